//! One process's share of a quota, for outages.

use std::sync::Arc;

use tallygate::algorithm::Algorithm as _;
use tallygate::policy::{Anchor, LimitBuilder};
use tallygate::tiers::{Access, ClientRule};
use tallygate::{Cost, Kind, Limit, Policy, PolicyError, Tick, Ticks};

/// The share of a policy.
#[derive(Clone)]
pub(super) struct Share {
    pub(super) whole: Arc<Policy>,
    pub(super) instances: u32,
    pub(super) part: Arc<Policy>,
    /// The enforced limits of a policy of several limits.
    pub(super) limits: Arc<[LimitShare]>,
}

/// This process's share of one limit, or of a whole rule that does not have several limits.
#[derive(Clone)]
pub(super) struct LimitShare {
    /// The index of the limit in its policy.
    pub(super) index: usize,
    pub(super) share: ClientRule,
    /// The limit of the fleet whose [`Overlap`] counts. `None` for one bucket, which can be charged into debt, and where no
    /// limit is enforced.
    pub(super) overlaps: Option<Limit>,
}

impl LimitShare {
    /// Returns the most units that the share allows at once.
    pub(super) fn capacity(&self, at: Tick) -> Cost {
        match self.share.access(at) {
            Access::Limited(policy) => policy.capacity(),
            Access::Unlimited => Cost::MAX,
            Access::Blocked => 0,
        }
    }

    /// Returns the overlap of an outage that began at a time.
    pub(super) fn overlap(&self, began: Tick) -> Option<Overlap> {
        self.overlaps.as_ref().map(|limit| Overlap::of(limit, began))
    }
}

/// The time at the beginning of an outage in which Redis may have allowed the same quota as the shares.
///
/// Windows forget: in one window of L units, Redis may have allowed L units and the shares another L.
/// Charging the second L in Redis changes nothing if the window ends then. So each unit that is allowed here is paid for by
/// one of three quotas:
///
/// - by a window in Redis, charged by an ordinary check, as far as there is room;
/// - by a window of the share that is in the outage and after the overlap, when Redis has allowed nothing;
/// - by a later window of either kind. Until then it is unpaid.
///
/// A process allows a unit in the overlap only if its unpaid units stay within its share. They are charged to the share at
/// the end of the overlap, or in Redis when it is available and has room. So over any interval, the units that were paid for are at
/// most the bound of the policy: each window is either one in Redis or one of the shares. The units that are unpaid at the end of
/// the interval are at most the sum of the shares: one burst.
///
/// This needs an outage of the whole fleet. While one process alone cannot reach Redis, its share is allowed in addition.
#[derive(Clone, Copy)]
pub(super) struct Overlap {
    /// When everything that Redis allowed before the outage has left its windows.
    pub(super) until: Tick,
    /// The window of the limit.
    pub(super) window: Ticks,
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

impl Share {
    pub(super) fn of(whole: &Arc<Policy>, instances: u32) -> Result<Self, PolicyError> {
        let part = Arc::new(share_of(whole, instances)?);
        Ok(Self { whole: whole.clone(), instances, part, limits: limits_of(whole, instances)? })
    }
}

/// Returns one process's share of a policy. All shares together allow no more than the whole policy.
pub(super) fn share_of(policy: &Policy, instances: u32) -> Result<Policy, PolicyError> {
    let limits = policy.limits().iter().map(|limit| share_of_limit(limit, instances));
    Policy::all_of(policy.name(), limits)
}

/// Returns the share of each enforced limit of a policy of several limits; nothing for other policies.
fn limits_of(policy: &Policy, instances: u32) -> Result<Arc<[LimitShare]>, PolicyError> {
    if policy.limits().len() < 2 {
        return Ok([].into());
    }
    let enforced = policy.limits().iter().enumerate().filter(|(_, limit)| !limit.is_shadow());
    let share = |(index, limit): (usize, &Limit)| {
        let share = Policy::all_of(policy.name(), [share_of_limit(limit, instances)])?;
        Ok(LimitShare { index, share: ClientRule::of(share), overlaps: Some(limit.clone()) })
    };
    enforced.map(share).collect()
}

/// Returns one process's share of a limit. The share of a single process is the limit itself.
pub(super) fn share_of_limit(limit: &Limit, instances: u32) -> LimitBuilder {
    let instances = Cost::from(instances);
    let numbers = limit.numbers();
    let mut share = Policy::of(numbers.kind, numbers.limit).named(limit.name());
    if numbers.kind.is_bucket() {
        share = share
            .per(Ticks(numbers.window.0.saturating_mul(instances)))
            .burst((numbers.burst / instances).max(1));
    } else {
        // If the share is less than one unit per window, it is one unit in as many windows as it takes to earn it.
        let each = numbers.limit / instances;
        let windows = if each == 0 { instances.div_ceil(numbers.limit) } else { 1 };
        // Windows that begin at the same time in every process would all allow a unit at that time.
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

/// Returns the time in which one process's share earns a unit, if it starts with less than one.
pub(super) fn interval_of_share(policy: &Policy, instances: u32) -> Option<Ticks> {
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
