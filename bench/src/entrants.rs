//! How a limiter takes part in a contest: filled with all its keys, then asked.
//!
//! What it admits is counted and compared: a benchmark that decides wrongly measures nothing.

use crate::rivals::Limiter;
use crate::rounds::{Entrant, timed, timed_by};
use crate::workload::{CHUNK, Limit, TWO_A_DAY, Workload, name};

/// Keys of a batch.
const BATCH: usize = 32;

/// Asked at random for keys it knows, one by one.
pub fn asked<L: Limiter>(workload: &Workload, limit: Limit, threads: usize) -> Entrant<'_> {
    let limiter = filled::<L>(workload.clients, limit);
    let expected = if is_denied(limit) { 0 } else { CHUNK };
    // Threads start at different places of the order.
    let apart = workload.order.len() / CHUNK / threads;
    let ask = move |thread: usize, turn: usize| {
        let chunk = workload.chunk(thread * apart + turn);
        let admitted = chunk.filter(|key| limiter.allows(key)).count();
        assert_eq!(admitted, expected, "{} admitted wrongly", L::NAME);
        CHUNK
    };
    let turn: Box<dyn FnMut() -> f64> = match threads {
        1 => Box::new(move || timed(|turn| ask(0, turn))),
        threads => Box::new(move || timed_by(threads, &ask)),
    };
    Entrant { name: L::NAME, turn }
}

/// A limiter that knows so many clients, and refuses them all if their limit is to deny.
pub fn filled<L: Limiter>(clients: usize, limit: Limit) -> L {
    let limiter = L::new(limit, clients);
    for key in (0..clients).map(name) {
        assert!(limiter.allows(&key), "{} refused a new key", L::NAME);
        if is_denied(limit) {
            assert!(limiter.allows(&key), "{} refused the second request", L::NAME);
            assert!(!limiter.allows(&key), "{} admitted the third request", L::NAME);
        }
    }
    assert_kept(&limiter, clients);
    limiter
}

const fn is_denied(limit: Limit) -> bool {
    limit.burst == TWO_A_DAY.burst
}

/// Checks that a limiter keeps as many keys as it should, if it can say.
pub fn assert_kept(limiter: &impl Limiter, keys: usize) {
    if let Some(kept) = limiter.kept() {
        assert_eq!(kept, keys, "keys are missing, or too many");
    }
}

/// The same in batches, if it has any.
pub fn asked_in_batches<L: Limiter>(workload: &Workload, limit: Limit) -> Entrant<'_> {
    let limiter = filled::<L>(workload.clients, limit);
    let ask = move |turn| {
        let batches = workload.batches::<BATCH>(turn);
        let admitted: usize = batches.map(|batch| limiter.count_allowed(&batch)).sum();
        assert_eq!(admitted, CHUNK, "{} refused", L::NAME);
        CHUNK
    };
    Entrant { name: L::NAME, turn: Box::new(move || timed(&ask)) }
}
