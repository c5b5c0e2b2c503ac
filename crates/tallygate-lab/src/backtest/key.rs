//! The field of a log line that identifies the client.
//!
//! Addresses are converted to keys as in the server: an IPv6 client is its /64, an IPv4 client is its address, also if it
//! is embedded in an IPv6 address.

use std::fmt;
use std::str::FromStr;

use tallygate::address;
use tallygate_core::Tick;

use super::format::{NO_ADDRESS, ParsedLine, Unreadable};

/// The field that identifies the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyFrom {
    /// The client's address.
    Address,
    /// A request header, by its name in lower case.
    Header(String),
    /// Another field of the log.
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

/// Appends the key of the client with this address. Returns false if the text is not an address.
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

/// Returns whether the text is an IPv4 address in its usual form, which is its own key.
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

/// Appends a client's name, or its key if it is an address. The text is empty or `-` if the line has no client.
pub(super) fn put_key(
    text: &[u8],
    is_address: bool,
    now: Tick,
    out: &mut Vec<u8>,
) -> Result<ParsedLine, Unreadable> {
    if matches!(text, b"" | b"-") {
        return Ok(ParsedLine::NoKey);
    }
    if !is_address {
        out.extend_from_slice(text);
    } else if !put_address(text, out) {
        return Err(Unreadable(NO_ADDRESS));
    }
    Ok(ParsedLine::Request(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn has_key(text: &str, expected: Option<&str>) {
        let mut name = Vec::new();
        let found = put_address(text.as_bytes(), &mut name);
        assert_eq!(
            found.then(|| String::from_utf8(name).expect("the key is UTF-8")).as_deref(),
            expected
        );
    }

    #[test]
    fn addresses_are_converted_to_keys_as_in_the_server() {
        has_key("192.0.2.1", Some("192.0.2.1"));
        has_key("192.0.2.1:4711", Some("192.0.2.1"));
        has_key("::ffff:192.0.2.1", Some("192.0.2.1"));
        has_key("2001:db8:1:2:3::4", Some("2001:db8:1:2::/64"));
        has_key("[2001:db8:1:2:3::4]:443", Some("2001:db8:1:2::/64"));
        for none in ["", "-", "192.0.2", "192.0.2.256", "192.0.2.01", "1.2.3.4.5", "localhost"] {
            has_key(none, None);
        }
    }

    #[test]
    fn a_plain_ipv4_address_has_numbers_from_0_to_255() {
        for number in 0..1000 {
            assert_eq!(is_plain_v4(format!("10.{number}.0.9").as_bytes()), number < 256);
        }
    }

    #[test]
    fn a_printed_key_parses_as_the_same_key() {
        for text in ["ip", "header:x-api-key", "field:request.user"] {
            assert_eq!(text.parse::<KeyFrom>().expect("the key is valid").to_string(), text);
        }
        assert_eq!("header:X-Api-Key".parse(), Ok(KeyFrom::Header("x-api-key".into())));
        for bad in ["", "IP", "header:", "field:", "cookie:a"] {
            assert!(bad.parse::<KeyFrom>().is_err(), "{bad}");
        }
    }
}
