//! A reverse proxy in its stock configuration: it only forwards.

use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::flavor::workspace;
use super::folder::Folder;
use super::port::free_port;
use super::waiting::{PATIENCE, wait_until};

/// How many ports are tried for one proxy.
const ATTEMPTS: usize = 8;

/// A proxy with its own process, port and folder. Dropping it stops the process and removes the folder.
#[derive(Debug)]
pub struct StockProxy {
    child: Child,
    address: String,
    _folder: Folder,
}

impl StockProxy {
    /// Starts nginx with a bare `proxy_pass` to an address, and nothing else.
    ///
    /// # Panics
    ///
    /// Panics if nginx is not installed or does not listen in time.
    #[must_use]
    pub fn nginx(to: &str) -> Self {
        Self::start(Path::new("/usr/sbin/nginx"), &["-e", "stderr", "-c"], |port, folder| {
            let place = |name| folder.file(name);
            format!(
                "daemon off; master_process off; pid {}; error_log stderr; events {{}}
                http {{ access_log off; client_body_temp_path {}; proxy_temp_path {};
                fastcgi_temp_path {}; uwsgi_temp_path {}; scgi_temp_path {};
                server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://{to}; }} }} }}",
                place("pid"),
                place("body"),
                place("proxy"),
                place("fastcgi"),
                place("uwsgi"),
                place("scgi"),
            )
        })
    }

    /// Starts haproxy with a frontend, a backend and the timeouts that it requires. `mode` is `http` or `tcp`.
    ///
    /// # Panics
    ///
    /// Panics if haproxy is not installed or does not listen in time.
    #[must_use]
    pub fn haproxy(mode: &str, to: &str) -> Self {
        Self::start(Path::new("/usr/sbin/haproxy"), &["-db", "-f"], |port, _| {
            format!(
                "defaults\n  mode {mode}\n  timeout connect 5s\n  timeout client 50s\n  timeout server 50s\n\
                 frontend all\n  bind 127.0.0.1:{port}\n  default_backend gate\n\
                 backend gate\n  server one {to}\n"
            )
        })
    }

    /// Starts Caddy with a bare `reverse_proxy` to an address.
    ///
    /// # Panics
    ///
    /// Panics if Caddy is not installed or does not listen in time.
    #[must_use]
    pub fn caddy(to: &str) -> Self {
        let binary = workspace().join("target/test-servers/caddy");
        let options = ["run", "--adapter", "caddyfile", "--config"];
        Self::start(&binary, &options, |port, _| {
            format!(
                "{{\n admin off\n auto_https off\n persist_config off\n log {{\n level ERROR\n }}\n}}\n\
                 http://:{port} {{\n bind 127.0.0.1\n reverse_proxy {to}\n}}\n"
            )
        })
    }

    /// Starts a proxy with the configuration for a port and a folder.
    fn start(binary: &Path, options: &[&str], config: impl Fn(u16, &Folder) -> String) -> Self {
        let started = (0..ATTEMPTS).find_map(|_| {
            let (folder, port) = (Folder::new(), free_port());
            let file = folder.file("config");
            std::fs::write(&file, config(port, &folder)).expect("the file is written");
            let child = Command::new(binary)
                .args(options)
                .arg(file)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn();
            assert!(
                child.is_ok(),
                "{}: {:?}; run scripts/install-test-proxies",
                binary.display(),
                child.err()
            );
            let child = child.expect("just asserted");
            let mut proxy = Self { child, address: format!("127.0.0.1:{port}"), _folder: folder };
            proxy.comes_up().then_some(proxy)
        });
        started.expect("one of the random ports is free")
    }

    /// Returns false if the proxy ended, because another process has its port.
    fn comes_up(&mut self) -> bool {
        let mut has_ended = false;
        wait_until("the proxy listens", PATIENCE, || {
            has_ended = self.child.try_wait().expect("the process is our child").is_some();
            has_ended || TcpStream::connect(&self.address).is_ok()
        });
        !has_ended
    }

    /// Returns its address, `127.0.0.1:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for StockProxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
