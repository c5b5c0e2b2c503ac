//! Computes the fingerprints of keys: a keyed 128-bit hash. An attacker can therefore not choose keys that share a
//! bucket, or a key that is mistaken for another client.
//!
//! It is XXH3 with a secret of 192 random bytes per store. Only a snapshot contains the secret or a hash, so an attacker
//! cannot search for two keys that collide; `table.rs` states the odds that two do.

use std::hash::{BuildHasher as _, RandomState};

use crate::table::Fingerprint;

pub(crate) struct KeyHasher {
    secret: [u8; SECRET_BYTES],
}

pub(crate) const SECRET_BYTES: usize = 192;

impl KeyHasher {
    /// Creates a hasher with a new secret.
    pub(crate) fn new() -> Self {
        // The hasher of the standard library is seeded with random numbers of the system. It derives enough bytes from
        // them.
        let random = RandomState::new();
        let mut secret = [0; SECRET_BYTES];
        for (index, part) in secret.chunks_exact_mut(8).enumerate() {
            part.copy_from_slice(&random.hash_one(index).to_ne_bytes());
        }
        Self { secret }
    }

    /// Creates a hasher with the secret of another store, whose keys are taken over.
    pub(crate) const fn of_secret(secret: [u8; SECRET_BYTES]) -> Self {
        Self { secret }
    }

    pub(crate) const fn secret(&self) -> &[u8; SECRET_BYTES] {
        &self.secret
    }

    #[inline]
    pub(crate) fn fingerprint(&self, key: &[u8]) -> Fingerprint {
        xxhash_rust::xxh3::xxh3_128_with_secret(key, &self.secret).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys that collide in one store do not in another, so an attacker cannot prepare any.
    ///
    /// Fault D4.
    #[test]
    fn each_store_hashes_by_its_own_secret() {
        let (one, other) = (KeyHasher::new(), KeyHasher::new());
        for key in [&b""[..], b"a", b"alice", &[0; 16], &[0; 17], &[7; 200], &[1; 4096]] {
            assert_eq!(one.fingerprint(key), one.fingerprint(key));
            assert_ne!(one.fingerprint(key), other.fingerprint(key));
        }
    }
}
