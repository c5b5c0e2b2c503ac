//! Starts a server with the default configuration, and the store that it needs, and reads its memory.

use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, SocketAddrV4, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use tallygate_testkit::servers::{Cluster, Flavor, Server as RedisServer};

use crate::Failure;

/// The policies. Every request of the good client is allowed.
const POLICY: &str = "[policies.api]\nlimit = 100\nwindow = \"1h\"\nburst = 1000000\n[policies.keys]\nlimit = 1\nwindow = \"1000h\"\nburst = 100\n[policies.brief]\nlimit = 1\nwindow = \"20s\"\n";

/// The token of the good client, for servers that need one.
pub(crate) const TOKEN: &str = "the-token-of-the-good-client";

/// The kind of store that a server uses.
#[derive(Clone, Copy)]
pub(crate) enum StoreKind {
    Memory,
    /// A Redis with this many MiB of memory.
    Redis(u32),
    /// A Redis cluster of three primaries.
    Cluster,
}

/// A store that runs until it is dropped.
pub(crate) enum Store {
    Memory,
    Redis(RedisServer),
    Cluster(Cluster),
}

impl Store {
    pub(crate) fn start(kind: StoreKind) -> Self {
        match kind {
            StoreKind::Memory => Self::Memory,
            StoreKind::Redis(mib) => {
                let most = format!("{mib}mb");
                let options = ["--maxmemory", &most, "--maxmemory-policy", "noeviction"];
                Self::Redis(RedisServer::with(Flavor::Redis, &options))
            }
            StoreKind::Cluster => Self::Cluster(Cluster::start(Flavor::Redis, 3, 0)),
        }
    }

    /// Returns its servers.
    pub(crate) fn servers(&self) -> &[RedisServer] {
        match self {
            Self::Memory => &[],
            Self::Redis(server) => std::slice::from_ref(server),
            Self::Cluster(cluster) => cluster.nodes(),
        }
    }

    /// Returns the value of the server's option `--store`.
    fn address(&self) -> String {
        match self {
            Self::Memory => "memory".to_owned(),
            Self::Redis(server) => server.url(),
            Self::Cluster(cluster) => {
                let nodes: Vec<_> = cluster.nodes().iter().map(RedisServer::address).collect();
                format!("redis+cluster://{}", nodes.join(","))
            }
        }
    }
}

/// A server that runs until it is dropped.
pub(crate) struct Server {
    child: Child,
    _output: BufReader<ChildStdout>,
    config: PathBuf,
    pub(crate) http: SocketAddrV4,
    pub(crate) resp: SocketAddrV4,
}

/// The memory and the descriptors of a server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerUsage {
    pub(crate) mib: u64,
    /// The most since its start.
    pub(crate) peak_mib: u64,
    pub(crate) descriptors: usize,
}

impl Server {
    pub(crate) fn start(binary: &Path, options: &[&str]) -> Result<Self, Failure> {
        Self::configured(binary, options, "", &Store::Memory)
    }

    /// Starts a server with additional configuration and a store.
    pub(crate) fn configured(
        binary: &Path,
        options: &[&str],
        more: &str,
        store: &Store,
    ) -> Result<Self, Failure> {
        let config =
            std::env::temp_dir().join(format!("tallygate-abuse-{}.toml", std::process::id()));
        std::fs::write(&config, format!("{more}{POLICY}"))?;
        let mut child = Command::new(binary)
            .args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--log", "error"])
            .arg("--config")
            .arg(&config)
            .args(["--store", &store.address()])
            .args(options)
            .env("ABUSE_TOKEN", TOKEN)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut output = BufReader::new(child.stdout.take().ok_or("no output")?);
        let mut address = |name: &str| -> Result<SocketAddrV4, Failure> {
            let mut line = String::new();
            output.read_line(&mut line)?;
            let address = line
                .trim_end()
                .strip_prefix(name)
                .ok_or_else(|| format!("unexpected output {line:?}"))?;
            Ok(address.parse()?)
        };
        let (http, resp) = (address("http ")?, address("resp ")?);
        Ok(Self { child, _output: output, config, http, resp })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn holds(&self) -> Result<ServerUsage, Failure> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let mib = |name| -> Result<u64, Failure> {
            let kib = status.lines().find_map(|line| line.strip_prefix(name)).ok_or("no size")?;
            Ok(kib.trim().trim_end_matches(" kB").parse::<u64>()?.div_ceil(1024))
        };
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", self.pid()))?.count();
        Ok(ServerUsage { mib: mib("VmRSS:")?, peak_mib: mib("VmHWM:")?, descriptors })
    }
}

/// Connects from a loopback address.
pub(crate) fn connect(
    from: [u8; 4],
    to: SocketAddrV4,
    wait: Duration,
) -> std::io::Result<TcpStream> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4()?;
        socket.bind(SocketAddr::from((from, 0)))?;
        let connected = tokio::time::timeout(wait, socket.connect(to.into())).await;
        connected.map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))??.into_std()
    })?;
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(wait))?;
    stream.set_write_timeout(Some(wait))?;
    Ok(stream)
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.config);
    }
}
