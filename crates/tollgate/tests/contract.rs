//! The stores in memory do what every store does.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tollgate::{
    Capacity, Charged, Cost, Decision, ManualClock, MemoryStore, Op, Plan, Policy, PolicyStore,
    Store as _, Tick, Ticks, Timed, block_on,
};
use tollgate_testkit::contract::Subject;

/// A time to live that no history outlasts.
const AGES: Ticks = Ticks(1 << 62);

fn clock() -> ManualClock {
    ManualClock::new(Tick(0))
}

/// A store for one policy: one for each that is asked for.
#[derive(Default)]
struct OfOnePolicy {
    stores: Mutex<HashMap<String, Arc<PolicyStore<ManualClock>>>>,
}

impl OfOnePolicy {
    fn store(&self, policy: &Policy) -> Arc<PolicyStore<ManualClock>> {
        let mut stores = self.stores.lock().expect("nobody panicked");
        let new = || Arc::new(PolicyStore::new(policy, Capacity::of(1000), clock()));
        stores.entry(format!("{policy:?}")).or_insert_with(new).clone()
    }
}

impl Subject for OfOnePolicy {
    async fn apply(&self, policy: &Policy, key: &[u8], op: Op, now: Tick) -> Timed {
        self.store(policy).apply(policy, key, op, Some(now)).expect("there is room")
    }

    async fn check_many(
        &self,
        policy: &Policy,
        keys: &[&[u8]],
        cost: Cost,
        now: Tick,
    ) -> Vec<Timed> {
        self.store(policy).check_many(policy, keys, cost, Some(now)).expect("there is room")
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
        let charged = charged.expect("there is room");
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
        Some(settled.expect("there is room"))
    }
}

/// The store of tiers, for any policy.
struct OfPlans(MemoryStore<Plan, ManualClock>);

impl Subject for OfPlans {
    async fn apply(&self, policy: &Policy, key: &[u8], op: Op, now: Tick) -> Timed {
        let plan = Plan::of(policy.clone());
        self.0.apply(&plan, key, op, Some(now)).expect("there is room")
    }

    async fn check_many(
        &self,
        policy: &Policy,
        keys: &[&[u8]],
        cost: Cost,
        now: Tick,
    ) -> Vec<Timed> {
        let plan = Plan::of(policy.clone());
        self.0.check_many(&plan, keys, cost, Some(now)).expect("there is room")
    }

    type Reservation = Charged;

    async fn reserve(
        &self,
        policy: &Policy,
        key: &[u8],
        cost: Cost,
        now: Tick,
    ) -> (Timed, Charged) {
        let plan = Plan::of(policy.clone());
        let charged = self.0.reserve(&plan, key, cost, AGES, Some(now)).expect("there is room");
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
        let plan = Plan::of(policy.clone());
        let settled = self.0.settle(&plan, key, change, reservation, Some(now)).ok()?;
        Some(settled.expect("there is room"))
    }
}

mod of_one_policy {
    use super::*;

    fn on_an_empty_store(behaviour: impl AsyncFnOnce(&OfOnePolicy)) {
        block_on(behaviour(&OfOnePolicy::default()));
    }

    tollgate_testkit::store_contract!(on_an_empty_store, one policy);
}

mod of_plans {
    use super::*;

    fn on_an_empty_store(behaviour: impl AsyncFnOnce(&OfPlans)) {
        block_on(behaviour(&OfPlans(MemoryStore::new(Capacity::of(1000), clock()))));
    }

    tollgate_testkit::store_contract!(on_an_empty_store);
}
