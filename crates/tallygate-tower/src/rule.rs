//! A rule: which requests a limiter decides on, by which key, for which cost.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use tallygate::{Cost, Limit};

use crate::key::{Key, KeyBytes, MissingKey};
use crate::limiter::{Checked, Limiter};
use crate::settle::Settle;

/// One limiter, and how to use it for a request.
///
/// ```
/// use http::{Method, StatusCode};
/// use tallygate::Policy;
/// use tallygate_tower::{Key, RateLimit, Rule, Settle};
///
/// let general = Rule::new(Policy::token_bucket(100).per_minute().named("api").build()?, Key::peer());
/// // Only failed logins count.
/// let login = Rule::new(Policy::sliding_window_log(5).per_minute().named("login").build()?, Key::peer())
///     .when(|request| request.method == Method::POST && request.uri.path() == "/login")
///     .settle(Settle::refund_if(|response| response.status != StatusCode::UNAUTHORIZED));
/// let layer = RateLimit::all_of([general, login]);
/// # Ok::<(), tallygate::PolicyError>(())
/// ```
#[derive(Clone)]
pub struct Rule {
    pub(crate) limiter: Limiter,
    pub(crate) key: Key,
    pub(crate) when_missing: WhenMissing,
    pub(crate) applies: Option<RulePredicate>,
    pub(crate) cost: Option<CostOf>,
    pub(crate) tier: Option<TierOf>,
    pub(crate) settle: Option<Settle>,
    pub(crate) settle_within: Duration,
    pub(crate) is_shadow: bool,
}

pub(crate) type RulePredicate = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;
type CostOf = Arc<dyn Fn(&Parts) -> Cost + Send + Sync>;
type TierOf = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;

/// The treatment of a request that does not have the key of a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WhenMissing {
    /// The request is denied: with status 400 if the client can correct it, otherwise with 500.
    #[default]
    Deny,
    /// The rule does not apply to the request.
    Allow,
    /// All such requests share one quota, that of the empty key.
    Share,
}

/// How long a reservation can be settled, unless the rule says otherwise.
const SETTLE_WITHIN: Duration = Duration::from_secs(600);

impl Rule {
    /// Applies a limiter to all requests, with a cost of 1 each.
    #[must_use]
    pub fn new(limiter: impl Into<Limiter>, key: Key) -> Self {
        Self {
            limiter: limiter.into(),
            key,
            when_missing: WhenMissing::default(),
            applies: None,
            cost: None,
            tier: None,
            settle: None,
            settle_within: SETTLE_WITHIN,
            is_shadow: false,
        }
    }

    /// Sets what happens to requests without the key. Default: they are denied.
    #[must_use]
    pub const fn when_missing(mut self, when_missing: WhenMissing) -> Self {
        self.when_missing = when_missing;
        self
    }

    /// Applies the rule only to requests for which the function returns true, such as those of one route.
    #[must_use]
    pub fn when(mut self, applies: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.applies = Some(Arc::new(applies));
        self
    }

    /// Sets the cost of a request. With [`settle`](Self::settle) it is the estimate that is charged first.
    #[must_use]
    pub fn cost(mut self, cost: impl Fn(&Parts) -> Cost + Send + Sync + 'static) -> Self {
        self.cost = Some(Arc::new(cost));
        self
    }

    /// Sets the tier of a request. The limiter must have [`Tiers`](tallygate::Tiers); a tier that it does not have is
    /// an error of the application, and the request is denied with status 500.
    #[must_use]
    pub fn tier<T: Into<String>>(
        mut self,
        tier: impl Fn(&Parts) -> Option<T> + Send + Sync + 'static,
    ) -> Self {
        self.tier = Some(Arc::new(move |parts| tier(parts).map(Into::into)));
        self
    }

    /// Corrects the charge when the response is known: the cost is reserved first, and settled then.
    #[must_use]
    pub fn settle(mut self, settle: Settle) -> Self {
        self.settle = Some(settle);
        self
    }

    /// Sets how long a request may take until it is settled. After that, the estimate stays charged. Default: 10
    /// minutes.
    #[must_use]
    pub const fn settle_within(mut self, time: Duration) -> Self {
        self.settle_within = time;
        self
    }

    /// Makes the rule a shadow: it decides and charges as if it were enforced, but a request that it would deny is
    /// only reported, in an event with `shadow = true`. Use it to try out a limit.
    #[must_use]
    pub const fn shadow(mut self) -> Self {
        self.is_shadow = true;
        self
    }

    /// Returns the check that the rule requires for a request; `None` if the rule does not apply.
    pub(crate) fn check(
        &self,
        index: usize,
        parts: &Parts,
    ) -> Option<Result<RuleCheck, MissingKey>> {
        if self.applies.as_ref().is_some_and(|applies| !applies(parts)) {
            return None;
        }
        let key = match (self.key.bytes(parts), self.when_missing) {
            (Ok(key), _) => key,
            (Err(_), WhenMissing::Share) => KeyBytes::EMPTY,
            (Err(_), WhenMissing::Allow) => return None,
            (Err(missing), WhenMissing::Deny) => return Some(Err(missing)),
        };
        let cost = self.cost.as_ref().map_or(1, |cost| cost(parts));
        let tier = self.tier.as_ref().and_then(|tier| tier(parts));
        Some(Ok(RuleCheck { rule: index, key, cost, tier }))
    }

    /// Logs one event if the rule or one of its shadow limits denied a request.
    pub(crate) fn report(&self, checked: &Checked) {
        let decision = &checked.decision;
        if decision.allowed && decision.shadow_denied_by.is_none() {
            return;
        }
        let policy = self.limiter.name();
        let limit = |index: Option<usize>| {
            let limits = self.limiter.limits(checked);
            index.and_then(|index| limits.get(index)).map(Limit::name).unwrap_or_default()
        };
        let source = decision.source.name();
        if !decision.allowed {
            let limit = limit(decision.decided_by());
            let retry_after_ms = decision.retry_after.map(|wait| wait.as_duration().as_millis());
            let shadow = self.is_shadow;
            tracing::info!(policy, limit, source, retry_after_ms, shadow, "request denied");
        } else {
            let limit = limit(decision.shadow_denied_by);
            tracing::info!(policy, limit, source, shadow = true, "request denied");
        }
    }
}

/// A check of the limiter of a rule.
#[derive(Debug)]
pub(crate) struct RuleCheck {
    /// The index of the rule.
    pub(crate) rule: usize,
    pub(crate) key: KeyBytes,
    pub(crate) cost: Cost,
    pub(crate) tier: Option<String>,
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rule")
            .field("limiter", &self.limiter)
            .field("key", &self.key)
            .field("when_missing", &self.when_missing)
            .field("settle", &self.settle)
            .field("is_shadow", &self.is_shadow)
            .finish_non_exhaustive()
    }
}
