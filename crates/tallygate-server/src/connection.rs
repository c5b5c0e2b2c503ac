//! A connection of a client: TLS, fairness between connections, and a deadline for writes.
//!
//! | question | file |
//! |---|---|
//! | Which certificate does a listener show? | `tls.rs` |
//! | How do other connections get their turn? | `fair_stream.rs` |
//! | What if the client reads nothing? | `write_deadline.rs` |

mod fair_stream;
mod tls;
mod write_deadline;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;

pub(crate) use fair_stream::{FairStream, TURN_BYTES};
pub(crate) use tls::Security;
pub(crate) use write_deadline::WriteDeadline;

/// A connection of any kind: TCP, TLS or a Unix socket.
pub(crate) trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin + 'static> Connection for S {}

/// Becomes true when the server shuts down.
pub(crate) type Stop = watch::Receiver<bool>;
