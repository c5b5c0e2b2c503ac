//! Tests TLS on every listener with curl and redis-cli.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::Served;
use crate::http_client::{Reply, get};
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

/// Runs curl. Returns `None` if there is no reply.
fn curl(served: &Served, trusted: &Certificates, options: &[&str]) -> Option<Reply> {
    let url = format!("https://{}/v1/check", served.http());
    let mut command = Command::new("curl");
    command.args(["-si", "--max-time", "20", "--cacert"]).arg(trusted.authority()).args(options);
    command.args(["-d", r#"{"policy":"api","key":"alice"}"#, &url]);
    let output = command.output().expect("curl is installed");
    let text = String::from_utf8(output.stdout).expect("the text is UTF-8");
    (!text.is_empty()).then(|| Reply::parse(&text))
}

/// Runs redis-cli and returns its output.
fn redis_cli(served: &Served, trusted: &Certificates, options: &[&str]) -> String {
    let mut command = Command::new("redis-cli");
    command.args(["-p", served.resp_port(), "--tls", "--cacert"]).arg(trusted.authority());
    let output = command.args(options).args(["TG.PEEK", "api", "alice"]).output();
    String::from_utf8(output.expect("redis-cli runs").stdout)
        .expect("the text is UTF-8")
        .replace('\n', " ")
}

#[test]
fn both_listeners_accept_only_tls() {
    let certificates = Certificates::new();
    let served = Served::start(&[], Some(&config(&certificates, "")));
    for version in ["--http1.1", "--http2"] {
        for tls in ["--tlsv1.3", "--tls-max=1.2"] {
            let options: Vec<_> = tls.split('=').chain([version]).collect();
            let reply = curl(&served, &certificates, &options).expect("there is a reply");
            assert_eq!(reply.status, 200, "{version} {tls}");
        }
    }
    // Both surfaces charge the same quota of five.
    let peeked = redis_cli(&served, &certificates, &[]);
    assert!(peeked.starts_with("1 5 0 0 "), "{peeked}");
    // A client that trusts another authority does not connect.
    let other = Certificates::new();
    assert!(curl(&served, &other, &[]).is_none());
    assert_eq!(redis_cli(&served, &other, &[]), "");
    // Plain text gets no reply.
    for (address, sent) in
        [(served.http(), "GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"), (served.resp(), "PING\r\n")]
    {
        let mut stream = TcpStream::connect(address).expect("the connection opens");
        stream.set_read_timeout(Some(PATIENCE)).expect("the socket option is set");
        stream.write_all(sent.as_bytes()).expect("the write succeeds");
        let mut answered = Vec::new();
        let _ = stream.read_to_end(&mut answered);
        let answered = String::from_utf8_lossy(&answered);
        assert!(!answered.contains("alive") && !answered.contains("PONG"), "{answered}");
    }
    let url = format!("https://{}/metrics", served.http());
    let mut command = Command::new("curl");
    let metrics = command.args(["-s", "--cacert"]).arg(certificates.authority()).arg(url).output();
    let metrics = String::from_utf8(metrics.expect("curl runs").stdout).expect("the text is UTF-8");
    assert!(
        metrics.contains("tallygate_tls_handshakes_failed_total{surface=\"http\"} 2"),
        "{metrics}"
    );
    let plain = get(Served::start(&[], Some(POLICY)).http(), "/metrics").body;
    let bound = |metrics: &str| -> u64 {
        let line =
            metrics.lines().find_map(|line| line.strip_prefix("tallygate_memory_bound_bytes "));
        line.expect("the metric").parse().expect("a number")
    };
    assert_eq!(bound(&metrics) - bound(&plain), 10_000 * 64 * 1024, "64 KiB per connection");
}

#[test]
fn all_replies_arrive_over_tls_even_if_they_are_read_late() {
    const ASKED: usize = 10_000;
    let certificates = Certificates::new();
    let served = Served::start(&[], Some(&config(&certificates, "")));
    let mut roots = rustls::RootCertStore::empty();
    let authority =
        CertificateDer::from_pem_file(certificates.authority()).expect("the certificate is valid");
    roots.add(authority).expect("the URI has an authority");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the versions are listed")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("127.0.0.1").expect("there is a name");
    let session = ClientConnection::new(Arc::new(client), name).expect("the TLS session starts");
    let stream = TcpStream::connect(served.resp()).expect("the connection opens");
    stream.set_read_timeout(Some(PATIENCE)).expect("the socket option is set");
    let mut stream = StreamOwned::new(session, stream);
    let one = {
        stream.write_all(b"COMMAND\r\nPING\r\n").expect("the write succeeds");
        let mut reply = Vec::new();
        while !reply.ends_with(b"+PONG\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("there is a reply");
            reply.push(byte[0]);
        }
        reply.len() - "+PONG\r\n".len()
    };
    // More bytes than the system buffers.
    stream.write_all(&b"COMMAND\r\n".repeat(ASKED)).expect("the write succeeds");
    let mut replies = vec![0; one * ASKED];
    stream.read_exact(&mut replies).expect("all replies arrive");
}

#[test]
fn tls_can_be_enabled_for_one_listener() {
    let certificates = Certificates::new();
    let served = Served::start(&[], Some(&config(&certificates, "listeners = [\"resp\"]")));
    assert_eq!(get(served.http(), "/livez").status, 200);
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
    assert_eq!(curl(&served, &certificates, &[]).expect("there is a reply").status, 200);
}

#[test]
fn a_client_certificate_is_required_if_configured() {
    let certificates = Certificates::new();
    let more = format!("client_ca = {:?}", certificates.authority());
    let served = Served::start(&[], Some(&config(&certificates, &more)));
    let (certificate, key) = certificates.client();
    let (certificate, key) = (certificate.display().to_string(), key.display().to_string());
    let shown = ["--cert", &certificate, "--key", &key];
    assert_eq!(curl(&served, &certificates, &shown).expect("there is a reply").status, 200);
    assert!(redis_cli(&served, &certificates, &shown).starts_with("1 5 3"));
    assert!(curl(&served, &certificates, &[]).is_none(), "one without a certificate is served");
    assert_eq!(redis_cli(&served, &certificates, &[]), "");
    // A certificate of another authority is rejected.
    let (certificate, key) = Certificates::client(&Certificates::new());
    let shown = [certificate, key].map(|path| path.display().to_string());
    assert!(curl(&served, &certificates, &["--cert", &shown[0], "--key", &shown[1]]).is_none());
}

#[test]
fn a_new_certificate_is_used_for_new_connections_and_closes_none() {
    let certificates = Certificates::new();
    let served = Served::start(&[], Some(&config(&certificates, "")));
    let shown = || {
        let mut command = Command::new("openssl");
        command.args(["s_client", "-connect", served.http()]).stdin(std::process::Stdio::null());
        let output = command.output().expect("openssl is installed");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (_, text) =
            text.split_once("-----BEGIN CERTIFICATE-----").expect("the certificate is valid");
        text.split_once("-----END").expect("the connection ends").0.trim().to_owned()
    };
    let in_file = || {
        let text = std::fs::read_to_string(certificates.certificate()).expect("the file exists");
        let text = text.replace("-----BEGIN CERTIFICATE-----", "");
        text.split_once("-----END").expect("the connection ends").0.trim().to_owned()
    };
    let first = in_file();
    assert_eq!(shown(), first);
    // Existing connections continue.
    let mut stays = Command::new("redis-cli");
    stays.args(["-p", served.resp_port(), "--tls", "--cacert"]).arg(certificates.authority());
    stays.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut stays = stays.spawn().expect("redis-cli runs");
    let (mut to, mut from) = (
        stays.stdin.take().expect("the stream is piped"),
        stays.stdout.take().expect("the stream is piped"),
    );
    let mut ping = || {
        to.write_all(b"PING\n").expect("the write succeeds");
        let mut pong = [0; 5];
        from.read_exact(&mut pong).expect("there is a reply");
        assert_eq!(&pong, b"PONG\n");
    };
    ping();
    certificates.renew();
    assert_ne!(in_file(), first);
    wait_until("the new certificate is shown", PATIENCE, || shown() == in_file());
    ping();
    drop(to);
    stays.wait().expect("the process ends");
    // A key that does not match changes nothing and is logged.
    let second = in_file();
    std::fs::copy(certificates.client().1, certificates.key()).expect("the file is copied");
    wait_until("the certificate is rejected", PATIENCE, || served.log().contains("do not match"));
    assert_eq!(shown(), second);
    assert!(!served.log().contains("PRIVATE KEY"), "{}", served.log());
}

/// Fault E1.
#[test]
fn a_tls_handshake_that_does_not_arrive_times_out() {
    let certificates = Certificates::new();
    let limits = "[limits]\nhead_timeout = \"300ms\"\n";
    let served = Served::start(&[], Some(&format!("{limits}{}", config(&certificates, ""))));
    let began = Instant::now();
    let mut silent: Vec<_> = (0..200)
        .map(|_| TcpStream::connect(served.http()).expect("the connection opens"))
        .collect();
    assert_eq!(curl(&served, &certificates, &[]).expect("there is a reply").status, 200);
    for stream in &mut silent {
        stream.set_read_timeout(Some(PATIENCE)).expect("the socket option is set");
        assert_eq!(stream.read(&mut [0; 16]).expect("the connection is closed"), 0);
    }
    assert!(began.elapsed() >= Duration::from_millis(300), "the connection was closed too early");
}

/// Fault I1.
#[test]
fn an_unfinished_tls_handshake_does_not_delay_shutdown() {
    let certificates = Certificates::new();
    let mut served = Served::start(&[], Some(&config(&certificates, "")));
    let _silent = TcpStream::connect(served.http()).expect("the connection opens");
    assert_eq!(curl(&served, &certificates, &[]).expect("there is a reply").status, 200);
    let began = Instant::now();
    assert_eq!(served.stop(), Some(0));
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
}

#[test]
fn the_error_of_an_invalid_certificate_names_its_position() {
    let certificates = Certificates::new();
    let folder = certificates.folder();
    let name = folder.join("tallygate.toml");
    std::fs::write(folder.join("empty.pem"), "nothing\n").expect("the file is written");
    let says = |table: &str, expected: &str| {
        std::fs::write(&name, format!("{POLICY}\n[tls]\n{table}\n")).expect("the file is written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
        let output = command.arg("check-config").arg(&name).output().expect("the binary runs");
        let output_text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{table}: {output_text}");
        assert!(output_text.contains("tallygate.toml:5:1: tls: "), "{output_text}");
        assert!(output_text.contains(expected), "{output_text}");
    };
    let (right, key) = ("certificate = \"server.crt\"", "key = \"server.key\"");
    says(&format!("{right}\nkey = \"none.key\""), "cannot read none.key: No such file");
    says(
        &format!("{right}\nkey = \"empty.pem\""),
        "empty.pem contains no private key; expected PEM",
    );
    says(
        &format!("certificate = \"empty.pem\"\n{key}"),
        "empty.pem contains no certificate; expected PEM",
    );
    says(&format!("{right}\nkey = \"client.key\""), "server.crt and client.key do not match");
    says(&format!("{right}\n{key}\nclient_ca = \"none.crt\""), "cannot read none.crt");
    says(&format!("{right}\n{key}\nlisteners = []"), "`listeners` is empty");
    // Paths are relative to the configuration, not to the working directory.
    std::fs::write(&name, format!("{POLICY}\n[tls]\n{right}\n{key}\nclient_ca = \"ca.crt\"\n"))
        .expect("the file is written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    let output = command.arg("check-config").arg(&name).output().expect("the binary runs");
    let output_text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output_text.contains("tls http, resp, grpc, client certificate required\n"),
        "{output_text}"
    );
}

#[test]
fn the_check_command_works_over_tls() {
    let certificates = Certificates::new();
    let served = Served::start(&[], Some(&config(&certificates, "")));
    let right = run_check(&served, &certificates, &[]);
    assert_eq!(right.stdout, b"allowed, 4 of 5 left\n", "{right:?}");
    assert_eq!(run_check(&served, &Certificates::new(), &[]).status.code(), Some(2));
}

#[test]
fn the_check_command_can_use_a_client_certificate() {
    let certificates = Certificates::new();
    let more = format!("client_ca = {:?}", certificates.authority());
    let served = Served::start(&[], Some(&config(&certificates, &more)));
    let (certificate, key) = certificates.client();
    let [certificate, key] = [certificate, key].map(|path| path.display().to_string());
    let shown = ["--cert", &certificate, "--cert-key", &key];
    let right = run_check(&served, &certificates, &shown);
    assert_eq!(right.stdout, b"allowed, 4 of 5 left\n", "{right:?}");
    assert_eq!(run_check(&served, &certificates, &[]).status.code(), Some(2));
    let others = certificates.key().display().to_string();
    let wrong = run_check(&served, &certificates, &["--cert", &certificate, "--cert-key", &others]);
    let output_text = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(output_text.contains("server.key do not match"), "{output_text}");
}

/// A reply that is sent before the body has arrived must not be lost.
#[test]
fn curl_sees_every_reply_to_a_request_whose_body_is_not_read() {
    let certificates = Certificates::new();
    let served =
        Served::start(&[], Some(&config(&certificates, "").replace("limit = 5", "limit = 500")));
    let body = std::env::temp_dir().join(format!("tallygate-body-{}", std::process::id()));
    std::fs::write(&body, vec![b'x'; 100_000]).expect("the file is written");
    let long = format!("@{}", body.display());
    for version in ["--http2", "--http1.1"] {
        for (path, status) in [("/nothing", "404"), ("/livez", "405"), ("/v1/authorize/api", "200")]
        {
            for data in ["short", &long] {
                let url = format!("https://{}{path}", served.http());
                let mut command = Command::new("curl");
                command.args(["-s", "-o", "/dev/null", "-w", "%{http_code}\n", "--max-time", "20"]);
                command.arg("--cacert").arg(certificates.authority());
                command.args([version, "-H", "Expect:"]);
                command.args(["-d", data, &url]);
                // curl prints the status also if it then waits for the end of the reply until its time is over.
                let status_of = |output: std::process::Output| {
                    assert!(output.status.success(), "{version} {path}: {output:?}");
                    String::from_utf8_lossy(&output.stdout).trim().to_owned()
                };
                let statuses: Vec<_> = (0..5)
                    .map(|_| status_of(command.output().expect("curl is installed")))
                    .collect();
                assert_eq!(statuses, vec![status; 5], "{version} {path} {} bytes", data.len());
            }
        }
    }
    std::fs::remove_file(&body).expect("the file is removed");
}

#[test]
fn the_check_command_explains_errors_of_tls() {
    let certificates = Certificates::new();
    let served = Served::start(&[], Some(&config(&certificates, "")));
    let untrusted = run_check(&served, &Certificates::new(), &[]);
    let message = String::from_utf8_lossy(&untrusted.stderr).into_owned();
    assert!(message.contains("certificate is not issued by an authority in "), "{message}");
    let token = served.config().with_extension("token");
    std::fs::write(&token, "0123456789abcdef\n").expect("the file is written");
    for token in [None, Some(&token)] {
        let mut without_tls = Command::new(env!("CARGO_BIN_EXE_tallygate"));
        without_tls.args(["check", "--resp", served.resp(), "api", "bob"]);
        without_tls.envs(token.map(|file| ("TALLYGATE_TOKEN_FILE", file)));
        let message = without_tls.output().expect("the binary runs").stderr;
        let message = String::from_utf8_lossy(&message).into_owned();
        assert!(message.contains("the server uses TLS on this port; use --ca FILE"), "{message}");
    }
    std::fs::remove_file(&token).expect("the file is removed");
    let plain = Served::start(&[], Some(POLICY));
    let message = run_check(&plain, &certificates, &[]);
    let message = String::from_utf8_lossy(&message.stderr).into_owned();
    assert!(message.contains("the server does not use TLS on this port; remove --ca"), "{message}");
}

/// Runs `tallygate check` with a trusted authority.
fn run_check(served: &Served, trusted: &Certificates, options: &[&str]) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    command.args(["check", "--resp", served.resp(), "api", "bob", "--ca"]);
    command.arg(trusted.authority()).args(options).output().expect("the binary runs")
}
