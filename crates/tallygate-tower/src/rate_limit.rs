//! The rate limit of a service: rules that are decided together, and how denials are answered.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use ipnet::IpNet;
use tallygate::clock::Alarm;
use tallygate::headers::Dialect;
use tallygate::{Ask, Ticks};

use crate::address::ClientAddress;
use crate::few::Few;
use crate::in_flight::{InFlightLimit, InFlightRule};
use crate::key::{Key, KeyBytes, MissingKey};
use crate::limiter::{Limiter, LimiterError, answer};
use crate::respond::Denial;
use crate::rule::{Rule, RuleCheck, RulePredicate};
use crate::timer::Timer;
use crate::verdict::{Charges, Reason, Verdict};

/// Limits the requests of a service. It is a tower [`Layer`](tower_layer::Layer).
///
/// Cloning is cheap, and all clones share their limiters: every connection of a server counts against the same quotas.
///
/// ```
/// use axum::{Router, routing::get};
/// use tallygate::Policy;
/// use tallygate_tower::{Key, RateLimit};
///
/// let policy = Policy::token_bucket(100).per_minute().burst(20).named("api").build()?;
/// let app: Router = Router::new()
///     .route("/", get(|| async { "hello" }))
///     .layer(RateLimit::new(policy, Key::peer()));
/// # Ok::<(), tallygate::PolicyError>(())
/// ```
///
/// Frameworks without tower call [`check`](Self::check) instead.
#[derive(Clone)]
pub struct RateLimit {
    pub(crate) settings: Arc<Settings>,
}

#[derive(Clone)]
pub(crate) struct Settings {
    /// The rules that are enforced, and then the shadows.
    pub(crate) rules: Vec<Rule>,
    in_flight: Vec<InFlightRule>,
    exempt: Vec<RulePredicate>,
    pub(crate) dialects: Vec<Dialect>,
    pub(crate) respond: Option<Respond>,
    on_store_error: OnStoreError,
    max_delay: Option<Duration>,
    pub(crate) timer: Timer,
    /// Whether all limiters answer at once.
    is_immediate: bool,
}

pub(crate) type Respond = Arc<dyn Fn(&Denial<'_>) -> Response<Bytes> + Send + Sync>;

/// The treatment of a request if a store returns an error instead of a decision.
///
/// A store on Redis that is unavailable does not return an error: its own failure setting decides. An error means, for
/// example, that a store in memory is full and is set to reject new keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnStoreError {
    /// The request is denied with status 503.
    #[default]
    Deny,
    /// The request is allowed, and an event is logged.
    Allow,
}

impl RateLimit {
    /// Limits all requests by one limiter, with a cost of 1 each.
    #[must_use]
    pub fn new(limiter: impl Into<Limiter>, key: Key) -> Self {
        Self::all_of([Rule::new(limiter, key)])
    }

    /// Limits requests by several rules: a request is allowed only if all rules that apply to it allow it, and it is
    /// charged to all of them or to none.
    ///
    /// The rules are asked in order. If a later one denies, the charges of the earlier ones are returned, so another
    /// request may be denied in between that would otherwise have been allowed; never the other way around. Put the
    /// rule that denies most often first.
    #[must_use]
    pub fn all_of(rules: impl IntoIterator<Item = Rule>) -> Self {
        let mut rules: Vec<_> = rules.into_iter().collect();
        rules.sort_by_key(|rule| rule.is_shadow);
        let is_immediate = rules.iter().all(|rule| rule.limiter.backend.is_immediate());
        let settings = Settings {
            rules,
            in_flight: Vec::new(),
            exempt: Vec::new(),
            dialects: Dialect::ALL.to_vec(),
            respond: None,
            on_store_error: OnStoreError::default(),
            max_delay: None,
            timer: Timer::default(),
            is_immediate,
        };
        Self { settings: Arc::new(settings) }
    }

    /// Limits the requests that are in flight at the same time, by a key. A request holds its place until the body of
    /// its response has ended. A connection that was upgraded, such as a WebSocket, holds none.
    #[must_use]
    pub fn in_flight(mut self, limit: impl Into<InFlightLimit>, key: Key) -> Self {
        let InFlightLimit(places) = limit.into();
        let settings = self.settings();
        settings.is_immediate &= places.is_immediate();
        settings.in_flight.push(InFlightRule { places, key });
        self
    }

    /// Exempts requests for which the function returns true: they are neither checked nor charged.
    #[must_use]
    pub fn exempt(mut self, is_exempt: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.settings().exempt.push(Arc::new(is_exempt));
        self
    }

    /// Exempts clients whose address is in one of the networks, such as monitoring.
    #[must_use]
    pub fn exempt_networks(
        self,
        address: ClientAddress,
        networks: impl IntoIterator<Item = IpNet>,
    ) -> Self {
        let networks: Vec<_> = networks.into_iter().collect();
        self.exempt(move |parts| {
            let client = address.of(parts);
            client.is_some_and(|client| networks.iter().any(|net| net.contains(&client)))
        })
    }

    /// Exempts requests for these paths, such as health checks.
    #[must_use]
    pub fn exempt_paths<P: Into<String>>(self, paths: impl IntoIterator<Item = P>) -> Self {
        let paths: Vec<String> = paths.into_iter().map(Into::into).collect();
        self.exempt(move |parts| paths.iter().any(|path| path == parts.uri.path()))
    }

    /// Sets the header fields of responses. Default: all dialects. An empty list leaves out everything except for
    /// `Retry-After`.
    ///
    /// If the response has such fields already, because there is another layer within this one, the fields of the draft
    /// list the quotas of both, and the others show the one that denied the request or has the least remaining.
    #[must_use]
    pub fn headers(mut self, dialects: impl IntoIterator<Item = Dialect>) -> Self {
        self.settings().dialects = dialects.into_iter().collect();
        self
    }

    /// Sets the response to denied requests. The header fields of the quota are added to it, unless it has them.
    ///
    /// gRPC requests get a gRPC status in any case.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::Response;
    /// use tallygate::Policy;
    /// use tallygate_tower::{Key, RateLimit};
    ///
    /// let policy = Policy::token_bucket(100).per_minute().build()?;
    /// let limit = RateLimit::new(policy, Key::peer()).respond_with(|denial| {
    ///     let mut response = Response::new(Bytes::from_static(b"slow down\n"));
    ///     *response.status_mut() = denial.status();
    ///     response
    /// });
    /// # Ok::<(), tallygate::PolicyError>(())
    /// ```
    #[must_use]
    pub fn respond_with(
        mut self,
        respond: impl Fn(&Denial<'_>) -> Response<Bytes> + Send + Sync + 'static,
    ) -> Self {
        self.settings().respond = Some(Arc::new(respond));
        self
    }

    /// Sets what happens if a store fails. Default: the request is denied with status 503.
    #[must_use]
    pub fn on_store_error(mut self, on_store_error: OnStoreError) -> Self {
        self.settings().on_store_error = on_store_error;
        self
    }

    /// Delays each allowed request as long as its [leaky bucket](tallygate::Kind::LeakyBucket) says, so that requests
    /// reach the service at an even rate.
    ///
    /// A request that would have to wait longer than `max_delay` is denied and not charged. Without this setting, the
    /// layer delays nothing. If the client disconnects while its request waits, the charge stays, so that the rate of the
    /// others stays even.
    #[must_use]
    pub fn delay_up_to(mut self, max_delay: Duration) -> Self {
        self.settings().max_delay = Some(max_delay);
        self
    }

    /// Sets the clock that determines when [delays](Self::delay_up_to) end, for tests. Default: the system's clock.
    #[must_use]
    pub fn clock(mut self, clock: impl Alarm + Send + Sync + 'static) -> Self {
        self.settings().timer = Timer::new(clock);
        self
    }

    /// Decides on a request: for frameworks without tower. The layer does the same.
    ///
    /// With limiters in memory, the future is ready when it is first polled. Then:
    ///
    /// 1. If the request is denied, send [`Verdict::response`].
    /// 2. Otherwise serve it, after [`Verdict::delayed`] if you use [`delay_up_to`](Self::delay_up_to).
    /// 3. Call [`Verdict::respond`] with the head of the response, and keep the [guard](crate::BodyGuard) that it
    ///    returns until the body has ended.
    ///
    /// ```
    /// # tallygate::block_on(async {
    /// use http::{Request, Response};
    /// use tallygate::Policy;
    /// use tallygate_tower::{Key, RateLimit};
    ///
    /// let limit = RateLimit::new(Policy::token_bucket(1).per_hour().build()?, Key::everyone());
    /// let (request, ()) = Request::get("/").body(())?.into_parts();
    ///
    /// let verdict = limit.check(&request).await;
    /// assert!(verdict.is_allowed());
    /// let (mut response, body) = Response::new("hello").into_parts();
    /// let guard = verdict.respond(&mut response).await;
    /// assert_eq!(response.headers["x-ratelimit-remaining"], "0");
    /// drop(guard); // the body has ended
    ///
    /// let denied = limit.check(&request).await;
    /// assert_eq!(denied.response().unwrap().headers()["retry-after"], "3600");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    pub async fn check(&self, parts: &Parts) -> Verdict {
        let mut checks = RequestChecks::of(parts);
        self.add_checks(parts, &mut checks);
        let mut verdict = Verdict::new(self.clone(), &checks);
        self.decide(&checks, &mut verdict).await;
        verdict
    }

    fn settings(&mut self) -> &mut Settings {
        Arc::make_mut(&mut self.settings)
    }

    /// Returns whether decisions are ready at once.
    pub(crate) fn is_immediate(&self) -> bool {
        self.settings.is_immediate
    }

    /// Adds the checks that a request needs. Afterwards, the request itself is not needed any more.
    pub(crate) fn add_checks(&self, parts: &Parts, checks: &mut RequestChecks) {
        if self.settings.exempt.iter().any(|is_exempt| is_exempt(parts)) {
            return;
        }
        for (index, rule) in self.settings.in_flight.iter().enumerate() {
            match rule.key.bytes(parts) {
                Ok(key) => checks.places.push((index, key)),
                Err(missing) => checks.missing = checks.missing.take().or(Some(missing)),
            }
        }
        for (index, rule) in self.settings.rules.iter().enumerate() {
            match rule.check(index, parts) {
                None => {}
                Some(Ok(check)) => checks.rates.push(check),
                // A shadow denies nothing.
                Some(Err(_)) if rule.is_shadow => {}
                Some(Err(missing)) => {
                    checks.missing = checks.missing.take().or(Some(missing));
                }
            }
        }
    }

    /// Decides. If the future is dropped, what it has charged is returned.
    pub(crate) async fn decide(&self, checks: &RequestChecks, verdict: &mut Verdict) {
        if let Some(missing) = &checks.missing {
            return verdict.deny(Reason::MissingKey(missing.clone()));
        }
        // Places come first, because releasing a place undoes it completely.
        for (index, key) in checks.places.iter() {
            match answer!(self.settings.in_flight[*index].places.enter(key)) {
                Ok(Some(place)) => verdict.places.push(place),
                Ok(None) => return verdict.deny(Reason::InFlight),
                Err(error) => {
                    if let Some(reason) = self.reason(error) {
                        return verdict.deny(reason);
                    }
                }
            }
        }
        let enforced = |check: &&RuleCheck| !self.settings.rules[check.rule].is_shadow;
        let may_return =
            self.settings.max_delay.is_some() || checks.rates.iter().filter(enforced).count() > 1;
        let mut charges = Charges::default();
        for check in checks.rates.iter() {
            let rule = &self.settings.rules[check.rule];
            let ask = Ask::new(&check.key).cost(check.cost).tier(check.tier.as_deref());
            let backend = &rule.limiter.backend;
            let mut reservation = None;
            let decided = if rule.settle.is_some() || may_return {
                answer!(backend.reserve(ask, rule.settle_within)).map(|charged| {
                    reservation = charged.reservation;
                    verdict.checked.push((check.rule, charged.checked));
                    reservation.is_some()
                })
            } else {
                answer!(backend.check(ask, check.rule, &mut verdict.checked))
            };
            let is_allowed = match decided {
                Ok(is_allowed) => is_allowed,
                Err(error) => match self.reason(error).filter(|_| !rule.is_shadow) {
                    Some(reason) => {
                        charges.cancel().await;
                        return verdict.deny(reason);
                    }
                    None => continue,
                },
            };
            if let Some((_, checked)) = verdict.checked.last() {
                rule.report(checked);
            }
            if rule.is_shadow {
                verdict.checked.pop();
            }
            if is_allowed {
                charges.add(check.rule, rule, reservation);
            } else if !rule.is_shadow {
                charges.cancel().await;
                return verdict.deny(Reason::Limited);
            }
        }
        let delay = verdict.longest_delay();
        if let Some(max_delay) = self.settings.max_delay.map(Ticks::from)
            && delay > max_delay
        {
            charges.cancel().await;
            return verdict.deny_delay(delay, max_delay);
        }
        verdict.charges = charges.kept();
    }

    /// Returns why an error denies the request; `None` if it does not.
    fn reason(&self, error: LimiterError) -> Option<Reason> {
        let is_allowed = matches!(error, LimiterError::Store(_))
            && self.settings.on_store_error == OnStoreError::Allow;
        if is_allowed {
            tracing::warn!(%error, "rate limit check failed; allowing the request");
            return None;
        }
        if !matches!(error, LimiterError::KeyTooLong { .. }) {
            tracing::error!(%error, "rate limit check failed; denying the request");
        }
        Some(Reason::Failed(error))
    }

    /// Returns whether allowed requests may have to wait.
    pub(crate) fn delays(&self) -> bool {
        self.settings.max_delay.is_some()
    }
}

/// The checks that a request needs.
#[derive(Debug)]
pub(crate) struct RequestChecks {
    pub(crate) is_grpc: bool,
    missing: Option<MissingKey>,
    /// The indices of the limits on requests in flight, and their keys.
    places: Few<(usize, KeyBytes)>,
    rates: Few<RuleCheck>,
}

impl RequestChecks {
    /// Returns no checks, and whether the request is one of gRPC.
    #[inline]
    pub(crate) fn of(parts: &Parts) -> Self {
        let content_type = parts.headers.get(CONTENT_TYPE).map(http::HeaderValue::as_bytes);
        Self {
            is_grpc: content_type.is_some_and(|kind| kind.starts_with(b"application/grpc")),
            missing: None,
            places: Few::new(),
            rates: Few::new(),
        }
    }
}

impl From<Rule> for RateLimit {
    fn from(rule: Rule) -> Self {
        Self::all_of([rule])
    }
}

impl fmt::Debug for RateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit")
            .field("rules", &self.settings.rules)
            .field("in_flight", &self.settings.in_flight)
            .field("dialects", &self.settings.dialects)
            .field("on_store_error", &self.settings.on_store_error)
            .finish_non_exhaustive()
    }
}
