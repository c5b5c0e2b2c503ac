//! Attempts to administer or to charge without permission: through proxies in their stock configuration, and from pages
//! of other sites.

use std::io::Write as _;
use std::net::SocketAddrV4;
use std::time::Duration;

use tallygate_testkit::servers::StockProxy;

use crate::Failure;
use crate::attack::Attempt;
use crate::client::{FROM, RespClient, ask, read_reply, request};
use crate::server::connect;

const PATIENCE: Duration = Duration::from_secs(2);

/// Requests that only an administrator may send.
const ADMIN: [(&str, &str); 5] = [
    ("PUT /v1/admin/overrides", r#"{"policy":"keys","key":"a","access":"unlimited"}"#),
    ("GET /v1/admin/overrides", ""),
    ("GET /v1/policies", ""),
    ("POST /v1/reset", r#"{"policy":"keys","key":"a"}"#),
    ("POST /v1/admin/reload", ""),
];

/// Sends admin requests through nginx, haproxy and Caddy, which only forward, and admin commands through haproxy.
pub(super) fn through_proxies(attempt: &Attempt) -> Result<(), Failure> {
    let http = attempt.server.http.to_string();
    let proxies = [
        StockProxy::nginx(&http),
        StockProxy::haproxy("http", &http),
        StockProxy::haproxy("tcp", &http),
        StockProxy::caddy(&http),
    ];
    let to_resp = StockProxy::haproxy("tcp", &attempt.server.resp.to_string());
    let mut client = RespClient::connect(attempt.from, to_resp.address().parse()?)?;
    let (mut denied, mut allowed, mut checks) = (0, 0, 0);
    while attempt.goes_on() {
        for proxy in &proxies {
            let to: SocketAddrV4 = proxy.address().parse()?;
            for (line, body) in ADMIN {
                for host in ["localhost", "127.0.0.1", "example.com"] {
                    match send(to, line, &format!("host: {host}\r\n"), body)? {
                        200..=299 => allowed += 1,
                        _ => denied += 1,
                    }
                }
            }
            let check = r#"{"policy":"keys","key":"a"}"#;
            checks += usize::from(ask(FROM, to, "POST /v1/check", check)?.status == 200);
        }
        let replies = client.ask("TG.RESET keys a\r\nTG.REFUND keys a 1\r\n")?;
        let rejected = replies.matches("-NOPERM").count();
        denied += rejected;
        allowed += 2 - rejected;
        attempt.rest(Duration::from_millis(10));
    }
    attempt.finds(
        denied > 0 && allowed == 0,
        format!("{allowed} of {} admin requests allowed", denied + allowed),
    );
    attempt.finds(checks > 0, format!("{checks} checks answered"));
    Ok(())
}

/// The header fields of requests that a browser sends for another site, or that name their host ambiguously.
const FOREIGN: [&str; 8] = [
    "host: localhost\r\norigin: https://evil.example\r\ncontent-type: text/plain\r\n",
    "host: localhost\r\norigin: null\r\n",
    "host: localhost\r\norigin: http://localhost:3000\r\n",
    "host: localhost\r\nsec-fetch-site: cross-site\r\n",
    "host: localhost\r\nsec-fetch-site: same-site\r\n",
    "host: localhost\r\nhost: evil.example\r\n",
    "host: evil.example\r\n",
    "host: evil.example\r\norigin: http://evil.example\r\n",
];

/// Sends requests as pages of other sites do, to a server that anyone on loopback may administer.
pub(super) fn from_other_sites(attempt: &Attempt) -> Result<(), Failure> {
    let check = r#"{"policy":"keys","key":"visitor"}"#;
    let others = [("POST /v1/check", check), ("POST /v1/reserve", check), ("GET /metrics", "")];
    let (mut denied, mut allowed) = (0, 0);
    while attempt.goes_on() {
        for fields in FOREIGN {
            for (line, body) in ADMIN.into_iter().chain(others) {
                match send(attempt.server.http, line, fields, body)? {
                    200..=299 => allowed += 1,
                    _ => denied += 1,
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    attempt.finds(
        denied > 0 && allowed == 0,
        format!("{allowed} of {} requests allowed", denied + allowed),
    );
    let left =
        ask(FROM, attempt.server.http, "POST /v1/peek", &check.replace('}', ",\"cost\":0}"))?;
    attempt.finds(left.body.contains("\"remaining\":100,"), "nothing was charged");
    Ok(())
}

/// Sends a request and returns the status of the reply.
fn send(to: SocketAddrV4, line: &str, fields: &str, body: &str) -> Result<u16, Failure> {
    let mut stream = connect(FROM, to, PATIENCE)?;
    stream.write_all(&request(line, fields, body.as_bytes()))?;
    let reply = read_reply(&mut stream).ok_or_else(|| format!("{line}: no reply"))?;
    Ok(reply.status)
}
