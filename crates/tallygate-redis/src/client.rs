//! The way to Redis, shared by all stores of a process.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwapOption;
use futures_util::future::join_all;
use redis::{
    Client, Cmd, ConnectionInfo, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value,
};
use sha2::{Digest as _, Sha256};

use crate::address::Address;
use crate::clock::since_boot;
use crate::commit::Commits;
use crate::error::{AddressError, Error};
use crate::failure::OnFailure;
use crate::key::{Key, SlotSecret};
use crate::node::Failure;
use crate::routes::Routes;
use crate::script::{By, Script};
use crate::store::RedisStore;
use crate::window::{CallWindow, FEWEST_OF_SEVERAL_KEYS};

/// How to use Redis.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// What all keys begin with. Without braces, which would choose a cluster's slot.
    pub prefix: String,
    /// How long a decision may take: after that the failure policy decides.
    pub budget: Duration,
    /// How many connections there are to each server. One carries many calls at once.
    pub connections: usize,
    /// The secret by which keys are spread over the slots of a cluster, the same for all servers of the fleet. Without it
    /// they share one that the first of them stores in the cluster.
    pub slot_secret: Option<Vec<u8>>,
    /// The certificates, in PEM, of who may vouch for a server, if they are not the system's.
    pub root_certificates: Option<Vec<u8>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            prefix: "tallygate:".into(),
            budget: Duration::from_millis(50),
            connections: 1,
            slot_secret: None,
            root_certificates: None,
        }
    }
}

impl Options {
    /// Another prefix of keys.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Another time budget a decision.
    #[must_use]
    pub const fn budget(mut self, budget: Duration) -> Self {
        self.budget = budget;
        self
    }

    /// Several connections to each server.
    #[must_use]
    pub const fn connections(mut self, connections: usize) -> Self {
        self.connections = connections;
        self
    }

    /// A secret by which keys are spread over the slots of a cluster.
    #[must_use]
    pub fn slot_secret(mut self, secret: impl Into<Vec<u8>>) -> Self {
        self.slot_secret = Some(secret.into());
        self
    }

    /// Certificates, in PEM, of one's own authority.
    #[must_use]
    pub fn root_certificates(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.root_certificates = Some(pem.into());
        self
    }

    pub(crate) fn client(&self, info: ConnectionInfo) -> RedisResult<Client> {
        #[cfg(feature = "tls")]
        if matches!(info.addr(), redis::ConnectionAddr::TcpTls { .. }) {
            // Whoever has chosen a provider before keeps it.
            let _ = rustls::crypto::ring::default_provider().install_default();
            return Client::build_with_tls(
                info,
                redis::TlsCertificates {
                    client_tls: None,
                    root_cert: self.root_certificates.clone(),
                },
            );
        }
        Client::open(info)
    }
}

/// Redis, Valkey, their sentinels or a cluster of them.
///
/// It is cheap to clone, and all clones share their connections. Nothing is connected before the first
/// decision, and a server that is away is no error: the [failure policy](OnFailure) decides until it is back.
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
    /// What the server's clock is ahead of ours, in microseconds.
    ahead: AtomicI64,
    is_checked: AtomicBool,
    /// The secret that keys are spread over the slots of a cluster by, once it is known.
    slot_secret: OnceLock<SlotSecret>,
    is_agreeing: AtomicBool,
}

impl Redis {
    /// Redis at an address: `redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE]`, `rediss://` for TLS,
    /// `redis+cluster://HOST,HOST`, `redis+sentinel://HOST,HOST/NAME`, `unix:///PATH`.
    ///
    /// # Errors
    /// It is no such address.
    pub fn open(address: &str) -> Result<Self, AddressError> {
        Self::with(address, Options::default())
    }

    /// The same, with options.
    ///
    /// # Errors
    /// It is no such address, or the prefix has braces in it.
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
            return Err(error(format!("the prefix {prefix:?} has braces, which choose a slot")));
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

    /// A store for the keys of a policy, by its name. Limiters of the same name share their clients' quotas,
    /// in whatever process they are.
    #[must_use]
    pub fn store(&self, name: impl Into<Arc<str>>) -> RedisStore {
        RedisStore::new(self.clone(), name.into(), OnFailure::default())
    }

    /// Where it is, without its password.
    #[must_use]
    pub fn address(&self) -> impl fmt::Display + '_ {
        &self.inner.address
    }

    /// What has happened so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut counts = self.inner.counters.snapshot();
        counts.is_open = self.inner.routes.is_open();
        counts
    }

    /// Why Redis could not decide the last time it could not.
    #[must_use]
    pub fn last_error(&self) -> Option<Arc<Error>> {
        self.inner.counters.last_error.load_full()
    }

    /// Asks whether the server is there, within the time budget.
    ///
    /// # Errors
    /// It is not, or it will not be talked to.
    pub async fn ping(&self) -> Result<(), Error> {
        let ping = redis::cmd("PING");
        self.inner.routes.send(0, ping, self.deadline()).await.map(|_| ()).map_err(error_of)
    }

    /// Learns by which secret keys are spread over the slots of a cluster, within the time budget: the first server of a
    /// fleet stores it. Who calls this before the first decision has no decision that fails for want of it. Without a
    /// cluster, or with a [secret of its own](Options::slot_secret), it does nothing.
    ///
    /// # Errors
    /// The cluster could not be asked. The next decision tries again.
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
            _ => Err(Error::Server { message: "the secret of the slots is no string".into() }),
        }
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Identifies the connections that clones share.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.inner).addr()
    }

    pub(crate) fn is_cluster(&self) -> bool {
        self.inner.routes.is_cluster()
    }

    pub(crate) fn budget(&self) -> Duration {
        self.inner.options.budget
    }

    /// Whether the server of a key was at work since a moment: it answered others in time, or is being connected to for
    /// the first time. What is not decided then waits for others, and not for a server that does not answer.
    pub(crate) fn is_busy_since(&self, key: &Key, since: Instant) -> bool {
        self.inner.routes.is_busy_since(key.slot, since)
    }

    /// Returns whether the server of a slot did not answer at some time since a moment.
    pub(crate) fn was_away_since(&self, slot: u16, since: Instant) -> bool {
        self.inner.routes.was_open_since(slot, since)
    }

    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.inner.options.budget
    }

    pub(crate) fn key(&self, policy: &str, client: &[u8]) -> Result<Key, Error> {
        Key::new(&self.inner.options.prefix, self.known_secret()?, policy, client)
    }

    pub(crate) fn key_of_leases(&self, policy: &str, client: &[u8]) -> Result<Key, Error> {
        Key::of_leases(&self.inner.options.prefix, self.known_secret()?, policy, client)
    }

    /// The secret of a cluster; elsewhere there is none.
    fn known_secret(&self) -> Result<Option<&SlotSecret>, Error> {
        if !self.is_cluster() {
            return Ok(None);
        }
        if let Some(secret) = self.inner.slot_secret.get() {
            return Ok(Some(secret));
        }
        self.begin_agreeing();
        let reason = "the secret of the cluster's slots is not known yet".into();
        Err(Error::Unavailable { reason, sent: false })
    }

    /// Learns in the background by which secret keys are spread over the slots.
    fn begin_agreeing(&self) {
        if self.inner.is_agreeing.swap(true, Ordering::Relaxed) {
            return;
        }
        let redis = self.clone();
        tokio::spawn(async move {
            let agreed = redis.agree_on_slots().await;
            redis.inner.is_agreeing.store(false, Ordering::Relaxed);
            if let Err(error) = agreed {
                tracing::debug!(%error, "cannot read the secret of the cluster's slots; retrying");
            }
        });
    }

    pub(crate) fn key_of_outage(&self, policy: &str, client: &[u8]) -> Result<Key, Error> {
        Key::of_outage(&self.inner.options.prefix, self.known_secret()?, policy, client)
    }

    /// Runs a script on keys of one slot, once. A server that has not seen it gets its text: asking by its name first
    /// would take a second round trip. If the server has forgotten it, it gets the text again: it was not run then.
    pub(crate) async fn run(
        &self,
        script: &Script,
        keys: &[&Key],
        arguments: &[&[u8]],
        deadline: Instant,
    ) -> Result<Value, Error> {
        self.check_server();
        let slot = keys.first().map_or(0, |key| key.slot);
        let call = |by| script.call(keys, arguments, by);
        let routes = &self.inner.routes;
        let is_loaded = routes.has_script(slot, script.id);
        let mut result = match is_loaded {
            true => routes.send(slot, call(By::Name), deadline).await,
            // Only the first callers send the text: others need no room for it in their futures.
            false => Box::pin(self.send_text(script.id, slot, call(By::Text), deadline)).await,
        };
        if let Err(Failure::Refused(error)) = &result
            && error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
        {
            self.inner.counters.reloads.fetch_add(1, Ordering::Relaxed);
            result = Box::pin(routes.send(slot, call(By::Text), deadline)).await;
        }
        self.note_memory(&result);
        result.map_err(error_of)
    }

    /// Sends the text of a script. As soon as it is on its way, other calls go by its name, which the server reads after
    /// the text: many callers of a new script would fill the connection with its text.
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
            // A new connection has forgotten it meanwhile.
            Ok(_) | Err(Failure::Refused(_)) => routes.loaded_script(slot, script),
            Err(_) => routes.forget_script(slot, script),
        }
        result
    }

    /// Notes whether the server has memory for what it was asked.
    fn note_memory(&self, result: &Result<Value, Failure>) {
        let counters = &self.inner.counters;
        if let Err(Failure::Refused(error)) = result
            && is_out_of_memory(error)
        {
            counters.out_of_memory.fetch_add(1, Ordering::Relaxed);
            let now = wall() / 1000;
            let before = counters.out_of_memory_ms.swap(now, Ordering::Relaxed);
            if now - before >= OUT_OF_MEMORY_FOR_MS {
                tracing::error!(
                    address = %self.inner.address,
                    "redis is out of memory and refuses writes; each policy decides by its failure setting"
                );
            }
        }
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

    /// Notes the server's time, in microseconds, as a reply told it.
    pub(crate) fn heard(&self, time: i64) {
        self.inner.ahead.store(time.saturating_sub(wall()), Ordering::Relaxed);
    }

    /// About what time the server has, in microseconds.
    pub(crate) fn now(&self) -> i64 {
        wall().saturating_add(self.inner.ahead.load(Ordering::Relaxed))
    }

    /// Looks once whether the server may drop keys before they expire, and says so.
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
                            "redis may drop keys before they expire, and with them what clients have \
                             used; set maxmemory-policy to noeviction"
                        );
                    }
                }
                // Not allowed to look: nothing can be said.
                Err(Failure::Refused(_)) => {}
                Err(_) => redis.inner.is_checked.store(false, Ordering::Relaxed),
            }
        });
    }
}

/// What the caller is told of a failure.
fn error_of(failure: Failure) -> Error {
    match failure {
        Failure::Late { reason, sent } => Error::Overloaded { reason: reason.into(), sent },
        Failure::Refused(error) => {
            // A server may say much; the first line tells what it is about.
            let text = error.to_string();
            let first_line = text.lines().next().unwrap_or_default();
            if is_out_of_memory(&error) {
                return Error::OutOfMemory { message: first_line.chars().take(200).collect() };
            }
            Error::Server { message: first_line.chars().take(200).collect::<String>().into() }
        }
        Failure::NotSent(reason) => Error::Unavailable { reason: (&*reason).into(), sent: false },
        Failure::Lost(reason) => Error::Unavailable { reason: (&*reason).into(), sent: true },
    }
}

/// Whether the server refused a call because it has no memory left.
fn is_out_of_memory(error: &RedisError) -> bool {
    error.code() == Some("OOM")
        || error.detail().is_some_and(|detail| detail.contains("OOM command"))
}

/// The eviction policy in a reply, if it is one that drops keys.
fn dropping(reply: &Value) -> Option<String> {
    let policy = match reply {
        Value::Array(pair) => pair.get(1)?,
        Value::Map(pairs) => &pairs.first()?.1,
        _ => return None,
    };
    let Value::BulkString(policy) = policy else { return None };
    (policy != b"noeviction").then(|| String::from_utf8_lossy(policy).into_owned())
}

/// How long a server counts as out of memory after it said so: reads and denials succeed meanwhile, so a call that
/// succeeds proves nothing.
const OUT_OF_MEMORY_FOR_MS: i64 = 5000;

/// Returns the time since the epoch, in microseconds, as this process knew it when it started. It never goes back: while Redis
/// is away, windows end by it.
fn wall() -> i64 {
    static START: LazyLock<(Duration, Duration)> = LazyLock::new(|| {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (since_epoch, since_boot())
    });
    let (since_epoch, booted) = *START;
    let now = since_epoch.saturating_add(since_boot().saturating_sub(booted));
    i64::try_from(now.as_micros()).unwrap_or(i64::MAX)
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("address", &self.inner.address).finish_non_exhaustive()
    }
}

/// What happened, counted while it does.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) calls: AtomicU64,
    pub(crate) timeouts: AtomicU64,
    pub(crate) connections: AtomicU64,
    pub(crate) breaker_opened: AtomicU64,
    pub(crate) redirections: AtomicU64,
    pub(crate) reloads: AtomicU64,
    pub(crate) contended: AtomicU64,
    pub(crate) overloaded: AtomicU64,
    pub(crate) races_lost: AtomicU64,
    pub(crate) out_of_memory: AtomicU64,
    /// When it last was, in milliseconds since the epoch.
    pub(crate) out_of_memory_ms: AtomicI64,
    pub(crate) errors: AtomicU64,
    pub(crate) allowed: AtomicU64,
    pub(crate) denied: AtomicU64,
    pub(crate) local: AtomicU64,
    pub(crate) returned: AtomicU64,
    pub(crate) coalesced: AtomicU64,
    pub(crate) leased: AtomicU64,
    pub(crate) given_back: AtomicU64,
    pub(crate) lapsed: AtomicU64,
    pub(crate) unreturned: AtomicU64,
    pub(crate) eviction_warnings: AtomicU64,
    pub(crate) last_error: ArcSwapOption<Error>,
    /// When a caller last found no place among the calls that decide on several keys, in nanoseconds since [`FIRST_USE`].
    queued_ns: AtomicU64,
}

static FIRST_USE: LazyLock<Instant> = LazyLock::new(Instant::now);

impl Counters {
    /// Notes that a caller has to wait for its turn to decide on several keys.
    pub(crate) fn note_queue(&self) {
        let now = u64::try_from(FIRST_USE.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.queued_ns.fetch_max(now.max(1), Ordering::Relaxed);
    }

    /// Returns whether a caller had to wait for its turn to decide on several keys since a moment.
    pub(crate) fn has_queued_since(&self, since: Instant) -> bool {
        let queued = self.queued_ns.load(Ordering::Relaxed);
        queued > 0 && *FIRST_USE + Duration::from_nanos(queued) >= since
    }
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Calls that were sent.
    pub calls: u64,
    /// Calls whose reply did not come in time.
    pub timeouts: u64,
    /// Connections that were made.
    pub connections: u64,
    /// How often a server was left alone because it did not answer.
    pub breaker_opened: u64,
    /// Whether one is now.
    pub is_open: bool,
    /// Calls that were sent on to another server of the cluster.
    pub redirections: u64,
    /// Scripts that a server had forgotten and was told again.
    pub reloads: u64,
    /// Writes that were tried again because somebody else had written.
    pub contended: u64,
    /// Checks that were denied as [overloaded](tallygate::Source::Overloaded): the server answers, but they were not
    /// decided within their time budget.
    pub overloaded: u64,
    /// Of those, the ones that lost every race with other processes.
    pub races_lost: u64,
    /// Calls that the server refused because it has no memory left.
    pub out_of_memory: u64,
    /// Whether it did so in the last five seconds.
    pub is_out_of_memory: bool,
    /// Decisions that the server could not make, for whatever reason.
    pub errors: u64,
    /// Of those, the ones that were [allowed](OnFailure::Allow).
    pub allowed: u64,
    /// The ones that were [denied](OnFailure::Deny).
    pub denied: u64,
    /// The ones that were made [in this process](OnFailure::Local).
    pub local: u64,
    /// Clients whose use in this process was charged in Redis when it was back.
    pub returned: u64,
    /// Checks that shared another's call, or were answered by what it brought.
    pub coalesced: u64,
    /// What was taken on [lease](crate::Leases).
    pub leased: u64,
    /// What of it was given back.
    pub given_back: u64,
    /// What of it was neither served nor given back.
    pub lapsed: u64,
    /// Units that a decision over several keys charged and could not give back when another key denied. They stay charged
    /// until the policy has earned them back.
    pub unreturned: u64,
    /// Whether the server was found to drop keys before they expire.
    pub eviction_warnings: u64,
}

impl Counters {
    fn snapshot(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            calls: read(&self.calls),
            timeouts: read(&self.timeouts),
            connections: read(&self.connections),
            breaker_opened: read(&self.breaker_opened),
            is_open: false,
            redirections: read(&self.redirections),
            reloads: read(&self.reloads),
            contended: read(&self.contended),
            overloaded: read(&self.overloaded),
            races_lost: read(&self.races_lost),
            out_of_memory: read(&self.out_of_memory),
            is_out_of_memory: wall() / 1000 - self.out_of_memory_ms.load(Ordering::Relaxed)
                < OUT_OF_MEMORY_FOR_MS,
            errors: read(&self.errors),
            allowed: read(&self.allowed),
            denied: read(&self.denied),
            local: read(&self.local),
            returned: read(&self.returned),
            coalesced: read(&self.coalesced),
            leased: read(&self.leased),
            given_back: read(&self.given_back),
            lapsed: read(&self.lapsed),
            unreturned: read(&self.unreturned),
            eviction_warnings: read(&self.eviction_warnings),
        }
    }
}
