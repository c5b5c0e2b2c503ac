//! A reqwest client that sends at most 10 requests per second to each server, and waits as long as a server asks for.
//!
//!     cargo run -p tallygate-tower --example outgoing_reqwest -- http://127.0.0.1:3000/

use std::time::Duration;

use reqwest::{Client, Method, Request, Response, StatusCode};
use tallygate::Policy;
use tallygate_tower::{Pace, Paced};
use tower::{Layer as _, ServiceExt as _};

/// Paces the requests of a client. At most 20 requests wait; others fail without being sent.
pub(crate) fn paced(
    client: Client,
) -> Result<Paced<Client, Request, Response>, tallygate::PolicyError> {
    let policy = Policy::leaky_bucket(10).per_second().burst(20).build()?;
    let pace = Pace::of_client(
        |request: &Request| request.url().host_str().unwrap_or_default().into(),
        |response: &Response| (response.status(), response.headers()),
    );
    Ok(pace.limiter(policy).max_wait(Duration::from_secs(5)).layer(client))
}

/// Sends requests, and returns the statuses of their responses.
pub(crate) async fn send(
    client: Client,
    url: &str,
    requests: usize,
) -> Result<Vec<StatusCode>, Box<dyn std::error::Error>> {
    let client = paced(client)?;
    let mut statuses = Vec::new();
    for _ in 0..requests {
        let request = Request::new(Method::GET, url.parse()?);
        statuses.push(client.clone().oneshot(request).await?.status());
    }
    Ok(statuses)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).ok_or("give a URL")?;
    for status in send(Client::new(), &url, 20).await? {
        #[expect(clippy::print_stdout, reason = "an example shows its result")]
        {
            println!("{status}");
        }
    }
    Ok(())
}
