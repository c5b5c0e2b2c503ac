//! Reads snapshots.

use std::fmt;
use std::io::{self, Read};
use std::sync::Arc;

use tallygate_core::{Algorithm, DecodeError, Policy, Tick};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::allowance::Allowance;
use crate::client_state::{ClientState, MAX_POLICIES};
use crate::hash::{KeyHasher, SECRET_BYTES};
use crate::table::Fingerprint;
use crate::tiers::{Access, Override};

use super::{
    BLOCK_BYTES, BLOCKED, END, HEAD_BYTES, KEY, LIMITED, MAGIC, POLICY, SECTION, SnapshotError,
    UNLIMITED, VERSION,
};

/// Reads a snapshot.
///
/// ```
/// use tallygate::snapshot::SnapshotReader;
///
/// let error = SnapshotReader::new(&b"something else"[..]).unwrap_err();
/// assert!(error.to_string().starts_with("the file is not a snapshot"));
/// ```
pub struct SnapshotReader<R> {
    input: R,
    block: Vec<u8>,
    /// The number of bytes of the block that were read.
    at: usize,
    checksum: u64,
    /// The positions in the file at which this block and the next one begin.
    block_begins: u64,
    bytes: u64,
    is_over: bool,
    /// If a section was not read to its end yet: the number of bytes of a key in it.
    unread: Option<usize>,
}

/// The part of a snapshot that contains one store.
pub struct Section<'a, R> {
    snapshot: &'a mut SnapshotReader<R>,
    name: Box<str>,
    overrides: Vec<(Box<[u8]>, Override)>,
    known_bits: u32,
    secret: [u8; SECRET_BYTES],
}

impl<R: Read> SnapshotReader<R> {
    /// Starts to read a snapshot.
    ///
    /// # Errors
    /// Returns an error if the bytes are not a snapshot, or if they are a snapshot of another version.
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

    /// Returns the next store, and skips the unread part of the previous one. `None` means that there are no more stores,
    /// and that the snapshot is complete.
    ///
    /// # Errors
    /// Returns an error if the snapshot is damaged. Then do not use the restored stores: other clients may be missing,
    /// and would get a full quota.
    pub fn next_section(&mut self) -> Result<Option<Section<'_, R>>, SnapshotError> {
        self.skip_section()?;
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

    fn skip_section(&mut self) -> Result<(), SnapshotError> {
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
        let policy = Policy::from_description(&description).map_err(|error| self.state(error))?;
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

    /// Reads bytes that are preceded by their length. It allocates memory only for bytes that are there.
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

    /// Returns the unread part of the block, or the next block. It is never empty.
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

    /// Reads a block, and returns an error if its checksum is wrong.
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

    /// Checks that there are no more sections and no more bytes.
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
    /// Returns the name of the store.
    #[must_use]
    pub const fn name(&self) -> &str {
        &self.name
    }

    /// Returns the overrides that the snapshot contains, so that the caller can set them again.
    #[must_use]
    pub fn overrides(&self) -> &[(Box<[u8]>, Override)] {
        &self.overrides
    }

    /// Returns how many bits of each hash are stored, and the hasher with the secret of these hashes.
    pub(crate) const fn hashes(&self) -> (u32, KeyHasher) {
        (self.known_bits, KeyHasher::of_secret(self.secret))
    }

    /// Calls a function with each key and its usage. `share` returns one policy in memory for all equal policies.
    pub(crate) fn each(
        &mut self,
        mut share: impl FnMut(Policy) -> Arc<Policy>,
        mut show: impl FnMut(Fingerprint, ClientState),
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
                    show(u128::from_be_bytes(key).into(), ClientState::of(under, &allowances));
                }
                _ => return Err(snapshot.field("entry")),
            }
        }
        Ok(())
    }

    /// Calls a function with each key and its state, which can be read without a policy.
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

impl<R> fmt::Debug for SnapshotReader<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SnapshotReader").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Prints the section without its secret.
impl<R> fmt::Debug for Section<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Section").field("name", &self.name).finish_non_exhaustive()
    }
}
