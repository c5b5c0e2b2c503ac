//! All attacks on memory at once, from many addresses, with the default limits.

use std::time::Duration;

use serde_json::json;

use super::{connections, http2, quota, store, work};
use crate::Failure;
use crate::attack::Attempt;
use crate::client::{ask, resp_rounds};

/// The addresses that hold connections and make reservations. Each may have 1000 connections and a tenth of all
/// reservations.
const ADDRESSES: usize = 9;
/// The threads of the mix: some for each address, and one for each other attack.
pub(super) const ATTACKERS: usize = 5 * ADDRESSES + 6;

/// Runs one part of the mix.
pub(super) fn all(attempt: &Attempt) {
    let (kind, address) = (attempt.place / ADDRESSES, attempt.place % ADDRESSES);
    let address = u8::try_from(1 + address).unwrap_or(u8::MAX);
    let from = |network| attempt.at_address([127, 0, network, address]);
    match kind {
        0 => connections::hold_heads(&from(2), 400, 60_000),
        1 => connections::hold_lines(&from(3), 300),
        2 => connections::hold_bodies(&from(4), 32),
        3 => http2::hold_tiny_fields(&from(5), 100),
        4 => quota::reserve_bytes(&from(6)),
        _ => match attempt.place - 5 * ADDRESSES {
            0 => invented_keys(attempt),
            1 => store::throttle_numbers(attempt),
            2 | 3 => work::archives(attempt),
            4 => attempt.expects(overrides(attempt)),
            _ => attempt.expects(watch(attempt)),
        },
    }
}

/// Checks new keys with any cost.
fn invented_keys(attempt: &Attempt) {
    resp_rounds(attempt, |round| {
        format!("TG.CHECK keys invented-{round} COST {}\r\n", 1 + round % 100)
    });
}

/// Sets as many overrides as the server accepts, with long keys.
fn overrides(attempt: &Attempt) -> Result<(), Failure> {
    for number in 0..10_000 {
        if !attempt.goes_on() {
            break;
        }
        let set = json!({"policy":"keys","key":format!("{number:x<4000}"),"limit":5,"window":"1h"});
        ask(attempt.from, attempt.server.http, "PUT /v1/admin/overrides", &set.to_string())?;
    }
    Ok(())
}

/// Reports the most that each part of the mix reached.
fn watch(attempt: &Attempt) -> Result<(), Failure> {
    const MIB: u64 = 1 << 20;
    let parts = [
        ("tallygate_connections{", "connections", 1),
        ("tallygate_buffer_bytes ", "MiB of buffers", MIB),
        ("tallygate_reservations_open ", "reservations", 1),
        ("tallygate_keys_kept{", "keys", 1),
    ];
    let mut most = [0; 4];
    while attempt.goes_on() {
        for (most, (name, ..)) in most.iter_mut().zip(parts) {
            *most = attempt.metric(name)?.max(*most);
        }
        attempt.rest(Duration::from_millis(500));
    }
    for (most, (_, what, unit)) in most.into_iter().zip(parts) {
        attempt.finds(most > 0, format!("{} {what}", most / unit));
    }
    Ok(())
}
