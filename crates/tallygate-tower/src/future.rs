//! The response of a service with a rate limit: decide, serve, settle.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use crate::body::ResponseBody;
use crate::limiter::ready_now;
use crate::verdict::Verdict;

pin_project! {
    /// The future of a response: see [`RateLimited`](crate::RateLimited).
    ///
    /// If it is dropped while the limit decides, what was charged is returned. If it is dropped later, the request stays
    /// charged, and its place among the requests in flight is given back.
    #[must_use = "futures do nothing unless they are polled"]
    pub struct ResponseFuture<S, ReqBody>
    where
        S: Service<Request<ReqBody>>,
    {
        #[pin]
        state: State<S, ReqBody, S::Future, S::Response>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<S, ReqBody, F, R> {
        /// A store elsewhere decides, or the request waits for its delay.
        Deciding { deciding: Boxed<Verdict>, call: Option<Box<(S, Request<ReqBody>)>> },
        Serving { #[pin] serving: F, verdict: Option<Verdict> },
        /// A store elsewhere settles.
        Settling { settling: Boxed<(Verdict, http::response::Parts)>, response: Option<R> },
        Denied { response: Option<Response<Bytes>> },
    }
}

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl<S: Service<Request<ReqBody>>, ReqBody> ResponseFuture<S, ReqBody> {
    pub(crate) fn deciding(
        deciding: Boxed<Verdict>,
        service: S,
        request: Request<ReqBody>,
    ) -> Self {
        Self { state: State::Deciding { deciding, call: Some(Box::new((service, request))) } }
    }

    pub(crate) fn denied(verdict: &Verdict) -> Self {
        Self { state: State::Denied { response: verdict.response() } }
    }

    pub(crate) fn serving(
        service: &mut S,
        mut request: Request<ReqBody>,
        verdict: Verdict,
    ) -> Self {
        if let Some(meter) = verdict.meter() {
            request.extensions_mut().insert(meter.clone());
        }
        Self { state: State::Serving { serving: service.call(request), verdict: Some(verdict) } }
    }
}

impl<S, ReqBody, ResBody> Future for ResponseFuture<S, ReqBody>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    ResBody: Body<Data: From<Bytes>>,
{
    type Output = Result<Response<ResponseBody<ResBody>>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProjection::Deciding { deciding, call } => {
                    let verdict = ready!(deciding.as_mut().poll(context));
                    match call.take().filter(|_| verdict.is_allowed()) {
                        Some(call) => {
                            let (mut service, request) = *call;
                            Self::serving(&mut service, request, verdict)
                        }
                        None => Self::denied(&verdict),
                    }
                    .state
                }
                StateProjection::Serving { serving, verdict } => {
                    let response = ready!(serving.poll(context))?;
                    let Some(mut verdict) = verdict.take() else { return finished() };
                    let (head, body) = response.into_parts();
                    if verdict.settles_at_once() {
                        ready_now(verdict.settle(&head));
                        return Poll::Ready(Ok(complete(verdict, head, body)));
                    }
                    let settling = async move {
                        verdict.settle(&head).await;
                        (verdict, head)
                    };
                    let response = Some(Response::new(body));
                    State::Settling { settling: Box::pin(settling), response }
                }
                StateProjection::Settling { settling, response } => {
                    let (verdict, head) = ready!(settling.as_mut().poll(context));
                    let Some(response) = response.take() else { return finished() };
                    return Poll::Ready(Ok(complete(verdict, head, response.into_body())));
                }
                StateProjection::Denied { response } => {
                    let Some(response) = response.take() else { return finished() };
                    return Poll::Ready(Ok(response.map(ResponseBody::denied)));
                }
            };
            this.state.set(next);
        }
    }
}

fn complete<B>(
    verdict: Verdict,
    mut head: http::response::Parts,
    body: B,
) -> Response<ResponseBody<B>> {
    verdict.write_headers(&mut head.headers);
    let guard = verdict.into_guard();
    let guard = (!guard.is_empty()).then(|| Box::new(guard));
    Response::from_parts(head, ResponseBody::served(body, guard))
}

fn finished<T>() -> Poll<T> {
    unreachable!("it is polled after it was ready")
}
