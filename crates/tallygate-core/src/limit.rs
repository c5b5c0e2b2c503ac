//! A limit: one rule with its numbers, found valid when it was made.
//!
//! [`Limit`] is the six algorithms behind one type, for whoever learns at run time which one it is
//! (a configuration, a command line). It is an [`Algorithm`] itself, and knows how to take over a
//! state that was made under other numbers or by another algorithm.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::algorithm::{Algorithm, Facts, Fit, FitBehind, Share, Used};
use crate::bucket::{Bucket, BucketState};
use crate::codec::{self, DecodeError, Reader};
use crate::doubles::NumberReader;
use crate::fixed_window::{FixedWindow, FixedWindowState};
use crate::numbers::{Anchor, Kind, Numbers, PolicyError};
use crate::penalty::Penalty;
use crate::receipt::Receipt;
use crate::sliding_window_counter::{SlidingWindowCounter, SlidingWindowCounterState};
use crate::sliding_window_log::{SlidingWindowLog, SlidingWindowLogState};
use crate::{Cost, Tick, Ticks};

/// The state machine of a limit, for whoever wants to choose its code once and not with every
/// decision. Buckets whose levels need more than 64 bits are `Wide`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// A token bucket, a GCRA or a leaky bucket.
    Bucket(Bucket),
    /// One of them with extreme numbers.
    WideBucket(Bucket<u128>),
    /// A fixed window.
    FixedWindow(FixedWindow),
    /// A sliding window log.
    SlidingWindowLog(SlidingWindowLog),
    /// A sliding window counter.
    SlidingWindowCounter(SlidingWindowCounter),
}

/// A valid rule: algorithm, amount, window, burst, and its name.
///
/// ```
/// use tallygate_core::{Algorithm, Decision, Policy, Tick, Ticks};
///
/// let limit = Policy::gcra(3).per(Ticks(10)).limit()?;
/// let mut state = limit.first(Tick(0));
/// for _ in 0..3 {
///     assert!(limit.decide::<bool>(&mut state, Tick(0), 1));
/// }
/// let refused: Decision = limit.decide(&mut state, Tick(0), 1);
/// assert_eq!(refused.retry_after, Some(Ticks(4))); // 3⅓, and never early
/// # Ok::<(), tallygate_core::PolicyError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    name: Box<str>,
    numbers: Numbers,
    machine: Machine,
    options: Options,
}

/// What a [`Policy`](crate::Policy) makes of a limit's answer. The limit by itself does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) shadow: bool,
    pub(crate) penalty: Option<Penalty>,
}

/// The state of a key under a [`Limit`].
///
/// It belongs to the limit that made it. To read it under another, [`carry`](Limit::carry) it over.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LimitState {
    /// A bucket's.
    Bucket(BucketState),
    /// A bucket's of extreme numbers.
    WideBucket(BucketState<u128>),
    /// A fixed window's.
    FixedWindow(FixedWindowState),
    /// A sliding window log's.
    SlidingWindowLog(SlidingWindowLogState),
    /// A sliding window counter's.
    SlidingWindowCounter(SlidingWindowCounterState),
}

/// Runs an expression with the machine, wrapping what it makes into the state's variant.
macro_rules! make {
    ($limit:expr, |$machine:ident| $state:expr) => {
        match &$limit.machine {
            Machine::Bucket($machine) => LimitState::Bucket($state),
            Machine::WideBucket($machine) => LimitState::WideBucket($state),
            Machine::FixedWindow($machine) => LimitState::FixedWindow($state),
            Machine::SlidingWindowLog($machine) => LimitState::SlidingWindowLog($state),
            Machine::SlidingWindowCounter($machine) => LimitState::SlidingWindowCounter($state),
        }
    };
}

/// Runs an expression with the machine and the state of its kind; another for a foreign state.
macro_rules! with {
    ($limit:expr, $state:expr, |$machine:ident, $inner:ident| $run:expr, else $foreign:expr) => {
        match (&$limit.machine, $state) {
            (Machine::Bucket($machine), LimitState::Bucket($inner)) => $run,
            (Machine::WideBucket($machine), LimitState::WideBucket($inner)) => $run,
            (Machine::FixedWindow($machine), LimitState::FixedWindow($inner)) => $run,
            (Machine::SlidingWindowLog($machine), LimitState::SlidingWindowLog($inner)) => $run,
            (Machine::SlidingWindowCounter($machine), LimitState::SlidingWindowCounter($inner)) => {
                $run
            }
            _ => $foreign,
        }
    };
}

impl Limit {
    pub(crate) fn new(
        name: Box<str>,
        numbers: Numbers,
        options: Options,
    ) -> Result<Self, PolicyError> {
        numbers.validate()?;
        let n = &numbers;
        // Each bucket in 64 bits if its levels fit, else in 128, where all valid ones do.
        let machine = match numbers.kind {
            Kind::TokenBucket | Kind::Gcra | Kind::LeakyBucket => {
                let wide = || Bucket::new(n).map(Machine::WideBucket);
                Bucket::new(n).map(Machine::Bucket).or_else(wide)
            }
            Kind::FixedWindow => Some(Machine::FixedWindow(FixedWindow::new(n))),
            Kind::SlidingWindowLog => Some(Machine::SlidingWindowLog(SlidingWindowLog::new(n))),
            Kind::SlidingWindowCounter => {
                Some(Machine::SlidingWindowCounter(SlidingWindowCounter::new(n)))
            }
        };
        let machine = machine
            .ok_or(PolicyError::DebtTooLarge { debt: numbers.debt, capacity: numbers.burst })?;
        Ok(Self { name, numbers, machine, options })
    }

    /// Its name, to tell it from the other limits of its policy.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its numbers.
    #[must_use]
    pub const fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    /// Whether it only watches.
    #[must_use]
    pub const fn is_shadow(&self) -> bool {
        self.options.shadow
    }

    /// What becomes of keys that are refused too often.
    #[must_use]
    pub const fn penalty(&self) -> Option<&Penalty> {
        self.options.penalty.as_ref()
    }

    pub(crate) const fn is_plain(&self) -> bool {
        !self.options.shadow && self.options.penalty.is_none()
    }

    /// Its state machine.
    #[must_use]
    pub const fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Takes over a state that was made under another limit: what was used stays used, at most the
    /// new capacity. No change of limit, window, burst or algorithm hands out a free burst.
    ///
    /// ```
    /// use tallygate_core::{Algorithm, Policy, Tick, Ticks};
    ///
    /// let free = Policy::token_bucket(10).per(Ticks(60)).limit()?;
    /// let pro = Policy::fixed_window(100).per(Ticks(60)).limit()?;
    /// let mut state = free.first(Tick(0));
    /// assert!(free.decide::<bool>(&mut state, Tick(0), 10));
    /// let upgraded = pro.carry(&free, &state, Tick(0));
    /// assert_eq!(pro.facts(&upgraded, Tick(0), None).remaining, 90);
    /// # Ok::<(), tallygate_core::PolicyError>(())
    /// ```
    #[must_use]
    pub fn carry(&self, from: &Self, state: &LimitState, now: Tick) -> LimitState {
        if self.numbers.same_state(&from.numbers) {
            return state.clone();
        }
        let mut state = state.clone();
        if from.set_back(&state, now) {
            from.rebase(&mut state, now);
        }
        // A thread that comes late must not take the state back in time: it would earn that twice.
        let now = now.max(from.last_change(&state));
        self.with_used(from.used(&state, now), now)
    }

    /// Reads a state that [`encode`](Algorithm::encode) wrote under whatever limit, and carries it
    /// over to this one.
    ///
    /// # Errors
    /// The bytes are not a whole state of any of the six algorithms.
    pub fn adopt(&self, bytes: &[u8], now: Tick) -> Result<LimitState, DecodeError> {
        let (numbers, state) = read_numbers(bytes)?;
        if self.numbers.same_state(&numbers) {
            return self.decode_state(state);
        }
        let options = Options { shadow: false, penalty: None };
        let from = Self::new(Box::default(), numbers, options)
            .map_err(|_| DecodeError::Field { name: "limit" })?;
        Ok(self.carry(&from, &from.decode_state(state)?, now))
    }

    pub(crate) fn put_numbers(&self, state: &LimitState, out: &mut Vec<i128>) {
        with!(self, state, |machine, state| machine.put_numbers(state, out), else {
            self.put_numbers(&self.used_up(Tick(0)), out);
        });
    }

    pub(crate) fn take_numbers(
        &self,
        numbers: &mut NumberReader<'_>,
    ) -> Result<LimitState, DecodeError> {
        Ok(make!(self, |machine| machine.take_numbers(numbers)?))
    }

    fn decode_state(&self, bytes: &[u8]) -> Result<LimitState, DecodeError> {
        Ok(make!(self, |machine| machine.decode(bytes)?))
    }

    /// What a state of another kind of limit is taken for, if nobody carried it over: it refuses
    /// until it is earned back, because guessing otherwise would be a free burst.
    #[cold]
    fn used_up(&self, now: Tick) -> LimitState {
        self.with_used(Used::whole(self.capacity()), now)
    }
}

impl Algorithm for Limit {
    type State = LimitState;

    fn capacity(&self) -> Cost {
        self.numbers.burst
    }

    fn fresh(&self, now: Tick) -> LimitState {
        make!(self, |machine| machine.fresh(now))
    }

    fn first(&self, now: Tick) -> LimitState {
        make!(self, |machine| machine.first(now))
    }

    #[inline]
    fn last_change(&self, state: &LimitState) -> Tick {
        with!(self, state, |machine, state| machine.last_change(state), else Tick(i64::MIN))
    }

    fn clock_set_back(&self, state: &mut LimitState, now: Tick) {
        with!(self, state, |machine, state| machine.clock_set_back(state, now), else ());
    }

    #[inline]
    fn set_back(&self, state: &LimitState, now: Tick) -> bool {
        with!(self, state, |machine, state| machine.set_back(state, now), else true)
    }

    fn rebase(&self, state: &mut LimitState, now: Tick) {
        with!(self, &mut *state, |machine, state| machine.rebase(state, now), else {
            *state = self.used_up(now);
        });
    }

    #[inline]
    fn admits(&self, state: &LimitState, now: Tick, cost: Cost) -> bool {
        with!(self, state, |machine, state| machine.admits(state, now, cost), else false)
    }

    #[inline]
    fn admit(&self, state: &mut LimitState, now: Tick, cost: Cost) -> bool {
        with!(self, state, |machine, state| machine.admit(state, now, cost), else false)
    }

    fn fit(&self, state: &LimitState, now: Tick, cost: Cost) -> Fit {
        with!(self, state, |machine, state| machine.fit(state, now, cost), else {
            self.fit(&self.used_up(now), now, cost)
        })
    }

    fn fit_behind(&self, state: &LimitState, now: Tick, ahead: u128, cost: Cost) -> FitBehind {
        with!(self, state, |machine, state| machine.fit_behind(state, now, ahead, cost), else {
            self.fit_behind(&self.used_up(now), now, ahead, cost)
        })
    }

    fn charge(&self, state: &mut LimitState, now: Tick, amount: i128) -> u128 {
        with!(self, &mut *state, |machine, state| machine.charge(state, now, amount), else {
            *state = self.used_up(now);
            self.charge(state, now, amount)
        })
    }

    fn receipt(&self, state: &LimitState) -> Receipt {
        with!(self, state, |machine, state| machine.receipt(state), else Receipt::Nothing)
    }

    fn settle(&self, state: &mut LimitState, now: Tick, change: i128, receipt: &Receipt) -> u128 {
        with!(self, &mut *state, |machine, state| machine.settle(state, now, change, receipt), else {
            *state = self.used_up(now);
            self.settle(state, now, change.max(0), receipt)
        })
    }

    fn facts(&self, state: &LimitState, now: Tick, admitted: Option<Cost>) -> Facts {
        with!(self, state, |machine, state| machine.facts(state, now, admitted), else {
            self.facts(&self.used_up(now), now, admitted)
        })
    }

    fn limit(&self, index: usize, _: Tick) -> Option<&Self> {
        (index == 0).then_some(self)
    }

    fn fresh_at(&self, state: &LimitState) -> Option<Tick> {
        with!(self, state, |machine, state| machine.fresh_at(state), else None)
    }

    fn is_fresh(&self, state: &LimitState, now: Tick) -> bool {
        with!(self, state, |machine, state| machine.is_fresh(state, now), else false)
    }

    fn used(&self, state: &LimitState, now: Tick) -> Used {
        with!(self, state, |machine, state| machine.used(state, now), else {
            Used::whole(self.capacity())
        })
    }

    fn share_used(&self, state: &LimitState, now: Tick) -> Share {
        with!(self, state, |machine, state| machine.share_used(state, now), else Share::ALL)
    }

    fn with_used(&self, used: Used, now: Tick) -> LimitState {
        make!(self, |machine| machine.with_used(used, now))
    }

    /// The numbers of the limit come first, so that [`adopt`](Self::adopt) can read it under others.
    fn encode(&self, state: &LimitState, out: &mut Vec<u8>) {
        with!(self, state, |machine, state| {
            let n = &self.numbers;
            out.push(n.kind.tag());
            for number in [n.limit, n.window.0, n.burst, n.debt] {
                codec::put(out, number);
            }
            out.push(u8::from(n.anchor == Anchor::FirstRequest));
            machine.encode(state, out);
        }, else self.encode(&self.used_up(Tick(i64::MAX)), out));
    }

    fn decode(&self, bytes: &[u8]) -> Result<LimitState, DecodeError> {
        let (numbers, state) = read_numbers(bytes)?;
        if numbers.kind != self.numbers.kind {
            let (found, expected) = (numbers.kind.tag(), self.numbers.kind.tag());
            return Err(DecodeError::Tag { found, expected });
        }
        if !self.numbers.same_state(&numbers) {
            return Err(DecodeError::OtherLimit);
        }
        self.decode_state(state)
    }
}

/// The numbers in front of an encoded state, and the state.
fn read_numbers(bytes: &[u8]) -> Result<(Numbers, &[u8]), DecodeError> {
    let mut reader = Reader(bytes);
    let tag = reader.byte()?;
    let kind = Kind::of_tag(tag).ok_or(DecodeError::Field { name: "algorithm" })?;
    let (limit, window) = (reader.number("limit")?, Ticks(reader.number("window")?));
    let (burst, debt) = (reader.number("burst")?, reader.number("debt")?);
    let anchor = match reader.byte()? {
        0 => Anchor::Clock,
        1 => Anchor::FirstRequest,
        _ => return Err(DecodeError::Field { name: "anchor" }),
    };
    Ok((Numbers { kind, limit, window, burst, debt, start: burst, anchor }, reader.0))
}
