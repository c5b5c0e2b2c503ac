//! The state machines without a `Limit` around them, and a custom algorithm.

use tallygate_core::{
    Algorithm, Answer, ArrivalTime, Cost, Decision, DecodeError, Facts, Fit, Kind, Machine, Op,
    Part, Policy, Quota, Simulator, Source, Tick, Ticks, Used, Verdict, apply, simulate,
};

fn machine(kind: Kind, limit: Cost, window: u64) -> Machine {
    *Policy::of(kind, limit).per(Ticks(window)).limit().expect("the limit is valid").machine()
}

/// Checks what every state machine must do without a `Limit` around it.
fn works_alone<A: Algorithm>(rule: &A, tag: u8) {
    assert_eq!(rule.capacity(), 4);
    let mut state = rule.initial(Tick(30));
    assert!(rule.decide::<bool>(&mut state, Tick(30), 4));
    assert!(!rule.decide::<bool>(&mut state, Tick(30), 1));
    assert_eq!(rule.used(&state, Tick(30)).rounded_up(), 4);
    assert_eq!(rule.fresh_at(&rule.fresh(Tick(30))), Some(Tick(i64::MIN)));

    let mut bytes = Vec::new();
    rule.encode(&state, &mut bytes);
    assert_eq!(bytes[0], tag, "the tag is part of the format");
    let mut again = Vec::new();
    rule.encode(&rule.decode(&bytes).expect("the state was encoded by this rule"), &mut again);
    assert_eq!(again, bytes);
    bytes[0] = tag + 1;
    let other = DecodeError::Tag { found: tag + 1, expected: tag };
    assert_eq!(rule.decode(&bytes).err(), Some(other));
}

#[test]
fn each_state_machine_works_without_a_limit() {
    for kind in Kind::ALL {
        match machine(kind, 4, 10) {
            Machine::Bucket(rule) => works_alone(
                &rule,
                match kind {
                    Kind::TokenBucket => 1,
                    Kind::Gcra => 2,
                    Kind::LeakyBucket => 3,
                    other => panic!("a {other} is not a bucket"),
                },
            ),
            Machine::FixedWindow(rule) => works_alone(&rule, 4),
            Machine::SlidingWindowLog(rule) => works_alone(&rule, 5),
            Machine::SlidingWindowCounter(rule) => works_alone(&rule, 6),
            wide @ Machine::WideBucket(_) => panic!("small numbers do not need {wide:?}"),
        }
    }
}

#[test]
fn gcra_returns_its_arrival_time_to_a_fraction_of_a_tick() {
    let Machine::Bucket(rule) = machine(Kind::Gcra, 3, 10) else {
        panic!("the machine is not a 64-bit bucket")
    };
    let mut state = rule.initial(Tick(100));
    assert_eq!(rule.arrival_time(&state), ArrivalTime { tick: Tick(100), fraction: (0, 3) });
    assert!(rule.decide::<bool>(&mut state, Tick(100), 1));
    assert_eq!(rule.arrival_time(&state), ArrivalTime { tick: Tick(103), fraction: (1, 3) });
    assert!(rule.decide::<bool>(&mut state, Tick(101), 1));
    assert_eq!(rule.arrival_time(&state), ArrivalTime { tick: Tick(106), fraction: (2, 3) });
}

/// If windows are aligned to the clock, the position in the window follows from the time.
#[test]
fn a_window_state_that_contradicts_its_time_is_an_error() {
    let Machine::FixedWindow(rule) = machine(Kind::FixedWindow, 4, 10) else {
        panic!("the machine is not a fixed window")
    };
    let at = |position: u8| [4, 60, position, 1]; // last change at 30, zigzagged
    assert!(rule.decode(&at(0)).is_ok());
    let misplaced = DecodeError::Field { name: "position in its window" };
    assert_eq!(rule.decode(&at(1)).err(), Some(misplaced));
    assert_eq!(rule.decode(&at(10)).err(), Some(misplaced));
    assert_eq!(rule.decode(&[4, 60, 0, 9]).err(), Some(DecodeError::Field { name: "count" }));
}

#[test]
fn counts_above_the_bound_on_debt_are_errors() {
    let Machine::SlidingWindowCounter(rule) = machine(Kind::SlidingWindowCounter, 4, 10) else {
        panic!("the machine is not a sliding window counter")
    };
    let count = DecodeError::Field { name: "count" };
    assert!(rule.decode(&[6, 60, 8, 8]).is_ok(), "the debt may equal the capacity");
    assert_eq!(rule.decode(&[6, 60, 9, 0]).err(), Some(count));
    assert_eq!(rule.decode(&[6, 60, 0, 9]).err(), Some(count));
}

#[test]
fn decode_errors_say_what_is_wrong() {
    for (error, message) in [
        (DecodeError::Truncated, "the state is truncated; expected more bytes"),
        (DecodeError::Trailing { extra: 2 }, "2 bytes after the end of the state; expected none"),
        (
            DecodeError::Tag { found: 9, expected: 1 },
            "the state belongs to another algorithm: it has tag 9, expected 1",
        ),
        (
            DecodeError::OtherLimit,
            "the state belongs to a limit with other numbers; use Limit::adopt to carry it over",
        ),
        (DecodeError::Field { name: "level" }, "the level in the state is out of range"),
    ] {
        assert_eq!(error.to_string(), message);
    }
}

#[test]
fn an_outage_is_not_a_denial() {
    let policy = Policy::fixed_window(1).per(Ticks(1)).build().expect("valid");
    let decision: Decision = policy.decide(&mut policy.initial(Tick(0)), Tick(0), 1);
    let verdict = |allowed, source| Decision { allowed, source, ..decision }.verdict();
    for source in [Source::Store, Source::Lease, Source::DenyCache, Source::Local] {
        assert_eq!(verdict(true, source), Verdict::Allowed);
        assert_eq!(verdict(false, source), Verdict::Denied);
    }
    assert_eq!(verdict(false, Source::Overloaded), Verdict::Denied);
    assert_eq!(verdict(true, Source::FailedOpen), Verdict::Unavailable { allowed: true });
    assert_eq!(verdict(false, Source::FailedClosed), Verdict::Unavailable { allowed: false });
}

#[test]
fn merged_answers_are_the_strictest() {
    assert!(!bool::merge(true, false) && !bool::merge(false, true) && bool::merge(true, true));
    let decision = |limit, remaining| Decision {
        allowed: true,
        limit,
        remaining,
        retry_after: Some(Ticks::ZERO),
        reset_after: Ticks::ZERO,
        delay: Ticks::ZERO,
        scarcest: Some(0),
        denied_by: None,
        shadow_denied_by: None,
        quota: None,
        source: Source::Store,
    };
    let denied = Decision { allowed: false, denied_by: Some(1), ..decision(10, 0) };
    let shadowed = Decision { shadow_denied_by: Some(2), ..decision(10, 0) };
    let both = denied.merge(shadowed);
    assert_eq!((both.denied_by, both.shadow_denied_by), (Some(1), Some(2)));
    assert!(decision(10, 1).is_allowed() && !denied.is_allowed());
    let quota = |amount| Some(Quota { amount, window: Ticks(1) });
    let (few, many) = (
        Decision { quota: quota(1), ..decision(10, 0) },
        Decision { quota: quota(2), ..decision(10, 5) },
    );
    assert_eq!(few.merge(many).quota, quota(1), "that of the scarcest");
    let denied = Decision { quota: quota(3), remaining: 7, ..denied };
    assert_eq!(few.merge(denied).quota, quota(3), "that of the limit that denied");
    assert!(Answer::is_allowed(&true) && !Answer::is_allowed(&false));
    assert_eq!(decision(10, 3).merge(decision(5, 2)).limit, 5);
    assert_eq!(decision(10, 3).merge(decision(5, 3)).limit, 10, "of equals, the first counts");
}

/// Allows every other request, with the required methods only.
struct EveryOther;

impl Algorithm for EveryOther {
    type State = bool;

    fn capacity(&self) -> Cost {
        1
    }
    fn fresh(&self, _: Tick) -> bool {
        false
    }
    fn last_change(&self, _: &bool) -> Tick {
        Tick(i64::MIN)
    }
    fn clock_was_set_back(&self, _: &bool, _: Tick) -> bool {
        false
    }
    fn rebase(&self, _: &mut bool, _: Tick) {}
    fn fit(&self, used: &bool, _: Tick, cost: Cost) -> Fit {
        match (used, cost) {
            (_, 0) | (false, 1) => Fit::Now,
            (true, 1) => Fit::After(Ticks(1)),
            _ => Fit::Never,
        }
    }
    fn charge(&self, used: &mut bool, _: Tick, amount: i128) -> u128 {
        assert_ne!(amount, 0, "a cost of 0 charges nothing");
        *used = amount > 0;
        amount.unsigned_abs() - 1
    }
    fn facts(&self, used: &bool, _: Tick, _: Option<Cost>) -> Facts {
        let remaining = Cost::from(!*used);
        Facts { remaining, ..Facts::all_of(1) }
    }
    fn fresh_at(&self, used: &bool) -> Option<Tick> {
        (!*used).then_some(Tick(0))
    }
    fn used(&self, used: &bool, _: Tick) -> Used {
        Used::whole(Cost::from(*used))
    }
    fn with_used(&self, used: Used, _: Tick) -> bool {
        used.rounded_up() > 0
    }
    fn encode(&self, used: &bool, out: &mut Vec<u8>) {
        out.push(u8::from(*used));
    }
    fn decode(&self, bytes: &[u8]) -> Result<bool, DecodeError> {
        Ok(bytes == [1])
    }
}

#[test]
fn a_custom_algorithm_needs_only_the_required_methods() {
    let mut used = EveryOther.initial(Tick(0));
    assert!(EveryOther.decide::<bool>(&mut used, Tick(0), 0));
    assert!(EveryOther.try_charge(&mut used, Tick(0), 0));
    assert!(!used, "a cost of 0 changes nothing");
    assert!(EveryOther.decide::<bool>(&mut used, Tick(0), 1));
    let denied: Decision = EveryOther.decide(&mut used, Tick(0), 1);
    assert_eq!((denied.allowed, denied.retry_after), (false, Some(Ticks(1))));
    let never: Decision = EveryOther.decide(&mut used, Tick(0), 2);
    assert_eq!(never.retry_after, None);

    let mut parts = [Part { rule: &EveryOther, state: &mut used, op: Op::Force(-1) }];
    assert_eq!(apply::<_, bool>(&mut parts, Tick(0)).dropped, 0);
    let trace = [("a", Tick(0), 1), ("b", Tick(0), 1), ("a", Tick(0), 1)];
    let allowed: Vec<bool> = simulate(EveryOther, trace).map(|decision| decision.allowed).collect();
    assert_eq!(allowed, [true, true, false]);
}

/// A part that allows the request is not charged, and its answer has no delay.
#[test]
fn parts_are_not_charged_when_another_part_denies() {
    let limit = Policy::leaky_bucket(2).per(Ticks(10)).limit().expect("the limit is valid");
    let (mut used_up, mut free) = (limit.initial(Tick(0)), limit.initial(Tick(0)));
    assert!(limit.decide::<bool>(&mut used_up, Tick(0), 2));
    assert!(limit.decide::<bool>(&mut free, Tick(0), 1));
    for cost in [0, 1] {
        let mut parts = [
            Part { rule: &limit, state: &mut free, op: Op::Check(cost) },
            Part { rule: &limit, state: &mut used_up, op: Op::Check(1) },
        ];
        let applied = apply::<_, Decision>(&mut parts, Tick(0));
        assert_eq!(applied.denied_by, Some(1));
        let answer = applied.answer.expect("there are two parts");
        assert!(!answer.allowed);
        // A denied request has no delay.
        assert_eq!((answer.delay, answer.retry_after), (Ticks::ZERO, Some(Ticks(5))));
    }
}

#[test]
fn used_units_are_capped_at_the_capacity() {
    let used = Used { whole: 5, part: (1, 2) };
    assert_eq!(used.at_most(6), used);
    assert_eq!(used.at_most(5), Used::whole(5));
    assert_eq!((used.rounded_up(), Used::whole(5).rounded_up()), (6, 5));
}

#[test]
fn ticks_are_printed_as_numbers_and_converted_from_durations() {
    assert_eq!((Tick(-5).to_string(), Ticks(7).to_string()), ("-5".into(), "7".into()));
    let second = core::time::Duration::from_secs(1);
    assert_eq!(Ticks::from_duration(second), Ticks(1_000_000_000));
    assert_eq!(Ticks::from_duration(core::time::Duration::MAX), Ticks(u64::MAX));
}

#[test]
fn a_simulator_returns_the_states_of_its_clients() {
    let mut simulator = Simulator::new(EveryOther);
    assert!(simulator.state(0).is_none());
    assert!(simulator.step::<bool>(0, Tick(0), 1));
    assert_eq!((simulator.state(0), simulator.rule().capacity()), (Some(&true), 1));
}
