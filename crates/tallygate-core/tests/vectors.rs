//! The test vectors: traces with their expected decisions.

use tallygate_core::{Policy, Ticks, simulate};
use tallygate_testkit::{Expected, decision_cases};

#[test]
fn every_vector_agrees_in_every_field() {
    let cases = decision_cases();
    assert!(cases.len() >= 36, "some vectors are missing");
    for (number, case) in cases.iter().enumerate() {
        let limit = Policy::of(case.kind(), case.limit)
            .per(Ticks(case.window))
            .burst(case.burst)
            .limit()
            .expect("the limit is valid");
        let decisions: Vec<Expected> =
            simulate(limit, case.requests()).map(Expected::from).collect();
        assert_eq!(decisions, case.decisions, "case {number}: {}", case.algorithm);
    }
}
