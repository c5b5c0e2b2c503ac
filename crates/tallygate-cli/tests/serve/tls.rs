//! TLS on every listener, as curl and redis-cli meet it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::Served;
use crate::http_client::Reply;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use tallygate_testkit::servers::{Certificates, wait_until};

const POLICY: &str = "[policies.api]\nlimit = 5\nwindow = \"1000h\"\n";
const PATIENCE: Duration = Duration::from_secs(20);

fn config(certificates: &Certificates, more: &str) -> String {
    let (certificate, key) = (certificates.certificate(), certificates.key());
    format!("[tls]\ncertificate = {certificate:?}\nkey = {key:?}\n{more}\n{POLICY}")
}

/// What curl gets; `None` if it comes to no reply.
fn curl(served: &Served, trusted: &Certificates, options: &[&str]) -> Option<Reply> {
    let url = format!("https://{}/v1/check", served.http());
    let mut command = Command::new("curl");
    command.args(["-si", "--max-time", "20", "--cacert"]).arg(trusted.authority()).args(options);
    command.args(["-d", r#"{"policy":"api","key":"alice"}"#, &url]);
    let output = command.output().expect("curl is installed");
    let text = String::from_utf8(output.stdout).expect("text");
    (!text.is_empty()).then(|| Reply::shown(&text))
}

/// What redis-cli gets.
fn redis_cli(served: &Served, trusted: &Certificates, options: &[&str]) -> String {
    let mut command = Command::new("redis-cli");
    command.args(["-p", served.resp_port(), "--tls", "--cacert"]).arg(trusted.authority());
    let output = command.args(options).args(["TG.PEEK", "api", "alice"]).output();
    String::from_utf8(output.expect("redis-cli runs").stdout).expect("text").replace('\n', " ")
}

#[test]
fn both_listeners_speak_tls_and_nothing_else() {
    let certificates = Certificates::new();
    let served = Served::start(&[], Some(&config(&certificates, "")));
    for version in ["--http1.1", "--http2"] {
        for tls in ["--tlsv1.3", "--tls-max=1.2"] {
            let options: Vec<_> = tls.split('=').chain([version]).collect();
            let reply = curl(&served, &certificates, &options).expect("a reply");
            assert_eq!(reply.status, 200, "{version} {tls}");
        }
    }
    // The fifth of five would be the last.
    let peeked = redis_cli(&served, &certificates, &[]);
    assert!(peeked.starts_with("1 5 0 0 "), "{peeked}");
    // Who trusts another authority trusts nobody here.
    let other = Certificates::new();
    assert!(curl(&served, &other, &[]).is_none());
    assert_eq!(redis_cli(&served, &other, &[]), "");
    // In the clear nothing is answered.
    for (address, sent) in
        [(served.http(), "GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"), (served.resp(), "PING\r\n")]
    {
        let mut stream = TcpStream::connect(address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream.write_all(sent.as_bytes()).expect("it reads");
        let mut answered = Vec::new();
        let _ = stream.read_to_end(&mut answered);
        let answered = String::from_utf8_lossy(&answered);
        assert!(!answered.contains("alive") && !answered.contains("PONG"), "{answered}");
    }
    let url = format!("https://{}/metrics", served.http());
    let mut command = Command::new("curl");
    let metrics = command.args(["-s", "--cacert"]).arg(certificates.authority()).arg(url).output();
    let metrics = String::from_utf8(metrics.expect("curl runs").stdout).expect("text");
    assert!(
        metrics.contains("tallygate_tls_handshakes_failed_total{surface=\"http\"} 2"),
        "{metrics}"
    );
}

#[test]
fn all_that_was_asked_is_answered_over_tls_however_late_it_is_read() {
    const ASKED: usize = 10_000;
    let certificates = Certificates::new();
    let served = Served::start(&[], Some(&config(&certificates, "")));
    let mut roots = rustls::RootCertStore::empty();
    let authority = CertificateDer::from_pem_file(certificates.authority()).expect("a certificate");
    roots.add(authority).expect("an authority");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("127.0.0.1").expect("a name");
    let session = ClientConnection::new(Arc::new(client), name).expect("a session");
    let stream = TcpStream::connect(served.resp()).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let mut stream = StreamOwned::new(session, stream);
    let one = {
        stream.write_all(b"COMMAND\r\nPING\r\n").expect("it reads");
        let mut reply = Vec::new();
        while !reply.ends_with(b"+PONG\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("a reply");
            reply.push(byte[0]);
        }
        reply.len() - "+PONG\r\n".len()
    };
    // More than the system keeps between the two.
    stream.write_all(&b"COMMAND\r\n".repeat(ASKED)).expect("it reads");
    let mut replies = vec![0; one * ASKED];
    stream.read_exact(&mut replies).expect("all replies");
}

#[test]
fn one_listener_may_speak_in_the_clear() {
    let certificates = Certificates::new();
    let served = Served::start(&[], Some(&config(&certificates, "listeners = [\"resp\"]")));
    assert_eq!(crate::http_client::get(served.http(), "/livez").status, 200);
    assert!(redis_cli(&served, &certificates, &[]).starts_with("1 5 4"));
}

#[test]
fn a_unix_socket_needs_no_tls() {
    let certificates = Certificates::new();
    let socket = certificates.folder().join("socket");
    let resp = format!("unix:{}", socket.display());
    let served = Served::start(&["--resp", &resp], Some(&config(&certificates, "")));
    let mut command = Command::new("redis-cli");
    let output = command.arg("-s").arg(&socket).arg("PING").output().expect("redis-cli runs");
    assert_eq!(output.stdout, b"PONG\n");
    assert_eq!(curl(&served, &certificates, &[]).expect("a reply").status, 200);
}

#[test]
fn clients_show_a_certificate_where_it_is_asked_for() {
    let certificates = Certificates::new();
    let more = format!("client_ca = {:?}", certificates.authority());
    let served = Served::start(&[], Some(&config(&certificates, &more)));
    let (certificate, key) = certificates.client();
    let (certificate, key) = (certificate.display().to_string(), key.display().to_string());
    let shown = ["--cert", &certificate, "--key", &key];
    assert_eq!(curl(&served, &certificates, &shown).expect("a reply").status, 200);
    assert!(redis_cli(&served, &certificates, &shown).starts_with("1 5 3"));
    assert!(curl(&served, &certificates, &[]).is_none(), "one without a certificate is served");
    assert_eq!(redis_cli(&served, &certificates, &[]), "");
    // One that another authority has signed is none.
    let (certificate, key) = Certificates::client(&Certificates::new());
    let shown = [certificate, key].map(|path| path.display().to_string());
    assert!(curl(&served, &certificates, &["--cert", &shown[0], "--key", &shown[1]]).is_none());
}

#[test]
fn a_new_certificate_is_shown_to_whoever_connects_then_and_ends_nothing() {
    let certificates = Certificates::new();
    let served = Served::start(&[], Some(&config(&certificates, "")));
    let shown = || {
        let mut command = Command::new("openssl");
        command.args(["s_client", "-connect", served.http()]).stdin(std::process::Stdio::null());
        let output = command.output().expect("openssl is installed");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (_, text) = text.split_once("-----BEGIN CERTIFICATE-----").expect("a certificate");
        text.split_once("-----END").expect("its end").0.trim().to_owned()
    };
    let in_file = || {
        let text = std::fs::read_to_string(certificates.certificate()).expect("a file");
        let text = text.replace("-----BEGIN CERTIFICATE-----", "");
        text.split_once("-----END").expect("its end").0.trim().to_owned()
    };
    let first = in_file();
    assert_eq!(shown(), first);
    // A connection of before goes on.
    let mut stays = Command::new("redis-cli");
    stays.args(["-p", served.resp_port(), "--tls", "--cacert"]).arg(certificates.authority());
    stays.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut stays = stays.spawn().expect("redis-cli runs");
    let (mut to, mut from) =
        (stays.stdin.take().expect("a pipe"), stays.stdout.take().expect("a pipe"));
    let mut ping = || {
        to.write_all(b"PING\n").expect("it reads");
        let mut pong = [0; 5];
        from.read_exact(&mut pong).expect("an answer");
        assert_eq!(&pong, b"PONG\n");
    };
    ping();
    certificates.renew();
    assert_ne!(in_file(), first);
    wait_until("the new certificate is shown", PATIENCE, || shown() == in_file());
    ping();
    drop(to);
    stays.wait().expect("it ends");
    // A key that does not go with it changes nothing, and is told.
    let second = in_file();
    std::fs::copy(certificates.client().1, certificates.key()).expect("copied");
    wait_until("it is refused", PATIENCE, || served.log().contains("do not go together"));
    assert_eq!(shown(), second);
    assert!(!served.log().contains("PRIVATE KEY"), "{}", served.log());
}

#[test]
fn e1_a_handshake_that_does_not_come_is_not_waited_for() {
    let certificates = Certificates::new();
    let limits = "[limits]\nhead_timeout = \"300ms\"\n";
    let served = Served::start(&[], Some(&format!("{limits}{}", config(&certificates, ""))));
    let began = Instant::now();
    let mut silent: Vec<_> =
        (0..200).map(|_| TcpStream::connect(served.http()).expect("it listens")).collect();
    assert_eq!(curl(&served, &certificates, &[]).expect("a reply").status, 200);
    for stream in &mut silent {
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        assert_eq!(stream.read(&mut [0; 16]).expect("it is closed"), 0);
    }
    assert!(began.elapsed() >= Duration::from_millis(300), "it was closed upon at once");
}

#[test]
fn i1_a_handshake_amid_the_stop_does_not_hold_it_up() {
    let certificates = Certificates::new();
    let mut served = Served::start(&[], Some(&config(&certificates, "")));
    let _silent = TcpStream::connect(served.http()).expect("it listens");
    assert_eq!(curl(&served, &certificates, &[]).expect("a reply").status, 200);
    let began = Instant::now();
    assert_eq!(served.stop(), Some(0));
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
}

#[test]
fn certificates_that_do_not_work_are_told_with_their_place() {
    let certificates = Certificates::new();
    let folder = certificates.folder();
    let name = folder.join("tallygate.toml");
    std::fs::write(folder.join("empty.pem"), "nothing\n").expect("written");
    let says = |table: &str, told: &str| {
        std::fs::write(&name, format!("{POLICY}\n[tls]\n{table}\n")).expect("written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
        let output = command.arg("check-config").arg(&name).output().expect("the binary runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{table}: {said}");
        assert!(said.contains("tallygate.toml:5:1: tls: "), "{said}");
        assert!(said.contains(told), "{said}");
    };
    let (right, key) = ("certificate = \"server.crt\"", "key = \"server.key\"");
    says(&format!("{right}\nkey = \"none.key\""), "cannot read none.key: No such file");
    says(
        &format!("{right}\nkey = \"empty.pem\""),
        "empty.pem has no private key; expected one as PEM",
    );
    says(
        &format!("certificate = \"empty.pem\"\n{key}"),
        "empty.pem has no certificate; expected one as PEM",
    );
    says(&format!("{right}\nkey = \"client.key\""), "server.crt and client.key do not go together");
    says(&format!("{right}\n{key}\nclient_ca = \"none.crt\""), "cannot read none.crt");
    says(&format!("{right}\n{key}\nlisteners = []"), "listeners is empty");
    // From its own folder, wherever it is started.
    std::fs::write(&name, format!("{POLICY}\n[tls]\n{right}\n{key}\nclient_ca = \"ca.crt\"\n"))
        .expect("written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    let output = command.arg("check-config").arg(&name).output().expect("the binary runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("tls http, resp, for clients with a certificate\n"), "{said}");
}

#[test]
fn the_command_asks_by_tls() {
    let certificates = Certificates::new();
    let served = Served::start(&[], Some(&config(&certificates, "")));
    let right = checked(&served, &certificates, &[]);
    assert_eq!(right.stdout, b"allowed, 4 of 5 left\n", "{right:?}");
    assert_eq!(checked(&served, &Certificates::new(), &[]).status.code(), Some(2));
}

#[test]
fn the_command_shows_a_certificate_of_its_own() {
    let certificates = Certificates::new();
    let more = format!("client_ca = {:?}", certificates.authority());
    let served = Served::start(&[], Some(&config(&certificates, &more)));
    let (certificate, key) = certificates.client();
    let [certificate, key] = [certificate, key].map(|path| path.display().to_string());
    let shown = ["--cert", &certificate, "--cert-key", &key];
    let right = checked(&served, &certificates, &shown);
    assert_eq!(right.stdout, b"allowed, 4 of 5 left\n", "{right:?}");
    assert_eq!(checked(&served, &certificates, &[]).status.code(), Some(2));
    let others = certificates.key().display().to_string();
    let wrong = checked(&served, &certificates, &["--cert", &certificate, "--cert-key", &others]);
    let said = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(said.contains("server.key do not go together"), "{said}");
}

/// What `tallygate check` says, which trusts some authority.
fn checked(served: &Served, trusted: &Certificates, options: &[&str]) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    command.args(["check", "--resp", served.resp(), "api", "bob", "--ca"]);
    command.arg(trusted.authority()).args(options).output().expect("the binary runs")
}
