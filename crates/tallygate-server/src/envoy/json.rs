//! The mapping of protobuf to JSON: names in camel case or as in the protocol, numbers of 64 bits also as texts,
//! enumerations by name or number, and no fields with default values.

use std::borrow::Cow;

use prost_types::value::Kind;
use prost_types::{Duration, Struct};
use serde::{Deserialize, Deserializer, Serializer, de};
use serde_json::Value;

use super::Code;
use crate::config::Unit;

#[derive(Deserialize)]
#[serde(untagged)]
enum NumberOrText<'a> {
    Number(u64),
    Text(Cow<'a, str>),
}

impl NumberOrText<'_> {
    fn number<E: de::Error>(&self) -> Result<u64, E> {
        match self {
            Self::Number(number) => Ok(*number),
            Self::Text(text) => {
                let digits =
                    Some(&**text).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
                digits.and_then(|text| text.parse().ok()).ok_or_else(|| {
                    E::custom(format_args!("expected a whole number, found {text:?}"))
                })
            }
        }
    }
}

pub(super) fn number32<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let number = NumberOrText::deserialize(deserializer)?.number()?;
    u32::try_from(number)
        .map_err(|_| de::Error::custom(format_args!("{number} has more than 32 bits")))
}

pub(super) fn some_number<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<u64>, D::Error> {
    Option::<NumberOrText<'de>>::deserialize(deserializer)?.map(|given| given.number()).transpose()
}

/// Reads a unit by name or number. An unknown number is read as well; a decision rejects it.
pub(super) fn unit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i32, D::Error> {
    match NumberOrText::deserialize(deserializer)? {
        NumberOrText::Number(number) => Ok(i32::try_from(number).unwrap_or(i32::MAX)),
        NumberOrText::Text(name) if name == "UNKNOWN" => Ok(0),
        NumberOrText::Text(name) => {
            let known = Unit::ALL.into_iter().find(|(known, _)| *known == name);
            known.map(|(_, unit)| unit as i32).ok_or_else(|| {
                de::Error::custom(format_args!(
                    "unknown unit {name:?}; use SECOND, MINUTE, HOUR, DAY, WEEK, MONTH or YEAR"
                ))
            })
        }
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
    use super::super::messages::Entry;
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
            "limit":{"requestsPerUnit":5,"unit":"MINUTE"},"hitsAddend":"3"}],"hitsAddend":2}"#;
        let snake = br#"{"domain":"w","descriptors":[{"entries":[{"key":"a\n","value":"b"}],
            "limit":{"requests_per_unit":"5","unit":2},"hits_addend":3}],"hits_addend":"2"}"#;
        let request = parse_json(camel).unwrap();
        assert_eq!(request, parse_json(snake).unwrap());
        let descriptor = &request.descriptors[0];
        assert_eq!(descriptor.entries, [Entry { key: "a\n".to_owned(), value: "b".to_owned() }]);
        assert_eq!(descriptor.limit, Some(RateLimitOverride { requests_per_unit: 5, unit: 2 }));
        assert_eq!((descriptor.hits_addend, request.hits_addend), (Some(3), 2));
    }

    #[test]
    fn unknown_fields_units_and_negative_numbers_are_errors() {
        for body in [
            r#"{"domian":"w"}"#,
            r#"{"descriptors":[{"limit":{"unit":"FORTNIGHT"}}]}"#,
            r#"{"hitsAddend":-1}"#,
            r#"{"hitsAddend":4294967296}"#,
            r#"{"hitsAddend":"+1"}"#,
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
            r#""currentLimit":{"requestsPerUnit":5,"unit":"MINUTE","name":"per \"ip\""},"#,
            r#""durationUntilReset":"7s"}],"responseHeadersToAdd":[{"key":"retry-after","value":"7"}],"#,
            r#""dynamicMetadata":{"quotaModeEnabled":true,"quotaModeViolations":[1]}}"#,
        );
        assert_eq!(serde_json::to_string(&response).unwrap(), expected);
    }
}
