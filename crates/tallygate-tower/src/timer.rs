//! Waiting without a runtime: by the alarm of a clock of the library.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tallygate::clock::{Alarm, SystemClock};
use tallygate::{Tick, Ticks};

/// A clock that wakes futures, of any type.
#[derive(Clone)]
pub(crate) struct Timer(Arc<dyn AnyAlarm>);

trait AnyAlarm: Send + Sync {
    fn now(&self) -> Tick;

    fn ring_at(&self, when: Tick) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;
}

impl<C: Alarm + Send + Sync> AnyAlarm for C {
    fn now(&self) -> Tick {
        tallygate::clock::Clock::now(self)
    }

    fn ring_at(&self, when: Tick) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(Alarm::ring_at(self, when))
    }
}

impl Timer {
    pub(crate) fn new(clock: impl Alarm + Send + Sync + 'static) -> Self {
        Self(Arc::new(clock))
    }

    pub(crate) fn now(&self) -> Tick {
        self.0.now()
    }

    /// Waits until a time.
    pub(crate) async fn sleep_until(&self, when: Tick) {
        // An alarm may ring early.
        while self.now() < when {
            self.0.ring_at(when).await;
        }
    }

    /// Returns the time after a duration, or the end of time.
    pub(crate) fn after(&self, wait: Duration) -> Tick {
        self.now().after(Ticks::from(wait)).unwrap_or(Tick(i64::MAX))
    }
}

impl Default for Timer {
    fn default() -> Self {
        static SYSTEM: LazyLock<Timer> = LazyLock::new(|| Timer::new(SystemClock::new()));
        SYSTEM.clone()
    }
}
