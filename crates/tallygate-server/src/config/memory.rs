//! The upper bound of the memory of the server, whatever clients send: the formula in `docs/operations.md`.
//!
//! A test compares both with the memory of a server under attack.

use tallygate::Kind;
use tallygate::tiers::Access;

use super::{Config, DECODED_HEAD, PolicyConfig};
use crate::background::{BACKTESTS_AT_A_TIME, SCENARIOS_AT_A_TIME};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// The server itself, logs and metrics.
const ITSELF: u64 = 64 * MIB;
/// A key whose state is stored in the table.
const KEY: u64 = 128;
/// The additional memory of a key with several limits or tiers, and per limit of each tier.
const SEVERAL: u64 = KIB;
const EACH_OF_SEVERAL: u64 = 128;
/// The additional memory of a key whose requests contain their own limits: the states of eight limits, and the limits.
const REQUEST_LIMITS: u64 = 8 * KIB;
/// A unit of the limit of a sliding window log: an entry of 16 bytes, another for debt, and as much while the log grows.
const LOG_ENTRY: u64 = 64;
/// A policy with a single key: its table.
const ONE_KEY_POLICY: u64 = 64 * KIB;
/// The buffers of a connection, besides the head of a request.
const CONNECTION: u64 = 64 * KIB;
/// The buffers of TLS of a connection.
const TLS: u64 = 64 * KIB;
/// A simulation that runs, without its reply.
const SIMULATION: u64 = 48 * MIB;
/// An override with the longest key, and its copy while the overrides are changed.
const OVERRIDE: u64 = 10 * KIB;
/// A settled reservation while it is remembered, in trees whose nodes may be half empty.
pub(crate) const SETTLED_BYTES: usize = 512;
/// The reserve for replies that operators need during an attack, when clients hold all of `max_buffer_bytes`.
pub(crate) const OPERATOR_BYTES: usize = 8 * 1024 * 1024;
/// Keys per policy that are decided locally while Redis is unavailable.
const LOCAL_KEYS: u64 = 100_000;

impl Config {
    /// Returns the upper bound of the memory of the server, in bytes. `max_keys` is `None` if Redis keeps the keys.
    pub(crate) fn memory_bound(&self, max_keys: Option<usize>) -> u64 {
        let max_keys = max_keys.map_or(LOCAL_KEYS, bytes);
        let limits = &self.limits;
        let many = self.policies.values().filter(|policy| !policy.has_one_key);
        let key_bytes = many.map(PolicyConfig::key_bytes).fold(KEY, u64::saturating_add);
        let single = self.policies.values().filter(|policy| policy.has_one_key);
        let single = single.map(|policy| policy.key_bytes().saturating_add(ONE_KEY_POLICY));
        [
            ITSELF,
            max_keys.saturating_mul(key_bytes),
            single.fold(0, u64::saturating_add),
            SIMULATION.saturating_mul(bytes(SCENARIOS_AT_A_TIME)),
            bytes(limits.max_connections)
                .saturating_mul(u64::from(limits.max_head_bytes) + CONNECTION),
            if self.tls.is_any() { bytes(limits.max_connections).saturating_mul(TLS) } else { 0 },
            bytes(threads())
                .saturating_mul(u64::from(limits.max_streams))
                .saturating_mul(bytes(DECODED_HEAD))
                .saturating_mul(u64::from(limits.max_http2_head_bytes)),
            bytes(limits.max_buffer_bytes).saturating_mul(2),
            bytes(OPERATOR_BYTES).saturating_mul(2),
            bytes(limits.max_reservation_bytes),
            bytes(limits.max_reservations).saturating_mul(bytes(SETTLED_BYTES)),
            bytes(limits.max_overrides).saturating_mul(OVERRIDE),
            self.backtest_max_memory.saturating_mul(bytes(BACKTESTS_AT_A_TIME)),
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }
}

impl PolicyConfig {
    /// Returns the most bytes that a key of the policy takes.
    fn key_bytes(&self) -> u64 {
        let base = [self.tiers.base()];
        let (tiers, overrides) = (self.tiers.by_name(), self.tiers.by_key());
        let all = base
            .iter()
            .chain(tiers.iter().map(|(_, access)| access))
            .chain(overrides.iter().map(|(_, access)| access));
        let (mut limits, mut entries) = (0, 0_u64);
        for access in all {
            let Access::Limited(policy) = access else { continue };
            limits += policy.limits().len();
            for numbers in policy.limits().iter().map(tallygate::Limit::numbers) {
                if numbers.kind == Kind::SlidingWindowLog {
                    entries = entries.saturating_add(numbers.limit);
                }
            }
        }
        let several = match limits {
            0 | 1 => 0,
            limits => EACH_OF_SEVERAL.saturating_mul(bytes(limits)).saturating_add(SEVERAL),
        };
        let several = if self.takes_request_limits { several + REQUEST_LIMITS } else { several };
        several.saturating_add(KEY).saturating_add(entries.saturating_mul(LOG_ENTRY))
    }
}

/// Returns how many threads serve requests, as the runtime chooses it.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// More than any machine has.
fn bytes(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn of(text: &str) -> u64 {
        Config::parse(text, Path::new("")).expect("a configuration").memory_bound(Some(1_000_000))
    }

    #[test]
    fn a_key_takes_more_with_several_limits_tiers_and_logs() {
        let none = of("");
        let policy = |more: &str| of(&format!("[policies.a]\nlimit = 10\nwindow = \"1m\"\n{more}"));
        assert_eq!(policy("") - none, 1_000_000 * 128);
        assert_eq!(
            policy("[policies.a.tiers.pro]\nlimit = 20\n") - none,
            1_000_000 * (128 + 1024 + 2 * 128)
        );
        let log = policy("algorithm = \"sliding_window_log\"\n") - none;
        assert_eq!(log, 1_000_000 * (128 + 10 * 64));
    }
}
