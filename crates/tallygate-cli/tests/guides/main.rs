//! The guides of `docs/guides` work as written.
//!
//! Each test follows one guide with the programs that the guide names. `scripts/install-test-clients`,
//! `scripts/install-test-proxies` and `scripts/install-test-servers` install them. The Rust code of a guide is either a
//! doc test of the testkit or an excerpt of an example of the library.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a failing test panics")]

mod walkthrough;

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tallygate_testkit::servers::{Flavor, Server, wait_until};

use walkthrough::{Block, Walkthrough, blocks, clients, matches};

#[path = "../../examples/redis_client.rs"]
#[allow(dead_code, reason = "the example has a `main` of its own")]
mod redis_client;

#[path = "../../../tallygate-tower/examples/axum_by_address.rs"]
#[allow(dead_code, reason = "the example has a `main` of its own")]
mod axum_service;

/// The guides whose Rust code is an excerpt of one example. A block may name another one after its language.
const EXCERPTS: [(&str, &str); 4] = [
    ("python-node-go.md", "crates/tallygate-cli/examples/redis_client.rs"),
    ("limit-an-axum-service.md", "crates/tallygate-tower/examples/axum_by_address.rs"),
    ("write-your-own-algorithm.md", "crates/tallygate/examples/own_algorithm.rs"),
    ("write-your-own-store.md", "crates/tallygate/examples/own_store.rs"),
];

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn guide(name: &str) -> String {
    read(&format!("docs/guides/{name}"))
}

/// All guides, by name.
fn guides() -> Vec<(String, String)> {
    let files = std::fs::read_dir(root().join("docs/guides")).expect("the folder of the guides");
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != "README.md").map(|name| (name.clone(), guide(&name))).collect()
}

#[test]
fn rust_code_is_a_doc_test_or_an_excerpt_of_an_example() {
    let doc_tests = read("crates/tallygate-testkit/src/lib.rs");
    for (name, text) in guides() {
        let excerpt =
            EXCERPTS.iter().find(|(guide, _)| *guide == name).map(|(_, example)| *example);
        for block in
            blocks(&text).iter().filter(|block: &&Block| block.language.starts_with("rust"))
        {
            let Some(example) = block.mark.as_deref().or(excerpt) else {
                let is_tested = doc_tests.contains(&format!("docs/guides/{name}\""));
                assert!(is_tested, "{name}, line {} is not tested", block.line);
                continue;
            };
            assert!(
                read(example).contains(&block.text),
                "{name}, line {}: {example} has no such lines:\n{}",
                block.line,
                block.text
            );
        }
    }
}

#[test]
fn every_guide_is_short_and_listed_and_its_links_lead_somewhere() {
    let list = guide("README.md");
    for (name, text) in guides().into_iter().chain([("README.md".to_owned(), list.clone())]) {
        assert!(
            name == "README.md" || list.contains(&format!("]({name})")),
            "{name} is not listed"
        );
        assert!(text.lines().count() <= 175, "{name} has {} lines", text.lines().count());
        for link in text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            if !link.is_empty() && !link.starts_with("http") {
                assert!(root().join("docs/guides").join(link).exists(), "{name}: {link}");
            }
        }
    }
}

#[test]
fn every_part_of_a_printed_output_is_compared() {
    let shown =
        "HTTP/1.1 429\n…\nretry-after: 36\n…\n{\"id\":\"…\",\"left\":9650,\"reset_ms\":7200}\n";
    let reply = |left, reset| {
        let body = format!("{{\"id\":\"a1\",\"left\":{left},\"reset_ms\":{reset}}}");
        format!("HTTP/1.1 429\r\ndate: x\r\nretry-after: 35\r\n\r\n{body}")
    };
    let is_shown = |printed: &str| matches(shown, printed, false);
    let good = reply(9650, 7199);
    assert!(is_shown(&good));
    assert!(!is_shown(&reply(9649, 7199)), "what is no time is exact");
    assert!(!is_shown(&reply(9650, 6000)), "too short");
    assert!(!is_shown(&reply(9650, 7201)), "a time does not grow");
    assert!(!is_shown(&good.replace("retry", "Retry")), "text is exact");
    assert!(!is_shown(&good.replace("429", "428")), "a status is exact");
    assert!(!is_shown(&format!("{good}\nmore")), "all lines count");
    assert!(!matches("a\nb\n", "a\n", false) && !matches("", "a\n", false));
    assert!(matches("1\n120\n", "1\n119\n", true) && !matches("120\n", "119\n", false));
    assert!(!matches("12\n", "11\n", true), "small numbers are exact");
}

#[test]
fn limit_an_axum_service() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let port = listener.local_addr().unwrap().port();
    let app = axum_service::app().unwrap().into_make_service_with_connect_info::<SocketAddr>();
    runtime.spawn(async move { axum::serve(listener, app).await });
    let mut reader = Walkthrough::new();
    reader.replace("3000", port.to_string());
    reader.follow(&guide("limit-an-axum-service.md"));
    runtime.shutdown_background();
}

/// Long enough for a busy machine; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(20);

const PROXIES: &str = "nginx-caddy-traefik.md";

/// Follows a guide to proxies with one of them, which a command starts.
fn limit_at_a_proxy(name: &str, command: impl Fn(&Walkthrough) -> String) {
    let mut reader = Walkthrough::new();
    reader.replace_port(8000);
    reader.replace_port(3000);
    let text = guide(name);
    let (before, after) = text.split_once("## 3. ").expect("the guide has a third step");
    reader.follow(before);
    let command = command(&reader);
    reader.follow(&format!("```sh background\n{command}  # listens on 127.0.0.1:8000\n```\n"));
    let site = reader.replaced("http://127.0.0.1:8000/");
    let visit_from = |client: &str, forged: &str| {
        let mut curl = Command::new("curl");
        curl.args(["-s", "-o", "/dev/null", "-w", "%{http_code}", "--interface", client]);
        let output = curl.args(["-H", &format!("X-Forwarded-For: {forged}"), &site]).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    // Traefik listens before it knows its routes.
    wait_until("the proxy has its routes", PATIENCE, || visit_from("127.0.0.3", "") != "404");
    reader.follow(after);
    // Another client is not affected, and cannot pretend to be new.
    let visit = |forged: &str| visit_from("127.0.0.2", forged);
    let seen = ["6.6.6.1", "6.6.6.2", "6.6.6.3"].map(visit);
    assert_eq!(seen, ["200", "200", "429"]);
    // Neither can a client on the machine of the proxy, whose address is one of a trusted proxy.
    assert_eq!(visit_from("127.0.0.1", "6.6.6.4"), "429");
    // A browser shows the denial, and does not offer it as a download.
    let mut curl = Command::new("curl");
    let output = curl.args(["-s", "-o", "/dev/null", "-w", "%{content_type}", &site]).output();
    let content_type = String::from_utf8(output.unwrap().stdout).unwrap();
    assert!(
        ["text/plain", "application/problem+json"].contains(&content_type.as_str()),
        "{content_type}"
    );
    // By API key, as the last step says.
    let path = reader.folder().join("tallygate.toml");
    let by_key = std::fs::read_to_string(&path).unwrap().replace("\"ip\"", "\"header:x-api-key\"");
    std::fs::write(&path, by_key).unwrap();
    wait_until("a request without a key is answered with 401", PATIENCE, || visit("") == "401");
    let shown = "%{http_code} %header{x-ratelimit-remaining}";
    let mut curl = Command::new("curl");
    curl.args(["-s", "-o", "/dev/null", "-w", shown, "-H", "X-Api-Key: alice", &site]);
    let shown = String::from_utf8(curl.output().unwrap().stdout).unwrap();
    // Traefik cannot add the remaining quota to a response of the application.
    assert_eq!(shown, if command.starts_with("traefik") { "200 " } else { "200 1" });
}

#[test]
fn limit_at_nginx() {
    limit_at_a_proxy(PROXIES, |reader| {
        // What a system's nginx.conf does for `conf.d`, without files outside of the folder.
        let folder = reader.folder().display();
        let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
        let temporary = temporary.map(|name| format!("{name}_temp_path {folder}/{name};\n"));
        let config = format!(
            "daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n\
             http {{\ndefault_type application/octet-stream;\naccess_log off;\n{}include {folder}/conf.d/*.conf;\n}}\n",
            temporary.concat()
        );
        std::fs::write(reader.folder().join("nginx.conf"), config).unwrap();
        format!("nginx -e stderr -c {folder}/nginx.conf")
    });
}

#[test]
fn limit_at_caddy() {
    limit_at_a_proxy(PROXIES, |reader| {
        // Its port for administration is the same for all that run on this machine.
        let path = reader.folder().join("Caddyfile");
        let config = std::fs::read_to_string(&path).unwrap();
        let options = "{\n\tadmin off\n\tpersist_config off\n\tlog {\n\t\tlevel ERROR\n\t}\n}\n";
        std::fs::write(&path, format!("{options}{config}")).unwrap();
        "caddy run".to_owned()
    });
}

#[test]
fn limit_at_traefik() {
    let command = "traefik --configFile=traefik.toml --log.level=ERROR";
    limit_at_a_proxy(PROXIES, |_| command.to_owned());
}

#[test]
fn limit_at_haproxy() {
    limit_at_a_proxy("haproxy.md", |_| "haproxy -db -f haproxy.cfg".to_owned());
}

#[test]
fn use_it_from_python_node_and_go() {
    let mut reader = Walkthrough::new();
    reader.set("PYTHONPATH", clients().join("python"));
    // As `npm install redis ioredis` would have put them.
    let modules = reader.folder().join("node_modules");
    std::fs::create_dir(&modules).unwrap();
    for (folder, package) in [("node", "redis"), ("ioredis", "ioredis")] {
        let installed = clients().join(folder).join("node_modules").join(package);
        std::os::unix::fs::symlink(installed, modules.join(package)).unwrap();
    }
    let mut path = clients().join("go/go/bin").into_os_string();
    path.push(":");
    path.push(reader.path());
    reader.set("PATH", path);
    reader.set("GOENV", clients().join("go.env"));
    reader.follow(&guide("python-node-go.md"));
    let server = reader.replaced("redis://127.0.0.1:6380");
    let mut connection = redis::Client::open(server).unwrap().get_connection().unwrap();
    let seen = [(); 3].map(|()| redis_client::check(&mut connection, "rust").unwrap());
    assert_eq!(seen, [true, true, false]);
}

#[test]
fn move_from_redis_cell() {
    Walkthrough::new().follow(&guide("move-from-redis-cell.md"));
}

#[test]
fn move_from_envoy_ratelimit() {
    let mut reader = Walkthrough::new();
    for port in [8081, 8000, 3000] {
        reader.replace_port(port);
    }
    reader.follow(&guide("move-from-envoy-ratelimit.md"));
}

#[test]
fn pay_per_token() {
    Walkthrough::new().follow(&guide("pay-per-token.md"));
}

#[test]
fn run_it_in_production() {
    let mut reader = Walkthrough::new();
    let folder = reader.folder().display().to_string();
    for path in ["/etc/tallygate", "/var/lib/tallygate"] {
        std::fs::create_dir_all(format!("{folder}{path}")).unwrap();
        reader.replace(path, format!("{folder}{path}"));
    }
    let redis = Server::start(Flavor::Redis);
    reader.replace("redis://127.0.0.1:6379", redis.url());
    reader.follow(&guide("production.md"));
}
