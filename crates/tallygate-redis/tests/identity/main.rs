//! Sends the same operations to the core and to a server: every decision must be equal in every field.
//!
//! `TALLYGATE_IDENTITY_STEPS` sets the number of steps per algorithm; `scripts/identity` runs a million.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test, also where it is no #[test]"
)]

mod several_policies;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use futures_util::future::join_all;
use tallygate::algorithm::{Algorithm as _, LimitRecord, Op, Part, Timed};
use tallygate::policy::{Anchor, Penalty};
use tallygate::store::Store as _;
use tallygate::{Decision, Kind, Policy, Tick, Ticks};
use tallygate_redis::{OnFailure, Options, Redis, RedisStore};
use tallygate_testkit::servers::{Flavor, Server};

/// The number of concurrent clients. Each has its own history.
const CLIENTS: usize = 128;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_decides_as_the_core_does() {
    compare(Flavor::Redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn valkey_decides_as_the_core_does() {
    compare(Flavor::Valkey).await;
}

/// Found by a long run: a new key with a log of more entries than a script counts exactly.
#[tokio::test]
async fn a_new_key_that_a_script_cannot_decide_on_is_decided() {
    let server = Server::start(Flavor::Redis);
    let redis = Redis::open(&server.url()).unwrap();
    let store = redis.store("log").on_failure(OnFailure::Deny).in_ticks();
    let log = Policy::sliding_window_log(1 << 52).per(Ticks(24)).debt(0).starting_with(1 << 50);
    let policy = log.build().unwrap();
    let decision =
        store.apply::<Decision>(&policy, b"alice", Op::Check(1), Some(Tick(0))).await.unwrap();
    assert_eq!(
        (decision.allowed, decision.remaining),
        (true, (1 << 50) - 1),
        "{:?}",
        redis.last_error()
    );
}

async fn compare(flavor: Flavor) {
    let steps: usize =
        std::env::var("TALLYGATE_IDENTITY_STEPS").map_or(15_000, |steps| steps.parse().unwrap());
    let seed = std::env::var("TALLYGATE_IDENTITY_SEED").map_or(1, |seed| seed.parse().unwrap());
    let server = Server::start(flavor);
    let options = Options::default().budget(std::time::Duration::from_secs(20));
    let redis = Redis::with(&server.url(), options).unwrap();
    for kind in Kind::ALL {
        let mut campaign = Campaign::new(kind, &redis, seed);
        while campaign.steps < steps {
            campaign.round().await;
        }
        let Campaign { steps, wide, by_verb, .. } = &campaign;
        println!("identity {} {kind} steps={steps} above_2_53={wide} {by_verb:?}", flavor.name());
        assert!(wide * 10 >= *steps, "{kind}: only {wide} of {steps} had products above 2⁵³");
    }
    assert_eq!(server.keys_without_ttl(), Vec::<Vec<u8>>::new());
}

/// Random histories of one algorithm.
struct Campaign {
    kind: Kind,
    random: fastrand::Rng,
    store: RedisStore,
    clients: Vec<Client>,
    named: usize,
    steps: usize,
    /// Steps in which a product passed 2⁵³.
    wide: usize,
    by_verb: HashMap<&'static str, usize>,
}

/// The state of a client in the core.
struct Client {
    name: String,
    policy: Arc<Policy>,
    /// The state, and the policy that it was written under.
    state: Option<(Arc<Policy>, Box<[LimitRecord]>)>,
    now: i64,
    last: Option<Decision>,
    /// The last steps, for the message of a failure.
    history: VecDeque<String>,
    left: usize,
}

impl Campaign {
    fn new(kind: Kind, redis: &Redis, seed: u64) -> Self {
        let store = redis.store(kind.name()).on_failure(OnFailure::Deny).in_ticks();
        Self {
            kind,
            random: fastrand::Rng::with_seed(seed),
            store,
            clients: Vec::new(),
            named: 0,
            steps: 0,
            wide: 0,
            by_verb: HashMap::new(),
        }
    }

    /// Makes one step of every client, all of them in flight at once.
    async fn round(&mut self) {
        self.clients.retain(|client| client.left > 0);
        while self.clients.len() < CLIENTS {
            self.named += 1;
            let (policy, now) = (Arc::new(self.policy()), self.start());
            self.clients.push(Client {
                name: format!("client {}", self.named),
                policy,
                state: None,
                now,
                last: None,
                history: VecDeque::new(),
                left: self.random.usize(1..200),
            });
        }
        let mut asked = Vec::with_capacity(CLIENTS);
        for index in 0..self.clients.len() {
            if self.random.u8(..) < 4 {
                self.clients[index].policy = Arc::new(self.policy());
            }
            self.clients[index].now = self.time(index);
            self.clients[index].left -= 1;
            let op = self.op(index);
            asked.push((self.clients[index].policy.clone(), op));
        }
        let store = &self.store;
        let replies = self.clients.iter().zip(&asked).map(|(client, (policy, op))| {
            store.apply::<Timed>(&**policy, client.name.as_bytes(), *op, Some(Tick(client.now)))
        });
        let replies = join_all(replies).await;
        for (index, (reply, (policy, op))) in replies.into_iter().zip(asked).enumerate() {
            let client = &mut self.clients[index];
            let expected = client.step(&policy, op);
            let found = reply.unwrap_or_else(|error| panic!("{policy:?} {op:?}: {error}"));
            assert_eq!(
                found,
                expected,
                "{} at {} {op:?} under {policy:?}\nafter {:#?}\nto {:?}\n{:?}",
                client.name,
                client.now,
                client.history,
                client.state,
                self.store.redis().last_error()
            );
            client.last = Some(found.decision);
            client.history.truncate(4);
            let records = client.state.as_ref().map(|(_, state)| state);
            client.history.push_front(format!("{op:?} at {}: {records:?}", client.now));
            self.steps += 1;
            let widest = policy.limits().iter().map(|limit| {
                let n = limit.numbers();
                u128::from(n.burst) * u128::from(n.window.0)
            });
            self.wide += usize::from(widest.max().unwrap() > 1 << 53);
            let verb = match op {
                Op::Check(_) if found.decision.allowed => "allowed",
                Op::Check(_) => "denied",
                Op::Peek(_) => "peek",
                Op::Force(..0) => "refund",
                Op::Force(_) => "debt",
                Op::Reset => "reset",
            };
            *self.by_verb.entry(verb).or_default() += 1;
        }
    }

    fn number(&mut self, bits: u32) -> u64 {
        let bits = self.random.u32(0..=bits);
        let low = if bits == 0 { 0 } else { 1 << (bits - 1) };
        self.random.u64(low..=((1_u128 << bits) - 1).try_into().unwrap()).max(1)
    }

    /// Returns small, deep (products beyond doubles), or extreme (numbers beyond doubles) numbers.
    fn policy(&mut self) -> Policy {
        loop {
            let bits = match self.random.u8(0..10) {
                0..5 => 12,
                5..8 => 40,
                8 => 52,
                _ => 62,
            };
            let others = if self.random.u8(0..6) == 0 { self.random.usize(1..3) } else { 0 };
            let limits: Vec<_> = (0..=others)
                .map(|place| {
                    let kind =
                        if place == 0 { self.kind } else { self.random.choice(Kind::ALL).unwrap() };
                    self.limit(kind, bits).named(format!("limit {place}"))
                })
                .collect();
            if let Ok(policy) = Policy::all_of("a policy", limits) {
                return policy;
            }
        }
    }

    fn limit(&mut self, kind: Kind, bits: u32) -> tallygate::policy::LimitBuilder {
        let (mut limit, mut window) = (self.number(bits), self.number(bits));
        if kind == Kind::SlidingWindowLog {
            // One of them must be small, to bound the number of entries.
            match self.random.u8(0..3) {
                0 => (limit, window) = (limit % 64 + 1, window % 1000 + 1),
                1 => (limit, window) = (limit % 64 + 1, window << self.random.u32(0..(63 - bits))),
                _ => (limit, window) = (limit << self.random.u32(0..(63 - bits)), window % 64 + 1),
            }
        }
        let mut builder = Policy::of(kind, limit).per(Ticks(window));
        let mut capacity = limit;
        if kind.is_bucket() && self.random.bool() {
            capacity = self.number(bits);
            builder = builder.burst(capacity);
        }
        if self.random.u8(0..4) == 0 {
            builder = builder.debt(self.number(bits));
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
        if self.random.u8(0..8) == 0 {
            let lasts = self.number(bits);
            builder = builder.penalty(Penalty::lasting(Ticks(lasts)).after(self.random.u64(1..4)));
        }
        builder
    }

    fn start(&mut self) -> i64 {
        match self.random.u8(0..8) {
            0 => 0,
            1 => -self.random.i64(0..1_000_000),
            2 => self.random.i64(..),
            3 => (1 << 52) - self.random.i64(0..1000),
            _ => 1_760_000_000_000_000 + self.random.i64(0..1_000_000_000),
        }
    }

    /// Advances the time: usually a little, or to the tick of the next event; rarely far, and rarely back.
    fn time(&mut self, index: usize) -> i64 {
        let (now, last) = (self.clients[index].now, self.clients[index].last);
        let numbers = *self.clients[index].policy.limits()[0].numbers();
        let window = i64::try_from(numbers.window.0).unwrap();
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
            (11, _) => now.saturating_add(window).saturating_sub(self.random.i64(0..2)),
            (12, _) => now.saturating_sub(self.random.i64(0..=window)),
            (13, _) if self.random.u8(0..8) == 0 => {
                now.saturating_sub(window).saturating_sub(self.random.i64(0..=window))
            }
            (14, _) if self.random.u8(0..8) == 0 => {
                now.saturating_add(window.saturating_mul(self.random.i64(1..100)))
            }
            _ => now.saturating_add_unsigned(self.random.u64(0..=numbers.window.0 / 4 + 1)),
        }
    }

    fn op(&mut self, index: usize) -> Op {
        let client = &self.clients[index];
        let capacity = client.policy.limits()[0].numbers().burst;
        let remaining = client.last.map_or(capacity, |last| last.remaining);
        let cost = match self.random.u8(0..16) {
            0..6 => 1,
            6..9 => self.random.u64(0..=capacity / 4 + 1),
            9 => capacity,
            10 => capacity.saturating_add(1),
            11 => remaining,
            12 => remaining.saturating_add(1),
            13 => 0,
            14 => self.random.u64(..),
            _ => self.random.u64(0..=capacity),
        };
        match self.random.u8(0..20) {
            0 => Op::Peek(cost),
            1 | 2 => Op::Force(-i128::from(cost)),
            3 => Op::Force(cost.into()),
            4 if self.random.bool() => Op::Reset,
            _ => Op::Check(cost),
        }
    }
}

impl Client {
    /// Decides by the core, and keeps the new state, except after a peek.
    fn step(&mut self, policy: &Arc<Policy>, op: Op) -> Timed {
        let now = Tick(self.now);
        let mut state = match &self.state {
            None => policy.initial(now),
            Some((same, state)) if same.limits() == policy.limits() => state.clone(),
            Some((other, state)) => policy.carry(other, state, now),
        };
        let mut part = Part { rule: &**policy, state: &mut state, op };
        let agrees = part.allows(now);
        let (timed, _) = part.step::<Timed>(now, agrees);
        let looks = matches!(op, Op::Peek(_) | Op::Check(0) | Op::Force(0));
        let is_new = self.state.is_none();
        // A denial of a new client leaves no state behind, unless there is a penalty.
        let denied = matches!(op, Op::Check(_)) && !timed.decision.allowed;
        let kept = is_new
            && denied
            && policy.state_to_numbers(&state) == policy.state_to_numbers(&policy.initial(now));
        if !looks && !kept {
            self.state = Some((policy.clone(), state));
        }
        timed
    }
}
