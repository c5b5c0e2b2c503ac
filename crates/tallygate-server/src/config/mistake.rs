//! What is wrong with a configuration, and where.

use std::fmt;

use tallygate_lab::names::nearest;

/// What is wrong, with its line and column.
#[derive(Debug)]
pub(crate) struct Mistake {
    file: Option<String>,
    line: usize,
    column: usize,
    reason: String,
}

impl Mistake {
    /// At a place in a text, counted in bytes.
    pub(super) fn at(text: &str, place: usize, reason: String) -> Self {
        let before = &text[..place.min(text.len())];
        let line_start = before.rfind('\n').map_or(0, |end| end + 1);
        let line = before.matches('\n').count() + 1;
        let column = text[line_start..place.min(text.len())].chars().count() + 1;
        Self { file: None, line, column, reason }
    }

    pub(super) fn of_toml(text: &str, error: &toml::de::Error) -> Self {
        let place = error.span().map_or(0, |span| span.start);
        Self::at(text, place, with_nearest(&without_value(error.message())))
    }

    /// The same, with the name of the file it is in.
    pub(super) fn in_file(mut self, file: &str) -> Self {
        self.file = Some(file.to_owned());
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

/// A message about a text of the wrong type, without the text: it may be a secret that went to the wrong place.
fn without_value(message: &str) -> String {
    match (message.strip_prefix("invalid type: string "), message.rfind(", expected ")) {
        (Some(_), Some(expected)) => format!("invalid type: string{}", &message[expected..]),
        _ => message.to_owned(),
    }
}

/// Where a message lists what was expected, the one that is nearest to what was found.
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
        None => format!("{found}; there is {}", known.join(", ")),
    }
}
