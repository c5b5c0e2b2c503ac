//! Lines that are JSON objects, as many servers log.
//!
//! Only what is wanted is kept of a line; the rest is read past. A field is found by its name, or by a path with dots
//! into objects; where a name may be one of several, the first of them counts.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::format::{Told, Unreadable};
use super::key::{KeyFrom, put_address};
use super::moment;

/// Where the time is looked for unless it is said.
pub(super) const TIMES: [&str; 7] =
    ["time", "timestamp", "ts", "@timestamp", "msec", "time_iso8601", "time_local"];

/// Where the client's address is looked for.
pub(super) const ADDRESSES: [&str; 12] = [
    "remote_addr",
    "client_ip",
    "remote_ip",
    "ip",
    "clientip",
    "client",
    "ClientHost",
    "ClientAddr",
    "downstream_remote_address",
    "request.client_ip",
    "request.remote_ip",
    "client.ip",
];

/// The objects that hold header fields, besides the line itself.
const HEADERS: [&str; 5] =
    ["headers", "request_headers", "request.headers", "http.request.headers", "req.headers"];

/// How lines are read.
#[derive(Debug)]
pub(super) struct Json {
    wanted: Node,
    is_address: bool,
}

/// What is wanted of an object.
#[derive(Debug, Default)]
struct Node {
    /// What the value itself is wanted for, and how much: 0 most.
    wanted: Option<(Role, usize)>,
    children: Vec<(String, Self)>,
    /// Whether its names are those of header fields: in any case, and with either dash.
    are_headers: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Time,
    Key,
}

impl Node {
    /// Wants what is found at a path, whether a name has the dots or objects lie within each other.
    fn want(&mut self, path: &str, wanted: (Role, usize)) {
        self.child(path).wanted.get_or_insert(wanted);
        if let Some((first, rest)) = path.split_once('.')
            && !first.is_empty()
            && !rest.is_empty()
        {
            self.child(first).want(rest, wanted);
        }
    }

    /// Wants the header field of a name in the objects at a path.
    fn want_header(&mut self, path: &str, name: &str, wanted: (Role, usize)) {
        let mut node = self;
        for step in path.split('.') {
            node = node.child(step);
        }
        node.are_headers = true;
        node.child(name).wanted.get_or_insert(wanted);
    }

    fn child(&mut self, name: &str) -> &mut Self {
        let place = self.children.iter().position(|(known, _)| known == name);
        let place = place.unwrap_or_else(|| {
            self.children.push((name.to_owned(), Self::default()));
            self.children.len() - 1
        });
        &mut self.children[place].1
    }

    fn find(&self, name: &str) -> Option<&Self> {
        let is_it =
            |known: &str| known == name || (self.are_headers && is_same_header(known, name));
        self.children.iter().find(|(known, _)| is_it(known)).map(|(_, child)| child)
    }
}

fn is_same_header(one: &str, other: &str) -> bool {
    let plain = |byte: u8| if byte == b'_' { b'-' } else { byte.to_ascii_lowercase() };
    one.len() == other.len() && one.bytes().map(plain).eq(other.bytes().map(plain))
}

impl Json {
    pub(super) fn new(key: &KeyFrom, time: Option<&str>) -> Self {
        let mut wanted = Node::default();
        match time {
            Some(field) => wanted.want(field, (Role::Time, 0)),
            None => TIMES
                .iter()
                .enumerate()
                .for_each(|(rank, field)| wanted.want(field, (Role::Time, rank))),
        }
        match key {
            KeyFrom::Address => ADDRESSES
                .iter()
                .enumerate()
                .for_each(|(rank, field)| wanted.want(field, (Role::Key, rank))),
            KeyFrom::Field(field) => wanted.want(field, (Role::Key, 0)),
            KeyFrom::Header(name) => {
                for (rank, path) in HEADERS.into_iter().enumerate() {
                    wanted.want_header(path, name, (Role::Key, rank));
                }
                let plain = name.replace('-', "_");
                for (rank, name) in [name, &plain, &format!("http_{plain}")].into_iter().enumerate()
                {
                    wanted.want(name, (Role::Key, HEADERS.len() + rank));
                }
            }
        }
        Self { wanted, is_address: *key == KeyFrom::Address }
    }

    /// Whether it is such a line.
    pub(super) fn is_one(line: &[u8]) -> bool {
        let line = line.trim_ascii();
        line.starts_with(b"{") && serde_json::from_slice::<IgnoredAny>(line).is_ok()
    }

    pub(super) fn read(&self, line: &[u8], key: &mut Vec<u8>) -> Result<Told, Unreadable> {
        if !line.trim_ascii_start().starts_with(b"{") {
            return Err(Unreadable("no JSON object"));
        }
        let mut found = Found::default();
        let mut json = serde_json::Deserializer::from_slice(line);
        let read = Wanted { node: &self.wanted, found: &mut found }.deserialize(&mut json);
        read.and_then(|()| json.end()).map_err(|_| Unreadable("no JSON object"))?;
        let time = found.time.ok_or(Unreadable("no field with the time"))?.1;
        let now = moment::parse(time.as_bytes())
            .ok_or(Unreadable("a time that is neither RFC 3339 nor a number"))?;
        let Some((_, name)) = found.key.filter(|(_, name)| !matches!(&**name, "" | "-")) else {
            return Ok(Told::Nobody);
        };
        if !self.is_address {
            key.extend_from_slice(name.as_bytes());
        } else if !put_address(name.as_bytes(), key) {
            return Err(Unreadable("a client that is no address"));
        }
        Ok(Told::Request(now))
    }
}

/// What was found so far, with how much it was wanted.
#[derive(Default)]
struct Found<'a> {
    time: Option<(usize, Cow<'a, str>)>,
    key: Option<(usize, Cow<'a, str>)>,
}

struct Wanted<'n, 'f, 'a> {
    node: &'n Node,
    found: &'f mut Found<'a>,
}

impl<'a> Wanted<'_, '_, 'a> {
    fn put(self, value: Cow<'a, str>) {
        let Some((role, rank)) = self.node.wanted else { return };
        let place = match role {
            Role::Time => &mut self.found.time,
            Role::Key => &mut self.found.key,
        };
        if place.as_ref().is_none_or(|(known, _)| rank < *known) {
            *place = Some((rank, value));
        }
    }
}

impl<'a> DeserializeSeed<'a> for Wanted<'_, '_, 'a> {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'a> Visitor<'a> for Wanted<'_, '_, 'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key_seed(Name)? {
            match self.node.find(&name) {
                Some(node) => map.next_value_seed(Wanted { node, found: &mut *self.found })?,
                None => map.next_value::<IgnoredAny>().map(|_| ())?,
            }
        }
        Ok(())
    }

    /// Header fields are often lists of values; the first is the client.
    fn visit_seq<A: SeqAccess<'a>>(self, mut seq: A) -> Result<(), A::Error> {
        let first = Wanted { node: self.node, found: &mut *self.found };
        if seq.next_element_seed(first)?.is_some() {
            while seq.next_element::<IgnoredAny>()?.is_some() {}
        }
        Ok(())
    }

    fn visit_borrowed_str<E>(self, text: &'a str) -> Result<(), E> {
        self.put(Cow::Borrowed(text));
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.put(Cow::Owned(text.to_owned()));
        Ok(())
    }

    fn visit_u64<E>(self, number: u64) -> Result<(), E> {
        self.put(Cow::Owned(number.to_string()));
        Ok(())
    }

    fn visit_i64<E>(self, number: i64) -> Result<(), E> {
        self.put(Cow::Owned(number.to_string()));
        Ok(())
    }

    /// Printed again, it has all the digits that it was written with, up to 17 of them.
    fn visit_f64<E>(self, number: f64) -> Result<(), E> {
        self.put(Cow::Owned(number.to_string()));
        Ok(())
    }

    fn visit_bool<E>(self, flag: bool) -> Result<(), E> {
        self.put(Cow::Borrowed(if flag { "true" } else { "false" }));
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// A name, in the line where it can be.
struct Name;

impl<'a> DeserializeSeed<'a> for Name {
    type Value = Cow<'a, str>;

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<Cow<'a, str>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'a> Visitor<'a> for Name {
    type Value = Cow<'a, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_borrowed_str<E>(self, name: &'a str) -> Result<Cow<'a, str>, E> {
        Ok(Cow::Borrowed(name))
    }

    fn visit_str<E>(self, name: &str) -> Result<Cow<'a, str>, E> {
        Ok(Cow::Owned(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backtest::moment::Moment;

    #[track_caller]
    fn finds(key: &str, time: Option<&str>, line: &str, expected: &str) {
        let json = Json::new(&key.parse().expect("a key"), time);
        let mut name = Vec::new();
        let shown = match json.read(line.as_bytes(), &mut name) {
            Ok(Told::Request(now)) => format!("{} {}", Moment(now), String::from_utf8_lossy(&name)),
            Ok(Told::Nobody | Told::Header) => "nobody".to_owned(),
            Err(Unreadable(reason)) => reason.to_owned(),
        };
        assert_eq!(shown, expected, "{key} in {line}");
    }

    #[test]
    fn a_client_is_found_by_its_address_a_header_or_a_field() {
        let line = r#"{"ts":1700000000.5,"request":{"remote_ip":"2001:db8::1","headers":{"X-Api-Key":["k\u0031","k2"]}},"user":{"id":7},"n.m":null}"#;
        finds("ip", None, line, "2023-11-14T22:13:20.500Z 2001:db8::/64");
        finds("header:x-api-key", None, line, "2023-11-14T22:13:20.500Z k1");
        finds("field:user.id", None, line, "2023-11-14T22:13:20.500Z 7");
        finds("field:n.m", None, line, "nobody");
        finds("field:no", None, line, "nobody");
        let flat = r#" {"time":"2023-11-14T22:13:20Z","http_x_api_key":"a","headers.x-api-key":"b","user.id":"u"}"#;
        finds("header:X-Api-Key", None, flat, "2023-11-14T22:13:20Z a");
        finds("field:user.id", None, flat, "2023-11-14T22:13:20Z u");
    }

    #[test]
    fn the_first_of_several_names_counts_wherever_it_stands() {
        let line = r#"{"msec":1,"at":"1970-01-01T00:00:09Z","ts":2,"time":"3","client":"192.0.2.1","remote_addr":"192.0.2.2"}"#;
        finds("ip", None, line, "1970-01-01T00:00:03Z 192.0.2.2");
        finds("ip", Some("at"), line, "1970-01-01T00:00:09Z 192.0.2.2");
    }

    #[test]
    fn what_cannot_be_read_says_why() {
        for (line, reason) in [
            ("", "no JSON object"),
            ("[1]", "no JSON object"),
            (r#"{"ts":1"#, "no JSON object"),
            (r#"{"ts":1} x"#, "no JSON object"),
            (r#"{"at":1}"#, "no field with the time"),
            (r#"{"ts":null}"#, "no field with the time"),
            (r#"{"ts":"soon"}"#, "a time that is neither RFC 3339 nor a number"),
            (r#"{"ts":1,"ip":"localhost"}"#, "a client that is no address"),
        ] {
            finds("ip", None, line, reason);
        }
        let deep = format!(r#"{{"a":{}"#, "[".repeat(60_000));
        finds("ip", None, &deep, "no JSON object");
    }
}
