//! Traces: however they are cut into reads, the answers and the complaints are the same.

use clap::Parser as _;

use super::engine::Rule;
use super::lines::Lines;
use crate::cli::{Cli, Command};
use crate::fuzzing::Pieces;

/// Traces in any pieces. The first byte says by which rule, the second how large the pieces are.
pub fn replay(input: &[u8]) {
    let [choice, size, trace @ ..] = input else { return };
    let rules: [&[&str]; 8] = [
        &[],
        &["--burst", "3"],
        &["--exact"],
        &["--exact", "--json"],
        &["--algorithm", "sliding_window_log"],
        &["--algorithm", "sliding_window_counter", "--json"],
        &["--algorithm", "fixed_window", "--anchor", "first-request"],
        &["--algorithm", "leaky_bucket", "--burst", "9"],
    ];
    let words = ["tallygate", "replay"].iter().chain(rules[usize::from(choice % 8)]);
    let Ok(Cli { command: Command::Replay(options) }) = Cli::try_parse_from(words) else {
        unreachable!("these are options of replay")
    };
    let rule = Rule::new(&options).expect("a rule");
    let whole = decided(&rule, trace, usize::MAX);
    assert_eq!(whole, decided(&rule, trace, usize::from(*size) + 1));
    let answers = whole.0.split(|byte| *byte == b'\n').count() - 1;
    let lines = trace.split(|byte| *byte == b'\n').count();
    assert!(answers <= lines, "{answers} answers to {lines} lines");
}

/// What was answered, and what was complained of.
fn decided(rule: &Rule, trace: &[u8], piece: usize) -> (Vec<u8>, Option<String>) {
    let mut answers = Vec::new();
    let lines = Lines::new(Pieces::new(trace.to_vec(), piece));
    let result = super::replay(rule, None, lines, &mut answers);
    (answers, result.err().map(|error| format!("{error:#}")))
}
