//! Certificates for tests, created with `openssl`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::folder::Folder;

/// The certificate of the authority, which clients must trust.
pub(super) const AUTHORITY: &str = "ca.crt";
/// The certificate of the server for 127.0.0.1 and localhost, signed by the authority.
pub(super) const CERTIFICATE: &str = "server.crt";
/// The private key of the server.
pub(super) const KEY: &str = "server.key";

/// The configuration of `openssl`. The system's configuration may add extensions.
const CONFIGURATION: &str = "\
[req]
prompt = no
distinguished_name = name
[name]
CN = Tallygate tests
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = IP:127.0.0.1, DNS:localhost
[client]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = clientAuth
";

const KEY_OPTIONS: &str =
    "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -config openssl.cnf";

/// An authority and the certificates that it signed, in a folder that is removed on drop.
#[derive(Debug)]
pub struct Certificates(Folder);

impl Certificates {
    /// Creates an authority, a certificate for a server and one for a client.
    #[expect(clippy::new_without_default, reason = "it runs a program and writes files")]
    pub fn new() -> Self {
        let folder = Folder::new();
        make_certificates(&folder);
        sign(&folder, "client");
        Self(folder)
    }

    /// Returns the folder of the certificates.
    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    /// Returns the path of the certificate of the authority.
    pub fn authority(&self) -> PathBuf {
        self.folder().join(AUTHORITY)
    }

    /// Returns the path of the server's certificate, for 127.0.0.1 and localhost.
    pub fn certificate(&self) -> PathBuf {
        self.folder().join(CERTIFICATE)
    }

    /// Returns the path of the server's private key.
    pub fn key(&self) -> PathBuf {
        self.folder().join(KEY)
    }

    /// Returns the paths of the client's certificate and private key.
    pub fn client(&self) -> (PathBuf, PathBuf) {
        (self.folder().join("client.crt"), self.folder().join("client.key"))
    }

    /// Replaces the server's certificate and key by new ones of the same authority.
    pub fn renew(&self) {
        sign(&self.0, "server");
    }
}

/// Creates an authority and a certificate for a server. They are two certificates because a strict client rejects the
/// certificate of an authority as that of a server.
pub(super) fn make_certificates(folder: &Folder) {
    fs::write(folder.path().join("openssl.cnf"), CONFIGURATION).expect("the folder is writable");
    openssl(
        folder,
        &format!("req -x509 {KEY_OPTIONS} -extensions authority -keyout ca.key -out {AUTHORITY}"),
    );
    sign(folder, "server");
}

/// Creates a key and a certificate for a server or a client.
fn sign(folder: &Folder, role: &str) {
    openssl(folder, &format!("req -new {KEY_OPTIONS} -keyout {role}.key -out {role}.csr"));
    openssl(
        folder,
        &format!(
            "x509 -req -in {role}.csr -CA {AUTHORITY} -CAkey ca.key -CAcreateserial \
             -extfile openssl.cnf -extensions {role} -out {role}.crt"
        ),
    );
}

fn openssl(folder: &Folder, arguments: &str) {
    let made = Command::new("openssl")
        .args(arguments.split_whitespace())
        .current_dir(folder.path())
        .output()
        .expect("openssl is installed: run scripts/install-test-servers");
    assert!(
        made.status.success(),
        "openssl {arguments}: {}",
        String::from_utf8_lossy(&made.stderr)
    );
}
