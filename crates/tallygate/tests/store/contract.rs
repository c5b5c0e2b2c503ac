//! The stores in memory fulfill the contract of every store.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tallygate::algorithm::{Op, Timed};
use tallygate::clock::ManualClock;
use tallygate::reservation::Charged;
use tallygate::store::{Capacity, MemoryStore, PolicyStore, Store as _};
use tallygate::tiers::ClientRule;
use tallygate::{Ask, Cost, Decision, Policy, Tick, Ticks, block_on};
use tallygate_testkit::contract::Subject;

/// A time to live that is longer than any history.
const AGES: Ticks = Ticks(1 << 62);

/// A clock for histories of explicit times: it is set to each of them, and reports a set-back for every time that is
/// before an earlier one. So no caller is late, as in the model.
#[derive(Default)]
struct HistoryClock {
    clock: Arc<ManualClock>,
    latest: Mutex<Option<Tick>>,
}

impl HistoryClock {
    fn go_to(&self, now: Tick) {
        let mut latest = self.latest.lock().expect("no thread panicked");
        if latest.is_some_and(|latest| now < latest) {
            self.clock.set(Tick(now.0 + 1));
        }
        self.clock.set(now);
        *latest = latest.max(Some(now));
    }
}

/// Stores for one policy each, which are created when a policy is first used.
#[derive(Default)]
struct PolicyStores {
    time: HistoryClock,
    stores: Mutex<HashMap<String, Arc<PolicyStore<Arc<ManualClock>>>>>,
}

impl PolicyStores {
    fn store(&self, policy: &Policy) -> Arc<PolicyStore<Arc<ManualClock>>> {
        let mut stores = self.stores.lock().expect("no thread panicked");
        let new =
            || Arc::new(PolicyStore::new(policy, Capacity::of(1000), self.time.clock.clone()));
        stores.entry(format!("{policy:?}")).or_insert_with(new).clone()
    }
}

impl Subject for PolicyStores {
    async fn apply(&self, policy: &Policy, key: &[u8], op: Op, now: Tick) -> Timed {
        self.time.go_to(now);
        self.store(policy).apply(policy, key, op, None).expect("there is room")
    }

    async fn check_many(
        &self,
        policy: &Policy,
        keys: &[&[u8]],
        cost: Cost,
        now: Tick,
    ) -> Vec<Timed> {
        self.time.go_to(now);
        let asks: Vec<_> = keys.iter().map(|key| Ask::new(key).cost(cost)).collect();
        self.store(policy).check_many(policy, &asks).expect("there is room")
    }

    type Reservation = Charged;

    async fn reserve(
        &self,
        policy: &Policy,
        key: &[u8],
        cost: Cost,
        now: Tick,
    ) -> (Timed, Charged) {
        self.time.go_to(now);
        let charged = self.store(policy).reserve(policy, key, cost, AGES, None);
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
        self.time.go_to(now);
        let settled = self.store(policy).settle(policy, key, change, reservation, None).ok()?;
        Some(settled.expect("there is room"))
    }
}

/// A store of tiers, for any policy.
struct TierStore {
    time: HistoryClock,
    store: MemoryStore<ClientRule, Arc<ManualClock>>,
}

impl Subject for TierStore {
    async fn apply(&self, policy: &Policy, key: &[u8], op: Op, now: Tick) -> Timed {
        let rule = ClientRule::of(policy.clone());
        self.time.go_to(now);
        self.store.apply(&rule, key, op, None).expect("there is room")
    }

    async fn check_many(
        &self,
        policy: &Policy,
        keys: &[&[u8]],
        cost: Cost,
        now: Tick,
    ) -> Vec<Timed> {
        let rule = ClientRule::of(policy.clone());
        self.time.go_to(now);
        let asks: Vec<_> = keys.iter().map(|key| Ask::new(key).cost(cost)).collect();
        self.store.check_many(&rule, &asks).expect("there is room")
    }

    type Reservation = Charged;

    async fn reserve(
        &self,
        policy: &Policy,
        key: &[u8],
        cost: Cost,
        now: Tick,
    ) -> (Timed, Charged) {
        let rule = ClientRule::of(policy.clone());
        self.time.go_to(now);
        let charged = self.store.reserve(&rule, key, cost, AGES, None).expect("there is room");
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
        let rule = ClientRule::of(policy.clone());
        self.time.go_to(now);
        let settled = self.store.settle(&rule, key, change, reservation, None).ok()?;
        Some(settled.expect("there is room"))
    }
}

mod on_one_policy {
    use super::*;

    fn on_an_empty_store(behavior: impl AsyncFnOnce(&PolicyStores)) {
        block_on(behavior(&PolicyStores::default()));
    }

    tallygate_testkit::store_contract!(on_an_empty_store, one policy);
}

mod on_tiers {
    use super::*;

    fn on_an_empty_store(behavior: impl AsyncFnOnce(&TierStore)) {
        let time = HistoryClock::default();
        let store = MemoryStore::new(Capacity::of(1000), time.clock.clone());
        block_on(behavior(&TierStore { time, store }));
    }

    tallygate_testkit::store_contract!(on_an_empty_store, tiers);
}
