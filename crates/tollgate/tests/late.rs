//! A caller that read the clock before it got the lock is late, by however much: it earns nothing twice.

use tollgate::{
    Decision, Kind, LimitBuilder, Policy, RateLimiter, Tick, Ticks, Tiers, check_all_at,
};

const LIMIT: u64 = 10;
const WINDOW: Ticks = Ticks(1000);

fn policy(kind: Kind) -> Policy {
    builder(kind).build().expect("a valid policy")
}

fn builder(kind: Kind) -> LimitBuilder {
    let make = match kind {
        Kind::TokenBucket => Policy::token_bucket,
        Kind::Gcra => Policy::gcra,
        Kind::LeakyBucket => Policy::leaky_bucket,
        Kind::FixedWindow => Policy::fixed_window,
        Kind::SlidingWindowLog => Policy::sliding_window_log,
        Kind::SlidingWindowCounter => Policy::sliding_window_counter,
    };
    make(LIMIT).per(WINDOW)
}

#[test]
fn alternating_early_and_late_callers_get_one_quota() {
    for kind in Kind::ALL {
        let limiter = RateLimiter::new(policy(kind));
        let tiered = RateLimiter::tiered("tiered", Tiers::new(policy(kind)));
        let (mut single, mut several, mut joint, mut under_tiers) = (0, 0, 0, 0);
        for step in 0..1000 {
            let now = if step % 2 == 0 { Tick(10_000) } else { Tick(8_999) };
            single += u64::from(limiter.is_allowed_at("bool", now).expect("a decision"));
            let many: Vec<Decision> = limiter.check_many_at(&["many"], now).expect("decisions");
            several += u64::from(many[0].allowed);
            let both =
                check_all_at([limiter.ask("joint").expect("a part")], now).expect("a decision");
            joint += u64::from(both.decision.allowed);
            under_tiers += u64::from(tiered.check_at("tier", now).expect("a decision").allowed);
        }
        assert_eq!((single, several, joint, under_tiers), (LIMIT, LIMIT, LIMIT, LIMIT), "{kind}");
    }
}
