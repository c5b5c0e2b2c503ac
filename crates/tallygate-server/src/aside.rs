//! Work that takes its time, done where it delays nobody who is being served.

use std::io;
use std::sync::LazyLock;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;

/// How many scenarios are worked out at a time.
pub(crate) const SCENARIOS_AT_A_TIME: usize = 2;
/// How many backtests are decided at a time.
pub(crate) const BACKTESTS_AT_A_TIME: usize = 2;
/// How many lists are written, and overrides changed, at a time: they are quick, but not as quick as a decision.
const LISTS_AT_A_TIME: usize = 1;

/// How far a thread steps back from where the process is: of a processor that one which serves would have to itself it
/// gets a tenth, not nothing.
#[cfg(target_os = "linux")]
const NICE: i32 = 10;

/// How long a thread waits for more to do. A new one begins with a credit of the system's, which delays others.
const KEPT: Duration = Duration::from_secs(3600);

/// Threads for nothing else: what has stepped back cannot come forward again.
static THREADS: LazyLock<io::Result<Runtime>> = LazyLock::new(|| {
    Builder::new_current_thread()
        .thread_name("tallygate-aside")
        .max_blocking_threads(SCENARIOS_AT_A_TIME + BACKTESTS_AT_A_TIME + LISTS_AT_A_TIME)
        .thread_keep_alive(KEPT)
        .on_thread_start(step_back)
        .build()
});

/// Begins some work on a thread that the system runs where those that serve leave room, and waits for what comes of it.
/// Fails if there can be no such thread, or if the work panics.
pub(crate) fn aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = io::Result<T>> {
    let begun = match &*THREADS {
        Ok(threads) => Ok(threads.spawn_blocking(work)),
        Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
    };
    async move { begun?.await.map_err(io::Error::other) }
}

/// Does the same for work that goes through all policies, overrides or metrics. One is done after the other.
pub(crate) async fn aside_in_order<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    static PLACES: Semaphore = Semaphore::const_new(LISTS_AT_A_TIME);
    let place = PLACES.acquire().await.map_err(io::Error::other)?;
    aside(move || {
        let _held_until_done = place;
        work()
    })
    .await
}

/// Lets those that serve go first. Where the system knows only the priority of a whole process, things stay as they are.
fn step_back() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::nice(NICE) {
        tracing::warn!(%error, "what is done aside has the priority of those that serve");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn what_is_done_aside_lets_others_go_first() {
        let nice = || rustix::process::getpriority_process(None).expect("it has one");
        let here = nice();
        assert_eq!(aside(nice).await.expect("it is done"), (here + NICE).min(19));
        assert_eq!(nice(), here, "only that thread steps back");
    }

    #[tokio::test]
    async fn work_that_panics_is_told_as_such() {
        let failed = aside(|| assert!(std::hint::black_box(false), "on purpose")).await;
        let error = failed.expect_err("it panicked").to_string();
        assert!(error.contains("on purpose"), "{error}");
        assert_eq!(aside(|| 1).await.expect("the next is done"), 1);
    }
}
