//! The messages of `envoy.service.ratelimit.v3` in JSON, by the mapping of protobuf: names in camel case or as in the
//! protocol, numbers of 64 bits also as texts, enumerations by name or number, and no fields with default values.

use std::borrow::Cow;
use std::fmt::Write as _;

use serde::{Deserialize, Deserializer, de};

use super::{Descriptor, RateLimitRequest, RateLimitResponse, RequestLimit};
use crate::config::Unit;

/// A `RateLimitRequest` in JSON.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub(crate) struct JsonRequest<'a> {
    #[serde(borrow)]
    domain: Cow<'a, str>,
    #[serde(borrow)]
    descriptors: Vec<JsonDescriptor<'a>>,
    #[serde(alias = "hits_addend", deserialize_with = "number32")]
    hits_addend: u32,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct JsonDescriptor<'a> {
    #[serde(borrow)]
    entries: Vec<JsonEntry<'a>>,
    limit: Option<JsonLimit>,
    #[serde(alias = "hits_addend", deserialize_with = "some_number")]
    hits_addend: Option<u64>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct JsonEntry<'a> {
    #[serde(borrow)]
    key: Cow<'a, str>,
    #[serde(borrow)]
    value: Cow<'a, str>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct JsonLimit {
    #[serde(alias = "requests_per_unit", deserialize_with = "number32")]
    requests_per_unit: u32,
    #[serde(deserialize_with = "unit")]
    unit: u64,
}

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

fn number32<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let number = NumberOrText::deserialize(deserializer)?.number()?;
    u32::try_from(number)
        .map_err(|_| de::Error::custom(format_args!("{number} has more than 32 bits")))
}

fn some_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Option::<NumberOrText<'de>>::deserialize(deserializer)?.map(|given| given.number()).transpose()
}

/// Reads a unit by name or number. An unknown number is read as well; a decision rejects it.
fn unit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    match NumberOrText::deserialize(deserializer)? {
        NumberOrText::Number(number) => Ok(number),
        NumberOrText::Text(name) if name == "UNKNOWN" => Ok(0),
        NumberOrText::Text(name) => {
            let known = Unit::ALL.into_iter().find(|(known, _)| *known == name);
            known.map(|(_, unit)| unit as u64).ok_or_else(|| {
                de::Error::custom(format_args!(
                    "unknown unit {name:?}; use SECOND, MINUTE, HOUR, DAY, WEEK, MONTH or YEAR"
                ))
            })
        }
    }
}

impl<'a> From<JsonRequest<'a>> for RateLimitRequest<'a> {
    fn from(request: JsonRequest<'a>) -> Self {
        let entry = |entry: JsonEntry<'a>| (entry.key, entry.value);
        let limit = |limit: JsonLimit| RequestLimit {
            requests_per_unit: limit.requests_per_unit,
            unit: limit.unit,
        };
        let descriptor = |descriptor: JsonDescriptor<'a>| Descriptor {
            entries: descriptor.entries.into_iter().map(entry).collect(),
            limit: descriptor.limit.map(limit),
            hits_addend: descriptor.hits_addend,
        };
        Self {
            domain: request.domain,
            descriptors: request.descriptors.into_iter().map(descriptor).collect(),
            hits_addend: request.hits_addend,
        }
    }
}

/// Writes a `RateLimitResponse`.
pub(crate) fn write_json(response: &RateLimitResponse) -> String {
    let mut out = format!(r#"{{"overallCode":"{}","statuses":["#, code(response.is_over_limit));
    for (place, status) in response.statuses.iter().enumerate() {
        let comma = if place > 0 { "," } else { "" };
        // Writing to a string cannot fail.
        let _ = write!(out, r#"{comma}{{"code":"{}""#, code(status.is_over_limit));
        if let Some((limit, name)) = &status.limit {
            out.push_str(r#","currentLimit":{"#);
            if limit.requests_per_unit > 0 {
                let _ = write!(out, r#""requestsPerUnit":{},"#, limit.requests_per_unit);
            }
            let _ = write!(out, r#""unit":"{}""#, limit.unit.name());
            if let Some(name) = name {
                let _ = write!(out, r#","name":{}"#, text(name));
            }
            out.push('}');
        }
        if status.remaining > 0 {
            let _ = write!(out, r#","limitRemaining":{}"#, status.remaining);
        }
        if let Some(seconds) = status.reset_after_s {
            let _ = write!(out, r#","durationUntilReset":"{seconds}s""#);
        }
        out.push('}');
    }
    out.push(']');
    if !response.headers.is_empty() {
        let field = |(name, value): &(String, String)| {
            format!(r#"{{"key":{},"value":{}}}"#, text(name), text(value))
        };
        let fields: Vec<_> = response.headers.iter().map(field).collect();
        let _ = write!(out, r#","responseHeadersToAdd":[{}]"#, fields.join(","));
    }
    if let Some(violations) = &response.quota_violations {
        out.push_str(r#","dynamicMetadata":{"quotaModeEnabled":true"#);
        if !violations.is_empty() {
            let _ = write!(out, r#","quotaModeViolations":{violations:?}"#);
        }
        out.push('}');
    }
    out.push('}');
    out
}

const fn code(is_over_limit: bool) -> &'static str {
    if is_over_limit { "OVER_LIMIT" } else { "OK" }
}

fn text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::super::DescriptorStatus;
    use super::*;
    use crate::config::{EnvoyHeaders, EnvoyLimit};

    fn parse_json(body: &[u8]) -> Result<RateLimitRequest<'_>, serde_json::Error> {
        serde_json::from_slice::<JsonRequest<'_>>(body).map(RateLimitRequest::from)
    }

    #[test]
    fn names_in_both_cases_and_numbers_as_texts_are_read() {
        let camel = br#"{"domain":"w","descriptors":[{"entries":[{"key":"a\n","value":"b"}],
            "limit":{"requestsPerUnit":5,"unit":"MINUTE"},"hitsAddend":"3"}],"hitsAddend":2}"#;
        let snake = br#"{"domain":"w","descriptors":[{"entries":[{"key":"a\n","value":"b"}],
            "limit":{"requests_per_unit":"5","unit":2},"hits_addend":3}],"hits_addend":"2"}"#;
        let request = parse_json(camel).unwrap();
        assert_eq!(request, parse_json(snake).unwrap());
        assert_eq!(request.descriptors[0].entries[0], ("a\n".into(), "b".into()));
        assert_eq!(
            request.descriptors[0].limit,
            Some(RequestLimit { requests_per_unit: 5, unit: 2 })
        );
        assert_eq!((request.descriptors[0].hits_addend, request.hits_addend), (Some(3), 2));
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
        let limit = EnvoyLimit { requests_per_unit: 5, unit: Unit::Minute };
        let response = RateLimitResponse {
            is_over_limit: true,
            statuses: vec![
                DescriptorStatus::default(),
                DescriptorStatus {
                    is_over_limit: true,
                    limit: Some((limit, Some("per \"ip\"".into()))),
                    remaining: 0,
                    reset_after_s: Some(7),
                },
            ],
            quota_violations: Some(vec![1]),
            tightest: None,
            headers: vec![("retry-after".to_owned(), "7".to_owned())],
            wanted_headers: EnvoyHeaders::None,
        };
        let expected = serde_json::json!({
            "overallCode": "OVER_LIMIT",
            "statuses": [
                {"code": "OK"},
                {"code": "OVER_LIMIT", "currentLimit": {"requestsPerUnit": 5, "unit": "MINUTE", "name": "per \"ip\""},
                 "durationUntilReset": "7s"},
            ],
            "responseHeadersToAdd": [{"key": "retry-after", "value": "7"}],
            "dynamicMetadata": {"quotaModeEnabled": true, "quotaModeViolations": [1]},
        });
        let written: serde_json::Value = serde_json::from_str(&write_json(&response)).unwrap();
        assert_eq!(written, expected);
    }
}
