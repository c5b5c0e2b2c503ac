//! A connection of a client: TLS, turns, and a deadline for writes.
//!
//! | question | file |
//! |---|---|
//! | Which certificate does a listener show? | `tls.rs` |
//! | How do other connections get their turn? | `turns.rs` |
//! | What if the client reads nothing? | `impatient.rs` |

mod impatient;
mod tls;
mod turns;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;

pub(crate) use impatient::Impatient;
pub(crate) use tls::Security;
pub(crate) use turns::{InTurns, TURN_BYTES};

/// A connection of whatever kind.
pub(crate) trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin + 'static> Connection for S {}

/// Told when it is time to stop.
pub(crate) type Stop = watch::Receiver<bool>;
