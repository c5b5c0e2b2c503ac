//! The faults of `docs/faults.md` that the core handles, with a test each.

use tallygate_core::{
    Algorithm, Anchor, Cost, Decision, DecodeError, Kind, Limit, LimitBuilder, LimitState,
    MAX_LOG_ENTRIES, Policy, PolicyError, Tick, Ticks, simulate,
};

const MAX: u64 = u64::MAX;

fn limit(builder: LimitBuilder) -> Limit {
    builder.limit().expect("the limit is valid")
}

/// Returns limits of all six algorithms with the same numbers.
fn all_six(amount: Cost, window: u64) -> impl Iterator<Item = Limit> {
    Kind::ALL.into_iter().map(move |kind| limit(Policy::of(kind, amount).per(Ticks(window))))
}

fn decide(limit: &Limit, state: &mut LimitState, now: i64, cost: Cost) -> Decision {
    limit.decide(state, Tick(now), cost)
}

/// Makes requests of cost 1 until one is denied. Returns how many were allowed.
fn drain(limit: &Limit, state: &mut LimitState, now: i64) -> u64 {
    (0..).take_while(|_| limit.decide::<bool>(state, Tick(now), 1)).count() as u64
}

/// Fault A1.
#[test]
fn a_window_near_the_largest_is_an_error_or_exact() {
    for kind in Kind::ALL {
        for window in [MAX, MAX - 1, (1 << 63) + 1, (1 << 62) + 1] {
            let result = Policy::of(kind, 1).per(Ticks(window)).limit();
            assert!(matches!(result, Err(PolicyError::TimeToFresh { .. })), "{kind} {window}");
        }
        if !kind.is_bucket() {
            let result = Policy::of(kind, 1).per(Ticks((1 << 61) + 1)).limit();
            assert!(matches!(result, Err(PolicyError::TimeToFresh { .. })), "{kind}: both windows");
        }
        // The longest valid window allows exactly one request, and the next one exactly when it is earned.
        let window = if kind.is_bucket() { 1 << 62 } else { 1 << 61 };
        let limit = limit(Policy::of(kind, 1).per(Ticks(window)));
        let mut state = limit.initial(Tick(0));
        assert!(decide(&limit, &mut state, 0, 1).allowed);
        let denied = decide(&limit, &mut state, 1, 1);
        let wait = denied.retry_after.expect("the cost fits after some time").0.cast_signed();
        assert!(!decide(&limit, &mut state, wait, 1).allowed, "{kind}: a tick early");
        assert!(decide(&limit, &mut state, 1 + wait, 1).allowed, "{kind}: on time");
    }
    // governor 0.10 allows requests without limit at this window, in seconds.
    let nanoseconds = Ticks::from_duration(core::time::Duration::from_secs(18_446_744_073));
    assert!(Policy::token_bucket(1).per(nanoseconds).limit().is_err());
}

/// Fault A2.
#[test]
fn a_century_with_a_huge_burst_is_exact() {
    let century = 100 * 365 * 86_400 * 1_000_000_000_u64;
    let burst = u64::from(u32::MAX);
    let limit = limit(Policy::token_bucket(burst).per(Ticks(century)).burst(burst));
    let mut state = limit.initial(Tick(0));
    let all = decide(&limit, &mut state, 0, burst);
    assert!(all.allowed);
    assert_eq!(all.reset_after, Ticks(century));
    let next = decide(&limit, &mut state, 0, 1).retry_after.expect("the cost fits after some time");
    assert_eq!(next, Ticks(century.div_ceil(burst)));
    let slow = Policy::token_bucket(1).per(Ticks(century)).burst(burst).limit();
    let message = slow.expect_err("the time is above the bound").to_string();
    assert!(message.contains("at most 4611686018427387904"), "{message}");
}

/// Fault A3.
#[test]
fn one_tick_windows_and_rates_above_one_per_tick_are_exact() {
    for limit in all_six(5, 1) {
        let mut state = limit.initial(Tick(0));
        let mut allowed = 0;
        for now in 0..100 {
            allowed += drain(&limit, &mut state, now);
        }
        // At the start of a window, the previous window of the counter counts in full.
        let most = if limit.numbers().kind == Kind::SlidingWindowCounter { 250 } else { 500 };
        assert_eq!(allowed, most, "{}", limit.name());
    }
}

/// Fault A4.
#[test]
fn zeros_are_typed_errors() {
    for kind in Kind::ALL {
        let zero = |limit, window| Policy::of(kind, limit).per(Ticks(window)).limit();
        assert_eq!(zero(0, 1), Err(PolicyError::ZeroLimit));
        assert_eq!(zero(1, 0), Err(PolicyError::ZeroWindow));
        let burst = Policy::of(kind, 1).per(Ticks(1)).burst(0).limit();
        assert_eq!(burst, Err(PolicyError::ZeroBurst));
    }
}

/// Fault A5.
#[test]
fn a_cost_of_0_returns_the_state_and_never_writes() {
    for limit in all_six(3, 10) {
        let mut state = limit.initial(Tick(0));
        let _ = decide(&limit, &mut state, 0, 2);
        let look = decide(&limit, &mut state, 4, 0);
        assert!(look.allowed);
        assert_eq!(
            decide(&limit, &mut state, 4, 0),
            look,
            "{}: a cost of 0 changed it",
            limit.name()
        );
        // It does not write if the clock was set back either.
        assert!(decide(&limit, &mut state, -1_000, 0).allowed);
        assert_eq!(
            decide(&limit, &mut state, 4, 0),
            look,
            "{}: a cost of 0 changed it",
            limit.name()
        );
        limit.charge(&mut state, Tick(4), 3);
        let in_debt = decide(&limit, &mut state, 4, 0);
        assert!(!in_debt.allowed && in_debt.remaining == 0, "{}", limit.name());
        let wait =
            in_debt.retry_after.expect("debt is earned back after some time").0.cast_signed();
        assert!(!decide(&limit, &mut state, 4 + wait - 1, 0).allowed);
        assert!(decide(&limit, &mut state, 4 + wait, 0).allowed);
    }
}

/// Fault A7.
#[test]
fn a_cost_that_never_fits_differs_from_one_that_does_not_fit_yet() {
    for limit in all_six(3, 10) {
        let mut state = limit.initial(Tick(0));
        for cost in [4, MAX] {
            let never = decide(&limit, &mut state, 0, cost);
            assert_eq!((never.allowed, never.retry_after), (false, None));
            assert_eq!(never.remaining, 3, "nothing was charged");
        }
        let _ = decide(&limit, &mut state, 0, 3);
        let not_yet = decide(&limit, &mut state, 0, 3);
        assert!(!not_yet.allowed && not_yet.retry_after.is_some());
    }
}

/// Fault A8.
#[test]
fn three_per_second_do_not_drift_over_a_million_steps() {
    let second = 1_000_000_000;
    for kind in &Kind::ALL[..3] {
        // A burst of two, so that no fraction of a token is lost.
        let limit = limit(Policy::of(*kind, 3).per(Ticks(second)).burst(2));
        let mut state = limit.initial(Tick(0));
        assert_eq!(drain(&limit, &mut state, 0), 2);
        let mut now = 0_i64;
        for step in 1..=1_000_000 {
            let wait = decide(&limit, &mut state, now, 1)
                .retry_after
                .expect("the cost fits after some time");
            now += wait.0.cast_signed();
            // Token k is earned at k·10⁹/3, and used at the first whole tick after that.
            assert_eq!(now.unsigned_abs(), (step * second).div_ceil(3));
            assert!(limit.decide::<bool>(&mut state, Tick(now), 1));
        }
    }
}

/// Fault A9.
#[test]
fn bursts_above_32_bits_are_not_cut() {
    let burst = (1_u64 << 32) + 7;
    for kind in &Kind::ALL[..3] {
        let limit = limit(Policy::of(*kind, burst).per(Ticks(1_000)));
        let mut state = limit.initial(Tick(0));
        assert_eq!(decide(&limit, &mut state, 0, 5).remaining, burst - 5);
        assert!(decide(&limit, &mut state, 0, burst - 5).allowed);
        assert!(!decide(&limit, &mut state, 0, 1).allowed);
    }
}

/// Combines the largest valid numbers. A debug build panics on any overflow.
///
/// Fault A10.
#[test]
fn products_of_the_largest_numbers_do_not_overflow() {
    let windows: [Limit; 2] = [Kind::FixedWindow, Kind::SlidingWindowCounter]
        .map(|kind| limit(Policy::of(kind, MAX).per(Ticks(1 << 61))));
    let buckets = [
        limit(Policy::token_bucket(MAX).per(Ticks(1 << 62))),
        limit(Policy::gcra(MAX).per(Ticks(MAX)).burst(1 << 62)),
        limit(Policy::leaky_bucket(MAX).per(Ticks(MAX)).burst(1)),
        limit(Policy::token_bucket(MAX - 1).per(Ticks(MAX)).burst((1 << 62) - 1)),
    ];
    let log = limit(Policy::sliding_window_log(MAX_LOG_ENTRIES).per(Ticks(1 << 61)));
    for limit in windows.iter().chain(&buckets).chain([&log]) {
        let mut state = limit.initial(Tick(i64::MIN));
        let capacity = limit.capacity();
        let all = decide(limit, &mut state, i64::MIN, capacity);
        assert!(all.allowed && all.remaining == 0, "{}", limit.name());
        let dropped = limit.charge(&mut state, Tick(i64::MIN), i128::MAX);
        assert!(dropped > 0);
        let deep = decide(limit, &mut state, i64::MIN, capacity);
        assert!(!deep.allowed && deep.reset_after >= all.reset_after);
        assert!(decide(limit, &mut state, i64::MAX, capacity).allowed, "{}", limit.name());
        assert_eq!(
            limit.charge(&mut state, Tick(i64::MAX), i128::MIN),
            (1 << 127) - u128::from(capacity)
        );
    }
}

/// The wait of a denied request is never too short and never 0. Headers round it up.
///
/// Fault A11.
#[test]
fn a_denial_never_has_a_wait_of_0() {
    for limit in all_six(7, 3).chain(all_six(1, 1)) {
        let mut state = limit.initial(Tick(0));
        drain(&limit, &mut state, 0);
        let wait =
            decide(&limit, &mut state, 0, 1).retry_after.expect("the cost fits after some time");
        assert!(wait >= Ticks(1), "{}", limit.name());
    }
}

/// Fault A12.
#[test]
fn polling_faster_than_tokens_come_earns_the_same() {
    for limit in all_six(3, 10) {
        let (mut waiting, mut polling) = (limit.initial(Tick(0)), limit.initial(Tick(0)));
        let (mut one, mut other) = (0, 0);
        for now in 0..10_000 {
            if now % 10 == 9 {
                one += drain(&limit, &mut waiting, now);
            }
            if now % 10 == 9 {
                other += drain(&limit, &mut polling, now);
            } else {
                let _ = decide(&limit, &mut polling, now, 4);
                let _ = decide(&limit, &mut polling, now, 0);
            }
        }
        assert_eq!(one, other, "{}", limit.name());
    }
}

/// Fault A13.
#[test]
fn after_years_of_idling_the_quota_is_full_and_not_more() {
    let century = 100 * 365 * 86_400 * 1_000_000_000_i64;
    for limit in all_six(5, 1_000_000_000) {
        let mut state = limit.initial(Tick(0));
        drain(&limit, &mut state, 0);
        let look = decide(&limit, &mut state, century, 0);
        assert_eq!((look.remaining, look.reset_after), (5, Ticks::ZERO), "{}", limit.name());
        assert_eq!(drain(&limit, &mut state, century), 5, "{}", limit.name());
    }
    // 2⁶¹ ticks at 8 units per tick are 2⁶⁴ units, which would wrap to 0.
    for limit in all_six(8, 1_000_000_001) {
        let mut state = limit.initial(Tick(0));
        drain(&limit, &mut state, 0);
        assert_eq!(drain(&limit, &mut state, 1 << 61), 8, "{}", limit.name());
    }
}

/// A client is denied for at most the time to earn back what it used, plus a window.
///
/// Fault B1.
#[test]
fn a_clock_set_back_locks_no_client_out() {
    let hour = 3_600_000;
    for limit in all_six(10, 60_000) {
        for back in [1, 59_999, 60_000, 60_001, 120_000, hour] {
            let mut state = limit.initial(Tick(hour));
            drain(&limit, &mut state, hour);
            let longest = decide(&limit, &mut state, hour, 10)
                .retry_after
                .expect("the cost fits after some time")
                .0;
            let now = hour - back;
            // A client that retries until it is allowed.
            let mut later = now;
            while !decide(&limit, &mut state, later, 10).allowed {
                later += 100;
                let waited = later.abs_diff(now);
                assert!(waited <= longest + 60_000 + 100, "{} back {back}", limit.name());
            }
        }
    }
}

/// A client gains nothing from a clock that was set back: what was used stays used.
///
/// Fault B1.
#[test]
fn a_clock_set_back_allows_no_extra_units() {
    for limit in all_six(10, 60_000) {
        for back in [1, 60_000, 60_001, 3_600_000] {
            let mut state = limit.initial(Tick(3_600_000));
            let _ = decide(&limit, &mut state, 3_600_000, 7);
            let look = decide(&limit, &mut state, 3_600_000 - back, 0);
            assert!(look.remaining <= 3, "{} back {back}: {}", limit.name(), look.remaining);
        }
    }
}

/// Faults B2, B3.
#[test]
fn a_jump_forward_gains_at_most_one_burst() {
    for limit in all_six(10, 60_000) {
        let mut state = limit.initial(Tick(0));
        drain(&limit, &mut state, 0);
        assert_eq!(drain(&limit, &mut state, 3_600_000), 10, "{}", limit.name());
        assert_eq!(drain(&limit, &mut state, 3_600_000), 0, "{}", limit.name());
    }
}

/// Two threads read the clock in one order and arrive in the other order: both are decided at the later time.
///
/// Fault B4.
#[test]
fn times_out_of_order_allow_no_more() {
    for limit in all_six(10, 1_000) {
        // A late request that is allowed does not change the time of the last change.
        let mut on_time = limit.initial(Tick(2_000));
        let mut late = on_time.clone();
        for state in [&mut on_time, &mut late] {
            assert!(decide(&limit, state, 2_600, 5).allowed);
        }
        assert!(decide(&limit, &mut on_time, 2_600, 1).allowed);
        assert!(decide(&limit, &mut late, 2_400, 1).allowed);
        for now in [2_600, 2_900] {
            let look = |state: &mut LimitState| decide(&limit, state, now, 0);
            assert_eq!(look(&mut on_time), look(&mut late), "{}", limit.name());
        }

        let mut ordered = limit.initial(Tick(2_000));
        let mut swapped = ordered.clone();
        let one: u64 =
            [2_400, 2_500, 2_600].map(|now| drain(&limit, &mut ordered, now)).iter().sum();
        let other: u64 =
            [2_600, 2_400, 2_500].map(|now| drain(&limit, &mut swapped, now)).iter().sum();
        assert!(other <= one, "{}: {other} > {one}", limit.name());
        let late = decide(&limit, &mut swapped, 2_400, 1);
        let wait = late.retry_after.expect("the cost fits after some time").0.cast_signed();
        assert!(!decide(&limit, &mut swapped.clone(), 2_400 + wait - 1, 1).allowed);
        assert!(
            decide(&limit, &mut swapped, 2_400 + wait, 1).allowed,
            "the wait counts from the given time"
        );
    }
}

/// Fault B7.
#[test]
fn windows_are_half_open_at_their_boundary() {
    let by = |builder: LimitBuilder, first, then| {
        let limit = limit(builder);
        let trace = [("a", Tick(first), 1), ("a", Tick(then), 1)];
        simulate(limit, trace).last().expect("there is a decision").allowed
    };
    let fixed = || Policy::fixed_window(1).per(Ticks(10));
    assert!(!by(fixed(), 13, 19));
    assert!(by(fixed(), 13, 20));
    assert!(!by(fixed(), -10, -1));
    assert!(by(fixed(), -1, 0), "windows before the origin are aligned too");
    let anchored = || fixed().anchor(Anchor::FirstRequest);
    assert!(!by(anchored(), 13, 22));
    assert!(by(anchored(), 13, 23));
    let log = || Policy::sliding_window_log(1).per(Ticks(10));
    assert!(!by(log(), 13, 22), "t + W − 1");
    assert!(by(log(), 13, 23), "t + W");
    let bucket = || Policy::token_bucket(1).per(Ticks(10));
    assert!(!by(bucket(), 13, 22));
    assert!(by(bucket(), 13, 23));
    let counter = || Policy::sliding_window_counter(1).per(Ticks(10));
    assert!(!by(counter(), 13, 20), "all of the previous window");
    assert!(by(counter(), 13, 21), "floor(1 · 9 / 10)");
}

/// Fault B8.
#[test]
fn drained_then_idle_then_a_burst_allows_one_capacity_at_an_instant() {
    for limit in all_six(4, 10) {
        let mut state = limit.initial(Tick(0));
        drain(&limit, &mut state, 0);
        assert_eq!(drain(&limit, &mut state, 1_000), 4, "{}", limit.name());
    }
    let bucket = limit(Policy::token_bucket(4).per(Ticks(10)).burst(9));
    let mut state = bucket.initial(Tick(0));
    assert_eq!(drain(&bucket, &mut state, 0), 9);
    assert_eq!(drain(&bucket, &mut state, 1_000), 9);
}

/// Fault B9.
#[test]
fn the_ends_of_time_do_not_panic() {
    let ends = [i64::MIN, i64::MIN + 1, -1, 0, 1, i64::MAX - 1, i64::MAX];
    for limit in all_six(3, 10).chain(all_six(1, 1 << 61)) {
        for first in ends {
            for then in ends {
                let mut state = limit.initial(Tick(first));
                assert!(decide(&limit, &mut state, first, 1).allowed, "{}", limit.name());
                let second = decide(&limit, &mut state, then, 3);
                limit.charge(&mut state, Tick(first), -1);
                let _ = decide(&limit, &mut state, then, 1);
                assert!(second.remaining <= 3);
                assert!(limit.fresh_at(&state).is_none_or(|fresh| fresh >= Tick(i64::MIN)));
            }
        }
    }
}

/// Fault D5.
#[test]
fn a_sliding_log_is_bounded_or_an_error() {
    let log = |limit, window| Policy::sliding_window_log(limit).per(Ticks(window)).limit();
    let error = log(1_000_000_000, 1_000_000_000).expect_err("this needs a gigabyte per key");
    assert!(matches!(error, PolicyError::LogTooLong { .. }));
    assert!(error.to_string().contains("use a smaller limit or a sliding_window_counter"));
    assert!(log(MAX_LOG_ENTRIES + 1, 1 << 40).is_err());
    // A billion units in a window of a hundred ticks need a hundred entries, because equal ticks share one.
    let merging = log(1_000_000_000, 100).expect("the window bounds the entries");
    let mut state = merging.initial(Tick(0));
    for step in 0..100_000 {
        let now = step / 500;
        assert!(decide(&merging, &mut state, now, 1).allowed);
    }
    let mut bytes = Vec::new();
    merging.encode(&state, &mut bytes);
    assert!(bytes.len() < 100 * 4 + 40, "{} bytes for {} entries", bytes.len(), 100);
}

/// Fault G3.
#[test]
fn a_live_change_keeps_what_was_used() {
    for from in all_six(10, 100) {
        for to in all_six(4, 100).chain(all_six(20, 50)) {
            let mut state = from.initial(Tick(0));
            let _ = decide(&from, &mut state, 0, 7);
            let mut changed = to.carry(&from, &state, Tick(0));
            let decision = decide(&to, &mut changed, 0, 0);
            let expected = to.capacity() - to.capacity().min(7);
            assert_eq!(decision.remaining, expected, "{} to {}", from.name(), to.name());
            // Changing back gives no free burst and loses no token.
            let back = from.carry(&to, &changed, Tick(0));
            assert_eq!(from.used(&back, Tick(0)).rounded_up(), 7.min(to.capacity()));
        }
    }
}

/// A client whose tier changes with every request earns as much as one whose tier stays.
///
/// Fault G3.
#[test]
fn switching_tiers_neither_adds_nor_removes_units() {
    let one = limit(Policy::token_bucket(3).per(Ticks(10)));
    let other = limit(Policy::gcra(3).per(Ticks(10)).burst(4));
    let mut state = one.initial(Tick(0));
    let mut allowed = drain(&one, &mut state, 0);
    for now in 1..=1_000 {
        let there = other.carry(&one, &state, Tick(now));
        state = one.carry(&other, &there, Tick(now));
        allowed += drain(&one, &mut state, now);
    }
    assert_eq!(allowed, 3 + 300);
}

/// Fault G3.
#[test]
fn debt_is_capped_at_the_new_capacity() {
    let from = limit(Policy::token_bucket(10).per(Ticks(10)));
    let to = limit(Policy::fixed_window(5).per(Ticks(10)));
    let mut state = from.initial(Tick(0));
    assert_eq!(from.charge(&mut state, Tick(0), 25), 5, "debt is bounded by one capacity");
    assert_eq!(from.used(&state, Tick(0)).whole, 20);
    assert_eq!(to.used(&to.carry(&from, &state, Tick(0)), Tick(0)).whole, 5);
}

/// Fault G5.
#[test]
fn a_state_is_never_misread_by_another_algorithm() {
    let now = Tick(50);
    for from in all_six(10, 100) {
        for to in all_six(8, 70) {
            let mut state = from.initial(now);
            let _ = decide(&from, &mut state, 50, 6);
            let mut bytes = Vec::new();
            from.encode(&state, &mut bytes);
            let expected = if from.numbers().kind == to.numbers().kind {
                DecodeError::OtherLimit
            } else {
                let tag = |limit: &Limit| {
                    let mut bytes = Vec::new();
                    limit.encode(&limit.initial(now), &mut bytes);
                    bytes[0]
                };
                DecodeError::Tag { found: tag(&from), expected: tag(&to) }
            };
            assert_eq!(to.decode(&bytes).err(), Some(expected));
            let adopted = to.adopt(&bytes, now).expect("every valid state can be adopted");
            assert_eq!(to.used(&adopted, now).rounded_up(), 6, "{} to {}", from.name(), to.name());
        }
    }
}

/// A state of another algorithm that was not carried over counts as used up, and is earned back.
///
/// Fault G5.
#[test]
fn a_state_of_another_algorithm_gives_no_free_burst() {
    let bucket = limit(Policy::token_bucket(10).per(Ticks(100)));
    let window = limit(Policy::fixed_window(10).per(Ticks(100)));
    let mut state = bucket.initial(Tick(0));
    assert!(!decide(&window, &mut state, 0, 1).allowed);
    assert!(!decide(&window, &mut state, 99, 1).allowed);
    assert!(decide(&window, &mut state, 100, 1).allowed);
}
