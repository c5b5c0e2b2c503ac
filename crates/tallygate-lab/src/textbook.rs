//! The textbook token bucket in whole ticks, exactly as textbooks describe it.
//!
//! It exists for replays and comparisons, not for production. Every refill rounds the elapsed time down and so gains up to
//! one tick: 3 per 10 ticks allows one request per 3 ticks instead of one per 3⅓. The exact
//! [`Bucket`](tallygate_core::Bucket) has no such drift.

use std::collections::BTreeMap;
use std::fmt;

use tallygate_core::{Cost, Tick, Ticks};

use crate::instruction::{Instruction, InstructionError};

/// A textbook token bucket. Every capacity and window is valid.
///
/// With a window of 0 or less, nothing refills. With a capacity of 0 or less, every request is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Textbook {
    capacity: i64,
    window: i64,
    burst: i64,
}

/// The state of one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextbookState {
    /// The tokens that the client has left.
    pub tokens: i64,
    /// The time up to which refills have been added.
    pub last: Tick,
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The request is allowed.
    Allow,
    /// The request is denied.
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
    /// Creates a bucket that holds `capacity` tokens and refills as many per window.
    #[must_use]
    pub const fn new(capacity: i64, window: i64) -> Self {
        Self { capacity, window, burst: capacity }
    }

    /// Sets the number of tokens that the bucket holds. The rate does not change.
    #[must_use]
    pub const fn burst(mut self, burst: i64) -> Self {
        self.burst = burst;
        self
    }

    /// Returns the state of a new client: a full bucket at the time of its first request.
    #[must_use]
    pub const fn full_state(&self, now: Tick) -> TextbookState {
        TextbookState { tokens: self.burst, last: now }
    }

    /// Adds the refill, then decides a request. A denied request keeps the refill.
    #[inline]
    pub fn decide(&self, state: &mut TextbookState, now: Tick, cost: Cost) -> bool {
        let Self { capacity, window, burst } = *self;
        if capacity <= 0 || burst <= 0 {
            return false;
        }
        let elapsed = now.since(state.last).0;
        if elapsed > 0 && window > 0 {
            // The elapsed time is below 2⁶⁴ and the capacity below 2⁶³, so the product fits 127 bits.
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

/// Decides a list of instructions with the textbook rule and returns one verdict per request.
///
/// Instructions other than `request` are skipped.
///
/// # Errors
/// Returns an error if a request is not `request CLIENT TIMESTAMP [COST]`. The error names the line and the mistake.
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
        let state = match clients.get_mut(&*client) {
            Some(state) => state,
            None => clients.entry(client.into_owned()).or_insert(rule.full_state(now)),
        };
        verdicts.push(rule.decide(state, now, cost).into());
    }
    Ok(verdicts)
}
