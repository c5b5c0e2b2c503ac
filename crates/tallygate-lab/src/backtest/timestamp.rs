//! Parses the timestamps of logs as nanoseconds since 1970.
//!
//! There are three formats: `10/Oct/2000:13:55:36 -0700`, RFC 3339 (without an offset, the time is UTC), and a number since
//! 1970 whose size determines its unit. Times outside the years 1678 to 2261 are not valid.

use std::fmt;

use tallygate_core::{Tick, Ticks};

/// Signed, because times before 1970 are negative.
pub(super) const NANOS_PER_SECOND: i64 = Ticks::PER_SECOND.cast_signed();
const SECONDS_PER_DAY: i64 = 86_400;

/// Parses a time in any of the three formats.
pub(super) fn parse(text: &[u8]) -> Option<Tick> {
    let text = text.trim_ascii();
    if let Ok(text) = text.try_into() {
        return common_log(text).or_else(|| rfc_3339(text));
    }
    rfc_3339(text).or_else(|| since_1970(text))
}

/// Parses `10/Oct/2000:13:55:36 -0700`, the format of common and combined logs.
pub(super) fn common_log(text: &[u8; 26]) -> Option<Tick> {
    let [
        d1,
        d2,
        b'/',
        month @ ..,
        b'/',
        y1,
        y2,
        y3,
        y4,
        b':',
        h1,
        h2,
        b':',
        m1,
        m2,
        b':',
        s1,
        s2,
        b' ',
        sign,
        oh1,
        oh2,
        om1,
        om2,
    ] = text
    else {
        return None;
    };
    let month = match month {
        b"Jan" => 1,
        b"Feb" => 2,
        b"Mar" => 3,
        b"Apr" => 4,
        b"May" => 5,
        b"Jun" => 6,
        b"Jul" => 7,
        b"Aug" => 8,
        b"Sep" => 9,
        b"Oct" => 10,
        b"Nov" => 11,
        b"Dec" => 12,
        _ => return None,
    };
    let year = two(*y1, *y2)? * 100 + two(*y3, *y4)?;
    let days = days(year, month, two(*d1, *d2)?)?;
    let seconds = of_day(two(*h1, *h2)?, two(*m1, *m2)?, two(*s1, *s2)?)?;
    let offset = offset(*sign, two(*oh1, *oh2)?, two(*om1, *om2)?)?;
    tick(days * SECONDS_PER_DAY + seconds - offset, 0)
}

/// Parses `2000-10-10T13:55:36.5-07:00`. A space may replace the `T`; the offset may be `Z`, have no colon, or be missing.
fn rfc_3339(text: &[u8]) -> Option<Tick> {
    let (start, rest) = text.split_first_chunk::<19>()?;
    let [
        y1,
        y2,
        y3,
        y4,
        b'-',
        mo1,
        mo2,
        b'-',
        d1,
        d2,
        b'T' | b't' | b' ',
        h1,
        h2,
        b':',
        m1,
        m2,
        b':',
        s1,
        s2,
    ] = start
    else {
        return None;
    };
    let year = two(*y1, *y2)? * 100 + two(*y3, *y4)?;
    let days = days(year, two(*mo1, *mo2)?, two(*d1, *d2)?)?;
    let seconds = of_day(two(*h1, *h2)?, two(*m1, *m2)?, two(*s1, *s2)?)?;
    let (nanos, rest) = match rest {
        [b'.' | b',', rest @ ..] => {
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            (fraction(&rest[..digits])?, &rest[digits..])
        }
        rest => (0, rest),
    };
    let offset = match rest {
        [] | [b'Z' | b'z'] => 0,
        [sign, h1, h2, b':', m1, m2] | [sign, h1, h2, m1, m2] => {
            offset(*sign, two(*h1, *h2)?, two(*m1, *m2)?)?
        }
        _ => return None,
    };
    tick(days * SECONDS_PER_DAY + seconds - offset, nanos)
}

/// Parses a number since 1970, which may have a fraction. The unit is seconds below 10¹¹ (the year 5138), milliseconds
/// below 10¹⁴, microseconds below 10¹⁷, and nanoseconds above.
fn since_1970(text: &[u8]) -> Option<Tick> {
    let (is_negative, text) = match text {
        [b'-', rest @ ..] => (true, rest),
        text => (false, text),
    };
    let (whole, after) = match memchr::memchr(b'.', text) {
        Some(dot) => (&text[..dot], &text[dot + 1..]),
        None => (text, &b"0"[..]),
    };
    let number: i64 = std::str::from_utf8(whole)
        .ok()
        .filter(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))?
        .parse()
        .ok()?;
    let unit = match number {
        ..100_000_000_000 => NANOS_PER_SECOND,
        100_000_000_000..100_000_000_000_000 => 1_000_000,
        100_000_000_000_000..100_000_000_000_000_000 => 1_000,
        _ => 1,
    };
    let part = fraction(after)? / (NANOS_PER_SECOND / unit);
    let nanos = number.checked_mul(unit)?.checked_add(part)?;
    Some(Tick(if is_negative { -nanos } else { nanos }))
}

/// Converts the digits after a decimal point to billionths. Further digits are dropped.
fn fraction(digits: &[u8]) -> Option<i64> {
    if digits.is_empty() {
        return None;
    }
    let mut nanos = 0;
    let mut unit = NANOS_PER_SECOND;
    for digit in digits {
        unit /= 10;
        nanos += i64::from(char::from(*digit).to_digit(10)?) * unit;
    }
    Some(nanos)
}

#[inline]
fn two(tens: u8, ones: u8) -> Option<i64> {
    let (tens, ones) = (tens.wrapping_sub(b'0'), ones.wrapping_sub(b'0'));
    (tens < 10 && ones < 10).then(|| i64::from(tens) * 10 + i64::from(ones))
}

/// Returns the seconds since midnight. A leap second is the first second of the next minute.
#[inline]
fn of_day(hours: i64, minutes: i64, seconds: i64) -> Option<i64> {
    (hours < 24 && minutes < 60 && seconds <= 60).then_some(hours * 3600 + minutes * 60 + seconds)
}

#[inline]
fn offset(sign: u8, hours: i64, minutes: i64) -> Option<i64> {
    let seconds = (minutes < 60).then_some(hours * 3600 + minutes * 60)?;
    match sign {
        b'+' => Some(seconds),
        b'-' => Some(-seconds),
        _ => None,
    }
}

/// Returns the days since 1970 of a Gregorian date, or `None` if the date does not exist.
#[inline]
fn days(year: i64, month: i64, day: i64) -> Option<i64> {
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let last = match month {
        4 | 6 | 9 | 11 => 30,
        2 => 28 + i64::from(is_leap),
        1..=12 => 31,
        _ => return None,
    };
    if day < 1 || day > last {
        return None;
    }
    // If years start in March, the leap day comes last and the month lengths follow a linear formula.
    let year = if month <= 2 { year - 1 } else { year };
    let months = (month + 9) % 12;
    let in_year = (153 * months + 2) / 5 + day - 1;
    Some(
        365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + in_year
            - 719_468,
    )
}

fn tick(seconds: i64, nanos: i64) -> Option<Tick> {
    seconds.checked_mul(NANOS_PER_SECOND)?.checked_add(nanos).map(Tick)
}

/// Displays a time in RFC 3339 format, in UTC, with milliseconds if it has a fraction of a second.
pub(super) struct Timestamp(pub(super) Tick);

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tick(nanos) = self.0;
        let (seconds, part) =
            (nanos.div_euclid(NANOS_PER_SECOND), nanos.rem_euclid(NANOS_PER_SECOND));
        let (days, of_day) =
            (seconds.div_euclid(SECONDS_PER_DAY), seconds.rem_euclid(SECONDS_PER_DAY));
        let (year, month, day) = civil(days);
        let (hours, minutes, seconds) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
        write!(f, "{year:04}-{month:02}-{day:02}T{hours:02}:{minutes:02}:{seconds:02}")?;
        if part != 0 {
            write!(f, ".{:03}", part / 1_000_000)?;
        }
        f.write_str("Z")
    }
}

/// Converts days since 1970 to year, month and day.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let months = (5 * of_year + 2) / 153;
    let day = of_year - (153 * months + 2) / 5 + 1;
    let month = if months < 10 { months + 3 } else { months - 9 };
    (era * 400 + year + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn parses_as(text: &str, expected: &str) {
        let printed = parse(text.as_bytes()).map(|tick| Timestamp(tick).to_string());
        assert_eq!(printed.as_deref(), Some(expected), "{text}");
    }

    #[test]
    fn the_three_formats_give_the_same_time() {
        parses_as("10/Oct/2000:13:55:36 -0700", "2000-10-10T20:55:36Z");
        parses_as("2000-10-10T13:55:36-07:00", "2000-10-10T20:55:36Z");
        parses_as("2000-10-10 20:55:36", "2000-10-10T20:55:36Z");
        parses_as("2000-10-10t20:55:36.25z", "2000-10-10T20:55:36.250Z");
        parses_as("2000-10-11T02:25:36,250+0530", "2000-10-10T20:55:36.250Z");
        parses_as("971211336", "2000-10-10T20:55:36Z");
        parses_as("971211336.25", "2000-10-10T20:55:36.250Z");
        parses_as("971211336250", "2000-10-10T20:55:36.250Z");
        parses_as("971211336250000.9", "2000-10-10T20:55:36.250Z");
        parses_as("971211336250000000", "2000-10-10T20:55:36.250Z");
        parses_as("-1", "1969-12-31T23:59:59Z");
    }

    #[test]
    fn fractions_are_exact_to_the_nanosecond() {
        assert_eq!(parse(b"1.000000001"), Some(Tick(1_000_000_001)));
        assert_eq!(parse(b"1700000000123.456789"), Some(Tick(1_700_000_000_123_456_789)));
        assert_eq!(parse(b"1970-01-01T00:00:01.0000000019Z"), Some(Tick(1_000_000_001)));
    }

    #[test]
    fn leap_days_are_valid_and_impossible_times_are_not() {
        parses_as("29/Feb/2000:00:00:00 +0000", "2000-02-29T00:00:00Z");
        parses_as("29/Feb/2024:23:59:60 +0000", "2024-03-01T00:00:00Z");
        parses_as("01/Mar/1900:00:00:00 +0000", "1900-03-01T00:00:00Z");
        for none in [
            "29/Feb/1900:00:00:00 +0000",
            "29/Feb/2023:00:00:00 +0000",
            "31/Apr/2023:00:00:00 +0000",
            "00/Jan/2023:00:00:00 +0000",
            "01/Jan/2023:24:00:00 +0000",
            "01/Jan/2023:00:60:00 +0000",
            "01/jan/2023:00:00:00 +0000",
            "01/Jan/2023:00:00:00 0000",
            "01/Jan/9999:00:00:00 +0000",
            "01/Jan/2023:00:00:00 +00000",
            "2023-13-01T00:00:00Z",
            "2023-00-01T00:00:00Z",
            "2023-01-01T00:00:00.Z",
            "2023-01-01T00:00:00+1",
            "2023-01-01",
            "",
            "-",
            ".5",
            "1.",
            "1e9",
            "+1",
            "9223372036854775808",
        ] {
            assert_eq!(parse(none.as_bytes()), None, "{none}");
        }
    }

    #[test]
    fn every_day_of_four_centuries_converts_back() {
        for day in -100_000_i64..106_000 {
            let (year, month, date) = civil(day);
            assert_eq!(days(year, month, date), Some(day));
        }
    }
}
