//! Envoy's rate limit service: decides requests of `envoy.service.ratelimit.v3.RateLimitService`.
//!
//! | question | file |
//! |---|---|
//! | How is a request decided? | `decide.rs` |
//! | What limits may a request bring? | `request_limit.rs` |
//! | How do messages look in protobuf? | `proto.rs`, on `wire.rs` |
//! | How do they look in JSON? | `json.rs` |
//!
//! The rules are in `config/envoy`, the transport is in `grpc` and in `http`. Both use the same messages.

mod decide;
mod json;
mod proto;
mod request_limit;
pub(crate) mod wire;

use std::borrow::Cow;
use std::fmt;

use tallygate::Decision;
use tallygate::tiers::Access;

use crate::config::{EnvoyHeaders, EnvoyLimit};

pub(crate) use decide::decide;
pub(crate) use json::{JsonRequest, write_json};
pub(crate) use proto::{decode, encode};

/// A `RateLimitRequest`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RateLimitRequest<'a> {
    pub(crate) domain: Cow<'a, str>,
    pub(crate) descriptors: Vec<Descriptor<'a>>,
    /// The hits of descriptors without their own; 0 means 1.
    pub(crate) hits_addend: u32,
}

/// A `RateLimitDescriptor`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Descriptor<'a> {
    pub(crate) entries: Vec<(Cow<'a, str>, Cow<'a, str>)>,
    pub(crate) limit: Option<RequestLimit>,
    /// The hits of this descriptor; 0 is a look.
    pub(crate) hits_addend: Option<u64>,
}

/// A limit that comes with a descriptor, with the number of its unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestLimit {
    pub(crate) requests_per_unit: u32,
    pub(crate) unit: u64,
}

/// A `RateLimitResponse`.
#[derive(Debug)]
pub(crate) struct RateLimitResponse {
    pub(crate) is_over_limit: bool,
    /// One per descriptor, in order.
    pub(crate) statuses: Vec<DescriptorStatus>,
    /// The indexes of the descriptors in quota mode that are over their limit; `None` if no descriptor is in quota mode.
    pub(crate) quota_violations: Option<Vec<usize>>,
    /// The decision with the least remaining, or the one that denied the request, if the configuration asks for header
    /// fields.
    pub(crate) tightest: Option<TightestLimit>,
    /// The header fields that Envoy adds to the response: name and value.
    pub(crate) headers: Vec<(String, String)>,
    /// Which header fields the configuration asks for.
    pub(crate) wanted_headers: EnvoyHeaders,
}

/// A decision with its policy, for header fields.
#[derive(Debug)]
pub(crate) struct TightestLimit {
    pub(crate) policy: Box<str>,
    pub(crate) access: Access,
    pub(crate) decision: Decision,
}

/// A `DescriptorStatus`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DescriptorStatus {
    pub(crate) is_over_limit: bool,
    /// The limit, with its name.
    pub(crate) limit: Option<(EnvoyLimit, Option<Box<str>>)>,
    pub(crate) remaining: u32,
    /// Whole seconds, rounded up.
    pub(crate) reset_after_s: Option<u64>,
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
