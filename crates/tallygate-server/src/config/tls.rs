//! Certificates of the listeners, and certificates required from clients.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use serde::Deserialize;

use super::regular_file::{MAX_SECRET_BYTES, read};

/// The table `[tls]`.
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
    Grpc,
}

/// The TLS settings of each listener; `None` is plain text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tls {
    pub(crate) http: Option<Arc<ServerConfig>>,
    pub(crate) resp: Option<Arc<ServerConfig>>,
    pub(crate) grpc: Option<Arc<ServerConfig>>,
    asks_for_certificates: bool,
}

/// The protocols offered to HTTP clients.
const HTTP_PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];
/// The protocol of gRPC.
const GRPC_PROTOCOL: &[u8] = b"h2";

impl Tls {
    /// Returns whether any listener uses TLS.
    pub(crate) const fn is_any(&self) -> bool {
        self.http.is_some() || self.resp.is_some() || self.grpc.is_some()
    }
}

impl Surface {
    fn all() -> Vec<Self> {
        vec![Self::Http, Self::Resp, Self::Grpc]
    }
}

impl TlsTable {
    /// Reads the files. Relative paths start at `folder`.
    pub(super) fn read(&self, folder: &Path) -> Result<Tls, String> {
        let plain = Arc::new(self.server(folder)?);
        let mut http = (*plain).clone();
        http.alpn_protocols = HTTP_PROTOCOLS.map(<[u8]>::to_vec).to_vec();
        let http = Arc::new(http);
        let mut grpc = (*plain).clone();
        grpc.alpn_protocols = vec![GRPC_PROTOCOL.to_vec()];
        let grpc = Arc::new(grpc);
        let is_wanted = |surface| self.listeners.contains(&surface);
        if self.listeners.is_empty() {
            return Err(
                "`listeners` is empty; use \"http\", \"resp\", \"grpc\", or remove it for all"
                    .to_owned(),
            );
        }
        Ok(Tls {
            http: is_wanted(Surface::Http).then_some(http),
            resp: is_wanted(Surface::Resp).then_some(plain),
            grpc: is_wanted(Surface::Grpc).then_some(grpc),
            asks_for_certificates: self.client_ca.is_some(),
        })
    }

    /// Returns the files that the table names.
    pub(super) fn files(&self) -> impl Iterator<Item = &Path> {
        [&self.certificate, &self.key].into_iter().chain(&self.client_ca).map(PathBuf::as_path)
    }

    fn server(&self, folder: &Path) -> Result<ServerConfig, String> {
        let Self { certificate, key, client_ca, .. } = self;
        let chain = certificates(folder, certificate)?;
        let private = read(&folder.join(key), MAX_SECRET_BYTES).map_err(pem::Error::Io);
        let private = private
            .and_then(|text| PrivateKeyDer::from_pem_slice(&text))
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
                    roots.add(root).map_err(|_| {
                        format!("{} contains a certificate that is not valid", path.display())
                    })?;
                }
                let clients = WebPkiClientVerifier::builder_with_provider(roots.into(), provider)
                    .build()
                    .map_err(|error| format!("{}: {error}", path.display()))?;
                server.with_client_cert_verifier(clients)
            }
        };
        server.with_single_cert(chain, private).map_err(|error| {
            let (certificate, key) = (certificate.display(), key.display());
            match error {
                rustls::Error::InconsistentKeys(_) => {
                    format!("{certificate} and {key} do not match; use the key of the certificate")
                }
                rustls::Error::InvalidCertificate(_) => {
                    format!("{certificate} contains a certificate that is not valid")
                }
                error => format!("cannot use {certificate} and {key}: {error}"),
            }
        })
    }
}

fn certificates(folder: &Path, path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let text = read(&folder.join(path), MAX_SECRET_BYTES).map_err(pem::Error::Io);
    let found = text.and_then(|text| CertificateDer::pem_slice_iter(&text).collect());
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
        pem::Error::NoItemsFound => format!("{path} contains no {what}; expected PEM"),
        _ => format!("{path} contains no valid {what}; expected PEM"),
    }
}

/// Shows which listeners use TLS.
impl fmt::Display for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = [("http", &self.http), ("resp", &self.resp), ("grpc", &self.grpc)];
        let with_tls = all.iter().filter(|(_, tls)| tls.is_some()).map(|(name, _)| *name);
        let names = with_tls.collect::<Vec<_>>().join(", ");
        if names.is_empty() {
            return f.write_str("none");
        }
        f.write_str(&names)?;
        f.write_str(if self.asks_for_certificates { ", client certificate required" } else { "" })
    }
}
