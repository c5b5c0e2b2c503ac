//! Finds the smallest limit that would have denied no request of a given share of clients.
//!
//! The search decides all requests again with one limit after another, with the policy's algorithms and windows. Bursts, and
//! the other limits of a policy with several, keep their proportion to the first limit (rounded up). The result is exact:
//! the suggested limit and the next smaller one were both tried, and only the suggested one denies few enough clients.

use std::ops::ControlFlow;

use tallygate_core::{Algorithm, Cost, PolicyError, Simulator};

use super::BacktestError;
use super::spool::SpooledRequests;
use super::trial::Trial;
use crate::machine::{MachineVisitor, visit_machine};

/// A policy that denies few enough clients.
pub(super) struct Suggestion {
    pub(super) trial: Trial,
    /// The number of clients with at least one denied request.
    pub(super) clients_denied: u64,
}

/// Finds the smallest policy like `trial` that denies at most `max_denied` clients, starting from a guess of its first
/// limit. The inner error means that no valid limit is large enough: a sliding window log has a maximum number of entries.
pub(super) fn suggest(
    trial: &Trial,
    spooled: &mut SpooledRequests,
    max_denied: u64,
    guess: u64,
) -> Result<Result<Suggestion, PolicyError>, BacktestError> {
    let mut try_limit = |amount: u64| -> Result<Option<Suggestion>, SearchError> {
        let trial = trial.scaled(amount).map_err(SearchError::Policy)?;
        let count = CountDenied { spooled: &mut *spooled, max_denied, cost: trial.cost };
        let denied = match trial.policy.plain() {
            Some(limit) => visit_machine(limit, count),
            None => count.visit(trial.policy.clone()),
        };
        let denied = denied.map_err(SearchError::Spool)?;
        Ok(denied.map(|clients_denied| Suggestion { trial, clients_denied }))
    };
    match smallest(guess.max(1), &mut try_limit) {
        Ok(suggestion) => Ok(Ok(suggestion)),
        Err(SearchError::Policy(error)) => Ok(Err(error)),
        Err(SearchError::Spool(error)) => Err(BacktestError::Spool(error)),
    }
}

enum SearchError {
    Policy(PolicyError),
    Spool(std::io::Error),
}

/// Finds the smallest accepted limit: doubles or halves the guess to find bounds, then bisects.
fn smallest(
    guess: u64,
    try_limit: &mut impl FnMut(u64) -> Result<Option<Suggestion>, SearchError>,
) -> Result<Suggestion, SearchError> {
    let (mut low, mut high) = (0, guess);
    let mut best = try_limit(guess)?;
    while best.is_none() {
        low = high;
        high = high.saturating_mul(2);
        best = try_limit(high)?;
    }
    // The guess was accepted at once: the smallest limit may be far below it.
    while low == 0 && high > 1 {
        match try_limit(high / 2)? {
            Some(better) => (best, high) = (Some(better), high / 2),
            None => low = high / 2,
        }
    }
    while high - low > 1 {
        let middle = low.midpoint(high);
        match try_limit(middle)? {
            Some(better) => (best, high) = (Some(better), middle),
            None => low = middle,
        }
    }
    match best {
        Some(best) => Ok(best),
        None => unreachable!("the first loop ends with an accepted limit"),
    }
}

/// Decides all requests and counts the clients with a denial. Returns `None` if there are more than `max_denied`.
struct CountDenied<'a> {
    spooled: &'a mut SpooledRequests,
    max_denied: u64,
    cost: Cost,
}

impl MachineVisitor for CountDenied<'_> {
    type Output = std::io::Result<Option<u64>>;

    fn visit<A: Algorithm<State: Send> + Send + 'static>(self, rule: A) -> Self::Output {
        let mut simulator = Simulator::new(rule);
        let mut is_denied: Vec<bool> = Vec::new();
        let mut denied = 0;
        self.spooled.for_each(|client, now| {
            if is_denied.len() <= client {
                is_denied.resize(client + 1, false);
            }
            // A client counts once, so its later requests need no decision.
            if !is_denied[client] && !simulator.step::<bool>(client, now, self.cost) {
                is_denied[client] = true;
                denied += 1;
            }
            if denied > self.max_denied {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        Ok((denied <= self.max_denied).then_some(denied))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backtest::spool::Spool;
    use tallygate_core::Tick;

    fn spool(requests: impl IntoIterator<Item = (usize, i64)>) -> SpooledRequests {
        let mut spool = Spool::new().expect("the file is created");
        for (client, now) in requests {
            spool.push(client, Tick(now)).expect("the request is written");
        }
        spool.finish().expect("the file is written")
    }

    #[track_caller]
    fn suggests(policy: &str, max_denied: u64, guess: u64, expected: &str) {
        // Client n sends n + 1 requests at once.
        let mut spooled = spool((0..100).flat_map(|client| (0..=client).map(move |_| (client, 0))));
        let trial = Trial::parse(policy).expect("the policy is valid");
        let found = suggest(&trial, &mut spooled, max_denied, guess).expect("the file is readable");
        let found = match found {
            Ok(Suggestion { trial, clients_denied }) => {
                format!("{}, {clients_denied} denied", trial.text())
            }
            Err(error) => error.to_string(),
        };
        assert_eq!(found, expected, "{guess}");
    }

    #[test]
    fn the_smallest_limit_is_found_from_any_guess() {
        for guess in [1, 2, 63, 89, 90, 91, 1000, 1 << 40] {
            suggests("token_bucket 7/1m", 10, guess, "token_bucket 90/1m burst 90, 10 denied");
            suggests("fixed_window 7/1m", 0, guess, "fixed_window 100/1m, 0 denied");
            suggests("gcra 9/1m burst 3", 10, guess, "gcra 268/1m burst 90, 10 denied");
            suggests("gcra 9/1m burst 3", 100, guess, "gcra 1/1m burst 1, 99 denied");
            let several = "gcra 179/1m burst 179, fixed_window 90/1h, 10 denied";
            suggests("gcra 10/1m, fixed_window 5/1h", 10, guess, several);
        }
    }

    #[test]
    fn a_limit_that_would_not_be_valid_is_an_error() {
        let mut spooled = spool((0..1_100_000).map(|now| (0, now)));
        let trial = Trial::parse("sliding_window_log 5/1h").expect("the policy is valid");
        let found = suggest(&trial, &mut spooled, 0, 1 << 20).expect("the file is readable");
        assert!(found.is_err_and(|error| error.to_string().contains("1048576")));
    }
}
