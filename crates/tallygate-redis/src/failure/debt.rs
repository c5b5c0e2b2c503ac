//! The units that clients were allowed in this process during an outage, until they are charged in Redis.

use std::sync::Arc;

use tallygate::algorithm::{Algorithm as _, LimitRecord, Op};
use tallygate::tiers::ClientRule;
use tallygate::{Cost, Kind, Limit, Policy, PolicyError, Tick, Ticks};

use super::local::LocalLimiter;
use super::share::share_of_limit;

/// The units that a client was allowed in this process and that are not charged to one limit in Redis.
#[derive(Clone, Copy, Default)]
pub(super) struct Account {
    /// Units that the share has paid for, in a window or a bucket that Redis does not know.
    pub(super) cost: Cost,
    /// Units that no quota has paid for: see [`Overlap`](super::share::Overlap).
    pub(super) unpaid: Cost,
    /// Whether this outage has lasted longer than the [`Overlap`](super::share::Overlap).
    pub(super) is_past_overlap: bool,
}

impl Account {
    /// Counts the units of an operation that this process carried out.
    pub(super) fn note(&mut self, op: Op, is_allowed: bool, is_unpaid: bool) {
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

/// The units that a client owes, and when to charge them.
#[derive(Clone, Default)]
pub(super) struct ClientDebt {
    /// One for each limit that has a share.
    pub(super) accounts: Vec<Account>,
    /// When this process began to decide for the client, by the store's clock; `None` if Redis has answered since.
    pub(super) began: Option<Tick>,
    /// The time before which nothing is allowed, if the quota is smaller than the fleet.
    pub(super) not_before: Option<Tick>,
    /// The time before which Redis has no room for the unpaid units.
    pub(super) retry_at: Option<Tick>,
    /// The charge that was sent, and whose reply was lost.
    pub(super) unresolved: Option<SentCharge>,
    /// Whether a task is charging it. Until that is done, this process decides on the client.
    pub(super) is_being_charged: bool,
    /// Whether the caller gives the time, so that only the caller knows when to charge.
    pub(super) has_given_time: bool,
    /// The policy that decided on the client.
    pub(super) policy: Option<Arc<Policy>>,
}

/// A charge of a bucket. If its reply is lost, it is sent again with the same number, so that Redis charges it once.
#[derive(Clone, Copy)]
pub(crate) struct SentCharge {
    /// A random number. The script remembers the numbers of the last charges of a client.
    pub(crate) number: i64,
    /// The units to be charged.
    pub(crate) used: Cost,
    /// The units of `used` that the share has not earned back: at least as many are charged.
    pub(crate) least: Cost,
    /// When this process began to decide for the client, by the store's clock.
    pub(crate) began: Tick,
}

impl ClientDebt {
    /// Returns whether Redis has to be asked about the client before the next check is decided.
    pub(super) fn is_due(&self, at: Tick) -> bool {
        let has_unpaid = || self.accounts.iter().any(|account| account.unpaid > 0);
        self.began.is_some()
            || self.accounts.iter().any(|account| account.cost > 0)
            || has_unpaid() && self.retry_at.is_none_or(|retry_at| at >= retry_at)
    }

    pub(super) fn is_empty(&self) -> bool {
        let is_paid = self.accounts.iter().all(|account| account.cost == 0 && account.unpaid == 0);
        is_paid && self.began.is_none() && !self.is_being_charged
    }

    /// Makes room for an account of each limit. If the policy has other limits now, each of them owes the most that one of
    /// the limits before debts.
    pub(super) fn fit(&mut self, limits: usize) {
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

/// The result of taking the debt of a client.
pub(crate) enum TakenDebt<'a> {
    /// The client owes nothing.
    Nothing,
    /// Another task is charging it.
    ByAnother,
    Charge(DebtCharge<'a>),
}

/// The debt of a client while it is charged in Redis. When this is dropped, the outage is over for the client, unless the
/// charge has [failed](Self::failed).
pub(crate) struct DebtCharge<'a> {
    pub(super) local: &'a LocalLimiter,
    pub(super) client: &'a [u8],
    /// One for each account.
    pub(crate) payments: Vec<Payment>,
    /// Whether each limit is paid for by itself, because the policy has several.
    pub(crate) is_per_limit: bool,
    /// The units to be charged unconditionally: only of a policy that has one account.
    pub(crate) sent: Option<SentCharge>,
    /// Whether Redis has confirmed that `sent` was charged; also true if there is nothing to charge unconditionally.
    pub(crate) is_used_charged: bool,
    /// Whether `sent` was sent before, and its reply was lost.
    pub(super) is_repeated: bool,
    /// When to try again to charge the unpaid units.
    pub(crate) retry_at: Option<Tick>,
    /// How many processes share the quota.
    pub(crate) processes: u32,
    pub(super) has_failed: bool,
}

/// The units to be charged to one limit, as far as there is room in Redis.
pub(crate) struct Payment {
    /// The index of the limit in its policy.
    pub(crate) index: usize,
    /// The debts when they were taken.
    pub(super) cost: Cost,
    pub(super) unpaid: Cost,
    pub(crate) pay: Cost,
    /// How many of them were charged. Units whose charge got no reply do not count: the promise is an upper bound.
    pub(crate) paid: Cost,
}

impl DebtCharge<'_> {
    /// Returns whether any units are to be charged as far as there is room.
    pub(crate) fn has_payments(&self) -> bool {
        self.payments.iter().any(|payment| payment.pay > 0)
    }

    /// Returns whether any units were charged in Redis.
    pub(crate) fn is_any_charged(&self) -> bool {
        self.sent.is_some() || self.payments.iter().any(|payment| payment.paid > 0)
    }

    /// Records that Redis did not charge the remaining units: the outage continues.
    pub(crate) fn failed(mut self) {
        self.has_failed = true;
    }
}

impl DebtCharge<'_> {
    /// Returns whether the reply to the unconditional charge was lost.
    pub(super) const fn is_unresolved(&self) -> bool {
        !self.is_used_charged && !self.has_failed
    }
}

impl Drop for DebtCharge<'_> {
    fn drop(&mut self) {
        self.local.charged(self);
    }
}

/// The clients whose debts are to be charged in Redis next.
pub(crate) enum NextDebts {
    Now(Vec<(Box<[u8]>, ClientRule)>),
    In(Ticks),
    Never,
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

/// Charges units to single limits of a policy, as far as each has room for them, and at most `most` to each. Returns for each payment how many units were
/// charged, and the time after which the limit has forgotten everything.
pub(crate) fn pay_each(
    policy: &Policy,
    records: &mut [LimitRecord],
    payments: &[(usize, Cost)],
    most: Cost,
    at: Tick,
) -> Result<Vec<(Cost, Ticks)>, PolicyError> {
    let mut paid = Vec::with_capacity(payments.len());
    for (index, amount) in payments {
        let alone = Policy::all_of("", [share_of_limit(&policy.limits()[*index], 1)])?;
        let mut state: Box<[LimitRecord]> = [records[*index].clone()].into();
        let room = alone.facts(&state, at, None).remaining;
        let amount = room.min(*amount).min(most);
        if amount > 0 {
            alone.charge(&mut state, at, amount.into());
        }
        paid.push((amount, alone.facts(&state, at, None).reset_after));
        if let [record] = &mut *state {
            std::mem::swap(record, &mut records[*index]);
        }
    }
    Ok(paid)
}
