//! Counts of events, for metrics.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;

use crate::clock::since_epoch_us;
use crate::error::Error;
#[cfg(doc)]
use crate::failure::OnFailure;

macro_rules! counters {
    ($($(#[$doc:meta])+ $name:ident,)+) => {
        /// The counters of a client, and the times of its last events.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)+
            pub(crate) last_error: ArcSwapOption<Error>,
            /// When the server was last out of memory.
            memory_error: LastTime,
            /// When the server last rejected a call for a reason that concerns every call.
            rejection: LastTime,
            /// Whether no call has succeeded since then.
            rejects_all: AtomicBool,
            /// Whether a server has ever answered that it decides on no charge.
            pub(crate) rejected_charges: AtomicBool,
            /// Whether the server rejected the last connection: for example because of a wrong password.
            rejects_connections: AtomicBool,
            /// Whether the end of the last lack of memory, or of the last rejections, is still to be reported.
            has_trouble: AtomicBool,
            /// When a caller last had to wait for a place to decide on several keys, in nanoseconds since [`FIRST_USE`].
            queued_ns: AtomicU64,
        }

        /// Counts of events since the client was made: see [`Redis::counts`](crate::Redis::counts).
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counts {
            $($(#[$doc])+ pub $name: u64,)+
            /// Whether a circuit breaker is open now.
            pub is_open: bool,
            /// Whether the server was out of memory in the last five seconds.
            pub is_out_of_memory: bool,
            /// Whether the server answers, but rejects every call: for example because it requires a password. It is
            /// also true for five seconds after the last such rejection.
            pub is_rejecting: bool,
            /// Whether the server answers, but rejects new connections: for example because of a wrong password. Then a
            /// circuit breaker is open as well.
            pub rejects_connections: bool,
        }

        impl Counters {
            pub(crate) fn snapshot(&self, is_open: bool) -> Counts {
                Counts {
                    $($name: self.$name.load(Ordering::Relaxed),)+
                    is_open,
                    is_out_of_memory: self.memory_error.is_recent(),
                    is_rejecting: self.is_rejecting(),
                    rejects_connections: self.rejects_connections.load(Ordering::Relaxed),
                }
            }
        }
    };
}

counters! {
    /// Calls that were sent.
    calls,
    /// Calls without a reply in time.
    timeouts,
    /// Connections that were made.
    connections,
    /// How often the circuit breaker of a server opened because the server did not answer.
    breaker_opened,
    /// Calls that were redirected to another server of the cluster.
    redirections,
    /// Scripts that were sent again because a server had forgotten them.
    reloads,
    /// Writes that were retried because another process had written.
    contended,
    /// Checks that were denied as [overloaded](tallygate::Source::Overloaded): the server answers, but they were not
    /// decided within their time budget.
    overloaded,
    /// Overloaded checks that lost every race with other processes.
    races_lost,
    /// Calls that the server rejected because it was out of memory.
    out_of_memory,
    /// Decisions that the server did not make, for any reason.
    errors,
    /// Decisions that the failure setting [allowed](OnFailure::Allow).
    allowed,
    /// Decisions that the failure setting [denied](OnFailure::Deny).
    denied,
    /// Decisions that were made [in this process](OnFailure::Local).
    local,
    /// Clients whose units from an outage were charged in Redis afterwards.
    debts_charged,
    /// Checks that shared a call with another check.
    coalesced,
    /// Units that were taken on [lease](crate::Leases).
    leased,
    /// Leased units that were returned.
    lease_returned,
    /// Leased units that were neither served nor returned.
    lease_expired,
    /// Units that a joint decision charged and could not return when another key denied. They stay charged until the
    /// policy has earned them back.
    unreturned,
    /// How often a server was found to evict keys before they expire.
    eviction_warnings,
}

/// How long an error of the server counts. While it is out of memory, reads and denials succeed; and in a cluster, other
/// servers may work. So one successful call proves nothing.
const RECENT_MS: i64 = 5000;

/// The time of the last event of a kind, in milliseconds since the epoch.
#[derive(Debug, Default)]
pub(crate) struct LastTime(AtomicI64);

impl LastTime {
    fn note(&self) {
        self.0.store(since_epoch_us() / 1000, Ordering::Relaxed);
    }

    fn is_recent(&self) -> bool {
        since_epoch_us() / 1000 - self.0.load(Ordering::Relaxed) < RECENT_MS
    }
}

static FIRST_USE: LazyLock<Instant> = LazyLock::new(Instant::now);

impl Counters {
    /// Records that the server is out of memory. Returns whether that is news.
    pub(crate) fn note_out_of_memory(&self) -> bool {
        let was_known = self.memory_error.is_recent();
        self.out_of_memory.fetch_add(1, Ordering::Relaxed);
        self.memory_error.note();
        self.has_trouble.store(true, Ordering::Relaxed);
        !was_known
    }

    /// Records that the server rejected a call for a reason that concerns every call. Returns whether that is news.
    pub(crate) fn note_rejection(&self) -> bool {
        let was_known = self.is_rejecting();
        self.rejection.note();
        self.rejects_all.store(true, Ordering::Relaxed);
        self.has_trouble.store(true, Ordering::Relaxed);
        !was_known
    }

    /// Records whether the server rejected a new connection. Returns whether a rejection is news.
    pub(crate) fn note_connection(&self, is_rejected: bool) -> bool {
        if !is_rejected {
            self.rejects_connections.store(false, Ordering::Relaxed);
            return false;
        }
        let was_known = self.is_rejecting();
        self.rejection.note();
        self.rejects_connections.store(true, Ordering::Relaxed);
        self.has_trouble.store(true, Ordering::Relaxed);
        !was_known
    }

    /// Records that the server carried out a call. Returns whether the end of its trouble is news.
    pub(crate) fn note_success(&self) -> bool {
        if !self.has_trouble.load(Ordering::Relaxed) {
            return false;
        }
        self.rejects_all.store(false, Ordering::Relaxed);
        let is_over = !self.memory_error.is_recent() && !self.rejection.is_recent();
        is_over && self.has_trouble.swap(false, Ordering::Relaxed)
    }

    /// Returns whether a server was ever unavailable, or answered that it decides on no charge.
    pub(crate) fn was_ever_away(&self) -> bool {
        self.breaker_opened.load(Ordering::Relaxed) > 0
            || self.rejected_charges.load(Ordering::Relaxed)
    }

    fn is_rejecting(&self) -> bool {
        self.rejects_all.load(Ordering::Relaxed)
            || self.rejects_connections.load(Ordering::Relaxed)
            || self.rejection.is_recent()
    }

    /// Records that a caller has to wait for a place to decide on several keys.
    pub(crate) fn note_queue(&self) {
        let now = u64::try_from(FIRST_USE.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.queued_ns.fetch_max(now.max(1), Ordering::Relaxed);
    }

    /// Returns whether a caller had to wait for a place to decide on several keys since a time.
    pub(crate) fn has_queued_since(&self, since: Instant) -> bool {
        let queued = self.queued_ns.load(Ordering::Relaxed);
        queued > 0 && *FIRST_USE + Duration::from_nanos(queued) >= since
    }
}
