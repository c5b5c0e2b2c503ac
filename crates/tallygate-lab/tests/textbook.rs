//! Tests the textbook rule against its definition in unbounded integers.

use num_bigint::BigInt;
use proptest::prelude::*;
use tallygate_core::{Policy, Tick, Ticks, simulate};
use tallygate_lab::Verdict::{Allow, Deny};
use tallygate_lab::{Instruction, Textbook, Verdict, rate_limiter};
use tallygate_testkit::cases;

/// The rule as the design document defines it, for one client.
fn reference(capacity: i64, window: i64, burst: i64, trace: &[(i64, u64)]) -> Vec<bool> {
    let (l, w, b) = (BigInt::from(capacity), BigInt::from(window), BigInt::from(burst));
    let zero = BigInt::ZERO;
    let mut state = None;
    let mut verdicts = Vec::new();
    for &(now, cost) in trace {
        let (mut tokens, mut last) = state.unwrap_or((b.clone(), BigInt::from(now)));
        let (now, cost) = (BigInt::from(now), BigInt::from(cost));
        let elapsed = &now - &last;
        if elapsed > zero && w > zero {
            let refill = &elapsed * &l / &w;
            if refill > zero {
                if &tokens + &refill >= b {
                    (tokens, last) = (b.clone(), now);
                } else {
                    last += &refill * &w / &l;
                    tokens += refill;
                }
            }
        }
        let allowed = l > zero && tokens >= cost;
        if allowed {
            tokens -= cost;
        }
        state = Some((tokens, last));
        verdicts.push(allowed);
    }
    verdicts
}

fn run(rule: Textbook, trace: &[(i64, u64)]) -> Vec<bool> {
    let Some(&(start, _)) = trace.first() else { return Vec::new() };
    let mut state = rule.full_state(Tick(start));
    trace.iter().map(|&(now, cost)| rule.decide(&mut state, Tick(now), cost)).collect()
}

fn numbers() -> impl Strategy<Value = i64> {
    prop_oneof![6 => -1..20_i64, 1 => any::<i64>(), 1 => (0..3_i64).prop_map(|n| i64::MAX - n)]
}

fn trace() -> impl Strategy<Value = Vec<(i64, u64)>> {
    let time = prop_oneof![6 => 0..200_i64, 1 => any::<i64>()];
    let cost = prop_oneof![6 => 1..3_u64, 1 => 0..20_u64, 1 => any::<u64>()];
    (proptest::collection::vec((time, cost), 0..60), any::<bool>()).prop_map(|(mut trace, sort)| {
        if sort {
            trace.sort_by_key(|&(now, _)| now);
        }
        trace
    })
}

proptest! {
    #![proptest_config(cases(3000))]

    #[test]
    fn the_textbook_rule_equals_its_definition(
        capacity in numbers(),
        window in numbers(),
        burst in prop_oneof![2 => Just(None), 1 => (1..30_i64).prop_map(Some)],
        trace in trace(),
    ) {
        let burst = burst.unwrap_or(capacity);
        let rule = Textbook::new(capacity, window).burst(burst);
        prop_assert_eq!(run(rule, &trace), reference(capacity, window, burst, &trace));
    }

    /// If every tick refills whole tokens, nothing is rounded, and the textbook rule is exact.
    #[test]
    fn the_textbook_rule_is_exact_if_nothing_is_rounded(
        window in 1..6_i64,
        times in 1..5_i64,
        mut trace in proptest::collection::vec((0..60_i64, 1..4_u64), 1..60),
    ) {
        trace.sort_by_key(|&(now, _)| now);
        let limit = window * times;
        let exact = Policy::token_bucket(limit.unsigned_abs()).per(Ticks(window.unsigned_abs()));
        let requests = trace.iter().map(|&(now, cost)| ((), Tick(now), cost));
        let exact: Vec<bool> =
            simulate(exact.limit().unwrap(), requests).map(|decision| decision.allowed).collect();
        prop_assert_eq!(run(Textbook::new(limit, window), &trace), exact);
    }
}

/// 3 per 10 ticks is one per 3⅓ ticks, but the textbook rule allows one per 3 ticks.
#[test]
fn the_textbook_rule_drifts_and_the_exact_bucket_does_not() {
    let ticks = || (0..10_000).map(|now| (now, 1));
    let trace: Vec<_> = ticks().collect();
    let allowed = run(Textbook::new(3, 10), &trace).iter().filter(|allowed| **allowed).count();
    let limit = Policy::token_bucket(3).per(Ticks(10)).limit().unwrap();
    let exact = simulate(limit, ticks().map(|(now, cost)| ((), Tick(now), cost)));
    assert_eq!(allowed, 3_335);
    assert_eq!(exact.filter(|decision| decision.allowed).count(), 3 + 9_999 * 3 / 10);
}

#[test]
fn every_request_has_a_verdict_and_other_instructions_are_skipped() {
    let none: [&str; 0] = [];
    assert_eq!(rate_limiter(1, 1, none), Ok(vec![]));
    let lines = ["request a 5", "", "refund a 5", "request a 4", "  request\ta  6 1\r"];
    assert_eq!(rate_limiter(1, 1, lines), Ok(vec![Allow, Deny, Allow]));
    assert_eq!(Verdict::from(true).to_string() + " " + &Deny.to_string(), "allow deny");
}

#[test]
fn the_error_of_a_malformed_request_names_its_line() {
    let error = |line: &str| {
        let result = rate_limiter(1, 1, ["request a 1", line]);
        result.expect_err("the request is malformed").to_string()
    };
    let timestamp = "expected a timestamp, a whole 64-bit number";
    let cost = "expected a cost, a whole 64-bit number without a sign";
    for (line, expected) in [
        ("request", "the end of the line; expected a client after `request`".to_owned()),
        ("request a", "the end of the line; expected a timestamp after the client".to_owned()),
        ("request a x", format!("`x`; {timestamp}")),
        ("request a 1e3", format!("`1e3`; {timestamp}")),
        ("request a 0x10", format!("`0x10`; {timestamp}")),
        ("request a +1", format!("`+1`; {timestamp}")),
        ("request a --1", format!("`--1`; {timestamp}")),
        ("request a -", format!("`-`; {timestamp}")),
        ("request a inf", format!("`inf`; {timestamp}")),
        ("request a 9223372036854775808", format!("`9223372036854775808`; {timestamp}")),
        ("request a 1 1.0", format!("`1.0`; {cost}")),
        ("request a 1 18446744073709551616", format!("`18446744073709551616`; {cost}")),
        ("request a 1 1 1", "`1`; expected the end of the line after the cost".to_owned()),
    ] {
        assert_eq!(error(line), format!("line 2: found {expected}"));
    }
    let long = format!("request a {}", "9".repeat(100));
    assert_eq!(
        error(&long),
        format!("line 2: found `{}` and 40 more bytes; {timestamp}", "9".repeat(60))
    );
    assert_eq!(error("request a \x1b[2J"), format!("line 2: found `\\x1b[2J`; {timestamp}"));
    assert!(rate_limiter(1, 1, ["request a -9223372036854775808 18446744073709551615"]).is_ok());
}

#[test]
fn a_number_is_parsed_if_it_is_alone_on_its_line() {
    assert_eq!(Instruction::parse_number(b" -7\r", "a number"), Ok(Some(-7)));
    assert_eq!(Instruction::parse_number(b" ", "a number"), Ok(None));
    assert!(Instruction::parse_number(b"7 8", "a number").is_err());
    let exactly = "x".repeat(60);
    let error = Instruction::parse_number(exactly.as_bytes(), "a number")
        .expect_err("the line is not a number");
    assert_eq!(error.to_string(), format!("found `{exactly}`; expected a number"));
}

/// Fault A4.
#[test]
fn the_textbook_rule_accepts_zeros() {
    let twice = ["request a 0", "request a 9"];
    assert_eq!(rate_limiter(0, 1, twice), Ok(vec![Deny, Deny]));
    assert_eq!(rate_limiter(1, 0, twice), Ok(vec![Allow, Deny]));
    assert_eq!(rate_limiter(i64::MIN, 1, twice), Ok(vec![Deny, Deny]));
    assert_eq!(rate_limiter(1, i64::MIN, twice), Ok(vec![Allow, Deny]));
}

/// A cost is unsigned in the core, so parsing a cost with a sign is an error.
///
/// Fault A6.
#[test]
fn parsing_a_cost_with_a_sign_is_an_error() {
    for cost in ["-1", "-0", "+1", "-18446744073709551615"] {
        let line = format!("request a 0 {cost}");
        let error = rate_limiter(1, 1, [line]).expect_err("the cost has a sign").to_string();
        assert!(error.starts_with("line 1: found `"), "{error}");
        assert!(error.contains("expected a cost"), "{error}");
    }
}
