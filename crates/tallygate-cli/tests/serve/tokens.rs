//! Who may ask and who may administer: tokens, over HTTP and RESP.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::process::Command;
use std::time::Duration;

use crate::common::Served;
use crate::http_client::{Reply, ask, get};
use tallygate_testkit::servers::wait_until;

const CHECK: &str = "check-token-of-a-service";
const ADMIN: &str = "admin-token-of-the-operator";
const CONFIG: &str = r#"
    [auth]
    check = ["env:CHECK"]
    admin = ["env:ADMIN"]
    [policies.api]
    limit = 5
    window = "1000h"
"#;
const PATIENCE: Duration = Duration::from_secs(20);

/// What needs a token to ask, and what one to administer.
const TO_CHECK: [&str; 8] = [
    "POST /v1/check",
    "POST /v1/peek",
    "POST /v1/reserve",
    "POST /v1/settle",
    "POST /v1/simulate",
    "POST /v1/explain",
    "GET /v1/authorize/api",
    "GET /metrics",
];
const TO_ADMINISTER: [&str; 8] = [
    "POST /v1/refund",
    "POST /v1/reset",
    "GET /v1/policies",
    "GET /v1/admin/hot",
    "GET /v1/admin/client?key=a",
    "GET /v1/admin/overrides",
    "POST /v1/admin/reload",
    "POST /v1/backtest?policy=gcra+1/s",
];
const FOR_ALL: [&str; 4] = ["GET /", "GET /livez", "GET /readyz", "GET /openapi.json"];

fn served() -> Served {
    Served::with_variables(&[], Some(CONFIG), &[("CHECK", CHECK), ("ADMIN", ADMIN)])
}

fn with_token(served: &Served, line: &str, token: &str) -> Reply {
    let bearer = format!("Bearer {token}");
    ask(served.http(), line, &[("authorization", &bearer)], "")
}

/// All that is answered to some commands of RESP.
fn exchange(served: &Served, commands: &str) -> String {
    let mut stream = TcpStream::connect(served.resp()).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    stream.write_all(commands.as_bytes()).expect("it reads");
    stream.shutdown(Shutdown::Write).expect("a socket");
    let mut replies = String::new();
    stream.read_to_string(&mut replies).expect("replies");
    replies
}

#[test]
fn h7_a_token_opens_what_it_was_handed_out_for_and_nothing_more() {
    let served = served();
    for line in FOR_ALL {
        assert_eq!(ask(served.http(), line, &[], "").status, 200, "{line}");
    }
    for line in TO_CHECK {
        let refused = ask(served.http(), line, &[], "");
        assert_eq!((refused.status, refused.field("www-authenticate")), (401, Some("Bearer")));
        assert_eq!(
            refused.problem(),
            "missing or invalid token; send `Authorization: Bearer TOKEN`",
            "{line}"
        );
        for token in ["", "check-token-of-a-servic", "check-token-of-a-services", "CHECK"] {
            assert_eq!(with_token(&served, line, token).status, 401, "{line} {token}");
        }
        for token in [CHECK, ADMIN] {
            let passed = with_token(&served, line, token);
            assert!(!matches!(passed.status, 401 | 403), "{line}: {passed:?}");
        }
    }
    for line in TO_ADMINISTER {
        assert_eq!(ask(served.http(), line, &[], "").status, 401, "{line}");
        let refused = with_token(&served, line, CHECK);
        assert_eq!(refused.status, 403, "{line}");
        assert_eq!(refused.problem(), "this is for the operator; your token lets you check");
        let passed = with_token(&served, line, ADMIN);
        assert!(!matches!(passed.status, 401 | 403), "{line}: {passed:?}");
    }
    let metrics = with_token(&served, "GET /metrics", CHECK).body;
    assert!(metrics.contains("tallygate_tokens_refused_total{surface=\"http\"}"), "{metrics}");
}

#[test]
fn h7_who_has_not_authenticated_by_resp_is_told_nothing() {
    let served = served();
    let needed = "-NOAUTH Authentication required.\r\n";
    for command in ["TG.CHECK api a", "CL.THROTTLE a 1 1 60", "INFO", "PING", "TG.RESET api a", "X"]
    {
        assert_eq!(exchange(&served, &format!("{command}\r\n")), needed, "{command}");
    }
    let hello = exchange(&served, "HELLO 3\r\n");
    assert!(hello.starts_with("-NOAUTH HELLO must be called"), "{hello}");
    let wrong = exchange(&served, "AUTH check-token-of-a-servic\r\nPING\r\n");
    assert!(wrong.starts_with("-WRONGPASS ") && wrong.ends_with(needed), "{wrong}");
}

#[test]
fn h7_a_token_opens_as_much_by_resp() {
    let served = served();
    let checked = "*6\r\n:1\r\n:5\r\n:4\r\n:0\r\n:720000000\r\n:0\r\n";
    let fresh = "*6\r\n:1\r\n:5\r\n:5\r\n:0\r\n:0\r\n:0\r\n";
    let check = "TG.CHECK api a\r\n";
    let reset = "TG.RESET api a\r\n";
    let forbidden = "-NOPERM this is for the operator; your token lets you check\r\n";
    let told = exchange(&served, &format!("AUTH {CHECK}\r\n{check}{reset}"));
    assert_eq!(told, format!("+OK\r\n{checked}{forbidden}"));
    let told = exchange(&served, &format!("AUTH operator {ADMIN}\r\n{reset}{check}"));
    assert_eq!(told, format!("+OK\r\n{fresh}{checked}"));
    let told = exchange(&served, &format!("HELLO 2 AUTH default {ADMIN}\r\n{reset}"));
    assert!(told.ends_with(fresh), "{told}");
    // Who starts over has no token any more.
    let told = exchange(&served, &format!("AUTH {ADMIN}\r\nRESET\r\n{check}"));
    assert_eq!(told, "+OK\r\n+RESET\r\n-NOAUTH Authentication required.\r\n");
}

#[test]
fn without_tokens_to_ask_with_anybody_may_ask() {
    let config = CONFIG.replace("check = [\"env:CHECK\"]", "");
    let served = Served::with_variables(&[], Some(&config), &[("ADMIN", ADMIN)]);
    for line in TO_CHECK {
        assert!(!matches!(ask(served.http(), line, &[], "").status, 401 | 403), "{line}");
    }
    assert_eq!(get(served.http(), "/v1/admin/hot").status, 401);
    assert!(exchange(&served, "TG.CHECK api a\r\n").starts_with("*6\r\n:1"));
}

#[test]
fn a_token_is_replaced_without_a_moment_in_which_none_is_right() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tokens");
    let (old, new) = ("old-token-of-a-service", "new-token-of-a-service");
    std::fs::write(&file, format!("{old}\n")).expect("written");
    let config = format!(
        "[auth]\ncheck = [\"file:{}\"]\n[policies.api]\nlimit = 1\nwindow = \"1h\"\n",
        file.display()
    );
    let served = Served::start(&[], Some(&config));
    let is_right = |token| with_token(&served, "GET /metrics", token).status == 200;
    let mut stays = TcpStream::connect(served.resp()).expect("it listens");
    stays.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let mut ask = |commands: &str, length: usize| {
        stays.write_all(commands.as_bytes()).expect("it reads");
        let mut reply = vec![0; length];
        stays.read_exact(&mut reply).expect("a reply");
        String::from_utf8(reply).expect("text")
    };
    assert_eq!(ask(&format!("AUTH {old}\r\nPING\r\n"), 12), "+OK\r\n+PONG\r\n");
    assert!(is_right(old) && !is_right(new));
    std::fs::write(&file, format!("{old}\n{new}\n")).expect("written");
    wait_until("the new token is right", PATIENCE, || is_right(new));
    assert!(is_right(old));
    std::fs::write(&file, format!("{new}\n")).expect("written");
    wait_until("the old token is wrong", PATIENCE, || !is_right(old));
    assert!(is_right(new));
    // Also to who has been here since.
    assert_eq!(ask("PING\r\n", 34), "-NOAUTH Authentication required.\r\n");
    // A file without tokens changes nothing: nobody is locked out, nobody let in.
    std::fs::write(&file, "# none\n").expect("written");
    wait_until("it is refused", PATIENCE, || {
        served.log().contains("has no token; write one a line")
    });
    assert!(is_right(new) && !is_right(""));
}

#[test]
fn h10_no_token_is_told_to_anybody() {
    let variables = [("CHECK", CHECK), ("ADMIN", ADMIN)];
    let served = Served::with_variables(&["--log", "trace"], Some(CONFIG), &variables);
    let mut said = String::new();
    for line in TO_CHECK.iter().chain(&TO_ADMINISTER) {
        for token in [CHECK, ADMIN, "wrong-token-of-nobody"] {
            said += &format!("{:?}", with_token(&served, line, token));
        }
    }
    said += &exchange(&served, &format!("AUTH {CHECK}\r\nINFO\r\nCLIENT LIST\r\nCONFIG GET *\r\n"));
    said += &exchange(&served, &format!("AUTH a {ADMIN}\r\nHELLO 3 AUTH a {ADMIN}\r\n"));
    said += &exchange(&served, "AUTH wrong-token-of-nobody\r\n");
    said += &served.log();
    for secret in [CHECK, ADMIN, "wrong-token-of-nobody"] {
        assert!(!said.contains(secret), "{said}");
    }
}

#[test]
fn the_command_asks_with_a_token() {
    let served = served();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("token");
    let asked = |token: &str| {
        std::fs::write(&file, token).expect("written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
        command.args(["check", "--resp", served.resp(), "api", "alice", "--token-file"]).arg(&file);
        command.output().expect("the binary runs")
    };
    let right = asked(&format!("# for the script\n{CHECK}\n"));
    assert_eq!(right.stdout, b"allowed, 4 of 5 left\n", "{right:?}");
    let wrong = asked("wrong-token-of-nobody\n");
    let told = String::from_utf8_lossy(&wrong.stderr);
    assert!(wrong.status.code() == Some(2) && told.contains("WRONGPASS"), "{told}");
    assert!(!told.contains("wrong-token"), "{told}");
}

#[test]
fn the_command_that_asks_whether_it_is_there_needs_no_token() {
    let pinged = |address: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
        command.args(["ping", "--resp", address]).output().expect("the binary runs")
    };
    let mut served = served();
    let there = pinged(served.resp());
    assert_eq!(there.status.code(), Some(0), "{there:?}");
    let other = pinged(served.http());
    let told = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(other.status.code() == Some(2) && told.contains("is it a Tallygate server?"), "{told}");
    served.stop();
    let gone = pinged(served.resp());
    let told = String::from_utf8_lossy(&gone.stderr).into_owned();
    assert!(gone.status.code() == Some(2) && told.contains("cannot ask"), "{told}");
}
