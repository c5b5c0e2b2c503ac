//! Request bodies: bounded in size and time, and parsed strictly.
//!
//! A body is a JSON object with known fields, each once, of the right type. An error has its position, and nothing is
//! executed before the whole body is valid.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::StatusCode;
use hyper::body::{Body as _, Incoming};
use hyper::header;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use tallygate_lab::duration::DurationText;

use super::problem::Problem;
use super::{Caller, buffers_full};
use crate::client_budgets::{HeldBytes, SMALL_BYTES};
use crate::config::{Limits, in_plain_words};

/// How much of a body that is too long is read and dropped, so that the client sees the error.
pub(super) const MAX_SKIPPED_BYTES: u64 = 16 * 1024 * 1024;
/// Maximum bytes that are parsed in one slice, in far less than a millisecond. A key of the maximum length, with every
/// byte escaped, has 24 KiB.
pub(super) const MAX_PARSED_BYTES: usize = 32 * 1024;
/// The longest error message in which a nearest name is searched.
const MAX_COMPLAINT_BYTES: usize = 1024;

/// A body whose memory is counted until it is dropped.
pub(crate) struct Received {
    bytes: Bytes,
    held: Option<HeldBytes>,
}

impl Received {
    /// Returns the bytes, and their count.
    pub(crate) fn into_parts(self) -> (Bytes, Option<HeldBytes>) {
        (self.bytes, self.held)
    }
}

impl Deref for Received {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Why a body was not read to its end.
enum ReadError {
    TooLong,
    BudgetExceeded,
    Broken(hyper::Error),
}

/// Reads a whole body.
pub(crate) async fn read(mut body: Incoming, caller: &Caller) -> Result<Received, Problem> {
    let Limits { max_body_bytes, body_timeout, .. } = caller.limits;
    let too_long =
        usize::try_from(body.size_hint().lower()).map_or(true, |bytes| bytes > max_body_bytes);
    let mut problem = None;
    if !too_long {
        match tokio::time::timeout(body_timeout, collect(&mut body, caller)).await {
            Ok(Ok(whole)) => return Ok(whole),
            Ok(Err(ReadError::TooLong)) => {}
            Ok(Err(ReadError::BudgetExceeded)) => problem = Some(buffers_full()),
            Ok(Err(ReadError::Broken(error))) => {
                return Err(Problem::bad(format!("cannot read the body: {error}")));
            }
            Err(_) => {
                let within = DurationText(body_timeout);
                let detail = format!("the body did not arrive within {within}");
                return Err(Problem::new(StatusCode::REQUEST_TIMEOUT, detail)
                    .with(header::CONNECTION, "close"));
            }
        }
    }
    // If the connection were closed at once, a client that still writes would not see the reply.
    tokio::spawn(skip(body, MAX_SKIPPED_BYTES, body_timeout));
    Err(problem.unwrap_or_else(|| {
        let detail = format!("the body is longer than {max_body_bytes} bytes (`max_body_bytes`)");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
    }))
}

/// Collects a body.
async fn collect(body: &mut Incoming, caller: &Caller) -> Result<Received, ReadError> {
    let Some(first) = next(body).await? else {
        return Ok(Received { bytes: Bytes::new(), held: None });
    };
    let mut held = None;
    let mut hold = |so_far: usize, more: usize| {
        if so_far + more > caller.limits.max_body_bytes {
            return Err(ReadError::TooLong);
        }
        let is_room = match &mut held {
            _ if so_far + more <= SMALL_BYTES => true,
            None => {
                held = caller.hold(so_far + more);
                held.is_some()
            }
            Some(held) => held.grow(more, &caller.limits),
        };
        is_room.then_some(()).ok_or(ReadError::BudgetExceeded)
    };
    hold(0, first.len())?;
    if body.is_end_stream() {
        return Ok(Received { bytes: first, held });
    }
    let mut all = BytesMut::from(first);
    while let Some(more) = next(body).await? {
        hold(all.len(), more.len())?;
        all.extend_from_slice(&more);
    }
    Ok(Received { bytes: all.freeze(), held })
}

impl From<hyper::Error> for ReadError {
    fn from(error: hyper::Error) -> Self {
        Self::Broken(error)
    }
}

/// Reads and drops at most `at_most` bytes within `deadline`.
pub(super) async fn skip(mut body: Incoming, at_most: u64, deadline: Duration) {
    let all = async {
        let mut skipped = 0;
        while let Ok(Some(bytes)) = next(&mut body).await {
            skipped += bytes.len() as u64;
            if skipped > at_most {
                return;
            }
        }
    };
    // A timeout is not an error here.
    let _ = tokio::time::timeout(deadline, all).await;
}

/// Returns the next piece of data; trailers are dropped.
pub(crate) async fn next(body: &mut Incoming) -> Result<Option<Bytes>, hyper::Error> {
    while let Some(frame) = body.frame().await.transpose()? {
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// Parses a body that fits into one slice.
pub(super) fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Problem> {
    if body.len() > MAX_PARSED_BYTES {
        let bytes = body.len();
        let detail =
            format!("the body has {bytes} bytes; this path accepts at most {MAX_PARSED_BYTES}");
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
    }
    parse_at(body, |offset| Position::of(body, offset))
}

/// Parses a part of a body. `place` maps an offset in the part to a position in the body.
pub(super) fn parse_at<'a, T: Deserialize<'a>>(
    part: &'a [u8],
    place: impl Fn(usize) -> Position,
) -> Result<T, Problem> {
    if part.len() > MAX_PARSED_BYTES {
        return Err(too_long_to_parse());
    }
    let parsed = serde_json::from_slice::<Object<T>>(part);
    parsed.map(|Object(parsed)| parsed).map_err(|error| {
        let (message, found) = split_position(&error);
        let message = not_json(part).unwrap_or(&message);
        let place = found
            .map(|(line, column)| place(Position { line, column }.offset(part)))
            .map_or(String::new(), |Position { line, column }| {
                format!(" (line {line}, column {column})")
            });
        Problem::bad(format!("{message}{place}"))
    })
}

/// Describes a text that is not even the start of JSON, such as a form.
fn not_json(part: &[u8]) -> Option<&'static str> {
    match part.trim_ascii_start().first() {
        None => Some("found nothing; expected a JSON object, such as {\"name\": \"value\"}"),
        Some(b'{' | b'[' | b'"' | b'-' | b'0'..=b'9' | b't' | b'f' | b'n') => None,
        Some(_) => {
            Some("found text that is not JSON; expected an object, such as {\"name\": \"value\"}")
        }
    }
}

/// Returns the error for a body that would take too long to parse in one slice.
pub(super) fn too_long_to_parse() -> Problem {
    let detail = format!(
        "the body has more than {MAX_PARSED_BYTES} bytes, not counting the items of its list; shorten the key or the other fields"
    );
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
}

/// A position in a text. Lines count from 1; the column is the number of bytes before it in its line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    line: usize,
    column: usize,
}

impl Position {
    /// Returns the position of an offset.
    pub(super) fn of(text: &[u8], offset: usize) -> Self {
        let before = &text[..offset.min(text.len())];
        let line = 1 + memchr::memchr_iter(b'\n', before).count();
        let begins = memchr::memrchr(b'\n', before).map_or(0, |end| end + 1);
        Self { line, column: before.len() - begins }
    }

    fn offset(self, text: &[u8]) -> usize {
        let ends =
            self.line.checked_sub(2).and_then(|line| memchr::memchr_iter(b'\n', text).nth(line));
        ends.map_or(0, |end| end + 1) + self.column
    }
}

/// Splits an error into its message, with the nearest valid name, and its position.
fn split_position(error: &dyn fmt::Display) -> (String, Option<(usize, usize)>) {
    let error = error.to_string();
    let place = error.rsplit_once(" at line ").and_then(|(message, place)| {
        let (line, column) = place.split_once(" column ")?;
        Some((message, (line.parse().ok()?, column.parse().ok()?)))
    });
    let (message, place) = match place {
        Some((message, place)) => (message, Some(place)),
        None => (error.as_str(), None),
    };
    if message.len() > MAX_COMPLAINT_BYTES {
        return (message.to_owned(), place);
    }
    (in_plain_words(message, "an object"), place)
}

/// Adds the name of a part to an error.
pub(super) fn error_in<E: de::Error>(part: impl fmt::Display, error: &E) -> E {
    match split_position(error) {
        (message, None) => E::custom(format_args!("{part}: {message}")),
        (message, Some((line, column))) => {
            // Written so that serde_json parses the position again.
            E::custom(format_args!("{part}: {message} at line {line} column {column}"))
        }
    }
}

/// A JSON object. serde would also accept a list of the values.
#[derive(Debug)]
pub(super) struct Object<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }

        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

/// A string, borrowed from the body if it has no escapes.
#[derive(Debug)]
pub(super) struct Text<'a>(Cow<'a, str>);

impl Deref for Text<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;

        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }

        deserializer.deserialize_str(TextVisitor)
    }
}

/// A whole number, without fraction or exponent.
#[derive(Clone, Copy, Debug)]
pub(super) struct WholeNumber(pub(super) u64);

impl<'de> Deserialize<'de> for WholeNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WholeNumberVisitor;

        impl Visitor<'_> for WholeNumberVisitor {
            type Value = WholeNumber;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a whole number from 0 to {}", u64::MAX)
            }

            fn visit_u64<E>(self, number: u64) -> Result<WholeNumber, E> {
                Ok(WholeNumber(number))
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<WholeNumber, E> {
                Err(E::invalid_value(de::Unexpected::Signed(number), &self))
            }
        }

        deserializer.deserialize_u64(WholeNumberVisitor)
    }
}

/// A list of objects. An error contains the index of its item.
#[derive(Debug)]
pub(super) struct Items<T>(pub(super) Vec<T>);

/// The longest list.
pub(super) const MAX_ITEMS: usize = 10_000;
/// The error for a longer list.
pub(super) const TOO_MANY_ITEMS: &str = "more than 10000 items; send them in several requests";

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Items<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ItemsVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for ItemsVisitor<T> {
            type Value = Items<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Items<T>, A::Error> {
                let mut items = Vec::new();
                loop {
                    let next = seq.next_element::<Object<T>>();
                    match next
                        .map_err(|error| error_in(format_args!("item {}", items.len()), &error))?
                    {
                        None => return Ok(Items(items)),
                        Some(_) if items.len() == MAX_ITEMS => {
                            return Err(de::Error::custom(TOO_MANY_ITEMS));
                        }
                        Some(Object(item)) => items.push(item),
                    }
                }
            }
        }

        deserializer.deserialize_seq(ItemsVisitor(PhantomData))
    }
}

/// Makes a module `field` with a function per field of an endpoint's bodies. The function deserializes a field that is
/// present: `null` is an error. The error names the field.
macro_rules! fields {
    ($($name:ident: $type:ty),* $(,)?) => {
        mod field {
            use super::*;
            $(pub(super) fn $name<'de, D: ::serde::Deserializer<'de>>(
                deserializer: D,
            ) -> Result<Option<$type>, D::Error> {
                <$type as ::serde::Deserialize<'de>>::deserialize(deserializer)
                    .map(Some)
                    .map_err(|error| {
                        $crate::http::body::error_in(concat!("`", stringify!($name), "`"), &error)
                    })
            })*
        }
    };
}
pub(super) use fields;

/// Returns the value of a required field.
pub(super) fn required<T>(field: Option<T>, name: &str) -> Result<T, Problem> {
    field.ok_or_else(|| Problem::bad(format!("missing field `{name}`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fields! { key: Text<'de>, cost: WholeNumber }

    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "most of it is only read to be rejected")]
    struct TestBody<'a> {
        #[serde(borrow, default, deserialize_with = "field::key")]
        key: Option<Text<'a>>,
        #[serde(default, deserialize_with = "field::cost")]
        cost: Option<WholeNumber>,
        items: Option<Items<Self>>,
    }

    #[track_caller]
    fn assert_problem(body: &str, expected: &str) {
        let problem = parse::<TestBody<'_>>(body.as_bytes()).map(|_| ()).unwrap_err();
        let shown = format!("{problem:?}");
        assert!(shown.contains(&format!("{expected:?}")), "{shown}");
    }

    /// Fault E15.
    #[test]
    fn an_error_has_its_position() {
        let example = r#"such as {"name": "value"}"#;
        assert_problem(
            "",
            &format!("found nothing; expected a JSON object, {example} (line 1, column 0)"),
        );
        for text in ["hello", "policy=api&key=a", "'{}'"] {
            assert_problem(
                text,
                &format!(
                    "found text that is not JSON; expected an object, {example} (line 1, column 1)"
                ),
            );
        }
        assert_problem(
            r#"{"key":"a",}"#,
            "not valid JSON: remove the comma before the closing bracket (line 1, column 12)",
        );
        assert_problem(
            "{'key':1}",
            "not valid JSON: the name of a field must be in double quotes (line 1, column 2)",
        );
        assert_problem("[]", "found a list; expected an object (line 1, column 0)");
        assert_problem(r#"{"items":{}}"#, "found an object; expected a list (line 1, column 9)");
        assert_problem(
            r#"{"key":"a","key":"b"}"#,
            "`key` is set twice; remove one of them (line 1, column 16)",
        );
        assert_problem(
            r#"{"cost":"1"}"#,
            "`cost`: found a string; expected a whole number from 0 to 18446744073709551615, without quotes (line 1, column 11)",
        );
        assert_problem(
            r#"{"kye":"a"}"#,
            "unknown field `kye`; did you mean `key`? (line 1, column 6)",
        );
        assert_problem(
            r#"{"items":[{"key":"a"},{"kye":"b"}]}"#,
            "item 1: unknown field `kye`; did you mean `key`? (line 1, column 28)",
        );
        assert_problem(
            r#"{"key":null}"#,
            "`key`: found null; expected a string (line 1, column 11)",
        );
        assert_problem(r#"{"cost":1e400}"#, "`cost`: the number is too large (line 1, column 13)");
        assert_problem(
            r#"{"key":"a"} x"#,
            "found text after the end of the JSON; remove it (line 1, column 13)",
        );
    }

    /// Fault J4.
    #[test]
    fn a_body_that_is_too_long_for_its_path_is_rejected_with_both_sizes() {
        let long = format!(r#"{{"key":"{}"}}"#, "a".repeat(40_000));
        assert_problem(&long, "the body has 40010 bytes; this path accepts at most 32768");
    }

    /// Faults A6, A14.
    #[test]
    fn only_whole_numbers_are_numbers() {
        for bad in [
            "-1",
            "1.5",
            "1e3",
            "1.0",
            "18446744073709551616",
            "\"1\"",
            "NaN",
            "0x10",
            "01",
            "+1",
            "[1]",
        ] {
            let body = format!(r#"{{"cost":{bad}}}"#);
            assert!(parse::<TestBody<'_>>(body.as_bytes()).is_err(), "{bad}");
        }
        let most = parse::<TestBody<'_>>(br#"{"cost":18446744073709551615}"#).unwrap();
        assert_eq!(most.cost.map(|cost| cost.0), Some(u64::MAX));
    }

    #[test]
    fn a_place_is_found_again_by_its_offset() {
        let text = b"{\n  \"key\":\n\n1}";
        for offset in 0..=text.len() {
            assert_eq!(Position::of(text, offset).offset(text), offset);
        }
        assert_eq!(Position::of(text, 4), Position { line: 2, column: 2 });
    }

    /// Fault E15.
    #[test]
    fn deeply_nested_input_is_an_error() {
        let deep = format!(r#"{{"key":{}"#, "[".repeat(500_000));
        assert!(parse::<TestBody<'_>>(deep.as_bytes()).is_err());
        let deep = format!("{}1{}", r#"{"items":["#.repeat(50_000), "]}".repeat(50_000));
        assert!(parse::<TestBody<'_>>(deep.as_bytes()).is_err());
    }
}
