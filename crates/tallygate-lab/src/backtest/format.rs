//! How the lines of a log are written: told, or found out from the first line that says so.

use std::str::FromStr;

use tallygate_core::Tick;

use super::BacktestError;
use super::combined::Combined;
use super::json::Json;
use super::key::KeyFrom;
use super::table::Table;

/// The formats that are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// nginx's and Apache's combined and common logs.
    Combined,
    /// A JSON object per line.
    Json,
    /// Values with commas, semicolons or tabs between them, under a header.
    Csv,
}

impl Format {
    /// Every format.
    pub const ALL: [Self; 3] = [Self::Combined, Self::Json, Self::Csv];

    /// Returns its name.
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

/// What a line tells. The client's name is put where it is wanted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Told {
    Request(Tick),
    /// A request without a client, which no limit concerns.
    Nobody,
    /// The names of what comes.
    Header,
}

/// Why a line cannot be read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unreadable(pub(super) &'static str);

/// What is wanted of the lines of all inputs.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Where the client's name is.
    pub key: KeyFrom,
    /// How lines are written; found out without it.
    pub format: Option<Format>,
    /// The field with the time, in JSON and CSV; the usual ones without it.
    pub time: Option<String>,
}

/// Reads lines, once it knows how.
#[derive(Debug)]
pub(super) struct LineReader<'a> {
    wanted: &'a Wanted,
    format: Option<Known>,
    /// Lines that did not say their format.
    unknown: Vec<u8>,
    unknown_lines: usize,
}

#[derive(Debug)]
enum Known {
    Combined(Combined),
    Json(Json),
    /// The header of each input is its own.
    Csv(Option<Box<Table>>),
}

/// How many lines may come before one that says its format.
const MAX_UNKNOWN_LINES: usize = 100;
/// How much of such a line is shown.
const SHOWN: usize = 80;

const UNKNOWN: Unreadable = Unreadable("neither a combined log, nor JSON, nor under a header");

impl<'a> LineReader<'a> {
    pub(super) fn new(wanted: &'a Wanted) -> Result<Self, BacktestError> {
        let format = wanted.format.map(|format| wanted.known(format)).transpose()?;
        Ok(Self { wanted, format, unknown: Vec::new(), unknown_lines: 0 })
    }

    /// The next line is the first of an input.
    pub(super) fn start_input(&mut self) {
        if let Some(Known::Csv(table)) = &mut self.format {
            *table = None;
        }
    }

    /// No more lines will come: is it known what they were?
    pub(super) fn end(&self) -> Result<(), BacktestError> {
        if self.unknown_lines == 0 || self.format.is_some() {
            return Ok(());
        }
        let first = String::from_utf8_lossy(&self.unknown);
        let shown = &first[..first.floor_char_boundary(SHOWN)];
        Err(BacktestError::Format(format!(
            "cannot tell the format from its first lines, the first is {shown:?}; \
             say combined, json or csv"
        )))
    }

    /// Reads a line that is not blank, and appends the client's name.
    #[inline]
    pub(super) fn read(
        &mut self,
        line: &[u8],
        key: &mut Vec<u8>,
    ) -> Result<Result<Told, Unreadable>, BacktestError> {
        match &mut self.format {
            Some(Known::Combined(combined)) => Ok(combined.read(line, key)),
            Some(Known::Json(json)) => Ok(json.read(line, key)),
            Some(Known::Csv(Some(table))) => Ok(table.read(line, key)),
            Some(Known::Csv(table @ None)) => {
                let Wanted { key, time, .. } = self.wanted;
                let made = Table::new(line, key, time.as_deref()).map_err(BacktestError::Format)?;
                *table = Some(Box::new(made));
                Ok(Ok(Told::Header))
            }
            None => self.find_out(line, key),
        }
    }

    #[cold]
    fn find_out(
        &mut self,
        line: &[u8],
        key: &mut Vec<u8>,
    ) -> Result<Result<Told, Unreadable>, BacktestError> {
        let format = if Combined::is_one(line) {
            Format::Combined
        } else if Json::is_one(line) {
            Format::Json
        } else if self.unknown_lines == 0 && Table::is_header(line, self.wanted.time.as_deref()) {
            Format::Csv
        } else {
            if self.unknown_lines == 0 {
                self.unknown = line.to_vec();
            }
            self.unknown_lines += 1;
            if self.unknown_lines > MAX_UNKNOWN_LINES {
                self.end()?;
            }
            return Ok(Err(UNKNOWN));
        };
        self.format = Some(self.wanted.known(format)?);
        self.read(line, key)
    }
}

impl Wanted {
    fn known(&self, format: Format) -> Result<Known, BacktestError> {
        Ok(match format {
            Format::Combined => {
                Known::Combined(Combined::new(&self.key).map_err(BacktestError::Format)?)
            }
            Format::Json => Known::Json(Json::new(&self.key, self.time.as_deref())),
            Format::Csv => Known::Csv(None),
        })
    }
}
