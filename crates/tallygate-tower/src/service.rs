//! A service with a rate limit.

use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use crate::body::ResponseBody;
use crate::future::ResponseFuture;
use crate::limiter::ready_now;
use crate::rate_limit::{RateLimit, RequestChecks};
use crate::verdict::Verdict;

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
        let (mut parts, body) = request.into_parts();
        let mut checks = RequestChecks::of(&parts);
        self.limit.add_checks(&parts, &mut checks);
        // The verdict is made in its box instead of being copied into it.
        let mut verdict = Box::write(Box::new_uninit(), Verdict::new(self.limit.clone(), &checks));
        if self.limit.is_immediate() {
            ready_now(self.limit.decide(&checks, &mut verdict));
            if !verdict.is_allowed() {
                return ResponseFuture::denied(&verdict);
            }
            if verdict.delay().is_zero() {
                verdict.insert_meter(&mut parts.extensions);
                let serving = self.service.call(Request::from_parts(parts, body));
                return ResponseFuture::serving(serving, verdict);
            }
            let delaying = async move {
                verdict.delayed().await;
                verdict
            };
            let request = Request::from_parts(parts, body);
            return ResponseFuture::deciding(Box::pin(delaying), self.ready_service(), request);
        }
        let limit = self.limit.clone();
        let deciding = async move {
            limit.decide(&checks, &mut verdict).await;
            verdict.delayed().await;
            verdict
        };
        let request = Request::from_parts(parts, body);
        ResponseFuture::deciding(Box::pin(deciding), self.ready_service(), request)
    }
}

impl<S: Clone> RateLimited<S> {
    /// Takes the service that is ready, and leaves a clone, which may not be.
    fn ready_service(&mut self) -> S {
        let clone = self.service.clone();
        std::mem::replace(&mut self.service, clone)
    }
}
