//! Runs the table's own file under every interleaving and with every value that a weak ordering allows.
//!
//! `scripts/loom` runs these. A bucket has one slot here, and keys are at most one bucket away from home.

use loom::sync::Arc;
use loom::thread;
use tallygate_core::{Machine, Policy, Ticks};

use super::*;
use crate::tiers::ClientRule;

fn bucket(limit: u64, window: u64) -> tallygate_core::Bucket {
    let limit = Policy::token_bucket(limit).per(Ticks(window)).limit().expect("valid");
    match *limit.machine() {
        Machine::Bucket(rule) => rule,
        _ => unreachable!("a small bucket"),
    }
}

type Shared = Arc<Table<<tallygate_core::Bucket as Algorithm>::State>>;

fn table(max_keys: usize) -> Shared {
    Arc::new(Table::new(u128::BITS, max_keys, WhenFull::EvictLeastUsed))
}

fn ask(table: &Shared, rule: &tallygate_core::Bucket, key: Fingerprint, now: i64) -> bool {
    check(table, rule, key, now, 1)
}

fn check(
    table: &Shared,
    rule: &tallygate_core::Bucket,
    key: Fingerprint,
    now: i64,
    cost: u64,
) -> bool {
    // A key without a place is denied.
    let checked: Result<bool, Full> =
        table.check(rule, table.look_up(key), cost, Reading::from(Tick(now)));
    checked.unwrap_or(false)
}

/// Sets a key's state to a number of used units at a time.
fn set(table: &Shared, rule: &tallygate_core::Bucket, key: Fingerprint, used: u64, at: i64) {
    let state = rule.with_used(tallygate_core::Used::whole(used), Tick(at));
    let change = |to: &mut _, _| *to = state;
    assert!(table.with(rule, table.slot_of(key), Tick(at), change).is_ok());
}

/// Runs two sequences of (key, time) in two threads. Returns the answers of each.
fn race(
    table: &Shared,
    rule: tallygate_core::Bucket,
    one: &'static [(Fingerprint, i64)],
    other: &'static [(Fingerprint, i64)],
) -> (Vec<bool>, Vec<bool>) {
    let shared = table.clone();
    let run = move |table: &Shared, asks: &[(Fingerprint, i64)]| {
        asks.iter().map(|&(key, now)| ask(table, &rule, key, now)).collect::<Vec<_>>()
    };
    let thread = thread::spawn(move || run(&shared, one));
    let other = run(table, other);
    (thread.join().expect("no panic"), other)
}

const ALICE: Fingerprint = Fingerprint(1 << 80);
const BOB: Fingerprint = Fingerprint(2 << 80);
const FAR: Fingerprint = Fingerprint(u128::MAX);

fn count_allowed(answers: &(Vec<bool>, Vec<bool>)) -> usize {
    answers.0.iter().chain(&answers.1).filter(|allowed| **allowed).count()
}

/// Faults C1, C8.
#[test]
fn two_callers_and_one_token() {
    loom::model(|| {
        let (table, rule) = (table(1), bucket(2, 100));
        assert!(ask(&table, &rule, ALICE, 0));
        let answers = race(&table, rule, &[(ALICE, 1)], &[(ALICE, 1)]);
        assert_eq!(count_allowed(&answers), 1);
    });
}

/// Fault C2.
#[test]
fn two_first_requests_make_one_state() {
    loom::model(|| {
        let (table, rule) = (table(2), bucket(1, 100));
        let answers = race(&table, rule, &[(ALICE, 0)], &[(ALICE, 0)]);
        assert_eq!(count_allowed(&answers), 1);
        assert_eq!(table.usage().keys, 1);
    });
}

/// Alice is fresh at 10 and may be dropped for Bob while she sends another request. In either order, she gets the one
/// token of that time and no more.
///
/// Fault C3.
#[test]
fn eviction_meets_an_update() {
    loom::model(|| {
        let (table, rule) = (table(2), bucket(1, 10));
        assert!(ask(&table, &rule, ALICE, 0));
        let answers = race(&table, rule, &[(ALICE, 10), (ALICE, 10)], &[(BOB, 10)]);
        assert_eq!(answers.0, [true, false]);
        assert_eq!(answers.1, [true]);
    });
}

/// A thread reads the clock before the other thread, and decides after it.
///
/// Fault B4.
#[test]
fn threads_come_out_of_order() {
    loom::model(|| {
        let (table, rule) = (table(1), bucket(1, 10));
        assert!(ask(&table, &rule, ALICE, 0));
        let answers = race(&table, rule, &[(ALICE, 9)], &[(ALICE, 10)]);
        assert!(!answers.0[0], "9 is too early, in whatever order it comes");
        assert!(answers.1[0]);
    });
}

/// The same if the key is dropped at 10 for another key. The time 9 then counts as 10, at which there was a token, and
/// the next token is earned at 20. In every order, there is one token for the three requests.
///
/// Fault B4.
#[test]
fn a_late_thread_after_its_key_was_dropped() {
    loom::model(|| {
        let (table, rule) = (table(2), bucket(1, 10));
        assert!(ask(&table, &rule, ALICE, 0));
        let answers = race(&table, rule, &[(ALICE, 9), (ALICE, 10), (ALICE, 19)], &[(BOB, 10)]);
        assert_eq!(answers.0.iter().filter(|allowed| **allowed).count(), 1);
    });
}

/// A thread read the clock so long before it got the lock that its reading could also come from a clock that was set
/// back. It decides at the time of the last change, and earns nothing twice.
///
/// Fault K2.
#[test]
fn a_thread_that_is_later_than_a_window_earns_nothing() {
    loom::model(|| {
        let (table, rule) = (table(1), bucket(1, 10));
        assert!(ask(&table, &rule, ALICE, 80));
        let answers = race(&table, rule, &[(ALICE, 50), (ALICE, 50)], &[(ALICE, 100)]);
        assert_eq!(
            count_allowed(&answers),
            1,
            "one was earned by 100, in whatever order they come"
        );
        assert!(!ask(&table, &rule, ALICE, 109) && ask(&table, &rule, ALICE, 110));
    });
}

fn ask_in_era(
    table: &Shared,
    rule: &tallygate_core::Bucket,
    key: Fingerprint,
    now: i64,
    era: u32,
) -> bool {
    let decide = |state: &mut _, now| rule.decide::<bool>(state, now, 1);
    let reading = Reading { now: Tick(now), set_backs: era };
    table.with(rule, table.slot_of(key), reading, decide).expect("not full")
}

/// One caller read the clock before it was set back, and another one after that. The state ends in the new era, and the
/// key is not locked out until the clock reaches the old time again.
///
/// Fault B1.
#[test]
fn a_reading_from_before_a_set_back_moves_no_state_ahead() {
    loom::model(|| {
        let (table, rule) = (table(1), bucket(1, 10));
        let shared = table.clone();
        let old = thread::spawn(move || ask_in_era(&shared, &rule, ALICE, 1000, 0));
        let new = ask_in_era(&table, &rule, ALICE, 500, 1);
        let old = old.join().expect("no panic");
        assert!(old ^ new, "there is one for both");
        assert!(!ask_in_era(&table, &rule, ALICE, 509, 1), "what was used stays used");
        assert!(ask_in_era(&table, &rule, ALICE, 510, 1));
    });
}

/// The same while keys are dropped: the time at which a key was dropped before the set-back does not lock a key out
/// after it.
///
/// Fault B1.
#[test]
fn a_key_dropped_before_a_set_back_keeps_no_key_out() {
    loom::model(|| {
        // There is room for all keys, because a full table does not keep a new key that has used the same share as the
        // others.
        let (table, rule) = (table(3), bucket(1, 10));
        assert!(ask_in_era(&table, &rule, ALICE, 900, 0));
        let shared = table.clone();
        let old = thread::spawn(move || ask_in_era(&shared, &rule, BOB, 1000, 0));
        ask_in_era(&table, &rule, FAR, 500, 1);
        old.join().expect("no panic");
        // Alice may have been dropped or not. She is served once, and at most a window later.
        let at_once = ask_in_era(&table, &rule, ALICE, 500, 1);
        assert!(!at_once || !ask_in_era(&table, &rule, ALICE, 509, 1));
        assert!(ask_in_era(&table, &rule, ALICE, 510, 1));
    });
}

/// Two keys of one home, one of which is in the next bucket.
///
/// Fault C2.
#[test]
fn keys_away_from_home_are_found() {
    loom::model(|| {
        let (table, rule) = (table(4), bucket(1, 100));
        assert_eq!(table.slot_of(ALICE).home, table.slot_of(BOB).home);
        let answers = race(&table, rule, &[(ALICE, 0), (ALICE, 0)], &[(BOB, 0), (BOB, 0)]);
        assert_eq!(answers, (vec![true, false], vec![true, false]));
        assert_eq!(table.usage().keys, 2);
    });
}

/// Two keys have neighboring homes and are stored in each other's: no deadlock.
#[test]
fn neighbors_do_not_deadlock() {
    loom::model(|| {
        let (table, rule) = (table(2), bucket(1, 100));
        assert_ne!(table.slot_of(ALICE).home, table.slot_of(FAR).home);
        assert!(ask(&table, &rule, BOB, 0));
        let answers = race(&table, rule, &[(ALICE, 0)], &[(FAR, 0)]);
        // There is one place for both. The second key evicts a key, or is denied while the other thread has locked all
        // buckets within its reach.
        assert!((1..=2).contains(&count_allowed(&answers)), "{} allowed", count_allowed(&answers));
        assert!(table.usage().keys <= 2, "{:?}", table.usage());
    });
}

/// Charges one unit to each of some keys, all or nothing.
fn ask_all(table: &Shared, rule: &tallygate_core::Bucket, keys: &[Fingerprint], now: i64) -> bool {
    let now = Tick(now);
    let mut spots: Vec<_> = keys.iter().map(|key| table.slot_of(*key)).collect();
    let (mut locks, mut found) = loop {
        spots.sort_by_key(|spot| table.lock_order(*spot));
        let mut locks = Locks::default();
        let found: Option<Vec<_>> =
            spots.iter().map(|spot| table.look_for(*spot, &mut locks)).collect();
        if let Some(found) = found {
            break (locks, found);
        }
    };
    let allows = |state: &mut _, now| rule.allows(state, now, 1);
    let agree = found.iter().all(|key| table.read_found(rule, *key, now, &mut locks, allows));
    if agree {
        found.sort_by_key(|key| !key.is_kept());
        for key in found {
            let charge = |state: &mut _, now| rule.try_charge(state, now, 1);
            assert!(table.change_found(rule, key, now, &mut locks, charge));
        }
    }
    agree
}

/// Two decisions over the same two keys, in opposite orders: no deadlock, and the last token of both keys goes to one
/// decision.
///
/// Fault C7.
#[test]
fn several_keys_are_all_or_nothing_and_do_not_deadlock() {
    loom::model(|| {
        let (table, rule) = (table(4), bucket(1, 100));
        let shared = table.clone();
        let other = thread::spawn(move || ask_all(&shared, &rule, &[FAR, ALICE], 0));
        let one = ask_all(&table, &rule, &[ALICE, FAR], 0);
        let other = other.join().expect("no panic");
        assert!(one ^ other, "one of them has both");
        assert!(!ask(&table, &rule, ALICE, 0) && !ask(&table, &rule, FAR, 0));
        assert_eq!(table.usage().keys, 2);
    });
}

/// A decision over two keys of one home runs while another one takes a token of one of the keys: no partial charge.
///
/// Fault C7.
#[test]
fn a_denied_decision_charges_no_key() {
    loom::model(|| {
        let (table, rule) = (table(4), bucket(1, 100));
        let shared = table.clone();
        let other = thread::spawn(move || ask(&shared, &rule, BOB, 0));
        let both = ask_all(&table, &rule, &[ALICE, BOB], 0);
        let bob = other.join().expect("no panic");
        assert!(both ^ bob);
        assert_eq!(ask(&table, &rule, ALICE, 0), bob, "alice was charged with bob, or not at all");
    });
}

/// The same if one of the keys is away from home, in a bucket that is the home of another key.
///
/// Fault C7.
#[test]
fn keys_away_from_home_do_not_deadlock() {
    const NEXT: Fingerprint = Fingerprint(u128::MAX / 5);
    loom::model(|| {
        let (table, rule) = (table(4), bucket(1, 100));
        assert_eq!(table.slot_of(NEXT).home, table.slot_of(BOB).home + 1);
        assert!(ask(&table, &rule, ALICE, 0));
        let shared = table.clone();
        let other = thread::spawn(move || ask_all(&shared, &rule, &[NEXT, BOB], 0));
        let one = ask_all(&table, &rule, &[BOB, FAR], 0);
        let other = other.join().expect("no panic");
        assert!(one ^ other, "one of them has bob's");
        assert_eq!(ask(&table, &rule, FAR, 0), other);
        assert_eq!(ask(&table, &rule, NEXT, 0), one);
    });
}

/// A table of two homes that can become four.
fn growing() -> Shared {
    Arc::new(Table::of_homes(2, 1, u128::BITS, 4, WhenFull::EvictLeastUsed))
}

/// A key of the first home that moves when the home is split.
const MOVER: Fingerprint = Fingerprint((1 << 80) | (1 << 69));

/// Fault K10.
#[test]
fn a_key_is_found_while_its_home_is_split() {
    loom::model(|| {
        let (table, rule) = (growing(), bucket(1, 100));
        assert_eq!(table.home(table.slot_of(MOVER), table.shape()), 0);
        assert!(ask(&table, &rule, MOVER, 0));
        let shared = table.clone();
        let split = thread::spawn(move || assert!(shared.split_next()));
        assert!(!ask(&table, &rule, MOVER, 0), "it has used its one token");
        split.join().expect("no panic");
        assert_eq!(table.home(table.slot_of(MOVER), table.shape()), 2);
        assert!(!ask(&table, &rule, MOVER, 0), "it moved with its state");
        assert_eq!(table.usage().keys, 1);
    });
}

/// Two callers of a new key, one of which computed its home before the split.
///
/// Fault K10.
#[test]
fn a_new_key_is_made_once_while_its_home_is_split() {
    loom::model(|| {
        let (table, rule) = (growing(), bucket(1, 100));
        let other = table.clone();
        let asked = thread::spawn(move || ask(&other, &rule, MOVER, 0));
        assert!(table.split_next());
        let here = ask(&table, &rule, MOVER, 0);
        let there = asked.join().expect("no panic");
        assert!(here ^ there, "one of them has the token");
        assert_eq!(table.usage().keys, 1);
    });
}

/// A key that is away from home moves as well, and the key that stays is still found.
///
/// Fault K10.
#[test]
fn keys_away_from_home_are_found_while_it_is_split() {
    loom::model(|| {
        let (table, rule) = (growing(), bucket(1, 100));
        assert!(ask(&table, &rule, ALICE, 0) && ask(&table, &rule, MOVER, 0));
        // Two keys in two homes exceed the fill level, so the table has grown.
        assert_eq!(table.shape().homes(), 4);

        let table = growing();
        let place = |key| {
            let (index, mut home) = table.lock_home(table.slot_of(key));
            let state = rule.with_used(tallygate_core::Used::whole(1), Tick(0));
            let reading = Reading::from(Tick(0));
            let home = (index, &mut home);
            drop(table.place(&rule, table.slot_of(key), home, reading, state, (None, true)));
        };
        place(ALICE);
        place(MOVER);
        assert_eq!(table.buckets[0].spilled(Ordering::Relaxed), 1);
        let shared = table.clone();
        let split = thread::spawn(move || assert!(shared.split_next()));
        assert!(!ask(&table, &rule, MOVER, 0) && !ask(&table, &rule, ALICE, 0));
        split.join().expect("no panic");
        assert!(!ask(&table, &rule, MOVER, 0) && !ask(&table, &rule, ALICE, 0));
        assert_eq!(table.buckets[0].spilled(Ordering::Relaxed), 0);
        assert_eq!(table.usage().keys, 2);
    });
}

/// A decision on several keys starts again if a home is split while it takes the locks: no deadlock, and no key is
/// charged twice.
///
/// Fault K10.
#[test]
fn several_keys_are_decided_while_a_home_is_split() {
    loom::model(|| {
        let (table, rule) = (growing(), bucket(1, 100));
        let shared = table.clone();
        let split = thread::spawn(move || assert!(shared.split_next()));
        assert!(ask_all(&table, &rule, &[FAR, MOVER], 0));
        split.join().expect("no panic");
        assert!(!ask(&table, &rule, MOVER, 0) && !ask(&table, &rule, FAR, 0));
        assert_eq!(table.usage().keys, 2);
    });
}

/// A denial without the lock reads the state while another thread changes it. Both the old and the new state allow the
/// request, but a mixture of them does not.
///
/// Fault C1.
#[test]
fn a_denial_without_the_lock_reads_no_mixture_of_two_states() {
    // In either order of writing the two words of a state, one of the changes has a mixture that denies.
    for (before, after) in [((2, 0), (1, 20)), ((1, 20), (2, 0))] {
        loom::model(move || {
            let (table, rule) = (table(2), bucket(2, 20));
            set(&table, &rule, ALICE, before.0, before.1);
            assert!(
                !check(&table, &rule, ALICE, before.1, 2),
                "denied, so the next is tried without the lock"
            );
            let shared = table.clone();
            let change = thread::spawn(move || set(&shared, &rule, ALICE, after.0, after.1));
            assert!(ask(&table, &rule, ALICE, 20), "each of the states has room for one at 20");
            change.join().expect("no panic");
        });
    }
}

/// The same while the slot gets another key: its state is not mistaken for that of the previous key.
///
/// Fault C1.
#[test]
fn a_denial_without_the_lock_reads_the_state_of_its_own_key() {
    loom::model(|| {
        let (table, rule) = (table(4), bucket(1, 10));
        assert_eq!(table.slot_of(ALICE).home, table.slot_of(BOB).home);
        assert!(ask(&table, &rule, ALICE, 0) && !ask(&table, &rule, ALICE, 0));
        // Alice is fresh at 100, and Bob may take her slot.
        let answers = race(&table, rule, &[(ALICE, 100)], &[(BOB, 100)]);
        assert_eq!(count_allowed(&answers), 2);
    });
}

/// Denials without the lock, while another thread charges: no request is allowed twice, and none is denied too long.
///
/// Fault C1.
#[test]
fn denials_without_the_lock_and_a_charge() {
    loom::model(|| {
        let (table, rule) = (table(1), bucket(1, 10));
        assert!(ask(&table, &rule, ALICE, 0) && !ask(&table, &rule, ALICE, 0));
        let answers = race(&table, rule, &[(ALICE, 5), (ALICE, 10)], &[(ALICE, 10)]);
        assert!(!answers.0[0], "5 is too early");
        assert_eq!(count_allowed(&answers), 1, "one of those at 10 has the token");
        assert!(!ask(&table, &rule, ALICE, 19) && ask(&table, &rule, ALICE, 20));
    });
}

/// Two clients of different homes share the only note. While the other client is noted, a client is not denied by the
/// state of the other.
///
/// Fault C1.
#[test]
fn a_denial_from_a_note_reads_no_mixture_of_two_notes() {
    loom::model(|| {
        let policy = Policy::token_bucket(2).per(Ticks(20)).build().expect("valid");
        let rule = ClientRule::of(policy);
        let table = Arc::new(Table::new(u128::BITS, 2, WhenFull::EvictLeastUsed));
        let ask = |table: &Table<_>, rule: &ClientRule, key, now, cost| {
            let reading = Reading::from(Tick(now));
            table.check::<_, bool, Full>(rule, table.look_up(key), cost, reading) == Ok(true)
        };
        assert_ne!(table.slot_of(ALICE).home, table.slot_of(FAR).home);
        assert!(ask(&table, &rule, FAR, 20, 2) && !ask(&table, &rule, FAR, 20, 1));
        assert!(ask(&table, &rule, ALICE, 0, 2));
        assert!(!ask(&table, &rule, ALICE, 0, 1) && !ask(&table, &rule, ALICE, 0, 1), "noted");
        let (shared, same) = (table.clone(), rule.clone());
        let other = thread::spawn(move || ask(&shared, &same, FAR, 20, 1));
        assert!(ask(&table, &rule, ALICE, 20, 1), "she has earned all back");
        assert!(!other.join().expect("no panic"));
    });
}

/// A client is charged and denied by threads that use its note: no request is allowed twice, and none is denied too long.
///
/// Fault C1.
#[test]
fn denials_from_a_note_and_a_charge() {
    loom::model(|| {
        let policy = Policy::token_bucket(1).per(Ticks(10)).build().expect("valid");
        let rule = ClientRule::of(policy);
        let table = Arc::new(Table::new(u128::BITS, 1, WhenFull::EvictLeastUsed));
        let ask = |table: &Table<_>, rule: &ClientRule, now| {
            let reading = Reading::from(Tick(now));
            table.check::<_, bool, Full>(rule, table.look_up(ALICE), 1, reading) == Ok(true)
        };
        assert!(ask(&table, &rule, 0));
        assert!(!ask(&table, &rule, 0) && !ask(&table, &rule, 0), "noted");
        let (shared, same) = (table.clone(), rule.clone());
        let other = thread::spawn(move || ask(&shared, &same, 10));
        assert!(!ask(&table, &rule, 5), "5 is too early");
        let here = ask(&table, &rule, 10);
        assert!(here ^ other.join().expect("no panic"), "one of those at 10 has the token");
        assert!(!ask(&table, &rule, 19) && ask(&table, &rule, 20));
    });
}

/// States that are not plain are only read under the lock.
///
/// Fault C1.
#[test]
fn two_callers_and_one_token_of_a_wide_bucket() {
    loom::model(|| {
        let limit = Policy::token_bucket(1 << 40).per(Ticks((1 << 40) - 1)).limit().expect("valid");
        let Machine::WideBucket(rule) = *limit.machine() else { unreachable!("a wide bucket") };
        let table = Arc::new(Table::new(u128::BITS, 1, WhenFull::EvictLeastUsed));
        let all = move |table: &Table<_>| {
            let reading = Reading::from(Tick(0));
            table.check::<_, bool, Full>(&rule, table.look_up(ALICE), 1 << 40, reading) == Ok(true)
        };
        let shared = table.clone();
        let other = thread::spawn(move || all(&shared));
        let one = all(&table);
        assert!(one ^ other.join().expect("no panic"), "one of them has all");
    });
}
