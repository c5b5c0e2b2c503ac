//! Options of the command line, and the configuration that is in effect with them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tallygate::store::Capacity;
use tallygate_lab::names::nearest;

use crate::config::{Config, Tokens, check_listen_address, write_summary};
use crate::logs::{LogFormat, LogLevel};
use crate::random;

/// The beginning of the names of environment variables.
const VARIABLES: &str = "TALLYGATE_";

/// The options for starting a server. These fields override the same fields of the configuration.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The configuration file. Without it, the server has one policy, `demo`.
    pub config: Option<PathBuf>,
    /// The HTTP listen address: `HOST:PORT` or `unix:/path`.
    pub http: Option<String>,
    /// The RESP listen address: `HOST:PORT` or `unix:/path`.
    pub resp: Option<String>,
    /// The gRPC listen address: `HOST:PORT` or `unix:/path`. Without it, the server does not listen for gRPC.
    pub grpc: Option<String>,
    /// The rules of Envoy's rate limit service: a YAML file, or a folder of them.
    pub envoy_config: Option<PathBuf>,
    /// The store: `memory`, or the URL of a Redis server.
    pub store: Option<String>,
    /// The number of this server among the `instances` of a policy, from 1. It decides which servers get the remainder
    /// of a division.
    pub instance: Option<u32>,
    /// Maximum number of keys kept in memory per policy: at least 1. Default: a million.
    pub max_keys: Option<usize>,
    /// The snapshot file of the memory store.
    pub snapshot: Option<PathBuf>,
    /// The interval at which the snapshot is written; without it, only on shutdown.
    pub snapshot_every: Option<Duration>,
    /// The OTLP collector for traces; ignored without the feature `otlp`.
    pub otlp: Option<String>,
    /// The environment variables that the command line understands. A similar name is reported as a warning.
    pub variables: Vec<String>,
    /// Log level.
    pub log: LogLevel,
    /// Format of log lines.
    pub log_format: LogFormat,
}

impl ServeOptions {
    /// Reads the configuration, and applies these options to it. Without a file, the configuration has a new admin token,
    /// which is returned, and the rules for Envoy or the policy `demo`.
    pub(crate) fn read_config(&self) -> anyhow::Result<(Config, Option<String>)> {
        let (mut config, token) = match &self.config {
            Some(path) => (Config::read(path, self.envoy_config.as_deref())?, None),
            None => {
                let token = random::token();
                let tokens = Arc::new(Tokens::with_admin(&token));
                let config = Config::without_file(self.envoy_config.as_deref())?;
                (Config { tokens, ..config }, Some(token))
            }
        };
        for (flag, given, address) in [
            ("--http", &self.http, &mut config.http),
            ("--resp", &self.resp, &mut config.resp),
            ("--grpc", &self.grpc, &mut config.grpc),
        ] {
            if let Some(given) = given {
                check_listen_address(given).map_err(anyhow::Error::msg).context(flag)?;
                *address = Some(given.clone());
            }
        }
        anyhow::ensure!(
            config.grpc.is_none() || config.envoy.is_some(),
            "the gRPC listener serves Envoy's rate limit service, and no rules are configured; use --envoy-config PATH or \
             `[envoy] config`"
        );
        check_listeners(&config)?;
        config.store = self.store.clone().or(config.store).filter(|store| store != "memory");
        if let Some(store) = &config.store {
            if let Some(meant) = nearest(store, ["memory"].into_iter()) {
                anyhow::bail!("the store {store:?} is unknown; did you mean {meant:?}?");
            }
            tallygate_redis::open(store).context("the store must be `memory` or a Redis URL")?;
        }
        anyhow::ensure!(self.max_keys != Some(0), "--max-keys must be at least 1 (got 0)");
        if config.store.is_none() {
            // Without a common store, each server has a share of its own.
            let shared =
                config.policies.iter_mut().filter(|(_, policy)| policy.instances.is_some());
            for (name, policy) in shared {
                policy
                    .take_share(self.instance)
                    .map_err(|reason| anyhow::anyhow!("policy {name:?}: {reason}"))?;
            }
        }
        config.snapshot = self.snapshot.clone().or(config.snapshot);
        config.snapshot_every = self.snapshot_every.or(config.snapshot_every);
        anyhow::ensure!(
            config.snapshot.is_some() || config.snapshot_every.is_none(),
            "--snapshot-every needs --snapshot PATH"
        );
        anyhow::ensure!(
            config.snapshot.is_none() || config.store.is_none(),
            "a snapshot only works with the memory store (Redis keeps the keys itself); remove --snapshot or use --store memory"
        );
        Ok((config, token))
    }

    /// Returns the maximum number of keys kept in memory per policy.
    pub(crate) fn max_keys(&self) -> usize {
        self.max_keys.unwrap_or(Capacity::default().max_keys)
    }

    /// Returns the settings that have no effect, in sentences for `check-config` and for the log.
    pub(crate) fn warnings(&self, config: &Config) -> Vec<String> {
        let mut warnings = config.warnings();
        let is_redis = config.store.is_some();
        if self.max_keys.is_some() && is_redis {
            warnings.push("--max-keys has no effect, because Redis keeps the keys".to_owned());
        }
        let has_shares = config.policies.values().any(|policy| policy.instances.is_some());
        if self.instance.is_some() && (is_redis || !has_shares) {
            warnings.push(format!(
                "--instance has no effect, because {}",
                match is_redis {
                    true => "Redis holds one quota for all servers",
                    false => "no policy sets `instances`",
                }
            ));
        }
        let rest = |name: &str| name.strip_prefix(VARIABLES).unwrap_or_default().to_owned();
        for name in self.variables_set(config).1 {
            let known = self.variables.iter().map(|known| rest(known));
            if let Some(meant) = nearest(&rest(&name), known) {
                warnings.push(format!(
                    "the environment variable {name} has no effect; did you mean {VARIABLES}{meant}?"
                ));
            }
        }
        warnings
    }

    /// Returns the environment variables that are set and begin with `TALLYGATE_`: the known ones, and the others.
    fn variables_set(&self, config: &Config) -> (Vec<String>, Vec<String>) {
        // Kubernetes sets `TALLYGATE_PORT` and others for a service with the name `tallygate`.
        let is_own = |name: &String| {
            let rest = name.strip_prefix(VARIABLES);
            rest.is_some_and(|rest| !rest.starts_with("PORT") && !rest.starts_with("SERVICE_"))
        };
        let all = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        let mut names: Vec<_> = all.filter(is_own).collect();
        names.sort();
        let is_known =
            |name: &String| self.variables.contains(name) || config.token_variables.contains(name);
        names.into_iter().partition(is_known)
    }
}

/// Checks that no two listeners have the same address.
fn check_listeners(config: &Config) -> anyhow::Result<()> {
    let (http, resp) = (("http", config.http_address()), ("resp", config.resp_address()));
    let grpc = config.grpc.as_deref().map(|address| ("grpc", address));
    for ((one, address), other) in [(http, Some(resp)), (http, grpc), (resp, grpc)] {
        let Some((other, _)) = other.filter(|(_, other)| *other == address) else { continue };
        // Each of them gets a free port of its own.
        anyhow::ensure!(
            address.ends_with(":0"),
            "{one} and {other} have the same address, {address}; give each listener its own"
        );
    }
    Ok(())
}

/// Validates a configuration file and prints the settings in effect: those of the file, of the flags and of the
/// environment variables. Prints warnings to standard error.
///
/// # Errors
/// Returns an error if the file cannot be read or is invalid. The error has the place and the reason.
pub fn check_config(options: &ServeOptions) -> anyhow::Result<()> {
    use std::io::Write as _;
    let (config, _) = options.read_config()?;
    let mut out = std::io::stdout().lock();
    write_summary(&config, options.max_keys(), &mut out)?;
    // Only the names: the values may contain passwords.
    let (mut set, _) = options.variables_set(&config);
    set.retain(|name| name != "TALLYGATE_CONFIG");
    let set = if set.is_empty() { "none".to_owned() } else { set.join(", ") };
    writeln!(out, "environment {set}")?;
    for warning in options.warnings(&config) {
        writeln!(std::io::stderr(), "tallygate: warning: {warning}")?;
    }
    Ok(())
}
