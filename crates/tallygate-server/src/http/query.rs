//! Query parameters and names in paths: percent-decoding. Unknown parameters are errors.

use super::problem::Problem;

/// The parameters of a query, decoded.
pub(super) struct Query(Vec<(String, Vec<u8>)>);

impl Query {
    /// Parses a query. Unknown and repeated parameters are errors.
    pub(super) fn parse(query: Option<&str>, known: &[&str]) -> Result<Self, Problem> {
        Self::with_lists(query, known, &[])
    }

    /// Parses a query in which some parameters may be repeated.
    pub(super) fn with_lists(
        query: Option<&str>,
        known: &[&str],
        lists: &[&str],
    ) -> Result<Self, Problem> {
        let mut read = Vec::new();
        for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let name = String::from_utf8_lossy(&decoded(name, true)?).into_owned();
            if !known.contains(&name.as_str()) {
                let there_is = match known {
                    [] => "this path has no parameters".to_owned(),
                    [one] => format!("the only parameter of this path is {one:?}"),
                    known => format!("the parameters of this path are {}", known.join(", ")),
                };
                return Err(Problem::bad(format!("unknown parameter {name:?}; {there_is}")));
            }
            if !lists.contains(&name.as_str()) && read.iter().any(|(other, _)| *other == name) {
                return Err(Problem::bad(format!("parameter {name:?} is given more than once")));
            }
            read.push((name, decoded(value, true)?));
        }
        Ok(Self(read))
    }

    pub(super) fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_slice())
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&str>, Problem> {
        Ok(self.texts(name)?.first().copied())
    }

    /// Returns all values of a parameter.
    pub(super) fn texts(&self, name: &str) -> Result<Vec<&str>, Problem> {
        let given = self.0.iter().filter(|(known, _)| known == name);
        let texts = given.map(|(_, value)| std::str::from_utf8(value)).collect::<Result<_, _>>();
        texts.map_err(|_| Problem::bad(format!("parameter {name:?} is not valid UTF-8")))
    }

    /// Returns a required parameter.
    pub(super) fn required(&self, name: &str) -> Result<&[u8], Problem> {
        self.bytes(name).ok_or_else(|| Problem::bad(format!("missing parameter {name:?}")))
    }

    /// Returns a whole number, written in digits.
    pub(super) fn number(&self, name: &str) -> Result<Option<u64>, Problem> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let digits = Some(text).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        let number = digits.and_then(|digits| digits.parse().ok());
        number.map(Some).ok_or_else(|| {
            let expected = format!("expected a whole number from 0 to {}", u64::MAX);
            Problem::bad(format!("parameter {name:?}: found {text:?}; {expected}"))
        })
    }
}

/// Decodes percent-encoding; in a query, `+` is a space.
pub(super) fn decoded(text: &str, is_query: bool) -> Result<Vec<u8>, Problem> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        rest = after;
        match byte {
            b'%' => {
                let digits = after.first_chunk::<2>().and_then(|digits| {
                    let [high, low] = digits.map(|digit| char::from(digit).to_digit(16));
                    u8::try_from(high? * 16 + low?).ok()
                });
                let expected = "expected two hexadecimal digits after each %";
                out.push(digits.ok_or_else(|| Problem::bad(format!("{text:?}: {expected}")))?);
                rest = &after[2..];
            }
            b'+' if is_query => out.push(b' '),
            _ => out.push(*byte),
        }
    }
    Ok(out)
}

/// Percent-encodes bytes for a query.
pub(super) fn encoded(bytes: &[u8]) -> String {
    let mut out = String::new();
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(byte.into());
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decoded(&encoded(&all), true).unwrap(), all);
        assert_eq!(decoded("a+b%20c", true).unwrap(), b"a b c");
        assert_eq!(decoded("a+b", false).unwrap(), b"a+b");
        for broken in ["%", "%4", "%zz", "a%+1"] {
            assert!(decoded(broken, true).is_err(), "{broken}");
        }
    }

    /// Fault A14.
    #[test]
    fn a_number_is_digits_and_nothing_else() {
        let number =
            |text: &str| Query::parse(Some(text), &["cost"]).and_then(|q| q.number("cost"));
        assert_eq!(number("cost=18446744073709551615").unwrap(), Some(u64::MAX));
        assert_eq!(number("").unwrap(), None);
        for bad in ["-1", "%2B1", "+1", "1e3", "0x10", "inf", "nan", "", "18446744073709551616"] {
            assert!(number(&format!("cost={bad}")).is_err(), "{bad}");
        }
        assert!(number("cost=1&cost=2").is_err());
        assert!(number("csot=1").is_err());
    }
}
