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
    /// charged, and its place among the requests in flight is released.
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
        /// Waits for the decision of a remote store, or for the delay of the request.
        Deciding { deciding: Boxed<Box<Verdict>>, call: Option<Box<(S, Request<ReqBody>)>> },
        /// The verdict is in a box, because callers move the future. It is `None` after it was moved to
        /// [`Settling`](Self::Settling).
        Serving { #[pin] serving: F, verdict: Option<Box<Verdict>> },
        /// Waits until a remote store has settled.
        Settling { settling: Boxed<(Box<Verdict>, http::response::Parts)>, response: Option<R> },
        Denied { response: Option<Response<Bytes>> },
    }
}

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl<S: Service<Request<ReqBody>>, ReqBody> ResponseFuture<S, ReqBody> {
    pub(crate) fn deciding(
        deciding: Boxed<Box<Verdict>>,
        service: S,
        request: Request<ReqBody>,
    ) -> Self {
        Self { state: State::Deciding { deciding, call: Some(Box::new((service, request))) } }
    }

    pub(crate) fn denied(verdict: &Verdict) -> Self {
        Self { state: State::Denied { response: verdict.response() } }
    }

    pub(crate) const fn serving(serving: S::Future, verdict: Box<Verdict>) -> Self {
        Self { state: State::Serving { serving, verdict: Some(verdict) } }
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
                    let mut verdict = ready!(deciding.as_mut().poll(context));
                    match call.take().filter(|_| verdict.is_allowed()) {
                        Some(call) => {
                            let (mut service, mut request) = *call;
                            verdict.insert_meter(request.extensions_mut());
                            Self::serving(service.call(request), verdict)
                        }
                        None => Self::denied(&verdict),
                    }
                    .state
                }
                StateProjection::Serving { serving, verdict } => {
                    let response = ready!(serving.poll(context))?;
                    let Some(decided) = verdict else { return finished() };
                    if !decided.settles_by_response() {
                        return Poll::Ready(Ok(complete(decided, response)));
                    }
                    let (head, body) = response.into_parts();
                    if decided.limit.is_immediate() {
                        ready_now(decided.settle(&head));
                        return Poll::Ready(Ok(complete(
                            decided,
                            Response::from_parts(head, body),
                        )));
                    }
                    let Some(mut verdict) = verdict.take() else { return finished() };
                    let settling = async move {
                        verdict.settle(&head).await;
                        (verdict, head)
                    };
                    let response = Some(Response::new(body));
                    State::Settling { settling: Box::pin(settling), response }
                }
                StateProjection::Settling { settling, response } => {
                    let (mut verdict, head) = ready!(settling.as_mut().poll(context));
                    let Some(response) = response.take() else { return finished() };
                    let response = Response::from_parts(head, response.into_body());
                    return Poll::Ready(Ok(complete(&mut verdict, response)));
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

/// Adds the header fields to a response, and the guard with the remaining work to its body.
#[inline]
fn complete<B>(verdict: &mut Verdict, mut response: Response<B>) -> Response<ResponseBody<B>> {
    verdict.add_headers(response.headers_mut());
    let guard = verdict.take_guard().map(Box::new);
    response.map(|body| ResponseBody::served(body, guard))
}

fn finished<T>() -> Poll<T> {
    unreachable!("it is polled after it was ready")
}
