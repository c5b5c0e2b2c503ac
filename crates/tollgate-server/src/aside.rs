//! Work that takes its time, done where it delays nobody who is being served.

use std::io;
use std::sync::LazyLock;
use std::time::Duration;

use thread_priority::ThreadPriority;
#[cfg(target_os = "linux")]
use thread_priority::unix::{
    NormalThreadSchedulePolicy, ThreadSchedulePolicy, set_thread_priority_and_policy,
    thread_native_id,
};
use tokio::runtime::{Builder, Runtime};

use crate::http::WORKED_ON_AT_A_TIME;

/// How long a thread waits for more to do. A new one begins with a credit of the system's, which delays others.
const KEPT: Duration = Duration::from_secs(3600);

/// Threads for nothing else: what has stepped back cannot come forward again.
static THREADS: LazyLock<io::Result<Runtime>> = LazyLock::new(|| {
    Builder::new_current_thread()
        .thread_name("tollgate-aside")
        .max_blocking_threads(WORKED_ON_AT_A_TIME)
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

/// Runs only while a processor has nothing else to do, as far as the system can be told so.
///
/// A low priority is not enough: the thread of a higher one that wakes up is not always let in before the next tick, and
/// ticks are milliseconds apart.
fn step_back() {
    #[cfg(target_os = "linux")]
    let stepped_back =
        set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, WHEN_IDLE);
    #[cfg(not(target_os = "linux"))]
    let stepped_back = thread_priority::set_current_thread_priority(ThreadPriority::Min);
    if let Err(error) = stepped_back {
        tracing::warn!(?error, "what is done aside has the priority of those that serve");
    }
}

#[cfg(target_os = "linux")]
const WHEN_IDLE: ThreadSchedulePolicy =
    ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn what_is_done_aside_lets_others_go_first() {
        use thread_priority::unix::thread_schedule_policy;

        assert_eq!(aside(thread_schedule_policy).await.expect("it is done"), Ok(WHEN_IDLE));
        let here = thread_schedule_policy().expect("it has one");
        assert_ne!(here, WHEN_IDLE, "only that thread steps back");
    }

    #[tokio::test]
    async fn work_that_panics_is_told_as_such() {
        let failed = aside(|| assert!(std::hint::black_box(false), "on purpose")).await;
        let error = failed.expect_err("it panicked").to_string();
        assert!(error.contains("on purpose"), "{error}");
        assert_eq!(aside(|| 1).await.expect("the next is done"), 1);
    }
}
