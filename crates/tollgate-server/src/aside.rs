//! Work that takes its time, done where it delays nobody who is being served.

use std::io;

use tokio::sync::oneshot;

/// The lowest priority there is.
#[cfg(target_os = "linux")]
const LAST: i32 = 19;

/// Begins some work on a thread of its own, which the system runs where those that serve leave room, and waits for what
/// comes of it. Fails if there can be no such thread, or if the work panics.
///
/// The runtime's threads for blocking calls will not do: a priority that was lowered cannot be raised again.
pub(crate) fn aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = io::Result<T>> {
    let (tell, told) = oneshot::channel();
    let begun = std::thread::Builder::new().name("tollgate-aside".to_owned()).spawn(move || {
        step_back();
        // Nobody may be waiting any more.
        let _ = tell.send(work());
    });
    async move {
        begun?;
        told.await.map_err(|_| io::Error::other("the work ended without a result"))
    }
}

/// Lets all other threads go first. Where the system knows priorities of processes only, things stay as they are.
fn step_back() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::setpriority_process(None, LAST) {
        tracing::debug!(%error, "a thread that works aside has the priority of those that serve");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn what_is_done_aside_lets_others_go_first() {
        let priority = || rustix::process::getpriority_process(None).expect("it has one");
        let before = priority();
        assert_eq!(aside(priority).await.expect("it is done"), LAST);
        assert_eq!(priority(), before, "only that thread steps back");
    }

    #[tokio::test]
    async fn work_that_panics_is_told_as_such() {
        let failed = aside(|| assert!(std::hint::black_box(false), "on purpose")).await;
        assert_eq!(failed.expect_err("it panicked").to_string(), "the work ended without a result");
    }
}
