//! `tallygate serve`: listens, reloads the configuration, and shuts down on a signal.

mod listen;
mod notify;
mod reload;
mod snapshot;
mod sweep;
#[cfg(test)]
mod worker_time;

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures_util::TryFutureExt as _;
use tallygate::store::Capacity;
use tallygate_redis::{Redis, Stores};
use tokio::sync::{mpsc, watch};

use crate::gate::{Gate, RestoredStores};
use crate::logs::LogFormat;
use crate::options::ServeOptions;
use crate::shared::Shared;
use crate::{descriptors, grpc, http, resp, traces};
use listen::Listener;
use reload::WatchedConfig;
use snapshot::Snapshot;

/// How long shutdown waits for connections to end.
const DRAIN: Duration = Duration::from_secs(10);

/// Runs a server until a signal shuts it down.
pub(crate) fn run(options: &ServeOptions) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let traces = traces::start(options)?;
        let served = serve(options).await;
        traces.flush().await;
        served
    })
}

/// Connects to the store before the first request: connecting to a distant store takes longer than a request may take.
async fn connect_to_store(redis: &Redis) -> Result<(), tallygate_redis::Error> {
    let mut tries = 0;
    loop {
        match redis.agree_on_slots().and_then(|()| redis.ping()).await {
            Err(tallygate_redis::Error::Overloaded { .. }) if tries < 4 => tries += 1,
            reached => return reached,
        }
    }
}

async fn serve(options: &ServeOptions) -> anyhow::Result<()> {
    descriptors::raise();
    // Created before the file is read, so that every later change is noticed.
    let watched = WatchedConfig::new(options);
    let (config, one_time_token) = options.read_config()?;
    for warning in options.warnings(&config) {
        tracing::warn!("{warning}");
    }
    let stores = match tallygate_redis::open(config.store.as_deref().unwrap_or("memory"))? {
        Stores::Memory(_) => Stores::Memory(Capacity::of(options.max_keys())),
        redis @ Stores::Redis(_) => redis,
    };
    if let Some(redis) = stores.redis()
        && let Err(error) = connect_to_store(redis).await
    {
        tracing::warn!(%error, "the store is unavailable; policies decide by on_store_error until it answers");
    }
    let snapshot = Snapshot::of(&config);
    let remembered = match &snapshot {
        Some(snapshot) => snapshot.read(&config, options.max_keys())?,
        None => RestoredStores::default(),
    };
    let (ask_reload, reloads) = mpsc::channel(8);
    let shared = Arc::new(Shared::new(&config, stores, remembered, ask_reload));
    // Handle signals from here on, so that a signal during startup is not lost.
    let mut signals = Signals::new()?;
    let hangup = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
    let (http, resp) = (config.http_address(), config.resp_address());
    let http =
        Listener::bind(http).await.with_context(|| format!("cannot listen for HTTP on {http}"))?;
    let resp =
        Listener::bind(resp).await.with_context(|| format!("cannot listen for RESP on {resp}"))?;
    let grpc = match &config.grpc {
        Some(grpc) => {
            let bound = Listener::bind(grpc).await;
            Some(bound.with_context(|| format!("cannot listen for gRPC on {grpc}"))?)
        }
        None => None,
    };
    shared.is_ready.store(true, Ordering::Release);
    let started = Instant::now();
    log_start(options, &shared, &http, &resp, grpc.as_ref());
    let (token, is_demo) = (one_time_token.as_deref(), config.envoy.is_none());
    print_to_stdout(match options.log_format {
        LogFormat::Text => startup_message(token, is_demo, &http, &resp, grpc.as_ref()),
        LogFormat::Json => startup_json(token, is_demo, &http, &resp, grpc.as_ref()),
    });
    notify::ready();

    let (stop, stopped) = watch::channel(false);
    let (secure_http, secure_resp) = (shared.http.clone(), shared.resp.clone());
    let http =
        http.accept("http", secure_http, shared.clone(), stopped.clone(), http::serve_connection);
    let resp =
        resp.accept("resp", secure_resp, shared.clone(), stopped.clone(), resp::serve_connection);
    let grpc = grpc.map(|grpc| {
        let secure = shared.grpc.clone();
        grpc.accept("grpc", secure, shared.clone(), stopped.clone(), grpc::serve_connection)
    });
    let (http, resp, grpc) = (tokio::spawn(http), tokio::spawn(resp), grpc.map(tokio::spawn));
    let watching = reload::watch(watched, hangup, shared.clone(), reloads);
    tokio::select! {
        () = signals.stop() => {}
        () = watching => {}
        () = notify::stay_watched() => {}
        () = save_periodically(snapshot.as_ref(), &shared.gate) => {}
        () = shared.gate.hot.keep_time() => {}
        () = sweep::keep_sweeping(&shared.gate, config.sweep_interval()) => {}
    }
    tracing::info!("shutting down");
    notify::stopping();
    shared.is_ready.store(false, Ordering::Release);
    // Readiness probes see from here on that the server is not ready.
    stop.send_replace(true);
    let drained = async {
        let _ = http.await;
        let _ = resp.await;
        if let Some(grpc) = grpc {
            let _ = grpc.await;
        }
        while shared.budgets.connections() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    if tokio::time::timeout(DRAIN, drained).await.is_err() {
        tracing::warn!(
            connections = shared.budgets.connections(),
            "shutdown timed out; closing the remaining connections"
        );
    }
    if let Some(snapshot) = &snapshot {
        snapshot.save(&shared.gate).await?;
    }
    shared.gate.give_back_leases().await;
    tracing::info!(uptime_seconds = started.elapsed().as_secs(), "server stopped");
    Ok(())
}

/// Logs what is served where. The address of the store is shown without its password.
fn log_start(
    options: &ServeOptions,
    shared: &Shared,
    http: &Listener,
    resp: &Listener,
    grpc: Option<&Listener>,
) {
    let grpc = grpc.map(ToString::to_string);
    let without_file = match &options.envoy_config {
        Some(_) => "none",
        None => "none; serving the policy \"demo\"",
    };
    let config = options.config.as_deref().map(|path| path.display().to_string());
    let store = shared.gate.stores().redis().map(|redis| redis.address().to_string());
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        store = store.as_deref().unwrap_or("memory"),
        policies = shared.gate.policies().len(),
        %http,
        %resp,
        grpc = grpc.as_deref().unwrap_or("none"),
        config = config.as_deref().unwrap_or(without_file),
        "server started"
    );
}

/// Writes snapshots periodically, if that is configured.
async fn save_periodically(snapshot: Option<&Snapshot>, gate: &Arc<Gate>) {
    match snapshot {
        Some(snapshot) => snapshot.keep_saving(gate).await,
        None => std::future::pending().await,
    }
}

/// Prints to standard output on a separate thread, so that an unread pipe does not block.
fn print_to_stdout(text: String) {
    std::thread::spawn(move || {
        let mut out = std::io::stdout().lock();
        if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            tracing::warn!(%error, "cannot write the listen addresses to standard output");
        }
    });
}

/// Returns the listen addresses, `tallygate ready`, and what to try. Scripts read this: one address per line.
fn startup_message(
    one_time_token: Option<&str>,
    is_demo: bool,
    http: &Listener,
    resp: &Listener,
    grpc: Option<&Listener>,
) -> String {
    let mut out = format!("http {http}\nresp {resp}\n");
    if let Some(grpc) = grpc {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "grpc {grpc}");
    }
    out.push_str("tallygate ready\n");
    if let Some(token) = one_time_token.filter(|_| !is_demo) {
        let _ = writeln!(out, "admin token for this run: {token}");
    } else if let Some(token) = one_time_token {
        out.push_str(
            "no configuration file; serving the policy \"demo\" (10 requests per minute, at most 5 at once). Try:\n",
        );
        let (address, page) = (http.to_string(), format!("http://{http}/"));
        let curl = match address.strip_prefix("unix:") {
            Some(path) => format!("curl --unix-socket {path} http://localhost/v1/check"),
            None => format!("curl {page}v1/check"),
        };
        let _ = writeln!(out, "  {curl} -d '{{\"policy\":\"demo\",\"key\":\"alice\"}}'");
        if let Some(port) = resp.port() {
            let _ = writeln!(out, "  redis-cli -p {port} TG.CHECK demo alice");
            let _ = writeln!(out, "  redis-cli -p {port} CL.THROTTLE alice 4 10 60");
        }
        let _ = writeln!(out, "admin token for this run: {token}");
        if http.port().is_some() {
            let _ = writeln!(out, "or open {page}#token={token} in a browser");
        }
    }
    out
}

/// Returns the same as one JSON object, for programs that expect every line to be one.
fn startup_json(
    one_time_token: Option<&str>,
    is_demo: bool,
    http: &Listener,
    resp: &Listener,
    grpc: Option<&Listener>,
) -> String {
    let mut object = serde_json::json!({
        "status": "ready",
        "http": http.to_string(),
        "resp": resp.to_string(),
    });
    if let Some(grpc) = grpc {
        object["grpc"] = grpc.to_string().into();
    }
    if let Some(token) = one_time_token {
        if is_demo {
            object["policy"] = "demo".into();
        }
        object["admin_token"] = token.into();
    }
    format!("{object}\n")
}

/// The signals that shut the server down.
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
