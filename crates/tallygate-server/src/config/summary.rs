//! Prints the settings in effect, without secrets, and warns about settings that have no effect.

use std::io::Write;

use tallygate::tiers::Access;
use tallygate_lab::duration::DurationText;
use tallygate_redis::{OnFailure, Redis};

use super::{Config, PolicyConfig};

/// Writes the settings in effect, one per line.
pub(crate) fn write_summary(
    config: &Config,
    max_keys: usize,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    writeln!(out, "http {}", config.http_address())?;
    writeln!(out, "resp {}", config.resp_address())?;
    if let Some(grpc) = &config.grpc {
        writeln!(out, "grpc {grpc}")?;
    }
    writeln!(out, "names {}", list(&config.names))?;
    match config.store.as_deref() {
        None | Some("memory") => writeln!(out, "store memory")?,
        Some(address) => writeln!(out, "store {}", Redis::open(address)?.address())?,
    }
    match (&config.snapshot, config.snapshot_every) {
        (None, _) => writeln!(out, "snapshot none")?,
        (Some(path), None) => writeln!(out, "snapshot {}, written on shutdown", path.display())?,
        (Some(path), Some(every)) => {
            let every = DurationText(every);
            writeln!(out, "snapshot {}, written every {every} and on shutdown", path.display())?;
        }
    }
    if config.store.is_none() {
        writeln!(out, "max_keys {max_keys}")?;
        let every = config.sweep_interval().map(|every| DurationText(every).to_string());
        writeln!(out, "sweep_every {}", every.as_deref().unwrap_or("never"))?;
    }
    writeln!(out, "tls {}", config.tls)?;
    writeln!(out, "auth {}", config.tokens)?;
    if config.admin_on_loopback && !config.tokens.admin_needs_token() {
        writeln!(out, "auth admin is also open to every connection from loopback")?;
    }
    writeln!(out, "trusted_proxies {}", list(&config.trusted_proxies))?;
    writeln!(out, "limits {}", config.limits)?;
    writeln!(
        out,
        "backtest max_bytes {}, max_memory_bytes {}",
        config.backtest_max_bytes, config.backtest_max_memory
    )?;
    writeln!(out, "cl_throttle {}", if config.cl_throttle { "enabled" } else { "disabled" })?;
    if let Some(envoy) = &config.envoy {
        writeln!(out, "envoy {}", envoy.summary())?;
    }
    for (name, policy) in &config.policies {
        writeln!(out, "policy {name}: {}", access(&policy.tiers.base()))?;
        writeln!(out, "policy {name}, settings: {}", settings(policy, config.store.is_some()))?;
        for (tier, given) in policy.tiers.by_name() {
            writeln!(out, "policy {name}, tier {tier}: {}", access(&given))?;
        }
        for (key, given) in policy.tiers.by_key() {
            let key = String::from_utf8_lossy(&key).into_owned();
            writeln!(out, "policy {name}, override {key}: {}", access(&given))?;
        }
    }
    Ok(())
}

/// Returns the settings of a policy that are not limits.
fn settings(policy: &PolicyConfig, is_redis: bool) -> String {
    let mut settings = vec![format!("cost {}", policy.cost), format!("key {}", policy.key)];
    if policy.key == super::KeySource::Address {
        settings.push(format!("ipv6_prefix {}", policy.ipv6_prefix));
    }
    if let Some(instances) = policy.instances {
        let whose = if is_redis { "" } else { " (the limits are the share of this server)" };
        settings.push(format!("instances {instances}{whose}"));
    }
    if is_redis {
        let on_failure = match policy.on_failure {
            OnFailure::Allow => "allow",
            OnFailure::Deny => "deny",
            // The enum may grow; every other setting is local.
            _ => "local",
        };
        settings.push(format!("on_store_error {on_failure}"));
        settings.push(match policy.lease {
            Some(life) => format!("lease {}", DurationText(life)),
            None => "lease none".to_owned(),
        });
        settings.push(format!("deny_cache {}", policy.deny_cache));
    }
    settings.join(", ")
}

/// Returns every number of a tier, with the anchor of windows, penalties and shadows.
fn access(access: &Access) -> String {
    let Access::Limited(policy) = access else { return access.to_string() };
    let limits = policy.limits().iter().map(|limit| {
        let numbers = limit.numbers();
        let window = DurationText(numbers.window.as_duration());
        let name =
            if policy.limits().len() > 1 { format!("{} ", limit.name()) } else { String::new() };
        let mut text = format!("{name}{} {} per {window}", numbers.kind, numbers.limit);
        if numbers.kind.is_bucket() {
            text += &format!(", burst {}", numbers.burst);
        }
        if numbers.kind == tallygate::Kind::FixedWindow {
            text += match numbers.anchor {
                tallygate::policy::Anchor::Clock => ", anchor clock",
                tallygate::policy::Anchor::FirstRequest => ", anchor first_request",
            };
        }
        if let Some(penalty) = limit.penalty() {
            let lasts = DurationText(penalty.duration().as_duration());
            text += &format!(", penalty of {lasts} after {} denials", penalty.denials());
        }
        if limit.is_shadow() {
            text += ", shadow";
        }
        text
    });
    limits.collect::<Vec<_>>().join("; ")
}

fn list(items: &[impl ToString]) -> String {
    match items {
        [] => "none".to_owned(),
        items => items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

impl PolicyConfig {
    /// Returns the limits that can never allow a request of the default cost.
    fn unaffordable(&self, name: &str) -> Option<String> {
        let cost = self.cost;
        let base = [(String::new(), self.tiers.base())].into_iter();
        let tiers = self.tiers.by_name().into_iter();
        let mut all = base.chain(tiers.map(|(tier, access)| (format!(", tier {tier:?}"), access)));
        all.find_map(|(place, access)| {
            let Access::Limited(policy) = access else { return None };
            let limits = policy.limits().iter().filter(|limit| !limit.is_shadow());
            let least = limits.map(|limit| limit.numbers().burst).min()?;
            (cost > least).then(|| {
                format!(
                    "policy {name:?}{place}: cost {cost} is more than the limit can ever allow ({least}), so every request \
                     with this cost is denied; lower `cost` or raise the limit or `burst`"
                )
            })
        })
    }
}

impl Config {
    /// Returns warnings about settings that have no effect, for `check-config` and for the log.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.policies.is_empty() {
            let served =
                if self.cl_throttle { "only CL.THROTTLE can be used" } else { "every check fails" };
            warnings.push(format!("no policies are configured; {served}"));
        }
        if self.store.is_some() && self.sweep_every.is_some() {
            warnings.push(
                "sweep_every has no effect, because Redis expires idle keys itself".to_owned(),
            );
        }
        if self.admin_on_loopback && self.tokens.admin_needs_token() {
            warnings.push(
                "loopback in [admin] has no effect, because an admin token is configured"
                    .to_owned(),
            );
        }
        if !self.envoy_only.is_empty() {
            let settings = self.envoy_only.join(" and ");
            let have = if self.envoy_only.len() == 1 { "has" } else { "have" };
            warnings.push(format!(
                "{settings} in [envoy] {have} no effect, because no rules for Envoy are configured; add config = \"PATH\""
            ));
        }
        warnings.extend(self.envoy.iter().flat_map(|envoy| envoy.warnings.iter().cloned()));
        for (name, policy) in &self.policies {
            warnings.extend(policy.unaffordable(name));
            if self.store.is_none() && !policy.redis_only.is_empty() {
                let settings = policy.redis_only.join(", ");
                let have = if policy.redis_only.len() == 1 { "has" } else { "have" };
                warnings.push(format!(
                    "policy {name:?}: {settings} {have} no effect, because the store is in memory"
                ));
            }
            let is_local = matches!(policy.on_failure, OnFailure::Local { .. });
            if self.store.is_some() && policy.instances.is_some() && !is_local {
                warnings.push(format!(
                    "policy {name:?}: instances has no effect, because Redis holds one quota for all servers; it is for \
                     on_store_error = \"local\" or store = \"memory\""
                ));
            }
        }
        warnings
    }
}
