//! Compares the public interface of the limiter with the core's simulator.

use std::sync::{Arc, Mutex, OnceLock, Weak};

use proptest::prelude::*;
use tallygate::algorithm::{Algorithm, Op, simulate};
use tallygate::clock::{Clock, ManualClock};
use tallygate::observer::{Event, Observer};
use tallygate::policy::Anchor;
use tallygate::store::{Capacity, MemoryStore, PolicyStore};
use tallygate::tiers::{Access, ClientRule};
use tallygate::{
    Ask, Cost, Decision, Kind, Policy, RateLimiter, SingleLimiter, StoreError, Tick, Ticks, Tiers,
};
use tallygate_testkit::{any_limit, cases, costs, times};

fn limiter(policy: Policy, max_keys: usize) -> RateLimiter<Policy, PolicyStore<ManualClock>> {
    let store = PolicyStore::new(&policy, Capacity::of(max_keys), ManualClock::new(Tick(0)));
    RateLimiter::with_store(policy, store)
}

/// Returns a policy with the numbers of a limit.
fn policy(limit: &tallygate::Limit) -> Policy {
    let n = limit.numbers();
    let builder = Policy::of(n.kind, n.limit).per(n.window).burst(n.burst).anchor(n.anchor);
    builder.build().expect("valid")
}

proptest! {
    #![proptest_config(cases(300))]

    /// With its table, hashes and sweeps, the limiter makes the same decisions as the core.
    #[test]
    fn it_decides_as_the_core_does(
        (limit, times, requests) in any_limit().prop_flat_map(|limit| {
            let requests = proptest::collection::vec((0..12_u8, costs(&limit)), 80);
            (Just(limit.clone()), times(&limit, 80, false), requests)
        }),
    ) {
        let limiter = limiter(policy(&limit), 1_000);
        let trace: Vec<(u8, Tick, Cost)> =
            times.iter().zip(&requests).map(|(&now, &(key, cost))| (key, now, cost)).collect();
        let expected: Vec<Decision> = simulate(limit, trace.iter().copied()).collect();
        for (index, (&(key, now, cost), expected)) in trace.iter().zip(expected).enumerate() {
            let decision = limiter.check(Ask::new(&[key]).cost(cost).at(now)).expect("a short key");
            prop_assert_eq!(decision, expected, "request {}", index);
        }
    }

    /// A batch has the same results as single checks in order, also if a key occurs several times.
    #[test]
    fn a_batch_is_decided_as_one_by_one(
        limit in any_limit(),
        keys in proptest::collection::vec(0..20_u8, 0..100),
        now in 0..1_000_i64,
    ) {
        let (one, many) = (limiter(policy(&limit), 1_000), limiter(policy(&limit), 1_000));
        let keys: Vec<[u8; 1]> = keys.into_iter().map(|key| [key]).collect();
        let apart: Vec<Decision> =
            keys.iter().map(|key| one.check(Ask::new(key).at(Tick(now))).expect("short")).collect();
        let together: Vec<Decision> = {
            let asks: Vec<_> = keys.iter().map(|key| Ask::new(key).at(Tick(now))).collect();
            many.check_many(&asks).expect("short")
        };
        prop_assert_eq!(together, apart);
    }
}

#[test]
fn keys_are_bytes_whatever_they_are_borrowed_from() {
    let limiter = limiter(Policy::token_bucket(3).per_hour().build().unwrap(), 10);
    assert_eq!(limiter.check("alice").unwrap().remaining, 2);
    assert_eq!(limiter.check(&String::from("alice")).unwrap().remaining, 1);
    assert_eq!(limiter.check(b"alice").unwrap().remaining, 0);
    assert!(limiter.is_allowed("").unwrap() && limiter.is_allowed("\0").unwrap());
    assert!(limiter.is_allowed(&[0xff]).unwrap());
}

/// Fault D3.
#[test]
fn a_key_that_is_too_long_is_a_typed_error() {
    let limiter = limiter(Policy::token_bucket(3).per_hour().build().unwrap(), 10);
    assert!(limiter.is_allowed(&vec![b'x'; 4096]).unwrap());
    let long = vec![b'x'; 10 << 20];
    let error = StoreError::KeyTooLong { bytes: 10 << 20 };
    assert_eq!(limiter.check(&long), Err(error.clone()));
    assert_eq!(limiter.is_allowed(&long), Err(error.clone()));
    let batch: Result<Vec<bool>, _> = limiter.check_many(&[b"a".as_slice(), &long]);
    assert_eq!(batch, Err(error.clone()));
    assert_eq!(limiter.check("a").unwrap().remaining, 2, "nothing in the batch was charged");
    assert_eq!(error.to_string(), "the key has 10485760 bytes; use at most 4096, or a hash of it");
}

#[test]
fn peeks_and_denials_of_new_keys_store_nothing() {
    let limiter = limiter(Policy::token_bucket(3).per_hour().build().unwrap(), 10);
    assert!(limiter.check(Ask::new("alice").cost(0)).unwrap().allowed);
    assert_eq!(limiter.check(Ask::new("bob").cost(4)).unwrap().retry_after, None);
    assert_eq!(limiter.store().usage().keys, 0);
}

#[test]
fn several_limits_decide_as_one() {
    let policy = Policy::all_of(
        "api",
        [
            Policy::token_bucket(2).per_second().named("second"),
            Policy::fixed_window(3).per_hour().named("hour"),
        ],
    );
    let limiter = limiter(policy.unwrap(), 10);
    let second = 1_000_000_000;
    assert!(limiter.is_allowed(Ask::new("a").at(Tick(0))).unwrap());
    assert!(limiter.is_allowed(Ask::new("a").at(Tick(0))).unwrap());
    assert!(!limiter.is_allowed(Ask::new("a").at(Tick(0))).unwrap(), "two per second");
    assert!(limiter.is_allowed(Ask::new("a").at(Tick(second))).unwrap());
    let hour = limiter.check(Ask::new("a").at(Tick(2 * second))).unwrap();
    assert_eq!((hour.allowed, hour.limit), (false, 3), "three an hour");
    assert_eq!(hour.retry_after, Some(Ticks(3_598 * second.unsigned_abs())));
}

/// Any algorithm will do here: the methods of the state machines are tested in the core.
#[test]
fn a_custom_algorithm_is_saved_like_any_other() {
    let limit =
        Policy::fixed_window(2).per(Ticks(10)).anchor(Anchor::FirstRequest).limit().unwrap();
    let store = MemoryStore::new(Capacity::of(100), ManualClock::new(Tick(3)));
    let limiter = RateLimiter::in_store("own", limit, store);
    let answers: Vec<bool> = limiter.check_many(&["a", "a", "a", "b"]).unwrap();
    assert_eq!(answers, [true, true, false, true]);
    assert_eq!(limiter.name(), "own");
}

#[test]
fn one_client_without_a_name() {
    let clock = ManualClock::new(Tick(0));
    let rule = Policy::leaky_bucket(2).per(Ticks(10)).build().unwrap();
    let single = SingleLimiter::with_clock(rule, &clock);
    assert_eq!(single.check().delay, Ticks(0));
    assert_eq!(single.check_n(1).delay, Ticks(5));
    assert!(!single.is_allowed());
    clock.advance(Ticks(5));
    assert!(single.is_allowed());
    clock.set(Tick(9));
    assert!(!single.is_allowed());
    clock.set(Tick(10));
    assert!(single.check().allowed);
    clock.set(Tick(15));
    assert!(!single.check_n(2).allowed);
}

/// A store that was created for one kind of policy returns an error for another.
#[test]
fn a_store_rejects_a_policy_of_another_kind() {
    let bucket = Policy::token_bucket(2).per_hour().build().unwrap();
    let store = PolicyStore::new(&bucket, Capacity::of(10), ManualClock::default());
    let limiter =
        RateLimiter::with_store(Policy::fixed_window(2).per_hour().build().unwrap(), store);
    assert_eq!(limiter.check("a"), Err(StoreError::OtherPolicy));
}

/// Clocks that jump, with a real store.
///
/// Faults B1, B2.
#[test]
fn a_clock_that_jumps_is_survived() {
    let hour = 3_600_000;
    for kind in Kind::ALL {
        let policy = Policy::of(kind, 5).per(Ticks(60_000)).build().unwrap();
        let clock = ManualClock::new(Tick(10 * hour));
        let store = PolicyStore::new(&policy, Capacity::of(10), &clock);
        let limiter = RateLimiter::with_store(policy, store);
        let drain = || (0..).take_while(|_| limiter.is_allowed("a").unwrap()).count();
        assert_eq!(drain(), 5);
        clock.set(Tick(11 * hour));
        assert_eq!(drain(), 5, "{kind}: one burst by a jump forward");
        clock.set(Tick(10 * hour));
        let from = clock.now();
        while !limiter.is_allowed("a").unwrap() {
            clock.advance(Ticks(500));
            let waited = clock.now().since(from);
            assert!(waited <= Ticks(3 * 60_000), "{kind}: locked out for {waited}");
        }
    }
}

/// Rules are shared by reference, stores too: a limiter is `Send` and `Sync`.
#[test]
fn limiters_can_be_shared() {
    fn shared<T: Send + Sync + 'static>(_: &T) {}
    let policy = || Policy::sliding_window_log(2).per_hour().build().unwrap();
    shared(&RateLimiter::new(policy()));
    shared(&SingleLimiter::new(policy()));
    let fresh = policy().fresh(Tick(0));
    assert_eq!(policy().used(&fresh, Tick(0)).whole, 0);
}

/// For every operation, an unknown tier is an error that names the tiers, and nothing is charged.
#[test]
fn a_request_for_an_unknown_tier_fails_in_every_operation() {
    let policy = || Policy::token_bucket(3).per_hour().build().unwrap();
    let limiter = RateLimiter::tiered("api", Tiers::new(policy()).tier("pro", policy()));
    let gold = Ask::new("alice").tier("gold");
    let errors = [
        limiter.check(gold).unwrap_err(),
        limiter.is_allowed(gold).unwrap_err(),
        limiter.check_many::<bool, _>(&[Ask::new("alice"), gold]).unwrap_err(),
        limiter.peek(gold).unwrap_err(),
        limiter.refund(gold).unwrap_err(),
        limiter.reset(gold).unwrap_err(),
        limiter.reserve(gold, Ticks(1)).unwrap_err(),
        limiter.block_until_ready(gold, Ticks(1)).unwrap_err(),
        tallygate::block_on(limiter.shape(gold)).unwrap_err(),
        limiter.joint(gold).unwrap_err(),
        limiter.decide_with(gold, Op::Check(1), |_, _, _| ()).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.to_string(), "no tier is named \"gold\"; the only tier is pro");
    }
    assert_eq!(limiter.peek(Ask::new("alice").cost(0)).unwrap().remaining, 3);
    // A limiter without tiers returns the same error.
    let plain = RateLimiter::new(policy());
    for error in [
        plain.check(gold).unwrap_err(),
        plain.check_many::<bool, _>(&[Ask::new("alice"), gold]).unwrap_err(),
    ] {
        assert_eq!(error.to_string(), "no tier is named \"gold\"; there are no tiers");
    }
    assert_eq!(plain.peek(Ask::new("alice").cost(0)).unwrap().remaining, 3);
}

/// Requests of a batch may differ in cost, time and tier.
#[test]
fn each_request_of_a_batch_has_its_own_cost_time_and_tier() {
    let policy = |limit| Policy::token_bucket(limit).per(Ticks(10)).build().unwrap();
    let asks = [
        Ask::new("alice").cost(2).at(Tick(0)),
        Ask::new("alice").at(Tick(4)),
        Ask::new("alice").at(Tick(5)),
        Ask::new("bob").cost(3).at(Tick(5)),
    ];
    let plain = limiter(policy(2), 10);
    assert_eq!(plain.check_many::<bool, _>(&asks).unwrap(), [true, false, true, false]);
    let store = MemoryStore::new(Capacity::of(10), ManualClock::new(Tick(0)));
    let tiered = RateLimiter::in_store("api", Tiers::new(policy(2)).tier("pro", policy(3)), store);
    let mut asks = asks.to_vec();
    asks.push(Ask::new("bob").cost(3).tier("pro").at(Tick(5)));
    assert_eq!(tiered.check_many::<bool, _>(&asks).unwrap(), [true, false, true, false, true]);
}

/// Records the times of decisions.
#[derive(Default)]
struct Times(Mutex<Vec<(Tick, bool)>>);

impl Observer for Times {
    fn decided(&self, event: &Event<'_>) {
        self.0.lock().expect("not poisoned").push((event.at, event.allowed));
    }
}

struct Panics;

impl Observer for Panics {
    fn decided(&self, _: &Event<'_>) {
        unreachable!("an observer's own mistake");
    }
}

#[test]
fn every_observer_is_notified_with_the_time_of_the_decision() {
    let policy = || Policy::fixed_window(1).per(Ticks(10)).build().unwrap();
    let expected = [(Tick(7), true), (Tick(8), false)];
    let ask = |at| Ask::new("alice").at(Tick(at));
    let (first, second) = (Times::default(), Times::default());
    let pair = RateLimiter::new(policy()).observed_by((&first, Panics, &second));
    assert!(pair.is_allowed(ask(7)).unwrap() && !pair.check(ask(8)).unwrap().allowed);
    let boxed: Arc<Times> = Arc::default();
    let list: Vec<Box<dyn Observer + Send>> = vec![Box::new(Panics), Box::new(boxed.clone())];
    let listed = RateLimiter::new(policy()).observed_by(list);
    assert!(listed.is_allowed(ask(7)).unwrap() && !listed.check(ask(8)).unwrap().allowed);
    for times in [&first, &second, &*boxed] {
        assert_eq!(*times.0.lock().unwrap(), expected);
    }
}

/// Replaces the rules of a limiter when the time is read: after the rule was chosen, before it decides.
#[derive(Default)]
struct Reloads {
    limiter: OnceLock<Weak<Reloaded>>,
}

type Reloaded = RateLimiter<Tiers, MemoryStore<ClientRule, Arc<Reloads>>>;

impl Clock for Reloads {
    fn now(&self) -> Tick {
        if let Some(limiter) = self.limiter.get().and_then(Weak::upgrade) {
            limiter.replace(&Tiers::new(two_limits("new")));
        }
        Tick(0)
    }
}

fn two_limits(name: &str) -> Policy {
    let limit = |limit| Policy::token_bucket(limit).per_hour();
    Policy::all_of(name, [limit(5).named(format!("{name} 5")), limit(1).named(format!("{name} 1"))])
        .expect("valid")
}

/// The rules change while a decision is made. Its details come from the rule that made it.
#[test]
fn a_reload_does_not_change_the_name_of_the_limit_that_denied() {
    let clock: Arc<Reloads> = Arc::default();
    let store = MemoryStore::new(Capacity::of(10), clock.clone());
    let limiter: Arc<Reloaded> =
        Arc::new(RateLimiter::in_store("api", Tiers::new(two_limits("old")), store));
    assert!(limiter.check("alice").unwrap().allowed);
    clock.limiter.set(Arc::downgrade(&limiter)).unwrap();
    let names = |plan: &ClientRule, decision: Decision, at: Tick| {
        let limit = decision.denied_by.map(|limit| plan.limit_name(limit, at).to_owned());
        let Access::Limited(policy) = plan.access(at) else { panic!("{plan:?}") };
        (policy.name().to_owned(), limit)
    };
    let (policy, limit) = limiter.decide_with("alice", Op::Check(1), names).unwrap();
    assert_eq!((policy.as_str(), limit.as_deref()), ("old", Some("old 1")));
    let Access::Limited(now) = limiter.rules().base() else { panic!("it is limited") };
    assert_eq!(now.name(), "new", "the rules have changed meanwhile");
}
