//! Counts of keys and of events, in stripes: threads that count at the same time write to different cache lines.
//!
//! The number of keys has an exact bound, and yet a new key writes to no memory that all threads share. Each stripe
//! reserves several places at once from the shared total and hands them out one by one. Only when no place is left in
//! the total does a thread take one from another stripe.

use super::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use super::{OwnLines, Tick};

/// The most places that a stripe reserves at once.
const BATCH: usize = 64;

/// How many consecutive buckets a stripe sweeps before it asks for the next ones.
const RUN: usize = 64;

/// From how many keys on a table has more than one stripe.
const STRIPED: usize = 1024;

pub(super) struct Counts {
    pub(super) max_keys: usize,
    /// The number of places that a stripe reserves at once.
    batch: usize,
    shared: OwnLines<Shared>,
    stripes: Box<[OwnLines<Stripe>]>,
}

/// The totals that all stripes take from.
#[derive(Default)]
struct Shared {
    /// The number of places that the stripes have reserved, with keys and still free. Every new key reads it.
    reserved: OwnLines<AtomicUsize>,
    /// The position from which the next run of buckets is swept.
    next_run: AtomicUsize,
    /// When the present pass of sweeping began.
    pass_began: AtomicI64,
}

#[derive(Default)]
pub(super) struct Stripe {
    /// The number of reserved places without a key. In a full table, every new key looks for one in all stripes. So it
    /// is on other lines than the counts, which the threads of the stripe write for every key that they evict.
    free: OwnLines<AtomicUsize>,
    /// The position that is swept next, unless it is the end of a run.
    next_swept: AtomicUsize,
    /// Counts the buckets in which a key to evict was searched for.
    pub(super) searched: AtomicUsize,
    pub(super) swept: AtomicU64,
    pub(super) evicted: AtomicU64,
    pub(super) rejected: AtomicU64,
    pub(super) debt_dropped: AtomicU64,
}

impl Counts {
    pub(super) fn new(max_keys: usize) -> Self {
        let max_keys = max_keys.max(1);
        let stripes = if max_keys < STRIPED { 1 } else { threads_at_once() };
        Self {
            max_keys,
            batch: (max_keys / (16 * stripes)).clamp(1, BATCH),
            shared: OwnLines::default(),
            stripes: (0..stripes).map(|_| OwnLines::default()).collect(),
        }
    }

    /// The stripe of the calling thread.
    #[inline]
    pub(super) fn own(&self) -> &Stripe {
        // The stripes. Their number is a power of two.
        &self.stripes[thread_number() & (self.stripes.len() - 1)].0
    }

    /// The sum of a count over all stripes.
    pub(super) fn sum(&self, count: impl Fn(&Stripe) -> &AtomicU64) -> u64 {
        self.stripes.iter().map(|stripe| count(&stripe.0).load(Ordering::Relaxed)).sum()
    }

    /// Returns the number of keys. It is exact while no other thread adds or drops keys.
    pub(super) fn keys(&self) -> usize {
        let free: usize =
            self.stripes.iter().map(|stripe| stripe.0.free.load(Ordering::Relaxed)).sum();
        self.reserved().saturating_sub(free)
    }

    /// Returns the number of reserved places: the number of keys, and at most one batch more per stripe. It reads one
    /// line, which is written once per batch.
    #[inline]
    pub(super) fn reserved(&self) -> usize {
        self.shared.0.reserved.load(Ordering::Relaxed)
    }

    /// Takes a place for one more key, if there is one.
    #[inline]
    pub(super) fn reserve(&self) -> bool {
        take_one(&self.own().free) || self.reserve_more()
    }

    #[cold]
    #[inline(never)]
    fn reserve_more(&self) -> bool {
        // Near the bound batches become small, so that few free places are in other stripes.
        let batch = |left: usize| self.batch.min(left / (2 * self.stripes.len())).max(1).min(left);
        let more = |reserved: usize| {
            let left = self.max_keys.saturating_sub(reserved);
            (left > 0).then(|| reserved + batch(left))
        };
        match self.shared.0.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(before) => {
                let others = batch(self.max_keys.saturating_sub(before)).saturating_sub(1);
                if others > 0 {
                    self.own().free.fetch_add(others, Ordering::Relaxed);
                }
                true
            }
            Err(_) => self.stripes.iter().any(|stripe| take_one(&stripe.0.free)),
        }
    }

    /// Returns the place of a key that is gone, or that was reserved and not used.
    pub(super) fn release(&self) {
        let free = &self.own().free;
        let now = free.fetch_add(1, Ordering::Relaxed) + 1;
        // A thread that only drops keys does not keep their places.
        if now >= 2 * self.batch
            && free
                .compare_exchange(now, now - self.batch, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        {
            self.shared.0.reserved.fetch_sub(self.batch, Ordering::Relaxed);
        }
    }

    /// Returns the bucket that a new key sweeps, and when the present pass over all buckets began.
    pub(super) fn next_to_sweep(&self, buckets: usize, now: Tick) -> (usize, Tick) {
        let (own, shared) = (self.own(), &self.shared.0);
        let mut position = own.next_swept.fetch_add(1, Ordering::Relaxed);
        if position % RUN == 0 {
            position = shared.next_run.fetch_add(RUN, Ordering::Relaxed);
            if position % buckets < RUN {
                shared.pass_began.store(now.0, Ordering::Relaxed);
            }
            own.next_swept.store(position + 1, Ordering::Relaxed);
        }
        (position % buckets, Tick(shared.pass_began.load(Ordering::Relaxed)))
    }
}

/// Lowers a count by 1, unless it is 0.
#[inline]
fn take_one(count: &AtomicUsize) -> bool {
    // It is usually 0 in other stripes, and then nothing is written.
    count.load(Ordering::Relaxed) > 0
        && count
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1))
            .is_ok()
}

/// Returns the number of the calling thread: threads that start one after the other have different stripes.
#[cfg(not(loom))]
#[inline]
fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}

#[cfg(loom)]
fn thread_number() -> usize {
    0
}

/// Returns how many threads can run at once, as a power of two: at most 16.
#[cfg(not(loom))]
fn threads_at_once() -> usize {
    static THREADS: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *THREADS.get_or_init(|| {
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        threads.next_power_of_two().min(16)
    })
}

#[cfg(loom)]
fn threads_at_once() -> usize {
    1
}

/// The fields that threads write, with their offsets and sizes.
#[cfg(all(test, not(loom)))]
pub(super) fn written() -> impl Iterator<Item = (&'static str, usize, usize)> {
    [("shared", std::mem::offset_of!(Counts, shared), size_of::<Shared>())].into_iter()
}

/// The distance of what every new key reads of all stripes, and of the totals, to what a thread writes for each key.
#[cfg(all(test, not(loom)))]
pub(super) const fn distances() -> [usize; 2] {
    use std::mem::offset_of;
    [
        offset_of!(Stripe, free).abs_diff(offset_of!(Stripe, evicted)),
        offset_of!(Shared, reserved).abs_diff(offset_of!(Shared, next_run)),
    ]
}

#[cfg(all(test, not(loom)))]
pub(super) const STRIPE_BYTES: usize = size_of::<OwnLines<Stripe>>();

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn counts(max_keys: usize, stripes: usize) -> Counts {
        Counts {
            batch: (max_keys / (16 * stripes)).clamp(1, BATCH),
            stripes: (0..stripes).map(|_| OwnLines::default()).collect(),
            ..Counts::new(max_keys)
        }
    }

    #[test]
    fn no_thread_gets_a_place_beyond_the_bound_and_no_place_is_lost() {
        for (max_keys, stripes) in [(1, 1), (7, 4), (1_000, 2), (20_000, 16), (30_011, 4)] {
            let counts = counts(max_keys, stripes);
            for _ in 0..3 {
                let taken: usize = std::thread::scope(|scope| {
                    let reserve = || (0..max_keys).filter(|_| counts.reserve()).count();
                    let threads: Vec<_> = (0..8).map(|_| scope.spawn(reserve)).collect();
                    threads.into_iter().map(|thread| thread.join().unwrap()).sum()
                });
                // A thread can miss a place that another thread is just reserving, but the last attempt finds it.
                let late = (0..).take_while(|_| counts.reserve()).count();
                assert_eq!((taken + late, counts.keys()), (max_keys, max_keys));
                std::thread::scope(|scope| {
                    for thread in 0..4 {
                        let counts = &counts;
                        scope.spawn(move || {
                            (thread..max_keys).step_by(4).for_each(|_| counts.release());
                        });
                    }
                });
                assert_eq!(counts.keys(), 0);
                assert!(
                    counts.reserved() <= 2 * counts.batch * stripes,
                    "places go back to the total"
                );
            }
        }
    }

    #[test]
    fn one_thread_sweeps_the_buckets_in_order() {
        let counts = counts(100_000, 4);
        for position in 0..1_000 {
            let (bucket, began) = counts.next_to_sweep(300, Tick(position));
            assert_eq!(i64::try_from(bucket), Ok(position % 300));
            let passes = [0, 320, 640, 960];
            let last = passes.into_iter().filter(|pass| *pass <= position).max();
            assert_eq!(Some(began.0), last, "at {position}");
        }
    }
}
