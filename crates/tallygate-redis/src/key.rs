//! What a client's key is called in Redis.
//!
//! `PREFIX{TAG}LENGTH:POLICY=CLIENT`, or `PREFIX{TAG}LENGTH:POLICY#DIGEST` for a long one. The length is that
//! of the policy's name, so that `a:b` with `c` and `a` with `b:c` are two keys. The tag is four digits of a
//! hash of the client: it alone decides which node of a cluster has the key, so a client cannot choose it by
//! putting braces into its name, and all policies of one client are in one place. In a cluster the hash has a secret that
//! the servers share: else a client could try out names until many are in one slot. With `~` before `=` or `#` it is the
//! key of what is out on lease, with `^` that of returns and resets, with `!` that of when a bucket was found full after an
//! outage.

use std::io::Write as _;

use sha2::{Digest as _, Sha256};
use tallygate::MAX_KEY_BYTES;

use crate::Error;

/// The longest client that is written out. Of longer ones there is a digest.
const LONGEST: usize = 128;

/// A key in Redis, and its slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) name: Vec<u8>,
    pub(crate) slot: u16,
}

/// What tags are made with: a secret in a cluster, nothing elsewhere.
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

    /// The key of the secret that the servers of a cluster share.
    pub(crate) fn of_secret(prefix: &str) -> Self {
        Self { name: format!("{prefix}{{slots}}secret").into_bytes(), slot: slot(b"slots") }
    }

    /// The key of what is out on lease of another, in the same slot.
    pub(crate) fn of_leases(
        prefix: &str,
        secret: Option<&SlotSecret>,
        policy: &str,
        client: &[u8],
    ) -> Result<Self, Error> {
        Self::marked(prefix, secret, policy, b"~", client)
    }

    /// The key of the returns and resets of this one, in the same slot: with `^` before the `=` or `#`.
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

    /// The key of when a bucket was found full after an outage, in the same slot: with `!` before the `=` or `#`.
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

/// The slot of a hash tag in a cluster.
pub(crate) fn slot(tag: &[u8]) -> u16 {
    crc16::State::<crc16::XMODEM>::calculate(tag) % 16384
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(policy: &str, client: &str) -> String {
        let name = Key::new("tg:", None, policy, client.as_bytes()).unwrap().name;
        // Without the tag, in which few bits of the client are: they must differ all the same.
        String::from_utf8(name).unwrap().split_once('}').unwrap().1.to_owned()
    }

    #[test]
    fn different_policies_and_clients_never_share_a_key() {
        assert_ne!(name("a:b", "c"), name("a", "b:c"));
        assert_ne!(name("a", "=b"), name("a=", "b"));
        assert_ne!(name("a=b", "c"), name("a", "b=c"));
        // A digest written out is another client than the one it is of.
        let long = name("a", &"x".repeat(129));
        let digest = long.split_once('#').unwrap().1;
        assert_ne!(name("a", digest), long);
        assert_ne!(name("a", &"x".repeat(129)), name("a", &"x".repeat(130)));
    }

    #[test]
    fn what_is_out_on_lease_is_beside_its_key_and_is_no_clients_key() {
        for client in ["alice", "=alice", "~=alice", &"x".repeat(129)] {
            let key = Key::new("tg:", None, "api", client.as_bytes()).unwrap();
            let leases = Key::of_leases("tg:", None, "api", client.as_bytes()).unwrap();
            assert_eq!(key.slot, leases.slot);
            let rest =
                String::from_utf8(leases.name).unwrap().split_once('}').unwrap().1.to_owned();
            assert!(rest.starts_with("3:api~=") || rest.starts_with("3:api~#"), "{rest}");
        }
        assert!(name("api~", "alice").starts_with("4:api~="), "the length tells it apart");
    }

    #[test]
    fn returns_have_a_key_beside_the_clients() {
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
    #[test]
    fn j13_a_client_cannot_choose_slots_without_the_secret() {
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
    fn a_key_that_is_too_long_is_refused() {
        assert_eq!(
            Key::new("", None, "", &vec![0; MAX_KEY_BYTES + 1]),
            Err(Error::KeyTooLong { bytes: MAX_KEY_BYTES + 1 })
        );
    }
}
