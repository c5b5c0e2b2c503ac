//! The configuration of the server: a TOML file. An invalid file is rejected as a whole.
//!
//! `file.rs` has the fields of the file, `limits.rs` the limits per client, `tokens.rs` the tokens, `tls.rs` the
//! certificates. `policies.rs` builds the policies, `envoy.rs` those of Envoy's rate limit service, `memory.rs` computes
//! the upper bound of memory, `regular_file.rs` reads the files, `summary.rs` prints what is in effect and warns about what has no effect, and `mistake.rs`
//! describes an error and its place. A [`Config`] is always valid, and the files that it names have been read.

mod envoy;
mod file;
mod limits;
mod memory;
mod mistake;
mod policies;
mod regular_file;
mod summary;
mod tls;
mod tokens;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tallygate::tiers::Access;
use tallygate::{Cost, Policy, Tiers};
use tallygate_redis::OnFailure;

pub(crate) use envoy::{
    Charge, EnvoyConfig, EnvoyHeaders, EnvoyLimit, EnvoyMode, EnvoyRule, EnvoySettings,
    MAX_ENTRIES, Unit, files as envoy_files, override_key,
};
use file::{DEFAULT_HTTP, DEFAULT_RESP};
pub(crate) use file::{KeySource, check_listen_address};
pub(crate) use limits::{DECODED_HEAD, Limits, SHARE_OF_AN_ADDRESS};
#[cfg(test)]
pub(crate) use memory::SETTLED_BYTES;
pub(crate) use memory::{OPERATOR_BYTES, RuleHistory};
pub(crate) use mistake::{Mistake, in_plain_words};
use regular_file::read_text;
pub(crate) use regular_file::{MAX_CONFIG_BYTES, read as read_file};
pub(crate) use summary::write_summary;
pub(crate) use tls::Tls;
pub use tokens::tokens_of;
pub(crate) use tokens::{AccessDenied, LONGEST_TOKEN, Role, TokenDigest, Tokens};

/// How often idle keys are dropped from memory by default.
const DEFAULT_SWEEP: Duration = Duration::from_secs(60);

/// The name of `CL.THROTTLE` in the store, in metrics, in logs and in the list of hot clients. No policy can have it.
pub(crate) const CL_THROTTLE: &str = "CL.THROTTLE";

/// The longest name of a policy or a tier, in bytes.
pub(crate) const MAX_NAME_BYTES: usize = 128;

/// A valid configuration.
#[derive(Debug, Default)]
pub(crate) struct Config {
    pub(crate) http: Option<String>,
    pub(crate) resp: Option<String>,
    /// Without it, the server does not listen for gRPC.
    pub(crate) grpc: Option<String>,
    pub(crate) store: Option<String>,
    pub(crate) snapshot: Option<PathBuf>,
    pub(crate) snapshot_every: Option<Duration>,
    /// How often idle keys are dropped from memory, as given; zero is never.
    pub(crate) sweep_every: Option<Duration>,
    /// The host names by which browsers may call the server, in lower case.
    pub(crate) names: Vec<String>,
    pub(crate) tokens: Arc<Tokens>,
    /// Whether every connection from loopback may use the admin verbs while no admin token is configured.
    pub(crate) admin_on_loopback: bool,
    pub(crate) tls: Tls,
    pub(crate) trusted_proxies: Vec<IpNet>,
    pub(crate) limits: Limits,
    /// Whether `CL.THROTTLE` is enabled.
    pub(crate) cl_throttle: bool,
    pub(crate) backtest_max_bytes: u64,
    pub(crate) backtest_max_memory: u64,
    /// The rules of Envoy's rate limit service. Their policies are among `policies`.
    pub(crate) envoy: Option<Arc<EnvoyConfig>>,
    /// The settings for Envoy that the file has although there are no rules for Envoy.
    pub(crate) envoy_only: Vec<&'static str>,
    /// The environment variables that contain tokens.
    pub(crate) token_variables: Vec<String>,
    pub(crate) policies: BTreeMap<Arc<str>, PolicyConfig>,
}

/// A policy and its settings for the surfaces.
#[derive(Debug)]
pub(crate) struct PolicyConfig {
    /// The limits of the policy, its tiers and its overrides.
    pub(crate) tiers: Tiers,
    /// The default cost of a request.
    pub(crate) cost: Cost,
    /// Where `authorize` finds the key.
    pub(crate) key: KeySource,
    /// The length of the IPv6 prefix that identifies a client.
    pub(crate) ipv6_prefix: u8,
    /// How many servers share the quota.
    pub(crate) instances: Option<u32>,
    pub(crate) on_failure: OnFailure,
    /// How long leases of the quota last.
    pub(crate) lease: Option<Duration>,
    /// Whether denials of the store are cached.
    pub(crate) deny_cache: bool,
    /// The settings of the table that only Redis uses.
    pub(crate) redis_only: Vec<&'static str>,
    /// Whether all requests have the same key.
    pub(crate) has_one_key: bool,
    /// Whether requests may contain their own limits.
    pub(crate) takes_request_limits: bool,
}

impl Config {
    /// Reads and validates a file, and the files that it names. `envoy` overrides the path of the rules for Envoy.
    pub(crate) fn read(path: &Path, envoy: Option<&Path>) -> anyhow::Result<Self> {
        let name = path.display();
        let text = read_text(path, MAX_CONFIG_BYTES)
            .map_err(|error| anyhow::anyhow!("cannot read {name}: {error}"))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let config = Self::parse_with(&text, folder, envoy);
        config.map_err(|mistake| mistake.in_file(&name.to_string()).into())
    }

    /// Returns the configuration of a server without a file: the rules for Envoy, or the policy `demo`.
    pub(crate) fn without_file(envoy: Option<&Path>) -> anyhow::Result<Self> {
        match envoy {
            Some(path) => Ok(Self::parse_with("", Path::new(""), Some(path))?),
            None => Ok(Self::demo()),
        }
    }

    /// Parses and validates a text. Relative paths in it start at `folder`.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn parse(text: &str, folder: &Path) -> Result<Self, Mistake> {
        Self::parse_with(text, folder, None)
    }

    fn parse_with(text: &str, folder: &Path, envoy: Option<&Path>) -> Result<Self, Mistake> {
        let file: file::File =
            toml::from_str(text).map_err(|error| Mistake::of_toml(text, &error))?;
        file.check(text, folder, envoy)
    }

    /// Returns the other files that a configuration names; none if it is invalid.
    pub(crate) fn files_named(text: &str) -> Vec<PathBuf> {
        toml::from_str(text).map(|file: file::File| file.names()).unwrap_or_default()
    }

    /// Returns the HTTP listen address.
    pub(crate) fn http_address(&self) -> &str {
        self.http.as_deref().unwrap_or(DEFAULT_HTTP)
    }

    /// Returns the RESP listen address.
    pub(crate) fn resp_address(&self) -> &str {
        self.resp.as_deref().unwrap_or(DEFAULT_RESP)
    }

    /// Returns how often idle keys are dropped from memory; `None` is never.
    pub(crate) fn sweep_interval(&self) -> Option<Duration> {
        let every = self.sweep_every.unwrap_or(DEFAULT_SWEEP);
        (!every.is_zero()).then_some(every)
    }

    /// Returns the configuration of a server without a file: the policy `demo`.
    pub(crate) fn demo() -> Self {
        const DEMO: &str = include_str!("demo.toml");
        Self::parse_with(DEMO, Path::new(""), None)
            .unwrap_or_else(|mistake| unreachable!("the demo is a configuration: {mistake}"))
    }
}

/// A policy of a configuration file, or one of its tiers.
#[derive(Clone, Debug)]
pub struct ConfiguredPolicy {
    /// The name of the policy, or `NAME/TIER`.
    pub name: String,
    /// The limits.
    pub policy: Arc<Policy>,
    /// The units that a request charges by default.
    pub cost: Cost,
}

/// Reads a configuration file and returns its policies and their tiers, except unlimited and blocked ones.
///
/// # Errors
/// Returns an error if the file cannot be read or is invalid. The error has the place and the reason.
pub fn configured_policies(path: &Path) -> anyhow::Result<Vec<ConfiguredPolicy>> {
    let config = Config::read(path, None)?;
    let mut policies = Vec::new();
    for (name, settings) in &config.policies {
        let tiers = settings.tiers.by_name().into_iter();
        let tiers = tiers.map(|(tier, access)| (format!("{name}/{tier}"), access));
        let all = std::iter::once((name.to_string(), settings.tiers.base())).chain(tiers);
        policies.extend(all.filter_map(|(name, access)| match access {
            Access::Limited(policy) => Some(ConfiguredPolicy { name, policy, cost: settings.cost }),
            Access::Unlimited | Access::Blocked => None,
        }));
    }
    Ok(policies)
}

/// The settings that only a restart changes, as they are in effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RestartSettings([(&'static str, String); 10]);

impl RestartSettings {
    pub(crate) fn of(config: &Config) -> Self {
        let debug = |value: &dyn std::fmt::Debug| format!("{value:?}");
        Self([
            ("listen.http", debug(&config.http)),
            ("listen.resp", debug(&config.resp)),
            ("listen.grpc", debug(&config.grpc)),
            ("store", debug(&config.store)),
            ("snapshot", debug(&config.snapshot)),
            ("snapshot_every", debug(&config.snapshot_every)),
            ("sweep_every", debug(&config.sweep_interval())),
            ("tls of http", debug(&config.tls.http.is_some())),
            ("tls of resp", debug(&config.tls.resp.is_some())),
            ("tls of grpc", debug(&config.tls.grpc.is_some())),
        ])
    }

    /// Returns the names of the settings that differ.
    pub(crate) fn changed(&self, new: &Self) -> Vec<&'static str> {
        let both = self.0.iter().zip(&new.0);
        both.filter(|(old, new)| old != new).map(|((name, _), _)| *name).collect()
    }
}

#[cfg(test)]
mod tests {
    use tallygate::tiers::Access;
    use tallygate::{Policy, Ticks};
    use tallygate_lab::simulate::{Scenario, report};

    use super::*;

    #[test]
    fn the_demo_is_a_configuration() {
        assert!(Config::demo().policies.contains_key("demo"));
    }

    /// A simulation shows its policies as a configuration.
    #[test]
    fn the_configuration_of_a_simulation_is_valid_and_has_the_same_limit() {
        for window_ms in [1, 999, 1000, 1500, 60_000, 90_000, 3_600_000, 86_400_000] {
            let scenario = Scenario { limit: 7, burst: 9, window_ms, ..Scenario::default() };
            let kinds = scenario.algorithms.clone();
            let report = serde_json::to_value(report(scenario).expect("a report")).unwrap();
            for (place, kind) in kinds.into_iter().enumerate() {
                let toml = report["lanes"][place]["toml"].as_str().expect("a configuration");
                let config = Config::parse(toml, Path::new("")).expect("a configuration");
                let Access::Limited(policy) = config.policies["example"].tiers.base() else {
                    panic!("it limits nothing: {config:?}");
                };
                let written = *policy.limits()[0].numbers();
                // In a simulation, a tick is a nanosecond.
                let meant = Policy::of(kind, 7).per(Ticks(window_ms * 1_000_000));
                let meant = if kind.is_bucket() { meant.burst(9) } else { meant };
                assert_eq!(written, *meant.limit().unwrap().numbers());
            }
        }
    }

    #[track_caller]
    fn says(text: &str, expected: &str) {
        let mistake = Config::parse(text, Path::new("")).map(|_| ()).expect_err("a mistake");
        assert_eq!(mistake.in_file("tallygate.toml").to_string(), expected);
    }

    /// Fault G6.
    #[test]
    fn a_misspelled_field_is_reported_with_its_line_and_the_nearest_name() {
        says(
            "[policies.api]\nlimit = 100\nwindw = \"1m\"\n",
            "tallygate.toml:3:1: unknown field `windw`; did you mean `window`?",
        );
        let api = "[policies.api]\nlimit = 1\nwindow = \"1m\"\n";
        says(
            &format!("{api}trusted_proxies = [\"10.0.0.0/8\"]\n"),
            "tallygate.toml:4:1: `trusted_proxies` belongs at the top of the file, above the first [table]",
        );
        says(
            "[polices.api]\n",
            "tallygate.toml:1:2: unknown field `polices`; did you mean `policies`?",
        );
        says(
            "[policies.api]\nlimit = 1\nwindow = \"1m\"\nlimit = 2\n",
            "tallygate.toml:4:1: `limit` is set twice; remove one of them",
        );
        says(
            "[policies.api]\nalgorithm = \"token_bukcet\"\nlimit = 1\nwindow = \"1m\"\n",
            "tallygate.toml:2:13: unknown value `token_bukcet`; did you mean `token_bucket`?",
        );
    }

    #[test]
    fn a_limit_that_cannot_be_exact_is_rejected_with_its_position() {
        says(
            "[policies.api]\nlimit = 0\nwindow = \"1m\"\n",
            "tallygate.toml:1:1: policy \"api\": limit must be at least 1 (got 0)",
        );
        says(
            "[policies.api]\nlimit = 5\n",
            "tallygate.toml:1:1: policy \"api\" has no window; add one, such as window = \"1m\"",
        );
        says(
            "[policies.api]\nwindow = \"1m\"\n",
            "tallygate.toml:1:1: policy \"api\" has no limit; set `limit` and `window`, or add `[[policies.api.limits]]`",
        );
        says(
            "[policies.api]\nlimit = 1\nwindow = \"soon\"\n",
            "tallygate.toml:3:10: found \"soon\"; expected a duration such as \"500ms\", \"30s\", \"1m\", \"1h\" or \"7d\" (units: ms, s, m, h, d)",
        );
        says(
            "[policies.api]\nlimit = -1\nwindow = \"1m\"\n",
            "tallygate.toml:2:9: found the number `-1`; expected a whole number, 0 or more",
        );
    }

    #[test]
    fn a_value_of_the_wrong_type_is_described_in_plain_words() {
        let policy = "[policies.api]\nlimit = 1\nwindow = ";
        says(
            &format!("{policy}\"1M\"\n"),
            "tallygate.toml:3:10: found \"1M\"; expected a duration such as \"500ms\", \"30s\", \"1m\", \"1h\" or \"7d\" (units: ms, s, m, h, d)",
        );
        says(
            &format!("{policy}60\n"),
            "tallygate.toml:3:10: found the number `60`; expected a duration such as \"500ms\", \"30s\", \"1m\", \"1h\" or \"7d\" (units: ms, s, m, h, d)",
        );
        says(
            "[policies.api]\nlimit = 1.5\n",
            "tallygate.toml:2:9: found the number `1.5`; expected a whole number, 0 or more",
        );
        // A string may be a misplaced secret.
        says(
            "[policies.api]\nlimit = \"secret, expected secret\"\n",
            "tallygate.toml:2:9: found a string; expected a whole number, 0 or more, without quotes",
        );
        says(
            "[policies.api]\nlimit = \"ten\"\n",
            "tallygate.toml:2:9: found a string; expected a whole number, 0 or more, without quotes",
        );
        says(
            "[policies.api]\nlimit = 1\nwindow = \"1m\"\nshadow = 1\n",
            "tallygate.toml:4:10: found the number `1`; expected true or false",
        );
        says(
            "store = memory\n",
            "tallygate.toml:1:9: a value that is not a number, true or false must be in double quotes",
        );
        says("[tls]\n", "tallygate.toml:1:1: missing field `certificate`; add it");
        says(
            "trusted_proxies = 5\n",
            "tallygate.toml:1:19: found the number `5`; expected a list in brackets",
        );
        says(
            "trusted_proxies = [\"10.0.0.0/33\"]\n",
            "tallygate.toml:1:19: found \"10.0.0.0/33\"; the number after the slash must be from 0 to 32 for IPv4, and to 128 for IPv6",
        );
        says(
            "trusted_proxies = [\"10.0.0.1\"]\n",
            "tallygate.toml:1:19: found \"10.0.0.1\", an address; add the size of the network, such as \"10.0.0.1/32\"",
        );
        says(
            "trusted_proxies = [\"proxy\"]\n",
            "tallygate.toml:1:19: found \"proxy\"; expected a network, such as \"10.0.0.0/8\", \"127.0.0.1/32\" or \"fd00::/8\"",
        );
        says(
            "[policies.api]\nlimit = 99999999999999999999\n",
            "tallygate.toml:2:9: found the number `99999999999999999999`; expected a whole number, 0 or more",
        );
        says(
            "[policies.api]\nlimit = 1\nwindow = \"1m\"\n[policies.api.overrides]\nbob = \"pro\"\n",
            "tallygate.toml:5:7: found a string; expected a table, such as { limit = 10 }",
        );
    }

    #[test]
    fn a_field_outside_of_its_table_is_reported_with_the_name_of_the_table() {
        says("http = \"0.0.0.0:80\"\n", "tallygate.toml:1:1: `http` belongs below [listen]");
        says("limit = 5\n", "tallygate.toml:1:1: `limit` belongs below [policies.NAME]");
        says(
            "idle_timeout = \"5m\"\n",
            "tallygate.toml:1:1: `idle_timeout` belongs below [limits]",
        );
        says("max_keys = 5\n", "tallygate.toml:1:1: `max_keys` is a flag; use --max-keys");
    }

    #[test]
    fn a_listen_address_without_a_host_is_rejected_before_the_server_starts() {
        for address in [
            "8080",
            ":8080",
            "localhost",
            "127.0.0.1:port",
            "127.0.0.1:65536",
            "::1:8080",
            "unix:",
            "",
        ] {
            for listener in ["http", "resp"] {
                says(
                    &format!("[listen]\n{listener} = \"{address}\"\n"),
                    &format!(
                        "tallygate.toml:2:8: found \"{address}\"; expected HOST:PORT, such as \"127.0.0.1:8080\" or \"0.0.0.0:8080\", or unix:/path"
                    ),
                );
            }
        }
        for address in ["127.0.0.1:0", "[::1]:8080", "localhost:80", "unix:/run/tallygate.sock"] {
            let text = format!("[listen]\nhttp = \"{address}\"\n");
            assert!(Config::parse(&text, Path::new("")).is_ok(), "{address}");
        }
    }

    #[test]
    fn a_field_in_the_wrong_place_is_rejected() {
        let policy = "[policies.api]\nlimit = 1\nwindow = \"1m\"\n";
        for (more, expected) in [
            (
                "name = \"a\"\n",
                "policy \"api\": `name` is not allowed here; it belongs to one of several limits",
            ),
            (
                "access = \"blocked\"\n",
                "policy \"api\": `access` is not allowed here; it belongs to a tier or an override",
            ),
            (
                "[policies.api.tiers.pro]\ncost = 2\n",
                "policy \"api\", tier \"pro\": `cost` is not allowed here; it belongs to the policy itself",
            ),
            (
                "[policies.api.tiers.pro.tiers.pro]\nlimit = 2\n",
                "policy \"api\", tier \"pro\": `tiers` is not allowed here; it belongs to the policy itself",
            ),
            (
                "[policies.api.overrides.a]\nshadow = true\n",
                "policy \"api\", override \"a\": `shadow` is not allowed here; it belongs to a policy or one of several limits",
            ),
        ] {
            says(&format!("{policy}{more}"), &format!("tallygate.toml:1:1: {expected}"));
        }
        says(
            "[policies.api]\nwindow = \"1m\"\n[[policies.api.limits]]\nlimit = 2\n",
            "tallygate.toml:1:1: policy \"api\": a limit in `limits` needs a name, such as name = \"per_minute\"",
        );
        says(
            "[policies.api]\nwindow = \"1m\"\n[[policies.api.limits]]\nname = \"a\"\nlimit = 2\ndeny_cache = false\n",
            "tallygate.toml:1:1: policy \"api\": `deny_cache` is not allowed here; it belongs to the policy itself",
        );
    }

    #[test]
    fn limits_under_which_no_client_could_be_served_are_rejected() {
        says(
            "[limits]\nmax_connections = 0\n",
            "tallygate.toml:1:1: max_connections must be at least 1 (got 0)",
        );
        says(
            "[limits]\nmax_head_bytes = 100\n",
            "tallygate.toml:1:1: max_head_bytes must be from 8192 to 16777216 (got 100)",
        );
        says(
            "[limits]\nbody_timeout = \"0s\"\n",
            "tallygate.toml:1:1: body_timeout must be longer than \"0s\"; use a duration such as \"10s\"",
        );
        says(
            "[limits]\nidle_timeout = \"36501d\"\n",
            "tallygate.toml:1:1: idle_timeout must be at most \"36500d\" (got \"36501d\")",
        );
        says(
            "[limits]\nmax_hold = \"1d\"\n",
            "tallygate.toml:1:1: max_hold must be at most \"10s\" (got \"1d\")",
        );
        says(
            "[limits]\nmax_buffer_bytes = 1000\n",
            "tallygate.toml:1:1: max_buffer_bytes must be at least 4194304 (got 1000), so that one address can send a body of max_body_bytes (1048576)",
        );
        says(
            "[limits]\nwrite_timeout = \"0s\"\n",
            "tallygate.toml:1:1: write_timeout must be longer than \"0s\"; use a duration such as \"10s\"",
        );
        says(
            "[limits]\nmax_conections = 5\n",
            "tallygate.toml:2:1: unknown field `max_conections`; did you mean `max_connections`?",
        );
    }

    #[test]
    fn a_snapshot_setting_that_saves_nothing_is_rejected() {
        says(
            "snapshot = \"clients\"\nsnapshot_every = \"0s\"\n",
            "tallygate.toml:2:18: snapshot_every must be longer than \"0s\"; use a duration such as \"30s\"",
        );
        says(
            "snapshot_every = \"30s\"\n",
            "tallygate.toml:1:18: `snapshot_every` needs `snapshot`; add snapshot = \"PATH\"",
        );
        says(
            "snapshot = \"clients\"\nstore = \"redis://127.0.0.1\"\n",
            "tallygate.toml:1:12: `snapshot` only works with store = \"memory\" (Redis keeps the keys itself); remove `snapshot` or use the memory store",
        );
    }

    #[test]
    fn a_lease_needs_a_policy_that_can_be_leased() {
        let policy = |more: &str| format!("[policies.api]\nlimit = 1\nwindow = \"1m\"\n{more}\n");
        let config = Config::parse(&policy("lease = \"50ms\"\ndeny_cache = false"), Path::new(""))
            .expect("valid");
        let api = &config.policies["api"];
        assert_eq!((api.lease, api.deny_cache), (Some(Duration::from_millis(50)), false));
        says(
            &policy("lease = \"2m\""),
            "tallygate.toml:1:1: policy \"api\": `lease` must be from \"1ms\" to \"1m\" (got \"2m\")",
        );
        says(
            &policy("lease = \"1s\"\nalgorithm = \"sliding_window_log\""),
            "tallygate.toml:1:1: policy \"api\": `lease` only works for a policy with one bucket or fixed window, without `penalty` or `shadow`",
        );
    }

    #[test]
    fn tiers_and_overrides_inherit_missing_fields() {
        let text = r#"
            [policies.api]
            algorithm = "token_bucket"
            limit = 100
            window = "1m"
            burst = 200
            [policies.api.tiers.pro]
            limit = 1000
            burst = 2000
            [policies.api.overrides."alice"]
            limit = 7
            [policies.api.overrides."mallory"]
            access = "blocked"
        "#;
        let config = Config::parse(text, Path::new("")).expect("a configuration");
        let api = &config.policies["api"];
        let shown = format!("{:?}", api.tiers);
        assert!(shown.contains("limit: 1000") && shown.contains("burst: 2000"), "{shown}");
        let overrides = api.tiers.by_key();
        assert_eq!(overrides.len(), 2);
        assert_eq!(overrides[1].1, Access::Blocked);
        let Access::Limited(alice) = &overrides[0].1 else { panic!("{overrides:?}") };
        let numbers = alice.limits()[0].numbers();
        // A tier with its own limit has its own burst; by default, the limit.
        assert_eq!(
            (numbers.limit, numbers.burst, numbers.window.as_duration().as_secs()),
            (7, 7, 60)
        );
    }
}
