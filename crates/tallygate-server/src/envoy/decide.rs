//! Decides a request: finds the rule of each descriptor, and checks all of them together.
//!
//! By default, all descriptors are charged, or none is. With `charge = "always"`, each is charged by itself, as in
//! envoyproxy/ratelimit. Limits in shadow or quota mode and refunds never deny. They are applied for allowed requests only
//! (with `charge = "always"`, for all), after the decision, so that a failure of theirs has no effect on it.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::future::join_all;
use prost_types::value::Kind as ValueKind;
use prost_types::{Duration, ListValue, Struct, Value};
use tallygate::algorithm::{Op, Timed};
use tallygate::policy::Anchor;
use tallygate::store::Store as _;
use tallygate::tiers::{Access, ClientRule, RuleSource as _};
use tallygate::{Cost, Decision, Kind, Limit, Quota, Source, Ticks};
use tallygate_redis::JointAsk;

use super::messages::Entry;
use super::{
    Code, CurrentLimit, Decided, DescriptorStatus, EnvoyError, RateLimitRequest, RateLimitResponse,
    TightestLimit, request_limit,
};
use crate::config::{
    Charge, EnvoyConfig, EnvoyHeaders, EnvoyLimit, EnvoyMode, EnvoyRule, EnvoySettings, Limits,
    MAX_ENTRIES, Unit, override_key,
};
use crate::gate::{Gate, GateError, Policies, ServedPolicy};
use crate::turn::TimeSlice;

/// Decides a request.
///
/// # Errors
///
/// The request is malformed or too large, there are no rules, or the store is unavailable and a rule leaves the decision to
/// Envoy.
pub(crate) async fn decide(gate: &Gate, request: &RateLimitRequest) -> Result<Decided, EnvoyError> {
    let policies = gate.in_force();
    check_size(request, &policies.limits)?;
    let Some(envoy) = policies.envoy.clone() else {
        return Err(EnvoyError::NotConfigured);
    };
    let mut targets = targets(request, &envoy, &policies).await?;
    apply_replaces(&mut targets);
    let EnvoySettings { charge, headers: wanted_headers, shadow_mode, .. } = envoy.settings;
    decide_enforced(gate, &mut targets, charge).await?;
    let is_over_limit = targets.iter().any(Target::is_over_limit);
    decide_observed(gate, &mut targets, charge, is_over_limit).await;
    for target in &targets {
        target.count_details(gate);
    }
    if charge == Charge::AllOrNothing {
        targets.iter().filter_map(Target::limited).for_each(LimitedTarget::warn_of_free_responses);
    }
    let mut tightest = match wanted_headers {
        EnvoyHeaders::None => None,
        EnvoyHeaders::X | EnvoyHeaders::Draft | EnvoyHeaders::All => tightest(&targets),
    };
    if shadow_mode && let Some(tightest) = &mut tightest {
        // The request is allowed, so the header fields must not say when to retry.
        tightest.decision.allowed = true;
    }
    let response = response(&targets, is_over_limit && !shadow_mode);
    Ok(Decided { response, wanted_headers, tightest })
}

fn check_size(request: &RateLimitRequest, limits: &Limits) -> Result<(), EnvoyError> {
    let (count, most) = (request.descriptors.len(), limits.max_all_items);
    if request.domain.is_empty() {
        return Err(EnvoyError::Invalid(
            "the domain is empty; send the name of a domain".to_owned(),
        ));
    }
    if count == 0 {
        return Err(EnvoyError::Invalid(
            "the list of descriptors is empty; send at least one".to_owned(),
        ));
    }
    if count > most {
        return Err(too_many_descriptors(most));
    }
    if request.descriptors.iter().any(|descriptor| descriptor.entries.len() > MAX_ENTRIES) {
        return Err(too_many_entries());
    }
    Ok(())
}

pub(super) fn too_many_descriptors(most: usize) -> EnvoyError {
    EnvoyError::TooLarge(format!(
        "the request has more than {most} descriptors (`max_all_items` in `[limits]`)"
    ))
}

pub(super) fn too_many_entries() -> EnvoyError {
    EnvoyError::TooLarge(format!("a descriptor has more than {MAX_ENTRIES} entries"))
}

/// A descriptor of the request, and the limit that applies to it.
enum Target {
    /// No rule matches, or another limit replaces it.
    Unmatched,
    /// The configuration says `unlimited`.
    Unlimited {
        rule: Arc<EnvoyRule>,
    },
    Limited(Box<LimitedTarget>),
}

struct LimitedTarget {
    policy: Arc<ServedPolicy>,
    key: Vec<u8>,
    hits: Cost,
    /// Whether the hits are returned instead of charged.
    is_refund: bool,
    /// The configured rule, if one matches.
    rule: Option<Arc<EnvoyRule>>,
    /// Whether the request contains its own limit.
    has_request_limit: bool,
    /// The rule of the key. It is read once, so that the response describes the rule that decided: an override can be set
    /// at any time.
    client_rule: ClientRule,
    limit: EnvoyLimit,
    mode: EnvoyMode,
    /// The name for detailed metrics.
    metric: Option<String>,
    /// `None` until it is decided, and if a limit in shadow or quota mode could not be decided.
    decided: Option<Timed>,
}

impl Target {
    fn limited(&self) -> Option<&LimitedTarget> {
        match self {
            Self::Limited(target) => Some(target),
            Self::Unmatched | Self::Unlimited { .. } => None,
        }
    }

    fn rule(&self) -> Option<&Arc<EnvoyRule>> {
        match self {
            Self::Unmatched => None,
            Self::Unlimited { rule } => Some(rule),
            // A limit of the request has no name, and replaces nothing.
            Self::Limited(target) if target.has_request_limit => None,
            Self::Limited(target) => target.rule.as_ref(),
        }
    }

    /// Returns whether it denies the request.
    fn is_over_limit(&self) -> bool {
        self.limited().is_some_and(|target| target.can_deny() && target.exceeds())
    }

    fn count_details(&self, gate: &Gate) {
        if let Some(LimitedTarget { metric: Some(name), decided: Some(decided), .. }) =
            self.limited()
        {
            gate.metrics.envoy_details.count(name, decided.decision.allowed);
        }
    }
}

impl LimitedTarget {
    fn decision(&self) -> Option<Decision> {
        self.decided.map(|decided| decided.decision)
    }

    fn can_deny(&self) -> bool {
        self.mode == EnvoyMode::Enforced && !self.is_refund
    }

    fn exceeds(&self) -> bool {
        !self.is_refund && self.decision().is_some_and(|decision| !decision.allowed)
    }

    /// Warns if a charge was denied under a rule that requests look at first, as Envoy does for the costs of responses: it
    /// charged nothing, so the next look is allowed again.
    fn warn_of_free_responses(&self) {
        let Some(rule) = &self.rule else { return };
        if self.hits == 0 {
            rule.is_looked_at.store(true, Ordering::Relaxed);
        } else if self.exceeds() && rule.is_looked_at.swap(false, Ordering::Relaxed) {
            tracing::warn!(
                policy = %rule.policy,
                "requests look at this limit with 0 hits, and a charge above the remaining quota charged nothing; if Envoy \
                 charges the costs of responses (`apply_on_stream_done`), set `charge = \"always\"` in `[envoy]`, or no \
                 request is denied"
            );
        }
    }

    fn fails_without_store(&self) -> bool {
        self.rule.as_ref().is_none_or(|rule| rule.fails_without_store)
    }

    /// Returns whether every request is denied. A look at such a limit is allowed.
    fn is_blocked(&self) -> bool {
        self.limit.requests_per_unit == 0
    }

    fn ask(&self) -> tallygate::Ask<'_> {
        tallygate::Ask::new(&self.key).cost(self.hits)
    }

    fn part(&self) -> Result<JointAsk<'_>, GateError> {
        let rule = self.client_rule.clone();
        Ok(JointAsk::of_any_under(&self.policy.limiter, rule, self.ask())?)
    }

    /// Carries out an operation on the key.
    async fn apply(&self, op: Op) -> Result<Timed, GateError> {
        let limiter = &self.policy.limiter;
        let observed = |rule: &ClientRule, timed: Timed| {
            if let Op::Check(cost) = op {
                limiter.observe(rule, &self.key, cost, &timed.decision, timed.at);
            }
            timed
        };
        Ok(limiter.store().apply_with(&self.client_rule, &self.key, op, None, observed).await?)
    }

    /// Returns whether the hits would be allowed, and the present state.
    async fn look(&self) -> Result<Timed, GateError> {
        let Timed { mut decision, at } = self.apply(Op::Peek(self.hits)).await?;
        // A peek answers as a check would, and an allowed check lowers the remaining units by its cost.
        let charged = if decision.allowed { self.hits } else { 0 };
        decision.remaining = decision.remaining.saturating_add(charged);
        Ok(Timed { decision, at })
    }

    /// Returns the time until the quota is full. A fixed window ends also if nothing of it was used.
    fn until_reset(&self, Timed { decision, at }: Timed) -> Ticks {
        let window = match self.client_rule.access(at) {
            Access::Blocked => Some(self.limit.quota().window),
            access => {
                let numbers = access.limits().iter().map(Limit::numbers);
                let starts_by_clock = numbers.filter(|numbers| {
                    numbers.kind == Kind::FixedWindow && numbers.anchor == Anchor::Clock
                });
                starts_by_clock.map(|numbers| numbers.window).max()
            }
        };
        match window {
            Some(window)
                if decision.reset_after == Ticks::ZERO && decision.source.is_answered() =>
            {
                let passed = i128::from(at.0).rem_euclid(window.0.into());
                Ticks(window.0 - u64::try_from(passed).unwrap_or_default())
            }
            _ => decision.reset_after,
        }
    }

    /// Charges the hits, also if they exceed the limit.
    async fn charge_always(&self, gate: &Gate) -> Result<Timed, GateError> {
        let decided = gate.check_parts(vec![self.part()?]).await?.parts.into_iter().next();
        let Some(Timed { mut decision, at }) = decided.flatten() else {
            return Err(GateError::Store("a single key was not decided".into()));
        };
        if !decision.allowed && decision.source.is_answered() && !self.is_blocked() {
            let charged = self.apply(Op::Force(i128::from(self.hits))).await?.decision;
            decision.remaining = charged.remaining;
            decision.reset_after = charged.reset_after;
        }
        Ok(Timed { decision, at })
    }

    /// Returns the numbers of the limit that decided, if one did: the configured limit, unless the key has an override
    /// or the rules have changed since the configuration was read.
    fn deciding_limit(&self) -> Option<CurrentLimit> {
        let EnvoyLimit { requests_per_unit, unit, unit_multiplier } = self.limit;
        let unit = unit as i32;
        let unit_multiplier = Some(unit_multiplier).filter(|multiplier| *multiplier != 1);
        let configured =
            CurrentLimit { requests_per_unit, unit, unit_multiplier, ..CurrentLimit::default() };
        let Some(decision) = self.decision().filter(|decision| decision.source.is_answered())
        else {
            return Some(configured);
        };
        match decision.quota {
            Some(quota) if quota == self.limit.quota() => Some(configured),
            Some(Quota { amount, window }) => Some(CurrentLimit {
                requests_per_unit: u32::try_from(amount).unwrap_or(u32::MAX),
                unit: Unit::of_window(window).map_or(UNKNOWN_UNIT, |unit| unit as i32),
                ..CurrentLimit::default()
            }),
            None if decision.is_unlimited() => None,
            None => Some(CurrentLimit { requests_per_unit: 0, ..configured }),
        }
    }
}

/// Finds the limits of the descriptors.
async fn targets(
    request: &RateLimitRequest,
    envoy: &EnvoyConfig,
    policies: &Policies,
) -> Result<Vec<Target>, EnvoyError> {
    let Some(domain) = envoy.domains.get(&request.domain) else {
        return Ok(request.descriptors.iter().map(|_| Target::Unmatched).collect());
    };
    let common_hits = Cost::from(request.hits_addend.max(1));
    let mut slice = TimeSlice::default();
    let mut targets = Vec::with_capacity(request.descriptors.len());
    for (index, descriptor) in request.descriptors.iter().enumerate() {
        let texts: Vec<_> = descriptor.entries.iter().map(Entry::texts).collect();
        let entries: Vec<(&str, &str)> =
            texts.iter().map(|(key, value)| (&**key, &**value)).collect();
        let found = domain.find(&entries, &mut slice).await;
        let hits = descriptor.hits_addend.unwrap_or(common_hits);
        let (policy, key, rule, metric) = match found {
            Some(found) if found.rule.is_unlimited && descriptor.limit.is_none() => {
                targets.push(Target::Unlimited { rule: found.rule.clone() });
                continue;
            }
            Some(found) => (&found.rule.policy, found.key, Some(found.rule.clone()), found.metric),
            None if descriptor.limit.is_none() => {
                targets.push(Target::Unmatched);
                continue;
            }
            None => (&domain.override_policy, override_key(&entries), None, None),
        };
        let policy = policies.get(policy).cloned().ok_or_else(|| {
            EnvoyError::Unavailable(format!("the policy {policy:?} is not in force"))
        })?;
        let (limit, client_rule, mode) = match (descriptor.limit, &rule) {
            (Some(limit), _) => {
                let at = |error| match error {
                    EnvoyError::Invalid(reason) => {
                        EnvoyError::Invalid(format!("descriptor {index}: {reason}"))
                    }
                    other => other,
                };
                let (limit, rule) =
                    request_limit::rule(limit, envoy.settings.max_window).map_err(at)?;
                (limit, rule, EnvoyMode::Enforced)
            }
            (None, Some(rule)) => {
                let chosen = policy.limiter.rules().choose(&key);
                (rule.limit, ClientRule::clone(&chosen), rule.mode)
            }
            (None, None) => {
                targets.push(Target::Unmatched);
                continue;
            }
        };
        targets.push(Target::Limited(Box::new(LimitedTarget {
            policy,
            key,
            hits,
            is_refund: descriptor.is_negative_hits,
            rule,
            has_request_limit: descriptor.limit.is_some(),
            client_rule,
            limit,
            mode,
            metric,
            decided: None,
        })));
    }
    Ok(targets)
}

/// Removes the limits that others of the same request replace. A descriptor without a limit stays unlimited.
fn apply_replaces(targets: &mut [Target]) {
    let replaced: HashSet<Box<str>> = targets
        .iter()
        .filter_map(Target::rule)
        .flat_map(|rule| rule.replaces.iter().cloned())
        .collect();
    if replaced.is_empty() {
        return;
    }
    for target in targets {
        let name = target.rule().and_then(|rule| rule.name.as_deref());
        if target.limited().is_some() && name.is_some_and(|name| replaced.contains(name)) {
            *target = Target::Unmatched;
        }
    }
}

/// Returns the limits that the store has to decide.
///
/// Nothing can be charged or returned under a limit that denies every request, so a look at it and a refund are answered
/// here.
fn undecided(targets: &mut [Target]) -> impl Iterator<Item = &mut LimitedTarget> {
    targets.iter_mut().filter_map(|target| {
        let Target::Limited(target) = target else { return None };
        if target.is_blocked() && (target.hits == 0 || target.is_refund) {
            let at = target.policy.limiter.now();
            target.decided = Some(Timed { decision: NOTHING_LEFT, at });
        }
        target.decided.is_none().then_some(&mut **target)
    })
}

/// Decides the limits that can deny.
async fn decide_enforced(
    gate: &Gate,
    targets: &mut [Target],
    charge: Charge,
) -> Result<(), EnvoyError> {
    let enforced: Vec<_> = undecided(targets).filter(|target| target.can_deny()).collect();
    let decisions = match charge {
        Charge::AllOrNothing => decide_together(gate, &enforced).await,
        Charge::Always => decide_each(gate, &enforced).await,
    };
    let decisions = decisions.map_err(|error| match error {
        // Keys are bounded, and tiers are not used, so only the store can fail.
        error @ (GateError::Store(_) | GateError::KeyTooLong { .. }) => {
            EnvoyError::Unavailable(error.to_string())
        }
        other => EnvoyError::Invalid(other.to_string()),
    })?;
    for (target, decided) in enforced.into_iter().zip(decisions) {
        if decided.decision.source == Source::FailedClosed && target.fails_without_store() {
            return Err(EnvoyError::Unavailable("the store is unavailable".to_owned()));
        }
        target.decided = Some(decided);
    }
    Ok(())
}

/// The unit of a window that none of the protocol's units has.
const UNKNOWN_UNIT: i32 = 0;

/// A look at a limit that denies every request.
const NOTHING_LEFT: Decision = Decision {
    allowed: true,
    limit: 0,
    remaining: 0,
    retry_after: Some(Ticks::ZERO),
    reset_after: Ticks::ZERO,
    delay: Ticks::ZERO,
    scarcest: None,
    denied_by: None,
    shadow_denied_by: None,
    source: Source::Store,
    quota: None,
};

/// Charges all limits, or none.
async fn decide_together(
    gate: &Gate,
    targets: &[&mut LimitedTarget],
) -> Result<Vec<Timed>, GateError> {
    if let [target] = targets
        && !target.has_request_limit
    {
        return Ok(vec![target.apply(Op::Check(target.hits)).await?]);
    }
    let parts = targets.iter().map(|target| target.part()).collect::<Result<Vec<_>, _>>()?;
    let decided = gate.check_parts(parts).await?;
    let parts =
        decided.parts.into_iter().zip(targets).map(async |(decided, target)| match decided {
            Some(decided) => Ok(decided),
            // In a cluster, keys behind a denied one were not asked.
            None => target.look().await,
        });
    join_all(parts).await.into_iter().collect()
}

/// Charges each limit by itself, also if it is exceeded.
async fn decide_each(gate: &Gate, targets: &[&mut LimitedTarget]) -> Result<Vec<Timed>, GateError> {
    join_all(targets.iter().map(|target| target.charge_always(gate))).await.into_iter().collect()
}

/// Decides the limits in shadow and quota mode and the refunds, after the others. Without an answer, they have no status.
async fn decide_observed(gate: &Gate, targets: &mut [Target], charge: Charge, is_over_limit: bool) {
    let each = undecided(targets).map(async |target| {
        let decided = match charge {
            Charge::AllOrNothing if is_over_limit => target.look().await,
            _ if target.is_refund => target.apply(Op::Force(-i128::from(target.hits))).await,
            Charge::AllOrNothing => target.apply(Op::Check(target.hits)).await,
            Charge::Always => target.charge_always(gate).await,
        };
        target.decided = decided.ok().filter(|decided| decided.decision.source.is_answered());
    });
    join_all(each).await;
}

fn response(targets: &[Target], is_over_limit: bool) -> RateLimitResponse {
    let in_quota_mode = |target: &LimitedTarget| target.mode == EnvoyMode::Quota;
    let limited = || targets.iter().map(Target::limited);
    let dynamic_metadata = limited().flatten().any(in_quota_mode).then(|| {
        let violates = |target: &LimitedTarget| in_quota_mode(target) && target.exceeds();
        let violations = limited().enumerate().filter(|(_, target)| target.is_some_and(violates));
        quota_metadata(&violations.map(|(index, _)| index).collect::<Vec<_>>())
    });
    RateLimitResponse {
        overall_code: Code::of(is_over_limit).into(),
        statuses: targets.iter().map(status).collect(),
        response_headers_to_add: Vec::new(),
        dynamic_metadata,
    }
}

/// Returns the metadata of a response with descriptors in quota mode: the indexes of the descriptors that are over their limit.
pub(super) fn quota_metadata(violations: &[usize]) -> Struct {
    let value = |kind| Value { kind: Some(kind) };
    let index = |index: &usize| {
        value(ValueKind::NumberValue(u32::try_from(*index).unwrap_or(u32::MAX).into()))
    };
    let mut fields =
        BTreeMap::from([("quotaModeEnabled".to_owned(), value(ValueKind::BoolValue(true)))]);
    if !violations.is_empty() {
        let values = violations.iter().map(index).collect();
        let list = value(ValueKind::ListValue(ListValue { values }));
        fields.insert("quotaModeViolations".to_owned(), list);
    }
    Struct { fields }
}

fn status(target: &Target) -> DescriptorStatus {
    let ok = DescriptorStatus { code: Code::Ok.into(), ..Default::default() };
    let limited = match target {
        Target::Unmatched => return ok,
        Target::Unlimited { .. } => return DescriptorStatus { limit_remaining: u32::MAX, ..ok },
        Target::Limited(limited) => limited,
    };
    let is_over_limit = target.is_over_limit();
    // Whole seconds, rounded up.
    let reset = |decided: Timed| {
        let seconds = limited.until_reset(decided).0.div_ceil(Ticks::PER_SECOND);
        let seconds = if is_over_limit { seconds.max(1) } else { seconds };
        Duration { seconds: i64::try_from(seconds).unwrap_or(i64::MAX), nanos: 0 }
    };
    let name = target.rule().and_then(|rule| rule.name.as_deref()).unwrap_or_default();
    let current_limit =
        limited.deciding_limit().map(|limit| CurrentLimit { name: name.to_owned(), ..limit });
    let remaining = limited.decision().map_or(0, |decision| decision.remaining);
    DescriptorStatus {
        code: Code::of(is_over_limit).into(),
        current_limit,
        limit_remaining: u32::try_from(remaining).unwrap_or(u32::MAX),
        duration_until_reset: limited.decided.map(reset),
    }
}

/// Returns the limit that header fields are about: the first that denied the request, or the one with the least
/// remaining.
fn tightest(targets: &[Target]) -> Option<TightestLimit> {
    let enforced = targets.iter().filter_map(Target::limited).filter(|target| target.can_deny());
    let decided = enforced.filter_map(|target| Some((target, target.decided?)));
    let (target, Timed { decision, at }) =
        decided.min_by_key(|(_, Timed { decision, .. })| (decision.allowed, decision.remaining))?;
    let access = target.client_rule.access(at).clone();
    Some(TightestLimit { policy: (&*target.policy.name).into(), access, decision })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tallygate::Policy;
    use tallygate::store::Capacity;
    use tallygate_redis::Stores;

    use super::super::RateLimitOverride;
    use super::super::messages::RateLimitDescriptor;
    use super::*;
    use crate::config::Config;
    use crate::gate::RestoredStores;
    use crate::metrics::Metrics;

    /// Windows of years, so that none ends during a test.
    const RULES: &str = "
domain: d
descriptors:
  - key: three
    rate_limit: {unit: year, requests_per_unit: 3, name: three}
  - key: five
    rate_limit: {unit: year, requests_per_unit: 5}
  - key: none
    rate_limit: {unit: year, requests_per_unit: 0}
  - key: free
    rate_limit: {unlimited: true}
  - key: shadow
    shadow_mode: true
    rate_limit: {unit: year, requests_per_unit: 1}
  - key: quota
    quota_mode: true
    rate_limit: {unit: year, requests_per_unit: 1}
  - key: instead
    rate_limit: {unit: year, requests_per_unit: 9, replaces: [{name: three}]}
  - key: file
    value: a*
    share_threshold: true
    rate_limit: {unit: year, requests_per_unit: 2}
  - key: half-year
    rate_limit: {unit: month, unit_multiplier: 6, requests_per_unit: 4}
  - key: free-by-name
    rate_limit: {unlimited: true, name: three}
";

    fn config(rules: &str, settings: &str) -> Config {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("rules.yaml"), rules).unwrap();
        let text = format!("[envoy]\nconfig = \"rules.yaml\"\n{settings}\n");
        Config::parse(&text, folder.path()).unwrap()
    }

    fn gate(settings: &str) -> Gate {
        let stores = Stores::Memory(Capacity::of(1_000));
        let config = config(RULES, settings);
        Gate::new(&config, stores, Metrics::new(), RestoredStores::default())
    }

    fn descriptor(key: &'static str, value: &'static str) -> RateLimitDescriptor {
        let entries = vec![Entry { key: key.into(), value: value.into() }];
        RateLimitDescriptor { entries, ..Default::default() }
    }

    fn ask(gate: &Gate, descriptors: &[RateLimitDescriptor], hits: u32) -> RateLimitResponse {
        let request = RateLimitRequest {
            domain: "d".into(),
            descriptors: descriptors.to_vec(),
            hits_addend: hits,
        };
        tallygate::block_on(decide(gate, &request)).unwrap().response
    }

    /// Returns whether each descriptor is over its limit, and its remaining units.
    fn shown(response: &RateLimitResponse) -> Vec<(bool, u32)> {
        let shown = |status: &DescriptorStatus| {
            (status.code == Code::OverLimit as i32, status.limit_remaining)
        };
        response.statuses.iter().map(shown).collect()
    }

    #[test]
    fn a_denied_descriptor_charges_no_other() {
        let gate = gate("");
        let both = [descriptor("five", "x"), descriptor("three", "x")];
        for left in [(4, 2), (3, 1), (2, 0)] {
            let response = ask(&gate, &both, 0);
            assert!(!response.is_over_limit());
            assert_eq!(shown(&response), [(false, left.0), (false, left.1)]);
        }
        let denied = ask(&gate, &both, 0);
        assert!(denied.is_over_limit());
        assert_eq!(shown(&denied), [(false, 2), (true, 0)], "the first still has its two");
        assert!(denied.statuses[1].duration_until_reset.is_some_and(|reset| reset.seconds > 0));
        assert_eq!(shown(&ask(&gate, &both[..1], 0)), [(false, 1)]);
    }

    #[test]
    fn charge_always_charges_every_descriptor_as_the_original_does() {
        let gate = gate("charge = \"always\"");
        let both = [descriptor("five", "x"), descriptor("three", "x")];
        for _ in 0..3 {
            assert!(!ask(&gate, &both, 0).is_over_limit());
        }
        assert_eq!(shown(&ask(&gate, &both, 0)), [(false, 1), (true, 0)], "the first was charged");
        assert_eq!(shown(&ask(&gate, &both, 0)), [(false, 0), (true, 0)]);
        // Three hits on two that are left: denied, and nothing is left.
        let other = [descriptor("five", "y")];
        assert_eq!(shown(&ask(&gate, &other, 3)), [(false, 2)]);
        assert_eq!(shown(&ask(&gate, &other, 3)), [(true, 0)]);
        assert_eq!(shown(&ask(&gate, &other, 1)), [(true, 0)]);
    }

    /// Envoy looks when a request begins, and charges what it cost when it ends (`apply_on_stream_done`).
    #[test]
    fn with_charge_always_a_look_is_over_the_limit_once_more_was_charged_than_the_limit() {
        let gate = gate("charge = \"always\"");
        for key in ["five", "quota"] {
            let hits =
                |hits| [RateLimitDescriptor { hits_addend: Some(hits), ..descriptor(key, "x") }];
            let is_over = |hits_addend| {
                let response = ask(&gate, &hits(hits_addend), 0);
                match response.dynamic_metadata {
                    Some(metadata) => metadata.fields.contains_key("quotaModeViolations"),
                    None => response.is_over_limit(),
                }
            };
            let limit = if key == "five" { 5 } else { 1 };
            assert!(!is_over(0));
            assert!(!is_over(limit));
            assert!(!is_over(0), "{key}: the limit is reached and not exceeded");
            assert!(is_over(1));
            assert!(is_over(0), "{key}: the limit is exceeded");
        }
        // One charge of more than the limit counts as well.
        let hits =
            |hits| [RateLimitDescriptor { hits_addend: Some(hits), ..descriptor("five", "y") }];
        assert_eq!(shown(&ask(&gate, &hits(1_000_000), 0)), [(true, 0)]);
        assert_eq!(shown(&ask(&gate, &hits(0), 0)), [(true, 0)]);
    }

    #[test]
    fn negative_hits_return_units_and_never_more_than_were_used() {
        for settings in ["", "charge = \"always\""] {
            let gate = gate(settings);
            let back = |key, hits_addend| RateLimitDescriptor {
                hits_addend,
                is_negative_hits: true,
                ..descriptor(key, "x")
            };
            assert_eq!(shown(&ask(&gate, &[descriptor("five", "x")], 5)), [(false, 0)]);
            assert_eq!(shown(&ask(&gate, &[back("five", Some(2))], 0)), [(false, 2)]);
            assert_eq!(
                shown(&ask(&gate, &[back("five", None)], 0)),
                [(false, 3)],
                "one by default"
            );
            assert_eq!(shown(&ask(&gate, &[back("five", Some(0))], 0)), [(false, 3)]);
            let most = Some(u64::MAX);
            assert_eq!(shown(&ask(&gate, &[back("five", most)], 0)), [(false, 5)]);
            assert_eq!(
                shown(&ask(&gate, &[back("none", most), back("free", most)], 0)),
                [(false, 0), (false, u32::MAX)]
            );
            // Together with a charge of another limit.
            assert_eq!(shown(&ask(&gate, &[descriptor("five", "x")], 4)), [(false, 1)]);
            let both = [descriptor("three", "x"), back("five", None)];
            assert_eq!(shown(&ask(&gate, &both, 3)), [(false, 0), (false, 4)]);
            let denied = shown(&ask(&gate, &both, 1));
            let returned = if settings.is_empty() { 4 } else { 5 };
            assert_eq!(denied, [(true, 0), (false, returned)], "{settings}");
        }
    }

    #[test]
    fn a_status_has_the_number_of_units_of_its_window() {
        let gate = gate("");
        let current = |descriptor: RateLimitDescriptor| {
            let limit = ask(&gate, &[descriptor], 0).statuses[0].current_limit.clone().unwrap();
            (limit.requests_per_unit, limit.unit, limit.unit_multiplier)
        };
        assert_eq!(current(descriptor("half-year", "x")), (4, Unit::Month as i32, Some(6)));
        assert_eq!(current(descriptor("five", "x")), (5, Unit::Year as i32, None));
        let of_request = |unit_multiplier| RateLimitDescriptor {
            limit: Some(RateLimitOverride {
                requests_per_unit: 2,
                unit: Unit::Day as i32,
                unit_multiplier,
            }),
            ..descriptor("other", "x")
        };
        assert_eq!(current(of_request(Some(7))), (2, Unit::Day as i32, Some(7)));
        assert_eq!(current(of_request(Some(1))), (2, Unit::Day as i32, None));
        let response = ask(&gate, &[of_request(Some(7))], 0);
        let reset = response.statuses[0].duration_until_reset.unwrap().seconds;
        assert!((1..=7 * 86_400).contains(&reset), "{reset}");
    }

    #[test]
    fn a_window_ends_at_the_same_time_whether_or_not_it_was_used() {
        let gate = gate("");
        let reset = |key, hits| {
            let descriptor =
                RateLimitDescriptor { hits_addend: Some(hits), ..descriptor(key, "x") };
            let status = ask(&gate, &[descriptor], 0).statuses[0].clone();
            status.duration_until_reset.unwrap().seconds
        };
        let used = reset("three", 1);
        let year = 365 * 86_400;
        assert!((1..=year).contains(&used), "{used}");
        for (key, hits) in [("five", 0), ("five", 6), ("none", 0), ("none", 1), ("quota", 0)] {
            assert!((used - reset(key, hits)).abs() <= 1, "{key} {hits}");
        }
    }

    #[test]
    fn hits_above_the_limit_are_denied_and_charge_nothing() {
        let gate = gate("");
        let hits = |hits_addend| RateLimitDescriptor { hits_addend, ..descriptor("five", "x") };
        assert_eq!(shown(&ask(&gate, &[hits(None)], 6)), [(true, 5)]);
        assert_eq!(shown(&ask(&gate, &[hits(None)], u32::MAX)), [(true, 5)]);
        assert_eq!(shown(&ask(&gate, &[hits(Some(u64::MAX))], 0)), [(true, 5)]);
        assert_eq!(shown(&ask(&gate, &[hits(None)], 5)), [(false, 0)]);
    }

    /// All descriptors of a request share a counter if they have the same rule and values.
    #[test]
    fn a_descriptor_that_is_there_twice_is_charged_twice() {
        let gate = gate("");
        let twice = [descriptor("five", "x"), descriptor("five", "x")];
        let first = ask(&gate, &twice, 2);
        assert!(!first.is_over_limit());
        assert_eq!(shown(&ask(&gate, &twice[..1], 1)), [(false, 0)]);
        assert!(ask(&gate, &twice, 1).is_over_limit());
    }

    #[test]
    fn hits_come_from_the_descriptor_then_from_the_request_then_they_are_one() {
        let gate = gate("");
        let hits = |hits_addend| RateLimitDescriptor { hits_addend, ..descriptor("five", "x") };
        assert_eq!(shown(&ask(&gate, &[hits(None)], 0)), [(false, 4)]);
        assert_eq!(shown(&ask(&gate, &[hits(None)], 2)), [(false, 2)]);
        assert_eq!(shown(&ask(&gate, &[hits(Some(0))], 9)), [(false, 2)], "a look");
        assert_eq!(shown(&ask(&gate, &[hits(Some(2))], 9)), [(false, 0)]);
        assert_eq!(shown(&ask(&gate, &[hits(Some(0))], 0)), [(false, 0)], "a look at nothing left");
        assert_eq!(shown(&ask(&gate, &[hits(None)], 0)), [(true, 0)]);
    }

    #[test]
    fn descriptors_without_a_limit_have_a_status_without_one() {
        let gate = gate("");
        let all = [descriptor("other", "x"), descriptor("free", "x"), descriptor("none", "x")];
        let response = ask(&gate, &all[..2], 0);
        let ok = DescriptorStatus { code: 1, ..Default::default() };
        assert_eq!(response.statuses[0], ok);
        let unlimited = DescriptorStatus { limit_remaining: u32::MAX, ..ok.clone() };
        assert_eq!(response.statuses[1], unlimited);
        let denied = ask(&gate, &all, 0);
        assert_eq!(shown(&denied), [(false, 0), (false, u32::MAX), (true, 0)]);
        let look = RateLimitDescriptor { hits_addend: Some(0), ..descriptor("none", "x") };
        assert_eq!(shown(&ask(&gate, &[look], 0)), [(false, 0)]);
        let unknown = RateLimitRequest {
            domain: "unknown".into(),
            descriptors: vec![descriptor("none", "x")],
            hits_addend: 0,
        };
        let response = tallygate::block_on(decide(&gate, &unknown)).unwrap().response;
        assert_eq!(response.statuses, [ok]);
    }

    #[test]
    fn shadow_and_quota_mode_count_and_deny_nothing() {
        let gate = gate("");
        let both = [descriptor("shadow", "x"), descriptor("quota", "x"), descriptor("three", "x")];
        let first = ask(&gate, &both, 0);
        assert_eq!(shown(&first), [(false, 0), (false, 0), (false, 2)]);
        assert_eq!(first.dynamic_metadata, Some(quota_metadata(&[])));
        let second = ask(&gate, &both, 0);
        assert!(!second.is_over_limit());
        assert_eq!(shown(&second), [(false, 0), (false, 0), (false, 1)]);
        assert_eq!(second.dynamic_metadata, Some(quota_metadata(&[1])));
        // A denied request does not count in shadow mode.
        let other = [descriptor("shadow", "y"), descriptor("none", "x")];
        assert_eq!(shown(&ask(&gate, &other, 0)), [(false, 1), (true, 0)]);
        assert_eq!(ask(&gate, &other, 0).dynamic_metadata, None);
    }

    #[test]
    fn the_shadow_mode_of_the_service_denies_nothing_and_shows_what_it_would_deny() {
        let gate = gate("shadow_mode = true\nheaders = \"all\"");
        let both = [descriptor("shadow", "x"), descriptor("three", "x")];
        for left in [2, 1, 0] {
            assert_eq!(shown(&ask(&gate, &both[1..], 0)), [(false, left)]);
        }
        let request =
            RateLimitRequest { domain: "d".into(), descriptors: both.to_vec(), hits_addend: 0 };
        let decided = tallygate::block_on(decide(&gate, &request)).unwrap();
        assert!(!decided.response.is_over_limit());
        assert_eq!(shown(&decided.response), [(false, 1), (true, 0)]);
        assert!(decided.tightest.unwrap().decision.allowed);
    }

    #[test]
    fn a_limit_that_another_replaces_is_neither_checked_nor_charged() {
        let gate = gate("");
        let both = [descriptor("three", "x"), descriptor("instead", "x")];
        for left in (4..9).rev() {
            let response = ask(&gate, &both, 0);
            assert_eq!(shown(&response), [(false, 0), (false, left)]);
            assert_eq!(response.statuses[0].current_limit, None);
        }
        // A limit replaces others whatever the order, and not the lack of a limit.
        let all = [both[1].clone(), descriptor("free-by-name", "x"), both[0].clone()];
        assert_eq!(shown(&ask(&gate, &all, 0)), [(false, 3), (false, u32::MAX), (false, 0)]);
        let alone = ask(&gate, &both[..1], 0);
        assert_eq!(shown(&alone), [(false, 2)]);
        assert_eq!(alone.statuses[0].current_limit.as_ref().unwrap().name, "three");
    }

    #[test]
    fn values_of_a_shared_pattern_share_one_counter() {
        let gate = gate("");
        assert_eq!(shown(&ask(&gate, &[descriptor("file", "a1")], 0)), [(false, 1)]);
        assert_eq!(shown(&ask(&gate, &[descriptor("file", "a2")], 0)), [(false, 0)]);
        assert_eq!(shown(&ask(&gate, &[descriptor("file", "a3")], 0)), [(true, 0)]);
    }

    #[test]
    fn a_limit_of_the_request_applies_instead_of_the_configured_one() {
        let gate = gate("");
        let with = |key, requests_per_unit, unit| {
            let unit_multiplier = None;
            let limit = Some(RateLimitOverride { requests_per_unit, unit, unit_multiplier });
            RateLimitDescriptor { limit, ..descriptor(key, "x") }
        };
        // Of a descriptor that matches no rule.
        for left in [1, 0] {
            assert_eq!(shown(&ask(&gate, &[with("other", 2, 4)], 0)), [(false, left)]);
        }
        assert_eq!(shown(&ask(&gate, &[with("other", 2, 4)], 0)), [(true, 0)]);
        let current =
            ask(&gate, &[with("other", 2, 4)], 0).statuses[0].current_limit.clone().unwrap();
        assert_eq!((current.requests_per_unit, current.unit), (2, 4));
        // Usage of the configured limit counts.
        assert_eq!(shown(&ask(&gate, &[descriptor("three", "x")], 2)), [(false, 1)]);
        assert_eq!(shown(&ask(&gate, &[with("three", 10, 4)], 0)), [(false, 7)]);
        assert_eq!(shown(&ask(&gate, &[with("three", 0, 4)], 0)), [(true, 0)]);
        // Together with another descriptor, all or nothing.
        let both = [with("three", 10, 4), descriptor("none", "x")];
        assert_eq!(shown(&ask(&gate, &both, 0)), [(false, 7), (true, 0)]);
        // Every unit of the protocol works, a month and a year as well.
        let keys = ["s", "m", "h", "d", "month", "y", "w"];
        for ((_, unit), key) in Unit::ALL.into_iter().zip(keys) {
            let unit = unit as i32;
            assert_eq!(shown(&ask(&gate, &[with(key, 1, unit)], 0)), [(false, 0)], "{unit}");
            assert_eq!(shown(&ask(&gate, &[with(key, 1, unit)], 0)), [(true, 0)], "{unit}");
        }
        let error = |gate: &Gate, unit| {
            let request = RateLimitRequest {
                domain: "d".into(),
                descriptors: vec![with("other", 1, unit)],
                hits_addend: 0,
            };
            tallygate::block_on(decide(gate, &request)).unwrap_err()
        };
        // A limit without a known unit, or above `max_window`, is an error.
        for unit in [0, 99] {
            assert!(matches!(error(&gate, unit), EnvoyError::Invalid(_)));
        }
        let gate = self::gate("max_window = \"7d\"");
        for unit in [Unit::Month, Unit::Year] {
            let error = error(&gate, unit as i32).to_string();
            assert!(error.contains("max_window"), "{error}");
        }
    }

    #[test]
    fn malformed_and_large_requests_are_errors() {
        let gate = gate("");
        let ask = |domain: &'static str, descriptors: Vec<RateLimitDescriptor>| {
            let request = RateLimitRequest { domain: domain.into(), descriptors, hits_addend: 1 };
            tallygate::block_on(decide(&gate, &request)).unwrap_err()
        };
        assert!(matches!(ask("", vec![descriptor("five", "x")]), EnvoyError::Invalid(_)));
        assert!(matches!(ask("d", vec![]), EnvoyError::Invalid(_)));
        assert!(matches!(ask("d", vec![descriptor("five", "x"); 65]), EnvoyError::TooLarge(_)));
        let entries = vec![Entry::default(); MAX_ENTRIES + 1];
        let deep = RateLimitDescriptor { entries, ..Default::default() };
        assert!(matches!(ask("d", vec![deep]), EnvoyError::TooLarge(_)));
    }

    #[test]
    fn a_reload_keeps_what_was_used() {
        let gate = gate("");
        ask(&gate, &[descriptor("five", "x")], 4);
        let changed = RULES.replace("requests_per_unit: 5", "requests_per_unit: 6");
        gate.put_in_force(&config(&changed, ""));
        assert_eq!(shown(&ask(&gate, &[descriptor("five", "x")], 1)), [(false, 1)]);
        // Without rules, the service fails, so that Envoy decides.
        gate.put_in_force(&Config::parse("", Path::new("")).unwrap());
        let request = RateLimitRequest {
            domain: "d".into(),
            descriptors: vec![descriptor("five", "x")],
            hits_addend: 0,
        };
        let error = tallygate::block_on(decide(&gate, &request)).unwrap_err();
        assert!(matches!(error, EnvoyError::NotConfigured));
    }

    /// Returns the numbers of the first descriptor's limit, by its status and by the header fields.
    fn described(targets: &[Target]) -> ((u32, i32), Vec<Quota>) {
        let current = status(&targets[0]).current_limit.unwrap();
        let access = tightest(targets).unwrap().access;
        let quotas = access.limits().iter().map(Limit::quota).collect();
        ((current.requests_per_unit, current.unit), quotas)
    }

    /// Fault G4.
    #[test]
    fn a_response_describes_the_rule_that_decided_whenever_a_reload_comes() {
        let changed = RULES.replace(
            "key: five\n    rate_limit: {unit: year, requests_per_unit: 5}",
            "key: five\n    rate_limit: {unit: day, requests_per_unit: 7}",
        );
        let quota = |amount, unit: Unit| Quota {
            amount,
            window: Ticks(unit.seconds() * Ticks::PER_SECOND),
        };
        let old = ((5, Unit::Year as i32), vec![quota(5, Unit::Year)]);
        let new = ((7, Unit::Day as i32), vec![quota(7, Unit::Day)]);
        let alone = vec![descriptor("five", "x")];
        let joint = vec![descriptor("five", "x"), descriptor("instead", "x")];
        for (charge, descriptors) in [
            (Charge::AllOrNothing, &alone),
            (Charge::AllOrNothing, &joint),
            (Charge::Always, &alone),
        ] {
            let request = RateLimitRequest {
                domain: "d".into(),
                descriptors: descriptors.clone(),
                hits_addend: 1,
            };
            // Rules are read after the request has found its configuration, and once.
            for (is_reload, expected) in
                [(true, [&new, &old, &old, &old]), (false, [&new, &new, &old, &old])]
            {
                for (moment, expected) in expected.into_iter().enumerate() {
                    let gate = gate("");
                    let change_at = |now| match is_reload {
                        _ if moment != now => {}
                        true => gate.put_in_force(&config(&changed, "")),
                        false => {
                            let day = Ticks(Unit::Day.seconds() * Ticks::PER_SECOND);
                            let seven = Policy::token_bucket(7).per(day).build().unwrap();
                            let policy = gate.policy("envoy:d|five").unwrap();
                            policy.limiter.set_override("x", seven, None);
                        }
                    };
                    change_at(0);
                    let policies = gate.in_force();
                    let envoy = policies.envoy.clone().unwrap();
                    change_at(1);
                    let mut targets =
                        tallygate::block_on(targets(&request, &envoy, &policies)).unwrap();
                    change_at(2);
                    tallygate::block_on(decide_enforced(&gate, &mut targets, charge)).unwrap();
                    change_at(3);
                    assert_eq!(described(&targets), *expected, "{charge:?} {is_reload} {moment}");
                }
            }
        }
    }

    /// Fault G4.
    #[test]
    fn the_descriptors_of_a_request_are_decided_under_one_configuration_whenever_a_reload_comes() {
        let changed = RULES.replace("requests_per_unit: 5", "requests_per_unit: 50");
        let changed = changed.replace("requests_per_unit: 9", "requests_per_unit: 90");
        let request = RateLimitRequest {
            domain: "d".into(),
            descriptors: vec![descriptor("five", "x"), descriptor("instead", "x")],
            hits_addend: 1,
        };
        for charge in [Charge::AllOrNothing, Charge::Always] {
            for moment in 0..4 {
                let gate = gate("");
                let reload_at = |now| {
                    if moment == now {
                        gate.put_in_force(&config(&changed, ""));
                    }
                };
                reload_at(0);
                let policies = gate.in_force();
                let envoy = policies.envoy.clone().unwrap();
                reload_at(1);
                let mut targets =
                    tallygate::block_on(targets(&request, &envoy, &policies)).unwrap();
                reload_at(2);
                tallygate::block_on(decide_enforced(&gate, &mut targets, charge)).unwrap();
                reload_at(3);
                let seen: Vec<_> = targets
                    .iter()
                    .map(status)
                    .map(|status| {
                        let limit = status.current_limit.map(|limit| limit.requests_per_unit);
                        (limit.unwrap(), status.limit_remaining)
                    })
                    .collect();
                let expected = if moment == 0 { [(50, 49), (90, 89)] } else { [(5, 4), (9, 8)] };
                assert_eq!(seen, expected, "{charge:?}, reload at {moment}");
            }
        }
    }

    #[test]
    fn a_status_has_the_override_of_its_key() {
        let gate = gate("");
        let policy = gate.policy("envoy:d|five").unwrap();
        let two = |window| Access::from(Policy::token_bucket(2).per(window).build().unwrap());
        let current = || {
            let response = ask(&gate, &[descriptor("five", "x")], 0);
            let status = response.statuses[0].clone();
            (status.current_limit.map(|limit| (limit.requests_per_unit, limit.unit)), status.code)
        };
        let (ok, over_limit) = (Code::Ok as i32, Code::OverLimit as i32);
        for (access, limit, code) in [
            (two(Ticks(Unit::Hour.seconds() * Ticks::PER_SECOND)), Some((2, 3)), ok),
            (two(Ticks(17 * Ticks::PER_SECOND)), Some((2, UNKNOWN_UNIT)), ok),
            (Access::Unlimited, None, ok),
            (Access::Blocked, Some((0, Unit::Year as i32)), over_limit),
        ] {
            policy.limiter.set_override("x", access, None);
            assert_eq!(current(), (limit, code));
        }
        policy.limiter.remove_override("x");
        assert_eq!(current(), (Some((5, Unit::Year as i32)), ok));
    }
}
