//! The names of keys in Redis.
//!
//! `PREFIX{TAG}LENGTH:POLICY=CLIENT`, or `PREFIX{TAG}LENGTH:POLICY#DIGEST` for a long client. The length is that of the
//! policy's name, so that `a:b` with `c` and `a` with `b:c` are two keys. The tag is four digits of a hash of the
//! client. It alone decides which node of a cluster has the key, so a client cannot choose the node by braces in its
//! name, and all policies of one client are on the same node. In a cluster, the hash includes a secret that the servers
//! share; otherwise, a client could search for names that share a slot. A `~` before `=` or `#` marks the key of
//! outstanding leases, `^` that of returns and resets, and `!` that of the time when a bucket was found full after an
//! outage.

use std::io::Write as _;

use sha2::{Digest as _, Sha256};
use tallygate::store::MAX_KEY_BYTES;

use crate::Error;

/// The longest client that is part of the name. A longer client is replaced by a digest.
const LONGEST: usize = 128;

/// A key in Redis, and its slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) name: Vec<u8>,
    pub(crate) slot: u16,
}

/// The secret that is hashed into tags in a cluster.
pub(crate) type SlotSecret = [u8; 32];

impl Key {
    pub(crate) fn new(
        prefix: &str,
        secret: Option<&SlotSecret>,
        policy: &str,
        client: &[u8],
    ) -> Result<Self, Error> {
        Self::marked(prefix, secret, policy, b"", client)
    }

    /// Returns the key of the secret that the servers of a cluster share.
    pub(crate) fn of_secret(prefix: &str) -> Self {
        Self { name: format!("{prefix}{{slots}}secret").into_bytes(), slot: slot(b"slots") }
    }

    /// Returns the key of the outstanding leases of a client, in the same slot.
    pub(crate) fn of_leases(
        prefix: &str,
        secret: Option<&SlotSecret>,
        policy: &str,
        client: &[u8],
    ) -> Result<Self, Error> {
        Self::marked(prefix, secret, policy, b"~", client)
    }

    /// Returns the key of the returns and resets of this key, in the same slot: with `^` before the `=` or `#`.
    pub(crate) fn of_returns(&self) -> Self {
        let Self { name, slot } = self;
        let tag_ends = name.iter().position(|byte| *byte == b'}').map_or(0, |place| place + 1);
        let digits = name[tag_ends..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let length = str::from_utf8(&name[tag_ends..tag_ends + digits]).ok();
        let length: usize = length.and_then(|length| length.parse().ok()).unwrap_or(0);
        let place = (tag_ends + digits + 1 + length).min(name.len());
        let name = [&name[..place], b"^", &name[place..]].concat();
        Self { name, slot: *slot }
    }

    /// Returns the key of the times when a bucket was found full and charged after an outage, in the same slot: with `!`
    /// before the `=` or `#`.
    pub(crate) fn of_outage(
        prefix: &str,
        secret: Option<&SlotSecret>,
        policy: &str,
        client: &[u8],
    ) -> Result<Self, Error> {
        Self::marked(prefix, secret, policy, b"!", client)
    }

    fn marked(
        prefix: &str,
        secret: Option<&SlotSecret>,
        policy: &str,
        mark: &[u8],
        client: &[u8],
    ) -> Result<Self, Error> {
        if client.len() > MAX_KEY_BYTES {
            return Err(Error::KeyTooLong { bytes: client.len() });
        }
        let [high, low] = match secret {
            Some(secret) => {
                let digest = Sha256::new().chain_update(secret).chain_update(client).finalize();
                [digest[0], digest[1]]
            }
            None => {
                let [.., high, low] = xxhash_rust::xxh3::xxh3_64(client).to_be_bytes();
                [high, low]
            }
        };
        let tag = [high >> 4, high & 15, low >> 4, low & 15].map(hex);
        let mut name = Vec::with_capacity(prefix.len() + policy.len() + client.len() + 32);
        name.extend_from_slice(prefix.as_bytes());
        name.push(b'{');
        name.extend_from_slice(&tag);
        name.push(b'}');
        // Writing to memory does not fail.
        let _ = write!(name, "{}:", policy.len());
        name.extend_from_slice(policy.as_bytes());
        name.extend_from_slice(mark);
        if client.len() > LONGEST {
            name.push(b'#');
            name.extend(
                Sha256::digest(client).iter().flat_map(|byte| [hex(byte >> 4), hex(byte & 15)]),
            );
        } else {
            name.push(b'=');
            name.extend_from_slice(client);
        }
        Ok(Self { name, slot: slot(&tag) })
    }
}

const fn hex(digit: u8) -> u8 {
    if digit < 10 { b'0' + digit } else { b'a' + digit - 10 }
}

/// Returns the slot of a hash tag in a cluster.
pub(crate) fn slot(tag: &[u8]) -> u16 {
    crc16::State::<crc16::XMODEM>::calculate(tag) % 16384
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(policy: &str, client: &str) -> String {
        let name = Key::new("tg:", None, policy, client.as_bytes()).unwrap().name;
        // The tag has only a few bits of the client, and names must differ without it.
        String::from_utf8(name).unwrap().split_once('}').unwrap().1.to_owned()
    }

    #[test]
    fn different_policies_and_clients_never_share_a_key() {
        assert_ne!(name("a:b", "c"), name("a", "b:c"));
        assert_ne!(name("a", "=b"), name("a=", "b"));
        assert_ne!(name("a=b", "c"), name("a", "b=c"));
        // A client whose name is the digest of another client has another key.
        let long = name("a", &"x".repeat(129));
        let digest = long.split_once('#').unwrap().1;
        assert_ne!(name("a", digest), long);
        assert_ne!(name("a", &"x".repeat(129)), name("a", &"x".repeat(130)));
    }

    #[test]
    fn leases_have_a_key_in_the_slot_of_their_client_that_no_client_has() {
        for client in ["alice", "=alice", "~=alice", &"x".repeat(129)] {
            let key = Key::new("tg:", None, "api", client.as_bytes()).unwrap();
            let leases = Key::of_leases("tg:", None, "api", client.as_bytes()).unwrap();
            assert_eq!(key.slot, leases.slot);
            let rest =
                String::from_utf8(leases.name).unwrap().split_once('}').unwrap().1.to_owned();
            assert!(rest.starts_with("3:api~=") || rest.starts_with("3:api~#"), "{rest}");
        }
        assert!(name("api~", "alice").starts_with("4:api~="), "the length distinguishes it");
    }

    #[test]
    fn returns_have_a_key_beside_the_key_of_the_client() {
        for (policy, client) in [("api", "alice"), ("a=b}c:1", "x^=y"), ("", "}{"), ("7", "12:=")] {
            let key = Key::new("tg:", None, policy, client.as_bytes()).unwrap();
            let returns = key.of_returns();
            assert_eq!(returns, Key::marked("tg:", None, policy, b"^", client.as_bytes()).unwrap());
            assert_eq!(key.slot, returns.slot);
        }
    }

    #[test]
    fn a_client_cannot_choose_its_slot() {
        for client in ["{x}1", "{x}2", "a{x}b", "{}", "}{"] {
            let key = Key::new("tg:", None, "api", client.as_bytes()).unwrap();
            let text = String::from_utf8(key.name).unwrap();
            let tag = text.split_once('{').unwrap().1.split_once('}').unwrap().0;
            assert_eq!(tag.len(), 4, "{text}");
            assert_eq!(key.slot, slot(tag.as_bytes()), "{text}");
        }
        let slots = ["{x}1", "{x}2", "{x}3"]
            .map(|client| Key::new("", None, "", client.as_bytes()).unwrap().slot);
        assert!(slots[0] != slots[1] || slots[1] != slots[2]);
    }

    /// Twenty keys that share a slot under one secret do not share one under another.
    ///
    /// Fault J13.
    #[test]
    fn a_client_cannot_choose_slots_without_the_secret() {
        let slot_of = |secret: Option<&SlotSecret>, client: usize| {
            Key::new("tg:", secret, "api", client.to_string().as_bytes()).unwrap().slot
        };
        let (known, secret) = ([1; 32], [2; 32]);
        let wanted = slot_of(Some(&known), 0);
        let chosen: Vec<_> =
            (0..).filter(|client| slot_of(Some(&known), *client) == wanted).take(20).collect();
        let slots: std::collections::HashSet<_> =
            chosen.iter().map(|client| slot_of(Some(&secret), *client)).collect();
        assert!(slots.len() >= 18, "{slots:?}");
        let unkeyed: std::collections::HashSet<_> =
            chosen.iter().map(|client| slot_of(None, *client)).collect();
        assert!(unkeyed.len() >= 18, "{unkeyed:?}");
    }

    #[test]
    fn slots_are_those_of_the_cluster_specification() {
        assert_eq!(slot(b"123456789"), 0x31c3);
    }

    #[test]
    fn a_key_that_is_too_long_is_rejected() {
        assert_eq!(
            Key::new("", None, "", &vec![0; MAX_KEY_BYTES + 1]),
            Err(Error::KeyTooLong { bytes: MAX_KEY_BYTES + 1 })
        );
    }
}
