//! What a policy accepts, and what it says when it does not.

use tallygate_core::{Algorithm, Anchor, Decision, Kind, Policy, PolicyError, Tick, Ticks};

#[test]
fn errors_say_what_was_given_and_what_would_do() {
    let told = |result: Result<Policy, PolicyError>| result.expect_err("refused").to_string();
    let bucket = || Policy::token_bucket(5).per(Ticks(10));
    assert_eq!(
        told(Policy::token_bucket(5).build()),
        "limit 5 has no window; say per second, per minute or per what"
    );
    assert_eq!(
        told(Policy::fixed_window(5).per_minute().burst(9).build()),
        "burst 9 on a fixed_window of limit 5: a window's burst is its limit; leave burst out or \
         use a bucket"
    );
    assert_eq!(
        told(bucket().anchor(Anchor::FirstRequest).build()),
        "a token_bucket has no anchor; leave it out or use a fixed_window"
    );
    assert_eq!(
        told(bucket().starting_with(6).build()),
        "new keys cannot start with 6; use at most the capacity, 5"
    );
    assert_eq!(
        told(bucket().debt(u64::MAX).build()),
        "debt 18446744073709551615 on top of capacity 5 is more than can be counted exactly; use at \
         most the capacity"
    );
    assert_eq!(
        told(Policy::gcra(1).per(Ticks(1 << 61)).burst(3).build()),
        "a gcra of limit 1 and burst 3 per 2305843009213693952 ticks takes 6917529027641081856 \
         ticks to be fresh again, at most 4611686018427387904 can be counted exactly; use a shorter \
         window, a smaller burst or a greater limit"
    );
    assert_eq!(
        told(Policy::all_of("none", [])),
        "a policy without limits limits nothing; give at least one"
    );
    assert_eq!(
        told(Policy::all_of("twins", [bucket(), bucket()])),
        "two limits are named \"token_bucket\"; give each a name of its own"
    );
    assert_eq!(
        "token-bucket".parse::<Kind>().expect_err("a dash").to_string(),
        "no such algorithm; use one of token_bucket, gcra, leaky_bucket, fixed_window, \
         sliding_window_log, sliding_window_counter"
    );
}

#[test]
fn names_and_numbers_are_as_they_were_given() {
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

/// A window's burst may be said, if it is the limit.
#[test]
fn a_window_takes_its_own_limit_as_its_burst() {
    for kind in Kind::ALL {
        assert!(Policy::of(kind, 5).per(Ticks(10)).burst(5).limit().is_ok(), "{kind}");
    }
}

#[test]
fn debt_is_valid_up_to_the_time_that_can_be_counted() {
    let owing = |debt| Policy::token_bucket(1).per(Ticks(1 << 60)).burst(4).debt(debt).limit();
    assert!(owing(4).is_ok(), "8 · 2⁶⁰ = 2⁶³ ticks");
    assert!(matches!(owing(5), Err(PolicyError::DebtTooLarge { debt: 5, capacity: 4 })));
    let window = |debt| Policy::fixed_window(10).per(Ticks(1)).debt(debt).limit();
    assert!(window(u64::MAX - 10).is_ok());
    assert!(window(u64::MAX - 9).is_err());
}

#[test]
fn a_new_key_starts_as_full_as_asked() {
    for kind in Kind::ALL {
        let limit = Policy::of(kind, 8).per(Ticks(100)).starting_with(3).limit().unwrap();
        let mut state = limit.first(Tick(500));
        let first: Decision = limit.decide(&mut state, Tick(500), 0);
        assert_eq!((first.remaining, first.limit), (3, 8), "{kind}");
        let later: Decision = limit.decide(&mut state, Tick(700), 0);
        assert_eq!(later.remaining, 8, "{kind}: it fills as usual");
        let empty = Policy::of(kind, 8).per(Ticks(100)).starting_with(0).limit().unwrap();
        let mut state = empty.first(Tick(500));
        assert!(!empty.decide::<bool>(&mut state, Tick(500), 1), "{kind}");
    }
}
