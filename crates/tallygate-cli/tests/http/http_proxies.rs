//! Tests real proxies that ask Tallygate about each request: nginx with `auth_request`, Caddy with `forward_auth`.
//!
//! `scripts/install-test-proxies` installs them.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a failing test panics")]

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::Served;
use crate::http_client::Reply;

/// The proxy has the address 127.0.0.1, clients have 127.0.0.2.
const CONFIG: &str = r#"
    trusted_proxies = ["127.0.0.1/32"]
    [policies.site]
    limit = 2
    window = "1h"
    key = "ip"
    [policies.by_key]
    limit = 2
    window = "1h"
    key = "header:x-api-key"
    [policies.smooth]
    algorithm = "leaky_bucket"
    limit = 5
    window = "1s"
    burst = 5
    key = "ip"
    [policies.slow]
    algorithm = "leaky_bucket"
    limit = 5
    window = "10m"
    key = "ip"
"#;

/// The page that says how a proxy passes a delay on.
const SERVER_PAGE: &str = include_str!("../../../../docs/server.md");

const PATIENCE: Duration = Duration::from_secs(20);

/// A proxy that runs until it is dropped.
struct Proxy {
    child: Child,
    address: String,
    directory: PathBuf,
}

impl Proxy {
    /// Starts a proxy. `configuration` gets the address to listen on and a directory for the proxy.
    fn start(
        binary: &Path,
        options: &[&str],
        file: &str,
        config: impl Fn(&str, &str) -> String,
    ) -> Self {
        let name = binary.file_name().unwrap().display();
        // This port is free now and very probably still when the proxy binds it.
        let address = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let address = address.expect("a port is free");
        // The port makes the name unique among the tests of one process.
        let directory = format!("tallygate-{name}-{}-{}", std::process::id(), address.port());
        let directory = std::env::temp_dir().join(directory);
        let address = address.to_string();
        std::fs::create_dir_all(&directory).expect("the directory exists");
        let path = directory.join(file);
        std::fs::write(&path, config(&address, &directory.display().to_string()))
            .expect("the file is written");
        let child = Command::new(binary)
            .args(options)
            .arg(&path)
            .current_dir(&directory)
            .env("HOME", &directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{name}: {error}; run scripts/install-test-proxies"));
        let mut proxy = Self { child, address, directory };
        let started = Instant::now();
        while TcpStream::connect(&proxy.address).is_err() {
            let ended = proxy.child.try_wait().expect("the process status is readable");
            assert!(
                ended.is_none() && started.elapsed() < PATIENCE,
                "{name} does not listen: {ended:?}"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        proxy
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Returns the first block of configuration for a proxy in the documentation of delays.
fn delay_passed_on(proxy: &str) -> &'static str {
    let (_, section) =
        SERVER_PAGE.split_once("### Even output behind a proxy\n").expect("it is described");
    let (_, block) = section.split_once(&format!("```{proxy}\n")).expect("there is an example");
    block.split_once("```").expect("the block ends").0
}

/// Starts nginx in front of an application that replies with the delay it was given. `asked` is the policy and the
/// parameters of `/v1/authorize`.
fn nginx(served: &Served, asked: &str) -> Proxy {
    let binary = ["/usr/sbin/nginx", "/usr/local/sbin/nginx", "/usr/bin/nginx"]
        .into_iter()
        .map(Path::new)
        .find(|binary| binary.is_file())
        .expect("nginx is installed: run scripts/install-test-proxies");
    Proxy::start(binary, &["-e", "stderr", "-c"], "nginx.conf", |address, directory| {
        let (gate, delay) = (served.http(), delay_passed_on("nginx"));
        format!(
            r#"
            daemon off;
            master_process off;
            pid {directory}/pid;
            events {{}}
            http {{
                access_log off;
                client_body_temp_path {directory}/body;
                proxy_temp_path {directory}/proxy;
                fastcgi_temp_path {directory}/fastcgi;
                uwsgi_temp_path {directory}/uwsgi;
                scgi_temp_path {directory}/scgi;
                server {{
                    listen unix:{directory}/application;
                    location / {{
                        return 200 "hello$http_x_ratelimit_delay_ms";
                    }}
                }}
                server {{
                    listen {address};
                    location / {{
                        auth_request /gate;
                        auth_request_set $remaining $upstream_http_x_ratelimit_remaining;
                        auth_request_set $retry_after $upstream_http_retry_after;
                        add_header X-RateLimit-Remaining $remaining always;
                        error_page 403 = @denied;
                        {delay}
                        proxy_pass http://unix:{directory}/application;
                    }}
                    location @denied {{
                        add_header Retry-After $retry_after always;
                        return 429 "slow down";
                    }}
                    location = /gate {{
                        internal;
                        proxy_pass http://{gate}/v1/authorize/{asked};
                        proxy_pass_request_body off;
                        proxy_set_header Content-Length "";
                        proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
                    }}
                }}
            }}
            "#
        )
    })
}

fn caddy(served: &Served, asked: &str) -> Proxy {
    let binary = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/test-servers/caddy");
    let binary = std::fs::canonicalize(binary)
        .expect("caddy is installed: run scripts/install-test-proxies");
    let options = ["run", "--adapter", "caddyfile", "--config"];
    Proxy::start(&binary, &options, "Caddyfile", |address, _| {
        let (gate, delay) = (served.http(), delay_passed_on("caddy"));
        format!(
            r#"
            {{
                admin off
                auto_https off
                persist_config off
                log {{
                    level ERROR
                }}
            }}
            http://{address} {{
                route {{
                    forward_auth {gate} {{
                        uri /v1/authorize/{asked}
                        copy_headers X-RateLimit-Remaining
                        {delay}
                    }}
                    respond "hello{{header.X-RateLimit-Delay-Ms}}"
                }}
            }}
            "#
        )
    })
}

/// Requests the site from another address than the proxy's, with a different forged address each time and a forged delay.
fn visit(proxy: &Proxy, forged: u8) -> Reply {
    let shown = Command::new("curl")
        .args(["-sS", "-i", "--interface", "127.0.0.2"])
        .args(["-H", &format!("X-Forwarded-For: 6.6.6.{forged}"), "-H", "X-RateLimit-Delay-Ms: 7"])
        .arg(format!("http://{}/", proxy.address))
        .output()
        .expect("curl runs");
    assert!(shown.status.success(), "{shown:?}");
    Reply::parse(&String::from_utf8(shown.stdout).expect("the text is UTF-8"))
}

#[test]
fn nginx_allows_and_denies_with_auth_request() {
    let served = Served::start(&[], Some(CONFIG));
    let proxy = nginx(&served, "site?deny=403");
    for (forged, left) in [(1, "1"), (2, "0")] {
        let passed = visit(&proxy, forged);
        assert_eq!((passed.status, &*passed.body), (200, "hello"));
        assert_eq!(passed.field("X-RateLimit-Remaining"), Some(left));
    }
    let denied = visit(&proxy, 3);
    assert_eq!((denied.status, &*denied.body), (429, "slow down"));
    let wait: u64 = denied.field("Retry-After").unwrap().parse().unwrap();
    assert!((1700..=1800).contains(&wait), "{wait}");
}

#[test]
fn caddy_allows_and_denies_with_forward_auth() {
    let served = Served::start(&[], Some(CONFIG));
    let proxy = caddy(&served, "site");
    for forged in [1, 2] {
        let passed = visit(&proxy, forged);
        assert_eq!((passed.status, &*passed.body), (200, "hello"));
    }
    let denied = visit(&proxy, 3);
    assert_eq!(denied.status, 429);
    assert_eq!(denied.field("Content-Type"), Some("application/problem+json"));
    assert_eq!(denied.field("X-RateLimit-Remaining"), Some("0"));
    let wait: u64 = denied.field("Retry-After").unwrap().parse().unwrap();
    assert!((1700..=1800).contains(&wait), "{wait}");
    assert_eq!(denied.json()["violated-policies"][0], "site");
}

/// A request without the key is not a denial.
#[test]
fn proxies_pass_on_that_the_key_is_missing() {
    let served = Served::start(&[], Some(CONFIG));
    for proxy in [nginx(&served, "by_key?deny=403"), caddy(&served, "by_key")] {
        assert_eq!(visit(&proxy, 1).status, 401);
    }
}

#[test]
fn proxies_pass_the_delay_of_a_request_to_the_application() {
    for start in
        [|served: &Served| nginx(served, "slow?deny=403"), |served: &Served| caddy(served, "slow")]
    {
        let served = Served::start(&[], Some(CONFIG));
        let proxy = start(&served);
        let bodies = [1, 2].map(|forged| visit(&proxy, forged).body);
        // The first request need not wait, whatever the client says.
        assert_eq!(bodies[0], "hello");
        let delay = bodies[1].strip_prefix("hello").and_then(|delay| delay.parse().ok());
        assert!(matches!(delay, Some(100_000..=120_000)), "{}", bodies[1]);
    }
}

/// The server holds the answers, so the proxy forwards a burst of 5 at 5 per second.
#[test]
fn proxies_forward_evenly_if_the_answers_are_held() {
    for start in [
        |served: &Served| nginx(served, "smooth?deny=403&hold_ms=2000"),
        |served: &Served| caddy(served, "smooth?hold_ms=2000"),
    ] {
        let served = Served::start(&[], Some(CONFIG));
        let proxy = start(&served);
        let began = Instant::now();
        let visit = |forged| {
            assert_eq!(visit(&proxy, forged).body, "hello");
            began.elapsed()
        };
        let last = std::thread::scope(|scope| {
            let visits: Vec<_> = (0..5).map(|forged| scope.spawn(move || visit(forged))).collect();
            visits.into_iter().map(|visit| visit.join().expect("the thread does not panic")).max()
        });
        // The last of them waits for four others, 200 ms each. Rounding and the time between them take a part.
        assert!(last >= Some(Duration::from_millis(700)), "{last:?}");
    }
}
