//! The RESP surface.

use std::sync::Arc;

use crate::server::{Connection, Peer, Shared, Stop};

/// Serves a connection until either end closes it.
pub(crate) async fn serve_connection(
    _shared: Arc<Shared>,
    _stream: Box<dyn Connection>,
    _peer: Peer,
    _stop: Stop,
) {
}
