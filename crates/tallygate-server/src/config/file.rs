//! The fields of the configuration file. Unknown fields are errors.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use tallygate_lab::duration;
use toml::Spanned;

use super::envoy::{EnvoyConfig, EnvoyTable};
use super::limits::Limits;
use super::mistake::Mistake;
use super::tls::{Tls, TlsTable};
use super::tokens::{AuthTable, Tokens};
use super::{Config, policies};

pub(crate) const DEFAULT_HTTP: &str = "127.0.0.1:8080";
pub(crate) const DEFAULT_RESP: &str = "127.0.0.1:6380";
/// The default size limit of an uploaded log.
const DEFAULT_BACKTEST_BYTES: u64 = 256 * 1024 * 1024;
/// The default memory limit for the clients of a backtest.
const DEFAULT_BACKTEST_MEMORY: u64 = 256 * 1024 * 1024;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    #[serde(default)]
    listen: Listen,
    store: Option<String>,
    snapshot: Option<Spanned<PathBuf>>,
    snapshot_every: Option<Spanned<Window>>,
    sweep_every: Option<Window>,
    auth: Option<Spanned<AuthTable>>,
    tls: Option<Spanned<TlsTable>>,
    #[serde(default)]
    trusted_proxies: Vec<Network>,
    limits: Option<Spanned<Limits>>,
    #[serde(default)]
    admin: Admin,
    #[serde(default)]
    cl_throttle: ClThrottle,
    #[serde(default)]
    backtest: Backtest,
    #[serde(default)]
    envoy: EnvoyTable,
    #[serde(default)]
    policies: BTreeMap<String, Spanned<PolicyTable>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Listen {
    http: Option<ListenAddress>,
    resp: Option<ListenAddress>,
    grpc: Option<ListenAddress>,
    /// The host names by which browsers may call the server, beside addresses and names that are not public.
    #[serde(default)]
    names: Vec<HostName>,
}

/// The address of a listener.
#[derive(Debug)]
struct ListenAddress(String);

impl<'de> Deserialize<'de> for ListenAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = ListenAddress;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(EXPECTED_ADDRESS)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ListenAddress, E> {
                check_listen_address(text).map_err(E::custom)?;
                Ok(ListenAddress(text.to_owned()))
            }
        }

        deserializer.deserialize_str(Text)
    }
}

/// A public host name of the server, in lower case.
#[derive(Debug)]
struct HostName(String);

impl<'de> Deserialize<'de> for HostName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        if !text.is_empty() && text.bytes().all(is_plain) {
            return Ok(Self(text.to_ascii_lowercase()));
        }
        Err(de::Error::custom(format_args!(
            "found {text:?}; expected a host name without scheme, port or path, such as \"gate.example.com\""
        )))
    }
}

/// A network of addresses.
#[derive(Debug)]
struct Network(IpNet);

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(|_| {
            let address = text.split('/').next().and_then(|text| text.parse::<IpAddr>().ok());
            de::Error::custom(match address {
                Some(address) if !text.contains('/') => {
                    let network = IpNet::from(address);
                    format!("found {text:?}, an address; add the size of the network, such as \"{network}\"")
                }
                Some(_) => format!(
                    "found {text:?}; the number after the slash must be from 0 to 32 for IPv4, and to 128 for IPv6"
                ),
                None => format!(
                    "found {text:?}; expected a network, such as \"10.0.0.0/8\", \"127.0.0.1/32\" or \"fd00::/8\""
                ),
            })
        })
    }
}

const EXPECTED_ADDRESS: &str =
    "HOST:PORT, such as \"127.0.0.1:8080\" or \"0.0.0.0:8080\", or unix:/path";

/// Checks that a text is `HOST:PORT` or `unix:/path`, as far as that can be seen without the network.
pub(crate) fn check_listen_address(text: &str) -> Result<(), String> {
    let is_valid = match (text.strip_prefix("unix:"), text.rsplit_once(':')) {
        (Some(path), _) => !path.is_empty(),
        (None, Some((host, port))) => {
            let is_ipv6 = host.starts_with('[') && host.ends_with(']');
            let is_host = !host.is_empty() && (is_ipv6 || !host.contains([':', '*']));
            is_host && port.parse::<u16>().is_ok()
        }
        (None, None) => false,
    };
    if is_valid {
        return Ok(());
    }
    Err(format!("found {text:?}; expected {EXPECTED_ADDRESS}"))
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

/// A policy, one of its limits, a tier or an override. They have most fields in common, and a part inherits missing
/// fields from its policy. `policies.rs` checks that each field is allowed where it is.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "a table, such as { limit = 10 }")]
pub(super) struct PolicyTable {
    /// The name of one of several limits.
    pub(super) name: Option<String>,
    /// The access of a tier or an override that has no limit.
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
    /// How many servers share the quota, each with a share of its own: with the memory store always, with Redis for
    /// `on_store_error = "local"`.
    pub(super) instances: Option<u32>,
    /// How long leases of the quota last. Default: no leases.
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

/// A duration such as `"1m"`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window(pub(super) Duration);

impl<'de> Deserialize<'de> for Window {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = Window;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(duration::EXPECTED)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Window, E> {
                duration::parse(text).map(Window).map_err(E::custom)
            }
        }

        deserializer.deserialize_str(Text)
    }
}

/// Where `authorize` finds the key: `"ip"` or `"header:NAME"`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum KeySource {
    #[default]
    Address,
    Header(Box<str>),
}

impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address => f.write_str("ip"),
            Self::Header(name) => write!(f, "header:{name}"),
        }
    }
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
    /// Returns the other files that the configuration names.
    pub(super) fn names(&self) -> Vec<PathBuf> {
        let tokens = self.auth.iter().flat_map(|auth| auth.get_ref().files());
        let certificates = self.tls.iter().flat_map(|tls| tls.get_ref().files());
        let envoy = self.envoy.config.iter().map(PathBuf::as_path);
        tokens.chain(certificates).chain(envoy).map(Path::to_owned).collect()
    }

    /// Validates the fields and builds the configuration. Relative paths start at `folder`; `envoy` overrides the path of
    /// the rules for Envoy.
    pub(super) fn check(
        self,
        text: &str,
        folder: &Path,
        envoy: Option<&Path>,
    ) -> Result<Config, Mistake> {
        self.check_snapshot(text)?;
        let tokens = match &self.auth {
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
        let path = match (envoy, &self.envoy.config) {
            (Some(path), _) => Some(path.to_owned()),
            (None, Some(path)) => Some(folder.join(path)),
            (None, None) => None,
        };
        let settings = self.envoy.settings();
        let settings = settings.map_err(|(at, reason)| Mistake::at(text, at, reason))?;
        let envoy_only = if path.is_none() { self.envoy.set() } else { Vec::new() };
        let token_variables = self.auth.iter().flat_map(|auth| auth.get_ref().variables());
        let token_variables = token_variables.map(str::to_owned).collect();
        let envoy = path.map(|path| EnvoyConfig::read(&path, settings, &mut all).map(Arc::new));
        Ok(Config {
            http: self.listen.http.map(|ListenAddress(address)| address),
            resp: self.listen.resp.map(|ListenAddress(address)| address),
            grpc: self.listen.grpc.map(|ListenAddress(address)| address),
            envoy: envoy.transpose()?,
            envoy_only,
            token_variables,
            store: self.store,
            snapshot: self.snapshot.map(|path| folder.join(path.into_inner())),
            snapshot_every: self.snapshot_every.map(|every| every.into_inner().0),
            sweep_every: self.sweep_every.map(|Window(every)| every),
            names: self.listen.names.into_iter().map(|HostName(name)| name).collect(),
            tokens: Arc::new(tokens),
            admin_on_loopback: self.admin.loopback,
            tls,
            trusted_proxies: self.trusted_proxies.into_iter().map(|Network(net)| net).collect(),
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
                "`snapshot` only works with store = \"memory\" (Redis keeps the keys itself); remove `snapshot` or use the memory store",
            ),
            (None, Some(every)) => {
                (every.span().start, "`snapshot_every` needs `snapshot`; add snapshot = \"PATH\"")
            }
            (_, Some(every)) if every.get_ref().0.is_zero() => (
                every.span().start,
                "snapshot_every must be longer than \"0s\"; use a duration such as \"30s\"",
            ),
            _ => return Ok(()),
        };
        Err(Mistake::at(text, at, reason.to_owned()))
    }
}
