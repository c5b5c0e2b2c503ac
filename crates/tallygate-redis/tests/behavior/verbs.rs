//! Operations other than checks, on a real server and by its clock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use crate::common::{AMPLE, assert_all_expire, burst, count, limiter, only_key, patient, until};
use futures_util::future::join_all;
use tallygate::algorithm::{Algorithm, DecodeError, Facts, Fit, Used};
use tallygate::policy::Penalty;
use tallygate::reservation::SettleError;
use tallygate::tiers::Access;
use tallygate::{Ask, Cost, Decision, Policy, RateLimiter, Source, Tick, Ticks, Tiers};
use tallygate_redis::{
    AnyLimiter, CustomStore, Error, InFlight, JointAsk, OnFailure, Options, Redis, Stores,
    Waiting as _, check_all, open,
};
use tallygate_testkit::servers::{Flavor, Proxy, Server};
use tokio::task::block_in_place;

/// A user-defined algorithm: a number of coins, which all return an hour after the last one was taken.
struct Coins {
    coins: Cost,
    /// Called at every decision, between reading and writing.
    between: Box<dyn Fn() + Send + Sync>,
}

impl Coins {
    fn new(coins: Cost) -> Self {
        Self { coins, between: Box::new(|| {}) }
    }
}

const HOUR: Ticks = Ticks(3_600_000_000_000);

impl Algorithm for Coins {
    /// How many coins are taken, and when the last one was.
    type State = (Cost, Tick);

    fn capacity(&self) -> Cost {
        self.coins
    }

    fn fresh(&self, now: Tick) -> Self::State {
        (0, now)
    }

    fn last_change(&self, _: &Self::State) -> Tick {
        Tick(i64::MIN)
    }

    fn clock_was_set_back(&self, _: &Self::State, _: Tick) -> bool {
        false
    }

    fn rebase(&self, _: &mut Self::State, _: Tick) {}

    fn fit(&self, state: &Self::State, now: Tick, cost: Cost) -> Fit {
        (self.between)();
        match self.fresh_at(state) {
            _ if cost > self.coins => Fit::Never,
            Some(fresh) if now < fresh && state.0 + cost > self.coins => {
                Fit::After(fresh.since(now))
            }
            _ => Fit::Now,
        }
    }

    fn charge(&self, state: &mut Self::State, now: Tick, amount: i128) -> u128 {
        let taken = i128::from(state.0) + amount;
        *state = (u64::try_from(taken.max(0)).expect("few"), now);
        0
    }

    fn facts(&self, state: &Self::State, now: Tick, _: Option<Cost>) -> Facts {
        let reset_after = self.fresh_at(state).map_or(Ticks::ZERO, |fresh| fresh.since(now));
        let remaining = self.coins - state.0;
        Facts { remaining, reset_after, ..Facts::all_of(self.coins) }
    }

    fn fresh_at(&self, state: &Self::State) -> Option<Tick> {
        state.1.after(HOUR)
    }

    fn used(&self, state: &Self::State, _: Tick) -> Used {
        Used::whole(state.0)
    }

    fn with_used(&self, used: Used, now: Tick) -> Self::State {
        (used.rounded_up(), now)
    }

    fn encode(&self, state: &Self::State, out: &mut Vec<u8>) {
        out.extend(state.0.to_be_bytes());
        out.extend(state.1.0.to_be_bytes());
    }

    fn decode(&self, bytes: &[u8]) -> Result<Self::State, DecodeError> {
        let (taken, last) = bytes.split_first_chunk::<8>().ok_or(DecodeError::Truncated)?;
        let last = last.try_into().map_err(|_| DecodeError::Truncated)?;
        Ok((u64::from_be_bytes(*taken), Tick(i64::from_be_bytes(last))))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_custom_algorithm_is_exact_under_contention() {
    const COINS: Cost = 60;
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let store = CustomStore::new(&redis, "coins");
    // The first two callers have both read the state before one of them writes, so one of them loses the race.
    let (decisions, both_have_read) = (AtomicU64::new(0), Barrier::new(2));
    let between = Box::new(move || {
        if decisions.fetch_add(1, Ordering::Relaxed) < 2 {
            block_in_place(|| both_have_read.wait());
        }
    });
    let coins = Coins { coins: COINS, between };
    let limiter = Arc::new(RateLimiter::in_store("coins", coins, store));
    let asking = (0..8).map(|_| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let mut allowed = 0;
            loop {
                match limiter.check("alice").await {
                    Ok(decision) if decision.allowed => allowed += 1,
                    Ok(_) => return allowed,
                    // Nothing was charged, so the caller retries.
                    Err(error) => assert!(matches!(error, Error::Contended { .. }), "{error}"),
                }
            }
        })
    });
    let allowed: Cost = join_all(asking).await.into_iter().map(|one| one.expect("no panic")).sum();
    assert_eq!(allowed, COINS);
    assert!(redis.counts().contended > 0, "there were races");
    assert_eq!(limiter.refund(Ask::new("alice").cost(2)).await.unwrap().remaining, 2);
    assert_eq!(limiter.reset("alice").await.unwrap().remaining, COINS);
    assert_all_expire(&server);
}

/// Fault J1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_loses_every_race_writes_nothing_when_its_time_is_over() {
    const BUDGET: Duration = Duration::from_secs(1);
    const RACES: u64 = 5;
    let server = Server::start(Flavor::Redis);
    let redis = Redis::with(&server.url(), Options::default().budget(BUDGET)).unwrap();
    let store = CustomStore::new(&redis, "coins");
    let first = RateLimiter::in_store("coins", Coins::new(1_000_000), store.clone());
    assert!(first.check("alice").await.unwrap().allowed);
    let key = only_key(&server);
    let (mut other, taken) = (server.connection().unwrap(), Arc::new(AtomicU64::new(1)));
    let value: Vec<u8> = server.ask(&[b"GET", &key[..]]);
    let (counted, counting, mut began) = (taken.clone(), redis.clone(), None);
    // Another client writes between each read of the late caller and its write. After some races, the late caller is held
    // back until its time is over, so its time always ends before a write and never while a call is in flight.
    let other = Mutex::new(move || {
        let began = *began.get_or_insert_with(Instant::now);
        let mut value = value.clone();
        let taken = counted.fetch_add(1, Ordering::Relaxed) + 1;
        value[2..10].copy_from_slice(&taken.to_be_bytes());
        let mut set = redis::cmd("SET");
        set.arg(&key).arg(value).arg("EX").arg(1000);
        set.query::<()>(&mut other).expect("SET succeeds");
        while counting.counts().contended >= RACES && began.elapsed() < BUDGET {
            std::thread::yield_now();
        }
    });
    let between = Box::new(move || block_in_place(|| (other.lock().expect("no panic"))()));
    let late = RateLimiter::in_store("coins", Coins { coins: 1_000_000, between }, store);
    let decision = late.check("alice").await;
    assert_eq!(decision, Err(Error::Contended { tries: 5 }));
    assert_eq!(redis.counts().contended, RACES, "no write after the time is over");
    // Only the writes of the other client are there: the late caller was charged nothing.
    let coins = first.peek(Ask::new("alice").cost(0)).await.unwrap();
    assert_eq!(coins.remaining, 1_000_000 - taken.load(Ordering::Relaxed));
    assert_all_expire(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_keys_on_one_server_are_decided_in_one_step() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let make = |name: &'static str, limit| {
        RateLimiter::with_store(count(limit), redis.store(name).on_failure(OnFailure::Deny))
    };
    let (users, addresses) = (make("users", 100), make("addresses", 40));
    let limiters = Arc::new((users, addresses));
    let asking = (0..8).map(|_| {
        let limiters = limiters.clone();
        tokio::spawn(async move {
            let (mut allowed, mut seen) = (0, 0);
            loop {
                let asks = [
                    JointAsk::of(&limiters.0, Ask::new("alice").cost(2)).expect("valid"),
                    JointAsk::of(&limiters.1, "192.0.2.1").expect("valid"),
                ];
                let joint = check_all(asks).await.expect("a decision");
                // A denial charges nothing, not even for a moment.
                let left = limiters.0.peek(Ask::new("alice").cost(0)).await.expect("a decision");
                seen = seen.max(100 - left.remaining);
                match joint.decision.source {
                    Source::Store if joint.decision.allowed => allowed += 1,
                    Source::Store => {
                        assert_eq!(joint.denied_ask, Some(1));
                        return (allowed, seen);
                    }
                    // It lost too many races: nothing was charged.
                    _ => {}
                }
            }
        })
    });
    let (mut allowed, mut seen) = (0, 0);
    for one in join_all(asking).await {
        let (mine, saw) = one.expect("no panic");
        allowed += mine;
        seen = seen.max(saw);
    }
    assert_eq!(allowed, 40);
    assert_eq!(seen, 80, "never more than the allowed units");
    assert_eq!(limiters.0.peek(Ask::new("alice").cost(0)).await.unwrap().remaining, 20);
    assert_eq!(limiters.1.peek(Ask::new("192.0.2.1").cost(0)).await.unwrap().remaining, 0);
    // The same key twice is charged twice.
    let twice = || {
        ["bob", "bob"].map(|key| JointAsk::of(&limiters.1, Ask::new(key).cost(25)).expect("valid"))
    };
    let joint = check_all(twice()).await.unwrap();
    assert_eq!((joint.decision.allowed, joint.denied_ask), (false, Some(0)));
    assert_all_expire(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_are_limited_returned_and_renewed() {
    const LEASE: Duration = Duration::from_millis(300);
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let in_flight = InFlight::new(&redis, "uploads", 2, LEASE);
    let first = in_flight.enter("alice").await.unwrap().expect("there are two");
    let second = in_flight.enter("alice").await.unwrap().expect("there is another");
    assert!(in_flight.enter("alice").await.unwrap().is_none());
    assert!(in_flight.enter("bob").await.unwrap().is_some(), "every key has its own places");
    second.leave().await.unwrap();
    assert_eq!(in_flight.count("alice").await.unwrap(), 1);
    let second = in_flight.enter("alice").await.unwrap().expect("it was returned");
    drop(second);
    until("the place is returned", async || {
        (in_flight.count("alice").await.ok()? == 1).then_some(())
    })
    .await;
    // A place is renewed while it is held.
    let start = Instant::now();
    while start.elapsed() < 3 * LEASE {
        assert_eq!(in_flight.count("alice").await.unwrap(), 1, "after {:?}", start.elapsed());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_all_expire(&server);
    first.leave().await.unwrap();
    assert_eq!(in_flight.count("alice").await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_expires_when_its_holder_dies() {
    const LEASE: Duration = Duration::from_millis(400);
    let server = Server::start(Flavor::Redis);
    let url = server.url();
    let entered = std::thread::spawn(move || {
        let process = tokio::runtime::Runtime::new().expect("a runtime");
        let in_flight = InFlight::new(&patient(&url), "uploads", 1, LEASE);
        let place = process.block_on(in_flight.enter("alice")).expect("asked").expect("free");
        // As after a crash: the place is neither returned nor renewed.
        process.shutdown_background();
        std::mem::forget(place);
        Instant::now()
    });
    let entered = entered.join().unwrap();
    let in_flight = InFlight::new(&patient(&server.url()), "uploads", 1, LEASE);
    let place = until("it lapses", async || in_flight.enter("alice").await.ok()?).await;
    let after = entered.elapsed();
    // The lease began a moment before the reply.
    assert!(after >= LEASE - Duration::from_millis(100), "{after:?}");
    assert!(after < LEASE + Duration::from_secs(2), "{after:?}");
    place.leave().await.unwrap();
    assert_all_expire(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_callers_are_served_in_order() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let policy = Policy::token_bucket(20).per_second().burst(1).build().unwrap();
    let limiter = limiter(&redis, policy, OnFailure::Deny);
    assert!(limiter.check("alice").await.unwrap().allowed);
    let (served, start) = (Mutex::new(Vec::new()), Instant::now());
    let (limiter, served) = (&limiter, &served);
    let waiting = (0..6).map(|place| async move {
        let decision = limiter.until_ready("alice", AMPLE).await.expect("a decision");
        assert!(decision.allowed);
        served.lock().expect("no panic").push(place);
    });
    join_all(waiting).await;
    assert_eq!(*served.lock().unwrap(), [0, 1, 2, 3, 4, 5]);
    assert!(start.elapsed() >= Duration::from_millis(290), "{:?}", start.elapsed());
    assert_all_expire(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_would_wait_too_long_is_denied_and_one_that_leaves_is_charged_nothing() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let limiter = limiter(&redis, burst(2), OnFailure::Deny);
    // A caller that does not wait does not wait for the first connection, either.
    until("the connection is made", async || redis.ping().await.ok()).await;
    assert!(limiter.until_ready(Ask::new("alice").cost(2), Duration::ZERO).await.unwrap().allowed);
    let start = Instant::now();
    let decision = limiter.until_ready("alice", Duration::from_secs(60)).await.unwrap();
    assert!(!decision.allowed, "it would take an hour");
    assert!(decision.retry_after.unwrap().as_duration() > Duration::from_secs(3500));
    assert!(start.elapsed() < Duration::from_secs(5), "at once");
    let never =
        limiter.until_ready(Ask::new("alice").cost(3), Duration::from_secs(60)).await.unwrap();
    assert_eq!((never.allowed, never.retry_after), (false, None));

    // One caller waits, another behind it, and both leave before their turn.
    let used = limiter.peek(Ask::new("alice").cost(0)).await.unwrap();
    let day = Duration::from_secs(86_400);
    for _ in 0..2 {
        let both = join_all((0..2).map(|_| limiter.until_ready("alice", day)));
        assert!(tokio::time::timeout(Duration::from_millis(50), both).await.is_err());
    }
    let still = limiter.peek(Ask::new("alice").cost(0)).await.unwrap();
    assert!(still.remaining == used.remaining && still.reset_after <= used.reset_after);
    // A caller behind a waiting one gets the wait, and is charged nothing.
    let (first, second) = (
        limiter.until_ready("alice", day),
        limiter.until_ready("alice", Duration::from_millis(30)),
    );
    let first = std::pin::pin!(tokio::time::timeout(Duration::from_millis(500), first));
    let (first, second) = futures_util::future::join(first, second).await;
    assert!(first.is_err() && !second.unwrap().allowed);
    assert_all_expire(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn used_units_stay_used_when_tiers_change() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let tiers = Tiers::new(burst(10))
        .tier("pro", burst(100))
        .tier("free", Access::Unlimited)
        .tier("gone", Access::Blocked);
    let store = redis.store("api").on_failure(OnFailure::Deny);
    let limiter = RateLimiter::in_store("api", tiers, store);
    let [pro, free, gone] = ["pro", "free", "gone"].map(|tier| Ask::new("alice").tier(tier));
    let mut allowed = 0;
    for _ in 0..150 {
        allowed += u64::from(limiter.check("alice").await.unwrap().allowed);
        allowed += u64::from(limiter.check(pro).await.unwrap().allowed);
    }
    assert_eq!(allowed, 100, "the larger of the two quotas, once");
    for _ in 0..50 {
        let decision = limiter.check(free).await.unwrap();
        assert_eq!((decision.allowed, decision.remaining), (true, Cost::MAX));
        let decision = limiter.check(gone).await.unwrap();
        assert_eq!((decision.allowed, decision.limit, decision.retry_after), (false, 0, None));
        assert_eq!(decision.source, Source::Store, "{:?}", redis.last_error());
    }
    assert!(!limiter.check(pro).await.unwrap().allowed);

    limiter.set_override("alice", burst(200), None);
    assert_eq!(limiter.check("alice").await.unwrap().remaining, 99, "a hundred are used");
    limiter.set_override("alice", Access::Blocked, None);
    assert!(!limiter.check(pro).await.unwrap().allowed);
    assert!(limiter.remove_override("alice"));
    assert_eq!(limiter.check(Ask::new("bob").tier("pro")).await.unwrap().remaining, 99);
    assert_all_expire(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reservation_settles_the_units_that_were_used() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    for kind in tallygate::Kind::ALL {
        let policy = Policy::of(kind, 10).per_hour().debt(5).build().unwrap();
        let store = redis.store(kind.name()).on_failure(OnFailure::Deny);
        let limiter = RateLimiter::with_store(policy, store);
        let left =
            async || limiter.peek(Ask::new("alice").cost(0)).await.expect("a decision").remaining;
        let reserve = async |estimate| {
            let reserved =
                limiter.reserve(Ask::new("alice").cost(estimate), AMPLE).await.expect("a decision");
            reserved.granted()
        };
        let mut less = reserve(4).await.expect("granted");
        assert_eq!(left().await, 6, "{kind}");
        assert_eq!(limiter.settle(&mut less, 1).await.unwrap().remaining, 9, "{kind}");
        let again = limiter.settle(&mut less, 1).await;
        assert_eq!(again, Err(Error::Settle(SettleError::AlreadySettled)));

        let mut more = reserve(2).await.expect("granted");
        assert_eq!(limiter.settle(&mut more, 5).await.unwrap().remaining, 4, "{kind}");
        let mut none = reserve(3).await.expect("granted");
        assert_eq!(limiter.cancel(&mut none).await.unwrap().remaining, 4, "{kind}");
        assert!(reserve(5).await.is_none(), "{kind}");

        // The client goes into debt, up to the bound.
        let mut debt = reserve(4).await.expect("granted");
        let decision = limiter.settle(&mut debt, 100).await.unwrap();
        assert_eq!((decision.remaining, decision.source), (0, Source::Store), "{kind}");
        let owed = limiter.refund(Ask::new("alice").cost(5)).await.unwrap();
        assert_eq!(owed.remaining, 0, "{kind}: five were owed");
        assert_eq!(limiter.refund(Ask::new("alice").cost(3)).await.unwrap().remaining, 3, "{kind}");
        let late = limiter.reserve("alice", Ticks(0)).await.unwrap();
        let mut late = late.granted().unwrap();
        until("its time is over", async || (limiter.now() > late.until()).then_some(())).await;
        let settled = limiter.settle(&mut late, 0).await;
        assert!(
            matches!(settled, Err(Error::Settle(SettleError::Expired { .. }))),
            "{kind}: {settled:?}"
        );
        assert_eq!(left().await, 2, "{kind}: it stays charged");
    }
    assert_all_expire(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_keys_take_one_round_trip_and_stay_in_order() {
    let server = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&server.address());
    let redis = patient(&proxy.url());
    let limiter = Arc::new(limiter(&redis, count(100), OnFailure::Deny));
    let keys: Vec<String> = (0..40).map(|key| format!("key {key}")).collect();
    for (used, key) in keys.iter().enumerate() {
        let used = u64::try_from(used).unwrap();
        assert_eq!(limiter.check(Ask::new(key).cost(used + 1)).await.unwrap().remaining, 99 - used);
    }
    let before = redis.counts().calls;
    proxy.stall(true);
    let asking = {
        let (limiter, keys) = (limiter.clone(), keys.clone());
        tokio::spawn(async move { limiter.check_many::<Decision, _>(&keys).await })
    };
    until("all are sent before any is answered", async || {
        (redis.counts().calls - before == 40).then_some(())
    })
    .await;
    proxy.stall(false);
    let decisions = asking.await.unwrap().unwrap();
    let left: Vec<Cost> = decisions.iter().map(|decision| decision.remaining).collect();
    assert_eq!(left, (59..99).rev().collect::<Vec<Cost>>());
    assert_eq!(redis.counts().calls - before, 40);
    assert_all_expire(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn penalties_and_shadow_limits_work_on_the_server() {
    let server = Server::start(Flavor::Redis);
    let (here, there) = (patient(&server.url()), patient(&server.url()));
    let policy = || {
        let penalty = Penalty::lasting(Ticks(500_000_000)).after(3);
        let strict = Policy::token_bucket(50).per_second().burst(2).penalty(penalty);
        let shadow = Policy::fixed_window(1).per_day().named("shadow").shadow();
        Policy::all_of("api", [strict, shadow]).expect("valid")
    };
    let here = limiter(&here, policy(), OnFailure::Deny);
    let there = limiter(&there, policy(), OnFailure::Deny);
    let decision = here.check(Ask::new("alice").cost(2)).await.unwrap();
    assert_eq!((decision.allowed, decision.shadow_denied_by), (true, Some(1)), "only as a shadow");
    // Denials by all processes count; the third one starts the penalty.
    for limiter in [&here, &there, &here] {
        assert!(!limiter.check(Ask::new("alice").cost(2)).await.unwrap().allowed);
    }
    let decision = there.check("alice").await.unwrap();
    assert_eq!((decision.allowed, decision.denied_by), (false, Some(0)));
    let wait = decision.retry_after.unwrap().as_duration();
    assert!(wait > Duration::from_millis(100), "more than a token takes: {wait:?}");
    let start = Instant::now();
    let decision = until("the penalty is over", async || {
        there.check("alice").await.ok().filter(|decision| decision.allowed)
    })
    .await;
    assert_eq!(decision.source, Source::Store);
    assert!(start.elapsed() + Duration::from_millis(5) >= wait, "{:?}", start.elapsed());
    assert_all_expire(&server);
}

/// Runs one history on a limiter with any store.
async fn history(limiter: &AnyLimiter) -> Vec<(bool, u64)> {
    let short = |decision: Decision| (decision.allowed, decision.remaining);
    let pro = Ask::new("alice").tier("pro");
    let mut all = vec![
        short(limiter.check("alice").await.expect("an answer")),
        short(limiter.check(Ask::new("alice").cost(2)).await.expect("an answer")),
        short(limiter.check("alice").await.expect("an answer")),
        short(limiter.check(pro.cost(2)).await.expect("an answer")),
        short(limiter.peek(pro).await.expect("an answer")),
        short(limiter.refund(pro.cost(4)).await.expect("an answer")),
    ];
    let many: Vec<Decision> =
        limiter.check_many(&["bob", "bob", "carol"]).await.expect("an answer");
    all.extend(many.into_iter().map(short));
    let reserved = limiter
        .reserve(Ask::new("dave").cost(3), Duration::from_secs(60))
        .await
        .expect("an answer");
    let mut reservation = reserved.granted().expect("enough is left");
    all.push(short(limiter.settle(&mut reservation, 1).await.expect("an answer")));
    let parts = ["dave", "carol"].map(|key| JointAsk::of_any(limiter, key).expect("an answer"));
    all.push(short(check_all(parts).await.expect("an answer").decision));
    all.push(short(limiter.reset("dave").await.expect("an answer")));
    let until_ready = limiter.until_ready(Ask::new("erin").cost(3), AMPLE);
    all.push(short(until_ready.await.expect("an answer")));
    let too_long = limiter.until_ready(Ask::new("erin").cost(3), Duration::from_millis(1));
    all.push(short(too_long.await.expect("an answer")));
    all.push(short(limiter.shape("frank").await.expect("an answer")));
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_chosen_by_its_address_decides_the_same() {
    let server = Server::start(Flavor::Redis);
    let tiers = || Tiers::new(burst(3)).tier("pro", burst(5));
    let in_memory = open("memory").unwrap().limiter("api", tiers());
    assert!(in_memory.store().memory().is_some() && in_memory.store().redis().is_none());
    let in_redis = Stores::Redis(patient(&server.url())).limiter("api", tiers());
    let expected = history(&in_memory).await;
    assert_eq!(history(&in_redis).await, expected);
    assert_eq!(expected[..4], [(true, 2), (true, 0), (false, 0), (true, 0)]);
    assert!(
        matches!(open("memcached://127.0.0.1").unwrap_err().to_string(), error if error.contains("redis://"))
    );
    for limiter in [&in_memory, &in_redis] {
        let unknown = limiter.check(Ask::new("alice").tier("gold")).await.unwrap_err();
        assert_eq!(unknown.to_string(), "no tier is named \"gold\"; the only tier is pro");
        let long = limiter.check(&[b'x'; 5000]).await.unwrap_err();
        assert_eq!(long, Error::KeyTooLong { bytes: 5000 });
    }
    for stores in [open("memory").unwrap(), Stores::Redis(patient(&server.url()))] {
        let uploads = stores.in_flight("uploads", 1, Duration::from_secs(60));
        let place = uploads.enter("alice").await.unwrap().expect("no request is in flight");
        assert!(uploads.enter("alice").await.unwrap().is_none());
        assert!(uploads.enter("bob").await.unwrap().is_some());
        place.leave().await.unwrap();
        assert_eq!(uploads.count("alice").await.unwrap(), 0);
    }
    let parts = [&in_memory, &in_redis].map(|limiter| JointAsk::of_any(limiter, "erin").unwrap());
    assert_eq!(check_all(parts).await.unwrap_err(), Error::MixedStores);
    assert_all_expire(&server);
}
