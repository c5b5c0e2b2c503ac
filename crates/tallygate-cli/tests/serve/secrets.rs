//! Tests that the password of the store appears in no output of the server.

use std::process::{Command, Output};
use std::time::Duration;

use crate::common::Served;
use crate::http_client::{get, post};
use tallygate_testkit::servers::{Flavor, Server, wait_until};

const PASSWORD: &str = "hunter2-of-the-store";
const TOKEN: &str = "token-of-the-operator";
const POLICY: &str = "[policies.api]\nlimit = 5\nwindow = \"1h\"\n";

/// Returns all output of the server: replies over HTTP and RESP, metrics and the log.
fn all_output(served: &Served) -> String {
    let mut output_text = String::new();
    for path in ["/v1/check", "/v1/peek", "/v1/refund", "/v1/reset", "/v1/admin/reload"] {
        output_text +=
            &format!("{:?}\n", post(served.http(), path, r#"{"policy":"api","key":"alice"}"#));
    }
    for path in
        ["/", "/metrics", "/readyz", "/v1/authorize/api", "/v1/admin/hot", "/v1/admin/client?key=a"]
    {
        output_text += &format!("{:?}\n", get(served.http(), path));
    }
    for words in
        ["TG.CHECK api a", "TG.REFUND api a 1", "INFO", "CONFIG GET *", "CL.THROTTLE a 1 1 60"]
    {
        let words: Vec<_> = words.split(' ').collect();
        let output =
            Command::new("redis-cli").args(["-p", served.resp_port()]).args(words).output();
        output_text += &format!("{:?}\n", output.expect("redis-cli runs"));
    }
    output_text + &served.log()
}

#[track_caller]
fn is_nowhere(secret: &str, output_text: &str) {
    assert!(!output_text.contains(secret), "{output_text}");
}

/// Fault H10.
#[test]
fn the_password_of_the_store_is_in_no_reply_log_or_metric() {
    let store = Server::start(Flavor::Redis);
    store.command(&["CONFIG", "SET", "requirepass", PASSWORD]).expect("the limit is set");
    for (password, is_right) in [(PASSWORD, true), ("hunter2-of-another", false)] {
        let url = format!("redis://default:{password}@{}/", store.address());
        // As a flag, in the configuration and in the environment, with the most verbose log.
        let config = format!("store = \"{url}\"\n{POLICY}");
        for place in ["flag", "file", "variable"] {
            let (options, variables) = match place {
                "flag" => (vec!["--log", "trace", "--store", &url], vec![]),
                "file" => (vec!["--log", "trace"], vec![]),
                _ => (
                    vec!["--log", "trace", "--log-format", "json"],
                    vec![("TALLYGATE_STORE", &*url)],
                ),
            };
            let config = if place == "file" { &config } else { POLICY };
            let served = Served::with_variables(&options, Some(config), &variables);
            wait_until(
                "the store accepts or rejects the password",
                Duration::from_secs(20),
                || {
                    let decision =
                        post(served.http(), "/v1/check", r#"{"policy":"api","key":"bob"}"#).json();
                    (decision["source"] == "store") == is_right
                },
            );
            is_nowhere(password, &all_output(&served));
        }
    }
    // The store is down.
    let url = format!("redis://default:{PASSWORD}@{}/", store.address());
    let served = Served::start(&["--log", "trace", "--store", &url], Some(POLICY));
    store.kill();
    let output_text = all_output(&served);
    assert!(output_text.contains("redis is unavailable"), "{output_text}");
    is_nowhere(PASSWORD, &output_text);
}

fn tallygate(words: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    command.args(words).envs(variables.iter().copied()).output().expect("the binary runs")
}

/// Fault H10.
#[test]
fn neither_check_config_nor_the_help_shows_a_password() {
    let path = std::env::temp_dir().join(format!("tallygate-secrets-{}.toml", std::process::id()));
    let name = path.to_str().expect("there is a name");
    let shown = |text: &str| {
        std::fs::write(&path, text).expect("the file is written");
        let output = tallygate(&["check-config", name], &[("ADMIN", TOKEN)]);
        (output.status.code(), format!("{output:?}"))
    };
    let right = format!(
        "store = \"redis://alice:{PASSWORD}@db:6379/1\"\n[auth]\nadmin = [\"env:ADMIN\"]\n{POLICY}"
    );
    let (code, output_text) = shown(&right);
    assert_eq!(code, Some(0), "{output_text}");
    assert!(
        output_text.contains("store redis://alice:***@db:6379/1")
            && output_text.contains("admin needs a token"),
        "{output_text}"
    );
    is_nowhere(PASSWORD, &output_text);
    is_nowhere(TOKEN, &output_text);
    // Configurations with different errors.
    for wrong in [
        format!("store = \"redis://alice:{PASSWORD}@db:port\"\n"),
        format!("store = \"radish://alice:{PASSWORD}@db\"\n"),
        format!("store = \"alice:{PASSWORD}@db\"\n"),
        format!("store = \"redis://alice:{PASSWORD}@db\n"),
        format!("store = redis://alice:{PASSWORD}@db\n"),
        format!("store = [\"redis://alice:{PASSWORD}@db\"]\n"),
        format!("store = \"redis://alice:{PASSWORD}@db\"\nstore = \"memory\"\n"),
        format!("stoer = \"redis://alice:{PASSWORD}@db\"\n"),
        format!("[auth]\nadmin = [\"{PASSWORD}\"]\n"),
        format!("[auth]\nadmin = \"{PASSWORD}\"\n"),
        format!("[auth]\nadmin = {PASSWORD}\n"),
        format!("[auth]\nadmni = \"{PASSWORD}\"\n"),
        format!("auth = \"{PASSWORD}\"\n"),
    ] {
        let (code, output_text) = shown(&wrong);
        assert_eq!(code, Some(2), "{wrong}: {output_text}");
        is_nowhere(PASSWORD, &output_text);
        let output = tallygate(
            &["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--config", name],
            &[],
        );
        assert_eq!(output.status.code(), Some(2), "{wrong}: {output:?}");
        is_nowhere(PASSWORD, &format!("{output:?}"));
    }
    std::fs::remove_file(&path).expect("the file is removed");
    let url = format!("redis://alice:{PASSWORD}@db:6379/1");
    let help = format!("{:?}", tallygate(&["serve", "--help"], &[("TALLYGATE_STORE", &url)]));
    assert!(help.contains("TALLYGATE_STORE"));
    is_nowhere(PASSWORD, &help);
}
