//! Ports for servers.

use std::hash::{BuildHasher, RandomState};
use std::net::TcpListener;
use std::ops::Range;

/// Below those that the system gives to outgoing connections. A client that tries a dead server's
/// port again and again would else be given that very port one day, and be connected to itself.
const PORTS: Range<u16> = 14_000..32_000;

/// A port on which nobody listens now. Somebody may before its server does: then try another.
pub(super) fn free_port() -> u16 {
    let candidates = u64::from(PORTS.end - PORTS.start);
    loop {
        let random = RandomState::new().hash_one(()) % candidates;
        let port = PORTS.start + u16::try_from(random).expect("less than the candidates");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
