//! The service over gRPC and JSON, without Envoy.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use tallygate_testkit::servers::wait_until;

use crate::common::Served;
use crate::grpc_client::{GrpcClient, RateLimit, SHOULD_RATE_LIMIT, Status, bytes, fields, framed};
use crate::http_client::post;

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Windows of years, so that none ends during a test.
pub(crate) const RULES: &str = "
domain: web
descriptors:
  - key: user
    rate_limit: {unit: year, requests_per_unit: 2}
  - key: path
    value: /api
    rate_limit: {unit: year, requests_per_unit: 3}
";

const HEALTH: &str = "/grpc.health.v1.Health/Check";
const INVALID_ARGUMENT: u32 = 3;
const INTERNAL: u32 = 13;
const DEADLINE_EXCEEDED: u32 = 4;
const NOT_FOUND: u32 = 5;
const RESOURCE_EXHAUSTED: u32 = 8;
const UNIMPLEMENTED: u32 = 12;
const UNAUTHENTICATED: u32 = 16;

/// A folder with a file of rules.
pub(crate) struct Rules {
    folder: tempfile::TempDir,
}

impl Rules {
    pub(crate) fn new(text: &str) -> Self {
        let rules = Self { folder: tempfile::tempdir().unwrap() };
        rules.write(text);
        rules
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.folder().join("rules.yaml")
    }

    /// Replaces the file by a rename, so that no half-written file is read.
    pub(crate) fn write(&self, text: &str) {
        let new = self.folder().join("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, self.file()).unwrap();
    }
}

pub(crate) fn serve(rules: &Rules, options: &[&str], config: Option<&str>) -> Served {
    let path = rules.folder().display().to_string();
    let all = [&["--grpc", "127.0.0.1:0", "--envoy-config", &path], options].concat();
    Served::start(&all, config)
}

fn user(name: &str) -> RateLimit {
    RateLimit::of("web", &[&[("user", name)]])
}

#[test]
fn a_request_has_a_status_per_descriptor_over_grpc_and_json() {
    let rules = Rules::new(RULES);
    let served = serve(&rules, &[], None);
    let mut client = GrpcClient::connect(served.grpc());
    let request =
        RateLimit::of("web", &[&[("user", "alice")], &[("other", "x")], &[("path", "/api")]]);
    let first = client.ask(&request).unwrap();
    assert_eq!(first.code, 1);
    let [by_user, unmatched, by_path] = &first.statuses[..] else { panic!("{first:?}") };
    assert_eq!((by_user.code, by_user.limit, by_user.remaining), (1, Some((2, 6)), 1));
    assert!(by_user.reset_s > 0);
    assert_eq!(*unmatched, Status { code: 1, ..Status::default() });
    assert_eq!((by_path.limit, by_path.remaining), (Some((3, 6)), 2));
    // JSON has the same counters.
    let body = r#"{"domain":"web","descriptors":[{"entries":[{"key":"user","value":"alice"}]}]}"#;
    let second = post(served.http(), "/json", body);
    assert_eq!((second.status, &second.json()["overallCode"]), (200, &"OK".into()));
    let third = post(served.http(), "/json", body);
    assert_eq!(third.status, 429);
    let status = &third.json()["statuses"][0];
    assert_eq!(status["code"], "OVER_LIMIT");
    assert_eq!(status["currentLimit"]["requestsPerUnit"], 2);
    let denied = client.ask(&request).unwrap();
    assert_eq!(denied.code, 2);
    assert_eq!(denied.statuses.iter().map(|status| status.code).collect::<Vec<_>>(), [2, 1, 1]);
    assert_eq!(denied.statuses[2].remaining, 2, "the denied request charged nothing");
    // The policy is also there by its name.
    let peek =
        post(served.http(), "/v1/peek", r#"{"policy":"envoy:web|user","key":"alice","cost":0}"#);
    assert_eq!(peek.json()["remaining"], 0);
    assert_eq!(post(served.http(), "/json", "{").status, 400);
    assert_eq!(post(served.http(), "/json", r#"{"domain":"web"}"#).status, 400);
}

#[test]
fn headers_are_in_the_configured_dialect() {
    let rules = Rules::new(RULES);
    let served = serve(&rules, &[], Some("[envoy]\nheaders = \"all\"\n"));
    let mut client = GrpcClient::connect(served.grpc());
    let names = |request: &RateLimit, client: &mut GrpcClient| {
        let response = client.ask(request).unwrap();
        response.headers.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
    };
    let first = names(&user("alice"), &mut client);
    for name in [
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
        "ratelimit",
        "ratelimit-policy",
    ] {
        assert!(first.iter().any(|known| known == name), "{first:?}");
    }
    client.ask(&user("alice")).unwrap();
    assert!(names(&user("alice"), &mut client).iter().any(|name| name == "retry-after"));
}

#[test]
fn the_server_and_the_service_are_healthy_until_shutdown() {
    let rules = Rules::new(RULES);
    let mut served = serve(&rules, &[], None);
    let mut client = GrpcClient::connect(served.grpc());
    for service in ["", "ratelimit", "envoy.service.ratelimit.v3.RateLimitService"] {
        let mut request = Vec::new();
        bytes(&mut request, 1, service.as_bytes());
        let reply = client.call(HEALTH, &[], &request).unwrap();
        assert_eq!(fields(&reply[0]), [(1, 1, &[][..])], "{service}");
    }
    let mut unknown = Vec::new();
    bytes(&mut unknown, 1, b"unknown");
    assert_eq!(client.call(HEALTH, &[], &unknown).unwrap_err().code, NOT_FOUND);
    // A watch has the present state, then the last one, and does not delay the shutdown.
    let address = served.grpc().to_owned();
    let watching = std::thread::spawn(move || {
        GrpcClient::connect(&address).call("/grpc.health.v1.Health/Watch", &[], &[])
    });
    // The four calls above, and the watch.
    wait_until("the watch is answered", PATIENCE, || {
        let metrics = crate::http_client::get(served.http(), "/metrics").body;
        metrics.contains("tallygate_request_seconds_count{surface=\"grpc\"} 5")
    });
    assert_eq!(served.stop(), Some(0));
    let states = watching.join().unwrap().unwrap();
    let states: Vec<_> = states.iter().map(|state| fields(state)[0].1).collect();
    assert_eq!(states, [1, 2]);
}

#[test]
fn reflection_describes_the_service() {
    let rules = Rules::new(RULES);
    let served = serve(&rules, &[], None);
    let mut client = GrpcClient::connect(served.grpc());
    for version in ["v1", "v1alpha"] {
        let path = format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo");
        let mut list = Vec::new();
        bytes(&mut list, 7, b"*");
        let mut file = Vec::new();
        bytes(&mut file, 4, b"envoy.service.ratelimit.v3.RateLimitService");
        let mut import = Vec::new();
        bytes(&mut import, 3, b"google/protobuf/struct.proto");
        let questions = [list, file, import].map(|question| framed(&question));
        let replies = client.send(&path, &[], questions.concat().into()).unwrap();
        assert_eq!(replies.len(), 3);
        let services = String::from_utf8_lossy(&replies[0]).into_owned();
        assert!(services.contains("envoy.service.ratelimit.v3.RateLimitService"), "{services}");
        assert!(services.contains("grpc.health.v1.Health"), "{services}");
        let files = String::from_utf8_lossy(&replies[1]).into_owned();
        for name in [
            "envoy/service/ratelimit/v3/rls.proto",
            "google/protobuf/duration.proto",
            "ShouldRateLimit",
        ] {
            assert!(files.contains(name), "{name}");
        }
        let imported = String::from_utf8_lossy(&replies[2]).into_owned();
        assert!(imported.contains("ListValue"), "{imported}");
        let mut unknown = Vec::new();
        bytes(&mut unknown, 4, b"envoy.Unknown");
        assert_eq!(client.call(&path, &[], &unknown).unwrap_err().code, NOT_FOUND);
    }
}

/// Fault E7.
#[test]
fn a_large_message_and_many_descriptors_are_rejected_and_charge_nothing() {
    let rules = Rules::new(RULES);
    let served = serve(&rules, &[], None);
    let mut client = GrpcClient::connect(served.grpc());
    let many =
        RateLimit { descriptors: vec![vec![("user".into(), "a".into())]; 100_000], ..user("a") };
    let failed = client.ask(&many).unwrap_err();
    assert_eq!(failed.code, RESOURCE_EXHAUSTED, "{failed:?}");
    let some = RateLimit { descriptors: vec![vec![("user".into(), "a".into())]; 65], ..user("a") };
    assert_eq!(client.ask(&some).unwrap_err().code, RESOURCE_EXHAUSTED);
    // Empty descriptors take two bytes each.
    let empty = RateLimit { descriptors: vec![vec![]; 60_000], ..user("a") };
    assert_eq!(client.ask(&empty).unwrap_err().code, RESOURCE_EXHAUSTED);
    let long =
        RateLimit { descriptors: vec![vec![("user".into(), "x".repeat(200 * 1024))]], ..user("a") };
    assert_eq!(client.ask(&long).unwrap_err().code, RESOURCE_EXHAUSTED);
    let longest =
        RateLimit { descriptors: vec![vec![("user".into(), "x".repeat(100 * 1024))]], ..user("a") };
    assert_eq!(client.ask(&longest).unwrap().statuses[0].remaining, 1, "a long value has a key");
    // A long header field can be in many descriptors.
    let many_times = |count: usize| {
        let value = |number: usize| format!("{number}{}", "y".repeat(60 * 1024));
        let descriptors = (0..count).map(|number| vec![("user".into(), value(number))]).collect();
        RateLimit { descriptors, ..user("a") }
    };
    assert_eq!(client.ask(&many_times(17)).unwrap().code, 1);
    assert_eq!(client.ask(&many_times(18)).unwrap_err().code, RESOURCE_EXHAUSTED);
    // The connection continues, and nothing was charged.
    assert_eq!(client.ask(&user("a")).unwrap().statuses[0].remaining, 1);
}

#[test]
fn malformed_calls_fail_with_a_code_and_the_connection_goes_on() {
    let rules = Rules::new(RULES);
    let served = serve(&rules, &[], None);
    let mut client = GrpcClient::connect(served.grpc());
    let code = |client: &mut GrpcClient, body: &'static [u8]| {
        client.send(SHOULD_RATE_LIMIT, &[], Bytes::from_static(body)).unwrap_err().code
    };
    assert_eq!(code(&mut client, b""), INVALID_ARGUMENT);
    assert_eq!(code(&mut client, &[0, 0, 0, 0, 9, 1]), INVALID_ARGUMENT, "shorter than its prefix");
    assert_eq!(code(&mut client, &[0, 0, 0, 0, 1, 0xff]), INVALID_ARGUMENT, "not a message");
    let compressed = Bytes::from_static(&[1, 0, 0, 0, 0]);
    let gzip = client.send(SHOULD_RATE_LIMIT, &[("grpc-encoding", "gzip")], compressed);
    assert_eq!(gzip.unwrap_err().code, UNIMPLEMENTED, "compressed");
    assert_eq!(code(&mut client, &[1, 0, 0, 0, 0]), INTERNAL, "compressed without an encoding");
    assert_eq!(code(&mut client, &[0, 0, 0, 0, 0]), INVALID_ARGUMENT, "no domain");
    let unknown = client.call("/a.B/C", &[], &[]).unwrap_err();
    assert_eq!(unknown.code, UNIMPLEMENTED);
    let late = client.call(SHOULD_RATE_LIMIT, &[("grpc-timeout", "0n")], &user("a").encode());
    assert_eq!(late.unwrap_err().code, DEADLINE_EXCEEDED);
    assert_eq!(client.ask(&user("a")).unwrap().statuses[0].remaining, 1);
}

#[test]
fn a_token_is_needed_where_one_is_configured() {
    let rules = Rules::new(RULES);
    let token = "a-token-of-this-test-0123456789";
    std::fs::write(rules.folder().join("tokens"), token).unwrap();
    let config = format!("[auth]\ncheck = [\"file:{}/tokens\"]\n", rules.folder().display());
    let served = serve(&rules, &[], Some(&config));
    let mut client = GrpcClient::connect(served.grpc());
    let message = user("a").encode();
    assert_eq!(client.ask(&user("a")).unwrap_err().code, UNAUTHENTICATED);
    let wrong = [("authorization", "Bearer wrong")];
    assert_eq!(client.call(SHOULD_RATE_LIMIT, &wrong, &message).unwrap_err().code, UNAUTHENTICATED);
    let bearer = format!("Bearer {token}");
    assert!(client.call(SHOULD_RATE_LIMIT, &[("authorization", &bearer)], &message).is_ok());
    // Health needs none, as for HTTP.
    assert!(client.call(HEALTH, &[], &[]).is_ok());
}

/// Fault G1.
#[test]
fn invalid_rules_change_nothing_and_valid_ones_keep_what_was_used() {
    let rules = Rules::new(RULES);
    let served = serve(&rules, &[], None);
    let mut client = GrpcClient::connect(served.grpc());
    client.ask(&user("a")).unwrap();
    rules.write("domain: web\ndescriptors:\n  - key: user\n    rate_limitt: {}\n");
    wait_until("the error is logged", PATIENCE, || served.log().contains("rules.yaml:4:5"));
    assert!(served.log().contains("unknown field `rate_limitt`; did you mean `rate_limit`?"));
    assert_eq!(client.ask(&user("a")).unwrap().statuses[0].remaining, 0);
    rules.write(&RULES.replace("requests_per_unit: 2", "requests_per_unit: 5"));
    wait_until("the new limit is in force", PATIENCE, || {
        client.ask(&user("b")).unwrap().statuses[0].limit == Some((5, 6))
    });
    assert_eq!(client.ask(&user("a")).unwrap().statuses[0].remaining, 2);
    // A new file of the folder is read as well.
    std::fs::write(rules.folder().join("more.yaml"), RULES.replace("domain: web", "domain: more"))
        .unwrap();
    wait_until("the new domain is in force", PATIENCE, || {
        client.ask(&RateLimit::of("more", &[&[("user", "a")]])).unwrap().statuses[0].limit.is_some()
    });
}

#[test]
fn check_config_understands_the_rules() {
    let rules = Rules::new(RULES);
    let check = |arguments: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_tallygate"))
            .arg("check-config")
            .args(arguments)
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let file = rules.file().display().to_string();
    let (code, out, _) = check(&["--envoy-config", &file]);
    assert_eq!(code, Some(0));
    assert!(
        out.contains("envoy 1 domain, a denied request charges nothing, headers none"),
        "{out}"
    );
    assert!(out.contains("policy envoy:web|user: "), "{out}");
    rules.write(
        "domain: web\ndescriptors: [{key: user, rate_limit: {unit: eon, requests_per_unit: 1}}]\n",
    );
    let (code, _, error) = check(&["--envoy-config", &file]);
    assert_eq!(code, Some(2));
    assert!(error.contains(&format!("{file}:2:46: unknown unit \"eon\"")), "{error}");
}

#[test]
fn a_grpc_listener_without_rules_does_not_start() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_tallygate"))
        .args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--grpc", "127.0.0.1:0"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("--envoy-config"));
}

/// Envoy looks at a limit when a request begins, and charges it when the response has ended. With all or nothing, a charge
/// above the remaining quota charges nothing, so no request would ever be denied.
#[test]
fn a_limit_that_costs_of_responses_never_exhaust_is_logged() {
    const WARNING: &str = "if Envoy charges the costs of responses";
    let rules = Rules::new(RULES);
    for charge in ["all_or_nothing", "always"] {
        let served = serve(&rules, &[], Some(&format!("[envoy]\ncharge = \"{charge}\"\n")));
        let status = |key: &str, value: &str, hits: u32| {
            let entry = format!(r#"{{"key":"{key}","value":"{value}"}}"#);
            let descriptor = format!(r#"{{"entries":[{entry}],"hitsAddend":{hits}}}"#);
            let body = format!(r#"{{"domain":"web","descriptors":[{descriptor}]}}"#);
            post(served.http(), "/json", &body).status
        };
        assert_eq!(status("path", "/api", 4), 429, "denied without a look");
        let statuses = [1, 0, 2, 0].map(|hits| status("user", "a", hits));
        // An invalid file is logged after everything above.
        rules.write("domain: web\ndescriptors: 5\n");
        wait_until("the error is logged", PATIENCE, || served.log().contains("rules.yaml:2:14"));
        rules.write(RULES);
        let log = served.log();
        let warnings: Vec<_> = log.lines().filter(|line| line.contains(WARNING)).collect();
        if charge == "always" {
            assert_eq!(statuses, [200, 200, 429, 429]);
            assert!(warnings.is_empty(), "{log}");
        } else {
            assert_eq!(statuses, [200, 200, 429, 200]);
            assert!(warnings.len() == 1 && warnings[0].contains("envoy:web|user"), "{log}");
        }
    }
}

/// The values of requests are labels only where the rules say so, and only a bounded number of them.
#[test]
fn detailed_metrics_are_bounded() {
    let rules = Rules::new(
        "domain: web\ndescriptors:\n  - key: user\n    detailed_metric: true\n    rate_limit: {unit: year, requests_per_unit: 1}\n",
    );
    let served = serve(&rules, &[], None);
    let mut client = GrpcClient::connect(served.grpc());
    for number in 0..1_050 {
        client.ask(&user(&format!("u{number}"))).unwrap();
    }
    let metrics = crate::http_client::get(served.http(), "/metrics").body;
    let lines =
        metrics.lines().filter(|line| line.starts_with("tallygate_envoy_descriptor_decisions"));
    assert_eq!(lines.count(), 1_001);
    assert!(metrics.contains(r#"descriptor="envoy:web|user=u7",outcome="allowed"} 1"#));
    assert!(metrics.contains(r#"descriptor="other",outcome="allowed"} 50"#));
}
