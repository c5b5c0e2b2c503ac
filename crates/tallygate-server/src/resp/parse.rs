//! Parses commands from bytes that arrive in pieces.
//!
//! A command is an array of bulk strings, or a line of words (an inline command). Arguments are slices of the input,
//! without a copy. Parsed bytes are not parsed again when more arrive, nothing is allocated for a length before its
//! bytes arrive, and nothing nests, so there is no recursion. Commands can be parsed [ahead](Parser::look_ahead), so
//! that the memory which they need is loaded before they run.
//!
//! A command above our limits is skipped and answered with an error. A command above the limits of Redis closes the
//! connection, since the start of the next command cannot be found.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;

use super::reply::Quoted;

/// Maximum number of arguments, including the name.
pub(super) const MAX_ARGUMENTS: usize = 64;
/// The longest argument, in bytes.
pub(super) const MAX_ARGUMENT: usize = 64 << 10;
/// The longest command, in bytes.
pub(super) const MAX_COMMAND: usize = 128 << 10;
/// The longest command in a line, in bytes.
const MAX_LINE: usize = 64 << 10;
/// The limits of Redis: the length of an argument, and the number of arguments.
const MAX_LENGTH: usize = 512 << 20;
const MAX_COUNT: usize = 1 << 20;
/// How many commands are parsed ahead.
const AHEAD: usize = 16;
/// No more commands are parsed ahead when they have this many arguments.
const AHEAD_ARGUMENTS: usize = 128;
/// Maximum number of digits of a length, with a reserve.
const MAX_DIGITS: usize = 12;

/// Parses commands.
#[derive(Debug, Default)]
pub(super) struct Parser {
    /// How much of the input has been parsed, from the start of the command.
    at: usize,
    /// How many arguments are missing.
    missing: usize,
    /// The length of the next argument, if it is known already.
    coming: Option<usize>,
    /// The positions of the arguments, of commands that were parsed ahead and of the current one.
    spans: Vec<Span>,
    /// The index of the first argument of the current command.
    first: usize,
    /// Commands that were parsed ahead.
    ahead: VecDeque<AheadCommand>,
    /// What follows them, if it was parsed as well.
    after: Option<(usize, Progress)>,
    /// Why the command, which is being skipped, is rejected.
    rejected: Option<ProtocolError>,
    /// How many bytes to skip.
    skip: usize,
    /// The words of a line, without quotes.
    words: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    start: usize,
    end: usize,
}

/// A command that was parsed ahead.
#[derive(Debug)]
struct AheadCommand {
    /// Its length in bytes.
    used: usize,
    /// The indexes of its arguments.
    spans: Range<usize>,
}

/// How far an array was parsed.
#[derive(Clone, Copy, Debug)]
enum Progress {
    Complete,
    Nothing,
    Incomplete,
    Wrong(ProtocolError),
}

/// The arguments of a command; the first is its name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arguments<'a> {
    bytes: &'a [u8],
    spans: &'a [Span],
}

/// What the input starts with.
#[derive(Debug)]
pub(super) enum Parsed<'a> {
    Command(Arguments<'a>),
    /// Nothing, such as an empty line. More may follow.
    Nothing,
    /// A part of a command.
    Incomplete,
    /// Not a command. If the error does not close the connection, more may follow.
    Wrong(ProtocolError),
}

/// Why bytes are not a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub(super) enum ProtocolError {
    TooManyArguments { count: usize },
    ArgumentTooLong { bytes: usize },
    CommandTooLong,
    UnbalancedQuotes,
    LineTooLong,
    Count,
    Length,
    NotBulk { found: u8 },
    NoLineEnd,
    Http,
    Binary,
}

impl<'a> Arguments<'a> {
    pub(super) const fn len(self) -> usize {
        self.spans.len()
    }

    pub(super) fn at(self, index: usize) -> Option<&'a [u8]> {
        let Span { start, end } = *self.spans.get(index)?;
        self.bytes.get(start..end)
    }

    /// Returns the name of the command.
    pub(super) fn name(self) -> &'a [u8] {
        self.at(0).unwrap_or_default()
    }

    /// Returns the arguments from `first` on.
    pub(super) fn from(self, first: usize) -> impl Iterator<Item = &'a [u8]> {
        (first..self.len()).filter_map(move |index| self.at(index))
    }
}

/// Commands that are stored after their input is gone.
#[derive(Debug, Default)]
pub(super) struct StoredCommands {
    bytes: Vec<u8>,
    spans: Vec<Span>,
    /// The end of each command in `spans`.
    ends: Vec<usize>,
}

impl StoredCommands {
    pub(super) fn push(&mut self, words: Arguments<'_>) {
        for word in words.from(0) {
            let start = self.bytes.len();
            self.bytes.extend_from_slice(word);
            self.spans.push(Span { start, end: self.bytes.len() });
        }
        self.ends.push(self.spans.len());
    }

    pub(super) const fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the commands in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Arguments<'_>> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let spans = starts.zip(&self.ends).filter_map(|(start, end)| self.spans.get(start..*end));
        spans.map(|spans| Arguments { bytes: &self.bytes, spans })
    }

    /// Returns the most memory that one more command takes: the vectors may double.
    pub(super) fn memory_of(words: Arguments<'_>) -> usize {
        let bytes: usize = words.from(0).map(<[u8]>::len).sum();
        2 * (bytes + words.len() * size_of::<Span>() + size_of::<usize>())
    }
}

impl Parser {
    /// Parses the start of the input. Returns how many bytes are done, and what they are. The next call gets the rest
    /// of the input, with more bytes after it.
    pub(super) fn next<'a>(&'a mut self, input: &'a [u8]) -> (usize, Parsed<'a>) {
        if let Some(AheadCommand { used, spans }) = self.ahead.pop_front() {
            return (used, Parsed::Command(Arguments { bytes: input, spans: &self.spans[spans] }));
        }
        let (used, progress) = match self.after.take() {
            Some(after) => after,
            None if self.missing == 0 && !input.starts_with(b"*") => return self.line(input),
            None => self.array(input),
        };
        let parsed = match progress {
            Progress::Complete => {
                Parsed::Command(Arguments { bytes: input, spans: &self.spans[self.first..] })
            }
            Progress::Nothing => Parsed::Nothing,
            Progress::Incomplete => Parsed::Incomplete,
            Progress::Wrong(error) => Parsed::Wrong(error),
        };
        (used, parsed)
    }

    /// Parses the next commands, and calls `visit` with each. [`next`](Self::next) then returns them without parsing
    /// them again. Inline commands are not parsed ahead.
    pub(super) fn look_ahead(&mut self, input: &[u8], mut visit: impl FnMut(Arguments<'_>)) {
        if !self.ahead.is_empty() || self.after.is_some() {
            return;
        }
        if self.missing == 0 {
            self.spans.clear();
        }
        let mut seen = 0;
        while self.ahead.len() < AHEAD && self.spans.len() < AHEAD_ARGUMENTS {
            let input = &input[seen..];
            if self.missing == 0 && !input.starts_with(b"*") {
                return;
            }
            let (used, progress) = self.array(input);
            let Progress::Complete = progress else {
                self.after = Some((used, progress));
                return;
            };
            let spans = self.first..self.spans.len();
            visit(Arguments { bytes: input, spans: &self.spans[spans.clone()] });
            self.ahead.push_back(AheadCommand { used, spans });
            seen += used;
        }
    }

    /// Parses an array, or continues with one. Returns how many bytes are done.
    fn array(&mut self, input: &[u8]) -> (usize, Progress) {
        if self.missing == 0 {
            let (count, used) = match length(&input[1..], MAX_COUNT) {
                Ok(Some(length)) => length,
                Ok(None) => return (0, Progress::Incomplete),
                Err(InvalidLength) => return (0, Progress::Wrong(ProtocolError::Count)),
            };
            self.at = 1 + used;
            if count == 0 {
                return (std::mem::take(&mut self.at), Progress::Nothing);
            }
            self.missing = count;
            if self.ahead.is_empty() {
                self.spans.clear();
            }
            self.first = self.spans.len();
            if count > MAX_ARGUMENTS {
                self.rejected = Some(ProtocolError::TooManyArguments { count });
            }
        }
        match self.arguments(input) {
            Err(error) => (0, Progress::Wrong(error)),
            Ok(true) => {
                let used = std::mem::take(&mut self.at);
                match self.rejected.take() {
                    Some(rejected) => (used, Progress::Wrong(rejected)),
                    None => (used, Progress::Complete),
                }
            }
            // Do not keep a command that is rejected.
            Ok(false) if self.rejected.is_some() => {
                (std::mem::take(&mut self.at), Progress::Incomplete)
            }
            Ok(false) => (0, Progress::Incomplete),
        }
    }

    /// Returns whether a part of a command has been parsed.
    pub(super) const fn is_within_command(&self) -> bool {
        self.at > 0 || self.missing > 0
    }

    /// Continues with the arguments of an array. Returns whether they are complete.
    fn arguments(&mut self, input: &[u8]) -> Result<bool, ProtocolError> {
        while self.missing > 0 {
            if self.skip > 0 {
                let here = self.skip.min(input.len() - self.at);
                self.at += here;
                self.skip -= here;
                if self.skip > 0 {
                    return Ok(false);
                }
                self.missing -= 1;
                continue;
            }
            let bytes = match self.coming {
                Some(bytes) => bytes,
                None => {
                    let Some((&kind, rest)) = input[self.at..].split_first() else {
                        return Ok(false);
                    };
                    if kind != b'$' {
                        return Err(ProtocolError::NotBulk { found: kind });
                    }
                    let parsed_items = length(rest, MAX_LENGTH);
                    let Some((bytes, used)) =
                        parsed_items.map_err(|InvalidLength| ProtocolError::Length)?
                    else {
                        return Ok(false);
                    };
                    self.at += 1 + used;
                    bytes
                }
            };
            if self.rejected.is_none() {
                if bytes > MAX_ARGUMENT {
                    self.rejected = Some(ProtocolError::ArgumentTooLong { bytes });
                } else if self.at + bytes > MAX_COMMAND {
                    self.rejected = Some(ProtocolError::CommandTooLong);
                }
            }
            if self.rejected.is_some() {
                self.skip = bytes + 2;
                continue;
            }
            let end = self.at + bytes;
            match input.get(end..end + 2) {
                None => {
                    self.coming = Some(bytes);
                    return Ok(false);
                }
                Some(b"\r\n") => {
                    self.coming = None;
                    self.spans.push(Span { start: self.at, end });
                    self.at = end + 2;
                    self.missing -= 1;
                }
                Some(_) => return Err(ProtocolError::NoLineEnd),
            }
        }
        Ok(true)
    }

    /// Parses an inline command.
    fn line<'a>(&'a mut self, input: &'a [u8]) -> (usize, Parsed<'a>) {
        if input.is_empty() {
            return (0, Parsed::Incomplete);
        }
        let end = memchr::memchr(b'\n', &input[self.at..]).map(|end| self.at + end);
        if end.unwrap_or(input.len()) > MAX_LINE {
            return (0, Parsed::Wrong(ProtocolError::LineTooLong));
        }
        let Some(end) = end else {
            self.at = input.len();
            return (0, Parsed::Incomplete);
        };
        self.at = 0;
        let line = input[..end].strip_suffix(b"\r").unwrap_or(&input[..end]);
        // Browsers can be made to send commands within a TLS handshake or a STUN message, which also contain such bytes.
        if line.iter().any(|byte| byte.is_ascii_control() && *byte != b'\t') {
            return (end + 1, Parsed::Wrong(ProtocolError::Binary));
        }
        let parsed = match self.split(line) {
            Err(error) => Parsed::Wrong(error),
            Ok(0) => Parsed::Nothing,
            Ok(count) => {
                let words = Arguments { bytes: &self.words, spans: &self.spans };
                if is_http(words) {
                    Parsed::Wrong(ProtocolError::Http)
                } else if count > MAX_ARGUMENTS {
                    Parsed::Wrong(ProtocolError::TooManyArguments { count })
                } else {
                    Parsed::Command(words)
                }
            }
        };
        (end + 1, parsed)
    }

    /// Splits a line into words, separated by spaces, with escapes in double quotes and without in single quotes.
    /// Returns their number. Of the words beyond the limit, only the last is kept.
    fn split(&mut self, line: &[u8]) -> Result<usize, ProtocolError> {
        self.words.clear();
        self.spans.clear();
        let mut count = 0;
        let mut rest = line.trim_ascii_start();
        while !rest.is_empty() {
            if self.spans.len() > MAX_ARGUMENTS
                && let Some(beyond) = self.spans.pop()
            {
                self.words.truncate(beyond.start);
            }
            count += 1;
            let start = self.words.len();
            rest = match rest {
                [quote @ (b'"' | b'\''), inside @ ..] => {
                    let rest = unquote(*quote, inside, &mut self.words)?;
                    if rest.first().is_some_and(|next| !next.is_ascii_whitespace()) {
                        return Err(ProtocolError::UnbalancedQuotes);
                    }
                    rest
                }
                _ => {
                    let end = rest.iter().position(u8::is_ascii_whitespace).unwrap_or(rest.len());
                    self.words.extend_from_slice(&rest[..end]);
                    &rest[end..]
                }
            };
            self.spans.push(Span { start, end: self.words.len() });
            rest = rest.trim_ascii_start();
        }
        Ok(count)
    }

    /// Returns memory that only a long line needed.
    pub(super) fn shrink(&mut self) {
        self.words.clear();
        self.words.shrink_to(KEPT_WORDS);
    }
}

/// The size of the buffer for words that is kept between commands.
const KEPT_WORDS: usize = 1024;

/// Reads a word up to its closing quote, and returns the rest.
fn unquote<'a>(
    quote: u8,
    mut inside: &'a [u8],
    word: &mut Vec<u8>,
) -> Result<&'a [u8], ProtocolError> {
    loop {
        inside = match inside {
            [] => return Err(ProtocolError::UnbalancedQuotes),
            [byte, rest @ ..] if *byte == quote => return Ok(rest),
            [b'\\', b'\'', rest @ ..] if quote == b'\'' => {
                word.push(b'\'');
                rest
            }
            [b'\\', b'x', high, low, rest @ ..]
                if quote == b'"' && high.is_ascii_hexdigit() && low.is_ascii_hexdigit() =>
            {
                word.push(hex(*high) << 4 | hex(*low));
                rest
            }
            [b'\\', escaped, rest @ ..] if quote == b'"' => {
                word.push(match escaped {
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    b'b' => 8,
                    b'a' => 7,
                    other => *other,
                });
                rest
            }
            [byte, rest @ ..] => {
                word.push(*byte);
                rest
            }
        }
    }
}

/// Returns the value of a valid hexadecimal digit.
const fn hex(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => (digit | 0x20) - b'a' + 10,
    }
}

/// Returns whether the words are an HTTP request, sent by mistake or by a malicious page.
fn is_http(words: Arguments<'_>) -> bool {
    let last = words.at(words.len() - 1).unwrap_or_default();
    last.get(..5).is_some_and(|start| start.eq_ignore_ascii_case(b"HTTP/"))
        || words.name().eq_ignore_ascii_case(b"POST")
        || words.name().eq_ignore_ascii_case(b"Host:")
}

/// An invalid length, or one above the limits of Redis.
struct InvalidLength;

/// Parses a length and its line end, if they are complete. Returns the length and the bytes used.
fn length(line: &[u8], most: usize) -> Result<Option<(usize, usize)>, InvalidLength> {
    let mut value = 0;
    for (digits, &byte) in line.iter().enumerate() {
        match byte {
            b'0'..=b'9' if digits < MAX_DIGITS => value = value * 10 + usize::from(byte - b'0'),
            b'\r' if digits > 0 => {
                return match line.get(digits + 1) {
                    None => Ok(None),
                    Some(b'\n') if value <= most => Ok(Some((value, digits + 2))),
                    Some(_) => Err(InvalidLength),
                };
            }
            _ => return Err(InvalidLength),
        }
    }
    Ok(None)
}

impl ProtocolError {
    /// Returns whether the error closes the connection, because the start of the next command is unknown or unsafe.
    pub(super) const fn closes(self) -> bool {
        match self {
            Self::TooManyArguments { .. }
            | Self::ArgumentTooLong { .. }
            | Self::CommandTooLong
            | Self::UnbalancedQuotes => false,
            Self::LineTooLong
            | Self::Count
            | Self::Length
            | Self::NotBulk { .. }
            | Self::NoLineEnd
            | Self::Http
            | Self::Binary => true,
        }
    }
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyArguments { count } => {
                write!(f, "the command has {count} arguments; use at most {MAX_ARGUMENTS}")
            }
            Self::ArgumentTooLong { bytes } => {
                write!(f, "an argument has {bytes} bytes; use at most {MAX_ARGUMENT}")
            }
            Self::CommandTooLong => {
                write!(f, "the command is too long; use at most {MAX_COMMAND} bytes")
            }
            Self::UnbalancedQuotes => {
                write!(
                    f,
                    "Protocol error: unbalanced quotes; close each quote and put a space after it"
                )
            }
            Self::LineTooLong => {
                write!(f, "Protocol error: too big inline request; use at most {MAX_LINE} bytes")
            }
            Self::Count => {
                write!(f, "Protocol error: invalid multibulk length; use 0 to {MAX_COUNT}")
            }
            Self::Length => write!(f, "Protocol error: invalid bulk length; use 0 to {MAX_LENGTH}"),
            Self::NotBulk { found } => {
                write!(f, "Protocol error: expected '$', got {}", Quoted(&[*found]))
            }
            Self::NoLineEnd => {
                write!(f, "Protocol error: an argument is longer than its announced length")
            }
            Self::Http => {
                write!(f, "this is the RESP port, but the request is HTTP; use the HTTP port")
            }
            Self::Binary => {
                write!(
                    f,
                    "Protocol error: control characters in an inline command; send an array of bulk strings"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[derive(Clone, Debug, PartialEq, Eq)]
    enum ParsedItem {
        Command(Vec<Vec<u8>>),
        Wrong(ProtocolError),
    }

    /// Parses input that arrives in these pieces. Returns the results, and the most bytes that were kept.
    fn parsed_items(
        pieces: impl IntoIterator<Item = impl AsRef<[u8]>>,
    ) -> (Vec<ParsedItem>, usize) {
        parse(pieces, |_, _| {})
    }

    /// Does the same after `prepare` has seen the parser and the input.
    fn parse(
        pieces: impl IntoIterator<Item = impl AsRef<[u8]>>,
        mut prepare: impl FnMut(&mut Parser, &[u8]),
    ) -> (Vec<ParsedItem>, usize) {
        let mut parser = Parser::default();
        let (mut kept, mut most, mut parsed_items) = (Vec::new(), 0, Vec::new());
        for piece in pieces {
            kept.extend_from_slice(piece.as_ref());
            loop {
                prepare(&mut parser, &kept);
                let (used, parsed) = parser.next(&kept);
                match parsed {
                    Parsed::Command(words) => {
                        parsed_items
                            .push(ParsedItem::Command(words.from(0).map(<[u8]>::to_vec).collect()));
                    }
                    Parsed::Nothing => {}
                    Parsed::Wrong(error) => {
                        parsed_items.push(ParsedItem::Wrong(error));
                        if error.closes() {
                            return (parsed_items, most);
                        }
                    }
                    Parsed::Incomplete => {
                        kept.drain(..used);
                        break;
                    }
                }
                kept.drain(..used);
            }
            most = most.max(kept.len());
        }
        (parsed_items, most)
    }

    fn whole(input: &[u8]) -> Vec<ParsedItem> {
        parsed_items([input]).0
    }

    fn command(words: &[&[u8]]) -> ParsedItem {
        ParsedItem::Command(words.iter().map(|word| word.to_vec()).collect())
    }

    fn array(words: &[impl AsRef<[u8]>]) -> Vec<u8> {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words.iter().map(AsRef::as_ref) {
            bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            bytes.extend_from_slice(word);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes
    }

    #[test]
    fn reads_arrays_and_lines() {
        let input =
            b"*2\r\n$4\r\nECHO\r\n$2\r\n\r\n\r\n*0\r\n\r\nPING\r\n  PING  a \n*1\r\n$0\r\n\r\n";
        let expected = [
            command(&[b"ECHO", b"\r\n"]),
            command(&[b"PING"]),
            command(&[b"PING", b"a"]),
            command(&[b""]),
        ];
        assert_eq!(whole(input), expected);
    }

    #[test]
    fn lines_have_quotes_as_in_redis() {
        let read = |line: &str| whole(format!("{line}\r\n").as_bytes());
        assert_eq!(read(r#"a "b c" '' "\x41\n\"\q""#), [command(&[b"a", b"b c", b"", b"A\n\"q"])]);
        assert_eq!(read(r"'it\'s' '\n'"), [command(&[b"it's", b"\\n"])]);
        for unbalanced in [r#"a "b"#, r#"a "b"c"#, "a 'b", r#"a "b\"#] {
            assert_eq!(read(unbalanced), [ParsedItem::Wrong(ProtocolError::UnbalancedQuotes)]);
        }
    }

    /// Fault E9.
    #[test]
    fn lengths_above_every_limit_are_rejected_at_once() {
        let count = ParsedItem::Wrong(ProtocolError::Count);
        for input in
            ["*-1\r", "*1048577\r\n", "*99999999999999999999", "*\r\n", "*1x", "* 1", "*+1"]
        {
            assert_eq!(whole(input.as_bytes()), std::slice::from_ref(&count), "{input:?}");
        }
        let length = ParsedItem::Wrong(ProtocolError::Length);
        let lengths = [
            "-1\r",
            "536870913\r\n",
            "18446744073709551617",
            "9223372036854775807",
            "\r\n",
            "1e3",
            "0x10",
            "1\n",
            "1\r\r",
        ];
        for input in lengths {
            let input = format!("*1\r\n${input}");
            assert_eq!(whole(input.as_bytes()), std::slice::from_ref(&length), "{input:?}");
        }
        assert_eq!(whole(b"*1\r\n$1\r\nab\r\n"), [ParsedItem::Wrong(ProtocolError::NoLineEnd)]);
    }

    /// Fault E9.
    #[test]
    fn nothing_is_allocated_ahead_of_bytes() {
        let mut parser = Parser::default();
        let input = b"*1048576\r\n$536870912\r\nabc";
        let (used, parsed) = parser.next(input);
        assert!(matches!((used, parsed), (25, Parsed::Incomplete)), "{used}");
        let held = parser.spans.capacity() * size_of::<Span>() + parser.words.capacity();
        assert!(held < 4096, "{held}");
    }

    /// Fault E10.
    #[test]
    fn arrays_do_not_nest() {
        let deep = b"*1\r\n".repeat(100_000);
        assert_eq!(whole(&deep), [ParsedItem::Wrong(ProtocolError::NotBulk { found: b'*' })]);
    }

    /// Fault D3.
    #[test]
    fn input_over_a_limit_is_skipped_and_never_kept() {
        let long = vec![b'x'; 10 << 20];
        let many = vec![b"x"; 100_000];
        let heavy = vec![vec![b'x'; MAX_ARGUMENT]; 3];
        let cases = [
            (
                array(&[&b"PING"[..], &long, b"a"]),
                ProtocolError::ArgumentTooLong { bytes: 10 << 20 },
            ),
            (array(&many), ProtocolError::TooManyArguments { count: 100_000 }),
            (array(&heavy), ProtocolError::CommandTooLong),
        ];
        for (mut input, error) in cases {
            input.extend_from_slice(b"PING\r\n");
            let (parsed_items, most) = parsed_items(input.chunks(4096));
            assert_eq!(parsed_items, [ParsedItem::Wrong(error), command(&[b"PING"])]);
            assert!(most <= MAX_COMMAND + 4096, "{error:?}: {most}");
        }
    }

    #[test]
    fn input_at_its_limit_is_read() {
        let longest = vec![b'x'; MAX_ARGUMENT];
        let parsed_items = whole(&array(&[&b"ECHO"[..], &longest]));
        assert_eq!(parsed_items, [command(&[b"ECHO", &longest])]);
        let most = [&b"x"[..]; MAX_ARGUMENTS];
        assert_eq!(whole(&array(&most)), [command(&most)]);
    }

    #[test]
    fn an_endless_line_is_rejected() {
        let (parsed_items, most) = parsed_items(vec![b'x'; 2 * MAX_LINE].chunks(4096));
        assert_eq!(parsed_items, [ParsedItem::Wrong(ProtocolError::LineTooLong)]);
        assert!(most <= MAX_LINE + 4096, "{most}");
    }

    /// Fault E13.
    #[test]
    fn http_is_recognized() {
        let http = [ParsedItem::Wrong(ProtocolError::Http)];
        assert_eq!(whole(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"), http);
        assert_eq!(whole(b"get / http/1.1\r\nHost: a\r\n\r\n"), http);
        assert_eq!(whole(b"PRI * HTTP/2.0\r\n"), http);
        assert_eq!(whole(b"post /v1/check\r\n"), http);
        assert_eq!(whole(b"HOST: a\r\n"), http);
        assert_eq!(whole(b"GET a\r\n"), [command(&[b"GET", b"a"])]);
    }

    /// Fault J12.
    #[test]
    fn binary_input_is_rejected() {
        let binary = [ParsedItem::Wrong(ProtocolError::Binary)];
        for byte in [0, 1, 0x16, 0x1b, 0x7f] {
            assert_eq!(whole(&[b'a', byte, b'\r', b'\n']), binary, "{byte}");
        }
        assert_eq!(whole(b"GET\ta\r\n"), [command(&[b"GET", b"a"])]);
        assert_eq!(whole(b"GET \xe9\r\n"), [command(&[&b"GET"[..], b"\xe9"])]);
    }

    /// Splits input into pieces of these sizes, repeatedly.
    fn pieces<'a>(input: &'a [u8], sizes: &[usize]) -> impl Iterator<Item = &'a [u8]> {
        let mut sizes = sizes.iter().cycle();
        let mut rest = input;
        std::iter::from_fn(move || {
            let size = (*sizes.next()?).min(rest.len());
            let (piece, behind) = rest.split_at(size);
            rest = behind;
            (size > 0).then_some(piece)
        })
    }

    #[test]
    fn commands_are_parsed_ahead_up_to_a_bound() {
        let input = array(&[&b"PING"[..], b"a"]).repeat(100);
        let (mut parser, mut visited, mut rest) = (Parser::default(), 0, &input[..]);
        for command in 0..100 {
            parser.look_ahead(rest, |_| visited += 1);
            assert_eq!(visited, ((command / AHEAD + 1) * AHEAD).min(100));
            let (used, Parsed::Command(words)) = parser.next(rest) else { panic!("{command}") };
            assert_eq!(words.at(1), Some(&b"a"[..]));
            rest = &rest[used..];
        }
        assert!(parser.spans.capacity() <= 2 * AHEAD_ARGUMENTS, "{}", parser.spans.capacity());
    }

    /// Commands in arrays and lines, rejected commands, empty input, and noise.
    fn input() -> impl Strategy<Value = Vec<u8>> {
        let word = vec(any::<u8>(), 0..12);
        let part = prop_oneof![
            8 => vec(word, 0..6).prop_map(|words| array(&words)),
            2 => "[a-z'\"\\\\ ]{0,12}\r?\n".prop_map(String::into_bytes),
            1 => Just(array(&[b"x"; MAX_ARGUMENTS + 1])),
            1 => Just(array(&[vec![b'x'; MAX_ARGUMENT + 1]])),
            1 => vec(any::<u8>(), 0..12),
            1 => "[*$][-+ 0-9]{0,3}\r\n".prop_map(String::into_bytes),
        ];
        vec(part, 0..8).prop_map(|parts| parts.concat())
    }

    proptest! {
        #![proptest_config(tallygate_testkit::cases(128))]

        /// Fault E11.
        #[test]
        fn pieces_of_any_size_give_the_same_commands(input in input(), sizes in vec(1..40_usize, 1..20)) {
            prop_assert_eq!(parsed_items(pieces(&input, &sizes)).0, whole(&input));
        }

        /// Commands that are parsed ahead are the same, and each array is visited once.
        #[test]
        fn looking_ahead_changes_no_command(input in input(), sizes in vec(1..400_usize, 1..20)) {
            let mut visited = Vec::new();
            let (ahead, _) = parse(pieces(&input, &sizes), |parser, input| {
                parser.look_ahead(input, |words| visited.push(words.from(0).map(<[u8]>::to_vec).collect::<Vec<_>>()));
                assert!(parser.ahead.len() <= AHEAD, "{}", parser.ahead.len());
                assert!(parser.spans.len() < 2 * AHEAD_ARGUMENTS, "{}", parser.spans.len());
            });
            prop_assert_eq!(&ahead, &whole(&input));
            // Visited commands are a part of all commands, in order; inline commands are not visited.
            let mut all = ahead.iter();
            for words in visited {
                prop_assert!(all.any(|item| *item == ParsedItem::Command(words.clone())), "{:?}", words);
            }
        }
    }
}
