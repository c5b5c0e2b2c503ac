//! One server: its connections, how long it is waited for, and whether it is asked at all.
//!
//! Many calls are in flight on a connection at once. A call has a time budget; what becomes of one whose reply
//! does not come is never guessed: it is not sent again.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ConnectionInfo, RedisError, RedisResult, Value};
use tokio::sync::watch;
use tokio::time::timeout_at;

use crate::breaker::{Breaker, Pass, pause};
use crate::client::{Counters, Options};
use crate::window::{CallWindow, FEWEST, InWindow};

/// One server.
pub(crate) struct Node {
    name: String,
    breaker: Mutex<Breaker>,
    links: Box<[Arc<Link>]>,
    next: AtomicUsize,
    counters: Arc<Counters>,
    /// Whether a task asks for it until it answers again.
    is_probed: AtomicBool,
    pub(crate) scripts: Arc<LoadedScripts>,
}

/// The scripts that a server has, as far as is known: a few. None after a new connection: it may be another server.
#[derive(Debug, Default)]
pub(crate) struct LoadedScripts(RwLock<Vec<u64>>);

impl LoadedScripts {
    pub(crate) fn has(&self, script: u64) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).contains(&script)
    }

    pub(crate) fn add(&self, script: u64) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if !known.contains(&script) {
            known.push(script);
        }
    }

    pub(crate) fn remove(&self, script: u64) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).retain(|known| *known != script);
    }

    fn clear(&self) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// One connection to it.
struct Link {
    client: Client,
    settings: AsyncConnectionConfig,
    state: watch::Sender<State>,
    counters: Arc<Counters>,
    budget: Duration,
    window: Arc<CallWindow>,
    created: Instant,
    /// When the last reply came in time, in nanoseconds since it was created.
    heard_ns: AtomicU64,
    /// When the last reply came too late, counted in the same way.
    late_ns: AtomicU64,
    /// When a call was sent while no other was in flight, counted in the same way.
    waiting_since_ns: AtomicU64,
    /// How many calls in a row had no reply while nothing else was answered either.
    silent_calls: AtomicU32,
    scripts: Arc<LoadedScripts>,
}

#[derive(Clone)]
enum State {
    /// Not connected; not to be tried before a time.
    Down {
        tries: u32,
        not_before: Option<Instant>,
        reason: Arc<str>,
    },
    Connecting {
        since: Instant,
        /// Whether nothing has failed before.
        is_first: bool,
    },
    Up {
        connection: MultiplexedConnection,
        generation: u64,
    },
}

/// The times of a call that had no reply.
#[derive(Clone, Copy, Debug)]
struct CallTimes {
    sent: Instant,
    deadline: Instant,
    /// When this process saw that the deadline had passed.
    seen: Instant,
    now: Instant,
}

impl CallTimes {
    /// Returns whether this process got too little processor time to read replies when they came.
    fn was_stalled(&self) -> bool {
        self.seen.saturating_duration_since(self.deadline) > STALL
    }
}

/// Why there is no reply.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// It was not sent.
    NotSent(Arc<str>),
    /// It was sent, and nobody knows what became of it.
    Lost(Arc<str>),
    /// The server answers, but not this call in time: too many are before it. Nobody knows what became of it if it
    /// was sent.
    Late { reason: &'static str, sent: bool },
    /// The server refused it.
    Refused(RedisError),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSent(reason) | Self::Lost(reason) => f.write_str(reason),
            Self::Late { reason, .. } => f.write_str(reason),
            Self::Refused(error) => error.fmt(f),
        }
    }
}

/// How long a connection may take to be made: longer than a call may take, since nobody waits for it alone.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// Together with the breaker's own pause, a server that is back is asked again within a second.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// How long a first connection may take before the server counts as one that does not answer: it takes several round
/// trips, and a budget may have time for one.
const FIRST_CONNECTION: Duration = Duration::from_millis(250);
/// How long a reply is waited for beyond its time if this process was late to look for it.
const LEAST_GRACE: Duration = Duration::from_millis(2);
/// A process that sees a deadline so late gets too little processor time to read replies when they come.
pub(crate) const STALL: Duration = Duration::from_millis(4);
/// How long a server that answered in time is taken for one that does.
const LATELY: Duration = Duration::from_secs(1);
/// How many rounds of all tasks a reply is waited for beyond that.
const ROUNDS: usize = 6;
/// How long a server that was given a lot of work may be silent before it counts as one that does not answer. It answers
/// none of the calls that it reads together before it has carried out all of them, and also those of other processes.
const LONGEST_SILENCE: Duration = Duration::from_millis(500);
/// After how many calls without a reply a connection is given up.
const SILENT_CALLS: u32 = 3;
/// How many calls may wait to be written.
const BUFFERED_CALLS: usize = 4096;

impl Node {
    pub(crate) fn new(
        info: ConnectionInfo,
        options: &Options,
        counters: &Arc<Counters>,
    ) -> RedisResult<Self> {
        let name = info.addr().to_string();
        // Small packets go out at once: a call does not wait until the one before it was acknowledged.
        let settings = info.tcp_settings().clone().set_nodelay(true);
        let info = info.set_tcp_settings(settings);
        let client = options.client(info)?;
        let settings = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(None)
            .set_pipeline_buffer_size(BUFFERED_CALLS);
        let scripts = Arc::new(LoadedScripts::default());
        let link = |_| {
            let down = State::Down { tries: 0, not_before: None, reason: "not connected".into() };
            Arc::new(Link {
                client: client.clone(),
                settings: settings.clone(),
                state: watch::Sender::new(down),
                counters: counters.clone(),
                budget: options.budget,
                window: CallWindow::new(options.budget, FEWEST),
                created: Instant::now(),
                heard_ns: AtomicU64::new(0),
                late_ns: AtomicU64::new(0),
                waiting_since_ns: AtomicU64::new(0),
                silent_calls: AtomicU32::new(0),
                scripts: scripts.clone(),
            })
        };
        Ok(Self {
            name,
            breaker: Mutex::new(Breaker::new()),
            links: (0..options.connections.max(1)).map(link).collect(),
            next: AtomicUsize::new(0),
            counters: counters.clone(),
            is_probed: AtomicBool::new(false),
            scripts: scripts.clone(),
        })
    }

    /// Sends a command and waits for its reply. If it is only being moved here, the server has to be told.
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
        match &result {
            Ok(_) | Err(Failure::Refused(_)) => {
                let mut breaker = self.breaker();
                if breaker.succeeded() {
                    drop(breaker);
                    tracing::info!(server = self.name, "redis answers again");
                }
            }
            // The server answers others: the breaker does not hear of a call that was too late.
            Err(Failure::Late { .. }) if pass == Pass::Go => {}
            Err(failure) => self.failed(failure),
        }
        result
    }

    /// Whether any call was answered in time since a moment, the server may be at work although it is silent, or a first
    /// connection is being made.
    pub(crate) fn is_busy_since(&self, since: Instant) -> bool {
        let now = Instant::now();
        self.links.iter().any(|link| {
            link.is_busy_since(since, now)
                || link.may_be_at_work(since, false, now)
                || link.is_connecting_first()
        })
    }

    /// Asks for a server that does not answer until it does, so that it is known also while nobody needs it.
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
                let deadline = Instant::now() + node.links[0].budget;
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
        if self.breaker().failed(Instant::now()) {
            self.counters.breaker_opened.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(server = self.name, %failure, "redis does not answer; it is left alone");
            // A connection on which nothing comes back may lead nowhere.
            self.links.iter().for_each(|link| link.drop_connection(None, 1, &failure.to_string()));
        }
    }

    /// Forgets its connections: the server said that it is not the right one any more. The next one is made
    /// after a pause: it may well be the same server for a while.
    pub(crate) fn reconnect(&self, reason: &str) {
        self.links.iter().for_each(|link| link.rest(reason));
    }

    /// Returns whether the server did not answer at some time since a moment.
    pub(crate) fn was_open_since(&self, since: Instant) -> bool {
        self.breaker().was_open_since(since)
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

/// A probe whose caller went away before it was answered has failed: another must be able to try.
struct Probe<'a> {
    node: &'a Node,
    unanswered: bool,
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        if self.unanswered {
            self.node.failed(&Failure::Lost("the probe was given up".into()));
        }
    }
}

/// Looks once more for what did not come before a deadline: it may be there already. A process that was late to see the
/// deadline was late to read replies, too, and one with many tasks needs a few rounds to bring a reply to its caller.
pub(crate) async fn last_chance<T>(
    deadline: Instant,
    budget: Duration,
    mut waited_for: impl Future<Output = T> + Unpin,
) -> Option<T> {
    let grace = deadline.elapsed().clamp(LEAST_GRACE, budget);
    if let Ok(came) = tokio::time::timeout(grace, &mut waited_for).await {
        return Some(came);
    }
    for _ in 0..ROUNDS {
        tokio::task::yield_now().await;
        if let Some(came) = (&mut waited_for).now_or_never() {
            return Some(came);
        }
    }
    None
}

impl Link {
    async fn send(
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
        let mut reply = timeout_at(deadline.into(), &mut call).await.map_err(Some);
        let mut seen = deadline;
        if reply.is_err() {
            seen = Instant::now();
            reply = last_chance(deadline, self.budget, &mut call).await.ok_or(None);
        }
        match reply {
            Err(_) => {
                self.note_late_reply(call, place, generation);
                let times = CallTimes { sent, deadline, seen, now: Instant::now() };
                Err(self.timed_out(generation, times))
            }
            Ok(Err(error)) if error.is_io_error() || error.is_connection_dropped() => {
                self.drop_connection(Some(generation), 0, &error.to_string());
                Err(Failure::Lost(error.to_string().into()))
            }
            Ok(result) => {
                self.heard(sent);
                result.map_err(Failure::Refused)
            }
        }
    }

    fn heard(&self, sent: Instant) {
        let now = Instant::now();
        self.heard_ns.fetch_max(self.nanos_until(now), Ordering::Relaxed);
        self.silent_calls.store(0, Ordering::Relaxed);
        self.window.replied(now - sent, now);
    }

    /// The nanoseconds from when it was created until a time.
    fn nanos_until(&self, time: Instant) -> u64 {
        u64::try_from((time - self.created).as_nanos()).unwrap_or(u64::MAX)
    }

    /// For how long calls have been in flight without any reply.
    fn silence(&self, now: Instant) -> Duration {
        let heard = self.heard_ns.load(Ordering::Relaxed);
        let since = heard.max(self.waiting_since_ns.load(Ordering::Relaxed));
        now.duration_since(self.created).saturating_sub(Duration::from_nanos(since))
    }

    /// Whether the server has so much work that it may be silent for a while: the calls in flight take long, its replies
    /// were slow before because of the calls of others, or more callers wanted to decide on several keys since a moment
    /// than may do so at once.
    fn is_loaded(&self, since: Instant) -> bool {
        self.window.work() >= self.budget / 4
            || self.window.is_slow()
            || self.counters.has_queued_since(since)
    }

    /// Returns whether the server may be at work although it is silent: not yet for most of a time budget, or not for
    /// long and it is loaded, or this process was stalled and could not read replies in time. A call that was sent when
    /// little of its budget was left says nothing about the server.
    fn may_be_at_work(&self, since: Instant, was_stalled: bool, now: Instant) -> bool {
        let silence = self.silence(now);
        silence < self.budget * 3 / 4
            || (was_stalled || self.is_loaded(since))
                && silence < LONGEST_SILENCE.max(2 * self.budget)
    }

    fn heard_since(&self, since: Instant) -> bool {
        let heard = self.heard_ns.load(Ordering::Relaxed);
        heard > 0 && self.created + Duration::from_nanos(heard) >= since
    }

    /// Notes a reply that comes after its time: the server answers, if only late. Until then the call keeps its place in
    /// flight, so that a server is never given more work than it can do; unless the connection has gone.
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
            let came = tokio::select! {
                reply = reply => matches!(reply, Ok(Ok(_))),
                _ = state.wait_for(is_gone) => false,
            };
            if came {
                link.late_ns.fetch_max(link.nanos_until(Instant::now()), Ordering::Relaxed);
            }
            drop(place);
        });
    }

    /// Whether the server was at work since a moment: it answered a call in time; or one too late, if it answered in
    /// time lately. A server that always answers too late does not answer.
    fn is_busy_since(&self, since: Instant, now: Instant) -> bool {
        let late = self.late_ns.load(Ordering::Relaxed);
        let is_late = || late > 0 && self.created + Duration::from_nanos(late) >= since;
        let lately = || now.checked_sub(LATELY).is_some_and(|then| self.heard_since(then));
        self.heard_since(since) || is_late() && lately()
    }

    fn is_connecting_first(&self) -> bool {
        matches!(&*self.state.borrow(), State::Connecting { since, is_first: true }
            if since.elapsed() < FIRST_CONNECTION)
    }

    /// Decides what it means that a call had no reply. If another call was answered since this one was sent, the server
    /// is busy. If none was, it does not answer, unless it [may be at work](Self::may_be_at_work).
    fn timed_out(&self, generation: u64, times: CallTimes) -> Failure {
        self.counters.timeouts.fetch_add(1, Ordering::Relaxed);
        let CallTimes { sent, now, .. } = times;
        if self.is_busy_since(sent, now) || self.may_be_at_work(sent, times.was_stalled(), now) {
            return Failure::Late { reason: "no reply within the time budget", sent: true };
        }
        if self.silent_calls.fetch_add(1, Ordering::Relaxed) + 1 >= SILENT_CALLS {
            self.drop_connection(Some(generation), 1, "no reply within the time budget");
        }
        Failure::Lost("no reply within the time budget".into())
    }

    /// The connection, made if there is none. Those who come meanwhile wait for the same one.
    async fn connection(
        self: &Arc<Self>,
        deadline: Instant,
    ) -> Result<(MultiplexedConnection, u64), Failure> {
        // Nearly always: nothing is subscribed to that would have to be given up again.
        if let State::Up { connection, generation } = &*self.state.borrow() {
            return Ok((connection.clone(), *generation));
        }
        let mut state = self.state.subscribe();
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
                    return Err(if is_first && since.elapsed() < FIRST_CONNECTION {
                        Failure::Late { reason: "the connection is being made", sent: false }
                    } else {
                        Failure::NotSent("connecting takes too long".into())
                    });
                }
            }
        }
    }

    /// Starts connecting, unless somebody else has.
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
            let state = match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
                Ok(Ok(connection)) => {
                    let generation = link.counters.connections.fetch_add(1, Ordering::Relaxed);
                    link.scripts.clear();
                    State::Up { connection, generation }
                }
                Ok(Err(error)) => State::down(tries, &error.to_string()),
                Err(_) => State::down(tries, "connecting takes too long"),
            };
            link.state.send_replace(state);
        });
    }

    fn rest(&self, reason: &str) {
        self.state.send_if_modified(|state| {
            let is_up = matches!(state, State::Up { .. });
            if is_up {
                *state = State::down(0, reason);
            }
            is_up
        });
    }

    /// Forgets a connection, after so many that could not be made.
    fn drop_connection(&self, of: Option<u64>, tries: u32, reason: &str) {
        self.state.send_if_modified(|state| match state {
            State::Up { generation, .. } if of.is_none_or(|of| of == *generation) => {
                *state = State::Down { tries, not_before: None, reason: reason.into() };
                true
            }
            _ => false,
        });
    }
}

impl State {
    /// After a connection could not be made. Not at once again, and not all of a fleet at one time.
    fn down(tries: u32, reason: &str) -> Self {
        let pause = pause(tries, FIRST_PAUSE, LONGEST_PAUSE, fastrand::f64());
        let not_before = Some(Instant::now() + pause);
        Self::Down { tries: tries.saturating_add(1), not_before, reason: reason.into() }
    }
}

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo as _;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A call that is sent at the beginning and never answered, with a time budget of 50 ms. The process sees the deadline
    /// late by some time, and looks for the reply until another.
    fn failure(seen_late: Duration, until: Duration) -> Failure {
        let info = "redis://127.0.0.1:1".into_connection_info().unwrap();
        let options = Options::default().budget(50 * MS);
        let node = Node::new(info, &options, &Arc::default()).unwrap();
        let link = &node.links[0];
        let sent = link.created + MS;
        link.waiting_since_ns.store(link.nanos_until(sent), Ordering::Relaxed);
        let deadline = sent + 50 * MS;
        let times = CallTimes { sent, deadline, seen: deadline + seen_late, now: sent + until };
        link.timed_out(0, times)
    }

    #[test]
    fn a_process_that_was_stalled_takes_a_call_without_a_reply_for_late_and_not_for_lost() {
        assert!(matches!(failure(MS, 55 * MS), Failure::Lost(_)), "it looked in time");
        assert!(matches!(failure(10 * MS, 75 * MS), Failure::Late { sent: true, .. }));
    }

    #[test]
    fn a_server_that_is_silent_for_long_does_not_answer_even_if_the_process_was_stalled() {
        assert!(matches!(failure(10 * MS, 499 * MS), Failure::Late { .. }));
        assert!(matches!(failure(10 * MS, LONGEST_SILENCE), Failure::Lost(_)));
    }
}
