//! Reservations that were made over the network, until they are settled or lapse.
//!
//! They are known to the server that made them only. Settled ones are remembered as long as they would have lived, so
//! that settling twice is told apart from settling what never was.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tollgate::{Cost, Decision, Reservation, Reserved, SettleError, Tick, Ticks};

use super::{AskError, Entry, Limiter};

/// Reservations by their numbers.
#[derive(Default)]
pub(crate) struct Reservations {
    kept: Mutex<HashMap<u128, Kept>>,
}

enum Kept {
    Open { entry: Arc<Entry>, reservation: Reservation, until: Tick },
    Settled { entry: Arc<Entry>, until: Tick },
}

/// How many are kept. Past it new ones are refused: none can be forgotten.
const MOST: usize = 100_000;

/// Why a reservation cannot be settled.
#[derive(Debug)]
pub(crate) enum SettleFailure {
    Unknown,
    AlreadySettled,
    Store(AskError),
}

impl Reservations {
    /// Charges an estimate; with the number of the reservation if it was granted.
    pub(crate) async fn reserve(
        &self,
        entry: &Arc<Entry>,
        key: &[u8],
        tier: Option<&str>,
        estimate: Cost,
        time_to_live: Ticks,
    ) -> Result<(Decision, Option<u128>), AskError> {
        self.make_room()?;
        let reserved: Reserved = match (&entry.limiter, tier) {
            (Limiter::Memory(limiter), None) => limiter.reserve(key, estimate, time_to_live)?,
            (Limiter::Memory(limiter), Some(tier)) => {
                limiter.tier(tier)?.reserve(key, estimate, time_to_live)?
            }
            (Limiter::Redis(limiter), None) => limiter.reserve(key, estimate, time_to_live).await?,
            (Limiter::Redis(limiter), Some(tier)) => {
                limiter.tier(tier)?.reserve(key, estimate, time_to_live).await?
            }
        };
        Ok(match reserved {
            Reserved::Refused(decision) => (decision, None),
            Reserved::Granted(reservation, decision) => {
                let number = fastrand::u128(..);
                let until = reservation.until();
                let kept = Kept::Open { entry: entry.clone(), reservation, until };
                self.kept().insert(number, kept);
                (decision, Some(number))
            }
        })
    }

    /// Charges what it cost in the end.
    pub(crate) async fn settle(
        &self,
        number: u128,
        actual: Cost,
    ) -> Result<(Arc<Entry>, Decision), SettleFailure> {
        let (entry, mut reservation) = {
            let mut kept = self.kept();
            match kept.get(&number) {
                Some(Kept::Open { .. }) => {}
                Some(Kept::Settled { entry, until }) if entry.limiter.now() <= *until => {
                    return Err(SettleFailure::AlreadySettled);
                }
                None | Some(Kept::Settled { .. }) => return Err(SettleFailure::Unknown),
            }
            let Some(Kept::Open { entry, reservation, until }) = kept.remove(&number) else {
                return Err(SettleFailure::Unknown);
            };
            // From now on, whoever comes with it comes second.
            kept.insert(number, Kept::Settled { entry: entry.clone(), until });
            (entry, reservation)
        };
        let settled = match &entry.limiter {
            Limiter::Memory(limiter) => match limiter.settle(&mut reservation, actual) {
                Ok(decision) => decision.map_err(AskError::from),
                Err(error) => return Err(self.lapsed(number, &error)),
            },
            Limiter::Redis(limiter) => match limiter.settle(&mut reservation, actual) {
                Ok(decision) => decision.await.map_err(|error| {
                    if !matches!(
                        error,
                        tollgate_redis::Error::Unavailable { sent: true, .. }
                            | tollgate_redis::Error::Overloaded { sent: true, .. }
                    ) {
                        self.reopen(number, &entry, reservation);
                    }
                    AskError::from(error)
                }),
                Err(error) => return Err(self.lapsed(number, &error)),
            },
        };
        settled.map(|decision| (entry, decision)).map_err(SettleFailure::Store)
    }

    /// Nothing was done: it may be settled when the store is back.
    fn reopen(&self, number: u128, entry: &Arc<Entry>, mut reservation: Reservation) {
        reservation.reopen();
        let until = reservation.until();
        self.kept().insert(number, Kept::Open { entry: entry.clone(), reservation, until });
    }

    fn lapsed(&self, number: u128, error: &SettleError) -> SettleFailure {
        self.kept().remove(&number);
        match error {
            SettleError::AlreadySettled => SettleFailure::AlreadySettled,
            _ => SettleFailure::Unknown,
        }
    }

    fn make_room(&self) -> Result<(), AskError> {
        let mut kept = self.kept();
        if kept.len() < MOST {
            return Ok(());
        }
        kept.retain(|_, kept| {
            let (Kept::Open { entry, until, .. } | Kept::Settled { entry, until }) = kept;
            entry.limiter.now() <= *until
        });
        if kept.len() < MOST {
            return Ok(());
        }
        Err(AskError::Store(
            format!("{MOST} reservations are open; settle some, or let them lapse").into(),
        ))
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<u128, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
