//! Rules that change around an outage with `local`: what Redis charges afterwards keeps the usage under the old rule.

use futures_util::future::join_all;
use tallygate::clock::ManualClock;
use tallygate::policy::LimitBuilder;
use tallygate::reservation::{Actual, Reservation};
use tallygate::store::{Capacity, MemoryStore};
use tallygate::tiers::ClientRule;
use tallygate::{Ask, Cost, Decision, Kind, Policy, RateLimiter, Source, Tick, Ticks, Tiers};
use tallygate_redis::{OnFailure, Redis, RedisStore};
use tallygate_testkit::servers::{Flavor, Proxy, Server};

use crate::common::{assert_all_expire, patient, until};

const KINDS: [Kind; 6] = [
    Kind::TokenBucket,
    Kind::Gcra,
    Kind::LeakyBucket,
    Kind::FixedWindow,
    Kind::SlidingWindowLog,
    Kind::SlidingWindowCounter,
];
const HOUR: u64 = 3_600_000_000_000;
/// A time at the beginning of no window.
const NOW: Tick = Tick(10_007 * 3_600_000_000_000 + 1_000_000_000);

/// What a client does around the change of its rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    /// A check during an outage after the change.
    LocalCheck,
    /// Checks and a refund during an outage after the change.
    LocalRefund,
    /// A refund without an outage.
    Refund,
    /// A settlement below the estimate.
    SettleLess,
    /// A settlement above the estimate.
    SettleMore,
}

impl Verb {
    const ALL: [Self; 5] =
        [Self::LocalCheck, Self::LocalRefund, Self::Refund, Self::SettleLess, Self::SettleMore];

    const fn is_local(self) -> bool {
        matches!(self, Self::LocalCheck | Self::LocalRefund)
    }
}

fn policy(kind: Kind, limit: Cost, hours: u64, limits: usize) -> Policy {
    let long = Policy::of(kind, limit).per(Ticks(hours * HOUR)).named("long");
    let short = Policy::of(kind, 1000).per(Ticks(1_000_000_000)).named("short");
    let all: Vec<LimitBuilder> = [long, short].into_iter().take(limits).collect();
    Policy::all_of("", all).unwrap()
}

/// One history, on Redis with an outage and in memory without.
struct Case<'a> {
    name: String,
    verb: Verb,
    there: RateLimiter<Tiers, RedisStore>,
    here: RateLimiter<Tiers, MemoryStore<ClientRule, &'a ManualClock>>,
    new: Tiers,
    reservations: Option<(Reservation, Reservation)>,
}

impl<'a> Case<'a> {
    fn new(
        redis: &Redis,
        clock: &'a ManualClock,
        (stored, new, limits, verb): (Kind, Kind, usize, Verb),
    ) -> Self {
        let name = format!("{limits} {stored:?} to {new:?}, {verb:?}");
        let store = redis.store(name.clone());
        let store = store.on_failure(OnFailure::Local { instances: 1 }).deny_cache(false);
        let (stored, new) = (policy(stored, 10, 40, limits), policy(new, 9, 30, limits));
        let before = Tiers::new(stored.clone()).tier("old", stored.clone());
        let memory = MemoryStore::new(Capacity::of(10), clock);
        Self {
            there: RateLimiter::in_store("api", before, store),
            here: RateLimiter::in_store(
                "api",
                Tiers::new(stored.clone()).tier("old", stored.clone()),
                memory,
            ),
            new: Tiers::new(new).tier("old", stored),
            reservations: None,
            name,
            verb,
        }
    }

    fn ask(cost: Cost) -> Ask<'static> {
        Ask::new("alice").cost(cost).at(NOW)
    }

    /// Uses a part of the quota, and then changes the rule.
    async fn begin(&mut self) {
        let _ = self.here.check(Self::ask(3)).unwrap();
        let _ = self.there.check(Self::ask(3)).await.unwrap();
        let here = self.here.reserve(Self::ask(2), Ticks(HOUR)).unwrap().granted().unwrap();
        let there = self.there.reserve(Self::ask(2), Ticks(HOUR)).await.unwrap();
        let there = there.granted().unwrap();
        self.reservations = Some((here, there));
        self.here.replace(&self.new);
        self.there.replace(&self.new);
    }

    async fn charge_in_this_process(&self) {
        let mut steps = vec![(1, true)];
        if self.verb == Verb::LocalRefund {
            steps.extend([(1, true), (1, false)]);
        }
        for (cost, is_check) in steps {
            let (here, there) = if is_check {
                (self.here.check(Self::ask(cost)), self.there.check(Self::ask(cost)).await)
            } else {
                (self.here.refund(Self::ask(cost)), self.there.refund(Self::ask(cost)).await)
            };
            let (here, there) = (here.unwrap(), there.unwrap());
            assert_eq!(
                (there.source, there.allowed),
                (Source::Local, here.allowed),
                "{}",
                self.name
            );
        }
    }

    async fn charge_in_redis(&mut self) {
        let (here, there) = self.reservations.as_mut().unwrap();
        let actual = match self.verb {
            Verb::SettleLess => 1,
            Verb::SettleMore => 4,
            _ => {
                let _ = self.here.refund(Self::ask(1)).unwrap();
                let _ = self.there.refund(Self::ask(1)).await.unwrap();
                return;
            }
        };
        let actual = Actual::new(actual).at(NOW);
        let _ = self.here.settle(here, actual).unwrap();
        let _ = self.there.settle(there, actual).await.unwrap();
    }

    /// Requires the same decisions in Redis as in memory, under the new rule and under the old one.
    async fn compare(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        for (tier, is_check) in
            [(None, false), (Some("old"), false), (None, true), (Some("old"), true)]
        {
            let ask = Self::ask(1).tier(tier);
            let (here, there) = if is_check {
                (self.here.check(ask).unwrap(), self.there.check(ask).await.unwrap())
            } else {
                (self.here.peek(ask).unwrap(), self.there.peek(ask).await.unwrap())
            };
            assert_eq!(there.source, Source::Store, "{}", self.name);
            let fields = |decision: &Decision| (decision.allowed, decision.remaining);
            if fields(&here) != fields(&there) {
                wrong.push(format!(
                    "{}: {tier:?}, check {is_check}: redis {:?}, memory {:?}",
                    self.name,
                    fields(&there),
                    fields(&here)
                ));
            }
        }
        wrong
    }
}

/// Redis charges the units of an outage, a refund or a settlement to a state that another rule has written. The usage under
/// that rule stays used, whatever the algorithms are. All times are given, so the test does not depend on how long it
/// takes.
///
/// Faults G5, J16 and K3.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn units_of_an_outage_after_a_change_of_rule_leave_the_usage_before_it() {
    let server = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&server.address());
    let redis = patient(&proxy.url());
    let clock = ManualClock::new(NOW);
    let mut cases = Vec::new();
    for stored in KINDS {
        for new in KINDS {
            for limits in [1, 2] {
                for verb in Verb::ALL {
                    cases.push(Case::new(&redis, &clock, (stored, new, limits, verb)));
                }
            }
        }
    }
    for case in &mut cases {
        case.begin().await;
        if !case.verb.is_local() {
            case.charge_in_redis().await;
        }
    }
    proxy.reject_connections(true);
    proxy.cut();
    for case in cases.iter().filter(|case| case.verb.is_local()) {
        case.charge_in_this_process().await;
    }
    proxy.reject_connections(false);
    until("the store answers", async || {
        let peek = cases[0].there.peek(Case::ask(0)).await.unwrap();
        (peek.source == Source::Store).then_some(())
    })
    .await;
    let wrong = join_all(cases.iter().map(Case::compare)).await.concat();
    assert_eq!(wrong, Vec::<String>::new());
    assert_all_expire(&server);
}
