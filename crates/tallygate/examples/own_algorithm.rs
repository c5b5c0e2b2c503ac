//! A custom algorithm: one request, and then none for a fixed time.
//!
//! The memory store, the limiter and observers use it in the same way as the six built-in algorithms.
//!
//!     cargo run -p tallygate --example own_algorithm

use std::io::Write as _;
use std::time::Duration;

use tallygate::algorithm::{Algorithm, DecodeError, Facts, Fit, Used};
use tallygate::{Cost, RateLimiter, Tick, Ticks};

/// The time for which further requests are denied.
struct Cooldown(Ticks);

impl Cooldown {
    fn left(&self, last: Option<Tick>, now: Tick) -> Ticks {
        last.map_or(Ticks::ZERO, |last| Ticks(self.0.0.saturating_sub(now.since(last).0)))
    }
}

impl Algorithm for Cooldown {
    /// The time of the last allowed request.
    type State = Option<Tick>;

    fn capacity(&self) -> Cost {
        1
    }

    fn fresh(&self, _: Tick) -> Option<Tick> {
        None
    }

    fn last_change(&self, state: &Option<Tick>) -> Tick {
        state.unwrap_or(Tick(i64::MIN))
    }
    fn clock_was_set_back(&self, state: &Option<Tick>, now: Tick) -> bool {
        state.is_some_and(|last| last.since(now) > self.0)
    }

    fn rebase(&self, state: &mut Option<Tick>, now: Tick) {
        *state = Some(now);
    }

    fn fit(&self, state: &Option<Tick>, now: Tick, cost: Cost) -> Fit {
        match (cost, self.left(*state, now)) {
            (2.., _) => Fit::Never,
            (0, _) | (_, Ticks::ZERO) => Fit::Now,
            (_, wait) => Fit::After(wait),
        }
    }

    fn charge(&self, state: &mut Option<Tick>, now: Tick, amount: i128) -> u128 {
        match amount {
            1.. => *state = Some(now),
            0 => {}
            _ => *state = None,
        }
        amount.unsigned_abs().saturating_sub(1)
    }

    fn facts(&self, state: &Option<Tick>, now: Tick, _: Option<Cost>) -> Facts {
        let reset_after = self.left(*state, now);
        let remaining = Cost::from(reset_after == Ticks::ZERO);
        Facts { remaining, reset_after, ..Facts::all_of(1) }
    }

    fn fresh_at(&self, state: &Option<Tick>) -> Option<Tick> {
        state.map_or(Some(Tick(i64::MIN)), |last| last.after(self.0))
    }

    fn used(&self, state: &Option<Tick>, now: Tick) -> Used {
        Used::whole(Cost::from(self.left(*state, now) > Ticks::ZERO))
    }

    fn with_used(&self, used: Used, now: Tick) -> Option<Tick> {
        (used.rounded_up() > 0).then_some(now)
    }

    fn encode(&self, state: &Option<Tick>, out: &mut Vec<u8>) {
        out.push(b'C');
        out.extend(state.iter().flat_map(|last| last.0.to_be_bytes()));
    }

    fn decode(&self, bytes: &[u8]) -> Result<Option<Tick>, DecodeError> {
        match bytes.split_first() {
            Some((b'C', [])) => Ok(None),
            Some((b'C', last)) => {
                let last = last.try_into().map_err(|_| DecodeError::Truncated)?;
                Ok(Some(Tick(i64::from_be_bytes(last))))
            }
            Some((&found, _)) => Err(DecodeError::Tag { found, expected: b'C' }),
            None => Err(DecodeError::Truncated),
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rule = Cooldown(Ticks::from_duration(Duration::from_secs(30)));
    let limiter = RateLimiter::of_algorithm("password reset", rule);
    let mut out = std::io::stdout();
    for client in ["alice", "bob", "alice"] {
        let decision = limiter.check(client)?;
        let wait = decision.retry_after.unwrap_or_default().as_duration();
        writeln!(out, "{client}: allowed {}, wait {wait:.1?}", decision.allowed)?;
    }
    Ok(())
}
