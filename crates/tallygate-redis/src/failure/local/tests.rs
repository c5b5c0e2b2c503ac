//! Fleets in virtual time: how much they allow over outages of any length.

use std::cell::RefCell;

use tallygate::algorithm::{Algorithm as _, LimitRecord};
use tallygate::policy::{Anchor, LimitBuilder};
use tallygate::{Kind, Limit};

use super::super::share::share_of;
use super::super::{pay_again_after, pay_each};
use super::*;

#[test]
fn shares_add_up_to_the_whole() {
    let policy = Policy::all_of(
        "api",
        [
            Policy::token_bucket(100).per(Ticks(60)).burst(40),
            Policy::fixed_window(10).per(Ticks(60)),
            Policy::sliding_window_log(3).per(Ticks(60)),
        ],
    )
    .unwrap();
    let share = share_of(&policy, 4).unwrap();
    let numbers = share.limits().iter().map(|limit| *limit.numbers());
    let shares: Vec<_> = numbers.map(|n| (n.limit, n.window.0, n.burst)).collect();
    assert_eq!(shares, [(100, 240, 10), (2, 60, 2), (1, 120, 1)]);
}

/// Fault J16.
#[test]
fn shares_of_a_quota_smaller_than_the_fleet_do_not_add_up_to_more_than_the_quota() {
    let second = 1_000_000_000;
    for policy in [
        Policy::token_bucket(2).per_second().burst(1).build().unwrap(),
        Policy::fixed_window(2).per_second().build().unwrap(),
        Policy::sliding_window_counter(2).per_second().build().unwrap(),
        Policy::sliding_window_log(2).per_second().build().unwrap(),
    ] {
        let rule = ClientRule::of(policy);
        let processes: Vec<_> =
            (0..7).map(|_| LocalLimiter::new(OnFailure::Local { instances: 7 })).collect();
        let mut allowed = 0;
        for step in 0..60_000 {
            let now = step * second / 1000;
            for local in &processes {
                let at = (Tick(now), true);
                let decision = local.decide(&rule, b"alice", Op::Check(1), at);
                assert_eq!(decision.source, Source::Local);
                allowed += i64::from(decision.allowed);
            }
            assert!(allowed * second <= 2 * now, "{allowed} after {now} ns");
        }
        assert!(allowed > 60, "no client is locked out: {allowed}");
    }
}

/// Fault I5.
#[test]
fn clients_of_one_policy_have_one_share_however_often_it_is_made() {
    let local = LocalLimiter::new(OnFailure::Local { instances: 4 });
    let policy = |limit| Arc::new(Policy::gcra(limit).per_second().build().unwrap());
    let part_of = |limit, instances| local.share_of(&policy(limit), instances).unwrap().part;
    let first = part_of(100, 4);
    assert!(Arc::ptr_eq(&first, &part_of(100, 4)));
    assert_ne!(first, part_of(100, 5));
    for limit in 1..1000 {
        assert_eq!(*part_of(limit, 4), share_of(&policy(limit), 4).unwrap());
    }
    assert!(local.shares.lock().unwrap().len() <= MAX_SHARES);
}

/// A policy of L units per window, and the store and the processes that decide by it, in virtual time.
struct Fleet {
    rule: ClientRule,
    policy: Policy,
    /// The state of the client in Redis.
    records: RefCell<Box<[LimitRecord]>>,
    processes: Vec<LocalLimiter>,
    /// When each unit was allowed.
    allowed_at: Vec<i64>,
}

const LIMIT: Cost = 40;
const WINDOW: i64 = 1000;

fn policies() -> [Policy; 4] {
    let window = Ticks(WINDOW.cast_unsigned());
    [
        Policy::fixed_window(LIMIT).per(window),
        Policy::fixed_window(LIMIT).per(window).anchor(Anchor::FirstRequest),
        Policy::sliding_window_log(LIMIT).per(window),
        Policy::sliding_window_counter(LIMIT).per(window),
    ]
    .map(|policy| policy.build().unwrap())
}

impl Fleet {
    fn new(policy: &Policy, processes: u32) -> Self {
        let on_failure = OnFailure::Local { instances: processes };
        Self {
            rule: ClientRule::of(policy.clone()),
            policy: policy.clone(),
            records: RefCell::new(policy.initial(Tick(0))),
            processes: (0..processes).map(|_| LocalLimiter::new(on_failure)).collect(),
            allowed_at: Vec::new(),
        }
    }

    fn ask_redis(&self, op: Op, at: Tick) -> Decision {
        let mut state = self.records.borrow_mut();
        let mut part = tallygate::algorithm::Part { rule: &self.policy, state: &mut *state, op };
        let agrees = part.allows(at);
        part.step::<tallygate::algorithm::Timed>(at, agrees).0.decision
    }

    /// Charges the units that a process allowed, as `RedisStore::pay_debt` does.
    fn pay_debt(&self, process: &LocalLimiter, at: Tick) {
        if !process.is_due(b"alice", at) {
            return;
        }
        let room = self.ask_redis(Op::Peek(0), at);
        let TakenDebt::Charge(mut charge) = process.take(&self.rule, b"alice", at) else { return };
        if let Some(sent) = charge.sent {
            let _ = self.ask_redis(Op::Force(sent.used.into()), at);
            charge.is_used_charged = true;
        }
        let Access::Limited(policy) = self.rule.access(at) else { unreachable!() };
        if charge.is_per_limit {
            let mut records = self.records.borrow_mut();
            let amounts: Vec<_> =
                charge.payments.iter().map(|payment| (payment.index, payment.pay)).collect();
            let paid = pay_each(policy, &mut records, &amounts, Cost::MAX, at).unwrap();
            let mut retry_at = None;
            for (payment, (amount, reset_after)) in charge.payments.iter_mut().zip(paid) {
                payment.paid = amount;
                if payment.paid < payment.pay {
                    let wait = pay_again_after(&policy.limits()[payment.index], reset_after);
                    let next = at.after(wait).unwrap();
                    retry_at = Some(retry_at.map_or(next, |before: Tick| before.min(next)));
                }
            }
            charge.retry_at = retry_at;
            return;
        }
        charge.retry_at = at.after(pay_again_after(&policy.limits()[0], room.reset_after));
        let payment = &mut charge.payments[0];
        let amount = payment.pay.min(room.remaining);
        if amount > 0 && self.ask_redis(Op::Check(amount), at).allowed {
            payment.paid = amount;
        }
    }

    /// Asks every process at some ticks, while Redis is down in some intervals.
    fn run(&mut self, ticks: impl Iterator<Item = i64>, is_down: impl Fn(i64) -> bool) {
        for now in ticks {
            let at = Tick(now);
            if !is_down(now) {
                self.processes.iter().for_each(|process| self.pay_debt(process, at));
            }
            for index in 0..self.processes.len() {
                let decision = match is_down(now) {
                    true => {
                        let process = &self.processes[index];
                        process.decide(&self.rule, b"alice", Op::Check(1), (at, true))
                    }
                    false => self.ask_redis(Op::Check(1), at),
                };
                self.allowed_at.extend(decision.allowed.then_some(now));
            }
        }
    }

    /// Returns by how many units the worst of all intervals exceeds the bound of a limit.
    fn most_beyond_the_bound_of(&self, limit: &Limit) -> i64 {
        let numbers = *limit.numbers();
        let (limit, window) = (numbers.limit.cast_signed(), numbers.window.0.cast_signed());
        let mut most = i64::MIN;
        for (first, from) in self.allowed_at.iter().enumerate() {
            for (until, units) in self.allowed_at[first..].iter().zip(1..) {
                let windows = match numbers.kind {
                    Kind::SlidingWindowLog => (until - from) / window + 1,
                    Kind::FixedWindow if numbers.anchor == Anchor::FirstRequest => {
                        (until - from) / window + 2
                    }
                    kind if kind.is_bucket() => {
                        let earned = (until - from) * limit / window;
                        most = most.max(units - numbers.burst.cast_signed() - earned);
                        continue;
                    }
                    _ => until / window - from / window + 1,
                };
                most = most.max(units - windows * limit);
            }
        }
        most
    }

    fn allowed_in(&self, ticks: std::ops::Range<i64>) -> usize {
        self.allowed_at.iter().filter(|at| ticks.contains(at)).count()
    }
}

/// Fault J16.
#[test]
fn outages_in_every_window_allow_one_burst_more_in_all() {
    let mut random = fastrand::Rng::with_seed(16);
    for policy in policies() {
        for processes in [1, 4] {
            for pattern in 0..24 {
                let (outages, lasts) = match pattern {
                    0 => (1, 50),
                    1 => (1, 600),
                    2 => (5, 20),
                    3 => (10, 90),
                    _ => (random.i64(1..6), random.i64(1..300)),
                };
                let offset = random.i64(0..WINDOW);
                let every = WINDOW / outages + i64::from(pattern % 3 == 2);
                let mut fleet = Fleet::new(&policy, processes);
                fleet.run(0..13 * WINDOW, |now| {
                    (now + WINDOW - offset).rem_euclid(every) < lasts.min(every - 1)
                });
                let limit = &policy.limits()[0];
                let most = fleet.most_beyond_the_bound_of(limit);
                assert!(
                    most <= LIMIT.cast_signed(),
                    "{most} beyond the bound: {limit:?}, {processes} processes, {outages} outages of {lasts}, \
                     from {offset} on"
                );
                let possible = 13 * usize::try_from(LIMIT).unwrap();
                let allowed = fleet.allowed_at.len();
                assert!(allowed * 10 > possible * 5, "{allowed} of {possible}: {limit:?}");
            }
        }
    }
}

/// Fault J16.
#[test]
fn a_long_outage_locks_no_client_out_and_after_it_the_quota_is_there() {
    for policy in policies() {
        for processes in [1, 4] {
            for offset in [1, 300, 990] {
                let mut fleet = Fleet::new(&policy, processes);
                let (from, until) = (2 * WINDOW + offset, 12 * WINDOW + offset);
                fleet.run(0..16 * WINDOW, |now| (from..until).contains(&now));
                let limit = &policy.limits()[0];
                assert!(fleet.most_beyond_the_bound_of(limit) <= LIMIT.cast_signed());
                let enough = usize::try_from(LIMIT * 95 / 100).unwrap();
                // The window after the beginning pays for the units of the overlap.
                for window in 5..12 {
                    let start = window * WINDOW;
                    let allowed = fleet.allowed_in(start..start + WINDOW);
                    assert!(allowed >= enough, "{allowed} in window {window}: {limit:?}");
                }
                let after = fleet.allowed_in(14 * WINDOW..15 * WINDOW);
                assert!(after >= enough, "{after} after the outage: {limit:?}");
            }
        }
    }
}

/// Policies of several limits, each with a short window and one or two longer ones.
fn policies_of_several_limits() -> [Policy; 4] {
    let window = |windows: u64| Ticks(windows * WINDOW.cast_unsigned());
    let of = |limits: Vec<LimitBuilder>| Policy::all_of("api", limits).unwrap();
    [
        of(vec![
            Policy::fixed_window(LIMIT).per(window(1)).named("short"),
            Policy::sliding_window_log(3 * LIMIT).per(window(5)).named("long"),
        ]),
        of(vec![
            Policy::token_bucket(LIMIT).per(window(1)).burst(LIMIT / 2).named("short"),
            Policy::fixed_window(3 * LIMIT).per(window(6)).named("long"),
        ]),
        of(vec![
            Policy::sliding_window_counter(LIMIT).per(window(1)).named("short"),
            Policy::fixed_window(2 * LIMIT).per(window(3)).named("middle"),
            Policy::fixed_window(4 * LIMIT).per(window(8)).named("long"),
        ]),
        of(vec![
            Policy::sliding_window_log(LIMIT).per(window(1)).named("short"),
            Policy::token_bucket(LIMIT / 2).per(window(1)).burst(3 * LIMIT).named("long"),
        ]),
    ]
}

/// The bound of a limit that is not the tightest is never reached, so every limit is checked with its own bound.
///
/// Fault J16.
#[test]
fn a_policy_of_several_limits_keeps_the_bound_of_each_in_outages_of_any_length() {
    let mut random = fastrand::Rng::with_seed(17);
    for policy in policies_of_several_limits() {
        for processes in [1, 4] {
            for pattern in 0..14 {
                // Shorter than all windows, longer than the short one, as long as a window, longer than all of them.
                let (every, lasts) = match pattern {
                    0 => (WINDOW, 200),
                    1 => (2 * WINDOW, WINDOW),
                    2 => (6 * WINDOW, 2 * WINDOW),
                    3 => (6 * WINDOW, 5 * WINDOW),
                    4 => (8 * WINDOW + 1, 3 * WINDOW + 500),
                    5 => (14 * WINDOW, 9 * WINDOW),
                    _ => {
                        let every = random.i64(200..12 * WINDOW);
                        (every, random.i64(1..every))
                    }
                };
                let offset = random.i64(0..every);
                let mut fleet = Fleet::new(&policy, processes);
                let ticks = 32 * WINDOW;
                let asked_at = (0..ticks).step_by(5);
                fleet.run(asked_at, |now| (now + offset).rem_euclid(every) < lasts);
                for limit in policy.limits() {
                    let most = fleet.most_beyond_the_bound_of(limit);
                    let burst = match limit.numbers().kind.is_bucket() {
                        true => limit.numbers().burst.cast_signed(),
                        false => limit.numbers().limit.cast_signed(),
                    };
                    assert!(
                        most <= burst,
                        "{most} beyond the bound of {limit:?}: {processes} processes, every {every} an outage of \
                         {lasts}, from {offset} on"
                    );
                }
                // The slowest limit decides how many are possible. Where outages come all the time, a good part of them
                // pays for units of the window before; but no client is locked out.
                let rate = |limit: &Limit| {
                    ticks * limit.numbers().limit.cast_signed()
                        / limit.numbers().window.0.cast_signed()
                };
                let possible = policy.limits().iter().map(rate).min().unwrap();
                let allowed = i64::try_from(fleet.allowed_at.len()).unwrap();
                assert!(
                    allowed * 10 > possible * 2,
                    "{allowed} of {possible}: {processes} processes, every {every} an outage of {lasts}, from \
                     {offset} on, {policy:?}"
                );
            }
        }
    }
}

/// Fault J16.
#[test]
fn units_whose_charge_has_no_reply_stay_unpaid() {
    let rule = ClientRule::of(policies()[0].clone());
    let local = LocalLimiter::new(OnFailure::Local { instances: 1 });
    let check = |now| local.decide(&rule, b"alice", Op::Check(30), (Tick(now), true)).allowed;
    assert!(check(0));
    let TakenDebt::Charge(mut charge) = local.take(&rule, b"alice", Tick(10)) else {
        panic!("30 units are to be charged");
    };
    assert_eq!((charge.payments[0].pay, charge.sent.is_none()), (30, true));
    assert!(matches!(local.take(&rule, b"alice", Tick(11)), TakenDebt::ByAnother));
    charge.retry_at = Some(Tick(WINDOW));
    drop(charge);
    assert!(!local.is_due(b"alice", Tick(WINDOW - 1)), "there is no room in this window");
    assert!(!check(500), "30 of 40 are unpaid");
    let TakenDebt::Charge(mut charge) = local.take(&rule, b"alice", Tick(WINDOW)) else {
        panic!("30 units are still to be charged");
    };
    charge.payments[0].paid = charge.payments[0].pay;
    drop(charge);
    assert!(local.has_no_debts(), "everything is paid");
}

/// Fault J16: it is unknown whether the charge was carried out, so it is sent again with the same number.
#[test]
fn a_charge_of_a_bucket_without_a_reply_is_repeated_with_its_number() {
    let policy = Policy::token_bucket(100).per(Ticks(WINDOW.cast_unsigned())).burst(100).build();
    let rule = ClientRule::of(policy.unwrap());
    let local = LocalLimiter::new(OnFailure::Local { instances: 1 });
    let check = |now| local.decide(&rule, b"alice", Op::Check(30), (Tick(now), true)).allowed;
    let take = |now| match local.take(&rule, b"alice", Tick(now)) {
        TakenDebt::Charge(charge) => charge,
        _ => panic!("there are units to be charged"),
    };
    assert!(check(0));
    let rejected = take(1);
    let first = rejected.sent.unwrap().number;
    rejected.failed();
    assert!(check(2));
    let lost = take(3);
    let number = lost.sent.unwrap().number;
    assert_ne!(number, first, "the first one was not carried out");
    drop(lost);
    assert!(check(4));
    for is_rejected in [true, false] {
        let mut again = take(5);
        let sent = again.sent.unwrap();
        assert_eq!((sent.number, sent.used, sent.began), (number, 60, Tick(0)));
        if is_rejected {
            again.failed();
        } else {
            again.is_used_charged = true;
        }
    }
    let mut rest = take(6);
    let sent = rest.sent.unwrap();
    assert_eq!((sent.used, sent.began), (30, Tick(4)), "allowed since the lost charge");
    rest.is_used_charged = true;
    drop(rest);
    assert!(local.has_no_debts(), "everything is charged");
}
