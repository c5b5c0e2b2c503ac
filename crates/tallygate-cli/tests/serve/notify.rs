//! What a service manager hears of a server that it started.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use crate::common::Served;

const POLICY: &str = "[policies.api]\nlimit = 5\nwindow = \"1m\"\n";

#[test]
fn a_service_manager_is_told_that_it_is_ready_reloads_lives_and_stops() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).expect("a socket");
    manager.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let hears = |expected: &str| loop {
        let mut told = [0; 256];
        let length = manager.recv(&mut told).expect("it is told");
        let told = String::from_utf8_lossy(&told[..length]).into_owned();
        if told.lines().any(|line| line == expected) {
            break;
        }
        assert!(expected == "WATCHDOG=1" || told == "WATCHDOG=1", "{told:?} before {expected}");
    };
    let path = path.to_str().expect("text");
    let variables = [("NOTIFY_SOCKET", path), ("WATCHDOG_USEC", "200000")];
    let mut served = Served::with_variables(&[], Some(POLICY), &variables);
    hears("READY=1");
    hears("WATCHDOG=1");
    served.signal("HUP");
    hears("RELOADING=1");
    hears("READY=1");
    assert_eq!(served.stop(), Some(0));
    hears("STOPPING=1");
}

#[test]
fn a_manager_that_has_gone_is_not_waited_for() {
    let mut served = Served::with_variables(&[], None, &[("NOTIFY_SOCKET", "/nowhere/notify")]);
    assert_eq!(served.stop(), Some(0));
    assert!(served.log().contains("cannot be told how it is"), "{}", served.log());
}
