//! Parses lines that are JSON objects.
//!
//! The parser keeps only the time and the key of a line and skips the rest. A field is given by its name, or by a path
//! with dots into nested objects. If several names are possible, the first one in the list wins.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::filter::{FilterField, LineFilter, header_columns};
use super::format::{LogOptions, ParsedLine, UNKNOWN_TIMESTAMP, Unreadable};
use super::key::{KeyFrom, put_key};
use super::timestamp;

/// The fields that may hold the time, if the caller names none.
pub(super) const TIMES: [&str; 7] =
    ["time", "timestamp", "ts", "@timestamp", "msec", "time_iso8601", "time_local"];

/// The fields that may hold the client's address.
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

/// The objects that may hold request headers, in addition to the line itself.
const HEADERS: [&str; 5] =
    ["headers", "request_headers", "request.headers", "http.request.headers", "req.headers"];

/// A parser for JSON lines.
#[derive(Debug)]
pub(super) struct Json {
    fields: Node,
    is_address: bool,
    filters: Vec<LineFilter>,
}

/// The fields to find in an object, as a tree.
#[derive(Debug, Default)]
struct Node {
    /// What the value is used for, with the rank of its name for each use: 0 has priority.
    roles: Vec<(Role, usize)>,
    children: Vec<(String, Self)>,
    /// Whether the children are headers, which match in any case and with `_` for `-`.
    are_headers: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Time,
    Key,
    /// The value of the filter with this index.
    Filter(usize),
}

impl Node {
    /// Adds the field at a path. The dots may be part of a name or separate nested objects.
    fn add(&mut self, path: &str, role: (Role, usize)) {
        self.child(path).use_for(role);
        if let Some((first, rest)) = path.split_once('.')
            && !first.is_empty()
            && !rest.is_empty()
        {
            self.child(first).add(rest, role);
        }
    }

    /// Adds a field under several names, the best first.
    fn add_all(&mut self, names: &[impl AsRef<str>], role: Role) {
        for (rank, name) in names.iter().enumerate() {
            self.add(name.as_ref(), (role, rank));
        }
    }

    /// Adds a header in every object that may hold headers, and as a field of the line itself.
    fn add_header_anywhere(&mut self, name: &str, role: Role) {
        for (rank, path) in HEADERS.into_iter().enumerate() {
            self.add_header(path, name, (role, rank));
        }
        for (rank, name) in header_columns(name).iter().enumerate() {
            self.add(name, (role, HEADERS.len() + rank));
        }
    }

    /// Adds a header in the object at a path.
    fn add_header(&mut self, path: &str, name: &str, role: (Role, usize)) {
        let mut node = self;
        for step in path.split('.') {
            node = node.child(step);
        }
        node.are_headers = true;
        node.child(name).use_for(role);
    }

    /// Uses the value of this field. If a role has several names for it, the one with the lowest rank was added first.
    fn use_for(&mut self, (role, rank): (Role, usize)) {
        if self.roles.iter().all(|(known, _)| *known != role) {
            self.roles.push((role, rank));
        }
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
        let matches =
            |known: &str| known == name || (self.are_headers && is_same_header(known, name));
        self.children.iter().find(|(known, _)| matches(known)).map(|(_, child)| child)
    }
}

fn is_same_header(one: &str, other: &str) -> bool {
    let plain = |byte: u8| if byte == b'_' { b'-' } else { byte.to_ascii_lowercase() };
    one.len() == other.len() && one.bytes().map(plain).eq(other.bytes().map(plain))
}

impl Json {
    pub(super) fn new(options: &LogOptions) -> Self {
        let mut fields = Node::default();
        match &options.time {
            Some(field) => fields.add(field, (Role::Time, 0)),
            None => fields.add_all(&TIMES, Role::Time),
        }
        match &options.key {
            KeyFrom::Address => fields.add_all(&ADDRESSES, Role::Key),
            KeyFrom::Field(field) => fields.add(field, (Role::Key, 0)),
            KeyFrom::Header(name) => fields.add_header_anywhere(name, Role::Key),
        }
        for (index, filter) in options.filters.iter().enumerate() {
            let role = Role::Filter(index);
            match &filter.field {
                FilterField::Named(_) => fields.add_all(&filter.field.names(), role),
                FilterField::Header(name) => fields.add_header_anywhere(name, role),
            }
        }
        let is_address = options.key == KeyFrom::Address;
        Self { fields, is_address, filters: options.filters.clone() }
    }

    /// Returns whether a line has this format.
    pub(super) fn matches(line: &[u8]) -> bool {
        let line = line.trim_ascii();
        line.starts_with(b"{") && serde_json::from_slice::<IgnoredAny>(line).is_ok()
    }

    pub(super) fn read(&self, line: &[u8], key: &mut Vec<u8>) -> Result<ParsedLine, Unreadable> {
        if !line.trim_ascii_start().starts_with(b"{") {
            return Err(Unreadable("not a JSON object"));
        }
        let filters = vec![None; self.filters.len()];
        let mut found = FieldValues { time: None, key: None, filters };
        let mut json = serde_json::Deserializer::from_slice(line);
        let read = NodeVisitor { node: &self.fields, found: &mut found }.deserialize(&mut json);
        read.and_then(|()| json.end()).map_err(|_| Unreadable("not a JSON object"))?;
        let time = found.time.ok_or(Unreadable("no timestamp field"))?.1;
        let now = timestamp::parse(time.as_bytes()).ok_or(Unreadable(UNKNOWN_TIMESTAMP))?;
        let mut tests = self.filters.iter().zip(&found.filters);
        let passes = |(filter, found): (&LineFilter, &Option<(usize, Cow<'_, str>)>)| {
            filter.passes(found.as_ref().map(|(_, value)| value.as_bytes()))
        };
        if !tests.all(passes) {
            return Ok(ParsedLine::Filtered);
        }
        let name = found.key.as_ref().map_or("", |(_, name)| name);
        put_key(name.as_bytes(), self.is_address, now, key)
    }
}

/// The values found so far, with their ranks.
struct FieldValues<'a> {
    time: Option<(usize, Cow<'a, str>)>,
    key: Option<(usize, Cow<'a, str>)>,
    /// One per filter.
    filters: Vec<Option<(usize, Cow<'a, str>)>>,
}

struct NodeVisitor<'n, 'f, 'a> {
    node: &'n Node,
    found: &'f mut FieldValues<'a>,
}

impl<'a> NodeVisitor<'_, '_, 'a> {
    #[expect(clippy::needless_pass_by_value, reason = "callers make the value for this call")]
    fn put(self, value: Cow<'a, str>) {
        for &(role, rank) in &self.node.roles {
            let place = match role {
                Role::Time => &mut self.found.time,
                Role::Key => &mut self.found.key,
                Role::Filter(index) => &mut self.found.filters[index],
            };
            if place.as_ref().is_none_or(|(known, _)| rank < *known) {
                *place = Some((rank, value.clone()));
            }
        }
    }
}

impl<'a> DeserializeSeed<'a> for NodeVisitor<'_, '_, 'a> {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'a> Visitor<'a> for NodeVisitor<'_, '_, 'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key_seed(Name)? {
            match self.node.find(&name) {
                Some(node) => map.next_value_seed(NodeVisitor { node, found: &mut *self.found })?,
                None => map.next_value::<IgnoredAny>().map(|_| ())?,
            }
        }
        Ok(())
    }

    /// Headers are often lists of values; the first one is used.
    fn visit_seq<A: SeqAccess<'a>>(self, mut seq: A) -> Result<(), A::Error> {
        let first = NodeVisitor { node: self.node, found: &mut *self.found };
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

    /// The printed number has all digits of the original, up to 17.
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

/// Deserializes a name, borrowed from the line if possible.
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
    use crate::backtest::format::{NO_ADDRESS, options};
    use crate::backtest::timestamp::Timestamp;

    #[track_caller]
    fn finds(key: &str, time: Option<&str>, line: &str, expected: &str) {
        let json = Json::new(&options(key, time));
        let mut name = Vec::new();
        let shown = match json.read(line.as_bytes(), &mut name) {
            Ok(ParsedLine::Request(now)) => {
                format!("{} {}", Timestamp(now), String::from_utf8_lossy(&name))
            }
            Ok(_) => "no key".to_owned(),
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
        finds("field:n.m", None, line, "no key");
        finds("field:no", None, line, "no key");
        let flat = r#" {"time":"2023-11-14T22:13:20Z","http_x_api_key":"a","headers.x-api-key":"b","user.id":"u"}"#;
        finds("header:X-Api-Key", None, flat, "2023-11-14T22:13:20Z a");
        finds("field:user.id", None, flat, "2023-11-14T22:13:20Z u");
    }

    #[test]
    fn the_first_name_in_the_list_wins_regardless_of_the_order_in_the_line() {
        let line = r#"{"msec":1,"at":"1970-01-01T00:00:09Z","ts":2,"time":"3","client":"192.0.2.1","remote_addr":"192.0.2.2"}"#;
        finds("ip", None, line, "1970-01-01T00:00:03Z 192.0.2.2");
        finds("ip", Some("at"), line, "1970-01-01T00:00:09Z 192.0.2.2");
    }

    #[test]
    fn a_malformed_line_is_reported_with_its_reason() {
        for (line, reason) in [
            ("", "not a JSON object"),
            ("[1]", "not a JSON object"),
            (r#"{"ts":1"#, "not a JSON object"),
            (r#"{"ts":1} x"#, "not a JSON object"),
            (r#"{"at":1}"#, "no timestamp field"),
            (r#"{"ts":null}"#, "no timestamp field"),
            (r#"{"ts":"soon"}"#, UNKNOWN_TIMESTAMP),
            (r#"{"ts":1,"ip":"localhost"}"#, NO_ADDRESS),
        ] {
            finds("ip", None, line, reason);
        }
        let deep = format!(r#"{{"a":{}"#, "[".repeat(60_000));
        finds("ip", None, &deep, "not a JSON object");
    }
}
