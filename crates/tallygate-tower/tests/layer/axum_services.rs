//! Requests to axum services: headers, denials, routes, connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::extract::Request as AxumRequest;
use axum::middleware::{Next, from_fn};
use axum::routing::get as on_get;
use bytes::Bytes;
use http::{HeaderName, Method, Request, Response};
use tallygate::observer::{Event, Observer};
use tallygate::{InFlight, Policy, RateLimiter, Tiers};
use tallygate_tower::{ClientAddress, Dialect, Key, Limiter, RateLimit, Rule, WhenMissing};

use crate::network::{SERVERS, Version, get, ok, send, serve, status, status_with};

fn per_hour(limit: u64) -> Policy {
    Policy::fixed_window(limit).per_hour().named("api").build().unwrap()
}

fn app(limit: RateLimit) -> Router {
    Router::new().route("/", on_get(|| async { ok() })).layer(limit)
}

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

#[tokio::test]
async fn responses_have_the_quota_and_denials_have_the_time_to_wait() {
    for (server, version) in SERVERS {
        let policy = Policy::token_bucket(2).per_hour().named("api").build().unwrap();
        let routes = Router::new().route("/", on_get(|| async { ok() }));
        let server = server.serve(routes, RateLimit::new(policy, Key::peer())).await;
        let request = || Request::get(format!("http://{server}/"));
        let allowed = send(version, request()).await;
        assert_eq!((allowed.status.as_u16(), &allowed.body[..]), (200, &b"ok"[..]));
        assert_eq!(allowed.header("x-ratelimit-limit"), "2");
        assert_eq!(allowed.header("x-ratelimit-remaining"), "1");
        assert_eq!(allowed.header("ratelimit-policy"), "\"api\";q=2;w=3600");
        assert_eq!(allowed.header("ratelimit"), "\"api\";r=1;t=1800");
        assert_eq!(allowed.header("retry-after"), "");
        assert_eq!(send(version, request()).await.header("x-ratelimit-remaining"), "0");

        let denied = send(version, request()).await;
        assert_eq!(denied.status.as_u16(), 429);
        assert_eq!(denied.header("retry-after"), "1800");
        assert_eq!(denied.header("ratelimit"), "\"api\";r=0;t=1800");
        assert_eq!(denied.header("cache-control"), "no-store");
        assert_eq!(denied.header("content-type"), "application/problem+json");
        let problem: serde_json::Value = serde_json::from_slice(&denied.body).unwrap();
        let kind = "https://iana.org/assignments/http-problem-types#quota-exceeded";
        assert_eq!(problem["type"], kind);
        assert_eq!(
            (&problem["status"], &problem["violated-policies"][0]),
            (&429.into(), &"api".into())
        );
    }
}

/// Fault A11.
#[tokio::test]
async fn a_wait_below_a_second_is_rounded_up_and_never_0() {
    let policy = Policy::token_bucket(2).per_second().burst(1).build().unwrap();
    let limiter = Arc::new(RateLimiter::new(policy));
    let server = serve(app(RateLimit::new(limiter.clone(), Key::everyone()))).await;
    // A unit is earned every half second, so on a slow machine it may take several requests until one is denied.
    loop {
        let _ = limiter.check("").unwrap();
        let denied = get(server, "/").await;
        if denied.status.as_u16() == 429 {
            assert_eq!(denied.header("retry-after"), "1");
            assert!(denied.header("ratelimit").ends_with(";r=0;t=1"), "{denied:?}");
            return;
        }
    }
}

#[tokio::test]
async fn a_request_that_can_never_be_allowed_has_no_retry_time() {
    let rule = Rule::new(per_hour(5), Key::everyone()).cost(|_| 6);
    let denied = get(serve(app(rule.into())).await, "/").await;
    assert_eq!((denied.status.as_u16(), denied.header("retry-after")), (429, ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_connections_share_one_quota() {
    const CONNECTIONS: usize = 1000;
    const QUOTA: u64 = 300;
    let server = serve(app(RateLimit::new(per_hour(QUOTA), Key::peer()))).await;
    let allowed = Arc::new(AtomicU64::new(0));
    let all_connected = Arc::new(tokio::sync::Barrier::new(CONNECTIONS));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..CONNECTIONS {
        let (allowed, all_connected) = (allowed.clone(), all_connected.clone());
        tasks.spawn(async move {
            let stream = tokio::net::TcpStream::connect(server).await.unwrap();
            let io = hyper_util::rt::TokioIo::new(stream);
            let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
            tokio::spawn(connection);
            all_connected.wait().await;
            let request = Request::get("/").header("host", "localhost");
            let request = request.body(http_body_util::Empty::<Bytes>::new()).unwrap();
            let response = sender.send_request(request).await.unwrap();
            allowed.fetch_add(u64::from(response.status().is_success()), Ordering::Relaxed);
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    assert_eq!(allowed.load(Ordering::Relaxed), QUOTA);
}

#[tokio::test]
async fn a_request_without_its_key_is_denied_unless_the_rule_says_otherwise() {
    let rule = |when_missing| {
        app(Rule::new(per_hour(1), Key::header(API_KEY)).when_missing(when_missing).into())
    };
    let deny = serve(rule(WhenMissing::Deny)).await;
    let denied = get(deny, "/").await;
    assert_eq!(denied.status.as_u16(), 400);
    assert!(String::from_utf8_lossy(&denied.body).contains("missing header field x-api-key"));
    assert_eq!(status_with(deny, &[("x-api-key", "alice")]).await, 200);
    assert_eq!(status_with(deny, &[("x-api-key", "alice")]).await, 429);
    assert_eq!(status_with(deny, &[("x-api-key", "bob")]).await, 200);
    let long = "x".repeat(5000);
    assert_eq!(status_with(deny, &[("x-api-key", &*long)]).await, 400);

    let allow = serve(rule(WhenMissing::Allow)).await;
    assert_eq!([status(allow, "/").await, status(allow, "/").await], [200, 200]);
    let share = serve(rule(WhenMissing::Share)).await;
    assert_eq!([status(share, "/").await, status(share, "/").await], [200, 429]);
}

#[tokio::test]
async fn the_tier_and_the_cost_come_from_the_request() {
    let tiers = Tiers::new(per_hour(2)).tier("pro", per_hour(10));
    let rule = Rule::new(Limiter::tiered("api", tiers), Key::header(API_KEY))
        .tier(|request| request.headers.get("x-plan")?.to_str().ok().map(str::to_owned))
        .cost(|request| if request.uri.query().is_some() { 2 } else { 1 });
    let server = serve(app(rule.into())).await;
    let remaining = async |path: &str, key: &str, plan: Option<&str>| {
        let mut request = Request::get(format!("http://{server}{path}")).header("x-api-key", key);
        if let Some(plan) = plan {
            request = request.header("x-plan", plan);
        }
        let answer = send(Version::Http1, request).await;
        format!("{} {}", answer.status.as_u16(), answer.header("x-ratelimit-remaining"))
    };
    assert_eq!(remaining("/", "alice", None).await, "200 1");
    assert_eq!(remaining("/?heavy", "alice", None).await, "429 1");
    assert_eq!(remaining("/?heavy", "bob", Some("pro")).await, "200 8");
    // A tier that does not exist is a mistake of the application, and the response reveals nothing about it.
    assert_eq!(remaining("/", "bob", Some("gold")).await, "500 ");
}

#[tokio::test]
async fn several_rules_charge_all_or_nothing() {
    let address = Arc::new(RateLimiter::new(per_hour(5).with_name("address")));
    let user = Arc::new(RateLimiter::new(per_hour(1).with_name("user")));
    let rules =
        [Rule::new(address.clone(), Key::peer()), Rule::new(user.clone(), Key::header(API_KEY))];
    let server = serve(app(RateLimit::all_of(rules))).await;
    let alice = [("x-api-key", "alice")];
    assert_eq!(status_with(server, &alice).await, 200);
    assert_eq!(status_with(server, &alice).await, 429);
    assert_eq!(status_with(server, &alice).await, 429);
    assert_eq!(
        address.peek(tallygate::Ask::new("127.0.0.1").cost(0)).unwrap().remaining,
        4,
        "denied requests charge nothing"
    );

    let request = Request::get(format!("http://{server}/")).header("x-api-key", "bob");
    let both = send(Version::Http1, request).await;
    let policies = both.headers.get_all("ratelimit-policy").iter();
    let policies: Vec<_> = policies.map(|value| value.to_str().unwrap()).collect();
    assert_eq!(policies, ["\"user\";q=1;w=3600", "\"address\";q=5;w=3600"]);
    assert_eq!(both.header("x-ratelimit-remaining"), "0", "the scarcest decides");
}

#[tokio::test]
async fn routes_methods_and_rules_have_their_own_policies() {
    let by_route = RateLimit::new(per_hour(1), Key::route());
    let users = Router::new()
        .route("/users/{id}", on_get(|| async { ok() }))
        .route("/health", on_get(|| async { ok() }))
        .route("/login", on_get(|| async { ok() }).post(|| async { ok() }))
        .layer(by_route.exempt_paths(["/health", "/login"]))
        .layer(RateLimit::from(
            Rule::new(per_hour(2), Key::method())
                .when(|request| request.uri.path() == "/login" && request.method == Method::POST),
        ));
    let server = serve(users).await;
    assert_eq!([status(server, "/users/1").await, status(server, "/users/2").await], [200, 429]);
    for _ in 0..3 {
        assert_eq!([status(server, "/health").await, status(server, "/login").await], [200, 200]);
    }
    // All paths without a route have one quota in total.
    assert_eq!(
        [status(server, "/invented/1").await, status(server, "/invented/2").await],
        [404, 429]
    );
    let mut logins = Vec::new();
    for _ in 0..3 {
        let login = Request::post(format!("http://{server}/login"));
        logins.push(send(Version::Http1, login).await.status.as_u16());
    }
    assert_eq!(logins, [200, 200, 429]);
}

#[tokio::test]
async fn the_application_s_own_authentication_provides_the_key() {
    #[derive(Clone)]
    struct User(String);
    async fn authenticate(mut request: AxumRequest, next: Next) -> axum::response::Response {
        let user = request.headers().get("x-user").map(|user| user.to_str().unwrap().to_owned());
        if let Some(user) = user {
            request.extensions_mut().insert(User(user));
        }
        next.run(request).await
    }
    let key = Key::extension(|user: &User| user.0.clone()).or(Key::peer());
    let server = serve(app(RateLimit::new(per_hour(1), key)).layer(from_fn(authenticate))).await;
    let mut seen = Vec::new();
    for fields in
        [&[("x-user", "alice")][..], &[("x-user", "alice")], &[], &[], &[("x-user", "127.0.0.1")]]
    {
        seen.push(status_with(server, fields).await);
    }
    assert_eq!(seen, [200, 429, 200, 429, 200]);
}

#[tokio::test]
async fn exempt_clients_are_not_limited() {
    let loopback = "127.0.0.0/8".parse().unwrap();
    let limit = RateLimit::new(per_hour(1), Key::everyone());
    let exempt = limit.clone().exempt_networks(ClientAddress::peer(), [loopback]);
    let server = serve(app(exempt)).await;
    for _ in 0..3 {
        let answer = get(server, "/").await;
        assert_eq!((answer.status.as_u16(), answer.header("x-ratelimit-limit")), (200, ""));
    }
    let other = "10.0.0.0/8".parse().unwrap();
    let server = serve(app(limit.exempt_networks(ClientAddress::peer(), [other]))).await;
    assert_eq!([status(server, "/").await, status(server, "/").await], [200, 429]);
}

#[tokio::test]
async fn the_response_and_the_dialects_can_be_chosen() {
    let limit =
        RateLimit::new(per_hour(1), Key::everyone()).headers([Dialect::X]).respond_with(|denial| {
            let text = format!("{} by {}\n", denial.status().as_u16(), denial.policy().unwrap());
            let response = Response::builder().status(418).header("x-ratelimit-limit", "mine");
            response.body(Bytes::from(text)).unwrap()
        });
    let server = serve(app(limit)).await;
    let allowed = get(server, "/").await;
    assert_eq!(allowed.header("x-ratelimit-limit"), "1");
    assert_eq!((allowed.header("ratelimit"), allowed.header("ratelimit-policy")), ("", ""));
    let denied = get(server, "/").await;
    assert_eq!((denied.status.as_u16(), &denied.body[..]), (418, &b"429 by api\n"[..]));
    assert_eq!(denied.header("x-ratelimit-limit"), "mine", "a field of the application stays");
    assert_eq!(denied.header("x-ratelimit-remaining"), "0");
    assert_ne!(denied.header("retry-after"), "");
}

/// Fault H5.
#[tokio::test]
async fn no_name_injects_a_header_or_breaks_out_of_the_body() {
    let name = "a\"b\\c\r\nset-cookie: x=1";
    let policy = per_hour(1).with_name(name);
    let server = serve(app(RateLimit::new(policy, Key::everyone()))).await;
    let allowed = get(server, "/").await;
    assert_eq!(allowed.header("set-cookie"), "");
    assert!(allowed.header("ratelimit").starts_with("\"a\\\"b\\\\c%0D%0Aset-cookie: x=1\""));
    let denied = get(server, "/").await;
    assert_eq!(denied.header("set-cookie"), "");
    let problem: serde_json::Value = serde_json::from_slice(&denied.body).unwrap();
    assert_eq!(problem["violated-policies"][0], name);
}

#[tokio::test]
async fn observers_of_the_limiter_see_every_decision() {
    #[derive(Clone, Default)]
    struct Counts(Arc<[AtomicU64; 2]>);
    impl Observer for Counts {
        fn decided(&self, event: &Event<'_>) {
            self.0[usize::from(event.allowed)].fetch_add(1, Ordering::Relaxed);
        }
    }
    let counts = Counts::default();
    let limiter = RateLimiter::new(per_hour(2)).observed_by(counts.clone());
    let server = serve(app(RateLimit::new(limiter, Key::everyone()))).await;
    for _ in 0..5 {
        get(server, "/").await;
    }
    assert_eq!(counts.0.each_ref().map(|count| count.load(Ordering::Relaxed)), [3, 2]);
}

#[tokio::test]
async fn more_requests_in_flight_than_places_are_denied() {
    let in_flight = InFlight::new(1);
    let entered = Arc::new(tokio::sync::Semaphore::new(0));
    let leave = Arc::new(tokio::sync::Semaphore::new(0));
    let (entering, leaving) = (entered.clone(), leave.clone());
    let slow = move || async move {
        entering.add_permits(1);
        leaving.acquire().await.unwrap().forget();
        ok()
    };
    let limit = RateLimit::all_of([]).in_flight(in_flight.clone(), Key::peer());
    let server = serve(Router::new().route("/", on_get(slow)).layer(limit)).await;
    let first = tokio::spawn(get(server, "/"));
    entered.acquire().await.unwrap().forget();
    let denied = get(server, "/").await;
    assert_eq!((denied.status.as_u16(), denied.header("retry-after")), (429, "1"));
    assert_eq!(in_flight.count("127.0.0.1").unwrap(), 1);
    leave.add_permits(2);
    assert_eq!(first.await.unwrap().status.as_u16(), 200);
    assert_eq!(status(server, "/").await, 200);
}
