//! Assertions for hostile inputs: one function per fuzz target.
//!
//! cargo-fuzz runs them with generated inputs (`fuzz/`, `scripts/fuzz`); the tests below run them with the seeds in
//! `fuzz/corpus` and mutations of them. Each function panics if the input is not answered or rejected as it should be.
//! The server does not use this module.

#![allow(clippy::missing_panics_doc, reason = "a fuzzer looks for failed assertions")]

use std::path::Path;
use std::sync::Arc;

use tallygate::store::Capacity;
use tallygate_core::{Algorithm as _, Decision, Kind, Limit, Penalty, Policy, Tick, Ticks};
use tallygate_redis::Stores;
use tokio::sync::mpsc;

use crate::config::{self, Config};
use crate::gate::{GateReply, GateRequest, RestoredStores, Verb};
use crate::shared::Shared;

pub use crate::http::fuzzing::{headers, json, query, scenario};
pub use crate::resp::fuzzing::resp;

/// Checks configurations: a valid one can be printed, served and reloaded; an invalid one is rejected with its place.
pub fn config(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    // Do not read files of this machine.
    if text.contains("file:") || text.contains("tls") {
        return;
    }
    let config = match Config::parse(text, Path::new("")) {
        Ok(config) => config,
        Err(mistake) => {
            let summary = mistake.to_string();
            assert!(summary.starts_with("configuration:"), "{summary}");
            assert_eq!(summary.lines().count(), 1, "one line: {summary:?}");
            return;
        }
    };
    let again = Config::parse(text, Path::new("")).expect("it was accepted before");
    // An invalid address is only detected by `check-config` and at startup.
    let Some(summary) = summary(&config) else { return };
    assert_eq!(Some(&summary), self::summary(&again).as_ref());
    let shared = Arc::new(shared(&config));
    for (name, policy) in &config.policies {
        let tiers = policy.tiers.by_name();
        for tier in tiers.iter().map(|(tier, _)| Some(&**tier)).chain([None]) {
            let request = GateRequest { policy: name, key: b"alice", cost: None, tier };
            let GateReply::Now(answer) = shared.gate.ask(Verb::Check, request) else {
                unreachable!("memory answers at once")
            };
            let decision = answer.expect("its policies and tiers are known").decision;
            assert!(decision.remaining <= decision.limit, "{decision:?}");
        }
    }
    shared.gate.put_in_force(&again);
    assert_eq!(crate::resp::fuzzing::replies(&shared, &[b"PI", b"NG\r\n"]), b"+PONG\r\n");
}

fn summary(config: &Config) -> Option<String> {
    let mut out = Vec::new();
    config::write_summary(config, 1, &mut out).ok()?;
    Some(String::from_utf8(out).expect("text"))
}

/// Returns the shared state of a server that keeps a few keys in memory.
pub(crate) fn shared(config: &Config) -> Shared {
    const MAX_KEYS: usize = 64;
    let (reload, _) = mpsc::channel(1);
    Shared::new(config, Stores::Memory(Capacity::of(MAX_KEYS)), RestoredStores::default(), reload)
}

/// Checks encoded states: any bytes are rejected, or are the only encoding of a state that decides within its limit.
pub fn state(input: &[u8]) {
    let Some((&[choice, now @ ..], bytes)) = input.split_first_chunk::<9>() else { return };
    let now = Tick(i64::from_le_bytes(now));
    let limits = limits();
    let limit = &limits[usize::from(choice) % limits.len()];
    if let Ok(state) = limit.decode(bytes) {
        let mut encoded = Vec::new();
        limit.encode(&state, &mut encoded);
        assert_eq!(encoded, bytes, "one state, one encoding");
        assert_decides(limit, state, now);
    }
    if let Ok(state) = limit.adopt(bytes, now) {
        assert_decides(limit, state, now);
    }
    if let Ok(policy) = Policy::from_description(bytes) {
        let mut described = Vec::new();
        policy.describe(&mut described);
        let again = Policy::from_description(&described).expect("it was described");
        assert_eq!(policy, again);
    }
}

fn assert_decides(
    limit: &Limit,
    mut state: <Limit as tallygate_core::Algorithm>::State,
    now: Tick,
) {
    let decision: Decision = limit.decide(&mut state, now, 1);
    assert!(decision.remaining <= decision.limit, "{decision:?}");
    let mut encoded = Vec::new();
    limit.encode(&state, &mut encoded);
    assert!(limit.decode(&encoded).is_ok(), "what a decision leaves can be read");
}

/// Each algorithm with small numbers, with a penalty, and with the largest.
fn limits() -> Vec<Limit> {
    let of = |kind| {
        let small = Policy::of(kind, 5).per(Ticks(10));
        let penalised = Policy::of(kind, 5).per(Ticks(10));
        let penalised = penalised.penalty(Penalty::lasting(Ticks(100)).after(2));
        let large = Policy::of(kind, if kind == Kind::SlidingWindowLog { 1000 } else { 1 << 40 });
        [small, penalised, large.per(Ticks(1 << 60))]
    };
    Kind::ALL.into_iter().flat_map(of).filter_map(|limit| limit.limit().ok()).collect()
}

#[cfg(test)]
mod tests {
    use tallygate_testkit::try_corpus;

    macro_rules! corpus {
        ($($target:ident: $mutations:expr, $sentence:ident;)*) => {$(
            #[test]
            fn $sentence() {
                try_corpus(stringify!($target), $mutations, super::$target);
            }
        )*};
    }

    corpus! {
        // Fault E15.
        config: 1500, a_configuration_is_served_or_rejected_with_a_position;
        // Fault H1.
        headers: 5000, header_fields_of_strangers_do_not_change_the_address;
        // Fault E15.
        json: 3000, every_body_gets_an_answer_in_json;
        // Fault E15.
        query: 5000, a_query_is_decoded_or_rejected;
        // Fault E9.
        resp: 1500, any_split_of_the_bytes_gives_the_same_replies;
        // Fault E15.
        scenario: 100, a_scenario_is_simulated_or_rejected;
        state: 5000, any_bytes_are_rejected_or_a_usable_state;
    }
}
