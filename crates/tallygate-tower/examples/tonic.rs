//! A gRPC service with tonic. Denied calls get `RESOURCE_EXHAUSTED` with the time to wait.
//!
//!     cargo run -p tallygate-tower --features tonic --example tonic

use tallygate::{Policy, PolicyError};
use tallygate_tower::{Key, RateLimit};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

/// Each client may make 5 calls at once and 100 per hour to each method.
pub(crate) fn limit() -> Result<RateLimit, PolicyError> {
    let policy = Policy::token_bucket(100).per_hour().burst(5).named("calls").build()?;
    Ok(RateLimit::new(policy, Key::peer().and(Key::path())))
}

/// Serves the health service, which stands for your own service here.
pub(crate) async fn serve(incoming: TcpIncoming) -> Result<(), Box<dyn std::error::Error>> {
    let (_, health) = tonic_health::server::health_reporter();
    Server::builder().layer(limit()?).add_service(health).serve_with_incoming(incoming).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    serve(TcpIncoming::bind("127.0.0.1:3000".parse()?)?).await
}
