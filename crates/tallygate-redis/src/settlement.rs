//! Settles a reservation in a state that was read from Redis.

use tallygate::Tick;
use tallygate::algorithm::{Algorithm, Receipt, Returns, Settlement, Timed};

/// Changes the charge of a reservation, as far as it still counts, and records the returned units. Returns the answer, and
/// how many units had no effect.
pub(crate) fn settle_receipt<A: Algorithm>(
    rule: &A,
    (state, returns): (&mut A::State, &mut Returns),
    now: Tick,
    change: i128,
    (receipt, number): (&Receipt, i64),
) -> (Timed, u128) {
    let mut receipt = receipt.clone();
    let is_lowered = returns.lower(number, &mut receipt);
    let before = (is_lowered && change < 0).then(|| rule.receipt(state));
    let fresh = rule.fresh_at(state).unwrap_or(Tick(i64::MAX));
    let settled = tallygate::algorithm::settle(rule, state, now, change, &receipt);
    if change < 0 {
        let after = rule.receipt(state);
        if let Some(before) = &before {
            let settlement = Settlement { reservation: &receipt, before, after: &after };
            returns.settled(number, &settlement);
        }
        returns.note(now.0, after, rule.last_change(state), fresh);
    }
    settled
}
