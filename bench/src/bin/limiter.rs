//! The limiter beside others: nanoseconds a decision, case by case, and bytes a key.
//!
//! Prints a table, then a line a comparison for machines: `ratio <case> <rival> <times slower>`.
//! With arguments, only the cases they name. `bench/README.md` has the method.

use std::hint::black_box;
use std::time::Instant;

use tallygate::{Clock as _, SystemClock};
use tallygate_bench::entrants::{asked, asked_in_batches, assert_kept, filled};
use tallygate_bench::keyed;
use tallygate_bench::resident::{FILL, bytes_per_key, fill};
use tallygate_bench::rivals::{
    Governor, GovernorTelling, Limiter, Quota, Tallygate, Telling, Throttlecrab, single,
};
use tallygate_bench::rounds::{Best, Entrant, contest, per_decision, rounds, timed};
use tallygate_bench::workload::{
    CHUNK, Limit, PLENTY, PLENTY_FOR_ONE, Random, TWO_A_DAY, Workload, name, names, quick, scaled,
};

/// Keys of the cases that are called `1m`.
const MILLION: usize = 1_000_000;

/// New keys of a flood, each round.
const FLOOD: usize = 200_000;

/// Keys whose memory is measured.
const RESIDENT: usize = 5_000_000;

/// What Tallygate's table for a million keys takes: buckets of 128 bytes with five slots, 60 % full.
const TABLE_BYTES: usize = MILLION * 100 / 60 / 5 * 128;

const RIVALS: [&str; 8] = [
    "tallygate",
    "governor",
    "governor-best",
    "quota",
    "throttlecrab",
    "ratelimit",
    "leaky-bucket",
    "limitador",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [FILL, "tallygate", keys] => println!("{}", fill::<Tallygate>(keys.parse()?)?),
        [FILL, "governor", keys] => println!("{}", fill::<Governor>(keys.parse()?)?),
        ref chosen => compare(|case| chosen.is_empty() || chosen.contains(&case))?,
    }
    Ok(())
}

type Case = (&'static str, fn() -> Vec<Best>);

fn compare(is_chosen: impl Fn(&str) -> bool) -> Result<(), Box<dyn std::error::Error>> {
    let cases: [Case; 14] = [
        ("single-t1", || alone(1)),
        ("single-t2", || alone(2)),
        ("hot-t1", || one_by_one(1, PLENTY_FOR_ONE, 1)),
        ("hot-t2", || one_by_one(1, PLENTY_FOR_ONE, 2)),
        ("keys-1k-t1", || one_by_one(1000, PLENTY, 1)),
        ("keys-1m-t1", || one_by_one(scaled(MILLION), PLENTY, 1)),
        ("keys-1m-t2", || one_by_one(scaled(MILLION), PLENTY, 2)),
        ("keys-1m-t1-batch32", || in_batches(scaled(MILLION))),
        ("denied-1m-t1", || one_by_one(scaled(MILLION), TWO_A_DAY, 1)),
        ("full-1m-t1", || telling(scaled(MILLION))),
        ("insert-t1", || inserting(scaled(MILLION))),
        ("flood-t1", || flooding(scaled(MILLION))),
        ("floor-rmw-1m", floor_of_memory),
        ("floor-clock", floor_of_clock),
    ];
    if quick() {
        println!("BENCH_QUICK: small and short, to show that it works; these are no figures.\n");
    }
    print!("{:<20}", "ns a decision");
    for rival in RIVALS {
        print!("{rival:>14}");
    }
    println!();
    let mut results = Vec::new();
    for (case, run) in cases.into_iter().filter(|(case, _)| is_chosen(case)) {
        let bests = run();
        row(case, &bests);
        results.push((case, bests));
    }
    println!();
    for (case, bests) in &results {
        ratios(case, bests);
    }
    if is_chosen("bytes-per-key") {
        for name in ["tallygate", "governor"] {
            println!("bytes-per-key {name} {}", bytes_per_key(name, scaled(RESIDENT))?);
        }
    }
    Ok(())
}

fn row(case: &str, bests: &[Best]) {
    print!("{case:<20}");
    for rival in RIVALS {
        match bests.iter().find(|best| best.name == rival) {
            Some(best) => print!("{:>14.1}", best.ns),
            None => print!("{:>14}", "-"),
        }
    }
    println!();
}

fn ratios(case: &str, bests: &[Best]) {
    let Some((ours, others)) = bests.split_first() else { return };
    for other in others {
        println!("ratio {case} {} {:.2}", other.name, other.ns / ours.ns);
    }
}

/// Limiters of one client without a name.
fn alone(threads: usize) -> Vec<Best> {
    let workload = Workload::of(1);
    contest(vec![
        asked::<single::Tallygate>(&workload, PLENTY_FOR_ONE, threads),
        asked::<single::Governor>(&workload, PLENTY_FOR_ONE, threads),
        asked::<single::Ratelimit>(&workload, PLENTY_FOR_ONE, threads),
        asked::<single::LeakyBucket>(&workload, PLENTY_FOR_ONE, threads),
    ])
}

/// Keys that are all known, asked at random, one by one.
fn one_by_one(keys: usize, limit: Limit, threads: usize) -> Vec<Best> {
    let workload = Workload::of(keys);
    contest(match threads {
        1 => keyed!(GovernorLocked, asked(&workload, limit, 1)),
        _ => keyed!(GovernorSharded, asked(&workload, limit, threads)),
    })
}

/// The same, in batches where there are any.
fn in_batches(keys: usize) -> Vec<Best> {
    let workload = Workload::of(keys);
    contest(keyed!(asked_in_batches(&workload, PLENTY)))
}

/// Those that say more than yes or no.
fn telling(keys: usize) -> Vec<Best> {
    let workload = Workload::of(keys);
    contest(vec![
        asked_in_full::<Tallygate>(&workload),
        asked_in_full::<GovernorTelling>(&workload),
        asked_in_full::<Quota>(&workload),
        asked_in_full::<Throttlecrab>(&workload),
    ])
}

fn asked_in_full<L: Telling>(workload: &Workload) -> Entrant<'_> {
    let limiter = L::new(PLENTY, workload.clients);
    for key in (0..workload.clients).map(name) {
        let remaining = limiter.remaining(&key).expect("a new key is admitted");
        assert_eq!(remaining, u64::from(PLENTY.burst) - 1, "{} counts wrongly", L::NAME);
    }
    let ask = move |turn| {
        let admitted = workload.chunk(turn).filter_map(|key| limiter.remaining(key)).count();
        assert_eq!(admitted, CHUNK, "{} refused", L::NAME);
        CHUNK
    };
    Entrant { name: L::NAME, turn: Box::new(move || timed(&ask)) }
}

/// From nothing to a limiter that knows every key.
fn inserting(keys: usize) -> Vec<Best> {
    let keys = names(0..keys);
    contest(keyed!(inserted(&keys)))
}

fn inserted<L: Limiter>(keys: &[String]) -> Entrant<'_> {
    let turn = move || {
        let start = Instant::now();
        let limiter = L::new(PLENTY, keys.len());
        let admitted = keys.iter().filter(|key| limiter.allows(key)).count();
        let time = start.elapsed();
        assert_eq!(admitted, keys.len(), "{} refused a new key", L::NAME);
        assert_kept(&limiter, keys.len());
        per_decision(time, keys.len())
    };
    Entrant { name: L::NAME, turn: Box::new(turn) }
}

/// New keys, on top of as many as the limiter was made for. One with a bound must make room.
fn flooding(keys: usize) -> Vec<Best> {
    let flood = scaled(FLOOD);
    let floods: Vec<Vec<String>> = (0..rounds())
        .map(|round| keys + round * flood)
        .map(|first| names(first..first + flood))
        .collect();
    contest(keyed!(flooded(keys, &floods)))
}

fn flooded<L: Limiter>(known: usize, floods: &[Vec<String>]) -> Entrant<'_> {
    let limiter = filled::<L>(known, PLENTY);
    let mut expected = known;
    let mut floods = floods.iter();
    let turn = move || {
        let flood = floods.next().expect("a flood for every round");
        let start = Instant::now();
        let admitted = flood.iter().filter(|key| limiter.allows(key)).count();
        let time = start.elapsed();
        assert_eq!(admitted, flood.len(), "{} refused a new key", L::NAME);
        expected += if L::BOUNDED { 0 } else { flood.len() };
        assert_kept(&limiter, expected);
        per_decision(time, flood.len())
    };
    Entrant { name: L::NAME, turn: Box::new(turn) }
}

/// What no limiter with such a table can beat without batches: to change a bucket of it at random.
fn floor_of_memory() -> Vec<Best> {
    let mut table = memmap2::MmapMut::map_anon(TABLE_BYTES).expect("memory");
    #[cfg(target_os = "linux")]
    table.advise(memmap2::Advice::HugePage).expect("large pages");
    let buckets = table.as_chunks_mut::<128>().0;
    let span = u32::try_from(buckets.len()).expect("few buckets");
    let mut random = Random::new();
    let turn = move || {
        timed(|_| {
            for _ in 0..CHUNK {
                let bucket = &mut buckets[random.below(span) as usize];
                bucket[0] = bucket[0].wrapping_add(1);
                bucket[127] = bucket[127].wrapping_add(1);
            }
            CHUNK
        })
    };
    contest(vec![Entrant { name: "tallygate", turn: Box::new(turn) }])
}

/// What no limiter with such a clock can beat: to read it.
fn floor_of_clock() -> Vec<Best> {
    let clock = SystemClock::new();
    let turn = move || {
        timed(|_| {
            for _ in 0..CHUNK {
                black_box(clock.now());
            }
            CHUNK
        })
    };
    contest(vec![Entrant { name: "tallygate", turn: Box::new(turn) }])
}
