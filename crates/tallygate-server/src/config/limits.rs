//! What one client may take of the server itself: connections, bytes, time.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use humantime::format_duration;
use serde::Deserialize;
use serde::de::Deserializer;

use super::file::Window;

/// What part of all held bytes one address may hold.
pub(crate) const SHARE_OF_AN_ADDRESS: usize = 4;

/// What one client may take of the server itself. New connections go by it when it changes.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Limits {
    /// The most connections at a time, over all listeners. One too many is closed at once.
    pub(crate) max_connections: usize,
    /// The most connections at a time of one address; `None` is a tenth of all, but no less than a hundred.
    pub(crate) max_connections_per_address: Option<usize>,
    /// The most bytes of bodies and replies that are held at a time, small ones not counted. One address has a quarter.
    pub(crate) max_held_bytes: usize,
    /// The most that the head of an HTTP request may have.
    pub(crate) max_head_bytes: u32,
    /// The most that the head of an HTTP/2 request may have, by the count of HTTP/2: 32 bytes for each field besides its
    /// text.
    pub(crate) max_http2_head_bytes: u32,
    /// The most that the body of an HTTP request may have.
    pub(crate) max_body_bytes: usize,
    /// The most requests at a time on one HTTP/2 connection.
    pub(crate) max_streams: u32,
    /// The most items of an `all`.
    pub(crate) max_all_items: usize,
    /// The most reservations that are open at a time. One address has a tenth of them, one key a hundredth.
    pub(crate) max_reservations: usize,
    /// The most bytes of open reservations. One address has a tenth.
    pub(crate) max_reservation_bytes: usize,
    /// The longest time to live of a reservation.
    #[serde(deserialize_with = "span")]
    pub(crate) max_reservation_ttl: Duration,
    /// The most overrides that are set at run time.
    pub(crate) max_overrides: usize,
    /// How many commands of one RESP connection wait for a store across the network at a time.
    pub(crate) max_pipeline: usize,
    /// How long a client may take over the head of an HTTP request, or rest between two; and how long over a command
    /// of RESP that has begun.
    #[serde(deserialize_with = "span")]
    pub(crate) head_timeout: Duration,
    /// How long a connection has to present a token, where checks need one.
    #[serde(deserialize_with = "span")]
    pub(crate) auth_timeout: Duration,
    /// How long a client may take over the body of an HTTP request.
    #[serde(deserialize_with = "span")]
    pub(crate) body_timeout: Duration,
    /// How long a client may take nothing of its replies.
    #[serde(deserialize_with = "span")]
    pub(crate) write_timeout: Duration,
    /// How long a RESP connection may rest between two commands; `None` is as long as it likes, as with Redis.
    #[serde(deserialize_with = "some_span")]
    pub(crate) idle_timeout: Option<Duration>,
    /// The longest time to fresh of numbers that come with requests: so long the state of a key may stay in the store.
    /// Policies of the configuration may take longer.
    #[serde(deserialize_with = "span")]
    pub(crate) max_time_to_fresh: Duration,
}

/// Below this there is no room to read a head in.
const LEAST_HEAD_BYTES: u32 = 8 * 1024;
/// Above this a head is no head any more.
const MOST_HEAD_BYTES: u32 = 16 * 1024 * 1024;

/// The heads of HTTP/2 that can be served: all of a connection's may be decoded at once.
const HTTP2_HEAD_BYTES: RangeInclusive<u32> = 4 * 1024..=1024 * 1024;
/// The most requests at a time on one HTTP/2 connection that can be configured.
const MOST_STREAMS: u32 = 1_000;
/// The memory of a decoded head of HTTP/2, by its bytes as HTTP/2 counts them: the fewest bytes of a field are 33, and its
/// entry in the header map takes up to 250.
pub(crate) const DECODED_HEAD: usize = 8;

/// The locks of all clients of an `all` are held while it is decided, and others wait for them.
const MOST_ALL_ITEMS: usize = 1_000;

/// The longest `max_reservation_ttl`.
const LONGEST_RESERVATION: Duration = Duration::from_secs(86_400);

/// 100 years.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(100 * 31_557_600);

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_connections: 10_000,
            max_connections_per_address: None,
            max_held_bytes: 256 * 1024 * 1024,
            max_head_bytes: 64 * 1024,
            max_http2_head_bytes: 16 * 1024,
            max_body_bytes: 1024 * 1024,
            max_streams: 100,
            max_all_items: 64,
            max_reservations: 100_000,
            max_reservation_bytes: 64 * 1024 * 1024,
            max_reservation_ttl: Duration::from_secs(3_600),
            max_overrides: 10_000,
            max_pipeline: 256,
            auth_timeout: Duration::from_secs(10),
            head_timeout: Duration::from_secs(60),
            body_timeout: Duration::from_secs(10),
            write_timeout: Duration::from_secs(30),
            idle_timeout: None,
            max_time_to_fresh: Duration::from_secs(7 * 86_400),
        }
    }
}

impl Limits {
    /// The same, if one can serve by it.
    pub(super) fn check(self) -> Result<Self, String> {
        let least_one = [
            ("max_connections", self.max_connections),
            ("max_connections_per_address", self.max_connections_per_address()),
            ("max_body_bytes", self.max_body_bytes),
            ("max_streams", usize::try_from(self.max_streams).unwrap_or(usize::MAX)),
            ("max_pipeline", self.max_pipeline),
            ("max_all_items", self.max_all_items),
        ];
        if let Some((name, _)) = least_one.iter().find(|(_, value)| *value == 0) {
            return Err(format!("{name} 0 serves nobody; use at least 1"));
        }
        let items = self.max_all_items;
        if items > MOST_ALL_ITEMS {
            return Err(format!(
                "max_all_items {items} would let one request hold the others up; use at most {MOST_ALL_ITEMS}"
            ));
        }
        let idle_timeout = self.idle_timeout.unwrap_or(Duration::MAX);
        let times = [
            ("head_timeout", self.head_timeout),
            ("body_timeout", self.body_timeout),
            ("write_timeout", self.write_timeout),
            ("auth_timeout", self.auth_timeout),
            ("max_time_to_fresh", self.max_time_to_fresh),
            ("max_reservation_ttl", self.max_reservation_ttl),
            ("idle_timeout", idle_timeout),
        ];
        if let Some((name, _)) = times.iter().find(|(_, value)| value.is_zero()) {
            return Err(format!("{name} \"0s\" serves nobody; use a time such as \"10s\""));
        }
        // A deadline must be a time that the clock knows.
        let given = &times[..if self.idle_timeout.is_some() { 7 } else { 6 }];
        if let Some((name, _)) = given.iter().find(|(_, value)| *value > LONGEST_TIMEOUT) {
            return Err(format!("{name} is longer than anybody waits; use at most \"100y\""));
        }
        if self.max_reservation_ttl > LONGEST_RESERVATION {
            return Err("max_reservation_ttl is longer than a day; use at most \"24h\"".to_owned());
        }
        let (held, body) = (self.max_held_bytes, self.max_body_bytes);
        if held / SHARE_OF_AN_ADDRESS < body {
            let least = body.saturating_mul(SHARE_OF_AN_ADDRESS);
            return Err(format!(
                "max_held_bytes {held} leaves no address enough for a body of {body} bytes; use at least {least}"
            ));
        }
        let head = self.max_head_bytes;
        if !(LEAST_HEAD_BYTES..=MOST_HEAD_BYTES).contains(&head) {
            return Err(format!(
                "max_head_bytes {head} is not from {LEAST_HEAD_BYTES} to {MOST_HEAD_BYTES}"
            ));
        }
        let head = self.max_http2_head_bytes;
        if !HTTP2_HEAD_BYTES.contains(&head) {
            let (least, most) = (HTTP2_HEAD_BYTES.start(), HTTP2_HEAD_BYTES.end());
            return Err(format!("max_http2_head_bytes {head} is not from {least} to {most}"));
        }
        let of_address = held / SHARE_OF_AN_ADDRESS;
        let decoded = usize::try_from(head).unwrap_or(usize::MAX).saturating_mul(DECODED_HEAD);
        if of_address < decoded.saturating_mul(2) {
            let least = decoded.saturating_mul(2 * SHARE_OF_AN_ADDRESS);
            return Err(format!(
                "max_held_bytes {held} leaves no address enough for heads of HTTP/2 of {head} bytes; use at least {least}, or \
                 a smaller max_http2_head_bytes"
            ));
        }
        let streams = self.max_streams;
        if streams > MOST_STREAMS {
            return Err(format!(
                "max_streams {streams} would let one connection hold too much; use at most {MOST_STREAMS}"
            ));
        }
        Ok(self)
    }

    /// The most connections at a time of one address.
    pub(crate) fn max_connections_per_address(&self) -> usize {
        self.max_connections_per_address.unwrap_or((self.max_connections / 10).max(100))
    }
}

fn span<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    Window::deserialize(deserializer).map(|Window(span)| span)
}

fn some_span<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    span(deserializer).map(Some)
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (head, body) = (format_duration(self.head_timeout), format_duration(self.body_timeout));
        write!(f, "{} connections, ", self.max_connections)?;
        write!(f, "{} an address, ", self.max_connections_per_address())?;
        write!(f, "heads of {} bytes in {head}, ", self.max_head_bytes)?;
        write!(f, "bodies of {} bytes in {body}, ", self.max_body_bytes)?;
        write!(f, "{} bytes held, ", self.max_held_bytes)?;
        write!(f, "{} streams, {} commands at once, ", self.max_streams, self.max_pipeline)?;
        write!(f, "replies taken within {}", format_duration(self.write_timeout))?;
        match self.idle_timeout {
            Some(idle) => write!(f, ", {} of rest", format_duration(idle)),
            None => Ok(()),
        }
    }
}
