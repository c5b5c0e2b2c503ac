//! Writes decisions as JSON. This is hand-written, because nearly every reply contains a decision.

use bytes::Bytes;
use hyper::header::{self, HeaderValue};
use tallygate::Decision;

use super::Reply;
use super::query;
use crate::gate::{self, ReservationId};

/// Fields that only some decisions have.
#[derive(Default)]
pub(super) struct DecisionExtras<'a> {
    /// The name of the limit that denied the request, if the policy has several.
    pub(super) denied_by: Option<&'a str>,
    /// The index of the denied item of an `all`.
    pub(super) denied_index: Option<usize>,
    pub(super) reservation: Option<ReservationId>,
    /// The name of the shadow limit that would have denied the request.
    pub(super) shadow_denied_by: Option<&'a str>,
}

/// The approximate size of a decision.
pub(super) const BYTES: usize = 192;

pub(super) fn decision(
    out: &mut Vec<u8>,
    policy: &str,
    decision: &Decision,
    more: &DecisionExtras<'_>,
) {
    out.extend_from_slice(if decision.allowed {
        br#"{"allowed":true,"policy":"#
    } else {
        br#"{"allowed":false,"policy":"#
    });
    text(out, policy);
    out.extend_from_slice(br#","limit":"#);
    let is_unlimited = decision.is_unlimited();
    optional(out, Some(decision.limit).filter(|_| !is_unlimited));
    out.extend_from_slice(br#","remaining":"#);
    optional(out, Some(decision.remaining).filter(|_| !is_unlimited));
    out.extend_from_slice(br#","retry_after_ms":"#);
    optional(out, gate::retry_after_ms(decision));
    out.extend_from_slice(br#","reset_after_ms":"#);
    number(out, gate::milliseconds(decision.reset_after));
    out.extend_from_slice(br#","delay_ms":"#);
    number(out, gate::milliseconds(decision.delay));
    out.extend_from_slice(br#","window_ms":"#);
    optional(out, gate::window_ms(decision));
    out.extend_from_slice(br#","source":""#);
    out.extend_from_slice(decision.source.name().as_bytes());
    out.push(b'"');
    if let Some(name) = more.denied_by {
        out.extend_from_slice(br#","denied_by":"#);
        text(out, name);
    }
    if let Some(index) = more.denied_index {
        out.extend_from_slice(br#","denied_index":"#);
        number(out, index);
    }
    if let Some(name) = more.shadow_denied_by {
        out.extend_from_slice(br#","shadow_denied_by":"#);
        text(out, name);
    }
    if let Some(id) = more.reservation {
        out.extend_from_slice(format!(r#","reservation":"{id}""#).as_bytes());
    }
    out.push(b'}');
}

/// Writes a number, or `null`.
fn optional(out: &mut Vec<u8>, value: Option<u64>) {
    match value {
        Some(value) => number(out, value),
        None => out.extend_from_slice(b"null"),
    }
}

pub(super) fn number(out: &mut Vec<u8>, number: impl itoa::Integer) {
    out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

/// Writes a JSON string.
pub(super) fn text(out: &mut Vec<u8>, text: &str) {
    // Writing a string to a vector cannot fail.
    let _ = serde_json::to_writer(out, text);
}

/// Writes the field `key`. A key that is not UTF-8 is shown with replacement characters, and once more in
/// percent-encoding.
pub(super) fn key(out: &mut Vec<u8>, key: &[u8]) {
    out.extend_from_slice(br#""key":"#);
    text(out, &String::from_utf8_lossy(key));
    if std::str::from_utf8(key).is_err() {
        out.extend_from_slice(br#","key_encoded":"#);
        text(out, &query::encoded(key));
    }
}

pub(super) fn json(body: Vec<u8>) -> Reply {
    with_type(body, HeaderValue::from_static("application/json"))
}

pub(super) fn with_type(body: impl Into<Bytes>, content_type: HeaderValue) -> Reply {
    let mut reply = Reply::new(body.into());
    reply.headers_mut().insert(header::CONTENT_TYPE, content_type);
    reply
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallygate::{Source, Ticks};

    const DENIED: Decision = Decision {
        allowed: false,
        limit: 5,
        remaining: 0,
        retry_after: Some(Ticks(1)),
        reset_after: Ticks(1_000_001),
        delay: Ticks::ZERO,
        scarcest: None,
        denied_by: None,
        shadow_denied_by: None,
        quota: None,
        source: Source::Store,
    };

    fn shown(shown: Decision) -> String {
        let mut out = Vec::new();
        decision(&mut out, "a\"b", &shown, &DecisionExtras::default());
        String::from_utf8(out).unwrap()
    }

    /// Fault A11.
    #[test]
    fn times_are_rounded_up_and_a_denial_never_has_a_wait_of_0() {
        assert_eq!(
            shown(DENIED),
            r#"{"allowed":false,"policy":"a\"b","limit":5,"remaining":0,"retry_after_ms":1,"reset_after_ms":2,"delay_ms":0,"window_ms":null,"source":"store"}"#
        );
        let at_once = shown(Decision { retry_after: Some(Ticks::ZERO), ..DENIED });
        assert!(at_once.contains(r#""retry_after_ms":1,"#), "{at_once}");
        let allowed = Decision { allowed: true, retry_after: Some(Ticks::ZERO), ..DENIED };
        assert!(shown(allowed).contains(r#""retry_after_ms":0,"#));
    }

    /// Fault A7.
    #[test]
    fn a_cost_that_can_never_fit_has_no_retry_time() {
        let never = shown(Decision { retry_after: None, ..DENIED });
        assert!(never.contains(r#""retry_after_ms":null,"#), "{never}");
    }
}
