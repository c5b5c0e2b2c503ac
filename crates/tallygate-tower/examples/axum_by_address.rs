//! An axum service that limits each client by its address.
//!
//!     cargo run -p tallygate-tower --features axum --example axum_by_address

use std::error::Error;
use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tallygate::Policy;
use tallygate_tower::{Key, RateLimit};

/// Builds the service. Each client may send 5 requests at once and 100 per hour.
pub(crate) fn app() -> Result<Router, Box<dyn Error>> {
    let policy = Policy::token_bucket(100).per_hour().burst(5).named("api").build()?;
    let routes = Router::new().route("/", get(|| async { "hello\n" }));
    Ok(routes.layer(RateLimit::new(policy, Key::peer())))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    // axum provides the addresses of clients only if the service is made this way.
    let service = app()?.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await?;
    Ok(())
}
