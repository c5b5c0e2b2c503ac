//! Verdicts without a server: shadows, events, failing stores, keys that are too long.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Request;
use http::request::Parts;
use tallygate::store::{Capacity, PolicyStore, WhenFull};
use tallygate::{Ask, InFlight, Policy, RateLimiter};
use tallygate_tower::{Key, OnStoreError, RateLimit, Reason, Rule};
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, SubscriberExt as _};

fn per_hour(limit: u64) -> Policy {
    Policy::fixed_window(limit).per_hour().named("api").build().unwrap()
}

fn request() -> Parts {
    Request::get("/").header("x-client", "a").body(()).unwrap().into_parts().0
}

/// Collects events as text.
#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Events {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{}={value:?} ", field.name());
            }
        }
        let mut text = Text(format!("{} ", event.metadata().level()));
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
}

/// Returns the events that a function logs.
fn events(run: impl Future<Output = ()>) -> Vec<String> {
    let events = Events::default();
    let subscriber = tracing_subscriber::registry().with(events.clone());
    tracing::subscriber::with_default(subscriber, || tallygate::block_on(run));
    std::mem::take(&mut *events.0.lock().unwrap())
}

#[test]
fn a_denial_is_one_event_with_policy_limit_and_source() {
    let limit = RateLimit::new(per_hour(1), Key::everyone());
    let seen = events(async {
        assert!(limit.check(&request()).await.is_allowed());
        assert!(!limit.check(&request()).await.is_allowed());
    });
    assert_eq!(seen.len(), 1, "{seen:?}");
    for part in [
        "INFO",
        "request denied",
        "policy=\"api\"",
        "limit=\"api\"",
        "source=\"store\"",
        "shadow=false",
    ] {
        assert!(seen[0].contains(part), "{part} in {seen:?}");
    }
}

#[test]
fn a_denial_by_the_bound_of_delays_or_of_places_is_one_event_too() {
    let policy = Policy::leaky_bucket(1).per_hour().burst(9).named("even").build().unwrap();
    let delaying = RateLimit::new(policy, Key::everyone()).delay_up_to(Duration::from_secs(1));
    let crowded = RateLimit::all_of([]).in_flight(InFlight::new(1), Key::everyone());
    let seen = events(async {
        for limit in [delaying, crowded] {
            let first = limit.check(&request()).await;
            assert!(first.is_allowed());
            assert!(!limit.check(&request()).await.is_allowed());
        }
    });
    assert_eq!(seen.len(), 2, "{seen:?}");
    for part in ["INFO", "request denied", "policy=\"even\"", "limit=\"even\"", "source=\"store\""]
    {
        assert!(seen[0].contains(part), "{part} in {seen:?}");
    }
    assert!(seen[1].starts_with("INFO") && seen[1].contains("policy=\"in flight\""), "{seen:?}");
}

#[test]
fn a_key_that_is_missing_or_too_long_is_one_event_and_an_error_if_the_application_caused_it() {
    let seen = events(async {
        let by_header = Key::header(http::HeaderName::from_static("x-api-key"));
        assert!(!RateLimit::new(per_hour(1), by_header).check(&request()).await.is_allowed());
        assert!(!RateLimit::new(per_hour(1), Key::peer()).check(&request()).await.is_allowed());
        let too_long = Key::from_fn(|_| Some("k".repeat(5000)));
        assert!(!RateLimit::new(per_hour(1), too_long).check(&request()).await.is_allowed());
    });
    assert_eq!(seen.len(), 3, "{seen:?}");
    assert!(seen[0].starts_with("INFO") && seen[0].contains("missing header field x-api-key"));
    assert!(seen[1].starts_with("ERROR") && seen[1].contains("client address is unknown"));
    assert!(seen[2].starts_with("INFO") && seen[2].contains("the key has 5000 bytes"), "{seen:?}");
}

#[test]
fn a_shadow_rule_denies_nothing_and_is_reported() {
    let limiter = Arc::new(RateLimiter::new(per_hour(1)));
    let shadow = Rule::new(limiter.clone(), Key::everyone()).shadow();
    let enforced = Rule::new(per_hour(3).with_name("enforced"), Key::everyone());
    let limit = RateLimit::all_of([shadow, enforced]);
    let seen = events(async {
        for allowed in [true, true, true, false] {
            let verdict = limit.check(&request()).await;
            assert_eq!(verdict.is_allowed(), allowed);
            assert!(!verdict.headers()["ratelimit-policy"].to_str().unwrap().contains("api"));
        }
    });
    let shadows = seen.iter().filter(|event| event.contains("shadow=true")).count();
    assert_eq!((shadows, seen.len()), (2, 3), "{seen:?}");
    assert_eq!(limiter.peek(Ask::new("").cost(0)).unwrap().remaining, 0);
}

#[test]
fn a_shadow_limit_of_a_policy_is_reported() {
    let limits = [
        Policy::fixed_window(9).per_hour().named("real"),
        Policy::fixed_window(1).per_hour().named("planned").shadow(),
    ];
    let limit = RateLimit::new(Policy::all_of("api", limits).unwrap(), Key::everyone());
    let seen = events(async {
        assert!(limit.check(&request()).await.is_allowed());
        assert!(limit.check(&request()).await.is_allowed());
    });
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert!(seen[0].contains("limit=\"planned\"") && seen[0].contains("shadow=true"), "{seen:?}");
}

#[test]
fn a_store_without_a_decision_denies_unless_the_limit_says_otherwise() {
    let policy = per_hour(5);
    let capacity = Capacity::of(1).when_full(WhenFull::RejectNew);
    let store = PolicyStore::new(&policy, capacity, tallygate::clock::SystemClock::new());
    let limiter = Arc::new(RateLimiter::with_store(policy, store));
    let _ = limiter.check("another key").unwrap();
    // The table may have room for more keys than it promises.
    let mut number = 0;
    while limiter.check(&format!("key {number}")).is_ok() {
        number += 1;
    }
    let limit = RateLimit::new(limiter, Key::from_fn(|_| Some("new key")));
    let mut denied = None;
    let seen = events(async { denied = Some(limit.check(&request()).await) });
    assert!(seen.len() == 1 && seen[0].starts_with("ERROR"), "{seen:?}");
    let denied = denied.unwrap();
    assert!(matches!(denied.denial().unwrap().reason(), Reason::Failed(_)));
    let response = denied.response().unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["retry-after"]),
        (503, &"1".parse().unwrap())
    );
    let allowing = limit.on_store_error(OnStoreError::Allow);
    let seen = events(async { assert!(allowing.check(&request()).await.is_allowed()) });
    assert!(seen[0].contains("WARN"), "{seen:?}");
}

#[test]
fn the_name_of_the_limit_that_denied_is_in_the_problem() {
    let limits = [
        Policy::fixed_window(1).per_hour().named("hour"),
        Policy::fixed_window(9).per_day().named("day"),
    ];
    let limit = RateLimit::new(Policy::all_of("api", limits).unwrap(), Key::everyone());
    let _ = tallygate::block_on(limit.check(&request()));
    let verdict = tallygate::block_on(limit.check(&request()));
    let denial = verdict.denial().unwrap();
    assert_eq!((denial.policy(), denial.limit().as_deref()), (Some("api"), Some("api/hour")));
    let body = verdict.response().unwrap().into_body();
    assert!(
        String::from_utf8(body.to_vec()).unwrap().contains(r#""violated-policies":["api/hour"]"#)
    );
}
