//! Reservations never create units, whatever happens between reserving and settling.

use proptest::collection::vec;
use proptest::prelude::*;
use tallygate::clock::{Clock as _, ManualClock};
use tallygate::policy::{Anchor, Numbers, Penalty};
use tallygate::reservation::{Reservation, SettleError};
use tallygate::store::{Capacity, MemoryStore, PolicyStore};
use tallygate::tiers::{Access, ClientRule};
use tallygate::{Ask, Cost, Kind, Limit, Policy, RateLimiter, StoreError, Tick, Ticks, Tiers};
use tallygate_testkit::{cases, small_limit_of};

#[derive(Clone, Debug)]
enum Verb {
    Check(Cost),
    Reserve(Cost, u64),
    /// One of the open reservations, and its actual cost.
    Settle(usize, Cost),
    Refund(Cost),
    Reset,
    /// The rules are replaced by the same ones, which changes nothing.
    Replace,
    /// An override without limits is set and removed.
    Override,
}

fn verb() -> impl Strategy<Value = Verb> {
    prop_oneof![
        8 => (1..6_u64).prop_map(Verb::Check),
        8 => (1..8_u64, 0..60_u64).prop_map(|(cost, ttl)| Verb::Reserve(cost, ttl)),
        8 => (0..9_usize, 0..3_u64).prop_map(|(which, actual)| Verb::Settle(which, actual)),
        2 => (0..9_usize, 0..12_u64).prop_map(|(which, actual)| Verb::Settle(which, actual)),
        3 => (1..5_u64).prop_map(Verb::Refund),
        1 => Just(Verb::Reset),
        1 => Just(Verb::Replace),
        1 => Just(Verb::Override),
    ]
}

/// Units that were allowed at a time, in the order of all operations; negative for refunded units.
struct AllowedUnits {
    at: i64,
    units: i128,
}

/// The exact statement: take every allowed check at its time; every settled reservation at the time of its charge with
/// its actual cost, but at most its estimate, because a surplus is charged in any case and leads into debt; every open
/// or expired reservation with its estimate; and every refund as negative units at its time. (A refund needs no
/// receipt: it affects the units that count at that time.) Then any interval of a history without a reset has at most
/// as many units as the limit allows in it. A reset begins another history.
fn holds(numbers: &Numbers, history: &[AllowedUnits]) -> Result<(), String> {
    let (limit, window) = (i128::from(numbers.limit), i128::from(numbers.window.0));
    let burst = i128::from(numbers.burst);
    let sum = |from: i64, to: i64| -> i128 {
        history.iter().filter(|one| (from..=to).contains(&one.at)).map(|one| one.units).sum()
    };
    let number = |at: i64| i128::from(at).div_euclid(window);
    let is_in_one_window = |from, to| numbers.anchor == Anchor::Clock && number(from) == number(to);
    let starts = history.iter().map(|one| one.at);
    for from in starts.clone() {
        for to in starts.clone().filter(|to| *to >= from) {
            let length = i128::from(to - from);
            let most = match numbers.kind {
                Kind::TokenBucket | Kind::Gcra | Kind::LeakyBucket => {
                    burst + length * limit / window
                }
                Kind::SlidingWindowLog if length < window => limit,
                Kind::SlidingWindowCounter | Kind::FixedWindow if is_in_one_window(from, to) => {
                    limit
                }
                // An interval shorter than a window touches at most two windows.
                Kind::SlidingWindowCounter | Kind::FixedWindow if length < window => 2 * limit,
                _ => continue,
            };
            let units = sum(from, to);
            if units > most {
                return Err(format!("{units} units from {from} to {to}, at most {most}"));
            }
        }
    }
    Ok(())
}

fn policy(limit: &Limit, penalty: bool, shadow: bool) -> Policy {
    let n = limit.numbers();
    let builder = Policy::of(n.kind, n.limit).per(n.window).burst(n.burst).debt(n.debt);
    let mut builder = builder.anchor(n.anchor).named("limit");
    if penalty {
        builder = builder.penalty(Penalty::lasting(Ticks(7)).after(2));
    }
    if shadow {
        let stricter = Policy::of(n.kind, 1).per(Ticks(n.window.0 + 3)).named("shadow").shadow();
        return Policy::all_of("both", [builder, stricter]).expect("valid");
    }
    builder.build().expect("valid")
}

struct OpenReservation {
    reservation: Reservation,
    at: i64,
    estimate: Cost,
}

proptest! {
    #![proptest_config(cases(3000))]

    /// Fault K4.
    #[test]
    fn no_order_of_verbs_exceeds_the_bound(
        limit in (0..6_usize).prop_flat_map(|kind| small_limit_of(Kind::ALL[kind])),
        (penalty, shadow) in (any::<bool>(), any::<bool>()),
        trace in vec((verb(), prop_oneof![4 => Just(0_u64), 3 => 1..4_u64, 1 => 4..40_u64]), 1..120),
    ) {
        let clock = ManualClock::new(Tick(1_000));
        let tiers = || Tiers::new(policy(&limit, penalty, shadow));
        let store: MemoryStore<ClientRule, _> = MemoryStore::new(Capacity::of(100), &clock);
        let limiter = RateLimiter::in_store("api", tiers(), store);
        let mut history: Vec<AllowedUnits> = Vec::new();
        let mut open: Vec<OpenReservation> = Vec::new();
        let mut overridden = false;
        for (verb, gap) in &trace {
            clock.advance(Ticks(*gap));
            let at = clock.now().0;
            match verb {
                Verb::Check(cost) => {
                    let decision = limiter.check(Ask::new("a").cost(*cost)).expect("short");
                    if decision.allowed && !overridden {
                        history.push(AllowedUnits { at, units: (*cost).into() });
                    }
                }
                Verb::Reserve(cost, ttl) => {
                    let reserved = limiter.reserve(Ask::new("a").cost(*cost), Ticks(*ttl)).expect("short");
                    if let Some(reservation) = reserved.granted() && !overridden {
                        open.push(OpenReservation { reservation, at, estimate: *cost });
                    }
                }
                Verb::Settle(..) if open.is_empty() => {}
                Verb::Settle(which, actual) => {
                    let place = which % open.len();
                    let OpenReservation { reservation, at, estimate } = &mut open[place];
                    match limiter.settle(reservation, *actual) {
                        Ok(_) => {
                            history.push(AllowedUnits { at: *at, units: (*estimate).min(*actual).into() });
                        }
                        Err(StoreError::Settle(SettleError::Expired { .. })) => {
                            history.push(AllowedUnits { at: *at, units: (*estimate).into() });
                        }
                        Err(error) => prop_assert!(false, "{}", error),
                    }
                    open.swap_remove(place);
                }
                Verb::Refund(cost) => {
                    let _ = limiter.refund(Ask::new("a").cost(*cost)).expect("short");
                    history.push(AllowedUnits { at, units: -i128::from(*cost) });
                }
                Verb::Reset => {
                    let _ = limiter.reset("a").expect("short");
                    for mut one in open.drain(..) {
                        prop_assert!(limiter.cancel(&mut one.reservation).is_err(), "void");
                        history.push(AllowedUnits { at: one.at, units: one.estimate.into() });
                    }
                    prop_assert_eq!(holds(limit.numbers(), &history), Ok(()), "{:?}", trace);
                    history.clear();
                }
                Verb::Replace => limiter.replace(&tiers()),
                Verb::Override if overridden => {
                    prop_assert!(limiter.remove_override("a"));
                    overridden = false;
                }
                Verb::Override => {
                    limiter.set_override("a", Access::Unlimited, None);
                    overridden = true;
                }
            }
        }
        history.extend(open.iter().map(|one| AllowedUnits { at: one.at, units: one.estimate.into() }));
        prop_assert_eq!(holds(limit.numbers(), &history), Ok(()), "{:?}", trace);
    }
}

/// An operation of a client that changes its tier, with the index of the tier.
#[derive(Clone, Debug)]
enum TierVerb {
    Check(usize, Cost),
    Reserve(usize, Cost, u64),
    /// One of the open reservations, and its actual cost.
    Settle(usize, Cost),
    Refund(usize, Cost),
    /// The policies are assigned to the tiers again.
    Replace([usize; 3]),
    /// An override by one of the policies, for a time.
    Override(usize, i64),
    EndOverride,
}

fn tier_verb() -> impl Strategy<Value = TierVerb> {
    let tier = || 0..3_usize;
    prop_oneof![
        8 => (tier(), 1..6_u64).prop_map(|(tier, cost)| TierVerb::Check(tier, cost)),
        8 => (tier(), 1..8_u64, 0..2_000_u64)
            .prop_map(|(tier, cost, ttl)| TierVerb::Reserve(tier, cost, ttl)),
        8 => (0..9_usize, 0..3_u64).prop_map(|(which, actual)| TierVerb::Settle(which, actual)),
        1 => (0..9_usize, 0..12_u64).prop_map(|(which, actual)| TierVerb::Settle(which, actual)),
        3 => (tier(), 1..5_u64).prop_map(|(tier, cost)| TierVerb::Refund(tier, cost)),
        1 => [tier(), tier(), tier()].prop_map(TierVerb::Replace),
        1 => (tier(), 1..40_i64).prop_map(|(policy, lasts)| TierVerb::Override(policy, lasts)),
        1 => Just(TierVerb::EndOverride),
    ]
}

/// Returns a request of the client under one of the tiers.
fn under(tier: usize, cost: Cost) -> Ask<'static> {
    Ask::new("a").cost(cost).tier([None, Some("pro"), Some("team")][tier])
}

/// The bound of a client that is checked under several policies: the fastest of their rates, and one capacity of each.
fn holds_together(policies: &[Limit], history: &[AllowedUnits]) -> Result<(), String> {
    let numbers = policies.iter().map(Limit::numbers);
    let bursts: i128 = numbers.clone().map(|one| i128::from(one.burst)).sum();
    let per_window = |one: &Numbers| (i128::from(one.limit), i128::from(one.window.0));
    let (limit, window) = numbers
        .map(per_window)
        .reduce(|one, other| if one.0 * other.1 >= other.0 * one.1 { one } else { other })
        .expect("one");
    let times = history.iter().map(|one| one.at);
    for from in times.clone() {
        for to in times.clone().filter(|to| *to >= from) {
            let within = history.iter().filter(|one| (from..=to).contains(&one.at));
            let units: i128 = within.map(|one| one.units).sum();
            let most = bursts + i128::from(to - from) * limit / window;
            if units > most {
                return Err(format!("{units} units from {from} to {to}, at most {most}"));
            }
        }
    }
    Ok(())
}

/// Kinds whose bound over an interval is a rate and one capacity; a fixed window and a sliding window counter allow
/// one capacity more around the end of a window.
const WITHOUT_BOUNDARIES: [Kind; 4] =
    [Kind::TokenBucket, Kind::LeakyBucket, Kind::Gcra, Kind::SlidingWindowLog];

/// Runs operations under tiers for a client. Returns its usage, each entry with the index of the policy that decided. A
/// refund has the policy under which it was made.
fn uses_under_tiers(
    policies: &[Limit],
    trace: &[(TierVerb, u64)],
) -> Result<Vec<(usize, AllowedUnits)>, TestCaseError> {
    let rules = |chosen: [usize; 3]| {
        let [base, pro, team] = chosen.map(|one| policy(&policies[one], false, false));
        Tiers::new(base).tier("pro", pro).tier("team", team)
    };
    let clock = ManualClock::new(Tick(1_000));
    let store: MemoryStore<ClientRule, _> = MemoryStore::new(Capacity::of(100), &clock);
    let mut chosen = [0, 1, 2];
    let limiter = RateLimiter::in_store("api", rules(chosen), store);
    let mut overridden: Option<(usize, i64)> = None;
    let mut history: Vec<(usize, AllowedUnits)> = Vec::new();
    let mut open: Vec<(usize, OpenReservation)> = Vec::new();
    for (verb, gap) in trace {
        clock.advance(Ticks(*gap));
        let at = clock.now().0;
        let in_force = overridden.filter(|(_, until)| at < *until).map(|(policy, _)| policy);
        let decides = |tier: usize| in_force.unwrap_or(chosen[tier]);
        match verb {
            TierVerb::Check(tier, cost) => {
                let decision = limiter.check(under(*tier, *cost)).expect("short");
                if decision.allowed {
                    history.push((decides(*tier), AllowedUnits { at, units: (*cost).into() }));
                }
            }
            TierVerb::Reserve(tier, cost, ttl) => {
                let reserved = limiter.reserve(under(*tier, *cost), Ticks(*ttl));
                if let Some(reservation) = reserved.expect("short").granted() {
                    open.push((
                        decides(*tier),
                        OpenReservation { reservation, at, estimate: *cost },
                    ));
                }
            }
            TierVerb::Settle(..) if open.is_empty() => {}
            TierVerb::Settle(which, actual) => {
                let (decided, OpenReservation { mut reservation, at, estimate }) =
                    open.swap_remove(which % open.len());
                let settled = limiter.settle(&mut reservation, *actual);
                let units = match settled {
                    Ok(_) => estimate.min(*actual),
                    Err(StoreError::Settle(SettleError::Expired { .. })) => estimate,
                    Err(error) => return Err(TestCaseError::fail(error.to_string())),
                };
                history.push((decided, AllowedUnits { at, units: units.into() }));
            }
            TierVerb::Refund(tier, cost) => {
                let _ = limiter.refund(under(*tier, *cost)).expect("short");
                history.push((decides(*tier), AllowedUnits { at, units: -i128::from(*cost) }));
            }
            TierVerb::Replace(others) => {
                chosen = *others;
                limiter.replace(&rules(chosen));
            }
            TierVerb::Override(chosen, lasts) => {
                let access = policy(&policies[*chosen], false, false);
                limiter.set_override("a", access, Some(Tick(at + lasts)));
                overridden = Some((*chosen, at + lasts));
            }
            TierVerb::EndOverride => {
                limiter.remove_override("a");
                overridden = None;
            }
        }
    }
    let left = |(policy, one): (usize, OpenReservation)| {
        (policy, AllowedUnits { at: one.at, units: one.estimate.into() })
    };
    history.extend(open.into_iter().map(left));
    Ok(history)
}

proptest! {
    #![proptest_config(cases(3000))]

    /// As above, for a client that changes its tier between any two operations, and rules that are assigned again.
    ///
    /// Fault K4.
    #[test]
    fn no_order_of_verbs_and_tiers_exceeds_the_bound(
        policies in vec((0..4_usize).prop_flat_map(|kind| small_limit_of(WITHOUT_BOUNDARIES[kind])), 3),
        trace in vec((tier_verb(), prop_oneof![9 => Just(0_u64), 1 => 1..100_u64]), 1..250),
    ) {
        let history = uses_under_tiers(&policies, &trace)?;
        let history: Vec<AllowedUnits> = history.into_iter().map(|(_, one)| one).collect();
        prop_assert_eq!(holds_together(&policies, &history), Ok(()), "{:?}", trace);
    }

    /// The same for each policy alone: a client gets no more under a policy than that policy allows, whatever it
    /// reserves, settles and cancels under others. There are no refunds here, because they do not know what each policy
    /// charged.
    ///
    /// Fault K4.
    #[test]
    fn nothing_under_other_tiers_exceeds_the_bound_of_a_policy(
        policies in vec((0..6_usize).prop_flat_map(|kind| small_limit_of(Kind::ALL[kind])), 3),
        trace in vec((tier_verb(), prop_oneof![9 => Just(0_u64), 1 => 1..100_u64]), 1..250),
    ) {
        let is_refund = |verb: &TierVerb| matches!(verb, TierVerb::Refund(..));
        let trace: Vec<_> = trace.into_iter().filter(|(verb, _)| !is_refund(verb)).collect();
        let history = uses_under_tiers(&policies, &trace)?;
        for one in &policies {
            let is_same = |other: usize| policies[other].numbers() == one.numbers();
            let own = history.iter().filter(|(policy, _)| is_same(*policy));
            let own: Vec<AllowedUnits> = own.map(|(_, one)| AllowedUnits { ..*one }).collect();
            prop_assert_eq!(holds(one.numbers(), &own), Ok(()), "{:?} {:?}", one.numbers(), trace);
        }
    }
}

fn limiter(policy: Policy, clock: &ManualClock) -> RateLimiter<Policy, PolicyStore<&ManualClock>> {
    let store = PolicyStore::new(&policy, Capacity::of(10), clock);
    RateLimiter::with_store(policy, store)
}

const HOUR: Ticks = Ticks(3_600_000_000_000);

/// Six reservations of five, one every two seconds, and then each canceled before a check.
///
/// Fault J8.
#[test]
fn waiting_between_reserving_and_canceling_earns_nothing() {
    for kind in Kind::ALL {
        let clock = ManualClock::new(Tick(0));
        let limiter =
            limiter(Policy::of(kind, 5).per(Ticks(2_000)).build().expect("valid"), &clock);
        let mut banked = Vec::new();
        for _ in 0..6 {
            let reserved = limiter.reserve(Ask::new("a").cost(5), HOUR).expect("short").granted();
            banked.extend(reserved);
            clock.advance(Ticks(2_000));
        }
        let mut allowed = 0;
        for reservation in &mut banked {
            let _ = limiter.cancel(reservation).expect("in time");
            while limiter.is_allowed("a").expect("short") {
                allowed += 1;
            }
        }
        assert!(allowed <= 5, "{kind}: {allowed}");
    }
}

/// Settling a reservation that was made before a reset is an error and returns nothing.
///
/// Fault K4.
#[test]
fn a_reset_voids_the_reservations_of_its_client_only() {
    for kind in Kind::ALL {
        let clock = ManualClock::new(Tick(0));
        let limiter = limiter(Policy::of(kind, 10).per_minute().build().expect("valid"), &clock);
        let reserve =
            |key: &str| limiter.reserve(Ask::new(key).cost(10), HOUR).expect("short").granted();
        let (mut alice, mut bob) = (reserve("alice").expect("room"), reserve("bob").expect("room"));
        let _ = limiter.reset("alice").expect("short");
        assert!(limiter.check(Ask::new("alice").cost(10)).expect("short").allowed, "{kind}");
        for _ in 0..2 {
            assert_eq!(
                limiter.cancel(&mut alice),
                Err(StoreError::Settle(SettleError::Reset)),
                "{kind}"
            );
            assert_eq!(
                limiter.settle(&mut alice, 20),
                Err(StoreError::Settle(SettleError::Reset)),
                "{kind}"
            );
        }
        assert!(!limiter.is_allowed("alice").expect("short"), "{kind}");
        assert_eq!(limiter.cancel(&mut bob).expect("valid").remaining, 10, "{kind}");
        let _ = limiter.reset("alice").expect("short");
        let mut later = reserve("alice").expect("room");
        assert_eq!(limiter.cancel(&mut later).expect("valid").remaining, 10);
        assert_eq!(
            SettleError::Reset.to_string(),
            "the reservation is void because its client was reset; nothing was changed"
        );
    }
}

/// Another limiter cannot settle it, but every tier of its own limiter can.
///
/// Fault K4.
#[test]
fn only_the_limiter_that_made_a_reservation_settles_it() {
    let clock = ManualClock::new(Tick(0));
    let build = || Policy::token_bucket(10).per_minute().build().expect("valid");
    let (one, other) = (limiter(build(), &clock), limiter(build(), &clock));
    let mut reservation =
        one.reserve(Ask::new("a").cost(10), HOUR).expect("short").granted().expect("room");
    assert!(other.check(Ask::new("a").cost(10)).expect("short").allowed);
    assert_eq!(other.cancel(&mut reservation), Err(StoreError::Settle(SettleError::OtherLimiter)));
    assert!(!other.is_allowed("a").expect("short"));
    assert_eq!(one.cancel(&mut reservation).expect("its own").remaining, 10);

    let pro = Policy::fixed_window(20).per_hour().build().expect("valid");
    let tiers = Tiers::new(build()).tier("pro", pro);
    let store: MemoryStore<ClientRule, _> = MemoryStore::new(Capacity::of(10), &clock);
    let tiered = RateLimiter::in_store("api", tiers, store);
    let pro = Ask::new("a").tier("pro");
    let mut reservation =
        tiered.reserve(pro.cost(10), HOUR).expect("short").granted().expect("room");
    let decision = tiered.cancel(&mut reservation).expect("of the same limiter");
    assert_eq!(decision.remaining, 20, "the state of the tier that it was made under");
    assert_eq!(tiered.peek(pro).expect("short").remaining, 19);
}

/// A cost beyond the estimate is charged under every policy that charged the reservation.
///
/// Fault K4.
#[test]
fn a_surplus_is_charged_through_a_limiter_without_limits_too() {
    let clock = ManualClock::new(Tick(0));
    let free = Policy::token_bucket(10).per_hour().build().expect("valid");
    let tiers = Tiers::new(Access::Unlimited).tier("free", free);
    let store: MemoryStore<ClientRule, _> = MemoryStore::new(Capacity::of(10), &clock);
    let base = RateLimiter::in_store("api", tiers, store);
    let free = Ask::new("a").tier("free");
    let mut reservation = base.reserve(free.cost(3), HOUR).expect("short").granted().expect("room");
    let _ = base.settle(&mut reservation, 8).expect("its own");
    assert_eq!(base.check(free.cost(0)).expect("short").remaining, 2);
    let mut reservation = base.reserve(free.cost(2), HOUR).expect("short").granted().expect("room");
    let _ = base.settle(&mut reservation, 1).expect("its own");
    assert_eq!(base.check(free.cost(0)).expect("short").remaining, 1);
}

/// The client was dropped because it was fresh. It makes no difference to what is charged then.
///
/// Fault K4.
#[test]
fn a_surplus_is_charged_without_limits_also_after_the_client_was_dropped() {
    for is_dropped in [false, true] {
        let clock = ManualClock::new(Tick(0));
        let free = Policy::token_bucket(10).per(Ticks(100)).build().expect("valid");
        let tiers = Tiers::new(Access::Unlimited).tier("free", free);
        let store: MemoryStore<ClientRule, _> = MemoryStore::new(Capacity::of(10), &clock);
        let limiter = RateLimiter::in_store("api", tiers, store);
        let free = Ask::new("a").tier("free");
        let reserved = limiter.reserve(free.cost(3), HOUR).expect("short");
        let mut reservation = reserved.granted().expect("room");
        limiter.set_override("a", Access::Unlimited, None);
        clock.advance(Ticks(1_000));
        if is_dropped {
            while limiter.sweep(64).buckets_left > 0 {}
            assert_eq!(limiter.store().usage().keys, 0);
        }
        let _ = limiter.settle(&mut reservation, 8).expect("its own");
        limiter.remove_override("a");
        assert_eq!(limiter.check(free.cost(0)).expect("short").remaining, 5, "{is_dropped}");
    }
}

/// A shadow limit has the state of an enforced limit, whatever is settled of the requests that it would have denied.
///
/// Fault K4.
#[test]
fn a_shadow_limit_takes_no_part_in_what_it_would_have_denied() {
    let clock = ManualClock::new(Tick(0));
    let all = Policy::token_bucket(100).per_hour().named("all");
    let shadow = Policy::fixed_window(5).per_hour().named("few").shadow();
    let policy = Policy::all_of("both", [all, shadow]).expect("valid");
    let limiter = limiter(policy, &clock);
    let reserve = |cost| {
        limiter.reserve(Ask::new("a").cost(cost), HOUR).expect("short").granted().expect("room")
    };
    let used = || {
        let would_deny = |cost| {
            limiter.peek(Ask::new("a").cost(cost)).expect("short").shadow_denied_by.is_some()
        };
        (1..=6).find(|cost| would_deny(*cost)).map_or(0, |cost| 6 - cost)
    };
    let _four = reserve(4);
    assert_eq!(used(), 4);
    let (mut less, mut more) = (reserve(3), reserve(3));
    let _ = limiter.settle(&mut less, 0).expect("valid");
    let _ = limiter.settle(&mut more, 30).expect("valid");
    assert_eq!(used(), 4, "both were denied by it");
}
