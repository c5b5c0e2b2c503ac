//! One server: starting and stopping it, commands, replicas.

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

/// The timeout of a reply, much longer than a loaded machine needs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// How many ports are tried for one server.
const ATTEMPTS: usize = 8;

/// A server with its own process, port and folder. Dropping it stops the process and removes the folder.
#[derive(Debug)]
pub struct Server {
    flavor: Flavor,
    kind: Kind,
    arguments: Vec<String>,
    process: Mutex<Process>,
    port: u16,
    /// The port of the cluster bus or of TLS.
    second_port: u16,
    folder: Folder,
}

/// The role of the process.
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

/// Starting and stopping.
impl Server {
    /// Starts a server without persistence.
    #[must_use]
    pub fn start(flavor: Flavor) -> Self {
        Self::with(flavor, &[])
    }

    /// Starts a server with additional settings, such as `&["--maxmemory", "1mb"]`.
    #[must_use]
    pub fn with(flavor: Flavor, arguments: &[&str]) -> Self {
        Self::of(Kind::Plain, flavor, arguments)
    }

    /// Starts a server that also serves TLS on a second port: see [`rediss_url`](Self::rediss_url).
    ///
    /// # Panics
    ///
    /// Panics if the server is built without TLS. Debian's Redis has TLS, the Valkey of `scripts/install-test-servers`
    /// does not.
    #[must_use]
    pub fn with_tls(flavor: Flavor) -> Self {
        Self::of(Kind::Tls, flavor, &[])
    }

    pub(super) fn of(kind: Kind, flavor: Flavor, arguments: &[&str]) -> Self {
        (0..ATTEMPTS)
            .find_map(|_| Self::on_a_free_port(kind, flavor, arguments))
            .expect("one of the random ports is free")
    }

    /// Returns `None` if another process took the port before the server did.
    fn on_a_free_port(kind: Kind, flavor: Flavor, arguments: &[&str]) -> Option<Self> {
        let folder = Folder::new();
        let (port, second_port) = (free_port(), free_port());
        let mut all = kind.arguments(port, second_port, &folder);
        all.extend(arguments.iter().map(ToString::to_string));
        let process = Mutex::new(Process::spawn(flavor, &all, &folder));
        let server = Self { flavor, kind, arguments: all, process, port, second_port, folder };
        server.comes_up().then_some(server)
    }

    /// Returns false if the server stopped because its port is taken.
    fn comes_up(&self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.process().child.try_wait().expect("the process is our child")
            {
                let log = self.log();
                assert!(
                    log.contains("Address already in use"),
                    "{} {:?} ends with {status}:\n{log}",
                    self.flavor.name(),
                    self.arguments,
                );
                return false;
            }
            // The process that took the port may answer there, so check that it is our own process.
            if self.reported_pid().ok().flatten() == Some(self.pid()) {
                return true;
            }
            assert!(
                Instant::now() < deadline,
                "the server on {} does not answer; its log:\n{}",
                self.address(),
                self.log()
            );
            std::thread::sleep(PAUSE);
        }
    }

    fn reported_pid(&self) -> RedisResult<Option<u32>> {
        let info = self.try_info("server")?;
        Ok(info.get("process_id").and_then(|pid| pid.parse().ok()))
    }

    /// Kills the process, like a crash. Does nothing if it has ended.
    pub fn kill(&self) {
        self.process().kill();
    }

    /// Freezes the process: its connections stay open, and it does not answer. Returns when the process is frozen.
    ///
    /// # Panics
    ///
    /// Panics if it was killed.
    pub fn freeze(&self) {
        let mut process = self.process();
        let pid = process.signal(Signal::STOP);
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(pid), options).expect("the process is our child");
        process.frozen = true;
    }

    /// Resumes a frozen process. It then reads what it received in the meantime.
    ///
    /// # Panics
    ///
    /// Panics if it was killed.
    pub fn thaw(&self) {
        let mut process = self.process();
        process.signal(Signal::CONT);
        process.frozen = false;
    }

    /// Stops the process if it is running, and starts it again on the same port with the same settings. It starts without
    /// data. A cluster node keeps its role in the cluster.
    ///
    /// # Panics
    ///
    /// Panics if another process took the port and keeps it.
    pub fn restart(&self) {
        wait_until("its port is free again", PATIENCE, || {
            let mut process = self.process();
            process.kill();
            *process = Process::spawn(self.flavor, &self.arguments, &self.folder);
            drop(process);
            self.comes_up()
        });
    }

    /// Returns whether the process is running and not frozen.
    #[must_use]
    pub fn is_running(&self) -> bool {
        let mut process = self.process();
        !process.frozen && !process.has_ended()
    }

    /// Returns the kind of server.
    #[must_use]
    pub fn flavor(&self) -> Flavor {
        self.flavor
    }

    /// Returns the port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns `127.0.0.1:port`.
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Returns `redis://127.0.0.1:port/`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}/", self.address())
    }

    /// Returns `rediss://127.0.0.1:port/`, with the TLS port. Clients must trust
    /// [`ca_certificate`](Self::ca_certificate) and need no certificate.
    ///
    /// # Panics
    ///
    /// Panics if the server was started without TLS.
    #[must_use]
    pub fn rediss_url(&self) -> String {
        assert_eq!(self.kind, Kind::Tls, "started without TLS; use Server::with_tls");
        format!("rediss://127.0.0.1:{}/", self.second_port)
    }

    /// Returns the path of the certificate of the authority, a PEM file.
    ///
    /// # Panics
    ///
    /// Panics if the server was started without TLS.
    #[must_use]
    pub fn ca_certificate(&self) -> PathBuf {
        assert_eq!(self.kind, Kind::Tls, "started without TLS; use Server::with_tls");
        self.folder.path().join(tls::AUTHORITY)
    }

    /// Returns the process id, which changes with a [`restart`](Self::restart).
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process().child.id()
    }

    /// Returns the log of the server so far.
    #[must_use]
    pub fn log(&self) -> String {
        let log = fs::read(self.folder.path().join(LOG)).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    pub(super) fn bus_port(&self) -> u16 {
        self.second_port
    }

    fn process(&self) -> MutexGuard<'_, Process> {
        // A test that panics must still be able to stop its servers.
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Commands, each on its own connection.
impl Server {
    /// Returns a blocking connection with a timeout of two seconds per reply.
    ///
    /// # Errors
    ///
    /// Returns an error if the server does not accept the connection.
    pub fn connection(&self) -> RedisResult<Connection> {
        let info = self.url().into_connection_info()?;
        // Without a greeting, so that connecting to a frozen server does not wait for its reply.
        let quiet = info.redis_settings().clone().set_skip_set_lib_name();
        let client = Client::open(info.set_redis_settings(quiet))?;
        let connection = client.get_connection_with_timeout(ANSWER_TIMEOUT)?;
        connection.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        connection.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        Ok(connection)
    }

    /// Sends a command, such as `&["CONFIG", "GET", "maxmemory"]`. Words may also be bytes.
    ///
    /// # Errors
    ///
    /// Returns the error of the server, or an error if it cannot be reached.
    pub fn command(&self, words: &[impl AsRef<[u8]>]) -> RedisResult<Value> {
        let mut command = redis::Cmd::new();
        for word in words {
            command.arg(word.as_ref());
        }
        command.query(&mut self.connection()?)
    }

    /// Sends a command that must succeed, and returns the reply.
    ///
    /// # Panics
    ///
    /// Panics if the command fails, or if the reply is not a `T`.
    pub fn ask<T: FromRedisValue>(&self, words: &[impl AsRef<[u8]>]) -> T {
        let answer = self.command(words).and_then(|value| Ok(redis::from_redis_value(value)?));
        let words = words.iter().map(|word| word.as_ref().escape_ascii().to_string());
        let words: Vec<String> = words.collect();
        assert!(answer.is_ok(), "{words:?} to {}: {:?}", self.address(), answer.err());
        answer.expect("checked above")
    }

    /// Returns the fields of a section of `INFO`.
    ///
    /// # Panics
    ///
    /// Panics if it cannot be reached.
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

    /// Returns the keys of the first database that have no expiry.
    ///
    /// # Panics
    ///
    /// Panics if it cannot be reached.
    #[must_use]
    pub fn keys_without_ttl(&self) -> Vec<Vec<u8>> {
        let mut connection = self.connection().expect("a running server accepts connections");
        // Only cluster nodes know this command. It makes a replica answer for its keys.
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

/// Replicas.
impl Server {
    /// Starts a replica, and waits until it has the data of the primary and follows it.
    #[must_use]
    pub fn replica_of(primary: &Self) -> Self {
        let port = primary.port.to_string();
        let replica = Self::with(primary.flavor, &["--replicaof", "127.0.0.1", &port]);
        replica.wait_until_linked();
        replica
    }

    /// Promotes a replica to a primary, with the data that it has.
    pub fn promote(&self) {
        self.ask::<()>(&["REPLICAOF", "NO", "ONE"]);
    }

    /// Makes a primary a replica of another server, as a failover does with an old primary: its connections stay open, it
    /// rejects writes, and its data is replaced by that of the other server. Does not wait for the data.
    pub fn demote_to(&self, other: &Self) {
        self.ask::<()>(&["REPLICAOF", "127.0.0.1", &other.port.to_string()]);
    }

    /// Disconnects this replica from its primary. Later writes are only on the primary. The replica keeps serving its
    /// data.
    ///
    /// Freezing a replica is not enough: what the primary sends in the meantime waits in the socket of the replica, and
    /// survives the primary.
    pub fn pause_replication(&self) {
        // The primary rejects a password that it does not expect. The replica retries once per second.
        self.ask::<()>(&["CONFIG", "SET", "masterauth", "wrong"]);
        self.ask::<i64>(&["CLIENT", "KILL", "TYPE", "master"]);
    }

    /// Lets this replica reconnect to its primary, which takes a second or two.
    pub fn resume_replication(&self) {
        self.ask::<()>(&["CONFIG", "SET", "masterauth", ""]);
    }

    /// Waits until this replica follows its primary.
    pub fn wait_until_linked(&self) {
        wait_until("a replica follows its primary", PATIENCE, || self.is_linked());
    }

    /// Waits until this replica has all data that the primary has at the time of the call.
    ///
    /// # Panics
    ///
    /// Panics if that takes too long.
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
            // For the keys of a slot that is being moved to this node.
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
            .expect("the folder is writable");
        let child = Command::new(flavor.binary())
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the file handle can be cloned"))
            .stderr(log)
            .spawn()
            .expect("the binary of the server can be run");
        Self { child, frozen: false }
    }

    fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("the process is our child").is_some()
    }

    fn signal(&mut self, signal: Signal) -> Pid {
        // After the process has ended, its id may belong to another process.
        assert!(!self.has_ended(), "the server has ended; restart it first");
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("our child accepts signals");
        pid
    }

    /// Also kills a frozen process: this signal cannot be blocked.
    fn kill(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        self.frozen = false;
    }
}

impl Kind {
    /// Returns the command line, and creates the files that it needs.
    fn arguments(self, port: u16, second_port: u16, folder: &Folder) -> Vec<String> {
        let mut line = Vec::new();
        let mut set = |name: &str, value: &str| line.extend([name.to_owned(), value.to_owned()]);
        if self == Self::Sentinel {
            // A sentinel writes what it learns to its configuration file.
            let file = folder.file("sentinel.conf");
            File::create(&file).expect("the folder is writable");
            set(&file, "--sentinel");
        } else {
            set("--save", "");
            set("--appendonly", "no");
            // Otherwise a replica restarts with old data.
            set("--rdb-del-sync-files", "yes");
            // The first replica need not wait for a second one.
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
