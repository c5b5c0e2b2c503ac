//! Reads some keys, decides on them in this process, and writes them unless another process has written meanwhile.
//!
//! This is for decisions that no script makes: numbers beyond doubles, several keys, a policy that has changed, a
//! user-defined algorithm. All keys are in one slot, so the write is all or nothing. If another process has written,
//! this process decides again, until the deadline of the caller. Callers in one process take turns, so that only
//! processes race; `commit.rs` decides for all callers of one key together.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use redis::Value;

use crate::client::Redis;
use crate::error::Error;
use crate::key::Key;
use crate::script::COMPARE_AND_SET;

/// How long a key lives if the caller gives the time, in milliseconds: the given time may pass more slowly than the
/// real one.
const GIVEN_TIME_TO_LIVE: i64 = 86_400_000;
/// The latest possible expiry, in milliseconds.
const LATEST: i64 = 1 << 52;

/// The values of some keys, and when they were read, in microseconds.
#[derive(Debug)]
pub(crate) struct ReadValues {
    pub(crate) now: i64,
    /// One per key; empty if the key does not exist.
    pub(crate) values: Vec<Vec<u8>>,
}

/// The new value of a key.
#[derive(Debug)]
pub(crate) struct Write {
    pub(crate) value: Vec<u8>,
    /// When the key will be fresh, in microseconds; `None` beyond the end of time.
    pub(crate) fresh_at: Option<i64>,
}

/// The result of a decision: the writes for all keys, if any, and the answer.
pub(crate) type Step<R> = (Option<Vec<Write>>, R);

/// Which time a write uses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WriteTime {
    /// The time that the caller gave.
    Given(i64),
    /// The time of the server.
    Server,
    /// The time of the server, if it has reached the time of the values, which is an estimate.
    ServerIfReached,
}

impl WriteTime {
    fn of(given: Option<i64>) -> Self {
        given.map_or(Self::Server, Self::Given)
    }
}

/// The result of a write.
#[derive(Debug)]
pub(crate) enum WriteResult {
    Done {
        /// The time of the server, in microseconds.
        now: i64,
    },
    /// Another process has changed the keys; these are their values.
    Changed(ReadValues),
}

impl Redis {
    /// Decides on some keys of one slot. `seen` are values that a script has read already.
    pub(crate) async fn transact<R: Send>(
        &self,
        keys: &[&Key],
        given: Option<i64>,
        seen: Option<ReadValues>,
        deadline: Instant,
        mut decide: impl FnMut(&ReadValues) -> Result<Step<R>, Error> + Send,
    ) -> Result<R, Error> {
        let mut seen = match seen {
            Some(seen) => seen,
            None => self.read(keys, given, deadline).await?,
        };
        let mut turn = None;
        let mut tries = 0;
        loop {
            let (writes, answer) = decide(&seen)?;
            let Some(writes) = writes else { return Ok(answer) };
            let sent = Instant::now();
            if sent >= deadline {
                // The caller does not wait for the write any more, so the server must not carry it out.
                return Err(late(tries));
            }
            match self.write(keys, WriteTime::of(given), &seen, &writes, deadline).await? {
                WriteResult::Done { .. } => return Ok(answer),
                WriteResult::Changed(changed) => seen = changed,
            }
            tries += 1;
            self.inner().counters.contended.fetch_add(1, Ordering::Relaxed);
            if turn.is_none() {
                // From now on, only other processes race.
                turn = self.inner().commits.turn(keys, deadline).await;
                if turn.is_some() {
                    continue;
                }
            }
            backoff(tries, sent.elapsed()).await;
        }
    }

    /// Reads some keys.
    pub(crate) async fn read(
        &self,
        keys: &[&Key],
        given: Option<i64>,
        deadline: Instant,
    ) -> Result<ReadValues, Error> {
        let time = given.map(|now| now.to_string()).unwrap_or_default();
        match self.compare_and_set(keys, &[time.as_bytes()], deadline).await? {
            WriteResult::Changed(seen) => Ok(seen),
            WriteResult::Done { .. } => Err(unexpected()),
        }
    }

    /// Writes some keys, if their values have not changed.
    pub(crate) async fn write(
        &self,
        keys: &[&Key],
        at: WriteTime,
        seen: &ReadValues,
        writes: &[Write],
        deadline: Instant,
    ) -> Result<WriteResult, Error> {
        let (time, given) = match at {
            WriteTime::Given(now) => (now.to_string(), Some(now)),
            WriteTime::Server => (String::new(), None),
            WriteTime::ServerIfReached => (format!(">{}", seen.now), None),
        };
        let ends: Vec<String> =
            writes.iter().map(|write| expiry(write, given).to_string()).collect();
        let mut arguments = vec![time.as_bytes()];
        for ((write, was), ends) in writes.iter().zip(&seen.values).zip(&ends) {
            let is_fresh = given.is_none() && write.fresh_at.is_some_and(|fresh| fresh <= seen.now);
            let value = if is_fresh { &[][..] } else { &write.value[..] };
            arguments.extend([&was[..], value, ends.as_bytes()]);
        }
        self.compare_and_set(keys, &arguments, deadline).await
    }

    /// Writes the keys if their values have not changed; otherwise returns their values.
    async fn compare_and_set(
        &self,
        keys: &[&Key],
        arguments: &[&[u8]],
        deadline: Instant,
    ) -> Result<WriteResult, Error> {
        let reply = self.run(&COMPARE_AND_SET, keys, arguments, deadline).await?;
        let Value::Array(reply) = reply else { return Err(unexpected()) };
        let mut values = reply.into_iter();
        let (Some(Value::Int(is_written)), Some(time)) = (values.next(), values.next()) else {
            return Err(unexpected());
        };
        let Value::BulkString(time) = time else { return Err(unexpected()) };
        let time = std::str::from_utf8(&time).ok().and_then(|time| time.parse().ok());
        let now = time.ok_or_else(unexpected)?;
        if arguments.first().is_some_and(|time| time.is_empty() || time.starts_with(b">")) {
            self.note_server_time(now);
        }
        if is_written == 1 {
            return Ok(WriteResult::Done { now });
        }
        let values = values.map(|value| match value {
            Value::BulkString(value) => Ok(value),
            _ => Err(unexpected()),
        });
        Ok(WriteResult::Changed(ReadValues { now, values: values.collect::<Result<_, _>>()? }))
    }
}

/// Waits after a race was lost for the second time or more: a random part of a round trip, which grows, so that
/// processes do not collide again and again. The reply of a lost race has the current value, so an immediate retry is
/// often best.
async fn backoff(tries: u32, round_trip: Duration) {
    if tries > 1 {
        let longest = (round_trip / 2).saturating_mul(tries / 2).min(Duration::from_millis(10));
        let nanos = u64::try_from(longest.as_nanos()).unwrap_or(0);
        tokio::time::sleep(Duration::from_nanos(fastrand::u64(0..=nanos))).await;
    }
}

/// Returns the error of a caller whose time budget ended before its write, after a number of lost races. Nothing was
/// written.
pub(crate) fn late(tries: u32) -> Error {
    match tries {
        0 => Error::Overloaded { reason: "too little time is left to write".into(), sent: false },
        tries => Error::Contended { tries },
    }
}

/// Returns the error of a call that only read, as one after which nothing has changed.
pub(crate) fn nothing_sent(error: Error) -> Error {
    match error {
        Error::Unavailable { reason, .. } => Error::Unavailable { reason, sent: false },
        error => error,
    }
}

/// Returns the expiry of a key, in milliseconds: after it is fresh, never before.
fn expiry(write: &Write, given: Option<i64>) -> i64 {
    match (given, write.fresh_at) {
        (Some(_), _) => GIVEN_TIME_TO_LIVE,
        (None, Some(fresh_at)) => (fresh_at.div_euclid(1000) + 1).clamp(1, LATEST),
        (None, None) => LATEST,
    }
}

pub(crate) fn unexpected() -> Error {
    Error::Server { message: "unexpected reply to a script".into() }
}
