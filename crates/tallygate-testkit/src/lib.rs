//! What Tallygate's tests are made of.
//!
//! | file | what |
//! |---|---|
//! | `contract.rs` | what every store does, whatever it is made of |
//! | `corpus.rs` | the seeds of the fuzz targets, and mutations of them |
//! | `http2.rs` | frames of HTTP/2, written by hand |
//! | `model.rs` | the definitions of the six algorithms, written again without any cleverness |
//! | `traces.rs` | generators of limits, of traffic, and of every operation on a key |
//! | `vectors.rs` | cases with their answers, kept in `vectors/` |
//! | `servers/` | real Redis and Valkey servers, clusters, sentinels, and a proxy that fails |

use proptest::prelude::ProptestConfig;

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
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/choosing-an-algorithm.md")]
    struct ChoosingAnAlgorithm;
}

/// How hard a property is tried: so many cases, or what `PROPTEST_CASES` says. Failing cases are
/// written into tests by hand, with a name, not into files beside them.
#[must_use]
pub fn cases(usual: u32) -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    ProptestConfig {
        cases: asked.unwrap_or(usual),
        failure_persistence: None,
        max_shrink_time: 20_000,
        ..ProptestConfig::default()
    }
}
