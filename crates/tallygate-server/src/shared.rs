//! What all connections share: the gate, the settings in force, and the budgets of clients.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use arc_swap::ArcSwap;
use ipnet::IpNet;
use tallygate_redis::Stores;
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::aside::BACKTESTS_AT_A_TIME;
use crate::config::{Config, Denied, Given, Limits, Role, Tls, Tokens};
use crate::connection::Security;
use crate::descriptors;
use crate::gate::{Gate, Remembered};
use crate::holdings::{HeldBytes, HeldConnection, Holder, Holdings, NoRoom};
use crate::metrics::{Metrics, ReasonLabels, SurfaceLabels};
use crate::peer::Peer;

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
    pub(crate) holdings: Arc<Holdings>,
    /// The reserve for replies to operators.
    reserve: Arc<Holdings>,
    pub(crate) http: Security,
    pub(crate) resp: Security,
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

impl Settings {
    pub(crate) fn of(config: &Config) -> Self {
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

impl Shared {
    pub(crate) fn new(
        config: &Config,
        stores: Stores,
        remembered: Remembered,
        reload: AskReload,
    ) -> Self {
        Self {
            gate: Arc::new(Gate::new(config, stores, Metrics::new(), remembered)),
            settings: ArcSwap::from_pointee(Settings::of(config)),
            is_ready: AtomicBool::new(false),
            reload,
            backtests: Arc::new(Semaphore::new(BACKTESTS_AT_A_TIME)),
            holdings: Arc::default(),
            reserve: Arc::default(),
            http: Security::new(config.tls.http.as_ref()),
            resp: Security::new(config.tls.resp.as_ref()),
        }
    }

    /// Room for one more connection, if there is any.
    pub(crate) fn admit_connection(&self, peer: Peer) -> Option<HeldConnection> {
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

    /// Decides whether a client of a surface may act in a role, and counts tokens that are missing or wrong.
    pub(crate) fn admit(
        &self,
        surface: &'static str,
        role: Role,
        token: impl FnOnce() -> Option<Given>,
        is_operator: impl FnOnce() -> bool,
    ) -> Result<(), Denied> {
        let admitted = self.settings.load().tokens.admit(role, token, is_operator);
        if let Err(Denied::NoToken | Denied::CheckToken) = admitted {
            self.gate.metrics.tokens_refused.get_or_create(&SurfaceLabels { surface }).inc();
        }
        admitted
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
    pub(crate) fn renew(&self, tls: &Tls) {
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
