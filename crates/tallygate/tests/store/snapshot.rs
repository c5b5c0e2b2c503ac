//! The usage of clients survives the process in every field, and a damaged snapshot is rejected.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::collection::vec;
use proptest::prelude::*;
use tallygate::clock::ManualClock;
use tallygate::policy::{Numbers, Penalty};
use tallygate::snapshot::{SnapshotError, SnapshotReader, SnapshotWriter, save_snapshot};
use tallygate::store::{Capacity, MemoryStore, PolicyStore, WhenFull};
use tallygate::tiers::{Access, ClientRule};
use tallygate::{Ask, Cost, Decision, Limit, Policy, RateLimiter, Tick, Ticks, Tiers};
use tallygate_testkit::{any_limit, cases, costs, times};

type Tiered<'a> = RateLimiter<Tiers, MemoryStore<ClientRule, &'a ManualClock>>;
type Plain<'a> = RateLimiter<Policy, PolicyStore<&'a ManualClock>>;

const KEYS: [&str; 3] = ["alice", "bob", "carol"];

fn plain<'a>(policy: &Policy, clock: &'a ManualClock) -> Plain<'a> {
    let store = PolicyStore::new(policy, Capacity::of(100), clock);
    RateLimiter::with_store(policy.clone(), store)
}

fn tiered(tiers: Tiers, clock: &ManualClock) -> Tiered<'_> {
    RateLimiter::in_store("api", tiers, MemoryStore::new(Capacity::of(100), clock))
}

fn save_plain(limiter: &Plain<'_>) -> Vec<u8> {
    let mut snapshot = SnapshotWriter::new(Vec::new()).expect("memory");
    limiter.store().save(limiter.rules(), "api", &mut snapshot).expect("memory");
    snapshot.finish().expect("memory")
}

fn restore_plain<'a>(
    bytes: &[u8],
    policy: &Policy,
    keys: usize,
    clock: &'a ManualClock,
) -> Plain<'a> {
    let mut snapshot = SnapshotReader::new(bytes).expect("a snapshot");
    let mut section = snapshot.next_section().expect("whole").expect("a store");
    let store = PolicyStore::restored(policy, Capacity::of(keys), clock, &mut section);
    let limiter = RateLimiter::with_store(policy.clone(), store.expect("whole"));
    assert!(snapshot.next_section().expect("whole").is_none());
    limiter
}

fn save_tiered(limiter: &Tiered<'_>) -> Vec<u8> {
    let mut snapshot = SnapshotWriter::new(Vec::new()).expect("memory");
    let saved = limiter.store().save(limiter.name(), &limiter.overrides(), &mut snapshot);
    saved.expect("memory");
    snapshot.finish().expect("memory")
}

fn restore_tiered<'a>(
    bytes: &[u8],
    tiers: Tiers,
    keys: usize,
    clock: &'a ManualClock,
) -> Result<Tiered<'a>, SnapshotError> {
    let mut snapshot = SnapshotReader::new(bytes)?;
    let mut section = snapshot.next_section()?.expect("a store");
    let store = MemoryStore::restored(Capacity::of(keys), clock, &mut section, Arc::new)?;
    let limiter = RateLimiter::in_store(section.name(), tiers, store);
    for (key, set) in section.overrides() {
        limiter.set_override(key, set.access.clone(), set.until);
    }
    assert!(snapshot.next_section()?.is_none());
    Ok(limiter)
}

/// Builds the same limit again from its numbers.
fn builder(limit: &Limit, name: &str, options: u8) -> tallygate::policy::LimitBuilder {
    let Numbers { kind, limit, window, burst, anchor, .. } = *limit.numbers();
    let mut builder = Policy::of(kind, limit).per(window).anchor(anchor).named(name);
    if kind.is_bucket() {
        builder = builder.burst(burst);
    }
    match options {
        1 => builder.shadow(),
        2 => builder.penalty(Penalty::lasting(Ticks(7)).after(2)),
        _ => builder,
    }
}

/// A policy of one to three limits, with or without options.
fn any_policy() -> impl Strategy<Value = (Policy, Limit)> {
    vec((any_limit(), 0..4_u8), 1..=3).prop_map(|limits| {
        let builders = limits.iter().zip(["one", "two", "three"]);
        let builders = builders.map(|((limit, options), name)| builder(limit, name, *options));
        (Policy::all_of("api", builders).expect("valid"), limits[0].0.clone())
    })
}

/// Requests: the number of the client, the cost and the time.
type Asks = Vec<(usize, Cost, Tick)>;

fn history(limit: &Limit, back: bool) -> impl Strategy<Value = (Asks, usize)> + use<> {
    let asks = (times(limit, 24, back), vec((0..KEYS.len(), costs(limit)), 24));
    let asks = asks.prop_map(|(times, who)| {
        let asks = times.into_iter().zip(who);
        asks.map(|(now, (key, cost))| (key, cost, now)).collect::<Vec<_>>()
    });
    asks.prop_flat_map(|asks| {
        let cut = 0..=asks.len();
        (Just(asks), cut)
    })
}

fn any_history(back: bool) -> impl Strategy<Value = (Policy, Asks, usize)> {
    any_policy().prop_flat_map(move |(policy, limit)| {
        (Just(policy), history(&limit, back)).prop_map(|(policy, (asks, cut))| (policy, asks, cut))
    })
}

fn ask(limiter: &Plain<'_>, (key, cost, now): (usize, Cost, Tick)) -> Decision {
    limiter.check(Ask::new(KEYS[key]).cost(cost).at(now)).expect("there is room")
}

proptest! {
    #![proptest_config(cases(400))]

    /// A restored limiter decides as the original one in every field.
    #[test]
    fn the_restored_keys_of_a_policy_decide_as_the_original_ones((policy, asks, cut) in any_history(true)) {
        // At this time nothing is fresh yet: the history may go back.
        let clock = ManualClock::new(Tick(i64::MIN));
        let kept = plain(&policy, &clock);
        for &one in &asks[..cut] {
            let _ = ask(&kept, one);
        }
        let restored = restore_plain(&save_plain(&kept), &policy, 100, &clock);
        for &one in &asks[cut..] {
            prop_assert_eq!(ask(&restored, one), ask(&kept, one));
        }
    }

    /// The same at the time of the restart, when fresh keys are dropped, and with tiers and overrides.
    #[test]
    fn restored_tiers_and_overrides_decide_as_the_original_ones(
        (base, asks, cut) in any_history(false),
        (pro, _) in any_policy(),
        (own, _) in any_policy(),
        tiers in vec(any::<bool>(), 24),
        until in proptest::option::of(any::<i64>()),
    ) {
        let clock = ManualClock::new(Tick(i64::MIN));
        let rules = || Tiers::new(base.clone()).tier("pro", pro.clone());
        let ask = |limiter: &Tiered<'_>, place: usize| {
            let (key, cost, now) = asks[place];
            let decision = match tiers[place] {
                true => limiter.check(Ask::new(KEYS[key]).cost(cost).at(now).tier("pro")),
                false => limiter.check(Ask::new(KEYS[key]).cost(cost).at(now)),
            };
            decision.expect("there is room")
        };
        let kept = tiered(rules(), &clock);
        kept.set_override("bob", own, until.map(Tick));
        for place in 0..cut {
            let _ = ask(&kept, place);
        }
        let bytes = save_tiered(&kept);
        clock.set(if cut > 0 { asks[cut - 1].2 } else { Tick(i64::MIN) });
        let restored = restore_tiered(&bytes, rules(), 100, &clock).expect("whole");
        for place in cut..asks.len() {
            prop_assert_eq!(ask(&restored, place), ask(&kept, place));
        }
    }

    /// A policy change between shutdown and startup has the same effect as a change while the limiter is in use.
    #[test]
    fn a_changed_policy_carries_over_as_a_live_change_does(
        (old, asks, cut) in any_history(false),
        (new, _) in any_policy(),
    ) {
        let clock = ManualClock::new(Tick(i64::MIN));
        let kept = tiered(Tiers::new(old), &clock);
        let ask = |limiter: &Tiered<'_>, (key, cost, now): (usize, Cost, Tick)| {
            limiter.check(Ask::new(KEYS[key]).cost(cost).at(now)).expect("there is room")
        };
        for &one in &asks[..cut] {
            let _ = ask(&kept, one);
        }
        let bytes = save_tiered(&kept);
        kept.replace(&Tiers::new(new.clone()));
        let restored = restore_tiered(&bytes, Tiers::new(new), 100, &clock).expect("whole");
        for &one in &asks[cut..] {
            prop_assert_eq!(ask(&restored, one), ask(&kept, one));
        }
    }
}

#[test]
fn a_store_of_one_policy_keeps_what_was_used_under_another() {
    let clock = ManualClock::new(Tick(0));
    let old = Policy::token_bucket(10).per(Ticks(1_000)).build().expect("valid");
    let kept = plain(&old, &clock);
    let _ = kept.check(Ask::new("alice").cost(10)).expect("there is room");
    let bytes = save_plain(&kept);
    for new in [
        Policy::sliding_window_log(12).per(Ticks(500)).build(),
        Policy::fixed_window(12).per(Ticks(500)).penalty(Penalty::lasting(Ticks(9))).build(),
        Policy::gcra(12).per(Ticks(1 << 60)).build(),
    ] {
        let restored = restore_plain(&bytes, &new.expect("valid"), 100, &clock);
        assert_eq!(restored.check("alice").expect("there is room").remaining, 1);
        assert_eq!(restored.check("bob").expect("there is room").remaining, 11);
    }
}

/// The home of a key follows from its hash: a table of another size finds every key where it belongs.
#[test]
fn a_store_of_another_size_keeps_every_client() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(1).per_hour().build().expect("valid");
    let first = plain_of(&policy, 2_000, &clock);
    let keys: Vec<_> = (0..2_000).map(|key| format!("client-{key}")).collect();
    for key in &keys {
        assert!(first.is_allowed(key).expect("there is room"));
    }
    let mut bytes = save_plain(&first);
    // Several limiters one after the other: each one restores a snapshot, and saves it for the next.
    for size in [2_000, 500_000, 2_001, 100_000, 2_000] {
        let restored = restore_plain(&bytes, &policy, size, &clock);
        assert_eq!(restored.store().usage().keys, keys.len());
        let allowed = keys.iter().filter(|key| restored.is_allowed(key).expect("room"));
        assert_eq!(allowed.count(), 0, "in a store for {size}");
        assert!(restored.is_allowed("another").expect("there is room") || size == 2_000);
        bytes = save_plain(&restore_plain(&bytes, &policy, size, &clock));
    }
    let small = restore_plain(&bytes, &policy, 500, &clock);
    let usage = small.store().usage();
    assert_eq!((usage.keys, usage.evicted), (500, 1_500), "as many as there is room for");
}

fn plain_of<'a>(policy: &Policy, keys: usize, clock: &'a ManualClock) -> Plain<'a> {
    let store = PolicyStore::new(policy, Capacity::of(keys), clock);
    RateLimiter::with_store(policy.clone(), store)
}

#[test]
fn restoring_into_a_smaller_store_drops_the_least_used_keys() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(100).per_hour().build().expect("valid");
    let first = plain_of(&policy, 10_000, &clock);
    for key in 0..9_000 {
        let _ = first.check(&format!("idle-{key}")).expect("there is room");
    }
    for key in 0..100 {
        let _ = first.check(Ask::new(&format!("greedy-{key}")).cost(100)).expect("there is room");
    }
    let small = restore_plain(&save_plain(&first), &policy, 1_000, &clock);
    let remembered =
        (0..100).filter(|key| !small.is_allowed(&format!("greedy-{key}")).expect("room"));
    assert_eq!(remembered.count(), 100);
}

/// A store that rejects new keys when it is full keeps all its keys across a restart.
#[test]
fn a_full_store_that_rejects_new_keys_is_restored_completely() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(1).per_hour().build().expect("valid");
    let capacity = Capacity::of(50).when_full(WhenFull::RejectNew);
    let first = PolicyStore::new(&policy, capacity, &clock);
    let first = RateLimiter::with_store(policy.clone(), first);
    for key in 0..50 {
        assert!(first.is_allowed(&format!("client-{key}")).expect("there is room"));
    }
    let mut snapshot = SnapshotWriter::new(Vec::new()).expect("memory");
    assert_eq!(first.store().save(&policy, "api", &mut snapshot).expect("memory"), 50);
    let bytes = snapshot.finish().expect("memory");
    let mut snapshot = SnapshotReader::new(&bytes[..]).expect("a snapshot");
    let mut section = snapshot.next_section().expect("whole").expect("a store");
    let store = PolicyStore::restored(&policy, capacity, &clock, &mut section).expect("whole");
    let restored = RateLimiter::with_store(policy, store);
    assert_eq!(restored.store().usage().keys, 50);
    for key in 0..50 {
        assert!(!restored.is_allowed(&format!("client-{key}")).expect("it is known"));
    }
}

/// Returns a snapshot of two stores with everything that a snapshot can contain.
fn small_snapshot() -> Vec<u8> {
    let clock = ManualClock::new(Tick(0));
    let free = Policy::token_bucket(3).per(Ticks(1_000)).build().expect("valid");
    let pro = Policy::all_of(
        "pro",
        [
            Policy::sliding_window_log(5).per(Ticks(1_000)).named("log"),
            Policy::fixed_window(9).per(Ticks(1_000)).penalty(Penalty::lasting(Ticks(70))),
        ],
    );
    let limiter = tiered(Tiers::new(free.clone()).tier("pro", pro.expect("valid")), &clock);
    let _ = limiter.check("alice").expect("there is room");
    let _ = limiter.check(Ask::new("alice").tier("pro")).expect("there is room");
    limiter.set_override("bob", Access::Blocked, Some(Tick(500)));
    limiter.set_override("carol", free.clone(), None);
    let plain = plain(&free, &clock);
    let _ = plain.check("alice").expect("there is room");
    let mut snapshot = SnapshotWriter::new(Vec::new()).expect("memory");
    limiter.store().save("api", &limiter.overrides(), &mut snapshot).expect("memory");
    plain.store().save(&free, "plain", &mut snapshot).expect("memory");
    snapshot.finish().expect("memory")
}

/// Restores all of it.
fn read(bytes: &[u8]) -> Result<usize, SnapshotError> {
    let clock = ManualClock::new(Tick(0));
    let mut snapshot = SnapshotReader::new(bytes)?;
    let mut keys = 0;
    while let Some(mut section) = snapshot.next_section()? {
        let store = MemoryStore::restored(Capacity::of(10), &clock, &mut section, Arc::new)?;
        keys += store.usage().keys;
    }
    Ok(keys)
}

/// Skips all of it.
fn read_all(bytes: &[u8]) -> Result<(), SnapshotError> {
    let mut snapshot = SnapshotReader::new(bytes)?;
    while snapshot.next_section()?.is_some() {}
    Ok(())
}

#[test]
fn every_truncation_and_every_flipped_bit_is_rejected() {
    let whole = small_snapshot();
    assert_eq!(read(&whole).expect("whole"), 2);
    read_all(&whole).expect("whole");
    for length in 0..whole.len() {
        let cut = &whole[..length];
        assert!(matches!(read(cut), Err(SnapshotError::Truncated { .. })), "cut to {length}");
        assert!(matches!(read_all(cut), Err(SnapshotError::Truncated { .. })), "cut to {length}");
    }
    for bit in 0..whole.len() * 8 {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(read(&flipped).is_err(), "bit {bit}");
        assert!(read_all(&flipped).is_err(), "bit {bit}");
    }
    let longer = [&whole[..], &[0]].concat();
    assert!(matches!(read(&longer), Err(SnapshotError::Trailing { .. })));
    let twice = [&whole[..], &whole[..]].concat();
    assert!(matches!(read(&twice), Err(SnapshotError::Trailing { .. })));
}

#[test]
fn a_snapshot_error_says_what_was_found_where_and_what_to_do() {
    let whole = small_snapshot();
    let says = |bytes: &[u8]| read(bytes).expect_err("rejected").to_string();
    assert_eq!(
        says(&whole[..20]),
        "the snapshot is incomplete: it ends after 20 bytes; use a complete copy, or move it away to start \
         with an empty store"
    );
    let mut flipped = whole.clone();
    flipped[100] ^= 1;
    assert_eq!(
        says(&flipped),
        "the snapshot is damaged: the checksum of the block at byte 13 is wrong; use a complete copy, or \
         move it away to start with an empty store"
    );
    assert_eq!(
        says(b"[policies.api]\n"),
        "the file is not a snapshot: it begins with \"[policies.api\", expected \"tallygate\"; name \
         another file, or move it away to start with an empty store"
    );
}

/// The name of the format and its version.
const HEAD_BYTES: usize = 9 + 4;

/// Blocks that are valid by themselves, but in the wrong places.
#[test]
fn a_snapshot_with_a_block_left_out_is_rejected() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(9).per_hour().build().expect("valid");
    let limiter = plain_of(&policy, 20_000, &clock);
    for key in 0..10_000 {
        let _ = limiter.check(&format!("client-{key}")).expect("there is room");
    }
    let whole = save_plain(&limiter);
    let block = |at: usize| {
        let length = u32::from_le_bytes(whole[at..at + 4].try_into().expect("four"));
        at..at + 4 + usize::try_from(length).expect("small") + 8
    };
    let first = block(HEAD_BYTES);
    let second = block(first.end);
    assert!(second.len() > 60_000 && whole.len() > second.end + 60_000, "several blocks");
    let left_out = [&whole[..second.start], &whole[second.end..]].concat();
    let swapped =
        [&whole[..HEAD_BYTES], &whole[second.clone()], &whole[first], &whole[second.end..]]
            .concat();
    for bytes in [left_out, swapped] {
        assert!(matches!(read_all(&bytes), Err(SnapshotError::Damaged { .. })));
    }
}

/// Keys that are not used during the save are saved unchanged, whatever happens to other keys meanwhile.
#[test]
fn a_snapshot_under_load_has_every_client() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(1).per_hour().build().expect("valid");
    let limiter = plain_of(&policy, 50_000, &clock);
    for key in 0..10_000 {
        let _ = limiter.check(&format!("greedy-{key}")).expect("there is room");
    }
    let is_over = AtomicBool::new(false);
    let bytes = std::thread::scope(|scope| {
        for thread in 0..2 {
            let (limiter, is_over) = (&limiter, &is_over);
            scope.spawn(move || {
                for key in (0..20_000).cycle() {
                    let _ =
                        limiter.check(&format!("other-{thread}-{}", key % 10_000)).expect("room");
                    let _ = limiter.check(&format!("greedy-{}", key % 10_000)).expect("room");
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        let bytes: Vec<_> = (0..5).map(|_| save_plain(&limiter)).collect();
        is_over.store(true, Ordering::Relaxed);
        bytes
    });
    for bytes in bytes {
        let restored = restore_plain(&bytes, &policy, 50_000, &clock);
        for key in 0..10_000 {
            assert!(!restored.is_allowed(&format!("greedy-{key}")).expect("room"), "{key}");
        }
    }
}

/// Keys come out of a snapshot in the order of the old table's buckets, and the new table grows as they come.
#[test]
fn a_restored_table_loses_no_key_while_it_grows() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(1).per_hour().build().expect("valid");
    for keys in [1_000, 4_500, 9_000, 15_000, 20_000, 25_000, 30_000, 36_000, 48_000] {
        let limiter = plain_of(&policy, 50_000, &clock);
        for key in 0..keys {
            let _ = limiter.check(&format!("key-{key}")).expect("there is room");
        }
        let restored = restore_plain(&save_plain(&limiter), &policy, 50_000, &clock);
        assert_eq!(restored.store().usage().evicted, 0, "of {keys} keys");
        for key in 0..keys {
            assert!(!restored.is_allowed(&format!("key-{key}")).expect("room"), "{key} of {keys}");
        }
    }
}

/// A key of a snapshot that would be the first to be evicted evicts no other key.
///
/// Fault J6.
#[test]
fn a_smaller_store_keeps_the_clients_that_had_used_up_their_quota() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(100).per_day().build().expect("the policy is valid");
    let sizes = [(100_000, 2_000, 10_000), (100_000, 4_000, 5_000), (20_000, 90, 100)];
    // The others have used little, half or most of their quota, and before the clients that are denied.
    for ((keys, debtors, smaller), used) in
        sizes.into_iter().flat_map(|sizes| [1, 50, 90].map(|used| (sizes, used)))
    {
        let limiter = plain_of(&policy, keys, &clock);
        for key in (0..keys).rev() {
            let cost = if key < debtors { 100 } else { used };
            let ask = format!("client-{key}");
            assert!(limiter.is_allowed(Ask::new(&ask).cost(cost)).expect("the store has room"));
            clock.advance(Ticks(1));
        }
        let restored = restore_plain(&save_plain(&limiter), &policy, smaller, &clock);
        let still_denied = (0..debtors)
            .filter(|key| {
                let peek = restored.peek(&format!("client-{key}"));
                !peek.expect("a peek needs no room").allowed
            })
            .count();
        assert!(
            still_denied * 1000 >= debtors * 999,
            "{still_denied} of {debtors} clients are still denied in a store of {smaller} keys \
             whose other clients had used {used} of 100"
        );
    }
}

/// Saving does not make memory resident that was never used.
#[cfg(target_os = "linux")]
#[test]
fn saving_takes_no_memory_that_the_keys_do_not() {
    let resident_kb = || {
        let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
        let line = status.lines().find(|line| line.starts_with("RssAnon:")).expect("a line");
        line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).expect("a number")
    };
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(9).per_hour().build().expect("valid");
    let limiter = plain_of(&policy, 20_000_000, &clock);
    let _ = limiter.check("alice").expect("there is room");
    let before = resident_kb();
    let bytes = save_plain(&limiter);
    let after = resident_kb();
    assert!(bytes.len() < 1_000);
    assert!(after < before + 20_000, "{before} kB, then {after} kB, of a table for 860 000 kB");
}

#[test]
fn a_failed_write_keeps_the_previous_file() {
    let folder = std::env::temp_dir().join(format!("tallygate-snapshot-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join("clients");
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(1).per_hour().build().expect("valid");
    let limiter = plain(&policy, &clock);
    let _ = limiter.check("alice").expect("there is room");
    let save = |limiter: &Plain<'_>| {
        save_snapshot(&path, |to| limiter.store().save(&policy, "api", to).map(|_| ()))
    };
    // A file that a killed process left behind does no harm.
    std::fs::write(folder.join("clients.new"), "half a snapsh").expect("written");
    let bytes = save(&limiter).expect("saved");
    assert_eq!(bytes, std::fs::metadata(&path).expect("it is there").len());
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = std::fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "it has the secret of the hashes");
    }
    let _ = limiter.check("bob").expect("there is room");
    let failed = save_snapshot(&path, |to| {
        limiter.store().save(&policy, "api", to)?;
        Err(std::io::Error::other("the disk is full"))
    });
    assert_eq!(failed.expect_err("it failed").to_string(), "the disk is full");
    let whole = std::fs::read(&path).expect("it is there");
    assert_eq!(read(&whole).expect("whole"), 1, "alice, without bob");
    assert_eq!(std::fs::read_dir(&folder).expect("a folder").count(), 1, "nothing else is left");
    std::fs::remove_dir_all(&folder).expect("removed");
}

/// Opening a named pipe would block the start of a server.
#[test]
fn only_a_regular_file_is_opened_as_a_snapshot() {
    let Err(error) = SnapshotReader::open(std::env::temp_dir()) else {
        panic!("a folder is no snapshot");
    };
    let message = error.to_string();
    assert!(message.contains("it is not a regular file; use the path of a file"), "{message}");
}

/// Two processes use the same file by mistake: one gets an error, and does not damage the file of the other.
#[cfg(unix)]
#[test]
fn a_snapshot_that_another_process_writes_to_the_same_path_is_kept() {
    let folder = std::env::temp_dir().join(format!("tallygate-snapshots-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let (path, beside) = (folder.join("clients"), folder.join("clients.new"));
    for is_failing in [false, true] {
        let saved = save_snapshot(&path, |_| {
            std::fs::remove_file(&beside)?;
            std::fs::write(&beside, "of another process")?;
            if is_failing { Err(std::io::Error::other("the disk is full")) } else { Ok(()) }
        });
        let message = saved.expect_err("it fails").to_string();
        assert_eq!(message.starts_with("another process"), !is_failing, "{message}");
        let left = std::fs::read_to_string(&beside).expect("it is there");
        assert_eq!(left, "of another process");
    }
    std::fs::remove_dir_all(&folder).expect("removed");
}
