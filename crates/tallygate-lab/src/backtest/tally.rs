//! Decides every request with every policy and counts the results.

use tallygate_core::{Algorithm, Cost, Kind, Limit, Simulator, Tick};

use super::activity::{Activity, Slices};
use super::reading::{ParsedBatch, PartialInput, UnreadableLine};
use super::spool::Spool;
use super::timeline::Timeline;
use super::trial::Trial;
use super::{BacktestError, BacktestPlan, Bounds};
use crate::machine::{MachineVisitor, visit_machine};
use crate::replay::{Clients, Request};

/// The counts of a backtest.
pub(super) struct Tally {
    pub(super) lines: u64,
    pub(super) without_key: u64,
    pub(super) filtered: u64,
    pub(super) unreadable: u64,
    pub(super) shown: Vec<UnreadableLine>,
    pub(super) cut_short: Vec<PartialInput>,
    pub(super) requests: u64,
    /// The times of the earliest and the latest request.
    pub(super) span: Option<(Tick, Tick)>,
    pub(super) clients: Clients,
    pub(super) slices: Slices,
    pub(super) activities: Vec<Activity>,
    pub(super) policies: Vec<PolicyTally>,
    pub(super) timeline: Timeline,
    pub(super) spool: Option<Spool>,
    bounds: Bounds,
    /// The requests of the current batch.
    batch: Vec<Request>,
}

/// The bytes per client: its activity and table entry; its denials and its list of states per policy; and its state per
/// limit. Doubled, because a list exists twice while it grows.
const CLIENT_BYTES: u64 = 2 * (64 + 72);
const POLICY_BYTES: u64 = 2 * (24 + 32);
const LIMIT_BYTES: u64 = 2 * 96;
/// The bytes per request in a sliding window log.
const LOG_ENTRY_BYTES: u64 = 2 * 24;

/// The counts of one policy.
pub(super) struct PolicyTally {
    pub(super) trial: Trial,
    decider: Box<dyn PolicyDecider>,
    /// The decisions on the current batch.
    allowed: Vec<bool>,
    pub(super) denied: u64,
    /// Requests that this policy denies and the first policy does not.
    pub(super) denied_here_only: u64,
    /// Requests that the first policy denies and this one does not.
    pub(super) denied_by_first_only: u64,
    /// Denials by client number. Clients without denials may be missing at the end.
    pub(super) denials: Vec<ClientDenials>,
}

/// How often, and when, a policy denied a client.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientDenials {
    pub(super) denied: u64,
    pub(super) first: Tick,
    pub(super) last: Tick,
}

/// A policy with the states of its clients.
trait PolicyDecider: Send {
    /// Decides requests in order.
    fn decide(&mut self, requests: &[Request], cost: Cost, allowed: &mut Vec<bool>);
}

impl<A: Algorithm<State: Send> + Send> PolicyDecider for Simulator<A> {
    fn decide(&mut self, requests: &[Request], cost: Cost, allowed: &mut Vec<bool>) {
        let step = |&Request { client, now, .. }| self.step::<bool>(client, now, cost);
        allowed.extend(requests.iter().map(step));
    }
}

struct BoxedDecider;

impl MachineVisitor for BoxedDecider {
    type Output = Box<dyn PolicyDecider>;

    fn visit<A: Algorithm<State: Send> + Send + 'static>(self, rule: A) -> Box<dyn PolicyDecider> {
        Box::new(Simulator::new(rule))
    }
}

impl Tally {
    pub(super) fn new(plan: &BacktestPlan, bounds: &Bounds) -> std::io::Result<Self> {
        let policies = plan.policies.iter().cloned().map(PolicyTally::new).collect::<Vec<_>>();
        Ok(Self {
            lines: 0,
            without_key: 0,
            filtered: 0,
            unreadable: 0,
            shown: Vec::new(),
            cut_short: Vec::new(),
            requests: 0,
            span: None,
            clients: Clients::default(),
            slices: Slices::of(plan.peak),
            activities: Vec::new(),
            timeline: Timeline::new(policies.len()),
            policies,
            spool: plan.suggest.is_some().then(Spool::new).transpose()?,
            bounds: *bounds,
            batch: Vec::new(),
        })
    }

    /// Describes what was read if no line is a request, and what would work.
    pub(super) fn why_no_requests(&self, plan: &BacktestPlan) -> String {
        let cut = self.cut_short.first();
        let cut = cut.map(|cut| format!("; {} was read only in part: {}", cut.input, cut.reason));
        let cut = cut.unwrap_or_default();
        let Self { lines, unreadable, filtered, without_key, .. } = *self;
        if lines == 0 {
            return format!("the log has no lines; expected one request per line{cut}");
        }
        let mut parts = Vec::new();
        if let Some(first) = self.shown.first() {
            parts.push(format!(
                "{unreadable} unreadable (line {} of {}: {}; check the format and the time field)",
                first.line, first.input, first.reason
            ));
        }
        if filtered > 0 {
            let filters: Vec<String> = plan.log.filters.iter().map(ToString::to_string).collect();
            parts.push(format!("{filtered} excluded by the filters ({})", filters.join("; ")));
        }
        if without_key > 0 {
            parts.push(format!(
                "{without_key} without the key {} (choose another key)",
                plan.log.key
            ));
        }
        let reason = if filtered == lines {
            "the filters leave no line; remove a filter or change its value"
        } else {
            "no line of the log can be used"
        };
        format!("{reason}: {lines} lines read, {}{cut}", parts.join(", "))
    }

    /// Returns an upper estimate of the memory that the clients take.
    fn memory_bytes(&self) -> u64 {
        let (clients, requests) =
            (self.clients.len() as u64, self.requests + self.batch.len() as u64);
        let logged = |limit: &Limit| match limit.numbers().kind {
            Kind::SlidingWindowLog => {
                let most = limit.numbers().limit.saturating_mul(clients).min(requests);
                most.saturating_mul(LOG_ENTRY_BYTES)
            }
            _ => 0,
        };
        let limits = || self.policies.iter().flat_map(|policy| policy.trial.limits());
        let entries = limits().map(logged);
        let per_client = CLIENT_BYTES
            + POLICY_BYTES * self.policies.len() as u64
            + LIMIT_BYTES * limits().count() as u64;
        entries
            .fold(0_u64, u64::saturating_add)
            .saturating_add(clients.saturating_mul(per_client))
            .saturating_add(2 * self.clients.name_bytes() as u64)
    }

    /// Decides and counts a batch.
    pub(super) fn add(&mut self, parsed: ParsedBatch) -> Result<(), BacktestError> {
        self.batch.clear();
        for (name, hash, now) in parsed.requests() {
            let client = self.clients.number(name, hash);
            self.batch.push(Request { client, now, cost: 1 });
        }
        let max_bytes = self.bounds.memory_bytes;
        if self.memory_bytes() > max_bytes {
            return Err(BacktestError::TooMuchMemory { max_bytes });
        }
        for &Request { client, now, .. } in &self.batch {
            let slice = self.slices.slice(now);
            // Clients are numbered in order of appearance, so a new client has the next number.
            if client == self.activities.len() {
                self.activities.push(Activity::new(slice));
            }
            self.activities[client].add(slice);
            let (earliest, latest) = self.span.unwrap_or((now, now));
            self.span = Some((earliest.min(now), latest.max(now)));
        }
        for policy in &mut self.policies {
            policy.decide(&self.batch);
        }
        self.compare();
        for (place, request) in self.batch.iter().enumerate() {
            let denied_by = self.policies.iter().map(|policy| !policy.allowed[place]);
            self.timeline.add(request.now, denied_by);
        }
        if let Some(spool) = &mut self.spool {
            for &Request { client, now, .. } in &self.batch {
                spool.push(client, now).map_err(BacktestError::Spool)?;
            }
        }
        self.requests += self.batch.len() as u64;
        self.lines += parsed.lines;
        self.without_key += parsed.without_key;
        self.filtered += parsed.filtered;
        self.unreadable += parsed.unreadable;
        self.shown.extend(parsed.shown);
        self.cut_short.extend(parsed.cut_short);
        Ok(())
    }

    /// Counts the requests on which a policy and the first one disagree.
    fn compare(&mut self) {
        let Some((first, others)) = self.policies.split_first_mut() else { return };
        for policy in others {
            for (by_this, by_first) in policy.allowed.iter().zip(&first.allowed) {
                policy.denied_here_only += u64::from(!by_this && *by_first);
                policy.denied_by_first_only += u64::from(*by_this && !by_first);
            }
        }
    }
}

impl PolicyTally {
    fn new(trial: Trial) -> Self {
        let decider = match trial.policy.plain() {
            Some(limit) => visit_machine(limit, BoxedDecider),
            None => BoxedDecider.visit(trial.policy.clone()),
        };
        Self {
            trial,
            decider,
            allowed: Vec::new(),
            denied: 0,
            denied_here_only: 0,
            denied_by_first_only: 0,
            denials: Vec::new(),
        }
    }

    fn decide(&mut self, requests: &[Request]) {
        self.allowed.clear();
        self.decider.decide(requests, self.trial.cost, &mut self.allowed);
        for (request, _) in requests.iter().zip(&self.allowed).filter(|(_, allowed)| !**allowed) {
            self.denied += 1;
            if self.denials.len() <= request.client {
                self.denials.resize(request.client + 1, ClientDenials::NONE);
            }
            self.denials[request.client].add(request.now);
        }
    }

    /// Returns the number of clients that were denied at least once.
    pub(super) fn clients_denied(&self) -> u64 {
        self.denials.iter().filter(|client| client.denied > 0).count() as u64
    }
}

impl ClientDenials {
    const NONE: Self = Self { denied: 0, first: Tick(i64::MAX), last: Tick(i64::MIN) };

    fn add(&mut self, now: Tick) {
        self.denied += 1;
        self.first = self.first.min(now);
        self.last = self.last.max(now);
    }
}
