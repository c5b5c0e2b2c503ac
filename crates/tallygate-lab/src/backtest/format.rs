//! The format of a log: given by the caller, or detected from the first line that matches one.

use std::str::FromStr;

use tallygate_core::Tick;

use super::BacktestError;
use super::combined::Combined;
use super::filter::LineFilter;
use super::json::Json;
use super::key::KeyFrom;
use super::table::Table;

/// A log format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The combined and the common log format of nginx and Apache.
    Combined,
    /// One JSON object per line.
    Json,
    /// Values separated by commas, semicolons or tabs, below a header line.
    Csv,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::Combined, Self::Json, Self::Csv];

    /// Returns the name of the format.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Combined => "combined",
            Self::Json => "json",
            Self::Csv => "csv",
        }
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|format| format.name() == name);
        known.ok_or_else(|| format!("found {name:?}; expected combined, json or csv"))
    }
}

/// The contents of a line. The parser appends the key to a buffer of the caller.
#[derive(Clone, Copy, Debug)]
pub(super) enum ParsedLine {
    Request(Tick),
    /// A request without a key, to which no limit applies.
    NoKey,
    /// A request that does not pass the filters.
    Filtered,
    /// The names of the columns.
    Header,
}

/// Why a line cannot be parsed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unreadable(pub(super) &'static str);

/// The options for parsing the lines of all inputs.
#[derive(Clone, Debug)]
pub struct LogOptions {
    /// The field that identifies the client.
    pub key: KeyFrom,
    /// The format; `None` detects it.
    pub format: Option<Format>,
    /// The field with the time, in JSON and CSV; `None` tries the usual names.
    pub time: Option<String>,
    /// The conditions that a line must meet to take part.
    pub filters: Vec<LineFilter>,
}

/// Parses lines, after detecting their format if it is not given.
#[derive(Debug)]
pub(super) struct LineReader<'a> {
    options: &'a LogOptions,
    format: Option<LineParser>,
    /// The first line without a detected format.
    first_undetected: Vec<u8>,
    undetected_lines: usize,
}

#[derive(Debug)]
enum LineParser {
    Combined(Combined),
    Json(Json),
    /// Each input has its own header.
    Csv(Option<Box<Table>>),
}

/// The most lines without a detected format.
const MAX_UNDETECTED_LINES: usize = 100;
/// The most bytes of such a line in an error message.
const SHOWN: usize = 80;

/// Reasons that several formats share.
pub(super) const UNKNOWN_TIMESTAMP: &str =
    "unknown timestamp format (expected RFC 3339, the common log format or a number)";
pub(super) const NO_ADDRESS: &str = "the client is not an IP address";

const UNDETECTED: Unreadable =
    Unreadable("not a combined log line, not JSON, and not below a CSV header");

impl<'a> LineReader<'a> {
    pub(super) fn new(options: &'a LogOptions) -> Result<Self, BacktestError> {
        let format = options.format.map(|format| options.parser(format)).transpose()?;
        Ok(Self { options, format, first_undetected: Vec::new(), undetected_lines: 0 })
    }

    /// Starts a new input, whose first line comes next.
    pub(super) fn start_input(&mut self) {
        if let Some(LineParser::Csv(table)) = &mut self.format {
            *table = None;
        }
    }

    /// Ends the last input.
    ///
    /// # Errors
    /// Returns an error if there were lines but their format was not detected.
    pub(super) fn end(&self) -> Result<(), BacktestError> {
        if self.undetected_lines == 0 || self.format.is_some() {
            return Ok(());
        }
        let first = String::from_utf8_lossy(&self.first_undetected);
        let shown = &first[..first.floor_char_boundary(SHOWN)];
        Err(BacktestError::Format(format!(
            "cannot detect the log format; the first line is {shown:?}; expected the combined or common format of nginx and \
             Apache, a JSON object, or a CSV header with a column for the time; \
             set `format` to combined, json or csv, and `time` to the name of the time field"
        )))
    }

    /// Parses a line that is not blank, and appends its key to `key`.
    #[inline]
    pub(super) fn read(
        &mut self,
        line: &[u8],
        key: &mut Vec<u8>,
    ) -> Result<Result<ParsedLine, Unreadable>, BacktestError> {
        match &mut self.format {
            Some(LineParser::Combined(combined)) => Ok(combined.read(line, key)),
            Some(LineParser::Json(json)) => Ok(json.read(line, key)),
            Some(LineParser::Csv(Some(table))) => Ok(table.read(line, key)),
            Some(LineParser::Csv(table @ None)) => {
                let made = Table::new(line, self.options).map_err(BacktestError::Format)?;
                *table = Some(Box::new(made));
                Ok(Ok(ParsedLine::Header))
            }
            None => self.detect_format(line, key),
        }
    }

    #[cold]
    fn detect_format(
        &mut self,
        line: &[u8],
        key: &mut Vec<u8>,
    ) -> Result<Result<ParsedLine, Unreadable>, BacktestError> {
        let format = if Combined::matches(line) {
            Format::Combined
        } else if Json::matches(line) {
            Format::Json
        } else if self.undetected_lines == 0 && Table::is_header(line, self.options.time.as_deref())
        {
            Format::Csv
        } else {
            if self.undetected_lines == 0 {
                self.first_undetected = line.to_vec();
            }
            self.undetected_lines += 1;
            if self.undetected_lines > MAX_UNDETECTED_LINES {
                self.end()?;
            }
            return Ok(Err(UNDETECTED));
        };
        self.format = Some(self.options.parser(format)?);
        self.read(line, key)
    }
}

impl LogOptions {
    fn parser(&self, format: Format) -> Result<LineParser, BacktestError> {
        Ok(match format {
            Format::Combined => {
                LineParser::Combined(Combined::new(self).map_err(BacktestError::Format)?)
            }
            Format::Json => LineParser::Json(Json::new(self)),
            Format::Csv => LineParser::Csv(None),
        })
    }
}

/// Returns options for the tests of the parsers.
#[cfg(test)]
pub(super) fn options(key: &str, time: Option<&str>) -> LogOptions {
    let key = key.parse().expect("the key is valid");
    LogOptions { key, format: None, time: time.map(str::to_owned), filters: Vec::new() }
}
