//! One server: its connections, and the circuit breaker that stops calls while it does not answer.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::{Cmd, ConnectionInfo, RedisResult, Value};

use crate::breaker::{Breaker, Change, Pass};
use crate::counts::Counters;
use crate::error_reply::rejects_charges;
use crate::link::{Failure, Link, Watch};
use crate::loaded_scripts::LoadedScripts;
use crate::options::Options;
use crate::pulse::Pulse;
use crate::stall::StallMonitor;

/// One server.
pub(crate) struct Node {
    name: String,
    breaker: Mutex<Breaker>,
    links: Box<[Arc<Link>]>,
    next: AtomicUsize,
    counters: Arc<Counters>,
    created: Instant,
    /// When the server last answered that it decides on no charge now, in nanoseconds since the creation; 0 for never.
    rejected_ns: AtomicU64,
    /// Whether a task probes the server until it answers again.
    is_probed: AtomicBool,
    /// Whether the log says that the server is unavailable.
    is_reported: AtomicBool,
    budget: Duration,
    pub(crate) scripts: Arc<LoadedScripts>,
}

/// Why calls are not sent to a server that has become a replica.
const REPLICA: &str = "the server is a replica now";

impl Node {
    pub(crate) fn new(
        info: ConnectionInfo,
        options: &Options,
        counters: &Arc<Counters>,
    ) -> RedisResult<Self> {
        let name = info.addr().to_string();
        // Small packets are sent at once: a call does not wait until the previous one was acknowledged.
        let settings = info.tcp_settings().clone().set_nodelay(true);
        let info = info.set_tcp_settings(settings);
        let client = options.client(info)?;
        let scripts = Arc::<LoadedScripts>::default();
        let watch = Watch { stalls: StallMonitor::new(), pulse: Pulse::new(client.clone()) };
        let link = |_| {
            let (counters, watch) = (counters.clone(), watch.clone());
            Link::new(client.clone(), options.budget, counters, watch, scripts.clone())
        };
        Ok(Self {
            name,
            breaker: Mutex::new(Breaker::new()),
            links: (0..options.connections.max(1)).map(link).collect(),
            next: AtomicUsize::new(0),
            counters: counters.clone(),
            created: Instant::now(),
            rejected_ns: AtomicU64::new(0),
            is_probed: AtomicBool::new(false),
            is_reported: AtomicBool::new(false),
            budget: options.budget,
            scripts,
        })
    }

    /// Sends a command and waits for its reply. If the slot is being moved to this server, sends ASKING first.
    pub(crate) async fn send(
        &self,
        command: &Arc<Cmd>,
        is_moving: bool,
        deadline: Instant,
    ) -> Result<Value, Failure> {
        let pass = self.pass();
        if pass == Pass::Stop {
            return Err(Failure::NotSent(format!("{} does not answer", self.name).into()));
        }
        let mut probe = Probe { node: self, unanswered: pass == Pass::Probe };
        let link = &self.links[self.next.fetch_add(1, Ordering::Relaxed) % self.links.len()];
        let result = link.send(command, is_moving, deadline).await;
        probe.unanswered = false;
        if let Err(Failure::ErrorReply(error)) = &result
            && rejects_charges(error)
        {
            let now = u64::try_from(self.created.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.rejected_ns.fetch_max(now.max(1), Ordering::Relaxed);
            self.counters.rejected_charges.store(true, Ordering::Relaxed);
        }
        match &result {
            Ok(_) | Err(Failure::ErrorReply(_)) => {
                let mut breaker = self.breaker();
                let is_back = breaker.succeeded();
                drop(breaker);
                if is_back && self.is_reported.swap(false, Ordering::Relaxed) {
                    tracing::info!(
                        server = self.name,
                        "redis is available again; sending checks to it"
                    );
                }
            }
            // The server answers other calls, so the breaker ignores a late reply.
            Err(Failure::Late { .. }) if pass == Pass::Go => {}
            Err(failure) => self.failed(failure),
        }
        result
    }

    /// Returns whether the server was busy since a time: see [`Link::is_busy_since`].
    pub(crate) fn is_busy_since(&self, since: Instant) -> bool {
        self.links.iter().any(|link| link.is_busy_since(since))
    }

    /// Probes an unavailable server until it answers, so that its recovery is noticed without requests.
    pub(crate) fn keep_probing(self: &Arc<Self>) {
        if self.is_probed.swap(true, Ordering::AcqRel) {
            return;
        }
        let node = Arc::downgrade(self);
        tokio::spawn(async move {
            while let Some(pause) =
                node.upgrade().and_then(|node| node.breaker().pause(Instant::now()))
            {
                tokio::time::sleep(pause.max(Duration::from_millis(10))).await;
                let Some(node) = node.upgrade() else { return };
                let deadline = Instant::now() + node.budget;
                let _ = node.send(&Arc::new(redis::cmd("PING")), false, deadline).await;
            }
            if let Some(node) = node.upgrade() {
                node.is_probed.store(false, Ordering::Release);
            }
        });
    }

    /// Returns whether a call may be sent.
    fn pass(&self) -> Pass {
        let mut breaker = self.breaker();
        if breaker.is_open() { breaker.ask(Instant::now()) } else { Pass::Go }
    }

    fn failed(&self, failure: &Failure) {
        let change = self.breaker().failed(Instant::now());
        match change {
            Change::None => return,
            Change::Opened => {
                self.counters.breaker_opened.fetch_add(1, Ordering::Relaxed);
            }
            Change::StaysOpen => {
                tracing::debug!(server = self.name, %failure, "redis is still unavailable");
            }
        }
        // A replica answers each probe and rejects the next write. The log has its rejections already, once.
        let is_replica = matches!(failure, Failure::NotSent(reason) if **reason == *REPLICA);
        if !is_replica && !self.is_reported.swap(true, Ordering::Relaxed) {
            tracing::warn!(server = self.name, %failure, "redis is unavailable; sending no checks to it until a probe succeeds");
        }
        // A connection without replies may be broken.
        for link in &self.links {
            link.drop_connection(None, 1, &failure.to_string());
        }
    }

    /// Drops the connections, because the server has become a replica. The next connection is made after a pause: the
    /// address may lead to the same server for a while.
    pub(crate) fn reconnect(&self) {
        self.links.iter().for_each(|link| link.reconnect_later(REPLICA));
    }

    /// Returns whether the server was unavailable at some time since a given time, or answered that it decides on no charge.
    pub(crate) fn was_open_since(&self, since: Instant) -> bool {
        let rejected = self.rejected_ns.load(Ordering::Relaxed);
        rejected > 0 && self.created + Duration::from_nanos(rejected) >= since
            || self.breaker().was_open_since(since)
    }

    pub(crate) fn is_open(&self) -> bool {
        self.breaker().is_open()
    }

    fn breaker(&self) -> MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A probe. If its caller is dropped before the reply, the probe has failed, so that another can be sent.
struct Probe<'a> {
    node: &'a Node,
    unanswered: bool,
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        if self.unanswered {
            self.node.failed(&Failure::Lost("the probe was canceled".into()));
        }
    }
}
