//! Reads how long a server asks its client to wait.
//!
//! It knows `Retry-After` (seconds or a date), the fields of the IETF's drafts in their current and earlier forms, and
//! `X-RateLimit-*`. It ignores values that it cannot read. If the client then sends its next request too early, the
//! server denies it.

use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{HeaderMap, StatusCode};
use tallygate::{Tick, Ticks};

/// Numbers from this one on are Unix times and not seconds from now: the year 2001 is past, and no server asks for a
/// wait of 31 years.
const UNIX_TIMES: u64 = 1_000_000_000;

/// Returns how long the server asks to wait before the next request; `None` if it does not.
pub(super) fn wait(status: StatusCode, fields: &HeaderMap, now: Tick) -> Option<Duration> {
    let is_denial =
        matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    let text = |name: &str| fields.get(name)?.to_str().ok().map(str::trim);
    let retry_after = text(RETRY_AFTER.as_str()).filter(|_| is_denial);
    let retry_after =
        retry_after.and_then(|value| seconds(value, now).or_else(|| date(value, now)));
    let lists = fields.get_all("ratelimit").iter().filter_map(|value| value.to_str().ok());
    let structured = lists.filter_map(|list| exhausted(list, now)).max();
    let separate = |prefix: &str| {
        let remaining = text(&format!("{prefix}-remaining"))?;
        let reset = text(&format!("{prefix}-reset"))?;
        if remaining.parse() == Ok(0) { seconds(reset, now) } else { None }
    };
    let separate = [separate("ratelimit"), separate("x-ratelimit")].into_iter().flatten().max();
    [retry_after, structured, separate].into_iter().flatten().max()
}

/// Reads a number of seconds, or a Unix time.
fn seconds(text: &str, now: Tick) -> Option<Duration> {
    let number: u64 = text.parse().ok()?;
    if number < UNIX_TIMES { Some(Duration::from_secs(number)) } else { Some(until(number, now)) }
}

/// Returns the time from now until a Unix time.
fn until(unix_seconds: u64, now: Tick) -> Duration {
    let nanos = i128::from(unix_seconds) * i128::from(Ticks::PER_SECOND) - i128::from(now.0);
    Duration::from_nanos(u64::try_from(nanos.max(0)).unwrap_or(u64::MAX))
}

/// Reads `"api";r=0;t=5` (draft 8 and later) and `limit=10, remaining=0, reset=5` (drafts up to 7).
fn exhausted(list: &str, now: Tick) -> Option<Duration> {
    let parameter = |item: &str, name: &str| {
        item.split(';').find_map(|pair| {
            let (found, value) = pair.split_once('=')?;
            (found.trim() == name).then(|| value.trim().to_owned())
        })
    };
    let items: Vec<&str> = split_unquoted(list);
    let all = items.join(";");
    if parameter(&all, "remaining").as_deref() == Some("0") {
        return seconds(&parameter(&all, "reset")?, now);
    }
    let wait = |item: &&str| {
        // Quoted text is a name, not a parameter.
        let parameters = item.rsplit_once('"').map_or(*item, |(_, rest)| rest);
        let is_exhausted = parameter(parameters, "r").as_deref() == Some("0");
        is_exhausted.then(|| parameter(parameters, "t")).flatten()
    };
    items.iter().filter_map(wait).filter_map(|text| seconds(&text, now)).max()
}

/// Splits a list at its commas outside of quotes.
fn split_unquoted(list: &str) -> Vec<&str> {
    let (mut items, mut start, mut is_quoted, mut is_escaped) = (Vec::new(), 0, false, false);
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_quoted => is_escaped = true,
            b'"' => is_quoted = !is_quoted,
            b',' if !is_quoted => {
                items.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(&list[start..]);
    items
}

/// Reads a date such as `Tue, 17 Nov 2026 04:36:02 GMT`, and returns the time from now until then.
fn date(text: &str, now: Tick) -> Option<Duration> {
    let (_, text) = text.split_once(", ")?;
    let mut words = text.strip_suffix(" GMT")?.split(' ');
    let day: u64 = words.next()?.parse().ok()?;
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let name = words.next()?;
    let month = MONTHS.iter().position(|month| *month == name)? as u64 + 1;
    let year: u64 = words.next()?.parse().ok()?;
    let mut time = words.next()?.split(':').map(|part| part.parse::<u64>().ok());
    let (hour, minute, second) = (time.next()??, time.next()??, time.next()??);
    let is_valid = (1970..10_000).contains(&year) && (1..=31).contains(&day);
    if !is_valid || hour > 23 || minute > 59 || second > 60 || words.next().is_some() {
        return None;
    }
    // Days since 1970 in the Gregorian calendar, with years that begin in March.
    let (years, months) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leaps = years / 4 - years / 100 + years / 400;
    let days = years * 365 + leaps + (months * 153 + 2) / 5 + day - 1;
    let unix_days = days.checked_sub(719_468)?;
    Some(until(((unix_days * 24 + hour) * 60 + minute) * 60 + second, now))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 17 November 2026, 04:36:02 UTC.
    const NOW: Tick = Tick(1_794_890_162_000_000_000);

    #[track_caller]
    fn asks(status: u16, fields: &[(&'static str, &str)], expected: Option<u64>) {
        let mut map = HeaderMap::new();
        for (name, value) in fields {
            map.append(*name, value.parse().unwrap());
        }
        let found = wait(StatusCode::from_u16(status).unwrap(), &map, NOW);
        assert_eq!(found, expected.map(Duration::from_secs), "{status} {fields:?}");
    }

    #[test]
    fn retry_after_counts_on_denials_only() {
        asks(429, &[("retry-after", "7")], Some(7));
        asks(503, &[("retry-after", " 7 ")], Some(7));
        asks(200, &[("retry-after", "7")], None);
        for garbage in ["", "-1", "soon", "1.5", "99999999999999999999999"] {
            asks(429, &[("retry-after", garbage)], None);
        }
        asks(429, &[], None);
    }

    #[test]
    fn retry_after_may_be_a_date() {
        asks(429, &[("retry-after", "Tue, 17 Nov 2026 04:36:12 GMT")], Some(10));
        asks(429, &[("retry-after", "Wed, 18 Nov 2026 04:36:02 GMT")], Some(86_400));
        asks(429, &[("retry-after", "Thu, 29 Feb 2024 00:00:00 GMT")], Some(0));
        for garbage in ["Tue, 17 Nov 2026", "Tue, 17 Foo 2026 04:36:12 GMT", "x, 1 Jan 1 0:0:0 GMT"]
        {
            asks(429, &[("retry-after", garbage)], None);
        }
    }

    #[test]
    fn a_quota_without_remaining_units_is_waited_for() {
        asks(200, &[("ratelimit", "\"api\";r=0;t=5")], Some(5));
        asks(200, &[("ratelimit", "\"a\";r=3;t=50, \"b\";r=0;t=5, \"c\";t=4;r=0")], Some(5));
        asks(200, &[("ratelimit", "\"api\";r=1;t=5")], None);
        asks(200, &[("ratelimit", "\"api\";r=0")], None);
        asks(200, &[("ratelimit", "limit=10, remaining=0, reset=9")], Some(9));
        asks(200, &[("ratelimit", "limit=10, remaining=1, reset=9")], None);
        asks(200, &[("ratelimit-remaining", "0"), ("ratelimit-reset", "6")], Some(6));
        asks(200, &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "6")], Some(6));
        asks(200, &[("x-ratelimit-remaining", "1"), ("x-ratelimit-reset", "6")], None);
        // Some servers send the time at which the quota is full again.
        asks(200, &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1794890170")], Some(8));
    }

    #[test]
    fn a_name_cannot_look_like_a_parameter() {
        asks(200, &[("ratelimit", "\"x;r=0;t=99\";r=1;t=5")], None);
        asks(200, &[("ratelimit", "\"x, y;r=0;t=99\";r=0;t=5")], Some(5));
        asks(200, &[("ratelimit", "\"x\\\",;r=0;t=99\";r=1;t=5")], None);
    }

    #[test]
    fn the_longest_wait_counts() {
        asks(429, &[("retry-after", "3"), ("ratelimit", "\"api\";r=0;t=5")], Some(5));
    }
}
