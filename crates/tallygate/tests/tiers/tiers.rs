//! Tiers, overrides and rules that change while they are in use.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tallygate::clock::ManualClock;
use tallygate::observer::Observer;
use tallygate::policy::Penalty;
use tallygate::store::{Capacity, MemoryStore, PolicyStore};
use tallygate::tiers::{Access, ClientRule, Override, RuleSource};
use tallygate::{Ask, Cost, Decision, Policy, RateLimiter, Tick, Ticks, Tiers};

type Limiter<'a> = RateLimiter<Tiers, MemoryStore<ClientRule, &'a ManualClock>>;

fn limiter(tiers: Tiers, clock: &ManualClock) -> Limiter<'_> {
    RateLimiter::in_store("api", tiers, MemoryStore::new(Capacity::of(100), clock))
}

fn bucket(limit: Cost) -> Policy {
    Policy::token_bucket(limit).per(Ticks(1_000)).build().expect("valid")
}

/// Threads that decide on different keys of one tier must not write to the reference count of its policy.
#[test]
fn choosing_the_rule_of_a_tier_writes_to_no_memory_that_threads_share() {
    let (free, pro) = (Arc::new(bucket(10)), Arc::new(bucket(100)));
    let tiers = Tiers::new(Access::Limited(Arc::clone(&free)))
        .tier("pro", Access::Limited(Arc::clone(&pro)))
        .overridden("mallory", Access::Blocked)
        .resolved_by(|key| key.starts_with(b"pro").then_some(Cow::Borrowed("pro")));
    let before = (Arc::strong_count(&free), Arc::strong_count(&pro));
    let chosen = [
        tiers.choose(b"alice"),
        tiers.choose(b"pro-bob"),
        tiers.choose_in("pro", b"carol").unwrap(),
    ];
    assert_eq!((Arc::strong_count(&free), Arc::strong_count(&pro)), before);
    let policies = chosen.iter().flat_map(|rule| rule.policies().cloned()).collect::<Vec<_>>();
    assert_eq!(policies, [free, Arc::clone(&pro), pro]);
}

/// No free burst by switching tiers any number of times, and no units are lost.
///
/// Fault G3.
#[test]
fn switching_tiers_is_neither_gain_nor_loss() {
    let clock = ManualClock::new(Tick(0));
    let limiter = limiter(Tiers::new(bucket(10)).tier("pro", bucket(100)), &clock);
    let mut allowed = 0;
    for _ in 0..200 {
        allowed += u64::from(limiter.is_allowed("a").expect("short"));
        allowed += u64::from(limiter.is_allowed(Ask::new("a").tier("pro")).expect("short"));
    }
    assert_eq!(allowed, 100, "the higher of the two, once");
    let mut earned = 0;
    for tick in 1..=1_000 {
        clock.set(Tick(tick));
        // Requests under the other tier in between neither add nor remove units.
        assert!(!limiter.check(Ask::new("a").cost(10)).expect("short").allowed);
        earned += u64::from(limiter.is_allowed(Ask::new("a").tier("pro")).expect("short"));
    }
    assert_eq!(earned, 100, "a tenth of one a tick");
}

/// A repeated denial is decided without the lock, by a note of the previous denial. Its wait is that of the rules in
/// force.
#[test]
fn a_repeated_denial_waits_no_longer_than_an_override_lasts() {
    let clock = ManualClock::new(Tick(0));
    let policy: Arc<Policy> = bucket(1).into();
    let limiter = limiter(Tiers::new(Access::Limited(policy.clone())), &clock);
    assert!(limiter.is_allowed("a").expect("short"));
    let wait = || limiter.check("a").expect("short").retry_after;
    for _ in 0..3 {
        assert_eq!(wait(), Some(Ticks(1_000)));
    }
    // The same policy until 10, and no limit after it.
    limiter.replace(&Tiers::new(Access::Unlimited));
    limiter.set_override("a", Access::Limited(policy), Tick(10));
    for _ in 0..3 {
        assert_eq!(wait(), Some(Ticks(10)));
    }
}

/// With several limits, each keeps its own usage, also a limit that the other tier does not have.
///
/// Fault G3.
#[test]
fn a_limit_that_the_other_tier_lacks_keeps_its_usage() {
    let clock = ManualClock::new(Tick(0));
    let second = |limit| Policy::token_bucket(limit).per(Ticks(10)).named("second");
    let day = Policy::fixed_window(20).per(Ticks(100_000)).named("day");
    let base = Policy::all_of("base", [second(5)]).expect("valid");
    let pro = Policy::all_of("pro", [second(5), day]).expect("valid");
    let limiter = limiter(Tiers::new(base).tier("pro", pro), &clock);
    let mut allowed = 0;
    for tick in 0..2_000 {
        clock.set(Tick(tick));
        allowed += u64::from(limiter.is_allowed(Ask::new("a").tier("pro")).expect("short"));
        let _ = limiter.check(Ask::new("a").cost(0)).expect("short");
        let _ = limiter.check(Ask::new("a").cost(6)).expect("short");
    }
    assert_eq!(allowed, 20, "a day's worth");
    assert!(limiter.is_allowed("a").expect("short"), "the other tier has no such limit");
}

#[test]
fn overrides_come_before_tiers_and_end() {
    let clock = ManualClock::new(Tick(0));
    let limiter = limiter(Tiers::new(bucket(2)).tier("pro", bucket(5)), &clock);
    limiter.set_override("vip", bucket(50), None);
    limiter.set_override("free", Access::Unlimited, Some(Tick(10)));
    limiter.set_override("bad", Access::Blocked, Some(Tick(10)));
    limiter.set_override("worse", Access::Blocked, None);
    assert_eq!(limiter.check("vip").expect("short").limit, 50);
    assert_eq!(limiter.check(Ask::new("vip").tier("pro")).expect("short").limit, 50);

    for _ in 0..100 {
        let unlimited = limiter.check("free").expect("short");
        assert_eq!((unlimited.allowed, unlimited.remaining), (true, Cost::MAX));
    }
    let bad = limiter.check("bad").expect("short");
    assert_eq!((bad.allowed, bad.limit, bad.remaining), (false, 0, 0));
    assert_eq!(bad.retry_after, Some(Ticks(10)), "when the override ends");
    let too_much = limiter.check(Ask::new("bad").cost(3)).expect("short");
    assert_eq!(too_much.retry_after, None, "more than it will get then");
    assert_eq!(limiter.check("worse").expect("short").retry_after, None);

    clock.set(Tick(10));
    assert_eq!(limiter.check("free").expect("short").remaining, 1, "nothing was used meanwhile");
    assert!(limiter.is_allowed("bad").expect("short"));
    assert!(!limiter.is_allowed("worse").expect("short"));
    assert!(limiter.remove_override("worse") && !limiter.remove_override("worse"));
    assert!(limiter.is_allowed("worse").expect("short"));
    let kept = limiter.overrides();
    let vip = Override { access: bucket(50).into(), until: None };
    assert_eq!(kept, [(b"vip".to_vec().into(), vip)]);
}

#[test]
fn overrides_of_the_rules_come_before_tiers_and_after_overrides_at_run_time() {
    let clock = ManualClock::new(Tick(0));
    let rules = || Tiers::new(bucket(2)).tier("pro", bucket(5)).overridden("vip", bucket(50));
    let tiers = rules().overridden("bad", Access::Blocked);
    let by_key = [("bad", Access::Blocked), ("vip", bucket(50).into())]
        .map(|(key, access)| (Box::from(key.as_bytes()), access));
    assert_eq!(tiers.by_key(), by_key);
    assert_eq!((tiers.of_key(b"bad"), tiers.of_key(b"good")), (Some(Access::Blocked), None));
    let limiter = limiter(tiers.resolved_by(|key| (key == b"vip").then_some("pro".into())), &clock);
    let limit = |key: &str| limiter.peek(key).expect("short").limit;
    assert_eq!([limit("vip"), limit("bad"), limit("other")], [50, 0, 2]);
    assert_eq!(limiter.check(Ask::new("vip").tier("pro")).expect("short").limit, 50);
    assert!(!limiter.is_allowed(Ask::new("bad").tier("pro")).expect("short"));

    limiter.set_override("bad", bucket(7), Some(Tick(10)));
    assert_eq!(limit("bad"), 7);
    limiter.replace(&rules().overridden("bad", Access::Blocked));
    assert_eq!(limit("bad"), 7, "it outlasts a change of the rules");
    let set = Override { access: bucket(7).into(), until: Some(Tick(10)) };
    assert_eq!(limiter.overrides(), [(b"bad".to_vec().into(), set)], "no others are listed");
    let copied = limiter.rules().copy();
    assert_eq!(copied.by_key(), by_key);
    limiter.replace(&Tiers::new(bucket(2)));
    assert_eq!([limit("vip"), limit("bad")], [2, 7]);
    limiter.replace(&copied);
    clock.set(Tick(10));
    assert_eq!([limit("vip"), limit("bad")], [50, 0], "what the rules say is in force again");
    assert!(!limiter.remove_override("vip"), "it is not of the run time");
    assert_eq!(limit("vip"), 50);
}

/// Overrides were once removed and set again one by one, and blocked clients were allowed in between.
///
/// Fault G4.
#[test]
fn a_client_that_both_rules_block_is_never_allowed() {
    let version = |limit: Cost| {
        let others = (0..200).map(|other| format!("other {other}"));
        others.chain(["mallory".to_owned()]).fold(Tiers::new(bucket(limit)), |tiers, key| {
            tiers.tier("pro", bucket(2 * limit)).overridden(key, Access::Blocked)
        })
    };
    let clock = ManualClock::new(Tick(0));
    let limiter = limiter(version(10), &clock);
    let versions = [version(20), version(10)];
    let (done, replaced) = (AtomicBool::new(false), AtomicU64::new(0));
    let allowed = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                versions.iter().for_each(|version| limiter.replace(version));
                replaced.fetch_add(2, Ordering::Relaxed);
            }
        });
        let (mut asked, mut allowed) = (0, 0);
        while asked < 1_000 || replaced.load(Ordering::Relaxed) < 1_000 {
            asked += 1;
            allowed += u64::from(limiter.is_allowed("mallory").expect("short"));
            allowed +=
                u64::from(limiter.is_allowed(Ask::new("mallory").tier("pro")).expect("short"));
        }
        done.store(true, Ordering::Relaxed);
        allowed
    });
    assert_eq!(allowed, 0);
}

/// The retry time of a denial under an override that ends is the time at which the cost fits after it.
#[test]
fn an_override_that_ends_is_not_waited_out() {
    let clock = ManualClock::new(Tick(0));
    let limiter = limiter(Tiers::new(bucket(100)), &clock);
    let strict = Policy::token_bucket(1).per(Ticks(1_000_000)).build().expect("valid");
    limiter.set_override("a", strict, Some(Tick(50)));
    assert!(limiter.is_allowed("a").expect("short"));
    let denied = limiter.check("a").expect("short");
    assert_eq!(denied.retry_after, Some(Ticks(50)), "not a million");
    assert!(!limiter.is_allowed(Ask::new("a").at(Tick(49))).expect("short"));
    assert!(limiter.is_allowed(Ask::new("a").at(Tick(50))).expect("short"));
}

/// What was used before an override is earned back under it, at the old rate.
#[test]
fn a_client_that_was_unlimited_for_a_while_still_owes_its_usage() {
    let clock = ManualClock::new(Tick(0));
    let limiter = limiter(Tiers::new(bucket(10)), &clock);
    assert!(limiter.check(Ask::new("a").cost(10)).expect("short").allowed);
    limiter.set_override("a", Access::Unlimited, Some(Tick(300)));
    assert!(limiter.check(Ask::new("a").cost(1_000)).expect("short").allowed);
    let reserved = limiter.reserve(Ask::new("a").cost(7), Ticks(1_000)).expect("short");
    let mut reservation = reserved.granted().expect("unlimited");
    assert_eq!(limiter.refund(Ask::new("a").cost(5)).expect("short").remaining, Cost::MAX);
    clock.set(Tick(300));
    let status = limiter.check(Ask::new("a").cost(0)).expect("short");
    assert_eq!(status.remaining, 8, "three were earned, five returned");
    let settled = limiter.cancel(&mut reservation).expect("in time");
    assert_eq!(settled.remaining, 8, "what was not charged is not returned");
}

#[test]
fn a_resolver_knows_the_tier() {
    let clock = ManualClock::new(Tick(0));
    let tiers = Tiers::new(bucket(1)).tier("pro", bucket(5)).tier("staff", Access::Unlimited);
    let limiter = limiter(
        tiers.resolved_by(|key| match key {
            b"alice" => Some(Cow::Borrowed("pro")),
            b"root" => Some(Cow::Borrowed("staff")),
            b"odd" => Some(Cow::Owned("gone".to_owned())),
            _ => None,
        }),
        &clock,
    );
    let limits =
        ["alice", "bob", "odd", "root"].map(|key| limiter.check(key).expect("short").limit);
    assert_eq!(limits, [5, 1, 1, Cost::MAX]);
    // The tier of the request has priority.
    assert_eq!(limiter.check(Ask::new("bob").tier("staff")).expect("short").limit, Cost::MAX);
    let many: Vec<Decision> = limiter.check_many(&["alice", "bob"]).expect("short");
    assert_eq!((many[0].remaining, many[1].allowed), (3, false));
}

/// A change of tier or algorithm does not end a penalty.
#[test]
fn a_penalty_follows_from_tier_to_tier() {
    let clock = ManualClock::new(Tick(0));
    let strict = |kind| {
        let limit = Policy::of(kind, 1).per(Ticks(10));
        limit.penalty(Penalty::lasting(Ticks(500))).build().expect("valid")
    };
    let tiers = Tiers::new(strict(tallygate::Kind::FixedWindow));
    let limiter = limiter(tiers.tier("other", strict(tallygate::Kind::Gcra)), &clock);
    assert!(limiter.is_allowed("a").expect("short"));
    assert_eq!(limiter.check("a").expect("short").retry_after, Some(Ticks(500)));
    clock.set(Tick(100));
    let other = limiter.check(Ask::new("a").tier("other")).expect("short");
    assert_eq!((other.allowed, other.retry_after), (false, Some(Ticks(400))));
}

/// Replacing rules by equal ones is no change: no state is carried over, so no fraction of a token is lost.
#[test]
fn rules_replaced_by_themselves_change_nothing() {
    let clock = ManualClock::new(Tick(0));
    let tiers = || Tiers::new(bucket(3)).tier("pro", bucket(7)).overridden("vip", bucket(11));
    let (changing, steady) = (limiter(tiers(), &clock), limiter(tiers(), &clock));
    for tick in 0..2_000 {
        clock.set(Tick(tick));
        changing.replace(&tiers());
        for key in ["a", "vip"] {
            assert_eq!(
                changing.check(key).expect("short"),
                steady.check(key).expect("short"),
                "{key} at {tick}"
            );
        }
    }
}

/// Rules are replaced under load. Every decision is made under one version of them, nothing is
/// lost, and no client gets more than the more generous of the two allows.
///
/// Fault G4.
#[test]
fn every_decision_uses_one_version_of_the_rules() {
    // The tier and the base have different sizes in each version, so that a decision with one of each would show.
    let version = |base: Cost, pro: Cost| {
        let policy = |limit| {
            let limits =
                ["one", "two"].map(|name| Policy::fixed_window(limit).per_hour().named(name));
            Policy::all_of("api", limits).expect("valid")
        };
        Tiers::new(policy(base)).tier("pro", policy(pro))
    };
    let clock = ManualClock::new(Tick(0));
    let limiter = limiter(version(1_000, 3_000), &clock);
    let (done, versions) = (AtomicBool::new(false), AtomicU64::new(0));
    let answers: Vec<Vec<Decision>> = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                limiter.replace(&version(1_500, 4_500));
                limiter.replace(&version(1_000, 3_000));
                versions.fetch_add(2, Ordering::Relaxed);
            }
        });
        let workers = [0, 1, 2].map(|worker| {
            let limiter = &limiter;
            scope.spawn(move || {
                let ask = |_| match worker {
                    0 => limiter.check(Ask::new("pro").tier("pro")).expect("short"),
                    _ => limiter.check("base").expect("short"),
                };
                (0..20_000).map(ask).collect::<Vec<Decision>>()
            })
        });
        let answers = workers.map(std::thread::ScopedJoinHandle::join);
        done.store(true, Ordering::Relaxed);
        answers.into_iter().map(|answers| answers.expect("no panic")).collect()
    });
    assert!(versions.load(Ordering::Relaxed) > 10, "it changed meanwhile");
    let is_whole = |answer: &Decision, sizes: [Cost; 2]| {
        sizes.contains(&answer.limit)
            && answer.remaining < answer.limit
            && answer.allowed != answer.denied_by.is_some()
    };
    assert!(answers[0].iter().all(|answer| is_whole(answer, [3_000, 4_500])));
    assert!(answers[1].iter().chain(&answers[2]).all(|answer| is_whole(answer, [1_000, 1_500])));
    let allowed =
        |answer: &[Vec<Decision>]| answer.iter().flatten().filter(|answer| answer.allowed).count();
    assert!((3_000..=4_500).contains(&allowed(&answers[..1])));
    assert!((1_000..=1_500).contains(&allowed(&answers[1..])));
}

/// The key is checked under another algorithm.
///
/// Fault G5.
#[test]
fn a_changed_algorithm_misreads_no_state() {
    for from in tallygate::Kind::ALL {
        for to in tallygate::Kind::ALL {
            let clock = ManualClock::new(Tick(5_000));
            let policy = |kind, limit| Policy::of(kind, limit).per(Ticks(1_000)).build();
            let limiter = limiter(Tiers::new(policy(from, 10).expect("valid")), &clock);
            assert!(limiter.check(Ask::new("a").cost(6)).expect("short").allowed);
            limiter.replace(&Tiers::new(policy(to, 8).expect("valid")));
            let status = limiter.check(Ask::new("a").cost(0)).expect("short");
            assert_eq!((status.limit, status.remaining), (8, 2), "{from} to {to}");
            assert!(limiter.check(Ask::new("a").cost(2)).expect("short").allowed);
            assert!(!limiter.is_allowed("a").expect("short"), "{from} to {to}");
        }
    }
}

/// A shadow limit counts and is observed, and denies nothing.
#[test]
fn a_shadow_limit_is_reported_and_denies_nothing() {
    /// The observed decision: allowed, denied by, shadow denied by.
    #[derive(Default)]
    struct Recorder(Mutex<Vec<ObservedDecision>>);

    type ObservedDecision = (bool, Option<String>, Option<String>);

    impl Observer for &Recorder {
        fn decided(&self, event: &tallygate::observer::Event<'_>) {
            let owned = |name: Option<&str>| name.map(str::to_owned);
            let decision = (event.allowed, owned(event.denied_by), owned(event.shadow_denied_by));
            self.0.lock().expect("not poisoned").push(decision);
        }
    }

    let observer = Recorder::default();
    let limits = [
        Policy::token_bucket(5).per_hour().named("old"),
        Policy::token_bucket(2).per_hour().named("new").shadow(),
    ];
    let policy = Policy::all_of("api", limits).expect("valid");
    let store = PolicyStore::new(&policy, Capacity::of(10), ManualClock::new(Tick(0)));
    let limiter = RateLimiter::with_store(policy, store).observed_by(&observer);
    let answers: Vec<bool> = (0..5).map(|_| limiter.is_allowed("a").expect("short")).collect();
    assert_eq!(answers, [true; 5]);
    let batch: Vec<Decision> = limiter.check_many(&["b", "b", "b"]).expect("short");
    assert_eq!(
        batch.iter().map(|decision| decision.shadow_denied_by).collect::<Vec<_>>(),
        [None, None, Some(1)]
    );
    let denied = limiter.check(Ask::new("b").cost(3)).expect("short");
    assert_eq!(
        (denied.allowed, denied.denied_by, denied.shadow_denied_by),
        (false, Some(0), Some(1))
    );
    let name = |limit: Option<usize>| limit.map(|limit| limiter.rules().limits()[limit].name());
    assert_eq!((name(denied.denied_by), name(denied.shadow_denied_by)), (Some("old"), Some("new")));
    let decision = observer.0.into_inner().expect("not poisoned");
    let (old, new) = (Some("old".to_owned()), Some("new".to_owned()));
    let silent = (true, None, None);
    let shadowed = (true, None, new.clone());
    assert_eq!(
        decision[..5],
        [&silent, &silent, &shadowed, &shadowed, &shadowed].map(Clone::clone)
    );
    assert_eq!(decision[5..], [silent.clone(), silent, shadowed, (false, old, new)]);
}
