//! Shared code of Tallygate's tests. This crate is not published.
//!
//! To test your own store, start with [`contract`]: implement [`contract::Subject`] and call [`store_contract!`].
//!
//! | file | contents |
//! |---|---|
//! | `contract.rs` | the tests that every store must pass |
//! | `corpus.rs` | the seeds of the fuzz targets, and mutations of them |
//! | `http2.rs` | HTTP/2 frames, written by hand |
//! | `mistakes.rs` | the registry of seeded mistakes |
//! | `model.rs` | a simple and slow reference implementation of the six algorithms |
//! | `traces.rs` | generators of limits, traffic and operations |
//! | `vectors.rs` | test cases with their expected results, from `vectors/` |
//! | `servers/` | real Redis and Valkey servers, clusters, sentinels, and a proxy that fails on demand |

// The examples of the documents give a reader who copies them no warnings.
#![doc(test(attr(deny(unused_imports, unused_must_use, unused_mut, unused_variables))))]
#![allow(
    clippy::missing_panics_doc,
    reason = "functions for tests assert, and a panic fails the test"
)]

use proptest::prelude::ProptestConfig;
use proptest::test_runner::RngSeed;

pub mod contract;
mod corpus;
pub mod http2;
pub mod mistakes;
mod model;
pub mod servers;
mod traces;
mod vectors;

pub use corpus::try_corpus;
pub use model::Model;
pub use traces::{
    Step, any_limit, any_limit_of, bucket_limit, costs, extreme_limit_of, settling_steps,
    small_limit_of, steps, times,
};
pub use vectors::{DecisionCase, Expected, ReplayCase, decision_cases, replay_cases};

/// The examples of the documents, compiled and run with the other doc tests.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../../docs/verbs.md")]
    struct Verbs;
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/choosing-an-algorithm.md")]
    struct ChoosingAnAlgorithm;
    #[doc = include_str!("../../../docs/guides/move-from-governor.md")]
    struct MoveFromGovernor;
    #[doc = include_str!("../../../docs/guides/pay-per-token.md")]
    struct PayPerToken;
}

/// Returns the configuration of a property test: `usual` cases, or as many as `PROPTEST_CASES` says.
///
/// Without that variable the cases are the same in every run, so that a change is never blamed for a rare case that was
/// always there. With it, every run tries new cases; `scripts/properties` does that for a time budget.
///
/// Failing cases are not saved in files. Write a test with a name for each of them.
#[must_use]
pub fn cases(usual: u32) -> ProptestConfig {
    let configured = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let seed = if configured.is_some() { RngSeed::Random } else { RngSeed::Fixed(0) };
    ProptestConfig {
        cases: configured.unwrap_or(usual),
        rng_seed: seed,
        failure_persistence: None,
        max_shrink_time: 20_000,
        ..ProptestConfig::default()
    }
}
