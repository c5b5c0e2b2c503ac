//! A real Envoy in front of a small upstream asks the service about each request.
//!
//! `scripts/install-test-proxies` installs Envoy.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use tallygate_testkit::servers::{Certificates, wait_until};

use crate::common::Served;
use crate::http_client::{Reply, ask};
use crate::service::{PATIENCE, Rules, serve};

/// Windows of years, so that none ends during a test.
const RULES: &str = "
domain: web
descriptors:
  - key: path
    value: /limited
    rate_limit: {unit: year, requests_per_unit: 2}
  - key: path
    value: /shadow
    shadow_mode: true
    rate_limit: {unit: year, requests_per_unit: 1}
  - key: user
    rate_limit: {unit: year, requests_per_unit: 3}
  - key: remote_address
    rate_limit: {unit: year, requests_per_unit: 1000}
";

/// An upstream that replies with `hello` to every request. It ends with the process.
fn upstream() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut lines = BufReader::new(&stream).split(b'\n');
                while let Some(Ok(line)) = lines.next() {
                    let reply = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";
                    if line == b"\r" && (&stream).write_all(reply).is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

/// How Envoy is configured.
#[derive(Clone, Copy)]
struct Setup<'a> {
    service: &'a str,
    failure_mode_deny: bool,
    /// Lines of the rate limit service, such as a token.
    metadata: &'a str,
    /// The transport socket of the service's cluster.
    transport: &'a str,
    /// Filters before the rate limit filter.
    filters: &'a str,
    /// The rate limits of the route.
    rate_limits: &'a str,
    /// The rate limits of the filter, which replace those of the route.
    filter_rate_limits: &'a str,
}

const RATE_LIMITS: &str = "
                  - actions: [{request_headers: {header_name: ':path', descriptor_key: path}}]
                  - actions: [{request_headers: {header_name: x-user, descriptor_key: user}}]
                  - actions: [{remote_address: {}}]";

impl<'a> Setup<'a> {
    fn of(service: &'a str) -> Self {
        Self {
            service,
            failure_mode_deny: false,
            metadata: "",
            transport: "",
            filters: "",
            rate_limits: RATE_LIMITS,
            filter_rate_limits: "",
        }
    }

    fn yaml(&self, port: u16) -> String {
        let (service_host, service_port) = self.service.rsplit_once(':').unwrap();
        let upstream = upstream();
        let Self { failure_mode_deny, metadata, transport, filters, rate_limits, .. } = self;
        let of_filter = self.filter_rate_limits;
        format!(
            "
static_resources:
  listeners:
  - name: main
    address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          '@type': type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: main
          route_config:
            virtual_hosts:
            - name: all
              domains: ['*']
              routes:
              - match: {{prefix: /}}
                route:
                  cluster: upstream
                  rate_limits:{rate_limits}
          http_filters:{filters}
          - name: envoy.filters.http.ratelimit
            typed_config:
              '@type': type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit
              domain: web
              failure_mode_deny: {failure_mode_deny}
              timeout: 10s{of_filter}
              enable_x_ratelimit_headers: DRAFT_VERSION_03
              rate_limit_service:
                transport_api_version: V3
                grpc_service:
                  envoy_grpc: {{cluster_name: tallygate}}{metadata}
          - name: envoy.filters.http.router
            typed_config:
              '@type': type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
  - name: upstream
    type: STATIC
    load_assignment:
      cluster_name: upstream
      endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {upstream}}}}}}}}}]}}]
  - name: tallygate
    type: STATIC
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        '@type': type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
    load_assignment:
      cluster_name: tallygate
      endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: {service_host}, port_value: {service_port}}}}}}}}}]}}]{transport}
"
        )
    }
}

/// An Envoy that runs until it is dropped.
struct Envoy {
    child: Child,
    address: String,
    _folder: tempfile::TempDir,
}

impl Envoy {
    fn start(setup: &Setup<'_>) -> Self {
        let binary = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/test-servers/envoy");
        let folder = tempfile::tempdir().unwrap();
        // This port is free now and very probably still when Envoy binds it.
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let config = folder.path().join("envoy.yaml");
        std::fs::write(&config, setup.yaml(free.port())).unwrap();
        let log = folder.path().join("log");
        let child = Command::new(&binary)
            .args(["--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning", "-c"])
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap_or_else(|error| {
                panic!("{}: {error}; run scripts/install-test-proxies", binary.display())
            });
        let mut envoy = Self { child, address: free.to_string(), _folder: folder };
        let started = Instant::now();
        while TcpStream::connect(&envoy.address).is_err() {
            let ended = envoy.child.try_wait().unwrap();
            assert!(
                ended.is_none() && started.elapsed() < PATIENCE,
                "Envoy does not listen: {ended:?}\n{}",
                std::fs::read_to_string(&log).unwrap()
            );
            std::thread::yield_now();
        }
        envoy
    }

    fn get(&self, path: &str, fields: &[(&str, &str)]) -> Reply {
        ask(&self.address, &format!("GET {path}"), fields, "")
    }

    fn statuses(&self, path: &str, count: usize) -> Vec<u16> {
        (0..count).map(|_| self.get(path, &[]).status).collect()
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn service(rules: &Rules) -> Served {
    serve(rules, &[], None)
}

#[test]
fn requests_are_limited_by_path_header_and_address() {
    let rules = Rules::new(&RULES.replace("1000", "5"));
    let served = serve(&rules, &[], Some("[envoy]\nheaders = \"draft\"\n"));
    let envoy = Envoy::start(&Setup::of(served.grpc()));
    let first = envoy.get("/limited", &[]);
    assert_eq!((first.status, first.body.as_str()), (200, "hello"));
    assert_eq!(first.field("x-ratelimit-remaining"), Some("1"), "{first:?}");
    assert!(first.field("ratelimit").is_some_and(|field| field.contains("r=1")), "{first:?}");
    assert_eq!(envoy.get("/limited", &[]).status, 200);
    let denied = envoy.get("/limited", &[]);
    assert_eq!(denied.status, 429);
    assert_eq!(denied.field("x-ratelimit-remaining"), Some("0"), "{denied:?}");
    let reset = denied.field("x-ratelimit-reset").and_then(|reset| reset.parse::<u64>().ok());
    assert!(reset.is_some_and(|seconds| seconds > 0), "{denied:?}");
    assert!(denied.field("retry-after").is_some(), "{denied:?}");
    assert!(denied.field("x-envoy-ratelimited").is_some(), "{denied:?}");
    // The address has used two of its five: the denied request charged nothing. Each user has three.
    let alice = [("x-user", "alice")];
    let statuses: Vec<_> = (0..3).map(|_| envoy.get("/", &alice).status).collect();
    assert_eq!(statuses, [200, 200, 200]);
    assert_eq!(envoy.get("/", &[("x-user", "bob")]).status, 429, "the address has none left");
    let peek = r#"{"policy":"envoy:web|user","key":"bob","cost":0}"#;
    let peek = crate::http_client::post(served.http(), "/v1/peek", peek);
    assert_eq!(peek.json()["remaining"], 3, "bob was not charged");
}

#[test]
fn envoy_decides_by_its_own_setting_when_the_service_is_stopped() {
    for (failure_mode_deny, expected) in [(false, 200), (true, 500)] {
        let rules = Rules::new(RULES);
        let mut served = service(&rules);
        let envoy = Envoy::start(&Setup { failure_mode_deny, ..Setup::of(served.grpc()) });
        assert_eq!(envoy.statuses("/limited", 3), [200, 200, 429]);
        assert_eq!(served.stop(), Some(0));
        assert_eq!(envoy.statuses("/limited", 2), [expected; 2], "{failure_mode_deny}");
    }
}

#[test]
fn a_reload_takes_effect_behind_envoy() {
    let rules = Rules::new(RULES);
    let served = service(&rules);
    let envoy = Envoy::start(&Setup::of(served.grpc()));
    assert_eq!(envoy.statuses("/limited", 3), [200, 200, 429]);
    rules.write(&RULES.replace("requests_per_unit: 2", "requests_per_unit: 4"));
    wait_until("the new limit is in force", PATIENCE, || envoy.get("/limited", &[]).status == 200);
    assert_eq!(envoy.statuses("/limited", 2), [200, 429], "what was used stays used");
}

#[test]
fn shadow_mode_denies_nothing_and_is_counted() {
    let rules = Rules::new(RULES);
    let served = service(&rules);
    let envoy = Envoy::start(&Setup::of(served.grpc()));
    assert_eq!(envoy.statuses("/shadow", 3), [200; 3]);
    let metrics = crate::http_client::get(served.http(), "/metrics").body;
    let denied = r#"tallygate_decisions_total{policy="envoy:web|path=/shadow",outcome="denied",source="store"} 2"#;
    assert!(metrics.contains(denied), "{metrics}");
}

#[test]
fn a_limit_from_the_metadata_of_the_route_overrides_the_configured_one() {
    let rules = Rules::new(RULES);
    let served = service(&rules);
    let filters = "
          - name: envoy.filters.http.set_metadata
            typed_config:
              '@type': type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config
              metadata: [{metadata_namespace: limits, value: {override: {requests_per_unit: 1, unit: DAY}}}]";
    let rate_limits = "
                  - actions: [{request_headers: {header_name: ':path', descriptor_key: path}}]
                    limit: {dynamic_metadata: {metadata_key: {key: limits, path: [{key: override}]}}}";
    let envoy = Envoy::start(&Setup { filters, rate_limits, ..Setup::of(served.grpc()) });
    assert_eq!(envoy.statuses("/limited", 2), [200, 429], "one per day instead of two per year");
    assert_eq!(envoy.statuses("/no-rule", 2), [200, 429]);
}

/// A client chooses the bytes of its header fields. If bytes that are not UTF-8 made the call fail, Envoy would allow the
/// request, whatever the other descriptors say.
#[test]
fn a_header_that_is_not_utf8_is_limited() {
    let rules = Rules::new(RULES);
    let served = service(&rules);
    let envoy = Envoy::start(&Setup::of(served.grpc()));
    let status = |user: &[u8]| {
        let mut stream = TcpStream::connect(&envoy.address).unwrap();
        let head = b"GET / HTTP/1.1\r\nhost: t\r\nconnection: close\r\nx-user: ";
        stream.write_all(&[head, user, b"\r\n\r\n"].concat()).unwrap();
        let first = BufReader::new(stream).lines().next().unwrap().unwrap();
        first.split(' ').nth(1).unwrap().to_owned()
    };
    for user in [&b"caf\xe9"[..], b"caf\xe8"] {
        assert_eq!([(); 4].map(|()| status(user)), ["200", "200", "200", "429"], "{user:?}");
    }
}

/// A client chooses the length of its header fields. If a long one made the call fail, Envoy would allow the request.
#[test]
fn a_long_header_in_many_descriptors_is_limited() {
    let rules = Rules::new(&RULES.replace("requests_per_unit: 3", "requests_per_unit: 16"));
    let served = service(&rules);
    let action = "
                  - actions: [{request_headers: {header_name: x-user, descriptor_key: user}}]";
    let envoy =
        Envoy::start(&Setup { rate_limits: &action.repeat(16), ..Setup::of(served.grpc()) });
    // Envoy accepts heads of up to 60 KiB.
    let user = "u".repeat(55 << 10);
    let statuses = [(); 3].map(|()| envoy.get("/", &[("x-user", &user)]).status);
    assert_eq!(statuses, [200, 429, 429]);
}

/// Returns the remaining units of a policy's only key.
fn remaining(served: &Served, policy: &str) -> serde_json::Value {
    let body = format!(r#"{{"policy":"{policy}","key":"all","cost":0}}"#);
    crate::http_client::post(served.http(), "/v1/peek", &body).json()["remaining"].clone()
}

const BUDGET: &str = "
domain: web
descriptors:
  - key: budget
    value: tokens
    rate_limit: {unit: month, unit_multiplier: 2, requests_per_unit: 1000}
";

/// As Envoy Gateway does for the costs of responses.
#[test]
fn envoy_looks_before_a_request_and_charges_its_cost_after_the_response() {
    let rules = Rules::new(BUDGET);
    let served = serve(&rules, &[], Some("[envoy]\ncharge = \"always\"\n"));
    let filter_rate_limits = "
              rate_limits:
              - actions: [{generic_key: {descriptor_key: budget, descriptor_value: tokens}}]
                hits_addend: {number: 0}
              - actions: [{generic_key: {descriptor_key: budget, descriptor_value: tokens}}]
                hits_addend: {number: 600}
                apply_on_stream_done: true";
    let setup = Setup { rate_limits: " []", filter_rate_limits, ..Setup::of(served.grpc()) };
    let envoy = Envoy::start(&setup);
    let of_budget = |expected: u64| {
        wait_until("the response is charged", PATIENCE, || {
            remaining(&served, "envoy:web|budget=tokens") == expected
        });
    };
    let first = envoy.get("/", &[]);
    assert_eq!((first.status, first.field("x-ratelimit-remaining")), (200, Some("1000")));
    // Two months of 30 days.
    let quota = first.field("x-ratelimit-limit").unwrap_or_default();
    assert_eq!(quota, "1000, 1000;w=5184000", "{first:?}");
    of_budget(400);
    assert_eq!(envoy.get("/", &[]).status, 200, "something is left");
    of_budget(0);
    assert_eq!(envoy.statuses("/", 2), [429, 429]);
}

#[test]
fn negative_hits_of_envoy_return_units() {
    let rules = Rules::new(BUDGET);
    let served = service(&rules);
    let filter_rate_limits = "
              rate_limits:
              - actions: [{generic_key: {descriptor_key: budget, descriptor_value: tokens}}]
                hits_addend: {number: 300}
              - actions: [{generic_key: {descriptor_key: budget, descriptor_value: tokens}}]
                hits_addend: {number: 200, is_negative_hits: true}
                apply_on_stream_done: true";
    let setup = Setup { rate_limits: " []", filter_rate_limits, ..Setup::of(served.grpc()) };
    let envoy = Envoy::start(&setup);
    assert_eq!(envoy.get("/", &[]).status, 200);
    wait_until("the units are returned", PATIENCE, || {
        remaining(&served, "envoy:web|budget=tokens") == 900
    });
}

#[test]
fn envoy_calls_over_tls_with_a_token() {
    let certificates = Certificates::new();
    let rules = Rules::new(RULES);
    let token = "a-token-of-this-test-0123456789";
    std::fs::write(rules.folder().join("tokens"), token).unwrap();
    let config = format!(
        "[auth]\ncheck = [\"file:{}/tokens\"]\n[tls]\ncertificate = {:?}\nkey = {:?}\nlisteners = [\"grpc\"]\n",
        rules.folder().display(),
        certificates.certificate(),
        certificates.key()
    );
    let served = serve(&rules, &[], Some(&config));
    let transport = format!(
        "
    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        '@type': type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        sni: localhost
        common_tls_context:
          validation_context: {{trusted_ca: {{filename: {:?}}}}}",
        certificates.authority()
    );
    let metadata = format!(
        "
                  initial_metadata: [{{key: authorization, value: Bearer {token}}}]"
    );
    let setup =
        Setup { failure_mode_deny: true, transport: &transport, ..Setup::of(served.grpc()) };
    let without = Envoy::start(&Setup { metadata: "", ..setup });
    assert_eq!(without.statuses("/limited", 1), [500], "no token");
    let with = Envoy::start(&Setup { metadata: &metadata, ..setup });
    assert_eq!(with.statuses("/limited", 3), [200, 200, 429]);
}
