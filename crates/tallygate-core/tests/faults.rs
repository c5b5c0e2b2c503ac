//! The rows of `docs/faults.md` that the core owns, each as a promise with its own test.

use tallygate_core::{
    Algorithm, Anchor, Cost, Decision, DecodeError, Kind, Limit, LimitBuilder, LimitState,
    MAX_LOG_ENTRIES, Policy, PolicyError, Tick, Ticks, simulate,
};

const MAX: u64 = u64::MAX;

fn limit(builder: LimitBuilder) -> Limit {
    builder.limit().expect("a valid limit")
}

/// All six, with the same numbers.
fn all_six(amount: Cost, window: u64) -> impl Iterator<Item = Limit> {
    Kind::ALL.into_iter().map(move |kind| limit(Policy::of(kind, amount).per(Ticks(window))))
}

fn decide(limit: &Limit, state: &mut LimitState, now: i64, cost: Cost) -> Decision {
    limit.decide(state, Tick(now), cost)
}

/// Asks for 1 until refused; returns how many were admitted.
fn drain(limit: &Limit, state: &mut LimitState, now: i64) -> u64 {
    (0..).take_while(|_| limit.decide::<bool>(state, Tick(now), 1)).count() as u64
}

#[test]
fn a1_a_window_near_the_largest_is_refused_or_exact() {
    for kind in Kind::ALL {
        for window in [MAX, MAX - 1, (1 << 63) + 1, (1 << 62) + 1] {
            let refused = Policy::of(kind, 1).per(Ticks(window)).limit();
            assert!(matches!(refused, Err(PolicyError::TimeToFresh { .. })), "{kind} {window}");
        }
        if !kind.is_bucket() {
            let refused = Policy::of(kind, 1).per(Ticks((1 << 61) + 1)).limit();
            assert!(
                matches!(refused, Err(PolicyError::TimeToFresh { .. })),
                "{kind}: both windows"
            );
        }
        // The largest that is valid: exactly one is admitted, and again exactly when it is earned.
        let window = if kind.is_bucket() { 1 << 62 } else { 1 << 61 };
        let limit = limit(Policy::of(kind, 1).per(Ticks(window)));
        let mut state = limit.first(Tick(0));
        assert!(decide(&limit, &mut state, 0, 1).allowed);
        let refused = decide(&limit, &mut state, 1, 1);
        let wait = refused.retry_after.expect("it will fit").0.cast_signed();
        assert!(!decide(&limit, &mut state, wait, 1).allowed, "{kind}: a tick early");
        assert!(decide(&limit, &mut state, 1 + wait, 1).allowed, "{kind}: on time");
    }
    // governor 0.10 admits without limit at this window, in seconds.
    let nanoseconds = Ticks::from_duration(core::time::Duration::from_secs(18_446_744_073));
    assert!(Policy::token_bucket(1).per(nanoseconds).limit().is_err());
}

#[test]
fn a2_a_century_with_a_huge_burst_is_exact() {
    let century = 100 * 365 * 86_400 * 1_000_000_000_u64;
    let burst = u64::from(u32::MAX);
    let limit = limit(Policy::token_bucket(burst).per(Ticks(century)).burst(burst));
    let mut state = limit.first(Tick(0));
    let all = decide(&limit, &mut state, 0, burst);
    assert!(all.allowed);
    assert_eq!(all.reset_after, Ticks(century));
    let next = decide(&limit, &mut state, 0, 1).retry_after.expect("it will fit");
    assert_eq!(next, Ticks(century.div_ceil(burst)));
    let slow = Policy::token_bucket(1).per(Ticks(century)).burst(burst).limit();
    let told = slow.expect_err("beyond the stated bound").to_string();
    assert!(told.contains("at most 4611686018427387904"), "{told}");
}

#[test]
fn a3_one_tick_windows_and_rates_above_one_a_tick_are_honoured() {
    for limit in all_six(5, 1) {
        let mut state = limit.first(Tick(0));
        let mut admitted = 0;
        for now in 0..100 {
            admitted += drain(&limit, &mut state, now);
        }
        // The counter's previous window weighs all of it at the start of the next.
        let most = if limit.numbers().kind == Kind::SlidingWindowCounter { 250 } else { 500 };
        assert_eq!(admitted, most, "{}", limit.name());
    }
}

#[test]
fn a4_zeros_are_typed_errors() {
    for kind in Kind::ALL {
        let zero = |limit, window| Policy::of(kind, limit).per(Ticks(window)).limit();
        assert_eq!(zero(0, 1), Err(PolicyError::ZeroLimit));
        assert_eq!(zero(1, 0), Err(PolicyError::ZeroWindow));
        let burst = Policy::of(kind, 1).per(Ticks(1)).burst(0).limit();
        assert_eq!(burst, Err(PolicyError::ZeroBurst));
    }
}

#[test]
fn a5_a_cost_of_nothing_tells_and_never_writes() {
    for limit in all_six(3, 10) {
        let mut state = limit.first(Tick(0));
        let _ = decide(&limit, &mut state, 0, 2);
        let look = decide(&limit, &mut state, 4, 0);
        assert!(look.allowed);
        assert_eq!(decide(&limit, &mut state, 4, 0), look, "{}: looking changed it", limit.name());
        // Not even when it finds the clock set back.
        assert!(decide(&limit, &mut state, -1_000, 0).allowed);
        assert_eq!(decide(&limit, &mut state, 4, 0), look, "{}: looking changed it", limit.name());
        limit.charge(&mut state, Tick(4), 3);
        let in_debt = decide(&limit, &mut state, 4, 0);
        assert!(!in_debt.allowed && in_debt.remaining == 0, "{}", limit.name());
        let wait = in_debt.retry_after.expect("debt is earned back").0.cast_signed();
        assert!(!decide(&limit, &mut state, 4 + wait - 1, 0).allowed);
        assert!(decide(&limit, &mut state, 4 + wait, 0).allowed);
    }
}

#[test]
fn a7_what_can_never_fit_is_told_from_what_cannot_yet() {
    for limit in all_six(3, 10) {
        let mut state = limit.first(Tick(0));
        for cost in [4, MAX] {
            let never = decide(&limit, &mut state, 0, cost);
            assert_eq!((never.allowed, never.retry_after), (false, None));
            assert_eq!(never.remaining, 3, "it took nothing");
        }
        let _ = decide(&limit, &mut state, 0, 3);
        let not_yet = decide(&limit, &mut state, 0, 3);
        assert!(!not_yet.allowed && not_yet.retry_after.is_some());
    }
}

#[test]
fn a8_three_a_second_do_not_drift_over_a_million_steps() {
    let second = 1_000_000_000;
    for kind in &Kind::ALL[..3] {
        // Room for two, so that the part of a token earned by the whole tick is not lost.
        let limit = limit(Policy::of(*kind, 3).per(Ticks(second)).burst(2));
        let mut state = limit.first(Tick(0));
        assert_eq!(drain(&limit, &mut state, 0), 2);
        let mut now = 0_i64;
        for step in 1..=1_000_000 {
            let wait = decide(&limit, &mut state, now, 1).retry_after.expect("it will fit");
            now += wait.0.cast_signed();
            // Token k is earned at k·10⁹/3, and used at the first whole tick after that.
            assert_eq!(now.unsigned_abs(), (step * second).div_ceil(3));
            assert!(limit.decide::<bool>(&mut state, Tick(now), 1));
        }
    }
}

#[test]
fn a9_bursts_above_32_bits_are_not_cut() {
    let burst = (1_u64 << 32) + 7;
    for kind in &Kind::ALL[..3] {
        let limit = limit(Policy::of(*kind, burst).per(Ticks(1_000)));
        let mut state = limit.first(Tick(0));
        assert_eq!(decide(&limit, &mut state, 0, 5).remaining, burst - 5);
        assert!(decide(&limit, &mut state, 0, burst - 5).allowed);
        assert!(!decide(&limit, &mut state, 0, 1).allowed);
    }
}

/// The largest numbers that are valid, together. Debug builds would panic on any overflow.
#[test]
fn a10_products_of_the_largest_numbers_do_not_overflow() {
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
        let mut state = limit.first(Tick(i64::MIN));
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

/// The core's part: a wait is never told too short, and never 0 on a refusal. Headers round up.
#[test]
fn a11_a_refusal_never_says_to_come_back_at_once() {
    for limit in all_six(7, 3).chain(all_six(1, 1)) {
        let mut state = limit.first(Tick(0));
        drain(&limit, &mut state, 0);
        let wait = decide(&limit, &mut state, 0, 1).retry_after.expect("it will fit");
        assert!(wait >= Ticks(1), "{}", limit.name());
    }
}

#[test]
fn a12_polling_faster_than_tokens_come_earns_the_same() {
    for limit in all_six(3, 10) {
        let (mut patient, mut polling) = (limit.first(Tick(0)), limit.first(Tick(0)));
        let (mut one, mut other) = (0, 0);
        for now in 0..10_000 {
            if now % 10 == 9 {
                one += drain(&limit, &mut patient, now);
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

#[test]
fn a13_after_years_of_idling_it_is_full_and_not_more() {
    let century = 100 * 365 * 86_400 * 1_000_000_000_i64;
    for limit in all_six(5, 1_000_000_000) {
        let mut state = limit.first(Tick(0));
        drain(&limit, &mut state, 0);
        let look = decide(&limit, &mut state, century, 0);
        assert_eq!((look.remaining, look.reset_after), (5, Ticks::ZERO), "{}", limit.name());
        assert_eq!(drain(&limit, &mut state, century), 5, "{}", limit.name());
    }
    // 2⁶¹ ticks at 8 a tick are 2⁶⁴: nothing, to arithmetic that wraps.
    for limit in all_six(8, 1_000_000_001) {
        let mut state = limit.first(Tick(0));
        drain(&limit, &mut state, 0);
        assert_eq!(drain(&limit, &mut state, 1 << 61), 8, "{}", limit.name());
    }
}

/// Locked out for at most as long as it takes to earn back what was used, plus a window.
#[test]
fn b1_a_clock_set_back_locks_nobody_out() {
    let hour = 3_600_000;
    for limit in all_six(10, 60_000) {
        for back in [1, 59_999, 60_000, 60_001, 120_000, hour] {
            let mut state = limit.first(Tick(hour));
            drain(&limit, &mut state, hour);
            let longest = decide(&limit, &mut state, hour, 10).retry_after.expect("it will fit").0;
            let now = hour - back;
            // A client that polls, and is refused, and so on until it is served.
            let mut later = now;
            while !decide(&limit, &mut state, later, 10).allowed {
                later += 100;
                let waited = later.abs_diff(now);
                assert!(waited <= longest + 60_000 + 100, "{} back {back}", limit.name());
            }
        }
    }
}

/// Nothing is gained by the clock going back either: what was used stays used.
#[test]
fn b1_a_clock_set_back_gives_nothing_away() {
    for limit in all_six(10, 60_000) {
        for back in [1, 60_000, 60_001, 3_600_000] {
            let mut state = limit.first(Tick(3_600_000));
            let _ = decide(&limit, &mut state, 3_600_000, 7);
            let look = decide(&limit, &mut state, 3_600_000 - back, 0);
            assert!(look.remaining <= 3, "{} back {back}: {}", limit.name(), look.remaining);
        }
    }
}

#[test]
fn b2_b3_a_jump_forward_gains_at_most_one_burst() {
    for limit in all_six(10, 60_000) {
        let mut state = limit.first(Tick(0));
        drain(&limit, &mut state, 0);
        assert_eq!(drain(&limit, &mut state, 3_600_000), 10, "{}", limit.name());
        assert_eq!(drain(&limit, &mut state, 3_600_000), 0, "{}", limit.name());
    }
}

/// Two threads read the clock in one order and come in the other: as if both came at the later time.
#[test]
fn b4_times_out_of_order_admit_no_more() {
    for limit in all_six(10, 1_000) {
        // One that is late and admitted leaves the time where it was.
        let mut on_time = limit.first(Tick(2_000));
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

        let mut ordered = limit.first(Tick(2_000));
        let mut swapped = ordered.clone();
        let one: u64 =
            [2_400, 2_500, 2_600].map(|now| drain(&limit, &mut ordered, now)).iter().sum();
        let other: u64 =
            [2_600, 2_400, 2_500].map(|now| drain(&limit, &mut swapped, now)).iter().sum();
        assert!(other <= one, "{}: {other} > {one}", limit.name());
        let late = decide(&limit, &mut swapped, 2_400, 1);
        let wait = late.retry_after.expect("it will fit").0.cast_signed();
        assert!(!decide(&limit, &mut swapped.clone(), 2_400 + wait - 1, 1).allowed);
        assert!(
            decide(&limit, &mut swapped, 2_400 + wait, 1).allowed,
            "counts from the given time"
        );
    }
}

#[test]
fn b7_windows_are_half_open_at_their_boundary() {
    let by = |builder: LimitBuilder, first, then| {
        let limit = limit(builder);
        let trace = [("a", Tick(first), 1), ("a", Tick(then), 1)];
        simulate(limit, trace).last().expect("a decision").allowed
    };
    let fixed = || Policy::fixed_window(1).per(Ticks(10));
    assert!(!by(fixed(), 13, 19));
    assert!(by(fixed(), 13, 20));
    assert!(!by(fixed(), -10, -1));
    assert!(by(fixed(), -1, 0), "windows before the origin are aligned alike");
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

#[test]
fn b8_drained_then_idle_then_a_burst_admits_one_capacity_at_an_instant() {
    for limit in all_six(4, 10) {
        let mut state = limit.first(Tick(0));
        drain(&limit, &mut state, 0);
        assert_eq!(drain(&limit, &mut state, 1_000), 4, "{}", limit.name());
    }
    let bucket = limit(Policy::token_bucket(4).per(Ticks(10)).burst(9));
    let mut state = bucket.first(Tick(0));
    assert_eq!(drain(&bucket, &mut state, 0), 9);
    assert_eq!(drain(&bucket, &mut state, 1_000), 9);
}

#[test]
fn b9_the_ends_of_time_do_not_panic() {
    let ends = [i64::MIN, i64::MIN + 1, -1, 0, 1, i64::MAX - 1, i64::MAX];
    for limit in all_six(3, 10).chain(all_six(1, 1 << 61)) {
        for first in ends {
            for then in ends {
                let mut state = limit.first(Tick(first));
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

#[test]
fn d5_a_sliding_log_is_bounded_or_refused() {
    let log = |limit, window| Policy::sliding_window_log(limit).per(Ticks(window)).limit();
    let refused = log(1_000_000_000, 1_000_000_000).expect_err("a gigabyte a key");
    assert!(matches!(refused, PolicyError::LogTooLong { .. }));
    assert!(refused.to_string().contains("use a smaller limit or a sliding_window_counter"));
    assert!(log(MAX_LOG_ENTRIES + 1, 1 << 40).is_err());
    // A billion in a window of a hundred ticks is a hundred entries: equal ticks merge.
    let merging = log(1_000_000_000, 100).expect("bounded by its window");
    let mut state = merging.first(Tick(0));
    for step in 0..100_000 {
        let now = step / 500;
        assert!(decide(&merging, &mut state, now, 1).allowed);
    }
    let mut bytes = Vec::new();
    merging.encode(&state, &mut bytes);
    assert!(bytes.len() < 100 * 4 + 40, "{} bytes for {} entries", bytes.len(), 100);
}

#[test]
fn g3_a_live_change_keeps_what_was_used() {
    for from in all_six(10, 100) {
        for to in all_six(4, 100).chain(all_six(20, 50)) {
            let mut state = from.first(Tick(0));
            let _ = decide(&from, &mut state, 0, 7);
            let mut changed = to.carry(&from, &state, Tick(0));
            let told = decide(&to, &mut changed, 0, 0);
            let expected = to.capacity() - to.capacity().min(7);
            assert_eq!(told.remaining, expected, "{} to {}", from.name(), to.name());
            // To and fro: no free burst, and not a token lost on the way back.
            let back = from.carry(&to, &changed, Tick(0));
            assert_eq!(from.used(&back, Tick(0)).rounded_up(), 7.min(to.capacity()));
        }
    }
}

/// A client whose tier flips with every request earns as one that stays.
#[test]
fn g3_flipping_tiers_neither_gives_nor_takes() {
    let one = limit(Policy::token_bucket(3).per(Ticks(10)));
    let other = limit(Policy::gcra(3).per(Ticks(10)).burst(4));
    let mut state = one.first(Tick(0));
    let mut admitted = drain(&one, &mut state, 0);
    for now in 1..=1_000 {
        let there = other.carry(&one, &state, Tick(now));
        state = one.carry(&other, &there, Tick(now));
        admitted += drain(&one, &mut state, now);
    }
    assert_eq!(admitted, 3 + 300);
}

#[test]
fn g3_debt_is_capped_at_the_new_capacity() {
    let from = limit(Policy::token_bucket(10).per(Ticks(10)));
    let to = limit(Policy::fixed_window(5).per(Ticks(10)));
    let mut state = from.first(Tick(0));
    assert_eq!(from.charge(&mut state, Tick(0), 25), 5, "debt is bounded by one capacity");
    assert_eq!(from.used(&state, Tick(0)).whole, 20);
    assert_eq!(to.used(&to.carry(&from, &state, Tick(0)), Tick(0)).whole, 5);
}

#[test]
fn g5_a_state_is_never_misread_by_another_algorithm() {
    let now = Tick(50);
    for from in all_six(10, 100) {
        for to in all_six(8, 70) {
            let mut state = from.first(now);
            let _ = decide(&from, &mut state, 50, 6);
            let mut bytes = Vec::new();
            from.encode(&state, &mut bytes);
            let expected = if from.numbers().kind == to.numbers().kind {
                DecodeError::OtherLimit
            } else {
                let tag = |limit: &Limit| {
                    let mut bytes = Vec::new();
                    limit.encode(&limit.first(now), &mut bytes);
                    bytes[0]
                };
                DecodeError::Tag { found: tag(&from), expected: tag(&to) }
            };
            assert_eq!(to.decode(&bytes).err(), Some(expected));
            let adopted = to.adopt(&bytes, now).expect("any state can be adopted");
            assert_eq!(to.used(&adopted, now).rounded_up(), 6, "{} to {}", from.name(), to.name());
        }
    }
}

/// A state that nobody carried over is taken as used up: it refuses, and is earned back.
#[test]
fn g5_a_foreign_state_in_memory_hands_out_nothing() {
    let bucket = limit(Policy::token_bucket(10).per(Ticks(100)));
    let window = limit(Policy::fixed_window(10).per(Ticks(100)));
    let mut state = bucket.first(Tick(0));
    assert!(!decide(&window, &mut state, 0, 1).allowed);
    assert!(!decide(&window, &mut state, 99, 1).allowed);
    assert!(decide(&window, &mut state, 100, 1).allowed);
}
