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

/// A decision and the access of the client.
pub(super) struct Quota<'a> {
    pub(super) policy: &'a str,
    pub(super) access: &'a Access,
    pub(super) decision: &'a Decision,
}

impl<'a> Quota<'a> {
    /// Returns the quota of an answer that includes the access of the client.
    pub(super) fn of(answer: &'a Answer) -> Option<Self> {
        let Answer { entry, decided } = answer;
        let access = decided.access.as_ref()?;
        Some(Self { policy: &entry.name, access, decision: &decided.decision })
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
