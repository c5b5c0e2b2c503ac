//! Tells whoever started the server how it is doing, as systemd's `Type=notify` has it: datagrams to `NOTIFY_SOCKET`.
//!
//! A unit is then started when the server listens, not when its process exists, and a server whose threads are stuck is
//! noticed. Without the variable nobody is told anything, and whoever does not listen is not waited for.

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// It listens, with this configuration.
pub(super) fn ready() {
    tell("READY=1\nSTATUS=serving");
}

/// It reads its configuration anew, and says that it is [`ready`] when that is done.
pub(super) fn reloading() {
    tell("RELOADING=1\nSTATUS=reading the configuration");
}

/// It was told to stop.
pub(super) fn stopping() {
    tell("STOPPING=1\nSTATUS=answering what has come");
}

/// Says that it is alive, twice as often as is asked for; for ever, if that is not at all.
pub(super) async fn stay_watched() {
    let Some(every) = watchdog(std::env::var("WATCHDOG_USEC").ok().as_deref()) else {
        return std::future::pending().await;
    };
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        tell("WATCHDOG=1");
    }
}

fn watchdog(micros: Option<&str>) -> Option<Duration> {
    let micros = micros?.parse().ok().filter(|micros| *micros > 1)?;
    Some(Duration::from_micros(micros) / 2)
}

fn tell(state: &str) {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty())
        && let Err(error) = send(&socket, state)
    {
        tracing::warn!(%error, "whoever started the server cannot be told how it is");
    }
}

fn send(socket: &OsString, state: &str) -> io::Result<()> {
    // A name that begins with an @ is not in the file system.
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
    fn a_watchdog_is_told_twice_as_often_as_it_asks() {
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
            send(&socket, "READY=1").expect("somebody listens");
            let mut told = [0; 32];
            let length = listener.recv(&mut told).expect("it was told");
            assert_eq!(&told[..length], b"READY=1");
        }
    }
}
