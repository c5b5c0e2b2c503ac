//! States survive their encoding, and other bytes are an error.

use proptest::prelude::*;
use tallygate_core::{Algorithm, Decision, DecodeError, Limit, Policy, Tick, Ticks};
use tallygate_testkit::{any_limit, cases, costs, times};

fn encoded(limit: &Limit, state: &<Limit as Algorithm>::State) -> Vec<u8> {
    let mut bytes = Vec::new();
    limit.encode(state, &mut bytes);
    bytes
}

proptest! {
    #![proptest_config(cases(400))]

    /// A state that was encoded and decoded decides as the original does.
    #[test]
    fn a_state_survives_its_encoding(
        (limit, times, costs) in any_limit().prop_flat_map(|limit| {
            let costs = proptest::collection::vec(costs(&limit), 20);
            (Just(limit.clone()), times(&limit, 20, true), costs)
        }),
    ) {
        let mut kept = limit.initial(times[0]);
        let mut stored = encoded(&limit, &kept);
        for (&now, &cost) in times.iter().zip(&costs) {
            let mut loaded = limit.decode(&stored).expect("the bytes are an encoded state");
            let one: Decision = limit.decide(&mut kept, now, cost);
            let other: Decision = limit.decide(&mut loaded, now, cost);
            prop_assert_eq!(one, other);
            stored = encoded(&limit, &loaded);
            prop_assert_eq!(&stored, &encoded(&limit, &kept), "one state, one encoding");
        }
    }

    /// Random bytes are an error or a valid state, and never cause a panic.
    #[test]
    fn any_bytes_are_an_error_or_a_valid_state(
        limit in any_limit(),
        bytes in proptest::collection::vec(any::<u8>(), 0..40),
        now in any::<i64>(),
    ) {
        for decoded in [limit.decode(&bytes), limit.adopt(&bytes, Tick(now))].into_iter().flatten() {
            let mut state = decoded;
            let decision: Decision = limit.decide(&mut state, Tick(now), 1);
            prop_assert!(decision.remaining <= decision.limit);
        }
    }

    /// With a changed, missing or extra byte, the bytes are an error or still a valid state.
    #[test]
    fn damaged_states_do_not_panic(
        (limit, costs) in any_limit().prop_flat_map(|limit| {
            let costs = proptest::collection::vec(costs(&limit), 4);
            (Just(limit), costs)
        }),
        place in any::<usize>(),
        byte in any::<u8>(),
        now in 0..1_000_i64,
    ) {
        let mut state = limit.initial(Tick(0));
        for (at, cost) in (0..).zip(costs) {
            limit.decide::<bool>(&mut state, Tick(at), cost);
        }
        let good = encoded(&limit, &state);
        let mut damaged = good.clone();
        damaged[place % good.len()] = byte;
        let truncated = &good[..place % good.len()];
        prop_assert!(limit.decode(truncated).is_err());
        let longer = [&good[..], &[byte]].concat();
        prop_assert_eq!(limit.decode(&longer).err(), Some(DecodeError::Trailing { extra: 1 }));
        for bytes in [&damaged[..], truncated] {
            for mut state in [limit.decode(bytes), limit.adopt(bytes, Tick(now))].into_iter().flatten() {
                let decision: Decision = limit.decide(&mut state, Tick(now), 1);
                prop_assert!(decision.remaining <= decision.limit);
            }
        }
    }
}

/// The decoder must not allocate memory for entries that are not there.
#[test]
fn a_log_that_claims_many_entries_is_an_error() {
    let limit = Policy::sliding_window_log(9).per(Ticks(10)).limit().unwrap();
    let mut bytes = encoded(&limit, &limit.initial(Tick(0)));
    assert_eq!(bytes.pop(), Some(0), "the number of entries comes last in an empty log");
    bytes.extend([0xff; 8]);
    bytes.push(0x7f);
    assert_eq!(limit.decode(&bytes).err(), Some(DecodeError::Truncated));
}

/// A state that no decision can produce is an error.
#[test]
fn a_level_that_is_not_exact_in_a_double_is_an_error() {
    let limit = Policy::token_bucket(3).per(Ticks(10)).limit().unwrap();
    let mut state = limit.initial(Tick(0));
    limit.charge(&mut state, Tick(0), i128::MAX);
    let deepest = encoded(&limit, &state);
    assert!(limit.decode(&deepest).is_ok());
    let mut deeper = deepest.clone();
    let level = deeper.pop().expect("the level is the last byte");
    assert_eq!(level, 60, "6 tokens of 10 units");
    // A script may charge beyond the bound on debt, up to 2^52.
    let largest = [&deeper[..], &[0x80; 7], &[8]].concat();
    assert!(limit.decode(&largest).is_ok());
    deeper.extend([0x81, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 8]);
    assert_eq!(limit.decode(&deeper).err(), Some(DecodeError::Field { name: "level" }));
}
