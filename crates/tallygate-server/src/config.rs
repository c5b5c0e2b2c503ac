//! What the server is told to do: a TOML file, read whole or not at all.
//!
//! `file.rs` is the file as it is written, `limits.rs` what one client may take, `tokens.rs` who may ask, `tls.rs` the
//! certificates, `policies.rs` makes rules of it, `memory.rs` adds up the most memory that it takes, `mistake.rs` says what is wrong with it and where. Whoever has a
//! [`Config`] has one that works: also the files that it names were read.

mod file;
mod limits;
mod memory;
mod mistake;
mod policies;
mod tls;
mod tokens;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tallygate::{Cost, Tiers};
use tallygate_redis::{Leases, OnFailure, Redis};

pub(crate) use file::{DEFAULT_HTTP, DEFAULT_RESP, KeySource};
pub(crate) use limits::{DECODED_HEAD, Limits, SHARE_OF_AN_ADDRESS};
pub(crate) use memory::OPERATOR_BYTES;
#[cfg(test)]
pub(crate) use memory::SETTLED_BYTES;
pub(crate) use mistake::{Mistake, with_nearest};
pub(crate) use tls::Tls;
pub use tokens::tokens_of;
pub(crate) use tokens::{Denied, Given, Role, Tokens};

/// The longest name of a policy or a tier, in bytes.
pub(crate) const MAX_NAME_BYTES: usize = 128;

/// A configuration that works.
#[derive(Debug, Default)]
pub(crate) struct Config {
    pub(crate) http: Option<String>,
    pub(crate) resp: Option<String>,
    pub(crate) store: Option<String>,
    pub(crate) snapshot: Option<PathBuf>,
    pub(crate) snapshot_every: Option<Duration>,
    /// The host names by which browsers may call the server, in lower case.
    pub(crate) names: Vec<String>,
    pub(crate) tokens: Arc<Tokens>,
    /// Whether every connection from loopback may use the admin verbs while no admin token is configured.
    pub(crate) admin_on_loopback: bool,
    pub(crate) tls: Tls,
    pub(crate) trusted_proxies: Vec<IpNet>,
    pub(crate) limits: Limits,
    /// Whether `CL.THROTTLE` is answered.
    pub(crate) cl_throttle: bool,
    pub(crate) backtest_max_bytes: u64,
    pub(crate) backtest_max_memory: u64,
    pub(crate) policies: BTreeMap<Arc<str>, PolicyConfig>,
}

/// A policy and what the surfaces need to know of it.
#[derive(Debug)]
pub(crate) struct PolicyConfig {
    /// Its rules, with the tiers and what single clients get instead.
    pub(crate) tiers: Tiers,
    /// What a request uses that does not say.
    pub(crate) cost: Cost,
    /// Where `authorize` finds the client.
    pub(crate) key: KeySource,
    /// How many bits of an IPv6 address are one client.
    pub(crate) ipv6_prefix: u8,
    pub(crate) on_failure: OnFailure,
    pub(crate) leases: Option<Leases>,
    /// Whether refusals of the store are remembered.
    pub(crate) deny_cache: bool,
}

impl Config {
    /// Reads a file.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let name = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|error| anyhow::anyhow!("cannot read {name}: {error}"))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        Self::parse(&text, folder).map_err(|mistake| mistake.in_file(&name.to_string()).into())
    }

    /// Reads a text. Files that it names are looked for from a folder.
    pub(crate) fn parse(text: &str, folder: &Path) -> Result<Self, Mistake> {
        let file: file::File =
            toml::from_str(text).map_err(|error| Mistake::of_toml(text, &error))?;
        file.check(text, folder)
    }

    /// The other files that a text names; none if it is no configuration.
    pub(crate) fn files_named(text: &str) -> Vec<PathBuf> {
        toml::from_str(text).map(|file: file::File| file.names()).unwrap_or_default()
    }

    /// What is served without a file: a policy to try things with.
    pub(crate) fn demo() -> Self {
        const DEMO: &str = include_str!("demo.toml");
        Self::parse(DEMO, Path::new(""))
            .unwrap_or_else(|mistake| unreachable!("the demo is a configuration: {mistake}"))
    }
}

/// Validates a configuration file and prints the effective policies.
///
/// # Errors
/// The file cannot be read, or it is no configuration: the error says where and why.
pub fn show(path: &Path) -> anyhow::Result<()> {
    tell(&Config::read(path)?, &mut std::io::stdout().lock())
}

/// What a configuration comes to, for people; nothing of it is secret.
pub(crate) fn tell(config: &Config, out: &mut impl Write) -> anyhow::Result<()> {
    let listener =
        |given: &Option<String>, default: &str| given.clone().unwrap_or(default.to_owned());
    writeln!(out, "http {}", listener(&config.http, DEFAULT_HTTP))?;
    writeln!(out, "resp {}", listener(&config.resp, DEFAULT_RESP))?;
    match config.store.as_deref() {
        None | Some("memory") => writeln!(out, "store memory")?,
        Some(address) => writeln!(out, "store {}", Redis::open(address)?.address())?,
    }
    match (&config.snapshot, config.snapshot_every) {
        (None, _) => writeln!(out, "snapshot none")?,
        (Some(path), None) => writeln!(out, "snapshot {}, at the end", path.display())?,
        (Some(path), Some(every)) => {
            let every = humantime::format_duration(every);
            writeln!(out, "snapshot {}, every {every} and at the end", path.display())?;
        }
    }
    writeln!(out, "tls {}", config.tls)?;
    writeln!(out, "auth {}", config.tokens)?;
    if config.admin_on_loopback && !config.tokens.guard_administration() {
        writeln!(out, "auth admin by every connection from loopback, too")?;
    }
    writeln!(out, "limits {}", config.limits)?;
    for (name, policy) in &config.policies {
        writeln!(out, "policy {name}: {}", policy.tiers.base())?;
        for (tier, access) in policy.tiers.by_name() {
            writeln!(out, "policy {name}, tier {tier}: {access}")?;
        }
        for (key, access) in policy.tiers.by_key() {
            writeln!(out, "policy {name}, override {}: {access}", String::from_utf8_lossy(&key))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tallygate::{Access, Policy, Ticks};
    use tallygate_lab::simulate::{Scenario, report};

    use super::*;

    #[test]
    fn the_demo_is_a_configuration() {
        assert!(Config::demo().policies.contains_key("demo"));
    }

    /// A simulation shows its policies as a configuration.
    #[test]
    fn the_configuration_is_one_and_means_the_same() {
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
                // There a tick is a nanosecond.
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

    #[test]
    fn g6_a_misspelled_field_is_told_with_its_line_and_the_nearest_right_name() {
        says(
            "[policies.api]\nlimit = 100\nwindw = \"1m\"\n",
            "tallygate.toml:3:1: unknown field `windw`; did you mean `window`?",
        );
        says(
            "[polices.api]\n",
            "tallygate.toml:1:2: unknown field `polices`; did you mean `policies`?",
        );
        says(
            "[policies.api]\nlimit = 1\nwindow = \"1m\"\nlimit = 2\n",
            "tallygate.toml:4:1: duplicate key",
        );
        says(
            "[policies.api]\nalgorithm = \"token_bukcet\"\nlimit = 1\nwindow = \"1m\"\n",
            "tallygate.toml:2:13: unknown variant `token_bukcet`; did you mean `token_bucket`?",
        );
    }

    #[test]
    fn what_cannot_be_decided_exactly_is_refused_with_its_place() {
        says(
            "[policies.api]\nlimit = 0\nwindow = \"1m\"\n",
            "tallygate.toml:1:1: policy \"api\": limit 0 admits nothing; use at least 1",
        );
        says(
            "[policies.api]\nlimit = 5\n",
            "tallygate.toml:1:1: policy \"api\": limit 5 has no window; say per second, per minute or per what",
        );
        says(
            "[policies.api]\nwindow = \"1m\"\n",
            "tallygate.toml:1:1: policy \"api\" has no limit; give `limit` and `window`, or `[[policies.api.limits]]`",
        );
        says(
            "[policies.api]\nlimit = 1\nwindow = \"soon\"\n",
            "tallygate.toml:3:10: found \"soon\"; expected a time such as \"30s\", \"1m\" or \"1h\"",
        );
        says(
            "[policies.api]\nlimit = -1\nwindow = \"1m\"\n",
            "tallygate.toml:2:9: invalid value: integer `-1`, expected u64",
        );
    }

    #[test]
    fn a_field_where_it_does_not_belong_is_refused() {
        let policy = "[policies.api]\nlimit = 1\nwindow = \"1m\"\n";
        for (more, expected) in [
            (
                "name = \"a\"\n",
                "policy \"api\": `name` does not belong here; it is for one of several limits",
            ),
            (
                "access = \"blocked\"\n",
                "policy \"api\": `access` does not belong here; it is for a tier or an override",
            ),
            (
                "[policies.api.tiers.pro]\ncost = 2\n",
                "policy \"api\", tier \"pro\": `cost` does not belong here; it is for a whole policy",
            ),
            (
                "[policies.api.tiers.pro.tiers.pro]\nlimit = 2\n",
                "policy \"api\", tier \"pro\": `tiers` does not belong here; it is for a whole policy",
            ),
            (
                "[policies.api.overrides.a]\nshadow = true\n",
                "policy \"api\", override \"a\": `shadow` does not belong here; it is for a policy or one of several limits",
            ),
        ] {
            says(&format!("{policy}{more}"), &format!("tallygate.toml:1:1: {expected}"));
        }
        says(
            "[policies.api]\nwindow = \"1m\"\n[[policies.api.limits]]\nlimit = 2\n",
            "tallygate.toml:1:1: policy \"api\": one of its limits has no `name`",
        );
        says(
            "[policies.api]\nwindow = \"1m\"\n[[policies.api.limits]]\nname = \"a\"\nlimit = 2\ndeny_cache = false\n",
            "tallygate.toml:1:1: policy \"api\": `deny_cache` does not belong here; it is for a whole policy",
        );
    }

    #[test]
    fn limits_that_serve_nobody_are_refused() {
        says(
            "[limits]\nmax_connections = 0\n",
            "tallygate.toml:1:1: max_connections 0 serves nobody; use at least 1",
        );
        says(
            "[limits]\nmax_head_bytes = 100\n",
            "tallygate.toml:1:1: max_head_bytes 100 is not from 8192 to 16777216",
        );
        says(
            "[limits]\nbody_timeout = \"0s\"\n",
            "tallygate.toml:1:1: body_timeout \"0s\" serves nobody; use a time such as \"10s\"",
        );
        says(
            "[limits]\nidle_timeout = \"584542046090y\"\n",
            "tallygate.toml:1:1: idle_timeout is longer than anybody waits; use at most \"100y\"",
        );
        says(
            "[limits]\nmax_held_bytes = 1000\n",
            "tallygate.toml:1:1: max_held_bytes 1000 leaves no address enough for a body of 1048576 bytes; \
             use at least 4194304",
        );
        says(
            "[limits]\nwrite_timeout = \"0s\"\n",
            "tallygate.toml:1:1: write_timeout \"0s\" serves nobody; use a time such as \"10s\"",
        );
        says(
            "[limits]\nmax_conections = 5\n",
            "tallygate.toml:2:1: unknown field `max_conections`; did you mean `max_connections`?",
        );
    }

    #[test]
    fn a_snapshot_that_saves_nothing_is_refused() {
        says(
            "snapshot = \"clients\"\nsnapshot_every = \"0s\"\n",
            "tallygate.toml:2:18: snapshot_every \"0s\" would do nothing else; use a time such as \"30s\"",
        );
        says(
            "snapshot_every = \"30s\"\n",
            "tallygate.toml:1:18: snapshot_every without snapshot saves nothing; say where, as in snapshot = \"PATH\"",
        );
        says(
            "snapshot = \"clients\"\nstore = \"redis://127.0.0.1\"\n",
            "tallygate.toml:1:12: a snapshot is for store = \"memory\", and Redis keeps its clients itself; leave out one of the two",
        );
    }

    #[test]
    fn leases_are_of_what_can_be_leased() {
        let policy = |more: &str| format!("[policies.api]\nlimit = 1\nwindow = \"1m\"\n{more}\n");
        let config = Config::parse(&policy("lease = \"50ms\"\ndeny_cache = false"), Path::new(""))
            .expect("valid");
        let api = &config.policies["api"];
        let leases = Leases::default().life(Duration::from_millis(50));
        assert_eq!((api.leases, api.deny_cache), (Some(leases), false));
        says(
            &policy("lease = \"2m\""),
            "tallygate.toml:1:1: policy \"api\": a lease lives from \"1ms\" to \"1m\"",
        );
        says(
            &policy("lease = \"1s\"\nalgorithm = \"sliding_window_log\""),
            "tallygate.toml:1:1: policy \"api\": `lease` is for one bucket or fixed window, without penalty and shadow",
        );
    }

    #[test]
    fn tiers_and_overrides_take_over_what_they_do_not_say() {
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
        // A limit of its own has a burst of its own, unless it says otherwise.
        assert_eq!(
            (numbers.limit, numbers.burst, numbers.window.as_duration().as_secs()),
            (7, 7, 60)
        );
    }
}
