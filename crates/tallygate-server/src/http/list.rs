//! Splits a long body, so that its list can be parsed in several slices.
//!
//! A body of 1 MiB takes milliseconds to parse, which is too long for one slice. So a scan finds the items of its list
//! first, without parsing them; then the rest of the body and each item are parsed separately. A body that fits into
//! one slice is not split.

use std::borrow::Cow;
use std::ops::Range;

use hyper::StatusCode;

use super::body::{self, MAX_ITEMS, MAX_PARSED_BYTES, Position};
use super::problem::Problem;
use crate::turn::{PARSE_BYTE, SCAN_BYTE, TimeSlice};

/// The longest body that is parsed as a whole.
const WHOLE_BYTES: usize = 4 * 1024;
/// How many bytes are scanned between two counts of work.
const STEP: usize = 4 * 1024;

/// A body without its list, and the items of the list.
pub(super) struct Split<'a> {
    body: &'a [u8],
    rest: Cow<'a, [u8]>,
    list: Option<List>,
}

/// The position of a list.
struct List {
    /// The bytes between its brackets.
    inside: Range<usize>,
    items: Vec<Range<usize>>,
    /// Whether the body ends before the list does.
    is_open: bool,
}

impl<'a> Split<'a> {
    /// Finds the first list among the fields of an object.
    pub(super) async fn of(body: &'a [u8], turn: &mut TimeSlice) -> Result<Self, Problem> {
        let list = match body.len() {
            ..=WHOLE_BYTES => None,
            _ => Scan::default().list(body, turn).await?,
        };
        let rest = match &list {
            None => Cow::Borrowed(body),
            Some(List { inside, is_open, .. }) => {
                let after = if *is_open { b"]}" } else { &body[inside.end..] };
                let rest = [&body[..inside.start], after];
                if rest[0].len() + rest[1].len() > MAX_PARSED_BYTES {
                    return Err(body::too_long_to_parse());
                }
                Cow::Owned(rest.concat())
            }
        };
        Ok(Self { body, rest, list })
    }

    /// Parses the rest of the body, in which the list is empty.
    pub(super) fn rest<'b, T: serde::Deserialize<'b>>(&'b self) -> Result<T, Problem> {
        body::parse_at(&self.rest, |offset| match &self.list {
            Some(List { inside, .. }) if offset > inside.start => {
                Position::of(self.body, offset + inside.len())
            }
            _ => Position::of(self.body, offset),
        })
    }

    /// Returns the number of items of the list; `None` if the body was not split.
    pub(super) fn len(&self) -> Option<usize> {
        self.list.as_ref().map(|list| list.items.len())
    }

    /// Parses the items of the list.
    pub(super) async fn items<T: serde::Deserialize<'a>>(
        &self,
        turn: &mut TimeSlice,
    ) -> Result<Vec<T>, Problem> {
        let ranges = self.list.as_ref().map_or(&[][..], |list| &list.items);
        let mut items = Vec::with_capacity(ranges.len());
        for (index, range) in ranges.iter().enumerate() {
            if range.len() > MAX_PARSED_BYTES {
                let detail =
                    format!("it has {} bytes; send at most {MAX_PARSED_BYTES}", range.len());
                return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail).of_item(index));
            }
            turn.spend(range.len() * PARSE_BYTE).await;
            let place = |offset| Position::of(self.body, range.start + offset);
            let item = body::parse_at::<T>(&self.body[range.clone()], place);
            let item = item.map_err(|problem| problem.of_item(index))?;
            items.push(item);
        }
        if self.list.as_ref().is_some_and(|list| list.is_open) {
            return Err(Problem::bad("the JSON ends too early: a closing `]` is missing"));
        }
        Ok(items)
    }
}

/// Finds the brackets, commas and strings of a body. The parser checks everything else.
#[derive(Default)]
struct Scan {
    at: usize,
    depth: usize,
    is_in_string: bool,
    /// Where the list begins, once it was found.
    start: Option<usize>,
    item: usize,
    items: Vec<Range<usize>>,
}

impl Scan {
    /// Finds the first list. A list without an end ends with the body.
    async fn list(mut self, body: &[u8], turn: &mut TimeSlice) -> Result<Option<List>, Problem> {
        while self.at < body.len() {
            turn.spend(STEP * SCAN_BYTE).await;
            let until = body.len().min(self.at + STEP);
            while self.at < until {
                if let Some(end) = self.step(body) {
                    return self.found(body, end);
                }
            }
            if self.items.len() > MAX_ITEMS {
                return Err(Problem::bad(body::TOO_MANY_ITEMS));
            }
        }
        self.found(body, body.len())
    }

    /// Continues to the next bracket, comma or end of a string. Returns the end of the list, if it is there.
    fn step(&mut self, body: &[u8]) -> Option<usize> {
        let at = self.at;
        self.at += 1;
        if self.is_in_string {
            let until = body.len().min(at + STEP);
            match memchr::memchr2(b'"', b'\\', &body[at..until]) {
                None => self.at = until,
                Some(found) if body[at + found] == b'\\' => self.at = at + found + 2,
                Some(found) => {
                    self.at = at + found + 1;
                    self.is_in_string = false;
                }
            }
            return None;
        }
        // The fields of the object are at depth 1, the items of their lists at depth 2.
        let is_among_items = self.start.is_some() && self.depth == 2;
        match body[at] {
            b'"' => self.is_in_string = true,
            b'[' if self.start.is_none() && self.depth == 1 => {
                self.depth = 2;
                (self.start, self.item) = (Some(at + 1), at + 1);
            }
            b'[' | b'{' => self.depth += 1,
            b']' | b'}' if is_among_items => return Some(at),
            b']' | b'}' => self.depth = self.depth.saturating_sub(1),
            b',' if is_among_items => {
                self.items.push(self.item..at);
                self.item = at + 1;
            }
            _ => {}
        }
        None
    }

    fn found(mut self, body: &[u8], end: usize) -> Result<Option<List>, Problem> {
        let Some(start) = self.start else { return Ok(None) };
        let last = self.item..end;
        if !self.items.is_empty() || !body[last.clone()].trim_ascii().is_empty() {
            self.items.push(last);
        }
        if self.items.len() > MAX_ITEMS {
            return Err(Problem::bad(body::TOO_MANY_ITEMS));
        }
        let is_open = end == body.len();
        Ok(Some(List { inside: start..end, items: self.items, is_open }))
    }
}
