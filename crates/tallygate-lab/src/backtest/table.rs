//! Lines of comma-separated values under a header that names them: a record a line.
//!
//! Semicolons and tabs will do as well; the header says which. A quoted value with a line break in it is none.

use csv_core::{ReadRecordResult, Reader, ReaderBuilder};

use super::format::{Told, Unreadable};
use super::json::{ADDRESSES, TIMES};
use super::key::{KeyFrom, put_address};
use super::moment;

/// How lines are read.
#[derive(Debug)]
pub(super) struct Table {
    records: Records,
    time: usize,
    key: usize,
    is_address: bool,
}

impl Table {
    /// Reads the header.
    pub(super) fn new(header: &[u8], key: &KeyFrom, time: Option<&str>) -> Result<Self, String> {
        let (records, columns) = columns(header).ok_or("its first line is no header")?;
        let any_of = |names: &[&str]| {
            names.iter().find_map(|name| columns.iter().position(|column| column == name))
        };
        let there_is = || format!("there is {}", columns.join(", "));
        let time = match time {
            Some(name) => any_of(&[name])
                .ok_or_else(|| format!("no column {name:?} for the time; {}", there_is()))?,
            None => any_of(&TIMES).ok_or_else(|| {
                format!("no column for the time, one of {}; {}", TIMES.join(", "), there_is())
            })?,
        };
        let found = match key {
            KeyFrom::Address => any_of(&ADDRESSES),
            KeyFrom::Field(name) => any_of(&[name]),
            KeyFrom::Header(name) => {
                let plain = name.replace('-', "_");
                let of_nginx = format!("http_{plain}");
                let is_it = |column: &String| {
                    let column = column.to_ascii_lowercase();
                    column == *name || column == plain || column == of_nginx
                };
                columns.iter().position(is_it)
            }
        };
        let column = found.ok_or_else(|| format!("no column for the key {key}; {}", there_is()))?;
        Ok(Self { records, time, key: column, is_address: *key == KeyFrom::Address })
    }

    /// Whether it is a header that names a time.
    pub(super) fn is_header(line: &[u8], time: Option<&str>) -> bool {
        let is_time = |column: &String| match time {
            Some(name) => column == name,
            None => TIMES.contains(&column.as_str()),
        };
        columns(line).is_some_and(|(_, columns)| columns.iter().any(is_time))
    }

    pub(super) fn read(&mut self, line: &[u8], key: &mut Vec<u8>) -> Result<Told, Unreadable> {
        if !self.records.read(line) {
            return Err(Unreadable("not one record a line"));
        }
        if self.time >= self.records.ends.len() {
            return Err(Unreadable("too few columns for the time"));
        }
        let now = moment::parse(self.records.value(self.time))
            .ok_or(Unreadable("a time that is neither RFC 3339 nor a number"))?;
        if self.key >= self.records.ends.len() {
            return Err(Unreadable("too few columns for the key"));
        }
        let name = self.records.value(self.key).trim_ascii();
        if matches!(name, b"" | b"-") {
            return Ok(Told::Nobody);
        }
        if !self.is_address {
            key.extend_from_slice(name);
        } else if !put_address(name, key) {
            return Err(Unreadable("a client that is no address"));
        }
        Ok(Told::Request(now))
    }
}

/// What reads the lines under a header, and the names in it.
fn columns(header: &[u8]) -> Option<(Records, Vec<String>)> {
    let header = header.strip_prefix("\u{feff}".as_bytes()).unwrap_or(header);
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

/// The values of one line after the other.
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

    /// Reads a line; false if it is not a whole record.
    fn read(&mut self, line: &[u8]) -> bool {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        self.reader.reset();
        // Neither has more bytes than the line, nor more values than it has bytes and one.
        self.values.resize(line.len() + 1, 0);
        self.ends.resize(line.len() + 1, 0);
        let (mut read, mut written, mut ended) = (0, 0, 0);
        loop {
            // The line's end that was cut off is part of a record: in quotes the record goes on behind it.
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
    use crate::backtest::moment::Moment;

    #[track_caller]
    fn finds(header: &str, key: &str, line: &str, expected: &str) {
        let mut table =
            Table::new(header.as_bytes(), &key.parse().expect("a key"), None).expect("a table");
        let mut name = Vec::new();
        // What was read before must not matter.
        let _ = table.read(b"\"", &mut Vec::new());
        let shown = match table.read(line.as_bytes(), &mut name) {
            Ok(Told::Request(now)) => format!("{} {}", Moment(now), String::from_utf8_lossy(&name)),
            Ok(Told::Nobody | Told::Header) => "nobody".to_owned(),
            Err(Unreadable(reason)) => reason.to_owned(),
        };
        assert_eq!(shown, expected, "{key} in {line}");
    }

    #[test]
    fn columns_are_found_by_the_header() {
        finds("time,ip,user", "ip", "0,192.0.2.1,a", "1970-01-01T00:00:00Z 192.0.2.1");
        finds("user;ts", "field:user", "\"a;\"\"b\"\"\";1", "1970-01-01T00:00:01Z a;\"b\"");
        finds("\u{feff}timestamp\tX-Api-Key", "header:x-api-key", "2\tk", "1970-01-01T00:00:02Z k");
        finds("msec,http_x_api_key", "header:x-api-key", "3,-", "nobody");
        finds("time,ip", "ip", "0,192.0.2.1\r", "1970-01-01T00:00:00Z 192.0.2.1");
    }

    #[test]
    fn what_cannot_be_read_says_why() {
        finds("user,time", "field:user", "a", "too few columns for the time");
        finds("time,user", "field:user", "1", "too few columns for the key");
        finds("time,user", "field:user", "1,\"a", "not one record a line");
        finds("time,user", "field:user", "x,a", "a time that is neither RFC 3339 nor a number");
        finds("time,ip", "ip", "1,a", "a client that is no address");
    }

    #[test]
    fn a_column_that_is_not_there_is_told_with_those_that_are() {
        let refused = |header: &str, key: &str, time| {
            Table::new(header.as_bytes(), &key.parse().expect("a key"), time)
                .expect_err("no column")
        };
        assert_eq!(
            refused("time,user", "ip", None),
            "no column for the key ip; there is time, user"
        );
        assert!(refused("at,user", "field:user", None).contains("no column for the time, one of"));
        assert!(refused("time,user", "field:user", Some("at")).contains("no column \"at\""));
    }
}
