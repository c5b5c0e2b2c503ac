//! Prepares a limiter for a comparison: inserts all keys, then checks them.
//!
//! The allowed requests are counted and compared with the expected number, because wrong decisions make a benchmark
//! worthless.

use crate::rivals::Limiter;
use crate::rounds::{Entrant, timed, timed_by};
use crate::workload::{CHUNK, Limit, TWO_PER_DAY, Workload, name};

/// The number of keys per batch.
const BATCH: usize = 32;

/// Checks known keys one by one, in random order.
pub fn checks<L: Limiter>(workload: &Workload, limit: Limit, threads: usize) -> Entrant<'_> {
    let limiter = filled::<L>(workload.clients, limit);
    let expected = if is_denied(limit) { 0 } else { CHUNK };
    // Threads start at different positions of the order.
    let apart = workload.order.len() / CHUNK / threads;
    let ask = move |thread: usize, turn: usize| {
        let chunk = workload.chunk(thread * apart + turn);
        let allowed = chunk.filter(|key| limiter.allows(key)).count();
        assert_eq!(allowed, expected, "{} made a wrong decision", L::NAME);
        CHUNK
    };
    let turn: Box<dyn FnMut() -> f64> = match threads {
        1 => Box::new(move || timed(|turn| ask(0, turn))),
        threads => Box::new(move || timed_by(threads, &ask)),
    };
    Entrant { name: L::NAME, turn }
}

/// Returns a limiter that knows all clients. If the limit is [`TWO_PER_DAY`], it denies every further request.
pub fn filled<L: Limiter>(clients: usize, limit: Limit) -> L {
    let limiter = L::new(limit, clients);
    for key in (0..clients).map(name) {
        assert!(limiter.allows(&key), "{} denied a new key", L::NAME);
        if is_denied(limit) {
            assert!(limiter.allows(&key), "{} denied the second request", L::NAME);
            assert!(!limiter.allows(&key), "{} allowed the third request", L::NAME);
        }
    }
    assert_stored(&limiter, clients);
    limiter
}

const fn is_denied(limit: Limit) -> bool {
    limit.burst == TWO_PER_DAY.burst
}

/// Checks that a limiter stores the expected number of keys, if it can report it.
pub fn assert_stored(limiter: &impl Limiter, keys: usize) {
    if let Some(stored) = limiter.stored_keys() {
        assert_eq!(stored, keys, "the limiter stores a wrong number of keys");
    }
}

/// Checks known keys in batches, if the limiter supports batches.
pub fn checks_in_batches<L: Limiter>(workload: &Workload, limit: Limit) -> Entrant<'_> {
    let limiter = filled::<L>(workload.clients, limit);
    let ask = move |turn| {
        let batches = workload.batches::<BATCH>(turn);
        let allowed: usize = batches.map(|batch| limiter.count_allowed(&batch)).sum();
        assert_eq!(allowed, CHUNK, "{} denied a request", L::NAME);
        CHUNK
    };
    Entrant { name: L::NAME, turn: Box::new(move || timed(&ask)) }
}
