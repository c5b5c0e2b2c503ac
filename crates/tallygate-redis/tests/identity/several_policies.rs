//! Clients under several policies: a server decides as the core does in every field, and a check that its script decides is
//! one call.
//!
//! `TALLYGATE_IDENTITY_STEPS` sets the number of steps; `scripts/identity` runs a million.

use std::collections::VecDeque;
use std::time::Duration;

use futures_util::future::join_all;
use tallygate::algorithm::{Algorithm, Op, Part, Timed};
use tallygate::policy::{Anchor, LimitBuilder};
use tallygate::store::{ClientState, Store as _};
use tallygate::tiers::ClientRule;
use tallygate::{Cost, Decision, Kind, Policy, Tick, Ticks};
use tallygate_redis::{OnFailure, Options, Redis, RedisStore};
use tallygate_testkit::servers::{Flavor, Server};

/// The number of concurrent clients. Each has its own history.
const CLIENTS: usize = 64;
/// The largest number that a script accepts.
const LARGEST: u128 = 1 << 52;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_under_several_policies_is_decided_as_by_the_core_in_one_call() {
    for flavor in Flavor::ALL {
        compare(flavor, Range::OfScripts).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_under_policies_without_a_script_is_decided_as_by_the_core() {
    for flavor in Flavor::ALL {
        compare(flavor, Range::Any).await;
    }
}

/// The policies and times of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Range {
    /// Policies and times that the scripts can decide on.
    OfScripts,
    /// Also logs, numbers beyond doubles, and clocks that were set back.
    Any,
}

async fn compare(flavor: Flavor, range: Range) {
    let steps: usize =
        std::env::var("TALLYGATE_IDENTITY_STEPS").map_or(15_000, |steps| steps.parse().unwrap());
    let seed = std::env::var("TALLYGATE_IDENTITY_SEED").map_or(1, |seed| seed.parse().unwrap());
    let server = Server::start(flavor);
    let options = Options::default().budget(Duration::from_secs(20));
    let redis = Redis::with(&server.url(), options).unwrap();
    let mut campaign = Campaign::new(range, &redis, seed);
    while campaign.steps < steps {
        campaign.round().await;
    }
    let Campaign { steps, changes, allowed, .. } = &campaign;
    println!(
        "several {} {range:?} steps={steps} changes={changes} allowed={allowed}",
        flavor.name()
    );
    assert!(changes * 4 > *steps, "the policy changed in {changes} of {steps} steps only");
    assert!((steps / 5..steps * 4 / 5).contains(allowed), "{allowed} of {steps} were allowed");
    assert_eq!(server.keys_without_ttl(), Vec::<Vec<u8>>::new());
}

struct Campaign {
    range: Range,
    random: fastrand::Rng,
    redis: Redis,
    store: RedisStore,
    clients: Vec<Client>,
    named: usize,
    steps: usize,
    /// Steps under another policy than the previous step.
    changes: usize,
    allowed: usize,
}

/// The state of a client in the core.
struct Client {
    name: String,
    rules: Vec<ClientRule>,
    policies: Vec<Policy>,
    state: Option<ClientState>,
    asked: usize,
    now: i64,
    last: Option<Decision>,
    /// The last steps, for the message of a failure.
    history: VecDeque<String>,
    left: usize,
}

impl Campaign {
    fn new(range: Range, redis: &Redis, seed: u64) -> Self {
        Self {
            range,
            random: fastrand::Rng::with_seed(seed),
            redis: redis.clone(),
            store: redis.store("several").on_failure(OnFailure::Deny).in_ticks(),
            clients: Vec::new(),
            named: 0,
            steps: 0,
            changes: 0,
            allowed: 0,
        }
    }

    /// Makes one step of every client, all of them in flight at once.
    async fn round(&mut self) {
        self.clients.retain(|client| client.left > 0);
        while self.clients.len() < CLIENTS {
            let client = self.client();
            self.clients.push(client);
        }
        // All check, or all make another operation, so that the number of calls is known.
        let checks = self.random.u8(0..8) > 0;
        let mut asked = Vec::with_capacity(CLIENTS);
        for index in 0..self.clients.len() {
            let before = self.clients[index].asked;
            if self.random.u8(0..5) < 3 {
                self.clients[index].asked = self.random.usize(0..self.clients[index].rules.len());
            }
            self.changes += usize::from(self.clients[index].asked != before);
            self.clients[index].now = self.time(index);
            self.clients[index].left -= 1;
            asked.push(if checks { Op::Check(self.cost(index).max(1)) } else { self.other(index) });
        }
        // A script that the server does not know yet is sent again.
        let calls = |redis: &Redis| redis.counts().calls - redis.counts().reloads;
        let calls_before = calls(&self.redis);
        let store = &self.store;
        let replies = self.clients.iter().zip(&asked).map(|(client, op)| {
            let rule = &client.rules[client.asked];
            store.apply::<Timed>(rule, client.name.as_bytes(), *op, Some(Tick(client.now)))
        });
        let replies = join_all(replies).await;
        let calls = calls(&self.redis) - calls_before;
        // The first round also makes the connection.
        if checks && self.range == Range::OfScripts && self.steps > 0 {
            assert_eq!(calls, CLIENTS as u64, "each check is one call");
        }
        for (client, (reply, op)) in self.clients.iter_mut().zip(replies.into_iter().zip(asked)) {
            let expected = client.step(op);
            let found = reply.unwrap();
            assert_eq!(
                found,
                expected,
                "{} at {} {op:?} under {} of {:#?}\nafter {:#?}\nto {:?}\n{:?}",
                client.name,
                client.now,
                client.asked,
                client.policies,
                client.history,
                client.state,
                self.redis.last_error()
            );
            client.last = Some(found.decision);
            client.history.truncate(4);
            let Client { now, asked, state, .. } = client;
            client.history.push_front(format!("{op:?} at {now} under {asked}: {state:?}"));
            self.steps += 1;
            self.allowed += usize::from(found.decision.allowed);
        }
    }

    fn client(&mut self) -> Client {
        self.named += 1;
        let policies = loop {
            let bits = match self.random.u8(0..6) {
                0..3 => (8, 12),
                3 => (6, 36),
                4 => (20, 24),
                _ if self.range == Range::Any => (50, 50),
                _ => (12, 30),
            };
            let count = self.random.usize(2..6);
            let policies: Vec<_> = (0..count).filter_map(|_| self.policy(bits)).collect();
            if policies.len() > 1 && (self.range == Range::Any || are_scripted(&policies)) {
                break policies;
            }
        };
        let now = match self.random.u8(0..3) {
            0 => 0,
            1 => -self.random.i64(0..1_000_000),
            _ => 1_760_000_000_000_000 + self.random.i64(0..1_000_000_000),
        };
        Client {
            name: format!("client {}", self.named),
            rules: policies.iter().cloned().map(ClientRule::of).collect(),
            policies,
            state: None,
            asked: 0,
            now,
            last: None,
            history: VecDeque::new(),
            left: self.random.usize(1..300),
        }
    }

    fn policy(&mut self, (limit_bits, window_bits): (u32, u32)) -> Option<Policy> {
        let others = if self.random.u8(0..4) == 0 { self.random.usize(1..3) } else { 0 };
        let names = ["requests", "bytes", "writes"];
        let limits: Vec<_> = (0..=others)
            .map(|place| {
                // Some limits have the same name: a limit takes over the usage of its namesake.
                let name = names[(place + self.random.usize(0..2)) % 3];
                self.limit(limit_bits, window_bits).named(name)
            })
            .collect();
        Policy::all_of("a policy", limits).ok()
    }

    fn limit(&mut self, limit_bits: u32, window_bits: u32) -> LimitBuilder {
        let kinds = match self.range {
            Range::OfScripts => &[Kind::TokenBucket, Kind::Gcra, Kind::LeakyBucket][..],
            Range::Any => &Kind::ALL[..],
        };
        let windows = [Kind::FixedWindow, Kind::SlidingWindowCounter];
        let kind = match self.random.bool() {
            true => *self.random.choice(kinds).unwrap(),
            false => self.random.choice(windows).unwrap(),
        };
        let limit = self.random.u64(1..1 << limit_bits);
        let window = self.random.u64(1..1 << window_bits);
        let limit = if kind == Kind::SlidingWindowLog { limit % 64 + 1 } else { limit };
        let mut builder = Policy::of(kind, limit).per(Ticks(window));
        let mut capacity = limit;
        if kind.is_bucket() && self.random.bool() {
            capacity = self.random.u64(1..1 << limit_bits);
            builder = builder.burst(capacity);
        }
        if self.random.u8(0..4) == 0 {
            builder = builder.debt(self.random.u64(1..1 << limit_bits));
        }
        if self.random.u8(0..6) == 0 {
            builder = builder.starting_with(self.random.u64(0..=capacity));
        }
        if kind == Kind::FixedWindow && self.random.bool() {
            builder = builder.anchor(Anchor::FirstRequest);
        }
        if self.random.u8(0..8) == 0 {
            builder = builder.shadow();
        }
        builder
    }

    /// Advances the time: usually a little, or to the tick of the next event; rarely far, and rarely back.
    fn time(&mut self, index: usize) -> i64 {
        let Client { now, last, policies, asked, .. } = &self.clients[index];
        let (now, last) = (*now, *last);
        let numbers = *policies[*asked].limits()[0].numbers();
        let windows =
            policies.iter().flat_map(Policy::limits).map(|limit| limit.numbers().window.0);
        let shortest = i64::try_from(windows.min().unwrap()).unwrap();
        let unit = (numbers.window.0 / numbers.limit).max(1);
        let ahead = |span: Ticks| now.saturating_add_unsigned(span.0);
        match (self.random.u8(0..16), last) {
            (0..4, _) => now,
            (4..8, _) => now.saturating_add_unsigned(self.random.u64(0..=unit.saturating_mul(2))),
            (8, Some(last)) => ahead(last.retry_after.unwrap_or(Ticks::ZERO)),
            (9, Some(last)) => {
                ahead(last.retry_after.unwrap_or(Ticks::ZERO)).saturating_sub(1).max(now)
            }
            (10, Some(last)) => {
                ahead(last.reset_after).saturating_sub(self.random.i64(0..2)).max(now)
            }
            (11, _) => ahead(numbers.window).saturating_sub(self.random.i64(0..2)),
            (12, _) if self.range == Range::Any => {
                let back = shortest.saturating_mul(2);
                now.saturating_sub(self.random.i64(0..=back))
            }
            (13, _) if self.random.u8(0..8) == 0 => {
                ahead(Ticks(numbers.window.0.saturating_mul(self.random.u64(1..100))))
            }
            _ => ahead(Ticks(self.random.u64(0..=numbers.window.0 / 4 + 1))),
        }
    }

    fn cost(&mut self, index: usize) -> Cost {
        let client = &self.clients[index];
        let capacity = client.policies[client.asked].limits()[0].numbers().burst;
        let remaining = client.last.map_or(capacity, |last| last.remaining.min(1 << 50));
        match self.random.u8(0..16) {
            0..6 => 1,
            6..9 => self.random.u64(0..=capacity / 4 + 1),
            9 => capacity,
            10 => capacity.saturating_add(1),
            11 | 12 => remaining,
            13 => remaining.saturating_add(1),
            14 => self.random.u64(0..=1 << 52),
            _ => self.random.u64(0..=capacity),
        }
    }

    fn other(&mut self, index: usize) -> Op {
        let cost = self.cost(index);
        match self.random.u8(0..8) {
            0..4 => Op::Peek(cost),
            4 | 5 => Op::Force(-i128::from(cost)),
            6 => Op::Force(cost.into()),
            _ => Op::Reset,
        }
    }
}

/// Returns whether a script computes exactly with every number, including those of shared allowances.
fn are_scripted(policies: &[Policy]) -> bool {
    let limits = || policies.iter().flat_map(Policy::limits).map(|limit| *limit.numbers());
    let capacity: u128 = limits().map(|numbers| u128::from(numbers.burst + numbers.debt)).sum();
    limits().all(|numbers| capacity * u128::from(numbers.window.0) <= LARGEST)
        && policies.iter().all(|policy| policy.script().is_some())
}

impl Client {
    /// Decides by the core, and keeps the new state, except after a peek.
    fn step(&mut self, op: Op) -> Timed {
        let (now, rule) = (Tick(self.now), &self.rules[self.asked]);
        let mut state = self.state.clone().unwrap_or_else(|| rule.initial(now));
        let mut part = Part { rule, state: &mut state, op };
        let agrees = part.allows(now);
        let (timed, _) = part.step::<Timed>(now, agrees);
        let looks = matches!(op, Op::Peek(_) | Op::Check(0) | Op::Force(0));
        // A denial of a new client leaves no state behind.
        let is_denied = matches!(op, Op::Check(_)) && !timed.decision.allowed;
        let leaves_nothing = self.state.is_none() && is_denied;
        if !looks && !leaves_nothing {
            self.state = Some(state);
        }
        timed
    }
}
