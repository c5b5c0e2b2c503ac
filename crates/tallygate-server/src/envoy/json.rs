//! The mapping of protobuf to JSON: names in camel case or as in the protocol, whole numbers also as texts or with a
//! fraction of 0, enumerations by name or number, `null` for the default, and no fields with default values.

use std::borrow::Cow;
use std::fmt;

use prost_types::value::Kind;
use prost_types::{Duration, Struct};
use serde::{Deserialize, Deserializer, Serializer, de};
use serde_json::Value;

use super::Code;
use crate::config::Unit;

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a whole number, or one as a text")]
enum NumberOrText<'a> {
    Number(u64),
    /// `1.0` and `1e0` are whole numbers as well.
    Other(serde_json::Number),
    Text(Cow<'a, str>),
}

impl NumberOrText<'_> {
    fn number<E: de::Error>(&self) -> Result<u64, E> {
        let whole = |text: &str| {
            let digits = Some(text).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
            digits.and_then(|text| text.parse().ok())
        };
        let not_whole = |found: fmt::Arguments<'_>| {
            E::custom(format_args!("expected a whole number, found {found}"))
        };
        match self {
            Self::Number(number) => Ok(*number),
            Self::Other(number) => {
                let text = number.to_string();
                let found = text.strip_suffix(".0").and_then(whole);
                found.ok_or_else(|| not_whole(format_args!("{number}")))
            }
            Self::Text(text) => whole(text).ok_or_else(|| not_whole(format_args!("{text:?}"))),
        }
    }
}

/// Reads a value, or the default for `null`.
pub(super) fn or_default<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Default + Deserialize<'de>,
    D: Deserializer<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Reads a text as its bytes.
pub(super) fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    or_default(deserializer).map(String::into_bytes)
}

pub(super) fn number32<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    Ok(some_number32(deserializer)?.unwrap_or_default())
}

fn in_32_bits<E: de::Error>(number: u64) -> Result<u32, E> {
    u32::try_from(number).map_err(|_| E::custom(format_args!("{number} has more than 32 bits")))
}

pub(super) fn some_number32<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<u32>, D::Error> {
    some_number(deserializer)?.map(in_32_bits).transpose()
}

pub(super) fn some_number<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<u64>, D::Error> {
    Option::<NumberOrText<'de>>::deserialize(deserializer)?.map(|given| given.number()).transpose()
}

/// Reads a unit by name or number. An unknown number is read as well; a decision rejects it.
pub(super) fn unit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i32, D::Error> {
    match Option::<NumberOrText<'de>>::deserialize(deserializer)? {
        None => Ok(0),
        Some(NumberOrText::Text(name)) if name == "UNKNOWN" => Ok(0),
        Some(NumberOrText::Text(name)) => {
            let known = Unit::ALL.into_iter().find(|(known, _)| *known == name);
            known.map(|(_, unit)| unit as i32).ok_or_else(|| {
                de::Error::custom(format_args!(
                    "unknown unit {name:?}; use SECOND, MINUTE, HOUR, DAY, WEEK, MONTH or YEAR"
                ))
            })
        }
        Some(number) => Ok(i32::try_from(number.number()?).unwrap_or(i32::MAX)),
    }
}

pub(super) const fn is_zero(number: &u32) -> bool {
    *number == 0
}

pub(super) fn code_name<S: Serializer>(code: &i32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match Code::try_from(*code) {
        Ok(Code::Ok) => "OK",
        Ok(Code::OverLimit) => "OVER_LIMIT",
        Ok(Code::Unknown) | Err(_) => "UNKNOWN",
    })
}

pub(super) fn unit_name<S: Serializer>(unit: &i32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(Unit::of_number(*unit).map_or("UNKNOWN", Unit::name))
}

/// Writes a duration of whole seconds.
pub(super) fn seconds<S: Serializer>(
    duration: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{}s", duration.unwrap_or_default().seconds))
}

pub(super) fn metadata<S: Serializer>(
    metadata: &Option<Struct>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let fields = metadata.iter().flat_map(|metadata| &metadata.fields);
    serializer.collect_map(fields.map(|(name, value)| (name, json_value(value))))
}

fn json_value(value: &prost_types::Value) -> Value {
    match &value.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(value)) => (*value).into(),
        // A whole number is written without a fraction.
        Some(Kind::NumberValue(number)) => {
            number.to_string().parse().map_or(Value::Null, Value::Number)
        }
        Some(Kind::StringValue(text)) => text.as_str().into(),
        Some(Kind::ListValue(list)) => list.values.iter().map(json_value).collect(),
        Some(Kind::StructValue(inner)) => {
            inner.fields.iter().map(|(name, value)| (name.clone(), json_value(value))).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::decide::quota_metadata;
    use super::super::messages::{Entry, RateLimitDescriptor};
    use super::super::{
        CurrentLimit, DescriptorStatus, HeaderValue, RateLimitOverride, RateLimitRequest,
        RateLimitResponse,
    };
    use super::*;

    fn parse_json(body: &[u8]) -> Result<RateLimitRequest, serde_json::Error> {
        serde_json::from_slice(body)
    }

    #[test]
    fn names_in_both_cases_and_numbers_as_texts_are_read() {
        let camel = br#"{"domain":"w","descriptors":[{"entries":[{"key":"a\n","value":"b"}],
            "limit":{"requestsPerUnit":5,"unit":"MINUTE","unitMultiplier":3},"hitsAddend":"3",
            "isNegativeHits":true}],"hitsAddend":2}"#;
        let snake = br#"{"domain":"w","descriptors":[{"entries":[{"key":"a\n","value":"b"}],
            "limit":{"requests_per_unit":"5","unit":2,"unit_multiplier":"3"},"hits_addend":3,
            "is_negative_hits":true}],"hits_addend":"2"}"#;
        let request = parse_json(camel).unwrap();
        assert_eq!(request, parse_json(snake).unwrap());
        let descriptor = &request.descriptors[0];
        assert_eq!(descriptor.entries, [Entry { key: "a\n".into(), value: "b".into() }]);
        let limit = RateLimitOverride { requests_per_unit: 5, unit: 2, unit_multiplier: Some(3) };
        assert_eq!((descriptor.limit, descriptor.is_negative_hits), (Some(limit), true));
        assert_eq!((descriptor.hits_addend, request.hits_addend), (Some(3), 2));
    }

    #[test]
    fn null_is_the_default_and_a_number_may_have_a_fraction_of_0() {
        let request = parse_json(
            br#"{"domain":null,"descriptors":[{"entries":null,"limit":null,"hitsAddend":null,"isNegativeHits":null},
            {"entries":[{"key":null,"value":null}],"limit":{"requestsPerUnit":2.0,"unit":null,"unitMultiplier":1e1},
            "hitsAddend":3.0}],"hitsAddend":null}"#,
        )
        .unwrap();
        let [empty, other] = &request.descriptors[..] else { panic!("{request:?}") };
        assert_eq!((&*request.domain, request.hits_addend), ("", 0));
        assert_eq!(*empty, RateLimitDescriptor::default());
        let limit = RateLimitOverride { requests_per_unit: 2, unit: 0, unit_multiplier: Some(10) };
        assert_eq!((other.limit, other.hits_addend), (Some(limit), Some(3)));
        assert_eq!(other.entries, [Entry::default()]);
        assert_eq!(parse_json(br#"{"descriptors":null}"#).unwrap(), RateLimitRequest::default());
    }

    #[test]
    fn unknown_fields_units_and_negative_numbers_are_errors() {
        for body in [
            r#"{"domian":"w"}"#,
            r#"{"descriptors":[{"limit":{"unit":"FORTNIGHT"}}]}"#,
            r#"{"hitsAddend":-1}"#,
            r#"{"hitsAddend":4294967296}"#,
            r#"{"hitsAddend":"+1"}"#,
            r#"{"hitsAddend":1.5}"#,
            r#"{"hitsAddend":-1.0}"#,
            r#"{"hitsAddend":1e300}"#,
            r#"{"descriptors":[null]}"#,
            r#"{"descriptors":[{"limit":{"unitMultiplier":4294967296}}]}"#,
        ] {
            assert!(parse_json(body.as_bytes()).is_err(), "{body}");
        }
    }

    #[test]
    fn a_response_has_the_names_of_the_protocol_and_no_default_values() {
        let limit = CurrentLimit {
            requests_per_unit: 5,
            unit: Unit::Minute as i32,
            name: "per \"ip\"".to_owned(),
            unit_multiplier: Some(3),
        };
        let response = RateLimitResponse {
            overall_code: Code::OverLimit.into(),
            statuses: vec![
                DescriptorStatus { code: Code::Ok.into(), ..Default::default() },
                DescriptorStatus {
                    code: Code::OverLimit.into(),
                    current_limit: Some(limit),
                    limit_remaining: 0,
                    duration_until_reset: Some(Duration { seconds: 7, nanos: 0 }),
                },
            ],
            response_headers_to_add: vec![HeaderValue {
                key: "retry-after".to_owned(),
                value: "7".to_owned(),
            }],
            dynamic_metadata: Some(quota_metadata(&[1])),
        };
        let expected = concat!(
            r#"{"overallCode":"OVER_LIMIT","statuses":[{"code":"OK"},{"code":"OVER_LIMIT","#,
            r#""currentLimit":{"requestsPerUnit":5,"unit":"MINUTE","name":"per \"ip\"","unitMultiplier":3},"#,
            r#""durationUntilReset":"7s"}],"responseHeadersToAdd":[{"key":"retry-after","value":"7"}],"#,
            r#""dynamicMetadata":{"quotaModeEnabled":true,"quotaModeViolations":[1]}}"#,
        );
        assert_eq!(serde_json::to_string(&response).unwrap(), expected);
    }
}
