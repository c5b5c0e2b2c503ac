//! What the error replies of a server mean: which calls they concern.
//!
//! A server that answers with an error is not unavailable. Some errors concern one key or script, others concern every
//! call until an operator or a failover changes something.

use redis::{ErrorKind, RedisError};

/// Returns the message as the server sent it: its first line, since it may be long.
pub(crate) fn message_of(error: &RedisError) -> String {
    let text = match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        _ => error.to_string(),
    };
    text.lines().next().unwrap_or_default().chars().take(200).collect()
}

/// Returns whether the server answers, but decides on no charge: for lack of memory, or because it rejects every call.
pub(crate) fn rejects_charges(error: &RedisError) -> bool {
    is_out_of_memory(error) || rejects_all(error)
}

/// Returns whether the server rejected a call because it is out of memory.
pub(crate) fn is_out_of_memory(error: &RedisError) -> bool {
    error.code() == Some("OOM")
        || error.detail().is_some_and(|detail| detail.contains("OOM command"))
}

/// Returns whether the server rejected a call for a reason that concerns every call: of access, of its role or of its
/// state. Other errors concern a key or a script.
pub(crate) fn rejects_all(error: &RedisError) -> bool {
    const CODES: [&str; 10] = [
        "NOAUTH",
        "WRONGPASS",
        "NOPERM",
        "DENIED",
        "READONLY",
        "MISCONF",
        "LOADING",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "NOREPLICAS",
    ];
    // A server that requires a password rejects a long command, such as a script, before it reads it.
    let is_unauthenticated =
        error.detail().is_some_and(|detail| detail.contains("unauthenticated"));
    is_unauthenticated || error.code().is_some_and(|code| CODES.contains(&code))
}

/// Returns whether the server answered, but rejected a new connection: it requires another password, or the user may not
/// use the database.
pub(crate) fn rejects_connection(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::AuthenticationFailed | ErrorKind::Server(_))
}
