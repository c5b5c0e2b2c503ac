//! Replaces `traces.rs` without the feature `otlp`: does nothing, at no cost.

use hyper::{Request, StatusCode};
use tallygate::Source;

use crate::options::ServeOptions;

/// A span that does nothing.
pub(crate) struct Trace;

/// An exporter that does nothing.
pub(crate) struct Traces;

#[expect(clippy::unnecessary_wraps, reason = "where traces are built in, this can fail")]
pub(crate) const fn start(_: &ServeOptions) -> anyhow::Result<Traces> {
    Ok(Traces)
}

impl Traces {
    #[expect(clippy::unused_async, reason = "where traces are built in, this waits")]
    pub(crate) async fn flush(self) {}
}

impl Trace {
    #[inline]
    pub(crate) const fn of_request<B>(_: &Request<B>, _: fn(&str) -> Option<&str>) -> Self {
        Self
    }

    #[inline]
    pub(crate) const fn of_batch() -> Self {
        Self
    }

    #[inline]
    pub(crate) fn follow<F: Future>(
        self,
        work: F,
        _: impl FnOnce(&F::Output) -> Option<StatusCode>,
    ) -> F {
        work
    }
}

#[inline]
pub(crate) const fn decided(_: &str, _: bool, _: Source) {}
