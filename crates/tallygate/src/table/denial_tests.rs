//! Denials from notes, one thread at a time.

use tallygate_core::{Decision, Policy, Ticks};

use super::*;
use crate::client_state::ClientState;
use crate::tiers::ClientRule;

fn table() -> Table<ClientState> {
    Table::new(u128::BITS, 100, WhenFull::EvictLeastUsed)
}

fn rule(limit: Cost) -> ClientRule {
    ClientRule::of(Policy::token_bucket(limit).per(Ticks(100)).build().expect("valid"))
}

fn key(number: u128) -> Fingerprint {
    Fingerprint::from(number << 80)
}

fn check(table: &Table<ClientState>, rule: &ClientRule, key: Fingerprint, now: i64) -> Decision {
    let checked: Result<_, Full> =
        table.check(rule, table.look_up(key), 1, Reading::from(Tick(now)));
    checked.expect("there is a place")
}

/// Returns the decision of the note alone.
fn noted(
    table: &Table<ClientState>,
    rule: &ClientRule,
    key: Fingerprint,
    now: i64,
) -> Option<Decision> {
    table.deny_as_noted(rule, table.look_up(key), 1, Reading::from(Tick(now)))
}

/// Uses up the quota of a key, and has it denied until that is noted.
fn deny(table: &Table<ClientState>, rule: &ClientRule, key: Fingerprint, now: i64) {
    while check(table, rule, key, now).allowed {}
    assert!(!check(table, rule, key, now).allowed);
}

#[test]
fn a_repeated_denial_of_a_client_with_a_tier_writes_nothing() {
    let (table, rule) = (table(), rule(2));
    deny(&table, &rule, key(1), 0);
    let lock = &table.buckets[table.look_up(key(1)).home].lock.0;
    let word = lock.load(Ordering::Relaxed);
    for now in 0..50 {
        let denied = check(&table, &rule, key(1), now);
        assert_eq!(denied.retry_after, Some(Ticks(50 - now.unsigned_abs())));
    }
    assert_eq!(lock.load(Ordering::Relaxed), word, "the lock was not taken");
    assert!(check(&table, &rule, key(1), 50).allowed);
    assert_ne!(lock.load(Ordering::Relaxed), word, "a request is allowed under the lock");
}

#[test]
fn a_denial_from_a_note_is_the_decision_that_the_lock_gives() {
    let (table, rule) = (table(), rule(3));
    deny(&table, &rule, key(1), 7);
    let times = [0, 7, 8, 20, 40];
    let noted = |now| noted(&table, &rule, key(1), now);
    let from_note = times.map(noted);
    assert_eq!(noted(41), None, "one unit was earned");
    let under_lock = times.map(|now| {
        let slot = table.slot_of(key(1));
        let decide = |state: &mut _, at| rule.decide::<Decision>(state, at, 1);
        table.look(&rule, slot, Tick(now), |state, at| {
            Some(counted_from(Tick(now), at, decide(state, at)))
        })
    });
    assert_eq!(from_note, under_lock);
}

#[test]
fn a_note_is_not_used_after_the_state_has_changed() {
    let (table, rule) = (table(), rule(2));
    deny(&table, &rule, key(1), 0);
    let refund = |state: &mut _, now| rule.charge(state, now, -1);
    assert_eq!(table.with(&rule, table.slot_of(key(1)), Tick(0), refund), Ok(0));
    assert!(check(&table, &rule, key(1), 0).allowed, "a unit was refunded");
}

#[test]
fn a_note_is_only_used_for_its_own_client() {
    let (table, rule) = (table(), rule(2));
    let (one, other) = (key(1), key(2));
    assert_eq!(table.look_up(one).home, table.look_up(other).home, "they have one lock");
    assert!(check(&table, &rule, other, 0).allowed);
    deny(&table, &rule, one, 0);
    assert!(check(&table, &rule, other, 0).allowed, "it has used one of two");
}

#[test]
fn a_note_is_only_used_under_its_own_policy() {
    let (table, free, pro) = (table(), rule(2), rule(5));
    deny(&table, &free, key(1), 0);
    assert!(check(&table, &pro, key(1), 0).allowed, "two of five are used");
    deny(&table, &free, key(1), 0);
    assert_eq!(noted(&table, &free, key(1), 0), None, "two policies decide now");
}
