//! Charges that depend on the response: the cost is reserved before the request is served, and settled after it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use http::response::Parts;
use tallygate::Cost;

/// The way to find the actual cost of a request.
///
/// If a request has no response (the client canceled it, the handler panicked, or the service returned an error), the
/// estimate stays charged: otherwise clients could make the service work for free.
#[derive(Clone)]
pub struct Settle(pub(crate) SettleTime);

type CostOfResponse = Arc<dyn Fn(&Parts) -> Option<Cost> + Send + Sync>;

#[derive(Clone)]
pub(crate) enum SettleTime {
    /// As soon as the head of the response is known. `None` keeps the estimate.
    Response(CostOfResponse),
    /// When the body has ended, by its number of bytes.
    Bytes(Arc<dyn Fn(u64) -> Cost + Send + Sync>),
    /// When the body has ended, by what the handler has counted.
    Meter,
}

impl Settle {
    /// Settles by the head of the response: its status, a header field, or a value in its extensions. `None` keeps the
    /// estimate. The header fields of the response show the corrected quota.
    #[must_use]
    pub fn by_response(cost: impl Fn(&Parts) -> Option<Cost> + Send + Sync + 'static) -> Self {
        Self(SettleTime::Response(Arc::new(cost)))
    }

    /// Settles at the [`ActualCost`] that the handler puts into the extensions of the response. Without one, the
    /// estimate stays charged.
    #[must_use]
    pub fn by_extension() -> Self {
        Self::by_response(|response| response.extensions.get::<ActualCost>().map(|cost| cost.0))
    }

    /// Returns the charge if the function is true for the response, so that only the others count: only failed
    /// logins, only requests that changed something.
    #[must_use]
    pub fn refund_if(is_free: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        Self::by_response(move |response| is_free(response).then_some(0))
    }

    /// Settles when the body of the response has ended, by the number of its bytes. A body that is cut off counts as
    /// far as it was sent.
    #[must_use]
    pub fn by_bytes(cost: impl Fn(u64) -> Cost + Send + Sync + 'static) -> Self {
        Self(SettleTime::Bytes(Arc::new(cost)))
    }

    /// Settles when the body of the response has ended, at what the handler has counted in the [`Meter`] of the
    /// request: for streams whose cost is known only at their end. Without a count, the estimate stays charged.
    #[must_use]
    pub const fn by_meter() -> Self {
        Self(SettleTime::Meter)
    }
}

impl fmt::Debug for Settle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            SettleTime::Response(_) => "by response",
            SettleTime::Bytes(_) => "by bytes",
            SettleTime::Meter => "by meter",
        })
    }
}

/// The actual cost of a request: an extension of its response, for [`Settle::by_extension`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActualCost(pub Cost);

/// Counts the actual cost of a request: an extension of the request, for [`Settle::by_meter`].
///
/// All clones are one meter, and all rules and layers of a request share it. A handler keeps one in the stream that it
/// returns, and adds to it until the stream ends.
#[derive(Clone, Debug, Default)]
pub struct Meter(Arc<Count>);

#[derive(Debug, Default)]
struct Count {
    units: AtomicU64,
    is_used: AtomicBool,
}

impl Meter {
    /// Adds units to the actual cost.
    pub fn add(&self, units: Cost) {
        let add = |before: u64| Some(before.saturating_add(units));
        // The closure always returns a value, so the update succeeds.
        let _ = self.0.units.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        self.0.is_used.store(true, Ordering::Release);
    }

    /// Returns the actual cost so far; `None` if nothing was added.
    #[must_use]
    pub fn total(&self) -> Option<Cost> {
        let is_used = self.0.is_used.load(Ordering::Acquire);
        is_used.then(|| self.0.units.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_meter_counts_from_all_clones_and_knows_whether_it_was_used() {
        let meter = Meter::default();
        assert_eq!(meter.total(), None);
        meter.clone().add(0);
        assert_eq!(meter.total(), Some(0));
        meter.add(u64::MAX);
        meter.add(1);
        assert_eq!(meter.total(), Some(u64::MAX));
    }
}
