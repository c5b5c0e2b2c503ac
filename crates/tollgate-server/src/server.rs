//! `tollgate serve`: listens, keeps the configuration current, and stops when it is told to.

mod listen;
mod reload;

use std::io::Write as _;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use ipnet::IpNet;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tollgate_redis::Redis;

use crate::cli::Serve;
use crate::config::{Config, DEFAULT_HTTP, DEFAULT_RESP, Limits};
use crate::gate::{Backend, Gate};
use crate::metrics::Metrics;
use crate::{http, resp, traces};
pub(crate) use listen::Connection;
use listen::Listener;

/// What all connections share.
pub(crate) struct Shared {
    pub(crate) gate: Arc<Gate>,
    pub(crate) settings: ArcSwap<Settings>,
    /// Whether new requests are welcome: not before it listens, not after it was told to stop.
    pub(crate) is_ready: AtomicBool,
    /// Asks for the configuration to be read anew.
    pub(crate) reload: mpsc::Sender<oneshot::Sender<Result<(), String>>>,
    /// Places for backtests.
    pub(crate) backtests: Arc<Semaphore>,
    connections: AtomicUsize,
}

/// What of the configuration concerns the surfaces.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    pub(crate) admin_token: Option<Box<str>>,
    pub(crate) trusted_proxies: Vec<IpNet>,
    pub(crate) limits: Limits,
    /// The most bytes that are taken to be backtested.
    pub(crate) backtest_max_bytes: u64,
}

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    /// Its address; `None` over a Unix socket.
    pub(crate) address: Option<IpAddr>,
}

impl Peer {
    /// Whether it is on this machine.
    pub(crate) fn is_local(self) -> bool {
        self.address.is_none_or(|address| address.to_canonical().is_loopback())
    }
}

/// Told when it is time to stop.
pub(crate) type Stop = watch::Receiver<bool>;

/// How long connections have to end after the server was told to stop.
const DRAIN: Duration = Duration::from_secs(10);

impl Settings {
    fn of(config: &Config) -> Self {
        Self {
            admin_token: config.admin_token.clone(),
            trusted_proxies: config.trusted_proxies.clone(),
            limits: config.limits,
            backtest_max_bytes: config.backtest_max_bytes,
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

async fn serve(options: &Serve) -> anyhow::Result<()> {
    // Before it is read: what changes from now on is noticed.
    let in_force = options.config.as_deref().and_then(reload::look);
    let config = match &options.config {
        Some(path) => Config::read(path)?,
        None => Config::demo(),
    };
    let store = options.store.as_deref().or(config.store.as_deref()).unwrap_or("memory");
    let backend = match store {
        "memory" => Backend::Memory { max_keys: options.max_keys },
        address => Backend::Redis(Redis::open(address)?),
    };
    if let Backend::Redis(redis) = &backend
        && let Err(error) = redis.ping().await
    {
        tracing::warn!(%error, "the store does not answer; policies decide by on_store_error until it does");
    }
    let (ask_reload, reloads) = mpsc::channel(8);
    let shared = Arc::new(Shared {
        gate: Arc::new(Gate::new(&config, backend, Metrics::new())),
        settings: ArcSwap::from_pointee(Settings::of(&config)),
        is_ready: AtomicBool::new(false),
        reload: ask_reload,
        backtests: http::backtest_places(),
        connections: AtomicUsize::new(0),
    });
    // Signals are heard from here on: one that comes while it starts is not lost.
    let mut signals = Signals::new()?;
    let hangup = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
    let http = options.http.as_deref().or(config.http.as_deref()).unwrap_or(DEFAULT_HTTP);
    let resp = options.resp.as_deref().or(config.resp.as_deref()).unwrap_or(DEFAULT_RESP);
    let http =
        Listener::bind(http).await.with_context(|| format!("cannot listen for HTTP on {http}"))?;
    let resp =
        Listener::bind(resp).await.with_context(|| format!("cannot listen for RESP on {resp}"))?;
    say_hello(options, &http, &resp)?;
    shared.is_ready.store(true, Ordering::Release);

    let (stop, stopped) = watch::channel(false);
    let http = tokio::spawn(http.accept(shared.clone(), stopped.clone(), http::serve_connection));
    let resp = tokio::spawn(resp.accept(shared.clone(), stopped.clone(), resp::serve_connection));
    let watching = reload::watch(options.config.clone(), in_force, hangup, shared.clone(), reloads);
    tokio::select! {
        () = signals.stop() => {}
        () = watching => {}
    }
    tracing::info!("stopping");
    shared.is_ready.store(false, Ordering::Release);
    // Whoever asks whether it is ready has a moment to hear that it is not.
    stop.send_replace(true);
    let drained = async {
        let _ = http.await;
        let _ = resp.await;
        while shared.connections.load(Ordering::Acquire) > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    if tokio::time::timeout(DRAIN, drained).await.is_err() {
        tracing::warn!(
            connections = shared.connections.load(Ordering::Acquire),
            "not all have ended"
        );
    }
    shared.gate.give_back_leases().await;
    Ok(())
}

/// Prints where it listens and what to try. Scripts read this: an address a line, then `tollgate ready`.
fn say_hello(options: &Serve, http: &Listener, resp: &Listener) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "http {http}")?;
    writeln!(out, "resp {resp}")?;
    writeln!(out, "tollgate ready")?;
    if options.config.is_none() {
        writeln!(
            out,
            "no configuration was given; the policy \"demo\" allows 5 at once and 10 a minute. Try:"
        )?;
        let (address, page) = (http.to_string(), format!("http://{http}/"));
        let curl = match address.strip_prefix("unix:") {
            Some(path) => format!("curl --unix-socket {path} http://localhost/v1/check"),
            None => format!("curl {page}v1/check"),
        };
        writeln!(out, "  {curl} -d '{{\"policy\":\"demo\",\"key\":\"alice\"}}'")?;
        if let Some(port) = resp.port() {
            writeln!(out, "  redis-cli -p {port} TOLLGATE.CHECK demo alice")?;
            writeln!(out, "  redis-cli -p {port} CL.THROTTLE alice 4 10 60")?;
        }
        if http.port().is_some() {
            writeln!(out, "or open {page} in a browser")?;
        }
    }
    out.flush()?;
    Ok(())
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

/// A connection that is counted while it lives.
pub(crate) struct Counted(Arc<Shared>);

impl Shared {
    /// Room for one more connection, if there is any.
    fn admit_connection(self: &Arc<Self>) -> Option<Counted> {
        let taken = self.connections.fetch_add(1, Ordering::AcqRel);
        let counted = Counted(self.clone());
        let is_room = taken < self.limits().max_connections;
        if !is_room {
            self.gate.metrics.connections_refused.inc();
        }
        is_room.then_some(counted)
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

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Where the configuration is.
pub(crate) type ConfigPath = Option<PathBuf>;
