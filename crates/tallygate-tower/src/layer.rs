//! [`RateLimit`] as a layer: wraps a service so that denied requests do not reach it.

use tower_layer::Layer;

use crate::rate_limit::RateLimit;
use crate::service::RateLimited;

impl<S> Layer<S> for RateLimit {
    type Service = RateLimited<S>;

    fn layer(&self, service: S) -> RateLimited<S> {
        RateLimited { service, limit: self.clone() }
    }
}
