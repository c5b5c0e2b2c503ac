//! The client end of a connection.

use std::net::IpAddr;

use tokio::net::UnixStream;

/// The client end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    /// Its address; `None` over a Unix socket.
    pub(crate) address: Option<IpAddr>,
    /// Whether the client is a process of the server's own user or of root, over a Unix socket.
    pub(crate) is_same_user: bool,
}

impl Peer {
    /// Returns the peer of a TCP connection.
    pub(crate) const fn at(address: IpAddr) -> Self {
        Self { address: Some(address), is_same_user: false }
    }

    /// Returns the peer of a connection over a Unix socket, by the user that the kernel reports.
    pub(crate) fn of_socket(stream: &UnixStream) -> Self {
        let own = rustix::process::geteuid().as_raw();
        let user = stream.peer_cred().map(|peer| peer.uid());
        Self { address: None, is_same_user: user.is_ok_and(|user| user == own || user == 0) }
    }

    /// Returns whether the client connects over loopback.
    pub(crate) fn is_loopback(self) -> bool {
        self.address.is_some_and(|address| address.to_canonical().is_loopback())
    }
}
