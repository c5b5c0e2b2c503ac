//! The RESP surface: `CL.THROTTLE` as redis-cell answers it, and Tallygate's own commands.
//!
//! Any Redis client can ask. `connection.rs` reads, decides and writes in turn; `parse.rs` makes words of bytes;
//! `commands.rs` is the table of commands; `decide.rs` carries out the ones that decide, `session.rs` the ones by which clients
//! introduce themselves; `arguments.rs` reads their arguments, and `reply.rs` writes the replies. Nothing is stored here: `SET` is
//! an unknown command.

mod arguments;
mod commands;
mod connection;
mod decide;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod parse;
mod reply;
mod session;

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
