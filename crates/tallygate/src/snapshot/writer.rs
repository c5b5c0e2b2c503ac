//! Writes snapshots.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;

use tallygate_core::{Algorithm as _, LimitRecord, Policy};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::allowance::Allowance;
use crate::hash::KeyHasher;
use crate::table::Table;
use crate::tiers::{Access, Override};

use super::{
    BLOCK_BYTES, BLOCKED, END, KEY, LIMITED, Overrides, POLICY, SECTION, UNLIMITED, VERSION, head,
};

/// Writes a snapshot.
///
/// Add stores with [`MemoryStore::save`](crate::store::MemoryStore::save) or
/// [`PolicyStore::save`](crate::store::PolicyStore::save). [`save_snapshot`](crate::snapshot::save_snapshot) writes a snapshot
/// to a file.
///
/// ```
/// use tallygate::clock::SystemClock;
/// use tallygate::snapshot::{SnapshotReader, SnapshotWriter};
/// use tallygate::store::{Capacity, PolicyStore};
/// use tallygate::{Ask, Policy, RateLimiter};
///
/// let policy = Policy::token_bucket(2).per_hour().build()?;
/// let limiter = RateLimiter::new(policy.clone());
/// limiter.check(Ask::new("alice").cost(2))?;
///
/// let mut snapshot = SnapshotWriter::new(Vec::new())?;
/// limiter.store().save(&policy, "api", &mut snapshot)?;
/// let bytes = snapshot.finish()?;
///
/// let mut snapshot = SnapshotReader::new(&bytes[..])?;
/// let mut section = snapshot.next_section()?.expect("there is one");
/// assert_eq!(section.name(), "api");
/// let store = PolicyStore::restored(&policy, Capacity::default(), SystemClock::new(), &mut section)?;
/// assert!(snapshot.next_section()?.is_none()); // the snapshot is complete
/// assert!(!RateLimiter::with_store(policy, store).is_allowed("alice")?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct SnapshotWriter<W> {
    out: W,
    /// The bytes that are not written yet: less than a block, unless a state is larger.
    pending: Vec<u8>,
    /// The checksum of all blocks so far.
    checksum: u64,
    bytes: u64,
}

impl<W: Write> SnapshotWriter<W> {
    /// Starts a snapshot.
    ///
    /// # Errors
    /// Returns an error if writing fails.
    pub fn new(mut out: W) -> io::Result<Self> {
        let head = head(VERSION);
        out.write_all(&head)?;
        let checksum = xxh3_64_with_seed(&head, 0);
        Ok(Self { out, pending: Vec::new(), checksum, bytes: head.len() as u64 })
    }

    /// Completes the snapshot. Without this, readers reject it as incomplete.
    ///
    /// # Errors
    /// Returns an error if writing fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.put(&[END]);
        self.write_blocks()?;
        let rest = std::mem::take(&mut self.pending);
        if !rest.is_empty() {
            self.write_block(&rest)?;
        }
        self.write_block(&[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    /// Returns the number of bytes that were written so far.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    pub(super) fn put_number(&mut self, number: u64) {
        put_number(&mut self.pending, number);
    }

    pub(super) fn put_bytes(&mut self, bytes: &[u8]) {
        self.put_number(bytes.len() as u64);
        self.put(bytes);
    }

    fn put_policy(&mut self, policy: &Policy) {
        self.put_bytes(policy.name().as_bytes());
        let mut description = Vec::new();
        policy.describe(&mut description);
        self.put_bytes(&description);
    }

    fn put_override(&mut self, key: &[u8], set: &Override) {
        self.put_bytes(key);
        match set.until {
            Some(until) => {
                self.put(&[1]);
                self.put(&until.0.to_le_bytes());
            }
            None => self.put(&[0]),
        }
        match &set.access {
            Access::Unlimited => self.put(&[UNLIMITED]),
            Access::Blocked => self.put(&[BLOCKED]),
            Access::Limited(policy) => {
                self.put(&[LIMITED]);
                self.put_policy(policy);
            }
        }
    }

    /// Writes a table as a section, and returns the number of its keys. Holds at most one lock at a time, and none while it
    /// writes to the output.
    pub(crate) fn put_table<S: 'static>(
        &mut self,
        (name, overrides): (&str, &Overrides),
        hasher: &KeyHasher,
        table: &Table<S>,
        mut show: impl FnMut(&S, &mut UsageWriter<'_>),
    ) -> io::Result<u64> {
        self.put(&[SECTION]);
        self.put_bytes(name.as_bytes());
        self.put_number(overrides.len() as u64);
        for (key, set) in overrides {
            self.put_override(key, set);
            self.write_blocks()?;
        }
        self.put_number(table.known_bits().into());
        self.put(hasher.secret());
        let mut known = WrittenPolicies::default();
        let (mut keys, mut states) = (0, Vec::new());
        for bucket in table.buckets() {
            table.show(bucket, |key, state| {
                states.clear();
                let mut listed = UsageWriter { known: &mut known, states: &mut states, count: 0 };
                show(state, &mut listed);
                let count = listed.count;
                if count == 0 {
                    return;
                }
                for policy in known.new.drain(..) {
                    self.put(&[POLICY]);
                    self.put_policy(&policy);
                }
                self.put(&[KEY]);
                self.pending.extend(key.known_bytes(table.known_bits()));
                self.put_number(count);
                self.pending.append(&mut states);
                keys += 1;
            });
            self.write_blocks()?;
        }
        self.put(&[END]);
        Ok(keys)
    }

    /// Writes the pending bytes that fill whole blocks.
    fn write_blocks(&mut self) -> io::Result<()> {
        if self.pending.len() < BLOCK_BYTES {
            return Ok(());
        }
        let mut pending = std::mem::take(&mut self.pending);
        let blocks = pending.chunks_exact(BLOCK_BYTES);
        let written = pending.len() - blocks.remainder().len();
        for block in blocks {
            self.write_block(block)?;
        }
        pending.drain(..written);
        pending.shrink_to(2 * BLOCK_BYTES);
        self.pending = pending;
        Ok(())
    }

    fn write_block(&mut self, block: &[u8]) -> io::Result<()> {
        self.checksum = xxh3_64_with_seed(block, self.checksum);
        let length = u32::try_from(block.len()).unwrap_or(u32::MAX).to_le_bytes();
        self.out.write_all(&length)?;
        self.out.write_all(block)?;
        self.out.write_all(&self.checksum.to_le_bytes())?;
        self.bytes += (length.len() + block.len() + size_of::<u64>()) as u64;
        Ok(())
    }
}

/// Builds the list of the usage of one key.
pub(crate) struct UsageWriter<'a> {
    known: &'a mut WrittenPolicies,
    states: &'a mut Vec<u8>,
    count: u64,
}

impl UsageWriter<'_> {
    /// Adds the usage of the key under a policy.
    #[expect(clippy::borrowed_box, reason = "it is the policy's state")]
    pub(crate) fn add(&mut self, policy: &Arc<Policy>, records: &Box<[LimitRecord]>) {
        let next = self.known.held.len() as u64;
        let number = *self.known.numbers.entry(Arc::as_ptr(policy)).or_insert(next);
        if number == next {
            self.known.held.push(policy.clone());
            self.known.new.push(policy.clone());
        }
        put_number(self.states, number);
        let mut state = Vec::new();
        policy.encode(records, &mut state);
        put_number(self.states, state.len() as u64);
        self.states.append(&mut state);
        self.count += 1;
    }

    /// Adds the shared allowances of the policies. Call it after all policies were added.
    pub(crate) fn add_allowances(&mut self, allowances: impl Iterator<Item = Allowance>) {
        for allowance in allowances {
            self.states.extend(allowance.last.0.to_le_bytes());
            self.states.extend(allowance.level.to_le_bytes());
        }
    }

    /// Adds a state that can be read without a policy.
    pub(crate) fn add_state(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        put_number(self.states, 0);
        let mut state = Vec::new();
        encode(&mut state);
        put_number(self.states, state.len() as u64);
        self.states.append(&mut state);
        self.count += 1;
    }
}

/// The policies that a section has written so far, with their positions.
#[derive(Default)]
struct WrittenPolicies {
    numbers: HashMap<*const Policy, u64>,
    /// Keeps the policies alive, so that no other policy gets the address of a dropped one.
    held: Vec<Arc<Policy>>,
    new: Vec<Arc<Policy>>,
}

/// Writes a number with seven bits per byte, least significant first.
fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        #[expect(clippy::cast_possible_truncation, reason = "seven bits and the mark")]
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    #[expect(clippy::cast_possible_truncation, reason = "below 0x80")]
    out.push(number as u8);
}

impl<W> fmt::Debug for SnapshotWriter<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SnapshotWriter").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
