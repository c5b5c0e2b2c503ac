//! The state machines by their own types, and an algorithm of a user's own beside them.

use tallygate_core::{
    Algorithm, Answer, ArrivalTime, Cost, Decision, DecodeError, Facts, Fit, Kind, Machine, Op,
    Part, Policy, Simulator, Source, Tick, Ticks, Used, apply, simulate,
};

fn machine(kind: Kind, limit: Cost, window: u64) -> Machine {
    *Policy::of(kind, limit).per(Ticks(window)).limit().expect("valid").machine()
}

/// What every machine must do by itself, without the `Limit` around it.
fn stands_alone<A: Algorithm>(rule: &A, tag: u8) {
    assert_eq!(rule.capacity(), 4);
    let mut state = rule.first(Tick(30));
    assert!(rule.decide::<bool>(&mut state, Tick(30), 4));
    assert!(!rule.decide::<bool>(&mut state, Tick(30), 1));
    assert_eq!(rule.used(&state, Tick(30)).rounded_up(), 4);
    assert_eq!(rule.fresh_at(&rule.fresh(Tick(30))), Some(Tick(i64::MIN)));

    let mut bytes = Vec::new();
    rule.encode(&state, &mut bytes);
    assert_eq!(bytes[0], tag, "part of the format");
    let mut again = Vec::new();
    rule.encode(&rule.decode(&bytes).expect("its own"), &mut again);
    assert_eq!(again, bytes);
    bytes[0] = tag + 1;
    let other = DecodeError::Tag { found: tag + 1, expected: tag };
    assert_eq!(rule.decode(&bytes).err(), Some(other));
}

#[test]
fn each_machine_stands_alone() {
    for kind in Kind::ALL {
        match machine(kind, 4, 10) {
            Machine::Bucket(rule) => stands_alone(
                &rule,
                match kind {
                    Kind::TokenBucket => 1,
                    Kind::Gcra => 2,
                    Kind::LeakyBucket => 3,
                    other => panic!("a {other} is no bucket"),
                },
            ),
            Machine::FixedWindow(rule) => stands_alone(&rule, 4),
            Machine::SlidingWindowLog(rule) => stands_alone(&rule, 5),
            Machine::SlidingWindowCounter(rule) => stands_alone(&rule, 6),
            wide @ Machine::WideBucket(_) => panic!("small numbers need no {wide:?}"),
        }
    }
}

#[test]
fn gcra_tells_its_arrival_time_to_a_fraction_of_a_tick() {
    let Machine::Bucket(rule) = machine(Kind::Gcra, 3, 10) else { panic!("a small gcra") };
    let mut state = rule.first(Tick(100));
    assert_eq!(rule.arrival_time(&state), ArrivalTime { tick: Tick(100), fraction: (0, 3) });
    assert!(rule.decide::<bool>(&mut state, Tick(100), 1));
    assert_eq!(rule.arrival_time(&state), ArrivalTime { tick: Tick(103), fraction: (1, 3) });
    assert!(rule.decide::<bool>(&mut state, Tick(101), 1));
    assert_eq!(rule.arrival_time(&state), ArrivalTime { tick: Tick(106), fraction: (2, 3) });
}

/// A fixed window's place must be that of its time, if windows lie on the clock.
#[test]
fn a_window_that_is_not_where_its_time_is_is_refused() {
    let Machine::FixedWindow(rule) = machine(Kind::FixedWindow, 4, 10) else {
        panic!("a fixed window")
    };
    let at = |place: u8| [4, 60, place, 1]; // last change at 30, zigzagged
    assert!(rule.decode(&at(0)).is_ok());
    let misplaced = DecodeError::Field { name: "place in its window" };
    assert_eq!(rule.decode(&at(1)).err(), Some(misplaced));
    assert_eq!(rule.decode(&at(10)).err(), Some(misplaced));
    assert_eq!(rule.decode(&[4, 60, 0, 9]).err(), Some(DecodeError::Field { name: "count" }));
}

#[test]
fn counts_above_all_debt_are_refused() {
    let Machine::SlidingWindowCounter(rule) = machine(Kind::SlidingWindowCounter, 4, 10) else {
        panic!("a sliding window counter")
    };
    let count = DecodeError::Field { name: "count" };
    assert!(rule.decode(&[6, 60, 8, 8]).is_ok(), "as much again in debt");
    assert_eq!(rule.decode(&[6, 60, 9, 0]).err(), Some(count));
    assert_eq!(rule.decode(&[6, 60, 0, 9]).err(), Some(count));
}

#[test]
fn what_is_wrong_with_a_state_is_told() {
    for (error, told) in [
        (DecodeError::Truncated, "the state ends too early; expected more bytes"),
        (DecodeError::Trailing { extra: 2 }, "2 bytes follow the state; expected none"),
        (DecodeError::Tag { found: 9, expected: 1 }, "the state has tag 9; expected 1"),
        (
            DecodeError::OtherLimit,
            "the state was made under other numbers; adopt it to carry it over",
        ),
        (
            DecodeError::Field { name: "level" },
            "the state's level is out of range; expected what a decision leaves",
        ),
    ] {
        assert_eq!(error.to_string(), told);
    }
}

#[test]
fn answers_merge_into_the_tightest() {
    assert!(!bool::merge(true, false) && !bool::merge(false, true) && bool::merge(true, true));
    let decision = |limit, remaining| Decision {
        allowed: true,
        limit,
        remaining,
        retry_after: Some(Ticks::ZERO),
        reset_after: Ticks::ZERO,
        delay: Ticks::ZERO,
        scarcest: Some(0),
        refused_by: None,
        shadow_refused_by: None,
        source: Source::Store,
    };
    let refused = Decision { allowed: false, refused_by: Some(1), ..decision(10, 0) };
    let shadowed = Decision { shadow_refused_by: Some(2), ..decision(10, 0) };
    let both = refused.merge(shadowed);
    assert_eq!((both.refused_by, both.shadow_refused_by), (Some(1), Some(2)));
    assert!(decision(10, 1).is_allowed() && !refused.is_allowed());
    assert!(Answer::is_allowed(&true) && !Answer::is_allowed(&false));
    assert_eq!(decision(10, 3).merge(decision(5, 2)).limit, 5);
    assert_eq!(decision(10, 3).merge(decision(5, 3)).limit, 10, "the first of equals");
}

/// Admits every other request: as little of an algorithm as there can be, on the defaults.
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
    fn set_back(&self, _: &bool, _: Tick) -> bool {
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
        assert_ne!(amount, 0, "a look charges nothing");
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
fn an_algorithm_of_ones_own_needs_only_the_required_parts() {
    let mut used = EveryOther.first(Tick(0));
    assert!(EveryOther.decide::<bool>(&mut used, Tick(0), 0));
    assert!(EveryOther.admit(&mut used, Tick(0), 0));
    assert!(!used, "a look");
    assert!(EveryOther.decide::<bool>(&mut used, Tick(0), 1));
    let refused: Decision = EveryOther.decide(&mut used, Tick(0), 1);
    assert_eq!((refused.allowed, refused.retry_after), (false, Some(Ticks(1))));
    let never: Decision = EveryOther.decide(&mut used, Tick(0), 2);
    assert_eq!(never.retry_after, None);

    let mut parts = [Part { rule: &EveryOther, state: &mut used, op: Op::Force(-1) }];
    assert_eq!(apply::<_, bool>(&mut parts, Tick(0)).dropped, 0);
    let trace = [("a", Tick(0), 1), ("b", Tick(0), 1), ("a", Tick(0), 1)];
    let allowed: Vec<bool> = simulate(EveryOther, trace).map(|told| told.allowed).collect();
    assert_eq!(allowed, [true, true, false]);
}

/// A look among parts that are refused is answered by its own limit, and charged to nobody.
#[test]
fn parts_that_would_fit_are_spared_when_another_refuses() {
    let limit = Policy::leaky_bucket(2).per(Ticks(10)).limit().expect("valid");
    let (mut used_up, mut free) = (limit.first(Tick(0)), limit.first(Tick(0)));
    assert!(limit.decide::<bool>(&mut used_up, Tick(0), 2));
    assert!(limit.decide::<bool>(&mut free, Tick(0), 1));
    for cost in [0, 1] {
        let mut parts = [
            Part { rule: &limit, state: &mut free, op: Op::Check(cost) },
            Part { rule: &limit, state: &mut used_up, op: Op::Check(1) },
        ];
        let told = apply::<_, Decision>(&mut parts, Tick(0));
        assert_eq!(told.refused_by, Some(1));
        let answer = told.answer.expect("two enforced parts");
        assert!(!answer.allowed);
        // Whoever is not let through is not told to wait in line either.
        assert_eq!((answer.delay, answer.retry_after), (Ticks::ZERO, Some(Ticks(5))));
    }
}

#[test]
fn what_is_used_is_cut_at_the_capacity_with_its_part() {
    let used = Used { whole: 5, part: (1, 2) };
    assert_eq!(used.at_most(6), used);
    assert_eq!(used.at_most(5), Used::whole(5));
    assert_eq!((used.rounded_up(), Used::whole(5).rounded_up()), (6, 5));
}

#[test]
fn ticks_are_printed_as_numbers_and_made_of_durations() {
    assert_eq!((Tick(-5).to_string(), Ticks(7).to_string()), ("-5".into(), "7".into()));
    let second = core::time::Duration::from_secs(1);
    assert_eq!(Ticks::from_duration(second), Ticks(1_000_000_000));
    assert_eq!(Ticks::from_duration(core::time::Duration::MAX), Ticks(u64::MAX));
}

#[test]
fn a_simulator_shows_its_clients_states() {
    let mut simulator = Simulator::new(EveryOther);
    assert!(simulator.state(0).is_none());
    assert!(simulator.step::<bool>(0, Tick(0), 1));
    assert_eq!((simulator.state(0), simulator.rule().capacity()), (Some(&true), 1));
}
