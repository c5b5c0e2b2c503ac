//! The calls that take a slice, and that return its unused rest.

use std::time::Instant;

use redis::Value;
use tallygate::algorithm::{Receipt, Script as Numbers};
use tallygate::{Cost, Tick, Ticks};

use super::{Lowering, PolicyCodec, lower};
use crate::client::Redis;
use crate::error::Error;
use crate::key::Key;
use crate::lease::slice::{self, Slice, TakenSlice};
use crate::prepared::Prepared;
use crate::script::{RETURN_BUCKET, double};
use crate::transaction::unexpected;
use crate::value;

/// The key of a client, and the key of its outstanding leases.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keys<'a> {
    pub(super) client: &'a Key,
    pub(super) leases: &'a Key,
}

/// The largest amount that a script gets. No state is larger.
const MOST: Cost = 1 << 52;

impl Redis {
    /// Takes a slice. Returns `None` if no script can decide on the value, or there is none for this policy.
    pub(super) async fn take_slice(
        &self,
        prepared: &Prepared,
        keys: Keys<'_>,
        slice: Slice,
        life: Ticks,
        given: Option<i64>,
        deadline: Instant,
    ) -> Result<Option<TakenSlice>, Error> {
        let Some(scripted) = &prepared.scripted else { return Ok(None) };
        let Some(script) = &scripted.lease else { return Ok(None) };
        let need = scripted.numbers(slice.need.min(MOST).cast_signed());
        let wanted = [double(slice.want.min(MOST).into()), double(life.0.into())].concat();
        let time = given.map(|given| given.to_string());
        let mut arguments = vec![&prepared.head[..], &need, &wanted];
        arguments.extend(time.as_ref().map(String::as_bytes));
        let both = [keys.client, keys.leases];
        let Value::BulkString(bytes) = self.run(script, &both, &arguments, deadline).await? else {
            return Ok(None);
        };
        let numbers = value::numbers(&bytes)?;
        let [amount, now, state @ ..] = &numbers[..] else { return Err(unexpected()) };
        let now = i64::try_from(*now).map_err(|_| unexpected())?;
        if given.is_none() {
            self.note_server_time(now);
        }
        Ok(Some(TakenSlice {
            amount: Cost::try_from(*amount).map_err(|_| unexpected())?,
            at: Tick(now),
            state: prepared.policy.state_from_numbers(state)?,
        }))
    }

    /// Returns the unused rest of a slice that was taken at a time.
    pub(super) async fn return_slice(
        &self,
        prepared: &std::sync::Arc<Prepared>,
        keys: Keys<'_>,
        (amount, taken): (Cost, Tick),
        life: Ticks,
        given: Option<i64>,
        deadline: Instant,
    ) -> Result<(), Error> {
        let ends = slice::end_of_lease(taken, life);
        if !slice::tracks_outstanding(&prepared.policy) {
            let codec = PolicyCodec(prepared.clone());
            let (change, receipt) = (-i128::from(amount), Receipt::of_window(taken));
            let number = taken.0.saturating_sub(1);
            let what = Lowering::Settle { change, receipt, number };
            return match lower(self, &codec, keys.client, what, given, deadline).await {
                // A reset has removed the slice with everything else.
                Ok(_) | Err(Error::Settle(_)) => Ok(()),
                Err(error) => Err(error),
            };
        }
        let Some(scripted) = prepared.scripted.as_ref().filter(|_| Numbers::is_exact(ends.0))
        else {
            return Ok(());
        };
        let amount = scripted.numbers(amount.min(MOST).cast_signed());
        let lease = [double(ends.0.into()), double(life.0.into())].concat();
        let time = given.map(|given| given.to_string());
        let mut arguments = vec![&prepared.head[..], &amount, &lease];
        arguments.extend(time.as_ref().map(String::as_bytes));
        let returns = keys.client.of_returns();
        let all = [keys.client, keys.leases, &returns];
        self.run(&RETURN_BUCKET, &all, &arguments, deadline).await.map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use tallygate::algorithm::{Algorithm as _, Op};
    use tallygate::policy::Anchor;
    use tallygate::{Kind, Policy};
    use tallygate_testkit::servers::{Flavor, Server};

    use super::*;
    use crate::lease::ledger::{self, OutstandingLeases};
    use crate::prepared::PolicyChange;
    use crate::store::decide;
    use crate::{OnFailure, Options};

    /// Runs the same random histories by the scripts and by the ledger: plain checks, slices, returns in time and late,
    /// clocks that go back a little and far, several clients, lives and policies.
    async fn compare(flavor: Flavor) {
        let server = Server::start(flavor);
        let options = Options::default().budget(std::time::Duration::from_secs(20));
        let redis = Redis::with(&server.url(), options).unwrap();
        let store = redis.store("api").on_failure(OnFailure::Deny).in_ticks();
        let mut random = fastrand::Rng::with_seed(7);
        let (mut lifted, mut late, mut rejected) = (0, 0, 0);
        for round in 0..120 {
            let client = format!("client {round}");
            let policy = policy(&mut random);
            let prepared = store.prepare(&policy, PolicyChange::Replace).unwrap();
            let key = store.key(client.as_bytes()).unwrap();
            let leases = Key::of_leases("tallygate:", None, "api", client.as_bytes()).unwrap();
            let keys = Keys { client: &key, leases: &leases };
            let mut now = 1_700_000_000_000_000 + random.i64(0..1_000_000);
            let mut state = None;
            let mut out = OutstandingLeases::default();
            let mut held: Vec<(Cost, Tick, Ticks)> = Vec::new();
            let lives = [1, 50, random.u64(8..5000)].map(Ticks);
            for step in 0..60 {
                now += random.i64(-2..40) * random.i64(1..30);
                let life = lives[random.usize(0..lives.len())];
                let deadline = redis.deadline();
                let at = Tick(now);
                let model = state.get_or_insert_with(|| policy.initial(at));
                match random.u8(0..4) {
                    0 => {
                        let op = Op::Check(random.u64(1..9));
                        let codec = PolicyCodec(prepared.clone());
                        let decision = decide(&redis, &codec, &key, op, Some(now), deadline).await;
                        let Op::Check(cost) = op else { unreachable!() };
                        let expected =
                            policy.decide::<tallygate::algorithm::Timed>(model, at, cost);
                        assert_eq!(decision.unwrap(), expected, "{round} {step} {policy:?}");
                    }
                    1 if !held.is_empty() => {
                        let (amount, taken, life) = held.swap_remove(random.usize(0..held.len()));
                        let amount = random.u64(1..=amount + 1);
                        let back = (amount, taken);
                        let given = Some(now);
                        redis
                            .return_slice(&prepared, keys, back, life, given, deadline)
                            .await
                            .unwrap();
                        let again = ledger::return_units(&policy, model, &mut out, at, back, life);
                        lifted += again;
                        late += u64::from(again == 0);
                    }
                    _ => {
                        let need = random.u64(0..9);
                        let slice = Slice { need, want: need + random.u64(0..40) };
                        // No script decides after the clock was set back.
                        let is_left = policy.clock_was_set_back(model, at);
                        let found = redis
                            .take_slice(&prepared, keys, slice, life, Some(now), deadline)
                            .await
                            .unwrap();
                        if is_left {
                            assert!(found.is_none());
                            continue;
                        }
                        let amount = ledger::take(&policy, model, &mut out, at, slice, life);
                        let found = found.unwrap();
                        assert_eq!((found.amount, found.at), (amount, at), "{round} {step}");
                        rejected += u64::from(amount == 0);
                        if amount > 0 {
                            held.push((amount, at, life));
                        }
                        let facts = |state| policy.facts(state, at, None);
                        assert_eq!(facts(&found.state), facts(model), "{round} {step} {policy:?}");
                    }
                }
            }
        }
        assert!(lifted > 500 && late > 100 && rejected > 100, "{lifted} {late} {rejected}");
        assert_eq!(server.keys_without_ttl(), Vec::<Vec<u8>>::new());
    }

    fn policy(random: &mut fastrand::Rng) -> Policy {
        let kind = [Kind::TokenBucket, Kind::Gcra, Kind::LeakyBucket, Kind::FixedWindow]
            [random.usize(0..4)];
        let limit = Policy::of(kind, random.u64(1..60)).per(Ticks(random.u64(1..4000)));
        let limit = match kind {
            Kind::FixedWindow if random.bool() => limit.anchor(Anchor::FirstRequest),
            Kind::FixedWindow => limit,
            _ => limit.burst(random.u64(1..200)),
        };
        limit.build().unwrap()
    }

    #[tokio::test]
    async fn redis_leases_and_returns_as_the_ledger_does() {
        compare(Flavor::Redis).await;
    }

    #[tokio::test]
    async fn valkey_leases_and_returns_as_the_ledger_does() {
        compare(Flavor::Valkey).await;
    }
}
