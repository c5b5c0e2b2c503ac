//! How many connections there are descriptors for.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What is kept for listeners, files and the store.
const RESERVED: u64 = 64;

/// Asks the system for as many descriptors as it gives without asking an administrator.
pub(crate) fn raise() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::debug!(%error, "the number of descriptors stays as it is");
    }
}

/// As many connections as are wanted, or as there is room for; then a warning says so.
pub(crate) fn connections(wanted: usize) -> usize {
    let Some(descriptors) = getrlimit(Resource::Nofile).current else { return wanted };
    let room = usize::try_from(descriptors.saturating_sub(RESERVED).max(1)).unwrap_or(usize::MAX);
    if wanted > room {
        tracing::warn!(
            max_connections = wanted,
            descriptors,
            "there are descriptors for {room} connections only; raise the limit on open files (ulimit -n)"
        );
    }
    wanted.min(room)
}
