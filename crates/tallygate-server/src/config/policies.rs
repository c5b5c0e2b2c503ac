//! Builds policies from the tables of the file.

use tallygate::policy::{Anchor, Instance, LimitBuilder, Penalty};
use tallygate::tiers::Access;
use tallygate::{Kind, Policy, PolicyError, Tiers};
use tallygate_lab::duration::DurationText;
use tallygate_lab::limit_syntax::in_durations;
use tallygate_redis::{Leases, OnFailure};

use super::file::{self, Algorithm, OnStoreError, PolicyTable};
use super::{CL_THROTTLE, MAX_NAME_BYTES, PolicyConfig};

/// The kind of a table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Policy,
    /// One of several limits.
    Limit,
    /// A tier or an override.
    Variant,
}

/// The prefix that a provider usually assigns to one customer.
const DEFAULT_IPV6_PREFIX: u8 = 64;

pub(super) fn make(name: &str, table: PolicyTable) -> Result<PolicyConfig, String> {
    let place = format!("policy {name:?}");
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
        return Err(format!(
            "{place}: a name must have 1 to {MAX_NAME_BYTES} bytes and no control characters"
        ));
    }
    if name == CL_THROTTLE {
        return Err(format!(
            "{place}: this is the name of the command in metrics and in the store; choose another name"
        ));
    }
    check_fields(&table, Part::Policy, &place)?;
    let policy = policy(name, &place, &table, &table.limits)?;
    let lease = match table.lease {
        None => None,
        Some(_) if !Leases::serve(&policy) => {
            return Err(format!(
                "{place}: `lease` only works for a policy with one bucket or fixed window, without `penalty` or `shadow`"
            ));
        }
        Some(life) if !Leases::LIVES.contains(&life.0) => {
            let life = DurationText(life.0);
            return Err(format!(
                "{place}: `lease` must be from \"1ms\" to \"1m\" (got \"{life}\")"
            ));
        }
        Some(life) => Some(life.0),
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
        (_, Some(0)) => return Err(format!("{place}: instances must be at least 1 (got 0)")),
        (None | Some(OnStoreError::Allow), _) => OnFailure::Allow,
        (Some(OnStoreError::Deny), _) => OnFailure::Deny,
        (Some(OnStoreError::Local), Some(instances)) => OnFailure::Local { instances },
        (Some(OnStoreError::Local), None) => {
            return Err(format!(
                "{place}: on_store_error = \"local\" divides the quota between servers; set `instances` to their number (at least 1)"
            ));
        }
    };
    let redis_only = [
        ("on_store_error", table.on_store_error.is_some()),
        ("lease", table.lease.is_some()),
        ("deny_cache", table.deny_cache.is_some()),
    ];
    let redis_only = redis_only.into_iter().filter(|(_, is_given)| *is_given);
    let redis_only = redis_only.map(|(name, _)| name).collect();
    let cost = table.cost.unwrap_or(1);
    let key = table.key.unwrap_or_default();
    let ipv6_prefix = match table.ipv6_prefix {
        None => DEFAULT_IPV6_PREFIX,
        Some(prefix @ 1..=128) if key == file::KeySource::Address => prefix,
        Some(1..=128) => {
            return Err(format!("{place}: `ipv6_prefix` only works with key = \"ip\""));
        }
        Some(prefix) => {
            return Err(format!("{place}: ipv6_prefix must be from 1 to 128 (got {prefix})"));
        }
    };
    let deny_cache = table.deny_cache.unwrap_or(true);
    let instances = table.instances;
    Ok(PolicyConfig {
        tiers,
        cost,
        key,
        ipv6_prefix,
        instances,
        on_failure,
        lease,
        deny_cache,
        redis_only,
        has_one_key: false,
        takes_request_limits: false,
    })
}

impl PolicyConfig {
    /// Replaces the limits by the share of one of several servers that have no common store. Without a number, takes
    /// the smallest share, so that the servers together never allow more than the policy.
    pub(crate) fn take_share(&mut self, number: Option<u32>) -> Result<(), String> {
        let count = self.instances.unwrap_or(1);
        let instance = match number {
            None => Instance { index: count - 1, count },
            Some(number @ 1..) if number <= count => Instance { index: number - 1, count },
            Some(number) => {
                return Err(format!("instance must be from 1 to {count} (got {number})"));
            }
        };
        let share = |access: &Access| match access {
            Access::Limited(policy) => {
                policy.share(instance).map(Access::from).map_err(|error| in_durations(&error))
            }
            other => Ok(other.clone()),
        };
        let mut tiers = Tiers::new(share(&self.tiers.base())?);
        for (name, access) in self.tiers.by_name() {
            tiers = tiers.tier(name, share(&access)?);
        }
        for (key, access) in self.tiers.by_key() {
            tiers = tiers.overridden(key, share(&access)?);
        }
        self.tiers = tiers;
        Ok(())
    }
}

/// Checks that every field of a table is allowed in it.
fn check_fields(table: &PolicyTable, part: Part, place: &str) -> Result<(), String> {
    let (policy, limit, variant) =
        ("the policy itself", "one of several limits", "a tier or an override");
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
            Err(format!("{place}: `{name}` is not allowed here; it belongs to {owner}"))
        }
        None => Ok(()),
    }
}

/// Returns the access of a tier or an override. Missing fields are inherited from the policy.
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
            Err(format!("{place}: `access` cannot be combined with a limit; remove one of them"))
        }
        Some(file::Access::Unlimited) => Ok(Access::Unlimited),
        Some(file::Access::Blocked) => Ok(Access::Blocked),
        None => {
            let one = PolicyTable {
                algorithm: own.algorithm.or(base.algorithm),
                limit: own.limit.or(base.limit),
                window: own.window.or(base.window),
                // A tier with its own limit does not inherit the burst.
                burst: own.burst.or(base.burst.filter(|_| own.limit.is_none())),
                anchor: own.anchor.or(base.anchor),
                penalty: own.penalty.or(base.penalty),
                shadow: base.shadow,
                ..PolicyTable::default()
            };
            let several = match own.limits.as_slice() {
                // A tier with its own limit replaces the list of limits.
                [] if own.limit.is_some() => &[][..],
                [] => base.limits.as_slice(),
                several => several,
            };
            policy(name, place, &one, several).map(Access::from)
        }
    }
}

/// Builds a policy of one limit, or of several limits that inherit missing fields from `one`.
fn policy(
    name: &str,
    place: &str,
    one: &PolicyTable,
    several: &[PolicyTable],
) -> Result<Policy, String> {
    let invalid = |error: PolicyError| format!("{place}: {}", in_durations(&error));
    if several.is_empty() {
        if one.limit.is_none() {
            return Err(format!(
                "{place} has no limit; set `limit` and `window`, or add `[[policies.{name}.limits]]`"
            ));
        }
        if one.window.is_none() {
            return Err(format!("{place} has no window; add one, such as window = \"1m\""));
        }
        return Policy::all_of(name, [builder(one)]).map_err(invalid);
    }
    if one.limit.is_some() {
        return Err(format!("{place} has both `limit` and `limits`; use one of them"));
    }
    let each = several.iter().map(|limit| {
        check_fields(limit, Part::Limit, place)?;
        let Some(limit_name) = &limit.name else {
            return Err(format!(
                "{place}: a limit in `limits` needs a name, such as name = \"per_minute\""
            ));
        };
        if limit.limit.is_none() {
            return Err(format!(
                "{place}: limit {limit_name:?} has no number; add one, such as limit = 100"
            ));
        }
        if limit.window.or(one.window).is_none() {
            return Err(format!(
                "{place}: limit {limit_name:?} has no window; add one, such as window = \"1m\""
            ));
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
        builder = builder.per(window);
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
