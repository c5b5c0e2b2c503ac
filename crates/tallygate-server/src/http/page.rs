//! The page at `/`. Its files are part of the binary, and it loads nothing from other servers.
//!
//! A browser gets the page, other clients get a few lines of text. The files are in `src/page`; they request their data
//! from this server. Browsers revalidate the files every time, so that files of different versions are never mixed.

use std::hash::BuildHasher as _;

use foldhash::quality::FixedState;
use hyper::StatusCode;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::http::uri::Authority;

use super::{Reply, answer};

/// A file of the page.
pub(super) struct Asset {
    name: &'static str,
    content_type: &'static str,
    body: &'static [u8],
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";
const TEXT: &str = "text/plain; charset=utf-8";

macro_rules! asset {
    ($name:literal, $content_type:expr) => {
        Asset {
            name: $name,
            content_type: $content_type,
            body: include_bytes!(concat!("../page/", $name)),
        }
    };
}

static INDEX: Asset = asset!("index.html", HTML);

static ASSETS: [Asset; 22] = [
    asset!("style.css", CSS),
    asset!("icon.svg", SVG),
    asset!("main.js", JS),
    asset!("api.js", JS),
    asset!("backtest.js", JS),
    asset!("clients.js", JS),
    asset!("compare.js", JS),
    asset!("controls.js", JS),
    asset!("dom.js", JS),
    asset!("explain.js", JS),
    asset!("lanes.js", JS),
    asset!("live.js", JS),
    asset!("metrics.js", JS),
    asset!("playback.js", JS),
    asset!("plots.js", JS),
    asset!("scenario.js", JS),
    asset!("theme.js", JS),
    asset!("token.js", JS),
    asset!("units.js", JS),
    asset!("uplot.css", CSS),
    asset!("uplot.js", JS),
    asset!("uplot.LICENSE", TEXT),
];

/// The page may only load its own files and call this server. Injected markup cannot run scripts.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
     img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; \
     form-action 'none'";

/// Returns a file by its name below `/page/`.
pub(super) fn asset(name: &str) -> Option<&'static Asset> {
    ASSETS.iter().find(|asset| asset.name == name)
}

/// Serves `/`. In the text, `{address}` is replaced by the address that the client used.
pub(super) fn home(request: &Parts, text: &str, is_encrypted: bool) -> Reply {
    let fields = &request.headers;
    let accepted = fields.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let mut kinds = accepted.flat_map(|list| list.split(',')).map(|kind| kind.split(';').next());
    let is_browser = kinds.any(|kind| kind.is_some_and(|kind| kind.trim() == "text/html"));
    let mut reply = if is_browser {
        INDEX.reply(fields)
    } else {
        let text = text.replace("{address}", &address(request, is_encrypted));
        answer::with_type(text, HeaderValue::from_static(TEXT))
    };
    reply.headers_mut().insert(header::VARY, HeaderValue::from_static("accept"));
    reply
}

/// Returns the address that the client used, or the default one if the client did not send a usable name.
fn address(request: &Parts, is_encrypted: bool) -> String {
    let host = request.headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let host = request.uri.authority().map(Authority::as_str).or(host);
    let is_name = |host: &&str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
        (1..=255).contains(&host.len()) && host.bytes().all(is_plain)
    };
    let scheme = if is_encrypted { "https" } else { "http" };
    format!("{scheme}://{}", host.filter(is_name).unwrap_or("127.0.0.1:8080"))
}

impl Asset {
    pub(super) fn reply(&self, fields: &HeaderMap) -> Reply {
        let tag = self.tag();
        let known = fields.get_all(header::IF_NONE_MATCH).iter();
        let mut known = known.filter_map(|value| value.to_str().ok()).flat_map(|l| l.split(','));
        let mut reply = if known.any(|known| known.trim() == tag) {
            let mut reply = Reply::default();
            *reply.status_mut() = StatusCode::NOT_MODIFIED;
            reply
        } else {
            answer::with_type(self.body, HeaderValue::from_static(self.content_type))
        };
        let fields = reply.headers_mut();
        if let Ok(tag) = HeaderValue::from_str(&tag) {
            fields.insert(header::ETAG, tag);
        }
        let fixed = [
            (header::CACHE_CONTROL, "no-cache"),
            (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        ];
        for (name, value) in fixed {
            fields.insert(name, HeaderValue::from_static(value));
        }
        reply
    }

    /// Equal bytes have the same tag on every server.
    fn tag(&self) -> String {
        format!("\"{:016x}\"", FixedState::default().hash_one(self.body))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_only_files_that_are_served() {
        let index = std::str::from_utf8(INDEX.body).unwrap();
        let mut named = index.match_indices("\"page/").peekable();
        assert!(named.peek().is_some());
        for (at, quote) in named {
            let name = index[at + quote.len()..].split('"').next().unwrap();
            assert!(asset(name).is_some(), "{name}");
        }
        for module in ASSETS.iter().filter(|asset| asset.name.ends_with(".js")) {
            let text = std::str::from_utf8(module.body).unwrap();
            for (at, from) in text.match_indices(" from \"./") {
                let name = text[at + from.len()..].split('"').next().unwrap();
                assert!(asset(name).is_some(), "{} imports {name}", module.name);
            }
        }
    }
}
