//! The cases that came with their answers.

use tallygate_core::{Policy, Ticks, simulate};
use tallygate_testkit::{Expected, decision_cases};

#[test]
fn every_vector_is_answered_in_every_field() {
    let cases = decision_cases();
    assert!(cases.len() >= 36, "the vectors are all there");
    for (number, case) in cases.iter().enumerate() {
        let limit = Policy::of(case.kind(), case.limit)
            .per(Ticks(case.window))
            .burst(case.burst)
            .limit()
            .expect("a valid limit");
        let decisions: Vec<Expected> =
            simulate(limit, case.requests()).map(Expected::from).collect();
        assert_eq!(decisions, case.decisions, "case {number}: {}", case.algorithm);
    }
}
