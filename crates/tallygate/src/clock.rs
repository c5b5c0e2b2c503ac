//! Clocks: the time in nanoseconds since the Unix epoch, which never goes back.
//!
//! Limits need a clock that only goes forward, and windows that are aligned to minutes and hours need the wall clock.
//! [`SystemClock`] is monotonic and anchored to the wall clock. If the wall clock is ahead (for example after the machine
//! was suspended), it follows at once. If the wall clock is behind by at most a second, it stops until the wall
//! clock has caught up. If the wall clock was set back by more, it ignores that.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::timer::Sleep;
use crate::{Tick, Ticks};

/// A clock. Within one thread its time never goes back, unless the clock reports a set-back.
pub trait Clock {
    /// Returns the time: nanoseconds since the Unix epoch, or the ticks of a [`ManualClock`].
    fn now(&self) -> Tick;

    /// Returns how often this clock has been set back. By default a clock is never set back.
    ///
    /// A store does not infer a set-back from an early time, because the caller may only be late. It reads this count
    /// first and [`now`](Self::now) after it. So a clock that is set back must change its time first and raise the count
    /// after it. The store then moves older states back, and keeps what was used.
    #[inline]
    fn set_backs(&self) -> u32 {
        0
    }
}

impl<C: Clock + ?Sized> Clock for &C {
    fn now(&self) -> Tick {
        (**self).now()
    }

    fn set_backs(&self) -> u32 {
        (**self).set_backs()
    }
}

impl<C: Clock + ?Sized> Clock for std::sync::Arc<C> {
    fn now(&self) -> Tick {
        (**self).now()
    }

    fn set_backs(&self) -> u32 {
        (**self).set_backs()
    }
}

/// A clock that can wake futures at a time.
pub trait Alarm: Clock {
    /// A future that is ready when the alarm rings.
    type Ring<'a>: Future<Output = ()> + Send
    where
        Self: 'a;

    /// Returns a future that is ready at a time or soon after; at once if the time has passed.
    fn ring_at(&self, when: Tick) -> Self::Ring<'_>;
}

impl<C: Alarm + ?Sized> Alarm for &C {
    type Ring<'a>
        = C::Ring<'a>
    where
        Self: 'a;

    fn ring_at(&self, when: Tick) -> C::Ring<'_> {
        (**self).ring_at(when)
    }
}

impl<C: Alarm + ?Sized> Alarm for std::sync::Arc<C> {
    type Ring<'a>
        = C::Ring<'a>
    where
        Self: 'a;

    fn ring_at(&self, when: Tick) -> C::Ring<'_> {
        (**self).ring_at(when)
    }
}

/// The system's monotonic clock, anchored to the wall clock.
///
/// It reads the processor's time-stamp counter if the kernel itself uses it, and calls the kernel otherwise.
///
/// ```
/// use tallygate::clock::{Clock, SystemClock};
///
/// let clock = SystemClock::new();
/// let before = clock.now();
/// assert!(clock.now() >= before);
/// ```
pub struct SystemClock(Anchored<Monotonic>);

/// A coarse clock: a reading takes a few nanoseconds and is as precise as the kernel's tick (1 to 10 ms).
///
/// Requests within one tick count as simultaneous. On systems without such a clock it equals [`SystemClock`].
pub struct CoarseClock(Anchored<Coarse>);

/// A clock that the program sets: for tests, and for programs with their own time.
///
/// ```
/// use tallygate::clock::{Clock, ManualClock};
/// use tallygate::{Tick, Ticks};
///
/// let clock = ManualClock::new(Tick(0));
/// clock.advance(Ticks(5));
/// assert_eq!(clock.now(), Tick(5));
/// clock.set(Tick(3)); // it may be set back, and reports that it was
/// assert_eq!((clock.now(), clock.set_backs()), (Tick(3), 1));
/// ```
#[derive(Debug, Default)]
pub struct ManualClock {
    now: AtomicI64,
    /// How often the time was set back. Raised after the time has changed.
    set_backs: AtomicU32,
    /// The futures that wait, by time.
    rings: Mutex<BTreeMap<(Tick, u64), Waker>>,
    next_ring: AtomicU64,
}

impl SystemClock {
    /// Creates the clock and anchors it to the wall clock.
    #[must_use]
    pub fn new() -> Self {
        Self(Anchored::new(Monotonic::new(), wall))
    }
}

impl CoarseClock {
    /// Creates the clock and anchors it to the wall clock.
    #[must_use]
    pub fn new() -> Self {
        Self(Anchored::new(Coarse::new(), wall))
    }
}

impl ManualClock {
    /// Creates a clock that shows a given time.
    #[must_use]
    pub const fn new(now: Tick) -> Self {
        Self {
            now: AtomicI64::new(now.0),
            set_backs: AtomicU32::new(0),
            rings: Mutex::new(BTreeMap::new()),
            next_ring: AtomicU64::new(0),
        }
    }

    /// Moves the clock forward by a duration, and wakes the futures whose time has come.
    pub fn advance(&self, by: impl Into<Ticks>) {
        let by = by.into();
        let later = |now: i64| Some(now.saturating_add_unsigned(by.0));
        // The closure always returns a time, so the update happens.
        let _ = self.now.fetch_update(Ordering::AcqRel, Ordering::Acquire, later);
        self.ring();
    }

    /// Sets the clock to a time, forward or back.
    ///
    /// Forward, it wakes the futures whose time has come. Back, it counts a [set-back](Clock::set_backs) and wakes all
    /// futures, so that they compute their time again.
    pub fn set(&self, now: Tick) {
        let before = self.now.swap(now.0, Ordering::AcqRel);
        if now.0 < before {
            self.set_backs.fetch_add(1, Ordering::Release);
            let all = std::mem::take(&mut *self.rings());
            all.into_values().for_each(Waker::wake);
        } else {
            self.ring();
        }
    }

    /// Returns the earliest time that a future waits for.
    #[must_use]
    pub fn next_ring(&self) -> Option<Tick> {
        self.rings().keys().next().map(|(when, _)| *when)
    }

    fn rings(&self) -> MutexGuard<'_, BTreeMap<(Tick, u64), Waker>> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        let now = self.now();
        let mut rings = self.rings();
        let later = rings.split_off(&(Tick(now.0.saturating_add(1)), 0));
        let due = std::mem::replace(&mut *rings, later);
        drop(rings);
        due.into_values().for_each(Waker::wake);
    }
}

/// The alarm of a [`ManualClock`].
#[derive(Debug)]
pub struct ManualRing<'a> {
    clock: &'a ManualClock,
    when: Tick,
    number: u64,
}

impl Future for ManualRing<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        // With the lock held, the clock cannot pass the time between the comparison and the insertion.
        let mut rings = self.clock.rings();
        if self.clock.now() >= self.when {
            return Poll::Ready(());
        }
        rings.insert((self.when, self.number), context.waker().clone());
        Poll::Pending
    }
}

impl Drop for ManualRing<'_> {
    fn drop(&mut self) {
        self.clock.rings().remove(&(self.when, self.number));
    }
}

impl Alarm for ManualClock {
    type Ring<'a> = ManualRing<'a>;

    fn ring_at(&self, when: Tick) -> ManualRing<'_> {
        let number = self.next_ring.fetch_add(1, Ordering::Relaxed);
        ManualRing { clock: self, when, number }
    }
}

/// The alarm of the system's clocks. One timer thread per process wakes all futures, so any executor works.
#[derive(Debug)]
pub struct SystemRing(Sleep);

impl SystemRing {
    fn after(wait: Ticks) -> Self {
        Self(Sleep::new(wait.as_duration()))
    }
}

impl Future for SystemRing {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.0).poll(context)
    }
}

impl Alarm for SystemClock {
    type Ring<'a> = SystemRing;

    fn ring_at(&self, when: Tick) -> SystemRing {
        SystemRing::after(when.since(self.now()))
    }
}

impl Alarm for CoarseClock {
    type Ring<'a> = SystemRing;

    /// Waits at least until this clock can have changed.
    fn ring_at(&self, when: Tick) -> SystemRing {
        const TICK: Ticks = Ticks(1_000_000);
        SystemRing::after(when.since(self.now()).max(TICK))
    }
}

impl Clock for SystemClock {
    #[inline]
    fn now(&self) -> Tick {
        self.0.now()
    }
}

impl Clock for CoarseClock {
    #[inline]
    fn now(&self) -> Tick {
        self.0.now()
    }
}

impl Clock for ManualClock {
    #[inline]
    fn now(&self) -> Tick {
        Tick(self.now.load(Ordering::Acquire))
    }

    #[inline]
    fn set_backs(&self) -> u32 {
        self.set_backs.load(Ordering::Acquire)
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Default for CoarseClock {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for SystemClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SystemClock").field(&self.now()).finish()
    }
}

impl fmt::Debug for CoarseClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CoarseClock").field(&self.now()).finish()
    }
}

/// The time between two readings of the wall clock, in nanoseconds of the monotonic source.
const CHECK_EVERY_NS: u64 = 1_000_000_000;

/// How far the clock may be ahead of the wall clock and still wait for it.
const MAX_WAIT_NS: i64 = 1_000_000_000;

/// A monotonic source of nanoseconds.
trait Source {
    fn nanoseconds(&self) -> u64;
}

/// A monotonic source with an offset to the wall clock.
struct Anchored<S> {
    source: S,
    wall: fn() -> i64,
    /// The wall clock minus the source.
    offset: AtomicI64,
    /// The earliest time that the clock returns, so that it does not go back when the offset is lowered.
    floor: AtomicI64,
    /// The reading of the source at which the wall clock is read next.
    next_check: AtomicU64,
}

impl<S: Source> Anchored<S> {
    fn new(source: S, wall: fn() -> i64) -> Self {
        let reading = source.nanoseconds();
        Self {
            offset: AtomicI64::new(wall().wrapping_sub_unsigned(reading)),
            floor: AtomicI64::new(i64::MIN),
            next_check: AtomicU64::new(reading + CHECK_EVERY_NS),
            wall,
            source,
        }
    }

    #[inline]
    fn now(&self) -> Tick {
        let reading = self.source.nanoseconds();
        if reading >= self.next_check.load(Ordering::Relaxed) {
            self.check(reading);
        }
        // A thread that reads a lowered offset also reads the floor that was stored before it.
        let time = self.offset.load(Ordering::Acquire).wrapping_add_unsigned(reading);
        Tick(time.max(self.floor.load(Ordering::Acquire)))
    }

    /// Reads the wall clock and moves toward it.
    #[cold]
    fn check(&self, reading: u64) {
        let due = self.next_check.load(Ordering::Relaxed);
        let next = reading + CHECK_EVERY_NS;
        // Only one thread reads the wall clock.
        if self.next_check.compare_exchange(due, next, Ordering::AcqRel, Ordering::Relaxed).is_err()
        {
            return;
        }
        let offset = self.offset.load(Ordering::Acquire);
        let here = offset.wrapping_add_unsigned(reading);
        let ahead = here.saturating_sub((self.wall)());
        if ahead <= MAX_WAIT_NS {
            self.floor.fetch_max(here, Ordering::AcqRel);
            self.offset.store(offset.saturating_sub(ahead), Ordering::Release);
        }
    }
}

/// Returns the wall clock in nanoseconds since the Unix epoch.
fn wall() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// The time-stamp counter if the kernel trusts it, otherwise the kernel's monotonic clock.
enum Monotonic {
    Counter { clock: quanta::Clock, start: u64 },
    Kernel(Instant),
}

impl Monotonic {
    fn new() -> Self {
        if kernel_trusts_counter() {
            let clock = quanta::Clock::new();
            let start = clock.raw();
            Self::Counter { clock, start }
        } else {
            Self::Kernel(Instant::now())
        }
    }
}

impl Source for Monotonic {
    #[inline]
    fn nanoseconds(&self) -> u64 {
        match self {
            Self::Counter { clock, start } => clock.delta_as_nanos(*start, clock.raw()),
            // Five hundred years are enough.
            Self::Kernel(start) => u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

#[cfg(target_os = "linux")]
fn kernel_trusts_counter() -> bool {
    let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    std::fs::read_to_string(path).is_ok_and(|source| source.trim() == "tsc")
}

#[cfg(not(target_os = "linux"))]
fn kernel_trusts_counter() -> bool {
    false
}

#[cfg(target_os = "linux")]
struct Coarse;

#[cfg(target_os = "linux")]
impl Coarse {
    const fn new() -> Self {
        Self
    }
}

#[cfg(target_os = "linux")]
impl Source for Coarse {
    #[inline]
    fn nanoseconds(&self) -> u64 {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        seconds.wrapping_mul(1_000_000_000).wrapping_add(u64::try_from(time.tv_nsec).unwrap_or(0))
    }
}

#[cfg(not(target_os = "linux"))]
type Coarse = Monotonic;

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        static WALL: std::cell::Cell<i64> = const { std::cell::Cell::new(0) };
    }

    struct ManualSource(std::cell::Cell<u64>);

    impl Source for ManualSource {
        fn nanoseconds(&self) -> u64 {
            self.0.get()
        }
    }

    /// Returns a clock with a manual source and a manual wall clock, both in seconds.
    fn at(source: u64, wall: i64) -> Anchored<ManualSource> {
        WALL.set(wall * 1_000_000_000);
        Anchored::new(ManualSource(std::cell::Cell::new(source * 1_000_000_000)), || WALL.get())
    }

    fn read(clock: &Anchored<ManualSource>, source_ms: u64, wall_ms: i64) -> i64 {
        clock.source.0.set(source_ms * 1_000_000);
        WALL.set(wall_ms * 1_000_000);
        clock.now().0 / 1_000_000
    }

    #[test]
    fn the_clock_starts_at_the_wall_clock_and_continues_with_its_source() {
        let clock = at(5, 1_000);
        assert_eq!(read(&clock, 5_000, 0), 1_000_000);
        assert_eq!(read(&clock, 5_700, 0), 1_000_700);
    }

    /// After a suspend the wall is ahead: it is followed at once.
    ///
    /// Fault B3.
    #[test]
    fn the_clock_follows_the_wall_clock_forward() {
        let clock = at(0, 1_000);
        assert_eq!(read(&clock, 1_500, 4_600_000), 4_600_000);
        assert_eq!(read(&clock, 1_600, 0), 4_600_100);
    }

    /// A source that runs a little fast waits for the wall, and never goes back.
    #[test]
    fn the_clock_stands_still_until_the_wall_clock_has_caught_up() {
        let clock = at(0, 1_000);
        assert_eq!(read(&clock, 2_000, 1_001_900), 1_002_000);
        assert_eq!(read(&clock, 2_050, 0), 1_002_000);
        assert_eq!(read(&clock, 2_150, 0), 1_002_050);
    }

    /// A wall clock that was set back is not followed, so no client is locked out.
    ///
    /// Fault B1.
    #[test]
    fn the_clock_ignores_a_wall_clock_that_was_set_back() {
        let clock = at(0, 10_000);
        assert_eq!(read(&clock, 2_000, 6_400_000), 10_002_000);
        assert_eq!(read(&clock, 4_000, 6_402_000), 10_004_000);
    }

    #[test]
    fn real_clocks_agree_with_the_wall_and_never_go_back() {
        let (system, coarse) = (SystemClock::new(), CoarseClock::new());
        let clocks: [&dyn Clock; 2] = [&system, &coarse];
        for clock in clocks {
            let mut last = clock.now();
            assert!(last.0.abs_diff(wall()) < 1_000_000_000);
            for _ in 0..100_000 {
                let now = clock.now();
                assert!(now >= last);
                last = now;
            }
        }
    }
}
