//! The state that all connections share: the gate, the settings in force, and the budgets of clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use ipnet::IpNet;
use tallygate_redis::Stores;
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::background::BACKTESTS_AT_A_TIME;
use crate::client_budgets::{
    BudgetExceeded, BudgetOwner, ClientBudgets, HeldBytes, HeldConnection,
};
use crate::config::{
    AccessDenied, Config, Limits, RestartSettings, Role, Tls, TokenDigest, Tokens,
};
use crate::connection::Security;
use crate::descriptors;
use crate::gate::{Gate, RestoredStores};
use crate::metrics::{Metrics, ReasonLabels, SurfaceLabels};
use crate::peer::Peer;

/// The state that all connections share.
pub(crate) struct Shared {
    pub(crate) gate: Arc<Gate>,
    pub(crate) settings: ArcSwap<Settings>,
    /// The settings that only a restart changes.
    pub(crate) at_start: RestartSettings,
    /// Whether the server accepts requests: from when it listens until it shuts down.
    pub(crate) is_ready: AtomicBool,
    /// Sends reload requests.
    pub(crate) reload: AskReload,
    /// Permits of backtests.
    pub(crate) backtests: Arc<Semaphore>,
    pub(crate) budgets: Arc<ClientBudgets>,
    /// The reserve for replies to operators.
    reserve: Arc<ClientBudgets>,
    pub(crate) http: Security,
    pub(crate) resp: Security,
    pub(crate) grpc: Security,
}

/// The channel of reload requests. Each has a channel for its result.
pub(crate) type AskReload = mpsc::Sender<oneshot::Sender<ReloadResult>>;

/// The changed settings that need a restart, or why the configuration is invalid.
pub(crate) type ReloadResult = Result<Vec<&'static str>, String>;

/// The settings of the surfaces.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    /// Whether the log has a warning about an ignored `X-Forwarded-For`, once per configuration.
    has_warned: AtomicBool,
    pub(crate) tokens: Arc<Tokens>,
    pub(crate) admin_on_loopback: bool,
    /// The host names by which browsers may call the server.
    pub(crate) names: Vec<String>,
    pub(crate) trusted_proxies: Vec<IpNet>,
    pub(crate) limits: Limits,
    /// Maximum size of an uploaded log.
    pub(crate) backtest_max_bytes: u64,
    /// Maximum memory for the clients of a backtest.
    pub(crate) backtest_max_memory: u64,
}

impl Settings {
    pub(crate) fn of(config: &Config) -> Self {
        let max_connections = descriptors::connections(config.limits.max_connections);
        Self {
            has_warned: AtomicBool::new(false),
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

impl Settings {
    /// Logs once that the `X-Forwarded-For` of a peer is ignored, because the peer is not a trusted proxy.
    pub(crate) fn warn_if_ignored(&self, peer: Peer, fields: &hyper::HeaderMap) {
        let Some(address) = peer.address.map(|address| address.to_canonical()) else { return };
        let is_ignored = || {
            fields.contains_key("x-forwarded-for")
                && !self.trusted_proxies.iter().any(|net| net.contains(&address))
        };
        if !self.has_warned.load(Ordering::Relaxed)
            && is_ignored()
            && !self.has_warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                peer = %address,
                "ignoring X-Forwarded-For of a peer that is not in trusted_proxies; limiting the address of the peer itself. If it is your proxy, add it to trusted_proxies (this is logged once)"
            );
        }
    }
}

impl Shared {
    pub(crate) fn new(
        config: &Config,
        stores: Stores,
        remembered: RestoredStores,
        reload: AskReload,
    ) -> Self {
        Self {
            gate: Arc::new(Gate::new(config, stores, Metrics::new(), remembered)),
            settings: ArcSwap::from_pointee(Settings::of(config)),
            at_start: RestartSettings::of(config),
            is_ready: AtomicBool::new(false),
            reload,
            backtests: Arc::new(Semaphore::new(BACKTESTS_AT_A_TIME)),
            budgets: Arc::default(),
            reserve: Arc::default(),
            http: Security::new(config.tls.http.as_ref()),
            resp: Security::new(config.tls.resp.as_ref()),
            grpc: Security::new(config.tls.grpc.as_ref()),
        }
    }

    /// Counts one more connection, if the limits allow it.
    pub(crate) fn accept_connection(&self, peer: Peer) -> Option<HeldConnection> {
        let settings = self.settings.load();
        let reason = match self.budgets.connect(self.holder(peer), &settings.limits) {
            Ok(held) => return Some(held),
            Err(BudgetExceeded::Server) => "server",
            Err(BudgetExceeded::Address) => "address",
        };
        let labels = ReasonLabels { reason };
        self.gate.metrics.connections_rejected.get_or_create(&labels).inc();
        None
    }

    /// Returns the owner of the budget of a connection. It is determined once per connection, so that bytes are
    /// returned to the same budget.
    pub(crate) fn holder(&self, peer: Peer) -> BudgetOwner {
        BudgetOwner::of(peer, &self.settings.load().trusted_proxies)
    }

    /// Counts buffered bytes of a client, if the limits allow it.
    pub(crate) fn hold(
        &self,
        holder: BudgetOwner,
        bytes: usize,
        limits: &Limits,
    ) -> Option<HeldBytes> {
        self.budgets.hold(holder, bytes, limits)
    }

    /// Counts bytes of a reply to an operator in the reserve, if there is room.
    pub(crate) fn hold_of_reserve(&self, holder: BudgetOwner, bytes: usize) -> Option<HeldBytes> {
        self.reserve.hold_of_reserve(holder, bytes)
    }

    /// Decides whether a client has a role, and counts missing and invalid tokens.
    pub(crate) fn authorize(
        &self,
        surface: &'static str,
        role: Role,
        token: impl FnOnce() -> Option<TokenDigest>,
        is_operator: impl FnOnce() -> bool,
    ) -> Result<(), AccessDenied> {
        let result = self.settings.load().tokens.authorize(role, token, is_operator);
        if let Err(AccessDenied::NoToken | AccessDenied::CheckToken) = result {
            self.gate.metrics.tokens_rejected.get_or_create(&SurfaceLabels { surface }).inc();
        }
        result
    }

    /// Returns whether a peer may send admin requests without a token: a process of the same user or of root over a
    /// Unix socket, or, if the configuration allows it, a connection from loopback that is not a trusted proxy.
    pub(crate) fn is_operator(&self, peer: Peer) -> bool {
        let opened = peer.is_loopback() && self.settings.load().admin_on_loopback;
        peer.is_same_user || (opened && !self.is_trusted_proxy(peer))
    }

    /// Returns whether the configuration trusts a peer as a proxy.
    pub(crate) fn is_trusted_proxy(&self, peer: Peer) -> bool {
        peer.address.is_some_and(|address| {
            let address = address.to_canonical();
            self.settings.load().trusted_proxies.iter().any(|net| net.contains(&address))
        })
    }

    /// Replaces the certificates of the listeners that use TLS.
    pub(crate) fn renew(&self, tls: &Tls) {
        self.http.renew(tls.http.as_ref());
        self.resp.renew(tls.resp.as_ref());
        self.grpc.renew(tls.grpc.as_ref());
    }

    /// Returns the limits per client in force.
    pub(crate) fn limits(&self) -> Limits {
        self.settings.load().limits
    }

    /// Reloads the configuration, and returns the result.
    pub(crate) async fn reload(&self) -> ReloadResult {
        let (sender, result) = oneshot::channel();
        let gone = || "the server is shutting down".to_owned();
        self.reload.send(sender).await.map_err(|_| gone())?;
        result.await.map_err(|_| gone())?
    }
}
