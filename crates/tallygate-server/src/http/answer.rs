//! A decision in JSON, written by hand: it is what nearly every reply is made of.

use bytes::Bytes;
use hyper::header::{self, HeaderValue};
use tallygate::{Decision, Ticks};

use super::Reply;
use super::query;

/// What some decisions tell besides.
#[derive(Default)]
pub(super) struct More<'a> {
    /// The limit that refused, by its name, where there are several.
    pub(super) refused_by: Option<&'a str>,
    /// Which of the questions was refused, where they were asked as one.
    pub(super) refused: Option<usize>,
    pub(super) reservation: Option<u128>,
}

/// About as much as a decision takes.
pub(super) const BYTES: usize = 192;

pub(super) fn decision(out: &mut Vec<u8>, policy: &str, decision: &Decision, more: &More<'_>) {
    out.extend_from_slice(if decision.allowed {
        br#"{"allowed":true,"policy":"#
    } else {
        br#"{"allowed":false,"policy":"#
    });
    text(out, policy);
    out.extend_from_slice(br#","limit":"#);
    number(out, decision.limit);
    out.extend_from_slice(br#","remaining":"#);
    number(out, decision.remaining);
    out.extend_from_slice(br#","retry_after_ms":"#);
    match decision.retry_after {
        Some(wait) if decision.allowed => number(out, millis(wait)),
        Some(wait) => number(out, millis(wait).max(1)),
        None => out.extend_from_slice(b"null"),
    }
    out.extend_from_slice(br#","reset_after_ms":"#);
    number(out, millis(decision.reset_after));
    out.extend_from_slice(br#","delay_ms":"#);
    number(out, millis(decision.delay));
    out.extend_from_slice(br#","source":""#);
    out.extend_from_slice(decision.source.name().as_bytes());
    out.push(b'"');
    if let Some(name) = more.refused_by {
        out.extend_from_slice(br#","refused_by":"#);
        text(out, name);
    }
    if let Some(index) = more.refused {
        out.extend_from_slice(br#","refused":"#);
        number(out, index);
    }
    if let Some(number) = more.reservation {
        out.extend_from_slice(format!(r#","reservation":"{number:032x}""#).as_bytes());
    }
    out.push(b'}');
}

/// Whole milliseconds, rounded up: nobody is told to come too early.
fn millis(span: Ticks) -> u64 {
    span.0.div_ceil(Ticks::PER_MILLISECOND)
}

pub(super) fn number(out: &mut Vec<u8>, number: impl itoa::Integer) {
    out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

/// A string of JSON.
pub(super) fn text(out: &mut Vec<u8>, text: &str) {
    // Neither a string nor a vector can refuse.
    let _ = serde_json::to_writer(out, text);
}

/// The field `key`. Bytes that are no text are shown as well as can be, and once more as a query takes them.
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
    use tallygate::Source;

    const REFUSED: Decision = Decision {
        allowed: false,
        limit: 5,
        remaining: 0,
        retry_after: Some(Ticks(1)),
        reset_after: Ticks(1_000_001),
        delay: Ticks::ZERO,
        scarcest: None,
        refused_by: None,
        shadow_refused_by: None,
        source: Source::Store,
    };

    fn shown(shown: Decision) -> String {
        let mut out = Vec::new();
        decision(&mut out, "a\"b", &shown, &More::default());
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a11_times_are_rounded_up_and_a_refusal_never_says_now() {
        assert_eq!(
            shown(REFUSED),
            r#"{"allowed":false,"policy":"a\"b","limit":5,"remaining":0,"retry_after_ms":1,"reset_after_ms":2,"delay_ms":0,"source":"store"}"#
        );
        let at_once = shown(Decision { retry_after: Some(Ticks::ZERO), ..REFUSED });
        assert!(at_once.contains(r#""retry_after_ms":1,"#), "{at_once}");
        let allowed = Decision { allowed: true, retry_after: Some(Ticks::ZERO), ..REFUSED };
        assert!(shown(allowed).contains(r#""retry_after_ms":0,"#));
    }

    #[test]
    fn a7_what_can_never_fit_has_no_retry_time() {
        let never = shown(Decision { retry_after: None, ..REFUSED });
        assert!(never.contains(r#""retry_after_ms":null,"#), "{never}");
    }
}
