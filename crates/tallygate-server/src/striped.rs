//! Values with one copy per thread, which are combined when they are read.
//!
//! A counter that all worker threads write moves its cache line from core to core with every decision. Here, each
//! thread writes its own copy, and a reader adds the copies up. With more threads than copies, threads share a copy, so
//! the copies must still be safe to write from several threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

/// One copy of a value per thread.
pub(crate) struct Striped<T> {
    copies: Box<[OwnLines<T>]>,
}

/// A value that shares no cache line with another. Processors load lines in pairs.
#[derive(Default)]
#[repr(align(128))]
struct OwnLines<T>(T);

/// The number of copies: twice the number of worker threads, so that threads of other work rarely share a copy with a
/// worker.
static COPIES: LazyLock<usize> =
    LazyLock::new(|| 2 * std::thread::available_parallelism().map_or(1, usize::from));

impl<T> Striped<T> {
    /// Returns the copy of the current thread.
    pub(crate) fn local(&self) -> &T {
        &self.copies[thread_number() % self.copies.len()].0
    }

    /// Returns all copies.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.copies.iter().map(|OwnLines(copy)| copy)
    }
}

impl<T: Default> Default for Striped<T> {
    fn default() -> Self {
        Self { copies: (0..*COPIES).map(|_| OwnLines::default()).collect() }
    }
}

/// A set of counters. Adding to one writes no memory that another thread writes.
pub(crate) struct Counters<const N: usize>(Striped<CounterCopy<N>>);

struct CounterCopy<const N: usize>([AtomicU64; N]);

impl<const N: usize> Default for CounterCopy<N> {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; N])
    }
}

impl<const N: usize> Default for Counters<N> {
    fn default() -> Self {
        Self(Striped::default())
    }
}

impl<const N: usize> Counters<N> {
    pub(crate) fn add(&self, index: usize, amount: u64) {
        self.0.local().0[index].fetch_add(amount, Ordering::Relaxed);
    }

    /// Returns the sums over all threads.
    pub(crate) fn sums(&self) -> [u64; N] {
        let mut sums = [0_u64; N];
        for CounterCopy(copy) in self.0.iter() {
            for (sum, count) in sums.iter_mut().zip(copy) {
                *sum = sum.wrapping_add(count.load(Ordering::Relaxed));
            }
        }
        sums
    }
}

/// Returns a small number that no other running thread has.
fn thread_number() -> usize {
    thread_local! {
        static NUMBER: ThreadNumber = ThreadNumber::take();
    }
    // While a thread ends, its number may be gone already. Sharing a copy does no harm.
    NUMBER.try_with(|number| number.0).unwrap_or(0)
}

/// The number of a thread. It is used again when the thread has ended.
struct ThreadNumber(usize);

struct Numbers {
    free: Vec<usize>,
    next: usize,
}

static NUMBERS: Mutex<Numbers> = Mutex::new(Numbers { free: Vec::new(), next: 0 });

impl ThreadNumber {
    fn take() -> Self {
        let mut numbers = NUMBERS.lock().unwrap_or_else(PoisonError::into_inner);
        Self(numbers.free.pop().unwrap_or_else(|| {
            numbers.next += 1;
            numbers.next - 1
        }))
    }
}

impl Drop for ThreadNumber {
    fn drop(&mut self) {
        NUMBERS.lock().unwrap_or_else(PoisonError::into_inner).free.push(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_covers_all_threads() {
        let counters = Counters::<3>::default();
        // A thread that has ended leaves its copy to the next one, so all of them start together.
        let start = std::sync::Barrier::new(3 * *COPIES);
        std::thread::scope(|scope| {
            for _ in 0..3 * *COPIES {
                scope.spawn(|| {
                    start.wait();
                    for _ in 0..1000 {
                        counters.add(1, 2);
                    }
                    counters.add(2, 1);
                });
            }
        });
        let threads = 3 * *COPIES as u64;
        assert_eq!(counters.sums(), [0, 2000 * threads, threads]);
    }

    #[test]
    fn two_threads_write_different_cache_lines() {
        let counters = Counters::<16>::default();
        let address = || std::ptr::from_ref(counters.0.local()).addr();
        let here = address();
        let there = std::thread::scope(|scope| scope.spawn(address).join().unwrap());
        assert!(here.abs_diff(there) >= 128, "{here:x} {there:x}");
        assert_eq!(here % 128, 0);
        assert_eq!(size_of::<OwnLines<CounterCopy<16>>>(), 128);
    }

    #[test]
    fn a_thread_that_has_ended_leaves_its_number_to_another() {
        let number = || std::thread::spawn(thread_number).join().unwrap();
        let used: std::collections::HashSet<_> = (0..1000).map(|_| number()).collect();
        // Tests of other modules run in other threads of this process.
        assert!(used.len() < 500, "{}", used.len());
    }
}
