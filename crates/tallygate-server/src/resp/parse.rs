//! Commands out of bytes that come in pieces.
//!
//! A command is an array of bulk strings, or a line of words as people type it. Its arguments are told as pieces of the
//! input, without a copy. What was looked at is not looked at again when more bytes come, nothing is allocated for a
//! length before its bytes are there, and nothing nests, so there is no recursion.
//!
//! What is over a limit of ours is read past and refused. What no limit allows leaves no way to find where the next
//! command begins, so it closes the connection.

use std::fmt;

use super::reply::Quoted;

/// The most arguments of a command, its name among them.
pub(super) const MAX_ARGUMENTS: usize = 64;
/// The longest argument, in bytes.
pub(super) const MAX_ARGUMENT: usize = 64 << 10;
/// The longest command, in bytes.
pub(super) const MAX_COMMAND: usize = 128 << 10;
/// The longest command in a line, in bytes.
const MAX_LINE: usize = 64 << 10;
/// Redis's own limits: the length of an argument, and the number of them.
const MAX_LENGTH: usize = 512 << 20;
const MAX_COUNT: usize = 1 << 20;
/// The digits of the greatest length, with some to spare.
const MAX_DIGITS: usize = 12;

/// Makes commands of bytes.
#[derive(Debug, Default)]
pub(super) struct Parser {
    /// How much of the input has been looked at, from the beginning of the command.
    at: usize,
    /// How many arguments are still to come.
    missing: usize,
    /// The length of the argument that comes next, if it is known already.
    coming: Option<usize>,
    /// Where the arguments are.
    spans: Vec<Span>,
    /// Why the command, which is read past, is refused.
    refused: Option<ProtocolError>,
    /// How many bytes to read past.
    skip: usize,
    /// The words of a line, without their quotes.
    words: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    start: usize,
    end: usize,
}

/// The arguments of a command; the first is its name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arguments<'a> {
    bytes: &'a [u8],
    spans: &'a [Span],
}

/// What the input begins with.
#[derive(Debug)]
pub(super) enum Parsed<'a> {
    Command(Arguments<'a>),
    /// Something without meaning, such as an empty line: there may be more behind it.
    Nothing,
    /// A part of a command.
    Incomplete,
    /// Something that is none; where it does not close the connection, there may be more behind it.
    Wrong(ProtocolError),
}

/// Why bytes are no command.
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
}

impl<'a> Arguments<'a> {
    pub(super) const fn len(self) -> usize {
        self.spans.len()
    }

    pub(super) fn at(self, index: usize) -> Option<&'a [u8]> {
        let Span { start, end } = *self.spans.get(index)?;
        self.bytes.get(start..end)
    }

    /// The first, the command's name.
    pub(super) fn name(self) -> &'a [u8] {
        self.at(0).unwrap_or_default()
    }

    /// Those from `first` on.
    pub(super) fn from(self, first: usize) -> impl Iterator<Item = &'a [u8]> {
        (first..self.len()).filter_map(move |index| self.at(index))
    }
}

impl Parser {
    /// Looks at the input: how many of its bytes are done with, and what it begins with. The rest, with more behind it,
    /// is the input of the next call.
    pub(super) fn next<'a>(&'a mut self, input: &'a [u8]) -> (usize, Parsed<'a>) {
        if self.missing == 0 {
            match input.first() {
                None => return (0, Parsed::Incomplete),
                Some(b'*') => {}
                Some(_) => return self.line(input),
            }
            let (count, used) = match length(&input[1..], MAX_COUNT) {
                Ok(Some(length)) => length,
                Ok(None) => return (0, Parsed::Incomplete),
                Err(Unusable) => return (0, Parsed::Wrong(ProtocolError::Count)),
            };
            self.at = 1 + used;
            if count == 0 {
                return (std::mem::take(&mut self.at), Parsed::Nothing);
            }
            self.missing = count;
            self.spans.clear();
            if count > MAX_ARGUMENTS {
                self.refused = Some(ProtocolError::TooManyArguments { count });
            }
        }
        match self.arguments(input) {
            Err(error) => (0, Parsed::Wrong(error)),
            Ok(true) => {
                let used = std::mem::take(&mut self.at);
                match self.refused.take() {
                    Some(refused) => (used, Parsed::Wrong(refused)),
                    None => (used, Parsed::Command(Arguments { bytes: input, spans: &self.spans })),
                }
            }
            // What is refused is not kept.
            Ok(false) if self.refused.is_some() => {
                (std::mem::take(&mut self.at), Parsed::Incomplete)
            }
            Ok(false) => (0, Parsed::Incomplete),
        }
    }

    /// Whether a part of a command has been looked at already.
    pub(super) const fn is_amid(&self) -> bool {
        self.at > 0 || self.missing > 0
    }

    /// Goes on with the arguments of an array; whether they are complete.
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
                    let told = length(rest, MAX_LENGTH);
                    let Some((bytes, used)) = told.map_err(|Unusable| ProtocolError::Length)?
                    else {
                        return Ok(false);
                    };
                    self.at += 1 + used;
                    bytes
                }
            };
            if self.refused.is_none() {
                if bytes > MAX_ARGUMENT {
                    self.refused = Some(ProtocolError::ArgumentTooLong { bytes });
                } else if self.at + bytes > MAX_COMMAND {
                    self.refused = Some(ProtocolError::CommandTooLong);
                }
            }
            if self.refused.is_some() {
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

    /// A command in a line.
    fn line<'a>(&'a mut self, input: &'a [u8]) -> (usize, Parsed<'a>) {
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

    /// Splits a line into words: apart by spaces, in double quotes with escapes, or in single quotes as they stand. Returns
    /// how many there are. Of those beyond the limit only the last is kept, in the place of the one before.
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

    /// Gives back memory that only a long line needed.
    pub(super) fn shrink(&mut self) {
        self.words.clear();
        self.words.shrink_to(KEPT_WORDS);
    }
}

/// The bytes of words that a parser keeps room for between two commands.
const KEPT_WORDS: usize = 1024;

/// Takes a word up to its closing quote; what follows it.
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

/// The value of a digit that is one.
const fn hex(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => (digit | 0x20) - b'a' + 10,
    }
}

/// A browser that took the wrong port, or somebody who made it.
fn is_http(words: Arguments<'_>) -> bool {
    let last = words.at(words.len() - 1).unwrap_or_default();
    last.starts_with(b"HTTP/")
        || words.name().eq_ignore_ascii_case(b"POST")
        || words.name().eq_ignore_ascii_case(b"Host:")
}

/// A length that is none, or that no limit allows.
struct Unusable;

/// A length and its line's end, if they are there; and how many bytes they take.
fn length(line: &[u8], most: usize) -> Result<Option<(usize, usize)>, Unusable> {
    let mut value = 0;
    for (digits, &byte) in line.iter().enumerate() {
        match byte {
            b'0'..=b'9' if digits < MAX_DIGITS => value = value * 10 + usize::from(byte - b'0'),
            b'\r' if digits > 0 => {
                return match line.get(digits + 1) {
                    None => Ok(None),
                    Some(b'\n') if value <= most => Ok(Some((value, digits + 2))),
                    Some(_) => Err(Unusable),
                };
            }
            _ => return Err(Unusable),
        }
    }
    Ok(None)
}

impl ProtocolError {
    /// Whether nobody knows where the next command would begin, or nobody should.
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
            | Self::Http => true,
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
                    "Protocol error: unbalanced quotes; close each, and put a space behind it"
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
                write!(f, "Protocol error: an argument is longer than its length says")
            }
            Self::Http => write!(f, "this is HTTP on a port for RESP; HTTP has a port of its own"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[derive(Clone, Debug, PartialEq, Eq)]
    enum Told {
        Command(Vec<Vec<u8>>),
        Wrong(ProtocolError),
    }

    /// What is told of input that comes in these pieces; and the most that was kept of it.
    fn told(pieces: impl IntoIterator<Item = impl AsRef<[u8]>>) -> (Vec<Told>, usize) {
        let mut parser = Parser::default();
        let (mut kept, mut most, mut told) = (Vec::new(), 0, Vec::new());
        for piece in pieces {
            kept.extend_from_slice(piece.as_ref());
            loop {
                let (used, parsed) = parser.next(&kept);
                match parsed {
                    Parsed::Command(words) => {
                        told.push(Told::Command(words.from(0).map(<[u8]>::to_vec).collect()));
                    }
                    Parsed::Nothing => {}
                    Parsed::Wrong(error) => {
                        told.push(Told::Wrong(error));
                        if error.closes() {
                            return (told, most);
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
        (told, most)
    }

    fn whole(input: &[u8]) -> Vec<Told> {
        told([input]).0
    }

    fn command(words: &[&[u8]]) -> Told {
        Told::Command(words.iter().map(|word| word.to_vec()).collect())
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
            assert_eq!(read(unbalanced), [Told::Wrong(ProtocolError::UnbalancedQuotes)]);
        }
    }

    #[test]
    fn e9_lengths_that_no_limit_allows_are_told_at_once() {
        let count = Told::Wrong(ProtocolError::Count);
        for input in
            ["*-1\r", "*1048577\r\n", "*99999999999999999999", "*\r\n", "*1x", "* 1", "*+1"]
        {
            assert_eq!(whole(input.as_bytes()), std::slice::from_ref(&count), "{input:?}");
        }
        let length = Told::Wrong(ProtocolError::Length);
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
        assert_eq!(whole(b"*1\r\n$1\r\nab\r\n"), [Told::Wrong(ProtocolError::NoLineEnd)]);
    }

    #[test]
    fn e9_nothing_is_allocated_ahead_of_bytes() {
        let mut parser = Parser::default();
        let input = b"*1048576\r\n$536870912\r\nabc";
        let (used, parsed) = parser.next(input);
        assert!(matches!((used, parsed), (25, Parsed::Incomplete)), "{used}");
        let held = parser.spans.capacity() * size_of::<Span>() + parser.words.capacity();
        assert!(held < 4096, "{held}");
    }

    #[test]
    fn e10_arrays_do_not_nest() {
        let deep = b"*1\r\n".repeat(100_000);
        assert_eq!(whole(&deep), [Told::Wrong(ProtocolError::NotBulk { found: b'*' })]);
    }

    #[test]
    fn d3_what_is_over_a_limit_is_read_past_and_never_kept() {
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
            let (told, most) = told(input.chunks(4096));
            assert_eq!(told, [Told::Wrong(error), command(&[b"PING"])]);
            assert!(most <= MAX_COMMAND + 4096, "{error:?}: {most}");
        }
    }

    #[test]
    fn what_is_at_its_limit_is_read() {
        let longest = vec![b'x'; MAX_ARGUMENT];
        let told = whole(&array(&[&b"ECHO"[..], &longest]));
        assert_eq!(told, [command(&[b"ECHO", &longest])]);
        let most = [&b"x"[..]; MAX_ARGUMENTS];
        assert_eq!(whole(&array(&most)), [command(&most)]);
    }

    #[test]
    fn a_line_without_end_is_given_up() {
        let (told, most) = told(vec![b'x'; 2 * MAX_LINE].chunks(4096));
        assert_eq!(told, [Told::Wrong(ProtocolError::LineTooLong)]);
        assert!(most <= MAX_LINE + 4096, "{most}");
    }

    #[test]
    fn e13_http_is_recognised() {
        let http = [Told::Wrong(ProtocolError::Http)];
        assert_eq!(whole(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"), http);
        assert_eq!(whole(b"PRI * HTTP/2.0\r\n"), http);
        assert_eq!(whole(b"post /v1/check\r\n"), http);
        assert_eq!(whole(b"HOST: a\r\n"), http);
        assert_eq!(whole(b"GET a\r\n"), [command(&[b"GET", b"a"])]);
    }

    /// Commands in arrays and lines, what is refused, what has no meaning, and noise.
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

        #[test]
        fn e11_pieces_of_any_size_give_the_same_commands(input in input(), sizes in vec(1..40_usize, 1..20)) {
            let mut sizes = sizes.into_iter().cycle();
            let mut rest = &input[..];
            let pieces = std::iter::from_fn(|| {
                let size = sizes.next()?.min(rest.len());
                let (piece, behind) = rest.split_at(size);
                rest = behind;
                (size > 0).then_some(piece)
            });
            prop_assert_eq!(told(pieces).0, whole(&input));
        }
    }
}
