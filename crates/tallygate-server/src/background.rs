//! Long work on low-priority threads, so that it does not delay requests.

use std::io;
use std::sync::LazyLock;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;

/// How many simulations run at a time.
pub(crate) const SCENARIOS_AT_A_TIME: usize = 2;
/// How many backtests run at a time.
pub(crate) const BACKTESTS_AT_A_TIME: usize = 2;
/// How many lists are written, and overrides changed, at a time: these are quick, but slower than a decision.
const LISTS_AT_A_TIME: usize = 1;

/// The niceness of a background thread relative to the process: beside a busy request thread, it gets a tenth of a
/// processor.
#[cfg(target_os = "linux")]
const NICE: i32 = 10;

/// How long an idle thread is kept. The scheduler gives a new thread a credit at first, which would delay requests.
const KEPT: Duration = Duration::from_secs(3600);

/// Threads for background work only: a thread cannot raise its priority again.
static THREADS: LazyLock<io::Result<Runtime>> = LazyLock::new(|| {
    Builder::new_current_thread()
        .thread_name("tallygate-background")
        .max_blocking_threads(SCENARIOS_AT_A_TIME + BACKTESTS_AT_A_TIME + LISTS_AT_A_TIME)
        .thread_keep_alive(KEPT)
        .on_thread_start(lower_priority)
        .build()
});

/// Starts work on a low-priority thread and waits for its result. Fails if no thread can be started, or if the work
/// panics.
pub(crate) fn run_in_background<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = io::Result<T>> {
    let spawned = match &*THREADS {
        Ok(threads) => Ok(threads.spawn_blocking(work)),
        Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
    };
    async move { spawned?.await.map_err(io::Error::other) }
}

/// Does the same for work that goes through all policies, overrides or metrics, one task after the other.
pub(crate) async fn run_in_background_in_order<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    static PLACES: Semaphore = Semaphore::const_new(LISTS_AT_A_TIME);
    let place = PLACES.acquire().await.map_err(io::Error::other)?;
    run_in_background(move || {
        let _held_until_done = place;
        work()
    })
    .await
}

/// Lowers the priority of the current thread. Does nothing on systems that only have priorities of processes.
fn lower_priority() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::nice(NICE) {
        tracing::warn!(%error, "cannot lower the priority of a background thread; it competes with request threads");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn background_work_has_a_lower_priority() {
        let nice = || rustix::process::getpriority_process(None).expect("it has one");
        let here = nice();
        assert_eq!(run_in_background(nice).await.expect("it is done"), (here + NICE).min(19));
        assert_eq!(nice(), here, "only that thread steps back");
    }

    #[tokio::test]
    async fn background_work_that_panics_is_an_error() {
        let failed = run_in_background(|| assert!(std::hint::black_box(false), "on purpose")).await;
        let error = failed.expect_err("it panicked").to_string();
        assert!(error.contains("on purpose"), "{error}");
        assert_eq!(run_in_background(|| 1).await.expect("the next is done"), 1);
    }
}
