//! Limits that come with descriptors.
//!
//! Their numbers are the client's choice, so their lifetime is bounded: the store would keep the key for that long. The
//! rules are cached, because most requests bring the same few limits.

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
    let limit = EnvoyLimit { requests_per_unit, unit, unit_multiplier: 1 };
    if Duration::from_secs(unit.seconds()) > longest {
        let longest = DurationText(longest);
        return Err(EnvoyError::Invalid(format!(
            "a limit per {} keeps its count for longer than a limit in a request may ({longest}); configure the limit, or \
             raise `max_time_to_fresh` in `[limits]`",
            unit.name()
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

    const WEEK: Duration = Duration::from_secs(7 * 86_400);

    /// Fault J2.
    #[test]
    fn a_limit_in_a_request_cannot_keep_state_for_longer_than_the_maximum() {
        let of = |unit: i32| rule(RateLimitOverride { requests_per_unit: 5, unit }, WEEK);
        for unit in [Unit::Second, Unit::Minute, Unit::Hour, Unit::Day, Unit::Week] {
            assert_eq!(of(unit as i32).expect("short enough").0.unit, unit);
        }
        for unit in [Unit::Month, Unit::Year] {
            assert!(of(unit as i32).unwrap_err().to_string().contains("max_time_to_fresh"));
        }
    }

    #[test]
    fn an_unknown_unit_is_an_error_and_a_limit_of_zero_denies() {
        let of = |unit: i32| rule(RateLimitOverride { requests_per_unit: 0, unit }, WEEK);
        for unit in [0, 8, -1, i32::MAX] {
            assert!(matches!(of(unit), Err(EnvoyError::Invalid(_))));
        }
        let (_, rule) = of(1).unwrap();
        assert_eq!(*rule.access(tallygate::Tick(0)), Access::Blocked);
    }
}
