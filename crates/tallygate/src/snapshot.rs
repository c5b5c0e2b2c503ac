//! Snapshots: the usage of clients in a file, so that a restart keeps it.
//!
//! A snapshot consists of a magic word, a version, and blocks of up to 64 KiB. Each block has a checksum that continues
//! the checksum of the block before. So the reader notices bytes that were cut off, changed, swapped or appended before it
//! uses them, and it never allocates memory for bytes that are not there. The blocks contain one section per store: its
//! name, the overrides that were set at run time, the secret with which it hashes keys, and for each key its usage under
//! each policy. A key is stored as the first bits of its hash. With the secret in the file, one can test whether a key is
//! in it, so only the owner may read the file.
//!
//! States are written as their policies encode them, and each policy is written once. So a program with other rules can
//! read them: its clients continue as after a change of rules. Snapshots do not contain the states of user-defined
//! algorithms, places of requests in flight, waiting requests, and open reservations. The estimates of these reservations
//! stay charged.

mod error;
mod file;
mod reader;
mod writer;

use crate::tiers::Override;

pub use error::SnapshotError;
pub use file::save_snapshot;
pub use reader::{Section, SnapshotReader};
pub use writer::SnapshotWriter;

const MAGIC: [u8; 9] = *b"tallygate";

/// The version of the format. A later version has to read this one as well.
const VERSION: u32 = 1;

const HEAD_BYTES: usize = MAGIC.len() + size_of::<u32>();

/// The most bytes of a block, without its length and its checksum.
const BLOCK_BYTES: usize = 64 * 1024;

/// The tags of the parts of a snapshot, and of a section.
const END: u8 = 0;
const SECTION: u8 = 1;
const POLICY: u8 = 1;
const KEY: u8 = 2;

/// The tags of the access that an override gives.
const UNLIMITED: u8 = 0;
const BLOCKED: u8 = 1;
const LIMITED: u8 = 2;

type Overrides = [(Box<[u8]>, Override)];

fn head(version: u32) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..MAGIC.len()].copy_from_slice(&MAGIC);
    head[MAGIC.len()..].copy_from_slice(&version.to_le_bytes());
    head
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;

    use tallygate_core::{Algorithm as _, Policy, Tick};

    use super::*;
    use crate::client_state::ClientState;
    use crate::hash::{KeyHasher, SECRET_BYTES};
    use crate::table::Table;
    use crate::tiers::Access;

    fn written(write: impl FnOnce(&mut SnapshotWriter<Vec<u8>>)) -> Vec<u8> {
        let mut snapshot = SnapshotWriter::new(Vec::new()).expect("memory");
        write(&mut snapshot);
        snapshot.finish().expect("memory")
    }

    /// Even if all checksums are right, memory is only allocated for bytes that were read.
    #[test]
    fn lengths_and_counts_without_their_bytes_are_rejected() {
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
    fn another_version_is_rejected_with_advice() {
        let mut bytes = written(|_| {});
        bytes[MAGIC.len()] = 7;
        let error = SnapshotReader::new(&bytes[..]).expect_err("of another version");
        assert_eq!(
            error.to_string(),
            "the snapshot has version 7, and this program reads version 1; start the program that \
             wrote it, or move it away to start with an empty store"
        );
    }

    /// Later versions must read what this version writes.
    #[test]
    fn the_format_of_this_version_is_pinned() {
        let policy: Arc<Policy> =
            Policy::token_bucket(3).per(tallygate_core::Ticks(10)).build().expect("valid").into();
        let hasher = KeyHasher::of_secret([7; SECRET_BYTES]);
        let table = Table::new(u128::BITS, 3, crate::store::WhenFull::EvictLeastUsed);
        let rule = crate::tiers::ClientRule::of(Access::Limited(policy.clone()));
        let kept = ClientState::of(
            [(policy.clone(), policy.with_used(tallygate_core::Used::whole(2), Tick(5)))],
            &[],
        );
        let spot = table.slot_of(hasher.fingerprint(b"alice"));
        assert!(table.with(&rule, spot, Tick(5), |state, _| *state = kept).is_ok());
        let overrides = [
            (b"bob"[..].into(), Override { access: Access::Blocked, until: Some(Tick(9)) }),
            (b"carol"[..].into(), Override { access: Access::Limited(policy), until: None }),
        ];
        let bytes = written(|snapshot| {
            let name = ("api", &overrides[..]);
            let keys = snapshot.put_table(name, &hasher, &table, |kept, listed| {
                for (policy, records) in kept.policies() {
                    listed.add(policy, &records);
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
