//! Measures how decisions scale with the number of threads, compared with governor and quota: millions of decisions per
//! second, all threads together.
//!
//! Prints a table and one line per comparison for scripts. The first two arguments are the paths of the plots of
//! Tallygate's speed: with known keys, and with Zipf's law and new keys. With more arguments, it runs only the named
//! cases and writes no plots, since they would lack the other cases. `bench/README.md` describes the method.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use tallygate_bench::entrants::assert_stored;
use tallygate_bench::plot::{Curve, Plot};
use tallygate_bench::rivals::{GovernorSharded, Limiter, Quota, Tallygate, TallygateTiered};
use tallygate_bench::rounds::{Entrant, contest, pin, timed_by};
use tallygate_bench::workload::{
    CHUNK, Limit, PLENTY, PLENTY_FOR_ONE, Random, TWO_PER_DAY, Workload, name, names, quick, scaled,
};

/// The numbers of threads, unless `BENCH_THREADS` has others.
const THREADS: [usize; 5] = [1, 2, 4, 8, 16];

const MILLION: usize = 1_000_000;

/// 1000 per second: a key that is checked a few times per second is fresh at every check.
const FRESH_AT_EVERY_CHECK: Limit = Limit { burst: 1000, one_per: Duration::from_millis(1) };

/// The new keys of one turn: enough for all threads, in a name space of their own per turn.
const NEW_PER_TURN: usize = 1 << 18;

type Case = (&'static str, &'static str, fn(usize) -> Vec<Entrant<'static>>);

/// How many of the cases are in the first plot. The others are in the second, because they are much slower.
const IN_FIRST_PLOT: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let paths = [arguments.next(), arguments.next()];
    let [Some(known), Some(new)] = paths else {
        return Err("expected the paths of two plots as the first arguments".into());
    };
    let chosen: Vec<String> = arguments.collect();
    let threads = match std::env::var("BENCH_THREADS") {
        Ok(numbers) => numbers.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>()?,
        Err(_) => THREADS.to_vec(),
    };
    let cases: [Case; 8] = [
        ("in-use", "#1f883d", |threads| rivals(threads, uniform(scaled(MILLION)), PLENTY)),
        ("becoming-fresh", "#0969da", |threads| {
            rivals(threads, uniform(scaled(MILLION)), FRESH_AT_EVERY_CHECK)
        }),
        ("hot-allowed", "#cf222e", |threads| rivals(threads, uniform(1), PLENTY_FOR_ONE)),
        ("hot-denied", "#8250df", |threads| rivals(threads, uniform(1), TWO_PER_DAY)),
        ("hot-denied-tiers", "#1b7c83", |threads| {
            let mut entrants = rivals(threads, uniform(1), TWO_PER_DAY);
            entrants[0] = checks::<TallygateTiered>(uniform(1), TWO_PER_DAY, threads);
            entrants
        }),
        ("zipf", "#9a6700", |threads| rivals(threads, zipf(scaled(MILLION)), PLENTY_FOR_ONE)),
        ("insert", "#57606a", |threads| new_keys(threads, 0)),
        ("eviction-flood", "#bf3989", |threads| new_keys(threads, scaled(MILLION))),
    ];
    if quick() {
        println!("BENCH_QUICK: a short run that only checks that the benchmark works.\n");
    }
    println!("millions of decisions per second, all threads together");
    print!("{:<18}{:<16}", "case", "limiter");
    threads.iter().for_each(|threads| print!("{threads:>8}"));
    println!();
    let mut curves = Vec::new();
    for (case, color, entrants) in cases {
        if !chosen.is_empty() && !chosen.iter().any(|chosen| chosen == case) {
            continue;
        }
        let results: Vec<_> =
            threads.iter().map(|threads| (*threads, contest(entrants(*threads)))).collect();
        for entrant in 0..results[0].1.len() {
            print!("{case:<18}{:<16}", results[0].1[entrant].name);
            for (threads, bests) in &results {
                print!("{:>8.1}", millions(*threads, bests[entrant].ns));
            }
            println!();
        }
        let speed = |index: usize| millions(results[index].0, results[index].1[0].ns);
        if results.len() > 1 {
            let (from, to) = (results[0].0, results[1].0);
            println!("speedup {case} from {from} to {to} threads {:.2}", speed(1) / speed(0));
        }
        for (threads, bests) in &results {
            for other in &bests[1..] {
                println!("ratio {case} {threads} {} {:.2}", other.name, other.ns / bests[0].ns);
            }
        }
        let points = (0..results.len()).map(|index| (results[index].0 as f64, speed(index)));
        curves.push(Curve { name: case, color, points: points.collect() });
    }
    if !chosen.is_empty() {
        return Ok(());
    }
    let of_new = curves.split_off(IN_FIRST_PLOT);
    for (path, curves) in [(known, curves), (new, of_new)] {
        let title = "Tallygate: millions of decisions per second, by number of threads";
        std::fs::write(path, Plot { title, x: "threads", curves }.svg())?;
    }
    Ok(())
}

/// Returns the speed of all threads together, by the time of one decision in one of them.
fn millions(threads: usize, ns: f64) -> f64 {
    threads as f64 * 1e3 / ns
}

fn uniform(clients: usize) -> &'static Workload {
    Box::leak(Box::new(Workload::of(clients)))
}

/// Requests whose keys are distributed by Zipf's law: the second most frequent key comes half as often as the first.
fn zipf(clients: usize) -> &'static Workload {
    let mut random = Random::new();
    let requests = (4 * clients).clamp(1 << 15, 1 << 22).next_multiple_of(CHUNK);
    let draw = |random: &mut Random| {
        // The sum of 1/k grows as the logarithm, so its inverse is exponential.
        let uniform = (random.next() >> 11) as f64 / (1_u64 << 53) as f64;
        let rank = (clients as f64).powf(uniform);
        (rank as usize - 1).min(clients - 1)
    };
    let keys = (0..requests).map(|_| name(draw(&mut random))).collect();
    let order = (0..).take(requests).collect();
    Box::leak(Box::new(Workload { clients, keys, order }))
}

fn rivals(threads: usize, workload: &'static Workload, limit: Limit) -> Vec<Entrant<'static>> {
    vec![
        checks::<Tallygate>(workload, limit, threads),
        checks::<GovernorSharded>(workload, limit, threads),
        checks::<Quota>(workload, limit, threads),
    ]
}

/// Checks known keys, from several threads at different positions of the order.
fn checks<L: Limiter>(
    workload: &'static Workload,
    limit: Limit,
    threads: usize,
) -> Entrant<'static> {
    let limiter = L::new(limit, workload.clients);
    for key in (0..workload.clients).map(name) {
        assert!(limiter.allows(&key), "{} denied a new key", L::NAME);
    }
    let is_denied = limit.burst == TWO_PER_DAY.burst;
    if is_denied {
        (0..workload.clients).map(name).for_each(|key| {
            limiter.allows(&key);
        });
    }
    let expected = if is_denied { 0 } else { CHUNK };
    let apart = workload.order.len() / CHUNK / threads;
    let turn = move || {
        timed_by(threads, |thread, turn| {
            let chunk = workload.chunk(thread * apart + turn);
            let allowed = chunk.filter(|key| limiter.allows(key)).count();
            assert_eq!(allowed, expected, "{} made a wrong decision", L::NAME);
            CHUNK
        })
    };
    Entrant { name: L::NAME, turn: Box::new(turn) }
}

fn new_keys(threads: usize, known: usize) -> Vec<Entrant<'static>> {
    vec![
        inserts::<Tallygate>(threads, known),
        inserts::<GovernorSharded>(threads, known),
        inserts::<Quota>(threads, known),
    ]
}

/// Checks keys that were never seen: in an empty limiter, or in one that is full already. A bounded limiter must evict then.
fn inserts<L: Limiter>(threads: usize, known: usize) -> Entrant<'static> {
    let each = scaled(NEW_PER_TURN) / threads;
    let mut next = 0;
    let mut filled = None;
    let turn = move || {
        // An empty limiter per turn, or the same full one for all turns.
        let limiter = filled.take().unwrap_or_else(|| {
            let limiter = L::new(PLENTY, known.max(each * threads));
            (0..known).map(name).for_each(|key| assert!(limiter.allows(&key)));
            limiter
        });
        let first = MILLION + next;
        next += each * threads;
        let ready = Barrier::new(threads);
        let spent = std::thread::scope(|scope| {
            let run = |thread: usize| {
                pin(thread);
                // Each thread makes its own keys: keys that another core has just written would be slow to read.
                let first = first + thread * each;
                let keys = names(first..first + each);
                ready.wait();
                let began = Instant::now();
                let allowed = keys.iter().filter(|key| limiter.allows(key)).count();
                let ended = Instant::now();
                // A new key that finds all places near its home in use by other threads is denied.
                assert!(allowed * 100 >= keys.len() * 99, "{} denied new keys", L::NAME);
                (began, ended)
            };
            let running: Vec<_> =
                (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
            let times = running.into_iter().map(|thread| thread.join().expect("the thread ends"));
            // From the first start to the last end: threads that take turns on a processor are not faster for it.
            let (began, ended): (Vec<_>, Vec<_>) = times.unzip();
            *ended.iter().max().expect("there is a thread") - *began.iter().min().expect("as above")
        });
        if known == 0 {
            assert_stored(&limiter, each * threads);
        } else {
            filled = Some(limiter);
        }
        spent.as_secs_f64() * 1e9 / each as f64
    };
    Entrant { name: L::NAME, turn: Box::new(turn) }
}
