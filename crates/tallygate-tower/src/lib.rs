//! Rate limits for axum, hyper, tonic and every other [tower](https://docs.rs/tower) service, on the limiters of
//! [`tallygate`].
//!
//! To start, describe the limit with a [`Policy`](tallygate::Policy), choose what identifies a client with a [`Key`], and
//! add a [`RateLimit`] of both to your service as a layer:
//!
//! ```
//! use axum::{Router, routing::get};
//! use tallygate::Policy;
//! use tallygate_tower::{Key, RateLimit};
//!
//! let policy = Policy::token_bucket(100).per_minute().burst(20).named("api").build()?;
//! let app: Router = Router::new()
//!     .route("/", get(|| async { "hello" }))
//!     .layer(RateLimit::new(policy, Key::peer()));
//! # Ok::<(), tallygate::PolicyError>(())
//! ```
//!
//! Responses have the header fields `RateLimit`, `RateLimit-Policy` and `X-RateLimit-*`. A denied request gets status
//! 429, `Retry-After` and a problem+json body; a gRPC request gets `RESOURCE_EXHAUSTED` with a `RetryInfo`.
//!
//! # Common tasks
//!
//! | task | use |
//! |---|---|
//! | Choose what identifies a client | [`Key`] |
//! | Trust proxies to report the address | [`ClientAddress`] |
//! | Share limits between processes, choose the store by a URL | [`Limiter`], with the feature `redis` |
//! | Apply several rules, to some routes, with costs and tiers | [`Rule`], [`RateLimit::all_of`] |
//! | Charge by the response: only failures, bytes, model tokens | [`Settle`] |
//! | Try out a limit | [`Rule::shadow`] |
//! | Limit concurrent requests | [`RateLimit::in_flight`] |
//! | Exempt clients or routes | [`RateLimit::exempt`], [`RateLimit::exempt_networks`] |
//! | Change the response | [`RateLimit::respond_with`], [`RateLimit::headers`] |
//! | Smooth out bursts | [`RateLimit::delay_up_to`] |
//! | Use a framework without tower | [`RateLimit::check`] |
//! | Pace outgoing requests | [`Pace`] |
//! | Count decisions | [`tallygate::observer`], on the limiter |
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `axum` | addresses of axum's connections, [`Key::route`] |
//! | `tonic` | addresses of tonic's connections |
//! | `redis` | limiters on Redis and Valkey |
//! | `metrics` | [`tallygate::observer`]'s observer for the `metrics` facade |

#![cfg_attr(docsrs, feature(doc_cfg))]

mod address;
mod body;
mod few;
mod future;
mod grpc;
mod in_flight;
mod key;
mod layer;
mod limiter;
mod pace;
mod rate_limit;
mod respond;
mod rule;
mod service;
mod settle;
mod timer;
mod verdict;

pub use address::{ClientAddress, Peer};
pub use body::ResponseBody;
pub use future::ResponseFuture;
pub use in_flight::InFlightLimit;
pub use ipnet::IpNet;
pub use key::{Key, MissingKey};
pub use limiter::{Limiter, LimiterError};
pub use pace::{HeadOf, Pace, PaceError, Paced};
pub use rate_limit::{OnStoreError, RateLimit};
pub use respond::Denial;
pub use rule::{Rule, WhenMissing};
pub use service::RateLimited;
pub use settle::{ActualCost, Meter, Settle};
pub use tallygate::headers::Dialect;
pub use verdict::{BodyGuard, Reason, Verdict};
