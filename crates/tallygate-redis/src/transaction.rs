//! Reading some keys, deciding on them here, and writing them if nobody else has meanwhile.
//!
//! For what a script does not decide: numbers beyond doubles, several keys, a policy that has changed, an
//! algorithm of one's own. All keys are of one slot, so it is all or nothing. Somebody else's write in between
//! means to decide again, until the caller's time is over. Callers in one process take turns, so that only processes
//! race; callers of one key are decided on together in `commit.rs`.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use redis::Value;

use crate::client::Redis;
use crate::error::Error;
use crate::key::Key;
use crate::script::COMPARE_AND_SET;

/// How long a key lives whose time is given, in milliseconds: whoever gives it may take longer than it says.
const GIVEN_TIME_TO_LIVE: i64 = 86_400_000;
/// The latest expiry there is, in milliseconds.
const LATEST: i64 = 1 << 52;

/// What some keys hold, and when that was read, in microseconds.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) now: i64,
    /// Of each key; nothing where there is none.
    pub(crate) values: Vec<Vec<u8>>,
}

/// What a key is to hold.
#[derive(Debug)]
pub(crate) struct Write {
    pub(crate) value: Vec<u8>,
    /// From when on it has used nothing, in microseconds; `None` beyond the end of time.
    pub(crate) fresh_at: Option<i64>,
}

/// What was decided: what to write of each key, if anything, and the answer.
pub(crate) type Step<R> = (Option<Vec<Write>>, R);

/// Whose time counts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum At {
    /// The caller's.
    Given(i64),
    /// The server's.
    Server,
    /// The server's, if it has reached the time of what was seen: that was an estimate.
    Reached,
}

impl At {
    fn of(given: Option<i64>) -> Self {
        given.map_or(Self::Server, Self::Given)
    }
}

/// What came of writing.
#[derive(Debug)]
pub(crate) enum Written {
    Done {
        /// By the server's clock, in microseconds.
        now: i64,
    },
    /// The keys were changed meanwhile; this is what they hold.
    Changed(Seen),
}

impl Redis {
    /// Decides on some keys of one slot. `seen` is what a script has read of them already.
    pub(crate) async fn transact<R: Send>(
        &self,
        keys: &[&Key],
        given: Option<i64>,
        seen: Option<Seen>,
        deadline: Instant,
        mut decide: impl FnMut(&Seen) -> Result<Step<R>, Error> + Send,
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
            match self.write(keys, At::of(given), &seen, &writes, deadline).await? {
                Written::Done { .. } => return Ok(answer),
                Written::Changed(changed) => seen = changed,
            }
            tries += 1;
            self.inner().counters.contended.fetch_add(1, Ordering::Relaxed);
            if turn.is_none() {
                // From now on only other processes are in the way.
                turn = self.inner().commits.turn(keys, deadline).await;
                if turn.is_some() {
                    continue;
                }
            }
            backoff(tries, sent.elapsed()).await;
            if Instant::now() >= deadline {
                return Err(Error::Contended { tries });
            }
        }
    }

    /// Reads some keys.
    pub(crate) async fn read(
        &self,
        keys: &[&Key],
        given: Option<i64>,
        deadline: Instant,
    ) -> Result<Seen, Error> {
        let time = given.map(|now| now.to_string()).unwrap_or_default();
        match self.compare_and_set(keys, &[time.as_bytes()], deadline).await? {
            Written::Changed(seen) => Ok(seen),
            Written::Done { .. } => Err(unexpected()),
        }
    }

    /// Writes some keys, if they still hold what was seen.
    pub(crate) async fn write(
        &self,
        keys: &[&Key],
        at: At,
        seen: &Seen,
        writes: &[Write],
        deadline: Instant,
    ) -> Result<Written, Error> {
        let (time, given) = match at {
            At::Given(now) => (now.to_string(), Some(now)),
            At::Server => (String::new(), None),
            At::Reached => (format!(">{}", seen.now), None),
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

    /// Writes, if the keys are what they were; else says what they are.
    async fn compare_and_set(
        &self,
        keys: &[&Key],
        arguments: &[&[u8]],
        deadline: Instant,
    ) -> Result<Written, Error> {
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
            self.heard(now);
        }
        if is_written == 1 {
            return Ok(Written::Done { now });
        }
        let values = values.map(|value| match value {
            Value::BulkString(value) => Ok(value),
            _ => Err(unexpected()),
        });
        Ok(Written::Changed(Seen { now, values: values.collect::<Result<_, _>>()? }))
    }
}

/// Waits after a race was lost for the second time or more: a random part of a round trip, which grows, so that processes
/// do not meet again and again. The reply of a lost race brings what is there, so trying again at once is often best.
pub(crate) async fn backoff(tries: u32, round_trip: Duration) {
    if tries > 1 {
        let longest = (round_trip / 2).saturating_mul(tries / 2).min(Duration::from_millis(10));
        let nanos = u64::try_from(longest.as_nanos()).unwrap_or(0);
        tokio::time::sleep(Duration::from_nanos(fastrand::u64(0..=nanos))).await;
    }
}

/// When a key goes, in milliseconds: after it is fresh, never before.
fn expiry(write: &Write, given: Option<i64>) -> i64 {
    match (given, write.fresh_at) {
        (Some(_), _) => GIVEN_TIME_TO_LIVE,
        (None, Some(fresh_at)) => (fresh_at.div_euclid(1000) + 1).clamp(1, LATEST),
        (None, None) => LATEST,
    }
}

pub(crate) fn unexpected() -> Error {
    Error::Server { message: "the reply is not what the script sends".into() }
}
