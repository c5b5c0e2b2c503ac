//! Tests the roles of tokens, over HTTP and RESP.

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

/// Requests that need a check token, and requests that need an admin token.
const TO_CHECK: [&str; 9] = [
    "POST /v1/check",
    "POST /v1/peek",
    "POST /v1/reserve",
    "POST /v1/settle",
    "POST /json",
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

/// Sends RESP commands and returns all replies.
fn exchange(served: &Served, commands: &str) -> String {
    let mut stream = TcpStream::connect(served.resp()).expect("the connection opens");
    stream.set_read_timeout(Some(PATIENCE)).expect("the socket option is set");
    stream.write_all(commands.as_bytes()).expect("the write succeeds");
    stream.shutdown(Shutdown::Write).expect("the write side closes");
    let mut replies = String::new();
    stream.read_to_string(&mut replies).expect("there are replies");
    replies
}

/// Fault H7.
#[test]
fn a_token_grants_its_role_and_nothing_more() {
    let served = served();
    for line in FOR_ALL {
        assert_eq!(ask(served.http(), line, &[], "").status, 200, "{line}");
    }
    for line in TO_CHECK {
        let rejected = ask(served.http(), line, &[], "");
        assert_eq!((rejected.status, rejected.field("www-authenticate")), (401, Some("Bearer")));
        assert_eq!(
            rejected.problem(),
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
        let rejected = with_token(&served, line, CHECK);
        assert_eq!(rejected.status, 403, "{line}");
        assert_eq!(
            rejected.problem(),
            "this needs an admin token; the token sent is a check token"
        );
        let passed = with_token(&served, line, ADMIN);
        assert!(!matches!(passed.status, 401 | 403), "{line}: {passed:?}");
    }
    let metrics = with_token(&served, "GET /metrics", CHECK).body;
    assert!(metrics.contains("tallygate_tokens_rejected_total{surface=\"http\"}"), "{metrics}");
}

/// Fault H7.
#[test]
fn an_unauthenticated_resp_client_gets_only_errors() {
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

/// Fault H7.
#[test]
fn a_token_grants_the_same_role_over_resp() {
    let served = served();
    let checked = "*6\r\n:1\r\n:5\r\n:4\r\n:0\r\n:720000000\r\n:0\r\n";
    let fresh = "*6\r\n:1\r\n:5\r\n:5\r\n:0\r\n:0\r\n:0\r\n";
    let check = "TG.CHECK api a\r\n";
    let reset = "TG.RESET api a\r\n";
    let forbidden = "-NOPERM this needs an admin token; the token sent is a check token\r\n";
    let reply = exchange(&served, &format!("AUTH {CHECK}\r\n{check}{reset}"));
    assert_eq!(reply, format!("+OK\r\n{checked}{forbidden}"));
    let reply = exchange(&served, &format!("AUTH operator {ADMIN}\r\n{reset}{check}"));
    assert_eq!(reply, format!("+OK\r\n{fresh}{checked}"));
    let reply = exchange(&served, &format!("HELLO 2 AUTH default {ADMIN}\r\n{reset}"));
    assert!(reply.ends_with(fresh), "{reply}");
    // RESET clears the authentication.
    let reply = exchange(&served, &format!("AUTH {ADMIN}\r\nRESET\r\n{check}"));
    assert_eq!(reply, "+OK\r\n+RESET\r\n-NOAUTH Authentication required.\r\n");
}

#[test]
fn without_check_tokens_every_client_may_check() {
    let config = CONFIG.replace("check = [\"env:CHECK\"]", "");
    let served = Served::with_variables(&[], Some(&config), &[("ADMIN", ADMIN)]);
    for line in TO_CHECK {
        assert!(!matches!(ask(served.http(), line, &[], "").status, 401 | 403), "{line}");
    }
    assert_eq!(get(served.http(), "/v1/admin/hot").status, 401);
    assert!(exchange(&served, "TG.CHECK api a\r\n").starts_with("*6\r\n:1"));
}

#[test]
fn a_token_can_be_rotated_without_downtime() {
    let folder = tempfile::tempdir().expect("the directory is created");
    let file = folder.path().join("tokens");
    let (old, new) = ("old-token-of-a-service", "new-token-of-a-service");
    std::fs::write(&file, format!("{old}\n")).expect("the file is written");
    let config = format!(
        "[auth]\ncheck = [\"file:{}\"]\n[policies.api]\nlimit = 1\nwindow = \"1h\"\n",
        file.display()
    );
    let served = Served::start(&[], Some(&config));
    let is_right = |token| with_token(&served, "GET /metrics", token).status == 200;
    let mut stays = TcpStream::connect(served.resp()).expect("the connection opens");
    stays.set_read_timeout(Some(PATIENCE)).expect("the socket option is set");
    let mut ask = |commands: &str, length: usize| {
        stays.write_all(commands.as_bytes()).expect("the write succeeds");
        let mut reply = vec![0; length];
        stays.read_exact(&mut reply).expect("there is a reply");
        String::from_utf8(reply).expect("the text is UTF-8")
    };
    assert_eq!(ask(&format!("AUTH {old}\r\nPING\r\n"), 12), "+OK\r\n+PONG\r\n");
    assert!(is_right(old) && !is_right(new));
    std::fs::write(&file, format!("{old}\n{new}\n")).expect("the file is written");
    wait_until("the new token is right", PATIENCE, || is_right(new));
    assert!(is_right(old));
    std::fs::write(&file, format!("{new}\n")).expect("the file is written");
    wait_until("the old token is wrong", PATIENCE, || !is_right(old));
    assert!(is_right(new));
    // Also on a connection that authenticated before.
    assert_eq!(ask("PING\r\n", 34), "-NOAUTH Authentication required.\r\n");
    // A file without tokens is rejected; the tokens in force stay.
    std::fs::write(&file, "# none\n").expect("the file is written");
    wait_until("the file is rejected", PATIENCE, || {
        served.log().contains("contains no token; write one per line")
    });
    assert!(is_right(new) && !is_right(""));
}

/// Fault G1.
#[test]
fn a_token_file_that_is_a_pipe_for_a_while_does_not_stop_reloads() {
    let folder = tempfile::tempdir().expect("the directory is created");
    let file = folder.path().join("tokens");
    let (old, new) = ("old-token-of-a-service", "new-token-of-a-service");
    std::fs::write(&file, old).expect("the file is written");
    let config = format!(
        "[auth]\ncheck = [\"file:{}\"]\n[policies.api]\nlimit = 1\nwindow = \"1h\"\n",
        file.display()
    );
    let served = Served::start(&[], Some(&config));
    let is_right = |token| with_token(&served, "GET /metrics", token).status == 200;
    assert!(is_right(old));
    std::fs::remove_file(&file).expect("the file is removed");
    rustix::fs::mkfifoat(rustix::fs::CWD, &file, rustix::fs::Mode::RUSR).expect("a pipe");
    wait_until("the pipe is rejected", PATIENCE, || {
        let metrics = with_token(&served, "GET /metrics", old).body;
        metrics.contains("tallygate_reloads_total{outcome=\"rejected\"} 1")
    });
    assert!(served.log().contains("it is a named pipe; use a regular file"), "{}", served.log());
    std::fs::write(folder.path().join("next"), new).expect("the file is written");
    std::fs::rename(folder.path().join("next"), &file).expect("the pipe is replaced");
    wait_until("the new token is right", PATIENCE, || is_right(new));
    assert!(!is_right(old));
}

/// Fault H10.
#[test]
fn no_token_is_ever_shown() {
    let variables = [("CHECK", CHECK), ("ADMIN", ADMIN)];
    let served = Served::with_variables(&["--log", "trace"], Some(CONFIG), &variables);
    let mut output = String::new();
    for line in TO_CHECK.iter().chain(&TO_ADMINISTER) {
        for token in [CHECK, ADMIN, "unknown-token-of-a-stranger"] {
            output += &format!("{:?}", with_token(&served, line, token));
        }
    }
    output +=
        &exchange(&served, &format!("AUTH {CHECK}\r\nINFO\r\nCLIENT LIST\r\nCONFIG GET *\r\n"));
    output += &exchange(&served, &format!("AUTH a {ADMIN}\r\nHELLO 3 AUTH a {ADMIN}\r\n"));
    output += &exchange(&served, "AUTH unknown-token-of-a-stranger\r\n");
    output += &served.log();
    for secret in [CHECK, ADMIN, "unknown-token-of-a-stranger"] {
        assert!(!output.contains(secret), "{output}");
    }
}

#[test]
fn the_check_command_sends_a_token() {
    let served = served();
    let folder = tempfile::tempdir().expect("the directory is created");
    let file = folder.path().join("token");
    let check = |token: &str| {
        std::fs::write(&file, token).expect("the file is written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
        command.args(["check", "--resp", served.resp(), "api", "alice", "--token-file"]).arg(&file);
        command.output().expect("the binary runs")
    };
    let right = check(&format!("# for the script\n{CHECK}\n"));
    assert_eq!(right.stdout, b"allowed, 4 of 5 left\n", "{right:?}");
    let wrong = check("unknown-token-of-a-stranger\n");
    let message = String::from_utf8_lossy(&wrong.stderr);
    assert!(wrong.status.code() == Some(2) && message.contains("WRONGPASS"), "{message}");
    assert!(!message.contains("wrong-token"), "{message}");
    let mut without = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    let without = without.args(["check", "--resp", served.resp(), "api", "alice"]).output();
    let message = without.expect("the binary runs").stderr;
    let expected = "failed: the server needs a token; use --token-file FILE\n";
    assert!(String::from_utf8_lossy(&message).ends_with(expected), "{message:?}");
}

#[test]
fn the_ping_command_needs_no_token() {
    let ping = |address: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
        command.args(["ping", "--resp", address]).output().expect("the binary runs")
    };
    let mut served = served();
    let running = ping(served.resp());
    assert_eq!(running.status.code(), Some(0), "{running:?}");
    let other = ping(served.http());
    let message = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(
        other.status.code() == Some(2) && message.contains("is it a Tallygate server?"),
        "{message}"
    );
    served.stop();
    let gone = ping(served.resp());
    let message = String::from_utf8_lossy(&gone.stderr).into_owned();
    assert!(gone.status.code() == Some(2) && message.contains("ping of"), "{message}");
}
