//! Decisions in header fields. The library writes them ([`tallygate::headers`]); a request selects the dialects.

use hyper::HeaderMap;
use tallygate::Decision;
use tallygate::headers::{Dialect, NamedLimits};
use tallygate::tiers::Access;

use crate::gate::Answer;

use super::problem::Problem;
use super::query::Query;

/// Returns the dialects that the parameter `headers` selects.
pub(super) fn wanted_dialects(
    query: &Query,
    default: &'static [Dialect],
) -> Result<&'static [Dialect], Problem> {
    match query.text("headers")? {
        None => Ok(default),
        Some("all") => Ok(&Dialect::ALL),
        Some("x") => Ok(&[Dialect::X]),
        Some("draft") => Ok(&[Dialect::Draft10]),
        Some("none") => Ok(&[]),
        Some(other) => {
            Err(Problem::bad(format!("headers={other:?} is unknown; use all, x, draft or none")))
        }
    }
}

/// A decision and the access of the client by the rule that decided, as header fields show them.
pub(super) struct DecisionHeaders<'a> {
    pub(super) policy: &'a str,
    pub(super) access: &'a Access,
    pub(super) decision: &'a Decision,
}

impl<'a> DecisionHeaders<'a> {
    pub(super) fn of(Answer { entry, decision, access }: &'a Answer) -> Self {
        Self { policy: &entry.name, access, decision }
    }

    /// Writes the fields of the dialects, and `Retry-After`.
    pub(super) fn write_all(&self, fields: &mut HeaderMap, dialects: &[Dialect]) {
        self.decision.write_headers(self.limits(), dialects, fields);
    }

    /// Returns the name of the limit that denied the request.
    pub(super) fn violated(&self) -> String {
        self.limits().name_of_deciding(self.decision).into_owned()
    }

    fn limits(&self) -> NamedLimits<'a> {
        (self.policy, self.access.limits()).into()
    }
}
