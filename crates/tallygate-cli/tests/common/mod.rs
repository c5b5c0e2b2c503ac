//! Starts a Tallygate server for a test, as its users start it.
#![allow(dead_code, reason = "each test file uses its part")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tallygate_testkit::servers::wait_until;

/// A server that runs until it is dropped.
pub(crate) struct Served {
    child: Child,
    /// Keeps the pipe of standard output open.
    _output: BufReader<ChildStdout>,
    /// The token that the server printed, if it was started without a configuration.
    one_time_token: Option<String>,
    http: String,
    resp: String,
    /// Empty without a gRPC listener.
    grpc: String,
    config: Option<PathBuf>,
    log: PathBuf,
}

/// Adds `[admin] loopback = true` to a configuration without an `[admin]` table, so that a test may use the admin verbs.
pub(crate) fn with_admin(config: &str) -> String {
    match config.contains("[admin]") {
        true => config.to_owned(),
        false => format!("{config}\n[admin]\nloopback = true\n"),
    }
}

/// The most time that a server may take to start or to stop.
const PATIENCE: Duration = Duration::from_secs(20);

impl Served {
    /// Starts the binary on free loopback ports and waits until it is ready. Without a configuration, it serves the demo
    /// policy.
    pub(crate) fn start(options: &[&str], config: Option<&str>) -> Self {
        Self::with_variables(options, config, &[])
    }

    /// Starts the server from a shell that runs `prelude` first.
    pub(crate) fn after(prelude: &str, options: &[&str], config: Option<&str>) -> Self {
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(format!("{prelude}; exec \"$0\" \"$@\""));
        shell.arg(env!("CARGO_BIN_EXE_tallygate")).env("TALLYGATE_LOG", "warn");
        Self::run(shell, options, config, None)
    }

    /// Starts the server with environment variables.
    pub(crate) fn with_variables(
        options: &[&str],
        config: Option<&str>,
        variables: &[(&str, &str)],
    ) -> Self {
        Self::with_log(options, config, variables, None)
    }

    /// Starts the server with environment variables and another standard error than a file.
    pub(crate) fn with_log(
        options: &[&str],
        config: Option<&str>,
        variables: &[(&str, &str)],
        stderr: Option<Stdio>,
    ) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
        command.env("TALLYGATE_LOG", "warn").envs(variables.iter().copied());
        Self::run(command, options, config, stderr)
    }

    fn run(
        mut command: Command,
        options: &[&str],
        config: Option<&str>,
        stderr: Option<Stdio>,
    ) -> Self {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let started = STARTED.fetch_add(1, Ordering::Relaxed);
        let file = |extension: &str| {
            let name = format!("tallygate-test-{}-{started}.{extension}", std::process::id());
            std::env::temp_dir().join(name)
        };
        let log = file("log");
        let config = config.map(|text| {
            let path = file("toml");
            std::fs::write(&path, with_admin(text)).expect("the configuration is written");
            path
        });
        command.arg("serve");
        for (flag, value) in [("--http", "127.0.0.1:0"), ("--resp", "127.0.0.1:0")] {
            if !options.contains(&flag) {
                command.args([flag, value]);
            }
        }
        command.args(options);
        if let Some(path) = &config {
            command.arg("--config").arg(path);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let file = std::fs::File::create(&log).expect("the log is written");
        command.stderr(stderr.unwrap_or(file.into()));
        let mut child = command.spawn().expect("the binary starts");
        let mut output = BufReader::new(child.stdout.take().expect("the stream is piped"));
        let (mut http, mut resp, mut grpc) = (String::new(), String::new(), String::new());
        let mut json_token = None;
        loop {
            let mut line = String::new();
            output.read_line(&mut line).expect("the server prints its addresses");
            // With `--log-format json`, everything is in one line.
            if let Ok(object) = serde_json::from_str::<serde_json::Value>(&line) {
                assert_eq!(object["status"], "ready", "unexpected line {line:?}");
                let text = |name: &str| object[name].as_str().map(str::to_owned);
                (http, resp) = (text("http").unwrap_or_default(), text("resp").unwrap_or_default());
                grpc = text("grpc").unwrap_or_default();
                json_token = text("admin_token");
                break;
            }
            match line.trim_end().split_once(' ') {
                Some(("http", address)) => http = address.to_owned(),
                Some(("resp", address)) => resp = address.to_owned(),
                Some(("grpc", address)) => grpc = address.to_owned(),
                other => {
                    assert_eq!(other, Some(("tallygate", "ready")), "unexpected line {line:?}");
                    break;
                }
            }
        }
        let is_demo = config.is_none() && !options.contains(&"--config");
        let one_time_token = is_demo.then(|| {
            if let Some(token) = json_token {
                return token;
            }
            let mut lines = output.by_ref().lines().map(|line| line.expect("the output continues"));
            let token = lines.find_map(|line| {
                line.trim().strip_prefix("admin token for this run: ").map(str::to_owned)
            });
            token.expect("the server prints a token")
        });
        Self { child, _output: output, one_time_token, http, resp, grpc, config, log }
    }

    /// Returns the HTTP address: `HOST:PORT` or `unix:/path`.
    pub(crate) fn http(&self) -> &str {
        &self.http
    }

    /// Returns the RESP address.
    pub(crate) fn resp(&self) -> &str {
        &self.resp
    }

    /// Returns the gRPC address.
    pub(crate) fn grpc(&self) -> &str {
        assert!(!self.grpc.is_empty(), "the server was started with --grpc");
        &self.grpc
    }

    /// Returns the RESP port.
    pub(crate) fn resp_port(&self) -> &str {
        self.resp.rsplit_once(':').expect("the address has a port").1
    }

    /// Returns the admin token that the server printed at startup.
    pub(crate) fn one_time_token(&self) -> &str {
        self.one_time_token.as_deref().expect("it was started without a configuration")
    }

    /// Returns the admin token, or `None` if the server was started with a configuration.
    pub(crate) fn printed_token(&self) -> Option<&str> {
        self.one_time_token.as_deref()
    }

    /// Returns the path of the configuration file.
    pub(crate) fn config(&self) -> &Path {
        self.config.as_deref().expect("the server was started with a configuration")
    }

    /// Returns the log so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).expect("the log is readable")
    }

    /// Returns the process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the resident memory, in KiB.
    pub(crate) fn resident_kib(&self) -> u64 {
        self.status("VmRSS:")
    }

    /// Returns the peak of resident memory, in KiB.
    pub(crate) fn peak_kib(&self) -> u64 {
        self.status("VmHWM:")
    }

    fn status(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let status = status.expect("the process is running");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(field))
            .expect("the status has the field");
        line.trim().trim_end_matches(" kB").parse().expect("the value is a number")
    }

    /// Returns the number of open files and connections.
    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .expect("the process is running")
            .count()
    }

    /// Waits until the server has at most `max` files and connections open.
    pub(crate) fn wait_for_descriptors(&self, max: usize) {
        wait_until("descriptors are closed", PATIENCE, || self.descriptors() <= max);
    }

    /// Sends a signal by its name.
    pub(crate) fn signal(&self, name: &str) {
        let pid = self.pid().to_string();
        let sent = Command::new("kill").args(["-s", name, &pid]).status().expect("kill runs");
        assert!(sent.success(), "SIG{name} was not sent");
    }

    /// Waits until the server has exited and returns its exit code.
    pub(crate) fn wait_for_exit(&mut self) -> Option<i32> {
        let mut status = None;
        wait_until("the server exits", PATIENCE, || {
            status = self.child.try_wait().expect("the process status is readable");
            status.is_some()
        });
        status.and_then(|status| status.code())
    }

    /// Kills the server and keeps the sockets that it leaves behind.
    pub(crate) fn kill(mut self) {
        self.signal("KILL");
        self.wait_for_exit();
        (self.http, self.resp, self.grpc) = (String::new(), String::new(), String::new());
    }

    /// Sends SIGTERM, waits for the exit and returns the exit code.
    pub(crate) fn stop(&mut self) -> Option<i32> {
        self.signal("TERM");
        self.wait_for_exit()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            #[allow(clippy::print_stderr, reason = "the log explains the failure")]
            {
                eprintln!("the server logged:\n{}", self.log());
            }
        }
        let _ = std::fs::remove_file(&self.log);
        if let Some(path) = &self.config {
            let _ = std::fs::remove_file(path);
        }
        // A killed server does not remove its sockets.
        let listeners = [&self.http, &self.resp, &self.grpc];
        for socket in listeners.into_iter().filter_map(|one| one.strip_prefix("unix:")) {
            let _ = std::fs::remove_file(socket);
        }
    }
}
