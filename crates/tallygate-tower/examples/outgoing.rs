//! A client that sends at most 10 requests per second to each server, and waits as long as a server asks for.
//!
//!     cargo run -p tallygate-tower --example outgoing -- http://127.0.0.1:3000/

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tallygate::Policy;
use tallygate_tower::{Pace, Paced};
use tower::{Layer as _, ServiceExt as _};

type Outgoing = Request<Empty<Bytes>>;
type HttpClient = Client<hyper_util::client::legacy::connect::HttpConnector, Empty<Bytes>>;

/// Makes the client. At most 20 requests wait; others fail without being sent.
pub(crate) fn client()
-> Result<Paced<HttpClient, Outgoing, Response<Incoming>>, tallygate::PolicyError> {
    let policy = Policy::leaky_bucket(10).per_second().burst(20).build()?;
    let pace = Pace::new(policy).max_wait(Duration::from_secs(5));
    Ok(pace.layer(Client::builder(TokioExecutor::new()).build_http()))
}

/// Sends requests, and returns the statuses of their responses.
pub(crate) async fn send(
    url: &str,
    requests: usize,
) -> Result<Vec<StatusCode>, Box<dyn std::error::Error>> {
    let client = client()?;
    let mut statuses = Vec::new();
    for _ in 0..requests {
        let request = Request::get(url).body(Empty::new())?;
        statuses.push(client.clone().oneshot(request).await?.status());
    }
    Ok(statuses)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).ok_or("give a URL")?;
    for status in send(&url, 20).await? {
        #[expect(clippy::print_stdout, reason = "an example shows its result")]
        {
            println!("{status}");
        }
    }
    Ok(())
}
