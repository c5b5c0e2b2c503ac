//! Limits per client on the resources of the server: connections, bytes, time.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::Deserialize;
use serde::de::Deserializer;
use tallygate_lab::duration::DurationText;

use super::file::Window;

/// The share of `max_buffer_bytes` that one address may use, as a divisor.
pub(crate) const SHARE_OF_AN_ADDRESS: usize = 4;

/// Limits per client on the resources of the server. A change applies to new connections.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Limits {
    /// Maximum number of open connections over all listeners. Further connections are closed at once.
    pub(crate) max_connections: usize,
    /// Maximum number of open connections per address; `None` is a tenth of `max_connections`, but at least 100.
    pub(crate) max_connections_per_address: Option<usize>,
    /// Maximum bytes of buffered bodies and replies, except for small ones. One address may use a quarter.
    pub(crate) max_buffer_bytes: usize,
    /// Maximum size of the head of an HTTP/1 request.
    pub(crate) max_head_bytes: u32,
    /// Maximum size of the head of an HTTP/2 request, as HTTP/2 counts it: 32 bytes per field in addition to its text.
    pub(crate) max_http2_head_bytes: u32,
    /// Maximum size of the body of an HTTP request.
    pub(crate) max_body_bytes: usize,
    /// Maximum number of concurrent requests per HTTP/2 connection.
    pub(crate) max_streams: u32,
    /// Maximum number of items of an `all`.
    pub(crate) max_all_items: usize,
    /// Maximum number of open reservations. One address may have a tenth of them, one key a hundredth.
    pub(crate) max_reservations: usize,
    /// Maximum bytes of open reservations. One address may have a tenth.
    pub(crate) max_reservation_bytes: usize,
    /// Maximum time to live of a reservation.
    #[serde(deserialize_with = "span")]
    pub(crate) max_reservation_ttl: Duration,
    /// Maximum number of overrides that are set at run time.
    pub(crate) max_overrides: usize,
    /// Maximum number of commands per RESP connection that wait for a remote store at a time.
    pub(crate) max_pipeline: usize,
    /// Maximum time to receive the head of an HTTP request, including the idle time before it, and to receive the rest
    /// of a RESP command.
    #[serde(deserialize_with = "span")]
    pub(crate) head_timeout: Duration,
    /// Maximum time until a connection presents a valid token, if checks need one.
    #[serde(deserialize_with = "span")]
    pub(crate) auth_timeout: Duration,
    /// Maximum time to receive the body of an HTTP request.
    #[serde(deserialize_with = "span")]
    pub(crate) body_timeout: Duration,
    /// Maximum time for which a client may read none of its replies.
    #[serde(deserialize_with = "span")]
    pub(crate) write_timeout: Duration,
    /// Maximum idle time of a RESP connection; `None` is no limit, as with Redis.
    #[serde(deserialize_with = "some_span")]
    pub(crate) idle_timeout: Option<Duration>,
    /// Maximum time for which `authorize` may hold a reply (`hold_ms`).
    #[serde(deserialize_with = "span")]
    pub(crate) max_hold: Duration,
    /// Maximum time until a key is fresh again, for limits that come with requests: the store may keep the key for so
    /// long. Policies of the configuration may take longer. Limits in requests of Envoy have a bound of their own.
    #[serde(deserialize_with = "span")]
    pub(crate) max_time_to_fresh: Duration,
}

/// The smallest buffer in which hyper can read a head.
const LEAST_HEAD_BYTES: u32 = 8 * 1024;
/// The largest head that can be configured.
const MOST_HEAD_BYTES: u32 = 16 * 1024 * 1024;

/// The heads of HTTP/2 that can be configured: all heads of a connection may be decoded at once.
const HTTP2_HEAD_BYTES: RangeInclusive<u32> = 4 * 1024..=1024 * 1024;
/// The most requests at a time on one HTTP/2 connection that can be configured.
const MOST_STREAMS: u32 = 1_000;
/// The memory of a decoded head of HTTP/2, by its bytes as HTTP/2 counts them: the fewest bytes of a field are 33, and its
/// entry in the header map takes up to 250.
pub(crate) const DECODED_HEAD: usize = 8;

/// The largest `max_all_items`: while an `all` is decided, the locks of all its keys are held and other requests wait.
const MOST_ALL_ITEMS: usize = 1_000;

/// The longest `max_reservation_ttl`.
const LONGEST_RESERVATION: Duration = Duration::from_secs(86_400);

/// The longest `max_hold`: a shutdown waits for held replies.
const LONGEST_HOLD: Duration = Duration::from_secs(10);

/// 100 years: the longest time that can be configured.
pub(super) const LONGEST_TIME: Duration = Duration::from_secs(36_500 * 86_400);

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_connections: 10_000,
            max_connections_per_address: None,
            max_buffer_bytes: 256 * 1024 * 1024,
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
            max_hold: Duration::from_secs(5),
            max_time_to_fresh: Duration::from_secs(7 * 86_400),
        }
    }
}

impl Limits {
    /// Validates the limits.
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
            return Err(format!("{name} must be at least 1 (got 0)"));
        }
        let items = self.max_all_items;
        if items > MOST_ALL_ITEMS {
            return Err(format!("max_all_items must be at most {MOST_ALL_ITEMS} (got {items})"));
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
            return Err(format!(
                "{name} must be longer than \"0s\"; use a duration such as \"10s\""
            ));
        }
        // A deadline must not overflow the clock.
        let given = &times[..if self.idle_timeout.is_some() { 7 } else { 6 }];
        let bounded = [
            ("max_reservation_ttl", self.max_reservation_ttl, LONGEST_RESERVATION, "24h"),
            ("max_hold", self.max_hold, LONGEST_HOLD, "10s"),
        ];
        let given = given.iter().map(|(name, time)| (*name, *time, LONGEST_TIME, "36500d"));
        if let Some((name, time, _, longest)) =
            given.chain(bounded).find(|(_, time, longest, _)| time > longest)
        {
            let time = DurationText(time);
            return Err(format!("{name} must be at most \"{longest}\" (got \"{time}\")"));
        }
        let (held, body) = (self.max_buffer_bytes, self.max_body_bytes);
        if held / SHARE_OF_AN_ADDRESS < body {
            let least = body.saturating_mul(SHARE_OF_AN_ADDRESS);
            return Err(format!(
                "max_buffer_bytes must be at least {least} (got {held}), so that one address can send a body of max_body_bytes ({body})"
            ));
        }
        let head = self.max_head_bytes;
        if !(LEAST_HEAD_BYTES..=MOST_HEAD_BYTES).contains(&head) {
            return Err(format!(
                "max_head_bytes must be from {LEAST_HEAD_BYTES} to {MOST_HEAD_BYTES} (got {head})"
            ));
        }
        let head = self.max_http2_head_bytes;
        if !HTTP2_HEAD_BYTES.contains(&head) {
            let (least, most) = (HTTP2_HEAD_BYTES.start(), HTTP2_HEAD_BYTES.end());
            return Err(format!(
                "max_http2_head_bytes must be from {least} to {most} (got {head})"
            ));
        }
        let of_address = held / SHARE_OF_AN_ADDRESS;
        let decoded = usize::try_from(head).unwrap_or(usize::MAX).saturating_mul(DECODED_HEAD);
        if of_address < decoded.saturating_mul(2) {
            let least = decoded.saturating_mul(2 * SHARE_OF_AN_ADDRESS);
            return Err(format!(
                "max_buffer_bytes must be at least {least} (got {held}) with max_http2_head_bytes = {head}; raise the one or lower \
                 the other"
            ));
        }
        let streams = self.max_streams;
        if streams > MOST_STREAMS {
            return Err(format!("max_streams must be at most {MOST_STREAMS} (got {streams})"));
        }
        Ok(self)
    }

    /// Returns the maximum number of open connections per address.
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

/// Shows every limit by its name.
impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = [
            ("max_connections", self.max_connections),
            ("max_connections_per_address", self.max_connections_per_address()),
            ("max_buffer_bytes", self.max_buffer_bytes),
            ("max_head_bytes", usize::try_from(self.max_head_bytes).unwrap_or(usize::MAX)),
            (
                "max_http2_head_bytes",
                usize::try_from(self.max_http2_head_bytes).unwrap_or(usize::MAX),
            ),
            ("max_body_bytes", self.max_body_bytes),
            ("max_streams", usize::try_from(self.max_streams).unwrap_or(usize::MAX)),
            ("max_all_items", self.max_all_items),
            ("max_reservations", self.max_reservations),
            ("max_reservation_bytes", self.max_reservation_bytes),
            ("max_overrides", self.max_overrides),
            ("max_pipeline", self.max_pipeline),
        ];
        for (name, value) in numbers {
            write!(f, "{name} {value}, ")?;
        }
        let times = [
            ("max_reservation_ttl", self.max_reservation_ttl),
            ("head_timeout", self.head_timeout),
            ("auth_timeout", self.auth_timeout),
            ("body_timeout", self.body_timeout),
            ("write_timeout", self.write_timeout),
            ("max_hold", self.max_hold),
            ("max_time_to_fresh", self.max_time_to_fresh),
        ];
        for (name, value) in times {
            write!(f, "{name} {}, ", DurationText(value))?;
        }
        match self.idle_timeout {
            Some(idle) => write!(f, "idle_timeout {}", DurationText(idle)),
            None => f.write_str("idle_timeout none"),
        }
    }
}
