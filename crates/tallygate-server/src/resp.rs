//! The RESP surface: `CL.THROTTLE` as redis-cell answers it, and Tallygate's own commands.
//!
//! Any Redis client can ask. `parse.rs` makes commands of bytes, `commands.rs` knows the commands and what clients say
//! to introduce themselves, `decide.rs` are those that decide, `reply.rs` writes what is answered, and `connection.rs`
//! keeps reading, deciding and writing in step. Nothing is stored here: who sends `SET` is told that it is unknown.

mod commands;
mod connection;
mod decide;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod parse;
mod reply;

use std::sync::Arc;

use crate::connection::{Connection, Stop};
use crate::metrics::SurfaceLabels;
use crate::peer::Peer;
use crate::shared::Shared;

/// Serves a connection until either end closes it.
pub(crate) async fn serve_connection(
    shared: Arc<Shared>,
    stream: Box<dyn Connection>,
    peer: Peer,
    stop: Stop,
) {
    let labels = SurfaceLabels { surface: "resp" };
    let open = shared.gate.metrics.connections.get_or_create_owned(&labels);
    open.inc();
    connection::serve(shared, stream, peer, stop).await;
    open.dec();
}
