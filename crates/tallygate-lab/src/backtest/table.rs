//! Parses CSV lines below a header line: one record per line.
//!
//! The delimiter is a comma, a semicolon or a tab, detected from the header. Quoted values with line breaks are not
//! supported.

use csv_core::{ReadRecordResult, Reader, ReaderBuilder};

use super::filter::{FilterField, LineFilter, header_columns};
use super::format::{LogOptions, ParsedLine, UNKNOWN_TIMESTAMP, Unreadable};
use super::json::{ADDRESSES, TIMES};
use super::key::{KeyFrom, put_key};
use super::timestamp;

/// A parser for CSV lines.
#[derive(Debug)]
pub(super) struct Table {
    records: Records,
    time: usize,
    key: usize,
    is_address: bool,
    filters: Vec<(usize, LineFilter)>,
}

impl Table {
    /// Parses the header.
    pub(super) fn new(header: &[u8], options: &LogOptions) -> Result<Self, String> {
        let (records, columns) = columns(header).ok_or("the first line is not a CSV header")?;
        let any_of = |names: &[&str]| {
            names.iter().find_map(|name| columns.iter().position(|column| column == name))
        };
        let available = || format!("the columns are {}", columns.join(", "));
        let time = match options.time.as_deref() {
            Some(name) => any_of(&[name])
                .ok_or_else(|| format!("no column {name:?} for the time; {}", available()))?,
            None => any_of(&TIMES).ok_or_else(|| {
                format!(
                    "no column for the time (expected one of {}); {}",
                    TIMES.join(", "),
                    available()
                )
            })?,
        };
        let header = |name: &str| {
            let names = header_columns(name);
            columns.iter().position(|column| names.contains(&column.to_ascii_lowercase().into()))
        };
        let key = &options.key;
        let found = match key {
            KeyFrom::Address => any_of(&ADDRESSES),
            KeyFrom::Field(name) => any_of(&[name]),
            KeyFrom::Header(name) => header(name),
        };
        let column =
            found.ok_or_else(|| format!("no column for the key {key}; {}", available()))?;
        let filters = options.filters.iter().map(|filter| {
            let names = filter.field.names();
            let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
            let found = match &filter.field {
                FilterField::Named(_) => any_of(&names),
                FilterField::Header(name) => header(name),
            };
            let column = found
                .ok_or_else(|| format!("no column {:?} for a filter; {}", names[0], available()))?;
            Ok((column, filter.clone()))
        });
        let filters = filters.collect::<Result<_, String>>()?;
        Ok(Self { records, time, key: column, is_address: *key == KeyFrom::Address, filters })
    }

    /// Returns whether a line is a header with a time column.
    pub(super) fn is_header(line: &[u8], time: Option<&str>) -> bool {
        let is_time = |column: &String| match time {
            Some(name) => column == name,
            None => TIMES.contains(&column.as_str()),
        };
        columns(line).is_some_and(|(_, columns)| columns.iter().any(is_time))
    }

    pub(super) fn read(
        &mut self,
        line: &[u8],
        key: &mut Vec<u8>,
    ) -> Result<ParsedLine, Unreadable> {
        if !self.records.read(line) {
            return Err(Unreadable("not exactly one record on the line"));
        }
        if self.time >= self.records.ends.len() {
            return Err(Unreadable("too few columns: the time is missing"));
        }
        let now =
            timestamp::parse(self.records.value(self.time)).ok_or(Unreadable(UNKNOWN_TIMESTAMP))?;
        if self.key >= self.records.ends.len() {
            return Err(Unreadable("too few columns: the key is missing"));
        }
        let passes = |(column, filter): &(usize, LineFilter)| {
            let value = (*column < self.records.ends.len()).then(|| self.records.value(*column));
            filter.passes(value.map(<[u8]>::trim_ascii))
        };
        if !self.filters.iter().all(passes) {
            return Ok(ParsedLine::Filtered);
        }
        put_key(self.records.value(self.key).trim_ascii(), self.is_address, now, key)
    }
}

/// Returns a reader for the lines below a header, and the names of the columns.
fn columns(header: &[u8]) -> Option<(Records, Vec<String>)> {
    let count = |delimiter: u8| memchr::memchr_iter(delimiter, header).count();
    let delimiter = [b';', b'\t', b','].into_iter().max_by_key(|delimiter| count(*delimiter))?;
    let mut records = Records::new(delimiter);
    if !records.read(header) {
        return None;
    }
    let name = |column| String::from_utf8_lossy(records.value(column)).trim().to_owned();
    let names = (0..records.ends.len()).map(name).collect();
    Some((records, names))
}

/// Splits lines into values.
#[derive(Debug)]
struct Records {
    reader: Reader,
    values: Vec<u8>,
    ends: Vec<usize>,
}

impl Records {
    fn new(delimiter: u8) -> Self {
        let reader = ReaderBuilder::new().delimiter(delimiter).build();
        Self { reader, values: Vec::new(), ends: Vec::new() }
    }

    /// Splits a line. Returns false if it is not exactly one record.
    fn read(&mut self, line: &[u8]) -> bool {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        self.reader.reset();
        // The values have no more bytes than the line, and there is at most one value more than bytes.
        self.values.resize(line.len() + 1, 0);
        self.ends.resize(line.len() + 1, 0);
        let (mut read, mut written, mut ended) = (0, 0, 0);
        loop {
            // The removed line end is part of the record: inside quotes, the record continues after it.
            let input = if read < line.len() { &line[read..] } else { &b"\n"[..] };
            let (result, taken, out, ends) = self.reader.read_record(
                input,
                &mut self.values[written..],
                &mut self.ends[ended..],
            );
            (read, written, ended) = (read + taken, written + out, ended + ends);
            match result {
                ReadRecordResult::Record => break,
                ReadRecordResult::InputEmpty if read <= line.len() => {}
                _ => return false,
            }
        }
        self.ends.truncate(ended);
        read > line.len()
    }

    fn value(&self, column: usize) -> &[u8] {
        let start = column.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.values[start..self.ends[column]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backtest::format::{NO_ADDRESS, options};
    use crate::backtest::timestamp::Timestamp;

    #[track_caller]
    fn finds(header: &str, key: &str, line: &str, expected: &str) {
        let mut table =
            Table::new(header.as_bytes(), &options(key, None)).expect("the header is valid");
        let mut name = Vec::new();
        // A line that was read before has no influence.
        let _ = table.read(b"\"", &mut Vec::new());
        let shown = match table.read(line.as_bytes(), &mut name) {
            Ok(ParsedLine::Request(now)) => {
                format!("{} {}", Timestamp(now), String::from_utf8_lossy(&name))
            }
            Ok(_) => "no key".to_owned(),
            Err(Unreadable(reason)) => reason.to_owned(),
        };
        assert_eq!(shown, expected, "{key} in {line}");
    }

    #[test]
    fn columns_are_found_by_their_names_in_the_header() {
        finds("time,ip,user", "ip", "0,192.0.2.1,a", "1970-01-01T00:00:00Z 192.0.2.1");
        finds("user;ts", "field:user", "\"a;\"\"b\"\"\";1", "1970-01-01T00:00:01Z a;\"b\"");
        finds("timestamp\tX-Api-Key", "header:x-api-key", "2\tk", "1970-01-01T00:00:02Z k");
        finds("msec,http_x_api_key", "header:x-api-key", "3,-", "no key");
        finds("time,ip", "ip", "0,192.0.2.1\r", "1970-01-01T00:00:00Z 192.0.2.1");
    }

    #[test]
    fn a_malformed_line_is_reported_with_its_reason() {
        finds("user,time", "field:user", "a", "too few columns: the time is missing");
        finds("time,user", "field:user", "1", "too few columns: the key is missing");
        finds("time,user", "field:user", "1,\"a", "not exactly one record on the line");
        finds("time,user", "field:user", "x,a", UNKNOWN_TIMESTAMP);
        finds("time,ip", "ip", "1,a", NO_ADDRESS);
    }

    #[test]
    fn a_missing_column_is_an_error_that_lists_the_columns() {
        let error = |header: &str, key: &str, time| {
            Table::new(header.as_bytes(), &options(key, time)).expect_err("there is no such column")
        };
        assert_eq!(
            error("time,user", "ip", None),
            "no column for the key ip; the columns are time, user"
        );
        assert!(
            error("at,user", "field:user", None)
                .contains("no column for the time (expected one of")
        );
        assert!(error("time,user", "field:user", Some("at")).contains("no column \"at\""));
    }
}
