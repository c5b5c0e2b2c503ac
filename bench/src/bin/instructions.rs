//! How many instructions a decision takes, counted by valgrind.
//!
//! Without arguments it runs itself under callgrind twice a case, with N and 2N decisions, and
//! prints the difference divided by N: what the loop costs without what the process costs. Counts,
//! unlike times, are the same on a busy machine.

use std::hint::black_box;
use std::process::Command;

use tallygate_core::{Algorithm, Answer, Decision, Kind, Machine, Policy, Tick, Ticks};

/// Decisions in the shorter of the two runs.
const N: u64 = 20_000;

/// 100 a second in nanoseconds: a request every 10 ms is always admitted, one every 10 µs is not.
const LIMIT: u64 = 100;
const WINDOW: Ticks = Ticks(1_000_000_000);

const CASES: [(&str, &str); 4] =
    [("yes", "admitted"), ("yes", "refused"), ("full", "admitted"), ("full", "refused")];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => table(),
        [rule, answer, outcome, count] => run(rule, answer, outcome, count.parse()?),
        _ => Err("no arguments, or RULE ANSWER OUTCOME COUNT".into()),
    }
}

/// Prints a row an algorithm: the yes/no answer and the full decision, admitted and refused.
fn table() -> Result<(), Box<dyn std::error::Error>> {
    println!("instructions a decision    yes/no           full decision");
    println!("                           allowed refused  allowed refused");
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

/// The instructions of a whole run.
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
    let told = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("{rule} {answer} {outcome}: {told}").into());
    }
    let collected = told.lines().find_map(|line| line.split("Collected : ").nth(1));
    Ok(collected.ok_or_else(|| format!("valgrind counted nothing: {told}"))?.trim().parse()?)
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
        // Without a common divisor, and with debt that only levels of 128 bits can count.
        builder = builder.per(Ticks(WINDOW.0 + 1)).debt(debt);
    }
    let limit = builder.limit()?;
    if rule == "Limit" {
        return ask(&limit, answer, outcome, count);
    }
    match limit.machine() {
        Machine::Bucket(rule) => ask(rule, answer, outcome, count),
        Machine::WideBucket(rule) => ask(rule, answer, outcome, count),
        Machine::FixedWindow(rule) => ask(rule, answer, outcome, count),
        Machine::SlidingWindowLog(rule) => ask(rule, answer, outcome, count),
        Machine::SlidingWindowCounter(rule) => ask(rule, answer, outcome, count),
    }
}

fn ask<A: Algorithm>(
    rule: &A,
    answer: &str,
    outcome: &str,
    count: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let admitted = outcome == "admitted";
    let refused = match answer {
        "yes" => ask_as::<A, bool>(rule, admitted, count, |allowed| !allowed),
        _ => ask_as::<A, Decision>(rule, admitted, count, |decision| !decision.allowed),
    };
    let expected = if admitted { 0 } else { count };
    // A benchmark that decides wrongly measures nothing.
    if refused != expected {
        return Err(format!("{refused} of {count} refused, expected {expected}").into());
    }
    Ok(())
}

fn ask_as<A: Algorithm, T: Answer>(
    rule: &A,
    admitted: bool,
    count: u64,
    refused: fn(T) -> bool,
) -> u64 {
    let mut state = rule.first(Tick(0));
    // A refused client asks every 10 ns, so that nothing it could use is earned meanwhile.
    let (mut now, step) = if admitted { (0, 10_500_000) } else { (0, 10) };
    if !admitted {
        for _ in 0..LIMIT {
            rule.decide::<bool>(&mut state, Tick(now), 1);
        }
    }
    let mut sum = 0;
    for _ in 0..count {
        now += step;
        let answer = black_box(rule).decide(&mut state, black_box(Tick(now)), black_box(1));
        sum += u64::from(refused(black_box(answer)));
    }
    sum
}
