//! The client of Redis, shared by all stores of a process.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use redis::{Cmd, ErrorKind, ServerErrorKind, Value};
use sha2::{Digest as _, Sha256};

use crate::address::Address;
use crate::clock::since_epoch_us;
use crate::commit::Commits;
use crate::counts::{Counters, Counts};
use crate::error::{AddressError, Error};
use crate::error_reply::{is_out_of_memory, message_of, rejects_all};
#[cfg(doc)]
use crate::failure::OnFailure;
use crate::key::{Key, SlotSecret};
use crate::link::Failure;
use crate::options::Options;
use crate::routes::Routes;
use crate::script::{Script, ScriptForm};
use crate::window::{CallWindow, FEWEST_OF_SEVERAL_KEYS};

/// A reply can be late by up to this many microseconds. If the server's clock seems to be further behind, it was set back.
const LATE_US: i64 = 500_000;

/// A connection to Redis or Valkey: one server, a primary behind sentinels, or a cluster.
///
/// Cloning is cheap, and all clones share their connections. Connections are made at the first decision. An unavailable
/// server is not an error: the [failure setting](OnFailure) decides until the server answers again.
#[derive(Clone)]
pub struct Redis {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) options: Options,
    pub(crate) counters: Arc<Counters>,
    address: Address,
    routes: Arc<Routes>,
    pub(crate) commits: Commits,
    /// Calls in flight that decide on several keys.
    pub(crate) several_keys: Arc<CallWindow>,
    /// How far the server's clock is ahead of the clock of this process, in microseconds.
    ahead: AtomicI64,
    is_checked: AtomicBool,
    /// The secret that spreads keys over the slots of a cluster, once it is known.
    slot_secret: OnceLock<SlotSecret>,
    is_agreeing: AtomicBool,
}

impl Redis {
    /// Opens Redis at an address: `redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE]`, `rediss://` for TLS,
    /// `redis+cluster://HOST,HOST`, `redis+sentinel://HOST,HOST/NAME`, or `unix:///PATH`. Connections are made when
    /// they are needed.
    ///
    /// # Errors
    /// Fails if the address is not of one of these forms.
    pub fn open(address: &str) -> Result<Self, AddressError> {
        Self::with(address, Options::default())
    }

    /// Opens Redis at an address, with options.
    ///
    /// # Errors
    /// Fails if the address is invalid, or if the prefix contains braces.
    ///
    /// ```
    /// use tallygate_redis::{Options, Redis};
    ///
    /// let options = Options::default().prefix("shop:");
    /// let redis = Redis::with("redis://alice:secret@10.0.0.7:6379/2", options)?;
    /// assert!(!format!("{redis:?}").contains("secret"));
    /// # Ok::<(), tallygate_redis::AddressError>(())
    /// ```
    pub fn with(address: &str, options: Options) -> Result<Self, AddressError> {
        let parsed = Address::parse(address)?;
        let error = |reason: String| AddressError {
            address: parsed.to_string().into(),
            reason: reason.into(),
        };
        if options.prefix.contains(['{', '}']) {
            let prefix = &options.prefix;
            return Err(error(format!(
                "the prefix {prefix:?} contains braces, which would choose a cluster slot; remove them"
            )));
        }
        let counters = Arc::new(Counters::default());
        let routes = Routes::new(parsed.clone(), options.clone(), counters.clone())
            .map_err(|failure| error(failure.to_string()))?;
        let routes = Arc::new(routes);
        let inner = Inner {
            several_keys: CallWindow::new(options.budget, FEWEST_OF_SEVERAL_KEYS),
            options,
            counters,
            address: parsed,
            routes,
            commits: Commits::new(),
            ahead: AtomicI64::new(0),
            is_checked: AtomicBool::new(false),
            slot_secret: OnceLock::new(),
            is_agreeing: AtomicBool::new(false),
        };
        if let Some(secret) = &inner.options.slot_secret {
            let _ = inner.slot_secret.set(Sha256::digest(secret).into());
        }
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Returns the address, without its password.
    #[must_use]
    pub fn address(&self) -> impl fmt::Display + '_ {
        &self.inner.address
    }

    /// Returns the counts of events since the client was made.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.inner.counters.snapshot(self.inner.routes.is_open())
    }

    /// Returns the error of the last decision that Redis did not make.
    #[must_use]
    pub fn last_error(&self) -> Option<Arc<Error>> {
        self.inner.counters.last_error.load_full()
    }

    /// Checks that the server answers, within the time budget.
    ///
    /// # Errors
    /// Fails if the server is unavailable or rejects the connection.
    pub async fn ping(&self) -> Result<(), Error> {
        let ping = redis::cmd("PING");
        let pong = self.inner.routes.send(0, ping, self.deadline()).await;
        pong.map(|_| ()).map_err(|failure| self.noted(failure))
    }

    /// Reads the secret that spreads keys over the slots of a cluster, within the time budget. The first server of a
    /// fleet stores it.
    ///
    /// Call this before the first decision, which would fail without the secret. Without a cluster, or with a
    /// [configured secret](Options::slot_secret), it does nothing.
    ///
    /// # Errors
    /// Fails if the cluster is unavailable. The next decision tries again.
    pub async fn agree_on_slots(&self) -> Result<(), Error> {
        if !self.is_cluster() || self.inner.slot_secret.get().is_some() {
            return Ok(());
        }
        let (key, deadline) = (Key::of_secret(&self.inner.options.prefix), self.deadline());
        let mut new = SlotSecret::default();
        getrandom::fill(&mut new).map_err(|error| Error::Unavailable {
            reason: error.to_string().into(),
            sent: false,
        })?;
        let set = redis::cmd("SET").arg(&key.name).arg(&new[..]).arg("NX").take();
        self.inner.routes.send(key.slot, set, deadline).await.map_err(error_of)?;
        let get = redis::cmd("GET").arg(&key.name).take();
        match self.inner.routes.send(key.slot, get, deadline).await.map_err(error_of)? {
            Value::BulkString(secret) => {
                let _ = self.inner.slot_secret.set(Sha256::digest(secret).into());
                Ok(())
            }
            _ => Err(Error::Server { message: "the slot secret is not a string".into() }),
        }
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns a number that is the same for all clones.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.inner).addr()
    }

    pub(crate) fn is_cluster(&self) -> bool {
        self.inner.routes.is_cluster()
    }

    pub(crate) fn budget(&self) -> Duration {
        self.inner.options.budget
    }

    /// Returns whether the server of a key was working since a time: it answered other calls in time, or the first
    /// connection is being made. A check that is not decided then waits for other checks, and not for an unavailable
    /// server.
    pub(crate) fn is_busy_since(&self, key: &Key, since: Instant) -> bool {
        self.inner.routes.is_busy_since(key.slot, since)
    }

    /// Returns whether the server of a slot was unavailable, out of memory or rejecting every call at some time since a
    /// given time.
    pub(crate) fn was_away_since(&self, slot: u16, since: Instant) -> bool {
        self.inner.routes.was_open_since(slot, since)
    }

    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.inner.options.budget
    }

    /// Returns the deadline of a settlement. It takes two round trips, and more while other requests change the key; and no
    /// request waits to be allowed by it.
    pub(crate) fn settlement_deadline(&self) -> Instant {
        Instant::now() + 4 * self.inner.options.budget
    }

    pub(crate) fn key(&self, policy: &str, client: &[u8]) -> Result<Key, Error> {
        Key::new(&self.inner.options.prefix, self.known_secret()?, policy, client)
    }

    pub(crate) fn key_of_leases(&self, policy: &str, client: &[u8]) -> Result<Key, Error> {
        Key::of_leases(&self.inner.options.prefix, self.known_secret()?, policy, client)
    }

    /// Returns the secret of a cluster; `None` without a cluster.
    fn known_secret(&self) -> Result<Option<&SlotSecret>, Error> {
        if !self.is_cluster() {
            return Ok(None);
        }
        if let Some(secret) = self.inner.slot_secret.get() {
            return Ok(Some(secret));
        }
        self.begin_agreeing();
        let reason = "the slot secret of the cluster is not known yet".into();
        Err(Error::Unavailable { reason, sent: false })
    }

    /// Reads the secret of the slots in the background.
    fn begin_agreeing(&self) {
        if self.inner.is_agreeing.swap(true, Ordering::Relaxed) {
            return;
        }
        let redis = self.clone();
        tokio::spawn(async move {
            let agreed = redis.agree_on_slots().await;
            redis.inner.is_agreeing.store(false, Ordering::Relaxed);
            if let Err(error) = agreed {
                tracing::debug!(%error, "cannot read the slot secret of the cluster; the next decision tries again");
            }
        });
    }

    pub(crate) fn key_of_outage(&self, policy: &str, client: &[u8]) -> Result<Key, Error> {
        Key::of_outage(&self.inner.options.prefix, self.known_secret()?, policy, client)
    }

    /// Runs a script on keys of one slot, once. Sends the text to a server that has not seen it: sending only the hash
    /// would need a second round trip. If the server has forgotten the script, sends the text again, because it was not
    /// run.
    pub(crate) async fn run(
        &self,
        script: &Script,
        keys: &[&Key],
        arguments: &[&[u8]],
        deadline: Instant,
    ) -> Result<Value, Error> {
        self.check_server();
        let slot = keys.first().map_or(0, |key| key.slot);
        let call = |form| script.call(keys, arguments, form);
        let routes = &self.inner.routes;
        let is_loaded = routes.has_script(slot, script.id);
        let mut result = match is_loaded {
            true => routes.send(slot, call(ScriptForm::Hash), deadline).await,
            // Only the first callers send the text, so other futures need no room for it.
            false => {
                Box::pin(self.send_text(script.id, slot, call(ScriptForm::Text), deadline)).await
            }
        };
        if let Err(Failure::ErrorReply(error)) = &result
            && error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
        {
            self.inner.counters.reloads.fetch_add(1, Ordering::Relaxed);
            result = Box::pin(routes.send(slot, call(ScriptForm::Text), deadline)).await;
        }
        if result.is_ok() && self.inner.counters.note_success() {
            let address = &self.inner.address;
            tracing::info!(%address, "redis accepts calls again; it has rejected none for 5 seconds");
        }
        result.map_err(|failure| self.noted(failure))
    }

    /// Sends the text of a script. As soon as it is sent, other calls use the hash, which the server reads after the
    /// text. Otherwise, many callers of a new script would fill the connection with its text.
    async fn send_text(
        &self,
        script: u64,
        slot: u16,
        call: Cmd,
        deadline: Instant,
    ) -> Result<Value, Failure> {
        let routes = &self.inner.routes;
        let mut sending = pin!(routes.send(slot, call, deadline));
        let result = match poll_fn(|now| Poll::Ready(sending.as_mut().poll(now))).await {
            Poll::Ready(result) => result,
            Poll::Pending => {
                routes.loaded_script(slot, script);
                sending.await
            }
        };
        match &result {
            // A new connection may have cleared the list meanwhile.
            Ok(_) | Err(Failure::ErrorReply(_)) => routes.loaded_script(slot, script),
            Err(_) => routes.forget_script(slot, script),
        }
        result
    }

    /// Records an error of the server that concerns all calls, and returns the error of this one.
    fn noted(&self, failure: Failure) -> Error {
        let Failure::ErrorReply(error) = &failure else { return error_of(failure) };
        let Inner { address, counters, .. } = &*self.inner;
        if is_out_of_memory(error) {
            if counters.note_out_of_memory() {
                tracing::error!(
                    %address,
                    "redis is out of memory and rejects writes; deciding by the failure setting of each policy"
                );
            }
        } else if rejects_all(error) && counters.note_rejection() {
            let error = message_of(error);
            tracing::error!(%address, error, "redis rejects every call; deciding by the failure setting of each policy");
        }
        error_of(failure)
    }

    /// Removes keys, many at a time.
    pub(crate) async fn remove(&self, keys: &[Key]) -> Result<(), Error> {
        for some in keys.chunks(256) {
            let deadline = self.deadline();
            let each = some.iter().map(|key| async move {
                let command = redis::cmd("UNLINK").arg(&key.name).take();
                self.inner.routes.send(key.slot, command, deadline).await.map_err(error_of)
            });
            join_all(each).await.into_iter().collect::<Result<Vec<_>, _>>()?;
        }
        Ok(())
    }

    /// Records the time of the server, in microseconds, from a reply.
    pub(crate) fn note_server_time(&self, time: i64) {
        let (ahead, known) = (time.saturating_sub(since_epoch_us()), &self.inner.ahead);
        let behind = known.load(Ordering::Relaxed).saturating_sub(ahead);
        // A late reply is no reason to set the clock back: an outage must not seem to have begun earlier.
        let error = if (0..LATE_US).contains(&behind) { behind - behind / 16 } else { 0 };
        known.store(ahead.saturating_add(error), Ordering::Relaxed);
    }

    /// Estimates the time of the server, in microseconds.
    pub(crate) fn now(&self) -> i64 {
        since_epoch_us().saturating_add(self.inner.ahead.load(Ordering::Relaxed))
    }

    /// Checks once whether the server may evict keys before they expire, and logs a warning.
    fn check_server(&self) {
        if self.inner.is_checked.swap(true, Ordering::Relaxed) {
            return;
        }
        let redis = self.clone();
        tokio::spawn(async move {
            let command = redis::cmd("CONFIG").arg("GET").arg("maxmemory-policy").take();
            let deadline = Instant::now() + Duration::from_secs(1);
            match redis.inner.routes.send(0, command, deadline).await {
                Ok(reply) => {
                    if let Some(policy) = dropping(&reply) {
                        redis.inner.counters.eviction_warnings.fetch_add(1, Ordering::Relaxed);
                        tracing::warn!(
                            address = %redis.inner.address,
                            policy,
                            "redis may evict keys before they expire, which forgets what clients \
                             have used; set maxmemory-policy to noeviction"
                        );
                    }
                }
                // The user may not read the configuration.
                Err(Failure::ErrorReply(_)) => {}
                Err(_) => redis.inner.is_checked.store(false, Ordering::Relaxed),
            }
        });
    }
}

/// Converts a failure to the error that the caller gets.
fn error_of(failure: Failure) -> Error {
    match failure {
        Failure::Late { reason, sent } => Error::Overloaded { reason: reason.into(), sent },
        Failure::ErrorReply(error) => {
            let message = message_of(&error).into();
            match is_out_of_memory(&error) {
                true => Error::OutOfMemory { message },
                false => Error::Server { message },
            }
        }
        Failure::NotSent(reason) => Error::Unavailable { reason: (&*reason).into(), sent: false },
        Failure::Lost(reason) => Error::Unavailable { reason: (&*reason).into(), sent: true },
    }
}

/// Returns the eviction policy in a reply, if it is one that evicts keys.
fn dropping(reply: &Value) -> Option<String> {
    let policy = match reply {
        Value::Array(pair) => pair.get(1)?,
        Value::Map(pairs) => &pairs.first()?.1,
        _ => return None,
    };
    let Value::BulkString(policy) = policy else { return None };
    (policy != b"noeviction").then(|| String::from_utf8_lossy(policy).into_owned())
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("address", &self.inner.address).finish_non_exhaustive()
    }
}
