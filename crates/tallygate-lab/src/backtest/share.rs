//! A share of clients, in percent, exactly as it was written: `99.9`.

use std::fmt;
use std::str::FromStr;

/// More than nothing, at most all, in millionths of a percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share(u64);

const PERCENT: u64 = 1_000_000;
const ALL: u64 = 100 * PERCENT;

impl Share {
    /// Thousandths of a percent.
    pub(super) const fn thousandths(thousandths: u64) -> Self {
        Self(thousandths * 1_000)
    }

    /// The least number of so many clients that is this share of them.
    pub(super) fn of(self, clients: u64) -> u64 {
        let product = u128::from(clients) * u128::from(self.0);
        u64::try_from(product.div_ceil(u128::from(ALL))).unwrap_or(u64::MAX)
    }

    /// As JSON has it.
    pub(super) fn percent(self) -> f64 {
        self.to_string().parse().unwrap_or(100.0)
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected =
            || format!("found {text:?}; expected a percentage above 0 up to 100, such as 99.9");
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
    fn a_share_is_read_exactly_and_printed_as_it_was() {
        for text in ["99.9", "100", "50", "0.000001", "99.999999"] {
            assert_eq!(text.parse::<Share>().expect("a share").to_string(), text);
        }
        for bad in
            ["", "0", "0.0", "100.000001", "101", "-1", "+1", "1e1", "99.", ".9", "0.0000001"]
        {
            assert!(bad.parse::<Share>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_part_of_a_client_is_a_client() {
        let share = |text: &str| text.parse::<Share>().expect("a share");
        assert_eq!(share("99.9").of(1000), 999);
        assert_eq!(share("99.9").of(1001), 1000);
        assert_eq!(share("99.9").of(10), 10);
        assert_eq!(share("100").of(u64::MAX), u64::MAX);
        assert_eq!(share("50").of(0), 0);
    }
}
