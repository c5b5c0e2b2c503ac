//! Decisions as HTTP header fields (feature `http`).
//!
//! This is the one place that writes rate-limit headers: the library, the middleware and the server use it. Most
//! clients know `X-RateLimit-*`. The IETF draft may still change, so it is one variant of [`Dialect`].
//!
//! Seconds are rounded up, integers have at most the 15 digits of structured fields, and names with other characters
//! than printable ASCII are percent-encoded.

use alloc::borrow::Cow;
use alloc::format;
use alloc::vec::Vec;

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

    const fn fields(self) -> usize {
        match self {
            Self::X => 3,
            Self::Draft10 => 2,
        }
    }
}

/// The name of a policy and its limits, as header fields show them.
///
/// It is made from a [`Policy`], from a name and a list of limits, or from a name alone. With a name alone, the
/// fields describe only the limit that the decision is about.
#[derive(Clone, Copy, Debug)]
pub struct NamedLimits<'a> {
    name: &'a str,
    limits: &'a [Limit],
    values: Option<&'a Values>,
}

/// The values of header fields that do not depend on the decision. All responses share them: see
/// [`NamedLimits::with_values`].
#[derive(Clone, Debug)]
pub struct Values {
    /// `RateLimit-Policy`, if it is the same for all decisions of the policy: it is, unless no limit is enforced.
    quotas: Option<HeaderValue>,
    /// `X-RateLimit-Limit` for the capacity of each limit.
    capacities: Vec<(Cost, HeaderValue)>,
}

impl<'a> From<&'a Policy> for NamedLimits<'a> {
    fn from(policy: &'a Policy) -> Self {
        (policy.name(), policy.limits()).into()
    }
}

impl<'a> From<(&'a str, &'a [Limit])> for NamedLimits<'a> {
    fn from((name, limits): (&'a str, &'a [Limit])) -> Self {
        Self { name, limits, values: None }
    }
}

impl<'a> From<&'a str> for NamedLimits<'a> {
    fn from(name: &'a str) -> Self {
        (name, &[][..]).into()
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

/// Longer values are built on the heap.
const SHORT_VALUE_BYTES: usize = 96;

impl Decision {
    /// Returns the header fields that describe the decision to an HTTP client.
    ///
    /// `Retry-After` is among them if the request was denied and a retry can succeed; it is at least 1 second. The
    /// other fields are left out if the remaining units are unknown because the store did not answer, and if the client is
    /// [unlimited](Self::is_unlimited).
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
        // Together with one more, which is `Retry-After`, or the length that the server adds: the map grows at most once.
        fields.reserve(dialects.iter().map(|dialect| dialect.fields()).sum::<usize>() + 1);
        // Without an answer of the store, the remaining units are unknown; an unlimited client has no quota to describe.
        let has_quota = self.source.is_answered() && !self.is_unlimited();
        for dialect in dialects.iter().filter(|_| has_quota) {
            match dialect {
                Dialect::X => {
                    fields.insert(X_LIMIT, policy.capacity_value(self.limit));
                    fields.insert(X_REMAINING, integer(self.remaining));
                    fields.insert(X_RESET, integer(seconds(self.reset_after)));
                }
                Dialect::Draft10 => {
                    fields.insert(RATE_LIMIT_POLICY, policy.policy_value(self));
                    fields.insert(RATE_LIMIT, policy.remaining(self));
                }
            }
        }
        if let Some(wait) = self.retry_after.filter(|_| !self.allowed) {
            fields.insert(RETRY_AFTER, integer(seconds(wait).max(1)));
        }
    }
}

impl<'a> NamedLimits<'a> {
    /// Returns the values that do not depend on the decision.
    #[must_use]
    pub fn values(&self) -> Values {
        let capacity = |limit: &Limit| {
            let capacity = limit.numbers().burst;
            (capacity, integer(capacity))
        };
        Values { quotas: self.quotas(), capacities: self.limits.iter().map(capacity).collect() }
    }

    /// Sets the values that do not depend on the decision, so that they are not computed for each response: the result
    /// of [`values`](Self::values) for the same name and limits.
    #[must_use]
    pub const fn with_values(mut self, values: &'a Values) -> Self {
        self.values = Some(values);
        self
    }

    /// Returns the value of `X-RateLimit-Limit`.
    fn capacity_value(&self, capacity: Cost) -> HeaderValue {
        let mut known = self.values.iter().flat_map(|values| &values.capacities);
        let known = known.find(|(known, _)| *known == capacity);
        known.map_or_else(|| integer(capacity), |(_, value)| value.clone())
    }

    /// Returns the value of `RateLimit-Policy`.
    fn policy_value(&self, decision: &Decision) -> HeaderValue {
        let quotas = match self.values {
            Some(values) => values.quotas.clone(),
            None => self.quotas(),
        };
        quotas.unwrap_or_else(|| self.quota_of(decision))
    }

    /// Returns the capacity of every enforced limit, and the seconds in which the capacity is earned; `None` if no limit
    /// is enforced.
    fn quotas(&self) -> Option<HeaderValue> {
        let mut list = ValueBuffer::default();
        for limit in self.limits.iter().filter(|limit| !limit.is_shadow()) {
            if !list.is_empty() {
                list.push(b", ");
            }
            list.push_name(&self.name(Some(limit)));
            list.push_quota(limit.numbers().burst, Some(limit.quota()));
        }
        (!list.is_empty()).then(|| list.into_value())
    }

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

    /// Returns the capacity and quota of a decision that no enforced limit made.
    fn quota_of(&self, decision: &Decision) -> HeaderValue {
        let mut item = ValueBuffer::default();
        item.push_name(self.name);
        // The capacity is that of the scarcest limit, and the quota may be that of another limit.
        let is_of_scarcest = decision.decided_by() == decision.scarcest;
        item.push_quota(decision.limit, decision.quota.filter(|_| is_of_scarcest));
        item.into_value()
    }

    /// Returns the remaining units, and the seconds until there are more.
    fn remaining(&self, decision: &Decision) -> HeaderValue {
        let limit = self.deciding(decision);
        let mut item = ValueBuffer::default();
        item.push_name(&self.name(limit));
        item.push_number(b";r=", decision.remaining);
        let more = if decision.allowed {
            let reset_after = decision.reset_after;
            let bucket = limit.filter(|limit| limit.numbers().kind.is_bucket()).map(Limit::quota);
            let one_unit = bucket.map(|quota| Ticks(quota.window.0.div_ceil(quota.amount.max(1))));
            Some(one_unit.map_or(reset_after, |one| one.min(reset_after))).filter(|more| more.0 > 0)
        } else {
            decision.retry_after.map(|wait| wait.max(Ticks(1)))
        };
        if let Some(more) = more {
            item.push_number(b";t=", seconds(more));
        }
        item.into_value()
    }
}

/// The value of a field while it is written: on the stack, and on the heap if it is long. Every response has such
/// values, so this also does without the machinery of `format`.
struct ValueBuffer {
    short: [u8; SHORT_VALUE_BYTES],
    length: usize,
    /// The whole value, if it is long.
    long: Vec<u8>,
}

impl Default for ValueBuffer {
    fn default() -> Self {
        Self { short: [0; SHORT_VALUE_BYTES], length: 0, long: Vec::new() }
    }
}

impl ValueBuffer {
    const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Inlined, because most of what is written are constants of a few bytes.
    #[inline]
    fn push(&mut self, bytes: &[u8]) {
        let end = self.length + bytes.len();
        match self.short.get_mut(self.length..end) {
            Some(space) => space.copy_from_slice(bytes),
            None => self.push_to_heap(bytes),
        }
        self.length = end;
    }

    #[cold]
    fn push_to_heap(&mut self, bytes: &[u8]) {
        if self.long.is_empty() {
            self.long.extend_from_slice(&self.short[..self.length]);
        }
        self.long.extend_from_slice(bytes);
    }

    /// Writes a name as a string of a structured field.
    fn push_name(&mut self, name: &str) {
        self.push(b"\"");
        if name.bytes().all(|byte| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\') {
            self.push(name.as_bytes());
        } else {
            for byte in name.bytes() {
                match byte {
                    b'"' | b'\\' => self.push(&[b'\\', byte]),
                    b' '..=b'~' => self.push(&[byte]),
                    _ => self.push(&percent_encoded(byte)),
                }
            }
        }
        self.push(b"\"");
    }

    fn push_quota(&mut self, capacity: Cost, quota: Option<Quota>) {
        self.push_number(b";q=", capacity);
        if let Some(Quota { amount, window }) = quota {
            let earned = u128::from(capacity) * u128::from(window.0);
            let earned = earned.div_ceil(u128::from(amount.max(1)));
            if earned >= u128::from(Ticks::PER_SECOND) {
                self.push_number(b";w=", seconds(Ticks(u64::try_from(earned).unwrap_or(u64::MAX))));
            }
        }
    }

    /// Writes a number after the name of its parameter.
    #[inline]
    fn push_number(&mut self, parameter: &[u8], number: u64) {
        self.push(parameter);
        let digits = Digits::of(number);
        self.push(digits.bytes());
    }

    fn into_value(self) -> HeaderValue {
        let bytes = if self.long.is_empty() { &self.short[..self.length] } else { &self.long };
        // Only valid characters were written.
        HeaderValue::from_bytes(bytes).unwrap_or(HeaderValue::from_static(""))
    }
}

fn percent_encoded(byte: u8) -> [u8; 3] {
    let digit = |number: u8| if number < 10 { b'0' + number } else { b'A' + number - 10 };
    [b'%', digit(byte >> 4), digit(byte & 15)]
}

/// The decimal digits of a number, at most those of the largest integer.
struct Digits {
    bytes: [u8; MAX_DIGITS],
    from: usize,
}

impl Digits {
    fn of(number: u64) -> Self {
        let mut rest = number.min(MAX_INTEGER);
        let mut digits = Self { bytes: [b'0'; MAX_DIGITS], from: MAX_DIGITS };
        loop {
            let (three, zeros) = three_digits(rest % 1000);
            digits.bytes[digits.from - 3..digits.from].copy_from_slice(three);
            rest /= 1000;
            if rest == 0 {
                digits.from -= 3 - zeros;
                return digits;
            }
            digits.from -= 3;
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[self.from..]
    }
}

/// The numbers below 1000 with three digits each.
static SMALL_NUMBERS: [u8; 3000] = {
    // The number before, of which the last digit counts up.
    let (mut digits, mut number, mut at) = ([b'0'; 3000], *b"000", 0);
    while at < 3000 {
        digits[at] = number[0];
        digits[at + 1] = number[1];
        digits[at + 2] = number[2];
        at += 3;
        let mut digit = 2;
        while number[digit] == b'9' && digit > 0 {
            number[digit] = b'0';
            digit -= 1;
        }
        number[digit] += 1;
    }
    digits
};

/// Returns the three digits of a number below 1000, and how many leading zeros they have.
fn three_digits(number: u64) -> (&'static [u8], usize) {
    let at = 3 * usize::try_from(number).unwrap_or(usize::MAX);
    let zeros = match number {
        0..10 => 2,
        10..100 => 1,
        _ => 0,
    };
    (&SMALL_NUMBERS[at..at + 3], zeros)
}

fn seconds(span: Ticks) -> u64 {
    span.0.div_ceil(Ticks::PER_SECOND)
}

/// Returns the value of a number. Small ones, such as most times, are not allocated.
fn integer(number: u64) -> HeaderValue {
    if number < 1000 {
        let (digits, zeros) = three_digits(number);
        return HeaderValue::from_static(
            core::str::from_utf8(&digits[zeros..]).unwrap_or_default(),
        );
    }
    // Digits are valid.
    HeaderValue::from_bytes(Digits::of(number).bytes()).unwrap_or(HeaderValue::from_static(""))
}
