//! A service with a rate limit.

use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use crate::body::ResponseBody;
use crate::future::ResponseFuture;
use crate::limiter::ready_now;
use crate::rate_limit::RateLimit;

/// A service with a rate limit: see [`RateLimit`]. Denied requests do not reach the inner service.
#[derive(Clone, Debug)]
pub struct RateLimited<S> {
    pub(crate) service: S,
    pub(crate) limit: RateLimit,
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for RateLimited<S>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    ResBody: Body<Data: From<Bytes>>,
{
    type Response = Response<ResponseBody<ResBody>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, ReqBody>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let questions = self.limit.questions(&parts);
        let request = Request::from_parts(parts, body);
        if !self.limit.is_immediate() {
            let limit = self.limit.clone();
            let deciding = async move {
                let verdict = limit.decide(questions).await;
                verdict.delayed().await;
                verdict
            };
            return ResponseFuture::deciding(Box::pin(deciding), self.ready_service(), request);
        }
        let verdict = ready_now(self.limit.decide(questions));
        if !verdict.is_allowed() {
            return ResponseFuture::denied(&verdict);
        }
        if verdict.delay().is_zero() {
            return ResponseFuture::serving(&mut self.service, request, verdict);
        }
        let waiting = async move {
            verdict.delayed().await;
            verdict
        };
        ResponseFuture::deciding(Box::pin(waiting), self.ready_service(), request)
    }
}

impl<S: Clone> RateLimited<S> {
    /// Takes the service that is ready, and leaves a clone, which may not be.
    fn ready_service(&mut self) -> S {
        let clone = self.service.clone();
        std::mem::replace(&mut self.service, clone)
    }
}
