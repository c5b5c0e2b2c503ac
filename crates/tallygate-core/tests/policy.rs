//! Which policies are valid, and the errors for the others.

use std::time::Duration;

use tallygate_core::{Algorithm, Anchor, Decision, Kind, Policy, PolicyError, Tick, Ticks};

#[test]
fn errors_say_what_was_given_and_what_would_work() {
    let message = |result: Result<Policy, PolicyError>| result.expect_err("not valid").to_string();
    let bucket = || Policy::token_bucket(5).per(Ticks(10));
    assert_eq!(
        message(Policy::token_bucket(5).build()),
        "limit 5 has no window; set one, such as per second or per minute"
    );
    assert_eq!(
        message(Policy::fixed_window(5).per_minute().burst(9).build()),
        "the burst of a fixed_window is its limit, 5 (got 9); leave burst out or use a bucket"
    );
    assert_eq!(
        message(bucket().anchor(Anchor::FirstRequest).build()),
        "a token_bucket has no anchor; leave it out or use a fixed_window"
    );
    assert_eq!(
        message(bucket().starting_with(6).build()),
        "new keys cannot start with 6 units; use at most the capacity, 5"
    );
    assert_eq!(
        message(bucket().debt(u64::MAX).build()),
        "debt 18446744073709551615 on top of capacity 5 is too large to be counted exactly; use at \
         most the capacity"
    );
    assert_eq!(
        message(Policy::gcra(1).per(Ticks(1 << 61)).burst(3).build()),
        "a gcra with limit 1 and burst 3 per 2305843009213693952 ticks takes 6917529027641081856 \
         ticks to restore a full quota, and at most 4611686018427387904 ticks can be counted exactly; \
         use a shorter window, a smaller burst or a larger limit"
    );
    assert_eq!(message(Policy::all_of("none", [])), "a policy needs at least one limit (got none)");
    assert_eq!(
        message(Policy::all_of("twins", [bucket(), bucket()])),
        "two limits have the name \"token_bucket\"; give each limit its own name"
    );
    assert_eq!(
        "token-bucket".parse::<Kind>().expect_err("the name has a dash").to_string(),
        "unknown algorithm; use one of token_bucket, gcra, leaky_bucket, fixed_window, \
         sliding_window_log, sliding_window_counter"
    );
}

#[test]
fn a_policy_keeps_the_names_and_numbers_it_was_built_with() {
    let policy = Policy::leaky_bucket(100).per_minute().burst(20).named("api").build().unwrap();
    let limit = &policy.limits()[0];
    assert_eq!((policy.name(), limit.name()), ("api", "api"));
    let numbers = limit.numbers();
    assert_eq!((numbers.kind, numbers.limit, numbers.burst), (Kind::LeakyBucket, 100, 20));
    assert_eq!(numbers.window, Ticks(60_000_000_000));
    let unit = |builder: tallygate_core::LimitBuilder| builder.limit().unwrap().numbers().window.0;
    assert_eq!(unit(Policy::gcra(1).per_second()), 1_000_000_000);
    assert_eq!(unit(Policy::gcra(1).per_hour()), 3_600_000_000_000);
    assert_eq!(unit(Policy::gcra(1).per_day()), 86_400_000_000_000);
}

/// A window accepts a burst that equals its limit.
#[test]
fn a_policy_is_shown_with_its_windows_in_the_units_of_the_configuration() {
    for (window, shown) in [
        (Duration::from_millis(1500), "1s500ms"),
        (Duration::from_secs(1), "1s"),
        (Duration::from_secs(90), "1m30s"),
        (Duration::from_secs(900), "15m"),
        (Duration::from_secs(5400), "1h30m"),
        (Duration::from_secs(86_400), "1d"),
    ] {
        let policy = Policy::token_bucket(5).per(window).burst(9).build().unwrap();
        assert_eq!(policy.to_string(), format!("token_bucket 5 per {shown} burst 9"));
    }
}

#[test]
fn a_window_accepts_its_limit_as_its_burst() {
    for kind in Kind::ALL {
        assert!(Policy::of(kind, 5).per(Ticks(10)).burst(5).limit().is_ok(), "{kind}");
    }
}

#[test]
fn debt_is_valid_up_to_the_longest_time_that_can_be_counted() {
    let owing = |debt| Policy::token_bucket(1).per(Ticks(1 << 60)).burst(4).debt(debt).limit();
    assert!(owing(4).is_ok(), "8 · 2⁶⁰ = 2⁶³ ticks");
    assert!(matches!(owing(5), Err(PolicyError::DebtTooLarge { debt: 5, capacity: 4 })));
    let window = |debt| Policy::fixed_window(10).per(Ticks(1)).debt(debt).limit();
    assert!(window(u64::MAX - 10).is_ok());
    assert!(window(u64::MAX - 9).is_err());
}

#[test]
fn a_new_key_starts_with_the_configured_units() {
    for kind in Kind::ALL {
        let limit = Policy::of(kind, 8).per(Ticks(100)).starting_with(3).limit().unwrap();
        let mut state = limit.initial(Tick(500));
        let first: Decision = limit.decide(&mut state, Tick(500), 0);
        assert_eq!((first.remaining, first.limit), (3, 8), "{kind}");
        let later: Decision = limit.decide(&mut state, Tick(700), 0);
        assert_eq!(later.remaining, 8, "{kind}: it earns units as usual");
        let empty = Policy::of(kind, 8).per(Ticks(100)).starting_with(0).limit().unwrap();
        let mut state = empty.initial(Tick(500));
        assert!(!empty.decide::<bool>(&mut state, Tick(500), 1), "{kind}");
    }
}
