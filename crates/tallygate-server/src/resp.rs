//! The RESP surface: `CL.THROTTLE`, compatible with redis-cell, and Tallygate's own commands.
//!
//! Any Redis client works. `connection.rs` reads commands and writes replies, `parse.rs` parses bytes, and
//! `commands.rs` is the table of commands. `decide.rs` runs the commands that decide, `session.rs` those about the
//! connection, and `transaction.rs` stores commands between `MULTI` and `EXEC`. `arguments.rs` reads arguments, and
//! `reply.rs` writes replies. Commands that store data, such as `SET`,
//! do not exist.

mod arguments;
mod commands;
mod connection;
mod decide;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod parse;
mod reply;
mod session;
mod transaction;

use std::sync::Arc;

use crate::connection::{Connection, Stop};
use crate::peer::Peer;
use crate::shared::Shared;

/// Serves a connection until either end closes it.
pub(crate) async fn serve_connection(
    shared: Arc<Shared>,
    stream: Box<dyn Connection>,
    peer: Peer,
    stop: Stop,
) {
    let _open = shared.gate.metrics.count_connection("resp");
    connection::serve(shared, stream, peer, stop).await;
}
