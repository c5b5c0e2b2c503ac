//! Counts of events, for metrics.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
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
            /// When the server was last out of memory, in milliseconds since the epoch.
            out_of_memory_ms: AtomicI64,
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
        }

        impl Counters {
            pub(crate) fn snapshot(&self, is_open: bool) -> Counts {
                Counts {
                    $($name: self.$name.load(Ordering::Relaxed),)+
                    is_open,
                    is_out_of_memory: self.is_out_of_memory(),
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
    /// Decisions that the failure policy [allowed](OnFailure::Allow).
    allowed,
    /// Decisions that the failure policy [denied](OnFailure::Deny).
    denied,
    /// Decisions that were made [in this process](OnFailure::Local).
    local,
    /// Clients whose units from an outage were charged in Redis afterwards.
    returned,
    /// Checks that shared a call with another check.
    coalesced,
    /// Units that were taken on [lease](crate::Leases).
    leased,
    /// Leased units that were returned.
    given_back,
    /// Leased units that were neither served nor returned.
    lapsed,
    /// Units that a joint decision charged and could not return when another key denied. They stay charged until the
    /// policy has earned them back.
    unreturned,
    /// How often a server was found to evict keys before they expire.
    eviction_warnings,
}

/// How long a server counts as out of memory after it reported so. Reads and denials succeed meanwhile, so a successful
/// call proves nothing.
const OUT_OF_MEMORY_FOR_MS: i64 = 5000;

static FIRST_USE: LazyLock<Instant> = LazyLock::new(Instant::now);

impl Counters {
    /// Records that the server is out of memory. Returns whether that is news.
    pub(crate) fn note_out_of_memory(&self) -> bool {
        let was_known = self.is_out_of_memory();
        self.out_of_memory.fetch_add(1, Ordering::Relaxed);
        self.out_of_memory_ms.store(since_epoch_us() / 1000, Ordering::Relaxed);
        !was_known
    }

    fn is_out_of_memory(&self) -> bool {
        let last = self.out_of_memory_ms.load(Ordering::Relaxed);
        since_epoch_us() / 1000 - last < OUT_OF_MEMORY_FOR_MS
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
