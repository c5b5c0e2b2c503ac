//! Where Redis is: one server, the sentinels that know it, or a cluster.
//!
//! `redis://` and `rediss://` have their usual meaning; `redis+cluster://` and `redis+sentinel://` (with `rediss+` for
//! TLS) with several hosts between commas. A password is only sent to the server, and never appears in a log or an
//! error.

use std::fmt;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};

use crate::AddressError;

/// Where Redis is.
#[derive(Clone)]
pub(crate) struct Address {
    pub(crate) shape: Shape,
    /// How to connect to the first host. Other hosts differ in name and port only.
    pub(crate) template: ConnectionInfo,
    redacted: Box<str>,
}

/// The topology of the servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    One,
    Cluster { seeds: Vec<(String, u16)> },
    Sentinel { sentinels: Vec<(String, u16)>, name: String },
}

impl Address {
    pub(crate) fn parse(text: &str) -> Result<Self, AddressError> {
        let redacted = redact(text);
        let error =
            |reason: &str| AddressError { address: redacted.clone(), reason: reason.into() };
        let (scheme, rest) = text
            .split_once("://")
            .ok_or_else(|| error("it does not begin with a scheme and `://`"))?;
        let (secure, kind) = match scheme.split_once('+') {
            Some((secure, kind)) => (secure, Some(kind)),
            None => (scheme, None),
        };
        if !matches!(secure, "redis" | "rediss" | "valkey" | "valkeys" | "unix") {
            return Err(error(&format!("unknown scheme `{scheme}`")));
        }
        let (authority, path) = rest.split_once('/').map_or((rest, None), |(a, p)| (a, Some(p)));
        let (login, hosts) = authority.rsplit_once('@').map_or(("", authority), |(l, h)| (l, h));
        let single = |host: &str, path: &str| {
            let at = if login.is_empty() { "" } else { "@" };
            let url = format!("{secure}://{login}{at}{host}{path}");
            url.into_connection_info().map_err(|failure| error(&reason(&failure)))
        };
        let default_port = if kind == Some("sentinel") { 26379 } else { 6379 };
        let all = || -> Result<Vec<(String, u16)>, AddressError> {
            let each = hosts.split(',').map(|host| {
                let info = single(host, "")?;
                let has_port =
                    host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
                match info.addr() {
                    ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                        Ok((host.clone(), if has_port { *port } else { default_port }))
                    }
                    _ => Err(error("a cluster needs hosts and ports")),
                }
            });
            each.collect()
        };
        let first = hosts.split(',').next().unwrap_or(hosts);
        let (shape, template) = match kind {
            None => (Shape::One, text.into_connection_info().map_err(|f| error(&reason(&f)))?),
            Some("cluster") => (Shape::Cluster { seeds: all()? }, single(first, "")?),
            Some("sentinel") => {
                let name = path.filter(|name| !name.is_empty());
                let name =
                    name.ok_or_else(|| error("the name of the primary is missing"))?.to_owned();
                let (name, database) = match name.split_once('/') {
                    Some((name, database)) => (name.to_owned(), format!("/{database}")),
                    None => (name, String::new()),
                };
                (Shape::Sentinel { sentinels: all()?, name }, single(first, &database)?)
            }
            Some(_) => return Err(error(&format!("unknown scheme `{scheme}`"))),
        };
        if cfg!(not(feature = "tls")) && secure == "rediss" {
            return Err(error("TLS is not built in (feature `tls`)"));
        }
        Ok(Self { shape, template, redacted })
    }

    /// Returns how to connect to another host.
    pub(crate) fn to(&self, host: &str, port: u16) -> ConnectionInfo {
        let addr = match self.template.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => ConnectionAddr::TcpTls {
                host: host.into(),
                port,
                insecure: *insecure,
                tls_params: tls_params.clone(),
            },
            _ => ConnectionAddr::Tcp(host.into(), port),
        };
        self.template.clone().set_addr(addr)
    }
}

/// Returns why the client library rejects an address.
fn reason(failure: &redis::RedisError) -> String {
    match failure.to_string().trim_end_matches(" - InvalidClientConfig") {
        "Missing hostname" => "the host is missing".to_owned(),
        "Redis URL did not parse" => "it is not a valid URL".to_owned(),
        other => other.to_owned(),
    }
}

/// Returns the address without its password.
fn redact(text: &str) -> Box<str> {
    let Some((scheme, rest)) = text.split_once("://") else {
        // Text before an @ may be a password.
        return without_parameters(text.rsplit_once('@').map_or(text, |(_, after)| after)).into();
    };
    match rest.rsplit_once('@') {
        None => without_parameters(text).into(),
        Some((login, hosts)) => {
            let user = login.split_once(':').map_or("", |(user, _)| user);
            let user = Some(user).filter(|user| !user.contains('?')).unwrap_or_default();
            format!("{scheme}://{user}:***@{}", without_parameters(hosts)).into()
        }
    }
}

/// Removes the parameters: the address of a Unix socket has its password among them.
fn without_parameters(text: &str) -> String {
    match text.split_once('?') {
        Some((before, _)) => format!("{before}?***"),
        None => text.to_owned(),
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.redacted)
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.redacted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_names_a_server_a_cluster_or_sentinels() {
        let shape = |text| Address::parse(text).unwrap().shape;
        assert_eq!(shape("redis://127.0.0.1:7000/3"), Shape::One);
        assert_eq!(shape("unix:///run/redis.sock"), Shape::One);
        let seeds = vec![("a".into(), 7000), ("b".into(), 6379)];
        assert_eq!(shape("redis+cluster://user:secret@a:7000,b"), Shape::Cluster { seeds });
        let sentinels = vec![("a".into(), 26379), ("b".into(), 5000)];
        let name = "main".into();
        assert_eq!(shape("redis+sentinel://a,b:5000/main/2"), Shape::Sentinel { sentinels, name });
    }

    #[test]
    fn the_error_for_another_scheme_names_the_scheme_and_the_known_ones() {
        for (text, reason) in [
            ("memcached://x", "unknown scheme `memcached`"),
            ("redis+ring://x", "unknown scheme `redis+ring`"),
            ("redis://", "the host is missing"),
            ("redis://a:b", "it is not a valid URL"),
            ("redis:/x", "it does not begin with a scheme and `://`"),
        ] {
            let error = Address::parse(text).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("cannot use {text}: {reason}; use redis://")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_connection_uses_every_part_of_the_address() {
        let one = Address::parse("redis://alice:p%40ss@127.0.0.1:7000/3").unwrap().template;
        assert_eq!(one.redis_settings().username(), Some("alice"));
        assert_eq!(one.redis_settings().password(), Some("p@ss"));
        assert_eq!(one.redis_settings().db(), 3);
        let cluster = Address::parse("redis+cluster://:secret@a:1,b:2").unwrap();
        let other = cluster.to("c", 3);
        assert_eq!(other.redis_settings().password(), Some("secret"));
        assert_eq!(other.addr().to_string(), "c:3");
    }

    #[test]
    fn passwords_are_not_printed() {
        for text in [
            "redis://alice:hunter2@localhost:6379/0",
            "redis+cluster://:hunter2@a:1,b:2",
            "redis+sentinel://alice:hunter2@a/main",
            "rediss://alice:hunter2@localhost",
            "unix:///run/redis.sock?user=alice&pass=hunter2",
            "unix:///run/redis.sock?pass=hunter2:@",
            "redis+cluster://alice:?hunter2@localhost",
            "redis://alice:hunter2@localhost?protocol=resp3",
        ] {
            let address = Address::parse(text).unwrap();
            assert!(!format!("{address} {address:?}").contains("hunter2"), "{address}");
        }
        for text in [
            "redis://alice:hunter2@localhost:port",
            "redis+nothing://alice:hunter2@localhost",
            "redis+sentinel://alice:hunter2@localhost",
            "redis://alice:hun@ter2@:x",
            "alice:hunter2@localhost",
            "redis+unix:///run/redis.sock?pass=hunter2",
        ] {
            let error = Address::parse(text).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
            assert!(error.to_string().contains("use redis://"), "{error}");
        }
    }
}
