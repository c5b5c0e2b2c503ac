//! What is decided when Redis cannot be asked.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use tallygate::{
    Access, Algorithm as _, Anchor, Capacity, Cost, Decision, Kind, Limit, LimitBuilder,
    MemoryStore, Op, Plan, Policy, PolicyError, Source, Standing, Store as _, StoreError,
    SystemClock, Tick, Ticks,
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
    ///
    /// Over any interval and any number of outages, each limit of a policy allows at most its bound plus one burst, and
    /// the long-run rate is the policy's. A bucket is charged into debt. A window forgets at its end, so the units
    /// that do not fit into the present window stay unpaid, and the process charges them in the next one. Until then
    /// they count against its share: an outage that begins after Redis has allowed the quota of a window allows one
    /// share, which the following window pays for.
    ///
    /// Of a policy of several limits, each limit has its own share and its own unpaid units, and a request needs all of
    /// them. The following window of each limit pays for its units: an outage on a day on which Redis has allowed the quota
    /// of the day allows one share, and the next day pays for it.
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
    /// The shares of clients: one store for the first limit of all policies, one for the second, and so on.
    stores: RwLock<Vec<Arc<MemoryStore<Plan>>>>,
    is_used: AtomicBool,
    /// What clients used here, until that is charged in Redis.
    owed: Mutex<HashMap<Box<[u8]>, Owed>>,
    /// The shares that clients have: one for all who have the same policy.
    shares: Mutex<Vec<Share>>,
}

#[derive(Clone)]
struct Share {
    whole: Arc<Policy>,
    instances: u32,
    part: Arc<Policy>,
    /// The enforced limits of a policy of several limits.
    limits: Arc<[LimitShare]>,
}

/// This process's share of one limit; or of a whole plan that does not have several limits.
#[derive(Clone)]
struct LimitShare {
    /// The place of the limit in its policy.
    index: usize,
    share: Plan,
    /// The limit of the fleet whose [`Overlap`] counts. `None` for one bucket, which can be charged into debt, and where no
    /// limit is enforced.
    overlaps: Option<Limit>,
}

impl LimitShare {
    /// Returns the most units that the share allows at once.
    fn capacity(&self, at: Tick) -> Cost {
        match self.share.access(at) {
            Access::Limited(policy) => policy.capacity(),
            Access::Unlimited => Cost::MAX,
            Access::Blocked => 0,
        }
    }

    fn overlap(&self, began: Tick) -> Option<Overlap> {
        self.overlaps.as_ref().map(|limit| Overlap::of(limit, began))
    }
}

/// The units that a client was allowed here and that are not charged to one limit in Redis.
#[derive(Clone, Copy, Default)]
struct Account {
    /// Units that the share has paid for, in a window or a bucket that Redis knows nothing of.
    cost: Cost,
    /// Units that no quota has paid for: see [`Overlap`].
    unpaid: Cost,
    /// Whether this outage has lasted longer than the [`Overlap`].
    is_past_overlap: bool,
}

impl Account {
    /// Counts the units of an operation that was carried out here.
    fn note(&mut self, op: Op, is_allowed: bool, is_unpaid: bool) {
        let amount = match op {
            Op::Check(cost) if is_allowed => cost.into(),
            Op::Force(amount) => amount,
            Op::Check(_) | Op::Peek(_) | Op::Reset => 0,
        };
        let count = if is_unpaid { &mut self.unpaid } else { &mut self.cost };
        let after = i128::from(*count).saturating_add(amount).max(0);
        *count = Cost::try_from(after).unwrap_or(Cost::MAX);
    }
}

/// What a client owes.
#[derive(Clone, Default)]
struct Owed {
    /// One of each limit that has a share.
    accounts: Vec<Account>,
    /// When this process began to decide for the client, by the store's clock; `None` if Redis has answered since.
    began: Option<Tick>,
    /// Before when nothing is allowed: of a quota that is smaller than the fleet.
    not_before: Option<Tick>,
    /// Before when Redis has no room for the unpaid units.
    retry_at: Option<Tick>,
    /// Whether a task is charging it. Until that is done, the client is decided on here.
    is_being_charged: bool,
    /// Whether the caller gives the time, so that only the caller knows when to charge.
    has_given_time: bool,
    /// The policy that the client was decided by.
    policy: Option<Arc<Policy>>,
}

impl Owed {
    /// Returns whether Redis has to be asked about the client before the next check is decided.
    fn is_due(&self, at: Tick) -> bool {
        let has_unpaid = || self.accounts.iter().any(|account| account.unpaid > 0);
        self.began.is_some()
            || self.accounts.iter().any(|account| account.cost > 0)
            || has_unpaid() && self.retry_at.is_none_or(|retry_at| at >= retry_at)
    }

    fn is_empty(&self) -> bool {
        let is_paid = self.accounts.iter().all(|account| account.cost == 0 && account.unpaid == 0);
        is_paid && self.began.is_none() && !self.is_being_charged
    }

    /// Makes room for an account of each limit. If the policy has other limits now, each of them owes the most that one of
    /// the limits before owed.
    fn fit(&mut self, limits: usize) {
        if self.accounts.len() == limits {
            return;
        }
        let most = |units: fn(&Account) -> Cost| self.accounts.iter().map(units).max().unwrap_or(0);
        let is_past_overlap = !self.accounts.is_empty()
            && self.accounts.iter().all(|account| account.is_past_overlap);
        let (cost, unpaid) = (most(|account| account.cost), most(|account| account.unpaid));
        self.accounts = vec![Account { cost, unpaid, is_past_overlap }; limits];
    }
}

/// The time at the beginning of an outage in which Redis may have allowed the same quota as the shares.
///
/// Windows forget: what Redis allowed in a window of L units, and what the shares allowed in the same window, is 2 L.
/// Charging the second L in Redis changes nothing if the window ends then. So each unit that is allowed here is paid for by
/// one of three quotas:
///
/// - by a window in Redis, charged by an ordinary check, as far as there is room;
/// - by a window of the share that lies in the outage and after the overlap, when Redis has allowed nothing;
/// - by a later window of either kind. Until then it is unpaid.
///
/// A process allows a unit in the overlap only if its unpaid units stay within its share. They are charged to the share at
/// the end of the overlap, or in Redis when it is back and has room. So over any interval, the units that were paid for are at
/// most the bound of the policy: each window is either one in Redis or one of the shares. The units that are unpaid at the end of
/// the interval are at most the sum of the shares: one burst.
///
/// This needs an outage of the whole fleet. While one process alone cannot reach Redis, its share is allowed in addition.
#[derive(Clone, Copy)]
struct Overlap {
    /// By then, everything that Redis allowed before has left its windows.
    until: Tick,
    /// The window of the limit.
    window: Ticks,
}

impl Overlap {
    /// Returns the overlap of an outage for a limit. Each limit of a policy has its own: a day forgets later than a second.
    fn of(limit: &Limit, began: Tick) -> Self {
        let numbers = limit.numbers();
        let window = numbers.window.0.max(1);
        let lasts = match numbers.kind {
            kind if kind.is_bucket() => {
                let fills = u128::from(numbers.burst) * u128::from(window);
                u64::try_from(fills.div_ceil(numbers.limit.max(1).into())).unwrap_or(u64::MAX)
            }
            Kind::FixedWindow if numbers.anchor == Anchor::FirstRequest => window,
            Kind::SlidingWindowLog => window,
            _ => {
                let into = i128::from(began.0).rem_euclid(window.into());
                window - u64::try_from(into).unwrap_or(0)
            }
        };
        let until = began.after(Ticks(lasts)).unwrap_or(Tick(i64::MAX));
        Self { until, window: Ticks(window) }
    }
}

/// What became of asking for what a client used here.
pub(crate) enum Taken<'a> {
    /// It used nothing that is not charged.
    Nothing,
    /// Another task is charging it.
    ByAnother,
    Charge(Charge<'a>),
}

/// What a client used here, while it is charged in Redis. When it is dropped, the outage is over for the client, unless the
/// charge has [failed](Self::failed).
pub(crate) struct Charge<'a> {
    local: &'a Local,
    client: &'a [u8],
    /// One of each account.
    pub(crate) payments: Vec<Payment>,
    /// Whether each limit is paid for by itself, because the policy has several.
    pub(crate) is_per_limit: bool,
    /// The units to be charged without asking: only of a policy that has one account.
    pub(crate) used: Cost,
    /// Whether they were charged, or may have been: they are not charged again.
    pub(crate) is_used_charged: bool,
    /// What of `cost` the share here has not earned back: at least that much is charged.
    pub(crate) least: Cost,
    /// When this process began to decide for the client, by the store's clock.
    pub(crate) began: Tick,
    /// When to try again to charge the unpaid units.
    pub(crate) retry_at: Option<Tick>,
    /// How many processes share the quota.
    pub(crate) processes: u32,
    has_failed: bool,
}

/// The units to be charged to one limit, as far as there is room in Redis.
pub(crate) struct Payment {
    /// The place of the limit in its policy.
    pub(crate) index: usize,
    /// What was owed when it was taken.
    cost: Cost,
    unpaid: Cost,
    pub(crate) pay: Cost,
    /// How many of them were charged. If it is unknown whether they were, they are not: the promise is an upper bound.
    pub(crate) paid: Cost,
}

impl Charge<'_> {
    /// Returns whether any units are to be charged as far as there is room.
    pub(crate) fn has_payments(&self) -> bool {
        self.payments.iter().any(|payment| payment.pay > 0)
    }

    /// Returns whether any units were charged in Redis.
    pub(crate) fn is_any_charged(&self) -> bool {
        self.used > 0 || self.payments.iter().any(|payment| payment.paid > 0)
    }

    /// Redis did not charge the units that are left: the outage goes on.
    pub(crate) fn failed(mut self) {
        self.has_failed = true;
    }
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        self.local.charged(self);
    }
}

/// A charge to this process's share, beside the one in Redis. It is returned when it is dropped, unless the request was
/// allowed and it is [kept](Self::keep).
#[must_use = "it is returned when it is dropped"]
pub(crate) struct ShareCharge<'a> {
    local: &'a Local,
    limits: Arc<[LimitShare]>,
    client: &'a [u8],
    cost: Cost,
    at: Tick,
}

impl ShareCharge<'_> {
    /// The request was allowed.
    pub(crate) fn keep(mut self) {
        self.cost = 0;
    }
}

impl Drop for ShareCharge<'_> {
    fn drop(&mut self) {
        if self.cost > 0 {
            let op = Op::Force(-i128::from(self.cost));
            for (place, limit) in self.limits.iter().enumerate() {
                // It was charged under this share, so the store takes it.
                let store = self.local.store(place);
                let _ = store.apply::<bool>(&limit.share, self.client, op, Some(self.at));
            }
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
            stores: RwLock::default(),
            is_used: AtomicBool::new(false),
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

    /// Returns the store of the shares of the limits in one place.
    fn store(&self, place: usize) -> Arc<MemoryStore<Plan>> {
        if let Some(store) = self.stores.read().unwrap_or_else(PoisonError::into_inner).get(place) {
            return store.clone();
        }
        let mut stores = self.stores.write().unwrap_or_else(PoisonError::into_inner);
        while stores.len() <= place {
            let store = MemoryStore::new(Capacity::of(MAX_CLIENTS), SystemClock::new());
            stores.push(Arc::new(store));
        }
        self.is_used.store(true, Ordering::Release);
        stores[place].clone()
    }

    /// Decides for this process's share. The time is that of the store's clock, as far as it is known, and whether the
    /// caller gave it.
    pub(crate) fn decide(
        &self,
        plan: &Plan,
        client: &[u8],
        op: Op,
        (at, is_given): (Tick, bool),
    ) -> Decision {
        let Ok(limits) = self.limits(plan, at) else { return refused(plan, Tick(0)) };
        // Held until the units are counted: two threads must not both find the same room.
        let mut owed = self.owed();
        let mut of_client = match owed.get(client) {
            Some(of_client) => of_client.clone(),
            None if owed.len() < MAX_CLIENTS => Owed::default(),
            None => return refused(plan, Tick(0)),
        };
        of_client.fit(limits.len());
        of_client.has_given_time = is_given;
        let began = *of_client.began.get_or_insert(at);
        if let Access::Limited(policy) = plan.access(at) {
            of_client.policy = Some(self.whole(policy));
        }
        let mut overlaps = Vec::with_capacity(limits.len());
        for (place, limit) in limits.iter().enumerate() {
            let overlap = limit.overlap(began);
            let account = &mut of_client.accounts[place];
            self.end_overlap((place, limit), client, account, overlap, at);
            overlaps.push(overlap);
        }
        overlaps.iter_mut().for_each(|overlap| {
            *overlap = overlap.filter(|overlap| at < overlap.until);
        });
        let denial = match op {
            Op::Check(cost) | Op::Peek(cost) => {
                let wait = self.waits(plan, &mut of_client, at);
                let unpaid = wait_for_payment(&limits, &of_client, &overlaps, cost, at);
                wait.max(unpaid)
            }
            Op::Force(_) | Op::Reset => None,
        };
        let decided = match denial {
            Some(wait) => self.apply_to_shares(&limits, client, Op::Peek(0), at).map(|stands| {
                let (retry_after, refused_by) = (Some(wait), Some(0));
                Decision { allowed: false, remaining: 0, retry_after, refused_by, ..stands }
            }),
            None => self.apply_to_shares(&limits, client, op, at).inspect(|decision| {
                for (account, overlap) in of_client.accounts.iter_mut().zip(&overlaps) {
                    account.note(op, decision.allowed, overlap.is_some());
                }
            }),
        };
        let Ok(mut decision) = decided else { return refused(plan, Tick(0)) };
        for ((limit, account), overlap) in limits.iter().zip(&of_client.accounts).zip(&overlaps) {
            if overlap.is_some() {
                let left = limit.capacity(at).saturating_sub(account.unpaid);
                decision.remaining = decision.remaining.min(left);
            }
        }
        owed.insert(client.into(), of_client);
        Decision { source: Source::Local, ..decision }
    }

    /// Applies an operation to all shares, all or nothing. Returns the tightest decision.
    fn apply_to_shares(
        &self,
        limits: &[LimitShare],
        client: &[u8],
        op: Op,
        at: Tick,
    ) -> Result<Decision, StoreError> {
        let apply = |place: usize, op| {
            let share = &limits[place].share;
            self.store(place).apply::<Decision>(share, client, op, Some(at))
        };
        let mut decisions = Vec::with_capacity(limits.len());
        if let (Op::Check(cost), 2..) = (op, limits.len()) {
            for place in 0..limits.len() {
                decisions.push(apply(place, Op::Peek(cost))?);
            }
            let is_allowed = decisions.iter().all(|decision| decision.allowed);
            for (place, decision) in decisions.iter_mut().enumerate() {
                // A limit that denies hears of it: the denial may count towards a penalty.
                if is_allowed || !decision.allowed {
                    *decision = apply(place, op)?;
                }
            }
        } else {
            for place in 0..limits.len() {
                decisions.push(apply(place, op)?);
            }
        }
        let named = limits.iter().zip(decisions).map(|(limit, decision)| Decision {
            scarcest: decision.scarcest.map(|_| limit.index),
            refused_by: decision.refused_by.map(|_| limit.index),
            ..decision
        });
        Ok(named.reduce(tighter).unwrap_or_else(denied))
    }

    /// Charges the units that were allowed in the overlap to the share, once it is over.
    ///
    /// The share starts again then. Everything that it counted is in Redis, which has forgotten it by then, or unpaid.
    fn end_overlap(
        &self,
        (place, limit): (usize, &LimitShare),
        client: &[u8],
        account: &mut Account,
        overlap: Option<Overlap>,
        at: Tick,
    ) {
        let Some(overlap) = overlap.filter(|overlap| at >= overlap.until) else { return };
        let (store, share) = (self.store(place), &limit.share);
        let mut charged_at = at;
        if !account.is_past_overlap {
            account.is_past_overlap = true;
            charged_at = overlap.until;
            let all = Op::Force(-i128::from(Cost::MAX));
            // A store in memory takes every time and every amount.
            let _ = store.apply::<bool>(share, client, all, Some(charged_at));
        }
        if account.unpaid > 0
            && let Ok(stands) = self.peek((place, limit), client, charged_at)
        {
            let paid = account.unpaid.min(stands.remaining);
            let op = Op::Force(paid.into());
            if store.apply::<bool>(share, client, op, Some(charged_at)).is_ok() {
                account.unpaid -= paid;
                account.cost = account.cost.saturating_add(paid);
            }
        }
    }

    fn peek(
        &self,
        (place, limit): (usize, &LimitShare),
        client: &[u8],
        at: Tick,
    ) -> Result<Decision, StoreError> {
        self.store(place).apply::<Decision>(&limit.share, client, Op::Peek(0), Some(at))
    }

    /// Returns this process's share of each limit that a client has now.
    fn limits(&self, plan: &Plan, at: Tick) -> Result<Arc<[LimitShare]>, PolicyError> {
        let instances = self.instances.load(Ordering::Relaxed);
        let overlaps = match plan.access(at) {
            Access::Limited(policy) => {
                let limits = self.share_of(policy, instances)?.limits;
                if !limits.is_empty() {
                    return Ok(limits);
                }
                // Here a policy has one limit, or none that is enforced.
                let enforced = policy.limits().iter().find(|limit| !limit.is_shadow());
                enforced.filter(|limit| !limit.numbers().kind.is_bucket()).cloned()
            }
            Access::Unlimited | Access::Blocked => None,
        };
        let share = plan.with(|policy| Ok(self.share_of(policy, instances)?.part), |time| time)?;
        Ok([LimitShare { index: 0, share, overlaps }].into())
    }

    /// How long a client has to wait until its share has earned a first unit; `None` if it has one from the start.
    ///
    /// Where a quota is smaller than the fleet, a share is less than a unit. If every process began with a whole one, they
    /// would allow more than the quota together. So a process allows nothing until one to two of the intervals have
    /// passed in which its share earns a unit: then all of them together never allow more than the quota earns from
    /// the beginning of the outage. The moment is random, so that they do not allow their units all at once.
    fn waits(&self, plan: &Plan, of_client: &mut Owed, at: Tick) -> Option<Ticks> {
        let Access::Limited(policy) = plan.access(at) else { return None };
        let interval = interval_of_share(policy, self.instances.load(Ordering::Relaxed))?;
        let not_before = *of_client.not_before.get_or_insert_with(|| {
            let waits = interval.0.saturating_add(fastrand::u64(0..=interval.0));
            at.after(Ticks(waits)).unwrap_or(Tick(i64::MAX))
        });
        (at < not_before).then(|| not_before.since(at))
    }

    /// Returns a policy that all clients of an equal policy share.
    fn whole(&self, policy: &Arc<Policy>) -> Arc<Policy> {
        let shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let same = shares.iter().find(|share| share.whole == *policy);
        same.map_or(policy, |share| &share.whole).clone()
    }

    /// Returns the share of a policy, one for all clients of an equal policy.
    fn share_of(&self, whole: &Arc<Policy>, instances: u32) -> Result<Share, PolicyError> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |share: &&Share| share.instances == instances && share.whole == *whole;
        if let Some(share) = shares.iter().find(is_it) {
            return Ok(share.clone());
        }
        let part = Arc::new(share_of(whole, instances)?);
        let share =
            Share { whole: whole.clone(), instances, part, limits: limits_of(whole, instances)? };
        if shares.len() == MAX_SHARES {
            shares.clear();
        }
        shares.push(share.clone());
        Ok(share)
    }

    /// Returns whether a client has units to be charged in Redis before its next check is decided.
    pub(crate) fn is_due(&self, client: &[u8], at: Tick) -> bool {
        self.owed().get(client).is_some_and(|of_client| of_client.is_due(at))
    }

    /// Takes what a client has used here, to be charged in Redis. Here it stays used.
    ///
    /// Of a window that is what counts in it now, and the units that are unpaid: see [`Overlap`]. Of a bucket it is all that
    /// was allowed here, less what the bucket in Redis earned and lost meanwhile because it was full. Were nothing
    /// taken off, a client that used its quota during an outage of an hour would be locked out for another hour.
    ///
    /// What was lost is known only if the key is gone when the first process is back, since a key goes when its bucket is
    /// full. Let that be after a time d, and let L be earned in it. Whatever the level was before, at most a burst B,
    /// L − B was lost at least. Each of the n processes is let off (L − B) / n, so all together no more than was lost;
    /// but none less than its share has not earned back. What each allowed is at most what its share did: (B + L) / n.
    /// So after an outage of any length all are charged two bursts together at most, and never less than if every
    /// request had been charged in Redis at its time.
    pub(crate) fn take<'a>(&'a self, plan: &Plan, client: &'a [u8], at: Tick) -> Taken<'a> {
        let mut owed = self.owed();
        let Some(of_client) = owed.get_mut(client) else { return Taken::Nothing };
        if of_client.is_being_charged {
            return Taken::ByAnother;
        }
        let began = of_client.began.unwrap_or(Tick(i64::MAX));
        let limits = self.limits(plan, at).unwrap_or_else(|_| [].into());
        of_client.fit(limits.len());
        let (mut payments, mut used, mut least) = (Vec::new(), 0, 0);
        for (place, limit) in limits.iter().enumerate() {
            let account = &mut of_client.accounts[place];
            let overlap = limit.overlap(began);
            if of_client.began.is_some() {
                self.end_overlap((place, limit), client, account, overlap, at);
            }
            let Account { cost, unpaid, .. } = *account;
            let stands = self.peek((place, limit), client, at).ok();
            least = stands.map_or(cost, |stands| cost.min(stands.limit - stands.remaining));
            let pay = match overlap {
                Some(_) => unpaid.saturating_add(least),
                None => {
                    used = cost.saturating_add(unpaid);
                    0
                }
            };
            payments.push(Payment { index: limit.index, cost, unpaid, pay, paid: 0 });
        }
        if used == 0 && payments.iter().all(|payment| payment.pay == 0) {
            owed.remove(client);
            return Taken::Nothing;
        }
        of_client.is_being_charged = true;
        let policy = match plan.access(at) {
            Access::Limited(policy) => Some(policy),
            Access::Unlimited | Access::Blocked => None,
        };
        Taken::Charge(Charge {
            local: self,
            client,
            payments,
            is_per_limit: policy.is_some_and(|policy| policy.limits().len() > 1),
            used,
            is_used_charged: used == 0,
            least,
            began,
            retry_at: None,
            processes: self.instances.load(Ordering::Relaxed),
            has_failed: false,
        })
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
        plan: &Plan,
        client: &'a [u8],
        cost: Cost,
        at: Tick,
    ) -> Result<Option<ShareCharge<'a>>, Decision> {
        // One process has the whole quota, and there are no others.
        if self.instances.load(Ordering::Relaxed) < 2 {
            return Ok(None);
        }
        let Ok(limits) = self.limits(plan, at) else { return Ok(None) };
        match self.apply_to_shares(&limits, client, Op::Check(cost), at) {
            Ok(decision) if !decision.allowed => {
                let most = Ticks::from_duration(SHARED_FOR);
                let retry_after = Some(decision.retry_after.map_or(most, |wait| wait.min(most)));
                Err(Decision { retry_after, source: Source::Local, ..decision })
            }
            _ => Ok(Some(ShareCharge { local: self, limits, client, cost, at })),
        }
    }

    fn charged(&self, charge: &Charge<'_>) {
        let mut owed = self.owed();
        let Some(of_client) = owed.get_mut(charge.client) else { return };
        of_client.is_being_charged = false;
        let is_any_paid = charge.payments.iter().any(|payment| payment.paid > 0);
        if charge.has_failed && !is_any_paid && (charge.used == 0 || !charge.is_used_charged) {
            return;
        }
        of_client.fit(charge.payments.len());
        if charge.is_used_charged {
            for (account, charge) in of_client.accounts.iter_mut().zip(&charge.payments) {
                account.cost = account.cost.saturating_sub(charge.cost);
                let left = charge.pay - charge.paid;
                account.unpaid = account.unpaid.saturating_sub(charge.unpaid).saturating_add(left);
            }
            of_client.retry_at = charge.retry_at;
        }
        if !charge.has_failed {
            of_client.began = None;
            of_client.accounts.iter_mut().for_each(|account| account.is_past_overlap = false);
        }
        if of_client.is_empty() {
            owed.remove(charge.client);
        }
    }

    /// Returns some of the clients that are due, with their policies; or, if none is, when the next one will be. Clients whose
    /// callers give the time are left to the callers.
    pub(crate) fn next_due(&self, at: Tick, at_most: usize) -> NextDue {
        let owed = self.owed();
        let left = owed.iter().filter(|(_, of_client)| !of_client.has_given_time);
        let due: Vec<_> = left.clone().filter(|(_, of_client)| of_client.is_due(at)).collect();
        if due.is_empty() {
            let next = left.filter_map(|(_, of_client)| of_client.retry_at).min();
            return next.map_or(NextDue::Never, |next| NextDue::In(next.since(at)));
        }
        // Not always the same: the server of some may be away while that of others answers.
        let first = fastrand::usize(0..due.len());
        let some = due.iter().cycle().skip(first).take(due.len().min(at_most));
        let plan = |of_client: &Owed| match &of_client.policy {
            Some(policy) => Plan::of(Access::Limited(policy.clone())),
            None => Plan::of(Access::Unlimited),
        };
        NextDue::Now(some.map(|(client, of_client)| ((*client).clone(), plan(of_client))).collect())
    }

    pub(crate) fn is_unused(&self) -> bool {
        !self.is_used.load(Ordering::Acquire) || self.owed().is_empty()
    }

    fn owed(&self) -> std::sync::MutexGuard<'_, HashMap<Box<[u8]>, Owed>> {
        self.owed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The clients whose units are to be charged in Redis next.
pub(crate) enum NextDue {
    Now(Vec<(Box<[u8]>, Plan)>),
    In(Ticks),
    Never,
}

/// Returns how long to wait until enough of the unpaid units are paid for a cost; `None` if none has to be paid first.
fn wait_for_payment(
    limits: &[LimitShare],
    of_client: &Owed,
    overlaps: &[Option<Overlap>],
    cost: Cost,
    at: Tick,
) -> Option<Ticks> {
    let each = limits.iter().zip(&of_client.accounts).zip(overlaps);
    let waits = each.filter_map(|((limit, account), overlap)| {
        let overlap = overlap
            .filter(|_| cost > 0 && account.unpaid.saturating_add(cost) > limit.capacity(at))?;
        // The window after the overlap pays for the units that are unpaid.
        Some(Ticks(overlap.until.since(at).0.saturating_add(overlap.window.0)))
    });
    waits.max()
}

/// Returns the tighter of two decisions: the least remaining, the longest wait.
fn tighter(one: Decision, other: Decision) -> Decision {
    let retry_after = match (one.allowed, other.allowed) {
        (false, false) => one.retry_after.zip(other.retry_after).map(|(one, other)| one.max(other)),
        (false, true) => one.retry_after,
        (true, _) => other.retry_after,
    };
    let least = if other.remaining < one.remaining { &other } else { &one };
    Decision {
        allowed: one.allowed && other.allowed,
        limit: least.limit,
        remaining: least.remaining,
        retry_after,
        reset_after: one.reset_after.max(other.reset_after),
        delay: one.delay.max(other.delay),
        scarcest: least.scarcest,
        refused_by: one.refused_by.or(other.refused_by),
        shadow_refused_by: one.shadow_refused_by.or(other.shadow_refused_by),
        source: one.source,
    }
}

/// Returns how long to wait until a limit may have room for unpaid units: until a fixed window ends, or for an eighth of any
/// other window.
pub(crate) fn pay_again_after(limit: &Limit, reset_after: Ticks) -> Ticks {
    let numbers = limit.numbers();
    if numbers.kind == Kind::FixedWindow && reset_after > Ticks::ZERO {
        return reset_after;
    }
    Ticks((numbers.window.0 / 8).max(1))
}

/// Charges units to single limits of a policy, as far as each has room for them. Returns for each payment how many were
/// charged, and in which time the limit has forgotten everything.
pub(crate) fn pay_each(
    policy: &Policy,
    standings: &mut [Standing],
    payments: &[(usize, Cost)],
    at: Tick,
) -> Result<Vec<(Cost, Ticks)>, PolicyError> {
    let mut paid = Vec::with_capacity(payments.len());
    for (index, amount) in payments {
        let alone = Policy::all_of("", [builder_of(&policy.limits()[*index])])?;
        let mut state: Box<[Standing]> = [standings[*index].clone()].into();
        let room = alone.facts(&state, at, None).remaining;
        let amount = room.min(*amount);
        if amount > 0 {
            alone.charge(&mut state, at, amount.into());
        }
        paid.push((amount, alone.facts(&state, at, None).reset_after));
        if let [standing] = &mut *state {
            std::mem::swap(standing, &mut standings[*index]);
        }
    }
    Ok(paid)
}

/// Returns a builder of the same limit.
fn builder_of(limit: &Limit) -> LimitBuilder {
    let numbers = limit.numbers();
    let mut builder = Policy::of(numbers.kind, numbers.limit).per(numbers.window);
    if numbers.kind.is_bucket() {
        builder = builder.burst(numbers.burst);
    }
    if numbers.kind == Kind::FixedWindow {
        builder = builder.anchor(numbers.anchor);
    }
    if let Some(penalty) = limit.penalty() {
        builder = builder.penalty(*penalty);
    }
    builder.named(limit.name())
}

/// One process's share of a quota: all of them together admit no more than the whole.
fn share_of(policy: &Policy, instances: u32) -> Result<Policy, PolicyError> {
    let limits = policy.limits().iter().map(|limit| share_of_limit(limit, instances));
    Policy::all_of(policy.name(), limits)
}

/// The share of each enforced limit of a policy of several limits; none of other policies.
fn limits_of(policy: &Policy, instances: u32) -> Result<Arc<[LimitShare]>, PolicyError> {
    if policy.limits().len() < 2 {
        return Ok([].into());
    }
    let enforced = policy.limits().iter().enumerate().filter(|(_, limit)| !limit.is_shadow());
    let share = |(index, limit): (usize, &Limit)| {
        let share = Policy::all_of(policy.name(), [share_of_limit(limit, instances)])?;
        Ok(LimitShare { index, share: Plan::of(share), overlaps: Some(limit.clone()) })
    };
    enforced.map(share).collect()
}

fn share_of_limit(limit: &Limit, instances: u32) -> LimitBuilder {
    let instances = Cost::from(instances);
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
        Access::Limited(policy) => policy.capacity(),
        Access::Unlimited => Cost::MAX,
        Access::Blocked => 0,
    };
    Decision { limit, ..denied() }
}

fn denied() -> Decision {
    Decision {
        allowed: false,
        limit: 0,
        remaining: 0,
        retry_after: Some(Ticks(RETRY_AFTER)),
        reset_after: Ticks::ZERO,
        delay: Ticks::ZERO,
        scarcest: None,
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
    use std::cell::RefCell;

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
                    let at = (Tick(now), true);
                    let decision = local.decide(&plan, b"alice", Op::Check(1), at);
                    assert_eq!(decision.source, Source::Local);
                    allowed += i64::from(decision.allowed);
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
        let part_of = |limit, instances| local.share_of(&policy(limit), instances).unwrap().part;
        let first = part_of(100, 4);
        assert!(Arc::ptr_eq(&first, &part_of(100, 4)));
        assert_ne!(first, part_of(100, 5));
        for limit in 1..1000 {
            assert_eq!(*part_of(limit, 4), share_of(&policy(limit), 4).unwrap());
        }
        assert!(local.shares.lock().unwrap().len() <= MAX_SHARES);
    }

    /// A policy of L units per window, and the store and the processes that decide by it, in virtual time.
    struct Fleet {
        plan: Plan,
        policy: Policy,
        /// What Redis keeps of the client.
        standings: RefCell<Box<[Standing]>>,
        processes: Vec<Local>,
        /// When each unit was allowed.
        allowed_at: Vec<i64>,
    }

    const LIMIT: Cost = 40;
    const WINDOW: i64 = 1000;

    fn policies() -> [Policy; 4] {
        let window = Ticks(WINDOW.cast_unsigned());
        [
            Policy::fixed_window(LIMIT).per(window),
            Policy::fixed_window(LIMIT).per(window).anchor(Anchor::FirstRequest),
            Policy::sliding_window_log(LIMIT).per(window),
            Policy::sliding_window_counter(LIMIT).per(window),
        ]
        .map(|policy| policy.build().unwrap())
    }

    impl Fleet {
        fn new(policy: &Policy, processes: u32) -> Self {
            let on_failure = OnFailure::Local { instances: processes };
            Self {
                plan: Plan::of(policy.clone()),
                policy: policy.clone(),
                standings: RefCell::new(policy.first(Tick(0))),
                processes: (0..processes).map(|_| Local::new(on_failure)).collect(),
                allowed_at: Vec::new(),
            }
        }

        fn ask_redis(&self, op: Op, at: Tick) -> Decision {
            let mut state = self.standings.borrow_mut();
            let mut part = tallygate::Part { rule: &self.policy, state: &mut *state, op };
            let agrees = part.admits(at);
            part.step::<tallygate::Timed>(at, agrees).0.decision
        }

        /// Charges what a process allowed, as `RedisStore::give_in` does.
        fn give_in(&self, process: &Local, at: Tick) {
            if !process.is_due(b"alice", at) {
                return;
            }
            let room = self.ask_redis(Op::Peek(0), at);
            let Taken::Charge(mut charge) = process.take(&self.plan, b"alice", at) else { return };
            if charge.used > 0 {
                let _ = self.ask_redis(Op::Force(charge.used.into()), at);
                charge.is_used_charged = true;
            }
            let Access::Limited(policy) = self.plan.access(at) else { unreachable!() };
            if charge.is_per_limit {
                let mut standings = self.standings.borrow_mut();
                let amounts: Vec<_> =
                    charge.payments.iter().map(|payment| (payment.index, payment.pay)).collect();
                let paid = pay_each(policy, &mut standings, &amounts, at).unwrap();
                let mut retry_at = None;
                for (payment, (amount, reset_after)) in charge.payments.iter_mut().zip(paid) {
                    payment.paid = amount;
                    if payment.paid < payment.pay {
                        let wait = pay_again_after(&policy.limits()[payment.index], reset_after);
                        let next = at.after(wait).unwrap();
                        retry_at = Some(retry_at.map_or(next, |before: Tick| before.min(next)));
                    }
                }
                charge.retry_at = retry_at;
                return;
            }
            charge.retry_at = at.after(pay_again_after(&policy.limits()[0], room.reset_after));
            let payment = &mut charge.payments[0];
            let amount = payment.pay.min(room.remaining);
            if amount > 0 && self.ask_redis(Op::Check(amount), at).allowed {
                payment.paid = amount;
            }
        }

        /// Asks every process at some ticks, while Redis is down in some intervals.
        fn run(&mut self, ticks: impl Iterator<Item = i64>, is_down: impl Fn(i64) -> bool) {
            for now in ticks {
                let at = Tick(now);
                if !is_down(now) {
                    self.processes.iter().for_each(|process| self.give_in(process, at));
                }
                for index in 0..self.processes.len() {
                    let decision = match is_down(now) {
                        true => {
                            let process = &self.processes[index];
                            process.decide(&self.plan, b"alice", Op::Check(1), (at, true))
                        }
                        false => self.ask_redis(Op::Check(1), at),
                    };
                    self.allowed_at.extend(decision.allowed.then_some(now));
                }
            }
        }

        /// Returns by how many units the worst of all intervals exceeds the bound of a limit.
        fn most_beyond_the_bound_of(&self, limit: &Limit) -> i64 {
            let numbers = *limit.numbers();
            let (limit, window) = (numbers.limit.cast_signed(), numbers.window.0.cast_signed());
            let mut most = i64::MIN;
            for (first, from) in self.allowed_at.iter().enumerate() {
                for (until, units) in self.allowed_at[first..].iter().zip(1..) {
                    let windows = match numbers.kind {
                        Kind::SlidingWindowLog => (until - from) / window + 1,
                        Kind::FixedWindow if numbers.anchor == Anchor::FirstRequest => {
                            (until - from) / window + 2
                        }
                        kind if kind.is_bucket() => {
                            let earned = (until - from) * limit / window;
                            most = most.max(units - numbers.burst.cast_signed() - earned);
                            continue;
                        }
                        _ => until / window - from / window + 1,
                    };
                    most = most.max(units - windows * limit);
                }
            }
            most
        }

        fn allowed_in(&self, ticks: std::ops::Range<i64>) -> usize {
            self.allowed_at.iter().filter(|at| ticks.contains(at)).count()
        }
    }

    #[test]
    fn j16_outages_in_every_window_allow_one_burst_more_in_all() {
        let mut random = fastrand::Rng::with_seed(16);
        for policy in policies() {
            for processes in [1, 4] {
                for pattern in 0..24 {
                    let (outages, lasts) = match pattern {
                        0 => (1, 50),
                        1 => (1, 600),
                        2 => (5, 20),
                        3 => (10, 90),
                        _ => (random.i64(1..6), random.i64(1..300)),
                    };
                    let offset = random.i64(0..WINDOW);
                    let every = WINDOW / outages + i64::from(pattern % 3 == 2);
                    let mut fleet = Fleet::new(&policy, processes);
                    fleet.run(0..13 * WINDOW, |now| {
                        (now + WINDOW - offset).rem_euclid(every) < lasts.min(every - 1)
                    });
                    let limit = &policy.limits()[0];
                    let most = fleet.most_beyond_the_bound_of(limit);
                    assert!(
                        most <= LIMIT.cast_signed(),
                        "{most} beyond the bound: {limit:?}, {processes} processes, {outages} outages of {lasts}, \
                         from {offset} on"
                    );
                    let possible = 13 * usize::try_from(LIMIT).unwrap();
                    let allowed = fleet.allowed_at.len();
                    assert!(allowed * 10 > possible * 5, "{allowed} of {possible}: {limit:?}");
                }
            }
        }
    }

    #[test]
    fn j16_a_long_outage_locks_no_client_out_and_after_it_the_quota_is_there() {
        for policy in policies() {
            for processes in [1, 4] {
                for offset in [1, 300, 990] {
                    let mut fleet = Fleet::new(&policy, processes);
                    let (from, until) = (2 * WINDOW + offset, 12 * WINDOW + offset);
                    fleet.run(0..16 * WINDOW, |now| (from..until).contains(&now));
                    let limit = &policy.limits()[0];
                    assert!(fleet.most_beyond_the_bound_of(limit) <= LIMIT.cast_signed());
                    let enough = usize::try_from(LIMIT * 95 / 100).unwrap();
                    // The window after the beginning pays for the units of the overlap.
                    for window in 5..12 {
                        let start = window * WINDOW;
                        let allowed = fleet.allowed_in(start..start + WINDOW);
                        assert!(allowed >= enough, "{allowed} in window {window}: {limit:?}");
                    }
                    let after = fleet.allowed_in(14 * WINDOW..15 * WINDOW);
                    assert!(after >= enough, "{after} after the outage: {limit:?}");
                }
            }
        }
    }

    /// Policies of several limits, each with a short window and one or two longer ones.
    fn policies_of_several_limits() -> [Policy; 4] {
        let window = |windows: u64| Ticks(windows * WINDOW.cast_unsigned());
        let of = |limits: Vec<LimitBuilder>| Policy::all_of("api", limits).unwrap();
        [
            of(vec![
                Policy::fixed_window(LIMIT).per(window(1)).named("short"),
                Policy::sliding_window_log(3 * LIMIT).per(window(5)).named("long"),
            ]),
            of(vec![
                Policy::token_bucket(LIMIT).per(window(1)).burst(LIMIT / 2).named("short"),
                Policy::fixed_window(3 * LIMIT).per(window(6)).named("long"),
            ]),
            of(vec![
                Policy::sliding_window_counter(LIMIT).per(window(1)).named("short"),
                Policy::fixed_window(2 * LIMIT).per(window(3)).named("middle"),
                Policy::fixed_window(4 * LIMIT).per(window(8)).named("long"),
            ]),
            of(vec![
                Policy::sliding_window_log(LIMIT).per(window(1)).named("short"),
                Policy::token_bucket(LIMIT / 2).per(window(1)).burst(3 * LIMIT).named("long"),
            ]),
        ]
    }

    /// The bound of a limit that is not the tightest is never reached, so every limit is checked with its own bound.
    #[test]
    fn j16_a_policy_of_several_limits_keeps_the_bound_of_each_in_outages_of_any_length() {
        let mut random = fastrand::Rng::with_seed(17);
        for policy in policies_of_several_limits() {
            for processes in [1, 4] {
                for pattern in 0..14 {
                    // Shorter than all windows, longer than the short one, as long as a window, longer than all of them.
                    let (every, lasts) = match pattern {
                        0 => (WINDOW, 200),
                        1 => (2 * WINDOW, WINDOW),
                        2 => (6 * WINDOW, 2 * WINDOW),
                        3 => (6 * WINDOW, 5 * WINDOW),
                        4 => (8 * WINDOW + 1, 3 * WINDOW + 500),
                        5 => (14 * WINDOW, 9 * WINDOW),
                        _ => {
                            let every = random.i64(200..12 * WINDOW);
                            (every, random.i64(1..every))
                        }
                    };
                    let offset = random.i64(0..every);
                    let mut fleet = Fleet::new(&policy, processes);
                    let ticks = 32 * WINDOW;
                    let asked_at = (0..ticks).step_by(5);
                    fleet.run(asked_at, |now| (now + offset).rem_euclid(every) < lasts);
                    for limit in policy.limits() {
                        let most = fleet.most_beyond_the_bound_of(limit);
                        let burst = match limit.numbers().kind.is_bucket() {
                            true => limit.numbers().burst.cast_signed(),
                            false => limit.numbers().limit.cast_signed(),
                        };
                        assert!(
                            most <= burst,
                            "{most} beyond the bound of {limit:?}: {processes} processes, every {every} an outage of \
                             {lasts}, from {offset} on"
                        );
                    }
                    // The slowest limit decides how many are possible. Where outages come all the time, a good part of them
                    // pays for units of the window before; but no client is locked out.
                    let rate = |limit: &Limit| {
                        ticks * limit.numbers().limit.cast_signed()
                            / limit.numbers().window.0.cast_signed()
                    };
                    let possible = policy.limits().iter().map(rate).min().unwrap();
                    let allowed = i64::try_from(fleet.allowed_at.len()).unwrap();
                    assert!(
                        allowed * 10 > possible * 2,
                        "{allowed} of {possible}: {processes} processes, every {every} an outage of {lasts}, from \
                         {offset} on, {policy:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn j16_units_whose_charge_has_no_reply_stay_unpaid() {
        let plan = Plan::of(policies()[0].clone());
        let local = Local::new(OnFailure::Local { instances: 1 });
        let check = |now| local.decide(&plan, b"alice", Op::Check(30), (Tick(now), true)).allowed;
        assert!(check(0));
        let Taken::Charge(mut charge) = local.take(&plan, b"alice", Tick(10)) else {
            panic!("30 units are to be charged");
        };
        assert_eq!((charge.payments[0].pay, charge.used), (30, 0));
        assert!(matches!(local.take(&plan, b"alice", Tick(11)), Taken::ByAnother));
        charge.retry_at = Some(Tick(WINDOW));
        drop(charge);
        assert!(!local.is_due(b"alice", Tick(WINDOW - 1)), "there is no room in this window");
        assert!(!check(500), "30 of 40 are unpaid");
        let Taken::Charge(mut charge) = local.take(&plan, b"alice", Tick(WINDOW)) else {
            panic!("30 units are still to be charged");
        };
        charge.payments[0].paid = charge.payments[0].pay;
        drop(charge);
        assert!(local.is_unused(), "everything is paid");
    }
}
