//! Tiers and overrides on Redis: the same decisions as in memory after every change.

use tallygate::clock::ManualClock;
use tallygate::policy::Penalty;
use tallygate::store::{Capacity, MemoryStore, Store};
use tallygate::tiers::{Access, ClientRule};
use tallygate::{Ask, Decision, Policy, RateLimiter, Tick, Ticks, Tiers};
use tallygate_redis::{OnFailure, Options, Redis, RedisStore};
use tallygate_testkit::servers::{Flavor, Server};

fn policies() -> [Policy; 4] {
    [
        Policy::token_bucket(10).per(Ticks(100)).build().unwrap(),
        Policy::sliding_window_counter(50).per(Ticks(77)).named("b").build().unwrap(),
        Policy::all_of(
            "c",
            [
                Policy::gcra(7).per(Ticks(30)).burst(3).named("short"),
                Policy::fixed_window(20).per(Ticks(300)).named("long"),
            ],
        )
        .unwrap(),
        Policy::sliding_window_log(5)
            .per(Ticks(60))
            .penalty(Penalty::lasting(Ticks(90)).after(3))
            .build()
            .unwrap(),
    ]
}

fn tiers() -> Tiers {
    let [base, pro, team, strict] = policies();
    Tiers::new(base).tier("pro", pro).tier("team", team).tier("strict", strict)
}

#[tokio::test]
async fn tiers_overrides_and_changes_are_answered_as_in_memory() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let options = Options::default().budget(std::time::Duration::from_secs(10));
        let redis = Redis::with(&server.url(), options).unwrap();
        for seed in 0..20 {
            one_history(&redis, seed).await;
        }
        assert_eq!(server.keys_without_ttl(), Vec::<Vec<u8>>::new());
    }
}

#[tokio::test]
async fn a_client_that_appears_several_times_in_a_batch_is_decided_in_order() {
    let server = Server::start(Flavor::Redis);
    let redis = Redis::open(&server.url()).unwrap();
    let base = Policy::token_bucket(100).per_hour().build().unwrap();
    let limiter = RateLimiter::in_store(
        "api",
        Tiers::new(base),
        redis.store("api").on_failure(OnFailure::Deny),
    );
    let answers: Vec<Decision> = limiter.check_many(&["a"; 40]).await.unwrap();
    let left: Vec<u64> = answers.iter().map(|decision| decision.remaining).collect();
    assert_eq!(left, (60..100).rev().collect::<Vec<_>>());
}

async fn one_history(redis: &Redis, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let store = redis.store(format!("api {seed}")).on_failure(OnFailure::Deny).in_ticks();
    let there = RateLimiter::in_store("api", tiers(), store);
    let clock = ManualClock::new(Tick(0));
    let here = RateLimiter::in_store("api", tiers(), MemoryStore::new(Capacity::of(1000), &clock));
    let mut now = 1000;
    for step in 0..300 {
        now += random.i64(0..20);
        let key = format!("client {}", random.u8(0..3));
        if random.u8(0..12) == 0 {
            change(&mut random, &key, now, &here, &there);
        }
        let tier = random.choice([None, Some("pro"), Some("team"), Some("strict")]).unwrap();
        let (cost, verb) = (random.u64(0..4), random.u8(0..10));
        let question = Ask::new(&key).cost(cost).tier(tier).at(Tick(now));
        let expected = ask(&here, question, verb).unwrap();
        let found = ask(&there, question, verb).await.unwrap();
        assert_eq!(
            found,
            expected,
            "seed {seed}, step {step}: {key} of {tier:?} at {now}, verb {verb}, cost {cost}; {:?}",
            redis.last_error()
        );
    }
}

/// Makes the same check with both limiters.
fn ask<'a, S: Store<ClientRule>>(
    limiter: &'a RateLimiter<Tiers, S>,
    question: Ask<'a>,
    verb: u8,
) -> S::Reply<'a, Decision> {
    match verb {
        0 => limiter.peek(question),
        1 => limiter.refund(question),
        2 if question.cost == 3 => limiter.reset(question),
        _ => limiter.check(question),
    }
}

/// Makes the same change of rules in both.
fn change(
    random: &mut fastrand::Rng,
    key: &str,
    now: i64,
    here: &RateLimiter<Tiers, MemoryStore<ClientRule, &ManualClock>>,
    there: &RateLimiter<Tiers, RedisStore>,
) {
    let access = match random.u8(0..4) {
        0 => Access::Unlimited,
        1 => Access::Blocked,
        _ => Access::from(random.choice(policies()).unwrap()),
    };
    let until = random.bool().then(|| Tick(now + random.i64(1..100)));
    if random.bool() {
        here.set_override(key, access.clone(), until);
        there.set_override(key, access, until);
    } else {
        here.remove_override(key);
        there.remove_override(key);
    }
    if random.u8(0..4) == 0 {
        let other = || Tiers::new(policies()[1].clone()).tier("pro", policies()[2].clone());
        let new = if random.bool() { other() } else { tiers() };
        let new = if random.bool() { new.tier("team", policies()[0].clone()) } else { new };
        let new = new.tier("strict", policies()[3].clone()).tier("team", Access::Unlimited);
        let ruled = random.choice(policies()).unwrap();
        let new = if random.bool() { new.overridden(key, ruled) } else { new };
        here.replace(&new);
        there.replace(&new);
    }
}
