//! The errors of reading a snapshot.

use std::{fmt, io};

use tallygate_core::DecodeError;

use super::{MAGIC, VERSION};

/// The error of reading a snapshot.
#[derive(Debug)]
#[non_exhaustive]
pub enum SnapshotError {
    /// Reading the file failed.
    Io(io::Error),
    /// The file is not a snapshot.
    NoSnapshot {
        /// The first bytes of the file.
        found: Vec<u8>,
    },
    /// Another version of the program wrote the snapshot.
    Version {
        /// The version of its format.
        found: u32,
    },
    /// The snapshot ends too early.
    Truncated {
        /// Its length in bytes.
        bytes: u64,
    },
    /// A checksum is wrong.
    Damaged {
        /// Where the block with that checksum begins.
        at: u64,
    },
    /// Bytes follow the end of the snapshot.
    Trailing {
        /// Where the snapshot ends.
        at: u64,
    },
    /// A block has a valid checksum, but contains something that no store can have written.
    Field {
        /// Where the block begins.
        at: u64,
        /// The invalid field.
        name: &'static str,
    },
    /// A block has a valid checksum, but contains an invalid state or policy.
    State {
        /// Where the block begins.
        at: u64,
        /// The error in the state or policy.
        error: DecodeError,
    },
}

impl From<io::Error> for SnapshotError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const ELSE: &str = "or move it away to start with an empty store";
        match self {
            Self::Io(error) => {
                write!(f, "the snapshot cannot be read: {error}; make it readable, {ELSE}")
            }
            Self::NoSnapshot { found } => {
                write!(
                    f,
                    "the file is not a snapshot: it begins with \"{}\"",
                    found.escape_ascii()
                )?;
                write!(f, ", expected \"{}\"; name another file, {ELSE}", MAGIC.escape_ascii())
            }
            Self::Version { found } => {
                write!(f, "the snapshot has version {found}, and this program reads version ")?;
                write!(f, "{VERSION}; start the program that wrote it, {ELSE}")
            }
            Self::Truncated { bytes } => write!(
                f,
                "the snapshot is incomplete: it ends after {bytes} bytes; use a complete copy, {ELSE}"
            ),
            Self::Damaged { at } => {
                write!(f, "the snapshot is damaged: the checksum of the block at byte {at} is ")?;
                write!(f, "wrong; use a complete copy, {ELSE}")
            }
            Self::Trailing { at } => {
                write!(f, "the snapshot ends at byte {at}, but more bytes follow; ")?;
                write!(f, "use a complete copy, {ELSE}")
            }
            Self::Field { at, name } => {
                write!(f, "the block at byte {at} of the snapshot has an invalid {name}; ")?;
                write!(f, "use another copy, {ELSE}")
            }
            Self::State { at, error } => {
                write!(
                    f,
                    "the block at byte {at} of the snapshot has an invalid state: {error}; "
                )?;
                write!(f, "use another copy, {ELSE}")
            }
        }
    }
}

// The text of the error contains that of its cause, so there is no `source`: reports would print the cause twice.
impl std::error::Error for SnapshotError {}
