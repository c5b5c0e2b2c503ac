//! Reservations of clients, until they are settled or expire.
//!
//! Only the server that made a reservation knows it. Expired reservations are removed in order of time, a few with
//! every new one, without a scan. Their number and bytes are bounded in total, per address and per key, so that a
//! client that never settles cannot use up the table. A slot is taken before the estimate is charged.
//!
//! Settled reservations are remembered until they expire, up to a maximum number, so that settling twice can be
//! distinguished from settling an unknown reservation.

use std::collections::btree_map::Entry as Slot;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::hash::BuildHasher as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tallygate::reservation::{Reservation, SettleError};
use tallygate::{Ask, Cost, Decision, Ticks};
use tallygate_redis::Error;

use super::{
    Answer, Gate, GateError, GateRequest, Policies, PolicyRequest, RuledDecision, ServedPolicy,
};
use crate::client_budgets::BudgetOwner;
use crate::config::Limits;
use crate::random;

/// Reservations by their ids.
#[derive(Default)]
pub(crate) struct Reservations {
    table: Mutex<ReservationTable>,
    hasher: foldhash::quality::RandomState,
}

/// The table uses trees, which grow in small steps: growing a hash table would move all entries while a request waits.
#[derive(Default)]
struct ReservationTable {
    records: BTreeMap<u128, ReservationRecord>,
    by_time: BTreeSet<(Instant, u128)>,
    /// The settled reservations, the oldest first. Some may have expired.
    settled: VecDeque<u128>,
    open: ReservationTotals,
    by_address: BTreeMap<BudgetOwner, ReservationTotals>,
    by_key: BTreeMap<u64, usize>,
    by_address_and_key: BTreeMap<(BudgetOwner, u64), usize>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ReservationTotals {
    reservations: usize,
    bytes: usize,
}

enum ReservationRecord {
    Open { entry: Arc<ServedPolicy>, reservation: Reservation, owner: Owner, expires: Instant },
    Settled { expires: Instant },
}

/// The address and key that a reservation is counted for.
#[derive(Clone, Copy)]
struct Owner {
    address: BudgetOwner,
    /// A keyed hash of policy and key.
    key: u64,
    bytes: usize,
}

/// A slot that is counted until it is dropped or used.
struct ReservationSlot<'a> {
    reservations: &'a Reservations,
    owner: Option<Owner>,
}

/// The share of all reservations that an address or a key may have, as a divisor.
const SHARE_OF_AN_ADDRESS: usize = 10;
const SHARE_OF_A_KEY: usize = 100;
/// The share of a key's reservations that one address may have, as a divisor, so that other addresses can use the key.
const SHARE_OF_AN_ADDRESS_IN_A_KEY: usize = 4;
/// The memory of a reservation in addition to its key.
const RESERVATION_BYTES: usize = 512;
/// How many expired reservations are removed with each new one: more than one, and few enough to be quick.
const EXPIRED_AT_A_TIME: usize = 16;

/// The id of a reservation, which only its owner knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReservationId(u128);

/// What has too many open reservations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReservationScope {
    Server,
    Address,
    Key,
    /// One address for one key.
    AddressAndKey,
}

/// Why a reservation cannot be settled.
#[derive(Debug)]
pub(crate) enum SettleFailure {
    Unknown,
    /// The client was reset after the reservation was made.
    Reset,
    AlreadySettled,
    Store(GateError),
}

impl Gate {
    /// Charges an estimate that is settled later. Returns the decision, and the id of the reservation if it is
    /// allowed.
    pub(crate) async fn reserve(
        &self,
        request: GateRequest<'_>,
        ttl_ms: u64,
        owner: BudgetOwner,
    ) -> Result<(Answer, Option<ReservationId>), GateError> {
        let policies = self.in_force();
        let PolicyRequest { entry, ask } = policies.find_reservation(&request, ttl_ms)?;
        let time_to_live = Ticks(ttl_ms * Ticks::PER_MILLISECOND);
        let counted = (owner, &policies.limits);
        let (answer, id) = self.reservations.reserve(entry, ask, time_to_live, counted).await?;
        Ok((answer, id.map(ReservationId)))
    }

    /// Replaces the estimate of a reservation by the real cost.
    pub(crate) async fn settle(
        &self,
        reservation: ReservationId,
        actual: Cost,
    ) -> Result<(Arc<ServedPolicy>, Decision), SettleFailure> {
        self.reservations.settle(reservation.0, actual, self).await
    }
}

impl Policies {
    /// Finds the policy of a reservation, and checks that it can be decided.
    pub(crate) fn find_reservation<'a>(
        &'a self,
        request: &GateRequest<'a>,
        ttl_ms: u64,
    ) -> Result<PolicyRequest<'a>, GateError> {
        let longest = self.limits.max_reservation_ttl.as_millis();
        let longest_ms = u64::try_from(longest).unwrap_or(u64::MAX);
        if !(1..=longest_ms).contains(&ttl_ms) {
            return Err(GateError::TimeToLive { given_ms: ttl_ms, longest_ms });
        }
        match self.find(request)? {
            PolicyRequest { ask: Ask { cost: 0, .. }, .. } => Err(GateError::NothingToReserve),
            found => Ok(found),
        }
    }
}

impl ReservationId {
    /// Parses an id; `None` if no reservation can have it.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok().filter(|text| text.len() == 32)?;
        let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
        u128::from_str_radix(text, 16).ok().filter(|_| is_hex).map(Self)
    }
}

impl fmt::Display for ReservationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for SettleFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => {
                f.write_str("no such reservation; it has expired, or another server made it")
            }
            Self::Reset => f.write_str(
                "the client was reset after the reservation; there is nothing to settle",
            ),
            Self::AlreadySettled => f.write_str("the reservation is already settled"),
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl Reservations {
    /// Charges an estimate. Returns the decision, and the id of the reservation if it is allowed.
    async fn reserve(
        &self,
        entry: &Arc<ServedPolicy>,
        ask: Ask<'_>,
        time_to_live: Ticks,
        (address, limits): (BudgetOwner, &Limits),
    ) -> Result<(Answer, Option<u128>), GateError> {
        let place = self.take_slot(entry, ask.key, address, limits)?;
        let reserving = entry.limiter.reserve_with(ask, time_to_live, |rule, at, reserved| {
            let decided = RuledDecision { rule, decision: *reserved.decision(), at };
            (Answer::new(entry, decided), reserved.granted())
        });
        let (answer, granted) = reserving.await?;
        let expires = Instant::now() + Duration::from_nanos(time_to_live.0);
        Ok((answer, granted.and_then(|reservation| place.keep(entry, reservation, expires))))
    }

    /// Returns the number of open reservations.
    pub(crate) fn open(&self) -> usize {
        self.table().open.reservations
    }

    /// Replaces the estimate by the real cost.
    async fn settle(
        &self,
        number: u128,
        actual: Cost,
        gate: &Gate,
    ) -> Result<(Arc<ServedPolicy>, Decision), SettleFailure> {
        let most = gate.limits().max_reservations;
        // From here on, another request with the same id finds it settled.
        let (entry, mut reservation, owner, expires) = self.table().settle(number, most)?;
        let entry = gate.latest(&entry);
        match entry.limiter.settle(&mut reservation, actual).await {
            Ok(decision) => Ok((entry, decision)),
            Err(Error::Settle(error)) => Err(self.forget(number, &error)),
            Err(error) => {
                if !error.may_be_done() {
                    // The store did nothing, so the client may retry.
                    reservation.reopen();
                    let records = ReservationRecord::Open { entry, reservation, owner, expires };
                    self.table().reopen(number, records, owner);
                }
                Err(SettleFailure::Store(error.into()))
            }
        }
    }

    fn forget(&self, number: u128, error: &SettleError) -> SettleFailure {
        self.table().remove(number);
        match error {
            SettleError::AlreadySettled => SettleFailure::AlreadySettled,
            SettleError::Reset => SettleFailure::Reset,
            _ => SettleFailure::Unknown,
        }
    }

    /// Takes a slot, if the limits allow it.
    fn take_slot(
        &self,
        entry: &ServedPolicy,
        key: &[u8],
        address: BudgetOwner,
        limits: &Limits,
    ) -> Result<ReservationSlot<'_>, GateError> {
        let bytes = RESERVATION_BYTES + key.len();
        let owner = Owner { address, key: self.hasher.hash_one((&*entry.name, key)), bytes };
        let mut table = self.table();
        table.expire(Instant::now());
        table.check_room(&owner, limits)?;
        table.count(&owner);
        drop(table);
        Ok(ReservationSlot { reservations: self, owner: Some(owner) })
    }

    fn table(&self) -> MutexGuard<'_, ReservationTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReservationSlot<'_> {
    /// Uses the slot for a reservation, and returns its id.
    fn keep(
        mut self,
        entry: &Arc<ServedPolicy>,
        reservation: Reservation,
        expires: Instant,
    ) -> Option<u128> {
        let owner = self.owner.take()?;
        let number = random::number();
        let mut table = self.reservations.table();
        table.by_time.insert((expires, number));
        table.records.insert(
            number,
            ReservationRecord::Open { entry: entry.clone(), reservation, owner, expires },
        );
        Some(number)
    }
}

impl Drop for ReservationSlot<'_> {
    fn drop(&mut self) {
        if let Some(owner) = self.owner.take() {
            self.reservations.table().uncount(&owner);
        }
    }
}

impl ReservationTable {
    fn check_room(&self, owner: &Owner, limits: &Limits) -> Result<(), GateError> {
        let Limits { max_reservations, max_reservation_bytes, .. } = *limits;
        let fits = |has: ReservationTotals, share: usize| {
            has.reservations < (max_reservations / share).max(1)
                && has.bytes + owner.bytes <= max_reservation_bytes / share
        };
        let of_key = (max_reservations / SHARE_OF_A_KEY).max(1);
        let scope = if !fits(self.open, 1) {
            ReservationScope::Server
        } else if owner.address.has_own_budget()
            && !fits(self.of_address(owner.address), SHARE_OF_AN_ADDRESS)
        {
            ReservationScope::Address
        } else if self.by_key.get(&owner.key).copied().unwrap_or(0) >= of_key {
            ReservationScope::Key
        } else if owner.address.has_own_budget()
            && self.by_address_and_key.get(&(owner.address, owner.key)).copied().unwrap_or(0)
                >= (of_key / SHARE_OF_AN_ADDRESS_IN_A_KEY).max(1)
        {
            ReservationScope::AddressAndKey
        } else {
            return Ok(());
        };
        Err(GateError::TooManyReservations { scope })
    }

    fn of_address(&self, address: BudgetOwner) -> ReservationTotals {
        self.by_address.get(&address).copied().unwrap_or_default()
    }

    fn count(&mut self, owner: &Owner) {
        for amount in [&mut self.open, self.by_address.entry(owner.address).or_default()] {
            amount.reservations += 1;
            amount.bytes += owner.bytes;
        }
        *self.by_key.entry(owner.key).or_default() += 1;
        *self.by_address_and_key.entry((owner.address, owner.key)).or_default() += 1;
    }

    fn uncount(&mut self, owner: &Owner) {
        let less = |amount: &mut ReservationTotals| {
            amount.reservations -= 1;
            amount.bytes -= owner.bytes;
            *amount == ReservationTotals::default()
        };
        less(&mut self.open);
        if let Slot::Occupied(mut number) =
            self.by_address_and_key.entry((owner.address, owner.key))
        {
            *number.get_mut() -= 1;
            if *number.get() == 0 {
                number.remove();
            }
        }
        if let Slot::Occupied(mut amount) = self.by_address.entry(owner.address)
            && less(amount.get_mut())
        {
            amount.remove();
        }
        if let Slot::Occupied(mut count) = self.by_key.entry(owner.key) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// Removes some expired reservations, the oldest first.
    fn expire(&mut self, now: Instant) {
        for _ in 0..EXPIRED_AT_A_TIME {
            match self.by_time.first() {
                Some((expires, number)) if *expires < now => {
                    let number = *number;
                    self.remove(number);
                }
                _ => return,
            }
        }
    }

    fn remove(&mut self, number: u128) {
        match self.records.remove(&number) {
            Some(ReservationRecord::Open { owner, expires, .. }) => {
                self.by_time.remove(&(expires, number));
                self.uncount(&owner);
            }
            Some(ReservationRecord::Settled { expires }) => {
                self.by_time.remove(&(expires, number));
            }
            None => {}
        }
    }

    /// Takes an open reservation out to be settled, and marks it as settled.
    fn settle(
        &mut self,
        number: u128,
        remembered: usize,
    ) -> Result<(Arc<ServedPolicy>, Reservation, Owner, Instant), SettleFailure> {
        let records = self.records.get_mut(&number).ok_or(SettleFailure::Unknown)?;
        let (ReservationRecord::Open { expires, .. } | ReservationRecord::Settled { expires }) =
            *records;
        if expires < Instant::now() {
            self.remove(number);
            return Err(SettleFailure::Unknown);
        }
        let ReservationRecord::Open { entry, reservation, owner, expires } =
            std::mem::replace(records, ReservationRecord::Settled { expires })
        else {
            return Err(SettleFailure::AlreadySettled);
        };
        self.uncount(&owner);
        self.settled.push_back(number);
        if self.settled.len() > remembered
            && let Some(first) = self.settled.pop_front()
            && matches!(self.records.get(&first), Some(ReservationRecord::Settled { .. }))
        {
            self.remove(first);
        }
        Ok((entry, reservation, owner, expires))
    }

    /// Puts a reservation back that was taken out to be settled.
    fn reopen(&mut self, number: u128, records: ReservationRecord, owner: Owner) {
        let (ReservationRecord::Open { expires, .. } | ReservationRecord::Settled { expires }) =
            records;
        self.count(&owner);
        self.by_time.insert((expires, number));
        self.records.insert(number, records);
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::config::SETTLED_BYTES;
    use crate::peer::Peer;

    fn owner(address: &str, key: u64, bytes: usize) -> Owner {
        let address: IpAddr = address.parse().expect("an address");
        Owner { address: BudgetOwner::of(Peer::at(address), &[]), key, bytes }
    }

    fn limits() -> Limits {
        Limits { max_reservations: 1000, max_reservation_bytes: 1_000_000, ..Limits::default() }
    }

    fn full(table: &ReservationTable, owner: Owner) -> Option<ReservationScope> {
        match table.check_room(&owner, &limits()) {
            Err(GateError::TooManyReservations { scope }) => Some(scope),
            _ => None,
        }
    }

    #[test]
    fn a_settled_reservation_takes_no_more_than_the_formula_of_memory_says() {
        let in_trees = size_of::<(u128, ReservationRecord)>() + size_of::<(Instant, u128)>();
        let bytes = 2 * in_trees + 2 * size_of::<u128>();
        assert!(bytes <= SETTLED_BYTES, "{bytes}");
    }

    /// Fault J9.
    #[test]
    fn an_address_and_a_key_have_their_share_and_others_the_rest() {
        let mut table = ReservationTable::default();
        for key in 0..100 {
            assert_eq!(full(&table, owner("192.0.2.1", key, 400)), None);
            table.count(&owner("192.0.2.1", key, 400));
        }
        assert_eq!(full(&table, owner("192.0.2.1", 100, 400)), Some(ReservationScope::Address));
        // One address has a quarter of a key's slots, and cannot take those of other addresses.
        for number in 0..10 {
            let address = format!("192.0.2.{}", 2 + number / 2);
            assert_eq!(full(&table, owner(&address, 7000, 400)), None);
            table.count(&owner(&address, 7000, 400));
            if number == 1 {
                let expected = Some(ReservationScope::AddressAndKey);
                assert_eq!(full(&table, owner("192.0.2.2", 7000, 400)), expected);
            }
        }
        assert_eq!(full(&table, owner("192.0.2.99", 7000, 400)), Some(ReservationScope::Key));
        assert_eq!(full(&table, owner("192.0.2.2", 7001, 400)), None);
        // Bytes count as well.
        assert_eq!(full(&table, owner("192.0.2.3", 1, 100_001)), Some(ReservationScope::Address));
        for key in 0..100 {
            table.uncount(&owner("192.0.2.1", key, 400));
        }
        assert_eq!(full(&table, owner("192.0.2.1", 100, 400)), None);
        for number in 0..10 {
            table.uncount(&owner(&format!("192.0.2.{}", 2 + number / 2), 7000, 400));
        }
        let left = table.by_address.len() + table.by_key.len() + table.by_address_and_key.len();
        assert_eq!((table.open, left), (ReservationTotals::default(), 0));
    }

    /// Fault J9.
    #[test]
    fn reservations_expire_in_order_a_few_at_a_time() {
        let (mut table, now) = (ReservationTable::default(), Instant::now());
        for number in 0..100_u128 {
            let expires = now + Duration::from_millis(100 - u64::try_from(number).expect("small"));
            table.by_time.insert((expires, number));
            table.records.insert(number, ReservationRecord::Settled { expires });
        }
        table.expire(now + Duration::from_millis(10));
        let left: Vec<_> = (0..100).filter(|number| table.records.contains_key(number)).collect();
        assert_eq!(left, (0..=90).collect::<Vec<_>>());
        table.expire(now + Duration::from_secs(1));
        assert_eq!(table.records.len(), 91 - EXPIRED_AT_A_TIME, "not all at once");
        assert_eq!(table.by_time.len(), table.records.len());
    }
}
