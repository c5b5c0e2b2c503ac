//! Certificates: what a listener shows, and whom it asks for one.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use serde::Deserialize;

/// `[tls]`, as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TlsTable {
    certificate: PathBuf,
    key: PathBuf,
    client_ca: Option<PathBuf>,
    #[serde(default = "Surface::all")]
    listeners: Vec<Surface>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Surface {
    Http,
    Resp,
}

/// What each listener shows; `None` where it speaks in the clear.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tls {
    pub(crate) http: Option<Arc<ServerConfig>>,
    pub(crate) resp: Option<Arc<ServerConfig>>,
    asks_for_certificates: bool,
}

/// What HTTP clients may choose from.
const HTTP_PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

impl Surface {
    fn all() -> Vec<Self> {
        vec![Self::Http, Self::Resp]
    }
}

impl TlsTable {
    /// What the files say now. They are looked for from a folder.
    pub(super) fn read(&self, folder: &Path) -> Result<Tls, String> {
        let plain = Arc::new(self.server(folder)?);
        let mut http = (*plain).clone();
        http.alpn_protocols = HTTP_PROTOCOLS.map(<[u8]>::to_vec).to_vec();
        let http = Arc::new(http);
        let is_wanted = |surface| self.listeners.contains(&surface);
        if self.listeners.is_empty() {
            return Err(
                "listeners is empty; name \"http\", \"resp\", or leave it out for both".to_owned()
            );
        }
        Ok(Tls {
            http: is_wanted(Surface::Http).then_some(http),
            resp: is_wanted(Surface::Resp).then_some(plain),
            asks_for_certificates: self.client_ca.is_some(),
        })
    }

    /// The files it names.
    pub(super) fn files(&self) -> impl Iterator<Item = &Path> {
        [&self.certificate, &self.key].into_iter().chain(&self.client_ca).map(PathBuf::as_path)
    }

    fn server(&self, folder: &Path) -> Result<ServerConfig, String> {
        let Self { certificate, key, client_ca, .. } = self;
        let chain = certificates(folder, certificate)?;
        let private = PrivateKeyDer::from_pem_file(folder.join(key))
            .map_err(|error| unreadable(key, "private key", &error))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let server = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        let server = match client_ca {
            None => server.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for root in certificates(folder, path)? {
                    roots.add(root).map_err(|error| format!("{}: {error}", path.display()))?;
                }
                let clients = WebPkiClientVerifier::builder_with_provider(roots.into(), provider)
                    .build()
                    .map_err(|error| format!("{}: {error}", path.display()))?;
                server.with_client_cert_verifier(clients)
            }
        };
        server.with_single_cert(chain, private).map_err(|error| {
            let (certificate, key) = (certificate.display(), key.display());
            format!("{certificate} and {key} do not go together: {error}")
        })
    }
}

fn certificates(folder: &Path, path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let found = CertificateDer::pem_file_iter(folder.join(path)).and_then(Iterator::collect);
    let found: Vec<_> = found.map_err(|error| unreadable(path, "certificate", &error))?;
    if found.is_empty() {
        return Err(unreadable(path, "certificate", &pem::Error::NoItemsFound));
    }
    Ok(found)
}

fn unreadable(path: &Path, what: &str, error: &pem::Error) -> String {
    let path = path.display();
    match error {
        pem::Error::Io(error) => format!("cannot read {path}: {error}"),
        pem::Error::NoItemsFound => format!("{path} has no {what}; expected one as PEM"),
        _ => format!("{path} has no {what} that can be read; expected one as PEM"),
    }
}

/// For people: which listeners speak TLS.
impl fmt::Display for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (&self.http, &self.resp) {
            (None, None) => return f.write_str("none"),
            (Some(_), Some(_)) => "http, resp",
            (Some(_), None) => "http",
            (None, Some(_)) => "resp",
        })?;
        f.write_str(if self.asks_for_certificates {
            ", for clients with a certificate"
        } else {
            ""
        })
    }
}
