//! Attempts to get more than the quota: reservations that mint units, debts that are washed out, ids that are guessed.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use crate::Failure;
use crate::attack::Attempt;
use crate::client::{RespClient, resp_rounds};

/// The window of the policies of [`bank`].
const WINDOW: Duration = Duration::from_millis(500);
const ALGORITHMS: [&str; 6] = [
    "gcra",
    "token_bucket",
    "leaky_bucket",
    "fixed_window",
    "sliding_window_log",
    "sliding_window_counter",
];

/// Policies of 5 per window for each algorithm.
pub(super) fn bank_config() -> String {
    let mut config = String::new();
    for algorithm in ALGORITHMS {
        let _ = write!(
            config,
            "[policies.bank-{algorithm}]\nalgorithm = \"{algorithm}\"\nlimit = 5\nwindow = \"{}ms\"\n",
            WINDOW.as_millis()
        );
    }
    config
}

/// Reserves the whole quota once per window, six times, and then cancels and checks in turns, as fast as possible.
pub(super) fn bank(attempt: &Attempt) -> Result<(), Failure> {
    let algorithm = ALGORITHMS[attempt.place];
    let mut client = RespClient::connect(attempt.from, attempt.server.resp)?;
    let (mut most, mut reserved, mut is_bounded) = (0, 0, true);
    for round in 0.. {
        if !attempt.goes_on() {
            break;
        }
        let mut ids = Vec::new();
        for _ in 0..6 {
            let words = format!("bank-{algorithm} banker-{round} 60000 COST 5");
            ids.extend(client.reserve(&words)?);
            std::thread::sleep(WINDOW);
        }
        reserved += ids.len();
        let (began, mut allowed) = (Instant::now(), 0);
        for id in ids {
            client.ask(&format!("TG.CANCEL {id}\r\n"))?;
            let checks = vec![format!("TG.CHECK bank-{algorithm} banker-{round}\r\n"); 10];
            allowed += client.allowed(&checks, RespClient::CHECK)?;
        }
        // Within an interval that begins at any time, a window more than it has may count.
        let windows = began.elapsed().as_micros() / WINDOW.as_micros();
        is_bounded &= allowed <= 5 * (2 + usize::try_from(windows)?);
        most = most.max(allowed);
    }
    attempt.finds(
        reserved > 0 && is_bounded,
        format!("{algorithm}: {most} checks at once after {reserved} reservations"),
    );
    Ok(())
}

/// The clients that have used up their quota before a flood.
const DEBTORS: usize = 200;
/// The keys of a flood: ten times the `--max-keys` of the server.
const FLOOD: usize = 1_000_000;
/// Commands per pipeline, and the pause after each.
const BATCH: usize = 500;
const PAUSE: Duration = Duration::from_millis(3);

pub(super) const DEBT_CONFIG: &str = "\
[policies.daily]\nlimit = 5\nwindow = \"1d\"\n[policies.daily.tiers.pro]\nlimit = 1000000\n\
[policies.wander]\nlimit = 5\nwindow = \"1d\"\n\
[policies.wander.tiers.a]\nlimit = 1000\nwindow = \"1s\"\n[policies.wander.tiers.b]\nlimit = 1000\nwindow = \"1s\"\n\
[policies.wander.tiers.c]\nlimit = 1000\nwindow = \"1s\"\n[policies.wander.tiers.d]\nlimit = 1000\nwindow = \"1s\"\n";

/// Tries to wash out debts: with invented keys and any cost or tier, with `CL.THROTTLE` and large numbers, and by a walk
/// through short tiers.
pub(super) fn wash_out(attempt: &Attempt) -> Result<(), Failure> {
    let mut client = RespClient::connect(attempt.from, attempt.server.resp)?;
    let (name, lines, first, flood, again): (_, _, _, fn(usize) -> String, _) = match attempt.place
    {
        0 => (
            "keys with any cost and tier",
            RespClient::CHECK,
            "TG.CHECK daily debtor-N COST 5\r\n",
            |key| {
                let more =
                    ["COST 5", "COST 1", "COST 1000 TIER pro", "COST 1000000 TIER pro"][key % 4];
                format!("TG.CHECK daily flood-{key} {more}\r\n")
            },
            "TG.CHECK daily debtor-N\r\n",
        ),
        1 => (
            "keys of CL.THROTTLE with large numbers",
            RespClient::THROTTLE,
            "CL.THROTTLE debtor-N 4 5 86400 5\r\n",
            |key| {
                let large = 1_000_000 + key % BATCH;
                format!("CL.THROTTLE flood-{key} {} {large} 3600 {large}\r\n", large - 1)
            },
            "CL.THROTTLE debtor-N 4 5 86400 1\r\n",
        ),
        _ => (
            "visits of the debtors to short tiers",
            RespClient::CHECK,
            "TG.CHECK wander debtor-N COST 5\r\n",
            |visit| {
                let tier = ["a", "b", "c", "d"][visit / DEBTORS % 4];
                format!("TG.CHECK wander debtor-{} COST 1000 TIER {tier}\r\n", visit % DEBTORS)
            },
            "TG.CHECK wander debtor-N\r\n",
        ),
    };
    let debtors = |command: &str| -> Vec<_> {
        (0..DEBTORS).map(|debtor| command.replace('N', &debtor.to_string())).collect()
    };
    let used_up = client.allowed(&debtors(first), lines)?;
    for batch in 0..FLOOD / BATCH {
        let commands: Vec<_> = (batch * BATCH..(batch + 1) * BATCH).map(flood).collect();
        client.allowed(&commands, lines)?;
        std::thread::sleep(PAUSE);
    }
    // What the debtors have used of the short tiers is earned back.
    std::thread::sleep(Duration::from_millis(1_100));
    let denied = DEBTORS - client.allowed(&debtors(again), lines)?;
    attempt.finds(
        used_up == DEBTORS && denied * 100 >= DEBTORS * 99,
        format!("{denied} of {DEBTORS} debtors denied after {FLOOD} {name}"),
    );
    Ok(())
}

/// Reservations with keys of 4000 bytes, from one address.
pub(super) fn reserve_bytes(attempt: &Attempt) {
    resp_rounds(attempt, |round| format!("TG.RESERVE keys {round:x<4000} 3600000 COST 1\r\n"));
}

/// Reservations with short keys, from nine addresses. The first asks for a whole day.
pub(super) fn reserve_places(attempt: &Attempt) {
    let lives = if attempt.place == 0 { 86_400_000 } else { 3_600_000 };
    let attempt = attempt.at_address([127, 0, 1, u8::try_from(attempt.place).unwrap_or(u8::MAX)]);
    resp_rounds(&attempt, |round| {
        format!("TG.RESERVE keys {}-{round} {lives} COST 1\r\n", attempt.place)
    });
}

/// Another client can still reserve and settle.
pub(super) fn others_reserve(attempt: &Attempt) -> Result<(), Failure> {
    let open = attempt.metric("tallygate_reservations_open")?;
    attempt.finds(
        (1..=90_000).contains(&open),
        format!("the attackers have {open} of 100000 reservations"),
    );
    let mut client = RespClient::connect([127, 0, 0, 3], attempt.server.resp)?;
    let id = client.reserve("keys polite 60000 COST 3")?.ok_or("another client cannot reserve")?;
    let settled = client.ask(&format!("TG.SETTLE {id} 1\r\n"))?.starts_with("*6\r\n:1\r\n");
    attempt.finds(settled, "another client reserves and settles");
    Ok(())
}

/// Settles reservations of others with guessed ids: ids close to its own ones, and random ids.
pub(super) fn guess_ids(attempt: &Attempt) -> Result<(), Failure> {
    let mut victim = RespClient::connect([127, 0, 0, 3], attempt.server.resp)?;
    let mut own = RespClient::connect(attempt.from, attempt.server.resp)?;
    let (mut guesses, mut hits) = (0, 0);
    while attempt.goes_on() {
        let id = own.reserve("keys guesser 60000 COST 1")?.ok_or("the reservation is denied")?;
        victim.reserve(&format!("keys victim-{guesses} 1000 COST 1"))?;
        let number = u128::from_str_radix(&id, 16)?;
        let near =
            (1..=250).flat_map(|step| [number.wrapping_add(step), number.wrapping_sub(step)]);
        let flipped = (0..128).map(|bit| number ^ (1 << bit));
        let random = (0..400).map(|_| fastrand::u128(..));
        let commands: Vec<_> = near
            .chain(flipped)
            .chain(random)
            .map(|guess| format!("TG.CANCEL {guess:032x}\r\n"))
            .collect();
        let replies = own.ask(&commands.concat())?;
        hits += commands.len() - replies.matches("-ERR ").count();
        guesses += commands.len();
        own.ask(&format!("TG.CANCEL {id}\r\n"))?;
    }
    attempt.finds(guesses > 0 && hits == 0, format!("{hits} of {guesses} guessed ids are right"));
    Ok(())
}
