//! Traces of requests, sent to an OTLP collector if one is configured.
//!
//! An HTTP request is a span, and so is a batch of RESP commands. A span has the route, the policies, the numbers of
//! allowed and denied requests and the sources of the decisions, but never a key, a query or a header field. The
//! `traceparent` of a request is continued.
//!
//! Spans do not use `tracing`: the log level would then decide what is traced, and the log would process every span.
//! Without a collector, a request costs one load; without the feature `otlp`, nothing.

use std::cell::RefCell;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::Context as _;
use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{Span as _, SpanKind, Status, Tracer as _, TracerProvider as _};
use opentelemetry::{Array, Context, KeyValue, StringValue, Value};
use opentelemetry_http::{HeaderExtractor, HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, Span};
use tallygate::Source;

use crate::options::ServeOptions;

/// The span of a request or a batch, if traces are sent.
pub(crate) struct Trace(Option<Span>);

/// The exporter of spans, if a collector is configured.
pub(crate) struct Traces(Option<SdkTracerProvider>);

static TRACER: OnceLock<SdkTracer> = OnceLock::new();

tokio::task_local! {
    static TALLY: RefCell<Tally>;
}

/// The decisions within one span.
#[derive(Default)]
struct Tally {
    allowed: i64,
    denied: i64,
    policies: Names,
    sources: Names,
}

/// Distinct names from the configuration.
#[derive(Default)]
struct Names(Vec<String>);

/// Maximum number of names per span.
const MAX_NAMES: usize = 16;
/// Maximum time of an export.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long shutdown waits for the last spans to be sent.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest answer of a collector that is read, in bytes.
const MAX_ANSWER_BYTES: usize = 64 * 1024;

/// The environment variables that name a collector.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// Starts to send traces if a collector is configured. Must be called within a tokio runtime.
pub(crate) fn start(options: &ServeOptions) -> anyhow::Result<Traces> {
    let is_set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if options.otlp.is_none() && !ENDPOINTS.iter().any(is_set) {
        return Ok(Traces(None));
    }
    let mut exporter = SpanExporter::builder().with_http().with_http_client(Collector::new());
    if let Some(url) = &options.otlp {
        if !url.starts_with("http://") {
            anyhow::bail!(
                "--otlp must be http://HOST:PORT; for TLS, send to a local collector that forwards the traces"
            );
        }
        exporter = exporter.with_endpoint(format!("{}/v1/traces", url.trim_end_matches('/')));
    }
    let exporter = exporter.build().context("cannot set up the trace exporter")?;
    let mut resource = Resource::builder();
    if !is_set(&"OTEL_SERVICE_NAME") {
        resource = resource.with_service_name("tallygate");
    }
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(resource.with_attribute(version).build())
        .build();
    // A process has one server; a second one would send nothing.
    let _ = TRACER.set(provider.tracer("tallygate"));
    Ok(Traces(Some(provider)))
}

impl Traces {
    /// Sends the remaining spans.
    pub(crate) async fn flush(self) {
        let Some(provider) = self.0 else { return };
        // Shutdown waits for the thread of the SDK, which waits for a task of this runtime.
        let ended =
            tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(FLUSH_TIMEOUT));
        match ended.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "cannot send the last traces; dropping them"),
            Err(error) => tracing::warn!(%error, "cannot send the last traces; dropping them"),
        }
    }
}

impl Trace {
    /// Starts the span of a request. `template` maps its path to a route.
    pub(crate) fn of_request<B>(request: &Request<B>, template: fn(&str) -> Option<&str>) -> Self {
        let Some(tracer) = TRACER.get() else { return Self(None) };
        let parent = TraceContextPropagator::new().extract(&HeaderExtractor(request.headers()));
        // Do not use an invented method as a name.
        let method = match request.method().as_str() {
            known @ ("GET" | "HEAD" | "POST" | "PUT" | "DELETE") => known,
            _ => "_OTHER",
        };
        let mut attributes = vec![KeyValue::new("http.request.method", method.to_owned())];
        let name = match template(request.uri().path()) {
            Some(route) => {
                attributes.push(KeyValue::new("http.route", route.to_owned()));
                format!("{method} {route}")
            }
            None => method.to_owned(),
        };
        let span =
            tracer.span_builder(name).with_kind(SpanKind::Server).with_attributes(attributes);
        Self(Some(span.start_with_context(tracer, &parent)))
    }

    /// Starts the span of a batch of commands.
    pub(crate) fn of_batch() -> Self {
        let Some(tracer) = TRACER.get() else { return Self(None) };
        let protocol = KeyValue::new("network.protocol.name", "resp");
        let span = tracer
            .span_builder("resp batch")
            .with_kind(SpanKind::Server)
            .with_attributes([protocol]);
        Self(Some(span.start_with_context(tracer, &Context::new())))
    }

    /// Runs the work, and ends the span with the decisions made meanwhile.
    pub(crate) async fn follow<F: Future>(
        self,
        work: F,
        status: impl FnOnce(&F::Output) -> Option<StatusCode>,
    ) -> F::Output {
        let Self(Some(mut span)) = self else { return work.await };
        let following = async {
            let output = work.await;
            if let Some(status) = status(&output) {
                let code = i64::from(status.as_u16());
                span.set_attribute(KeyValue::new("http.response.status_code", code));
                if status.is_server_error() {
                    span.set_status(Status::error(""));
                }
            }
            TALLY.with(|tally| span.set_attributes(tally.take().attributes()));
            span.end();
            output
        };
        TALLY.scope(RefCell::default(), following).await
    }
}

/// Adds a decision to the current span.
#[inline]
pub(crate) fn decided(policy: &str, allowed: bool, source: Source) {
    if TRACER.get().is_none() {
        return;
    }
    // Outside of a span, do nothing.
    let _ = TALLY.try_with(|tally| {
        let mut tally = tally.borrow_mut();
        if allowed {
            tally.allowed += 1;
        } else {
            tally.denied += 1;
        }
        tally.policies.add(policy);
        tally.sources.add(source.name());
    });
}

impl Tally {
    fn attributes(self) -> Vec<KeyValue> {
        if self.allowed + self.denied == 0 {
            return Vec::new();
        }
        vec![
            KeyValue::new("tallygate.allowed", self.allowed),
            KeyValue::new("tallygate.denied", self.denied),
            KeyValue::new("tallygate.policies", self.policies),
            KeyValue::new("tallygate.sources", self.sources),
        ]
    }
}

impl Names {
    fn add(&mut self, name: &str) {
        if self.0.len() < MAX_NAMES && !self.0.iter().any(|known| known == name) {
            self.0.push(name.to_owned());
        }
    }
}

impl From<Names> for Value {
    fn from(Names(names): Names) -> Self {
        Self::Array(Array::String(names.into_iter().map(StringValue::from).collect()))
    }
}

/// The HTTP client of the exporter. A thread of the SDK sends the spans; the connections belong to the runtime.
#[derive(Debug)]
struct Collector {
    runtime: tokio::runtime::Handle,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Collector {
    fn new() -> Self {
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { runtime: tokio::runtime::Handle::current(), client }
    }
}

#[async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let client = self.client.clone();
        let exchange = async move {
            let (head, body) = client.request(request.map(Full::new)).await?.into_parts();
            let body = Limited::new(body, MAX_ANSWER_BYTES).collect().await?.to_bytes();
            Ok::<_, HttpError>(Response::from_parts(head, body))
        };
        let exchange = async { tokio::time::timeout(EXPORT_TIMEOUT, exchange).await };
        let answer = match self.runtime.spawn(exchange).await? {
            Ok(answer) => answer,
            Err(late) => Err(late.into()),
        };
        match &answer {
            Ok(answer) if answer.status().is_success() => {}
            Ok(answer) => {
                tracing::warn!(status = %answer.status(), "the collector rejected traces; dropping them");
            }
            Err(error) => tracing::warn!(%error, "cannot send traces; dropping them"),
        }
        answer
    }
}
