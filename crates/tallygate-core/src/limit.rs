//! [`Limit`]: one algorithm with its numbers, which are valid.
//!
//! It is one type for all six algorithms, because a configuration or a command line chooses the algorithm at run
//! time. It implements [`Algorithm`], and can carry over a state from other numbers or another algorithm.

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
use crate::{Cost, Quota, Tick, Ticks};

/// The state machine of a limit.
///
/// Match on it once to avoid the choice between the algorithms in every decision. Buckets whose levels need more
/// than 64 bits are `WideBucket`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// A token bucket, a GCRA or a leaky bucket.
    Bucket(Bucket),
    /// A bucket whose levels need more than 64 bits.
    WideBucket(Bucket<u128>),
    /// A fixed window.
    FixedWindow(FixedWindow),
    /// A sliding window log.
    SlidingWindowLog(SlidingWindowLog),
    /// A sliding window counter.
    SlidingWindowCounter(SlidingWindowCounter),
}

/// A valid limit: an algorithm with its amount, window and burst, and a name.
///
/// A limit by itself ignores its options ([shadow](crate::LimitBuilder::shadow) and
/// [penalty](crate::LimitBuilder::penalty)): a [`Policy`](crate::Policy) applies them.
///
/// ```
/// use tallygate_core::{Algorithm, Decision, Policy, Tick, Ticks};
///
/// let limit = Policy::gcra(3).per(Ticks(10)).limit()?;
/// let mut state = limit.initial(Tick(0));
/// for _ in 0..3 {
///     assert!(limit.decide::<bool>(&mut state, Tick(0), 1));
/// }
/// let denied: Decision = limit.decide(&mut state, Tick(0), 1);
/// assert_eq!(denied.retry_after, Some(Ticks(4))); // 3⅓ ticks, rounded up
/// # Ok::<(), tallygate_core::PolicyError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    name: Box<str>,
    numbers: Numbers,
    machine: Machine,
    options: Options,
}

/// The options of a limit. A [`Policy`](crate::Policy) applies them; the limit itself ignores them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) shadow: bool,
    pub(crate) penalty: Option<Penalty>,
}

/// The state of a key under a [`Limit`].
///
/// It belongs to the limit that created it. To use it with another limit, [`carry`](Limit::carry) it over.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LimitState {
    /// The state of a bucket.
    Bucket(BucketState),
    /// The state of a bucket whose levels need more than 64 bits.
    WideBucket(BucketState<u128>),
    /// The state of a fixed window.
    FixedWindow(FixedWindowState),
    /// The state of a sliding window log.
    SlidingWindowLog(SlidingWindowLogState),
    /// The state of a sliding window counter.
    SlidingWindowCounter(SlidingWindowCounterState),
}

/// Evaluates an expression with the machine, and wraps the resulting state in its variant.
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

/// Evaluates an expression with the machine and its state, or another expression if the state belongs to another
/// kind of limit.
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
        // The levels of all valid buckets fit 128 bits. Use 64 bits if they fit.
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

    /// Returns the name, which is unique among the limits of a policy.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the numbers.
    #[must_use]
    pub const fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    /// Returns how many units are earned per window.
    #[must_use]
    pub const fn quota(&self) -> Quota {
        Quota { amount: self.numbers.limit, window: self.numbers.window }
    }

    /// Returns whether it is a [shadow limit](crate::LimitBuilder::shadow), which denies no request.
    #[must_use]
    pub const fn is_shadow(&self) -> bool {
        self.options.shadow
    }

    /// Returns the penalty for keys that are denied too often, if there is one.
    #[must_use]
    pub const fn penalty(&self) -> Option<&Penalty> {
        self.options.penalty.as_ref()
    }

    pub(crate) const fn is_plain(&self) -> bool {
        !self.options.shadow && self.options.penalty.is_none()
    }

    /// Returns the state machine.
    #[must_use]
    pub const fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Carries a state over from another limit. The client keeps what it has used, but at most the new
    /// capacity.
    ///
    /// So a change of limit, window, burst or algorithm never gives a client a free burst.
    ///
    /// ```
    /// use tallygate_core::{Algorithm, Policy, Tick, Ticks};
    ///
    /// let free = Policy::token_bucket(10).per(Ticks(60)).limit()?;
    /// let pro = Policy::fixed_window(100).per(Ticks(60)).limit()?;
    /// let mut state = free.initial(Tick(0));
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
        if from.clock_was_set_back(&state, now) {
            from.rebase(&mut state, now);
        }
        // A late caller must not move the state back in time: the client would earn that time twice.
        let now = now.max(from.last_change(&state));
        self.with_used(from.used(&state, now), now)
    }

    /// Reads a state that [`encode`](Algorithm::encode) wrote under any limit, and carries it over to this one.
    ///
    /// # Errors
    /// Returns an error if the bytes are not exactly one valid state of one of the six algorithms.
    pub fn adopt(&self, bytes: &[u8], now: Tick) -> Result<LimitState, DecodeError> {
        let (numbers, state) = read_header(bytes)?;
        if self.numbers.same_state(&numbers) {
            return self.decode_state(state);
        }
        let options = Options { shadow: false, penalty: None };
        let from = Self::new(Box::default(), numbers, options)
            .map_err(|_| DecodeError::Field { name: "limit" })?;
        Ok(self.carry(&from, &from.decode_state(state)?, now))
    }

    pub(crate) fn write_numbers(&self, state: &LimitState, out: &mut Vec<i128>) {
        with!(self, state, |machine, state| machine.write_numbers(state, out), else {
            self.write_numbers(&self.used_up(Tick(0)), out);
        });
    }

    pub(crate) fn read_numbers(
        &self,
        numbers: &mut NumberReader<'_>,
    ) -> Result<LimitState, DecodeError> {
        Ok(make!(self, |machine| machine.read_numbers(numbers)?))
    }

    fn decode_state(&self, bytes: &[u8]) -> Result<LimitState, DecodeError> {
        Ok(make!(self, |machine| machine.decode(bytes)?))
    }

    /// Returns the state that replaces a state of another kind of limit that was not carried over.
    ///
    /// The whole capacity is used, because a fresh state would be a free burst.
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

    fn initial(&self, now: Tick) -> LimitState {
        make!(self, |machine| machine.initial(now))
    }

    #[inline]
    fn last_change(&self, state: &LimitState) -> Tick {
        with!(self, state, |machine, state| machine.last_change(state), else Tick(i64::MIN))
    }

    fn rebase_after_set_back(&self, state: &mut LimitState, now: Tick) {
        with!(self, state, |machine, state| machine.rebase_after_set_back(state, now), else ());
    }

    #[inline]
    fn clock_was_set_back(&self, state: &LimitState, now: Tick) -> bool {
        with!(self, state, |machine, state| machine.clock_was_set_back(state, now), else true)
    }

    fn rebase(&self, state: &mut LimitState, now: Tick) {
        with!(self, &mut *state, |machine, state| machine.rebase(state, now), else {
            *state = self.used_up(now);
        });
    }

    #[inline]
    fn allows(&self, state: &LimitState, now: Tick, cost: Cost) -> bool {
        with!(self, state, |machine, state| machine.allows(state, now, cost), else false)
    }

    #[inline]
    fn try_charge(&self, state: &mut LimitState, now: Tick, cost: Cost) -> bool {
        with!(self, state, |machine, state| machine.try_charge(state, now, cost), else false)
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

    fn facts(&self, state: &LimitState, now: Tick, charged: Option<Cost>) -> Facts {
        with!(self, state, |machine, state| machine.facts(state, now, charged), else {
            self.facts(&self.used_up(now), now, charged)
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

    /// Writes the numbers of the limit first, so that [`adopt`](Self::adopt) can read the state under another
    /// limit.
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
        let (numbers, state) = read_header(bytes)?;
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

/// Reads the numbers at the start of an encoded state. Returns them and the rest.
fn read_header(bytes: &[u8]) -> Result<(Numbers, &[u8]), DecodeError> {
    let mut reader = Reader(bytes);
    let tag = reader.byte()?;
    let kind = Kind::from_tag(tag).ok_or(DecodeError::Field { name: "algorithm" })?;
    let (limit, window) = (reader.number("limit")?, Ticks(reader.number("window")?));
    let (burst, debt) = (reader.number("burst")?, reader.number("debt")?);
    let anchor = match reader.byte()? {
        0 => Anchor::Clock,
        1 => Anchor::FirstRequest,
        _ => return Err(DecodeError::Field { name: "anchor" }),
    };
    Ok((Numbers { kind, limit, window, burst, debt, start: burst, anchor }, reader.0))
}
