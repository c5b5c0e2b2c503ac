//! What every store does, whatever it is made of: one suite, mounted unchanged on each of them.
//!
//! A behaviour is a function of a store that is empty. It says what time it is, so nothing sleeps, and goes
//! through the six algorithms. [`store_contract!`](crate::store_contract) makes a test of each.
//!
//! What is not here: what a store does when it is full, or away. Stores differ in that.

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
    /// Carries out an operation on a key at a time.
    fn apply(&self, policy: &Policy, key: &[u8], op: Op, now: Tick) -> impl Future<Output = Timed>;

    /// Checks the same cost for many keys at a time.
    fn check_many(
        &self,
        policy: &Policy,
        keys: &[&[u8]],
        cost: Cost,
        now: Tick,
    ) -> impl Future<Output = Vec<Timed>>;

    /// What the store remembers of a reservation.
    type Reservation;

    /// Reserves a cost at a time, to be settled much later.
    fn reserve(
        &self,
        policy: &Policy,
        key: &[u8],
        cost: Cost,
        now: Tick,
    ) -> impl Future<Output = (Timed, Self::Reservation)>;

    /// Changes what a reservation charged; `None` if the reservation is void.
    fn settle(
        &self,
        policy: &Policy,
        key: &[u8],
        change: i128,
        reservation: &Self::Reservation,
        now: Tick,
    ) -> impl Future<Output = Option<Decision>>;
}

/// A test of each behaviour. `$on` is a function that is given a behaviour, and runs it on an empty store:
///
/// ```text
/// fn on_an_empty_store(behaviour: impl AsyncFnOnce(&MyStore)) { … }
///
/// tallygate_testkit::store_contract!(on_an_empty_store);
/// ```
///
/// A store that is for one policy only says `store_contract!(on, one policy)`: it has none of the tests in
/// which a key's policy changes. A store that keeps a key under several policies at once, which are tiers, says
/// `store_contract!(on, plans)`.
#[macro_export]
macro_rules! store_contract {
    ($on:path) => {
        $crate::store_contract!($on, one policy);
        $crate::store_contract!($on;
            a_change_of_policy_keeps_what_was_used
            a_smaller_policy_forgives_only_what_does_not_fit
        );
    };
    ($on:path, plans) => {
        $crate::store_contract!($on);
        $crate::store_contract!($on;
            a_reservation_returns_only_what_each_policy_charged
            a_refund_returns_nothing_that_another_policy_allowed
        );
    };
    ($on:path, one policy) => {
        $crate::store_contract!($on;
            admits_up_to_the_bound
            a_refusal_charges_nothing
            retry_after_is_exact
            a_cost_of_0_looks
            a_cost_above_the_capacity_never_fits
            keys_are_independent
            several_limits_charge_all_or_none
            a_shadow_tells_and_does_not_refuse
            a_penalty_lasts_as_long_as_it_says
            a_refund_stops_at_fresh
            a_canceled_reservation_returns_what_it_charged
            a_reservation_returns_nothing_to_a_later_window
            a_bucket_returns_only_what_has_not_drained
            a_log_returns_the_entries_of_the_reservation
            a_return_leaves_less_to_return_for_earlier_reservations
            a_reset_voids_reservations
            a_shadow_limit_returns_only_what_it_charged
            debt_is_bounded
            a_reset_forgets
            a_late_time_earns_nothing
            a_clock_set_back_locks_nobody_out
            windows_are_half_open
            a_peek_changes_nothing
            many_at_once_are_as_one_by_one_in_order
            histories_are_those_of_the_model
            histories_of_several_limits_are_those_of_the_core
        );
    };
    ($on:path; $($behaviour:ident)*) => {
        $(
            #[test]
            fn $behaviour() {
                $on($crate::contract::$behaviour);
            }
        )*
    };
}

/// A time at which a window of [`WINDOW`] begins.
const START: i64 = 1_000_000;
const WINDOW: u64 = 100;
const LIMIT: Cost = 10;

fn at(ticks: i64) -> Tick {
    Tick(START + ticks)
}

fn usual(kind: Kind) -> LimitBuilder {
    Policy::of(kind, LIMIT).per(Ticks(WINDOW))
}

fn build(limit: LimitBuilder) -> Policy {
    limit.build().expect("a valid policy")
}

/// A client's key.
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
        // A store whose callers may be late decides at the time of the last change, if that is later.
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

    /// What remains after a settlement that is not void.
    async fn remaining(&self, reservation: &S::Reservation, change: i128, now: Tick) -> Cost {
        self.settle(reservation, change, now).await.expect("not void").remaining
    }

    async fn admits(&self, cost: Cost, now: Tick) -> bool {
        self.check(cost, now).await.allowed
    }
}

/// One after another is admitted until nothing is left; then nobody is.
pub async fn admits_up_to_the_bound(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind));
        let client = Client::new(store, &policy, "alice");
        for left in (0..LIMIT).rev() {
            let told = client.check(1, at(0)).await;
            assert!(told.allowed, "{kind} with {left} left");
            assert_eq!((told.limit, told.remaining), (LIMIT, left), "{kind}");
            assert_eq!((told.retry_after, told.refused_by), (Some(Ticks::ZERO), None), "{kind}");
        }
        for _ in 0..3 {
            let told = client.check(1, at(0)).await;
            assert!(!told.allowed, "{kind}");
            assert_eq!((told.remaining, told.refused_by), (0, Some(0)), "{kind}");
        }
    }
}

/// Whoever is refused has used nothing by that.
pub async fn a_refusal_charges_nothing(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind));
        let client = Client::new(store, &policy, "alice");
        assert!(client.admits(7, at(0)).await, "{kind}");
        for _ in 0..3 {
            let told = client.check(4, at(0)).await;
            assert_eq!((told.allowed, told.remaining), (false, 3), "{kind}");
        }
        assert!(client.admits(3, at(0)).await, "{kind}");
    }
}

/// Who comes back when told to is admitted; a tick earlier is too early.
pub async fn retry_after_is_exact(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind));
        for cost in [1, 4, LIMIT] {
            for asked in [0, 7, 30] {
                let client = Client::new(store, &policy, format_args!("{cost} {asked}"));
                assert!(client.admits(LIMIT, at(0)).await, "{kind}");
                let told = client.check(LIMIT.min(cost + 3), at(asked)).await;
                assert!(!told.allowed, "{kind}: {cost} at {asked}");
                let told = client.peek(cost, at(asked)).await;
                if told.allowed {
                    continue;
                }
                let wait = told.retry_after.expect("it fits some day").0.cast_signed();
                assert!(!client.admits(cost, at(asked + wait - 1)).await, "{kind}: {cost} early");
                assert!(client.admits(cost, at(asked + wait)).await, "{kind}: {cost} in time");
            }
        }
    }
}

/// A cost of nothing tells how a key stands and leaves it so; only a debt refuses it.
pub async fn a_cost_of_0_looks(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind).debt(5));
        let client = Client::new(store, &policy, "alice");
        for used in [0, 4, LIMIT] {
            let told = client.check(0, at(0)).await;
            assert_eq!((told.allowed, told.remaining), (true, LIMIT), "{kind}");
            assert!(client.admits(used, at(0)).await, "{kind}");
            let told = client.check(0, at(0)).await;
            assert_eq!((told.allowed, told.remaining), (true, LIMIT - used), "{kind}");
            let _ = client.apply(Op::Reset, at(0)).await;
        }
        let _ = client.apply(Op::Force((LIMIT + 1).into()), at(0)).await;
        assert!(!client.admits(0, at(0)).await, "{kind}");
    }
}

/// What is more than ever fits is told apart from what does not fit now.
pub async fn a_cost_above_the_capacity_never_fits(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind));
        let client = Client::new(store, &policy, "alice");
        for cost in [LIMIT + 1, 1 << 40, Cost::MAX] {
            let told = client.check(cost, at(0)).await;
            assert_eq!((told.allowed, told.retry_after), (false, None), "{kind}: {cost}");
        }
        let told = client.check(LIMIT, at(0)).await;
        assert_eq!((told.allowed, told.remaining), (true, 0), "{kind}");
    }
}

/// Keys that look alike are different keys.
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
    let policy = build(usual(Kind::TokenBucket));
    for (used, key) in (0..).zip(keys) {
        assert!(store.apply(&policy, key, Op::Check(used % LIMIT), at(0)).await.decision.allowed);
    }
    for (used, key) in (0..).zip(keys) {
        let told = store.apply(&policy, key, Op::Check(0), at(0)).await.decision;
        assert_eq!(told.remaining, LIMIT - used % LIMIT, "{}", key.escape_ascii());
    }
}

/// If one limit refuses, no other is charged, whichever comes first.
pub async fn several_limits_charge_all_or_none(store: &impl Subject) {
    for kind in Kind::ALL {
        for tight_is in [0, 1] {
            let tight = Policy::of(kind, LIMIT / 2).per(Ticks(WINDOW)).named("tight");
            let wide = Policy::of(kind, LIMIT).per(Ticks(1_000_000)).named("wide");
            let limits = if tight_is == 0 { [tight, wide] } else { [wide, tight] };
            let policy = Policy::all_of("both", limits).expect("a valid policy");
            let client = Client::new(store, &policy, tight_is);
            assert!(client.admits(LIMIT / 2, at(0)).await, "{kind}");
            for _ in 0..3 {
                let told = client.check(1, at(0)).await;
                assert_eq!((told.allowed, told.refused_by), (false, Some(tight_is)), "{kind}");
            }
            // After two windows the tight one has all again, and the wide one what it had.
            let later = at(2 * WINDOW.cast_signed());
            let told = client.check(LIMIT / 2, later).await;
            assert_eq!((told.allowed, told.remaining), (true, 0), "{kind}");
            let later = at(4 * WINDOW.cast_signed());
            let told = client.check(1, later).await;
            assert_eq!((told.allowed, told.refused_by), (false, Some(1 - tight_is)), "{kind}");
        }
    }
}

/// A limit on trial says that it would have refused, and refuses nobody.
pub async fn a_shadow_tells_and_does_not_refuse(store: &impl Subject) {
    for kind in Kind::ALL {
        let trial = usual(kind).named("trial").shadow();
        let real = Policy::of(kind, 2 * LIMIT).per(Ticks(WINDOW)).named("real");
        let policy = Policy::all_of("both", [trial, real]).expect("a valid policy");
        let client = Client::new(store, &policy, "alice");
        for count in 1..=2 * LIMIT {
            let told = client.check(1, at(0)).await;
            let shadow = (count > LIMIT).then_some(0);
            assert_eq!((told.allowed, told.shadow_refused_by), (true, shadow), "{kind}: {count}");
        }
        let told = client.check(1, at(0)).await;
        assert_eq!((told.allowed, told.refused_by), (false, Some(1)), "{kind}");
    }
}

/// After so many refusals a client is refused for so long, and not a tick longer.
pub async fn a_penalty_lasts_as_long_as_it_says(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind).penalty(Penalty::lasting(Ticks(5_000)).after(2)));
        let client = Client::new(store, &policy, "alice");
        assert!(client.admits(LIMIT, at(0)).await, "{kind}");
        let first = client.check(1, at(0)).await;
        assert!(first.retry_after < Some(Ticks(5_000)), "{kind}: one refusal is none too many");
        let second = client.check(1, at(1)).await;
        assert_eq!(second.retry_after, Some(Ticks(5_000)), "{kind}");
        let told = client.check(1, at(5_000)).await;
        assert_eq!((told.allowed, told.retry_after), (false, Some(Ticks(1))), "{kind}");
        assert!(client.admits(1, at(5_001)).await, "{kind}");
    }
}

/// More than was used is not given back.
pub async fn a_refund_stops_at_fresh(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind));
        let client = Client::new(store, &policy, "alice");
        let told = client.apply(Op::Force(-3), at(0)).await;
        assert_eq!((told.allowed, told.remaining), (true, LIMIT), "{kind}: never seen");
        assert!(client.admits(6, at(0)).await, "{kind}");
        assert_eq!(client.apply(Op::Force(-2), at(0)).await.remaining, 6, "{kind}");
        assert_eq!(client.apply(Op::Force(-100), at(0)).await.remaining, LIMIT, "{kind}");
        assert!(client.admits(LIMIT, at(0)).await, "{kind}");
        assert!(!client.admits(1, at(0)).await, "{kind}");
    }
}

/// A charge that still counts is returned.
pub async fn a_canceled_reservation_returns_what_it_charged(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind));
        let client = Client::new(store, &policy, "alice");
        let (told, six) = client.reserve(6, at(0)).await;
        assert_eq!((told.allowed, told.remaining), (true, 4), "{kind}");
        assert_eq!(client.remaining(&six, -6, at(1)).await, LIMIT, "{kind}");
        assert!(client.admits(LIMIT, at(1)).await, "{kind}");
    }
}

/// A policy that had no room for a whole estimate under another policy charged less of it, and returns as much less.
pub async fn a_reservation_returns_only_what_each_policy_charged(store: &impl Subject) {
    let give_back = async |pro: &Client<'_, _>, (reservation, change), now| {
        assert!(pro.settle(&reservation, change, now).await.is_some(), "{}", pro.key);
    };
    return_under_a_larger_policy(store, give_back).await;
}

/// What was allowed under a policy stays used under it, whatever is refunded under another.
pub async fn a_refund_returns_nothing_that_another_policy_allowed(store: &impl Subject) {
    let give_back = async |pro: &Client<'_, _>, (_, change), now| {
        assert!(pro.apply(Op::Force(change), now).await.allowed, "{}", pro.key);
    };
    return_under_a_larger_policy(store, give_back).await;
}

/// Charges more under a larger policy than a smaller one has room for, and returns it.
async fn return_under_a_larger_policy<S: Subject>(
    store: &S,
    give_back: impl AsyncFn(&Client<'_, S>, (S::Reservation, i128), Tick),
) {
    let cases = [(10, 0, 0), (10, 0, 2), (4, 0, 0), (4, 0, 2), (4, 57, 2)];
    // A larger policy that is faster, and one that is not.
    let larger =
        [WINDOW, 10 * WINDOW].into_iter().flat_map(|window| cases.map(|one| (window, one)));
    for (kind, (window, (used, actual, moment))) in
        Kind::ALL.into_iter().flat_map(|kind| larger.clone().map(move |one| (kind, one)))
    {
        let (small, large) = (build(usual(kind)), build(Policy::of(kind, 100).per(Ticks(window))));
        let key = format!("{used} {actual} {moment} {window}");
        let (base, pro) = (Client::new(store, &small, &key), Client::new(store, &large, &key));
        assert!(base.admits(used, at(0)).await, "{kind} {key}");
        let (told, reservation) = pro.reserve(60, at(moment)).await;
        assert!(told.allowed, "{kind} {key}");
        assert!(!base.admits(1, at(moment)).await, "{kind} {key}: charged to both");
        give_back(&pro, (reservation, i128::from(actual) - 60), at(moment)).await;
        // As if only the actual cost had been charged, up to the bound of each.
        let left = LIMIT.saturating_sub(used + actual);
        assert_eq!(base.peek(0, at(moment)).await.remaining, left, "{kind} {key}");
        assert!(!base.admits(left + 1, at(moment)).await, "{kind} {key}");
        assert!(left == 0 || base.admits(left, at(moment)).await, "{kind} {key}");
        let left = 100 - used - actual - left;
        assert_eq!(pro.peek(0, at(moment)).await.remaining, left, "{kind} {key}");
    }
}

/// A charge of a window that has passed is not returned to the next one.
pub async fn a_reservation_returns_nothing_to_a_later_window(store: &impl Subject) {
    for kind in [Kind::FixedWindow, Kind::SlidingWindowLog, Kind::SlidingWindowCounter] {
        let policy = build(usual(kind));
        let client = Client::new(store, &policy, "alice");
        let (_, early) = client.reserve(6, at(0)).await;
        let (told, late) = client.reserve(LIMIT, at(250)).await;
        assert!(told.allowed, "{kind}");
        assert_eq!(client.remaining(&early, -6, at(251)).await, 0, "{kind}");
        assert_eq!(client.remaining(&late, -6, at(251)).await, 6, "{kind}");
    }
}

/// Reserving, waiting and canceling earns nothing.
pub async fn a_bucket_returns_only_what_has_not_drained(store: &impl Subject) {
    for kind in [Kind::TokenBucket, Kind::Gcra, Kind::LeakyBucket] {
        let policy = build(usual(kind));
        let client = Client::new(store, &policy, "alice");
        let mut banked = Vec::new();
        for round in 0..6 {
            let (told, reservation) = client.reserve(LIMIT, at(100 * round)).await;
            assert!(told.allowed, "{kind}");
            banked.push(reservation);
        }
        let mut allowed = 0;
        for reservation in &banked {
            let _ = client.remaining(reservation, -i128::from(LIMIT), at(600)).await;
            while client.admits(1, at(600)).await {
                allowed += 1;
            }
        }
        assert_eq!(allowed, LIMIT, "{kind}");
        let (_, half) = client.reserve(LIMIT, at(1_000)).await;
        assert!(client.admits(5, at(1_050)).await, "{kind}");
        assert_eq!(client.remaining(&half, -i128::from(LIMIT), at(1_050)).await, 5, "{kind}");
    }
}

/// A log that gave up its newest entries would admit nearly twice its limit within two ticks.
pub async fn a_log_returns_the_entries_of_the_reservation(store: &impl Subject) {
    let policy = build(usual(Kind::SlidingWindowLog));
    let client = Client::new(store, &policy, "alice");
    let (_, early) = client.reserve(LIMIT - 1, at(0)).await;
    assert!(client.admits(1, at(99)).await);
    assert_eq!(client.remaining(&early, 1 - i128::from(LIMIT), at(99)).await, LIMIT - 1);
    assert!(client.admits(LIMIT - 1, at(99)).await);
    let told = client.check(1, at(100)).await;
    assert_eq!((told.allowed, told.remaining), (false, 0));
}

/// Units that are returned no longer stand before those that were charged later: these drain sooner.
pub async fn a_return_leaves_less_to_return_for_earlier_reservations(store: &impl Subject) {
    for kind in [Kind::TokenBucket, Kind::Gcra, Kind::LeakyBucket] {
        for refunds in [false, true] {
            let policy = build(usual(kind));
            let client = Client::new(store, &policy, refunds);
            let (_, first) = client.reserve(5, at(0)).await;
            let (_, second) = client.reserve(5, at(0)).await;
            let told = if refunds {
                client.apply(Op::Force(-5), at(1)).await
            } else {
                client.settle(&first, -5, at(1)).await.expect("not void")
            };
            assert_eq!(told.remaining, 5, "{kind}");
            assert!(client.admits(5, at(50)).await, "{kind}: all else has drained by then");
            assert_eq!(client.remaining(&second, -5, at(50)).await, 5, "{kind}");
        }
    }
}

/// A reservation that was made before a reset cannot be settled, one made after it can.
pub async fn a_reset_voids_reservations(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind));
        let client = Client::new(store, &policy, "alice");
        let (_, before) = client.reserve(LIMIT, at(0)).await;
        let _ = client.apply(Op::Reset, at(1)).await;
        let (told, after) = client.reserve(LIMIT, at(2)).await;
        assert!(told.allowed, "{kind}");
        for change in [-1, 0, 1, -i128::from(LIMIT)] {
            assert_eq!(client.settle(&before, change, at(2)).await, None, "{kind}: {change}");
        }
        assert!(!client.admits(1, at(2)).await, "{kind}");
        assert_eq!(client.remaining(&after, -i128::from(LIMIT), at(2)).await, LIMIT, "{kind}");
    }
}

/// A shadow limit stands as if it were enforced: a reservation that it would have denied does not change it.
pub async fn a_shadow_limit_returns_only_what_it_charged(store: &impl Subject) {
    for kind in Kind::ALL {
        let half = Policy::of(kind, 5).per(Ticks(WINDOW)).named("half").shadow();
        let policy =
            Policy::all_of("both", [usual(kind).named("all"), half]).expect("a valid policy");
        let client = Client::new(store, &policy, "alice");
        let (told, fits) = client.reserve(4, at(0)).await;
        assert_eq!(told.shadow_refused_by, None, "{kind}");
        let (told, too_much) = client.reserve(4, at(0)).await;
        assert_eq!((told.allowed, told.shadow_refused_by), (true, Some(1)), "{kind}");
        assert_eq!(client.remaining(&too_much, -4, at(0)).await, 6, "{kind}");
        assert_eq!(
            client.peek(2, at(0)).await.shadow_refused_by,
            Some(1),
            "{kind}: 4 of 5 are used"
        );
        assert_eq!(client.remaining(&fits, -4, at(0)).await, LIMIT, "{kind}");
        assert_eq!(client.peek(5, at(0)).await.shadow_refused_by, None, "{kind}: nothing is used");
    }
}

/// What is used without asking leads into debt, so far and no further.
pub async fn debt_is_bounded(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind).debt(5));
        for amount in [LIMIT + 5, LIMIT + 6, 1 << 50, Cost::MAX] {
            let client = Client::new(store, &policy, amount);
            let told = client.apply(Op::Force(amount.into()), at(0)).await;
            assert_eq!((told.allowed, told.remaining), (true, 0), "{kind}: {amount}");
            let told = client.apply(Op::Force(-5), at(0)).await;
            assert_eq!(told.remaining, 0, "{kind}: {amount}");
            let told = client.apply(Op::Force(-1), at(0)).await;
            assert_eq!(told.remaining, 1, "{kind}: {amount}");
        }
    }
}

/// A key that was reset is as one never seen.
pub async fn a_reset_forgets(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind).debt(5));
        let client = Client::new(store, &policy, "alice");
        let _ = client.apply(Op::Force((LIMIT + 5).into()), at(0)).await;
        assert!(!client.admits(1, at(1)).await, "{kind}");
        let told = client.apply(Op::Reset, at(1)).await;
        assert_eq!((told.allowed, told.remaining), (true, LIMIT), "{kind}");
        assert_eq!(told.reset_after, Ticks::ZERO, "{kind}");
        let other = Client::new(store, &policy, "bob");
        assert_eq!(client.check(4, at(1)).await, other.check(4, at(1)).await, "{kind}");
    }
}

/// Whatever the algorithms before and after.
pub async fn a_change_of_policy_keeps_what_was_used(store: &impl Subject) {
    for before in Kind::ALL {
        for after in Kind::ALL {
            let (old, new) = (build(usual(before)), build(usual(after).named("new")));
            let key = format!("{before} to {after}");
            let Client { key, .. } = Client::new(store, &old, key);
            let client = |policy| Client { store, policy, key: key.clone() };
            assert!(client(&old).admits(6, at(0)).await);
            let told = client(&new).check(5, at(0)).await;
            assert_eq!((told.allowed, told.remaining), (false, 4), "{key}");
            assert!(client(&new).admits(4, at(0)).await, "{key}");
            assert!(!client(&new).admits(1, at(0)).await, "{key}");
        }
    }
}

/// Who has used more than there is room for now has used all of it, and no more.
pub async fn a_smaller_policy_forgives_only_what_does_not_fit(store: &impl Subject) {
    for before in Kind::ALL {
        for after in Kind::ALL {
            let small = Policy::of(after, LIMIT / 2).per(Ticks(WINDOW));
            let (old, new) = (build(usual(before)), build(small));
            let key = format!("{before} to {after}");
            let Client { key, .. } = Client::new(store, &old, key);
            let client = |policy| Client { store, policy, key: key.clone() };
            assert!(client(&old).admits(8, at(0)).await);
            let told = client(&new).check(1, at(0)).await;
            assert_eq!((told.allowed, told.remaining), (false, 0), "{key}");
            assert_eq!(client(&new).apply(Op::Force(-1), at(0)).await.remaining, 1, "{key}");
        }
    }
}

/// Who comes with an older time than another before finds what that one left.
pub async fn a_late_time_earns_nothing(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind));
        let client = Client::new(store, &policy, "alice");
        assert!(client.admits(LIMIT, at(50)).await, "{kind}");
        for late in [49, 30, 0] {
            let told = client.check(1, at(late)).await;
            assert!(!told.allowed, "{kind} at {late}");
            let wait = told.retry_after.expect("it fits some day").0.cast_signed();
            assert!(!client.peek(1, at(late + wait - 1)).await.allowed, "{kind} at {late}");
            assert!(client.peek(1, at(late + wait)).await.allowed, "{kind} at {late}");
        }
    }
}

/// After the clock was set back by more than a window, a client waits as long as it takes to earn what it
/// used, and a window at most.
pub async fn a_clock_set_back_locks_nobody_out(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind));
        let client = Client::new(store, &policy, "alice");
        assert!(client.admits(LIMIT, at(500_000)).await, "{kind}");
        let told = client.check(LIMIT, at(0)).await;
        assert!(!told.allowed, "{kind}: nothing is forgiven");
        let wait = told.retry_after.expect("it fits some day");
        assert!(wait <= Ticks(2 * WINDOW), "{kind}: {wait:?}");
        assert!(client.admits(LIMIT, at(wait.0.cast_signed())).await, "{kind}");
    }
}

/// The last tick of a window belongs to it, and the next one does not.
pub async fn windows_are_half_open(store: &impl Subject) {
    let anchored = |kind| build(usual(kind).anchor(Anchor::FirstRequest));
    // When all is used, and the first tick at which one more is admitted.
    let table = [
        (build(usual(Kind::TokenBucket)), 0, 10),
        (build(usual(Kind::Gcra)), 0, 10),
        (build(usual(Kind::LeakyBucket)), 0, 10),
        (build(usual(Kind::FixedWindow)), 0, 100),
        (build(usual(Kind::FixedWindow)), 99, 100),
        (anchored(Kind::FixedWindow), 37, 137),
        (build(usual(Kind::SlidingWindowLog)), 37, 137),
        // When the next begins all of it still counts; a tick later a part, rounded down.
        (build(usual(Kind::SlidingWindowCounter)), 0, 101),
        (build(usual(Kind::SlidingWindowCounter)), 99, 101),
    ];
    for (row, (policy, used, free)) in table.iter().enumerate() {
        let client = Client::new(store, policy, row);
        let context = &client.key;
        assert!(client.admits(LIMIT, at(*used)).await, "{context}");
        assert!(!client.admits(1, at(free - 1)).await, "{context}");
        assert!(client.admits(1, at(*free)).await, "{context}");
    }
}

/// A look answers as a check would, and leaves the key as if nobody had looked.
pub async fn a_peek_changes_nothing(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind).penalty(Penalty::lasting(Ticks(50))));
        let (looked, left) = (Client::new(store, &policy, "a"), Client::new(store, &policy, "b"));
        for (time, cost) in [(0, 3), (3, 4), (4, 4), (90, 9), (200, LIMIT), (201, 1), (260, 2)] {
            for peeked in [cost, 0, 1, LIMIT, LIMIT + 1] {
                let _ = looked.peek(peeked, at(time)).await;
            }
            let peeked = looked.peek(cost, at(time)).await;
            let told = looked.check(cost, at(time)).await;
            assert_eq!(told, left.check(cost, at(time)).await, "{kind}: {cost} at {time}");
            assert_eq!(peeked.allowed, told.allowed, "{kind}: {cost} at {time}");
        }
    }
}

/// Also where a key is among them several times.
pub async fn many_at_once_are_as_one_by_one_in_order(store: &impl Subject) {
    for kind in Kind::ALL {
        let policy = build(usual(kind));
        let names: Vec<String> = (0..40_u32).map(|i| format!("{}", i * i % 13)).collect();
        for (cost, time) in [(3, 0), (1, 20), (LIMIT + 1, 20), (2, 130)] {
            let keys: Vec<String> =
                names.iter().map(|name| format!("{kind} many {name}")).collect();
            let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
            let told = store.check_many(&policy, &keys, cost, at(time)).await;
            assert_eq!(told.len(), keys.len(), "{kind}");
            for (name, told) in names.iter().zip(told) {
                let one = Client::new(store, &policy, format_args!("one {name}"));
                assert_eq!(told.decision, one.check(cost, at(time)).await, "{kind}: {name}");
            }
        }
    }
}

/// Every operation at times of every kind, against the definitions: every field of every answer.
pub async fn histories_are_those_of_the_model(store: &impl Subject) {
    let mut runner = TestRunner::deterministic();
    for kind in Kind::ALL {
        for history in 0..60 {
            let traces = any_limit_of(kind).prop_flat_map(|limit| steps(limit, 40));
            let (limit, steps) = sample(&mut runner, &traces);
            let policy = with_numbers(limit.numbers());
            let client = Client::new(store, &policy, format_args!("history {history}"));
            let mut model = Model::first(limit.numbers(), steps[0].0);
            let mut reservations = Vec::new();
            let (mut returned, mut latest) = (None, steps[0].0);
            for (place, (now, step)) in steps.iter().enumerate() {
                // Of a clock that was set back, a store has to know otherwise.
                if *now < latest {
                    reservations.clear();
                }
                latest = *now;
                let context = format_args!("{kind} {:?}", limit.numbers());
                let (op, expected) = match step {
                    Step::Check(cost) => {
                        let (expected, charge) = model.reserve(*now, *cost);
                        let (told, reservation) = client.reserve(*cost, *now).await;
                        assert_eq!(
                            told,
                            expected,
                            "{context}\nstep {place} of {:#?}",
                            &steps[..=place]
                        );
                        // A store that orders by time takes a return at the same tick as one after the charge.
                        if told.allowed && returned < Some(*now) {
                            reservations.push((reservation, charge, *cost));
                        }
                        continue;
                    }
                    Step::Peek(cost) => (Op::Peek(*cost), model.peek(*now, *cost)),
                    Step::Force(amount) => {
                        model.force(*now, *amount);
                        returned = returned.max((*amount < 0).then_some(*now));
                        (Op::Force(*amount), standing(&model, *now))
                    }
                    Step::Reset => {
                        model.reset(*now);
                        returned = returned.max(Some(*now));
                        reservations.clear();
                        (Op::Reset, standing(&model, *now))
                    }
                    // Nothing to do for a store: it settles a reservation instead.
                    Step::Change(_) | Step::Store if reservations.is_empty() => continue,
                    Step::Change(_) | Step::Store => {
                        let (reservation, charge, cost) =
                            reservations.remove(place % reservations.len());
                        let change = match place % 4 {
                            0 => 3,
                            1 => -i128::from(cost.min(2)),
                            _ => -i128::from(cost),
                        };
                        model.settle(*now, charge, change);
                        returned = returned.max((change < 0).then_some(*now));
                        let told = client.settle(&reservation, change, *now).await;
                        let expected = Some(standing(&model, *now));
                        assert_eq!(
                            told,
                            expected,
                            "{context}\nstep {place} of {:#?}",
                            &steps[..=place]
                        );
                        continue;
                    }
                };
                let told = client.apply(op, *now).await;
                assert_eq!(told, expected, "{context}\nstep {place} of {:#?}", &steps[..=place]);
            }
        }
    }
}

/// What is told where nothing is asked for.
fn standing(model: &Model, now: Tick) -> Decision {
    Decision {
        allowed: true,
        retry_after: Some(Ticks::ZERO),
        delay: Ticks::ZERO,
        refused_by: None,
        ..model.peek(now, 0)
    }
}

/// Several limits, shadows and penalties, against the core: every field of every answer.
pub async fn histories_of_several_limits_are_those_of_the_core(store: &impl Subject) {
    let mut runner = TestRunner::deterministic();
    for kind in Kind::ALL {
        for history in 0..40 {
            let second = proptest::sample::select(&Kind::ALL[..]).prop_flat_map(small_limit_of);
            let of_both = (small_limit_of(kind), second, 0..4_u8, 0..4_u8, 1..60_u64);
            let (first, second, shadow, penalty, lasts) = sample(&mut runner, &of_both);
            let mut limits = [builder(first.numbers()), builder(second.numbers())];
            if shadow < 2 {
                limits[usize::from(shadow)] = limits[usize::from(shadow)].clone().shadow();
            }
            if penalty < 2 {
                let of = &mut limits[usize::from(penalty)];
                *of = of.clone().penalty(Penalty::lasting(Ticks(lasts)).after(lasts % 3 + 1));
            }
            let [one, other] = limits;
            let policy = Policy::all_of("both", [one.named("one"), other.named("other")])
                .expect("a valid policy");
            let client = Client::new(store, &policy, format_args!("several {history}"));
            let (_, steps) = sample(&mut runner, &steps(first, 40));
            let mut state = policy.first(steps[0].0);
            for (place, (now, step)) in steps.iter().enumerate() {
                let op = match step {
                    Step::Check(cost) => Op::Check(*cost),
                    Step::Peek(cost) => Op::Peek(*cost),
                    Step::Force(amount) => Op::Force(*amount),
                    Step::Reset => Op::Reset,
                    Step::Change(_) | Step::Store => continue,
                };
                let mut after = state.clone();
                let mut part = Part { rule: &policy, state: &mut after, op };
                let agrees = part.admits(*now);
                let (expected, _) = part.step::<Decision>(*now, agrees);
                // A look leaves nothing behind.
                if !matches!(op, Op::Peek(_) | Op::Check(0) | Op::Force(0)) {
                    state = after;
                }
                let told = client.apply(op, *now).await;
                assert_eq!(told, expected, "{policy:#?}\nstep {place} of {:#?}", &steps[..=place]);
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
    of.new_tree(runner).expect("there are such").current()
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_behaviour_is_mounted() {
        let source = include_str!("contract.rs");
        let (mounted, behaviours) = source.split_once("/// A time at which").expect("both parts");
        let behaviours = behaviours.lines().filter_map(|line| line.strip_prefix("pub async fn "));
        let names: Vec<_> = behaviours.filter_map(|line| line.split('(').next()).collect();
        assert!(!names.is_empty());
        for name in names {
            assert!(mounted.lines().any(|line| line.trim() == name), "{name} is in no list");
        }
    }
}
