//! Fuzz target for replays: results and errors do not depend on how the input is split into reads.

#![allow(clippy::missing_panics_doc, reason = "a fuzzer looks for failed assertions")]

use tallygate_core::{Anchor, Kind};

use super::Options;
use super::engine::RuleTemplate;
use super::lines::Lines;
use crate::fuzzing::Pieces;

/// Replays a trace whole and in pieces. The first byte selects the rule, the second the size of the pieces.
pub fn replay(input: &[u8]) {
    let [choice, size, trace @ ..] = input else { return };
    let defaults = Options::default;
    let with_algorithm = |kind| Options { algorithm: Some(kind), ..defaults() };
    let options = match choice % 8 {
        0 => defaults(),
        1 => Options { burst: Some(3), ..defaults() },
        2 => Options { exact: true, ..defaults() },
        3 => Options { exact: true, json: true, ..defaults() },
        4 => with_algorithm(Kind::SlidingWindowLog),
        5 => Options { json: true, ..with_algorithm(Kind::SlidingWindowCounter) },
        6 => Options { anchor: Some(Anchor::FirstRequest), ..with_algorithm(Kind::FixedWindow) },
        _ => Options { burst: Some(9), ..with_algorithm(Kind::LeakyBucket) },
    };
    let rule = RuleTemplate::new(&options).expect("the options are valid");
    let whole = run(&rule, trace, usize::MAX);
    assert_eq!(whole, run(&rule, trace, usize::from(*size) + 1));
    let answers = whole.0.split(|byte| *byte == b'\n').count() - 1;
    let lines = trace.split(|byte| *byte == b'\n').count();
    assert!(answers <= lines, "{answers} results for {lines} lines");
}

/// Returns the results and the error of a replay.
fn run(rule: &RuleTemplate, trace: &[u8], piece: usize) -> (Vec<u8>, Option<String>) {
    let mut answers = Vec::new();
    let lines = Lines::new(Pieces::new(trace.to_vec(), piece));
    let result = super::replay(rule, None, lines, &mut answers);
    (answers, result.err().map(|error| format!("{error:#}")))
}
