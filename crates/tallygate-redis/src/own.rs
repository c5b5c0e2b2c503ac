//! The keys of an algorithm of a user's own, in Redis, by compare-and-set.

use std::fmt;
use std::marker::PhantomData;

use tallygate::{
    Algorithm, Answer, Ask, Charged, Cost, Decision, DecodeError, InvalidAsk, Lent, Op, Policy,
    SettleError, Standing, Store, Tick, Ticks, Timed,
};

use crate::client::Redis;
use crate::error::Error;
use crate::key::Key;
use crate::store::{Judge, Lowering, Prepared, RedisStore, Reply, lower, lowers, reserve_in, step};
use crate::value;

/// A store for any [`Algorithm`]. A decision reads the state, is made here, and is written if nobody else has
/// written meanwhile: two calls, and more where many ask for one key at once. Past a bound it is an error.
///
/// There is no failure policy: who wrote the algorithm knows what to do without it.
///
/// ```no_run
/// use tallygate::{Policy, RateLimiter};
/// use tallygate_redis::{OwnStore, Redis};
///
/// # tokio::runtime::Runtime::new()?.block_on(async {
/// // Any algorithm; a limit of the library's own is one.
/// let rule = Policy::token_bucket(5).per_minute().limit()?;
/// let redis = Redis::open("redis://127.0.0.1:6379")?;
/// let limiter = RateLimiter::in_store("mine", rule, OwnStore::new(&redis, "mine"));
/// assert!(limiter.check("alice").await?.allowed);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct OwnStore(RedisStore);

impl OwnStore {
    /// A store for the keys of an algorithm, by a name of its own.
    #[must_use]
    pub fn new(redis: &Redis, name: &str) -> Self {
        Self(redis.store(name))
    }

    /// Removes whatever is kept of some clients, as if they had never come.
    ///
    /// # Errors
    /// A key is too long, or Redis could not be asked; some may be gone then.
    pub async fn forget(&self, clients: impl IntoIterator<Item: AsRef<[u8]>>) -> Result<(), Error> {
        self.0.forget(clients).await
    }

    /// The same for those who give the time with every call, in ticks of their own.
    #[must_use]
    pub fn in_ticks(self) -> Self {
        Self(self.0.in_ticks())
    }
}

/// A rule of one's own, which counts in the caller's ticks.
struct ByOwn<A, L> {
    rule: L,
    scale: u64,
    of: PhantomData<fn() -> A>,
}

impl<A: Algorithm + Sync, L: Lent<A>> Judge for ByOwn<A, L> {
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

    fn state_under(&self, _: Box<[Standing]>) -> A::State {
        unreachable!("it has no script")
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

impl OwnStore {
    async fn decide<A: Algorithm + Sync>(
        &self,
        judge: &ByOwn<A, impl Lent<A>>,
        key: &Key,
        op: Op,
        now: Option<Tick>,
    ) -> Result<Timed, Error> {
        let redis = self.0.redis();
        let given = now.map(|now| self.0.in_redis(now).0);
        let deadline = redis.deadline();
        if lowers(judge, op) {
            return lower(redis, judge, key, &Lowering::Op(op), given, deadline).await;
        }
        redis.transact(&[key], given, None, deadline, |seen| step(judge, op, seen)).await
    }
}

impl<A: Algorithm + Sync> Store<A> for OwnStore {
    type Reply<'a, T: 'a> = Reply<'a, T>;

    fn apply<'a, T: Answer>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Reply<'a, T> {
        self.apply_with(rule, key, op, now, |_, Timed { decision, at }| {
            T::of_decision(decision, at)
        })
    }

    fn apply_with<'a, T: Send + 'a>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
        make: impl FnOnce(&A, Timed) -> T + Send + 'a,
    ) -> Reply<'a, T> {
        let key = self.0.key(key);
        Box::pin(async move {
            let judge = ByOwn { rule, scale: self.0.scale(), of: PhantomData };
            let timed = self.decide(&judge, &key?, op, now).await?;
            Ok(make(&*judge.rule, timed))
        })
    }

    fn check_many<'a, T: Answer, K>(
        &'a self,
        rule: impl Lent<A> + 'a,
        asks: &'a [K],
    ) -> Reply<'a, Vec<T>>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        let asks: Vec<Ask<'a>> = asks.iter().map(Into::into).collect();
        let keys = asks.iter().map(|ask| self.0.key(ask.key)).collect::<Result<Vec<_>, _>>();
        Box::pin(async move {
            let judge = ByOwn { rule, scale: self.0.scale(), of: PhantomData };
            let mut answers = Vec::new();
            for (ask, key) in asks.iter().zip(keys?) {
                let Timed { decision, at } =
                    self.decide(&judge, &key, Op::Check(ask.cost), ask.at).await?;
                answers.push(T::of_decision(decision, at));
            }
            Ok(answers)
        })
    }

    fn reserve<'a>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        estimate: Cost,
        _: Ticks,
        now: Option<Tick>,
    ) -> Reply<'a, Charged> {
        let key = self.0.key(key);
        Box::pin(async move {
            let judge = ByOwn { rule, scale: self.0.scale(), of: PhantomData };
            let (redis, given) = (self.0.redis(), now.map(|now| self.0.in_redis(now).0));
            let deadline = redis.deadline();
            let (timed, receipt) =
                reserve_in(redis, &judge, &key?, estimate, given, deadline).await?;
            let (number, store) = (timed.at.0.saturating_sub(1), self.0.identity()?);
            Ok(Charged { timed, receipt, number, store })
        })
    }

    fn settle<'a>(
        &'a self,
        rule: impl Lent<A> + 'a,
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
            let judge = ByOwn { rule, scale: self.0.scale(), of: PhantomData };
            let (redis, given) = (self.0.redis(), now.map(|now| self.0.in_redis(now).0));
            let what = Lowering::Settle { change, receipt: &receipt, number };
            let timed = lower(redis, &judge, &key?, &what, given, redis.deadline()).await?;
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

impl fmt::Debug for OwnStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnStore").field(&self.0).finish()
    }
}
