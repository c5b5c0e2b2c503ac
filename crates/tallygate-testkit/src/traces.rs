//! Generators of limits and traffic for property tests, with many edge cases: boundary ticks, many requests at one tick,
//! long idle times, clocks that jump, costs from 0 to the largest, numbers at the ends of their ranges.

use proptest::collection::vec;
use proptest::prelude::*;
use tallygate_core::{Anchor, Cost, Kind, Limit, MAX_LOG_ENTRIES, Policy, Tick, Ticks};

/// An operation on a key.
#[derive(Clone, Debug)]
pub enum Step {
    /// A request.
    Check(Cost),
    /// A peek: returns what a check would return.
    Peek(Cost),
    /// A forced charge, or a refund.
    Force(i128),
    /// A reset.
    Reset,
    /// A change to another limit.
    Change(Limit),
    /// The state is encoded and decoded.
    Store,
}

fn build(
    kind: Kind,
    limit: Cost,
    window: u64,
    burst: Option<Cost>,
    anchored: bool,
) -> Option<Limit> {
    let mut builder = Policy::of(kind, limit).per(Ticks(window));
    if let (Some(burst), true) = (burst, kind.is_bucket()) {
        builder = builder.burst(burst);
    }
    if anchored && kind == Kind::FixedWindow {
        builder = builder.anchor(Anchor::FirstRequest);
    }
    builder.limit().ok()
}

/// Generates a limit so small that traffic reaches all its boundaries.
pub fn small_limit_of(kind: Kind) -> impl Strategy<Value = Limit> {
    (1..=9_u64, 1..=24_u64, proptest::option::of(1..=14_u64), any::<bool>()).prop_map(
        move |(limit, window, burst, anchored)| {
            build(kind, limit, window, burst, anchored).expect("small limits are valid")
        },
    )
}

/// Generates a valid limit, often with numbers near the ends of their ranges.
pub fn extreme_limit_of(kind: Kind) -> impl Strategy<Value = Limit> {
    let number = prop_oneof![
        2 => 1..=3_u64,
        2 => (0..=63_u32, -2..=2_i64).prop_map(|(bit, by)| {
            (1_u64 << bit).saturating_add_signed(by).max(1)
        }),
        2 => any::<u64>().prop_map(|n| n.max(1)),
        1 => (0..=3_u64).prop_map(|n| u64::MAX - n),
        1 => (0..=2_u64).prop_map(|n| (1 << 61) - n),
    ];
    let numbers = (number.clone(), number.clone(), proptest::option::of(number), any::<bool>());
    numbers.prop_filter_map("the limit is not valid", move |(limit, window, burst, anchored)| {
        let (limit, window) = match kind {
            Kind::SlidingWindowLog => (limit.min(MAX_LOG_ENTRIES), window % ((1 << 61) + 1)),
            kind if kind.is_bucket() => (limit, window),
            _ => (limit, window % ((1 << 61) + 1)),
        };
        build(kind, limit, window, burst, anchored)
    })
}

/// Generates a valid limit of an algorithm.
pub fn any_limit_of(kind: Kind) -> impl Strategy<Value = Limit> {
    prop_oneof![3 => small_limit_of(kind), 1 => extreme_limit_of(kind)]
}

/// Generates a valid limit of any algorithm.
pub fn any_limit() -> impl Strategy<Value = Limit> {
    proptest::sample::select(&Kind::ALL[..]).prop_flat_map(any_limit_of)
}

/// Generates a valid bucket.
pub fn bucket_limit() -> impl Strategy<Value = Limit> {
    proptest::sample::select(&Kind::ALL[..3]).prop_flat_map(any_limit_of)
}

/// Generates costs around the capacity of a limit.
pub fn costs(limit: &Limit) -> impl Strategy<Value = Cost> + use<> {
    let capacity = limit.numbers().burst;
    prop_oneof![
        6 => Just(1),
        1 => Just(0),
        3 => 1..=capacity.min(5),
        1 => 1..=capacity,
        1 => Just(capacity),
        1 => Just(capacity.saturating_add(1)),
        1 => Just(Cost::MAX),
    ]
}

/// Generates times that mostly advance: by 0, by a few ticks, by about a window or the interval of a token, or by a long
/// idle time. With `back`, some times are late, or the clock was set back.
pub fn times(limit: &Limit, length: usize, back: bool) -> impl Strategy<Value = Vec<Tick>> + use<> {
    let window = limit.numbers().window.0;
    let interval = window / limit.numbers().limit;
    let near =
        move |center: u64| (-1..=1_i128).prop_map(move |by| (i128::from(center) + by).max(0));
    let on = prop_oneof![
        4 => Just(0_i128),
        4 => 1..=3_i128,
        3 => near(interval),
        3 => near(window),
        2 => near(window.saturating_mul(2)),
        2 => 0..=i128::from(window),
        1 => 0..=i128::from(u64::MAX),
    ];
    let gap = if back {
        prop_oneof![
            8 => on,
            1 => (0..=i128::from(window)).prop_map(|by| -by),
            1 => near(window).prop_map(|by| -by),
            1 => (0..=i128::from(u64::MAX)).prop_map(|by| -by),
        ]
        .boxed()
    } else {
        on.boxed()
    };
    let start = prop_oneof![
        4 => 0..=100_i64,
        1 => Just(0),
        2 => any::<i64>(),
        1 => Just(i64::MIN),
        1 => (0..=100_i64).prop_map(|by| i64::MAX - by),
    ];
    (start, vec(gap, 1..=length)).prop_map(|(start, gaps)| {
        let mut now = i128::from(start);
        let clamp = |t: i128| t.clamp(i64::MIN.into(), i64::MAX.into());
        gaps.into_iter()
            .map(|gap| {
                now = clamp(now + gap);
                Tick(i64::try_from(now).expect("the time was clamped"))
            })
            .collect()
    })
}

/// Generates a history of a key under a limit: all operations, at all kinds of times.
pub fn steps(limit: Limit, length: usize) -> impl Strategy<Value = (Limit, Vec<(Tick, Step)>)> {
    let capacity = i128::from(limit.numbers().burst);
    let step = prop_oneof![
        12 => costs(&limit).prop_map(Step::Check),
        2 => costs(&limit).prop_map(Step::Peek),
        2 => (1..=capacity).prop_map(|by| Step::Force(-by)),
        1 => (1..=3_i128).prop_map(|by| Step::Force(-by)),
        2 => (1..=capacity.min(9)).prop_map(Step::Force),
        1 => (1..=2 * capacity + 1).prop_map(Step::Force),
        1 => prop_oneof![Just(i128::MAX), Just(i128::MIN), Just(0)].prop_map(Step::Force),
        1 => Just(Step::Reset),
        1 => any_limit().prop_map(Step::Change),
        2 => Just(Step::Store),
    ];
    (times(&limit, length, true), vec(step, 1..=length))
        .prop_map(move |(times, steps)| (limit.clone(), times.into_iter().zip(steps).collect()))
}

/// Generates a history in which most steps are reservations ([`Step::Check`]) and settlements ([`Step::Store`]).
pub fn settling_steps(
    limit: Limit,
    length: usize,
) -> impl Strategy<Value = (Limit, Vec<(Tick, Step)>)> {
    let capacity = i128::from(limit.numbers().burst);
    let step = prop_oneof![
        8 => costs(&limit).prop_map(Step::Check),
        8 => Just(Step::Store),
        4 => (1..=capacity).prop_map(|by| Step::Force(-by)),
        1 => (1..=capacity.min(9)).prop_map(Step::Force),
        1 => Just(Step::Reset),
    ];
    (times(&limit, length, true), vec(step, 1..=length))
        .prop_map(move |(times, steps)| (limit.clone(), times.into_iter().zip(steps).collect()))
}
