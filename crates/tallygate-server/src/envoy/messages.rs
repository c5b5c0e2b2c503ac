//! The messages of `envoy.service.ratelimit.v3`, in protobuf and in JSON.
//!
//! `proto/` has the same messages as text, for reflection; a test compares them. Messages have the parts that the server
//! uses: others are skipped when they are read in protobuf, and rejected in JSON.

use bytes::Buf as _;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use prost::{DecodeError, Message};
use serde::{Deserialize, Serialize};

use super::decide::{too_many_descriptors, too_many_entries};
use super::{EnvoyError, json};
use crate::config::MAX_ENTRIES;

#[derive(Clone, PartialEq, Message, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub(crate) struct RateLimitRequest {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "json::or_default")]
    pub(crate) domain: String,
    #[prost(message, repeated, tag = "2")]
    #[serde(deserialize_with = "json::or_default")]
    pub(crate) descriptors: Vec<RateLimitDescriptor>,
    /// The hits of descriptors without their own; 0 means 1.
    #[prost(uint32, tag = "3")]
    #[serde(alias = "hits_addend", deserialize_with = "json::number32")]
    pub(crate) hits_addend: u32,
}

#[derive(Clone, PartialEq, Message, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub(crate) struct RateLimitDescriptor {
    #[prost(message, repeated, tag = "1")]
    #[serde(deserialize_with = "json::or_default")]
    pub(crate) entries: Vec<Entry>,
    #[prost(message, optional, tag = "2")]
    pub(crate) limit: Option<RateLimitOverride>,
    /// The hits of this descriptor (a `google.protobuf.UInt64Value`); 0 is a look.
    #[prost(message, optional, tag = "3")]
    #[serde(alias = "hits_addend", deserialize_with = "json::some_number")]
    pub(crate) hits_addend: Option<u64>,
    /// Whether the hits are returned instead of charged.
    #[prost(bool, tag = "4")]
    #[serde(alias = "is_negative_hits", deserialize_with = "json::or_default")]
    pub(crate) is_negative_hits: bool,
}

#[derive(Clone, PartialEq, Message, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Entry {
    #[prost(string, tag = "1")]
    #[serde(deserialize_with = "json::or_default")]
    pub(crate) key: String,
    #[prost(string, tag = "2")]
    #[serde(deserialize_with = "json::or_default")]
    pub(crate) value: String,
}

/// A limit that comes with a descriptor, with the number of its unit.
#[derive(Clone, Copy, PartialEq, Message, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub(crate) struct RateLimitOverride {
    #[prost(uint32, tag = "1")]
    #[serde(alias = "requests_per_unit", deserialize_with = "json::number32")]
    pub(crate) requests_per_unit: u32,
    #[prost(int32, tag = "2")]
    #[serde(deserialize_with = "json::unit")]
    pub(crate) unit: i32,
    /// How many units the window has (a `google.protobuf.UInt32Value`); by default, one.
    #[prost(message, optional, tag = "3")]
    #[serde(alias = "unit_multiplier", deserialize_with = "json::some_number32")]
    pub(crate) unit_multiplier: Option<u32>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RateLimitResponse {
    #[prost(enumeration = "Code", tag = "1")]
    #[serde(serialize_with = "json::code_name")]
    pub(crate) overall_code: i32,
    /// One per descriptor, in order.
    #[prost(message, repeated, tag = "2")]
    pub(crate) statuses: Vec<DescriptorStatus>,
    #[prost(message, repeated, tag = "3")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) response_headers_to_add: Vec<HeaderValue>,
    #[prost(message, optional, tag = "6")]
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "json::metadata")]
    pub(crate) dynamic_metadata: Option<prost_types::Struct>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DescriptorStatus {
    #[prost(enumeration = "Code", tag = "1")]
    #[serde(serialize_with = "json::code_name")]
    pub(crate) code: i32,
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) current_limit: Option<CurrentLimit>,
    #[prost(uint32, tag = "3")]
    #[serde(skip_serializing_if = "json::is_zero")]
    pub(crate) limit_remaining: u32,
    #[prost(message, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "json::seconds")]
    pub(crate) duration_until_reset: Option<prost_types::Duration>,
}

/// `RateLimitResponse.RateLimit` in the protocol.
#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CurrentLimit {
    #[prost(uint32, tag = "1")]
    #[serde(skip_serializing_if = "json::is_zero")]
    pub(crate) requests_per_unit: u32,
    #[prost(int32, tag = "2")]
    #[serde(serialize_with = "json::unit_name")]
    pub(crate) unit: i32,
    #[prost(string, tag = "3")]
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) name: String,
    /// How many units the window has, if more than one.
    #[prost(message, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) unit_multiplier: Option<u32>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
pub(crate) struct HeaderValue {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    #[prost(string, tag = "2")]
    pub(crate) value: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum Code {
    Unknown = 0,
    Ok = 1,
    OverLimit = 2,
}

impl Code {
    pub(crate) const fn of(is_over_limit: bool) -> Self {
        if is_over_limit { Self::OverLimit } else { Self::Ok }
    }
}

impl RateLimitRequest {
    /// Reads a request with at most so many descriptors.
    ///
    /// # Errors
    ///
    /// The bytes are not such a message, or a list is longer than the limits allow.
    pub(crate) fn read(message: &[u8], max_descriptors: usize) -> Result<Self, EnvoyError> {
        check_lists(message, max_descriptors)?;
        Self::decode(message).map_err(EnvoyError::from)
    }
}

impl RateLimitResponse {
    pub(crate) const fn is_over_limit(&self) -> bool {
        self.overall_code == Code::OverLimit as i32
    }
}

/// Counts the descriptors and their entries before the message is decoded: an empty descriptor takes two bytes on the
/// wire, and thirty times as much in memory.
fn check_lists(message: &[u8], max_descriptors: usize) -> Result<(), EnvoyError> {
    let mut descriptors = 0;
    for_each_item(message, 2, |descriptor| {
        descriptors += 1;
        if descriptors > max_descriptors {
            return Err(too_many_descriptors(max_descriptors));
        }
        let mut entries = 0;
        for_each_item(descriptor, 1, |_| {
            entries += 1;
            if entries > MAX_ENTRIES { Err(too_many_entries()) } else { Ok(()) }
        })
    })
}

/// Calls `visit` with each item of the list in field `field`.
fn for_each_item<'a>(
    mut message: &'a [u8],
    field: u32,
    mut visit: impl FnMut(&'a [u8]) -> Result<(), EnvoyError>,
) -> Result<(), EnvoyError> {
    while message.has_remaining() {
        let (tag, kind) = decode_key(&mut message)?;
        if (tag, kind) != (field, WireType::LengthDelimited) {
            skip_field(kind, tag, &mut message, DecodeContext::default())?;
            continue;
        }
        let length = usize::try_from(decode_varint(&mut message)?).unwrap_or(usize::MAX);
        let Some((item, rest)) = message.split_at_checked(length) else {
            return Err(EnvoyError::Invalid("the message ends within a field".to_owned()));
        };
        message = rest;
        visit(item)?;
    }
    Ok(())
}

impl From<DecodeError> for EnvoyError {
    fn from(error: DecodeError) -> Self {
        Self::Invalid(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: &str, value: &str) -> Entry {
        Entry { key: key.to_owned(), value: value.to_owned() }
    }

    fn request(descriptors: Vec<RateLimitDescriptor>) -> RateLimitRequest {
        RateLimitRequest { domain: "web".to_owned(), descriptors, hits_addend: 3 }
    }

    #[test]
    fn a_request_is_read_as_it_was_written() {
        let written = request(vec![
            RateLimitDescriptor {
                entries: vec![entry("path", "/ä"), entry("ip", "")],
                limit: Some(RateLimitOverride {
                    requests_per_unit: 7,
                    unit: 2,
                    unit_multiplier: Some(5),
                }),
                hits_addend: Some(0),
                is_negative_hits: true,
            },
            RateLimitDescriptor::default(),
        ]);
        let mut bytes = written.encode_to_vec();
        assert_eq!(RateLimitRequest::read(&bytes, 2).unwrap(), written);
        // A field of a later version is skipped.
        prost::encoding::string::encode(15, &"new".to_owned(), &mut bytes);
        assert_eq!(RateLimitRequest::read(&bytes, 2).unwrap(), written);
    }

    /// Fault E7.
    #[test]
    fn lists_are_counted_before_they_are_decoded() {
        let read = |request: &RateLimitRequest| {
            // Bytes that are not a request: the count comes before this error.
            let bytes = [request.encode_to_vec(), vec![0xff]].concat();
            RateLimitRequest::read(&bytes, 64).unwrap_err()
        };
        let many = request(vec![RateLimitDescriptor::default(); 100_000]);
        assert!(matches!(read(&many), EnvoyError::TooLarge(_)));
        let entries = vec![Entry::default(); MAX_ENTRIES + 1];
        let deep = request(vec![RateLimitDescriptor { entries, ..Default::default() }]);
        assert!(matches!(read(&deep), EnvoyError::TooLarge(_)));
        let few = request(vec![RateLimitDescriptor::default(); 64]);
        assert!(matches!(read(&few), EnvoyError::Invalid(_)));
    }

    #[test]
    fn every_truncated_request_is_an_error_or_another_request() {
        let entries = vec![entry("path", "/a")];
        let whole =
            request(vec![RateLimitDescriptor { entries, ..Default::default() }]).encode_to_vec();
        for cut in 0..whole.len() {
            // It must not panic.
            drop(RateLimitRequest::read(&whole[..cut], 64));
        }
        let not_utf8 = RateLimitRequest::read(&[0x0a, 1, 0xff], 64);
        assert!(matches!(not_utf8, Err(EnvoyError::Invalid(_))));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_a_request_or_an_error(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400)) {
            if let Ok(request) = RateLimitRequest::read(&bytes, 8) {
                proptest::prop_assert!(request.descriptors.len() <= 8);
            }
        }
    }
}
