//! Long work in short time slices.
//!
//! A worker thread of the runtime serves many connections. A task with much to do counts its work here, and yields to
//! the other tasks of its worker after each slice. Work is counted, not timed, so that a test can assert the bound.

/// Maximum work per slice. A unit is about a nanosecond, so a slice takes about 50 µs, and less than a millisecond on a
/// slow machine.
const MAX_SLICE_WORK: usize = 50_000;

/// Work per byte of a body that is scanned for the items of a list.
pub(crate) const SCAN_BYTE: usize = 2;
/// Work per byte of JSON that is parsed.
pub(crate) const PARSE_BYTE: usize = 10;
/// Work per decision of a list, reply included.
pub(crate) const DECISION: usize = 1_000;
/// Work per command of RESP.
pub(crate) const COMMAND: usize = 500;
/// Work per byte of the reply to a command.
pub(crate) const REPLY_BYTE: usize = 5;
/// Work per field of a protobuf message.
pub(crate) const MESSAGE_FIELD: usize = 20;
/// Work per byte of such a field: it may consist of fields of two bytes, which are counted and decoded.
pub(crate) const MESSAGE_BYTE: usize = 5;
/// Work per byte of a descriptor's entry: it is looked up, and becomes part of a key, which may be hashed.
pub(crate) const ENTRY_BYTE: usize = 10;
/// Work per pattern that an entry is compared with.
pub(crate) const PATTERN: usize = 20;
/// Work per text between two `*` of such a pattern.
pub(crate) const PATTERN_PART: usize = 50;
/// Work per byte in which these texts are searched.
pub(crate) const PATTERN_BYTE: usize = 1;

/// The work that a task has done since it last yielded.
#[derive(Debug, Default)]
pub(crate) struct TimeSlice {
    done: usize,
}

impl TimeSlice {
    /// Counts work that comes next. Yields first if it does not fit into the current slice.
    pub(crate) async fn spend(&mut self, work: usize) {
        if self.done > 0 && self.done + work > MAX_SLICE_WORK {
            self.done = 0;
            tokio::task::yield_now().await;
        }
        self.done += work;
    }
}

/// Runs work that cannot pause. Another thread takes over the other tasks of this worker meanwhile.
pub(crate) fn off_worker<T>(work: impl FnOnce() -> T) -> T {
    use tokio::runtime::{Handle, RuntimeFlavor};
    let is_worker = Handle::try_current()
        .is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread);
    if is_worker { tokio::task::block_in_place(work) } else { work() }
}

/// Polls a future until it is ready, and returns its result and how many times it was polled.
#[cfg(any(test, fuzzing))]
pub(crate) fn count_polls<T>(future: impl Future<Output = T>) -> (T, usize) {
    use std::task::{Context, Poll, Waker};
    let mut future = std::pin::pin!(future);
    let mut cx = Context::from_waker(Waker::noop());
    for polls in 1.. {
        if let Poll::Ready(result) = future.as_mut().poll(&mut cx) {
            return (result, polls);
        }
    }
    unreachable!("it is polled until it is ready")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_tasks_run_while_work_is_done_off_the_worker() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build();
        let runtime = runtime.expect("a runtime");
        let (sender, receiver) = std::sync::mpsc::channel();
        runtime.block_on(async {
            let working = tokio::spawn(async move {
                // It runs on the only worker, as soon as that is free.
                tokio::spawn(async move { sender.send(()) });
                off_worker(|| receiver.recv_timeout(std::time::Duration::from_secs(20)))
            });
            assert!(working.await.expect("it ends").is_ok(), "the other task ran meanwhile");
        });
    }

    #[test]
    fn a_time_slice_ends_before_work_that_does_not_fit() {
        let work = |pieces: usize, each: usize| {
            let spending = async {
                let mut turn = TimeSlice::default();
                for _ in 0..pieces {
                    turn.spend(each).await;
                }
            };
            count_polls(spending).1
        };
        assert_eq!(work(50, MAX_SLICE_WORK / 50), 1);
        assert_eq!(work(51, MAX_SLICE_WORK / 50), 2);
        assert_eq!(
            work(3, 2 * MAX_SLICE_WORK),
            3,
            "a piece that is longer than a turn has one to itself"
        );
    }
}
