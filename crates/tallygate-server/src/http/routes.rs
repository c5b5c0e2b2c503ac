//! Routes: paths, methods and roles.

use std::sync::atomic::Ordering;
use std::time::Duration;

use hyper::body::{Body as _, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, StatusCode, Version};
use tallygate_redis::Redis;
use tokio::task::JoinHandle;

use super::body::{self as request_body, Received};
use super::identity::{self, Exposure};
use super::page::{self, Asset};
use super::problem::Problem;
use super::sending::OperatorReply;
use super::{
    Caller, Reply, admin, answer, authorize, backtest, envoy, operations, overrides, policies,
    roles, simulate,
};
use crate::background::run_in_background_in_order;
use crate::client_budgets::HeldBytes;
use crate::config::Role;
use crate::gate::Verb;
use crate::metrics::Format;

/// A route.
#[derive(Clone, Copy)]
enum Route<'a> {
    Home,
    Page(&'static Asset),
    Ask(Verb),
    Reserve,
    Settle,
    Envoy,
    Authorize(&'a str),
    Simulate,
    Explain,
    Live,
    Ready,
    Metrics,
    OpenApi,
    Policies,
    HotClients,
    Client,
    Overrides,
    Reload,
    Backtest,
}

const OPENAPI: &str = include_str!("openapi.json");

/// The body of `/readyz` while the store is unavailable.
const WITHOUT_STORE: &str =
    "ready, but the store does not answer; policies decide by on_store_error\n";

const WITHOUT_MEMORY: &str =
    "degraded: the store is out of memory and rejects writes; policies decide by on_store_error\n";

const REJECTED: &str = "degraded: the store answers, but rejects every call; policies decide by on_store_error (the log has the reason)\n";

const HELLO: &str = "\
This is Tallygate, a rate limiter.

  POST /v1/check               check a request and charge it if allowed
  POST /v1/peek                check without charging
  POST /v1/reserve, /v1/settle charge an estimate, then replace it by the real cost
  GET  /v1/authorize/{policy}  check a request of a proxy (nginx, Caddy, Traefik, HAProxy)
  POST /json                   check descriptors of Envoy's rate limit service
  POST /v1/simulate            run the algorithms on generated traffic
  POST /v1/explain             show the arithmetic of one decision
  GET  /livez, /readyz         liveness and readiness
  GET  /metrics                metrics for Prometheus
  GET  /openapi.json           the full API description
  GET  /                       in a browser: a page to try it

Admin requests (with an admin token, or over a Unix socket as the user of the server):

  POST /v1/refund, /v1/reset   return units to a client, or reset it
  GET  /v1/policies            the policies in force
  GET  /v1/admin/hot           the busiest and the most denied clients
  GET  /v1/admin/client?key=   the state of one client in every policy
  GET, PUT, DELETE /v1/admin/overrides  list, set and remove overrides
  POST /v1/admin/reload        reload the configuration
  POST /v1/backtest?policy=    report what policies would have done to an access log

Try: curl -d '{\"policy\":\"{example}\",\"key\":\"alice\"}' {address}/v1/check
";

impl<'a> Route<'a> {
    fn of(path: &'a str) -> Option<Self> {
        Some(match path {
            "/v1/check" => Self::Ask(Verb::Check),
            "/v1/peek" => Self::Ask(Verb::Peek),
            "/v1/refund" => Self::Ask(Verb::Refund),
            "/v1/reset" => Self::Ask(Verb::Reset),
            "/v1/reserve" => Self::Reserve,
            "/v1/settle" => Self::Settle,
            "/json" => Self::Envoy,
            "/v1/simulate" => Self::Simulate,
            "/v1/explain" => Self::Explain,
            "/" => Self::Home,
            "/livez" => Self::Live,
            "/readyz" => Self::Ready,
            "/metrics" => Self::Metrics,
            "/openapi.json" => Self::OpenApi,
            "/v1/policies" => Self::Policies,
            "/v1/admin/hot" => Self::HotClients,
            "/v1/admin/client" => Self::Client,
            "/v1/admin/overrides" => Self::Overrides,
            "/v1/admin/reload" => Self::Reload,
            "/v1/backtest" => Self::Backtest,
            _ => match path.strip_prefix("/page/") {
                Some(name) => Self::Page(page::asset(name)?),
                None => {
                    let policy = path.strip_prefix("/v1/authorize/")?;
                    Self::Authorize(
                        Some(policy).filter(|name| !name.is_empty() && !name.contains('/'))?,
                    )
                }
            },
        })
    }

    const fn methods(self) -> &'static str {
        match self {
            Self::Ask(_)
            | Self::Reserve
            | Self::Settle
            | Self::Envoy
            | Self::Simulate
            | Self::Explain
            | Self::Reload
            | Self::Backtest => "POST",
            Self::Authorize(_) => "GET, HEAD, POST",
            Self::Overrides => "GET, PUT, DELETE",
            Self::Home
            | Self::Page(_)
            | Self::Live
            | Self::Ready
            | Self::Metrics
            | Self::OpenApi
            | Self::Policies
            | Self::HotClients
            | Self::Client => "GET, HEAD",
        }
    }

    /// Returns the role that a route needs; `None` is open to every client.
    const fn role(self) -> Option<Role> {
        match self {
            Self::Home | Self::Page(_) | Self::Live | Self::Ready | Self::OpenApi => None,
            Self::Ask(Verb::Check | Verb::Peek)
            | Self::Reserve
            | Self::Settle
            | Self::Envoy
            | Self::Authorize(_)
            | Self::Simulate
            | Self::Explain
            | Self::Metrics => Some(Role::Check),
            Self::Ask(Verb::Refund | Verb::Reset)
            | Self::Policies
            | Self::HotClients
            | Self::Client
            | Self::Overrides
            | Self::Reload
            | Self::Backtest => Some(Role::Admin),
        }
    }
}

impl Route<'_> {
    /// Returns whether an operator needs the reply during an attack.
    const fn is_for_operators(self) -> bool {
        matches!(self, Self::Metrics) || matches!(self.role(), Some(Role::Admin))
    }

    const fn exposure(self) -> Exposure {
        match self {
            Self::Authorize(_) => Exposure::Proxy,
            Self::Metrics => Exposure::Server,
            _ => Exposure::Caller,
        }
    }
}

/// Returns the template of a path, without the name of a policy; `None` if there is no such route.
pub(super) fn template(path: &str) -> Option<&str> {
    match Route::of(path)? {
        Route::Authorize(_) => Some("/v1/authorize/{policy}"),
        _ => Some(path),
    }
}

/// Answers a request. `head` is the counted memory of its head, and is dropped with it.
pub(super) async fn reply(
    caller: &Caller,
    request: Request<Incoming>,
    head: Option<HeldBytes>,
) -> Reply {
    let (request, body) = request.into_parts();
    let is_http2 = request.version == Version::HTTP_2;
    let mut body = RequestBody {
        incoming: Some(body),
        is_awaited: !is_http2 && request.headers.contains_key(header::EXPECT),
        skip_timeout: caller.limits.body_timeout,
        is_unread: false,
        skipping: None,
    };
    let served = served(caller, request, head, &mut body).await;
    let mut reply = served.unwrap_or_else(Problem::reply);
    body.leave();
    if body.is_unread && !is_http2 {
        // The connection cannot be reused, and the client must know it.
        reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    if is_http2 && reply.status().is_success() {
        body.skipped().await;
    }
    reply
}

/// The body of a request. Not every handler reads it.
struct RequestBody {
    incoming: Option<Incoming>,
    /// Whether the client sends it only when the server asks for it (`Expect: 100-continue`), which reading does.
    is_awaited: bool,
    /// How long a body that no handler reads is skipped.
    skip_timeout: Duration,
    /// Whether a part of it was not read.
    is_unread: bool,
    /// The task that reads and drops it.
    skipping: Option<JoinHandle<()>>,
}

impl RequestBody {
    /// Returns the body to a handler that reads it. A body can be read once.
    fn take(&mut self) -> Result<Incoming, Problem> {
        let was_read = || {
            Problem::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "internal error: the body was already read",
            )
        };
        self.incoming.take().ok_or_else(was_read)
    }

    /// Reads and drops the body in the background. If the server stopped reading, it would reset the stream or the
    /// connection, and a client that still writes would not see the reply.
    fn leave(&mut self) {
        let Some(body) = self.incoming.take() else { return };
        self.is_unread = !body.is_end_stream();
        if self.is_unread && !self.is_awaited {
            self.skipping = Some(tokio::spawn(request_body::skip(
                body,
                request_body::MAX_SKIPPED_BYTES,
                self.skip_timeout,
            )));
        }
    }

    /// Waits until a body that no handler reads has ended. Over HTTP/2, curl 7.88 waits forever after a reply without a body
    /// that arrives while it still sends; after an error it stops sending.
    async fn skipped(&mut self) {
        if let Some(skipping) = self.skipping.take() {
            // A task that was stopped with the runtime has nothing to report.
            let _ = skipping.await;
        }
    }

    async fn read(&mut self, caller: &Caller) -> Result<Received, Problem> {
        request_body::read(self.take()?, caller).await
    }
}

async fn served(
    caller: &Caller,
    request: Parts,
    head: Option<HeldBytes>,
    body: &mut RequestBody,
) -> Result<Reply, Problem> {
    let route = Route::of(request.uri.path()).ok_or_else(|| {
        Problem::new(StatusCode::NOT_FOUND, "there is nothing at this path; GET / lists all paths")
    })?;
    let methods = route.methods();
    if !methods.split(", ").any(|method| method == request.method) {
        let detail = format!("{} is not allowed here; use {methods}", request.method);
        return Err(
            Problem::new(StatusCode::METHOD_NOT_ALLOWED, detail).with(header::ALLOW, methods)
        );
    }
    let shared = &caller.shared;
    let gate = &shared.gate;
    if let Some(role) = route.role() {
        identity::check(caller, route.exposure(), &request)?;
        roles::authorize(caller, role, &request)?;
    }
    let is_for_operators = route.is_for_operators();
    let mut reply = match route {
        Route::Ask(verb) => {
            let query = request.uri.query().map(str::to_owned);
            // The body may take long to arrive, so drop the head first.
            drop((request, head));
            let body = body.read(caller).await?;
            operations::ask(gate, verb, query.as_deref(), &body, |bytes| caller.reserve(bytes))
                .await
        }
        Route::Authorize(policy) => {
            body.leave();
            let proxied = authorize::AuthorizeRequest::of(caller, policy, &request)?;
            drop((request, head));
            authorize::authorize(proxied).await
        }
        Route::Reserve => {
            drop((request, head));
            operations::reserve(gate, caller.holder, &body.read(caller).await?).await
        }
        Route::Settle => {
            drop((request, head));
            operations::settle(gate, &body.read(caller).await?).await
        }
        Route::Envoy => {
            drop((request, head));
            envoy::reply(gate, &body.read(caller).await?).await
        }
        Route::Simulate => {
            drop((request, head));
            simulate::simulate(&body.read(caller).await?, caller.reserve_for_report()).await
        }
        Route::Explain => {
            drop((request, head));
            simulate::explain(&body.read(caller).await?, caller.reserve_for_report()).await
        }
        Route::Home => {
            let is_encrypted = caller.shared.http.is_encrypted() && caller.peer.address.is_some();
            // The names of other policies are not for everyone.
            let has_demo = gate.in_force().get("demo").is_some();
            let text = HELLO.replace("{example}", if has_demo { "demo" } else { "NAME" });
            Ok(page::home(&request, &text, is_encrypted))
        }
        Route::Page(asset) => Ok(asset.reply(&request.headers)),
        Route::Live => Ok(text("alive\n")),
        Route::Ready if shared.is_ready.load(Ordering::Acquire) => {
            Ok(text(match gate.stores().redis().map(Redis::counts) {
                Some(counts) if counts.rejects_connections => REJECTED,
                Some(counts) if counts.is_open => WITHOUT_STORE,
                Some(counts) if counts.is_out_of_memory => WITHOUT_MEMORY,
                Some(counts) if counts.is_rejecting => REJECTED,
                _ => "ready\n",
            }))
        }
        Route::Ready => {
            Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down"))
        }
        Route::Metrics => {
            body.leave();
            let format = Format::wanted(&request.headers);
            drop((request, head));
            let shared = caller.shared.clone();
            let metrics = run_in_background_in_order(move || {
                shared.gate.render_metrics(shared.budgets.bytes(), format)
            });
            let mut reply = answer::with_type(metrics.await?, format.content_type());
            reply.headers_mut().insert(header::VARY, HeaderValue::from_static("accept"));
            Ok(reply)
        }
        Route::OpenApi => {
            Ok(answer::with_type(OPENAPI, HeaderValue::from_static("application/json")))
        }
        Route::Policies => policies::reply(gate, &request).await,
        Route::HotClients => admin::hot(gate, &request).await,
        Route::Client => admin::client(gate, &request).await,
        Route::Overrides if request.method == Method::PUT => {
            drop((request, head));
            overrides::set(gate, &body.read(caller).await?).await
        }
        Route::Overrides => overrides::reply(caller, &request).await,
        Route::Reload => {
            body.leave();
            admin::reload(shared).await
        }
        Route::Backtest => backtest::reply(caller, &request, body.take()?).await,
    }?;
    if is_for_operators {
        reply.extensions_mut().insert(OperatorReply);
    }
    Ok(reply)
}

fn text(text: &'static str) -> Reply {
    answer::with_type(text, HeaderValue::from_static("text/plain; charset=utf-8"))
}
