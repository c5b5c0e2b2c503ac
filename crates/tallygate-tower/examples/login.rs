//! A login that allows 5 failed attempts per address in 15 minutes. Successful logins do not count.
//!
//!     cargo run -p tallygate-tower --features axum --example login

use std::net::SocketAddr;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use tallygate::{Policy, PolicyError, Ticks};
use tallygate_tower::{Key, RateLimit, Rule, Settle};

/// Builds the service.
pub(crate) fn app() -> Result<Router, PolicyError> {
    let window = Ticks(15 * 60 * Ticks::PER_SECOND);
    let policy = Policy::sliding_window_log(5).per(window).named("login").build()?;
    // Each attempt is charged before the password is checked, so that parallel attempts count as well. A successful one
    // is returned.
    let rule = Rule::new(policy, Key::peer())
        .settle(Settle::refund_if(|response| response.status != StatusCode::UNAUTHORIZED));
    Ok(Router::new().route("/login", post(login)).layer(RateLimit::from(rule)))
}

async fn login(password: String) -> (StatusCode, &'static str) {
    if password == "correct horse" {
        (StatusCode::OK, "welcome\n")
    } else {
        (StatusCode::UNAUTHORIZED, "wrong password\n")
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    let service = app()?.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await?;
    Ok(())
}
