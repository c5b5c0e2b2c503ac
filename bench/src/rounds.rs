//! How time is taken: all entrants in turn, round after round, and the best of each.
//!
//! Whatever else the machine does hits all entrants alike, and the best round of each is the one it
//! disturbed least.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::workload::quick;

/// One who takes part in a case.
pub struct Entrant<'a> {
    pub name: &'static str,
    /// Takes a turn, and says how many nanoseconds a decision took.
    pub turn: Box<dyn FnMut() -> f64 + 'a>,
}

/// What an entrant's best turn took, in nanoseconds a decision.
#[derive(Clone, Copy, Debug)]
pub struct Best {
    pub name: &'static str,
    pub ns: f64,
}

pub fn rounds() -> usize {
    if quick() { 2 } else { 9 }
}

fn turn_time() -> Duration {
    Duration::from_millis(if quick() { 20 } else { 300 })
}

/// Lets all entrants take their turns.
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

/// Nanoseconds a decision, of a turn in which `decide` is called with 0, 1, 2… and says how many
/// decisions it made.
pub fn timed(mut decide: impl FnMut(usize) -> usize) -> f64 {
    let (time, decisions) = spend(&mut decide);
    per_decision(time, decisions)
}

/// The same by several threads at once: what one of them waits for a decision.
pub fn timed_by(threads: usize, decide: impl Fn(usize, usize) -> usize + Sync) -> f64 {
    let start = Barrier::new(threads);
    let spent: Vec<(Duration, usize)> = std::thread::scope(|scope| {
        let run = |thread| {
            let (start, decide) = (&start, &decide);
            move || {
                start.wait();
                spend(&mut |turn| decide(thread, turn))
            }
        };
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(run(thread))).collect();
        running.into_iter().map(|thread| thread.join().expect("a thread failed")).collect()
    });
    per_decision(spent.iter().map(|spent| spent.0).sum(), spent.iter().map(|spent| spent.1).sum())
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
