//! The count: every request is decided by every policy, client by client.

use tallygate_core::{Algorithm, Kind, Limit, Simulator, Tick};

use super::activity::{Activity, Slices};
use super::reading::{Batch, CutShort, UnreadableLine};
use super::spool::Spool;
use super::timeline::Timeline;
use super::{BacktestError, Bounds, Plan};
use crate::machine::{ForMachine, for_machine};
use crate::replay::{Clients, Request};

/// All that was counted.
pub(super) struct Tally {
    pub(super) lines: u64,
    pub(super) without_key: u64,
    pub(super) unreadable: u64,
    pub(super) shown: Vec<UnreadableLine>,
    pub(super) cut_short: Vec<CutShort>,
    pub(super) requests: u64,
    /// The earliest and the latest request.
    pub(super) span: Option<(Tick, Tick)>,
    pub(super) clients: Clients,
    pub(super) slices: Slices,
    pub(super) activities: Vec<Activity>,
    pub(super) policies: Vec<PolicyTally>,
    pub(super) timeline: Timeline,
    pub(super) spool: Option<Spool>,
    bounds: Bounds,
    /// The requests of a batch.
    here: Vec<Request>,
}

/// What a client takes: its activity and its place in the table, and for each policy its state and what it was refused.
/// Twice, since a list that grows is there twice for a while.
const CLIENT_BYTES: u64 = 2 * (64 + 72);
const POLICY_BYTES: u64 = 2 * (48 + 24);
/// What one request takes in a sliding window's log.
const LOG_ENTRY_BYTES: u64 = 2 * 24;

/// What one policy did.
pub(super) struct PolicyTally {
    pub(super) limit: Limit,
    rule: Box<dyn Rule>,
    /// Its answers to a batch.
    allowed: Vec<bool>,
    pub(super) refused: u64,
    /// Refused here and not by the first policy.
    pub(super) refused_here_only: u64,
    /// Refused by the first policy and not here.
    pub(super) refused_there_only: u64,
    /// By client; those who were never refused may be missing at the end.
    pub(super) hits: Vec<Hit>,
}

/// What a client was refused by a policy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hit {
    pub(super) refused: u64,
    pub(super) first: Tick,
    pub(super) last: Tick,
}

/// A limit with its clients' states.
trait Rule: Send {
    /// Decides requests in order.
    fn decide(&mut self, requests: &[Request], allowed: &mut Vec<bool>);
}

impl<A: Algorithm<State: Send> + Send> Rule for Simulator<A> {
    fn decide(&mut self, requests: &[Request], allowed: &mut Vec<bool>) {
        let step = |&Request { client, now, cost }| self.step::<bool>(client, now, cost);
        allowed.extend(requests.iter().map(step));
    }
}

struct Boxed;

impl ForMachine for Boxed {
    type Made = Box<dyn Rule>;

    fn made<A: Algorithm<State: Send> + Send + 'static>(self, rule: A) -> Box<dyn Rule> {
        Box::new(Simulator::new(rule))
    }
}

impl Tally {
    pub(super) fn new(plan: &Plan, bounds: &Bounds) -> std::io::Result<Self> {
        let policies = plan.policies.iter().cloned().map(PolicyTally::new).collect::<Vec<_>>();
        Ok(Self {
            lines: 0,
            without_key: 0,
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
            here: Vec::new(),
        })
    }

    /// Returns an estimate from above of what the clients take.
    fn memory_bytes(&self) -> u64 {
        let (clients, requests) =
            (self.clients.len() as u64, self.requests + self.here.len() as u64);
        let logged = |limit: &Limit| match limit.numbers().kind {
            Kind::SlidingWindowLog => {
                let most = limit.numbers().limit.saturating_mul(clients).min(requests);
                most.saturating_mul(LOG_ENTRY_BYTES)
            }
            _ => 0,
        };
        let entries = self.policies.iter().map(|policy| logged(&policy.limit));
        let per_client = CLIENT_BYTES + POLICY_BYTES * self.policies.len() as u64;
        entries
            .fold(0_u64, u64::saturating_add)
            .saturating_add(clients.saturating_mul(per_client))
            .saturating_add(2 * self.clients.name_bytes() as u64)
    }

    /// Decides a batch.
    pub(super) fn take(&mut self, batch: Batch) -> Result<(), BacktestError> {
        self.here.clear();
        for (name, hash, now) in batch.requests() {
            let client = self.clients.number(name, hash);
            self.here.push(Request { client, now, cost: 1 });
        }
        let most = self.bounds.memory_bytes;
        if self.memory_bytes() > most {
            let what = "bytes of memory for its clients; send fewer clients, or try fewer policies";
            return Err(BacktestError::TooLarge { what, most });
        }
        for &Request { client, now, .. } in &self.here {
            let slice = self.slices.slice(now);
            // Clients are numbered as they come, so a new one is the next.
            if client == self.activities.len() {
                self.activities.push(Activity::new(slice));
            }
            self.activities[client].add(slice);
            let (earliest, latest) = self.span.unwrap_or((now, now));
            self.span = Some((earliest.min(now), latest.max(now)));
        }
        for policy in &mut self.policies {
            policy.decide(&self.here);
        }
        self.compare();
        for (place, request) in self.here.iter().enumerate() {
            let refused_by = self.policies.iter().map(|policy| !policy.allowed[place]);
            self.timeline.add(request.now, refused_by);
        }
        if let Some(spool) = &mut self.spool {
            for &Request { client, now, .. } in &self.here {
                spool.put(client, now).map_err(BacktestError::Spool)?;
            }
        }
        self.requests += self.here.len() as u64;
        self.lines += batch.lines;
        self.without_key += batch.without_key;
        self.unreadable += batch.unreadable;
        self.shown.extend(batch.shown);
        self.cut_short.extend(batch.cut_short);
        Ok(())
    }

    /// Counts where policies disagree with the first.
    fn compare(&mut self) {
        let Some((first, others)) = self.policies.split_first_mut() else { return };
        for policy in others {
            for (here, there) in policy.allowed.iter().zip(&first.allowed) {
                policy.refused_here_only += u64::from(!here && *there);
                policy.refused_there_only += u64::from(*here && !there);
            }
        }
    }
}

impl PolicyTally {
    fn new(limit: Limit) -> Self {
        let rule = for_machine(&limit, Boxed);
        Self {
            limit,
            rule,
            allowed: Vec::new(),
            refused: 0,
            refused_here_only: 0,
            refused_there_only: 0,
            hits: Vec::new(),
        }
    }

    fn decide(&mut self, requests: &[Request]) {
        self.allowed.clear();
        self.rule.decide(requests, &mut self.allowed);
        for (request, _) in requests.iter().zip(&self.allowed).filter(|(_, allowed)| !**allowed) {
            self.refused += 1;
            if self.hits.len() <= request.client {
                self.hits.resize(request.client + 1, Hit::NONE);
            }
            self.hits[request.client].add(request.now);
        }
    }

    /// How many clients were refused at least once.
    pub(super) fn clients_refused(&self) -> u64 {
        self.hits.iter().filter(|hit| hit.refused > 0).count() as u64
    }
}

impl Hit {
    const NONE: Self = Self { refused: 0, first: Tick(i64::MAX), last: Tick(i64::MIN) };

    fn add(&mut self, now: Tick) {
        self.refused += 1;
        self.first = self.first.min(now);
        self.last = self.last.max(now);
    }
}
