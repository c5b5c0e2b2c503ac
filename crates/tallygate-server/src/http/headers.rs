//! A decision in header fields: one serializer, several dialects.
//!
//! `X-RateLimit-*` is what most clients know. The IETF's draft (`draft-ietf-httpapi-ratelimit-headers-10`) still moves:
//! it is one arm of [`Dialect`]. Seconds are whole and rounded up, integers have the 15 digits that structured fields
//! allow, and a name that they cannot hold is percent-encoded.

use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue, RETRY_AFTER};
use tallygate::{Access, Decision, Limit, Source, Ticks};

use crate::gate::Answer;

use super::problem::Problem;
use super::query::Query;

/// A set of header fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// `X-RateLimit-Limit`, `-Remaining` and `-Reset`, the last in seconds from now.
    X,
    /// `RateLimit-Policy` and `RateLimit` of the IETF's tenth draft.
    Draft10,
}

impl Dialect {
    pub(super) const ALL: [Self; 2] = [Self::X, Self::Draft10];

    /// Those that the parameter `headers` asks for.
    pub(super) fn wanted(
        query: &Query,
        unless_said: &'static [Self],
    ) -> Result<&'static [Self], Problem> {
        match query.text("headers")? {
            None => Ok(unless_said),
            Some("all") => Ok(&Self::ALL),
            Some("x") => Ok(&[Self::X]),
            Some("draft") => Ok(&[Self::Draft10]),
            Some("none") => Ok(&[]),
            Some(other) => Err(Problem::bad(format!(
                "headers={other:?} is unknown; there is all, x, draft, none"
            ))),
        }
    }
}

/// A decision and what it was decided by.
pub(super) struct Quota<'a> {
    pub(super) policy: &'a str,
    pub(super) access: &'a Access,
    pub(super) decision: &'a Decision,
}

const X_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const X_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// The largest integer of a structured field.
const MAX_INTEGER: u64 = 999_999_999_999_999;

impl<'a> Quota<'a> {
    /// Returns what an answer says, if its question asked what the client gets.
    pub(super) fn of(answer: &'a Answer) -> Option<Self> {
        let Answer { entry, decided } = answer;
        let access = decided.access.as_ref()?;
        Some(Self { policy: &entry.name, access, decision: &decided.decision })
    }

    /// Writes what is left in some dialects, and when to come again.
    pub(super) fn write_all(&self, fields: &mut HeaderMap, dialects: &[Dialect]) {
        // Without an answer from the store, it is not known what is left.
        let is_unknown = matches!(
            self.decision.source,
            Source::FailedOpen | Source::FailedClosed | Source::Overloaded
        );
        if !is_unknown {
            for dialect in dialects {
                self.write(fields, *dialect);
            }
        }
        self.write_retry_after(fields);
    }

    fn write(&self, fields: &mut HeaderMap, dialect: Dialect) {
        match dialect {
            Dialect::X => {
                fields.insert(X_LIMIT, integer(self.decision.limit));
                fields.insert(X_REMAINING, integer(self.decision.remaining));
                fields.insert(X_RESET, integer(seconds(self.decision.reset_after)));
            }
            Dialect::Draft10 => {
                insert(fields, RATE_LIMIT_POLICY, self.policies());
                insert(fields, RATE_LIMIT, self.remaining());
            }
        }
    }

    /// When to come again, if that would do.
    fn write_retry_after(&self, fields: &mut HeaderMap) {
        if let Some(wait) = self.decision.retry_after.filter(|_| !self.decision.allowed) {
            fields.insert(RETRY_AFTER, integer(seconds(wait).max(1)));
        }
    }

    /// Every limit with what it holds, and in how many seconds that much is earned.
    fn policies(&self) -> String {
        let mut list = String::new();
        for limit in self.limits().iter().filter(|limit| !limit.is_shadow()) {
            if !list.is_empty() {
                list.push_str(", ");
            }
            let numbers = limit.numbers();
            list.push_str(&self.quoted(Some(limit)));
            push(&mut list, "q", numbers.burst);
            let earned = u128::from(numbers.burst) * u128::from(numbers.window.0);
            let earned = earned.div_ceil(u128::from(numbers.limit.max(1)));
            if earned >= u128::from(Ticks::PER_SECOND) {
                let earned = Ticks(u64::try_from(earned).unwrap_or(u64::MAX));
                push(&mut list, "w", seconds(earned));
            }
        }
        if list.is_empty() {
            list = self.quoted(None);
            push(&mut list, "q", self.decision.limit);
        }
        list
    }

    /// What is left of the scarcest limit, and in how many seconds there is more.
    fn remaining(&self) -> String {
        let limit = self.decided_by();
        let mut item = self.quoted(limit);
        push(&mut item, "r", self.decision.remaining);
        let more = if self.decision.allowed {
            let reset_after = self.decision.reset_after;
            let numbers = limit.map(Limit::numbers).filter(|numbers| numbers.kind.is_bucket());
            let one = numbers.map(|numbers| Ticks(numbers.window.0.div_ceil(numbers.limit.max(1))));
            Some(one.map_or(reset_after, |one| one.min(reset_after))).filter(|more| more.0 > 0)
        } else {
            self.decision.retry_after.map(|wait| wait.max(Ticks(1)))
        };
        if let Some(more) = more {
            push(&mut item, "t", seconds(more));
        }
        item
    }

    /// The limit that the decision is about: the one that refused, or the one with the least remaining.
    fn decided_by(&self) -> Option<&Limit> {
        self.limits().get(self.decision.decided_by()?)
    }

    fn limits(&self) -> &[Limit] {
        match self.access {
            Access::Limited(policy) => policy.limits(),
            Access::Unlimited | Access::Blocked => &[],
        }
    }

    /// The name of what refused.
    pub(super) fn violated(&self) -> String {
        self.name(self.decided_by())
    }

    /// The policy's name, and the limit's where there are several.
    fn name(&self, limit: Option<&Limit>) -> String {
        match limit {
            Some(limit) if self.limits().len() > 1 => format!("{}/{}", self.policy, limit.name()),
            _ => self.policy.to_owned(),
        }
    }

    fn quoted(&self, limit: Option<&Limit>) -> String {
        quoted(&self.name(limit))
    }
}

/// A string of a structured field.
fn quoted(name: &str) -> String {
    let mut out = String::with_capacity(name.len() + 2);
    out.push('"');
    for byte in name.bytes() {
        match byte {
            b'"' | b'\\' => out.extend(['\\', byte.into()]),
            b' '..=b'~' => out.push(byte.into()),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out.push('"');
    out
}

fn push(item: &mut String, parameter: &str, number: u64) {
    item.push(';');
    item.push_str(parameter);
    item.push('=');
    item.push_str(itoa::Buffer::new().format(number.min(MAX_INTEGER)));
}

fn seconds(span: Ticks) -> u64 {
    span.0.div_ceil(Ticks::PER_SECOND)
}

fn integer(number: u64) -> HeaderValue {
    HeaderValue::from(number.min(MAX_INTEGER))
}

fn insert(fields: &mut HeaderMap, name: HeaderName, value: String) {
    // Only what a field can hold was put in.
    if let Ok(value) = HeaderValue::try_from(value) {
        fields.insert(name, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallygate::{LimitBuilder, Policy};

    const DECISION: Decision = Decision {
        allowed: true,
        limit: 100,
        remaining: 99,
        retry_after: Some(Ticks::ZERO),
        reset_after: Ticks(600_000_000),
        delay: Ticks::ZERO,
        scarcest: Some(0),
        refused_by: None,
        shadow_refused_by: None,
        source: Source::Store,
    };

    fn shown(name: &str, access: &Access, decision: &Decision) -> Vec<(String, String)> {
        let quota = Quota { policy: name, access, decision };
        let mut fields = HeaderMap::new();
        quota.write(&mut fields, Dialect::X);
        quota.write(&mut fields, Dialect::Draft10);
        quota.write_retry_after(&mut fields);
        let text = |value: &HeaderValue| value.to_str().unwrap().to_owned();
        fields.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
    }

    #[track_caller]
    fn says(policy: Policy, decision: &Decision, expected: &[(&str, &str)]) {
        let shown = shown("api", &policy.into(), decision);
        for (name, value) in expected {
            let field = shown.iter().find(|(field, _)| field == name).map(|(_, value)| &**value);
            assert_eq!(field.unwrap_or("none"), *value, "{name} of {decision:?}");
        }
    }

    fn a_minute() -> LimitBuilder {
        Policy::token_bucket(100).per_minute()
    }

    #[test]
    fn a_request_that_passes_is_told_what_is_left() {
        says(
            a_minute().build().unwrap(),
            &DECISION,
            &[
                ("x-ratelimit-limit", "100"),
                ("x-ratelimit-remaining", "99"),
                ("x-ratelimit-reset", "1"),
                ("ratelimit-policy", "\"api\";q=100;w=60"),
                ("ratelimit", "\"api\";r=99;t=1"),
                ("retry-after", "none"),
            ],
        );
    }

    #[test]
    fn a11_a_refusal_is_never_told_to_come_at_once() {
        let refused = Decision { allowed: false, remaining: 0, ..DECISION };
        for (wait, seconds) in [(0, "1"), (1, "1"), (1_000_000_000, "1"), (1_000_000_001, "2")] {
            let refused = Decision { retry_after: Some(Ticks(wait)), ..refused };
            let limit = format!("\"api\";r=0;t={seconds}");
            let expected = [("retry-after", seconds), ("ratelimit", &*limit)];
            says(a_minute().build().unwrap(), &refused, &expected);
        }
        let never = Decision { retry_after: None, ..refused };
        let expected = [("retry-after", "none"), ("ratelimit", "\"api\";r=0")];
        says(a_minute().build().unwrap(), &never, &expected);
    }

    #[test]
    fn the_window_is_that_of_the_capacity_and_left_out_below_a_second() {
        let bursty = a_minute().burst(200).build().unwrap();
        let decision = Decision { limit: 200, remaining: 150, ..DECISION };
        says(bursty, &decision, &[("ratelimit-policy", "\"api\";q=200;w=120")]);
        let fast = Policy::token_bucket(1000).per_second().burst(100).build().unwrap();
        says(fast, &DECISION, &[("ratelimit-policy", "\"api\";q=100")]);
        let odd = Policy::token_bucket(2).per_second().burst(3).build().unwrap();
        says(odd, &DECISION, &[("ratelimit-policy", "\"api\";q=3;w=2")]);
    }

    #[test]
    fn each_of_several_limits_is_named_and_shadows_are_not() {
        let several = Policy::all_of(
            "api",
            [
                Policy::token_bucket(10).per_second().named("second"),
                Policy::fixed_window(1000).per_hour().named("hour"),
                Policy::fixed_window(1).per_hour().named("watching").shadow(),
            ],
        );
        let refused = Decision {
            allowed: false,
            limit: 1000,
            remaining: 0,
            retry_after: Some(Ticks(90 * Ticks::PER_SECOND)),
            refused_by: Some(1),
            ..DECISION
        };
        says(
            several.unwrap(),
            &refused,
            &[
                ("ratelimit-policy", "\"api/second\";q=10;w=1, \"api/hour\";q=1000;w=3600"),
                ("ratelimit", "\"api/hour\";r=0;t=90"),
            ],
        );
    }

    #[test]
    fn of_two_limits_with_the_same_capacity_the_scarcest_is_named() {
        let several = Policy::all_of(
            "api",
            [
                Policy::fixed_window(100).per_minute().named("minute"),
                Policy::fixed_window(100).per_hour().named("hour"),
            ],
        );
        let decision = Decision { scarcest: Some(1), remaining: 7, ..DECISION };
        says(several.unwrap(), &decision, &[("ratelimit", "\"api/hour\";r=7;t=1")]);
    }

    #[test]
    fn h5_no_name_breaks_out_of_its_field() {
        let policy = Access::from(a_minute().build().unwrap());
        let fields = shown("a\"b\\c;d\r\ne: f\u{e9}", &policy, &DECISION);
        assert_eq!(fields[4].1, "\"a\\\"b\\\\c;d%0D%0Ae: f%C3%A9\";r=99;t=1");
    }

    #[test]
    fn integers_have_at_most_15_digits() {
        let most = Decision { limit: u64::MAX, remaining: u64::MAX, ..DECISION };
        let fields = shown("api", &Access::Unlimited, &most);
        assert_eq!(fields[0].1, "999999999999999");
        assert_eq!(fields[3].1, "\"api\";q=999999999999999");
        assert_eq!(fields[4].1, "\"api\";r=999999999999999;t=1");
    }
}
