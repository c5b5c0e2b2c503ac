//! Ten million invented keys over RESP and HTTP: their memory, their effect on other clients, and the debts that they evict.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::SocketAddrV4;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::client::{FROM, RespClient};
use crate::good::{GoodClient, shown};
use crate::server::{Server, connect};
use crate::{Failure, QUIET_SECONDS, allowed, step_back};

/// The number of invented keys; one in ten is sent over HTTP.
const INVENTED: usize = 10_000_000;
/// Keys per second. The rate is limited because the measured client shares the processors.
const PER_SECOND: usize = 150_000;
/// Keys per pipeline.
const BATCH: usize = 500;
/// The default maximum of stored clients.
const MAX_KEYS: usize = 1_000_000;
/// The bytes per stored client, including its tiers and the spare room of the table.
const BYTES_PER_KEY: usize = 96;
/// The number of keys that are chosen to collide.
const CHOSEN: usize = 20_000;
/// The bits in which their hashes agree without a secret.
const ALIKE: u32 = 12;
/// The life of a key of the brief policy, plus a second.
const EXPIRED: Duration = Duration::from_secs(21);

const PATIENCE: Duration = Duration::from_secs(10);

/// Runs all measurements. Returns a table and whether every promise was kept.
pub(crate) fn measure(binary: &Path) -> Result<(String, bool), Failure> {
    let mut table = String::from("| promise | measured | verdict |\n|---|---|---|\n");
    let mut all_held = true;
    let mut report = |promise: &str, measured: String, is_held: bool| {
        let verdict = if is_held { "held" } else { "broken" };
        let _ = writeln!(table, "| {promise} | {measured} | {verdict} |");
        all_held &= is_held;
    };
    invented(binary, &mut report)?;
    chosen(binary, &mut report)?;
    expiring(binary, &mut report)?;
    Ok((table, all_held))
}

fn invented(binary: &Path, report: &mut impl FnMut(&str, String, bool)) -> Result<(), Failure> {
    let server = Server::start(binary, &[])?;
    let mut good = GoodClient::new(&server);
    let quiet = good.watch(QUIET_SECONDS)?;
    let before = server.holds()?.mib;
    let mut observer = RespClient::connect(FROM, server.resp)?;
    let greedy = ["greedy".to_owned()];
    let used_up = check(&mut observer, "keys", &greedy, 100)? == 1;
    let began = Instant::now();
    let seconds = INVENTED / PER_SECOND;
    let time = Duration::from_secs(seconds as u64);
    let (during, evicted, unserved, asked) = std::thread::scope(|scope| -> Result<_, Failure> {
        let resp = scope.spawn(|| {
            step_back();
            flood_resp(server.resp, INVENTED / 10 * 9)
        });
        let http = scope.spawn(|| {
            step_back();
            flood_http(server.http, INVENTED / 10)
        });
        let observing = scope.spawn(move || -> Result<_, Failure> {
            let (mut evicted, mut unserved, mut asked) = (0, 0, 0);
            while began.elapsed() < time {
                evicted += check(&mut observer, "keys", &greedy, 1)?;
                unserved += 1 - check(&mut observer, "keys", &[format!("honest-{asked}")], 1)?;
                asked += 1;
                std::thread::sleep(Duration::from_millis(50));
            }
            Ok((evicted, unserved, asked))
        });
        let during = good.watch(seconds / 2)?;
        let failed = |_| "a flood failed";
        let (evicted, unserved, asked) = observing.join().map_err(failed)??;
        let denied_keys = resp.join().map_err(failed)?? + http.join().map_err(failed)??;
        Ok((during, evicted, unserved + denied_keys, asked))
    })?;
    let took = began.elapsed().as_secs();
    let grown = server.holds()?.mib.saturating_sub(before);
    let cap = (MAX_KEYS * BYTES_PER_KEY / (1 << 20) + 8) as u64;
    report(
        "D1: 10 million invented keys, memory under its cap",
        format!(
            "{grown} MiB more after {took} s; {MAX_KEYS} keys are kept, for which {cap} MiB are allowed"
        ),
        grown <= cap,
    );
    report(
        "D2: no client with debt is evicted",
        format!("a client without quota was denied in {} of {asked} checks", asked - evicted),
        used_up && evicted == 0,
    );
    report(
        "D2: others are served",
        format!("{unserved} of {INVENTED} new clients were denied"),
        unserved == 0,
    );
    for (name, quiet, during) in
        [("HTTP", quiet.http, during.http), ("RESP", quiet.resp, during.resp)]
    {
        report(
            &format!("a good client does not notice, {name}"),
            format!("p50, p99 {quiet} without an attack, {during} during the attack"),
            during.failed == 0 && during.p99 <= allowed(quiet.p99),
        );
    }
    Ok(())
}

fn chosen(binary: &Path, report: &mut impl FnMut(&str, String, bool)) -> Result<(), Failure> {
    let server = Server::start(binary, &["--max-keys", "50000"])?;
    let mut client = RespClient::connect(FROM, server.resp)?;
    let is_chosen =
        |key: &String| xxhash_rust::xxh3::xxh3_128(key.as_bytes()) >> (128 - ALIKE) == 0;
    let chosen: Vec<String> = (0..)
        .map(|number: u64| format!("client-{number:010}"))
        .filter(is_chosen)
        .take(CHOSEN)
        .collect();
    let at_random: Vec<String> = (0..CHOSEN).map(|number| format!("random-{number:010}")).collect();
    let mut p99 = [Duration::MAX; 2];
    for _ in 0..5 {
        for (best, keys) in p99.iter_mut().zip([&at_random, &chosen]) {
            let mut times = times(&mut client, "keys", keys)?;
            times.sort_unstable();
            *best = (*best).min(times[times.len() * 99 / 100]);
        }
    }
    let [at_random, chosen] = p99;
    report(
        "D4: keys that are chosen to collide, p99 within twice that of others",
        format!("{} of chosen keys, {} of others", shown(chosen), shown(at_random)),
        chosen < 2 * at_random,
    );
    Ok(())
}

fn expiring(binary: &Path, report: &mut impl FnMut(&str, String, bool)) -> Result<(), Failure> {
    let server = Server::start(binary, &["--max-keys", "12000000"])?;
    let mut client = RespClient::connect(FROM, server.resp)?;
    for batch in 0..INVENTED / BATCH {
        let keys: Vec<_> = (0..BATCH).map(|key| format!("old-{batch}-{key}")).collect();
        check(&mut client, "brief", &keys, 1)?;
    }
    let filled = Instant::now();
    let mut slow = [Duration::ZERO; 4];
    for (place, kind) in ["early", "late"].into_iter().enumerate() {
        if kind == "late" {
            std::thread::sleep(EXPIRED.saturating_sub(filled.elapsed()));
        }
        let new: Vec<_> = (0..100_000).map(|key| format!("{kind}-{key}")).collect();
        let mut times = times(&mut client, "brief", &new)?;
        times.sort_unstable();
        slow[2 * place] = times[times.len() * 999 / 1000];
        slow[2 * place + 1] = times[times.len() - 1];
    }
    let [live, live_max, expired, expired_max] = slow.map(shown);
    report(
        "D6: 10 million keys expire, p99.9 of a check stays flat",
        format!(
            "{expired} (at most {expired_max}) while they do, {live} (at most {live_max}) before"
        ),
        slow[2] <= allowed(slow[0]),
    );
    Ok(())
}

/// Checks keys and returns how many are allowed.
fn check(
    client: &mut RespClient,
    policy: &str,
    keys: &[String],
    cost: u32,
) -> Result<usize, Failure> {
    let commands: Vec<_> =
        keys.iter().map(|key| format!("TG.CHECK {policy} {key} COST {cost}\r\n")).collect();
    client.allowed(&commands, RespClient::CHECK)
}

/// Checks keys one by one and returns their times.
fn times(client: &mut RespClient, policy: &str, keys: &[String]) -> Result<Vec<Duration>, Failure> {
    let times = keys.iter().map(|key| {
        let began = Instant::now();
        check(client, policy, std::slice::from_ref(key), 1)?;
        Ok(began.elapsed())
    });
    times.collect()
}

/// Waits until the next requests are due at the given rate.
fn pace(began: Instant, done: usize, of: usize) {
    let whole = INVENTED as u64 * 1_000_000 / PER_SECOND as u64;
    let due = Duration::from_micros(whole * done as u64 / of as u64);
    std::thread::sleep(due.saturating_sub(began.elapsed()));
}

/// Checks new keys over RESP and returns how many were denied.
fn flood_resp(to: SocketAddrV4, count: usize) -> Result<usize, Failure> {
    let (mut client, began, mut denied_keys) = (RespClient::connect(FROM, to)?, Instant::now(), 0);
    for batch in 0..count / BATCH {
        let keys: Vec<_> = (0..BATCH).map(|key| format!("resp-{batch}-{key}")).collect();
        denied_keys += BATCH - check(&mut client, "keys", &keys, 1)?;
        pace(began, (batch + 1) * BATCH, count);
    }
    Ok(denied_keys)
}

/// Checks new keys over HTTP in lists and returns how many were denied.
fn flood_http(to: SocketAddrV4, count: usize) -> Result<usize, Failure> {
    const LIST: usize = 50;
    let (mut stream, began, mut denied_keys) = (connect(FROM, to, PATIENCE)?, Instant::now(), 0);
    let mut reply = vec![0; 1 << 16];
    for batch in 0..count / LIST {
        let checks: Vec<_> = (0..LIST)
            .map(|key| format!(r#"{{"policy":"keys","key":"http-{batch}-{key}"}}"#))
            .collect();
        let body = format!(r#"{{"checks":[{}]}}"#, checks.join(","));
        let head = format!(
            "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(format!("{head}{body}").as_bytes())?;
        let mut read = 0;
        // The end of the list is the end of the reply.
        while !reply[..read].ends_with(b"]}") {
            match stream.read(&mut reply[read..])? {
                0 => return Err("the server closed the connection".into()),
                more => read += more,
            }
        }
        let allowed = memchr::memmem::find_iter(&reply[..read], b"\"allowed\":true").count();
        denied_keys += LIST - allowed;
        pace(began, (batch + 1) * LIST, count);
    }
    Ok(denied_keys)
}
