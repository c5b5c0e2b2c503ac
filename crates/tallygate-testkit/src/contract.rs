//! The contract of all stores: one suite of tests that runs unchanged on each of them.
//!
//! A behavior is a function that gets an empty store. It passes explicit times, so nothing sleeps, and it runs with
//! all six algorithms. [`store_contract!`](crate::store_contract) makes a test of each behavior.
//!
//! The contract does not cover what a store does when it is full or unavailable, because stores differ in that.

use proptest::strategy::{Strategy, ValueTree as _};
use proptest::test_runner::TestRunner;
use tallygate_core::{
    Algorithm as _, Anchor, Cost, Decision, Kind, LimitBuilder, Numbers, Op, Part, Penalty, Policy,
    Source, Tick, Ticks, Timed,
};

use crate::model::Model;
use crate::traces::{Step, any_limit_of, small_limit_of, steps};

/// A store under test.
pub trait Subject {
    /// Carries out an operation on a key at `now`.
    fn apply(&self, policy: &Policy, key: &[u8], op: Op, now: Tick) -> impl Future<Output = Timed>;

    /// Checks the same cost for several keys at `now`.
    fn check_many(
        &self,
        policy: &Policy,
        keys: &[&[u8]],
        cost: Cost,
        now: Tick,
    ) -> impl Future<Output = Vec<Timed>>;

    /// A reservation of the store.
    type Reservation;

    /// Reserves a cost at `now`. The reservation does not expire during the test.
    fn reserve(
        &self,
        policy: &Policy,
        key: &[u8],
        cost: Cost,
        now: Tick,
    ) -> impl Future<Output = (Timed, Self::Reservation)>;

    /// Settles a reservation: changes its charge by `change` units. Returns `None` if the reservation is void.
    fn settle(
        &self,
        policy: &Policy,
        key: &[u8],
        change: i128,
        reservation: &Self::Reservation,
        now: Tick,
    ) -> impl Future<Output = Option<Decision>>;
}

/// Defines a test for each behavior. `$on` is a function that runs a behavior on an empty store:
///
/// ```text
/// fn on_an_empty_store(behavior: impl AsyncFnOnce(&MyStore)) { … }
///
/// tallygate_testkit::store_contract!(on_an_empty_store);
/// ```
///
/// For a store with a single policy, use `store_contract!(on, one policy)`, which leaves out the tests in which the
/// policy of a key changes. For a store that keeps a key under several policies at once (tiers), use
/// `store_contract!(on, tiers)`.
#[macro_export]
macro_rules! store_contract {
    ($on:path) => {
        $crate::store_contract!($on, one policy);
        $crate::store_contract!($on;
            a_change_of_policy_keeps_what_was_used
            a_smaller_policy_clears_only_usage_that_does_not_fit
        );
    };
    ($on:path, tiers) => {
        $crate::store_contract!($on);
        $crate::store_contract!($on;
            a_reservation_returns_only_what_each_policy_charged
            a_refund_returns_nothing_that_another_policy_allowed
        );
    };
    ($on:path, one policy) => {
        $crate::store_contract!($on;
            allows_requests_up_to_the_limit
            a_denied_request_charges_nothing
            retry_after_is_exact
            a_cost_of_0_only_reads
            a_cost_above_the_capacity_never_fits
            keys_are_independent
            several_limits_charge_all_or_none
            a_shadow_limit_reports_and_does_not_deny
            a_penalty_lasts_as_long_as_it_says
            a_refund_stops_at_fresh
            a_canceled_reservation_returns_what_it_charged
            a_reservation_returns_nothing_to_a_later_window
            a_bucket_returns_only_what_has_not_drained
            a_log_returns_the_entries_of_the_reservation
            a_return_leaves_less_to_return_for_earlier_reservations
            a_refund_and_a_settlement_return_different_units
            settlements_after_a_refund_return_different_units
            a_window_returns_only_what_later_refunds_left_of_it
            a_reset_voids_reservations
            a_shadow_limit_returns_only_what_it_charged
            a_refund_of_a_check_that_a_shadow_limit_denied_returns_nothing_to_it
            a_settlement_returns_to_a_shadow_limit_what_its_run_charged
            debt_is_bounded
            a_reset_restores_the_initial_state
            a_late_time_earns_nothing
            a_clock_set_back_locks_no_client_out
            windows_are_half_open
            a_peek_changes_nothing
            a_batch_decides_as_single_checks_in_order
            histories_agree_with_the_model
            histories_of_several_limits_agree_with_the_core
        );
    };
    ($on:path; $($behavior:ident)*) => {
        $(
            #[test]
            fn $behavior() {
                $on($crate::contract::$behavior);
            }
        )*
    };
}

/// A time at which a window of length [`WINDOW`] starts.
const START: i64 = 1_000_000;
const WINDOW: u64 = 100;
const LIMIT: Cost = 10;

fn at(ticks: i64) -> Tick {
    Tick(START + ticks)
}

fn limit_of(kind: Kind) -> LimitBuilder {
    Policy::of(kind, LIMIT).per(Ticks(WINDOW))
}

/// Returns a fixed window that starts at the first request.
fn anchored() -> LimitBuilder {
    limit_of(Kind::FixedWindow).anchor(Anchor::FirstRequest)
}

/// Returns where the windows of a policy with one limit start.
fn anchor(policy: &Policy) -> Anchor {
    policy.limits()[0].numbers().anchor
}

fn build(limit: LimitBuilder) -> Policy {
    limit.build().expect("the policy is valid")
}

/// A key of the store under a policy.
struct Client<'a, S> {
    store: &'a S,
    policy: &'a Policy,
    key: String,
}

impl<'a, S: Subject> Client<'a, S> {
    fn new(store: &'a S, policy: &'a Policy, key: impl std::fmt::Display) -> Self {
        let kind = policy.limits()[0].numbers().kind;
        Self { store, policy, key: format!("{kind} {key}") }
    }

    async fn apply(&self, op: Op, now: Tick) -> Decision {
        let Timed { decision, at } =
            self.store.apply(self.policy, self.key.as_bytes(), op, now).await;
        // A store whose callers can be late decides at the time of the last change if that is later.
        assert!(at >= now, "{} {op:?} at {at:?} instead of {now:?}", self.key);
        assert_eq!(decision.source, Source::Store, "{} {op:?}", self.key);
        decision
    }

    async fn check(&self, cost: Cost, now: Tick) -> Decision {
        self.apply(Op::Check(cost), now).await
    }

    async fn peek(&self, cost: Cost, now: Tick) -> Decision {
        self.apply(Op::Peek(cost), now).await
    }

    async fn reserve(&self, cost: Cost, now: Tick) -> (Decision, S::Reservation) {
        let (timed, reservation) =
            self.store.reserve(self.policy, self.key.as_bytes(), cost, now).await;
        (timed.decision, reservation)
    }

    async fn settle(
        &self,
        reservation: &S::Reservation,
        change: i128,
        now: Tick,
    ) -> Option<Decision> {
        self.store.settle(self.policy, self.key.as_bytes(), change, reservation, now).await
    }

    /// Settles a reservation, and returns what remains.
    async fn remaining_after_settling(
        &self,
        reservation: &S::Reservation,
        change: i128,
        now: Tick,
    ) -> Cost {
        self.settle(reservation, change, now).await.expect("the reservation is not void").remaining
    }

    async fn allows(&self, cost: Cost, now: Tick) -> bool {
        self.check(cost, now).await.allowed
    }
}

/// Requests are allowed until nothing is left, and denied from then on.
pub async fn allows_requests_up_to_the_limit(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind));
        let client = Client::new(store, &policy, "alice");
        for left in (0..LIMIT).rev() {
            let decision = client.check(1, at(0)).await;
            assert!(decision.allowed, "{kind} with {left} left");
            assert_eq!((decision.limit, decision.remaining), (LIMIT, left), "{kind}");
            assert_eq!(
                (decision.retry_after, decision.denied_by),
                (Some(Ticks::ZERO), None),
                "{kind}"
            );
        }
        for _ in 0..3 {
            let decision = client.check(1, at(0)).await;
            assert!(!decision.allowed, "{kind}");
            assert_eq!((decision.remaining, decision.denied_by), (0, Some(0)), "{kind}");
        }
    }
}

/// A denied request charges nothing.
pub async fn a_denied_request_charges_nothing(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind));
        let client = Client::new(store, &policy, "alice");
        assert!(client.allows(7, at(0)).await, "{kind}");
        for _ in 0..3 {
            let decision = client.check(4, at(0)).await;
            assert_eq!((decision.allowed, decision.remaining), (false, 3), "{kind}");
        }
        assert!(client.allows(3, at(0)).await, "{kind}");
    }
}

/// A request is allowed after exactly `retry_after`, and denied one tick earlier.
pub async fn retry_after_is_exact(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind));
        for cost in [1, 4, LIMIT] {
            for asked in [0, 7, 30] {
                let client = Client::new(store, &policy, format_args!("{cost} {asked}"));
                assert!(client.allows(LIMIT, at(0)).await, "{kind}");
                let decision = client.check(LIMIT.min(cost + 3), at(asked)).await;
                assert!(!decision.allowed, "{kind}: {cost} at {asked}");
                let decision = client.peek(cost, at(asked)).await;
                if decision.allowed {
                    continue;
                }
                let wait =
                    decision.retry_after.expect("the cost fits after some time").0.cast_signed();
                assert!(!client.allows(cost, at(asked + wait - 1)).await, "{kind}: {cost} early");
                assert!(client.allows(cost, at(asked + wait)).await, "{kind}: {cost} in time");
            }
        }
    }
}

/// A check of cost 0 returns the state and does not change it. It is denied only if the key is in debt.
pub async fn a_cost_of_0_only_reads(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind).debt(5));
        let client = Client::new(store, &policy, "alice");
        for used in [0, 4, LIMIT] {
            let decision = client.check(0, at(0)).await;
            assert_eq!((decision.allowed, decision.remaining), (true, LIMIT), "{kind}");
            assert!(client.allows(used, at(0)).await, "{kind}");
            let decision = client.check(0, at(0)).await;
            assert_eq!((decision.allowed, decision.remaining), (true, LIMIT - used), "{kind}");
            let _ = client.apply(Op::Reset, at(0)).await;
        }
        let _ = client.apply(Op::Force((LIMIT + 1).into()), at(0)).await;
        assert!(!client.allows(0, at(0)).await, "{kind}");
    }
}

/// A cost above the capacity has no `retry_after`.
pub async fn a_cost_above_the_capacity_never_fits(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind));
        let client = Client::new(store, &policy, "alice");
        for cost in [LIMIT + 1, 1 << 40, Cost::MAX] {
            let decision = client.check(cost, at(0)).await;
            assert_eq!((decision.allowed, decision.retry_after), (false, None), "{kind}: {cost}");
        }
        let decision = client.check(LIMIT, at(0)).await;
        assert_eq!((decision.allowed, decision.remaining), (true, 0), "{kind}");
    }
}

/// Similar keys are different keys.
pub async fn keys_are_independent(store: &impl Subject) {
    let long = [b'x'; 200];
    let longer = [b'x'; 201];
    let keys: [&[u8]; 12] = [
        b"",
        b"a",
        b"A",
        b"a ",
        b"a:b",
        b"{a}",
        b"{a}b",
        b"\0",
        b"\xff\xfe",
        "ä".as_bytes(),
        &long,
        &longer,
    ];
    let policy = build(limit_of(Kind::TokenBucket));
    for (used, key) in (0..).zip(keys) {
        assert!(store.apply(&policy, key, Op::Check(used % LIMIT), at(0)).await.decision.allowed);
    }
    for (used, key) in (0..).zip(keys) {
        let decision = store.apply(&policy, key, Op::Check(0), at(0)).await.decision;
        assert_eq!(decision.remaining, LIMIT - used % LIMIT, "{}", key.escape_ascii());
    }
}

/// If one limit denies a request, no other limit is charged, in any order of the limits.
pub async fn several_limits_charge_all_or_none(store: &impl Subject) {
    for kind in Kind::ALL {
        for tight_is in [0, 1] {
            let tight = Policy::of(kind, LIMIT / 2).per(Ticks(WINDOW)).named("tight");
            let wide = Policy::of(kind, LIMIT).per(Ticks(1_000_000)).named("wide");
            let limits = if tight_is == 0 { [tight, wide] } else { [wide, tight] };
            let policy = Policy::all_of("both", limits).expect("the policy is valid");
            let client = Client::new(store, &policy, tight_is);
            assert!(client.allows(LIMIT / 2, at(0)).await, "{kind}");
            for _ in 0..3 {
                let decision = client.check(1, at(0)).await;
                assert_eq!(
                    (decision.allowed, decision.denied_by),
                    (false, Some(tight_is)),
                    "{kind}"
                );
            }
            // After two windows, the tight limit has its full quota again, and the wide one is unchanged.
            let later = at(2 * WINDOW.cast_signed());
            let decision = client.check(LIMIT / 2, later).await;
            assert_eq!((decision.allowed, decision.remaining), (true, 0), "{kind}");
            let later = at(4 * WINDOW.cast_signed());
            let decision = client.check(1, later).await;
            assert_eq!(
                (decision.allowed, decision.denied_by),
                (false, Some(1 - tight_is)),
                "{kind}"
            );
        }
    }
}

/// A shadow limit reports that it would have denied a request, and denies none.
pub async fn a_shadow_limit_reports_and_does_not_deny(store: &impl Subject) {
    for kind in Kind::ALL {
        let trial = limit_of(kind).named("trial").shadow();
        let real = Policy::of(kind, 2 * LIMIT).per(Ticks(WINDOW)).named("real");
        let policy = Policy::all_of("both", [trial, real]).expect("the policy is valid");
        let client = Client::new(store, &policy, "alice");
        for count in 1..=2 * LIMIT {
            let decision = client.check(1, at(0)).await;
            let shadow = (count > LIMIT).then_some(0);
            assert_eq!(
                (decision.allowed, decision.shadow_denied_by),
                (true, shadow),
                "{kind}: {count}"
            );
        }
        let decision = client.check(1, at(0)).await;
        assert_eq!((decision.allowed, decision.denied_by), (false, Some(1)), "{kind}");
    }
}

/// After a number of denials, a client is denied for the duration of the penalty, and not one tick longer.
pub async fn a_penalty_lasts_as_long_as_it_says(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind).penalty(Penalty::lasting(Ticks(5_000)).after(2)));
        let client = Client::new(store, &policy, "alice");
        assert!(client.allows(LIMIT, at(0)).await, "{kind}");
        let first = client.check(1, at(0)).await;
        assert!(first.retry_after < Some(Ticks(5_000)), "{kind}: one denial starts no penalty");
        let second = client.check(1, at(1)).await;
        assert_eq!(second.retry_after, Some(Ticks(5_000)), "{kind}");
        let decision = client.check(1, at(5_000)).await;
        assert_eq!((decision.allowed, decision.retry_after), (false, Some(Ticks(1))), "{kind}");
        assert!(client.allows(1, at(5_001)).await, "{kind}");
    }
}

/// A refund returns at most what was used.
pub async fn a_refund_stops_at_fresh(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind));
        let client = Client::new(store, &policy, "alice");
        let decision = client.apply(Op::Force(-3), at(0)).await;
        assert_eq!((decision.allowed, decision.remaining), (true, LIMIT), "{kind}: a new key");
        assert!(client.allows(6, at(0)).await, "{kind}");
        assert_eq!(client.apply(Op::Force(-2), at(0)).await.remaining, 6, "{kind}");
        assert_eq!(client.apply(Op::Force(-100), at(0)).await.remaining, LIMIT, "{kind}");
        assert!(client.allows(LIMIT, at(0)).await, "{kind}");
        assert!(!client.allows(1, at(0)).await, "{kind}");
    }
}

/// Canceling a reservation returns a charge that still counts.
pub async fn a_canceled_reservation_returns_what_it_charged(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind));
        let client = Client::new(store, &policy, "alice");
        let (decision, six) = client.reserve(6, at(0)).await;
        assert_eq!((decision.allowed, decision.remaining), (true, 4), "{kind}");
        assert_eq!(client.remaining_after_settling(&six, -6, at(1)).await, LIMIT, "{kind}");
        assert!(client.allows(LIMIT, at(1)).await, "{kind}");
    }
}

/// A policy that had no room for the whole estimate charged a part of it, and returns at most that part.
pub async fn a_reservation_returns_only_what_each_policy_charged(store: &impl Subject) {
    let return_units = async |pro: &Client<'_, _>, (reservation, change), now| {
        assert!(pro.settle(&reservation, change, now).await.is_some(), "{}", pro.key);
    };
    return_under_a_larger_policy(store, return_units).await;
}

/// A refund under one policy does not return what was allowed under another policy.
pub async fn a_refund_returns_nothing_that_another_policy_allowed(store: &impl Subject) {
    let return_units = async |pro: &Client<'_, _>, (_, change), now| {
        assert!(pro.apply(Op::Force(change), now).await.allowed, "{}", pro.key);
    };
    return_under_a_larger_policy(store, return_units).await;
}

/// Charges more under a larger policy than a smaller one has room for, and returns it.
async fn return_under_a_larger_policy<S: Subject>(
    store: &S,
    return_units: impl AsyncFn(&Client<'_, S>, (S::Reservation, i128), Tick),
) {
    let cases = [(10, 0, 0), (10, 0, 2), (4, 0, 0), (4, 0, 2), (4, 57, 2)];
    // A larger policy with a higher rate, and one with the same rate.
    let larger =
        [WINDOW, 10 * WINDOW].into_iter().flat_map(|window| cases.map(|one| (window, one)));
    for (kind, (window, (used, actual, moment))) in
        Kind::ALL.into_iter().flat_map(|kind| larger.clone().map(move |one| (kind, one)))
    {
        let (small, large) =
            (build(limit_of(kind)), build(Policy::of(kind, 100).per(Ticks(window))));
        let key = format!("{used} {actual} {moment} {window}");
        let (base, pro) = (Client::new(store, &small, &key), Client::new(store, &large, &key));
        assert!(base.allows(used, at(0)).await, "{kind} {key}");
        let (decision, reservation) = pro.reserve(60, at(moment)).await;
        assert!(decision.allowed, "{kind} {key}");
        assert!(!base.allows(1, at(moment)).await, "{kind} {key}: charged to both");
        return_units(&pro, (reservation, i128::from(actual) - 60), at(moment)).await;
        // The state is the same as if only the actual cost had been charged, up to the bound of each policy.
        let left = LIMIT.saturating_sub(used + actual);
        assert_eq!(base.peek(0, at(moment)).await.remaining, left, "{kind} {key}");
        assert!(!base.allows(left + 1, at(moment)).await, "{kind} {key}");
        assert!(left == 0 || base.allows(left, at(moment)).await, "{kind} {key}");
        let left = 100 - used - actual - left;
        assert_eq!(pro.peek(0, at(moment)).await.remaining, left, "{kind} {key}");
    }
}

/// A charge in an ended window returns nothing to the next window.
pub async fn a_reservation_returns_nothing_to_a_later_window(store: &impl Subject) {
    for kind in [Kind::FixedWindow, Kind::SlidingWindowLog, Kind::SlidingWindowCounter] {
        let policy = build(limit_of(kind));
        let client = Client::new(store, &policy, "alice");
        let (_, early) = client.reserve(6, at(0)).await;
        let (decision, late) = client.reserve(LIMIT, at(250)).await;
        assert!(decision.allowed, "{kind}");
        assert_eq!(client.remaining_after_settling(&early, -6, at(251)).await, 0, "{kind}");
        assert_eq!(client.remaining_after_settling(&late, -6, at(251)).await, 6, "{kind}");
    }
}

/// Reserving, waiting and canceling gains nothing.
pub async fn a_bucket_returns_only_what_has_not_drained(store: &impl Subject) {
    for kind in [Kind::TokenBucket, Kind::Gcra, Kind::LeakyBucket] {
        let policy = build(limit_of(kind));
        let client = Client::new(store, &policy, "alice");
        let mut banked = Vec::new();
        for round in 0..6 {
            let (decision, reservation) = client.reserve(LIMIT, at(100 * round)).await;
            assert!(decision.allowed, "{kind}");
            banked.push(reservation);
        }
        let mut allowed = 0;
        for reservation in &banked {
            let _ = client.remaining_after_settling(reservation, -i128::from(LIMIT), at(600)).await;
            while client.allows(1, at(600)).await {
                allowed += 1;
            }
        }
        assert_eq!(allowed, LIMIT, "{kind}");
        let (_, half) = client.reserve(LIMIT, at(1_000)).await;
        assert!(client.allows(5, at(1_050)).await, "{kind}");
        assert_eq!(
            client.remaining_after_settling(&half, -i128::from(LIMIT), at(1_050)).await,
            5,
            "{kind}"
        );
    }
}

/// If a log returned its newest entries instead, it would allow nearly twice its limit within two ticks.
pub async fn a_log_returns_the_entries_of_the_reservation(store: &impl Subject) {
    let policy = build(limit_of(Kind::SlidingWindowLog));
    let client = Client::new(store, &policy, "alice");
    let (_, early) = client.reserve(LIMIT - 1, at(0)).await;
    assert!(client.allows(1, at(99)).await);
    assert_eq!(
        client.remaining_after_settling(&early, 1 - i128::from(LIMIT), at(99)).await,
        LIMIT - 1
    );
    assert!(client.allows(LIMIT - 1, at(99)).await);
    let decision = client.check(1, at(100)).await;
    assert_eq!((decision.allowed, decision.remaining), (false, 0));
}

/// After units are returned, units that were charged later drain sooner.
pub async fn a_return_leaves_less_to_return_for_earlier_reservations(store: &impl Subject) {
    for kind in [Kind::TokenBucket, Kind::Gcra, Kind::LeakyBucket] {
        for refunds in [false, true] {
            let policy = build(limit_of(kind));
            let client = Client::new(store, &policy, refunds);
            let (_, first) = client.reserve(5, at(0)).await;
            let (_, second) = client.reserve(5, at(0)).await;
            let decision = if refunds {
                client.apply(Op::Force(-5), at(1)).await
            } else {
                client.settle(&first, -5, at(1)).await.expect("the reservation is not void")
            };
            assert_eq!(decision.remaining, 5, "{kind}");
            assert!(client.allows(5, at(50)).await, "{kind}: everything else has drained");
            assert_eq!(client.remaining_after_settling(&second, -5, at(50)).await, 5, "{kind}");
        }
    }
}

/// A plain refund returns the units that a reservation charged. Units that are charged later belong to other requests.
pub async fn a_refund_and_a_settlement_return_different_units(store: &impl Subject) {
    for limit in Kind::ALL.map(limit_of).into_iter().chain([anchored()]) {
        let policy = build(limit);
        let client = Client::new(store, &policy, format!("{:?}", anchor(&policy)));
        let (decision, ten) = client.reserve(LIMIT, at(0)).await;
        assert!(decision.allowed, "{policy:?}");
        assert_eq!(client.apply(Op::Force(-10), at(1)).await.remaining, LIMIT, "{policy:?}");
        assert!(client.allows(LIMIT, at(2)).await, "{policy:?}");
        assert_eq!(client.remaining_after_settling(&ten, -10, at(3)).await, 0, "{policy:?}");
        assert!(!client.allows(1, at(3)).await, "{policy:?}");
    }
}

/// Two reservations share the units that a refund left: the second settlement returns what the first one did not.
pub async fn settlements_after_a_refund_return_different_units(store: &impl Subject) {
    for limit in Kind::ALL.map(limit_of).into_iter().chain([anchored()]) {
        let policy = build(limit);
        for settles_the_first_one_first in [true, false] {
            let key = format!("{:?} {settles_the_first_one_first}", anchor(&policy));
            let client = Client::new(store, &policy, key);
            let three = (client.reserve(3, at(0)).await.1, -3);
            let six = (client.reserve(6, at(0)).await.1, -6);
            assert_eq!(client.apply(Op::Force(-6), at(1)).await.remaining, 7, "{policy:?}");
            assert!(client.allows(5, at(2)).await, "{policy:?}");
            let both = if settles_the_first_one_first { [three, six] } else { [six, three] };
            for (reservation, change) in both {
                // Together, they return the 3 units that the refund left. The other 5 belong to the check.
                assert_eq!(
                    client.remaining_after_settling(&reservation, change, at(3)).await,
                    5,
                    "{policy:?}"
                );
            }
        }
    }
}

/// A sliding window counter also returns units from the previous window, but only units that are left of the charge.
pub async fn a_window_returns_only_what_later_refunds_left_of_it(store: &impl Subject) {
    let policy = build(limit_of(Kind::SlidingWindowCounter));
    for is_in_the_next_window in [false, true] {
        let client = Client::new(store, &policy, is_in_the_next_window);
        let (_, ten) = client.reserve(LIMIT, at(0)).await;
        if is_in_the_next_window {
            // The refund takes 1 unit from the current window and 5 from the window of the reservation.
            assert!(client.allows(1, at(110)).await);
            let _ = client.apply(Op::Force(-6), at(110)).await;
            assert_eq!(
                client.remaining_after_settling(&ten, -10, at(110)).await,
                LIMIT,
                "nothing is left"
            );
            assert!(client.allows(LIMIT, at(110)).await);
        } else {
            let _ = client.apply(Op::Force(-6), at(1)).await;
            assert!(client.allows(6, at(50)).await);
            // 6 units of the previous window are left, of which nine tenths count.
            assert_eq!(client.remaining_after_settling(&ten, -10, at(110)).await, 5);
        }
    }
}

/// A reservation from before a reset cannot be settled. One from after it can.
pub async fn a_reset_voids_reservations(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind));
        let client = Client::new(store, &policy, "alice");
        let (_, before) = client.reserve(LIMIT, at(0)).await;
        let _ = client.apply(Op::Reset, at(1)).await;
        let (decision, after) = client.reserve(LIMIT, at(2)).await;
        assert!(decision.allowed, "{kind}");
        for change in [-1, 0, 1, -i128::from(LIMIT)] {
            assert_eq!(client.settle(&before, change, at(2)).await, None, "{kind}: {change}");
        }
        assert!(!client.allows(1, at(2)).await, "{kind}");
        assert_eq!(
            client.remaining_after_settling(&after, -i128::from(LIMIT), at(2)).await,
            LIMIT,
            "{kind}"
        );
    }
}

/// A shadow limit keeps its state as if it were enforced: a reservation that it would have denied does not change it.
pub async fn a_shadow_limit_returns_only_what_it_charged(store: &impl Subject) {
    for kind in Kind::ALL {
        let half = Policy::of(kind, 5).per(Ticks(WINDOW)).named("half").shadow();
        let policy = Policy::all_of("both", [limit_of(kind).named("all"), half])
            .expect("the policy is valid");
        let client = Client::new(store, &policy, "alice");
        let (decision, fits) = client.reserve(4, at(0)).await;
        assert_eq!(decision.shadow_denied_by, None, "{kind}");
        let (decision, too_much) = client.reserve(4, at(0)).await;
        assert_eq!((decision.allowed, decision.shadow_denied_by), (true, Some(1)), "{kind}");
        assert_eq!(client.remaining_after_settling(&too_much, -4, at(0)).await, 6, "{kind}");
        assert_eq!(
            client.peek(2, at(0)).await.shadow_denied_by,
            Some(1),
            "{kind}: 4 of 5 are used"
        );
        assert_eq!(client.remaining_after_settling(&fits, -4, at(0)).await, LIMIT, "{kind}");
        assert_eq!(client.peek(5, at(0)).await.shadow_denied_by, None, "{kind}: nothing is used");
    }
}

/// Units come back in the reverse order of the requests, so the first refund is of the request that the shadow limit did
/// not charge.
pub async fn a_refund_of_a_check_that_a_shadow_limit_denied_returns_nothing_to_it(
    store: &impl Subject,
) {
    for kind in Kind::ALL {
        let half = Policy::of(kind, 5).per(Ticks(WINDOW)).named("half").shadow();
        let policy = Policy::all_of("both", [limit_of(kind).named("all"), half])
            .expect("the policy is valid");
        let client = Client::new(store, &policy, "bob");
        for denied_by in [None, Some(1)] {
            let decision = client.apply(Op::Check(4), at(0)).await;
            assert_eq!((decision.allowed, decision.shadow_denied_by), (true, denied_by), "{kind}");
        }
        assert_eq!(client.apply(Op::Force(-4), at(0)).await.remaining, LIMIT - 4, "{kind}");
        let would_deny = client.peek(2, at(0)).await.shadow_denied_by;
        assert_eq!(would_deny, Some(1), "{kind}: 4 of 5 are used");
        assert_eq!(client.apply(Op::Force(-4), at(0)).await.remaining, LIMIT, "{kind}");
        assert_eq!(client.peek(5, at(0)).await.shadow_denied_by, None, "{kind}: nothing is used");
    }
}

/// The shadow limit charged the first and the third request, and not the second and the fourth. The second is canceled.
pub async fn a_settlement_returns_to_a_shadow_limit_what_its_run_charged(store: &impl Subject) {
    for kind in Kind::ALL {
        let half = Policy::of(kind, 5).per(Ticks(WINDOW)).named("half").shadow();
        let policy = Policy::all_of("both", [limit_of(kind).named("all"), half])
            .expect("the policy is valid");
        let client = Client::new(store, &policy, "bob");
        let would_deny =
            async |cost: Cost| client.peek(cost, at(0)).await.shadow_denied_by.is_some();
        let refund = async |cost: i128| client.apply(Op::Force(-cost), at(0)).await.remaining;
        assert_eq!(client.apply(Op::Check(3), at(0)).await.shadow_denied_by, None, "{kind}");
        let (_, denied) = client.reserve(3, at(0)).await;
        assert_eq!(client.apply(Op::Check(2), at(0)).await.shadow_denied_by, None, "{kind}");
        assert_eq!(client.apply(Op::Check(1), at(0)).await.shadow_denied_by, Some(1), "{kind}");
        assert_eq!(client.remaining_after_settling(&denied, -3, at(0)).await, 4, "{kind}");
        assert!(would_deny(1).await, "{kind}: 5 of 5 are used");
        assert_eq!(refund(1).await, 5, "{kind}");
        assert!(would_deny(1).await, "{kind}: the fourth request was not charged");
        assert_eq!(refund(2).await, 7, "{kind}");
        assert!(!would_deny(2).await && would_deny(3).await, "{kind}: 3 of 5 are used");
        assert_eq!(refund(3).await, LIMIT, "{kind}");
        assert!(!would_deny(5).await, "{kind}: nothing is used");
    }
}

/// A forced charge leads into debt, up to the bound.
pub async fn debt_is_bounded(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind).debt(5));
        for amount in [LIMIT + 5, LIMIT + 6, 1 << 50, Cost::MAX] {
            let client = Client::new(store, &policy, amount);
            let decision = client.apply(Op::Force(amount.into()), at(0)).await;
            assert_eq!((decision.allowed, decision.remaining), (true, 0), "{kind}: {amount}");
            let decision = client.apply(Op::Force(-5), at(0)).await;
            assert_eq!(decision.remaining, 0, "{kind}: {amount}");
            let decision = client.apply(Op::Force(-1), at(0)).await;
            assert_eq!(decision.remaining, 1, "{kind}: {amount}");
        }
    }
}

/// After a reset, a key is like a new key.
pub async fn a_reset_restores_the_initial_state(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind).debt(5));
        let client = Client::new(store, &policy, "alice");
        let _ = client.apply(Op::Force((LIMIT + 5).into()), at(0)).await;
        assert!(!client.allows(1, at(1)).await, "{kind}");
        let decision = client.apply(Op::Reset, at(1)).await;
        assert_eq!((decision.allowed, decision.remaining), (true, LIMIT), "{kind}");
        assert_eq!(decision.reset_after, Ticks::ZERO, "{kind}");
        let other = Client::new(store, &policy, "bob");
        assert_eq!(client.check(4, at(1)).await, other.check(4, at(1)).await, "{kind}");
    }
}

/// This holds for every pair of algorithms.
pub async fn a_change_of_policy_keeps_what_was_used(store: &impl Subject) {
    for before in Kind::ALL {
        for after in Kind::ALL {
            let (old, new) = (build(limit_of(before)), build(limit_of(after).named("new")));
            let key = format!("{before} to {after}");
            let Client { key, .. } = Client::new(store, &old, key);
            let client = |policy| Client { store, policy, key: key.clone() };
            assert!(client(&old).allows(6, at(0)).await);
            let decision = client(&new).check(5, at(0)).await;
            assert_eq!((decision.allowed, decision.remaining), (false, 4), "{key}");
            assert!(client(&new).allows(4, at(0)).await, "{key}");
            assert!(!client(&new).allows(1, at(0)).await, "{key}");
        }
    }
}

/// A client that has used more than the new capacity has used all of the new capacity.
pub async fn a_smaller_policy_clears_only_usage_that_does_not_fit(store: &impl Subject) {
    for before in Kind::ALL {
        for after in Kind::ALL {
            let small = Policy::of(after, LIMIT / 2).per(Ticks(WINDOW));
            let (old, new) = (build(limit_of(before)), build(small));
            let key = format!("{before} to {after}");
            let Client { key, .. } = Client::new(store, &old, key);
            let client = |policy| Client { store, policy, key: key.clone() };
            assert!(client(&old).allows(8, at(0)).await);
            let decision = client(&new).check(1, at(0)).await;
            assert_eq!((decision.allowed, decision.remaining), (false, 0), "{key}");
            assert_eq!(client(&new).apply(Op::Force(-1), at(0)).await.remaining, 1, "{key}");
        }
    }
}

/// A request with an earlier time than the one before sees the state that the earlier request left.
pub async fn a_late_time_earns_nothing(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind));
        let client = Client::new(store, &policy, "alice");
        assert!(client.allows(LIMIT, at(50)).await, "{kind}");
        for late in [49, 30, 0] {
            let decision = client.check(1, at(late)).await;
            assert!(!decision.allowed, "{kind} at {late}");
            let wait = decision.retry_after.expect("the cost fits after some time").0.cast_signed();
            assert!(!client.peek(1, at(late + wait - 1)).await.allowed, "{kind} at {late}");
            assert!(client.peek(1, at(late + wait)).await.allowed, "{kind} at {late}");
        }
    }
}

/// After the clock was set back by more than a window, a client waits for at most the time to earn back what it
/// used, plus a window.
pub async fn a_clock_set_back_locks_no_client_out(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind));
        let client = Client::new(store, &policy, "alice");
        assert!(client.allows(LIMIT, at(500_000)).await, "{kind}");
        let decision = client.check(LIMIT, at(0)).await;
        assert!(!decision.allowed, "{kind}: what was used stays used");
        let wait = decision.retry_after.expect("the cost fits after some time");
        assert!(wait <= Ticks(2 * WINDOW), "{kind}: {wait:?}");
        assert!(client.allows(LIMIT, at(wait.0.cast_signed())).await, "{kind}");
    }
}

/// The last tick of a window belongs to it, and the next tick does not.
pub async fn windows_are_half_open(store: &impl Subject) {
    let anchored = |kind| build(limit_of(kind).anchor(Anchor::FirstRequest));
    // The tick at which the whole limit is used, and the first tick at which one more request is allowed.
    let table = [
        (build(limit_of(Kind::TokenBucket)), 0, 10),
        (build(limit_of(Kind::Gcra)), 0, 10),
        (build(limit_of(Kind::LeakyBucket)), 0, 10),
        (build(limit_of(Kind::FixedWindow)), 0, 100),
        (build(limit_of(Kind::FixedWindow)), 99, 100),
        (anchored(Kind::FixedWindow), 37, 137),
        (build(limit_of(Kind::SlidingWindowLog)), 37, 137),
        // At the start of the next window, the whole count still applies; one tick later a part of it, rounded down.
        (build(limit_of(Kind::SlidingWindowCounter)), 0, 101),
        (build(limit_of(Kind::SlidingWindowCounter)), 99, 101),
    ];
    for (row, (policy, used, free)) in table.iter().enumerate() {
        let client = Client::new(store, policy, row);
        let context = &client.key;
        assert!(client.allows(LIMIT, at(*used)).await, "{context}");
        assert!(!client.allows(1, at(free - 1)).await, "{context}");
        assert!(client.allows(1, at(*free)).await, "{context}");
    }
}

/// A peek returns what a check would return, and changes nothing.
pub async fn a_peek_changes_nothing(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind).penalty(Penalty::lasting(Ticks(50))));
        let (peeked_at, other) =
            (Client::new(store, &policy, "a"), Client::new(store, &policy, "b"));
        for (time, cost) in [(0, 3), (3, 4), (4, 4), (90, 9), (200, LIMIT), (201, 1), (260, 2)] {
            for peeked in [cost, 0, 1, LIMIT, LIMIT + 1] {
                let _ = peeked_at.peek(peeked, at(time)).await;
            }
            let peeked = peeked_at.peek(cost, at(time)).await;
            let decision = peeked_at.check(cost, at(time)).await;
            assert_eq!(decision, other.check(cost, at(time)).await, "{kind}: {cost} at {time}");
            assert_eq!(peeked.allowed, decision.allowed, "{kind}: {cost} at {time}");
        }
    }
}

/// A batch returns the same as single checks in the same order, also if a key occurs several times.
pub async fn a_batch_decides_as_single_checks_in_order(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(limit_of(kind));
        let names: Vec<String> = (0..40_u32).map(|i| format!("{}", i * i % 13)).collect();
        for (cost, time) in [(3, 0), (1, 20), (LIMIT + 1, 20), (2, 130)] {
            let keys: Vec<String> =
                names.iter().map(|name| format!("{kind} many {name}")).collect();
            let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
            let batch = store.check_many(&policy, &keys, cost, at(time)).await;
            assert_eq!(batch.len(), keys.len(), "{kind}");
            for (name, timed) in names.iter().zip(batch) {
                let one = Client::new(store, &policy, format_args!("one {name}"));
                assert_eq!(timed.decision, one.check(cost, at(time)).await, "{kind}: {name}");
            }
        }
    }
}

/// Random histories of all operations agree with the reference model in every field.
pub async fn histories_agree_with_the_model(store: &impl Subject) {
    let mut runner = TestRunner::deterministic();
    for kind in Kind::ALL {
        for history in 0..60 {
            let traces = any_limit_of(kind).prop_flat_map(|limit| steps(limit, 40));
            let (limit, steps) = sample(&mut runner, &traces);
            let policy = with_numbers(limit.numbers());
            let client = Client::new(store, &policy, format_args!("history {history}"));
            let mut model = Model::initial(limit.numbers(), steps[0].0);
            let mut reservations = Vec::new();
            let (mut returned, mut latest) = (None, steps[0].0);
            for (index, (now, step)) in steps.iter().enumerate() {
                // A store cannot infer from the times that the clock was set back.
                if *now < latest {
                    reservations.clear();
                }
                latest = *now;
                let context = format_args!("{kind} {:?}", limit.numbers());
                let (op, expected) = match step {
                    Step::Check(cost) => {
                        let (expected, charge) = model.reserve(*now, *cost);
                        let (decision, reservation) = client.reserve(*cost, *now).await;
                        assert_eq!(
                            decision,
                            expected,
                            "{context}\nstep {index} of {:#?}",
                            &steps[..=index]
                        );
                        // A store that orders by time places a return at the same tick after the charge.
                        if decision.allowed && returned < Some(*now) {
                            reservations.push((reservation, charge, *cost));
                        }
                        continue;
                    }
                    Step::Peek(cost) => (Op::Peek(*cost), model.peek(*now, *cost)),
                    Step::Force(amount) => {
                        model.force(*now, *amount);
                        returned = returned.max((*amount < 0).then_some(*now));
                        (Op::Force(*amount), unchecked(&model, *now))
                    }
                    Step::Reset => {
                        model.reset(*now);
                        returned = returned.max(Some(*now));
                        reservations.clear();
                        (Op::Reset, unchecked(&model, *now))
                    }
                    // A store does not change or encode states here, so settle a reservation instead.
                    Step::Change(_) | Step::Store if reservations.is_empty() => continue,
                    Step::Change(_) | Step::Store => {
                        let (reservation, charge, cost) =
                            reservations.remove(index % reservations.len());
                        let change = match index % 4 {
                            0 => 3,
                            1 => -i128::from(cost.min(2)),
                            _ => -i128::from(cost),
                        };
                        model.settle(*now, charge, change);
                        returned = returned.max((change < 0).then_some(*now));
                        let decision = client.settle(&reservation, change, *now).await;
                        let expected = Some(unchecked(&model, *now));
                        assert_eq!(
                            decision,
                            expected,
                            "{context}\nstep {index} of {:#?}",
                            &steps[..=index]
                        );
                        continue;
                    }
                };
                let decision = client.apply(op, *now).await;
                assert_eq!(
                    decision,
                    expected,
                    "{context}\nstep {index} of {:#?}",
                    &steps[..=index]
                );
            }
        }
    }
}

/// Returns the decision of an operation that checks nothing.
fn unchecked(model: &Model, now: Tick) -> Decision {
    Decision {
        allowed: true,
        retry_after: Some(Ticks::ZERO),
        delay: Ticks::ZERO,
        denied_by: None,
        ..model.peek(now, 0)
    }
}

/// Random histories of several limits with shadow limits and penalties agree with the core in every field.
pub async fn histories_of_several_limits_agree_with_the_core(store: &impl Subject) {
    let mut runner = TestRunner::deterministic();
    for kind in Kind::ALL {
        for history in 0..40 {
            let second = proptest::sample::select(&Kind::ALL[..]).prop_flat_map(small_limit_of);
            let of_both = (small_limit_of(kind), second, 0..4_u8, 0..4_u8, 1..60_u64);
            let (first, second, shadow, penalty, duration) = sample(&mut runner, &of_both);
            let mut limits = [builder(first.numbers()), builder(second.numbers())];
            if shadow < 2 {
                limits[usize::from(shadow)] = limits[usize::from(shadow)].clone().shadow();
            }
            if penalty < 2 {
                let of = &mut limits[usize::from(penalty)];
                *of = of.clone().penalty(Penalty::lasting(Ticks(duration)).after(duration % 3 + 1));
            }
            let [one, other] = limits;
            let policy = Policy::all_of("both", [one.named("one"), other.named("other")])
                .expect("the policy is valid");
            let client = Client::new(store, &policy, format_args!("several {history}"));
            let (_, steps) = sample(&mut runner, &steps(first, 40));
            let mut state = policy.initial(steps[0].0);
            for (index, (now, step)) in steps.iter().enumerate() {
                let op = match step {
                    Step::Check(cost) => Op::Check(*cost),
                    Step::Peek(cost) => Op::Peek(*cost),
                    Step::Force(amount) => Op::Force(*amount),
                    Step::Reset => Op::Reset,
                    Step::Change(_) | Step::Store => continue,
                };
                let mut after = state.clone();
                let mut part = Part { rule: &policy, state: &mut after, op };
                let is_allowed = part.allows(*now);
                let (expected, _) = part.step::<Decision>(*now, is_allowed);
                // Peeks, and checks and charges of 0, change nothing.
                if !matches!(op, Op::Peek(_) | Op::Check(0) | Op::Force(0)) {
                    state = after;
                }
                let decision = client.apply(op, *now).await;
                assert_eq!(
                    decision,
                    expected,
                    "{policy:#?}\nstep {index} of {:#?}",
                    &steps[..=index]
                );
            }
        }
    }
}

fn with_numbers(numbers: &Numbers) -> Policy {
    build(builder(numbers))
}

fn builder(n: &Numbers) -> LimitBuilder {
    let limit = Policy::of(n.kind, n.limit).per(n.window).burst(n.burst).debt(n.debt);
    limit.starting_with(n.start).anchor(n.anchor)
}

fn sample<T: Strategy>(runner: &mut TestRunner, of: &T) -> T::Value {
    of.new_tree(runner).expect("the strategy has values").current()
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_behavior_is_mounted() {
        let source = include_str!("contract.rs");
        let (mounted, behaviors) =
            source.split_once("/// A time at which").expect("the source has both parts");
        let behaviors = behaviors.lines().filter_map(|line| line.strip_prefix("pub async fn "));
        let names: Vec<_> = behaviors.filter_map(|line| line.split('(').next()).collect();
        assert!(!names.is_empty());
        for name in names {
            assert!(
                mounted.lines().any(|line| line.trim() == name),
                "{name} is not in a list of store_contract!"
            );
        }
    }
}
