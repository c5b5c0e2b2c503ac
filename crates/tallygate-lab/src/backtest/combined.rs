//! Parses lines of the combined log format of nginx and Apache, and of the common log format, which is a prefix of it:
//! `192.0.2.7 - alice [10/Oct/2000:13:55:36 -0700] "GET /a HTTP/1.1" 200 2326 "http://referer" "agent"`.
//!
//! Text after the user agent is ignored. A `-` is an empty field.

use tallygate_core::Tick;

use super::filter::{FilterField, LineFilter};
use super::format::{LogOptions, ParsedLine, Unreadable};
use super::key::{KeyFrom, put_address};
use super::timestamp;

/// A parser for combined logs that takes the key from one field and tests others.
#[derive(Debug)]
pub(super) struct Combined {
    key: LogField,
    filters: Vec<(LogField, LineFilter)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LogField {
    Address,
    Host,
    Ident,
    User,
    Request,
    Method,
    Path,
    Protocol,
    Status,
    Bytes,
    Referer,
    Agent,
}

/// The fields by name, with their synonyms.
const FIELDS: [(&str, LogField); 16] = [
    ("host", LogField::Host),
    ("remote_addr", LogField::Host),
    ("ident", LogField::Ident),
    ("remote_user", LogField::User),
    ("user", LogField::User),
    ("request", LogField::Request),
    ("method", LogField::Method),
    ("path", LogField::Path),
    ("protocol", LogField::Protocol),
    ("status", LogField::Status),
    ("bytes", LogField::Bytes),
    ("referer", LogField::Referer),
    ("http_referer", LogField::Referer),
    ("user_agent", LogField::Agent),
    ("user-agent", LogField::Agent),
    ("http_user_agent", LogField::Agent),
];

/// The fields that every line must have.
struct RequiredFields<'a> {
    host: &'a [u8],
    ident: &'a [u8],
    user: &'a [u8],
    now: Tick,
    request: &'a [u8],
    status: &'a [u8],
    /// The rest of the line, from the response size on.
    rest: &'a [u8],
}

impl Combined {
    pub(super) fn new(options: &LogOptions) -> Result<Self, String> {
        if let Some(field) = &options.time {
            return Err(format!(
                "the time of a combined log is always in brackets; the time field {field:?} applies only to JSON and CSV; \
                 leave it out"
            ));
        }
        let key = match &options.key {
            KeyFrom::Address => LogField::Address,
            KeyFrom::Header(name) => LogField::of_header(name)?,
            KeyFrom::Field(name) => LogField::of_name(name)?,
        };
        let filters = options.filters.iter().map(|filter| {
            let field = match &filter.field {
                FilterField::Header(name) => LogField::of_header(name)?,
                FilterField::Named(name) => LogField::of_name(name)?,
            };
            Ok((field, filter.clone()))
        });
        Ok(Self { key, filters: filters.collect::<Result<_, String>>()? })
    }

    /// Returns whether a line has this format.
    pub(super) fn matches(line: &[u8]) -> bool {
        RequiredFields::of(line).is_ok()
    }

    #[inline]
    pub(super) fn read(&self, line: &[u8], key: &mut Vec<u8>) -> Result<ParsedLine, Unreadable> {
        let start = RequiredFields::of(line)?;
        if !self.filters.iter().all(|(field, filter)| filter.passes(Some(start.field(*field)))) {
            return Ok(ParsedLine::Filtered);
        }
        if self.key == LogField::Address {
            return if put_address(start.host, key) {
                Ok(ParsedLine::Request(start.now))
            } else {
                Err(Unreadable("the line does not start with an IP address"))
            };
        }
        let name = start.field(self.key);
        if matches!(name, b"" | b"-") {
            return Ok(ParsedLine::NoKey);
        }
        key.extend_from_slice(name);
        Ok(ParsedLine::Request(start.now))
    }
}

impl LogField {
    fn of_header(name: &str) -> Result<Self, String> {
        match name {
            "user-agent" => Ok(Self::Agent),
            "referer" => Ok(Self::Referer),
            _ => Err(format!(
                "combined logs have no header {name:?}; use header:user-agent or header:referer"
            )),
        }
    }

    fn of_name(name: &str) -> Result<Self, String> {
        let found = FIELDS.iter().find(|(field, _)| *field == name);
        found.map(|(_, field)| *field).ok_or_else(|| {
            let known = FIELDS.map(|(field, _)| field).join(", ");
            format!("combined logs have no field {name:?}; use one of {known}")
        })
    }
}

impl<'a> RequiredFields<'a> {
    #[inline]
    fn of(line: &'a [u8]) -> Result<Self, Unreadable> {
        let (host, rest) = until_space(line);
        let (ident, rest) = until_space(rest);
        let (user, now, rest) = until_time(rest).ok_or(Unreadable("no timestamp in brackets"))?;
        let (request, rest) = rest
            .strip_prefix(b" \"")
            .and_then(until_quote)
            .ok_or(Unreadable("no quoted request after the timestamp"))?;
        let (status, rest) = match rest {
            [b' ', rest @ ..] => until_space(rest),
            _ => (&rest[..0], rest),
        };
        if status.len() != 3 || !status.iter().all(u8::is_ascii_digit) {
            return Err(Unreadable("no three-digit status after the request"));
        }
        Ok(Self { host, ident, user, now, request, status, rest })
    }

    /// Returns the text of a field; `-` or nothing if the line does not have it.
    #[inline]
    fn field(&self, field: LogField) -> &'a [u8] {
        match field {
            LogField::Address | LogField::Host => self.host,
            LogField::Ident => self.ident,
            LogField::User => self.user,
            LogField::Request => self.request,
            LogField::Status => self.status,
            LogField::Method | LogField::Path | LogField::Protocol => {
                match split_request(self.request) {
                    Some((method, _, _)) if field == LogField::Method => method,
                    Some((_, path, _)) if field == LogField::Path => path,
                    Some((_, _, protocol)) => protocol,
                    None => b"-",
                }
            }
            LogField::Bytes => until_space(self.rest).0,
            LogField::Referer => quoted_at(self.rest, 0),
            LogField::Agent => quoted_at(self.rest, 1),
        }
    }
}

/// Returns the text before the first space and the text after it.
#[inline]
fn until_space(text: &[u8]) -> (&[u8], &[u8]) {
    match memchr::memchr(b' ', text) {
        Some(space) => (&text[..space], &text[space + 1..]),
        None => (text, &text[text.len()..]),
    }
}

/// Returns the text before ` [time]`, the time, and the text after it. A user name may have spaces and brackets.
#[inline]
fn until_time(text: &[u8]) -> Option<(&[u8], Tick, &[u8])> {
    for open in memchr::memchr_iter(b'[', text) {
        let Some((time, rest)) = text[open + 1..].split_first_chunk() else { break };
        if let [b']', rest @ ..] = rest
            && let Some(now) = timestamp::common_log(time)
        {
            return Some((text[..open].strip_suffix(b" ").unwrap_or_default(), now, rest));
        }
    }
    None
}

/// Returns the text before the closing quote and the text after it. A quote after a backslash is part of the text.
#[inline]
fn until_quote(text: &[u8]) -> Option<(&[u8], &[u8])> {
    for quote in memchr::memchr_iter(b'"', text) {
        let backslashes = text[..quote].iter().rev().take_while(|byte| **byte == b'\\').count();
        if backslashes % 2 == 0 {
            return Some((&text[..quote], &text[quote + 1..]));
        }
    }
    None
}

/// Returns the quoted text with this index, or an empty text if there is none.
fn quoted_at(mut text: &[u8], index: usize) -> &[u8] {
    for before in 0..=index {
        let quoted = memchr::memchr(b'"', text).and_then(|open| until_quote(&text[open + 1..]));
        match quoted {
            Some((quoted, _)) if before == index => return quoted,
            Some((_, rest)) => text = rest,
            None => break,
        }
    }
    b""
}

/// Returns the method, the path without its query, and the protocol of a request that has all three.
fn split_request(request: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let first = memchr::memchr(b' ', request)?;
    let last = memchr::memrchr(b' ', request)?;
    let target = request.get(first + 1..last)?;
    let path = memchr::memchr(b'?', target).map_or(target, |query| &target[..query]);
    Some((&request[..first], path, &request[last + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backtest::format::options;

    const LINE: &str = r#"192.0.2.7 - a [b] c [10/Oct/2000:13:55:36 -0700] "GET /a?b=c HTTP/1.1" 200 2326 "http://x/" "an \"agent\"" 0.01"#;

    #[track_caller]
    fn finds(key: &str, line: &str, expected: &str) {
        let combined = Combined::new(&options(key, None)).expect("the field exists");
        let mut name = Vec::new();
        let shown = match combined.read(line.as_bytes(), &mut name) {
            Ok(ParsedLine::Request(_)) => String::from_utf8(name).expect("the key is UTF-8"),
            Ok(_) => "no key".to_owned(),
            Err(Unreadable(reason)) => reason.to_owned(),
        };
        assert_eq!(shown, expected, "{key} in {line}");
    }

    #[test]
    fn every_field_can_be_the_key() {
        finds("ip", LINE, "192.0.2.7");
        finds("field:remote_user", LINE, "a [b] c");
        finds("field:method", LINE, "GET");
        finds("field:path", LINE, "/a");
        finds("field:protocol", LINE, "HTTP/1.1");
        finds("field:request", LINE, "GET /a?b=c HTTP/1.1");
        finds("field:status", LINE, "200");
        finds("field:bytes", LINE, "2326");
        finds("header:referer", LINE, "http://x/");
        finds("header:user-agent", LINE, r#"an \"agent\""#);
        finds("field:ident", LINE, "no key");
    }

    #[test]
    fn a_common_log_line_has_no_user_agent_and_a_malformed_request_no_path() {
        let common = r#"host.example - - [10/Oct/2000:13:55:36 -0700] "\x16\x03" 400 0"#;
        finds("field:host", common, "host.example");
        finds("ip", common, "the line does not start with an IP address");
        finds("header:user-agent", common, "no key");
        finds("field:path", common, "no key");
        finds("field:status", common, "400");
        finds("field:status", &common[..common.len() - 2], "400");
    }

    #[test]
    fn a_malformed_line_is_reported_with_its_reason() {
        for (line, reason) in [
            ("", "no timestamp in brackets"),
            ("192.0.2.7", "no timestamp in brackets"),
            ("192.0.2.7 - - [10/Oct/2000:13:55:36 -0700", "no timestamp in brackets"),
            ("192.0.2.7 - - [10/Oct/2000:13:55:99 -0700] \"\" 200 0", "no timestamp in brackets"),
            ("192.0.2.7 - - [10/Oct/2000:13:55:36 -0700]", "no quoted request after the timestamp"),
            (
                "192.0.2.7 - - [10/Oct/2000:13:55:36 -0700] \"GET \\\" 200",
                "no quoted request after the timestamp",
            ),
            (
                "192.0.2.7 - - [10/Oct/2000:13:55:36 -0700] \"GET\" 20",
                "no three-digit status after the request",
            ),
            (
                "192.0.2.7 - - [10/Oct/2000:13:55:36 -0700] \"GET\" 2x0 1",
                "no three-digit status after the request",
            ),
            (
                "192.0.2.7 - - [10/Oct/2000:13:55:36 -0700] \"GET\"",
                "no three-digit status after the request",
            ),
        ] {
            finds("ip", line, reason);
        }
    }

    #[test]
    fn a_line_takes_part_if_it_passes_all_filters() {
        let takes_part = |filters: &[&str]| {
            let filters = filters.iter().map(|filter| filter.parse().expect("the filter is valid"));
            let options = LogOptions { filters: filters.collect(), ..options("ip", None) };
            let combined = Combined::new(&options).expect("the fields exist");
            match combined.read(LINE.as_bytes(), &mut Vec::new()) {
                Ok(ParsedLine::Request(_)) => true,
                Ok(ParsedLine::Filtered) => false,
                other => unreachable!("{other:?}"),
            }
        };
        assert!(takes_part(&["path=/a", "method=GET", "status=2*"]));
        assert!(takes_part(&["user_agent!=curl", "header:referer=http://x/"]));
        assert!(!takes_part(&["path=/a", "method=POST"]));
    }

    #[test]
    fn an_unknown_key_is_an_error_that_lists_the_known_ones() {
        let error =
            |key: &str| Combined::new(&options(key, None)).expect_err("there is no such field");
        assert!(error("header:x-api-key").contains("use header:user-agent"));
        assert!(error("field:tenant").contains("use one of host, remote_addr"));
    }
}
