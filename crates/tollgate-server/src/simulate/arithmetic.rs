//! Why a request was decided as it was.

use serde::Serialize;
use tollgate_core::Kind;

use super::scenario::{Scenario, ScenarioError};

#[derive(Debug, Serialize)]
pub(crate) struct Arithmetic {
    event: u64,
}

pub(crate) fn arithmetic(
    _scenario: &Scenario,
    kind: Kind,
    _event: u64,
) -> Result<Arithmetic, ScenarioError> {
    Err(ScenarioError::NoSuchLane { kind })
}
