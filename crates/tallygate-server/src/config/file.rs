//! The file as it is written: every field it may have, and no other.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use toml::Spanned;

use super::limits::Limits;
use super::mistake::Mistake;
use super::tls::{Tls, TlsTable};
use super::tokens::{AuthTable, Tokens};
use super::{Config, policies};

pub(crate) const DEFAULT_HTTP: &str = "127.0.0.1:8080";
pub(crate) const DEFAULT_RESP: &str = "127.0.0.1:6380";
/// The largest log that can be sent, as it is sent.
const DEFAULT_BACKTEST_BYTES: u64 = 256 * 1024 * 1024;
/// The most memory that the clients of one may take.
const DEFAULT_BACKTEST_MEMORY: u64 = 256 * 1024 * 1024;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    #[serde(default)]
    listen: Listen,
    store: Option<String>,
    snapshot: Option<Spanned<PathBuf>>,
    snapshot_every: Option<Spanned<Window>>,
    auth: Option<Spanned<AuthTable>>,
    tls: Option<Spanned<TlsTable>>,
    #[serde(default)]
    trusted_proxies: Vec<IpNet>,
    limits: Option<Spanned<Limits>>,
    #[serde(default)]
    admin: Admin,
    #[serde(default)]
    cl_throttle: ClThrottle,
    #[serde(default)]
    backtest: Backtest,
    #[serde(default)]
    policies: BTreeMap<String, Spanned<PolicyTable>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Listen {
    http: Option<String>,
    resp: Option<String>,
    /// The host names by which browsers may call the server, beside addresses and names that are not public.
    #[serde(default)]
    names: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Admin {
    /// Whether every connection from loopback may use the admin verbs while no admin token is configured.
    #[serde(default)]
    loopback: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ClThrottle {
    enabled: bool,
}

impl Default for ClThrottle {
    fn default() -> Self {
        Self { enabled: true }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Backtest {
    max_bytes: Option<u64>,
    max_memory_bytes: Option<u64>,
}

/// A policy, one of its limits, one of its tiers or one of its overrides: they have most fields in common, and what the parts do
/// not say is the policy's. `policies.rs` checks that each field stands where it belongs.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct PolicyTable {
    /// The name of one of several limits.
    pub(super) name: Option<String>,
    /// What a tier or an override is instead of a limit.
    pub(super) access: Option<Access>,
    pub(super) algorithm: Option<Algorithm>,
    pub(super) limit: Option<u64>,
    pub(super) window: Option<Window>,
    pub(super) burst: Option<u64>,
    pub(super) anchor: Option<Anchor>,
    pub(super) penalty: Option<Penalty>,
    pub(super) shadow: bool,
    pub(super) limits: Vec<Self>,
    pub(super) tiers: BTreeMap<String, Self>,
    pub(super) overrides: BTreeMap<String, Self>,
    pub(super) cost: Option<u64>,
    pub(super) key: Option<KeySource>,
    /// How many bits of an IPv6 address are one client, for `key = "ip"`.
    pub(super) ipv6_prefix: Option<u8>,
    pub(super) on_store_error: Option<OnStoreError>,
    /// How many servers share the quota, for `on_store_error = "local"`.
    pub(super) instances: Option<u32>,
    /// For how long slices of the quota are taken; none without it.
    pub(super) lease: Option<Window>,
    pub(super) deny_cache: Option<bool>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Access {
    Unlimited,
    Blocked,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Algorithm {
    TokenBucket,
    Gcra,
    LeakyBucket,
    FixedWindow,
    SlidingWindowLog,
    SlidingWindowCounter,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Anchor {
    Clock,
    FirstRequest,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Penalty {
    pub(super) after: u64,
    pub(super) lasts: Window,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum OnStoreError {
    Allow,
    Deny,
    Local,
}

/// A time such as `"1m"`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window(pub(super) Duration);

impl<'de> Deserialize<'de> for Window {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = Window;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a time such as \"30s\", \"1m\" or \"1h\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Window, E> {
                let expected = "expected a time such as \"30s\", \"1m\" or \"1h\"";
                let span = humantime::parse_duration(text);
                span.map(Window).map_err(|_| E::custom(format_args!("found {text:?}; {expected}")))
            }
        }

        deserializer.deserialize_str(Text)
    }
}

/// Where `authorize` finds the client: `"ip"` or `"header:NAME"`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum KeySource {
    #[default]
    Address,
    Header(Box<str>),
}

impl<'de> Deserialize<'de> for KeySource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let error = || {
            let expected = "expected \"ip\" or \"header:NAME\"";
            de::Error::custom(format_args!("found {text:?}; {expected}"))
        };
        match text.split_once(':') {
            None if text == "ip" => Ok(Self::Address),
            Some(("header", name)) => {
                let name = hyper::header::HeaderName::try_from(name).map_err(|_| error())?;
                Ok(Self::Header(name.as_str().into()))
            }
            _ => Err(error()),
        }
    }
}

impl File {
    /// The other files that it names.
    pub(super) fn names(&self) -> Vec<PathBuf> {
        let tokens = self.auth.iter().flat_map(|auth| auth.get_ref().files());
        let certificates = self.tls.iter().flat_map(|tls| tls.get_ref().files());
        tokens.chain(certificates).map(Path::to_owned).collect()
    }

    /// Makes rules of what is written. Files that it names are looked for from a folder.
    pub(super) fn check(self, text: &str, folder: &Path) -> Result<Config, Mistake> {
        self.check_snapshot(text)?;
        let tokens = match self.auth {
            Some(auth) => auth.get_ref().read(folder).map_err(|reason| {
                Mistake::at(text, auth.span().start, format!("auth: {reason}"))
            })?,
            None => Tokens::default(),
        };
        let tls = match self.tls {
            Some(tls) => tls
                .get_ref()
                .read(folder)
                .map_err(|reason| Mistake::at(text, tls.span().start, format!("tls: {reason}")))?,
            None => Tls::default(),
        };
        let limits = match self.limits {
            Some(limits) => {
                let at = limits.span().start;
                limits.into_inner().check().map_err(|reason| Mistake::at(text, at, reason))?
            }
            None => Limits::default(),
        };
        let mut all = BTreeMap::new();
        for (name, table) in self.policies {
            let at = table.span().start;
            let made = policies::make(&name, table.into_inner());
            let policy = made.map_err(|reason| Mistake::at(text, at, reason))?;
            all.insert(Arc::from(name), policy);
        }
        Ok(Config {
            http: self.listen.http,
            resp: self.listen.resp,
            store: self.store,
            snapshot: self.snapshot.map(|path| folder.join(path.into_inner())),
            snapshot_every: self.snapshot_every.map(|every| every.into_inner().0),
            names: self.listen.names.iter().map(|name| name.to_ascii_lowercase()).collect(),
            tokens: Arc::new(tokens),
            admin_on_loopback: self.admin.loopback,
            tls,
            trusted_proxies: self.trusted_proxies,
            limits,
            cl_throttle: self.cl_throttle.enabled,
            backtest_max_bytes: self.backtest.max_bytes.unwrap_or(DEFAULT_BACKTEST_BYTES),
            backtest_max_memory: self.backtest.max_memory_bytes.unwrap_or(DEFAULT_BACKTEST_MEMORY),
            policies: all,
        })
    }

    fn check_snapshot(&self, text: &str) -> Result<(), Mistake> {
        let is_redis = self.store.as_deref().is_some_and(|store| store != "memory");
        let (at, reason) = match (&self.snapshot, &self.snapshot_every) {
            (Some(path), _) if is_redis => (
                path.span().start,
                "a snapshot is for store = \"memory\", and Redis keeps its clients itself; leave out one of the two",
            ),
            (None, Some(every)) => (
                every.span().start,
                "snapshot_every without snapshot saves nothing; say where, as in snapshot = \"PATH\"",
            ),
            (_, Some(every)) if every.get_ref().0.is_zero() => (
                every.span().start,
                "snapshot_every \"0s\" would do nothing else; use a time such as \"30s\"",
            ),
            _ => return Ok(()),
        };
        Err(Mistake::at(text, at, reason.to_owned()))
    }
}
