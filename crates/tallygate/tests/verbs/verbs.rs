//! Compares every operation, in any order, with the reference model: check, peek, refund, reset, reserve and settle,
//! with tiers that differ from call to call and policies that change meanwhile.

use proptest::collection::vec;
use proptest::prelude::*;
use tallygate::clock::ManualClock;
use tallygate::policy::Numbers;
use tallygate::reservation::{Actual, Reservation, SettleError};
use tallygate::store::{Capacity, MemoryStore, PolicyStore};
use tallygate::tiers::ClientRule;
use tallygate::{
    Ask, Cost, Decision, Kind, Limit, Policy, RateLimiter, StoreError, Tick, Ticks, Tiers,
};
use tallygate_testkit::{Model, cases, small_limit_of};

#[derive(Clone, Debug)]
enum Verb {
    Check(Cost),
    Peek,
    Refund(Cost),
    Reset,
    Reserve(Cost, u64),
    /// One of the reservations.
    Settle(usize, Cost),
    Cancel(usize),
    /// Other numbers for one of the tiers.
    Change(usize, Limit),
}

fn verb() -> impl Strategy<Value = Verb> {
    prop_oneof![
        6 => (0..6_u64).prop_map(Verb::Check),
        1 => Just(Verb::Peek),
        2 => (0..5_u64).prop_map(Verb::Refund),
        1 => Just(Verb::Reset),
        3 => (0..6_u64, 0..30_u64).prop_map(|(estimate, ttl)| Verb::Reserve(estimate, ttl)),
        3 => (0..9_usize, 0..12_u64).prop_map(|(which, actual)| Verb::Settle(which, actual)),
        1 => (0..9_usize).prop_map(Verb::Cancel),
        1 => (0..3_usize, any_small()).prop_map(|(tier, limit)| Verb::Change(tier, limit)),
    ]
}

fn any_small() -> impl Strategy<Value = Limit> {
    (0..6_usize).prop_flat_map(|kind| small_limit_of(Kind::ALL[kind]))
}

fn policy(limit: &Limit) -> Policy {
    let n = limit.numbers();
    let builder = Policy::of(n.kind, n.limit).per(n.window).burst(n.burst).debt(n.debt);
    builder.starting_with(n.start).anchor(n.anchor).build().expect("valid")
}

const TIERS: [&str; 2] = ["pro", "enterprise"];

fn tiers(limits: &[Limit; 3]) -> Tiers {
    let tiers = Tiers::new(policy(&limits[0]));
    tiers.tier(TIERS[0], policy(&limits[1])).tier(TIERS[1], policy(&limits[2]))
}

/// The definition of a client. If its rule changes, its usage is kept, up to the new capacity. Units that are used
/// under one rule are used under all rules that the client was checked under; the latest rule is first. With several
/// rules, each has an allowance that it shares with all slower rules.
#[derive(Clone)]
struct Client(Vec<RuleUsage>);

#[derive(Clone)]
struct RuleUsage {
    numbers: Numbers,
    model: Model,
    /// The time of the allowance's last change, and the level at that time, in fractions of a unit: one per tick of the
    /// window.
    shared: (Tick, u128),
}

/// Whether the rate of one rule is at most that of another.
const fn is_at_most(one: &Numbers, other: &Numbers) -> bool {
    one.limit * other.window.0 <= other.limit * one.window.0
}

impl RuleUsage {
    fn unit(&self) -> u128 {
        self.numbers.window.0.into()
    }

    fn is_at_most(&self, other: &Numbers) -> bool {
        is_at_most(&self.numbers, other)
    }

    fn level(&self, at: Tick) -> u128 {
        let earned = at.since(self.shared.0).0 * self.numbers.limit;
        self.shared.1.saturating_sub(earned.into())
    }

    fn is_fresh(&self, at: Tick) -> bool {
        self.model.is_fresh_at(at) && self.level(at) == 0
    }
}

impl Client {
    fn first(numbers: &Numbers, at: Tick) -> Self {
        Self(vec![RuleUsage {
            numbers: *numbers,
            model: Model::initial(numbers, at),
            shared: (at, 0),
        }])
    }

    fn change(&mut self, numbers: &Numbers, at: Tick) {
        if self.0[0].numbers == *numbers {
            return;
        }
        if let [one] = &mut self.0[..] {
            let used = one.model.used_in_parts(at, one.numbers.window.0);
            one.shared = (at, used.min(one.unit() * u128::from(one.numbers.burst)));
        }
        if let Some(place) = self.0.iter().position(|one| one.numbers == *numbers) {
            let one = self.0.remove(place);
            self.0.insert(0, one);
            return;
        }
        let model = most_used(self.0.iter().map(|one| one.model.clone()), numbers, at);
        let next = self
            .0
            .iter()
            .filter(|one| one.is_at_most(numbers))
            .reduce(|one, other| if one.is_at_most(&other.numbers) { other } else { one });
        let unit = u128::from(numbers.window.0);
        let level = next.map_or(0, |one| (one.level(at) * unit).div_ceil(one.unit()));
        if self.0.iter().all(|one| one.is_fresh(at)) {
            self.0.clear();
        }
        if self.0.len() == 8 {
            self.make_room(numbers, at);
        }
        self.0.insert(0, RuleUsage { numbers: *numbers, model, shared: (at, level) });
    }

    /// Drops the rule that will be fresh first, but not the fastest one. The others take over its usage.
    fn make_room(&mut self, new: &Numbers, at: Tick) {
        let fastest = |one: &RuleUsage| {
            self.0.iter().all(|other| other.is_at_most(&one.numbers)) && !one.is_at_most(new)
        };
        let wait = |one: &RuleUsage| {
            let shared = one.level(at).div_ceil(one.numbers.limit.into());
            u128::from(one.model.peek(at, 0).reset_after.0).max(shared)
        };
        let places = (0..8).filter(|place| !fastest(&self.0[*place]));
        let soonest = places.min_by_key(|place| wait(&self.0[*place])).expect("there is one");
        let dropped = self.0.remove(soonest).model;
        for one in &mut self.0 {
            one.model =
                most_used([one.model.clone(), dropped.clone()].into_iter(), &one.numbers, at);
        }
    }

    /// Clears the state of a client that has used nothing: it is like a new client.
    fn forget_if_fresh(&mut self, at: Tick) {
        if self.0.iter().all(|one| one.is_fresh(at)) {
            self.0.truncate(1);
        }
    }

    /// Returns the capacity of an allowance without one of the policies.
    fn capacity(&self, of: usize, without: Option<usize>) -> u128 {
        let slower =
            self.0.iter().enumerate().filter(|(place, one)| {
                Some(*place) != without && one.is_at_most(&self.0[of].numbers)
            });
        slower.map(|(_, one)| u128::from(one.numbers.burst)).sum()
    }

    /// Returns the allowances that a request must fit into.
    fn bounds(&self) -> Vec<usize> {
        let several = self.0.len() > 1;
        let places = 0..if several { self.0.len() } else { 0 };
        places.filter(|place| self.0[0].is_at_most(&self.0[*place].numbers)).collect()
    }

    /// Returns how far the level is above the highest level at which the cost would fit.
    fn excess(&self, place: usize, at: Tick, cost: Cost) -> u128 {
        let one = &self.0[place];
        let room = self.capacity(place, None).saturating_sub(cost.into());
        one.level(at).saturating_sub(room * one.unit())
    }

    /// Decides, and returns the state of the client.
    fn decide(&mut self, at: Tick, cost: Cost) -> Decision {
        self.reserve(at, cost).0
    }

    /// Does the same, and returns the charge under each rule. The rule that decided is first.
    fn reserve(&mut self, at: Tick, cost: Cost) -> (Decision, Vec<PolicyCharge>) {
        self.forget_if_fresh(at);
        let has_room = self.bounds().iter().all(|place| self.excess(*place, at, cost) == 0);
        let decision = if has_room {
            self.0[0].model.decide(at, cost)
        } else {
            let own = self.0[0].model.peek(at, cost).retry_after;
            let delay = Ticks::ZERO;
            let decision = self.0[0].model.peek(at, 0);
            Decision { allowed: false, retry_after: own, denied_by: Some(0), delay, ..decision }
        };
        let mut decision = decision;
        for place in self.bounds() {
            let wait = self.excess(place, at, cost).div_ceil(self.0[place].numbers.limit.into());
            let wait = Ticks(u64::try_from(wait).expect("small"));
            decision.retry_after = decision.retry_after.map(|own| own.max(wait));
        }
        let mut charges = Vec::new();
        if decision.allowed && cost > 0 {
            for (place, one) in self.0.iter_mut().enumerate() {
                let dropped = if place > 0 { one.model.force(at, cost.into()) } else { 0 };
                charges.push((one.numbers, one.model.name_charge(), dropped));
            }
            for place in self.bounds() {
                let one = &mut self.0[place];
                one.shared = (at, one.level(at) + u128::from(cost) * one.unit());
            }
            self.drop_stale(at);
        }
        (self.also_shared(decision, at), charges)
    }

    /// Returns the decision, limited by the room in the allowances.
    fn also_shared(&self, mut decision: Decision, at: Tick) -> Decision {
        for place in self.bounds() {
            let (one, capacity) = (&self.0[place], self.capacity(place, None));
            let left = (capacity * one.unit()).saturating_sub(one.level(at)) / one.unit();
            let reset = one.level(at).div_ceil(one.numbers.limit.into());
            decision.remaining = decision.remaining.min(u64::try_from(left).expect("small"));
            let reset = Ticks(u64::try_from(reset).expect("small"));
            decision.reset_after = decision.reset_after.max(reset);
        }
        decision
    }

    fn look(&self, at: Tick) -> Decision {
        self.also_shared(self.0[0].model.peek(at, 0), at)
    }

    fn drop_stale(&mut self, at: Tick) {
        let mut place = 1;
        while place < self.0.len() {
            let one = &self.0[place];
            let is_spare = |other: usize| {
                let level = self.0[other].level(at);
                let capacity = self.capacity(other, Some(place));
                other == place
                    || !one.is_at_most(&self.0[other].numbers)
                    || level <= capacity * self.0[other].unit()
            };
            let first = &self.0[0];
            let is_covered =
                first.level(at) <= first.model.used_in_parts(at, first.numbers.window.0);
            if one.is_fresh(at)
                && (0..self.0.len()).all(is_spare)
                && (self.0.len() > 2 || is_covered)
            {
                self.0.remove(place);
            } else {
                place += 1;
            }
        }
    }

    fn force(&mut self, at: Tick, amount: i128) -> u128 {
        if amount == 0 {
            return 0;
        }
        self.forget_if_fresh(at);
        let dropped = self.0[0].model.force(at, amount);
        if amount > 0 {
            self.0[1..].iter_mut().for_each(|one| {
                one.model.force(at, amount);
            });
            self.force_shared(at, amount.unsigned_abs());
        } else {
            let (asked, own) = (amount.unsigned_abs(), self.0[0].numbers);
            self.return_shared(at, asked - dropped, at, |one| is_at_most(&own, &one.numbers));
            // Units that were allowed under a policy stay used under it, whatever is refunded under others.
            for one in &mut self.0[1..] {
                let used = one.model.used_in_parts(at, one.numbers.window.0);
                let most = used.saturating_sub(one.level(at)) / one.unit();
                one.model.force(at, 0_i128.saturating_sub_unsigned(asked.min(most)));
            }
        }
        self.drop_stale(at);
        dropped
    }

    /// Charges the allowances, each at most up to its capacity.
    fn force_shared(&mut self, at: Tick, amount: u128) {
        for place in self.bounds() {
            let most = self.capacity(place, None) * self.0[place].unit();
            let one = &mut self.0[place];
            let level = one.level(at);
            let charged = level + amount * one.unit();
            one.shared = (at, charged.min(most.max(level)));
        }
    }

    /// Returns the units of a charge that have not been earned back since to the allowances that were charged.
    fn return_shared(
        &mut self,
        at: Tick,
        amount: u128,
        charged_at: Tick,
        was_charged: impl Fn(&RuleUsage) -> bool,
    ) {
        for one in self.0.iter_mut().filter(|one| was_charged(one)) {
            let earned = u128::from(at.since(charged_at).0 * one.numbers.limit);
            let returned = (amount * one.unit()).saturating_sub(earned);
            one.shared = (at, one.level(at).saturating_sub(returned));
        }
    }

    /// Settles under every rule, each with its own charge.
    fn settle(
        &mut self,
        numbers: &Numbers,
        at: Tick,
        change: i128,
        (charged_at, charges): (Tick, &[PolicyCharge]),
    ) -> u128 {
        self.forget_if_fresh(at);
        if self.0.len() == 1 && self.0[0].model.peek(at, 0).reset_after == Ticks::ZERO {
            *self = Self::first(numbers, at);
        }
        let settle = |one: &mut RuleUsage| {
            let charge = charges.iter().find(|(other, ..)| *other == one.numbers);
            let name = charge.map(|(_, name, _)| *name);
            if change > 0 {
                return one.model.settle(at, name, change);
            }
            // What was not charged is not returned.
            let kept = charge.map_or(0, |(.., dropped)| *dropped).min(change.unsigned_abs());
            kept + one.model.settle(at, name, change.saturating_add_unsigned(kept))
        };
        let dropped: Vec<u128> = self.0.iter_mut().map(settle).collect();
        if change > 0 {
            self.force_shared(at, change.unsigned_abs());
        } else if let Some((decided, ..)) = charges.first() {
            let place = self.0.iter().position(|one| one.numbers == *decided);
            let returned = place.map_or(0, |place| change.unsigned_abs() - dropped[place]);
            let is_faster = |one: &RuleUsage| is_at_most(decided, &one.numbers);
            self.return_shared(at, returned, charged_at, is_faster);
        }
        self.drop_stale(at);
        dropped[0]
    }

    fn reset(&mut self, at: Tick) {
        self.0.truncate(1);
        self.0[0].model.reset(at);
    }
}

/// Continues under other numbers, from the model with the largest usage.
fn most_used(models: impl Iterator<Item = Model>, numbers: &Numbers, at: Tick) -> Model {
    let changed = models.map(|mut model| {
        model.change(numbers, at);
        model
    });
    let used = |model: &Model| model.used_in_parts(at, numbers.window.0);
    changed.reduce(|one, other| if used(&other) > used(&one) { other } else { one }).expect("one")
}

/// The numbers of a policy, the name of a charge under it, and the units of the cost that were not charged.
type PolicyCharge = (Numbers, u64, u128);

/// A reservation, and the record of it in the model.
struct Pending {
    reservation: Reservation,
    client: usize,
    tier: usize,
    until: Tick,
    charged: Cost,
    charged_at: Tick,
    charges: Vec<PolicyCharge>,
    settled: bool,
    is_void: bool,
}

type Limiter<'a> = RateLimiter<Tiers, MemoryStore<ClientRule, &'a ManualClock>>;

/// Runs an operation on a limiter.
fn run(
    limiter: &Limiter<'_>,
    verb: &Verb,
    ask: Ask<'_>,
    pending: &mut Option<&mut Pending>,
) -> Result<Decision, SettleError> {
    let reservation = pending.as_mut().map(|pending| &mut pending.reservation);
    let decision = match verb {
        Verb::Check(cost) => limiter.check(ask.cost(*cost)),
        Verb::Peek => limiter.peek(ask),
        Verb::Refund(cost) => limiter.refund(ask.cost(*cost)),
        Verb::Reset => limiter.reset(ask),
        Verb::Settle(_, actual) => limiter.settle(reservation.expect("there is one"), *actual),
        Verb::Cancel(_) => limiter.cancel(reservation.expect("there is one")),
        Verb::Reserve(..) | Verb::Change(..) => unreachable!("done elsewhere"),
    };
    decision.map_err(|error| match error {
        StoreError::Settle(error) => error,
        error => unreachable!("{error}"),
    })
}

/// Runs the operation on the model. Returns the answer, and the units of a settled cost beyond the bound on debt.
fn on_model(
    model: &mut Client,
    verb: &Verb,
    numbers: &Numbers,
    now: Tick,
    pending: Option<&mut Pending>,
) -> (Result<Decision, SettleError>, u128) {
    let decision = |model: &Client| {
        let mut model = model.clone();
        model.change(numbers, now);
        Decision {
            allowed: true,
            retry_after: Some(Ticks::ZERO),
            delay: Ticks::ZERO,
            denied_by: None,
            ..model.look(now)
        }
    };
    match verb {
        Verb::Check(cost) => (Ok(model.decide(now, *cost)), 0),
        Verb::Peek => (Ok(model.clone().decide(now, 1)), 0),
        Verb::Refund(cost) => {
            model.force(now, -i128::from(*cost));
            (Ok(decision(model)), 0)
        }
        Verb::Reset => {
            model.reset(now);
            (Ok(decision(model)), 0)
        }
        Verb::Settle(..) | Verb::Cancel(_) => {
            let pending = pending.expect("there is one");
            let actual = if let Verb::Settle(_, actual) = verb { *actual } else { 0 };
            if pending.settled {
                return (Err(SettleError::AlreadySettled), 0);
            }
            if now > pending.until {
                return (Err(SettleError::Expired { until: pending.until, now }), 0);
            }
            if pending.is_void {
                return (Err(SettleError::Reset), 0);
            }
            pending.settled = true;
            let change = i128::from(actual) - i128::from(pending.charged);
            let charge = (pending.charged_at, &pending.charges[..]);
            let dropped = if change == 0 { 0 } else { model.settle(numbers, now, change, charge) };
            (Ok(decision(model)), if change > 0 { dropped } else { 0 })
        }
        Verb::Reserve(..) | Verb::Change(..) => unreachable!("done elsewhere"),
    }
}

proptest! {
    #![proptest_config(cases(600))]

    #[test]
    fn every_operation_agrees_with_the_model(
        mut limits in [any_small(), any_small(), any_small()],
        trace in vec((verb(), 0..3_usize, 0..2_usize, 0..12_u64), 1..60),
    ) {
        let clock = ManualClock::new(Tick(1_000));
        let store = MemoryStore::new(Capacity::of(100), &clock);
        let limiter: Limiter<'_> = RateLimiter::in_store("api", tiers(&limits), store);
        let keys = ["alice", "bob"];
        let mut models = [None, None];
        let mut reservations: Vec<Pending> = Vec::new();
        let mut dropped_debt = 0;
        let mut known: std::collections::BTreeSet<String> =
            limits.iter().map(|limit| format!("{:?}", limit.numbers())).collect();
        for (step, (verb, tier, client, gap)) in trace.iter().enumerate() {
            clock.advance(Ticks(*gap));
            let now = tallygate::clock::Clock::now(&clock);
            if let Verb::Change(tier, limit) = verb {
                // At most four policies: a policy that was dropped and is used again keeps its old receipts.
                let numbers = format!("{:?}", limit.numbers());
                if known.len() == 4 && !known.contains(&numbers) {
                    continue;
                }
                known.insert(numbers);
                limits[*tier] = limit.clone();
                limiter.replace(&tiers(&limits));
                continue;
            }
            let (mut tier, mut client) = (*tier, *client);
            let count = reservations.len();
            let mut pending = match verb {
                Verb::Settle(which, _) | Verb::Cancel(which) if count > 0 => {
                    let pending = &mut reservations[which % count];
                    (tier, client) = (pending.tier, pending.client);
                    Some(pending)
                }
                Verb::Settle(..) | Verb::Cancel(_) => continue,
                _ => None,
            };
            let numbers = limits[tier].numbers();
            let moves = match (verb, &pending) {
                // A settlement acts on the policies that were charged.
                (_, Some(_)) => true,
                (Verb::Check(cost) | Verb::Refund(cost) | Verb::Reserve(cost, _), _) => *cost > 0,
                (verb, _) => matches!(verb, Verb::Reset),
            };
            let model = models[client].get_or_insert_with(|| Client::first(numbers, now));
            // Only an operation that changes the state moves the key to the tier of the call.
            let mut looked_at = model.clone();
            if pending.is_none() {
                looked_at.change(numbers, now);
            }
            let model = if moves {
                *model = looked_at;
                model
            } else {
                &mut looked_at
            };
            let ask = Ask::new(keys[client]).tier(tier.checked_sub(1).map(|tier| TIERS[tier]));
            if let Verb::Reserve(estimate, ttl) = verb {
                let reserved = limiter.reserve(ask.cost(*estimate), Ticks(*ttl));
                let reserved = reserved.expect("short");
                let (expected, charges) = model.reserve(now, *estimate);
                prop_assert_eq!(*reserved.decision(), expected, "step {}", step);
                let until = Tick(now.0 + i64::try_from(*ttl).expect("small"));
                reservations.extend(reserved.granted().map(|reservation| Pending {
                    reservation, client, tier, until, charged: *estimate, charged_at: now, charges,
                    settled: false, is_void: false,
                }));
                continue;
            }
            let answer = run(&limiter, verb, ask, &mut pending);
            let (expected, dropped) = on_model(model, verb, numbers, now, pending);
            dropped_debt += dropped;
            if matches!(verb, Verb::Reset) {
                reservations.iter_mut().filter(|one| one.client == client).for_each(|one| one.is_void = true);
            }
            match (answer, expected) {
                (Ok(answer), Ok(expected)) => {
                    // An operation that charges nothing is allowed, and returns the state of the key.
                    prop_assert_eq!(answer, expected, "step {} {:?}", step, verb);
                }
                (answer, expected) => prop_assert_eq!(answer.err(), expected.err(), "step {}", step),
            }
        }
        prop_assert_eq!(u128::from(limiter.store().usage().debt_dropped), dropped_debt);
    }
}

fn limiter(policy: Policy, clock: &ManualClock) -> RateLimiter<Policy, PolicyStore<&ManualClock>> {
    let store = PolicyStore::new(&policy, Capacity::of(10), clock);
    RateLimiter::with_store(policy, store)
}

/// The operations of a limiter of one policy, for each of the six algorithms. Except for the table, the code is the
/// same as with tiers.
#[test]
fn verbs_of_a_single_policy() {
    for kind in Kind::ALL {
        let clock = ManualClock::new(Tick(100));
        let policy = Policy::of(kind, 10).per(Ticks(100)).build().expect("valid");
        let limiter = limiter(policy, &clock);
        assert_eq!(limiter.check(Ask::new("a").cost(6)).expect("short").remaining, 4, "{kind}");
        assert_eq!(limiter.peek("a").expect("short").remaining, 3, "{kind}");
        assert_eq!(
            limiter.peek(Ask::new("a").at(Tick(100))).expect("short").remaining,
            3,
            "{kind}"
        );
        assert_eq!(limiter.refund(Ask::new("a").cost(2)).expect("short").remaining, 6, "{kind}");
        assert_eq!(
            limiter.refund(Ask::new("a").at(Tick(100))).expect("short").remaining,
            7,
            "{kind}"
        );
        assert_eq!(
            limiter.refund(Ask::new("a").cost(99)).expect("short").remaining,
            10,
            "{kind}: not above"
        );
        let reserved = limiter.reserve(Ask::new("a").cost(10), Ticks(50)).expect("short");
        assert!(!limiter.is_allowed("a").expect("short"), "{kind}");
        let mut reservation = reserved.granted().expect("all was left");
        assert_eq!((reservation.charged(), reservation.until()), (10, Tick(150)));
        let settled = limiter.settle(&mut reservation, 13).expect("in time");
        assert_eq!((settled.remaining, settled.allowed), (0, true), "{kind}: in debt");
        assert!(
            !limiter.check(Ask::new("a").cost(0)).expect("short").allowed,
            "{kind}: not even a look"
        );
        assert_eq!(limiter.reset("a").expect("short").remaining, 10, "{kind}");
        // Every operation uses the given time.
        let used_at = |now| {
            let status = limiter.check(Ask::new("t").cost(0).at(Tick(now))).expect("short");
            status.limit - status.remaining
        };
        assert!(limiter.check(Ask::new("t").cost(5).at(Tick(1_000))).expect("short").allowed);
        let answer = limiter.peek(Ask::new("t").at(Tick(1_400))).expect("short");
        assert_eq!(
            (answer.remaining, answer.limit),
            (9, 10),
            "{kind}: all was earned back by then"
        );
        let answer = limiter.peek(Ask::new("t").cost(2).at(Tick(1_400))).expect("short");
        assert_eq!(answer.remaining, 8, "{kind}");
        assert_eq!(limiter.peek(Ask::new("t").cost(3)).map(|answer| answer.limit), Ok(10));
        let answer = limiter.refund(Ask::new("t").at(Tick(1_001))).expect("short");
        assert!(answer.remaining >= 6 && used_at(1_002) <= 4, "{kind}");
        let reserved =
            limiter.reserve(Ask::new("t").cost(4).at(Tick(1_500)), Ticks(10)).expect("short");
        let mut reservation = reserved.granted().expect("room");
        assert_eq!(reservation.until(), Tick(1_510));
        assert!(
            limiter.settle(&mut reservation, Actual::new(0).at(Tick(1_511))).is_err(),
            "{kind}: too late"
        );
        assert!(
            limiter.settle(&mut reservation, Actual::new(0).at(Tick(1_510))).is_ok(),
            "{kind}: in time"
        );
        assert!(limiter.check(Ask::new("t").cost(9).at(Tick(1_600))).expect("short").allowed);
        assert_eq!(
            limiter.reset(Ask::new("t").at(Tick(1_601))).expect("short").remaining,
            10,
            "{kind}"
        );
        assert_eq!(used_at(1_602), 0, "{kind}");
        let _ = limiter.check("a").expect("short");
        let denied = limiter.reserve(Ask::new("a").cost(11), Ticks(50)).expect("short");
        assert_eq!(denied.decision().retry_after, None);
        assert!(denied.granted().is_none());
    }
}

#[test]
fn a_reservation_is_settled_once_and_in_time() {
    let clock = ManualClock::new(Tick(0));
    let limiter = limiter(Policy::token_bucket(10).per_hour().build().expect("valid"), &clock);
    let reserve = || {
        limiter.reserve(Ask::new("a").cost(3), Ticks(5)).expect("short").granted().expect("room")
    };
    let (mut once, mut late, mut canceled) = (reserve(), reserve(), reserve());
    assert_eq!(once.key(), b"a");
    assert!(limiter.cancel(&mut canceled).is_ok_and(|decision| decision.remaining == 4));
    assert_eq!(limiter.cancel(&mut canceled), Err(StoreError::Settle(SettleError::AlreadySettled)));
    clock.set(Tick(5));
    assert!(limiter.settle(&mut once, 0).is_ok());
    let twice = limiter.settle(&mut once, 0).expect_err("settled");
    assert_eq!(twice.to_string(), "the reservation was settled before; settle each one once");
    clock.set(Tick(6));
    let expired = limiter.settle(&mut late, 0).expect_err("too late");
    assert_eq!(expired, StoreError::Settle(SettleError::Expired { until: Tick(5), now: Tick(6) }));
    assert!(
        expired.to_string().starts_with("the reservation could be settled until 5, and it is 6")
    );
    assert_eq!(limiter.peek("a").expect("short").remaining, 6, "the late one stays charged");
    drop(limiter.reserve(Ask::new("a").cost(7), Ticks(5)).expect("short").granted());
    assert_eq!(
        limiter.check(Ask::new("a").cost(0)).expect("short").remaining,
        0,
        "and so does a dropped one"
    );
}
