//! The chaos campaign: a fleet uses real servers while they fail, and no interval may have allowed more than the bound of
//! the row.
//!
//! Each row is a test, and prints one line per seed:
//!
//! ```text
//! chaos ROW SEED over=N gap_ms=N slowest_ms=N allowed=N failed=N on=SERVER
//! ```
//!
//! `over` is by how many units the worst interval exceeds its bound, `gap_ms` the longest time in which the store decided
//! nothing on some key. The failure setting denies here, so every allowed request was allowed by the store.
//! `TALLYGATE_CHAOS_SEEDS` sets the number of seeds; `scripts/chaos` runs twenty.
//!
//! | file | contains |
//! |---|---|
//! | `load.rs` | the fleet, and its decisions |
//! | `history.rs` | the check of its decisions against the bound |

mod history;
mod load;

use std::time::Duration;

use tallygate_testkit::servers::{Cluster, Flavor, Proxy, Server, wait_until};

use load::{KEYS, Load, METER, Outcome, key};

/// The usual time budget.
const BUDGET: Duration = Duration::from_millis(50);
/// The time budget for faults that must be invisible, also on a busy machine.
const PATIENT: Duration = Duration::from_secs(2);
/// How long a failover may take.
const SOON: Duration = Duration::from_secs(20);

/// A crash of a server that writes everything to disk: nothing is lost.
#[test]
fn killed() {
    campaign("killed", |flavor, random| {
        let server = Server::with(flavor, &["--appendonly", "yes", "--appendfsync", "always"]);
        let mut load = Load::start(&[server.url()], BUDGET, random);
        load.until_some_moment();
        server.kill();
        load.run_for(100, 500);
        server.restart();
        let mut outcome = load.end();
        outcome.must(outcome.failed > 0, "the fault is noticed");
        outcome.must(outcome.charged_too_much >= 0, "no charge is lost");
        (outcome, server.keys_without_ttl())
    });
}

/// A server that is suspended, and later carries out the calls that it received meanwhile.
#[test]
fn frozen() {
    campaign("frozen", |flavor, random| {
        let server = Server::start(flavor);
        let mut load = Load::start(&[server.url()], BUDGET, random);
        load.until_some_moment();
        server.freeze();
        load.run_for(600, 1500);
        server.thaw();
        let mut outcome = load.end();
        let opened = outcome.counts.iter().all(|counts| counts.breaker_opened > 0);
        outcome.must(opened, "every breaker opens");
        outcome.must(outcome.charged_too_much >= 0, "no charge is lost");
        (outcome, server.keys_without_ttl())
    });
}

/// A crash of a server that keeps nothing on disk: one burst.
#[test]
fn restarted_empty() {
    campaign("restarted-empty", |flavor, random| {
        let server = Server::start(flavor);
        let mut load = Load::start(&[server.url()], BUDGET, random);
        load.until_some_moment();
        load.losing_a_burst(|| server.restart());
        (load.end(), server.keys_without_ttl())
    });
}

/// A server that forgets its scripts repeatedly: the fault is invisible.
#[test]
fn script_flush() {
    campaign("script-flush", |flavor, random| {
        let server = Server::start(flavor);
        let mut load = Load::start(&[server.url()], PATIENT, random);
        load.until_some_moment();
        for _ in 0..20 {
            server.ask::<()>(&["SCRIPT", "FLUSH"]);
            load.run_for(0, 50);
        }
        let mut outcome = load.end();
        let reloaded = outcome.counts.iter().all(|counts| counts.reloads > 0);
        outcome.must(reloaded, "scripts are sent again");
        outcome.must_not_show();
        (outcome, server.keys_without_ttl())
    });
}

/// Everything is deleted: one burst each time.
#[test]
fn flushall() {
    campaign("flushall", |flavor, random| {
        let server = Server::start(flavor);
        let mut load = Load::start(&[server.url()], PATIENT, random);
        for _ in 0..3 {
            load.until_some_moment();
            load.losing_a_burst(|| server.ask::<()>(&["FLUSHALL"]));
        }
        let mut outcome = load.end();
        outcome.must(outcome.failed == 0, "the store decides everything");
        (outcome, server.keys_without_ttl())
    });
}

/// A replica takes over, and connections to the old primary stay open, which then returns READONLY. For the moment in
/// which both are primaries, the bound is that of [`split_brain`].
#[test]
fn demoted() {
    campaign("demoted", |flavor, random| {
        let first = Server::start(flavor);
        let second = Server::replica_of(&first);
        let proxy = Proxy::start(&first.address());
        let mut load = Load::start(&[proxy.url()], BUDGET, random);
        load.until_some_moment();
        proxy.point_to(&second.address());
        load.splitting(|_| {
            second.promote();
            first.demote_to(&second);
        });
        load.until_all_have_reconnected();
        let outcome = load.end();
        first.wait_until_linked();
        (outcome, [first.keys_without_ttl(), second.keys_without_ttl()].concat())
    });
}

/// Two servers change roles by FAILOVER: writes wait until both have the same data. Nothing is lost.
#[test]
fn handed_over() {
    campaign("handed-over", |flavor, random| {
        let first = Server::start(flavor);
        let second = Server::replica_of(&first);
        let proxy = Proxy::start(&first.address());
        let points_early = random.bool();
        let mut load = Load::start(&[proxy.url()], BUDGET, random);
        load.until_some_moment();
        if points_early {
            proxy.point_to(&second.address());
        }
        first.ask::<()>(&["FAILOVER", "TO", "127.0.0.1", &second.port().to_string()]);
        wait_until("both have changed roles", SOON, || {
            role(&first) == "slave" && role(&second) == "master"
        });
        proxy.point_to(&second.address());
        load.until_all_have_reconnected();
        let mut outcome = load.end();
        outcome.must(outcome.charged_too_much >= 0, "no charge is lost");
        first.wait_until_linked();
        (outcome, [first.keys_without_ttl(), second.keys_without_ttl()].concat())
    });
}

/// A primary of a cluster crashes, and its replica takes over, perhaps without the last writes: one burst of the keys of
/// that primary.
#[test]
fn cluster_primary_lost() {
    campaign("cluster-primary-lost", |flavor, random| {
        let cluster = Cluster::start(flavor, 3, 1);
        let mut load = Load::start(&[address(&cluster)], BUDGET, random);
        load.until_some_moment();
        let primaries: Vec<usize> = slots(&cluster).map(|slot| cluster.primary_of(slot)).collect();
        let victim = primaries[random.usize(0..KEYS)];
        let keys: Vec<usize> =
            (0..primaries.len()).filter(|index| primaries[*index] == victim).collect();
        load.losing_a_burst_of(&keys, || cluster.kill(victim));
        cluster.wait_until_ok(SOON);
        (load.end(), cluster.keys_without_ttl())
    });
}

/// Slots move between the servers of a cluster and back: the fault is invisible, and nothing is charged twice.
#[test]
fn reshard() {
    campaign("reshard", |flavor, random| {
        let cluster = Cluster::start(flavor, 3, 0);
        let mut load = Load::start(&[address(&cluster)], PATIENT, random);
        load.until_some_moment();
        let mut slots: Vec<u16> = slots(&cluster).collect();
        slots.push(cluster.slot_of(&names(cluster.nodes(), METER)[0]));
        for _ in 0..4 {
            for slot in &slots {
                let to = (cluster.primary_of(*slot) + random.usize(1..3)) % 3;
                cluster.begin_migration(*slot, to);
                load.run_for(0, 20);
                cluster.migrate_keys(*slot, to);
                load.run_for(0, 20);
                cluster.end_migration(*slot, to);
                load.run_for(0, 20);
            }
        }
        let mut outcome = load.end();
        let redirected = outcome.counts.iter().all(|counts| counts.redirections > 0);
        outcome.must(redirected, "every process is redirected");
        outcome.must_not_show();
        (outcome, cluster.keys_without_ttl())
    });
}

/// A primary crashes, and a replica takes over that had stopped replicating: one burst, however long ago it stopped.
#[test]
fn unreplicated() {
    campaign("unreplicated", |flavor, random| {
        let primary = Server::start(flavor);
        let replica = Server::replica_of(&primary);
        let proxy = Proxy::start(&primary.address());
        let mut load = Load::start(&[proxy.url()], BUDGET, random);
        load.until_some_moment();
        replica.pause_replication();
        load.run_for(50, 800);
        load.losing_a_burst(|| primary.kill());
        replica.promote();
        proxy.point_to(&replica.address());
        (load.end(), replica.keys_without_ttl())
    });
}

/// For a while there are two primaries, and each serves half of the fleet; then one of them becomes a replica.
///
/// The bound: each side has its own bucket, so there is one more burst, and the rate counts twice while there are two.
/// Afterwards there is one bucket again, and the usage of the other side is forgotten. That costs no further burst, since
/// the remaining bucket was never more than full.
#[test]
fn split_brain() {
    campaign("split-brain", |flavor, random| {
        let first = Server::start(flavor);
        let second = Server::replica_of(&first);
        let sides = [&first, &first].map(|server| Proxy::start(&server.address()));
        let stays = random.usize(0..2);
        let mut load = Load::start(&sides.each_ref().map(Proxy::url), BUDGET, random);
        load.until_some_moment();
        let servers = [&first, &second];
        load.splitting(|load| {
            second.promote();
            sides[1].point_to(&second.address());
            sides[1].cut();
            load.until_all_are_decided_again();
            load.run_for(300, 1000);
            servers[1 - stays].demote_to(servers[stays]);
        });
        sides[1 - stays].point_to(&servers[stays].address());
        let outcome = load.end();
        servers[1 - stays].wait_until_linked();
        (outcome, [first.keys_without_ttl(), second.keys_without_ttl()].concat())
    });
}

/// A server that is out of memory rejects writes: nothing is allowed, and nothing is lost.
#[test]
fn oom() {
    campaign("oom", |flavor, random| {
        let server = Server::start(flavor);
        let mut load = Load::start(&[server.url()], BUDGET, random);
        let maxmemory = |bytes| server.ask::<()>(&["CONFIG", "SET", "maxmemory", bytes]);
        load.until_some_moment();
        maxmemory("1");
        load.run_for(200, 800);
        maxmemory("0");
        let mut outcome = load.end();
        outcome.must(outcome.failed > 0, "the fault is noticed");
        outcome.must(outcome.charged_too_much >= 0, "no charge is lost");
        (outcome, server.keys_without_ttl())
    });
}

/// Garbage is written over keys. It allows nothing. When it expires, the key is new: one burst each time. Garbage that
/// looks like a state costs no more.
#[test]
fn poisoned() {
    campaign("poisoned", |flavor, random| {
        let server = Server::start(flavor);
        let mut load = Load::start(&[server.url()], BUDGET, random);
        load.until_some_moment();
        for round in 0..10 {
            let index = random.usize(0..KEYS);
            let [name] = &names(std::slice::from_ref(&server), &key(index))[..] else {
                continue;
            };
            load.losing_a_burst_of(&[index], || {
                let poison = poison(&server, name, round, random);
                wait_until("the garbage is gone", SOON, || poison.is_gone(&server, name));
            });
            load.until_all_are_decided_again();
            load.run_for(0, 100);
        }
        let mut outcome = load.end();
        outcome.must(outcome.failed > 0, "the fault is noticed");
        let heals = outcome.gap < Duration::from_secs(2);
        outcome.must(heals, "no call renews the garbage");
        (outcome, server.keys_without_ttl())
    });
}

/// The garbage that was written over a key.
enum Poison {
    Text(Vec<u8>),
    OtherType,
}

/// Writes garbage over a key, which expires soon.
fn poison(server: &Server, name: &[u8], round: usize, random: &mut fastrand::Rng) -> Poison {
    const LASTS_MS: &[u8] = b"150";
    let was: Option<Vec<u8>> = server.ask(&[b"GET", name]);
    let mut was = was.unwrap_or_default();
    let text = match round % 5 {
        0 => (0..random.usize(0..200)).map(|_| random.u8(..)).collect(),
        1 => {
            was.truncate(random.usize(0..=was.len()));
            was
        }
        2 => {
            if let Some(byte) = random.choice(&mut was) {
                *byte ^= 1 << random.u8(0..8);
            }
            was
        }
        // A number that is slightly off and not whole: the scripts must reject it.
        3 => {
            if let Some(byte) = was.last_mut() {
                *byte ^= 4;
            }
            was
        }
        _ => {
            let push = b"redis.call('DEL', KEYS[1]); redis.call('RPUSH', KEYS[1], 'x'); \
                         redis.call('PEXPIRE', KEYS[1], ARGV[1])";
            server.ask::<()>(&[b"EVAL", &push[..], b"1", name, LASTS_MS]);
            return Poison::OtherType;
        }
    };
    server.ask::<()>(&[b"SET", name, &text, b"PX", LASTS_MS]);
    Poison::Text(text)
}

impl Poison {
    fn is_gone(&self, server: &Server, name: &[u8]) -> bool {
        match self {
            Self::Text(text) => {
                server.ask::<Option<Vec<u8>>>(&[b"GET", name]).as_ref() != Some(text)
            }
            Self::OtherType => server.ask::<String>(&[b"TYPE", name]) != "list",
        }
    }
}

/// Runs a row for each seed. The row returns its outcome, and the keys without an expiry.
#[expect(clippy::print_stdout, reason = "the lines are the result of the campaign")]
fn campaign(row: &str, run: impl Fn(Flavor, &mut fastrand::Rng) -> (Outcome, Vec<Vec<u8>>)) {
    let asked = std::env::var("TALLYGATE_CHAOS_SEEDS");
    let seeds: u64 = asked.map_or(1, |seeds| seeds.parse().expect("a number of seeds"));
    let mut too_much = Vec::new();
    for seed in 1..=seeds {
        // Each row has its own randomness, and its seeds alternate between Redis and Valkey.
        let of_row = row.bytes().fold(0, |hash: u64, byte| hash.wrapping_mul(31) + u64::from(byte));
        let mut random = fastrand::Rng::with_seed(of_row.wrapping_add(seed));
        let flavor = Flavor::ALL[usize::from(of_row.wrapping_add(seed) % 2 == 0)];
        let (outcome, without_ttl) = run(flavor, &mut random);
        let Outcome { over, gap, slowest, allowed, failed, complaints, .. } = &outcome;
        println!(
            "chaos {row} {seed} over={over} gap_ms={} slowest_ms={} allowed={allowed} \
             failed={failed} on={}",
            gap.as_millis(),
            slowest.as_millis(),
            flavor.name()
        );
        assert!(complaints.is_empty(), "{row} {seed}: not met: {complaints:?} in {outcome:?}");
        assert_eq!(without_ttl, Vec::<Vec<u8>>::new(), "{row} {seed}: keys without an expiry");
        if *over > 0 {
            too_much.push((seed, *over));
        }
    }
    assert!(too_much.is_empty(), "{row}: allowed too much, by seed: {too_much:?}");
}

/// Returns the names of a client's keys on some servers.
fn names(servers: &[Server], client: &str) -> Vec<Vec<u8>> {
    let pattern = format!("*={client}");
    servers.iter().flat_map(|server| server.ask::<Vec<Vec<u8>>>(&["KEYS", &pattern])).collect()
}

/// Returns the slots of the keys, in their order.
fn slots(cluster: &Cluster) -> impl Iterator<Item = u16> {
    (0..KEYS).map(|index| {
        let name = || names(cluster.nodes(), &key(index)).into_iter().next();
        wait_until("the key is there", SOON, || name().is_some());
        cluster.slot_of(name().expect("it is there"))
    })
}

fn address(cluster: &Cluster) -> String {
    let nodes: Vec<String> = cluster.nodes().iter().map(Server::address).collect();
    format!("redis+cluster://{}", nodes.join(","))
}

fn role(server: &Server) -> String {
    server.info("replication").remove("role").expect("every server has a role")
}
