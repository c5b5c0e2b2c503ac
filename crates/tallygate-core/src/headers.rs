//! Decisions as HTTP header fields (feature `http`).
//!
//! This is the one place that writes rate-limit headers: the library, the middleware and the server use it. Most
//! clients know `X-RateLimit-*`. The IETF draft may still change, so it is one variant of [`Dialect`].
//!
//! Seconds are rounded up, integers have at most the 15 digits of structured fields, and names with other characters
//! than printable ASCII are percent-encoded.

use alloc::borrow::Cow;
use alloc::format;
use alloc::string::String;
use core::fmt::Write as _;

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue, RETRY_AFTER};

use crate::{Cost, Decision, Limit, Policy, Quota, Ticks};

/// A set of header fields that describe a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dialect {
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`, the last in seconds from now.
    X,
    /// `RateLimit-Policy` and `RateLimit` of `draft-ietf-httpapi-ratelimit-headers-10`.
    Draft10,
}

impl Dialect {
    /// All dialects.
    pub const ALL: [Self; 2] = [Self::X, Self::Draft10];
}

/// The name of a policy and its limits, as header fields show them.
///
/// It is made from a [`Policy`], from a name and a list of limits, or from a name alone. With a name alone, the
/// fields describe only the limit that the decision is about.
#[derive(Clone, Copy, Debug)]
pub struct NamedLimits<'a> {
    name: &'a str,
    limits: &'a [Limit],
}

impl<'a> From<&'a Policy> for NamedLimits<'a> {
    fn from(policy: &'a Policy) -> Self {
        Self { name: policy.name(), limits: policy.limits() }
    }
}

impl<'a> From<(&'a str, &'a [Limit])> for NamedLimits<'a> {
    fn from((name, limits): (&'a str, &'a [Limit])) -> Self {
        Self { name, limits }
    }
}

impl<'a> From<&'a str> for NamedLimits<'a> {
    fn from(name: &'a str) -> Self {
        Self { name, limits: &[] }
    }
}

const X_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const X_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// The largest integer of a structured field.
const MAX_INTEGER: u64 = 999_999_999_999_999;

/// The digits of the largest integer.
const MAX_DIGITS: usize = 15;

/// The length of most items, so that a string is allocated once.
const ITEM_BYTES: usize = 64;

impl Decision {
    /// Returns the header fields that describe the decision to an HTTP client.
    ///
    /// `Retry-After` is among them if the request was denied and a retry can succeed; it is at least 1 second. The
    /// other fields are left out if the remaining units are unknown because the store did not answer.
    ///
    /// ```
    /// use tallygate_core::headers::Dialect;
    /// use tallygate_core::{Algorithm, Decision, Policy, Tick};
    ///
    /// let policy = Policy::token_bucket(100).per_minute().named("api").build()?;
    /// let mut state = policy.initial(Tick(0));
    /// let decision: Decision = policy.decide(&mut state, Tick(0), 1);
    /// let headers = decision.headers(&policy, &[Dialect::X, Dialect::Draft10]);
    /// assert_eq!(headers["x-ratelimit-remaining"], "99");
    /// assert_eq!(headers["ratelimit-policy"], r#""api";q=100;w=60"#);
    /// assert_eq!(headers["ratelimit"], r#""api";r=99;t=1"#);
    /// # Ok::<(), tallygate_core::PolicyError>(())
    /// ```
    #[must_use]
    #[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
    pub fn headers<'a>(
        &self,
        policy: impl Into<NamedLimits<'a>>,
        dialects: &[Dialect],
    ) -> HeaderMap {
        let mut fields = HeaderMap::new();
        self.write_headers(policy, dialects, &mut fields);
        fields
    }

    /// Writes the fields of [`headers`](Self::headers) into an existing map, and replaces fields of the same name.
    #[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
    pub fn write_headers<'a>(
        &self,
        policy: impl Into<NamedLimits<'a>>,
        dialects: &[Dialect],
        fields: &mut HeaderMap,
    ) {
        let policy = policy.into();
        // Without an answer of the store, the remaining units are unknown.
        for dialect in dialects.iter().filter(|_| self.source.is_answered()) {
            match dialect {
                Dialect::X => {
                    fields.insert(X_LIMIT, integer(self.limit));
                    fields.insert(X_REMAINING, integer(self.remaining));
                    fields.insert(X_RESET, integer(seconds(self.reset_after)));
                }
                Dialect::Draft10 => {
                    insert(fields, RATE_LIMIT_POLICY, policy.quotas(self));
                    insert(fields, RATE_LIMIT, policy.remaining(self));
                }
            }
        }
        if let Some(wait) = self.retry_after.filter(|_| !self.allowed) {
            fields.insert(RETRY_AFTER, integer(seconds(wait).max(1)));
        }
    }
}

impl<'a> NamedLimits<'a> {
    /// Returns the name of the limit that a decision is about: the name of the policy, followed by `/` and the name
    /// of the limit if the policy has several.
    #[must_use]
    pub fn name_of_deciding(&self, decision: &Decision) -> Cow<'a, str> {
        self.name(self.deciding(decision))
    }

    fn deciding(&self, decision: &Decision) -> Option<&'a Limit> {
        self.limits.get(decision.decided_by()?)
    }

    fn name(&self, limit: Option<&Limit>) -> Cow<'a, str> {
        match limit {
            Some(limit) if self.limits.len() > 1 => {
                format!("{}/{}", self.name, limit.name()).into()
            }
            _ => self.name.into(),
        }
    }

    /// Returns the capacity of every enforced limit, and the seconds in which the capacity is earned.
    fn quotas(&self, decision: &Decision) -> String {
        let mut list = String::with_capacity(ITEM_BYTES);
        for limit in self.limits.iter().filter(|limit| !limit.is_shadow()) {
            if !list.is_empty() {
                list.push_str(", ");
            }
            push_quoted(&mut list, &self.name(Some(limit)));
            push_quota(&mut list, limit.numbers().burst, Some(limit.quota()));
        }
        if list.is_empty() {
            push_quoted(&mut list, self.name);
            // The capacity is that of the scarcest limit, and the quota may be that of another limit.
            let is_of_scarcest = decision.decided_by() == decision.scarcest;
            push_quota(&mut list, decision.limit, decision.quota.filter(|_| is_of_scarcest));
        }
        list
    }

    /// Returns the remaining units, and the seconds until there are more.
    fn remaining(&self, decision: &Decision) -> String {
        let limit = self.deciding(decision);
        let mut item = String::with_capacity(ITEM_BYTES);
        push_quoted(&mut item, &self.name(limit));
        push(&mut item, "r", decision.remaining);
        let more = if decision.allowed {
            let reset_after = decision.reset_after;
            let bucket = limit.filter(|limit| limit.numbers().kind.is_bucket()).map(Limit::quota);
            let one_unit = bucket.map(|quota| Ticks(quota.window.0.div_ceil(quota.amount.max(1))));
            Some(one_unit.map_or(reset_after, |one| one.min(reset_after))).filter(|more| more.0 > 0)
        } else {
            decision.retry_after.map(|wait| wait.max(Ticks(1)))
        };
        if let Some(more) = more {
            push(&mut item, "t", seconds(more));
        }
        item
    }
}

/// Writes a string of a structured field.
fn push_quoted(out: &mut String, name: &str) {
    out.push('"');
    if name.bytes().all(|byte| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\') {
        out.push_str(name);
    } else {
        for byte in name.bytes() {
            match byte {
                b'"' | b'\\' => out.extend(['\\', byte.into()]),
                b' '..=b'~' => out.push(byte.into()),
                _ => push_percent(out, byte),
            }
        }
    }
    out.push('"');
}

fn push_percent(out: &mut String, byte: u8) {
    // Writing to a string does not fail.
    let _ = write!(out, "%{byte:02X}");
}

fn push_quota(item: &mut String, capacity: Cost, quota: Option<Quota>) {
    push(item, "q", capacity);
    if let Some(Quota { amount, window }) = quota {
        let earned = u128::from(capacity) * u128::from(window.0);
        let earned = earned.div_ceil(u128::from(amount.max(1)));
        if earned >= u128::from(Ticks::PER_SECOND) {
            push(item, "w", seconds(Ticks(u64::try_from(earned).unwrap_or(u64::MAX))));
        }
    }
}

/// Writes a parameter. Every response has some, so this does without the machinery of `format`.
fn push(item: &mut String, parameter: &str, number: u64) {
    item.push(';');
    item.push_str(parameter);
    item.push('=');
    let (mut rest, mut digits, mut from) =
        (number.min(MAX_INTEGER), [b'0'; MAX_DIGITS], MAX_DIGITS);
    loop {
        from -= 1;
        digits[from] += u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    item.extend(digits[from..].iter().map(|digit| char::from(*digit)));
}

fn seconds(span: Ticks) -> u64 {
    span.0.div_ceil(Ticks::PER_SECOND)
}

fn integer(number: u64) -> HeaderValue {
    HeaderValue::from(number.min(MAX_INTEGER))
}

fn insert(fields: &mut HeaderMap, name: HeaderName, value: String) {
    // Only valid characters were written.
    if let Ok(value) = HeaderValue::try_from(value) {
        fields.insert(name, value);
    }
}
