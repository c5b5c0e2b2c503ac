//! Attacks that fill the store: in memory, in Redis, and with keys of one slot of a cluster.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tallygate_testkit::servers::Server as RedisServer;

use crate::Failure;
use crate::attack::Attempt;
use crate::client::{RespClient, ask, resp_rounds};
use crate::server::Store;

/// The longest life of a key that a request may ask for, in seconds.
const LONGEST: i64 = 7 * 86_400;
/// The clients of the attack on one slot.
const OF_ONE_SLOT: usize = 100;

/// `CL.THROTTLE` with other numbers for every key.
pub(super) fn throttle_numbers(attempt: &Attempt) {
    resp_rounds(attempt, |round| {
        format!("CL.THROTTLE key-{round} {} {} 3600\r\n", round % 991, 1 + round)
    });
}

/// Keys of `CL.THROTTLE` count as others do.
pub(super) fn count_keys(attempt: &Attempt) -> Result<(), Failure> {
    let kept = attempt.metric("tallygate_keys_kept{policy=\"CL.THROTTLE\"}")?;
    attempt.finds(
        (1..=1_000_000).contains(&kept),
        format!("{kept} keys are kept and counted, of at most 1000000"),
    );
    Ok(())
}

/// `CL.THROTTLE` with numbers that would need 126 years to refill.
pub(super) fn throttle_years(attempt: &Attempt) {
    resp_rounds(attempt, |round| format!("CL.THROTTLE key-{round} 1000000 1 4000 1000000\r\n"));
}

/// No key of the attacker is in Redis, and Redis decides.
pub(super) fn nothing_is_kept(attempt: &Attempt) -> Result<(), Failure> {
    let of_attacker = keys(attempt.store).filter(|(name, _)| name.contains("=key-")).count();
    attempt.finds(of_attacker == 0, format!("{of_attacker} keys of the attacker in Redis"));
    let ready = ask(attempt.from, attempt.server.http, "GET /readyz", "")?.body;
    attempt.finds(ready == "ready\n", format!("/readyz says {:?}", ready.trim_end()));
    let open = attempt.metric(
        "tallygate_decisions_total{policy=\"api\",outcome=\"allowed\",source=\"failed_open\"",
    )?;
    attempt.finds(open == 0, format!("{open} checks failed open"));
    Ok(())
}

/// `CL.THROTTLE` with the longest life that is accepted, until Redis is full.
pub(super) fn fill_redis(attempt: &Attempt) -> Result<(), Failure> {
    let mut client = RespClient::connect(attempt.from, attempt.server.resp)?;
    let used_up =
        client.allowed(&["TG.CHECK keys debtor COST 100\r\n".to_owned()], RespClient::CHECK)?;
    attempt.finds(used_up == 1, "a client uses up its quota before the attack");
    resp_rounds(attempt, |round| format!("CL.THROTTLE key-{round} 0 1 {LONGEST}\r\n"));
    Ok(())
}

/// While Redis is full, the server says so and each policy does what its failure setting says. Afterwards it recovers.
pub(super) fn is_degraded_and_recovers(attempt: &Attempt) -> Result<(), Failure> {
    let mut client = RespClient::connect(attempt.from, attempt.server.resp)?;
    let mut allowed =
        |command: &str| client.allowed(&[format!("{command}\r\n")], RespClient::CHECK);
    let denied = allowed("TG.CHECK keys debtor")? == 0;
    attempt.finds(denied, "the client without quota is still denied");
    let (open, closed) = (allowed("TG.CHECK keys new")?, allowed("TG.CHECK closed new")?);
    attempt.finds(
        (open, closed) == (1, 0),
        format!("new clients: {open} of 1 allowed by `allow`, {closed} of 1 by `deny`"),
    );
    let ready =
        || Ok::<_, Failure>(ask(attempt.from, attempt.server.http, "GET /readyz", "")?.body);
    let says = ready()?;
    attempt.finds(
        says.starts_with("degraded: the store is out of memory"),
        format!("/readyz says {:?}", says.lines().next().unwrap_or_default()),
    );
    let of_attacker = keys(attempt.store).filter(|(name, _)| name.contains("=key-"));
    let longest = of_attacker.map(|(_, seconds)| seconds).max().unwrap_or_default();
    attempt
        .finds((1..=LONGEST).contains(&longest), format!("the longest key lives {longest} s more"));
    for server in attempt.store.servers() {
        server.ask::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    }
    let since = Instant::now();
    while ready()? != "ready\n" && since.elapsed() < Duration::from_secs(15) {
        allowed("TG.CHECK keys new")?;
        std::thread::sleep(Duration::from_millis(100));
    }
    let closed = allowed("TG.CHECK closed new")?;
    attempt.finds(
        ready()? == "ready\n" && closed == 1,
        format!("with more memory, Redis decides after {} s", since.elapsed().as_secs()),
    );
    Ok(())
}

/// Returns the names and remaining seconds of a thousand keys of each server of a store. A key without an expiry has -1.
fn keys(store: &Store) -> impl Iterator<Item = (String, i64)> {
    store.servers().iter().flat_map(|server: &RedisServer| {
        let (_, names) = server.ask::<(String, Vec<String>)>(&["SCAN", "0", "COUNT", "1000"]);
        names.into_iter().map(|name| {
            let seconds = server.ask::<i64>(&["TTL", &name]);
            // A key that never expires lives longer than any bound.
            (name, if seconds == -1 { i64::MAX } else { seconds })
        })
    })
}

/// Checks clients whose names share a slot, as far as a client can know: names with the same braces, and names with the
/// same hash without a secret.
pub(super) fn one_slot(attempt: &Attempt) -> Result<(), Failure> {
    let tag = |name: &String| xxhash_rust::xxh3::xxh3_64(name.as_bytes()) & 0xffff == 0;
    let hashed = (0_u64..).map(|number| format!("slot-{number}")).filter(tag).take(OF_ONE_SLOT);
    let braced = (0..OF_ONE_SLOT).map(|number| format!("{{slot}}-{number}"));
    let commands: Vec<_> =
        hashed.chain(braced).map(|name| format!("TG.CHECK keys {name}\r\n")).collect();
    let mut client = RespClient::connect(attempt.from, attempt.server.resp)?;
    while attempt.goes_on() {
        client.allowed(&commands, RespClient::CHECK)?;
        attempt.rest(Duration::from_millis(10));
    }
    Ok(())
}

/// The names of the attacker are in many slots.
pub(super) fn slots_are_spread(attempt: &Attempt) -> Result<(), Failure> {
    let Store::Cluster(cluster) = attempt.store else { return Err("expected a cluster".into()) };
    let mut slots = HashMap::<u16, usize>::new();
    for (name, _) in keys(attempt.store).filter(|(name, _)| name.contains("slot")) {
        if name.contains(":keys=") {
            *slots.entry(cluster.slot_of(&name)).or_default() += 1;
        }
    }
    let (names, most) = (slots.values().sum::<usize>(), slots.values().max().copied());
    attempt.finds(
        names == 2 * OF_ONE_SLOT && most.is_some_and(|most| most <= 4),
        format!(
            "{names} names are in {} slots, at most {} in one",
            slots.len(),
            most.unwrap_or_default()
        ),
    );
    Ok(())
}
