//! The limit on open files, and how many connections it allows.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors reserved for listeners, files and the store.
const RESERVED: u64 = 64;

/// Raises the soft limit on open files to the hard limit.
pub(crate) fn raise() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::debug!(%error, "cannot raise the limit on open files; keeping the current one");
    }
}

/// Returns `wanted`, or fewer connections if the limit on open files is lower; then logs a warning.
pub(crate) fn connections(wanted: usize) -> usize {
    let Some(descriptors) = getrlimit(Resource::Nofile).current else { return wanted };
    let room = usize::try_from(descriptors.saturating_sub(RESERVED).max(1)).unwrap_or(usize::MAX);
    if wanted > room {
        tracing::warn!(
            max_connections = wanted,
            descriptors,
            "the limit on open files leaves room for {room} connections; using that as max_connections (to allow more, raise the limit with `ulimit -n` or LimitNOFILE)"
        );
    }
    wanted.min(room)
}
