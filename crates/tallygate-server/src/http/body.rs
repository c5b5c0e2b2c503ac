//! Bodies: read within bounds of size and time, and taken at their word.
//!
//! JSON objects only, with known fields, each once, of the right type. What is wrong is told with its place, and
//! before anything is done about the rest.

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

use super::problem::Problem;
use super::{Caller, no_room};
use crate::config::{Limits, with_nearest};
use crate::holdings::{HeldBytes, SMALL_BYTES};

/// How much of a body that is too long is read past, so that the client hears why.
pub(super) const MAX_SKIPPED_BYTES: u64 = 16 * 1024 * 1024;
/// The most that is parsed in one turn of a worker, in far less than a millisecond. A key of the greatest length with every
/// byte of it escaped has 24 KiB.
pub(super) const MAX_PARSED_BYTES: usize = 32 * 1024;
/// The longest complaint in which a nearest name is looked for.
const MAX_COMPLAINT_BYTES: usize = 1024;

/// A body that was read, and counts as held until it is dropped.
pub(super) struct Received {
    bytes: Bytes,
    _held: Option<HeldBytes>,
}

impl Deref for Received {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Why a body was not read to its end.
enum Unread {
    TooLong,
    NoRoom,
    Broken(hyper::Error),
}

/// Reads a body whole.
pub(super) async fn read(mut body: Incoming, caller: &Caller) -> Result<Received, Problem> {
    let Limits { max_body_bytes, body_timeout, .. } = caller.limits;
    let too_long =
        usize::try_from(body.size_hint().lower()).map_or(true, |bytes| bytes > max_body_bytes);
    let mut problem = None;
    if !too_long {
        match tokio::time::timeout(body_timeout, collected(&mut body, caller)).await {
            Ok(Ok(whole)) => return Ok(whole),
            Ok(Err(Unread::TooLong)) => {}
            Ok(Err(Unread::NoRoom)) => problem = Some(no_room()),
            Ok(Err(Unread::Broken(error))) => {
                return Err(Problem::bad(format!("the body cannot be read: {error}")));
            }
            Err(_) => {
                let within = humantime::format_duration(body_timeout);
                let detail = format!("the body did not come within {within}");
                return Err(Problem::new(StatusCode::REQUEST_TIMEOUT, detail)
                    .with(header::CONNECTION, "close"));
            }
        }
    }
    // Closed upon at once, a client that still writes would never read the answer.
    tokio::spawn(skip(body, MAX_SKIPPED_BYTES, body_timeout));
    Err(problem.unwrap_or_else(|| {
        let detail = format!("the body has more than {max_body_bytes} bytes");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
    }))
}

/// All of it.
async fn collected(body: &mut Incoming, caller: &Caller) -> Result<Received, Unread> {
    let Some(first) = next(body).await? else {
        return Ok(Received { bytes: Bytes::new(), _held: None });
    };
    let mut held = None;
    let mut hold = |so_far: usize, more: usize| {
        if so_far + more > caller.limits.max_body_bytes {
            return Err(Unread::TooLong);
        }
        let is_room = match &mut held {
            _ if so_far + more <= SMALL_BYTES => true,
            None => {
                held = caller.hold(so_far + more);
                held.is_some()
            }
            Some(held) => held.grow(more, &caller.limits),
        };
        is_room.then_some(()).ok_or(Unread::NoRoom)
    };
    hold(0, first.len())?;
    if body.is_end_stream() {
        return Ok(Received { bytes: first, _held: held });
    }
    let mut all = BytesMut::from(first);
    while let Some(more) = next(body).await? {
        hold(all.len(), more.len())?;
        all.extend_from_slice(&more);
    }
    Ok(Received { bytes: all.freeze(), _held: held })
}

impl From<hyper::Error> for Unread {
    fn from(error: hyper::Error) -> Self {
        Self::Broken(error)
    }
}

/// Reads past so many bytes, as long as they come in time.
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
    // What does not come in time is not waited for.
    let _ = tokio::time::timeout(deadline, all).await;
}

/// The next piece of data; trailers are nobody's.
pub(super) async fn next(body: &mut Incoming) -> Result<Option<Bytes>, hyper::Error> {
    while let Some(frame) = body.frame().await.transpose()? {
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// Parses a body that has no list, or one that fits into a turn.
pub(super) fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Problem> {
    parse_at(body, |offset| Place::of(body, offset))
}

/// Parses a part of a body. `place` returns where in the body an offset of the part is.
pub(super) fn parse_at<'a, T: Deserialize<'a>>(
    part: &'a [u8],
    place: impl Fn(usize) -> Place,
) -> Result<T, Problem> {
    if part.len() > MAX_PARSED_BYTES {
        return Err(too_long_to_parse());
    }
    let parsed = serde_json::from_slice::<Object<T>>(part);
    parsed.map(|Object(said)| said).map_err(|error| {
        let (complaint, found) = told(&error);
        let place = found
            .map(|(line, column)| place(Place { line, column }.offset(part)))
            .map_or(String::new(), |Place { line, column }| {
                format!(" (line {line}, column {column})")
            });
        Problem::bad(format!("{complaint}{place}"))
    })
}

/// Returns the answer to a body that would take too long to parse in one turn of a worker.
pub(super) fn too_long_to_parse() -> Problem {
    let detail = format!(
        "the body has more than {MAX_PARSED_BYTES} bytes besides the items of its list; send less"
    );
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
}

/// A place in a text: lines count from 1, columns are the bytes of the line before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    line: usize,
    column: usize,
}

impl Place {
    /// Returns the place of an offset.
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

/// A complaint with the nearest right name, and its place.
fn told(error: &dyn fmt::Display) -> (String, Option<(usize, usize)>) {
    let error = error.to_string();
    let place = error.rsplit_once(" at line ").and_then(|(complaint, place)| {
        let (line, column) = place.split_once(" column ")?;
        Some((complaint, (line.parse().ok()?, column.parse().ok()?)))
    });
    let (complaint, place) = match place {
        Some((complaint, place)) => (complaint, Some(place)),
        None => (error.as_str(), None),
    };
    if complaint.len() > MAX_COMPLAINT_BYTES {
        return (complaint.to_owned(), place);
    }
    (with_nearest(complaint), place)
}

/// The same complaint about a part, in front of which it is named.
pub(super) fn about<E: de::Error>(part: impl fmt::Display, error: &E) -> E {
    match told(error) {
        (complaint, None) => E::custom(format_args!("{part}: {complaint}")),
        (complaint, Some((line, column))) => {
            // Written so that serde_json finds the place again.
            E::custom(format_args!("{part}: {complaint} at line {line} column {column}"))
        }
    }
}

/// An object, and not a list of its fields' values.
#[derive(Debug)]
pub(super) struct Object<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }

        deserializer.deserialize_map(Fields(PhantomData))
    }
}

/// A string, in the body where it can be.
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
        struct Either;

        impl<'de> Visitor<'de> for Either {
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

        deserializer.deserialize_str(Either)
    }
}

/// A whole number, written as one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Whole(pub(super) u64);

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Digits;

        impl Visitor<'_> for Digits {
            type Value = Whole;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a whole number from 0 to {}", u64::MAX)
            }

            fn visit_u64<E>(self, number: u64) -> Result<Whole, E> {
                Ok(Whole(number))
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Whole, E> {
                Err(E::invalid_value(de::Unexpected::Signed(number), &self))
            }
        }

        deserializer.deserialize_u64(Digits)
    }
}

/// A list of objects; a mistake is told with the index of its item.
#[derive(Debug)]
pub(super) struct Items<T>(pub(super) Vec<T>);

/// The longest list.
pub(super) const MAX_ITEMS: usize = 10_000;
/// What is wrong with a longer one.
pub(super) const TOO_MANY_ITEMS: &str = "more than 10000 items; send them in several requests";

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Items<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Each<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Each<T> {
            type Value = Items<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Items<T>, A::Error> {
                let mut items = Vec::new();
                loop {
                    let next = seq.next_element::<Object<T>>();
                    match next
                        .map_err(|error| about(format_args!("item {}", items.len()), &error))?
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

        deserializer.deserialize_seq(Each(PhantomData))
    }
}

/// Makes a module `field` with a function for each field of an endpoint's bodies. The function reads a field that is
/// there: `null` is not left out, it is a mistake. The complaint names the field.
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
                        $crate::http::body::about(concat!("`", stringify!($name), "`"), &error)
                    })
            })*
        }
    };
}
pub(super) use fields;

/// What a field says that must be there.
pub(super) fn required<T>(field: Option<T>, name: &str) -> Result<T, Problem> {
    field.ok_or_else(|| Problem::bad(format!("missing field `{name}`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fields! { key: Text<'de>, cost: Whole }

    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "most of it is only read to be refused")]
    struct Said<'a> {
        #[serde(borrow, default, deserialize_with = "field::key")]
        key: Option<Text<'a>>,
        #[serde(default, deserialize_with = "field::cost")]
        cost: Option<Whole>,
        items: Option<Items<Self>>,
    }

    #[track_caller]
    fn says(body: &str, expected: &str) {
        let problem = parse::<Said<'_>>(body.as_bytes()).map(|_| ()).unwrap_err();
        let shown = format!("{problem:?}");
        assert!(shown.contains(&format!("{expected:?}")), "{shown}");
    }

    #[test]
    fn e15_a_mistake_is_told_with_its_place() {
        says("", "EOF while parsing a value (line 1, column 0)");
        says("[]", "invalid type: sequence, expected an object (line 1, column 0)");
        says(r#"{"key":"a","key":"b"}"#, "duplicate field `key` (line 1, column 16)");
        says(r#"{"kye":"a"}"#, "unknown field `kye`; did you mean `key`? (line 1, column 6)");
        says(
            r#"{"items":[{"key":"a"},{"kye":"b"}]}"#,
            "item 1: unknown field `kye`; did you mean `key`? (line 1, column 28)",
        );
        says(r#"{"key":null}"#, "`key`: invalid type: null, expected a string (line 1, column 11)");
        says(r#"{"cost":1e400}"#, "`cost`: number out of range (line 1, column 13)");
        says(r#"{"key":"a"} x"#, "trailing characters (line 1, column 13)");
    }

    #[test]
    fn a6_a14_only_whole_numbers_are_numbers() {
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
            assert!(parse::<Said<'_>>(body.as_bytes()).is_err(), "{bad}");
        }
        let most = parse::<Said<'_>>(br#"{"cost":18446744073709551615}"#).unwrap();
        assert_eq!(most.cost.map(|cost| cost.0), Some(u64::MAX));
    }

    #[test]
    fn a_place_is_found_again_by_its_offset() {
        let text = b"{\n  \"key\":\n\n1}";
        for offset in 0..=text.len() {
            assert_eq!(Place::of(text, offset).offset(text), offset);
        }
        assert_eq!(Place::of(text, 4), Place { line: 2, column: 2 });
    }

    #[test]
    fn e15_depth_is_no_danger() {
        let deep = format!(r#"{{"key":{}"#, "[".repeat(500_000));
        assert!(parse::<Said<'_>>(deep.as_bytes()).is_err());
        let deep = format!("{}1{}", r#"{"items":["#.repeat(50_000), "]}".repeat(50_000));
        assert!(parse::<Said<'_>>(deep.as_bytes()).is_err());
    }
}
