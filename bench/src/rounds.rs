//! Measures time: all limiters take turns for several rounds, and the best turn of each counts.
//!
//! Other load on the machine then affects all limiters equally, and the best turn is the least disturbed one.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::workload::quick;

/// A limiter that takes part in a case.
pub struct Entrant<'a> {
    pub name: &'static str,
    /// Takes a turn and returns the nanoseconds per decision.
    pub turn: Box<dyn FnMut() -> f64 + 'a>,
}

/// The best turn of an entrant, in nanoseconds per decision.
#[derive(Clone, Copy, Debug)]
pub struct Best {
    pub name: &'static str,
    pub ns: f64,
}

/// Returns the number of rounds: 9, or as many as `BENCH_ROUNDS` says.
pub fn rounds() -> usize {
    let chosen = std::env::var("BENCH_ROUNDS").ok().and_then(|rounds| rounds.parse().ok());
    chosen.unwrap_or(if quick() { 2 } else { 9 })
}

fn turn_time() -> Duration {
    Duration::from_millis(if quick() { 20 } else { 300 })
}

/// Runs all rounds and returns the best turn of each entrant.
pub fn contest(mut entrants: Vec<Entrant<'_>>) -> Vec<Best> {
    let mut bests: Vec<Best> =
        entrants.iter().map(|entrant| Best { name: entrant.name, ns: f64::INFINITY }).collect();
    for _ in 0..rounds() {
        for (entrant, best) in entrants.iter_mut().zip(&mut bests) {
            best.ns = best.ns.min((entrant.turn)());
        }
    }
    bests
}

/// Returns the nanoseconds per decision of a turn that calls `decide` with 0, 1, 2… `decide` returns the number of
/// decisions it made.
pub fn timed(mut decide: impl FnMut(usize) -> usize) -> f64 {
    let (time, decisions) = spend(&mut decide);
    per_decision(time, decisions)
}

/// Returns the nanoseconds per decision of one thread while several threads run the turn at once.
pub fn timed_by(threads: usize, decide: impl Fn(usize, usize) -> usize + Sync) -> f64 {
    let start = Barrier::new(threads);
    let spent: Vec<(Duration, usize)> = std::thread::scope(|scope| {
        let run = |thread| {
            let (start, decide) = (&start, &decide);
            move || {
                pin(thread);
                start.wait();
                spend(&mut |turn| decide(thread, turn))
            }
        };
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(run(thread))).collect();
        running.into_iter().map(|thread| thread.join().expect("the thread ends")).collect()
    });
    per_decision(spent.iter().map(|spent| spent.0).sum(), spent.iter().map(|spent| spent.1).sum())
}

/// Keeps the calling thread on one core: threads with other numbers are on other cores, while there are enough.
///
/// The scheduler may start two new threads on one core, and leave them there for a whole turn.
pub fn pin(thread: usize) {
    #[cfg(target_os = "linux")]
    {
        let allowed = rustix::thread::sched_getaffinity(None)
            .expect("the system lists the cores of this process");
        let cores: Vec<usize> =
            (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect();
        let mut own = rustix::thread::CpuSet::new();
        own.set(cores[thread % cores.len()]);
        rustix::thread::sched_setaffinity(None, &own).expect("a core can be chosen");
    }
    #[cfg(not(target_os = "linux"))]
    let _ = thread;
}

fn spend(decide: &mut impl FnMut(usize) -> usize) -> (Duration, usize) {
    let (limit, start) = (turn_time(), Instant::now());
    let mut decisions = 0;
    for turn in 0.. {
        decisions += decide(turn);
        if start.elapsed() >= limit {
            break;
        }
    }
    (start.elapsed(), decisions)
}

pub fn per_decision(time: Duration, decisions: usize) -> f64 {
    time.as_secs_f64() * 1e9 / decisions as f64
}
