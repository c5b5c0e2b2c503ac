//! Errors in a configuration, with their place.

use std::fmt;

use tallygate_lab::names::nearest;

/// An error in a configuration, with its line and column.
#[derive(Debug)]
pub(crate) struct Mistake {
    file: Option<String>,
    line: usize,
    column: usize,
    reason: String,
}

impl Mistake {
    /// Returns the error at a byte offset of the text.
    pub(super) fn at(text: &str, place: usize, reason: String) -> Self {
        let before = &text[..place.min(text.len())];
        let line_start = before.rfind('\n').map_or(0, |end| end + 1);
        let line = before.matches('\n').count() + 1;
        let column = text[line_start..place.min(text.len())].chars().count() + 1;
        Self { file: None, line, column, reason }
    }

    /// Returns the error at a line and a column, both from 1.
    pub(super) fn in_line(line: usize, column: usize, reason: String) -> Self {
        Self { file: None, line, column, reason }
    }

    pub(super) fn of_toml(text: &str, error: &toml::de::Error) -> Self {
        let span = error.span().unwrap_or(0..0);
        let message = match error.message() {
            "duplicate key" => duplicate(text, span.clone()),
            "string values must be quoted, expected literal string" => {
                "a value that is not a number, true or false must be in double quotes".to_owned()
            }
            message if message.starts_with("missing field ") => format!("{message}; add it"),
            message => {
                place_of_field(message).unwrap_or_else(|| in_plain_words(message, "a table"))
            }
        };
        Self::at(text, span.start, message)
    }

    /// Adds the name of the file, unless the error is in a file that the file names.
    pub(super) fn in_file(mut self, file: &str) -> Self {
        self.file.get_or_insert_with(|| file.to_owned());
        self
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, column, reason } = self;
        write!(f, "{}:{line}:{column}: {reason}", file.as_deref().unwrap_or("configuration"))
    }
}

impl std::error::Error for Mistake {}

/// Names the key that a table has twice.
fn duplicate(text: &str, span: std::ops::Range<usize>) -> String {
    let line = text.get(span.start..).and_then(|rest| rest.lines().next()).unwrap_or_default();
    let key = text.get(span).filter(|key| !key.is_empty());
    let key = key.unwrap_or_else(|| line.split(['=', ']']).next().unwrap_or_default());
    format!("`{}` is set twice; remove one of them", key.trim())
}

/// Translates a message of serde, or of its JSON parser, into plain words: what was found, and what would work. `table` is
/// the format's word for named values. Does not change a message that is translated already.
pub(crate) fn in_plain_words(message: &str, table: &str) -> String {
    if let Some((_, words)) = SYNTAX.iter().find(|(known, _)| *known == message) {
        return (*words).to_owned();
    }
    if let Some(field) = message.strip_prefix("duplicate field ") {
        return format!("{field} is set twice; remove one of them");
    }
    let invalid =
        message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "));
    let Some((found, expected)) = invalid.and_then(|rest| rest.rsplit_once(", expected ")) else {
        return with_nearest(&message.replacen("unknown variant", "unknown value", 1));
    };
    let (kind, value) = found.split_once(' ').unwrap_or((found, ""));
    let found = match kind {
        "integer" => format!("the number {}", value.trim_end_matches(" as i128")),
        "floating" => format!("the number {}", value.trim_start_matches("point ")),
        "boolean" => value.to_owned(),
        // Not the text itself: it may be a misplaced secret.
        "string" => "a string".to_owned(),
        "sequence" => "a list".to_owned(),
        "map" => table.to_owned(),
        _ => found.to_owned(),
    };
    let expected = match expected {
        "u64" | "usize" => "a whole number, 0 or more".to_owned(),
        "u32" => format!("a whole number from 0 to {}", u32::MAX),
        "u8" => format!("a whole number from 0 to {}", u8::MAX),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "a list in brackets".to_owned(),
        "a map" => table.to_owned(),
        expected if expected.starts_with("struct ") => table.to_owned(),
        expected => expected.to_owned(),
    };
    let is_quoted = found == "a string"
        && (expected.starts_with("a whole number") || expected.starts_with("true or false"));
    let quotes = if is_quoted { ", without quotes" } else { "" };
    format!("found {found}; expected {expected}{quotes}")
}

/// Messages of the JSON parser.
const SYNTAX: [(&str, &str); 13] = [
    ("expected value", "not valid JSON: expected a value, such as \"text\", 5, true or {}"),
    ("expected ident", "not valid JSON: expected true, false or null"),
    ("expected `:`", "not valid JSON: expected `:` after the name of a field"),
    ("expected `,` or `}`", "not valid JSON: expected `,` or `}`"),
    ("key must be a string", "not valid JSON: the name of a field must be in double quotes"),
    ("trailing comma", "not valid JSON: remove the comma before the closing bracket"),
    ("trailing characters", "found text after the end of the JSON; remove it"),
    ("invalid number", "not valid JSON: the number is malformed"),
    ("number out of range", "the number is too large"),
    ("EOF while parsing a value", "the JSON ends too early: a value is missing"),
    ("EOF while parsing an object", "the JSON ends too early: a closing `}` is missing"),
    ("EOF while parsing a list", "the JSON ends too early: a closing `]` is missing"),
    ("EOF while parsing a string", "the JSON ends too early: a closing `\"` is missing"),
];

/// Names the place of a field that is outside of its table, or in a table although it belongs outside of all tables.
fn place_of_field(message: &str) -> Option<String> {
    let (unknown, known) = message.strip_prefix("unknown field `")?.split_once("`, expected")?;
    let is_outside = known.ends_with("`policies`");
    let table = match unknown {
        "store" | "snapshot" | "snapshot_every" | "sweep_every" | "trusted_proxies"
            if !is_outside =>
        {
            return Some(format!(
                "`{unknown}` belongs at the top of the file, above the first [table]"
            ));
        }
        _ if !is_outside => return None,
        "http" | "resp" | "grpc" | "names" => "[listen]",
        "algorithm" | "limit" | "window" | "burst" | "tiers" | "overrides" => "[policies.NAME]",
        "certificate" | "client_ca" => "[tls]",
        "max_keys" => return Some("`max_keys` is a flag; use --max-keys".to_owned()),
        field if field.starts_with("max_") || field.ends_with("_timeout") => "[limits]",
        _ => return None,
    };
    Some(format!("`{unknown}` belongs below {table}"))
}

/// Replaces a list of expected names in a message by the name nearest to the one found.
fn with_nearest(message: &str) -> String {
    let message = message.lines().next().unwrap_or_default();
    let Some((found, expected)) = message.split_once(", expected ") else {
        return message.to_owned();
    };
    let quoted = |text: &str| -> Vec<String> {
        text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    };
    let (names, known) = (quoted(found), quoted(expected));
    let Some(name) = names.first().filter(|_| found.starts_with("unknown ")) else {
        return message.to_owned();
    };
    match nearest(name, known.iter().map(String::as_str)) {
        Some(near) => format!("{found}; did you mean `{near}`?"),
        None => format!("{found}; expected one of {}", known.join(", ")),
    }
}
