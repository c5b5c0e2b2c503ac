//! Rules out of what is written.

use tallygate::{Access, Anchor, Kind, LimitBuilder, Penalty, Policy, PolicyError, Tiers};
use tallygate_redis::{Leases, OnFailure};

use super::file::{self, Algorithm, OnStoreError, PolicyTable};
use super::{MAX_NAME_BYTES, PolicyConfig};

/// What a table of the file is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Policy,
    /// One of several limits.
    Limit,
    /// A tier or an override.
    Variant,
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
    check_fields(&table, Part::Policy, &place)?;
    let policy = policy(name, &place, &table, &table.limits)?;
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
        tiers = tiers.tier(tier.as_str(), access_of(name, &place, &table, access)?);
    }
    for (key, access) in &table.overrides {
        let place = format!("{place}, override {key:?}");
        tiers = tiers.overridden(key, access_of(name, &place, &table, access)?);
    }
    let on_failure = match (table.on_store_error, table.instances) {
        (None | Some(OnStoreError::Allow), None) => OnFailure::Allow,
        (Some(OnStoreError::Deny), None) => OnFailure::Deny,
        (Some(OnStoreError::Local), Some(instances @ 1..)) => OnFailure::Local { instances },
        (Some(OnStoreError::Local), _) => {
            return Err(format!(
                "{place}: on_store_error = \"local\" divides the quota; say `instances`, at least 1"
            ));
        }
        (_, Some(_)) => {
            return Err(format!("{place}: `instances` is for on_store_error = \"local\""));
        }
    };
    let cost = table.cost.unwrap_or(1);
    let key = table.key.unwrap_or_default();
    let ipv6_prefix = match table.ipv6_prefix {
        None => DEFAULT_IPV6_PREFIX,
        Some(prefix @ 1..=128) if key == file::KeySource::Address => prefix,
        Some(prefix @ 1..=128) => {
            return Err(format!("{place}: `ipv6_prefix` {prefix} is for key = \"ip\""));
        }
        Some(prefix) => return Err(format!("{place}: ipv6_prefix {prefix} is not from 1 to 128")),
    };
    let deny_cache = table.deny_cache.unwrap_or(true);
    Ok(PolicyConfig { tiers, cost, key, ipv6_prefix, on_failure, leases, deny_cache })
}

/// Checks that every field of a table stands where it belongs.
fn check_fields(table: &PolicyTable, part: Part, place: &str) -> Result<(), String> {
    let (policy, limit, variant) =
        ("a whole policy", "one of several limits", "a tier or an override");
    let fields = [
        ("name", table.name.is_some(), &[Part::Limit][..], limit),
        ("access", table.access.is_some(), &[Part::Variant], variant),
        ("shadow", table.shadow, &[Part::Policy, Part::Limit], "a policy or one of several limits"),
        ("limits", !table.limits.is_empty(), &[Part::Policy, Part::Variant], "a policy or a tier"),
        ("tiers", !table.tiers.is_empty(), &[Part::Policy], policy),
        ("overrides", !table.overrides.is_empty(), &[Part::Policy], policy),
        ("cost", table.cost.is_some(), &[Part::Policy], policy),
        ("key", table.key.is_some(), &[Part::Policy], policy),
        ("ipv6_prefix", table.ipv6_prefix.is_some(), &[Part::Policy], policy),
        ("on_store_error", table.on_store_error.is_some(), &[Part::Policy], policy),
        ("instances", table.instances.is_some(), &[Part::Policy], policy),
        ("lease", table.lease.is_some(), &[Part::Policy], policy),
        ("deny_cache", table.deny_cache.is_some(), &[Part::Policy], policy),
    ];
    match fields.iter().find(|(_, is_given, parts, _)| *is_given && !parts.contains(&part)) {
        Some((name, _, _, owner)) => {
            Err(format!("{place}: `{name}` does not belong here; it is for {owner}"))
        }
        None => Ok(()),
    }
}

/// What a tier or an override says, with the policy's for the rest.
fn access_of(
    name: &str,
    place: &str,
    base: &PolicyTable,
    own: &PolicyTable,
) -> Result<Access, String> {
    check_fields(own, Part::Variant, place)?;
    let says_numbers = own.algorithm.is_some()
        || own.limit.is_some()
        || own.window.is_some()
        || own.burst.is_some()
        || !own.limits.is_empty();
    match own.access {
        Some(_) if says_numbers => {
            Err(format!("{place}: `access` stands alone; leave out the numbers or `access`"))
        }
        Some(file::Access::Unlimited) => Ok(Access::Unlimited),
        Some(file::Access::Blocked) => Ok(Access::Blocked),
        None => {
            let one = PolicyTable {
                algorithm: own.algorithm.or(base.algorithm),
                limit: own.limit.or(base.limit),
                window: own.window.or(base.window),
                // A limit of its own has a burst of its own.
                burst: own.burst.or(base.burst.filter(|_| own.limit.is_none())),
                anchor: own.anchor.or(base.anchor),
                penalty: own.penalty.or(base.penalty),
                shadow: base.shadow,
                ..PolicyTable::default()
            };
            let several = match own.limits.as_slice() {
                // With a number of its own it is one limit; else the policy's list.
                [] if own.limit.is_some() => &[][..],
                [] => base.limits.as_slice(),
                several => several,
            };
            policy(name, place, &one, several).map(Access::from)
        }
    }
}

/// Makes a policy of one limit, or of several that take from `one` what they do not say.
fn policy(
    name: &str,
    place: &str,
    one: &PolicyTable,
    several: &[PolicyTable],
) -> Result<Policy, String> {
    let invalid = |error: PolicyError| format!("{place}: {error}");
    if several.is_empty() {
        if one.limit.is_none() {
            return Err(format!(
                "{place} has no limit; give `limit` and `window`, or `[[policies.{name}.limits]]`"
            ));
        }
        return Policy::all_of(name, [builder(one)]).map_err(invalid);
    }
    if one.limit.is_some() {
        return Err(format!("{place} has `limit` and `limits`; give one or the other"));
    }
    let each = several.iter().map(|limit| {
        check_fields(limit, Part::Limit, place)?;
        let Some(limit_name) = &limit.name else {
            return Err(format!("{place}: one of its limits has no `name`"));
        };
        if limit.limit.is_none() {
            return Err(format!("{place}: limit {limit_name:?} has no `limit`"));
        }
        Ok(builder(&PolicyTable {
            name: Some(limit_name.clone()),
            algorithm: limit.algorithm.or(one.algorithm),
            limit: limit.limit,
            window: limit.window.or(one.window),
            burst: limit.burst,
            anchor: limit.anchor,
            penalty: limit.penalty,
            shadow: limit.shadow || one.shadow,
            ..PolicyTable::default()
        }))
    });
    Policy::all_of(name, each.collect::<Result<Vec<_>, _>>()?).map_err(invalid)
}

fn builder(table: &PolicyTable) -> LimitBuilder {
    let kind = match table.algorithm.unwrap_or(Algorithm::TokenBucket) {
        Algorithm::TokenBucket => Kind::TokenBucket,
        Algorithm::Gcra => Kind::Gcra,
        Algorithm::LeakyBucket => Kind::LeakyBucket,
        Algorithm::FixedWindow => Kind::FixedWindow,
        Algorithm::SlidingWindowLog => Kind::SlidingWindowLog,
        Algorithm::SlidingWindowCounter => Kind::SlidingWindowCounter,
    };
    let mut builder = Policy::of(kind, table.limit.unwrap_or(0));
    if let Some(name) = &table.name {
        builder = builder.named(name.as_str());
    }
    if let Some(file::Window(window)) = table.window {
        builder = builder.per(window.into());
    }
    if let Some(burst) = table.burst {
        builder = builder.burst(burst);
    }
    if matches!(table.anchor, Some(file::Anchor::FirstRequest)) {
        builder = builder.anchor(Anchor::FirstRequest);
    }
    if let Some(file::Penalty { after, lasts }) = table.penalty {
        builder = builder.penalty(Penalty::lasting(lasts.0).after(after));
    }
    if table.shadow { builder.shadow() } else { builder }
}
