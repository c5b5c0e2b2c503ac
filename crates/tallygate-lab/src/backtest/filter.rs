//! Filters: which lines of a log take part in a backtest.
//!
//! A filter tests one field of a line. A line takes part if it passes all filters. Lines that do not are counted, so that a
//! report accounts for every line.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A condition on one field of a line.
#[derive(Clone, Debug)]
pub struct LineFilter {
    pub(super) field: FilterField,
    test: Test,
    is_negated: bool,
    /// The filter as it was given.
    text: String,
    /// Whether a line with the field was tested, by this filter or a clone of it.
    has_seen_field: Arc<AtomicBool>,
}

/// The field that a filter tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FilterField {
    /// A field by name. `path`, `method` and `status` also match the other usual names of these fields.
    Named(String),
    /// A request header, by its name in lower case.
    Header(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    Equals(String),
    StartsWith(String),
    /// Contains the text, which is in lower case, in upper or lower case.
    Contains(String),
    /// Is one of these status codes, from 100 to 599. The digits after the first may be `x`.
    Status(Vec<[u8; 3]>),
}

/// Names that stand for the same field in JSON and CSV, the first of which a filter uses.
const SYNONYMS: [&[&str]; 3] = [
    &[
        "path",
        "uri",
        "request_uri",
        "url",
        "request_path",
        "RequestPath",
        "request.uri",
        "request.path",
        "request.url",
        "http.request.path",
        "req.url",
    ],
    &[
        "method",
        "request_method",
        "RequestMethod",
        "request.method",
        "http.request.method",
        "req.method",
    ],
    &[
        "status",
        "status_code",
        "response_code",
        "DownstreamStatus",
        "response.status",
        "http.response.status_code",
        "res.statusCode",
    ],
];

impl LineFilter {
    /// Accepts lines with one of these status codes, such as `200`, `404,429` or `5xx`.
    ///
    /// # Errors
    /// Returns an error if the text is not a list of status codes, or has a code that HTTP does not have.
    pub fn status(text: &str) -> Result<Self, String> {
        let field = FilterField::Named("status".to_owned());
        Ok(Self::new(field, status_codes(text)?, false, format!("status={text}")))
    }

    fn new(field: FilterField, test: Test, is_negated: bool, text: String) -> Self {
        Self { field, test, is_negated, text, has_seen_field: Arc::default() }
    }

    /// Rejects lines whose user agent contains a text, in upper or lower case.
    ///
    /// # Errors
    /// Returns an error if the text is empty.
    pub fn exclude_agent(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err(
                "the text is empty; expected a part of a user agent, such as bot".to_owned()
            );
        }
        let field = FilterField::Header("user-agent".to_owned());
        let test = Test::Contains(text.to_lowercase());
        Ok(Self::new(field, test, true, format!("user agent without {text}")))
    }

    /// Describes a filter that was tested on every request of a log, but has no effect because no line has its field.
    pub(super) fn without_effect(&self) -> Option<String> {
        let has_seen_field = self.has_seen_field.load(Ordering::Relaxed);
        (!has_seen_field).then(|| {
            let (kind, name) = match &self.field {
                FilterField::Named(name) => ("field", name),
                FilterField::Header(name) => ("header", name),
            };
            format!("the filter \"{self}\" has no effect: no line has the {kind} {name}")
        })
    }

    /// Returns whether a line with this value passes. A line without the field has no value.
    pub(super) fn passes(&self, value: Option<&[u8]>) -> bool {
        let value = value.filter(|value| !matches!(*value, b"" | b"-"));
        if value.is_some() && !self.has_seen_field.load(Ordering::Relaxed) {
            self.has_seen_field.store(true, Ordering::Relaxed);
        }
        let matches = value.is_some_and(|value| self.matches(value));
        matches != self.is_negated
    }

    fn matches(&self, value: &[u8]) -> bool {
        let value = if self.is_path() { without_query(value) } else { value };
        match &self.test {
            Test::Equals(text) => value == text.as_bytes(),
            Test::StartsWith(text) => value.starts_with(text.as_bytes()),
            Test::Contains(text) => {
                let value = String::from_utf8_lossy(value);
                let is_ascii = value.is_ascii() && text.is_ascii();
                let value =
                    if is_ascii { value.to_ascii_lowercase() } else { value.to_lowercase() };
                value.contains(text)
            }
            Test::Status(codes) => codes.iter().any(|code| {
                value.len() == code.len()
                    && value.iter().zip(code).all(|(digit, known)| digit == known || *known == b'x')
            }),
        }
    }

    fn is_path(&self) -> bool {
        matches!(&self.field, FilterField::Named(name) if name == "path")
    }
}

/// Shows the filter as it was given.
impl fmt::Display for LineFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Parses a list of status codes from 100 to 599, such as `200`, `404,429` or `5xx`.
fn status_codes(text: &str) -> Result<Test, String> {
    let code = |code: &str| match *code.trim().to_ascii_lowercase().as_bytes() {
        [first @ b'1'..=b'5', second @ (b'0'..=b'9' | b'x'), third @ (b'0'..=b'9' | b'x')] => {
            Some([first, second, third])
        }
        _ => None,
    };
    let codes: Option<Vec<_>> = text.split(',').map(code).collect();
    codes.map(Test::Status).ok_or_else(|| {
        format!(
            "found {text:?}; expected status codes from 100 to 599, such as 200, 404,429 or 5xx"
        )
    })
}

fn without_query(target: &[u8]) -> &[u8] {
    memchr::memchr(b'?', target).map_or(target, |query| &target[..query])
}

impl FilterField {
    /// Returns the names under which JSON and CSV logs may have the field, the best first.
    pub(super) fn names(&self) -> Vec<Cow<'_, str>> {
        match self {
            Self::Named(name) => {
                let known = SYNONYMS.into_iter().find(|names| names[0] == name);
                match known {
                    Some(names) => names.iter().map(|name| Cow::Borrowed(*name)).collect(),
                    None => vec![Cow::Borrowed(name.as_str())],
                }
            }
            Self::Header(name) => header_columns(name),
        }
    }
}

/// Returns the names under which a flat log may have a header: `x-api-key`, `x_api_key` and, as in nginx, `http_x_api_key`.
pub(super) fn header_columns(name: &str) -> Vec<Cow<'_, str>> {
    let plain = name.replace('-', "_");
    let of_nginx = format!("http_{plain}");
    vec![Cow::Borrowed(name), Cow::Owned(plain), Cow::Owned(of_nginx)]
}

/// Parses `FIELD=VALUE` or `FIELD!=VALUE`. A `*` at the end of the value matches any text. `header:NAME` is a request
/// header. A number for `status` may be a list or a class, as in [`LineFilter::status`].
impl FromStr for LineFilter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "found {text:?}; expected FIELD=VALUE, such as path=/login, path=/api/* or method!=GET"
            )
        };
        let (name, value) = text.split_once('=').ok_or_else(expected)?;
        let (name, is_negated) = match name.strip_suffix('!') {
            Some(name) => (name, true),
            None => (name, false),
        };
        let field = match name.split_once(':') {
            Some(("header", header)) if !header.is_empty() => {
                FilterField::Header(header.to_ascii_lowercase())
            }
            Some(("field", field)) if !field.is_empty() => FilterField::Named(field.to_owned()),
            None if !name.is_empty() => FilterField::Named(name.to_owned()),
            _ => return Err(expected()),
        };
        let test = match value.strip_suffix('*') {
            Some(start) => Test::StartsWith(start.to_owned()),
            None if name == "status" && value.starts_with(|first: char| first.is_ascii_digit()) => {
                status_codes(value)?
            }
            None => Test::Equals(value.to_owned()),
        };
        Ok(Self::new(field, test, is_negated, text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn passes(filter: &str, value: Option<&str>, expected: bool) {
        let filter: LineFilter = filter.parse().expect("the filter is valid");
        assert_eq!(filter.passes(value.map(str::as_bytes)), expected, "{filter:?} {value:?}");
    }

    #[test]
    fn a_filter_compares_a_whole_value_or_its_start() {
        passes("path=/login", Some("/login"), true);
        passes("path=/login", Some("/login?next=/"), true);
        passes("path=/login", Some("/login/other"), false);
        passes("path=/api/*", Some("/api/users"), true);
        passes("path=/api/*", Some("/apis"), false);
        passes("path!=/health", Some("/health"), false);
        passes("path!=/health", Some("/"), true);
        passes("user=alice", None, false);
        passes("user!=alice", None, true);
        passes("user=*", Some("-"), false);
        passes("query=a?b", Some("a?b"), true);
        passes("header:X-Key=a=b", Some("a=b"), true);
        passes("status=5xx", Some("503"), true);
        passes("status!=404,5xx", Some("404"), false);
        passes("status=ok", Some("ok"), true);
    }

    #[test]
    fn a_status_filter_accepts_lists_and_classes() {
        let passes = |text: &str, value: &str| {
            LineFilter::status(text).expect("the codes are valid").passes(Some(value.as_bytes()))
        };
        assert!(passes("200", "200") && !passes("200", "201"));
        assert!(passes("404, 5xx", "503") && passes("404,5XX", "404") && !passes("404,5xx", "403"));
        for bad in ["", "20", "2000", "x00", "4x?", "200,", "9xx", "600", "099", "200,6xx"] {
            assert!(LineFilter::status(bad).is_err(), "{bad}");
            let is_number = bad.starts_with(|first: char| first.is_ascii_digit());
            assert_eq!(format!("status={bad}").parse::<LineFilter>().is_err(), is_number, "{bad}");
        }
    }

    #[test]
    fn an_agent_is_excluded_in_upper_or_lower_case() {
        let filter = LineFilter::exclude_agent("Bot").expect("the text is valid");
        assert!(!filter.passes(Some(b"Mozilla (compatible; Googlebot/2.1)")));
        assert!(filter.passes(Some(b"curl/8")) && filter.passes(None));
        assert!(LineFilter::exclude_agent("").is_err());
    }

    #[test]
    fn a_malformed_filter_is_an_error() {
        for bad in ["", "path", "=x", "!=x", "header:=x", "cookie:a=x"] {
            assert!(bad.parse::<LineFilter>().is_err(), "{bad}");
        }
    }
}
