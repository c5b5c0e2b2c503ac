//! Compares Tallygate with other limiters: nanoseconds per decision for several cases, and bytes per key.
//!
//! Prints a table, then one line per comparison for scripts: `ratio <case> <rival> <times slower>`. With arguments, it
//! runs only the named cases. `bench/README.md` describes the method.

use std::hint::black_box;
use std::time::Instant;

use tallygate::clock::{Clock as _, SystemClock};
use tallygate_bench::entrants::{assert_stored, checks, checks_in_batches, filled};
use tallygate_bench::keyed;
use tallygate_bench::resident::{FILL, bytes_per_key, fill};
use tallygate_bench::rivals::{
    DetailedLimiter, Governor, GovernorDetailed, GovernorLocked, Limiter, Quota, Tallygate,
    TallygateCoarse, Throttlecrab, single,
};
use tallygate_bench::rounds::{Best, Entrant, contest, per_decision, rounds, timed};
use tallygate_bench::workload::{
    CHUNK, Limit, PLENTY, PLENTY_FOR_ONE, Random, TWO_PER_DAY, Workload, name, names, quick, scaled,
};

/// The number of keys of the cases named `1m`.
const MILLION: usize = 1_000_000;

/// The number of new keys per round of a flood.
const FLOOD: usize = 200_000;

/// The number of keys whose memory is measured.
const RESIDENT: usize = 5_000_000;

/// The size of Tallygate's table for a million keys: buckets of 128 bytes with five slots, 60 % full.
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
    let cases: [Case; 15] = [
        ("single-t1", || alone(1)),
        ("single-t2", || alone(2)),
        ("hot-t1", || one_by_one(1, PLENTY_FOR_ONE, 1)),
        ("hot-t2", || one_by_one(1, PLENTY_FOR_ONE, 2)),
        ("keys-1k-t1", || one_by_one(1000, PLENTY, 1)),
        ("keys-1k-t1-coarse", || by_coarse_clock(1000)),
        ("keys-1m-t1", || one_by_one(scaled(MILLION), PLENTY, 1)),
        ("keys-1m-t2", || one_by_one(scaled(MILLION), PLENTY, 2)),
        ("keys-1m-t1-batch32", || in_batches(scaled(MILLION))),
        ("denied-1m-t1", || one_by_one(scaled(MILLION), TWO_PER_DAY, 1)),
        ("full-1m-t1", || detailed(scaled(MILLION))),
        ("insert-t1", || inserting(scaled(MILLION))),
        ("flood-t1", || flooding(scaled(MILLION))),
        ("floor-rmw-1m", floor_of_memory),
        ("floor-clock", floor_of_clock),
    ];
    if quick() {
        println!(
            "BENCH_QUICK: a short run that only checks that the benchmark works; do not use these figures.\n"
        );
    }
    print!("{:<20}", "ns per decision");
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

/// Limiters for a single client without a key.
fn alone(threads: usize) -> Vec<Best> {
    let workload = Workload::of(1);
    contest(vec![
        checks::<single::Tallygate>(&workload, PLENTY_FOR_ONE, threads),
        checks::<single::Governor>(&workload, PLENTY_FOR_ONE, threads),
        checks::<single::Ratelimit>(&workload, PLENTY_FOR_ONE, threads),
        checks::<single::LeakyBucket>(&workload, PLENTY_FOR_ONE, threads),
    ])
}

/// Known keys, checked one by one in random order.
fn one_by_one(keys: usize, limit: Limit, threads: usize) -> Vec<Best> {
    let workload = Workload::of(keys);
    contest(match threads {
        1 => keyed!(GovernorLocked, checks(&workload, limit, 1)),
        _ => keyed!(GovernorSharded, checks(&workload, limit, threads)),
    })
}

/// Known keys, checked one by one by Tallygate with a coarse clock, and by the others with their exact ones.
fn by_coarse_clock(keys: usize) -> Vec<Best> {
    let workload = Workload::of(keys);
    contest(vec![
        checks::<TallygateCoarse>(&workload, PLENTY, 1),
        checks::<Governor>(&workload, PLENTY, 1),
        checks::<GovernorLocked>(&workload, PLENTY, 1),
        checks::<Quota>(&workload, PLENTY, 1),
    ])
}

/// Known keys, checked in batches if the limiter supports batches.
fn in_batches(keys: usize) -> Vec<Best> {
    let workload = Workload::of(keys);
    contest(keyed!(checks_in_batches(&workload, PLENTY)))
}

/// Limiters that return more than yes or no.
fn detailed(keys: usize) -> Vec<Best> {
    let workload = Workload::of(keys);
    contest(vec![
        detailed_checks::<Tallygate>(&workload),
        detailed_checks::<GovernorDetailed>(&workload),
        detailed_checks::<Quota>(&workload),
        detailed_checks::<Throttlecrab>(&workload),
    ])
}

fn detailed_checks<L: DetailedLimiter>(workload: &Workload) -> Entrant<'_> {
    let limiter = L::new(PLENTY, workload.clients);
    for key in (0..workload.clients).map(name) {
        let remaining = limiter.remaining(&key).expect("a new key is allowed");
        assert_eq!(
            remaining,
            u64::from(PLENTY.burst) - 1,
            "{} returns a wrong number of remaining units",
            L::NAME
        );
    }
    let ask = move |turn| {
        let allowed = workload.chunk(turn).filter_map(|key| limiter.remaining(key)).count();
        assert_eq!(allowed, CHUNK, "{} denied a request", L::NAME);
        CHUNK
    };
    Entrant { name: L::NAME, turn: Box::new(move || timed(&ask)) }
}

/// Inserts every key into an empty limiter.
fn inserting(keys: usize) -> Vec<Best> {
    let keys = names(0..keys);
    contest(keyed!(inserted(&keys)))
}

fn inserted<L: Limiter>(keys: &[String]) -> Entrant<'_> {
    let turn = move || {
        let start = Instant::now();
        let limiter = L::new(PLENTY, keys.len());
        let allowed = keys.iter().filter(|key| limiter.allows(key)).count();
        let time = start.elapsed();
        assert_eq!(allowed, keys.len(), "{} denied a new key", L::NAME);
        assert_stored(&limiter, keys.len());
        per_decision(time, keys.len())
    };
    Entrant { name: L::NAME, turn: Box::new(turn) }
}

/// Checks new keys in a limiter that is already full. A bounded limiter must evict keys.
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
        let flood = floods.next().expect("every round has a flood");
        let start = Instant::now();
        let allowed = flood.iter().filter(|key| limiter.allows(key)).count();
        let time = start.elapsed();
        assert_eq!(allowed, flood.len(), "{} denied a new key", L::NAME);
        expected += if L::BOUNDED { 0 } else { flood.len() };
        assert_stored(&limiter, expected);
        per_decision(time, flood.len())
    };
    Entrant { name: L::NAME, turn: Box::new(turn) }
}

/// Changes random buckets of a table of this size: a lower bound for limiters without batches.
fn floor_of_memory() -> Vec<Best> {
    let mut table = memmap2::MmapMut::map_anon(TABLE_BYTES).expect("the memory is mapped");
    #[cfg(target_os = "linux")]
    table.advise(memmap2::Advice::HugePage).expect("the system supports huge pages");
    let buckets = table.as_chunks_mut::<128>().0;
    let span = u32::try_from(buckets.len()).expect("the number of buckets fits 32 bits");
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

/// Reads the clock: a lower bound for limiters with this clock.
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
