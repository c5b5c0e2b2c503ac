//! Decisions as header fields, in each dialect.
#![cfg(feature = "http")]

use http::HeaderValue;
use tallygate_core::headers::{Dialect, NamedLimits};
use tallygate_core::{Decision, LimitBuilder, Policy, Quota, Source, Ticks};

const DECISION: Decision = Decision {
    allowed: true,
    limit: 100,
    remaining: 99,
    retry_after: Some(Ticks::ZERO),
    reset_after: Ticks(600_000_000),
    delay: Ticks::ZERO,
    scarcest: Some(0),
    denied_by: None,
    shadow_denied_by: None,
    quota: Some(Quota { amount: 100, window: Ticks(60 * Ticks::PER_SECOND) }),
    source: Source::Store,
};

#[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
fn shown<'a>(policy: impl Into<NamedLimits<'a>>, decision: &Decision) -> Vec<(String, String)> {
    let fields = decision.headers(policy, &Dialect::ALL);
    let text = |value: &HeaderValue| value.to_str().expect("the value is text").to_owned();
    fields.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
}

#[track_caller]
#[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
fn has_fields<'a>(
    policy: impl Into<NamedLimits<'a>>,
    decision: &Decision,
    expected: &[(&str, &str)],
) {
    let shown = shown(policy, decision);
    for (name, value) in expected {
        let field = shown.iter().find(|(field, _)| field == name).map(|(_, value)| &**value);
        assert_eq!(field.unwrap_or("none"), *value, "{name} of {decision:?}");
    }
}

fn per_minute() -> LimitBuilder {
    Policy::token_bucket(100).per_minute().named("api")
}

#[test]
fn an_allowed_request_has_the_remaining_units_in_each_dialect() {
    has_fields(
        &per_minute().build().unwrap(),
        &DECISION,
        &[
            ("x-ratelimit-limit", "100"),
            ("x-ratelimit-remaining", "99"),
            ("x-ratelimit-reset", "1"),
            ("ratelimit-policy", "\"api\";q=100;w=60"),
            ("ratelimit", "\"api\";r=99;t=1"),
            ("retry-after", "none"),
        ],
    );
}

/// Fault A11.
#[test]
fn a_denial_never_asks_for_an_immediate_retry() {
    let denied = Decision { allowed: false, remaining: 0, ..DECISION };
    for (wait, seconds) in [(0, "1"), (1, "1"), (1_000_000_000, "1"), (1_000_000_001, "2")] {
        let denied = Decision { retry_after: Some(Ticks(wait)), ..denied };
        let limit = format!("\"api\";r=0;t={seconds}");
        let expected = [("retry-after", seconds), ("ratelimit", &*limit)];
        has_fields(&per_minute().build().unwrap(), &denied, &expected);
    }
    let never = Decision { retry_after: None, ..denied };
    let expected = [("retry-after", "none"), ("ratelimit", "\"api\";r=0")];
    has_fields(&per_minute().build().unwrap(), &never, &expected);
}

#[test]
fn the_window_is_that_of_the_capacity_and_left_out_below_a_second() {
    let bursty = per_minute().burst(200).build().unwrap();
    let decision = Decision { limit: 200, remaining: 150, ..DECISION };
    has_fields(&bursty, &decision, &[("ratelimit-policy", "\"api\";q=200;w=120")]);
    let fast = Policy::token_bucket(1000).per_second().burst(100).named("api").build().unwrap();
    has_fields(&fast, &DECISION, &[("ratelimit-policy", "\"api\";q=100")]);
    let odd = Policy::token_bucket(2).per_second().burst(3).named("api").build().unwrap();
    has_fields(&odd, &DECISION, &[("ratelimit-policy", "\"api\";q=3;w=2")]);
}

#[test]
fn each_of_several_limits_is_named_and_shadows_are_not() {
    let several = Policy::all_of(
        "api",
        [
            Policy::token_bucket(10).per_second().named("second"),
            Policy::fixed_window(1000).per_hour().named("hour"),
            Policy::fixed_window(1).per_hour().named("watching").shadow(),
        ],
    );
    let denied = Decision {
        allowed: false,
        limit: 1000,
        remaining: 0,
        retry_after: Some(Ticks(90 * Ticks::PER_SECOND)),
        denied_by: Some(1),
        ..DECISION
    };
    has_fields(
        &several.unwrap(),
        &denied,
        &[
            ("ratelimit-policy", "\"api/second\";q=10;w=1, \"api/hour\";q=1000;w=3600"),
            ("ratelimit", "\"api/hour\";r=0;t=90"),
        ],
    );
}

#[test]
fn of_two_limits_with_the_same_capacity_the_scarcest_is_named() {
    let several = Policy::all_of(
        "api",
        [
            Policy::fixed_window(100).per_minute().named("minute"),
            Policy::fixed_window(100).per_hour().named("hour"),
        ],
    );
    let decision = Decision { scarcest: Some(1), remaining: 7, ..DECISION };
    has_fields(&several.unwrap(), &decision, &[("ratelimit", "\"api/hour\";r=7;t=1")]);
}

/// Fault H5.
#[test]
fn no_name_breaks_out_of_its_field() {
    let policy = per_minute().build().unwrap();
    let fields = shown(("a\"b\\c;d\r\ne: f\u{e9}", policy.limits()), &DECISION);
    assert_eq!(fields[4].1, "\"a\\\"b\\\\c;d%0D%0Ae: f%C3%A9\";r=99;t=1");
}

#[test]
fn integers_have_at_most_15_digits() {
    let most = Decision { limit: u64::MAX, remaining: u64::MAX, quota: None, ..DECISION };
    let fields = shown("api", &most);
    assert_eq!(fields[0].1, "999999999999999");
    assert_eq!(fields[3].1, "\"api\";q=999999999999999");
    assert_eq!(fields[4].1, "\"api\";r=999999999999999;t=1");
}

#[test]
fn a_name_alone_describes_the_limit_that_decided() {
    let decision = Decision { limit: 200, ..DECISION };
    has_fields("api", &decision, &[("ratelimit-policy", "\"api\";q=200;w=120")]);
    // The capacity is that of limit 1 and the quota that of limit 0, so no window is known.
    let decision = Decision { allowed: false, scarcest: Some(1), denied_by: Some(0), ..decision };
    has_fields("api", &decision, &[("ratelimit-policy", "\"api\";q=200")]);
}

#[test]
fn without_an_answer_of_the_store_only_the_retry_time_is_known() {
    for source in [Source::FailedClosed, Source::Overloaded] {
        let decision = Decision { allowed: false, source, ..DECISION };
        assert_eq!(shown("api", &decision), [("retry-after".to_owned(), "1".to_owned())]);
    }
    assert_eq!(shown("api", &Decision { source: Source::FailedOpen, ..DECISION }), []);
}

#[test]
fn an_unlimited_client_has_no_fields_rather_than_very_large_numbers() {
    let most = Decision { limit: u64::MAX, remaining: u64::MAX, quota: None, ..DECISION };
    let unlimited = Decision { scarcest: None, ..most };
    assert!(unlimited.is_unlimited() && !most.is_unlimited());
    assert_eq!(shown(&per_minute().build().unwrap(), &unlimited), []);
    let blocked =
        Decision { allowed: false, limit: 0, remaining: 0, retry_after: None, ..unlimited };
    assert!(!blocked.is_unlimited());
    has_fields("api", &blocked, &[("x-ratelimit-limit", "0"), ("x-ratelimit-remaining", "0")]);
}

#[test]
fn fields_of_an_earlier_decision_are_replaced() {
    let mut fields = DECISION.headers("api", &[Dialect::X]);
    Decision { remaining: 98, ..DECISION }.write_headers("api", &[Dialect::X], &mut fields);
    assert_eq!(fields.get_all("x-ratelimit-remaining").iter().collect::<Vec<_>>(), ["98"]);
}

#[test]
fn numbers_of_every_length_and_long_names_are_written_in_full() {
    for number in (0..1_100).chain([9_999, 10_000, 999_999, 1_000_000, 1_002_003_004]) {
        let decision = Decision { limit: number, remaining: number, ..DECISION };
        let text = number.to_string();
        has_fields("n", &decision, &[("x-ratelimit-remaining", &text)]);
        has_fields("n", &decision, &[("ratelimit", &format!("\"n\";r={text};t=1"))]);
    }
    let most = Decision { remaining: u64::MAX, ..DECISION };
    has_fields("n", &most, &[("x-ratelimit-remaining", "999999999999999")]);
    for length in 85..100 {
        let name = "n".repeat(length);
        has_fields(&*name, &DECISION, &[("ratelimit", &format!("\"{name}\";r=99;t=1"))]);
    }
}

#[test]
fn values_that_are_known_are_written_as_they_would_be_computed() {
    let several = Policy::all_of(
        "api",
        [
            Policy::token_bucket(10).per_second().burst(5_000).named("second"),
            Policy::fixed_window(1000).per_hour().named("hour"),
        ],
    );
    let only_a_shadow = per_minute().shadow().build().unwrap();
    for policy in [per_minute().build().unwrap(), several.unwrap(), only_a_shadow] {
        let limits = NamedLimits::from(&policy);
        let values = limits.values();
        // The last one is the capacity of no limit.
        for (scarcest, limit) in [(0, 100), (0, 5_000), (1, 1_000), (1, 7_777)] {
            let decision = Decision { limit, scarcest: Some(scarcest), ..DECISION };
            assert_eq!(shown(limits.with_values(&values), &decision), shown(&policy, &decision));
        }
    }
}
