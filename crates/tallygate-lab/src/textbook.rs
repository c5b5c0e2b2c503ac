//! The textbook token bucket in whole ticks, to the letter.
//!
//! It is here to be replayed and compared with, not to serve. Its refill moves the clock by a floor,
//! which hands out up to a tick a refill: 3 per 10 admits one per 3 ticks, not per 3⅓. The
//! [`Bucket`](tallygate_core::Bucket) has no such drift.

use std::collections::BTreeMap;
use std::fmt;

use tallygate_core::{Cost, Tick, Ticks};

use crate::instruction::{Instruction, InstructionError};

/// Capacity and window as the exercise gives them: any numbers, with a meaning for each.
///
/// With a window of 0 or below nothing refills; with a capacity of 0 or below all is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Textbook {
    capacity: i64,
    window: i64,
    burst: i64,
}

/// A client's tokens and the time up to which refills have been settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextbookState {
    /// What it may use at once.
    pub tokens: i64,
    /// Up to when refills have been settled.
    pub last: Tick,
}

/// The answer to an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The request may go ahead.
    Allow,
    /// It may not.
    Deny,
}

impl From<bool> for Verdict {
    fn from(allowed: bool) -> Self {
        if allowed { Self::Allow } else { Self::Deny }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
        })
    }
}

impl Textbook {
    /// A bucket that holds `capacity` and earns as much a window.
    #[must_use]
    pub const fn new(capacity: i64, window: i64) -> Self {
        Self { capacity, window, burst: capacity }
    }

    /// The same rate in a bucket of another size.
    #[must_use]
    pub const fn burst(mut self, burst: i64) -> Self {
        self.burst = burst;
        self
    }

    /// A new client: full, at the time of its first request.
    #[must_use]
    pub const fn first(&self, now: Tick) -> TextbookState {
        TextbookState { tokens: self.burst, last: now }
    }

    /// Settles the refill, on denials too, and decides.
    #[inline]
    pub fn decide(&self, state: &mut TextbookState, now: Tick, cost: Cost) -> bool {
        let Self { capacity, window, burst } = *self;
        if capacity <= 0 || burst <= 0 {
            return false;
        }
        let elapsed = now.since(state.last).0;
        if elapsed > 0 && window > 0 {
            // Both factors fit 64 bits without a sign, so their product fits 127.
            let refill = i128::from(elapsed) * i128::from(capacity) / i128::from(window);
            if refill > 0 {
                let tokens = i128::from(state.tokens) + refill;
                match i64::try_from(tokens) {
                    Ok(tokens) if tokens < burst => {
                        // At most the elapsed time, since the refill was rounded down.
                        let settled = refill * i128::from(window) / i128::from(capacity);
                        let settled = Ticks(u64::try_from(settled).unwrap_or(elapsed));
                        let last = state.last.after(settled).unwrap_or(now);
                        *state = TextbookState { tokens, last };
                    }
                    _ => *state = TextbookState { tokens: burst, last: now },
                }
            }
        }
        match i64::try_from(cost) {
            Ok(cost) if cost <= state.tokens => {
                state.tokens -= cost;
                true
            }
            _ => false,
        }
    }
}

/// Decides a list of instructions by the textbook rule, one verdict a request.
///
/// Instructions other than `request` are skipped.
///
/// # Errors
/// A request is not `request CLIENT TIMESTAMP [COST]`; the error says which line and what is wrong.
///
/// ```
/// use tallygate_lab::{rate_limiter, Verdict::{Allow, Deny}};
///
/// let instructions = ["request alice 0", "request alice 1", "request bob 1", "request alice 5"];
/// assert_eq!(rate_limiter(1, 5, instructions)?, [Allow, Deny, Allow, Allow]);
/// # Ok::<(), tallygate_lab::InstructionError>(())
/// ```
pub fn rate_limiter<I>(
    capacity: i64,
    window: i64,
    instructions: I,
) -> Result<Vec<Verdict>, InstructionError>
where
    I: IntoIterator,
    I::Item: AsRef<str>,
{
    let rule = Textbook::new(capacity, window);
    let mut clients = BTreeMap::<Vec<u8>, TextbookState>::new();
    let mut verdicts = Vec::new();
    for (index, line) in instructions.into_iter().enumerate() {
        let line = line.as_ref().as_bytes();
        let instruction = Instruction::parse(line).map_err(|error| error.at_line(index + 1))?;
        let Some(Instruction::Request { client, now, cost }) = instruction else { continue };
        let state = match clients.get_mut(client) {
            Some(state) => state,
            None => clients.entry(client.into()).or_insert(rule.first(now)),
        };
        verdicts.push(rule.decide(state, now, cost).into());
    }
    Ok(verdicts)
}
