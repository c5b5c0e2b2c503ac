//! The body of a response: that of the service, with the work to do at its end, or that of a denial.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::verdict::BodyGuard;

pin_project! {
    /// The body of a response of [`RateLimited`](crate::RateLimited).
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProjection]
    #[derive(Debug)]
    enum Kind<B> {
        Served { #[pin] body: B, guard: Option<Box<BodyGuard>> },
        Denied { bytes: Bytes },
    }
}

impl<B> ResponseBody<B> {
    pub(crate) const fn served(body: B, guard: Option<Box<BodyGuard>>) -> Self {
        Self { kind: Kind::Served { body, guard } }
    }

    pub(crate) const fn denied(bytes: Bytes) -> Self {
        Self { kind: Kind::Denied { bytes } }
    }
}

impl<B: Body<Data: From<Bytes>>> Body for ResponseBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        match self.project().kind.project() {
            KindProjection::Served { body, guard } => {
                let frame = ready!(body.poll_frame(context));
                match (&frame, &mut *guard) {
                    (Some(Ok(frame)), Some(guard)) => {
                        let bytes = frame.data_ref().map_or(0, Buf::remaining);
                        guard.sent(bytes as u64);
                    }
                    // The body has ended or failed: its guard settles and releases its place.
                    (None | Some(Err(_)), guard) => drop(guard.take()),
                    (Some(Ok(_)), None) => {}
                }
                Poll::Ready(frame)
            }
            KindProjection::Denied { bytes } if bytes.is_empty() => Poll::Ready(None),
            KindProjection::Denied { bytes } => {
                Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes).into()))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Served { body, .. } => body.is_end_stream(),
            Kind::Denied { bytes } => bytes.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Served { body, .. } => body.size_hint(),
            Kind::Denied { bytes } => SizeHint::with_exact(bytes.len() as u64),
        }
    }
}
