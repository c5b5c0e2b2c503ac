//! Certificates for tests, made with `openssl`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::folder::Folder;

/// The authority's certificate: what a client must trust.
pub(super) const AUTHORITY: &str = "ca.crt";
/// The server's, signed by the authority, for 127.0.0.1 and localhost.
pub(super) const CERTIFICATE: &str = "server.crt";
/// The server's private key.
pub(super) const KEY: &str = "server.key";

/// An `openssl` configuration of our own: the system's may add extensions.
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

/// An authority and what it has signed, in a folder that goes with this value.
#[derive(Debug)]
pub struct Certificates(Folder);

impl Certificates {
    /// Makes an authority, a server's certificate and a client's.
    #[expect(clippy::new_without_default, reason = "it runs a program and writes files")]
    pub fn new() -> Self {
        let folder = Folder::new();
        make_certificates(&folder);
        sign(&folder, "client");
        Self(folder)
    }

    /// Where they are.
    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    /// What whoever trusts the authority must know.
    pub fn authority(&self) -> PathBuf {
        self.folder().join(AUTHORITY)
    }

    /// The server's, for 127.0.0.1 and localhost.
    pub fn certificate(&self) -> PathBuf {
        self.folder().join(CERTIFICATE)
    }

    /// The server's private key.
    pub fn key(&self) -> PathBuf {
        self.folder().join(KEY)
    }

    /// A client's certificate and its private key.
    pub fn client(&self) -> (PathBuf, PathBuf) {
        (self.folder().join("client.crt"), self.folder().join("client.key"))
    }

    /// Puts another certificate and key into the place of the server's, of the same authority.
    pub fn renew(&self) {
        sign(&self.0, "server");
    }
}

/// Makes an authority and a server's certificate. The two differ because a strict client refuses
/// an authority as a server.
pub(super) fn make_certificates(folder: &Folder) {
    fs::write(folder.path().join("openssl.cnf"), CONFIGURATION).expect("its folder is writable");
    openssl(
        folder,
        &format!("req -x509 {KEY_OPTIONS} -extensions authority -keyout ca.key -out {AUTHORITY}"),
    );
    sign(folder, "server");
}

/// Makes a key, and a certificate for who has it.
fn sign(folder: &Folder, whom: &str) {
    openssl(folder, &format!("req -new {KEY_OPTIONS} -keyout {whom}.key -out {whom}.csr"));
    openssl(
        folder,
        &format!(
            "x509 -req -in {whom}.csr -CA {AUTHORITY} -CAkey ca.key -CAcreateserial \
             -extfile openssl.cnf -extensions {whom} -out {whom}.crt"
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
