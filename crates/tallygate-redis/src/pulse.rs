//! Finds out whether a server answers at all while calls to it have no reply.
//!
//! A server answers none of the calls that it reads together on one connection before it has carried out all of them.
//! A server with many long calls can therefore be silent on a connection for long, although it works. So if a
//! server that may be busy does not reply in time, a task sends a PING every few milliseconds on a connection of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redis::{AsyncConnectionConfig, Client, Value};
use tokio::time::timeout;

/// Remembers when a server last answered a PING.
#[derive(Debug)]
pub(crate) struct Pulse {
    client: Client,
    created: Instant,
    is_running: AtomicBool,
    /// Until when the task runs, in nanoseconds since the creation.
    needed_until_ns: AtomicU64,
    /// When the last answer arrived, counted in the same way; 0 if there was none.
    answered_ns: AtomicU64,
}

/// The pause between two PINGs.
const INTERVAL: Duration = Duration::from_millis(50);
/// How long the task runs after a call without a reply in time.
const NEEDED_FOR: Duration = Duration::from_secs(10);
/// How long the task waits for a connection or a reply.
const PATIENCE: Duration = Duration::from_secs(1);

impl Pulse {
    pub(crate) fn new(client: Client) -> Arc<Self> {
        Arc::new(Self {
            client,
            created: Instant::now(),
            is_running: AtomicBool::new(false),
            needed_until_ns: AtomicU64::new(0),
            answered_ns: AtomicU64::new(0),
        })
    }

    /// Sends PINGs for a while, because a call had no reply in time.
    pub(crate) fn watch(self: &Arc<Self>) {
        let until = self.nanos(Instant::now() + NEEDED_FOR);
        self.needed_until_ns.fetch_max(until, Ordering::Relaxed);
        if tokio::runtime::Handle::try_current().is_err()
            || self.is_running.swap(true, Ordering::AcqRel)
        {
            return;
        }
        let task = Task(self.clone());
        tokio::spawn(async move { task.0.run().await });
    }

    async fn run(&self) {
        let settings = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(PATIENCE))
            .set_response_timeout(None);
        let ping = redis::cmd("PING");
        let mut connected = None;
        while self.nanos(Instant::now()) < self.needed_until_ns.load(Ordering::Relaxed) {
            if connected.is_none() {
                let connecting =
                    self.client.get_multiplexed_async_connection_with_config(&settings);
                connected = timeout(PATIENCE, connecting).await.ok().and_then(Result::ok);
            }
            if let Some(connection) = &mut connected {
                let reply = timeout(PATIENCE, ping.query_async::<Value>(connection)).await;
                match reply {
                    Ok(Ok(_)) => self.answered(Instant::now()),
                    Ok(Err(_)) | Err(_) => connected = None,
                }
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Records that the server answered at a time.
    pub(crate) fn answered(&self, at: Instant) {
        self.answered_ns.fetch_max(self.nanos(at), Ordering::Relaxed);
    }

    /// Returns whether the server answered a PING in the time before `now`.
    pub(crate) fn has_answered(&self, within: Duration, now: Instant) -> bool {
        let answered = self.answered_ns.load(Ordering::Relaxed);
        answered > 0 && self.nanos(now).saturating_sub(answered) < nanos(within)
    }

    fn nanos(&self, time: Instant) -> u64 {
        nanos(time.saturating_duration_since(self.created))
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The task of a pulse. When it ends, also together with its runtime, another one can start.
struct Task(Arc<Pulse>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.is_running.store(false, Ordering::Release);
    }
}
