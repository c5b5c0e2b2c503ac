//! Who a request is by: where its name is found in a line.
//!
//! An address is the client that the server would take it for: IPv6 by its /64, IPv4 in whatever dress.

use std::fmt;
use std::str::FromStr;

use crate::address;

/// Where the client's name is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyFrom {
    /// The client's address.
    Address,
    /// A header field of the request, by its name in lower case.
    Header(String),
    /// Any other field of the log.
    Field(String),
}

impl FromStr for KeyFrom {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "ip" => Ok(Self::Address),
            Some(("header", name)) if !name.is_empty() => {
                Ok(Self::Header(name.to_ascii_lowercase()))
            }
            Some(("field", name)) if !name.is_empty() => Ok(Self::Field(name.to_owned())),
            _ => Err(format!("found {text:?}; expected `ip`, `header:NAME` or `field:NAME`")),
        }
    }
}

impl fmt::Display for KeyFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address => f.write_str("ip"),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Field(name) => write!(f, "field:{name}"),
        }
    }
}

/// Appends the client with this address; false if it is none.
pub(super) fn put_address(text: &[u8], out: &mut Vec<u8>) -> bool {
    if is_plain_v4(text) {
        out.extend_from_slice(text);
        return true;
    }
    let address = address::parse(text);
    if let Some(address) = address {
        out.extend_from_slice(address::key(address).as_bytes());
    }
    address.is_some()
}

/// Whether it is an IPv4 address as everybody writes them, which then is its own name.
#[inline]
fn is_plain_v4(text: &[u8]) -> bool {
    let mut parts = 0;
    for part in text.split(|byte| *byte == b'.') {
        parts += 1;
        let is_number = matches!(
            part,
            [b'0'..=b'9']
                | [b'1'..=b'9', b'0'..=b'9']
                | [b'1', b'0'..=b'9', b'0'..=b'9']
                | [b'2', b'0'..=b'4', b'0'..=b'9']
                | [b'2', b'5', b'0'..=b'5']
        );
        if !is_number || parts > 4 {
            return false;
        }
    }
    parts == 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn is(text: &str, expected: Option<&str>) {
        let mut name = Vec::new();
        let found = put_address(text.as_bytes(), &mut name);
        assert_eq!(found.then(|| String::from_utf8(name).expect("text")).as_deref(), expected);
    }

    #[test]
    fn an_address_is_the_client_that_the_server_takes_it_for() {
        is("192.0.2.1", Some("192.0.2.1"));
        is("192.0.2.1:4711", Some("192.0.2.1"));
        is("::ffff:192.0.2.1", Some("192.0.2.1"));
        is("2001:db8:1:2:3::4", Some("2001:db8:1:2::/64"));
        is("[2001:db8:1:2:3::4]:443", Some("2001:db8:1:2::/64"));
        for none in ["", "-", "192.0.2", "192.0.2.256", "192.0.2.01", "1.2.3.4.5", "localhost"] {
            is(none, None);
        }
    }

    #[test]
    fn the_short_way_knows_every_number_from_0_to_255_and_no_other() {
        for number in 0..1000 {
            assert_eq!(is_plain_v4(format!("10.{number}.0.9").as_bytes()), number < 256);
        }
    }

    #[test]
    fn a_key_is_read_as_it_is_printed() {
        for text in ["ip", "header:x-api-key", "field:request.user"] {
            assert_eq!(text.parse::<KeyFrom>().expect("a key").to_string(), text);
        }
        assert_eq!("header:X-Api-Key".parse(), Ok(KeyFrom::Header("x-api-key".into())));
        for bad in ["", "IP", "header:", "field:", "cookie:a"] {
            assert!(bad.parse::<KeyFrom>().is_err(), "{bad}");
        }
    }
}
