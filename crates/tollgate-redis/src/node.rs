//! One server: its connections, how long it is waited for, and whether it is asked at all.
//!
//! Many calls are in flight on a connection at once. A call has a time budget; what becomes of one whose reply
//! does not come is never guessed: it is not sent again.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ConnectionInfo, RedisError, RedisResult, Value};
use tokio::sync::watch;
use tokio::time::timeout_at;

use crate::breaker::{Breaker, Pass, pause};
use crate::client::{Counters, Options};

/// One server.
pub(crate) struct Node {
    name: String,
    breaker: Mutex<Breaker>,
    links: Box<[Arc<Link>]>,
    next: AtomicUsize,
    counters: Arc<Counters>,
}

/// One connection to it.
struct Link {
    client: Client,
    settings: AsyncConnectionConfig,
    state: watch::Sender<State>,
    counters: Arc<Counters>,
}

#[derive(Clone)]
enum State {
    /// Not connected; not to be tried before a time.
    Down {
        tries: u32,
        not_before: Option<Instant>,
        reason: Arc<str>,
    },
    Connecting,
    Up {
        connection: MultiplexedConnection,
        generation: u64,
    },
}

/// Why there is no reply.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// It was not sent.
    NotSent(Arc<str>),
    /// It was sent, and nobody knows what became of it.
    Lost(Arc<str>),
    /// The server refused it.
    Refused(RedisError),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSent(reason) | Self::Lost(reason) => f.write_str(reason),
            Self::Refused(error) => error.fmt(f),
        }
    }
}

/// How long a connection may take to be made: longer than a call may take, since nobody waits for it alone.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How many calls may wait to be written.
const BUFFERED_CALLS: usize = 4096;

impl Node {
    pub(crate) fn new(
        info: ConnectionInfo,
        options: &Options,
        counters: &Arc<Counters>,
    ) -> RedisResult<Self> {
        let name = info.addr().to_string();
        let client = options.client(info)?;
        let settings = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(None)
            .set_pipeline_buffer_size(BUFFERED_CALLS);
        let link = |_| {
            let down = State::Down { tries: 0, not_before: None, reason: "not connected".into() };
            Arc::new(Link {
                client: client.clone(),
                settings: settings.clone(),
                state: watch::Sender::new(down),
                counters: counters.clone(),
            })
        };
        Ok(Self {
            name,
            breaker: Mutex::new(Breaker::new()),
            links: (0..options.connections.max(1)).map(link).collect(),
            next: AtomicUsize::new(0),
            counters: counters.clone(),
        })
    }

    /// Sends a command and waits for its reply. If it is only being moved here, the server has to be told.
    pub(crate) async fn send(
        &self,
        command: &Cmd,
        is_moving: bool,
        deadline: Instant,
    ) -> Result<Value, Failure> {
        let pass = self.breaker().ask(Instant::now());
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
            Err(failure) => self.failed(failure),
        }
        result
    }

    fn failed(&self, failure: &Failure) {
        if self.breaker().failed(Instant::now()) {
            self.counters.breaker_opened.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(server = self.name, %failure, "redis does not answer; it is left alone");
            // A connection on which nothing comes back may lead nowhere.
            self.links.iter().for_each(|link| link.drop_connection(None, &failure.to_string()));
        }
    }

    /// Forgets its connections: the server said that it is not the right one any more. The next one is made
    /// after a pause: it may well be the same server for a while.
    pub(crate) fn reconnect(&self, reason: &str) {
        self.links.iter().for_each(|link| link.rest(reason));
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

impl Link {
    async fn send(
        self: &Arc<Self>,
        command: &Cmd,
        is_moving: bool,
        deadline: Instant,
    ) -> Result<Value, Failure> {
        let (mut connection, generation) = self.connection(deadline).await?;
        let call = async {
            if is_moving {
                let mut both = redis::pipe();
                both.cmd("ASKING").add_command(command.clone());
                let replies = connection.send_packed_commands(&both, 1, 1).await?;
                replies.into_iter().next().unwrap_or_default().extract_error()
            } else {
                connection.send_packed_command(command).await?.extract_error()
            }
        };
        self.counters.calls.fetch_add(1, Ordering::Relaxed);
        match timeout_at(deadline.into(), call).await {
            Err(_) => {
                self.counters.timeouts.fetch_add(1, Ordering::Relaxed);
                Err(Failure::Lost("no reply within the time budget".into()))
            }
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) if error.is_io_error() || error.is_connection_dropped() => {
                self.drop_connection(Some(generation), &error.to_string());
                Err(Failure::Lost(error.to_string().into()))
            }
            Ok(Err(error)) => Err(Failure::Refused(error)),
        }
    }

    /// The connection, made if there is none. Those who come meanwhile wait for the same one.
    async fn connection(
        self: &Arc<Self>,
        deadline: Instant,
    ) -> Result<(MultiplexedConnection, u64), Failure> {
        let mut state = self.state.subscribe();
        loop {
            let seen = state.borrow_and_update().clone();
            match seen {
                State::Up { connection, generation } => return Ok((connection, generation)),
                State::Down { not_before: Some(when), reason, .. } if Instant::now() < when => {
                    return Err(Failure::NotSent(reason));
                }
                State::Down { .. } => self.connect(),
                State::Connecting => match timeout_at(deadline.into(), state.changed()).await {
                    Ok(_) => {}
                    Err(_) => return Err(Failure::NotSent("connecting takes too long".into())),
                },
            }
        }
    }

    /// Starts connecting, unless somebody else has.
    fn connect(self: &Arc<Self>) {
        let mut tries = 0;
        let begins = self.state.send_if_modified(|state| match state {
            State::Down { tries: before, .. } => {
                tries = *before;
                *state = State::Connecting;
                true
            }
            State::Connecting | State::Up { .. } => false,
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

    fn drop_connection(&self, of: Option<u64>, reason: &str) {
        self.state.send_if_modified(|state| match state {
            State::Up { generation, .. } if of.is_none_or(|of| of == *generation) => {
                *state = State::Down { tries: 0, not_before: None, reason: reason.into() };
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
