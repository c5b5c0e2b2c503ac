//! The verdict on a request, and what is left to do until its response has ended.

use std::borrow::Cow;
use std::fmt;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http::{Extensions, Response, response};
use tallygate::headers::NamedLimits;
use tallygate::reservation::Reservation;
use tallygate::{Cost, Decision, Ticks};

use crate::few::Few;
use crate::in_flight::Place;
use crate::key::MissingKey;
use crate::limiter::{Backend, Checked, LimiterError, answer};
use crate::rate_limit::{RateLimit, RequestChecks};
use crate::respond::{self, Denial};
use crate::rule::Rule;
use crate::settle::{Meter, SettleTime};

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
/// The fields of the draft are lists, so they can show several rules.
const LISTS: [HeaderName; 2] = [HeaderName::from_static("ratelimit-policy"), RATE_LIMIT];

/// The decision about a request, and the work to do with its response.
#[must_use = "ignoring a verdict limits nothing"]
pub struct Verdict {
    pub(crate) limit: RateLimit,
    pub(crate) is_grpc: bool,
    reason: Option<Reason>,
    /// The decisions of the rules that are enforced, by the index of their rule.
    pub(crate) checked: Few<(usize, Checked)>,
    /// The charges that the response will correct.
    pub(crate) charges: Vec<Charge>,
    pub(crate) places: Vec<Place>,
}

/// The reason for which a request is denied.
#[derive(Debug)]
#[non_exhaustive]
pub enum Reason {
    /// A limit denied it, or the failure setting of an unavailable store.
    Limited,
    /// All places for requests in flight are taken.
    InFlight,
    /// It does not have the key of a rule.
    MissingKey(MissingKey),
    /// There is no decision.
    Failed(LimiterError),
}

impl Verdict {
    /// Makes a verdict that allows the request.
    #[inline]
    pub(crate) const fn new(limit: RateLimit, checks: &RequestChecks) -> Self {
        Self {
            limit,
            is_grpc: checks.is_grpc,
            reason: None,
            checked: Few::new(),
            charges: Vec::new(),
            places: Vec::new(),
        }
    }

    pub(crate) fn deny(&mut self, reason: Reason) {
        match &reason {
            Reason::InFlight => {
                tracing::info!(policy = "in flight", source = "store", "request denied");
            }
            Reason::MissingKey(missing) if missing.is_correctable() => {
                tracing::info!(reason = %missing, "request denied");
            }
            Reason::MissingKey(missing) => tracing::error!(reason = %missing, "request denied"),
            Reason::Failed(error @ LimiterError::KeyTooLong { .. }) => {
                tracing::info!(reason = %error, "request denied");
            }
            // These are logged where they happen.
            Reason::Limited | Reason::Failed(_) => {}
        }
        self.reason = Some(reason);
        self.places.clear();
    }

    /// Denies a request that was allowed with a delay above the bound.
    pub(crate) fn deny_delay(&mut self, delay: Ticks, max_delay: Ticks) {
        for (rule, checked) in self.checked.iter_mut() {
            let decision = &mut checked.decision;
            if decision.delay == delay {
                decision.allowed = false;
                decision.retry_after = Some(Ticks(delay.0 - max_delay.0));
                self.limit.settings.rules[*rule].report(checked);
            }
        }
        self.deny(Reason::Limited);
    }

    /// Returns whether the request is allowed.
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        self.reason.is_none()
    }

    /// Returns how long the request must wait before it is served, by its leaky bucket. It is 0 without
    /// [`delay_up_to`](RateLimit::delay_up_to).
    #[must_use]
    pub fn delay(&self) -> Duration {
        if self.is_allowed() && self.limit.delays() {
            self.longest_delay().as_duration()
        } else {
            Duration::ZERO
        }
    }

    /// Waits for the [delay](Self::delay).
    pub async fn delayed(&self) {
        let delay = self.delay();
        if delay > Duration::ZERO {
            let timer = &self.limit.settings.timer;
            timer.sleep_until(timer.after(delay)).await;
        }
    }

    pub(crate) fn longest_delay(&self) -> Ticks {
        let delays = self.checked.iter().map(|(_, checked)| checked.decision.delay);
        delays.max().unwrap_or(Ticks::ZERO)
    }

    /// Returns the decision that matters most: the denial, or the one with the least share of its quota left. `None` if
    /// no rule applied.
    #[must_use]
    pub fn decision(&self) -> Option<&Decision> {
        self.deciding().map(|(_, checked)| &checked.decision)
    }

    /// Returns the denial, if the request is denied.
    #[must_use]
    pub const fn denial(&self) -> Option<Denial<'_>> {
        match &self.reason {
            Some(reason) => Some(Denial { verdict: self, reason }),
            None => None,
        }
    }

    /// Returns the response to send if the request is denied.
    #[must_use]
    pub fn response(&self) -> Option<Response<Bytes>> {
        self.denial().map(|denial| respond::response(&denial))
    }

    /// Returns the meter that the handler counts the actual cost in, if a rule [settles by
    /// it](crate::Settle::by_meter). All such rules share it. The layer puts it into the extensions of the request.
    #[must_use]
    pub fn meter(&self) -> Option<&Meter> {
        self.charges.iter().find_map(|charge| charge.meter.as_ref())
    }

    /// Puts the meter into the extensions of the request, or uses the one that an outer layer has put there: the handler
    /// counts in one meter only.
    pub(crate) fn insert_meter(&mut self, extensions: &mut Extensions) {
        if self.charges.is_empty() {
            return;
        }
        let mut meters = self.charges.iter_mut().filter_map(|charge| charge.meter.as_mut());
        match extensions.get::<Meter>() {
            Some(outer) => meters.for_each(|meter| *meter = outer.clone()),
            None => drop(meters.next().map(|meter| extensions.insert(meter.clone()))),
        }
    }

    /// Settles the charges that depend on the head of the response, adds the header fields of the quota to it, and
    /// returns the guard to keep until the body has ended.
    pub async fn respond(mut self, response: &mut response::Parts) -> BodyGuard {
        self.settle(response).await;
        self.add_headers(&mut response.headers);
        self.into_guard()
    }

    /// Settles the charges that depend on the head of the response.
    pub async fn settle(&mut self, response: &response::Parts) {
        for charge in &mut self.charges {
            let Some(actual) = charge.actual(response) else { continue };
            let Some(mut reservation) = charge.reservation.take() else { continue };
            match answer!(charge.backend.settle(&mut reservation, actual)) {
                Ok(decision) => {
                    let shown = self.checked.iter_mut().find(|(rule, _)| *rule == charge.rule);
                    if let Some((_, shown)) = shown {
                        shown.decision.remaining = decision.remaining;
                        shown.decision.reset_after = decision.reset_after;
                    }
                }
                Err(error) => {
                    let policy = charge.backend.name();
                    tracing::warn!(policy, %error, "settlement failed; the estimate stays charged");
                }
            }
        }
    }

    /// Returns whether [`settle`](Self::settle) has anything to do.
    pub(crate) fn settles_by_response(&self) -> bool {
        self.charges.iter().any(|charge| matches!(charge.when, Some(SettleTime::Response(_))))
    }

    /// Returns what is left to do when the body has ended.
    pub fn into_guard(mut self) -> BodyGuard {
        self.take_guard().unwrap_or_default()
    }

    /// Takes what is left to do when the body has ended; `None` if nothing is.
    pub(crate) fn take_guard(&mut self) -> Option<BodyGuard> {
        self.charges.retain(Charge::is_open);
        if self.charges.is_empty() && self.places.is_empty() {
            return None;
        }
        let (charges, places) = (mem::take(&mut self.charges), mem::take(&mut self.places));
        Some(BodyGuard { charges, places, bytes: 0 })
    }

    /// Returns the header fields of the quota, and `Retry-After` if the request is denied.
    #[must_use]
    pub fn headers(&self) -> HeaderMap {
        let mut fields = HeaderMap::new();
        self.write_headers(&mut fields);
        fields
    }

    /// Adds the header fields to a response that may already have some, of a layer within this one or of the service.
    pub(crate) fn add_headers(&self, fields: &mut HeaderMap) {
        // Comparing the few names takes fewer instructions than two lookups, which hash these names.
        if !fields.keys().any(|name| *name == REMAINING || *name == RATE_LIMIT) {
            return self.write_headers(fields);
        }
        let own = self.headers();
        for name in LISTS {
            for value in own.get_all(&name) {
                fields.append(&name, value.clone());
            }
        }
        // These describe one limit: the one that denied the request, or the one with the least remaining.
        let remaining = |fields: &HeaderMap| -> Option<Cost> {
            fields.get(REMAINING)?.to_str().ok()?.parse().ok()
        };
        let is_scarcer = remaining(fields).is_none_or(|inner| remaining(&own) < Some(inner));
        if is_scarcer && !fields.contains_key(RETRY_AFTER) {
            for name in [LIMIT, REMAINING, RESET] {
                if let Some(value) = own.get(&name) {
                    fields.insert(name, value.clone());
                }
            }
        }
    }

    pub(crate) fn write_headers(&self, fields: &mut HeaderMap) {
        let dialects = &self.limit.settings.dialects;
        let deciding = self.deciding();
        if let Some((rule, deciding)) = deciding {
            deciding.decision.write_headers(self.named(*rule, deciding), dialects, fields);
        }
        for other in self.checked.iter() {
            if deciding.is_some_and(|deciding| std::ptr::eq(deciding, other)) {
                continue;
            }
            let (rule, checked) = other;
            let shown = checked.decision.headers(self.named(*rule, checked), dialects);
            for name in LISTS {
                if let Some(value) = shown.get(&name) {
                    fields.append(name, value.clone());
                }
            }
        }
        if let Some(wait) = self.denial().and_then(|denial| denial.retry_after()) {
            let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
            fields.entry(RETRY_AFTER).or_insert(HeaderValue::from(seconds.max(1)));
        }
    }

    /// Returns the rule and decision that deny the request, or that have the least share of their quota left.
    fn deciding(&self) -> Option<&(usize, Checked)> {
        // A denial by a limit is the last decision that was made, except for one by a delay.
        let denial = self.checked.iter().find(|(_, checked)| !checked.decision.allowed);
        // Compares remaining/limit without a division.
        let by_share = |(_, one): &&(usize, Checked), (_, other): &&(usize, Checked)| {
            let (one, other) = (&one.decision, &other.decision);
            let product = |left: &Decision, right: &Decision| {
                u128::from(left.remaining) * u128::from(right.limit.max(1))
            };
            product(one, other).cmp(&product(other, one))
        };
        denial.or_else(|| self.checked.iter().min_by(by_share))
    }

    fn named<'a>(&'a self, rule: usize, checked: &'a Checked) -> NamedLimits<'a> {
        self.limit.settings.rules[rule].limiter.named_limits(checked)
    }

    /// Returns the name of the deciding policy.
    pub(crate) fn policy(&self) -> Option<&str> {
        let (rule, _) = self.deciding()?;
        Some(self.limit.settings.rules[*rule].limiter.name())
    }

    /// Returns the name of the policy, with that of the deciding limit if there are several.
    pub(crate) fn violated(&self) -> Option<Cow<'_, str>> {
        let (rule, checked) = self.deciding()?;
        Some(self.named(*rule, checked).name_of_deciding(&checked.decision))
    }
}

impl fmt::Debug for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verdict")
            .field("reason", &self.reason)
            .field("checked", &self.checked)
            .finish_non_exhaustive()
    }
}

/// A charge that can be corrected.
pub(crate) struct Charge {
    /// The index of its rule.
    rule: usize,
    backend: Arc<dyn Backend>,
    /// `None` after it was settled.
    reservation: Option<Reservation>,
    /// `None` if the response changes nothing.
    when: Option<SettleTime>,
    meter: Option<Meter>,
}

impl Charge {
    /// Returns the actual cost, if the head of the response determines it.
    fn actual(&self, response: &response::Parts) -> Option<Cost> {
        match self.when.as_ref()? {
            SettleTime::Response(actual) => actual(response),
            SettleTime::Bytes(_) | SettleTime::Meter => None,
        }
    }

    /// Returns whether it is settled when the body has ended.
    const fn is_open(&self) -> bool {
        self.reservation.is_some()
            && matches!(self.when, Some(SettleTime::Bytes(_) | SettleTime::Meter))
    }

    fn settle_at_end(self, bytes: u64) {
        let actual = match &self.when {
            None | Some(SettleTime::Response(_)) => None,
            Some(SettleTime::Bytes(cost)) => Some(cost(bytes)),
            Some(SettleTime::Meter) => self.meter.as_ref().and_then(Meter::total),
        };
        if let Some((reservation, actual)) = self.reservation.zip(actual) {
            self.backend.settle_in_background(reservation, actual);
        }
    }
}

/// The charges of a decision that is not complete. If it is dropped, they are returned.
#[derive(Default)]
pub(crate) struct Charges(Vec<Charge>);

impl Charges {
    pub(crate) fn add(&mut self, index: usize, rule: &Rule, reservation: Option<Reservation>) {
        if reservation.is_some() {
            let when = rule.settle.as_ref().map(|settle| settle.0.clone());
            let known = || self.0.iter().find_map(|charge| charge.meter.clone());
            let meter =
                matches!(when, Some(SettleTime::Meter)).then(|| known().unwrap_or_default());
            let backend = rule.limiter.backend.clone();
            self.0.push(Charge { rule: index, backend, reservation, when, meter });
        }
    }

    /// Returns all charges.
    pub(crate) async fn cancel(&mut self) {
        while let Some(charge) = self.0.last_mut() {
            if let Some(reservation) = &mut charge.reservation {
                // If a charge cannot be returned, the client is allowed less, never more.
                let _ = answer!(charge.backend.settle(reservation, 0));
            }
            self.0.pop();
        }
    }

    /// Keeps the charges, and returns the ones that the response will correct.
    pub(crate) fn kept(mut self) -> Vec<Charge> {
        let mut charges = mem::take(&mut self.0);
        charges.retain(|charge| charge.when.is_some());
        charges
    }
}

impl Drop for Charges {
    fn drop(&mut self) {
        for charge in mem::take(&mut self.0) {
            if let Some(reservation) = charge.reservation {
                charge.backend.settle_in_background(reservation, 0);
            }
        }
    }
}

/// A guard that settles charges and releases places in flight when the body of a response has ended.
///
/// It does so when it is dropped, also if the body was cut off.
#[must_use = "keep it until the body has ended"]
#[derive(Default)]
pub struct BodyGuard {
    charges: Vec<Charge>,
    places: Vec<Place>,
    bytes: u64,
}

impl BodyGuard {
    /// Counts bytes of the body, for [`Settle::by_bytes`](crate::Settle::by_bytes).
    pub const fn sent(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Returns whether there is nothing left to do.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.charges.is_empty() && self.places.is_empty()
    }
}

impl Drop for BodyGuard {
    fn drop(&mut self) {
        for charge in mem::take(&mut self.charges) {
            charge.settle_at_end(self.bytes);
        }
    }
}

impl fmt::Debug for BodyGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BodyGuard")
            .field("charges", &self.charges.len())
            .field("places", &self.places.len())
            .field("bytes", &self.bytes)
            .finish()
    }
}
