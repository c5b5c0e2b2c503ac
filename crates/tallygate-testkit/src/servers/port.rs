//! Free ports for servers.

use std::hash::{BuildHasher, RandomState};
use std::net::TcpListener;
use std::ops::Range;

/// Ports below the range that the system assigns to outgoing connections. Otherwise a client that keeps connecting to the
/// port of a dead server could be assigned that port and connect to itself.
const PORTS: Range<u16> = 14_000..32_000;

/// Returns a port on which no process listens. Another process may take it before the server starts; then try another
/// port.
pub(super) fn free_port() -> u16 {
    let candidates = u64::from(PORTS.end - PORTS.start);
    loop {
        let random = RandomState::new().hash_one(()) % candidates;
        let port = PORTS.start + u16::try_from(random).expect("the number fits 16 bits");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
