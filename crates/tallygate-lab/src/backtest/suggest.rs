//! The least limit that would have spared a share of the clients: decided, not estimated.
//!
//! A client is spared if none of its requests is refused. All requests are decided again under one limit after the
//! other, with the policy's algorithm and window, and a burst in the policy's proportion to the limit (rounded up). The
//! limit that is told spares the share, and the next smaller one does not: both were decided.

use std::ops::ControlFlow;

use tallygate_core::{Algorithm, Limit, Policy, PolicyError, Simulator};

use super::BacktestError;
use super::spool::Kept;
use crate::machine::{ForMachine, for_machine};

/// A limit that spares enough clients.
pub(super) struct Suggestion {
    pub(super) limit: Limit,
    /// How many it does not spare.
    pub(super) clients_refused: u64,
}

/// Finds the least limit like `policy` that refuses at most so many clients, starting from a guess. There may be none
/// that can be made: a log can only hold so many.
pub(super) fn suggest(
    policy: &Limit,
    kept: &mut Kept,
    at_most: u64,
    guess: u64,
) -> Result<Result<Suggestion, PolicyError>, BacktestError> {
    let mut spares = |amount: u64| -> Result<Option<Suggestion>, SearchError> {
        let limit = like(policy, amount).map_err(SearchError::Policy)?;
        let refused = for_machine(&limit, Again { kept: &mut *kept, at_most });
        let refused = refused.map_err(SearchError::Spool)?;
        Ok(refused.map(|clients_refused| Suggestion { limit, clients_refused }))
    };
    match least(guess.max(1), &mut spares) {
        Ok(suggestion) => Ok(Ok(suggestion)),
        Err(SearchError::Policy(error)) => Ok(Err(error)),
        Err(SearchError::Spool(error)) => Err(BacktestError::Spool(error)),
    }
}

enum SearchError {
    Policy(PolicyError),
    Spool(std::io::Error),
}

/// The least amount that spares: first between two powers of two times the guess, then by halves.
fn least(
    guess: u64,
    spares: &mut impl FnMut(u64) -> Result<Option<Suggestion>, SearchError>,
) -> Result<Suggestion, SearchError> {
    let (mut low, mut high) = (0, guess);
    let mut best = spares(guess)?;
    while best.is_none() {
        low = high;
        high = high.saturating_mul(2);
        best = spares(high)?;
    }
    // Nothing was refused yet: the least may be far below the guess.
    while low == 0 && high > 1 {
        match spares(high / 2)? {
            Some(better) => (best, high) = (Some(better), high / 2),
            None => low = high / 2,
        }
    }
    while high - low > 1 {
        let middle = low.midpoint(high);
        match spares(middle)? {
            Some(better) => (best, high) = (Some(better), middle),
            None => low = middle,
        }
    }
    match best {
        Some(best) => Ok(best),
        None => unreachable!("the loop above ends with one"),
    }
}

/// The policy with another limit.
fn like(policy: &Limit, amount: u64) -> Result<Limit, PolicyError> {
    let numbers = policy.numbers();
    let burst = u128::from(amount) * u128::from(numbers.burst);
    let burst = burst.div_ceil(u128::from(numbers.limit)).max(1);
    let burst = u64::try_from(burst).unwrap_or(u64::MAX);
    Policy::of(numbers.kind, amount).per(numbers.window).burst(burst).anchor(numbers.anchor).limit()
}

/// Decides all requests again; how many clients are refused, if it is not more than so many.
struct Again<'a> {
    kept: &'a mut Kept,
    at_most: u64,
}

impl ForMachine for Again<'_> {
    type Made = std::io::Result<Option<u64>>;

    fn made<A: Algorithm<State: Send> + Send + 'static>(self, rule: A) -> Self::Made {
        let mut simulator = Simulator::new(rule);
        let mut is_refused: Vec<bool> = Vec::new();
        let mut refused = 0;
        self.kept.each(|client, now| {
            if is_refused.len() <= client {
                is_refused.resize(client + 1, false);
            }
            // A client that was refused once is not spared, whatever comes.
            if !is_refused[client] && !simulator.step::<bool>(client, now, 1) {
                is_refused[client] = true;
                refused += 1;
            }
            if refused > self.at_most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        Ok((refused <= self.at_most).then_some(refused))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backtest::spool::Spool;
    use crate::spelling::{Spelled, parse};
    use tallygate_core::Tick;

    fn kept(requests: impl IntoIterator<Item = (usize, i64)>) -> Kept {
        let mut spool = Spool::new().expect("a file");
        for (client, now) in requests {
            spool.put(client, Tick(now)).expect("room");
        }
        spool.keep().expect("a file")
    }

    #[track_caller]
    fn suggests(policy: &str, at_most: u64, guess: u64, expected: &str) {
        // Client n comes n + 1 times at once.
        let mut kept = kept((0..100).flat_map(|client| (0..=client).map(move |_| (client, 0))));
        let policy = parse(policy).expect("a policy");
        let told = suggest(&policy, &mut kept, at_most, guess).expect("a file");
        let told = match told {
            Ok(Suggestion { limit, clients_refused }) => {
                format!("{}, {clients_refused} refused", Spelled::new(&limit))
            }
            Err(error) => error.to_string(),
        };
        assert_eq!(told, expected, "{guess}");
    }

    #[test]
    fn the_least_limit_is_found_from_any_guess() {
        for guess in [1, 2, 63, 89, 90, 91, 1000, 1 << 40] {
            suggests("token_bucket 7/1m", 10, guess, "token_bucket 90/1m burst 90, 10 refused");
            suggests("fixed_window 7/1m", 0, guess, "fixed_window 100/1m, 0 refused");
            suggests("gcra 9/1m burst 3", 10, guess, "gcra 268/1m burst 90, 10 refused");
            suggests("gcra 9/1m burst 3", 100, guess, "gcra 1/1m burst 1, 99 refused");
        }
    }

    #[test]
    fn a_limit_that_cannot_be_made_is_told() {
        let mut kept = kept((0..1_100_000).map(|now| (0, now)));
        let policy = parse("sliding_window_log 5/1h").expect("a policy");
        let told = suggest(&policy, &mut kept, 0, 1 << 20).expect("a file");
        assert!(told.is_err_and(|error| error.to_string().contains("1048576 are kept")));
    }
}
