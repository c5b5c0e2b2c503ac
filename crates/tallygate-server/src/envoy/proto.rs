//! The messages of `envoy.service.ratelimit.v3` in protobuf.

use super::decide::too_many_descriptors;
use super::wire::{self, Fields, WireError};
use super::{
    Descriptor, DescriptorStatus, EnvoyError, RateLimitRequest, RateLimitResponse, RequestLimit,
};
use crate::config::MAX_ENTRIES;

const OK: u64 = 1;
const OVER_LIMIT: u64 = 2;

/// Reads a `RateLimitRequest` with at most so many descriptors.
///
/// # Errors
///
/// The bytes are not such a message, or a list is longer than the limits allow.
pub(crate) fn decode(
    bytes: &[u8],
    max_descriptors: usize,
) -> Result<RateLimitRequest<'_>, EnvoyError> {
    let mut request = RateLimitRequest::default();
    let mut fields = Fields::of(bytes);
    while let Some((field, value)) = fields.next()? {
        match field {
            1 => request.domain = value.text(field)?.into(),
            2 => {
                if request.descriptors.len() == max_descriptors {
                    return Err(too_many_descriptors(max_descriptors));
                }
                request.descriptors.push(descriptor(value.bytes(field)?)?);
            }
            3 => request.hits_addend = value.number32(field)?,
            _ => {}
        }
    }
    Ok(request)
}

fn descriptor(bytes: &[u8]) -> Result<Descriptor<'_>, EnvoyError> {
    let mut descriptor = Descriptor::default();
    let mut fields = Fields::of(bytes);
    while let Some((field, value)) = fields.next()? {
        match field {
            1 => {
                if descriptor.entries.len() == MAX_ENTRIES {
                    return Err(EnvoyError::TooLarge(format!(
                        "a descriptor has more than {MAX_ENTRIES} entries"
                    )));
                }
                descriptor.entries.push(entry(value.bytes(field)?)?);
            }
            // A message that appears twice is merged, as protobuf says.
            2 => limit(value.bytes(field)?, descriptor.limit.get_or_insert_default())?,
            3 => wrapped(value.bytes(field)?, descriptor.hits_addend.get_or_insert_default())?,
            _ => {}
        }
    }
    Ok(descriptor)
}

fn entry(
    bytes: &[u8],
) -> Result<(std::borrow::Cow<'_, str>, std::borrow::Cow<'_, str>), WireError> {
    let (mut key, mut text) = ("", "");
    let mut fields = Fields::of(bytes);
    while let Some((field, value)) = fields.next()? {
        match field {
            1 => key = value.text(field)?,
            2 => text = value.text(field)?,
            _ => {}
        }
    }
    Ok((key.into(), text.into()))
}

fn limit(bytes: &[u8], limit: &mut RequestLimit) -> Result<(), WireError> {
    let mut fields = Fields::of(bytes);
    while let Some((field, value)) = fields.next()? {
        match field {
            1 => limit.requests_per_unit = value.number32(field)?,
            2 => limit.unit = value.number(field)?,
            _ => {}
        }
    }
    Ok(())
}

/// Reads a `google.protobuf.UInt64Value`.
fn wrapped(bytes: &[u8], number: &mut u64) -> Result<(), WireError> {
    let mut fields = Fields::of(bytes);
    while let Some((field, value)) = fields.next()? {
        if field == 1 {
            *number = value.number(field)?;
        }
    }
    Ok(())
}

/// Writes a `RateLimitResponse`.
pub(crate) fn encode(response: &RateLimitResponse) -> Vec<u8> {
    let mut out = Vec::with_capacity(32 + 48 * response.statuses.len());
    wire::number(&mut out, 1, code(response.is_over_limit));
    for each in &response.statuses {
        wire::message(&mut out, 2, |out| status(out, each));
    }
    for (name, value) in &response.headers {
        wire::message(&mut out, 3, |out| {
            wire::text(out, 1, name);
            wire::text(out, 2, value);
        });
    }
    if let Some(violations) = &response.quota_violations {
        wire::message(&mut out, 6, |out| quota_metadata(out, violations));
    }
    out
}

const fn code(is_over_limit: bool) -> u64 {
    if is_over_limit { OVER_LIMIT } else { OK }
}

fn status(out: &mut Vec<u8>, status: &DescriptorStatus) {
    wire::number(out, 1, code(status.is_over_limit));
    if let Some((limit, name)) = &status.limit {
        wire::message(out, 2, |out| {
            wire::number(out, 1, u64::from(limit.requests_per_unit));
            wire::number(out, 2, limit.unit as u64);
            wire::text(out, 3, name.as_deref().unwrap_or_default());
        });
    }
    wire::number(out, 3, u64::from(status.remaining));
    if let Some(seconds) = status.reset_after_s {
        wire::message(out, 4, |out| wire::number(out, 1, seconds));
    }
}

/// Writes the `google.protobuf.Struct` of a response with descriptors in quota mode.
fn quota_metadata(out: &mut Vec<u8>, violations: &[usize]) {
    let field = |out: &mut Vec<u8>, name: &str, value: &dyn Fn(&mut Vec<u8>)| {
        wire::message(out, 1, |out| {
            wire::text(out, 1, name);
            wire::message(out, 2, value);
        });
    };
    field(out, "quotaModeEnabled", &|out| wire::number(out, 4, 1));
    if !violations.is_empty() {
        field(out, "quotaModeViolations", &|out| {
            wire::message(out, 6, |out| {
                for index in violations {
                    wire::message(out, 1, |out| {
                        // The tag of field 2 as a number of 8 bytes.
                        out.push(2 << 3 | 1);
                        let index = u32::try_from(*index).unwrap_or(u32::MAX);
                        out.extend_from_slice(&f64::from(index).to_le_bytes());
                    });
                }
            });
        });
    }
}

impl From<WireError> for EnvoyError {
    fn from(error: WireError) -> Self {
        Self::Invalid(format!("not a RateLimitRequest: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a request, for tests.
    fn request(domain: &str, descriptors: &[Descriptor<'_>], hits: u32) -> Vec<u8> {
        let mut out = Vec::new();
        wire::text(&mut out, 1, domain);
        for descriptor in descriptors {
            wire::message(&mut out, 2, |out| {
                for (key, value) in &descriptor.entries {
                    wire::message(out, 1, |out| {
                        wire::text(out, 1, key);
                        wire::text(out, 2, value);
                    });
                }
                if let Some(limit) = descriptor.limit {
                    wire::message(out, 2, |out| {
                        wire::number(out, 1, limit.requests_per_unit.into());
                        wire::number(out, 2, limit.unit);
                    });
                }
                if let Some(hits) = descriptor.hits_addend {
                    wire::message(out, 3, |out| wire::number(out, 1, hits));
                }
            });
        }
        wire::number(&mut out, 3, hits.into());
        out
    }

    #[test]
    fn a_request_is_read_as_it_was_written() {
        let descriptors = [
            Descriptor {
                entries: vec![("path".into(), "/ä".into()), ("ip".into(), "".into())],
                limit: Some(RequestLimit { requests_per_unit: 7, unit: 2 }),
                hits_addend: Some(0),
            },
            Descriptor::default(),
        ];
        let bytes = request("web", &descriptors, 3);
        let read = decode(&bytes, 2).unwrap();
        assert_eq!((&*read.domain, read.hits_addend), ("web", 3));
        assert_eq!(read.descriptors, descriptors);
        // A field of a later version is skipped.
        let mut later = bytes.clone();
        wire::text(&mut later, 15, "new");
        assert_eq!(decode(&later, 2).unwrap(), read);
    }

    /// Fault E7.
    #[test]
    fn lists_are_bounded_while_they_are_read() {
        let descriptors = vec![Descriptor::default(); 100_000];
        let bytes = request("web", &descriptors, 1);
        assert!(matches!(decode(&bytes, 64), Err(EnvoyError::TooLarge(_))));
        let entries = vec![("".into(), "".into()); MAX_ENTRIES + 1];
        let bytes = request("web", &[Descriptor { entries, ..Descriptor::default() }], 1);
        assert!(matches!(decode(&bytes, 64), Err(EnvoyError::TooLarge(_))));
    }

    #[test]
    fn every_truncated_request_is_an_error_or_another_request() {
        let entries = vec![("path".into(), "/a".into())];
        let whole = request("web", &[Descriptor { entries, ..Descriptor::default() }], 9);
        for cut in 0..whole.len() {
            // It must not panic.
            drop(decode(&whole[..cut], 64));
        }
        assert!(matches!(decode(&[0x0a, 1, 0xff], 64), Err(EnvoyError::Invalid(_))));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_a_request_or_an_error(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400)) {
            if let Ok(request) = decode(&bytes, 8) {
                proptest::prop_assert!(request.descriptors.len() <= 8);
            }
        }
    }
}
