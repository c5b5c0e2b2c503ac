//! Rules out of what is written.

use std::time::Duration;

use tallygate::{Access, Anchor, Kind, LimitBuilder, Penalty, Policy, PolicyError, Tiers};
use tallygate_redis::{Leases, OnFailure};

use super::file::{self, AccessTable, Algorithm, LimitTable, OnStoreError, PolicyTable};
use super::{MAX_NAME_BYTES, PolicyConfig};

/// One limit as it is written, in a policy, a tier, an override or a list.
#[derive(Clone)]
struct Written {
    name: Option<String>,
    algorithm: Option<Algorithm>,
    limit: Option<u64>,
    window: Option<Duration>,
    burst: Option<u64>,
    anchor: Option<file::Anchor>,
    penalty: Option<file::Penalty>,
    shadow: bool,
}

/// A network of this many bits is what one customer of a provider usually has.
const DEFAULT_IPV6_PREFIX: u8 = 64;

pub(super) fn make(name: &str, table: PolicyTable) -> Result<PolicyConfig, String> {
    let place = format!("policy {name:?}");
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
        return Err(format!(
            "{place}: a name has 1 to {MAX_NAME_BYTES} bytes and no control characters"
        ));
    }
    let base = Written {
        name: None,
        algorithm: table.algorithm,
        limit: table.limit,
        window: table.window.map(|window| window.0),
        burst: table.burst,
        anchor: table.anchor,
        penalty: table.penalty,
        shadow: table.shadow,
    };
    let policy = policy(name, &place, &base, &table.limits)?;
    let leases = match table.lease {
        None => None,
        Some(_) if !Leases::serve(&policy) => {
            return Err(format!(
                "{place}: `lease` is for one bucket or fixed window, without penalty and shadow"
            ));
        }
        Some(life) if !Leases::LIVES.contains(&life.0) => {
            return Err(format!("{place}: a lease lives from \"1ms\" to \"1m\""));
        }
        Some(life) => Some(Leases::default().life(life.0)),
    };
    let mut tiers = Tiers::new(policy);
    for (tier, access) in &table.tiers {
        let place = format!("{place}, tier {tier:?}");
        tiers = tiers.tier(tier.as_str(), access_of(name, &place, &base, &table.limits, access)?);
    }
    for (key, access) in &table.overrides {
        let place = format!("{place}, override {key:?}");
        tiers = tiers.overridden(key, access_of(name, &place, &base, &table.limits, access)?);
    }
    let on_failure = match (table.on_store_error, table.instances) {
        (OnStoreError::Allow, None) => OnFailure::Allow,
        (OnStoreError::Deny, None) => OnFailure::Deny,
        (OnStoreError::Local, Some(instances @ 1..)) => OnFailure::Local { instances },
        (OnStoreError::Local, _) => {
            return Err(format!(
                "{place}: on_store_error = \"local\" divides the quota; say `instances`, at least 1"
            ));
        }
        (_, Some(_)) => {
            return Err(format!("{place}: `instances` is for on_store_error = \"local\""));
        }
    };
    let cost = table.cost.unwrap_or(1);
    let ipv6_prefix = match table.ipv6_prefix {
        None => DEFAULT_IPV6_PREFIX,
        Some(prefix @ 1..=128) if table.key == file::KeySource::Address => prefix,
        Some(prefix @ 1..=128) => {
            return Err(format!("{place}: `ipv6_prefix` {prefix} is for key = \"ip\""));
        }
        Some(prefix) => return Err(format!("{place}: ipv6_prefix {prefix} is not from 1 to 128")),
    };
    let deny_cache = table.deny_cache.unwrap_or(true);
    Ok(PolicyConfig { tiers, cost, key: table.key, ipv6_prefix, on_failure, leases, deny_cache })
}

/// What a tier or an override says, with the policy's for the rest.
fn access_of(
    name: &str,
    place: &str,
    base: &Written,
    limits: &[LimitTable],
    table: &AccessTable,
) -> Result<Access, String> {
    let says_numbers = table.algorithm.is_some()
        || table.limit.is_some()
        || table.window.is_some()
        || table.burst.is_some()
        || !table.limits.is_empty();
    match table.access {
        Some(_) if says_numbers => {
            Err(format!("{place}: `access` stands alone; leave out the numbers or `access`"))
        }
        Some(file::Access::Unlimited) => Ok(Access::Unlimited),
        Some(file::Access::Blocked) => Ok(Access::Blocked),
        None => {
            let written = Written {
                algorithm: table.algorithm.or(base.algorithm),
                limit: table.limit.or(base.limit),
                window: table.window.map(|window| window.0).or(base.window),
                // A limit of its own has a burst of its own.
                burst: table.burst.or(base.burst.filter(|_| table.limit.is_none())),
                anchor: table.anchor.or(base.anchor),
                penalty: table.penalty.or(base.penalty),
                ..base.clone()
            };
            let limits = match table.limits.as_slice() {
                // With a number of its own it is one limit; else the policy's list.
                [] if table.limit.is_some() => &[],
                [] => limits,
                own => own,
            };
            policy(name, place, &written, limits).map(Access::from)
        }
    }
}

fn policy(
    name: &str,
    place: &str,
    one: &Written,
    several: &[LimitTable],
) -> Result<Policy, String> {
    let told = |error: PolicyError| format!("{place}: {error}");
    if several.is_empty() {
        if one.limit.is_none() {
            return Err(format!(
                "{place} has no limit; give `limit` and `window`, or `[[policies.{name}.limits]]`"
            ));
        }
        return Policy::all_of(name, [builder(one)]).map_err(told);
    }
    if one.limit.is_some() {
        return Err(format!("{place} has `limit` and `limits`; give one or the other"));
    }
    let each = several.iter().map(|limit| {
        let written = Written {
            name: Some(limit.name.clone()),
            algorithm: limit.algorithm.or(one.algorithm),
            limit: limit.limit,
            window: limit.window.map(|window| window.0).or(one.window),
            burst: limit.burst,
            anchor: limit.anchor,
            penalty: limit.penalty,
            shadow: limit.shadow || one.shadow,
        };
        match written.limit {
            Some(_) => Ok(builder(&written)),
            None => Err(format!("{place}: limit {:?} has no `limit`", limit.name)),
        }
    });
    Policy::all_of(name, each.collect::<Result<Vec<_>, _>>()?).map_err(told)
}

fn builder(written: &Written) -> LimitBuilder {
    let kind = match written.algorithm.unwrap_or(Algorithm::TokenBucket) {
        Algorithm::TokenBucket => Kind::TokenBucket,
        Algorithm::Gcra => Kind::Gcra,
        Algorithm::LeakyBucket => Kind::LeakyBucket,
        Algorithm::FixedWindow => Kind::FixedWindow,
        Algorithm::SlidingWindowLog => Kind::SlidingWindowLog,
        Algorithm::SlidingWindowCounter => Kind::SlidingWindowCounter,
    };
    let mut builder = Policy::of(kind, written.limit.unwrap_or(0));
    if let Some(name) = &written.name {
        builder = builder.named(name.as_str());
    }
    if let Some(window) = written.window {
        builder = builder.per(window.into());
    }
    if let Some(burst) = written.burst {
        builder = builder.burst(burst);
    }
    if matches!(written.anchor, Some(file::Anchor::FirstRequest)) {
        builder = builder.anchor(Anchor::FirstRequest);
    }
    if let Some(file::Penalty { after, lasts }) = written.penalty {
        builder = builder.penalty(Penalty::lasting(lasts.0).after(after));
    }
    if written.shadow { builder.shadow() } else { builder }
}
