//! `grpc.reflection`: lists the services for tools such as grpcurl, in both versions of the protocol.

use std::convert::Infallible;
use std::sync::LazyLock;

use futures_util::future::BoxFuture;
use hyper::body::Incoming;
use hyper::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tonic_reflection::server::{Builder, Error};
use tower_service::Service;

use super::call::{self, MAX_STREAMED_BYTES};
use crate::http::{Caller, Content};

/// The compiled files of `proto/`, and the files that they import. A test compares it with the text.
const DESCRIPTORS: &[u8] = include_bytes!("../../proto/descriptors.bin");

/// A service of tonic, which has no name.
type Reflection =
    Result<Box<dyn Fn(Request<Body>) -> BoxFuture<'static, Response<Body>> + Send + Sync>, Error>;

pub(super) async fn v1(
    caller: &Caller,
    request: Request<Incoming>,
) -> Result<Response<Content>, Status> {
    static V1: LazyLock<Reflection> = LazyLock::new(|| {
        Ok(boxed(builder().build_v1()?.max_decoding_message_size(MAX_STREAMED_BYTES)))
    });
    reply(&V1, caller, request).await
}

pub(super) async fn v1alpha(
    caller: &Caller,
    request: Request<Incoming>,
) -> Result<Response<Content>, Status> {
    static V1ALPHA: LazyLock<Reflection> = LazyLock::new(|| {
        Ok(boxed(builder().build_v1alpha()?.max_decoding_message_size(MAX_STREAMED_BYTES)))
    });
    reply(&V1ALPHA, caller, request).await
}

async fn reply(
    service: &Reflection,
    caller: &Caller,
    request: Request<Incoming>,
) -> Result<Response<Content>, Status> {
    let service = service.as_ref().map_err(|error| Status::unavailable(error.to_string()))?;
    Ok(call::streamed(service(call::stream(caller, request)).await))
}

/// Both versions list the same services.
fn builder() -> Builder<'static> {
    Builder::configure()
        .include_reflection_service(false)
        .register_encoded_file_descriptor_set(DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET)
}

fn boxed<S>(
    service: S,
) -> Box<dyn Fn(Request<Body>) -> BoxFuture<'static, Response<Body>> + Send + Sync>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send,
{
    Box::new(move |request| {
        let mut service = service.clone();
        Box::pin(async move {
            let Ok(response) = service.call(request).await;
            response
        })
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// If the text was changed on purpose, run this test with `UPDATE_GOLDEN=1`.
    #[test]
    fn the_descriptors_are_those_of_the_text() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
        let mut compiler = protox::Compiler::new([&folder]).unwrap();
        compiler.include_imports(true);
        compiler.open_file("envoy/service/ratelimit/v3/rls.proto").unwrap();
        let compiled = compiler.encode_file_descriptor_set();
        let file = folder.join("descriptors.bin");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&file, &compiled).unwrap();
        }
        assert!(std::fs::read(file).unwrap() == compiled, "proto/descriptors.bin is out of date");
    }
}
