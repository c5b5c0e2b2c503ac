//! Traces: however they are cut into reads, the answers and the complaints are the same.

use tallygate_core::{Anchor, Kind};

use super::Options;
use super::engine::Rule;
use super::lines::Lines;
use crate::fuzzing::Pieces;

/// Traces in any pieces. The first byte says by which rule, the second how large the pieces are.
pub fn replay(input: &[u8]) {
    let [choice, size, trace @ ..] = input else { return };
    let none = Options::default;
    let by = |kind| Options { algorithm: Some(kind), ..none() };
    let options = match choice % 8 {
        0 => none(),
        1 => Options { burst: Some(3), ..none() },
        2 => Options { exact: true, ..none() },
        3 => Options { exact: true, json: true, ..none() },
        4 => by(Kind::SlidingWindowLog),
        5 => Options { json: true, ..by(Kind::SlidingWindowCounter) },
        6 => Options { anchor: Some(Anchor::FirstRequest), ..by(Kind::FixedWindow) },
        _ => Options { burst: Some(9), ..by(Kind::LeakyBucket) },
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
