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
            message => with_nearest(&in_plain_words(message)),
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

/// Translates the types of Rust. Removes a string of the wrong type: it may be a misplaced secret.
fn in_plain_words(message: &str) -> String {
    const WORDS: [(&str, &str); 10] = [
        ("expected u64", "expected a whole number"),
        ("expected usize", "expected a whole number"),
        ("expected u32", "expected a whole number"),
        ("expected u8", "expected a whole number"),
        ("expected a boolean", "expected true or false"),
        ("expected a sequence", "expected a list in brackets"),
        ("expected a map", "expected a table"),
        ("unknown variant", "unknown value"),
        ("floating point `", "the fraction `"),
        ("integer `", "the number `"),
    ];
    let message =
        match message.strip_prefix("invalid type: ").map(|rest| rest.split_once(", expected ")) {
            Some(Some((found, expected))) => {
                let found = if found.starts_with("string ") { "a string" } else { found };
                format!("found {found}; expected {expected}")
            }
            _ => match message
                .strip_prefix("invalid value: ")
                .map(|rest| rest.split_once(", expected "))
            {
                Some(Some((found, expected))) => format!("found {found}; expected {expected}"),
                _ => message.to_owned(),
            },
        };
    let message = message.replace("expected struct ", "expected a table: ");
    WORDS.iter().fold(message, |message, (from, to)| message.replace(from, to))
}

/// Replaces a list of expected names in a message by the name nearest to the one found.
pub(crate) fn with_nearest(message: &str) -> String {
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
