//! The invariants of the design, each as a property over hostile traffic.
//!
//! These tests do not look at states. They count what was allowed, and compare decisions with what happens next.

use proptest::prelude::*;
use tallygate_core::{
    Algorithm, Cost, Decision, Kind, Limit, LimitState, Policy, Share, Tick, Ticks,
};
use tallygate_testkit::{
    any_limit, any_limit_of, bucket_limit, cases, costs, extreme_limit_of, small_limit_of, times,
};

/// A limit and requests at times that do not go back.
fn traffic(
    limit: impl Strategy<Value = Limit>,
) -> impl Strategy<Value = (Limit, Vec<(Tick, Cost)>)> {
    requests(limit, false)
}

fn requests(
    limit: impl Strategy<Value = Limit>,
    back: bool,
) -> impl Strategy<Value = (Limit, Vec<(Tick, Cost)>)> {
    limit.prop_flat_map(move |limit| {
        (times(&limit, 60, back), proptest::collection::vec(costs(&limit), 60))
            .prop_map(move |(times, costs)| (limit.clone(), times.into_iter().zip(costs).collect()))
    })
}

/// Runs a trace for one client.
fn run(limit: &Limit, trace: &[(Tick, Cost)]) -> Vec<Decision> {
    tallygate_core::simulate(limit.clone(), trace.iter().map(|&(now, cost)| ((), now, cost)))
        .collect()
}

fn allowed_costs(trace: &[(Tick, Cost)], decisions: &[Decision]) -> Vec<(Tick, u128)> {
    let both = trace.iter().zip(decisions);
    both.filter(|(_, d)| d.allowed).map(|(&(now, cost), _)| (now, u128::from(cost))).collect()
}

/// B + floor((t − s)·L/W).
fn bucket_bound(limit: &Limit, span: Ticks) -> u128 {
    let n = limit.numbers();
    u128::from(n.burst) + u128::from(span.0) * u128::from(n.limit) / u128::from(n.window.0)
}

/// Returns the time after a wait, or `None` if it is out of range.
fn within_time(now: Tick, wait: Ticks) -> Option<Tick> {
    now.after(wait).filter(|_| wait < Ticks(u64::MAX))
}

fn encoded(limit: &Limit, state: &LimitState) -> Vec<u8> {
    let mut bytes = Vec::new();
    limit.encode(state, &mut bytes);
    bytes
}

proptest! {
    #![proptest_config(cases(600))]

    /// A[s,t] ≤ B + floor((t−s)·L/W), without a "+1", over every closed interval.
    #[test]
    fn buckets_allow_at_most_burst_plus_rate((limit, trace) in traffic(bucket_limit())) {
        let allowed_costs = allowed_costs(&trace, &run(&limit, &trace));
        for (from, &(s, _)) in allowed_costs.iter().enumerate() {
            let mut sum = 0;
            for &(t, cost) in &allowed_costs[from..] {
                sum += cost;
                prop_assert!(sum <= bucket_bound(&limit, t.since(s)), "[{s}, {t}]: {sum}");
            }
        }
    }

    /// A greedy client reaches the bound at every tick.
    #[test]
    fn a_greedy_client_reaches_the_bound_of_a_bucket(limit in roomy_bucket(), start in -50..50_i64) {
        let mut state = limit.initial(Tick(start));
        let mut sum = 0;
        for now in start..start + 200 {
            while limit.decide::<bool>(&mut state, Tick(now), 1) {
                sum += 1;
            }
            prop_assert_eq!(sum, bucket_bound(&limit, Tick(now).since(Tick(start))));
        }
    }

    /// Callers that are late by up to a window get no more than the whole span earns.
    #[test]
    fn late_callers_gain_nothing((limit, mut trace) in traffic(bucket_small()), order in any::<u64>()) {
        let window = limit.numbers().window.0.cast_signed();
        let mut noise = order;
        for (now, _) in &mut trace {
            now.0 = now.0 % 1_000 * window.min(7);
            noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            now.0 -= i64::try_from(noise >> 33).unwrap() % (window + 1);
        }
        // Remove jumps back by more than a window: these mean that the clock was set back.
        let mut latest = i64::MIN;
        trace.retain(|&(now, _)| {
            latest = latest.max(now.0);
            latest - now.0 <= window
        });
        let allowed_costs = allowed_costs(&trace, &run(&limit, &trace));
        let span = |f: fn(i64, i64) -> i64| allowed_costs.iter().map(|(t, _)| t.0).reduce(f);
        if let (Some(first), Some(last)) = (span(i64::min), span(i64::max)) {
            let sum: u128 = allowed_costs.iter().map(|(_, cost)| cost).sum();
            prop_assert!(sum <= bucket_bound(&limit, Tick(last).since(Tick(first))));
        }
    }

    /// Departures are in order of arrival, and do not exceed the rate.
    #[test]
    fn the_output_of_a_leaky_bucket_is_even((limit, trace) in traffic(small_limit_of(Kind::LeakyBucket))) {
        let trace: Vec<_> = trace.into_iter().map(|(now, _)| (Tick(now.0 / 4), 1)).collect();
        let decisions = run(&limit, &trace);
        let departures: Vec<i64> = trace
            .iter()
            .zip(&decisions)
            .filter(|(_, decision)| decision.allowed)
            .map(|((now, _), decision)| now.0 + decision.delay.0.cast_signed())
            .collect();
        prop_assert!(departures.is_sorted());
        let n = limit.numbers();
        for (from, s) in departures.iter().enumerate() {
            for (count, t) in departures[from..].iter().enumerate() {
                let most = 1 + u128::from(t.abs_diff(*s) + 1) * u128::from(n.limit)
                    / u128::from(n.window.0);
                prop_assert!((count as u128) < most, "[{}, {}]", s, t);
            }
        }
    }

    /// At most L in each window of the clock.
    #[test]
    fn an_aligned_fixed_window_allows_at_most_its_limit(
        (limit, trace) in traffic(clock_window()),
    ) {
        let window = i128::from(limit.numbers().window.0);
        let mut counts = std::collections::BTreeMap::<i128, u128>::new();
        for (now, cost) in allowed_costs(&trace, &run(&limit, &trace)) {
            *counts.entry(i128::from(now.0).div_euclid(window)).or_default() += cost;
        }
        prop_assert!(counts.values().all(|&count| count <= u128::from(limit.numbers().limit)));
    }

    /// At most L units are allowed from the first request on until W later.
    #[test]
    fn an_anchored_fixed_window_starts_at_its_first_request(
        (limit, trace) in traffic(anchored_window()),
    ) {
        let window = limit.numbers().window;
        let (mut start, mut count) = (None::<Tick>, 0);
        for (&(now, cost), decision) in trace.iter().zip(run(&limit, &trace)) {
            if start.is_some_and(|start| now.since(start) >= window) {
                (start, count) = (None, 0);
            }
            let fits = count + u128::from(cost) <= u128::from(limit.numbers().limit);
            prop_assert_eq!(decision.allowed, fits);
            if fits && cost > 0 {
                start = start.or(Some(now));
                count += u128::from(cost);
            }
        }
    }

    /// The log denies a request only if it exceeds L in (now − W, now].
    #[test]
    fn the_sliding_log_is_exact((limit, trace) in traffic(any_limit_of(Kind::SlidingWindowLog))) {
        let n = limit.numbers();
        let mut past = Vec::<(Tick, u128)>::new();
        for (&(now, cost), decision) in trace.iter().zip(run(&limit, &trace)) {
            let recent = past.iter().filter(|(t, _)| now.since(*t) < n.window);
            let count: u128 = recent.map(|(_, cost)| cost).sum();
            let fits = count + u128::from(cost) <= u128::from(n.limit);
            prop_assert_eq!(decision.allowed, fits);
            if fits && cost > 0 {
                past.push((now, cost.into()));
            }
        }
    }

    /// At most 2L units are allowed in every half-open window, and the error of the estimate is within its bounds.
    #[test]
    fn the_sliding_counter_errs_within_its_bounds(
        (limit, trace) in traffic(any_limit_of(Kind::SlidingWindowCounter)),
    ) {
        let n = limit.numbers();
        let (l, w) = (u128::from(n.limit), u128::from(n.window.0));
        let decisions = run(&limit, &trace);
        let allowed_costs = allowed_costs(&trace, &decisions);
        for &(end, _) in &allowed_costs {
            let recent = allowed_costs.iter().filter(|(t, _)| *t <= end && end.since(*t) < n.window);
            prop_assert!(recent.map(|(_, cost)| cost).sum::<u128>() <= 2 * l);
        }
        let mut past = Vec::<(Tick, u128)>::new();
        for (&(now, cost), decision) in trace.iter().zip(&decisions) {
            if decision.allowed {
                past.push((now, cost.into()));
            }
            let number = |t: Tick| i128::from(t.0).div_euclid(w.cast_signed());
            let e = i128::from(now.0).rem_euclid(w.cast_signed()).cast_unsigned();
            let sum = |keep: &dyn Fn(Tick) -> bool| -> u128 {
                past.iter().filter(|(t, _)| keep(*t)).map(|(_, cost)| cost).sum()
            };
            let exact = sum(&|t| now.since(t) < n.window);
            let previous = sum(&|t| number(t) == number(now) - 1);
            if decision.remaining > 0 {
                let estimate = l - u128::from(decision.remaining);
                prop_assert!(exact <= estimate + (previous * e).div_ceil(w), "the estimate is too low");
                prop_assert!(estimate <= exact + (previous * (w - e)).div_ceil(w), "the estimate is too high");
            }
        }
    }

    /// A cost of `remaining` is allowed, and one unit more is denied. A request is allowed after `retry_after`, and denied
    /// one tick earlier.
    #[test]
    fn decisions_predict_what_happens_next((limit, trace) in requests(any_limit(), true)) {
        let mut state = limit.initial(trace[0].0);
        for &(now, cost) in &trace {
            let before: Decision = limit.decide(&mut state.clone(), now, 0);
            let decision: Decision = limit.decide(&mut state, now, cost);
            if limit.clock_was_set_back(&state, now) {
                continue; // a cost of 0 does not rebase, so the next decision differs
            }
            let check = |now: Tick, cost| limit.decide::<bool>(&mut state.clone(), now, cost);

            prop_assert!(decision.remaining == 0 || check(now, decision.remaining));
            prop_assert!(decision.remaining == decision.limit || !check(now, decision.remaining + 1));
            if decision.allowed {
                prop_assert_eq!(before.remaining - decision.remaining, cost, "an allowed request lowers it by the cost");
                prop_assert_eq!(decision.retry_after, Some(Ticks::ZERO));
            } else {
                prop_assert_eq!(before.remaining, decision.remaining, "a denied request charges nothing");
            }
            match decision.retry_after {
                None => prop_assert!(cost > decision.limit),
                Some(wait) => {
                    prop_assert!(cost <= decision.limit);
                    if let (Some(then), false) = (within_time(now, wait), decision.allowed) {
                        prop_assert!(check(then, cost), "denied at retry_after");
                        prop_assert!(!check(Tick(then.0 - 1), cost), "allowed one tick too early");
                    }
                }
            }
            for at in [now.0.saturating_sub(1), now.0, now.0.saturating_add(1)].map(Tick) {
                let by_time = limit.fresh_at(&state).is_some_and(|fresh| fresh <= at);
                prop_assert_eq!(limit.is_fresh(&state, at), by_time);
                let share = Share::of(limit.used(&state, at), limit.capacity());
                prop_assert_eq!(limit.share_used(&state, at), share);
            }
            // The time for the store agrees with the time for the client.
            match (limit.fresh_at(&state), decision.reset_after) {
                (fresh, Ticks::ZERO) => prop_assert!(fresh.is_some_and(|fresh| fresh <= now)),
                // From the first tick to the last one, `u64::MAX` is a real distance; otherwise it means "out of range".
                (None, Ticks(u64::MAX)) => {}
                (fresh, reset_after) => prop_assert_eq!(fresh, now.after(reset_after)),
            }
            if let Some(fresh) = within_time(now, decision.reset_after) {
                let all: Decision = limit.decide(&mut state.clone(), fresh, 0);
                prop_assert_eq!((all.remaining, all.reset_after), (all.limit, Ticks::ZERO));
                prop_assert!(limit.is_fresh(&state, fresh));
                if decision.reset_after > Ticks::ZERO {
                    let sooner = Tick(fresh.0 - 1);
                    prop_assert!(!limit.is_fresh(&state, sooner));
                    let not_yet: Decision = limit.decide(&mut state.clone(), sooner, 0);
                    prop_assert!(not_yet.reset_after > Ticks::ZERO, "the state was fresh one tick earlier");
                }
            }
        }
    }

    #[test]
    fn time_alone_only_raises_what_remains(
        (limit, trace) in traffic(any_limit()),
        later in proptest::collection::vec(0..u64::MAX, 8),
    ) {
        let mut state = limit.initial(trace[0].0);
        for &(now, cost) in &trace {
            let decision: Decision = limit.decide(&mut state, now, cost);
            let window = limit.numbers().window.0;
            let mut waits: Vec<u64> =
                later.iter().enumerate().map(|(i, by)| if i < 4 { by % window } else { *by }).collect();
            waits.sort_unstable();
            let mut least = decision.remaining;
            for then in waits.into_iter().map_while(|wait| now.after(Ticks(wait))) {
                let look: Decision = limit.decide(&mut state.clone(), then, 0);
                prop_assert!(look.remaining >= least);
                least = look.remaining;
            }
        }
    }

    /// Denied requests and requests of cost 0 do not affect later decisions.
    #[test]
    fn polling_earns_the_same_as_waiting((limit, trace) in traffic(any_limit()), every in 1..5_u64) {
        let mut waiting = limit.initial(trace[0].0);
        let mut polling = waiting.clone();
        for &(now, cost) in &trace {
            for poll in 1..=every {
                let before = encoded(&limit, &polling);
                let look: Decision = limit.decide(&mut polling, now, 0);
                if let Some(too_much) = look.remaining.checked_add(poll) {
                    prop_assert!(!limit.decide::<bool>(&mut polling, now, too_much));
                }
                prop_assert_eq!(&before, &encoded(&limit, &polling));
            }
            let one: Decision = limit.decide(&mut waiting, now, cost);
            let other: Decision = limit.decide(&mut polling, now, cost);
            prop_assert_eq!(one, other);
        }
    }

    /// A cost of 0 never writes, whatever the clock does.
    #[test]
    fn a_cost_of_0_never_writes((limit, trace) in requests(any_limit(), true)) {
        let mut state = limit.initial(trace[0].0);
        for &(now, cost) in &trace {
            let before = encoded(&limit, &state);
            let _: Decision = limit.decide(&mut state, now, 0);
            prop_assert_eq!(before, encoded(&limit, &state));
            limit.decide::<bool>(&mut state, now, cost);
        }
    }

    /// The requests of one client do not affect another.
    #[test]
    fn keys_are_independent((limit, trace) in traffic(any_limit()), owners in any::<u64>()) {
        let owner = |index: usize| (owners >> (index % 64)) & 1;
        let keyed = trace.iter().enumerate().map(|(i, &(now, cost))| (owner(i), now, cost));
        let together: Vec<Decision> = tallygate_core::simulate(limit.clone(), keyed).collect();
        for client in 0..2 {
            let mine = |i: &usize| owner(*i) == client;
            let trace: Vec<_> = (0..trace.len()).filter(mine).map(|i| trace[i]).collect();
            let theirs: Vec<_> = (0..together.len()).filter(mine).map(|i| together[i]).collect();
            prop_assert_eq!(run(&limit, &trace), theirs);
        }
    }

    /// A store may drop a state from the tick on at which it is fresh, without any effect on decisions.
    #[test]
    fn eviction_is_invisible((limit, trace) in traffic(any_limit())) {
        let mut kept = limit.initial(trace[0].0);
        let mut evicted = kept.clone();
        for &(now, cost) in &trace {
            if limit.fresh_at(&evicted).is_some_and(|fresh| fresh <= now) {
                evicted = limit.initial(now);
            }
            let one: Decision = limit.decide(&mut kept, now, cost);
            let other: Decision = limit.decide(&mut evicted, now, cost);
            prop_assert_eq!(one, other);
        }
    }

    /// The token bucket, GCRA and the leaky bucket agree in all fields except the delay, also when clocks jump.
    #[test]
    fn the_three_buckets_agree((limit, trace) in requests(bucket_limit(), true)) {
        let n = *limit.numbers();
        let of = |kind| {
            let rule = Policy::of(kind, n.limit).per(n.window).burst(n.burst).limit().unwrap();
            let mut decisions = run(&rule, &trace);
            decisions.iter_mut().for_each(|decision| decision.delay = Ticks::ZERO);
            decisions
        };
        let token_bucket = of(Kind::TokenBucket);
        prop_assert_eq!(&token_bucket, &of(Kind::Gcra));
        prop_assert_eq!(&token_bucket, &of(Kind::LeakyBucket));
    }

    /// A bucket decides the same in 128 bits and in 64 bits.
    #[test]
    fn wide_and_narrow_buckets_agree((limit, trace) in requests(fractional_bucket(), true)) {
        let n = *limit.numbers();
        // The largest valid debt needs levels of more than 64 bits.
        let debt = (1 << 63) / n.window.0 * n.limit - n.burst;
        let wide = Policy::of(n.kind, n.limit).per(n.window).burst(n.burst).debt(debt);
        let wide = wide.limit().unwrap();
        let machine = format!("{:?}", wide.machine());
        prop_assert!(machine.starts_with("Wide"), "{}", machine);
        prop_assert_eq!(run(&limit, &trace), run(&wide, &trace));
    }

    /// No input at the ends of the ranges causes a panic or an overflow.
    #[test]
    fn the_largest_and_smallest_numbers_are_decided((limit, trace) in requests(extreme(), true), amount in any::<i128>()) {
        let mut state = limit.initial(trace[0].0);
        for &(now, cost) in &trace {
            let decision: Decision = limit.decide(&mut state, now, cost);
            prop_assert!(decision.remaining <= decision.limit);
            limit.charge(&mut state, now, amount);
            limit.fresh_at(&state);
            limit.used(&state, now);
        }
    }
}

fn bucket_small() -> impl Strategy<Value = Limit> {
    proptest::sample::select(&Kind::ALL[..3]).prop_flat_map(small_limit_of)
}

/// Returns a bucket that earns less than its burst per tick. A smaller bucket would overflow and lose units.
fn roomy_bucket() -> impl Strategy<Value = Limit> {
    bucket_small().prop_filter("too small", |limit| {
        limit.numbers().burst > limit.numbers().limit.div_ceil(limit.numbers().window.0)
    })
}

/// Returns a bucket of at least 3 units per window and less than one unit per tick, in lowest terms.
fn fractional_bucket() -> impl Strategy<Value = Limit> {
    bucket_small().prop_filter("not in lowest terms", |limit| {
        let (l, w) = (limit.numbers().limit, limit.numbers().window.0);
        w > l && l > 2 && (2..=l).all(|divisor| l % divisor != 0 || w % divisor != 0)
    })
}

fn extreme() -> impl Strategy<Value = Limit> {
    proptest::sample::select(&Kind::ALL[..]).prop_flat_map(extreme_limit_of)
}

fn clock_window() -> impl Strategy<Value = Limit> {
    any_limit_of(Kind::FixedWindow).prop_map(|limit| {
        let n = limit.numbers();
        Policy::fixed_window(n.limit).per(n.window).limit().expect("the limit is valid")
    })
}

fn anchored_window() -> impl Strategy<Value = Limit> {
    clock_window().prop_map(|limit| {
        let n = limit.numbers();
        let anchor = tallygate_core::Anchor::FirstRequest;
        Policy::fixed_window(n.limit)
            .per(n.window)
            .anchor(anchor)
            .limit()
            .expect("the limit is valid")
    })
}

/// The sliding counter reaches its bound: L units at the end of a window, and L again at the end of the next one, when
/// the first window has almost no weight.
#[test]
fn the_sliding_counter_can_allow_twice_its_limit_in_a_window() {
    let limit = Policy::sliding_window_counter(10).per(Ticks(1_000)).limit().unwrap();
    let mut state = limit.initial(Tick(0));
    assert!(limit.decide::<bool>(&mut state, Tick(999), 10));
    // At the last tick of the next window, the first one counts floor(10 · 1 / 1000) = 0.
    assert!(limit.decide::<bool>(&mut state, Tick(1_999), 10));
    let longer = Policy::sliding_window_counter(1).per(Ticks(3)).limit().unwrap();
    let mut state = longer.initial(Tick(0));
    assert!(longer.decide::<bool>(&mut state, Tick(2), 1));
    assert!(
        longer.decide::<bool>(&mut state, Tick(4), 1),
        "both are within (1, 4]: twice the limit"
    );
}
