//! What is served where, by which methods, and to whom.

use std::sync::atomic::Ordering;

use hyper::body::{Body as _, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, StatusCode, Version};
use tallygate_redis::Redis;

use super::body::Received;
use super::identity::{self, Exposure};
use super::page::{self, Asset};
use super::problem::Problem;
use super::sending::ForOperators;
use super::{
    Caller, Reply, admin, answer, authorize, backtest, body, overrides, policies, questions, roles,
    simulate,
};
use crate::aside::aside_in_order;
use crate::config::Role;
use crate::gate::Verb;
use crate::holdings::HeldBytes;

/// A place that is served.
#[derive(Clone, Copy)]
enum Route<'a> {
    Home,
    Page(&'static Asset),
    Ask(Verb),
    Reserve,
    Settle,
    Authorize(&'a str),
    Simulate,
    Explain,
    Live,
    Ready,
    Metrics,
    OpenApi,
    Policies,
    Hot,
    Client,
    Overrides,
    Reload,
    Backtest,
}

const OPENAPI: &str = include_str!("openapi.json");

/// It decides without the store, too.
const WITHOUT_STORE: &str =
    "ready, but the store does not answer; policies decide by on_store_error\n";

const WITHOUT_MEMORY: &str =
    "degraded: the store is out of memory and refuses writes; policies decide by on_store_error\n";

const HELLO: &str = "\
This is Tallygate, a rate limiter.

  POST /v1/check               may this client do this now?
  POST /v1/peek                the same, without charging
  POST /v1/reserve, /v1/settle charge an estimate, then what it cost
  GET  /v1/authorize/{policy}  for proxies
  POST /v1/simulate            what each algorithm would do to some traffic
  POST /v1/explain             the arithmetic of one of those decisions
  GET  /livez, /readyz         is it there, does it want requests
  GET  /metrics                for Prometheus
  GET  /openapi.json           all of it, in detail
  GET  /                       in a browser: a page to try it with

For the operator (with an admin token, or over a Unix socket as the server's own user):

  POST /v1/refund, /v1/reset   give back, start over
  GET  /v1/policies            the policies in force
  GET  /v1/admin/hot           the busiest and the most refused clients
  GET  /v1/admin/client?key=   one client in every policy
  GET, PUT, DELETE /v1/admin/overrides
  POST /v1/admin/reload        read the configuration anew
  POST /v1/backtest?policy=    what policies would have done to the log in the body

Try: curl -d '{\"policy\":\"demo\",\"key\":\"alice\"}' http://127.0.0.1:8080/v1/check
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
            "/v1/simulate" => Self::Simulate,
            "/v1/explain" => Self::Explain,
            "/" => Self::Home,
            "/livez" => Self::Live,
            "/readyz" => Self::Ready,
            "/metrics" => Self::Metrics,
            "/openapi.json" => Self::OpenApi,
            "/v1/policies" => Self::Policies,
            "/v1/admin/hot" => Self::Hot,
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
            | Self::Hot
            | Self::Client => "GET, HEAD",
        }
    }

    /// Who is served; `None` is anybody: what is asked before one can know more, and what is the same for all.
    const fn role(self) -> Option<Role> {
        match self {
            Self::Home | Self::Page(_) | Self::Live | Self::Ready | Self::OpenApi => None,
            Self::Ask(Verb::Check | Verb::Peek)
            | Self::Reserve
            | Self::Settle
            | Self::Authorize(_)
            | Self::Simulate
            | Self::Explain
            | Self::Metrics => Some(Role::Check),
            Self::Ask(Verb::Refund | Verb::Reset)
            | Self::Policies
            | Self::Hot
            | Self::Client
            | Self::Overrides
            | Self::Reload
            | Self::Backtest => Some(Role::Admin),
        }
    }
}

impl Route<'_> {
    /// Whether an operator needs the reply during an attack.
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

/// How a path is described, whatever stands for the policy in it; `None` where nothing is served.
pub(super) fn template(path: &str) -> Option<&str> {
    match Route::of(path)? {
        Route::Authorize(_) => Some("/v1/authorize/{policy}"),
        _ => Some(path),
    }
}

/// Answers a request. `head` counts the memory of its head, and is dropped with it.
pub(super) async fn reply(
    caller: &Caller,
    request: Request<Incoming>,
    head: Option<HeldBytes>,
) -> Reply {
    let (request, body) = request.into_parts();
    let is_http2 = request.version == Version::HTTP_2;
    let mut body = RequestBody { incoming: Some(body), is_unread: false };
    let served = served(caller, request, head, &mut body).await;
    let mut reply = served.unwrap_or_else(Problem::reply);
    body.leave();
    if body.is_unread && !is_http2 {
        // The connection cannot be used for another request, and the client should know.
        reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    reply
}

/// The body of a request, which not every handler reads.
struct RequestBody {
    incoming: Option<Incoming>,
    /// Whether a part of it was left unread.
    is_unread: bool,
}

impl RequestBody {
    /// Returns the body to a handler that reads it. A body can be read once.
    fn take(&mut self) -> Result<Incoming, Problem> {
        let was_read =
            || Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the body was read before");
        self.incoming.take().ok_or_else(was_read)
    }

    /// Drops the body, so that it takes no memory while the request is answered.
    fn leave(&mut self) {
        if let Some(body) = self.incoming.take() {
            self.is_unread = !body.is_end_stream();
        }
    }

    async fn read(&mut self, caller: &Caller) -> Result<Received, Problem> {
        body::read(self.take()?, caller).await
    }
}

async fn served(
    caller: &Caller,
    request: Parts,
    head: Option<HeldBytes>,
    body: &mut RequestBody,
) -> Result<Reply, Problem> {
    let route = Route::of(request.uri.path()).ok_or_else(|| {
        Problem::new(StatusCode::NOT_FOUND, "nothing is served here; / says what is")
    })?;
    let methods = route.methods();
    if !methods.split(", ").any(|method| method == request.method) {
        let detail = format!("{} is not served here; use {methods}", request.method);
        return Err(
            Problem::new(StatusCode::METHOD_NOT_ALLOWED, detail).with(header::ALLOW, methods)
        );
    }
    let shared = &caller.shared;
    let gate = &shared.gate;
    if let Some(role) = route.role() {
        identity::check(caller, route.exposure(), &request)?;
        roles::admit(caller, role, &request)?;
    }
    let is_for_operators = route.is_for_operators();
    let mut reply = match route {
        Route::Ask(verb) => {
            let query = request.uri.query().map(str::to_owned);
            // The body may take long to come: the head is not held meanwhile.
            drop((request, head));
            let body = body.read(caller).await?;
            questions::ask(gate, verb, query.as_deref(), &body, |bytes| caller.reserve(bytes)).await
        }
        Route::Authorize(policy) => {
            body.leave();
            let question = authorize::Question::of(caller, policy, &request)?;
            drop((request, head));
            authorize::authorize(caller, question).await
        }
        Route::Reserve => {
            drop((request, head));
            questions::reserve(gate, caller.holder, &body.read(caller).await?).await
        }
        Route::Settle => {
            drop((request, head));
            questions::settle(gate, &body.read(caller).await?).await
        }
        Route::Simulate => {
            drop((request, head));
            simulate::simulate(&body.read(caller).await?).await
        }
        Route::Explain => {
            drop((request, head));
            simulate::explain(&body.read(caller).await?).await
        }
        Route::Home => Ok(page::home(&request.headers, HELLO)),
        Route::Page(asset) => Ok(asset.reply(&request.headers)),
        Route::Live => Ok(text("alive\n")),
        Route::Ready if shared.is_ready.load(Ordering::Acquire) => {
            Ok(text(match gate.stores().redis().map(Redis::counts) {
                Some(counts) if counts.is_open => WITHOUT_STORE,
                Some(counts) if counts.is_out_of_memory => WITHOUT_MEMORY,
                _ => "ready\n",
            }))
        }
        Route::Ready => Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "it is stopping")),
        Route::Metrics => {
            body.leave();
            drop((request, head));
            let open_metrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            let shared = caller.shared.clone();
            let metrics = aside_in_order(move || {
                let figures = shared.gate.figures(shared.holdings.bytes());
                shared.gate.metrics.render(&figures)
            });
            let metrics = metrics.await?;
            Ok(answer::with_type(metrics, HeaderValue::from_static(open_metrics)))
        }
        Route::OpenApi => {
            Ok(answer::with_type(OPENAPI, HeaderValue::from_static("application/json")))
        }
        Route::Policies => policies::reply(gate, &request).await,
        Route::Hot => admin::hot(gate, &request).await,
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
        reply.extensions_mut().insert(ForOperators);
    }
    Ok(reply)
}

fn text(text: &'static str) -> Reply {
    answer::with_type(text, HeaderValue::from_static("text/plain; charset=utf-8"))
}
