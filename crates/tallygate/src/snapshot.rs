//! What clients have used, in a file: so that a restart forgives nobody.
//!
//! A snapshot is a magic word, a version, and blocks of up to 64 KiB, each with a checksum that goes on from the one
//! before: whatever is cut off, flipped, swapped or appended is found before it is believed, and nothing is allocated for
//! a length that is not there. In the blocks are sections, one a store: its name, the overrides it was given, the secret
//! by which it hashes keys, and its keys, each with what it used under which policies. Keys are kept as the store keeps
//! them, by the first bits of their hashes; who has the file can try out keys, so it is its owner's alone.
//!
//! States are written as policies encode them, each policy once. So whoever reads them may have other rules by then: a
//! client goes on under the new ones as after a change while it served. Algorithms of a user's own, places of requests
//! in flight, those who wait and open reservations are not in it; the estimates of those stay charged.

mod file;

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;

use tallygate_core::{Algorithm, DecodeError, Policy, Standing, Tick};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::allowance::Allowance;
use crate::hash::{KeyHasher, SECRET_BYTES};
use crate::kept::{Kept, MAX_POLICIES};
use crate::table::{Fingerprint, Table};
use crate::tiers::{Access, Override};

pub use file::save_snapshot;

const MAGIC: [u8; 9] = *b"tallygate";

/// The version of the format. Whoever changes it reads this one as well.
const VERSION: u32 = 1;

const HEAD_BYTES: usize = MAGIC.len() + size_of::<u32>();

/// The most bytes of a block, without its length and its checksum.
const BLOCK_BYTES: usize = 64 * 1024;

/// What comes next in a snapshot, and in a section of it.
const END: u8 = 0;
const SECTION: u8 = 1;
const POLICY: u8 = 1;
const KEY: u8 = 2;

/// What a client gets, in an override.
const UNLIMITED: u8 = 0;
const BLOCKED: u8 = 1;
const LIMITED: u8 = 2;

type Overrides = [(Box<[u8]>, Override)];

/// Writes a snapshot.
///
/// Stores put themselves into it, [`MemoryStore`](crate::MemoryStore::save) and
/// [`PolicyStore`](crate::PolicyStore::save); [`save_snapshot`] makes a file of it.
///
/// ```
/// use tallygate::{
///     Ask, Capacity, Policy, PolicyStore, RateLimiter, SnapshotReader, SnapshotWriter, SystemClock,
/// };
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
/// assert!(snapshot.next_section()?.is_none()); // and nothing else: it was whole
/// assert!(!RateLimiter::with_store(policy, store).is_allowed("alice")?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct SnapshotWriter<W> {
    out: W,
    /// What is not written yet: less than a block, unless a state is larger.
    pending: Vec<u8>,
    /// The checksum of all blocks so far.
    checksum: u64,
    bytes: u64,
}

/// Reads a snapshot.
///
/// ```
/// use tallygate::SnapshotReader;
///
/// let refused = SnapshotReader::new(&b"something else"[..]).unwrap_err();
/// assert!(refused.to_string().starts_with("it is no snapshot"));
/// ```
pub struct SnapshotReader<R> {
    input: R,
    block: Vec<u8>,
    /// How much of the block was read.
    at: usize,
    checksum: u64,
    /// Where in the file the block begins, and where the next one does.
    block_begins: u64,
    bytes: u64,
    is_over: bool,
    /// The section that was begun and not read to its end: how many bytes stand for a key in it.
    unread: Option<usize>,
}

/// One store of a snapshot.
pub struct Section<'a, R> {
    snapshot: &'a mut SnapshotReader<R>,
    name: Box<str>,
    overrides: Vec<(Box<[u8]>, Override)>,
    known_bits: u32,
    secret: [u8; SECRET_BYTES],
}

/// Why a snapshot is refused.
#[derive(Debug)]
#[non_exhaustive]
pub enum SnapshotError {
    /// It cannot be read.
    Io(io::Error),
    /// It is something else.
    NoSnapshot {
        /// How it begins.
        found: Vec<u8>,
    },
    /// It was written by another version.
    Version {
        /// Which one.
        found: u32,
    },
    /// It ends too early.
    Truncated {
        /// After so many bytes.
        bytes: u64,
    },
    /// A checksum is wrong.
    Damaged {
        /// Where the block begins that it belongs to.
        at: u64,
    },
    /// Bytes follow its end.
    Trailing {
        /// Where it ends.
        at: u64,
    },
    /// It is whole, but says what no store can have written.
    Field {
        /// Where the block begins that says so.
        at: u64,
        /// What is wrong.
        name: &'static str,
    },
    /// It is whole, but a state or a policy in it is none.
    State {
        /// Where the block begins that it is in.
        at: u64,
        /// What is wrong with it.
        error: DecodeError,
    },
}

impl<W: Write> SnapshotWriter<W> {
    /// Begins a snapshot.
    ///
    /// # Errors
    /// It cannot be written to.
    pub fn new(mut out: W) -> io::Result<Self> {
        let head = head(VERSION);
        out.write_all(&head)?;
        let checksum = xxh3_64_with_seed(&head, 0);
        Ok(Self { out, pending: Vec::new(), checksum, bytes: head.len() as u64 })
    }

    /// Ends it. Without this it is refused as cut short.
    ///
    /// # Errors
    /// It cannot be written to.
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

    /// How many bytes were written so far.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    fn put(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    fn put_number(&mut self, number: u64) {
        put_number(&mut self.pending, number);
    }

    fn put_bytes(&mut self, bytes: &[u8]) {
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

    /// Writes a table as a section; how many keys it has. No lock is held while it is written to the outside, and never
    /// more than one.
    pub(crate) fn put_table<S>(
        &mut self,
        (name, overrides): (&str, &Overrides),
        hasher: &KeyHasher,
        table: &Table<S>,
        mut show: impl FnMut(&S, &mut Listed<'_>),
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
        let mut known = Known::default();
        let (mut keys, mut states) = (0, Vec::new());
        for bucket in table.buckets() {
            table.show(bucket, |key, state| {
                states.clear();
                let mut listed = Listed { known: &mut known, states: &mut states, count: 0 };
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

    /// Writes what is pending, as far as it is whole blocks.
    fn write_blocks(&mut self) -> io::Result<()> {
        if self.pending.len() < BLOCK_BYTES {
            return Ok(());
        }
        let mut pending = std::mem::take(&mut self.pending);
        let (blocks, rest) = pending.as_chunks::<BLOCK_BYTES>();
        for block in blocks {
            self.write_block(block)?;
        }
        let written = pending.len() - rest.len();
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

/// Seven bits a byte, least first.
fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        #[expect(clippy::cast_possible_truncation, reason = "seven bits and the mark")]
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    #[expect(clippy::cast_possible_truncation, reason = "below 0x80")]
    out.push(number as u8);
}

fn head(version: u32) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..MAGIC.len()].copy_from_slice(&MAGIC);
    head[MAGIC.len()..].copy_from_slice(&version.to_le_bytes());
    head
}

/// The policies that a section has told so far, by where they are.
#[derive(Default)]
struct Known {
    numbers: HashMap<*const Policy, u64>,
    /// Held, so that no other comes to be where one was.
    held: Vec<Arc<Policy>>,
    new: Vec<Arc<Policy>>,
}

/// What one key used, being listed.
pub(crate) struct Listed<'a> {
    known: &'a mut Known,
    states: &'a mut Vec<u8>,
    count: u64,
}

impl Listed<'_> {
    /// Adds what it used under a policy.
    #[expect(clippy::borrowed_box, reason = "it is the policy's state")]
    pub(crate) fn add(&mut self, policy: &Arc<Policy>, standings: &Box<[Standing]>) {
        let next = self.known.held.len() as u64;
        let number = *self.known.numbers.entry(Arc::as_ptr(policy)).or_insert(next);
        if number == next {
            self.known.held.push(policy.clone());
            self.known.new.push(policy.clone());
        }
        put_number(self.states, number);
        let mut state = Vec::new();
        policy.encode(standings, &mut state);
        put_number(self.states, state.len() as u64);
        self.states.append(&mut state);
        self.count += 1;
    }

    /// Adds the allowances that its policies share, after all of them.
    pub(crate) fn add_allowances(&mut self, allowances: impl Iterator<Item = Allowance>) {
        for allowance in allowances {
            self.states.extend(allowance.last.0.to_le_bytes());
            self.states.extend(allowance.level.to_le_bytes());
        }
    }
}

impl Listed<'_> {
    /// Adds a state that stands for itself, without a policy.
    pub(crate) fn add_state(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        put_number(self.states, 0);
        let mut state = Vec::new();
        encode(&mut state);
        put_number(self.states, state.len() as u64);
        self.states.append(&mut state);
        self.count += 1;
    }
}

impl<R: Read> SnapshotReader<R> {
    /// Begins to read one.
    ///
    /// # Errors
    /// It is no snapshot, or of another version.
    pub fn new(mut input: R) -> Result<Self, SnapshotError> {
        let mut found = Vec::new();
        let head_bytes = HEAD_BYTES as u64;
        input.by_ref().take(head_bytes).read_to_end(&mut found)?;
        let magic = &found[..found.len().min(MAGIC.len())];
        if !MAGIC.starts_with(magic) {
            return Err(SnapshotError::NoSnapshot { found });
        }
        let Some(version) = found.last_chunk::<4>().filter(|_| found.len() as u64 == head_bytes)
        else {
            return Err(SnapshotError::Truncated { bytes: found.len() as u64 });
        };
        match u32::from_le_bytes(*version) {
            VERSION => {}
            found => return Err(SnapshotError::Version { found }),
        }
        Ok(Self {
            input,
            block: Vec::new(),
            at: 0,
            checksum: xxh3_64_with_seed(&found, 0),
            block_begins: head_bytes,
            bytes: head_bytes,
            is_over: false,
            unread: None,
        })
    }

    /// The next store in it; what was not read of the one before is passed over. `None` says that there is no other,
    /// and that all of it was whole.
    ///
    /// # Errors
    /// The snapshot is damaged. Whatever was restored of it is then not to be used: others may be forgiven.
    pub fn next_section(&mut self) -> Result<Option<Section<'_, R>>, SnapshotError> {
        self.pass_over()?;
        match self.byte()? {
            SECTION => {}
            END => return self.end().map(|()| None),
            _ => return Err(self.field("section")),
        }
        let name = String::from_utf8(self.bytes()?);
        let name = name.map_err(|_| self.field("name"))?.into();
        let mut overrides = Vec::new();
        for _ in 0..self.number()? {
            overrides.push(self.set_override()?);
        }
        let known_bits = u32::try_from(self.number()?).unwrap_or(u32::MAX);
        if !(1..=u128::BITS).contains(&known_bits) {
            return Err(self.field("number of known bits"));
        }
        let mut secret = [0; SECRET_BYTES];
        self.exactly(&mut secret)?;
        self.unread = Some(known_bits.div_ceil(8) as usize);
        Ok(Some(Section { snapshot: self, name, overrides, known_bits, secret }))
    }

    fn pass_over(&mut self) -> Result<(), SnapshotError> {
        while let Some(key_bytes) = self.unread {
            match self.byte()? {
                END => self.unread = None,
                POLICY => {
                    self.policy()?;
                }
                KEY => {
                    self.exactly(&mut [0; 16][..key_bytes])?;
                    let count = self.number()?;
                    for _ in 0..count {
                        self.number()?;
                        self.bytes()?;
                    }
                    for _ in 0..if count > 1 { count } else { 0 } {
                        self.allowance()?;
                    }
                }
                _ => return Err(self.field("entry")),
            }
        }
        Ok(())
    }

    fn allowance(&mut self) -> Result<Allowance, SnapshotError> {
        let (mut last, mut level) = ([0; 8], [0; 16]);
        self.exactly(&mut last)?;
        self.exactly(&mut level)?;
        let last = Tick(i64::from_le_bytes(last));
        Ok(Allowance { last, level: u128::from_le_bytes(level) })
    }

    fn set_override(&mut self) -> Result<(Box<[u8]>, Override), SnapshotError> {
        let key = self.bytes()?.into();
        let until = match self.byte()? {
            0 => None,
            1 => {
                let mut until = [0; 8];
                self.exactly(&mut until)?;
                Some(Tick(i64::from_le_bytes(until)))
            }
            _ => return Err(self.field("end of an override")),
        };
        let access = match self.byte()? {
            UNLIMITED => Access::Unlimited,
            BLOCKED => Access::Blocked,
            LIMITED => Access::Limited(Arc::new(self.policy()?)),
            _ => return Err(self.field("access")),
        };
        Ok((key, Override { access, until }))
    }

    fn policy(&mut self) -> Result<Policy, SnapshotError> {
        let name = String::from_utf8(self.bytes()?);
        let name = name.map_err(|_| self.field("name"))?;
        let description = self.bytes()?;
        let policy = Policy::of_description(&description).map_err(|error| self.state(error))?;
        Ok(policy.with_name(name))
    }

    fn byte(&mut self) -> Result<u8, SnapshotError> {
        let mut byte = [0];
        self.exactly(&mut byte)?;
        Ok(byte[0])
    }

    fn number(&mut self) -> Result<u64, SnapshotError> {
        let (mut number, mut shift) = (0_u64, 0);
        loop {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift > 63 || (bits << shift) >> shift != bits {
                return Err(self.field("number"));
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
            shift += 7;
        }
    }

    /// Bytes with their length before them. Room is made for those that are there, not for those that are claimed.
    fn bytes(&mut self) -> Result<Vec<u8>, SnapshotError> {
        let mut left = usize::try_from(self.number()?).unwrap_or(usize::MAX);
        let mut bytes = Vec::new();
        while left > 0 {
            let here = self.some()?;
            let here = &here[..here.len().min(left)];
            bytes.extend_from_slice(here);
            let taken = here.len();
            self.at += taken;
            left -= taken;
        }
        Ok(bytes)
    }

    fn exactly(&mut self, mut into: &mut [u8]) -> Result<(), SnapshotError> {
        while !into.is_empty() {
            let here = self.some()?;
            let taken = here.len().min(into.len());
            into[..taken].copy_from_slice(&here[..taken]);
            into = &mut into[taken..];
            self.at += taken;
        }
        Ok(())
    }

    /// What is left of the block, or the next one: never nothing.
    fn some(&mut self) -> Result<&[u8], SnapshotError> {
        if self.at == self.block.len() {
            if !self.is_over {
                self.next_block()?;
            }
            if self.is_over {
                return Err(self.field("end"));
            }
        }
        Ok(&self.block[self.at..])
    }

    /// Reads a block, and believes it if its checksum is right.
    fn next_block(&mut self) -> Result<(), SnapshotError> {
        self.block_begins = self.bytes;
        let mut length = [0; 4];
        self.read(&mut length)?;
        let length = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
        let damaged = SnapshotError::Damaged { at: self.block_begins };
        if length > BLOCK_BYTES {
            return Err(damaged);
        }
        let mut block = std::mem::take(&mut self.block);
        block.resize(length, 0);
        self.read(&mut block)?;
        let mut checksum = [0; 8];
        self.read(&mut checksum)?;
        self.checksum = xxh3_64_with_seed(&block, self.checksum);
        if self.checksum != u64::from_le_bytes(checksum) {
            return Err(damaged);
        }
        (self.block, self.at, self.is_over) = (block, 0, length == 0);
        Ok(())
    }

    fn read(&mut self, mut into: &mut [u8]) -> Result<(), SnapshotError> {
        while !into.is_empty() {
            match self.input.read(into) {
                Ok(0) => return Err(SnapshotError::Truncated { bytes: self.bytes }),
                Ok(read) => {
                    into = &mut into[read..];
                    self.bytes += read as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Nothing is left, neither of sections nor of bytes.
    fn end(&mut self) -> Result<(), SnapshotError> {
        if self.at != self.block.len() {
            return Err(self.field("end"));
        }
        self.next_block()?;
        if !self.is_over {
            return Err(self.field("end"));
        }
        match self.input.read(&mut [0])? {
            0 => Ok(()),
            _ => Err(SnapshotError::Trailing { at: self.bytes }),
        }
    }

    const fn field(&self, name: &'static str) -> SnapshotError {
        SnapshotError::Field { at: self.block_begins, name }
    }

    const fn state(&self, error: DecodeError) -> SnapshotError {
        SnapshotError::State { at: self.block_begins, error }
    }
}

impl<R: Read> Section<'_, R> {
    /// Its name.
    #[must_use]
    pub const fn name(&self) -> &str {
        &self.name
    }

    /// The overrides it was saved with, to be set again.
    #[must_use]
    pub fn overrides(&self) -> &[(Box<[u8]>, Override)] {
        &self.overrides
    }

    /// How many bits of hashes it knows, and by which secret they were made.
    pub(crate) const fn hashes(&self) -> (u32, KeyHasher) {
        (self.known_bits, KeyHasher::of_secret(self.secret))
    }

    /// Shows all keys and what they used. Policies that are the same are to be one in memory, too: `share` says which.
    pub(crate) fn each(
        &mut self,
        mut share: impl FnMut(Policy) -> Arc<Policy>,
        mut show: impl FnMut(Fingerprint, Kept),
    ) -> Result<(), SnapshotError> {
        let Self { snapshot, overrides, .. } = self;
        let mut policies = Vec::new();
        while let Some(key_bytes) = snapshot.unread {
            match snapshot.byte()? {
                END => snapshot.unread = None,
                POLICY => {
                    let policy = snapshot.policy()?;
                    let mut set = overrides.iter().filter_map(|(_, set)| match &set.access {
                        Access::Limited(own) => Some(own),
                        Access::Unlimited | Access::Blocked => None,
                    });
                    let known = set.find(|own| ***own == policy).cloned();
                    policies.push(known.unwrap_or_else(|| share(policy)));
                }
                KEY => {
                    let mut key = [0; 16];
                    snapshot.exactly(&mut key[..key_bytes])?;
                    let mut under = Vec::new();
                    for _ in 0..snapshot.number()? {
                        let number = usize::try_from(snapshot.number()?).unwrap_or(usize::MAX);
                        let state = snapshot.bytes()?;
                        let policy: &Arc<Policy> =
                            policies.get(number).ok_or_else(|| snapshot.field("policy"))?;
                        let state = policy.decode(&state).map_err(|error| snapshot.state(error))?;
                        under.push((policy.clone(), state));
                        if under.len() > MAX_POLICIES {
                            return Err(snapshot.field("number of policies"));
                        }
                    }
                    let mut allowances = Vec::new();
                    for _ in 0..if under.len() > 1 { under.len() } else { 0 } {
                        allowances.push(snapshot.allowance()?);
                    }
                    show(u128::from_be_bytes(key).into(), Kept::of(under, &allowances));
                }
                _ => return Err(snapshot.field("entry")),
            }
        }
        Ok(())
    }
}

impl<R: Read> Section<'_, R> {
    /// Shows all keys, with states that stand for themselves.
    pub(crate) fn each_state<A: Algorithm>(
        &mut self,
        rule: &A,
        mut show: impl FnMut(Fingerprint, A::State),
    ) -> Result<(), SnapshotError> {
        let Self { snapshot, .. } = self;
        while let Some(key_bytes) = snapshot.unread {
            match snapshot.byte()? {
                END => snapshot.unread = None,
                KEY => {
                    let mut key = [0; 16];
                    snapshot.exactly(&mut key[..key_bytes])?;
                    if (snapshot.number()?, snapshot.number()?) != (1, 0) {
                        return Err(snapshot.field("number of states"));
                    }
                    let state = snapshot.bytes()?;
                    let state = rule.decode(&state).map_err(|error| snapshot.state(error))?;
                    show(u128::from_be_bytes(key).into(), state);
                }
                _ => return Err(snapshot.field("entry")),
            }
        }
        Ok(())
    }
}

impl From<io::Error> for SnapshotError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const ELSE: &str = "or move it away to start with nobody remembered";
        match self {
            Self::Io(error) => write!(f, "it cannot be read: {error}; mend that, {ELSE}"),
            Self::NoSnapshot { found } => {
                write!(f, "it is no snapshot: it begins with \"{}\"", found.escape_ascii())?;
                write!(f, ", expected \"{}\"; name another file, {ELSE}", MAGIC.escape_ascii())
            }
            Self::Version { found } => {
                write!(f, "it is of version {found}, and version {VERSION} is known here; ")?;
                write!(f, "start the program that wrote it, {ELSE}")
            }
            Self::Truncated { bytes } => {
                write!(f, "it is cut short after {bytes} bytes; use a whole copy, {ELSE}")
            }
            Self::Damaged { at } => {
                write!(f, "it is damaged: the checksum of the block at byte {at} is wrong; ")?;
                write!(f, "use a whole copy, {ELSE}")
            }
            Self::Trailing { at } => {
                write!(f, "it ends at byte {at}, and more follows; use a whole copy, {ELSE}")
            }
            Self::Field { at, name } => {
                write!(f, "the block at byte {at} is whole, but its {name} makes no sense; ")?;
                write!(f, "use another copy, {ELSE}")
            }
            Self::State { at, error } => {
                write!(f, "the block at byte {at} is whole, but not what is in it: {error}; ")?;
                write!(f, "use another copy, {ELSE}")
            }
        }
    }
}

impl std::error::Error for SnapshotError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            Self::State { error, .. } => Some(error),
            _ => None,
        }
    }
}

impl<W> fmt::Debug for SnapshotWriter<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SnapshotWriter").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl<R> fmt::Debug for SnapshotReader<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SnapshotReader").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Without its secret.
impl<R> fmt::Debug for Section<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Section").field("name", &self.name).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn written(write: impl FnOnce(&mut SnapshotWriter<Vec<u8>>)) -> Vec<u8> {
        let mut snapshot = SnapshotWriter::new(Vec::new()).expect("memory");
        write(&mut snapshot);
        snapshot.finish().expect("memory")
    }

    /// Also where all checksums are right, no length is believed before its bytes are there.
    #[test]
    fn lengths_and_counts_without_their_bytes_are_refused() {
        let name = written(|snapshot| {
            snapshot.put(&[SECTION]);
            snapshot.put_number(u64::MAX);
        });
        let overrides = written(|snapshot| {
            snapshot.put(&[SECTION]);
            snapshot.put_bytes(b"api");
            snapshot.put_number(u64::MAX);
        });
        let policies = written(|snapshot| {
            snapshot.put(&[SECTION]);
            snapshot.put_bytes(b"api");
            snapshot.put_number(0);
            snapshot.put_number(77);
            snapshot.put(&[7; SECRET_BYTES]);
            snapshot.put(&[KEY]);
            snapshot.put(&[1; 10]);
            snapshot.put_number(u64::MAX);
        });
        for bytes in [name, overrides, policies] {
            let mut snapshot = SnapshotReader::new(&bytes[..]).expect("a snapshot");
            let read = loop {
                match snapshot.next_section() {
                    Ok(Some(mut section)) => {
                        if let Err(error) = section.each(Arc::new, |_, _| {}) {
                            break Err(error);
                        }
                    }
                    Ok(None) => break Ok(()),
                    Err(error) => break Err(error),
                }
            };
            assert!(matches!(read, Err(SnapshotError::Field { .. })), "{read:?}");
        }
    }

    #[test]
    fn another_version_is_refused_with_what_to_do() {
        let mut bytes = written(|_| {});
        bytes[MAGIC.len()] = 7;
        let refused = SnapshotReader::new(&bytes[..]).expect_err("of another version");
        assert_eq!(
            refused.to_string(),
            "it is of version 7, and version 1 is known here; start the program that wrote it, or \
             move it away to start with nobody remembered"
        );
    }

    /// The format outlives this program: what it writes now is read by those to come.
    #[test]
    fn what_this_version_writes_is_pinned() {
        let policy: Arc<Policy> =
            Policy::token_bucket(3).per(tallygate_core::Ticks(10)).build().expect("valid").into();
        let hasher = KeyHasher::of_secret([7; SECRET_BYTES]);
        let table = Table::new(u128::BITS, 3, crate::WhenFull::EvictLeastUsed);
        let rule = crate::Plan::of(Access::Limited(policy.clone()));
        let kept = Kept::of(
            [(policy.clone(), policy.with_used(tallygate_core::Used::whole(2), Tick(5)))],
            &[],
        );
        let spot = table.spot(hasher.fingerprint(b"alice"));
        assert!(table.with(&rule, spot, Tick(5), |state, _| *state = kept).is_ok());
        let overrides = [
            (b"bob"[..].into(), Override { access: Access::Blocked, until: Some(Tick(9)) }),
            (b"carol"[..].into(), Override { access: Access::Limited(policy), until: None }),
        ];
        let bytes = written(|snapshot| {
            let name = ("api", &overrides[..]);
            let keys = snapshot.put_table(name, &hasher, &table, |kept, listed| {
                for (policy, standings) in kept.policies() {
                    listed.add(policy, &standings);
                }
            });
            assert_eq!(keys.expect("memory"), 1);
        });
        let secret = bytes.windows(SECRET_BYTES).position(|part| part == [7; SECRET_BYTES]);
        let (before, after) = bytes.split_at(secret.expect("it is there"));
        assert_eq!(
            before.escape_ascii().to_string(),
            r"tallygate\x01\x00\x00\x00C\x01\x00\x00\x01\x03api\x02\x03bob\x01\t\x00\x00\x00\x00\x00\x00\x00\x01\x05carol\x00\x02\x0ctoken_bucket\x17\x01\x0ctoken_bucket\x01\x03\n\x03\x03\x03\x00\x00\x00;"
        );
        assert_eq!(
            after[SECRET_BYTES..].escape_ascii().to_string(),
            r"\x01\x0ctoken_bucket\x17\x01\x0ctoken_bucket\x01\x03\n\x03\x03\x03\x00\x00\x00\x02w[\x85\x87\xfbe\x9d`\x01\x00\r\x10\x01\t\x01\x03\n\x03\x03\x00\x01\n\x14\x00\x00\x00\xc1\xb7|\xc0\x95\x8e\xb8\xcb\x00\x00\x00\x00dg7G\xa9\xf0E\xd6"
        );
    }
}
