//! A shadow limit keeps the state that it would have if it were enforced, whatever is refunded.

use proptest::prelude::*;
use tallygate_core::{
    Algorithm, Cost, Decision, Kind, Limit, LimitBuilder, LimitRecord, LimitState, Op, Part,
    Penalty, Policy, Receipt, Tick, Ticks, reserve, settle,
};
use tallygate_testkit::{cases, costs, small_limit_of, times};

/// The number of changes between charged and uncharged requests that a shadow limit remembers.
const RUNS: usize = 8;

fn builder(limit: &Limit) -> LimitBuilder {
    let n = limit.numbers();
    Policy::of(n.kind, n.limit)
        .per(n.window)
        .burst(n.burst)
        .debt(n.debt)
        .starting_with(n.start)
        .anchor(n.anchor)
}

/// A limit that allows everything, and the limit as a shadow.
fn with_shadow(shadow: LimitBuilder) -> Policy {
    let roomy = Policy::fixed_window(1 << 40).per(Ticks(1 << 40)).named("roomy");
    Policy::all_of("both", [roomy, shadow.named("tried").shadow()]).expect("both are valid")
}

fn encoded(limit: &Limit, state: &LimitState) -> Vec<u8> {
    let mut bytes = Vec::new();
    limit.encode(state, &mut bytes);
    bytes
}

/// The units of the newest requests that have not been refunded, the newest last.
#[derive(Default)]
struct NewestRequests(Vec<(Cost, bool)>);

impl NewestRequests {
    fn push(&mut self, units: Cost, is_charged: bool) {
        self.0.push((units, is_charged));
        let mut uncharged_runs = 0;
        let mut newer_is_charged = true;
        for (_, is_charged) in self.0.iter_mut().rev() {
            uncharged_runs += usize::from(newer_is_charged && !*is_charged);
            newer_is_charged = *is_charged;
            *is_charged |= uncharged_runs > RUNS;
        }
    }

    /// Drops settled requests, unless there are newer ones.
    fn trim(&mut self) {
        while self.0.last().is_some_and(|(units, _)| *units == 0) {
            self.0.pop();
        }
    }

    /// Takes off the newest units, and returns how many of them were charged.
    fn pop(&mut self, mut units: Cost) -> Cost {
        let mut charged = 0;
        while units > 0 {
            let (request, is_charged) = self.0.last_mut().expect("there are as many units");
            let taken = units.min(*request);
            *request -= taken;
            units -= taken;
            charged += if *is_charged { taken } else { 0 };
            self.trim();
        }
        charged
    }

    fn units(&self) -> Cost {
        self.0.iter().map(|(units, _)| units).sum()
    }
}

proptest! {
    #![proptest_config(cases(1500))]

    /// The shadow limit runs beside an enforced limit that gets only the requests that it allows. Refunds return the
    /// newest requests.
    #[test]
    fn a_shadow_limit_decides_as_if_it_were_enforced(
        (limit, times, steps) in proptest::sample::select(&Kind::ALL[..])
            .prop_flat_map(small_limit_of)
            .prop_flat_map(|limit| {
                let times = times(&limit, 60, false);
                // Not more than the roomy limit allows.
                let costs = costs(&limit).prop_map(|cost| cost.min(1000));
                let step = (costs, proptest::option::weighted(0.4, 0..=100_u64));
                (Just(limit), times, proptest::collection::vec(step, 60))
            }),
        penalty in proptest::option::weighted(0.2, (1..30_u64, 1..4_u64)),
    ) {
        let penalized = |builder: LimitBuilder| match penalty {
            Some((lasts, after)) => builder.penalty(Penalty::lasting(Ticks(lasts)).after(after)),
            None => builder,
        };
        let enforced = penalized(builder(&limit)).build().unwrap();
        let policy = with_shadow(penalized(builder(&limit)));
        let (mut alone, mut both) = (enforced.initial(times[0]), policy.initial(times[0]));
        let mut newest = NewestRequests::default();
        for (&now, &(cost, refund)) in times.iter().zip(&steps) {
            if let Some(percent) = refund {
                let units = newest.units() * percent / 100;
                let charged = newest.pop(units);
                let refund = |units: Cost| Op::Force(-i128::from(units));
                Part { rule: &policy, state: &mut both, op: refund(units) }.step::<bool>(now, true);
                Part { rule: &enforced, state: &mut alone, op: refund(charged) }
                    .step::<bool>(now, true);
            } else {
                let expected: Decision = enforced.decide(&mut alone, now, cost);
                let decision: Decision = policy.decide(&mut both, now, cost);
                prop_assert!(decision.allowed);
                prop_assert_eq!(decision.shadow_denied_by.is_some(), !expected.allowed);
                if cost > 0 {
                    newest.push(cost, expected.allowed);
                }
            }
            let (shadow, real) = (both[1].state(), alone[0].state());
            prop_assert_eq!(encoded(&limit, shadow), encoded(&limit, real));
            // The history survives both encodings.
            let mut bytes = Vec::new();
            policy.encode(&both, &mut bytes);
            let mut again = Vec::new();
            policy.encode(&policy.decode(&bytes).unwrap(), &mut again);
            prop_assert_eq!(&bytes, &again);
            let numbers = policy.state_to_numbers(&both);
            let read = policy.state_from_numbers(&numbers).unwrap();
            prop_assert_eq!(policy.state_to_numbers(&read), numbers);
            both = read;
        }
    }

    /// A store may drop a fresh state. The history of the shadow limit goes with it, which must not be noticeable.
    #[test]
    fn dropping_a_fresh_state_is_invisible(
        (limit, times, steps) in proptest::sample::select(&Kind::ALL[..])
            .prop_flat_map(small_limit_of)
            .prop_flat_map(|limit| {
                let times = times(&limit, 60, false);
                let step = (costs(&limit), proptest::option::weighted(0.4, 1..40_u64));
                (Just(limit), times, proptest::collection::vec(step, 60))
            }),
    ) {
        let policy = Policy::all_of(
            "both",
            [
                Policy::fixed_window(1 << 40).per(Ticks(7)).named("roomy"),
                builder(&limit).starting_with(limit.numbers().burst).named("tried").shadow(),
            ],
        )
        .unwrap();
        let (mut kept, mut dropped) = (policy.initial(times[0]), policy.initial(times[0]));
        for (&now, &(cost, refund)) in times.iter().zip(&steps) {
            if policy.is_fresh(&dropped, now) {
                dropped = policy.initial(now);
            }
            let op = match refund {
                Some(units) => Op::Force(-i128::from(units)),
                None => Op::Check(cost),
            };
            let step = |state| {
                let mut part = Part { rule: &policy, state, op };
                let goes = part.allows(now);
                part.step::<Decision>(now, goes).0
            };
            prop_assert_eq!(step(&mut kept), step(&mut dropped));
        }
    }
}

/// A step of a random history.
#[derive(Clone, Debug)]
enum Step {
    Check(Cost),
    Reserve(Cost),
    /// Settles an open reservation for at most so many units less.
    Settle(proptest::sample::Index, Cost),
    Refund(Cost),
}

/// A reservation that can still be settled.
struct OpenReservation {
    /// Its place in the exact history.
    index: usize,
    cost: Cost,
    was_charged: bool,
    receipt: Receipt,
}

proptest! {
    #![proptest_config(cases(3000))]

    /// The exact history knows the units of each reservation. Reservations of which a refund has returned units are not
    /// settled: which request such a refund was for is not known.
    #[test]
    fn a_settlement_returns_the_units_of_its_reservation_in_any_order(
        steps in proptest::collection::vec(
            prop_oneof![
                2 => (1..9_u64).prop_map(Step::Check),
                3 => (1..9_u64).prop_map(Step::Reserve),
                2 => (any::<proptest::sample::Index>(), 1..9_u64)
                    .prop_map(|(which, units)| Step::Settle(which, units)),
                1 => (1..9_u64).prop_map(Step::Refund),
            ],
            1..80,
        ),
    ) {
        let policy = with_shadow(Policy::fixed_window(20).per(Ticks(100)));
        let mut state = policy.initial(Tick(0));
        let mut exact = NewestRequests::default();
        let (mut open, mut used) = (Vec::<OpenReservation>::new(), 0);
        for step in steps {
            match step {
                Step::Check(cost) | Step::Reserve(cost) => {
                    let (decision, receipt) =
                        reserve::<_, Decision>(&policy, &mut state, Tick(0), cost);
                    let was_charged = decision.shadow_denied_by.is_none();
                    prop_assert_eq!(was_charged, used + cost <= 20);
                    used += if was_charged { cost } else { 0 };
                    exact.push(cost, was_charged);
                    let index = exact.0.len() - 1;
                    if matches!(step, Step::Reserve(_)) {
                        open.push(OpenReservation { index, cost, was_charged, receipt });
                    }
                }
                Step::Settle(which, units) if !open.is_empty() => {
                    let OpenReservation { index, cost, was_charged, receipt } =
                        open.swap_remove(which.index(open.len()));
                    let units = units.min(cost);
                    let change = -i128::from(units);
                    let _ = settle::<_, Decision>(&policy, &mut state, Tick(0), change, &receipt);
                    used -= if was_charged { units } else { 0 };
                    let (left, counts_as_charged) = &mut exact.0[index];
                    // Nothing is known of uncharged units that are older than the history.
                    *left -= if was_charged == *counts_as_charged { units } else { 0 };
                    exact.trim();
                }
                Step::Settle(..) => {}
                Step::Refund(units) => {
                    let units = units.min(exact.units());
                    // Older units count as charged, so more may be returned than was charged.
                    used = used.saturating_sub(exact.pop(units));
                    open.retain(|one| exact.0.get(one.index).is_some_and(|left| left.0 == one.cost));
                    let op = Op::Force(-i128::from(units));
                    Part { rule: &policy, state: &mut state, op }.step::<bool>(Tick(0), true);
                }
            }
            let really = policy.limits()[1].used(state[1].state(), Tick(0)).rounded_up();
            prop_assert_eq!(really, used);
            let numbers = policy.state_to_numbers(&state);
            state = policy.state_from_numbers(&numbers).unwrap();
            prop_assert_eq!(policy.state_to_numbers(&state), numbers);
        }
    }
}

/// A refund that is not for a charged request does not lower the shadow limit.
#[test]
fn a_refund_of_a_request_that_the_shadow_limit_denied_returns_nothing_to_it() {
    let policy = with_shadow(Policy::fixed_window(2).per(Ticks(100)));
    let mut state = policy.initial(Tick(0));
    let mut check = |refunds: bool| {
        let decision: Decision = policy.decide(&mut state, Tick(0), 1);
        if refunds {
            let op = Op::Force(-1);
            Part { rule: &policy, state: &mut state, op }.step::<bool>(Tick(0), true);
        }
        decision.shadow_denied_by
    };
    assert_eq!((check(false), check(false)), (None, None));
    for _ in 0..20 {
        assert_eq!(
            check(true),
            Some(1),
            "the shadow limit is used up, and nothing is returned to it"
        );
    }
}

#[test]
fn many_refunds_after_many_requests_return_what_was_charged() {
    let policy = with_shadow(Policy::token_bucket(1).per(Ticks(2)).burst(4));
    let mut state = policy.initial(Tick(0));
    // At one request per tick, the limit charges seven requests, and then every second one.
    let denied = (0..16)
        .filter(|now| {
            policy.decide::<Decision>(&mut state, Tick(*now), 1).shadow_denied_by.is_some()
        })
        .count();
    assert_eq!(denied, 5);
    let shadow = &policy.limits()[1];
    let used_before = shadow.used(state[1].state(), Tick(15)).rounded_up();
    // Of the newest six requests, three were charged.
    for _ in 0..6 {
        Part { rule: &policy, state: &mut state, op: Op::Force(-1) }.step::<bool>(Tick(15), true);
    }
    assert_eq!(shadow.used(state[1].state(), Tick(15)).rounded_up(), used_before - 3);
}

#[test]
fn a_canceled_reservation_that_the_shadow_limit_denied_is_forgotten() {
    let policy = with_shadow(Policy::fixed_window(3).per(Ticks(100)));
    let mut state = policy.initial(Tick(0));
    assert!(policy.decide::<bool>(&mut state, Tick(0), 2));
    let (decision, receipt) = reserve::<_, Decision>(&policy, &mut state, Tick(0), 5);
    assert_eq!(decision.shadow_denied_by, Some(1));
    let _ = settle::<_, Decision>(&policy, &mut state, Tick(0), -5, &receipt);
    // The refund is for the first request, because the reservation is gone.
    Part { rule: &policy, state: &mut state, op: Op::Force(-2) }.step::<bool>(Tick(0), true);
    let next: Decision = policy.decide(&mut state, Tick(0), 3);
    assert_eq!(next.shadow_denied_by, None);
}

/// A shadow limit of some units per 100 ticks, and requests to it.
struct ShadowTrial {
    policy: Policy,
    state: Box<[LimitRecord]>,
    now: Tick,
}

impl ShadowTrial {
    fn new(limit: Cost) -> Self {
        let policy = with_shadow(Policy::fixed_window(limit).per(Ticks(100)));
        let state = policy.initial(Tick(0));
        Self { policy, state, now: Tick(0) }
    }

    /// Returns whether the shadow limit would have allowed the reservation, and its receipt.
    fn reserve(&mut self, cost: Cost) -> (bool, Receipt) {
        let (decision, receipt) =
            reserve::<_, Decision>(&self.policy, &mut self.state, self.now, cost);
        (decision.shadow_denied_by.is_none(), receipt)
    }

    fn cancel(&mut self, cost: Cost, receipt: &Receipt) {
        let change = -i128::from(cost);
        let _ = settle::<_, Decision>(&self.policy, &mut self.state, self.now, change, receipt);
    }

    fn refund(&mut self, cost: Cost) {
        let op = Op::Force(-i128::from(cost));
        Part { rule: &self.policy, state: &mut self.state, op }.step::<bool>(self.now, true);
    }

    fn used(&self) -> Cost {
        self.policy.limits()[1].used(self.state[1].state(), self.now).rounded_up()
    }
}

/// The settlement is for a request in an older run than the newest.
#[test]
fn a_settlement_of_an_older_run_leaves_newer_runs_as_they_are() {
    let mut tried = ShadowTrial::new(6);
    assert!(tried.reserve(3).0);
    let (is_allowed, denied) = tried.reserve(5);
    assert!(!is_allowed);
    assert!(tried.reserve(2).0);
    assert!(!tried.reserve(4).0);
    tried.cancel(5, &denied);
    // The newest 4 units were not charged, and the 2 units before them were.
    tried.refund(4);
    assert_eq!(tried.used(), 5);
    tried.refund(2);
    assert_eq!(tried.used(), 3);
    // The canceled units are gone, so this refund is for the first request.
    tried.refund(1);
    assert_eq!(tried.used(), 2);
}

/// If the newest units belong to the reservation that is settled afterwards, the refund was for older ones.
#[test]
fn a_refund_and_a_settlement_return_different_units_of_a_shadow_limit() {
    let mut tried = ShadowTrial::new(10);
    assert!(tried.reserve(5).0);
    assert!(!tried.reserve(6).0);
    let (is_allowed, receipt) = tried.reserve(5);
    assert!(is_allowed);
    tried.refund(5);
    assert_eq!(tried.used(), 5);
    tried.cancel(5, &receipt);
    assert_eq!(tried.used(), 5, "5 of the 6 uncharged units are returned");
    tried.refund(1);
    assert_eq!(tried.used(), 5, "and now the last of them");
    tried.refund(5);
    assert_eq!(tried.used(), 0);
}

/// An uncharged reservation that is older than the history: it says nothing about newer requests.
#[test]
fn a_reservation_older_than_the_history_changes_no_newer_run() {
    let mut tried = ShadowTrial::new(100);
    let (is_allowed, receipt) = tried.reserve(101);
    assert!(!is_allowed);
    for _ in 0..RUNS {
        assert!(tried.reserve(1).0);
        assert!(!tried.reserve(101).0);
    }
    tried.cancel(101, &receipt);
    for run in (0..RUNS as u64).rev() {
        tried.refund(101);
        assert_eq!(tried.used(), run + 1, "the units of the newest run were not charged");
        tried.refund(1);
        assert_eq!(tried.used(), run);
    }
}

/// A store drops a fresh state with its history. A reservation from before belongs to no run of a new history.
#[test]
fn a_reservation_from_before_a_dropped_state_changes_no_newer_run() {
    let mut tried = ShadowTrial::new(4);
    let (is_allowed, receipt) = tried.reserve(5);
    assert!(!is_allowed);
    tried.now = Tick(100);
    tried.state = tried.policy.initial(tried.now);
    assert!(tried.reserve(4).0);
    assert!(!tried.reserve(5).0);
    tried.cancel(5, &receipt);
    tried.refund(5);
    assert_eq!(tried.used(), 4, "the newest units were not charged");
}

#[test]
fn a_damaged_history_is_an_error() {
    let policy = with_shadow(Policy::fixed_window(1).per(Ticks(100)));
    let mut state = policy.initial(Tick(0));
    for _ in 0..3 {
        assert!(policy.decide::<bool>(&mut state, Tick(0), 1));
    }
    let numbers = policy.state_to_numbers(&state);
    assert_eq!(numbers[6..], [1, 0, 0, 2], "one run: nothing charged after two uncharged units");
    for damage in [[9, 0, 0, 2], [1, -1, 0, 2], [1, 0, 0, 0], [1, 0, 1 << 53, 2], [1, 0, -1, 2]] {
        let damaged = [&numbers[..6], &damage].concat();
        assert!(policy.state_from_numbers(&damaged).is_err(), "{damage:?}");
    }
}
