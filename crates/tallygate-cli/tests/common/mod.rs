//! A Tallygate server as its users start it.
#![allow(dead_code, reason = "each test file uses its part")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A server that runs until it is dropped.
pub(crate) struct Served {
    child: Child,
    /// Held open: a server whose output nobody can read would fail.
    _output: BufReader<ChildStdout>,
    /// The token that it printed, if it was started without a configuration.
    one_time_token: Option<String>,
    http: String,
    resp: String,
    config: Option<PathBuf>,
    log: PathBuf,
}

/// Opens the admin verbs to a test, which comes over loopback, unless its configuration says otherwise.
pub(crate) fn with_admin(config: &str) -> String {
    match config.contains("[admin]") {
        true => config.to_owned(),
        false => format!("{config}\n[admin]\nloopback = true\n"),
    }
}

/// How long a server may take to start and to stop.
const PATIENCE: Duration = Duration::from_secs(20);

impl Served {
    /// Starts the binary on free ports of loopback, and waits until it is ready. Without a configuration it serves the
    /// demo policy.
    pub(crate) fn start(options: &[&str], config: Option<&str>) -> Self {
        Self::with_variables(options, config, &[])
    }

    /// The same, by a shell that is told something first.
    pub(crate) fn after(prelude: &str, options: &[&str], config: Option<&str>) -> Self {
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(format!("{prelude}; exec \"$0\" \"$@\""));
        shell.arg(env!("CARGO_BIN_EXE_tallygate")).env("TALLYGATE_LOG", "warn");
        Self::run(shell, options, config, None)
    }

    /// The same, with variables in its environment.
    pub(crate) fn with_variables(
        options: &[&str],
        config: Option<&str>,
        variables: &[(&str, &str)],
    ) -> Self {
        Self::with_log(options, config, variables, None)
    }

    /// The same, with something else for standard error than a file.
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
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (mut http, mut resp) = (String::new(), String::new());
        loop {
            let mut line = String::new();
            output.read_line(&mut line).expect("it says where it listens");
            match line.trim_end().split_once(' ') {
                Some(("http", address)) => http = address.to_owned(),
                Some(("resp", address)) => resp = address.to_owned(),
                said => {
                    assert_eq!(said, Some(("tallygate", "ready")), "it said {line:?}");
                    break;
                }
            }
        }
        let is_demo = config.is_none() && !options.contains(&"--config");
        let one_time_token = is_demo.then(|| {
            let mut lines = output.by_ref().lines().map(|line| line.expect("it goes on"));
            let token = lines.find_map(|line| {
                line.trim().strip_prefix("admin token of this run: ").map(str::to_owned)
            });
            token.expect("a token")
        });
        Self { child, _output: output, one_time_token, http, resp, config, log }
    }

    /// Where it listens for HTTP: `HOST:PORT` or `unix:/path`.
    pub(crate) fn http(&self) -> &str {
        &self.http
    }

    /// Where it listens for RESP.
    pub(crate) fn resp(&self) -> &str {
        &self.resp
    }

    /// The port on which it listens for RESP.
    pub(crate) fn resp_port(&self) -> &str {
        self.resp.rsplit_once(':').expect("a port").1
    }

    /// The admin token that it printed at startup.
    pub(crate) fn one_time_token(&self) -> &str {
        self.one_time_token.as_deref().expect("it was started without a configuration")
    }

    /// The same; `None` if it was started with a configuration.
    pub(crate) fn printed_token(&self) -> Option<&str> {
        self.one_time_token.as_deref()
    }

    /// Its configuration, to be changed.
    pub(crate) fn config(&self) -> &Path {
        self.config.as_deref().expect("it was started with one")
    }

    /// What it has logged so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).expect("a log")
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it holds in memory, in KiB.
    pub(crate) fn resident_kib(&self) -> u64 {
        self.status("VmRSS:")
    }

    /// The most that it ever held in memory, in KiB.
    pub(crate) fn peak_kib(&self) -> u64 {
        self.status("VmHWM:")
    }

    fn status(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let status = status.expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a size");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    /// How many files and connections it has open.
    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("it runs").count()
    }

    /// Waits until it has no more files and connections open than so many.
    pub(crate) fn wait_for_descriptors(&self, most: usize) {
        let started = Instant::now();
        while self.descriptors() > most {
            assert!(started.elapsed() < PATIENCE, "{} are open, not {most}", self.descriptors());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends a signal, by its name.
    pub(crate) fn signal(&self, name: &str) {
        let pid = self.pid().to_string();
        let sent = Command::new("kill").args(["-s", name, &pid]).status().expect("kill runs");
        assert!(sent.success(), "SIG{name} was not sent");
    }

    /// Waits for its end; the exit code.
    pub(crate) fn ended(&mut self) -> Option<i32> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("it can be asked") {
                return status.code();
            }
            assert!(started.elapsed() < PATIENCE, "it goes on");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills it, and leaves behind what it leaves behind.
    pub(crate) fn kill(mut self) {
        self.signal("KILL");
        self.ended();
        (self.http, self.resp) = (String::new(), String::new());
    }

    /// Tells it to stop, and waits; the exit code.
    pub(crate) fn stop(&mut self) -> Option<i32> {
        self.signal("TERM");
        self.ended()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            #[allow(clippy::print_stderr, reason = "whoever looks for a failure looks for this")]
            {
                eprintln!("the server logged:\n{}", self.log());
            }
        }
        let _ = std::fs::remove_file(&self.log);
        if let Some(path) = &self.config {
            let _ = std::fs::remove_file(path);
        }
        // Killed, it could not do so itself.
        for socket in
            [&self.http, &self.resp].into_iter().filter_map(|one| one.strip_prefix("unix:"))
        {
            let _ = std::fs::remove_file(socket);
        }
    }
}
