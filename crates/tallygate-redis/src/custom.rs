//! Keeps the states of a user-defined algorithm in Redis, by compare-and-set.

use std::fmt;
use std::marker::PhantomData;

use tallygate::algorithm::{Algorithm, Answer, DecodeError, LimitRecord, Op, Timed};
use tallygate::reservation::{Charged, SettleError};
use tallygate::store::{InvalidAsk, RuleRef, Store};
use tallygate::{Ask, Cost, Decision, Policy, Tick, Ticks};

use crate::client::Redis;
use crate::error::Error;
use crate::key::Key;
use crate::prepared::Prepared;
use crate::store::{
    Lowering, RedisStore, Reply, StateCodec, lower_alone, lowers, reserve_in, step,
};
use crate::value;

/// Keeps the states of any [`Algorithm`] in Redis.
///
/// A decision reads the state, decides in this process, and writes the state unless another process has written meanwhile.
/// It takes two calls, and more if several processes check one key at the same time. It fails at the end of the time budget.
///
/// There is no failure setting: the application handles errors.
///
/// ```no_run
/// use tallygate::{Policy, RateLimiter};
/// use tallygate_redis::{CustomStore, Redis};
///
/// # tokio::runtime::Runtime::new()?.block_on(async {
/// // Any algorithm; here, a limit of the library.
/// let rule = Policy::token_bucket(5).per_minute().limit()?;
/// let redis = Redis::open("redis://127.0.0.1:6379")?;
/// let limiter = RateLimiter::in_store("mine", rule, CustomStore::new(&redis, "mine"));
/// assert!(limiter.check("alice").await?.allowed);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct CustomStore(RedisStore);

impl CustomStore {
    /// Makes a store for the keys of an algorithm. Each algorithm needs its own name.
    #[must_use]
    pub fn new(redis: &Redis, name: &str) -> Self {
        Self(redis.store(name))
    }

    /// Removes all state of some clients, as if they had never made a request.
    ///
    /// # Errors
    /// Fails if a key is too long or Redis is unavailable. Some clients may be removed already.
    pub async fn forget(&self, clients: impl IntoIterator<Item: AsRef<[u8]>>) -> Result<(), Error> {
        self.0.forget(clients).await
    }

    /// Makes the store count in ticks of any length, for callers that give the time with every call.
    #[must_use]
    pub fn in_ticks(self) -> Self {
        Self(self.0.in_ticks())
    }
}

/// The codec of a user-defined rule, which counts in the caller's ticks.
struct CustomCodec<A, L> {
    rule: L,
    scale: u64,
    of: PhantomData<fn() -> A>,
}

impl<A: Algorithm + Sync, L: RuleRef<A>> StateCodec for CustomCodec<A, L> {
    type Rule = A;

    fn rule(&self) -> &A {
        &self.rule
    }

    fn scale(&self) -> u64 {
        self.scale
    }

    fn script(&self) -> Option<&Prepared> {
        None
    }

    fn state_under(&self, _: Box<[LimitRecord]>) -> A::State {
        unreachable!("a user-defined rule has no script")
    }

    fn read(&self, value: &[u8], _: Tick) -> Result<A::State, Error> {
        let state = value.strip_prefix(&value::OWN);
        let state = state.ok_or(DecodeError::Field { name: "format" })?;
        Ok(self.rule.decode(state)?)
    }

    fn write(&self, state: &A::State) -> Vec<u8> {
        let mut out = value::OWN.to_vec();
        self.rule.encode(state, &mut out);
        out
    }
}

impl CustomStore {
    async fn decide<A: Algorithm + Sync>(
        &self,
        codec: &CustomCodec<A, impl RuleRef<A>>,
        key: &Key,
        op: Op,
        now: Option<Tick>,
    ) -> Result<Timed, Error> {
        let redis = self.0.redis();
        let given = now.map(|now| self.0.to_redis_time(now).0);
        let deadline = redis.deadline();
        if lowers(codec, op) {
            return lower_alone(redis, codec, key, &Lowering::Op(op), given, deadline).await;
        }
        redis.transact(&[key], given, None, deadline, |seen| step(codec, op, seen)).await
    }
}

impl<A: Algorithm + Sync> Store<A> for CustomStore {
    type Reply<'a, T: 'a> = Reply<'a, T>;

    fn apply_with<'a, T: Send + 'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
        make: impl FnOnce(&A, Timed) -> T + Send + 'a,
    ) -> Reply<'a, T> {
        let key = self.0.key(key);
        Box::pin(async move {
            let codec = CustomCodec { rule, scale: self.0.scale(), of: PhantomData };
            let timed = self.decide(&codec, &key?, op, now).await?;
            Ok(make(&*codec.rule, timed))
        })
    }

    fn check_many<'a, T: Answer, K>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        asks: &'a [K],
    ) -> Reply<'a, Vec<T>>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        let asks: Vec<Ask<'a>> = asks.iter().map(Into::into).collect();
        let keys = asks.iter().map(|ask| self.0.key(ask.key)).collect::<Result<Vec<_>, _>>();
        Box::pin(async move {
            let codec = CustomCodec { rule, scale: self.0.scale(), of: PhantomData };
            let mut answers = Vec::new();
            for (ask, key) in asks.iter().zip(keys?) {
                let Timed { decision, at } =
                    self.decide(&codec, &key, Op::Check(ask.cost), ask.at).await?;
                answers.push(T::from_decision(decision, at));
            }
            Ok(answers)
        })
    }

    fn reserve<'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        estimate: Cost,
        _: Ticks,
        now: Option<Tick>,
    ) -> Reply<'a, Charged> {
        let key = self.0.key(key);
        Box::pin(async move {
            let codec = CustomCodec { rule, scale: self.0.scale(), of: PhantomData };
            let (redis, given) = (self.0.redis(), now.map(|now| self.0.to_redis_time(now).0));
            let deadline = redis.deadline();
            let (timed, receipt) =
                reserve_in(redis, &codec, &key?, estimate, given, deadline).await?;
            let (number, store) = (timed.at.0.saturating_sub(1), self.0.identity()?);
            Ok(Charged { timed, receipt, number, store })
        })
    }

    fn settle<'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        change: i128,
        charged: &Charged,
        now: Option<Tick>,
    ) -> Result<Reply<'a, Decision>, SettleError> {
        if self.0.identity() != Ok(charged.store) {
            return Err(SettleError::OtherLimiter);
        }
        let (key, receipt, number) = (self.0.key(key), charged.receipt.clone(), charged.number);
        Ok(Box::pin(async move {
            let codec = CustomCodec { rule, scale: self.0.scale(), of: PhantomData };
            let (redis, given) = (self.0.redis(), now.map(|now| self.0.to_redis_time(now).0));
            let what = Lowering::Settle { change, receipt, number };
            let timed = lower_alone(redis, &codec, &key?, &what, given, redis.deadline()).await?;
            Ok(timed.decision)
        }))
    }

    fn now(&self) -> Tick {
        Store::<Policy>::now(&self.0)
    }

    fn fail<'a, T: Send + 'a>(invalid: InvalidAsk) -> Reply<'a, T> {
        <RedisStore as Store<Policy>>::fail(invalid)
    }

    fn map<'a, T: Send + 'a, U: Send + 'a>(
        reply: Reply<'a, T>,
        make: impl FnOnce(T) -> U + Send + 'a,
    ) -> Reply<'a, U> {
        <RedisStore as Store<Policy>>::map(reply, make)
    }

    fn gather<'a, T: Send + 'a>(
        replies: impl Iterator<Item = (&'a [u8], Reply<'a, T>)>,
    ) -> Reply<'a, Vec<T>> {
        <RedisStore as Store<Policy>>::gather(replies)
    }
}

impl fmt::Debug for CustomStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CustomStore").field(&self.0).finish()
    }
}
