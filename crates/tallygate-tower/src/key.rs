//! Keys: what identifies the client of a request.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use http::header::{COOKIE, HeaderName};
use http::request::Parts;
use tallygate::address::{KeyText, MAX_KEY_TEXT};
use tallygate::joined_key;

use crate::address::ClientAddress;

/// Derives the key of a request.
///
/// | the client is | key |
/// |---|---|
/// | an address | [`Key::peer`], [`Key::client`] behind proxies |
/// | a user that the application has authenticated | [`Key::extension`] |
/// | an API key, a session | [`Key::header`], [`Key::cookie`] |
/// | anything else | [`Key::from_fn`] |
/// | everyone, with one common quota | [`Key::everyone`] |
///
/// Keys can be combined: [`and`](Self::and) separates clients by both, [`or`](Self::or) uses the second if the request
/// does not have the first. Different values never make the same key.
///
/// A client that chooses its own key has as many quotas as it can invent keys. So check an API key before the layer (or
/// use [`Key::extension`]), or limit the address as well.
///
/// ```
/// use tallygate_tower::Key;
///
/// // Users have their own quota per method; requests without a user are limited by their address.
/// #[derive(Clone)]
/// struct UserId(u64);
///
/// let user = Key::extension(|user: &UserId| user.0.to_string());
/// let key = user.and(Key::method()).or(Key::peer());
/// ```
#[derive(Clone)]
pub struct Key(Source);

#[derive(Clone)]
enum Source {
    Everyone,
    Client(ClientAddress),
    Header(HeaderName),
    Cookie(Box<str>),
    #[cfg(feature = "axum")]
    Route,
    Path,
    Method,
    Custom {
        name: &'static str,
        extract: Extract,
    },
    All(Vec<Key>),
    First(Vec<Key>),
}

type Extract = Arc<dyn Fn(&Parts) -> Option<Vec<u8>> + Send + Sync>;

impl Key {
    /// Gives all requests the same key.
    #[must_use]
    pub const fn everyone() -> Self {
        Self(Source::Everyone)
    }

    /// Uses the address of the connection, which is that of the last proxy if there are any. See [`ClientAddress::peer`].
    ///
    /// The server must provide the address: with axum, serve with
    /// `into_make_service_with_connect_info::<SocketAddr>()`; with hyper, insert a [`Peer`](crate::Peer).
    #[must_use]
    pub fn peer() -> Self {
        Self::client(ClientAddress::peer())
    }

    /// Uses the address of the client, also behind trusted proxies.
    #[must_use]
    pub const fn client(address: ClientAddress) -> Self {
        Self(Source::Client(address))
    }

    /// Uses the value of a header field, such as an API key, without the spaces around it. A field that is empty or occurs
    /// twice counts as missing.
    #[must_use]
    pub const fn header(name: HeaderName) -> Self {
        Self(Source::Header(name))
    }

    /// Uses the value of a cookie, without spaces or quotes around it. A cookie that is empty or occurs twice counts as
    /// missing.
    #[must_use]
    pub fn cookie(name: impl Into<Box<str>>) -> Self {
        Self(Source::Cookie(name.into()))
    }

    /// Uses the pattern of the route in axum, such as `/users/{id}`. All requests that match no route have the same key.
    ///
    /// Add the layer after the routes of the router.
    #[cfg(feature = "axum")]
    #[must_use]
    pub const fn route() -> Self {
        Self(Source::Route)
    }

    /// Uses the path of the request, such as `/users/7`, or `/package.Service/Method` in gRPC.
    ///
    /// Clients can invent paths, and each path has its own quota. Therefore restrict the rule to known paths
    /// ([`Rule::when`](crate::Rule::when)).
    #[must_use]
    pub const fn path() -> Self {
        Self(Source::Path)
    }

    /// Uses the method of the request.
    #[must_use]
    pub const fn method() -> Self {
        Self(Source::Method)
    }

    /// Uses a value that the application has added to the extensions of the request, such as the authenticated user. The
    /// layer that adds the value must run before this one.
    #[must_use]
    pub fn extension<T, K>(key: impl Fn(&T) -> K + Send + Sync + 'static) -> Self
    where
        T: Send + Sync + 'static,
        K: Into<Vec<u8>>,
    {
        let extract =
            move |parts: &Parts| parts.extensions.get::<T>().map(|value| key(value).into());
        Self(Source::Custom { name: std::any::type_name::<T>(), extract: Arc::new(extract) })
    }

    /// Computes the key with a function. `None` counts as missing.
    #[must_use]
    pub fn from_fn<K: Into<Vec<u8>>>(
        key: impl Fn(&Parts) -> Option<K> + Send + Sync + 'static,
    ) -> Self {
        let extract = move |parts: &Parts| key(parts).map(Into::into);
        Self(Source::Custom { name: "the function of the key", extract: Arc::new(extract) })
    }

    /// Combines two keys: requests share a quota only if both keys are equal. The combined key is missing if one of them is.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(Source::All(match self.0 {
            Source::All(mut keys) => {
                keys.push(other);
                keys
            }
            source => vec![Self(source), other],
        }))
    }

    /// Uses another key if the request does not have this one. Keys of the two kinds are never equal.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self(Source::First(match self.0 {
            Source::First(mut keys) => {
                keys.push(other);
                keys
            }
            source => vec![Self(source), other],
        }))
    }

    /// Returns the key of a request.
    ///
    /// # Errors
    /// Returns an error if the request does not have it.
    pub fn of(&self, parts: &Parts) -> Result<Vec<u8>, MissingKey> {
        Ok(match self.bytes(parts)? {
            KeyBytes::Long(bytes) => bytes,
            short => short.to_vec(),
        })
    }

    /// Returns the key of a request, on the heap only if it is long.
    pub(crate) fn bytes(&self, parts: &Parts) -> Result<KeyBytes, MissingKey> {
        match &self.0 {
            Source::Everyone => Ok(KeyBytes::EMPTY),
            Source::Client(address) => {
                let (address, prefix) = address.network(parts).ok_or(MissingKey::Address)?;
                Ok(KeyBytes::Address(KeyText::of(address, prefix)))
            }
            Source::Header(name) => header(parts, name).map(KeyBytes::from),
            Source::Cookie(name) => cookie(parts, name).map(KeyBytes::from),
            #[cfg(feature = "axum")]
            Source::Route => Ok(route(parts).as_bytes().into()),
            Source::Path => Ok(parts.uri.path().as_bytes().into()),
            Source::Method => Ok(parts.method.as_str().as_bytes().into()),
            Source::Custom { name, extract } => {
                let key = extract(parts).ok_or(MissingKey::Custom { source: name })?;
                Ok(KeyBytes::Long(key))
            }
            Source::All(keys) => {
                let parts: Result<Vec<_>, _> = keys.iter().map(|key| key.bytes(parts)).collect();
                Ok(KeyBytes::Long(joined_key(parts?)))
            }
            Source::First(keys) => {
                let mut missing = None;
                for (index, key) in keys.iter().enumerate() {
                    match key.bytes(parts) {
                        // Without the index, an API key could be equal to an address.
                        Ok(key) => {
                            let index = index.to_string();
                            return Ok(KeyBytes::Long(joined_key([index.as_bytes(), &key])));
                        }
                        Err(error) => missing = missing.or(Some(error)),
                    }
                }
                Err(missing.unwrap_or(MissingKey::Address))
            }
        }
    }
}

/// The bytes of a key. Short ones, such as all addresses, are not on the heap.
#[derive(Debug)]
pub(crate) enum KeyBytes {
    Address(KeyText),
    Short { bytes: [u8; MAX_KEY_TEXT], length: u8 },
    Long(Vec<u8>),
}

impl KeyBytes {
    pub(crate) const EMPTY: Self = Self::Short { bytes: [0; MAX_KEY_TEXT], length: 0 };
}

impl Deref for KeyBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Address(text) => text.as_bytes(),
            Self::Short { bytes, length } => &bytes[..usize::from(*length)],
            Self::Long(bytes) => bytes,
        }
    }
}

impl AsRef<[u8]> for KeyBytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<&[u8]> for KeyBytes {
    fn from(key: &[u8]) -> Self {
        let mut bytes = [0; MAX_KEY_TEXT];
        match (bytes.get_mut(..key.len()), u8::try_from(key.len())) {
            (Some(space), Ok(length)) => {
                space.copy_from_slice(key);
                Self::Short { bytes, length }
            }
            _ => Self::Long(key.to_vec()),
        }
    }
}

fn header<'a>(parts: &'a Parts, name: &HeaderName) -> Result<&'a [u8], MissingKey> {
    // A client must not get another quota by adding spaces, which HTTP/2 does not remove.
    let mut values = parts.headers.get_all(name).iter().map(|value| value.as_bytes().trim_ascii());
    match (values.next().filter(|value| !value.is_empty()), values.next()) {
        (Some(value), None) => Ok(value),
        (None, None) => Err(MissingKey::Header { name: name.clone() }),
        // The application might use another one of the values.
        (_, Some(_)) => Err(MissingKey::RepeatedHeader { name: name.clone() }),
    }
}

fn cookie<'a>(parts: &'a Parts, name: &str) -> Result<&'a [u8], MissingKey> {
    let lines = parts.headers.get_all(COOKIE).iter();
    let pairs = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
    let mut found = None;
    for pair in pairs {
        let pair = pair.trim_ascii();
        let value = pair.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"="));
        let Some(value) = value else { continue };
        // Applications read the same cookie with and without spaces and quotes, so it has one key.
        let value = value.trim_ascii();
        let unquoted = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
        let value = unquoted.unwrap_or(value);
        if found.replace(value).is_some() {
            return Err(MissingKey::RepeatedCookie { name: name.into() });
        }
    }
    let found = found.filter(|value| !value.is_empty());
    found.ok_or_else(|| MissingKey::Cookie { name: name.into() })
}

#[cfg(feature = "axum")]
fn route(parts: &Parts) -> &str {
    let matched = parts.extensions.get::<axum::extract::MatchedPath>();
    matched.map_or("", axum::extract::MatchedPath::as_str)
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::Everyone => f.write_str("everyone"),
            Source::Client(address) => address.fmt(f),
            Source::Header(name) => write!(f, "header {name}"),
            Source::Cookie(name) => write!(f, "cookie {name}"),
            #[cfg(feature = "axum")]
            Source::Route => f.write_str("route"),
            Source::Path => f.write_str("path"),
            Source::Method => f.write_str("method"),
            Source::Custom { name, .. } => f.write_str(name),
            Source::All(keys) => f.debug_tuple("All").field(keys).finish(),
            Source::First(keys) => f.debug_tuple("First").field(keys).finish(),
        }
    }
}

/// The reason for which a request has no key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingKey {
    /// The server did not provide the address of the connection.
    Address,
    /// The header field is missing or empty.
    Header {
        /// The name of the field.
        name: HeaderName,
    },
    /// The header field occurs more than once.
    RepeatedHeader {
        /// The name of the field.
        name: HeaderName,
    },
    /// The cookie is missing or empty.
    Cookie {
        /// The name of the cookie.
        name: Box<str>,
    },
    /// The cookie occurs more than once.
    RepeatedCookie {
        /// The name of the cookie.
        name: Box<str>,
    },
    /// The function of the key returned nothing, or the extension is missing.
    Custom {
        /// The type of the extension, or `the function of the key`.
        source: &'static str,
    },
}

impl MissingKey {
    /// Returns whether the client can correct it by sending another request.
    pub(crate) const fn is_correctable(&self) -> bool {
        !matches!(self, Self::Address | Self::Custom { .. })
    }
}

impl fmt::Display for MissingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address => f.write_str(
                "the client address is unknown; serve with connection info, or insert a Peer into the request",
            ),
            Self::Header { name } => write!(f, "missing header field {name}"),
            Self::RepeatedHeader { name } => {
                write!(f, "header field {name} is given more than once; send it once")
            }
            Self::Cookie { name } => write!(f, "missing cookie {name}"),
            Self::RepeatedCookie { name } => {
                write!(f, "cookie {name} is given more than once; send it once")
            }
            Self::Custom { source } => write!(f, "the request has no key from {source}"),
        }
    }
}

impl std::error::Error for MissingKey {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Peer;
    use http::Request;

    fn parts(fields: &[(&str, &str)]) -> Parts {
        let mut request = Request::get("/users/7?x=1");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn from(address: &str) -> Parts {
        let mut parts = parts(&[]);
        parts.extensions.insert(Peer::Address(address.parse().unwrap()));
        parts
    }

    #[track_caller]
    fn key(key: &Key, parts: &Parts) -> String {
        String::from_utf8(key.of(parts).unwrap()).unwrap()
    }

    const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

    #[test]
    fn a_header_or_cookie_that_is_missing_empty_or_repeated_is_no_key() {
        let header = Key::header(API_KEY);
        assert_eq!(key(&header, &parts(&[("x-api-key", "abc")])), "abc");
        let name = API_KEY;
        let missing = Err(MissingKey::Header { name: name.clone() });
        assert_eq!(header.of(&parts(&[])), missing);
        assert_eq!(header.of(&parts(&[("x-api-key", "")])), missing);
        // HTTP/2 does not remove the spaces around a value.
        assert_eq!(key(&header, &parts(&[("x-api-key", "\t abc ")])), "abc");
        assert_eq!(header.of(&parts(&[("x-api-key", "  ")])), missing);
        let twice = parts(&[("x-api-key", "a"), ("x-api-key", "b")]);
        assert_eq!(header.of(&twice), Err(MissingKey::RepeatedHeader { name }));

        let cookie = Key::cookie("sid");
        let found = |line: &str| cookie.of(&parts(&[("cookie", line)]));
        assert_eq!(found("a=1; sid=x=y;b=2").as_deref(), Ok(&b"x=y"[..]));
        let missing = Err(MissingKey::Cookie { name: "sid".into() });
        // What applications read as one cookie has one key.
        for line in ["sid= x=y", "sid=\t x=y ;b=2", "sid=\"x=y\"", "a=1;sid= \"x=y\" "] {
            assert_eq!(found(line).as_deref(), Ok(&b"x=y"[..]), "{line:?}");
        }
        for line in ["", "sid", "xsid=1", "sid2=1", "sid=", "sid = 1", "sid= ", "sid=\"\""] {
            assert_eq!(found(line), missing, "{line:?}");
        }
        let repeated = Err(MissingKey::RepeatedCookie { name: "sid".into() });
        assert_eq!(found("sid=a; sid=b"), repeated);
        let two_lines = parts(&[("cookie", "sid=a"), ("cookie", "sid=a")]);
        assert_eq!(cookie.of(&two_lines), repeated);
    }

    /// Fault H8.
    #[test]
    fn different_combined_keys_are_never_equal() {
        let both = Key::header(API_KEY).and(Key::header(HeaderName::from_static("x-b")));
        let joined = |a, b| key(&both, &parts(&[("x-api-key", a), ("x-b", b)]));
        assert_ne!(joined("a:b", "c"), joined("a", "b:c"));
        assert_ne!(joined("1:a", "b"), joined("1", "a1:b"));
        assert!(both.of(&parts(&[("x-api-key", "a")])).is_err());

        // A client that sends an address as its API key does not get the quota of the address.
        let either = Key::header(API_KEY).or(Key::peer());
        let by_address = key(&either, &from("192.0.2.1"));
        let mut forged = from("198.51.100.7");
        forged.headers.insert(API_KEY, "192.0.2.1".parse().unwrap());
        assert_ne!(key(&either, &forged), by_address);
        forged.headers.insert(API_KEY, by_address.parse().unwrap());
        assert_ne!(key(&either, &forged), by_address);
    }

    #[test]
    fn keys_come_from_extensions_functions_methods_and_paths() {
        #[derive(Clone)]
        struct User(u32);
        let user = Key::extension(|user: &User| user.0.to_string());
        let mut with_user = parts(&[]);
        with_user.extensions.insert(User(7));
        assert_eq!(key(&user, &with_user), "7");
        assert!(matches!(user.of(&parts(&[])), Err(MissingKey::Custom { .. })));
        let query = Key::from_fn(|parts| parts.uri.query().map(str::to_owned));
        assert_eq!(key(&query, &parts(&[])), "x=1");
        assert_eq!(key(&Key::path().and(Key::method()), &parts(&[])), "8:/users/73:GET");
        assert_eq!(key(&Key::everyone(), &parts(&[])), "");
    }

    /// Faults H2 and H3.
    #[test]
    fn an_address_has_the_key_that_the_server_gives_it() {
        let peer = Key::peer();
        assert_eq!(key(&peer, &from("192.0.2.1")), "192.0.2.1");
        assert_eq!(key(&peer, &from("::ffff:192.0.2.1")), "192.0.2.1");
        assert_eq!(key(&peer, &from("2001:db8:1:2:3::4")), "2001:db8:1:2::/64");
        let wide = Key::client(ClientAddress::peer().ipv6_prefix(48));
        assert_eq!(key(&wide, &from("2001:db8:1:2:3::4")), "2001:db8:1::/48");
        assert_eq!(peer.of(&parts(&[])), Err(MissingKey::Address));
    }
    #[test]
    fn a_key_of_any_length_is_whole() {
        for length in 1..100 {
            let value = "0123456789".repeat(10)[..length].to_owned();
            assert_eq!(key(&Key::header(API_KEY), &parts(&[("x-api-key", &value)])), value);
        }
        let longest = "2001:db8:1111:2222:3333:4444:5555:6666";
        let exact = Key::client(ClientAddress::peer().ipv6_prefix(128));
        assert_eq!(key(&exact, &from(longest)), format!("{longest}/128"));
    }
}
