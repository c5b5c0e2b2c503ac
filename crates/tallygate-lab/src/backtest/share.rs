//! A share of clients in percent, such as `99.9`, stored exactly.

use std::fmt;
use std::str::FromStr;

/// A share above 0 % and up to 100 %, in millionths of a percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share(u64);

const PERCENT: u64 = 1_000_000;
const ALL: u64 = 100 * PERCENT;

impl Share {
    /// Creates a share from thousandths of a percent.
    pub(super) const fn thousandths(thousandths: u64) -> Self {
        Self(thousandths * 1_000)
    }

    /// Returns the smallest number of clients that is at least this share of `clients`.
    pub(super) fn of(self, clients: u64) -> u64 {
        let product = u128::from(clients) * u128::from(self.0);
        u64::try_from(product.div_ceil(u128::from(ALL))).unwrap_or(u64::MAX)
    }

    /// Returns the share in percent, for JSON.
    pub(super) fn percent(self) -> f64 {
        self.to_string().parse().unwrap_or(100.0)
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "found {text:?}; expected a percentage above 0 and up to 100, such as 99.9, with at most 6 decimal places"
            )
        };
        let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
        let is_number = |digits: &str, most: usize| {
            (1..=most).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit())
        };
        if !is_number(whole, 3) || !is_number(part, 6) {
            return Err(expected());
        }
        let number = |digits: &str| digits.parse::<u64>().map_err(|_| expected());
        let share = number(whole)? * PERCENT + number(&format!("{part:0<6}"))?;
        if share == 0 || share > ALL { Err(expected()) } else { Ok(Self(share)) }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0 / PERCENT)?;
        let part = format!("{:06}", self.0 % PERCENT);
        match part.trim_end_matches('0') {
            "" => Ok(()),
            part => write!(f, ".{part}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_parsed_exactly_and_printed_unchanged() {
        for text in ["99.9", "100", "50", "0.000001", "99.999999"] {
            assert_eq!(text.parse::<Share>().expect("the share is valid").to_string(), text);
        }
        for bad in
            ["", "0", "0.0", "100.000001", "101", "-1", "+1", "1e1", "99.", ".9", "0.0000001"]
        {
            assert!(bad.parse::<Share>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_fraction_of_a_client_is_rounded_up() {
        let share = |text: &str| text.parse::<Share>().expect("the share is valid");
        assert_eq!(share("99.9").of(1000), 999);
        assert_eq!(share("99.9").of(1001), 1000);
        assert_eq!(share("99.9").of(10), 10);
        assert_eq!(share("100").of(u64::MAX), u64::MAX);
        assert_eq!(share("50").of(0), 0);
    }
}
