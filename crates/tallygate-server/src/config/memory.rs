//! The upper bound of the memory of the server, whatever clients send: the formula in `docs/operations.md`.
//!
//! A test compares both with the memory of a server under attack.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use tallygate::tiers::Access;
use tallygate::{Kind, Limit, Policy};

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

/// The most earlier rules of a policy under which a client can have used units: as many as a client keeps.
const EARLIER_RULES: usize = 8;

/// The rules that each policy of a configuration has or had since the server started. A reload leaves the usage of
/// clients under earlier rules until it has expired.
#[derive(Clone, Debug, Default)]
pub(crate) struct RuleHistory(HashMap<Arc<str>, Vec<Arc<Policy>>>);

impl RuleHistory {
    /// Returns the rules after a configuration has come into force: its own and the earlier ones. Of all of them, it
    /// keeps the rules that take the most memory.
    pub(crate) fn with(&self, config: &Config) -> Self {
        let each = config.policies.iter().map(|(name, policy)| {
            let mut rules = self.of(name).to_vec();
            for rule in policy.rules() {
                if !rules.contains(&rule) {
                    rules.push(rule);
                }
            }
            rules.sort_by_key(|rule| Reverse(rule_bytes(rule)));
            rules.truncate(EARLIER_RULES);
            (name.clone(), rules)
        });
        Self(each.collect())
    }

    fn of(&self, policy: &str) -> &[Arc<Policy>] {
        self.0.get(policy).map_or(&[], Vec::as_slice)
    }
}

impl Config {
    /// Returns the upper bound of the memory of the server, in bytes. `max_keys` is `None` if Redis keeps the keys.
    pub(crate) fn memory_bound(&self, max_keys: Option<usize>, history: &RuleHistory) -> u64 {
        let max_keys = max_keys.map_or(LOCAL_KEYS, bytes);
        let limits = &self.limits;
        let bytes_of_keys = |has_one_key: bool| {
            let policies = self.policies.iter();
            let policies = policies.filter(move |(_, policy)| policy.has_one_key == has_one_key);
            policies.map(|(name, policy)| policy.key_bytes(history.of(name)))
        };
        let key_bytes = bytes_of_keys(false).fold(KEY, u64::saturating_add);
        let single = bytes_of_keys(true).map(|bytes| bytes.saturating_add(ONE_KEY_POLICY));
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
    /// Returns the most bytes that a key of the policy takes, with usage under earlier rules.
    fn key_bytes(&self, history: &[Arc<Policy>]) -> u64 {
        let own = self.rules();
        let earlier = history.iter().filter(|rule| !own.contains(rule));
        let (mut limits, mut entries) = (0, 0_u64);
        for rule in own.iter().chain(earlier) {
            limits += rule.limits().len();
            entries = entries.saturating_add(log_entries(rule));
        }
        let several = match limits {
            0 | 1 => 0,
            limits => EACH_OF_SEVERAL.saturating_mul(bytes(limits)).saturating_add(SEVERAL),
        };
        let several = if self.takes_request_limits { several + REQUEST_LIMITS } else { several };
        several.saturating_add(KEY).saturating_add(entries.saturating_mul(LOG_ENTRY))
    }

    /// Returns the rules of the policy, its tiers and its overrides.
    fn rules(&self) -> Vec<Arc<Policy>> {
        let (tiers, overrides) = (self.tiers.by_name(), self.tiers.by_key());
        let accesses = tiers.iter().map(|(_, access)| access);
        let accesses = accesses.chain(overrides.iter().map(|(_, access)| access)).cloned();
        std::iter::once(self.tiers.base())
            .chain(accesses)
            .filter_map(|access| match access {
                Access::Limited(rule) => Some(rule),
                _ => None,
            })
            .collect()
    }
}

/// Returns the bytes that the state of a client under a rule takes in addition to others.
fn rule_bytes(rule: &Policy) -> u64 {
    let limits = EACH_OF_SEVERAL.saturating_mul(bytes(rule.limits().len()));
    limits.saturating_add(log_entries(rule).saturating_mul(LOG_ENTRY))
}

/// Returns the most entries of the logs of a rule.
fn log_entries(rule: &Policy) -> u64 {
    let numbers = rule.limits().iter().map(Limit::numbers);
    let logs = numbers.filter(|numbers| numbers.kind == Kind::SlidingWindowLog);
    logs.map(|numbers| numbers.limit).fold(0, u64::saturating_add)
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

    fn config(text: &str) -> Config {
        Config::parse(text, Path::new("")).expect("a configuration")
    }

    fn of(text: &str) -> u64 {
        config(text).memory_bound(Some(1_000_000), &RuleHistory::default())
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

    /// Clients that are checked after each reload have a state under each of the last rules.
    ///
    /// Fault J5.
    #[test]
    fn rules_of_earlier_configurations_count_as_tiers() {
        let none = of("");
        let mut history = RuleHistory::default();
        for changes in 0..20 {
            // The second rule is the one with the log.
            let algorithm = if changes == 1 { "sliding_window_log" } else { "fixed_window" };
            let limit = 10 + changes;
            let text = format!(
                "[policies.a]\nlimit = {limit}\nwindow = \"1m\"\nalgorithm = \"{algorithm}\"\n"
            );
            // A reload of the same file changes nothing.
            for _ in 0..2 {
                let config = config(&text);
                history = history.with(&config);
                let rules = bytes(changes.min(EARLIER_RULES) + 1);
                let several = if changes == 0 { 0 } else { SEVERAL + rules * EACH_OF_SEVERAL };
                let log = if changes == 0 { 0 } else { 11 * LOG_ENTRY };
                let bound = config.memory_bound(Some(1_000_000), &history) - none;
                assert_eq!(bound, 1_000_000 * (KEY + several + log), "after {changes} changes");
            }
        }
        // A policy that is removed takes its keys with it.
        assert!(history.with(&config("")).of("a").is_empty());
    }
}
