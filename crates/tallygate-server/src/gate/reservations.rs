//! Reservations that were made over the network, until they are settled or expire.
//!
//! They are known to the server that made them only. They expire in order of time, a few with every new one: nothing scans
//! them all. Their number and bytes are bounded, in total, per address and per key, so that one client that lets them lie
//! leaves room for the others. A place is taken before the estimate is charged.
//!
//! Settled reservations are remembered as long as they would have lived, or until as many others were settled: so that
//! settling twice is told apart from settling what never was.

use std::collections::btree_map::Entry as Slot;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::BuildHasher as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tallygate::{Ask, Cost, Decision, Reservation, SettleError, Ticks};
use tallygate_redis::Error;

use super::{AskError, Decided, Entry};
use crate::config::Limits;
use crate::holdings::Holder;
use crate::random;

/// Reservations by their numbers.
#[derive(Default)]
pub(crate) struct Reservations {
    book: Mutex<Book>,
    hasher: foldhash::quality::RandomState,
}

/// Trees, which grow a little at a time: a hash table moves everything to a larger one while its requester waits.
#[derive(Default)]
struct Book {
    kept: BTreeMap<u128, Kept>,
    by_time: BTreeSet<(Instant, u128)>,
    /// The settled ones, the first first. Some of them may have expired.
    settled: VecDeque<u128>,
    open: Amount,
    by_address: BTreeMap<Holder, Amount>,
    by_key: BTreeMap<u64, usize>,
    by_address_and_key: BTreeMap<(Holder, u64), usize>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Amount {
    reservations: usize,
    bytes: usize,
}

enum Kept {
    Open { entry: Arc<Entry>, reservation: Reservation, owner: Owner, expires: Instant },
    Settled { expires: Instant },
}

/// Whom a reservation is counted to.
#[derive(Clone, Copy)]
struct Owner {
    address: Holder,
    /// A keyed hash of policy and key.
    key: u64,
    bytes: usize,
}

/// A place that is counted, until it is given back or used.
struct Place<'a> {
    reservations: &'a Reservations,
    owner: Option<Owner>,
}

/// What part of all an address may have, and a key.
const SHARE_OF_AN_ADDRESS: usize = 10;
const SHARE_OF_A_KEY: usize = 100;
/// What part of a key's reservations one address may have: it leaves places for the other addresses that use the key.
const SHARE_OF_AN_ADDRESS_IN_A_KEY: usize = 4;
/// What a reservation takes beside its key.
const RESERVATION_BYTES: usize = 512;
/// How many expired ones are removed when a new one comes: more than come, and few enough to take no time.
const EXPIRED_AT_A_TIME: usize = 16;

/// Why a reservation cannot be settled.
#[derive(Debug)]
pub(crate) enum SettleFailure {
    Unknown,
    /// The client was reset after the reservation was made.
    Reset,
    AlreadySettled,
    Store(AskError),
}

impl Reservations {
    /// Charges an estimate; with the number of the reservation if it was granted.
    pub(crate) async fn reserve(
        &self,
        entry: &Arc<Entry>,
        (key, tier): (&[u8], Option<&str>),
        estimate: Cost,
        time_to_live: Ticks,
        (address, limits): (Holder, &Limits),
    ) -> Result<(Decided, Option<u128>), AskError> {
        let place = self.take_place(entry, key, address, limits)?;
        let ask = Ask::new(key).cost(estimate).tier(tier);
        let reserving = entry.limiter.reserve_with(ask, time_to_live, |plan, at, reserved| {
            (Decided::new(plan, *reserved.decision(), at, false), reserved.granted())
        });
        let (decided, granted) = reserving.await?;
        let expires = Instant::now() + Duration::from_nanos(time_to_live.0);
        Ok((decided, granted.and_then(|reservation| place.keep(entry, reservation, expires))))
    }

    /// Returns how many are open.
    pub(crate) fn open(&self) -> usize {
        self.book().open.reservations
    }

    /// Charges what it cost in the end.
    pub(crate) async fn settle(
        &self,
        number: u128,
        actual: Cost,
        limits: &Limits,
    ) -> Result<(Arc<Entry>, Decision), SettleFailure> {
        // From now on, another request with the same number comes second.
        let (entry, mut reservation, owner, expires) =
            self.book().settle(number, limits.max_reservations)?;
        let settled = match entry.limiter.settle(&mut reservation, actual) {
            Ok(settling) => settling.await,
            Err(error) => Err(Error::Settle(error)),
        };
        match settled {
            Ok(decision) => Ok((entry, decision)),
            Err(Error::Settle(error)) => Err(self.lapsed(number, &error)),
            Err(error) => {
                let may_be_done = matches!(
                    error,
                    Error::Unavailable { sent: true, .. } | Error::Overloaded { sent: true, .. }
                );
                if !may_be_done {
                    // Nothing was done: it may be settled when the store is back.
                    reservation.reopen();
                    let kept = Kept::Open { entry, reservation, owner, expires };
                    self.book().reopen(number, kept, owner);
                }
                Err(SettleFailure::Store(error.into()))
            }
        }
    }

    fn lapsed(&self, number: u128, error: &SettleError) -> SettleFailure {
        self.book().remove(number);
        match error {
            SettleError::AlreadySettled => SettleFailure::AlreadySettled,
            SettleError::Reset => SettleFailure::Reset,
            _ => SettleFailure::Unknown,
        }
    }

    /// Counts one more, if there is room for it.
    fn take_place(
        &self,
        entry: &Entry,
        key: &[u8],
        address: Holder,
        limits: &Limits,
    ) -> Result<Place<'_>, AskError> {
        let bytes = RESERVATION_BYTES + key.len();
        let owner = Owner { address, key: self.hasher.hash_one((&*entry.name, key)), bytes };
        let mut book = self.book();
        book.expire(Instant::now());
        book.check_room(&owner, limits)?;
        book.count(&owner);
        drop(book);
        Ok(Place { reservations: self, owner: Some(owner) })
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place<'_> {
    /// Uses the place for a reservation; its number.
    fn keep(
        mut self,
        entry: &Arc<Entry>,
        reservation: Reservation,
        expires: Instant,
    ) -> Option<u128> {
        let owner = self.owner.take()?;
        let number = random::number();
        let mut book = self.reservations.book();
        book.by_time.insert((expires, number));
        book.kept.insert(number, Kept::Open { entry: entry.clone(), reservation, owner, expires });
        Some(number)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(owner) = self.owner.take() {
            self.reservations.book().uncount(&owner);
        }
    }
}

impl Book {
    fn check_room(&self, owner: &Owner, limits: &Limits) -> Result<(), AskError> {
        let Limits { max_reservations, max_reservation_bytes, .. } = *limits;
        let fits = |has: Amount, share: usize| {
            has.reservations < (max_reservations / share).max(1)
                && has.bytes + owner.bytes <= max_reservation_bytes / share
        };
        let of_key = (max_reservations / SHARE_OF_A_KEY).max(1);
        let whose = if !fits(self.open, 1) {
            "the server has"
        } else if owner.address.is_counted()
            && !fits(self.of_address(owner.address), SHARE_OF_AN_ADDRESS)
        {
            "your address has"
        } else if self.by_key.get(&owner.key).copied().unwrap_or(0) >= of_key {
            "the key has"
        } else if owner.address.is_counted()
            && self.by_address_and_key.get(&(owner.address, owner.key)).copied().unwrap_or(0)
                >= (of_key / SHARE_OF_AN_ADDRESS_IN_A_KEY).max(1)
        {
            "your address has for this key"
        } else {
            return Ok(());
        };
        Err(AskError::Reservations { whose })
    }

    fn of_address(&self, address: Holder) -> Amount {
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
        let less = |amount: &mut Amount| {
            amount.reservations -= 1;
            amount.bytes -= owner.bytes;
            *amount == Amount::default()
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

    /// Removes some of those whose time has passed, the first first.
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
        match self.kept.remove(&number) {
            Some(Kept::Open { owner, expires, .. }) => {
                self.by_time.remove(&(expires, number));
                self.uncount(&owner);
            }
            Some(Kept::Settled { expires }) => {
                self.by_time.remove(&(expires, number));
            }
            None => {}
        }
    }

    /// Takes an open one out to be settled, and remembers that it was.
    fn settle(
        &mut self,
        number: u128,
        remembered: usize,
    ) -> Result<(Arc<Entry>, Reservation, Owner, Instant), SettleFailure> {
        let kept = self.kept.get_mut(&number).ok_or(SettleFailure::Unknown)?;
        let (Kept::Open { expires, .. } | Kept::Settled { expires }) = *kept;
        if expires < Instant::now() {
            self.remove(number);
            return Err(SettleFailure::Unknown);
        }
        let Kept::Open { entry, reservation, owner, expires } =
            std::mem::replace(kept, Kept::Settled { expires })
        else {
            return Err(SettleFailure::AlreadySettled);
        };
        self.uncount(&owner);
        self.settled.push_back(number);
        if self.settled.len() > remembered
            && let Some(first) = self.settled.pop_front()
            && matches!(self.kept.get(&first), Some(Kept::Settled { .. }))
        {
            self.remove(first);
        }
        Ok((entry, reservation, owner, expires))
    }

    /// Puts one back that was taken out to be settled.
    fn reopen(&mut self, number: u128, kept: Kept, owner: Owner) {
        let (Kept::Open { expires, .. } | Kept::Settled { expires }) = kept;
        self.count(&owner);
        self.by_time.insert((expires, number));
        self.kept.insert(number, kept);
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
        Owner { address: Holder::of(Peer::at(address), &[]), key, bytes }
    }

    fn limits() -> Limits {
        Limits { max_reservations: 1000, max_reservation_bytes: 1_000_000, ..Limits::default() }
    }

    fn whose(book: &Book, owner: Owner) -> Option<&'static str> {
        match book.check_room(&owner, &limits()) {
            Err(AskError::Reservations { whose }) => Some(whose),
            _ => None,
        }
    }

    #[test]
    fn a_settled_reservation_takes_no_more_than_the_formula_of_memory_says() {
        let in_trees = size_of::<(u128, Kept)>() + size_of::<(Instant, u128)>();
        let bytes = 2 * in_trees + 2 * size_of::<u128>();
        assert!(bytes <= SETTLED_BYTES, "{bytes}");
    }

    #[test]
    fn j9_an_address_and_a_key_have_their_share_and_others_the_rest() {
        let mut book = Book::default();
        for key in 0..100 {
            assert_eq!(whose(&book, owner("192.0.2.1", key, 400)), None);
            book.count(&owner("192.0.2.1", key, 400));
        }
        assert_eq!(whose(&book, owner("192.0.2.1", 100, 400)), Some("your address has"));
        // One address has a quarter of a key's places, and cannot take those of the others.
        for number in 0..10 {
            let address = format!("192.0.2.{}", 2 + number / 2);
            assert_eq!(whose(&book, owner(&address, 7000, 400)), None);
            book.count(&owner(&address, 7000, 400));
            if number == 1 {
                let full = Some("your address has for this key");
                assert_eq!(whose(&book, owner("192.0.2.2", 7000, 400)), full);
            }
        }
        assert_eq!(whose(&book, owner("192.0.2.99", 7000, 400)), Some("the key has"));
        assert_eq!(whose(&book, owner("192.0.2.2", 7001, 400)), None);
        // Few, but large: bytes count as well.
        assert_eq!(whose(&book, owner("192.0.2.3", 1, 100_001)), Some("your address has"));
        for key in 0..100 {
            book.uncount(&owner("192.0.2.1", key, 400));
        }
        assert_eq!(whose(&book, owner("192.0.2.1", 100, 400)), None);
        for number in 0..10 {
            book.uncount(&owner(&format!("192.0.2.{}", 2 + number / 2), 7000, 400));
        }
        let left = book.by_address.len() + book.by_key.len() + book.by_address_and_key.len();
        assert_eq!((book.open, left), (Amount::default(), 0));
    }

    #[test]
    fn j9_reservations_expire_in_order_a_few_at_a_time() {
        let (mut book, now) = (Book::default(), Instant::now());
        for number in 0..100_u128 {
            let expires = now + Duration::from_millis(100 - u64::try_from(number).expect("small"));
            book.by_time.insert((expires, number));
            book.kept.insert(number, Kept::Settled { expires });
        }
        book.expire(now + Duration::from_millis(10));
        let left: Vec<_> = (0..100).filter(|number| book.kept.contains_key(number)).collect();
        assert_eq!(left, (0..=90).collect::<Vec<_>>());
        book.expire(now + Duration::from_secs(1));
        assert_eq!(book.kept.len(), 91 - EXPIRED_AT_A_TIME, "not all at once");
        assert_eq!(book.by_time.len(), book.kept.len());
    }
}
