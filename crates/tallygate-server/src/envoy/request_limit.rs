//! Limits that come with descriptors.
//!
//! Their numbers come with the request, so their lifetime is bounded: the store would keep the key for that long. The
//! bound is `max_window` in `[envoy]`. By default, it allows every unit of the protocol, because the configuration of
//! Envoy chooses the numbers, not the client of Envoy. The rules are cached, because most requests contain the same few
//! limits.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tallygate::tiers::{Access, ClientRule};
use tallygate::{Policy, Quota};
use tallygate_lab::duration::DurationText;
use tallygate_lab::limit_syntax::in_durations;

use super::{EnvoyError, RateLimitOverride};
use crate::config::{EnvoyLimit, Unit};

/// How many limits a thread caches.
const CACHED: usize = 1024;

type Rules = HashMap<EnvoyLimit, ClientRule, foldhash::fast::RandomState>;

/// Returns the limit and its rule: a fixed window, as in envoyproxy/ratelimit.
pub(super) fn rule(
    limit: RateLimitOverride,
    longest: Duration,
) -> Result<(EnvoyLimit, ClientRule), EnvoyError> {
    let unit = Unit::of_number(limit.unit).ok_or_else(|| {
        let unit = limit.unit;
        EnvoyError::Invalid(format!(
            "the limit has an unknown unit ({unit}); use SECOND (1), MINUTE (2), HOUR (3), DAY (4), MONTH (5), YEAR (6) or WEEK (7)"
        ))
    })?;
    let requests_per_unit = limit.requests_per_unit;
    let unit_multiplier = limit.unit_multiplier.unwrap_or(1);
    if unit_multiplier == 0 {
        return Err(EnvoyError::Invalid("unit_multiplier must be at least 1 (got 0)".to_owned()));
    }
    let limit = EnvoyLimit { requests_per_unit, unit, unit_multiplier };
    let window = Duration::from_nanos(limit.quota().window.0);
    if window > longest {
        let (window, longest) = (DurationText(window), DurationText(longest));
        return Err(EnvoyError::Invalid(format!(
            "a limit per {window} keeps its count for longer than a limit in a request may ({longest}); configure the \
             limit, or raise `max_window` in `[envoy]`"
        )));
    }
    thread_local! {
        static RULES: RefCell<Rules> = RefCell::default();
    }
    RULES.with_borrow_mut(|rules| {
        if let Some(rule) = rules.get(&limit) {
            return Ok((limit, rule.clone()));
        }
        if rules.len() >= CACHED {
            rules.clear();
        }
        let rule = ClientRule::of(access(limit)?);
        rules.insert(limit, rule.clone());
        Ok((limit, rule))
    })
}

fn access(limit: EnvoyLimit) -> Result<Access, EnvoyError> {
    let Quota { amount, window } = limit.quota();
    if amount == 0 {
        return Ok(Access::Blocked);
    }
    let policy = Policy::fixed_window(amount).per(window).build();
    let policy = policy.map_err(|error| EnvoyError::Invalid(in_durations(&error)))?;
    Ok(Access::Limited(Arc::new(policy)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EnvoySettings;

    const DAY: Duration = Duration::from_secs(86_400);

    /// Fault J2.
    #[test]
    fn a_limit_in_a_request_cannot_keep_state_for_longer_than_the_maximum() {
        let of = |unit: Unit, unit_multiplier, longest| {
            let unit = unit as i32;
            rule(RateLimitOverride { requests_per_unit: 5, unit, unit_multiplier }, longest)
        };
        let (by_default, week) = (EnvoySettings::default().max_window, 7 * DAY);
        for (_, unit) in Unit::ALL {
            assert_eq!(of(unit, None, by_default).expect("short enough").0.unit, unit);
        }
        assert_eq!(of(Unit::Day, Some(366), by_default).expect("366 days").0.unit_multiplier, 366);
        assert_eq!(of(Unit::Day, Some(7), week).expect("a week").0.unit_multiplier, 7);
        for (unit, multiplier, longest) in [
            (Unit::Day, Some(367), by_default),
            (Unit::Year, Some(2), by_default),
            (Unit::Year, Some(u32::MAX), by_default),
            (Unit::Month, None, week),
            (Unit::Year, Some(1), week),
            (Unit::Day, Some(8), week),
        ] {
            let error = of(unit, multiplier, longest).unwrap_err().to_string();
            assert!(error.contains("raise `max_window` in `[envoy]`"), "{error}");
        }
        assert!(matches!(of(Unit::Second, Some(0), week), Err(EnvoyError::Invalid(_))));
    }

    #[test]
    fn an_unknown_unit_is_an_error_and_a_limit_of_zero_denies() {
        let of = |unit: i32| {
            rule(RateLimitOverride { requests_per_unit: 0, unit, unit_multiplier: None }, DAY)
        };
        for unit in [0, 8, -1, i32::MAX] {
            assert!(matches!(of(unit), Err(EnvoyError::Invalid(_))));
        }
        let (_, rule) = of(1).unwrap();
        assert_eq!(*rule.access(tallygate::Tick(0)), Access::Blocked);
    }
}
