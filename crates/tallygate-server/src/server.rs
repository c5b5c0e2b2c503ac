//! `tallygate serve`: listens, keeps the configuration current, and stops when it is told to.

mod descriptors;
mod holdings;
mod impatient;
mod listen;
mod notify;
mod reload;
mod snapshot;
mod tls;
mod turns;
#[cfg(test)]
mod worker_time;

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use futures_util::TryFutureExt as _;
use ipnet::IpNet;
use tallygate_redis::Redis;
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::cli::Serve;
use crate::config::{Config, DEFAULT_HTTP, DEFAULT_RESP, Limits, Tls, Tokens};
use crate::gate::{Backend, Gate, Remembered};
use crate::metrics::{Metrics, ReasonLabels};
use crate::{http, random, resp, traces};
pub(crate) use holdings::{
    HeldBytes, Holder, OPERATOR_BYTES, SHARE_OF_AN_ADDRESS, SMALL_BYTES, WAITING_BYTES,
};
use holdings::{HeldConnection, Holdings, NoRoom};
pub(crate) use listen::Connection;
use listen::Listener;
use reload::Watched;
use snapshot::Snapshot;
use tls::Security;
pub(crate) use turns::TURN_BYTES;

/// What all connections share.
pub(crate) struct Shared {
    pub(crate) gate: Arc<Gate>,
    pub(crate) settings: ArcSwap<Settings>,
    /// Whether new requests are welcome: not before it listens, not after it was told to stop.
    pub(crate) is_ready: AtomicBool,
    /// Asks for the configuration to be read anew.
    pub(crate) reload: AskReload,
    /// Places for backtests.
    pub(crate) backtests: Arc<Semaphore>,
    holdings: Arc<Holdings>,
    /// The reserve for replies to operators.
    reserve: Arc<Holdings>,
    http: Security,
    resp: Security,
}

/// Where to ask for the configuration to be read anew, and who is told what came of it.
pub(crate) type AskReload = mpsc::Sender<oneshot::Sender<Result<(), String>>>;

/// What of the configuration concerns the surfaces.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    pub(crate) tokens: Arc<Tokens>,
    pub(crate) admin_on_loopback: bool,
    /// The host names by which browsers may call the server.
    pub(crate) names: Vec<String>,
    pub(crate) trusted_proxies: Vec<IpNet>,
    pub(crate) limits: Limits,
    /// The most bytes that are taken to be backtested.
    pub(crate) backtest_max_bytes: u64,
    /// The most memory that the clients of a backtest may take.
    pub(crate) backtest_max_memory: u64,
}

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    /// Its address; `None` over a Unix socket.
    pub(crate) address: Option<IpAddr>,
    /// Whether it is a process of the server's own user or of root, over a Unix socket.
    pub(crate) is_same_user: bool,
}

impl Peer {
    /// Returns the peer of a TCP connection.
    pub(crate) const fn at(address: IpAddr) -> Self {
        Self { address: Some(address), is_same_user: false }
    }

    /// Returns the peer of a connection over a Unix socket, by the user that the kernel reports.
    fn of_socket(stream: &UnixStream) -> Self {
        let own = rustix::process::geteuid().as_raw();
        let user = stream.peer_cred().map(|peer| peer.uid());
        Self { address: None, is_same_user: user.is_ok_and(|user| user == own || user == 0) }
    }

    /// Whether it connects over loopback.
    pub(crate) fn is_loopback(self) -> bool {
        self.address.is_some_and(|address| address.to_canonical().is_loopback())
    }
}

/// Told when it is time to stop.
pub(crate) type Stop = watch::Receiver<bool>;

/// How long connections have to end after the server was told to stop.
const DRAIN: Duration = Duration::from_secs(10);

impl Settings {
    fn of(config: &Config) -> Self {
        let max_connections = descriptors::connections(config.limits.max_connections);
        Self {
            tokens: config.tokens.clone(),
            admin_on_loopback: config.admin_on_loopback,
            names: config.names.clone(),
            trusted_proxies: config.trusted_proxies.clone(),
            limits: Limits { max_connections, ..config.limits },
            backtest_max_bytes: config.backtest_max_bytes,
            backtest_max_memory: config.backtest_max_memory,
        }
    }
}

/// Runs until it is told to stop.
pub(crate) fn run(options: &Serve) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let traces = traces::start(options)?;
        let served = serve(options).await;
        traces.flush().await;
        served
    })
}

/// Connects to the store before the first request, which has less time than a connection takes at a distance.
async fn reach(redis: &Redis) -> Result<(), tallygate_redis::Error> {
    let mut tries = 0;
    loop {
        match redis.agree_on_slots().and_then(|()| redis.ping()).await {
            Err(tallygate_redis::Error::Overloaded { .. }) if tries < 4 => tries += 1,
            reached => return reached,
        }
    }
}

async fn serve(options: &Serve) -> anyhow::Result<()> {
    descriptors::raise();
    // Before it is read: what changes from now on is noticed.
    let watched = options.config.as_deref().map(Watched::new);
    let (config, one_time_token) = match &options.config {
        Some(path) => (Config::read(path)?, None),
        None => {
            let token = random::token();
            let tokens = Arc::new(Tokens::with_admin(&token));
            (Config { tokens, ..Config::demo() }, Some(token))
        }
    };
    let store = options.store.as_deref().or(config.store.as_deref()).unwrap_or("memory");
    let backend = match store {
        "memory" => Backend::Memory { max_keys: options.max_keys },
        address => Backend::Redis(Redis::open(address)?),
    };
    if let Backend::Redis(redis) = &backend
        && let Err(error) = reach(redis).await
    {
        tracing::warn!(%error, "the store does not answer; policies decide by on_store_error until it does");
    }
    let in_memory = matches!(backend, Backend::Memory { .. });
    let snapshot = Snapshot::asked_for(options, &config, in_memory)?;
    let remembered = match &snapshot {
        Some(snapshot) => snapshot.read(&config, options.max_keys)?,
        None => Remembered::default(),
    };
    let (ask_reload, reloads) = mpsc::channel(8);
    let shared = Arc::new(Shared::new(&config, backend, remembered, ask_reload));
    // Signals are heard from here on: one that comes while it starts is not lost.
    let mut signals = Signals::new()?;
    let hangup = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
    let http = options.http.as_deref().or(config.http.as_deref()).unwrap_or(DEFAULT_HTTP);
    let resp = options.resp.as_deref().or(config.resp.as_deref()).unwrap_or(DEFAULT_RESP);
    let http =
        Listener::bind(http).await.with_context(|| format!("cannot listen for HTTP on {http}"))?;
    let resp =
        Listener::bind(resp).await.with_context(|| format!("cannot listen for RESP on {resp}"))?;
    shared.is_ready.store(true, Ordering::Release);
    say(hello(one_time_token.as_deref(), &http, &resp));
    notify::ready();

    let (stop, stopped) = watch::channel(false);
    let (secure_http, secure_resp) = (shared.http.clone(), shared.resp.clone());
    let http =
        http.accept("http", secure_http, shared.clone(), stopped.clone(), http::serve_connection);
    let resp =
        resp.accept("resp", secure_resp, shared.clone(), stopped.clone(), resp::serve_connection);
    let (http, resp) = (tokio::spawn(http), tokio::spawn(resp));
    let watching = reload::watch(watched, hangup, shared.clone(), reloads);
    tokio::select! {
        () = signals.stop() => {}
        () = watching => {}
        () = notify::stay_watched() => {}
        () = saving(snapshot.as_ref(), &shared.gate) => {}
    }
    tracing::info!("stopping");
    notify::stopping();
    shared.is_ready.store(false, Ordering::Release);
    // Whoever asks whether it is ready has a moment to hear that it is not.
    stop.send_replace(true);
    let drained = async {
        let _ = http.await;
        let _ = resp.await;
        while shared.holdings.connections() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    if tokio::time::timeout(DRAIN, drained).await.is_err() {
        tracing::warn!(connections = shared.holdings.connections(), "not all have ended");
    }
    if let Some(snapshot) = &snapshot {
        snapshot.save(&shared.gate).await?;
    }
    shared.gate.give_back_leases().await;
    Ok(())
}

/// Saves clients every so often, if that was asked for.
async fn saving(snapshot: Option<&Snapshot>, gate: &Arc<Gate>) {
    match snapshot {
        Some(snapshot) => snapshot.keep_saving(gate).await,
        None => std::future::pending().await,
    }
}

/// Prints something to standard output. Whether anybody reads it is not waited for.
fn say(text: String) {
    std::thread::spawn(move || {
        let mut out = std::io::stdout().lock();
        if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            tracing::warn!(%error, "where it listens cannot be printed");
        }
    });
}

/// Where it listens and what to try. Scripts read this: an address a line, then `tallygate ready`.
fn hello(one_time_token: Option<&str>, http: &Listener, resp: &Listener) -> String {
    let mut out = format!("http {http}\nresp {resp}\ntallygate ready\n");
    if let Some(token) = one_time_token {
        out.push_str(
            "no configuration was given; the policy \"demo\" allows 5 at once and 10 a minute. Try:\n",
        );
        let (address, page) = (http.to_string(), format!("http://{http}/"));
        let curl = match address.strip_prefix("unix:") {
            Some(path) => format!("curl --unix-socket {path} http://localhost/v1/check"),
            None => format!("curl {page}v1/check"),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(out, "  {curl} -d '{{\"policy\":\"demo\",\"key\":\"alice\"}}'");
        if let Some(port) = resp.port() {
            let _ = writeln!(out, "  redis-cli -p {port} TG.CHECK demo alice");
            let _ = writeln!(out, "  redis-cli -p {port} CL.THROTTLE alice 4 10 60");
        }
        let _ = writeln!(out, "admin token of this run: {token}");
        if http.port().is_some() {
            let _ = writeln!(out, "or open {page}#token={token} in a browser");
        }
    }
    out
}

/// What the system tells.
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

impl Shared {
    pub(crate) fn new(
        config: &Config,
        backend: Backend,
        remembered: Remembered,
        reload: AskReload,
    ) -> Self {
        Self {
            gate: Arc::new(Gate::new(config, backend, Metrics::new(), remembered)),
            settings: ArcSwap::from_pointee(Settings::of(config)),
            is_ready: AtomicBool::new(false),
            reload,
            backtests: http::backtest_places(),
            holdings: Arc::default(),
            reserve: Arc::default(),
            http: Security::new(config.tls.http.as_ref()),
            resp: Security::new(config.tls.resp.as_ref()),
        }
    }

    /// Room for one more connection, if there is any.
    fn admit_connection(&self, peer: Peer) -> Option<HeldConnection> {
        let settings = self.settings.load();
        let refused = match self.holdings.connect(self.holder(peer), &settings.limits) {
            Ok(held) => return Some(held),
            Err(NoRoom::Server) => "server",
            Err(NoRoom::Address) => "address",
        };
        let labels = ReasonLabels { reason: refused };
        self.gate.metrics.connections_refused.get_or_create(&labels).inc();
        None
    }

    /// Whom the bytes of a connection are counted to. It is settled once: they are given back to whom they were taken from.
    pub(crate) fn holder(&self, peer: Peer) -> Holder {
        Holder::of(peer, &self.settings.load().trusted_proxies)
    }

    /// Room for bytes that a client makes the server hold, if there is any.
    pub(crate) fn hold(&self, holder: Holder, bytes: usize, limits: &Limits) -> Option<HeldBytes> {
        self.holdings.hold(holder, bytes, limits)
    }

    /// Room in the reserve for a reply to an operator, if there is any.
    pub(crate) fn hold_of_reserve(&self, holder: Holder, bytes: usize) -> Option<HeldBytes> {
        self.reserve.hold_of_reserve(holder, bytes)
    }

    /// Whether a peer may use the admin verbs without a token: a process of the same user or of root over a Unix socket,
    /// or, if the configuration opens it, a connection from loopback that is not a trusted proxy's.
    pub(crate) fn is_operator(&self, peer: Peer) -> bool {
        let opened = peer.is_loopback() && self.settings.load().admin_on_loopback;
        peer.is_same_user || (opened && !self.is_trusted_proxy(peer))
    }

    /// Whether a peer is a proxy that the configuration trusts to name its clients.
    pub(crate) fn is_trusted_proxy(&self, peer: Peer) -> bool {
        peer.address.is_some_and(|address| {
            let address = address.to_canonical();
            self.settings.load().trusted_proxies.iter().any(|net| net.contains(&address))
        })
    }

    /// Shows new certificates, as far as that can be changed while it runs.
    fn renew(&self, tls: &Tls) {
        let is_other = [self.http.renew(tls.http.as_ref()), self.resp.renew(tls.resp.as_ref())];
        if is_other.contains(&true) {
            tracing::warn!(
                "which listeners speak TLS is settled at the start: restart to change it"
            );
        }
    }

    /// What one client may take, at this time.
    pub(crate) fn limits(&self) -> Limits {
        self.settings.load().limits
    }

    /// Reads the configuration anew, and says what came of it.
    pub(crate) async fn reload(&self) -> Result<(), String> {
        let (tell, told) = oneshot::channel();
        let gone = || "the server is stopping".to_owned();
        self.reload.send(tell).await.map_err(|_| gone())?;
        told.await.map_err(|_| gone())?
    }
}
