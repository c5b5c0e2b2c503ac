//! Certificates for one server, made with `openssl`.

use std::fs;
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
CN = Tollgate tests
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = IP:127.0.0.1, DNS:localhost
";

/// Makes an authority and a server's certificate. The two differ because a strict client refuses
/// an authority as a server.
pub(super) fn make_certificates(folder: &Folder) {
    fs::write(folder.path().join("openssl.cnf"), CONFIGURATION).expect("its folder is writable");
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -config openssl.cnf";
    openssl(
        folder,
        &format!("req -x509 {key} -extensions authority -keyout ca.key -out {AUTHORITY}"),
    );
    openssl(folder, &format!("req -new {key} -keyout {KEY} -out server.csr"));
    openssl(
        folder,
        &format!(
            "x509 -req -in server.csr -CA {AUTHORITY} -CAkey ca.key -CAcreateserial \
             -extfile openssl.cnf -extensions server -out {CERTIFICATE}"
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
