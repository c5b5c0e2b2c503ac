//! The store of `examples/own_store.rs` passes the contract of stores.

#![allow(clippy::panic, reason = "an algorithm that panics is part of the test")]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use proptest::collection::vec;
use proptest::prelude::*;
use tallygate::algorithm::{Algorithm, DecodeError, Facts, Fit, Op, Timed, Used};
use tallygate::clock::ManualClock;
use tallygate::reservation::{Charged, SettleError};
use tallygate::store::{Capacity, Entry, MapStore, PolicyStore, StateMap, Store as _};
use tallygate::{Ask, Cost, Decision, Kind, Policy, RateLimiter, Tick, Ticks, block_on};
use tallygate_testkit::cases;
use tallygate_testkit::contract::Subject;

#[path = "../examples/own_store.rs"]
#[allow(dead_code, reason = "the example has a `main` of its own")]
mod own_store;

use own_store::MutexMap;

type PolicyMap = MapStore<MutexMap<<Policy as Algorithm>::State>>;

/// A time to live that is longer than any history.
const AGES: Ticks = Ticks(1 << 62);

/// One store per policy.
#[derive(Default)]
struct Stores(Mutex<HashMap<String, Arc<PolicyMap>>>);

impl Stores {
    fn store(&self, policy: &Policy) -> Arc<PolicyMap> {
        let mut stores = self.0.lock().expect("no thread panicked");
        let new = || Arc::new(MapStore::new(MutexMap::new()));
        stores.entry(format!("{policy:?}")).or_insert_with(new).clone()
    }
}

impl Subject for Stores {
    async fn apply(&self, policy: &Policy, key: &[u8], op: Op, now: Tick) -> Timed {
        self.store(policy).apply(policy, key, op, Some(now)).expect("the key is short")
    }

    async fn check_many(
        &self,
        policy: &Policy,
        keys: &[&[u8]],
        cost: Cost,
        now: Tick,
    ) -> Vec<Timed> {
        let asks: Vec<_> = keys.iter().map(|key| Ask::new(key).cost(cost).at(now)).collect();
        self.store(policy).check_many(policy, &asks).expect("the keys are short")
    }

    type Reservation = Charged;

    async fn reserve(
        &self,
        policy: &Policy,
        key: &[u8],
        cost: Cost,
        now: Tick,
    ) -> (Timed, Charged) {
        let charged = self.store(policy).reserve(policy, key, cost, AGES, Some(now));
        let charged = charged.expect("the key is short");
        (charged.timed, charged)
    }

    async fn settle(
        &self,
        policy: &Policy,
        key: &[u8],
        change: i128,
        reservation: &Charged,
        now: Tick,
    ) -> Option<Decision> {
        let settled =
            self.store(policy).settle(policy, key, change, reservation, Some(now)).ok()?;
        Some(settled.expect("the key is short"))
    }
}

fn on_an_empty_store(behavior: impl AsyncFnOnce(&Stores)) {
    block_on(behavior(&Stores::default()));
}

tallygate_testkit::store_contract!(on_an_empty_store, one policy);

#[test]
fn many_threads_on_one_key_get_exactly_the_limit() {
    let policy = Policy::fixed_window(1_000).per_day().build().expect("valid");
    let limiter = RateLimiter::with_store(policy, MapStore::new(MutexMap::new()));
    let allowed: usize = std::thread::scope(|scope| {
        let check = || (0..500).filter(|_| limiter.is_allowed("alice").expect("short")).count();
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(check)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    });
    // The day may end meanwhile, and then another thousand is allowed.
    assert!(allowed == 1_000 || allowed == 2_000, "{allowed}");
}

#[test]
fn a_peek_stores_nothing_and_a_panic_charges_nothing() {
    let policy = Policy::token_bucket(5).per_day().build().expect("valid");
    let limiter = RateLimiter::with_store(policy, MapStore::new(MutexMap::new()));
    assert!(limiter.peek("alice").expect("short").allowed);
    let panicking = RateLimiter::in_store("panics", Panicking, MapStore::new(MutexMap::new()));
    let check = || panicking.check("alice").map(|decision| decision.allowed);
    for _ in 0..2 {
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_err());
    }
    assert_eq!(panicking.peek(Ask::new("alice").cost(0)).expect("short").remaining, 1);
}

/// A reset is remembered only for reservations that can still be settled.
#[test]
fn a_client_that_was_reset_expires() {
    let policy = Policy::token_bucket(5).per(Ticks(10)).build().expect("valid");
    let store: PolicyMap = MapStore::new(MutexMap::new());
    let expires_at = || {
        let read = |entry: &mut Option<Entry<_>>| entry.as_ref().map(Entry::expires_at);
        StateMap::<Policy>::with_entry(store.map(), b"alice", read).expect("there is room")
    };
    let reset = |now| {
        let _: Decision = store.apply(&policy, b"alice", Op::Reset, Some(now)).expect("short");
    };
    let _: Decision = store.apply(&policy, b"alice", Op::Check(5), Some(Tick(0))).expect("short");
    reset(Tick(1));
    assert!(expires_at() <= Some(Tick(1)), "nothing is used and nothing is reserved");
    let charged = store.reserve(&policy, b"alice", 5, Ticks(50), Some(Tick(2))).expect("short");
    reset(Tick(3));
    assert_eq!(expires_at(), Some(Tick(53)), "the reservation can be settled until 52");
    let settled = store.settle(&policy, b"alice", -5, &charged, Some(Tick(52)));
    assert_eq!(settled, Err(SettleError::Reset));
}

/// One operation of a random history.
#[derive(Clone, Debug)]
enum Step {
    Apply(Op),
    Reserve(Cost),
    /// Settles one of the reservations so far for another cost.
    Settle(usize, Cost),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..6_u64).prop_map(|cost| Step::Apply(Op::Check(cost))),
        1 => (0..6_u64).prop_map(|cost| Step::Apply(Op::Peek(cost))),
        2 => (-6..4_i128).prop_map(|amount| Step::Apply(Op::Force(amount))),
        1 => Just(Step::Apply(Op::Reset)),
        3 => (0..6_u64).prop_map(Step::Reserve),
        3 => (any::<usize>(), 0..8_u64).prop_map(|(which, actual)| Step::Settle(which, actual)),
    ]
}

proptest! {
    #![proptest_config(cases(400))]

    /// The store on a map and the memory store answer every operation of a history in the same way.
    #[test]
    fn both_stores_agree_on_every_operation(
        (kind, shadow) in (0..6_usize, 0..6_usize),
        (limit, window, is_watched) in (1..9_u64, 1..24_u64, any::<bool>()),
        steps in vec((0..9_u64, 0..2_u8, step()), 1..60),
    ) {
        let enforced = Policy::of(Kind::ALL[kind], limit).per(Ticks(window));
        let watched = Policy::of(Kind::ALL[shadow], 3).per(Ticks(10)).named("watched").shadow();
        let policy = match is_watched {
            false => enforced.build().expect("valid"),
            true => Policy::all_of("both", [enforced, watched]).expect("valid"),
        };
        let map: PolicyMap = MapStore::new(MutexMap::new());
        let memory = PolicyStore::new(&policy, Capacity::of(100), ManualClock::new(Tick(0)));
        let mut reserved: Vec<([u8; 1], Cost, Charged, Charged)> = Vec::new();
        let mut now = Tick(0);
        for (passed, key, step) in steps {
            now = now.after(Ticks(passed)).expect("small");
            let key = [key];
            match step {
                Step::Apply(op) => {
                    let one: Decision = map.apply(&policy, &key, op, Some(now)).expect("short");
                    let other: Decision = memory.apply(&policy, &key, op, Some(now)).expect("short");
                    prop_assert_eq!(one, other, "{:?} at {}", op, now);
                }
                Step::Reserve(cost) => {
                    let one = map.reserve(&policy, &key, cost, AGES, Some(now)).expect("short");
                    let other = memory.reserve(&policy, &key, cost, AGES, Some(now)).expect("short");
                    prop_assert_eq!(one.timed.decision, other.timed.decision);
                    if one.timed.decision.allowed {
                        reserved.push((key, cost, one, other));
                    }
                }
                Step::Settle(which, actual) if !reserved.is_empty() => {
                    let (key, cost, one, other) = reserved.swap_remove(which % reserved.len());
                    let change = i128::from(actual) - i128::from(cost);
                    let one = map.settle(&policy, &key, change, &one, Some(now));
                    let other = memory.settle(&policy, &key, change, &other, Some(now));
                    prop_assert_eq!(one, other, "settled by {} at {}", change, now);
                }
                Step::Settle(..) => {}
            }
        }
    }
}

/// An algorithm that charges a unit and then panics.
struct Panicking;

impl Algorithm for Panicking {
    type State = u64;

    fn capacity(&self) -> Cost {
        1
    }
    fn fresh(&self, _: Tick) -> u64 {
        0
    }
    fn last_change(&self, _: &u64) -> Tick {
        Tick(i64::MIN)
    }
    fn clock_was_set_back(&self, _: &u64, _: Tick) -> bool {
        false
    }
    fn rebase(&self, _: &mut u64, _: Tick) {}
    fn fit(&self, used: &u64, _: Tick, cost: Cost) -> Fit {
        if used + cost <= 1 { Fit::Now } else { Fit::Never }
    }
    fn charge(&self, used: &mut u64, _: Tick, _: i128) -> u128 {
        *used += 1;
        panic!("after the charge");
    }
    fn facts(&self, used: &u64, _: Tick, _: Option<Cost>) -> Facts {
        Facts { remaining: 1 - used.min(&1), ..Facts::all_of(1) }
    }
    fn fresh_at(&self, _: &u64) -> Option<Tick> {
        None
    }
    fn used(&self, used: &u64, _: Tick) -> Used {
        Used::whole(*used)
    }
    fn with_used(&self, used: Used, _: Tick) -> u64 {
        used.rounded_up()
    }
    fn encode(&self, _: &u64, _: &mut Vec<u8>) {}
    fn decode(&self, _: &[u8]) -> Result<u64, DecodeError> {
        Ok(0)
    }
}
