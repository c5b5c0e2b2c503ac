//! Decides on all keys of a joint decision in one atomic step, where one server has all of them.

use std::time::Instant;

use tallygate::Tick;
use tallygate::algorithm::Script;

use super::key_parts::{Answers, KeyParts};
use crate::error::Error;
use crate::key::Key;
use crate::script::Scripted;
use crate::transaction::{ReadValues, unexpected};

/// Decides on all keys in one atomic step. A part that does not deny is reported as allowed.
pub(super) async fn decide_in_one_step(
    keys: &[KeyParts<'_>],
    now: Option<Tick>,
) -> Result<Answers, Error> {
    let (redis, store) = (keys[0].redis(), keys[0].first().store());
    let deadline = redis.deadline();
    let given = now.map(|now| store.to_redis_time(now).0);
    for key in keys {
        key.first().pay_debt(now, deadline).await?;
    }
    if let Some(answers) = by_script(keys, given, deadline).await? {
        return Ok(answers);
    }
    let decide = |seen: &ReadValues| {
        let mut go = true;
        for (key, value) in keys.iter().zip(&seen.values) {
            go = go && key.agrees(value, seen.now)?;
        }
        let mut answers = Vec::with_capacity(keys.len());
        let mut writes = Vec::with_capacity(keys.len());
        let mut is_changed = false;
        for (key, value) in keys.iter().zip(&seen.values) {
            let step = key.step(value, seen.now, go)?;
            is_changed |= step.is_changed;
            writes.push(step.write);
            answers.extend(step.answers);
        }
        Ok((is_changed.then_some(writes), answers))
    };
    let names: Vec<&Key> = keys.iter().map(KeyParts::key).collect();
    redis.transact(&names, given, None, deadline, decide).await
}

/// Decides on all keys by one script. Returns `None` if there is no script for their policies or for their values.
async fn by_script(
    keys: &[KeyParts<'_>],
    given: Option<i64>,
    deadline: Instant,
) -> Result<Option<Answers>, Error> {
    if !given.is_none_or(Script::is_exact) {
        return Ok(None);
    }
    let mut scripted = Vec::with_capacity(keys.len());
    for key in keys {
        let Some((prepared, cost)) = key.scripted() else { return Ok(None) };
        scripted.push((key, prepared, cost));
    }
    let scripts: Vec<_> =
        scripted.iter().filter_map(|(_, prepared, _)| prepared.scripted.as_ref()).collect();
    let script = Scripted::of_all(&scripts);
    let costs: Vec<_> =
        scripted.iter().enumerate().map(|(place, (_, _, cost))| (place, *cost)).collect();
    let names: Vec<_> = scripted.iter().map(|(key, prepared, _)| (key.key(), *prepared)).collect();
    let redis = keys[0].redis();
    let decided = redis.run_many(&script, &names, &[&costs], given, deadline).await?;
    let Some((now, decided)) = decided else { return Ok(None) };
    if decided.len() != scripted.len() {
        return Err(unexpected());
    }
    let go = decided.iter().all(|part| part.is_allowed);
    let mut answers = Vec::with_capacity(decided.len());
    for ((key, _, cost), decided) in scripted.iter().zip(&decided) {
        for (index, part) in &key.parts {
            answers.push((*index, part.answer(decided, now, *cost, go)?));
        }
    }
    Ok(Some(answers))
}
