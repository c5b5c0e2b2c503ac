//! The algorithm of `CL.THROTTLE` in memory: an exact GCRA whose states contain the numbers of the last request.
//!
//! Every request contains its own numbers, which may differ each time. So a state is one usage with its rate and burst,
//! 48 bytes, and nothing is kept per set of numbers. As in redis-cell, a usage is a time: how long it takes until
//! everything has drained. Other numbers change what a unit adds to this time, but never the time itself. So whatever
//! numbers are used in between, the requests with one set of numbers stay within its own burst and rate: each of them
//! adds its time, and none of the others takes any away.
//!
//! With equal numbers, every field of a decision equals that of the GCRA in the core.

use tallygate::algorithm::{Algorithm, DecodeError, Facts, Fit, Share, Used};
use tallygate::{Cost, Quota, Tick, Ticks};

use super::throttle::ThrottleArguments;

/// The numbers of one request, as an algorithm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell {
    arguments: ThrottleArguments,
    rate: Rate,
}

/// The usage of a key, and the numbers it was charged with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CellState {
    last: Tick,
    /// The level in units of 1/`unit` of a token, in two halves, so that the state needs no 16-byte alignment.
    high: u64,
    low: u64,
    arguments: ThrottleArguments,
}

/// How a level drains and grows: count and period, divided by their greatest common divisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rate {
    /// What the level drains per tick.
    drain: u64,
    /// What one unit of cost adds to the level.
    unit: u64,
}

/// The first byte of an encoded state. The core's algorithms have numbers below it.
const TAG: u8 = 0x63;
const ENCODED_BYTES: usize = 1 + 6 * 8;

impl Rate {
    fn of(arguments: ThrottleArguments) -> Self {
        let (count, period) = (arguments.count.max(1), arguments.period().0.max(1));
        let (mut divisor, mut rest) = (count, period);
        while rest > 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        Self { drain: count / divisor, unit: period / divisor }
    }

    /// Returns the time that a level takes to drain, rounded up.
    fn time_to_drain(self, level: u128) -> Ticks {
        Ticks(u64::try_from(level.div_ceil(u128::from(self.drain))).unwrap_or(u64::MAX))
    }

    /// Converts a level of another rate: both take the same time to drain, rounded up.
    fn convert(self, level: u128, from: Self) -> u128 {
        if self == from {
            return level;
        }
        let (drain, other) = (u128::from(self.drain), u128::from(from.drain));
        let whole = (level / other).saturating_mul(drain);
        whole.saturating_add((level % other * drain).div_ceil(other))
    }

    fn units(self, level: u128) -> Used {
        let unit = u128::from(self.unit);
        let whole = u64::try_from(level / unit).unwrap_or(u64::MAX);
        // Below `unit`, so it fits.
        Used { whole, part: (u64::try_from(level % unit).unwrap_or(u64::MAX), self.unit) }
    }

    /// Returns the level of a number of units, rounded up.
    fn level(self, used: Used) -> u128 {
        let (numerator, denominator) = used.part;
        let unit = u128::from(self.unit);
        let part = (u128::from(numerator) * unit).div_ceil(u128::from(denominator.max(1)));
        u128::from(used.whole) * unit + part
    }
}

impl Cell {
    pub(super) fn new(arguments: ThrottleArguments) -> Self {
        Self { arguments, rate: Rate::of(arguments) }
    }

    /// Returns an algorithm to encode and decode states with. Its numbers do not matter for that.
    pub(super) fn any() -> Self {
        Self::new(ThrottleArguments { max_burst: 0, count: 1, period_s: 1 })
    }

    /// Returns the rate of the numbers in a state.
    fn stored_rate(&self, state: &CellState) -> Rate {
        if state.arguments == self.arguments { self.rate } else { Rate::of(state.arguments) }
    }

    /// Returns the level at a time, at the rate of the current request.
    fn level(&self, state: &CellState, now: Tick) -> u128 {
        let level = self.rate.convert(state.level(), self.stored_rate(state));
        level.saturating_sub(u128::from(now.since(state.last).0) * u128::from(self.rate.drain))
    }

    fn behind(state: &CellState, now: Tick) -> Ticks {
        if state.level() > 0 { state.last.since(now) } else { Ticks::ZERO }
    }

    /// Returns the highest level at which a cost fits.
    fn highest(&self, cost: Cost) -> Option<u128> {
        let room = self.arguments.burst().checked_sub(cost)?;
        Some(u128::from(room) * u128::from(self.rate.unit))
    }
}

impl CellState {
    const fn level(&self) -> u128 {
        (self.high as u128) << 64 | self.low as u128
    }

    #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
    const fn new(last: Tick, level: u128, arguments: ThrottleArguments) -> Self {
        Self { last, high: (level >> 64) as u64, low: level as u64, arguments }
    }
}

impl Algorithm for Cell {
    type State = CellState;

    fn capacity(&self) -> Cost {
        self.arguments.burst()
    }

    fn fresh(&self, now: Tick) -> CellState {
        CellState::new(now, 0, self.arguments)
    }

    fn last_change(&self, state: &CellState) -> Tick {
        state.last
    }

    fn clock_was_set_back(&self, state: &CellState, now: Tick) -> bool {
        Self::behind(state, now) > state.arguments.period()
    }

    fn rebase(&self, state: &mut CellState, now: Tick) {
        state.last = now;
    }

    fn allows(&self, state: &CellState, now: Tick, cost: Cost) -> bool {
        self.highest(cost).is_some_and(|highest| self.level(state, now) <= highest)
    }

    fn fit(&self, state: &CellState, now: Tick, cost: Cost) -> Fit {
        let Some(highest) = self.highest(cost) else { return Fit::Never };
        match self.level(state, now).checked_sub(highest) {
            None | Some(0) => Fit::Now,
            Some(excess) => {
                Fit::After(Self::behind(state, now).plus(self.rate.time_to_drain(excess)))
            }
        }
    }

    fn charge(&self, state: &mut CellState, now: Tick, amount: i128) -> u128 {
        let (level, unit, asked) =
            (self.level(state, now), u128::from(self.rate.unit), amount.unsigned_abs());
        let last = if level > 0 { state.last.max(now) } else { now };
        let ceiling = u128::from(self.arguments.burst()) * unit;
        let room = match amount {
            ..0 => level.div_ceil(unit),
            _ => ceiling.saturating_sub(level) / unit,
        };
        let moved = asked.min(room);
        let level = match amount {
            ..0 => level.saturating_sub(moved * unit),
            _ => level + moved * unit,
        };
        // A level above the burst stays with the numbers that allowed it.
        if moved == 0 || level > ceiling {
            return asked;
        }
        *state = CellState::new(last, level, self.arguments);
        asked - moved
    }

    fn facts(&self, state: &CellState, now: Tick, _: Option<Cost>) -> Facts {
        let (level, unit) = (self.level(state, now), u128::from(self.rate.unit));
        let capacity = u128::from(self.arguments.burst()) * unit;
        Facts {
            limit: self.arguments.burst(),
            remaining: u64::try_from(capacity.saturating_sub(level) / unit).unwrap_or(u64::MAX),
            reset_after: Self::behind(state, now).plus(self.rate.time_to_drain(level)),
            delay: Ticks::ZERO,
            scarcest: Some(0),
            quota: Some(Quota { amount: self.arguments.count, window: self.arguments.period() }),
        }
    }

    fn fresh_at(&self, state: &CellState) -> Option<Tick> {
        if state.level() == 0 {
            return Some(Tick(i64::MIN));
        }
        state.last.after(self.stored_rate(state).time_to_drain(state.level()))
    }

    fn used(&self, state: &CellState, now: Tick) -> Used {
        self.rate.units(self.level(state, now))
    }

    /// Returns the used share of the stored burst. The burst of the current request does not matter, since it can be
    /// any number.
    fn share_used(&self, state: &CellState, now: Tick) -> Share {
        let stored = Self::new(state.arguments);
        Share::of(stored.used(state, now), stored.capacity())
    }

    fn with_used(&self, used: Used, now: Tick) -> CellState {
        CellState::new(now, self.rate.level(used.at_most(self.capacity())), self.arguments)
    }

    fn encode(&self, state: &CellState, out: &mut Vec<u8>) {
        let ThrottleArguments { max_burst, count, period_s } = state.arguments;
        out.push(TAG);
        out.extend(state.last.0.to_le_bytes());
        for number in [state.high, state.low, max_burst, count, period_s] {
            out.extend(number.to_le_bytes());
        }
    }

    fn decode(&self, bytes: &[u8]) -> Result<CellState, DecodeError> {
        let (&found, rest) = bytes.split_first().ok_or(DecodeError::Truncated)?;
        if found != TAG {
            return Err(DecodeError::Tag { found, expected: TAG });
        }
        if bytes.len() != ENCODED_BYTES {
            return Err(DecodeError::Truncated);
        }
        let number = |index: usize| {
            let bytes = rest.get(8 * index..).and_then(|rest| rest.first_chunk());
            bytes.copied().map(u64::from_le_bytes).ok_or(DecodeError::Truncated)
        };
        let arguments =
            ThrottleArguments { max_burst: number(3)?, count: number(4)?, period_s: number(5)? };
        let state = CellState {
            last: Tick(number(0)?.cast_signed()),
            high: number(1)?,
            low: number(2)?,
            arguments,
        };
        let ceiling = u128::from(arguments.burst()) * u128::from(Rate::of(arguments).unit);
        match arguments.count > 0 && arguments.period_s > 0 && state.level() <= ceiling {
            true => Ok(state),
            false => Err(DecodeError::Field { name: "level" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tallygate::{Decision, Limit, Policy};

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn cell(max_burst: u64, count: u64, period_s: u64) -> Cell {
        Cell::new(ThrottleArguments { max_burst, count, period_s })
    }

    fn limit(arguments: ThrottleArguments) -> Limit {
        let builder = Policy::gcra(arguments.count).per(arguments.period());
        builder.burst(arguments.burst()).debt(0).limit().expect("valid")
    }

    fn at(seconds: u64) -> Tick {
        Tick(i64::try_from(seconds * SECOND).expect("small"))
    }

    #[test]
    fn a_key_takes_48_bytes_whatever_the_numbers() {
        assert_eq!(size_of::<CellState>(), 48);
    }

    #[test]
    fn a_check_with_a_small_burst_clears_no_usage() {
        let (large, small) = (cell(99, 100, 3600), cell(0, 1000, 1));
        let mut state = large.initial(at(0));
        assert!(large.decide::<bool>(&mut state, at(0), 100));
        // Denied while the usage exceeds the small burst, which drains at the stored rate.
        let denied: Decision = small.decide(&mut state, at(1), 1);
        assert_eq!((denied.allowed, denied.remaining), (false, 0));
        assert_eq!(denied.retry_after, Some(Ticks(3599 * SECOND)));
        assert!(!large.decide::<bool>(&mut state, at(2), 1), "nothing was returned");
        assert!(!small.decide::<bool>(&mut state, at(3599), 1));
        assert!(small.decide::<bool>(&mut state, at(3600), 1), "exactly then");
        assert_eq!(large.facts(&state, at(3600), None).remaining, 99);
    }

    #[test]
    fn fast_numbers_do_not_clear_the_usage_of_slow_ones() {
        let (slow, fast) = (cell(4, 5, 86_400), cell(100, 1000, 1));
        let mut state = slow.initial(at(0));
        assert!(slow.decide::<bool>(&mut state, at(0), 5));
        let denied: Decision = fast.decide(&mut state, at(1), 1);
        // As in redis-cell: until the day of the slow numbers is over, except for the 100 ms of the fast burst.
        let wait = Ticks(86_399 * SECOND - SECOND / 10);
        assert_eq!((denied.allowed, denied.retry_after), (false, Some(wait)));
        assert!(!slow.decide::<bool>(&mut state, at(2), 1));
        let day = at(86_400);
        assert!(fast.decide::<bool>(&mut state, Tick(day.0 - 100_000_000), 1), "exactly then");
        assert!(slow.decide::<bool>(&mut state, day, 4));
    }

    #[test]
    fn keys_are_compared_by_the_share_of_their_own_burst() {
        let (victim, flood) = (cell(4, 5, 86_400), cell(999_999, 1_000_000, 3600));
        let (mut used_up, mut invented) = (victim.initial(at(0)), flood.initial(at(0)));
        assert!(victim.decide::<bool>(&mut used_up, at(0), 5));
        assert!(flood.decide::<bool>(&mut invented, at(0), 500_000));
        for rule in [victim, flood] {
            let (debt, other) =
                (rule.share_used(&used_up, at(0)), rule.share_used(&invented, at(0)));
            assert!(debt > other, "{debt:?} {other:?}");
        }
    }

    #[test]
    fn only_encoded_states_are_decoded() {
        let rule = cell(4, 10, 60);
        let mut state = rule.initial(at(7));
        assert!(rule.decide::<bool>(&mut state, at(7), 3));
        let mut bytes = Vec::new();
        Cell::any().encode(&state, &mut bytes);
        assert_eq!(Cell::any().decode(&bytes), Ok(state));
        for cut in 0..bytes.len() {
            assert!(Cell::any().decode(&bytes[..cut]).is_err());
        }
        // A level above the burst is invalid.
        bytes[9..17].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Cell::any().decode(&bytes).is_err());
    }

    proptest! {
        #[test]
        fn with_equal_numbers_it_decides_like_the_gcra_of_the_core(
            max_burst in prop_oneof![0_u64..20, 0_u64..40_000],
            count in 1_u64..10_000,
            period_s in 1_u64..100_000,
            steps in prop::collection::vec((0_u64..100 * SECOND, 0_u64..30), 1..60),
        ) {
            let rule = cell(max_burst, count, period_s);
            let core = limit(rule.arguments);
            let (mut state, mut expected) = (rule.initial(Tick(0)), core.initial(Tick(0)));
            let mut now = 0;
            for (wait, cost) in steps {
                now += wait;
                let now = Tick(i64::try_from(now).expect("small"));
                let decision: Decision = rule.decide(&mut state, now, cost);
                prop_assert_eq!(decision, core.decide::<Decision>(&mut expected, now, cost));
                prop_assert_eq!(rule.used(&state, now), core.used(&expected, now));
                prop_assert_eq!(rule.fresh_at(&state), core.fresh_at(&expected));
            }
        }

        #[test]
        fn with_changing_numbers_the_requests_of_each_stay_within_its_own_bound(
            rules in prop::collection::vec((0_u64..10, 1_u64..1000, 1_u64..100_000), 2..5),
            steps in prop::collection::vec((0_u64..100_000, 0_u32..6, 1_u64..6, 0_usize..5), 1..80),
        ) {
            let rules: Vec<_> = rules.into_iter().map(|(burst, count, period)| cell(burst, count, period)).collect();
            let mut state = rules[0].initial(Tick(0));
            let mut allowed = vec![Vec::new(); rules.len()];
            let mut now = 0_u64;
            for (wait, magnitude, cost, which) in steps {
                now += wait * 10_u64.pow(2 * magnitude);
                let which = which % rules.len();
                let at = Tick(i64::try_from(now).expect("small"));
                if rules[which].decide::<bool>(&mut state, at, cost) {
                    allowed[which].push((now, cost));
                }
            }
            for (rule, allowed) in rules.iter().zip(&allowed) {
                let Rate { drain, unit } = rule.rate;
                for (index, (start, _)) in allowed.iter().enumerate() {
                    let mut charged = 0;
                    for (end, cost) in &allowed[index..] {
                        charged += u128::from(*cost) * u128::from(unit);
                        let earned = u128::from(end - start) * u128::from(drain);
                        let bound = u128::from(rule.capacity()) * u128::from(unit) + earned;
                        prop_assert!(charged <= bound, "{rule:?} from {start} to {end}");
                    }
                }
            }
        }

        #[test]
        fn with_changing_numbers_at_most_the_best_rate_and_each_burst_once_are_allowed(
            rules in prop::collection::vec((0_u64..10, 1_u64..10, 1_u64..60), 2..4),
            steps in prop::collection::vec((0_u64..10 * SECOND, 1_u64..6, 0_usize..4), 1..80),
        ) {
            let rules: Vec<_> = rules.into_iter().map(|(burst, count, period)| cell(burst, count, period)).collect();
            let mut state = rules[0].initial(Tick(0));
            let (mut now, mut allowed) = (0_u64, 0_u128);
            for (wait, cost, which) in steps {
                now += wait;
                let rule = rules[which % rules.len()];
                let at = Tick(i64::try_from(now).expect("small"));
                allowed += u128::from(cost) * u128::from(rule.decide::<bool>(&mut state, at, cost));
                let earned = rules.iter().map(|rule| {
                    u128::from(now) * u128::from(rule.rate.drain) / u128::from(rule.rate.unit)
                });
                let bursts: u128 = rules.iter().map(|rule| u128::from(rule.capacity())).sum();
                let bound = earned.max().expect("some") + bursts;
                prop_assert!(allowed <= bound, "{allowed} of {bound} at {now}");
            }
        }
    }
}
