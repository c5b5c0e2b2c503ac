//! One server: its life, its questions, its replicas.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::{Client, Connection, FromRedisValue, IntoConnectionInfo, RedisResult, Value};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use super::flavor::Flavor;
use super::folder::Folder;
use super::port::free_port;
use super::tls;
use super::waiting::{PATIENCE, PAUSE, wait_until};

/// How long an answer may take: much longer than a loaded machine needs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// How many ports are tried for one server.
const ATTEMPTS: usize = 8;

/// A server of its own process, port and folder; all three go with the value.
#[derive(Debug)]
pub struct Server {
    flavor: Flavor,
    kind: Kind,
    arguments: Vec<String>,
    process: Mutex<Process>,
    port: u16,
    /// For the cluster's bus or for TLS.
    second_port: u16,
    folder: Folder,
}

/// What the process is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Plain,
    Tls,
    ClusterNode,
    Sentinel,
}

#[derive(Debug)]
struct Process {
    child: Child,
    frozen: bool,
}

/// Its life.
impl Server {
    /// Starts a server that keeps nothing on disk.
    #[must_use]
    pub fn start(flavor: Flavor) -> Self {
        Self::with(flavor, &[])
    }

    /// Starts a server with more settings: `&["--maxmemory", "1mb"]`.
    #[must_use]
    pub fn with(flavor: Flavor, arguments: &[&str]) -> Self {
        Self::of(Kind::Plain, flavor, arguments)
    }

    /// Starts a server that also speaks TLS, on a second port, see [`rediss_url`](Self::rediss_url).
    ///
    /// # Panics
    ///
    /// If the server is built without: Debian's Redis has it, the Valkey of
    /// `scripts/install-test-servers` has not.
    #[must_use]
    pub fn with_tls(flavor: Flavor) -> Self {
        Self::of(Kind::Tls, flavor, &[])
    }

    pub(super) fn of(kind: Kind, flavor: Flavor, arguments: &[&str]) -> Self {
        (0..ATTEMPTS)
            .find_map(|_| Self::on_a_free_port(kind, flavor, arguments))
            .expect("one of several random ports is free")
    }

    /// None if somebody else took the port before the server could.
    fn on_a_free_port(kind: Kind, flavor: Flavor, arguments: &[&str]) -> Option<Self> {
        let folder = Folder::new();
        let (port, second_port) = (free_port(), free_port());
        let mut all = kind.arguments(port, second_port, &folder);
        all.extend(arguments.iter().map(ToString::to_string));
        let process = Mutex::new(Process::spawn(flavor, &all, &folder));
        let server = Self { flavor, kind, arguments: all, process, port, second_port, folder };
        server.comes_up().then_some(server)
    }

    /// False if it stopped because its port is taken.
    fn comes_up(&self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.process().child.try_wait().expect("it is our child") {
                let log = self.log();
                assert!(
                    log.contains("Address already in use"),
                    "{} {:?} ends with {status}:\n{log}",
                    self.flavor.name(),
                    self.arguments,
                );
                return false;
            }
            // Whoever took the port may answer there, too: only our own process counts.
            if self.reported_pid().ok().flatten() == Some(self.pid()) {
                return true;
            }
            assert!(Instant::now() < deadline, "no answer on {}:\n{}", self.address(), self.log());
            std::thread::sleep(PAUSE);
        }
    }

    fn reported_pid(&self) -> RedisResult<Option<u32>> {
        let info = self.try_info("server")?;
        Ok(info.get("process_id").and_then(|pid| pid.parse().ok()))
    }

    /// Ends the process at once, as a crash would. Nothing if it has ended.
    pub fn kill(&self) {
        self.process().kill();
    }

    /// Stops the process where it is: connections stay open and nothing answers. Returns when it
    /// has stopped.
    ///
    /// # Panics
    ///
    /// If it was killed.
    pub fn freeze(&self) {
        let mut process = self.process();
        let pid = process.signal(Signal::STOP);
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(pid), options).expect("it is our child");
        process.frozen = true;
    }

    /// Lets a frozen process go on. It then reads what came meanwhile.
    ///
    /// # Panics
    ///
    /// If it was killed.
    pub fn thaw(&self) {
        let mut process = self.process();
        process.signal(Signal::CONT);
        process.frozen = false;
    }

    /// Ends the process, if it runs, and starts it again on the same port with the settings it was
    /// started with: empty, and with its place in the cluster if it is a node.
    ///
    /// # Panics
    ///
    /// If somebody else took the port and keeps it.
    pub fn restart(&self) {
        wait_until("its port is free again", PATIENCE, || {
            let mut process = self.process();
            process.kill();
            *process = Process::spawn(self.flavor, &self.arguments, &self.folder);
            drop(process);
            self.comes_up()
        });
    }

    /// Whether its process runs and is not frozen.
    #[must_use]
    pub fn is_running(&self) -> bool {
        let mut process = self.process();
        !process.frozen && !process.has_ended()
    }

    /// What it is.
    #[must_use]
    pub fn flavor(&self) -> Flavor {
        self.flavor
    }

    /// Where it listens.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `127.0.0.1:port`.
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// `redis://127.0.0.1:port/`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}/", self.address())
    }

    /// `rediss://127.0.0.1:port/`, with the port that speaks TLS. Clients must trust
    /// [`ca_certificate`](Self::ca_certificate) and need no certificate of their own.
    ///
    /// # Panics
    ///
    /// If the server was started without TLS.
    #[must_use]
    pub fn rediss_url(&self) -> String {
        assert_eq!(self.kind, Kind::Tls, "started without TLS; use Server::with_tls");
        format!("rediss://127.0.0.1:{}/", self.second_port)
    }

    /// The certificate of the authority that signed the server's, a PEM file.
    ///
    /// # Panics
    ///
    /// If the server was started without TLS.
    #[must_use]
    pub fn ca_certificate(&self) -> PathBuf {
        assert_eq!(self.kind, Kind::Tls, "started without TLS; use Server::with_tls");
        self.folder.path().join(tls::AUTHORITY)
    }

    /// Its process; another one after a [`restart`](Self::restart).
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process().child.id()
    }

    /// What it has printed so far.
    #[must_use]
    pub fn log(&self) -> String {
        let log = fs::read(self.folder.path().join(LOG)).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    pub(super) fn bus_port(&self) -> u16 {
        self.second_port
    }

    fn process(&self) -> MutexGuard<'_, Process> {
        // A test that panics must still be able to end its servers.
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Its questions, each on a connection of its own.
impl Server {
    /// A blocking connection whose answers may take two seconds.
    ///
    /// # Errors
    ///
    /// If nobody accepts it.
    pub fn connection(&self) -> RedisResult<Connection> {
        let info = self.url().into_connection_info()?;
        // Without greetings, so that connecting to a frozen server does not wait for its answer.
        let quiet = info.redis_settings().clone().set_skip_set_lib_name();
        let client = Client::open(info.set_redis_settings(quiet))?;
        let connection = client.get_connection_with_timeout(ANSWER_TIMEOUT)?;
        connection.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        connection.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        Ok(connection)
    }

    /// Sends a command: `&["CONFIG", "GET", "maxmemory"]`. Words may also be bytes.
    ///
    /// # Errors
    ///
    /// The server's, and that it cannot be reached.
    pub fn command(&self, words: &[impl AsRef<[u8]>]) -> RedisResult<Value> {
        let mut command = redis::Cmd::new();
        for word in words {
            command.arg(word.as_ref());
        }
        command.query(&mut self.connection()?)
    }

    /// Sends a command that must succeed, and reads its answer.
    ///
    /// # Panics
    ///
    /// If it fails, or answers with something else than a `T`.
    pub fn ask<T: FromRedisValue>(&self, words: &[impl AsRef<[u8]>]) -> T {
        let answer = self.command(words).and_then(|value| Ok(redis::from_redis_value(value)?));
        let words = words.iter().map(|word| word.as_ref().escape_ascii().to_string());
        let words: Vec<String> = words.collect();
        assert!(answer.is_ok(), "{words:?} to {}: {:?}", self.address(), answer.err());
        answer.expect("just asserted")
    }

    /// The fields of a section of `INFO`.
    ///
    /// # Panics
    ///
    /// If it cannot be reached.
    #[must_use]
    pub fn info(&self, section: &str) -> HashMap<String, String> {
        self.try_info(section).expect("a running server answers INFO")
    }

    fn try_info(&self, section: &str) -> RedisResult<HashMap<String, String>> {
        let text: String = redis::from_redis_value(self.command(&["INFO", section])?)?;
        Ok(text
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(field, value)| (field.to_owned(), value.to_owned()))
            .collect())
    }

    /// The keys of the first database that would stay for ever.
    ///
    /// # Panics
    ///
    /// If it cannot be reached.
    #[must_use]
    pub fn keys_without_ttl(&self) -> Vec<Vec<u8>> {
        let mut connection = self.connection().expect("a running server accepts connections");
        // Only the node of a cluster knows the command: it makes a replica answer for its keys.
        let is_node = redis::cmd("READONLY").query::<()>(&mut connection).is_ok();
        let mut found = BTreeSet::new();
        let mut cursor = 0_u64;
        loop {
            let (next, keys): (u64, Vec<Vec<u8>>) = redis::cmd("SCAN")
                .arg(cursor)
                .arg("COUNT")
                .arg(1_000)
                .query(&mut connection)
                .expect("SCAN answers with a cursor and keys");
            let ttls = ttls_ms(&mut connection, &keys, is_node);
            for (key, ttl) in keys.into_iter().zip(ttls) {
                match ttl {
                    Ok(-1) => drop(found.insert(key)),
                    Ok(_) => {}
                    Err(error) => assert!(
                        error.is_cluster_error(),
                        "PTTL of {key:?} fails for another reason than that it was moved: {error}"
                    ),
                }
            }
            cursor = next;
            if cursor == 0 {
                return found.into_iter().collect();
            }
        }
    }
}

/// Its replicas.
impl Server {
    /// Starts a replica, and waits until it has the primary's data and follows it.
    #[must_use]
    pub fn replica_of(primary: &Self) -> Self {
        let port = primary.port.to_string();
        let replica = Self::with(primary.flavor, &["--replicaof", "127.0.0.1", &port]);
        replica.wait_until_linked();
        replica
    }

    /// Makes a replica a primary, with what it has.
    pub fn promote(&self) {
        self.ask::<()>(&["REPLICAOF", "NO", "ONE"]);
    }

    /// Makes a primary a replica of another, as a failover does to one that comes back: its
    /// connections stay open, its writes are refused, its data become the other's. Does not wait
    /// for them.
    pub fn demote_to(&self, other: &Self) {
        self.ask::<()>(&["REPLICAOF", "127.0.0.1", &other.port.to_string()]);
    }

    /// Cuts this replica off from its primary, and keeps it off: what is written from now on is on
    /// the primary alone. It goes on as a replica of what it has.
    ///
    /// To freeze a replica is not enough: what the primary sent meanwhile waits in its socket, and
    /// survives the primary.
    pub fn pause_replication(&self) {
        // A password that the primary did not ask for: it turns the replica away, once a second.
        self.ask::<()>(&["CONFIG", "SET", "masterauth", "wrong"]);
        self.ask::<i64>(&["CLIENT", "KILL", "TYPE", "master"]);
    }

    /// Lets this replica go back to its primary. It does within a second or two.
    pub fn resume_replication(&self) {
        self.ask::<()>(&["CONFIG", "SET", "masterauth", ""]);
    }

    /// Waits until this replica follows its primary.
    pub fn wait_until_linked(&self) {
        wait_until("a replica follows its primary", PATIENCE, || self.is_linked());
    }

    /// Waits until this replica has all that the primary has at the time of the call.
    ///
    /// # Panics
    ///
    /// If it has not in time.
    pub fn wait_until_caught_up_with(&self, primary: &Self) {
        let written = primary.offset("master_repl_offset");
        wait_until("a replica has what its primary has", PATIENCE, || {
            self.is_linked() && self.offset("slave_repl_offset") >= written
        });
    }

    pub(super) fn is_linked(&self) -> bool {
        self.info("replication").get("master_link_status").is_some_and(|link| link == "up")
    }

    fn offset(&self, field: &str) -> Option<u64> {
        self.info("replication").get(field).and_then(|offset| offset.parse().ok())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process().kill();
    }
}

fn ttls_ms(connection: &mut Connection, keys: &[Vec<u8>], is_node: bool) -> Vec<RedisResult<i64>> {
    if keys.is_empty() {
        return Vec::new();
    }
    let mut ttls = redis::pipe();
    for key in keys {
        if is_node {
            // For the keys of a slot that is being moved here.
            ttls.cmd("ASKING").ignore();
        }
        ttls.cmd("PTTL").arg(key);
    }
    ttls.ignore_errors().query(connection).expect("PTTL answers")
}

const LOG: &str = "log";

impl Process {
    fn spawn(flavor: Flavor, arguments: &[String], folder: &Folder) -> Self {
        let log = File::options()
            .create(true)
            .append(true)
            .open(folder.path().join(LOG))
            .expect("its folder is writable");
        let child = Command::new(flavor.binary())
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file has as many handles as wanted"))
            .stderr(log)
            .spawn()
            .expect("the server's binary can be run");
        Self { child, frozen: false }
    }

    fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("it is our child").is_some()
    }

    fn signal(&mut self, signal: Signal) -> Pid {
        // The id of one that has ended may be a stranger's by now.
        assert!(!self.has_ended(), "the server has ended; restart it first");
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("our child takes signals");
        pid
    }

    /// Also ends a frozen one: that signal waits for nobody.
    fn kill(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        self.frozen = false;
    }
}

impl Kind {
    /// The command line, and what it needs in the folder.
    fn arguments(self, port: u16, second_port: u16, folder: &Folder) -> Vec<String> {
        let mut line = Vec::new();
        let mut set = |name: &str, value: &str| line.extend([name.to_owned(), value.to_owned()]);
        if self == Self::Sentinel {
            // A sentinel writes what it learns into its configuration.
            let file = folder.file("sentinel.conf");
            File::create(&file).expect("its folder is writable");
            set(&file, "--sentinel");
        } else {
            set("--save", "");
            set("--appendonly", "no");
            // Or a replica restarts with what it once was sent.
            set("--rdb-del-sync-files", "yes");
            // A first replica need not wait for a second.
            set("--repl-diskless-sync-delay", "0");
        }
        set("--bind", "127.0.0.1");
        set("--port", &port.to_string());
        set("--dir", &folder.path().display().to_string());
        match self {
            Self::Plain | Self::Sentinel => {}
            Self::Tls => {
                tls::make_certificates(folder);
                set("--tls-port", &second_port.to_string());
                set("--tls-ca-cert-file", &folder.file(tls::AUTHORITY));
                set("--tls-cert-file", &folder.file(tls::CERTIFICATE));
                set("--tls-key-file", &folder.file(tls::KEY));
                set("--tls-auth-clients", "no");
            }
            Self::ClusterNode => {
                set("--cluster-enabled", "yes");
                set("--cluster-config-file", "nodes.conf");
                set("--cluster-port", &second_port.to_string());
                set("--cluster-node-timeout", "1000");
            }
        }
        line
    }
}
