//! Notifies the service manager, as systemd's `Type=notify` requires: datagrams to `NOTIFY_SOCKET`.
//!
//! So systemd knows when the server listens, and restarts it if its threads are stuck. Without the variable nothing is
//! sent, and sending never blocks.

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// Reports that the server listens.
pub(super) fn ready() {
    notify("READY=1\nSTATUS=serving");
}

/// Reports that the server reloads its configuration; [`ready`] ends the reload.
pub(super) fn reloading() {
    notify("RELOADING=1\nSTATUS=reloading the configuration");
}

/// Reports that the server shuts down.
pub(super) fn stopping() {
    notify("STOPPING=1\nSTATUS=shutting down");
}

/// Sends watchdog messages, twice as often as required. Never returns.
pub(super) async fn stay_watched() {
    let Some(every) = watchdog(std::env::var("WATCHDOG_USEC").ok().as_deref()) else {
        return std::future::pending().await;
    };
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        notify("WATCHDOG=1");
    }
}

fn watchdog(micros: Option<&str>) -> Option<Duration> {
    let micros = micros?.parse().ok().filter(|micros| *micros > 1)?;
    Some(Duration::from_micros(micros) / 2)
}

fn notify(state: &str) {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty())
        && let Err(error) = send(&socket, state)
    {
        tracing::warn!(%error, "sd_notify failed; the service manager does not see the state of the server");
    }
}

fn send(socket: &OsString, state: &str) -> io::Result<()> {
    // A name that starts with @ is an abstract socket.
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(true)?;
    sender.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watchdog_is_notified_twice_per_interval() {
        assert_eq!(watchdog(Some("30000000")), Some(Duration::from_secs(15)));
        for none in [None, Some("0"), Some("soon"), Some("-5")] {
            assert_eq!(watchdog(none), None, "{none:?}");
        }
    }

    #[test]
    fn a_socket_may_be_a_file_or_a_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("notify");
        let name = format!("tallygate-test-{}", std::process::id());
        let by_name = SocketAddr::from_abstract_name(&name).expect("a name");
        let abstract_socket = UnixDatagram::bind_addr(&by_name).expect("a socket");
        let listeners = [
            (UnixDatagram::bind(&path).expect("a socket"), path.into_os_string()),
            (abstract_socket, format!("@{name}").into()),
        ];
        for (listener, socket) in listeners {
            send(&socket, "READY=1").expect("the socket has a listener");
            let mut message = [0; 32];
            let length = listener.recv(&mut message).expect("the message arrives");
            assert_eq!(&message[..length], b"READY=1");
        }
    }
}
