//! Lines of nginx's and Apache's combined logs, and of common logs, which have the same start:
//! `192.0.2.7 - alice [10/Oct/2000:13:55:36 -0700] "GET /a HTTP/1.1" 200 2326 "http://referer" "agent"`.
//!
//! What stands behind the agent is nobody's. A `-` is nothing.

use tallygate_core::Tick;

use super::format::{Told, Unreadable};
use super::key::{KeyFrom, put_address};
use super::moment;

/// How lines are read whose client is one of their parts.
#[derive(Debug)]
pub(super) struct Combined {
    key: Part,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
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

/// The parts by name; the first of each is the one that is told.
const FIELDS: [(&str, Part); 16] = [
    ("host", Part::Host),
    ("remote_addr", Part::Host),
    ("ident", Part::Ident),
    ("remote_user", Part::User),
    ("user", Part::User),
    ("request", Part::Request),
    ("method", Part::Method),
    ("path", Part::Path),
    ("protocol", Part::Protocol),
    ("status", Part::Status),
    ("bytes", Part::Bytes),
    ("referer", Part::Referer),
    ("http_referer", Part::Referer),
    ("user_agent", Part::Agent),
    ("user-agent", Part::Agent),
    ("http_user_agent", Part::Agent),
];

/// What every line must have.
struct Start<'a> {
    host: &'a [u8],
    ident: &'a [u8],
    user: &'a [u8],
    now: Tick,
    request: &'a [u8],
    status: &'a [u8],
    /// From the bytes on.
    rest: &'a [u8],
}

impl Combined {
    pub(super) fn new(key: &KeyFrom) -> Result<Self, String> {
        let key = match key {
            KeyFrom::Address => Part::Address,
            KeyFrom::Header(name) => match name.as_str() {
                "user-agent" => Part::Agent,
                "referer" => Part::Referer,
                _ => {
                    return Err(format!(
                        "combined logs have no header {name:?}; there is header:user-agent and \
                         header:referer"
                    ));
                }
            },
            KeyFrom::Field(name) => {
                let found = FIELDS.iter().find(|(field, _)| field == name);
                found.map(|(_, part)| *part).ok_or_else(|| {
                    let known = FIELDS.map(|(field, _)| field).join(", ");
                    format!("combined logs have no field {name:?}; there is {known}")
                })?
            }
        };
        Ok(Self { key })
    }

    /// Whether it is such a line.
    pub(super) fn is_one(line: &[u8]) -> bool {
        Start::of(line).is_ok()
    }

    #[inline]
    pub(super) fn read(&self, line: &[u8], key: &mut Vec<u8>) -> Result<Told, Unreadable> {
        let start = Start::of(line)?;
        let now = start.now;
        let name = match self.key {
            Part::Address => {
                return if put_address(start.host, key) {
                    Ok(Told::Request(now))
                } else {
                    Err(Unreadable("no address at its start"))
                };
            }
            Part::Host => start.host,
            Part::Ident => start.ident,
            Part::User => start.user,
            Part::Request => start.request,
            Part::Status => start.status,
            Part::Method | Part::Path | Part::Protocol => match words(start.request) {
                Some((method, _, _)) if self.key == Part::Method => method,
                Some((_, path, _)) if self.key == Part::Path => path,
                Some((_, _, protocol)) => protocol,
                None => b"-",
            },
            Part::Bytes => until_space(start.rest).0,
            Part::Referer => quoted_at(start.rest, 0),
            Part::Agent => quoted_at(start.rest, 1),
        };
        if matches!(name, b"" | b"-") {
            return Ok(Told::Nobody);
        }
        key.extend_from_slice(name);
        Ok(Told::Request(now))
    }
}

impl<'a> Start<'a> {
    #[inline]
    fn of(line: &'a [u8]) -> Result<Self, Unreadable> {
        let (host, rest) = until_space(line);
        let (ident, rest) = until_space(rest);
        let (user, now, rest) = until_time(rest).ok_or(Unreadable("no time in brackets"))?;
        let (request, rest) = rest
            .strip_prefix(b" \"")
            .and_then(until_quote)
            .ok_or(Unreadable("no request in quotes behind the time"))?;
        let (status, rest) = match rest {
            [b' ', rest @ ..] => until_space(rest),
            _ => (&rest[..0], rest),
        };
        if status.len() != 3 || !status.iter().all(u8::is_ascii_digit) {
            return Err(Unreadable("no status of three digits behind the request"));
        }
        Ok(Self { host, ident, user, now, request, status, rest })
    }
}

/// What stands before the first space, and behind it.
#[inline]
fn until_space(text: &[u8]) -> (&[u8], &[u8]) {
    match memchr::memchr(b' ', text) {
        Some(space) => (&text[..space], &text[space + 1..]),
        None => (text, &text[text.len()..]),
    }
}

/// What stands before ` [time]`, the time, and what stands behind it. Users may have spaces and brackets.
#[inline]
fn until_time(text: &[u8]) -> Option<(&[u8], Tick, &[u8])> {
    for open in memchr::memchr_iter(b'[', text) {
        let Some((time, rest)) = text[open + 1..].split_first_chunk() else { break };
        if let [b']', rest @ ..] = rest
            && let Some(now) = moment::common_log(time)
        {
            return Some((text[..open].strip_suffix(b" ").unwrap_or_default(), now, rest));
        }
    }
    None
}

/// What stands before the closing quote, and behind it. A quote behind a backslash is part of the text.
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

/// The quoted text of this index; nothing if there is none.
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

/// Method, path without its query, and protocol of a request that has all three.
fn words(request: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let first = memchr::memchr(b' ', request)?;
    let last = memchr::memrchr(b' ', request)?;
    let target = request.get(first + 1..last)?;
    let path = memchr::memchr(b'?', target).map_or(target, |query| &target[..query]);
    Some((&request[..first], path, &request[last + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"192.0.2.7 - a [b] c [10/Oct/2000:13:55:36 -0700] "GET /a?b=c HTTP/1.1" 200 2326 "http://x/" "an \"agent\"" 0.01"#;

    #[track_caller]
    fn finds(key: &str, line: &str, expected: &str) {
        let combined = Combined::new(&key.parse().expect("a key")).expect("a part");
        let mut name = Vec::new();
        let told = combined.read(line.as_bytes(), &mut name);
        let shown = match told {
            Ok(Told::Request(_)) => String::from_utf8(name).expect("text"),
            Ok(Told::Nobody | Told::Header) => "nobody".to_owned(),
            Err(Unreadable(reason)) => reason.to_owned(),
        };
        assert_eq!(shown, expected, "{key} in {line}");
    }

    #[test]
    fn every_part_can_be_the_client() {
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
        finds("field:ident", LINE, "nobody");
    }

    #[test]
    fn a_common_line_has_no_agent_and_a_strange_request_no_path() {
        let common = r#"host.example - - [10/Oct/2000:13:55:36 -0700] "\x16\x03" 400 0"#;
        finds("field:host", common, "host.example");
        finds("ip", common, "no address at its start");
        finds("header:user-agent", common, "nobody");
        finds("field:path", common, "nobody");
        finds("field:status", common, "400");
        finds("field:status", &common[..common.len() - 2], "400");
    }

    #[test]
    fn what_cannot_be_read_says_why() {
        for (line, reason) in [
            ("", "no time in brackets"),
            ("192.0.2.7", "no time in brackets"),
            ("192.0.2.7 - - [10/Oct/2000:13:55:36 -0700", "no time in brackets"),
            ("192.0.2.7 - - [10/Oct/2000:13:55:99 -0700] \"\" 200 0", "no time in brackets"),
            ("192.0.2.7 - - [10/Oct/2000:13:55:36 -0700]", "no request in quotes behind the time"),
            (
                "192.0.2.7 - - [10/Oct/2000:13:55:36 -0700] \"GET \\\" 200",
                "no request in quotes behind the time",
            ),
            (
                "192.0.2.7 - - [10/Oct/2000:13:55:36 -0700] \"GET\" 20",
                "no status of three digits behind the request",
            ),
            (
                "192.0.2.7 - - [10/Oct/2000:13:55:36 -0700] \"GET\" 2x0 1",
                "no status of three digits behind the request",
            ),
            (
                "192.0.2.7 - - [10/Oct/2000:13:55:36 -0700] \"GET\"",
                "no status of three digits behind the request",
            ),
        ] {
            finds("ip", line, reason);
        }
    }

    #[test]
    fn a_part_that_is_not_there_is_told_with_those_that_are() {
        let refused = |key: &str| Combined::new(&key.parse().expect("a key")).expect_err("no part");
        assert!(refused("header:x-api-key").contains("there is header:user-agent"));
        assert!(refused("field:tenant").contains("there is host, remote_addr"));
    }
}
