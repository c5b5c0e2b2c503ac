//! Counts the instructions per decision with valgrind.
//!
//! Without arguments, the program runs itself under callgrind twice per case, with N and 2N decisions, and prints the
//! difference divided by N. This removes the cost of starting the process. Unlike times, counts do not depend on other
//! load.

use std::hint::black_box;
use std::process::Command;

use tallygate_core::{Algorithm, Answer, Decision, Kind, Machine, Policy, Tick, Ticks};

/// The number of decisions in the shorter run.
const N: u64 = 20_000;

/// 100 per second: a request every 10 ms is always allowed, a request every 10 µs is not.
const LIMIT: u64 = 100;
const WINDOW: Ticks = Ticks(1_000_000_000);

const CASES: [(&str, &str); 4] =
    [("yes", "allowed"), ("yes", "denied"), ("full", "allowed"), ("full", "denied")];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => table(),
        [rule, answer, outcome, count] => run(rule, answer, outcome, count.parse()?),
        _ => Err("expected no arguments, or RULE ANSWER OUTCOME COUNT".into()),
    }
}

/// Prints one row per algorithm: the yes/no answer and the full decision, allowed and denied.
fn table() -> Result<(), Box<dyn std::error::Error>> {
    println!("instructions per decision  yes/no           full decision");
    println!("                           allowed  denied  allowed  denied");
    let rules = Kind::ALL.map(Kind::name).into_iter().chain(["token_bucket (128 bits)", "Limit"]);
    for rule in rules {
        let mut row = [0; 4];
        for (cell, (answer, outcome)) in row.iter_mut().zip(CASES) {
            let long = count(rule, answer, outcome, 2 * N)?;
            *cell = (long - count(rule, answer, outcome, N)?) / N;
        }
        println!("{rule:<26} {:>7} {:>7}  {:>7} {:>7}", row[0], row[1], row[2], row[3]);
    }
    Ok(())
}

/// Returns the instructions of a whole run.
fn count(
    rule: &str,
    answer: &str,
    outcome: &str,
    count: u64,
) -> Result<u64, Box<dyn std::error::Error>> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(std::env::current_exe()?)
        .args([rule, answer, outcome, &count.to_string()])
        .output()
        .map_err(|error| format!("cannot run valgrind ({error}); install the package valgrind"))?;
    let report = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("{rule} {answer} {outcome}: {report}").into());
    }
    let collected = report.lines().find_map(|line| line.split("Collected : ").nth(1));
    Ok(collected.ok_or_else(|| format!("valgrind printed no count: {report}"))?.trim().parse()?)
}

fn run(
    rule: &str,
    answer: &str,
    outcome: &str,
    count: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let (kind, debt) = match rule {
        "token_bucket (128 bits)" => (Kind::TokenBucket, Some(1 << 38)),
        "Limit" => (Kind::TokenBucket, None),
        name => (name.parse()?, None),
    };
    let mut builder = Policy::of(kind, LIMIT).per(WINDOW);
    if let Some(debt) = debt {
        // A limit and a window without a common divisor, and a debt that needs 128-bit levels.
        builder = builder.per(Ticks(WINDOW.0 + 1)).debt(debt);
    }
    let limit = builder.limit()?;
    if rule == "Limit" {
        return check(&limit, answer, outcome, count);
    }
    match limit.machine() {
        Machine::Bucket(rule) => check(rule, answer, outcome, count),
        Machine::WideBucket(rule) => check(rule, answer, outcome, count),
        Machine::FixedWindow(rule) => check(rule, answer, outcome, count),
        Machine::SlidingWindowLog(rule) => check(rule, answer, outcome, count),
        Machine::SlidingWindowCounter(rule) => check(rule, answer, outcome, count),
    }
}

fn check<A: Algorithm>(
    rule: &A,
    answer: &str,
    outcome: &str,
    count: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let allowed = outcome == "allowed";
    let denied = match answer {
        "yes" => check_as::<A, bool>(rule, allowed, count, |allowed| !allowed),
        _ => check_as::<A, Decision>(rule, allowed, count, |decision| !decision.allowed),
    };
    let expected = if allowed { 0 } else { count };
    // Wrong decisions make a benchmark worthless.
    if denied != expected {
        return Err(format!("{denied} of {count} requests were denied, expected {expected}").into());
    }
    Ok(())
}

fn check_as<A: Algorithm, T: Answer>(
    rule: &A,
    allowed: bool,
    count: u64,
    is_denied: fn(T) -> bool,
) -> u64 {
    let mut state = rule.initial(Tick(0));
    // A denied client sends a request every 10 ns, so that nothing refills in between.
    let (mut now, step) = if allowed { (0, 10_500_000) } else { (0, 10) };
    if !allowed {
        for _ in 0..LIMIT {
            rule.decide::<bool>(&mut state, Tick(now), 1);
        }
    }
    let mut sum = 0;
    for _ in 0..count {
        now += step;
        let answer = black_box(rule).decide(&mut state, black_box(Tick(now)), black_box(1));
        sum += u64::from(is_denied(black_box(answer)));
    }
    sum
}
