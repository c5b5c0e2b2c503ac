//! Reading some keys, deciding on them here, and writing them if nobody else has meanwhile.
//!
//! For what a script does not decide: numbers beyond doubles, several keys, a policy that has changed, an
//! algorithm of one's own. All keys are of one slot, so it is all or nothing. Somebody else's write in between
//! means to decide again, a bounded number of times.

use std::sync::atomic::Ordering;
use std::time::Instant;

use redis::Value;

use crate::client::Redis;
use crate::error::Error;
use crate::key::Key;
use crate::script::COMPARE_AND_SET;

/// How often a decision is made again because others have written.
const MAX_TRIES: u32 = 16;
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
        let time = given.map(|now| now.to_string()).unwrap_or_default();
        let mut seen = match seen {
            Some(seen) => seen,
            None => match self.compare_and_set(keys, &[time.as_bytes()], deadline).await? {
                Some(seen) => seen,
                None => return Err(unexpected()),
            },
        };
        for _ in 0..MAX_TRIES {
            let (writes, answer) = decide(&seen)?;
            let Some(writes) = writes else { return Ok(answer) };
            let ends: Vec<String> =
                writes.iter().map(|write| expiry(write, given).to_string()).collect();
            let mut arguments = vec![time.as_bytes()];
            for ((write, was), ends) in writes.iter().zip(&seen.values).zip(&ends) {
                let is_fresh =
                    given.is_none() && write.fresh_at.is_some_and(|fresh| fresh <= seen.now);
                let value = if is_fresh { &[][..] } else { &write.value[..] };
                arguments.extend([&was[..], value, ends.as_bytes()]);
            }
            match self.compare_and_set(keys, &arguments, deadline).await? {
                None => return Ok(answer),
                Some(changed) => seen = changed,
            }
            self.inner().counters.contended.fetch_add(1, Ordering::Relaxed);
        }
        Err(Error::Contended { tries: MAX_TRIES })
    }

    /// Writes, if the keys are what they were; else says what they are.
    async fn compare_and_set(
        &self,
        keys: &[&Key],
        arguments: &[&[u8]],
        deadline: Instant,
    ) -> Result<Option<Seen>, Error> {
        let reply = self.run(&COMPARE_AND_SET, keys, arguments, deadline).await?;
        let Value::Array(reply) = reply else { return Err(unexpected()) };
        let mut values = reply.into_iter();
        let (Some(Value::Int(is_written)), Some(time)) = (values.next(), values.next()) else {
            return Err(unexpected());
        };
        let Value::BulkString(time) = time else { return Err(unexpected()) };
        let time = std::str::from_utf8(&time).ok().and_then(|time| time.parse().ok());
        let now = time.ok_or_else(unexpected)?;
        if arguments.first().is_some_and(|given| given.is_empty()) {
            self.heard(now);
        }
        if is_written == 1 {
            return Ok(None);
        }
        let values = values.map(|value| match value {
            Value::BulkString(value) => Ok(value),
            _ => Err(unexpected()),
        });
        Ok(Some(Seen { now, values: values.collect::<Result<_, _>>()? }))
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
