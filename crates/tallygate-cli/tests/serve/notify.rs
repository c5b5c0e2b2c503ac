//! Tests the notifications to a service manager (`sd_notify`).

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use crate::common::Served;

const POLICY: &str = "[policies.api]\nlimit = 5\nwindow = \"1m\"\n";

#[test]
fn the_service_manager_is_notified_of_readiness_reload_liveness_and_stop() {
    let folder = tempfile::tempdir().expect("the directory is created");
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).expect("the socket is bound");
    manager.set_read_timeout(Some(Duration::from_secs(20))).expect("the timeout is set");
    let receives = |expected: &str| loop {
        let mut message = [0; 256];
        let length = manager.recv(&mut message).expect("a notification arrives");
        let message = String::from_utf8_lossy(&message[..length]).into_owned();
        if message.lines().any(|line| line == expected) {
            break;
        }
        assert!(
            expected == "WATCHDOG=1" || message == "WATCHDOG=1",
            "{message:?} before {expected}"
        );
    };
    let path = path.to_str().expect("the text is UTF-8");
    let variables = [("NOTIFY_SOCKET", path), ("WATCHDOG_USEC", "200000")];
    let mut served = Served::with_variables(&[], Some(POLICY), &variables);
    receives("READY=1");
    receives("WATCHDOG=1");
    served.signal("HUP");
    receives("RELOADING=1");
    receives("READY=1");
    assert_eq!(served.stop(), Some(0));
    receives("STOPPING=1");
}

#[test]
fn the_server_does_not_wait_for_a_missing_service_manager() {
    let mut served = Served::with_variables(&[], None, &[("NOTIFY_SOCKET", "/nowhere/notify")]);
    assert_eq!(served.stop(), Some(0));
    assert!(served.log().contains("sd_notify failed"), "{}", served.log());
}
