//! One connection to a server: makes it, sends calls, and decides what a missing reply means.
//!
//! Many calls are in flight on a connection at once. A call has a time budget. A call without a reply is never sent
//! again, because it may have been carried out.
//!
//! A call without a reply in time is *lost* if the server is unavailable, which the failure settings then handle. It is
//! *late* if the server answers other calls, or may be busy, or if this process was [stalled](crate::stall) and may not
//! have read the reply: load is not an outage.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, RedisError, RedisResult, Value};
use tokio::sync::watch;
use tokio::time::timeout_at;

use crate::breaker::pause;
use crate::counts::Counters;
use crate::error_reply::rejects_connection;
use crate::loaded_scripts::LoadedScripts;
use crate::pulse::Pulse;
use crate::stall::StallMonitor;
use crate::window::{CallWindow, FEWEST, InWindow};

/// One connection to a server.
pub(crate) struct Link {
    client: Client,
    settings: AsyncConnectionConfig,
    state: watch::Sender<State>,
    counters: Arc<Counters>,
    budget: Duration,
    window: Arc<CallWindow>,
    created: Instant,
    /// When the last reply arrived in time, in nanoseconds since the connection was created.
    replied_ns: AtomicU64,
    /// When the last reply arrived too late, counted in the same way.
    late_ns: AtomicU64,
    /// When a call was sent while no other was in flight, counted in the same way.
    waiting_since_ns: AtomicU64,
    /// How many calls in a row had no reply while no other call was answered either.
    silent_calls: AtomicU32,
    watch: Watch,
    scripts: Arc<LoadedScripts>,
}

/// What shows whether a missing reply is the fault of the server. All connections to one server share it.
#[derive(Clone)]
pub(crate) struct Watch {
    pub(crate) stalls: Arc<StallMonitor>,
    pub(crate) pulse: Arc<Pulse>,
}

#[derive(Clone)]
enum State {
    /// Not connected, and not to be connected before a time.
    Down {
        tries: u32,
        not_before: Option<Instant>,
        reason: Arc<str>,
    },
    Connecting {
        since: Instant,
        /// Whether no attempt has failed before.
        is_first: bool,
    },
    Up {
        connection: MultiplexedConnection,
        generation: u64,
    },
}

/// Why a call has no reply.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The call was not sent.
    NotSent(Arc<str>),
    /// The call was sent, and it is unknown whether it was carried out.
    Lost(Arc<str>),
    /// The server answers, but did not answer this call in time, because of other calls. If it was sent, it is unknown
    /// whether it was carried out.
    Late { reason: &'static str, sent: bool },
    /// The server returned an error.
    ErrorReply(RedisError),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSent(reason) | Self::Lost(reason) => f.write_str(reason),
            Self::Late { reason, .. } => f.write_str(reason),
            Self::ErrorReply(error) => error.fmt(f),
        }
    }
}

/// How long connecting may take: longer than a call, since no caller waits for it alone.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// Together with the pause of the breaker, a recovered server is called again within a second.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// How long a first connection may take before the server counts as unavailable: it takes several round trips, and a
/// budget may have time for one only.
const FIRST_CONNECTION: Duration = Duration::from_millis(250);
/// How long this process waits for a late reply if it was late to check for it.
const LEAST_GRACE: Duration = Duration::from_millis(2);
/// How long a server counts as answering after a reply in time.
const LATELY: Duration = Duration::from_secs(1);
/// How many rounds of all tasks this process waits for a reply after that.
const ROUNDS: usize = 6;
/// How long a busy server may be silent before it counts as unavailable. It answers none of the calls that it reads
/// together before it has carried out all of them, including those of other processes.
const LONGEST_SILENCE: Duration = Duration::from_millis(500);
/// After how many calls without a reply a connection is dropped.
const SILENT_CALLS: u32 = 3;
/// How long a connection is idle before it is probed. Servers and networks close idle connections, and the first check
/// afterwards must not fail.
const IDLE: Duration = Duration::from_secs(1);
/// How many calls may be queued for writing.
const BUFFERED_CALLS: usize = 4096;

/// Waits a little longer for a result that has missed its deadline: it may have arrived already. A process that noticed
/// the deadline late was late to read replies as well, and a process with many tasks needs a few rounds to deliver a
/// reply.
pub(crate) async fn last_chance<T>(
    deadline: Instant,
    budget: Duration,
    mut waited_for: impl Future<Output = T> + Unpin,
) -> Option<T> {
    let grace = deadline.elapsed().clamp(LEAST_GRACE, budget);
    if let Ok(reply) = tokio::time::timeout(grace, &mut waited_for).await {
        return Some(reply);
    }
    for _ in 0..ROUNDS {
        tokio::task::yield_now().await;
        if let Some(reply) = (&mut waited_for).now_or_never() {
            return Some(reply);
        }
    }
    None
}

impl Link {
    pub(crate) fn new(
        client: Client,
        budget: Duration,
        counters: Arc<Counters>,
        watch: Watch,
        scripts: Arc<LoadedScripts>,
    ) -> Arc<Self> {
        let down = State::Down { tries: 0, not_before: None, reason: "not connected".into() };
        Arc::new(Self {
            client,
            settings: AsyncConnectionConfig::new()
                .set_connection_timeout(Some(CONNECT_TIMEOUT))
                .set_response_timeout(None)
                .set_pipeline_buffer_size(BUFFERED_CALLS),
            state: watch::Sender::new(down),
            counters,
            budget,
            window: CallWindow::new(budget, FEWEST),
            created: Instant::now(),
            replied_ns: AtomicU64::new(0),
            late_ns: AtomicU64::new(0),
            waiting_since_ns: AtomicU64::new(0),
            silent_calls: AtomicU32::new(0),
            watch,
            scripts,
        })
    }

    /// Sends a command and waits for its reply. If the slot is being moved to this server, sends ASKING first.
    pub(crate) async fn send(
        self: &Arc<Self>,
        command: &Arc<Cmd>,
        is_moving: bool,
        deadline: Instant,
    ) -> Result<Value, Failure> {
        let (connection, generation) = self.connection(deadline).await?;
        let Some(mut place) = self.window.enter(deadline).await else {
            return Err(Failure::Late { reason: "too many calls are in flight", sent: false });
        };
        place.weigh(command.args_iter().count());
        let (mut connection, command) = (connection, command.clone());
        let mut call = Box::pin(async move {
            if is_moving {
                let mut both = redis::pipe();
                both.cmd("ASKING").add_command(Cmd::clone(&command));
                let replies = connection.send_packed_commands(&both, 1, 1).await?;
                replies.into_iter().next().unwrap_or_default().extract_error()
            } else {
                connection.send_packed_command(&command).await?.extract_error()
            }
        });
        self.counters.calls.fetch_add(1, Ordering::Relaxed);
        let sent = Instant::now();
        if self.window.in_flight() <= 1 {
            self.waiting_since_ns.store(self.nanos_until(sent), Ordering::Relaxed);
        }
        self.watch.stalls.watch_until(deadline + self.budget);
        let reply = match timeout_at(deadline.into(), &mut call).await {
            Ok(reply) => Some(reply),
            Err(_) => last_chance(deadline, self.budget, &mut call).await,
        };
        match reply {
            None => {
                self.note_late_reply(call, place, generation);
                Err(self.timed_out(generation, sent, Instant::now()))
            }
            Some(Err(error)) if error.is_io_error() || error.is_connection_dropped() => {
                self.drop_connection(Some(generation), 0, &error.to_string());
                Err(Failure::Lost(error.to_string().into()))
            }
            Some(result) => {
                self.note_reply(sent);
                result.map_err(Failure::ErrorReply)
            }
        }
    }

    fn note_reply(&self, sent: Instant) {
        let now = Instant::now();
        self.replied_ns.fetch_max(self.nanos_until(now), Ordering::Relaxed);
        self.silent_calls.store(0, Ordering::Relaxed);
        self.window.replied(now - sent, now);
    }

    /// Returns the nanoseconds from the creation of the connection until a time.
    fn nanos_until(&self, time: Instant) -> u64 {
        u64::try_from((time - self.created).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns for how long calls have been in flight without a reply in time, or without any reply.
    fn silence(&self, now: Instant, late_replies_count: bool) -> Duration {
        let replied = self.replied_ns.load(Ordering::Relaxed);
        let late = if late_replies_count { self.late_ns.load(Ordering::Relaxed) } else { 0 };
        let since = replied.max(late).max(self.waiting_since_ns.load(Ordering::Relaxed));
        now.duration_since(self.created).saturating_sub(Duration::from_nanos(since))
    }

    /// Returns whether the server has so much work that it may be silent for a while: the calls in flight take long,
    /// its replies were slow before because of other calls, or callers had to wait for a place to decide on several
    /// keys.
    fn is_loaded(&self, since: Instant) -> bool {
        self.window.work() >= self.budget / 4
            || self.window.is_slow()
            || self.counters.has_queued_since(since)
    }

    /// Returns whether the server may be busy although it is silent: for less than most of a time budget, or than half of
    /// it in addition to its distance; or for longer if it is loaded or this process was stalled and could not read
    /// replies in time. Then all replies may be late, and late replies end a silence as well, and so does the answer to a
    /// PING on another connection. A call that was sent when little of its budget was left proves nothing about the
    /// server.
    fn may_be_busy(&self, since: Instant, now: Instant) -> bool {
        let is_strained = self.watch.stalls.was_stalled_lately(now) || self.is_loaded(since);
        let silence = self.silence(now, is_strained);
        silence < self.budget * 3 / 4
            || silence < self.window.distance() + self.budget / 2
            || is_strained && silence < self.longest_silence()
            || is_strained && self.watch.pulse.has_answered(self.longest_silence(), now)
    }

    /// Returns for how long a busy server may be silent.
    fn longest_silence(&self) -> Duration {
        LONGEST_SILENCE.max(2 * self.budget)
    }

    /// Returns whether a check that was not decided since a time waits for other checks, or for this process, and not for
    /// an unavailable server.
    pub(crate) fn is_busy_since(&self, since: Instant) -> bool {
        let now = Instant::now();
        self.has_answered_since(since, now)
            || self.may_be_busy(since, now)
            || matches!(&*self.state.borrow(), State::Connecting { since, is_first: true }
                if self.may_still_connect(*since))
    }

    fn has_replied_since(&self, since: Instant) -> bool {
        let replied = self.replied_ns.load(Ordering::Relaxed);
        replied > 0 && self.created + Duration::from_nanos(replied) >= since
    }

    /// Waits for a late reply and records it: the server answers, but late. Until then, the call keeps its place in
    /// flight, so that a server never gets more work than it can do; unless the connection is dropped.
    fn note_late_reply(
        self: &Arc<Self>,
        call: impl Future<Output = RedisResult<Value>> + Send + 'static,
        place: InWindow,
        generation: u64,
    ) {
        let link = self.clone();
        let mut state = self.state.subscribe();
        tokio::spawn(async move {
            let is_gone = |state: &State| !matches!(state, State::Up { generation: now, .. } if *now == generation);
            let reply = tokio::time::timeout(CONNECT_TIMEOUT, call);
            let reply = tokio::select! {
                reply = reply => matches!(reply, Ok(Ok(_))),
                _ = state.wait_for(is_gone) => false,
            };
            if reply {
                link.late_ns.fetch_max(link.nanos_until(Instant::now()), Ordering::Relaxed);
            }
            drop(place);
        });
    }

    /// Returns whether the server answered a call since a time: in time; or late, if it has recently answered in time. A
    /// server that always answers late counts as unavailable.
    fn has_answered_since(&self, since: Instant, now: Instant) -> bool {
        let late = self.late_ns.load(Ordering::Relaxed);
        let is_late = || late > 0 && self.created + Duration::from_nanos(late) >= since;
        let lately = || now.checked_sub(LATELY).is_some_and(|then| self.has_replied_since(then));
        self.has_replied_since(since) || is_late() && lately()
    }

    /// Returns whether a first connection that was begun at a time may still be made.
    fn may_still_connect(&self, since: Instant) -> bool {
        let now = Instant::now();
        let was_stalled = self.watch.stalls.was_stalled_lately(now);
        now - since < if was_stalled { CONNECT_TIMEOUT } else { FIRST_CONNECTION }
    }

    /// Classifies a call without a reply. If another call was answered since this one was sent, the server is busy. If
    /// none was, it is unavailable, unless it [may be busy](Self::may_be_busy).
    fn timed_out(&self, generation: u64, sent: Instant, now: Instant) -> Failure {
        self.counters.timeouts.fetch_add(1, Ordering::Relaxed);
        if self.has_answered_since(sent, now) {
            return Failure::Late { reason: "redis answers other calls", sent: true };
        }
        if self.may_be_busy(sent, now) {
            self.watch.pulse.watch();
            if self.silence(now, true) > CONNECT_TIMEOUT + self.budget {
                // Only another connection has answers, so this one may be broken.
                self.drop_connection(Some(generation), 1, "no reply for too long");
            }
            return Failure::Late { reason: "redis does not answer, but may be busy", sent: true };
        }
        if self.silent_calls.fetch_add(1, Ordering::Relaxed) + 1 >= SILENT_CALLS {
            self.drop_connection(Some(generation), 1, "no reply within the time budget");
        }
        Failure::Lost("no reply within the time budget".into())
    }

    /// Returns the connection, or makes one. Concurrent callers wait for the same one.
    async fn connection(
        self: &Arc<Self>,
        deadline: Instant,
    ) -> Result<(MultiplexedConnection, u64), Failure> {
        // The common case, without a subscription.
        if let State::Up { connection, generation } = &*self.state.borrow() {
            return Ok((connection.clone(), *generation));
        }
        let mut state = self.state.subscribe();
        self.watch.stalls.watch_until(deadline);
        loop {
            let seen = state.borrow_and_update().clone();
            match seen {
                State::Up { connection, generation } => return Ok((connection, generation)),
                State::Down { not_before: Some(when), reason, .. } if Instant::now() < when => {
                    return Err(Failure::NotSent(reason));
                }
                State::Down { .. } => self.connect(),
                State::Connecting { since, is_first } => {
                    if timeout_at(deadline.into(), state.changed()).await.is_ok() {
                        continue;
                    }
                    let now = Instant::now();
                    let is_busy = self.watch.pulse.has_answered(self.longest_silence(), now);
                    return Err(if is_busy || is_first && self.may_still_connect(since) {
                        Failure::Late { reason: "still connecting", sent: false }
                    } else {
                        Failure::NotSent("connecting timed out".into())
                    });
                }
            }
        }
    }

    /// Starts connecting, unless another caller has.
    fn connect(self: &Arc<Self>) {
        let mut tries = 0;
        let begins = self.state.send_if_modified(|state| match state {
            State::Down { tries: before, .. } => {
                tries = *before;
                *state = State::Connecting { since: Instant::now(), is_first: tries == 0 };
                true
            }
            State::Connecting { .. } | State::Up { .. } => false,
        });
        if !begins {
            return;
        }
        let link = self.clone();
        tokio::spawn(async move {
            let settings = link.settings.clone();
            let connecting = link.client.get_multiplexed_async_connection_with_config(&settings);
            let result = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
            let rejection = result
                .as_ref()
                .ok()
                .and_then(|result| result.as_ref().err())
                .filter(|error| rejects_connection(error));
            if link.counters.note_connection(rejection.is_some())
                && let Some(error) = rejection
            {
                let server = link.client.get_connection_info().addr();
                tracing::error!(%server, %error, "redis rejects every call; deciding by the failure setting of each policy");
            }
            let state = match result {
                Ok(Ok(connection)) => {
                    let generation = link.counters.connections.fetch_add(1, Ordering::Relaxed);
                    link.scripts.clear();
                    tokio::spawn(keep_alive(Arc::downgrade(&link), generation));
                    State::Up { connection, generation }
                }
                Ok(Err(error)) => State::down(tries, &error.to_string()),
                Err(_) => State::down(tries, "connecting timed out"),
            };
            link.state.send_replace(state);
        });
    }

    /// Returns the connection with this number, unless it was dropped.
    fn connection_of(&self, number: u64) -> Option<MultiplexedConnection> {
        match &*self.state.borrow() {
            State::Up { connection, generation } if *generation == number => {
                Some(connection.clone())
            }
            _ => None,
        }
    }

    /// Returns whether no call is in flight and no reply arrived lately.
    fn is_idle(&self, now: Instant) -> bool {
        self.window.in_flight() == 0 && self.silence(now, true) >= IDLE
    }

    /// Drops the connection. The next one is made after a pause.
    pub(crate) fn reconnect_later(&self, reason: &str) {
        self.state.send_if_modified(|state| {
            let is_up = matches!(state, State::Up { .. });
            if is_up {
                *state = State::down(0, reason);
            }
            is_up
        });
    }

    /// Drops a connection, after a number of failed attempts. Returns whether there was one.
    pub(crate) fn drop_connection(&self, of: Option<u64>, tries: u32, reason: &str) -> bool {
        self.state.send_if_modified(|state| match state {
            State::Up { generation, .. } if of.is_none_or(|of| of == *generation) => {
                *state = State::Down { tries, not_before: None, reason: reason.into() };
                true
            }
            _ => false,
        })
    }
}

/// Probes a connection while it is idle, until it is dropped. Drops it if it is broken, and makes another one, so that the
/// next check finds a connection that works.
async fn keep_alive(link: Weak<Link>, generation: u64) {
    loop {
        tokio::time::sleep(IDLE).await;
        let mut connection = {
            let Some(link) = link.upgrade() else { return };
            let Some(connection) = link.connection_of(generation) else { return };
            if !link.is_idle(Instant::now()) {
                continue;
            }
            connection
        };
        let ping = redis::cmd("PING");
        let reply = tokio::time::timeout(CONNECT_TIMEOUT, connection.send_packed_command(&ping));
        let (tries, reason) = match reply.await {
            Ok(Ok(_)) => continue,
            Ok(Err(error)) => (0, error.to_string()),
            Err(_) => (1, "no reply on an idle connection".to_owned()),
        };
        let Some(link) = link.upgrade() else { return };
        if link.drop_connection(Some(generation), tries, &reason) {
            link.connect();
        }
        return;
    }
}

impl State {
    /// Returns the state after a failed attempt. The next attempt follows after a random pause, so that the servers of
    /// a fleet do not connect at the same time.
    fn down(tries: u32, reason: &str) -> Self {
        let pause = pause(tries, FIRST_PAUSE, LONGEST_PAUSE, fastrand::f64());
        let not_before = Some(Instant::now() + pause);
        Self::Down { tries: tries.saturating_add(1), not_before, reason: reason.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn link() -> Arc<Link> {
        let client = Client::open("redis://127.0.0.1:1").unwrap();
        let watch = Watch { stalls: StallMonitor::new(), pulse: Pulse::new(client.clone()) };
        Link::new(client, 50 * MS, Arc::default(), watch, Arc::default())
    }

    /// Returns the failure of a call with a time budget of 50 ms that has no reply at a time after it was sent. The
    /// process was stalled until another time after that, if it was.
    fn failure(stalled_until: Option<Duration>, until: Duration) -> Failure {
        let link = link();
        let sent = link.created + 20 * MS;
        link.waiting_since_ns.store(link.nanos_until(sent), Ordering::Relaxed);
        if let Some(stalled_until) = stalled_until {
            link.watch.stalls.stall_until(sent + stalled_until);
        }
        link.timed_out(0, sent, sent + until)
    }

    /// Fault J1.
    #[test]
    fn a_call_without_a_reply_is_late_and_not_lost_if_the_process_was_stalled() {
        assert!(matches!(failure(None, 55 * MS), Failure::Lost(_)), "it could read the reply");
        // Whenever it was stalled: at the deadline, before it, or even before the call was sent.
        for stalled_until in [60 * MS, 30 * MS, Duration::ZERO] {
            let failure = failure(Some(stalled_until), 65 * MS);
            assert!(matches!(failure, Failure::Late { sent: true, .. }), "{stalled_until:?}");
        }
    }

    /// Fault J1.
    #[test]
    fn a_server_that_is_silent_for_long_is_unavailable_even_if_the_process_was_stalled() {
        assert!(matches!(failure(Some(60 * MS), 499 * MS), Failure::Late { .. }));
        assert!(matches!(failure(Some(60 * MS), LONGEST_SILENCE), Failure::Lost(_)));
    }

    /// Fault J1: on a starved machine, all replies may be late for a long time.
    #[test]
    fn late_replies_prove_that_a_server_answers_while_the_process_is_stalled() {
        let failure = |was_stalled: bool| {
            let link = link();
            let sent = link.created + 3000 * MS;
            link.replied_ns.store(link.nanos_until(sent - 2000 * MS), Ordering::Relaxed);
            link.late_ns.store(link.nanos_until(sent - 100 * MS), Ordering::Relaxed);
            if was_stalled {
                link.watch.stalls.stall_until(sent - 10 * MS);
            }
            link.timed_out(0, sent, sent + 55 * MS)
        };
        assert!(matches!(failure(true), Failure::Late { sent: true, .. }));
        assert!(matches!(failure(false), Failure::Lost(_)), "a server that is always late");
    }

    /// Fault J15: a server with many long calls is silent on a connection, but answers on another.
    #[test]
    fn a_busy_server_that_answers_pings_is_not_unavailable() {
        let failure = |since_ping: Option<Duration>, is_busy: bool| {
            let link = link();
            let now = link.created + 3000 * MS;
            let sent = now - 60 * MS;
            // An argument is estimated to take 10 µs.
            let mut place = link.window.enter(now).now_or_never().flatten().expect("a place");
            place.weigh(if is_busy { 2000 } else { 10 });
            if let Some(since_ping) = since_ping {
                link.watch.pulse.answered(now - since_ping);
            }
            link.timed_out(0, sent, now)
        };
        assert!(matches!(failure(Some(490 * MS), true), Failure::Late { sent: true, .. }));
        assert!(matches!(failure(Some(LONGEST_SILENCE), true), Failure::Lost(_)), "it stopped");
        assert!(matches!(failure(None, true), Failure::Lost(_)));
        assert!(matches!(failure(Some(10 * MS), false), Failure::Lost(_)), "it is not busy");
    }

    /// Fault J15: a reply from 40 ms away that is 10 ms late misses a budget of 50 ms.
    #[test]
    fn a_distant_server_is_not_unavailable_because_a_reply_is_a_little_late() {
        let failure = |until| {
            let link = link();
            let sent = link.created + 20 * MS;
            link.window.replied(40 * MS, sent);
            link.waiting_since_ns.store(link.nanos_until(sent), Ordering::Relaxed);
            link.timed_out(0, sent, sent + until)
        };
        assert!(matches!(failure(55 * MS), Failure::Late { sent: true, .. }));
        assert!(matches!(failure(66 * MS), Failure::Lost(_)));
    }

    /// Fault J1: callers that wait for a call of another caller judge the server in the same way.
    #[test]
    fn a_waiting_caller_does_not_blame_the_server_for_a_stall_of_the_process() {
        let link = link();
        let sent = Instant::now() - 60 * MS;
        let link = Link { created: sent - 20 * MS, ..Arc::into_inner(link).unwrap() };
        link.waiting_since_ns.store(link.nanos_until(sent), Ordering::Relaxed);
        assert!(!link.is_busy_since(sent));
        link.watch.stalls.stall_until(Instant::now());
        assert!(link.is_busy_since(sent));
    }
}
