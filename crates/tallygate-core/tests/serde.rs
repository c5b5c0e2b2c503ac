//! Decisions and policies as JSON.
#![cfg(feature = "serde")]

use proptest::prelude::*;
use serde_json::json;
use tallygate_core::{
    Algorithm, Anchor, Decision, Kind, Limit, Penalty, Policy, Source, Tick, Ticks,
};
use tallygate_testkit::any_limit;

#[test]
fn a_policy_keeps_all_its_options() {
    let policy = Policy::all_of(
        "api",
        [
            Policy::token_bucket(100).per_minute().burst(20).debt(5).starting_with(3).named("fast"),
            Policy::fixed_window(1000).per_hour().anchor(Anchor::FirstRequest).named("slow"),
            Policy::sliding_window_log(5)
                .per_second()
                .penalty(Penalty::lasting(Ticks(900)).after(2))
                .shadow()
                .named("tried"),
        ],
    )
    .unwrap();
    let text = serde_json::to_string(&policy).unwrap();
    assert_eq!(serde_json::from_str::<Policy>(&text).unwrap(), policy);
}

proptest! {
    #[test]
    fn every_limit_survives_a_round_trip(limit in any_limit()) {
        let text = serde_json::to_string(&limit).unwrap();
        prop_assert_eq!(serde_json::from_str::<Limit>(&text).unwrap(), limit);
    }
}

#[test]
fn a_missing_field_has_the_default_of_the_builder() {
    let read: Policy = serde_json::from_value(json!({
        "name": "api",
        "limits": [{ "algorithm": "token_bucket", "limit": 10, "window": 60_000_000_000_u64 }],
    }))
    .unwrap();
    let built = Policy::token_bucket(10).per_minute().build().unwrap().with_name("api");
    assert_eq!(read, built);
}

#[test]
fn an_invalid_policy_cannot_be_read() {
    let read = |limit: serde_json::Value| {
        let policy = json!({ "name": "api", "limits": [limit] });
        serde_json::from_value::<Policy>(policy).unwrap_err().to_string()
    };
    let zero = read(json!({ "algorithm": "gcra", "limit": 1, "window": 1, "burst": 0 }));
    assert!(zero.contains("burst must be at least 1 (got 0)"), "{zero}");
    let unknown = read(json!({ "algorithm": "gcra", "limit": 1, "window": 1, "brust": 5 }));
    assert!(unknown.contains("unknown field `brust`"), "{unknown}");
}

#[test]
fn the_names_of_algorithms_and_sources_are_those_of_replies() {
    for kind in Kind::ALL {
        assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
    }
    for source in [
        Source::Store,
        Source::Lease,
        Source::DenyCache,
        Source::Local,
        Source::FailedOpen,
        Source::FailedClosed,
        Source::Overloaded,
    ] {
        assert_eq!(serde_json::to_value(source).unwrap(), source.name());
    }
}

#[test]
fn a_decision_survives_a_round_trip() {
    let policy = Policy::token_bucket(1).per(Ticks(10)).build().unwrap();
    let mut state = policy.initial(Tick(0));
    for cost in [1, 1, 2] {
        let decision: Decision = policy.decide(&mut state, Tick(0), cost);
        let value = serde_json::to_value(decision).unwrap();
        assert_eq!(value["quota"], json!({ "amount": 1, "window": 10 }));
        assert_eq!(serde_json::from_value::<Decision>(value).unwrap(), decision);
    }
}
