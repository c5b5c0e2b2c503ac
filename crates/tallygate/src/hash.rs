//! Keys to fingerprints: a keyed 128-bit hash, so that nobody can aim at a bucket or at a client.
//!
//! XXH3 with a secret of 192 random bytes, of each store its own. The secret leaves it in a snapshot only, and so
//! does any hash, so a colliding pair cannot be searched for, only met; `table.rs` states the odds.

use std::hash::{BuildHasher as _, RandomState};

use crate::table::Fingerprint;

pub(crate) struct KeyHasher {
    secret: [u8; SECRET_BYTES],
}

pub(crate) const SECRET_BYTES: usize = 192;

impl KeyHasher {
    /// With a secret of its own.
    pub(crate) fn new() -> Self {
        // The standard library's hasher is keyed by the system's randomness: it stretches it here.
        let random = RandomState::new();
        let mut secret = [0; SECRET_BYTES];
        for (index, part) in secret.chunks_exact_mut(8).enumerate() {
            part.copy_from_slice(&random.hash_one(index).to_ne_bytes());
        }
        Self { secret }
    }

    /// With the secret of another, whose keys it takes over.
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

    /// What collides in one store does not in another: nothing can be prepared beforehand.
    #[test]
    fn d4_each_store_hashes_by_its_own_secret() {
        let (one, other) = (KeyHasher::new(), KeyHasher::new());
        for key in [&b""[..], b"a", b"alice", &[0; 16], &[0; 17], &[7; 200], &[1; 4096]] {
            assert_eq!(one.fingerprint(key), one.fingerprint(key));
            assert_ne!(one.fingerprint(key), other.fingerprint(key));
        }
    }
}
