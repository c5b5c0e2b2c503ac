//! `tallygate serve`: listens, keeps the configuration current, and stops when it is told to.

mod listen;
mod notify;
mod reload;
mod snapshot;
#[cfg(test)]
mod worker_time;

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::TryFutureExt as _;
use tallygate::Capacity;
use tallygate_redis::{Redis, Stores};
use tokio::sync::{mpsc, watch};

use crate::config::{Config, DEFAULT_HTTP, DEFAULT_RESP, Tokens};
use crate::gate::{Gate, Remembered};
use crate::options::ServeOptions;
use crate::shared::Shared;
use crate::{descriptors, http, random, resp, traces};
use listen::Listener;
use reload::Watched;
use snapshot::Snapshot;

/// How long connections have to end after the server was told to stop.
const DRAIN: Duration = Duration::from_secs(10);

/// Runs until it is told to stop.
pub(crate) fn run(options: &ServeOptions) -> anyhow::Result<()> {
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

async fn serve(options: &ServeOptions) -> anyhow::Result<()> {
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
    let stores = match tallygate_redis::open(store)? {
        Stores::Memory(_) => Stores::Memory(Capacity::of(options.max_keys)),
        redis @ Stores::Redis(_) => redis,
    };
    if let Some(redis) = stores.redis()
        && let Err(error) = reach(redis).await
    {
        tracing::warn!(%error, "the store does not answer; policies decide by on_store_error until it does");
    }
    let snapshot = Snapshot::asked_for(options, &config, stores.redis().is_none())?;
    let remembered = match &snapshot {
        Some(snapshot) => snapshot.read(&config, options.max_keys)?,
        None => Remembered::default(),
    };
    let (ask_reload, reloads) = mpsc::channel(8);
    let shared = Arc::new(Shared::new(&config, stores, remembered, ask_reload));
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
