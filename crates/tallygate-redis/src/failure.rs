//! What is decided when Redis cannot be asked.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tallygate::{
    Access, Anchor, Capacity, Cost, Decision, Kind, Limit, MemoryStore, Op, Plan, Policy,
    PolicyError, Source, Store as _, SystemClock, Tick, Ticks,
};

/// What to decide while Redis cannot be asked, does not answer in time, or answers with an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnFailure {
    /// Everything is allowed. For limits that protect little, where being away would cost more.
    #[default]
    Allow,
    /// Everything is refused. For limits that protect much: logins, payments.
    Deny,
    /// This process decides by itself, for its share of the quota. The units that it allowed are charged in Redis when
    /// Redis is back. For one second after that, a request needs both the share and Redis: other processes may not have
    /// charged theirs yet.
    Local {
        /// How many processes share the quota.
        instances: u32,
    },
}

/// The limiter in this process that decides meanwhile.
///
/// What it knows of a client stays when Redis is back: the next outage is no reason for another burst.
pub(crate) struct Local {
    instances: AtomicU32,
    store: OnceLock<MemoryStore<Plan>>,
    /// What clients used here, until that is charged in Redis.
    owed: Mutex<HashMap<Box<[u8]>, Owed>>,
    /// The shares that clients have: one for all who have the same policy.
    shares: Mutex<Vec<Share>>,
}

struct Share {
    whole: Arc<Policy>,
    instances: u32,
    part: Arc<Policy>,
}

#[derive(Clone, Copy, Default)]
struct Owed {
    cost: Cost,
    /// When this process began to decide for the client, by the store's clock.
    began: Option<Tick>,
    /// Before when nothing is allowed: of a quota that is smaller than the fleet.
    not_before: Option<Tick>,
    /// Whether somebody is about to charge it. Until it is done, the client is decided on here.
    is_being_charged: bool,
}

/// What became of asking for what a client used here.
pub(crate) enum Taken<'a> {
    /// It used nothing that is not charged.
    Nothing,
    /// Somebody else is about to charge it.
    ByAnother,
    Charge(Charge<'a>),
}

/// What a client used here, while it is charged in Redis. It is not owed any more afterwards, also if nobody knows
/// whether it was charged: but for a charge that has [failed](Self::failed).
pub(crate) struct Charge<'a> {
    local: &'a Local,
    client: &'a [u8],
    owed: Cost,
    /// What of it is to be charged.
    pub(crate) used: Cost,
    /// What of it the share here has not earned back: at least that much is charged.
    pub(crate) least: Cost,
    /// When this process began to decide for the client, by the store's clock.
    pub(crate) began: Tick,
    /// How many processes share the quota.
    pub(crate) processes: u32,
}

impl Charge<'_> {
    /// Nothing was charged: it is still owed.
    pub(crate) fn failed(mut self) {
        self.owed = 0;
    }
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        self.local.charged(self.client, self.owed);
    }
}

/// A charge to this process's share, beside the one in Redis. It is returned when it is dropped, unless the request was
/// allowed and it is [kept](Self::keep).
#[must_use = "it is returned when it is dropped"]
pub(crate) struct ShareCharge<'a> {
    local: &'a Local,
    plan: Plan,
    client: &'a [u8],
    cost: Cost,
}

impl ShareCharge<'_> {
    /// The request was allowed.
    pub(crate) fn keep(mut self) {
        self.cost = 0;
    }
}

impl Drop for ShareCharge<'_> {
    fn drop(&mut self) {
        if self.cost > 0
            && let Ok(share) = self.local.share(&self.plan)
        {
            let op = Op::Force(-i128::from(self.cost));
            // It was charged under this share, so the store takes it.
            let _ = self.local.store().apply::<bool>(&share, self.client, op, None);
        }
    }
}

/// How long a process that is back from an outage keeps to its share of the quota: by then all processes have found out that
/// the server answers again.
pub(crate) const SHARED_FOR: Duration = Duration::from_secs(1);

/// How many clients are decided on locally. More are refused: what they used could not be charged later.
const MAX_CLIENTS: usize = 100_000;
/// How many shares are kept to be found again.
const MAX_SHARES: usize = 32;

impl Local {
    pub(crate) fn new(on_failure: OnFailure) -> Self {
        let local = Self {
            instances: AtomicU32::new(1),
            store: OnceLock::new(),
            owed: Mutex::default(),
            shares: Mutex::default(),
        };
        local.share_as(on_failure);
        local
    }

    /// Shares the quota as a failure policy says, from now on.
    pub(crate) fn share_as(&self, on_failure: OnFailure) {
        if let OnFailure::Local { instances } = on_failure {
            self.instances.store(instances.max(1), Ordering::Relaxed);
        }
    }

    fn store(&self) -> &MemoryStore<Plan> {
        self.store.get_or_init(|| MemoryStore::new(Capacity::of(MAX_CLIENTS), SystemClock::new()))
    }

    /// Decides for this process's share; `at` is the time by the store's clock, as far as it is known.
    pub(crate) fn decide(
        &self,
        plan: &Plan,
        client: &[u8],
        op: Op,
        (now, at): (Option<Tick>, Tick),
    ) -> Decision {
        let Ok(share) = self.share(plan) else { return refused(plan, Tick(0)) };
        let is_known_or_fits = {
            let owed = self.owed();
            owed.len() < MAX_CLIENTS || owed.contains_key(client)
        };
        if !is_known_or_fits {
            return refused(&share, Tick(0));
        }
        if let Op::Check(_) | Op::Peek(_) = op
            && let Some(wait) = self.waits(plan, client, now)
            && let Ok(stands) = self.store().apply::<Decision>(&share, client, Op::Peek(0), now)
        {
            let retry_after = Some(wait);
            let refused_by = Some(0);
            let source = Source::Local;
            return Decision {
                allowed: false,
                remaining: 0,
                retry_after,
                refused_by,
                source,
                ..stands
            };
        }
        match self.store().apply::<Decision>(&share, client, op, now) {
            Ok(decision) => {
                self.note(client, op, decision.allowed, at);
                Decision { source: Source::Local, ..decision }
            }
            Err(_) => refused(&share, Tick(0)),
        }
    }

    /// How long a client has to wait until its share has earned a first unit; `None` if it has one from the start.
    ///
    /// Where a quota is smaller than the fleet, a share is less than a unit. If every process began with a whole one, they
    /// would allow more than the quota together. So a process allows nothing until one to two of the intervals have
    /// passed in which its share earns a unit: then all of them together never allow more than the quota earns from
    /// the beginning of the outage. The moment is random, so that they do not allow their units all at once.
    fn waits(&self, plan: &Plan, client: &[u8], now: Option<Tick>) -> Option<Ticks> {
        let at = now.unwrap_or_else(|| self.store().now());
        let Access::Limited(policy) = plan.access(at) else { return None };
        let interval = interval_of_share(policy, self.instances.load(Ordering::Relaxed))?;
        let mut owed = self.owed();
        let of_client = match owed.get_mut(client) {
            Some(of_client) => of_client,
            None => owed.entry(client.into()).or_default(),
        };
        let not_before = *of_client.not_before.get_or_insert_with(|| {
            let waits = interval.0.saturating_add(fastrand::u64(0..=interval.0));
            at.after(Ticks(waits)).unwrap_or(Tick(i64::MAX))
        });
        (at < not_before).then(|| not_before.since(at))
    }

    fn share(&self, plan: &Plan) -> Result<Plan, PolicyError> {
        let instances = self.instances.load(Ordering::Relaxed);
        plan.with(|policy| self.part_of(policy, instances), |time| time)
    }

    /// What each client kept of its policy would be a policy of its own, were it made anew each time.
    fn part_of(&self, whole: &Arc<Policy>, instances: u32) -> Result<Arc<Policy>, PolicyError> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |share: &&Share| share.instances == instances && share.whole == *whole;
        if let Some(share) = shares.iter().find(is_it) {
            return Ok(share.part.clone());
        }
        let part = Arc::new(share_of(whole, instances)?);
        if shares.len() == MAX_SHARES {
            shares.clear();
        }
        shares.push(Share { whole: whole.clone(), instances, part: part.clone() });
        Ok(part)
    }

    fn note(&self, client: &[u8], op: Op, is_allowed: bool, at: Tick) {
        let amount = match op {
            Op::Check(cost) if is_allowed => cost.into(),
            Op::Force(amount) => amount,
            Op::Check(_) | Op::Peek(_) | Op::Reset => 0,
        };
        let mut owed = self.owed();
        let mut of_client = owed.get(client).copied().unwrap_or_default();
        of_client.began = of_client.began.or(Some(at));
        let after = i128::from(of_client.cost).saturating_add(amount).max(0);
        of_client.cost = Cost::try_from(after).unwrap_or(Cost::MAX);
        match of_client {
            Owed { cost: 0, is_being_charged: false, not_before: None, .. } => owed.remove(client),
            other => owed.insert(client.into(), other),
        };
    }

    pub(crate) fn owes(&self, client: &[u8]) -> bool {
        self.owed().contains_key(client)
    }

    /// Takes what a client has used here, to be charged in Redis. Here it stays used.
    ///
    /// Of windows that is what counts in them now. Of a bucket it is all that was allowed here, less what the bucket in
    /// Redis earned and lost meanwhile because it was full. Were nothing taken off, a client that used its quota during
    /// an outage of an hour would be locked out for another hour.
    ///
    /// What was lost is known only if the key is gone when the first process is back, since a key goes when its bucket is
    /// full. Let that be after a time d, and let L be earned in it. Whatever the level was before, at most a burst B,
    /// L − B was lost at least. Each of the n processes is let off (L − B) / n, so all together no more than was lost;
    /// but none less than its share has not earned back. What each allowed is at most what its share did: (B + L) / n.
    /// So after an outage of any length all are charged two bursts together at most, and never less than if every
    /// request had been charged in Redis at its time.
    pub(crate) fn take<'a>(
        &'a self,
        plan: &Plan,
        client: &'a [u8],
        now: Option<Tick>,
    ) -> Taken<'a> {
        let (owed, began) = match self.owed().get_mut(client) {
            None => return Taken::Nothing,
            Some(Owed { is_being_charged: true, .. }) => return Taken::ByAnother,
            Some(of_client) => {
                of_client.is_being_charged = of_client.cost > 0;
                (of_client.cost, of_client.began.unwrap_or(Tick(i64::MAX)))
            }
        };
        let stands = self.share(plan).ok().and_then(|share| {
            self.store().apply::<Decision>(&share, client, Op::Peek(0), now).ok()
        });
        let at = now.unwrap_or_else(|| self.store().now());
        let least = stands.map_or(owed, |stands| owed.min(stands.limit - stands.remaining));
        let used = match plan.access(at) {
            Access::Limited(policy) => match policy.limits() {
                [limit] if !limit.numbers().kind.is_bucket() => least,
                _ => owed,
            },
            Access::Unlimited | Access::Blocked => owed,
        };
        let processes = self.instances.load(Ordering::Relaxed);
        let charge = Charge { local: self, client, owed, used, least, began, processes };
        if charge.used > 0 { Taken::Charge(charge) } else { Taken::Nothing }
    }

    /// Charges a cost to this process's share of the quota, for a request that is then decided by Redis. Returns a denial if
    /// the share does not allow it.
    ///
    /// Processes do not find out at the same time that Redis is back. The first of them finds the quota as it was before the
    /// outage, with everything earned since, while the others have allowed their shares of the same quota and have not
    /// charged them yet. So it keeps to its own share until they have: see [`SHARED_FOR`]. Then a fleet allows no more
    /// after an outage than during it.
    pub(crate) fn charge_share<'a>(
        &'a self,
        plan: Plan,
        client: &'a [u8],
        cost: Cost,
    ) -> Result<Option<ShareCharge<'a>>, Decision> {
        // One process has the whole quota, and there are no others.
        if self.instances.load(Ordering::Relaxed) < 2 {
            return Ok(None);
        }
        let Ok(share) = self.share(&plan) else { return Ok(None) };
        match self.store().apply::<Decision>(&share, client, Op::Check(cost), None) {
            Ok(decision) if !decision.allowed => {
                let most = Ticks::from_duration(SHARED_FOR);
                let retry_after = Some(decision.retry_after.map_or(most, |wait| wait.min(most)));
                Err(Decision { retry_after, source: Source::Local, ..decision })
            }
            _ => Ok(Some(ShareCharge { local: self, plan, client, cost })),
        }
    }

    fn charged(&self, client: &[u8], cost: Cost) {
        let mut owed = self.owed();
        let Some(of_client) = owed.get_mut(client) else { return };
        of_client.is_being_charged = false;
        of_client.cost = of_client.cost.saturating_sub(cost);
        of_client.began = None;
        if of_client.cost == 0 {
            owed.remove(client);
        }
    }

    /// Some of the clients that were decided on here.
    pub(crate) fn clients_left(&self, at_most: usize) -> Vec<Box<[u8]>> {
        self.owed().keys().take(at_most).cloned().collect()
    }

    pub(crate) fn is_unused(&self) -> bool {
        self.store.get().is_none() || self.owed().is_empty()
    }

    fn owed(&self) -> std::sync::MutexGuard<'_, HashMap<Box<[u8]>, Owed>> {
        self.owed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One process's share of a quota: all of them together admit no more than the whole.
fn share_of(policy: &Policy, instances: u32) -> Result<Policy, PolicyError> {
    let instances = Cost::from(instances);
    let limits = policy.limits().iter().map(|limit| {
        let numbers = limit.numbers();
        let mut share = Policy::of(numbers.kind, numbers.limit).named(limit.name());
        if numbers.kind.is_bucket() {
            share = share
                .per(Ticks(numbers.window.0.saturating_mul(instances)))
                .burst((numbers.burst / instances).max(1));
        } else {
            // Less than one each: one, in so many windows as make it a share.
            let each = numbers.limit / instances;
            let windows = if each == 0 { instances.div_ceil(numbers.limit) } else { 1 };
            // Windows that begin at the same time in every process would allow one each at the same time.
            let kind = match numbers.kind {
                Kind::SlidingWindowCounter if each == 0 => Kind::SlidingWindowLog,
                kind => kind,
            };
            share = Policy::of(kind, each.max(1))
                .per(Ticks(numbers.window.0.saturating_mul(windows)))
                .named(limit.name());
            if kind == Kind::FixedWindow {
                let anchor = if each == 0 { Anchor::FirstRequest } else { numbers.anchor };
                share = share.anchor(anchor);
            }
        }
        if let Some(penalty) = limit.penalty() {
            share = share.penalty(*penalty);
        }
        if limit.is_shadow() { share.shadow() } else { share }
    });
    Policy::all_of(policy.name(), limits)
}

/// In which time one process's share earns a unit, if it is less than one from the start.
fn interval_of_share(policy: &Policy, instances: u32) -> Option<Ticks> {
    let instances = Cost::from(instances);
    let of_limit = |limit: &Limit| {
        let numbers = limit.numbers();
        let capacity = if numbers.kind.is_bucket() { numbers.burst } else { numbers.limit };
        let interval = u128::from(numbers.window.0) * u128::from(instances);
        let interval = interval.div_ceil(u128::from(numbers.limit.max(1)));
        (capacity < instances).then(|| Ticks(u64::try_from(interval).unwrap_or(u64::MAX)))
    };
    policy.limits().iter().filter_map(of_limit).max()
}

/// The answer where everything is allowed meanwhile. How much is left nobody knows.
pub(crate) fn allowed(plan: &Plan, now: Tick) -> Decision {
    let retry_after = Some(Ticks::ZERO);
    Decision { allowed: true, retry_after, source: Source::FailedOpen, ..refused(plan, now) }
}

/// The answer where everything is refused meanwhile. When it would be allowed nobody knows: a second is tried.
pub(crate) fn refused(plan: &Plan, now: Tick) -> Decision {
    let limit = match plan.access(now) {
        Access::Limited(policy) => tallygate::Algorithm::capacity(&**policy),
        Access::Unlimited => Cost::MAX,
        Access::Blocked => 0,
    };
    Decision {
        allowed: false,
        limit,
        remaining: 0,
        retry_after: Some(Ticks(RETRY_AFTER)),
        reset_after: Ticks::ZERO,
        delay: Ticks::ZERO,
        refused_by: None,
        shadow_refused_by: None,
        source: Source::FailedClosed,
    }
}

/// The answer while Redis answers, but not in time: denied, to be tried again after a time budget or two, so that not
/// all come back at once.
pub(crate) fn overloaded(plan: &Plan, now: Tick, budget: Duration) -> Decision {
    let budget = Ticks::from_duration(budget).0.max(1);
    let retry_after = Some(Ticks(budget.saturating_add(fastrand::u64(0..budget))));
    Decision { retry_after, source: Source::Overloaded, ..refused(plan, now) }
}

const RETRY_AFTER: u64 = 1_000_000_000;

/// Lets something be said once a second.
pub(crate) struct Seldom(AtomicU64);

impl Seldom {
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(crate) fn may(&self) -> bool {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        let second = START.elapsed().as_secs() + 1;
        self.0.swap(second, Ordering::Relaxed) != second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_to_the_whole() {
        let policy = Policy::all_of(
            "api",
            [
                Policy::token_bucket(100).per(Ticks(60)).burst(40),
                Policy::fixed_window(10).per(Ticks(60)),
                Policy::sliding_window_log(3).per(Ticks(60)),
            ],
        )
        .unwrap();
        let share = share_of(&policy, 4).unwrap();
        let numbers = share.limits().iter().map(|limit| *limit.numbers());
        let told: Vec<_> = numbers.map(|n| (n.limit, n.window.0, n.burst)).collect();
        assert_eq!(told, [(100, 240, 10), (2, 60, 2), (1, 120, 1)]);
    }

    #[test]
    fn j16_shares_of_a_quota_smaller_than_the_fleet_do_not_add_up_to_more_than_the_quota() {
        let second = 1_000_000_000;
        for policy in [
            Policy::token_bucket(2).per_second().burst(1).build().unwrap(),
            Policy::fixed_window(2).per_second().build().unwrap(),
            Policy::sliding_window_counter(2).per_second().build().unwrap(),
            Policy::sliding_window_log(2).per_second().build().unwrap(),
        ] {
            let plan = Plan::of(policy);
            let processes: Vec<_> =
                (0..7).map(|_| Local::new(OnFailure::Local { instances: 7 })).collect();
            let mut allowed = 0;
            for step in 0..60_000 {
                let now = step * second / 1000;
                for local in &processes {
                    let told =
                        local.decide(&plan, b"alice", Op::Check(1), (Some(Tick(now)), Tick(now)));
                    assert_eq!(told.source, Source::Local);
                    allowed += i64::from(told.allowed);
                }
                assert!(allowed * second <= 2 * now, "{allowed} after {now} ns");
            }
            assert!(allowed > 60, "nobody is locked out: {allowed}");
        }
    }

    #[test]
    fn i5_clients_of_one_policy_have_one_share_however_often_it_is_made() {
        let local = Local::new(OnFailure::Local { instances: 4 });
        let policy = |limit| Arc::new(Policy::gcra(limit).per_second().build().unwrap());
        let first = local.part_of(&policy(100), 4).unwrap();
        assert!(Arc::ptr_eq(&first, &local.part_of(&policy(100), 4).unwrap()));
        assert_ne!(first, local.part_of(&policy(100), 5).unwrap());
        for limit in 1..1000 {
            assert_eq!(
                *local.part_of(&policy(limit), 4).unwrap(),
                share_of(&policy(limit), 4).unwrap()
            );
        }
        assert!(local.shares.lock().unwrap().len() <= MAX_SHARES);
    }
}
