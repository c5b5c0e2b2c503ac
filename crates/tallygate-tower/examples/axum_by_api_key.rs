//! An axum service that limits customers by their API key, in tiers, and everyone else by address.
//!
//!     cargo run -p tallygate-tower --features axum --example axum_by_api_key

use std::net::SocketAddr;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::get;
use tallygate::{Policy, PolicyError, Tiers};
use tallygate_tower::{Key, Limiter, RateLimit, Rule};

/// A customer, after its API key was checked.
#[derive(Clone)]
struct Customer {
    id: u64,
    plan: &'static str,
}

/// Builds the service. Customers have the quota of their plan; requests without a valid API key share that of their
/// address.
pub(crate) fn app() -> Result<Router, PolicyError> {
    let tiers = Tiers::new(Policy::token_bucket(2).per_minute().build()?)
        .tier("free", Policy::token_bucket(3).per_minute().build()?)
        .tier("pro", Policy::token_bucket(1000).per_minute().build()?);
    // One line moves the limits to Redis: Limiter::open("redis://127.0.0.1:6379", "api", tiers)?
    let limiter = Limiter::tiered("api", tiers);
    let customer = Key::extension(|customer: &Customer| customer.id.to_string());
    let rule = Rule::new(limiter, customer.or(Key::peer()))
        .tier(|request| request.extensions.get::<Customer>().map(|customer| customer.plan));
    Ok(Router::new()
        .route("/", get(|| async { "hello\n" }))
        .layer(RateLimit::from(rule))
        // The layer that is added last runs first, so the customer is known when the limit is checked.
        .layer(from_fn(authenticate)))
}

/// Finds the customer of an API key. An unknown key is no customer, so inventing keys gains nothing.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let key = request.headers().get("x-api-key").and_then(|key| key.to_str().ok());
    let customer = match key {
        Some("key-of-alice") => Some(Customer { id: 1, plan: "pro" }),
        Some("key-of-bob") => Some(Customer { id: 2, plan: "free" }),
        _ => None,
    };
    if let Some(customer) = customer {
        request.extensions_mut().insert(customer);
    }
    next.run(request).await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    let service = app()?.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await?;
    Ok(())
}
