//! Rejects requests that a page of another site sends through a browser.
//!
//! A web page can make its visitor's browser send requests to a server that only the visitor can reach. Three kinds of
//! such requests are rejected before anything is read, charged or changed:
//!
//! - cross-site requests: the browser sends an `Origin` of another site, or `Sec-Fetch-Site` says so;
//! - DNS rebinding: the page's own host name leads to this server, so browsers see the same site, but `Host` is a public
//!   name that the configuration does not list;
//! - requests that name two hosts, which two programs on the way can read differently.
//!
//! A proxy that calls `/v1/authorize` forwards the header fields of its client's request, including `Origin`. So on
//! this route, these fields count only if no proxy sent them.

use std::net::IpAddr;

use hyper::header::{self, HeaderMap, HeaderName};
use hyper::http::request::Parts;
use hyper::http::uri::{Authority, Scheme};
use hyper::{StatusCode, Uri, Version};

use super::Caller;
use super::problem::Problem;

/// Header fields that only a proxy adds, in addition to all that begin with `x-forwarded-` or `x-original-`.
const PROXY_FIELDS: [&str; 3] = ["forwarded", "via", "x-real-ip"];
/// Names below these domains are never public, so an attacker cannot make one resolve to this server.
const PRIVATE_SUFFIXES: [&str; 7] =
    ["localhost", "local", "internal", "lan", "localdomain", "home.arpa", "svc"];

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// What a route exposes to browsers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exposure {
    /// The route charges, changes or reads something for its caller.
    Caller,
    /// Proxies call the route, with the header fields of other requests.
    Proxy,
    /// The route shows information about the server to every client that can reach it, but not to pages of other sites.
    Server,
}

/// Rejects a request of a page of another site, and a request whose host is ambiguous.
pub(super) fn check(caller: &Caller, exposure: Exposure, request: &Parts) -> Result<(), Problem> {
    let host = host(request)?;
    let must_name_host = exposure == Exposure::Caller
        && request.version == Version::HTTP_11
        && caller.peer.address.is_some();
    if must_name_host && host.is_none() {
        return Err(Problem::bad("the request has no `Host`; send HOST or HOST:PORT"));
    }
    let settings = caller.shared.settings.load();
    let is_from_proxy = exposure == Exposure::Proxy
        && (caller.peer.address.is_none()
            || request.version == Version::HTTP_10
            || caller.shared.is_trusted_proxy(caller.peer));
    if is_from_proxy {
        return Ok(());
    }
    let is_handed_on = exposure == Exposure::Proxy && is_forwarded(&request.headers);
    if !is_handed_on && is_cross_site(&request.headers, host.as_ref(), &settings.names) {
        let detail = "a page of another site sent the request; \
                      this server only answers programs and its own page";
        return Err(Problem::new(StatusCode::FORBIDDEN, detail));
    }
    // Browsers cannot present a token that they do not have, nor reach a Unix socket.
    let can_be_rebound = !settings.tokens.checks_need_token()
        && (caller.peer.is_loopback() || exposure == Exposure::Server)
        && caller.peer.address.is_some();
    match host {
        Some(host) if can_be_rebound && !is_own_name(host.host(), &settings.names) => {
            let detail = "the request uses a public name of this server that is not configured; \
                          add the name to `[listen] names`, or configure tokens";
            Err(Problem::new(StatusCode::MISDIRECTED_REQUEST, detail))
        }
        _ => Ok(()),
    }
}

/// Returns the host that a request names; `None` if it names none, which only programs do.
fn host(request: &Parts) -> Result<Option<Authority>, Problem> {
    let ambiguous = || Problem::bad("the request has more than one `Host`; send one");
    let mut given = request.headers.get_all(header::HOST).iter();
    let (first, second) = (given.next(), given.next());
    if second.is_some() {
        return Err(ambiguous());
    }
    let first = match first.map(|host| host.to_str().map(str::parse::<Authority>)) {
        None => None,
        // `evil.com@localhost` contains another name.
        Some(Ok(Ok(host))) if !host.as_str().contains('@') && has_valid_port(&host) => Some(host),
        Some(_) => return Err(Problem::bad("`Host` is not valid; send HOST or HOST:PORT")),
    };
    match (request.uri.authority(), first) {
        (Some(target), Some(host)) if *target != host => Err(ambiguous()),
        (Some(target), _) => Ok(Some(target.clone())),
        (None, host) => Ok(host),
    }
}

fn has_valid_port(host: &Authority) -> bool {
    let port = host.as_str().strip_prefix(host.host()).unwrap_or_default();
    matches!(port, "" | ":") || host.port_u16().is_some()
}

/// Returns whether a browser sent the request for a page of another site.
fn is_cross_site(fields: &HeaderMap, host: Option<&Authority>, names: &[String]) -> bool {
    let is_other_site = |site: &header::HeaderValue| site != "same-origin" && site != "none";
    if fields.get_all(SEC_FETCH_SITE).iter().any(is_other_site) {
        return true;
    }
    let mut origins = fields.get_all(header::ORIGIN).iter();
    match (origins.next(), origins.next()) {
        (None, _) => false,
        (Some(origin), None) => {
            let origin = origin.to_str().ok().and_then(|origin| origin.parse::<Uri>().ok());
            !origin.is_some_and(|origin| is_own_origin(&origin, host, names))
        }
        (Some(_), Some(_)) => true,
    }
}

/// Returns whether an origin is this server, under the name that the request uses.
fn is_own_origin(origin: &Uri, host: Option<&Authority>, names: &[String]) -> bool {
    let (Some(scheme), Some(named)) = (origin.scheme(), origin.authority()) else { return false };
    let default = if *scheme == Scheme::HTTPS { 443 } else { 80 };
    let port = |of: &Authority| of.port_u16().unwrap_or(default);
    let is_listed = names.iter().any(|name| named.host().eq_ignore_ascii_case(name));
    is_listed
        || host.is_some_and(|host| {
            host.host().eq_ignore_ascii_case(named.host())
                && port(host) == port(named)
                && is_own_name(host.host(), names)
        })
}

/// Returns whether a host name can belong to this server: an address, a name that is not public, or a configured name.
fn is_own_name(host: &str, names: &[String]) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    let is_private = PRIVATE_SUFFIXES.iter().any(|suffix| {
        host.strip_suffix(suffix).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    });
    address(&host).is_some() || !host.contains('.') || is_private || names.contains(&host)
}

/// Returns whether a request uses a name that always means the local machine.
pub(super) fn is_called_local(request: &Parts) -> bool {
    // `check` has rejected invalid hosts, and browsers always send a host.
    let Ok(Some(host)) = host(request) else { return true };
    host.host().eq_ignore_ascii_case("localhost")
        || address(host.host()).is_some_and(|address| address.to_canonical().is_loopback())
}

fn address(host: &str) -> Option<IpAddr> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    bare.parse().ok()
}

/// Returns whether header fields show that a proxy forwarded the request.
pub(super) fn is_forwarded(fields: &HeaderMap) -> bool {
    let mut names = fields.keys().map(HeaderName::as_str);
    names.any(|name| {
        name.starts_with("x-forwarded-")
            || name.starts_with("x-original-")
            || PROXY_FIELDS.contains(&name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(all: &[(&'static str, &str)]) -> HeaderMap {
        let mut fields = HeaderMap::new();
        for (name, value) in all {
            fields.append(*name, value.parse().unwrap());
        }
        fields
    }

    /// Fault J12.
    #[test]
    fn only_the_server_itself_is_the_same_origin() {
        let names = ["gate.example".to_owned()];
        let is_foreign = |origin: &str, host: &str| {
            let host: Authority = host.parse().unwrap();
            is_cross_site(&fields(&[("origin", origin)]), Some(&host), &names)
        };
        for (origin, host) in [
            ("https://evil.example", "localhost:8080"),
            ("null", "localhost:8080"),
            ("x", "localhost:8080"),
            ("http://localhost.evil.example", "localhost"),
            ("http://localhost:3000", "localhost:8080"),
            ("http://localhost", "localhost:8080"),
            ("http://127.0.0.1:8080", "localhost:8080"),
            // A public name that resolves to this server but is not configured.
            ("http://evil.example:8080", "evil.example:8080"),
        ] {
            assert!(is_foreign(origin, host), "{origin} {host}");
        }
        for (origin, host) in [
            ("http://localhost:8080", "localhost:8080"),
            ("http://127.0.0.1:8080", "127.0.0.1:8080"),
            ("http://[::1]:8080", "[::1]:8080"),
            ("http://10.0.0.7", "10.0.0.7:80"),
            ("https://gate.example", "127.0.0.1:8080"),
            ("https://tallygate.prod.internal", "tallygate.prod.internal"),
        ] {
            assert!(!is_foreign(origin, host), "{origin} {host}");
        }
        let twice = fields(&[("origin", "http://a"), ("origin", "http://a")]);
        assert!(is_cross_site(&twice, Some(&"a".parse().unwrap()), &[]));
        assert!(!is_cross_site(&HeaderMap::new(), None, &[]), "programs send no origin");
    }

    /// Fault J11.
    #[test]
    fn a_host_has_a_number_as_its_port() {
        for (host, is_valid) in [
            ("localhost", true),
            ("localhost:", true),
            ("localhost:8080", true),
            ("[::1]:8080", true),
            ("localhost:abc", false),
            ("localhost:65536", false),
        ] {
            let request = hyper::Request::get("/").header(header::HOST, host).body(()).unwrap();
            let found = super::host(&request.into_parts().0);
            assert_eq!(found.is_ok_and(|found| found.is_some()), is_valid, "{host}");
        }
    }

    /// Fault J12.
    #[test]
    fn the_site_that_the_browser_reports_counts_without_an_origin() {
        for (site, is_denied) in
            [("cross-site", true), ("same-site", true), ("same-origin", false), ("none", false)]
        {
            let fields = fields(&[("sec-fetch-site", site)]);
            assert_eq!(is_cross_site(&fields, None, &[]), is_denied, "{site}");
        }
    }

    /// Fault J12.
    #[test]
    fn a_public_host_name_is_accepted_only_if_it_is_listed() {
        let names = ["gate.example".to_owned()];
        for own in [
            "localhost",
            "127.0.0.1",
            "[::1]",
            "192.0.2.7",
            "tallygate",
            "a.localhost",
            "tallygate.svc",
            "x.local",
            "gate.example",
            "GATE.example.",
            "t.home.arpa",
        ] {
            assert!(is_own_name(own, &names), "{own}");
        }
        for foreign in
            ["evil.example", "notlocal.evil.example", "gate.example.evil.example", "x.xlocal"]
        {
            assert!(!is_own_name(foreign, &names), "{foreign}");
        }
    }
}
