//! The messages of `envoy.service.ratelimit.v3`, in protobuf and in JSON.
//!
//! `proto/` has the same messages as text, for reflection; a test compares them. Messages have the parts that the server
//! uses: others are skipped when they are read in protobuf, and rejected in JSON.

use std::borrow::Cow;
use std::fmt::Write as _;

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use prost::{DecodeError, Message};
use serde::{Deserialize, Serialize};

use super::decide::{too_many_descriptors, too_many_entries};
use super::{EnvoyError, json};
use crate::config::MAX_ENTRIES;
use crate::turn::{MESSAGE_BYTE, MESSAGE_FIELD, TimeSlice};

/// The longest descriptor, and the longest domain, in bytes. A descriptor has at most the header fields of a request,
/// which Envoy limits to 60 KiB by default.
const MAX_PART_BYTES: usize = 128 * 1024;

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
    // Texts in the protocol. But Envoy sends the bytes of a header field as they are, and allows the request if the call
    // fails, so bytes that are not UTF-8 must not be an error.
    #[prost(bytes = "vec", tag = "1")]
    #[serde(deserialize_with = "json::text")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    #[serde(deserialize_with = "json::text")]
    pub(crate) value: Vec<u8>,
}

impl Entry {
    /// Returns the key and the value. In place of a byte that is not UTF-8, a text has U+FFFD and the byte in hexadecimal.
    pub(super) fn texts(&self) -> (Cow<'_, str>, Cow<'_, str>) {
        (text_of(&self.key), text_of(&self.value))
    }
}

fn text_of(bytes: &[u8]) -> Cow<'_, str> {
    if let Ok(text) = str::from_utf8(bytes) {
        return Cow::Borrowed(text);
    }
    let mut text = String::with_capacity(2 * bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            // Writing to a string cannot fail.
            let _ = write!(text, "\u{fffd}{byte:02x}");
        }
    }
    Cow::Owned(text)
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
    /// Reads a request with at most so many descriptors, one after the other. It yields between them.
    ///
    /// # Errors
    ///
    /// The bytes are not such a message, or a list or a text is longer than the limits allow.
    pub(crate) async fn read(message: &[u8], max_descriptors: usize) -> Result<Self, EnvoyError> {
        let (mut request, mut rest) = (Self::default(), message);
        let mut slice = TimeSlice::default();
        while !rest.is_empty() {
            let field = rest;
            let (tag, kind) = decode_key(&mut rest)?;
            let content = match kind {
                WireType::LengthDelimited => take_content(&mut rest)?,
                // It could have any number of fields, and the protocol has none.
                WireType::StartGroup => {
                    return Err(EnvoyError::Invalid("the message has a group".to_owned()));
                }
                kind => {
                    skip_field(kind, tag, &mut rest, DecodeContext::default())?;
                    &[]
                }
            };
            if matches!(tag, 1 | 2) && content.len() > MAX_PART_BYTES {
                let part = if tag == 1 { "domain" } else { "descriptor" };
                return Err(EnvoyError::TooLarge(format!(
                    "a {part} has more than {MAX_PART_BYTES} bytes"
                )));
            }
            slice.spend(MESSAGE_FIELD + MESSAGE_BYTE * content.len().min(MAX_PART_BYTES)).await;
            if (tag, kind) == (2, WireType::LengthDelimited) {
                // Count first: an empty entry takes two bytes on the wire, and thirty times as much in memory.
                if request.descriptors.len() >= max_descriptors {
                    return Err(too_many_descriptors(max_descriptors));
                }
                check_entries(content)?;
            }
            request.merge(&field[..field.len() - rest.len()])?;
        }
        Ok(request)
    }
}

impl RateLimitResponse {
    pub(crate) const fn is_over_limit(&self) -> bool {
        self.overall_code == Code::OverLimit as i32
    }
}

/// Counts the entries of a descriptor before it is decoded.
fn check_entries(mut descriptor: &[u8]) -> Result<(), EnvoyError> {
    let mut entries = 0;
    while !descriptor.is_empty() {
        let (tag, kind) = decode_key(&mut descriptor)?;
        if (tag, kind) == (1, WireType::LengthDelimited) {
            entries += 1;
            if entries > MAX_ENTRIES {
                return Err(too_many_entries());
            }
        }
        skip_field(kind, tag, &mut descriptor, DecodeContext::default())?;
    }
    Ok(())
}

/// Takes the content of a field, which has its length before it.
fn take_content<'a>(message: &mut &'a [u8]) -> Result<&'a [u8], EnvoyError> {
    let length = usize::try_from(decode_varint(message)?).unwrap_or(usize::MAX);
    let Some((content, rest)) = message.split_at_checked(length) else {
        return Err(EnvoyError::Invalid("the message ends within a field".to_owned()));
    };
    *message = rest;
    Ok(content)
}

impl From<DecodeError> for EnvoyError {
    fn from(error: DecodeError) -> Self {
        Self::Invalid(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turn::count_polls;

    fn entry(key: &str, value: &str) -> Entry {
        Entry { key: key.into(), value: value.into() }
    }

    fn request(descriptors: Vec<RateLimitDescriptor>) -> RateLimitRequest {
        RateLimitRequest { domain: "web".to_owned(), descriptors, hits_addend: 3 }
    }

    fn read(message: &[u8], max_descriptors: usize) -> Result<RateLimitRequest, EnvoyError> {
        tallygate::block_on(RateLimitRequest::read(message, max_descriptors))
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
        assert_eq!(read(&bytes, 2).unwrap(), written);
        // A field of a later version is skipped.
        prost::encoding::string::encode(15, &"new".to_owned(), &mut bytes);
        assert_eq!(read(&bytes, 2).unwrap(), written);
    }

    /// Fault E7.
    #[test]
    fn lists_are_counted_before_they_are_decoded() {
        let read = |request: &RateLimitRequest| {
            // Bytes that are not a request: the count comes before this error.
            let bytes = [request.encode_to_vec(), vec![0xff]].concat();
            read(&bytes, 64).unwrap_err()
        };
        let many = request(vec![RateLimitDescriptor::default(); 100_000]);
        assert!(matches!(read(&many), EnvoyError::TooLarge(_)));
        let entries = vec![Entry::default(); MAX_ENTRIES + 1];
        let deep = request(vec![RateLimitDescriptor { entries, ..Default::default() }]);
        assert!(matches!(read(&deep), EnvoyError::TooLarge(_)));
        let few = request(vec![RateLimitDescriptor::default(); 64]);
        assert!(matches!(read(&few), EnvoyError::Invalid(_)));
    }

    /// Fault E7.
    #[test]
    fn a_descriptor_and_a_domain_have_a_bounded_length() {
        let of_length = |bytes: usize| {
            let entries = vec![entry("key", &"x".repeat(bytes))];
            vec![RateLimitDescriptor { entries, ..Default::default() }]
        };
        let longest = request(of_length(MAX_PART_BYTES - 20)).encode_to_vec();
        assert!(read(&longest, 1).is_ok());
        let long = request(of_length(MAX_PART_BYTES)).encode_to_vec();
        assert!(matches!(read(&long, 1), Err(EnvoyError::TooLarge(_))));
        let domain = "x".repeat(MAX_PART_BYTES + 1);
        let long = RateLimitRequest { domain, ..request(Vec::new()) }.encode_to_vec();
        assert!(matches!(read(&long, 1), Err(EnvoyError::TooLarge(_))));
        // A group of unknown fields.
        assert!(matches!(read(&[0x7b, 0x08, 1, 0x7c], 1), Err(EnvoyError::Invalid(_))));
    }

    /// Fault J4.
    #[test]
    fn a_long_message_is_read_in_many_time_slices() {
        let slices = |message: &[u8]| {
            let (read, slices) = count_polls(RateLimitRequest::read(message, 64));
            assert!(read.is_ok());
            slices
        };
        let entries = vec![entry("key", &"x".repeat(1_000))];
        let short = vec![RateLimitDescriptor { entries, ..Default::default() }; 2];
        assert_eq!(slices(&request(short).encode_to_vec()), 1);
        let entries = vec![entry("key", &"x".repeat(15_000))];
        let long = vec![RateLimitDescriptor { entries, ..Default::default() }; 64];
        assert!(slices(&request(long).encode_to_vec()) >= 60);
        // Unknown fields of two bytes.
        assert!(slices(&[0x78, 1].repeat(500_000)) >= 200);
    }

    #[test]
    fn every_truncated_request_is_an_error_or_another_request() {
        let entries = vec![entry("path", "/a")];
        let whole =
            request(vec![RateLimitDescriptor { entries, ..Default::default() }]).encode_to_vec();
        for cut in 0..whole.len() {
            // It must not panic.
            drop(read(&whole[..cut], 64));
        }
        let not_utf8 = read(&[0x0a, 1, 0xff], 64);
        assert!(matches!(not_utf8, Err(EnvoyError::Invalid(_))));
    }

    /// Fault E14.
    #[test]
    fn different_bytes_are_different_texts_whether_or_not_they_are_utf8() {
        let values: [&[u8]; 7] = [
            b"caf\xe9",
            b"caf\xe8",
            b"\xff\xfe",
            b"\xfe\xff",
            b"\xff",
            b"caf",
            "caf\u{e9}".as_bytes(),
        ];
        let entries = values.map(|value| Entry { key: b"user".to_vec(), value: value.to_vec() });
        let descriptor = RateLimitDescriptor { entries: entries.to_vec(), ..Default::default() };
        let bytes = request(vec![descriptor]).encode_to_vec();
        let read = read(&bytes, 1).unwrap();
        let texts: Vec<_> =
            read.descriptors[0].entries.iter().map(|entry| entry.texts().1).collect();
        let expected = [
            "caf\u{fffd}e9",
            "caf\u{fffd}e8",
            "\u{fffd}ff\u{fffd}fe",
            "\u{fffd}fe\u{fffd}ff",
            "\u{fffd}ff",
            "caf",
            "café",
        ];
        assert_eq!(texts, expected);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_a_request_or_an_error(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400)) {
            if let Ok(request) = read(&bytes, 8) {
                proptest::prop_assert!(request.descriptors.len() <= 8);
            }
        }
    }
}
