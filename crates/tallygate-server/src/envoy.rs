//! Envoy's rate limit service: decides requests of `envoy.service.ratelimit.v3.RateLimitService`.
//!
//! | question | file |
//! |---|---|
//! | How is a request decided? | `decide.rs` |
//! | Which limits may a request contain? | `request_limit.rs` |
//! | Which messages are there? | `messages.rs` |
//! | How do they look in JSON? | `json.rs` |
//!
//! The rules are in `config/envoy`, the transport is in `grpc` and in `http`. Both use the same messages.

mod decide;
mod json;
mod messages;
mod request_limit;

use std::fmt;

use tallygate::Decision;
use tallygate::tiers::Access;

use crate::config::EnvoyHeaders;

pub(crate) use decide::decide;
use messages::{Code, CurrentLimit, DescriptorStatus, RateLimitOverride};
pub(crate) use messages::{HeaderValue, RateLimitRequest, RateLimitResponse};

/// The response to a request, and what the header fields of the response are made of.
#[derive(Debug)]
pub(crate) struct Decided {
    pub(crate) response: RateLimitResponse,
    /// Which header fields the configuration asks for.
    pub(crate) wanted_headers: EnvoyHeaders,
    /// The decision with the least remaining, or the one that denied the request, if the configuration asks for header
    /// fields.
    pub(crate) tightest: Option<TightestLimit>,
}

/// A decision with its policy, for header fields.
#[derive(Debug)]
pub(crate) struct TightestLimit {
    pub(crate) policy: Box<str>,
    pub(crate) access: Access,
    pub(crate) decision: Decision,
}

/// Why there is no response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EnvoyError {
    /// The request is malformed.
    Invalid(String),
    /// The request is larger than the limits allow.
    TooLarge(String),
    /// The store is unavailable, and the rule leaves the decision to Envoy.
    Unavailable(String),
    /// The server has no rules for Envoy.
    NotConfigured,
}

impl fmt::Display for EnvoyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Invalid(reason) | Self::TooLarge(reason) | Self::Unavailable(reason) => reason,
            Self::NotConfigured => "no rules are configured; start the server with --envoy-config",
        })
    }
}

impl std::error::Error for EnvoyError {}
