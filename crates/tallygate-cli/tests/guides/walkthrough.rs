//! Follows a guide as a reader would: writes the files that it shows, runs its commands and compares what they print.
//!
//! The word after the language of a code block says what to do with the block:
//!
//! | block | effect |
//! |---|---|
//! | ` ```toml file:NAME ` (any language) | writes the file |
//! | ` ```sh ` | runs the commands; they must succeed |
//! | ` ```text ` after it | is what the commands print |
//! | ` ```text about ` | the same, where all numbers from 20 may be times |
//! | ` ```sh background ` | starts a server and waits until it listens; it is stopped at the end |
//! | ` ```sh no_run ` | changes the machine, so no test runs it |
//!
//! In printed text, `…` matches any text and a line `…` for any lines. Times may be shorter by a tenth, because time
//! passes: they are the numbers behind `_ms":` and `retry-after:` and before ` ms`. The servers listen on free ports: the guide's ports are replaced in files and commands.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);

/// The ports of Tallygate in the guides.
const HTTP: &str = "8080";
const RESP: &str = "6380";
const GRPC: &str = "8081";

/// A code block of a guide.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) language: String,
    /// The word after the language.
    pub(crate) mark: Option<String>,
    pub(crate) text: String,
    /// The line on which the block begins.
    pub(crate) line: usize,
}

/// Returns the code blocks of a document.
pub(crate) fn blocks(document: &str) -> Vec<Block> {
    let mut found = Vec::new();
    let mut open: Option<Block> = None;
    for (index, line) in document.lines().enumerate() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(info)) => {
                let mut words = info.split(' ').map(str::to_owned);
                let (language, mark) = (words.next().unwrap_or_default(), words.next());
                open = Some(Block { language, mark, text: String::new(), line: index + 1 });
            }
            (Some(_), Some(_)) => found.extend(open.take()),
            (Some(block), None) => {
                block.text.push_str(line);
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a code block has no end: {open:?}");
    found
}

/// Returns whether a program printed what a guide shows. With `about`, every number from 20 may be a time.
pub(crate) fn matches(shown: &str, printed: &str, about: bool) -> bool {
    let lines = |text: &str| text.lines().map(|line| line.trim_end().to_owned()).collect();
    let (shown, printed): (Vec<String>, Vec<String>) = (lines(shown), lines(printed));
    lines_match(&shown, &printed, about)
}

fn lines_match(shown: &[String], printed: &[String], about: bool) -> bool {
    match (shown, printed) {
        ([], []) => true,
        ([any, rest @ ..], _) if any == "…" => {
            (0..=printed.len()).any(|skipped| lines_match(rest, &printed[skipped..], about))
        }
        ([line, shown @ ..], [other, printed @ ..]) => {
            line_matches(("", line), other, about) && lines_match(shown, printed, about)
        }
        _ => false,
    }
}

/// Compares the rest of a line, whose beginning was the same.
fn line_matches((before, shown): (&str, &str), printed: &str, about: bool) -> bool {
    let Some(next) = shown.chars().next() else { return printed.is_empty() };
    if next == '…' {
        let rest = &shown['…'.len_utf8()..];
        let mut ends = printed.char_indices().map(|(at, _)| at).chain([printed.len()]);
        return ends.any(|at| line_matches(("", rest), &printed[at..], about));
    }
    if !next.is_ascii_digit() {
        let mut rest = printed.chars();
        let before = &format!("{before}{next}");
        return rest.next() == Some(next)
            && line_matches((before, &shown[next.len_utf8()..]), rest.as_str(), about);
    }
    let number = |text: &str| {
        let digits = text.find(|one: char| !one.is_ascii_digit()).unwrap_or(text.len());
        (text[..digits].parse::<u64>().ok(), digits)
    };
    let ((expected, shown_digits), (found, digits)) = (number(shown), number(printed));
    let rest = &shown[shown_digits..];
    let is_time = about
        || before.ends_with("_ms\":")
        || before.ends_with("retry-after: ")
        || rest.starts_with(" ms");
    let is_same = match (expected, found) {
        (Some(one @ 20..), Some(other)) if is_time => (one - one / 10..=one).contains(&other),
        (one, other) => one == other,
    };
    is_same && line_matches(("", rest), &printed[digits..], about)
}

/// A reader who follows a guide in a folder of its own.
pub(crate) struct Walkthrough {
    folder: tempfile::TempDir,
    /// Texts of the guide, and what the test has instead.
    replaced: Vec<(String, String)>,
    variables: Vec<(String, OsString)>,
    servers: Vec<Child>,
}

impl Walkthrough {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder is made");
        let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
        let own = Path::new(env!("CARGO_BIN_EXE_tallygate")).parent().expect("a folder");
        let mut path = OsString::from(own);
        path.push(":");
        path.push(installed.join("test-servers"));
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        path.push(":/usr/sbin");
        let variables = vec![
            ("PATH".to_owned(), path),
            ("HOME".to_owned(), folder.path().into()),
            ("TALLYGATE_LOG".to_owned(), "warn".into()),
        ];
        Self { folder, replaced: Vec::new(), variables, servers: Vec::new() }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the folders in which the commands find programs.
    pub(crate) fn path(&self) -> &OsStr {
        &self.variables[0].1
    }

    /// Sets an environment variable of the commands.
    pub(crate) fn set(&mut self, name: &str, value: impl Into<OsString>) {
        self.variables.push((name.to_owned(), value.into()));
    }

    /// Replaces a text of the guide.
    pub(crate) fn replace(&mut self, text: &str, by: impl Into<String>) {
        self.replaced.push((text.to_owned(), by.into()));
    }

    /// Replaces a port of the guide by a free one.
    pub(crate) fn replace_port(&mut self, port: u16) {
        // It is free now, and most likely still free when the server takes it.
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        self.replace(&port.to_string(), free.expect("a port is free").port().to_string());
    }

    pub(crate) fn replaced(&self, text: &str) -> String {
        let (mut rest, mut done) = (text, String::new());
        // In one pass: a port that was put in must not be replaced again.
        while let Some(next) = rest.chars().next() {
            let replaced = self.replaced.iter().find(|(from, _)| rest.starts_with(from.as_str()));
            let length = match replaced {
                Some((from, to)) => {
                    done.push_str(to);
                    from.len()
                }
                None => {
                    done.push(next);
                    next.len_utf8()
                }
            };
            rest = &rest[length..];
        }
        done
    }

    /// Follows the guide from the beginning to the end.
    pub(crate) fn follow(&mut self, guide: &str) {
        let blocks = blocks(guide);
        let mut next = blocks.iter().peekable();
        while let Some(block) = next.next() {
            match (&*block.language, block.mark.as_deref()) {
                (_, Some(mark)) if mark.starts_with("file:") => {
                    let path = self.folder().join(&mark["file:".len()..]);
                    std::fs::create_dir_all(path.parent().expect("a folder")).expect("it is made");
                    std::fs::write(path, self.replaced(&block.text)).expect("the file is written");
                }
                ("sh", Some("background")) => self.start(block),
                ("sh", None) => {
                    let printed = self.run(block);
                    if let Some(shown) = next.next_if(|block| block.language == "text") {
                        let about = shown.mark.as_deref() == Some("about");
                        let shown = self.replaced(&shown.text);
                        assert!(
                            matches(&shown, &printed, about),
                            "line {}:\n{}printed:\n{printed}\nand not:\n{shown}",
                            block.line,
                            block.text
                        );
                    }
                }
                ("text", _) => panic!("line {}: no command prints this", block.line),
                _ => {}
            }
        }
    }

    fn command(&self, script: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-e", "-c", script]).current_dir(self.folder());
        shell.envs(self.variables.iter().map(|(name, value)| (name, value)));
        shell.stdin(Stdio::null());
        shell
    }

    /// Runs commands. Returns what they print.
    fn run(&self, block: &Block) -> String {
        let script = self.replaced(&block.text);
        let output = self.command(&script).output().expect("a shell starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (printed, errors) = (text(&output.stdout), text(&output.stderr));
        assert!(
            output.status.success(),
            "line {}: {}\n{script}{printed}{errors}",
            block.line,
            output.status
        );
        printed
    }

    /// Starts a server: Tallygate, or one that listens on a replaced port.
    fn start(&mut self, block: &Block) {
        let script = self.replaced(&block.text);
        let mut command = self.command(&format!("exec {}", script.trim_start()));
        let is_tallygate = script.contains("tallygate serve");
        if is_tallygate {
            // A variable goes before the configuration.
            command.envs(["TALLYGATE_HTTP", "TALLYGATE_RESP"].map(|name| (name, "127.0.0.1:0")));
        }
        command.stdout(if is_tallygate { Stdio::piped() } else { Stdio::null() });
        let mut child = command.spawn().expect("a shell starts");
        let output = child.stdout.take();
        self.servers.push(child);
        match output {
            Some(output) => self.wait_until_ready(output),
            None => self.wait_until_it_listens(block),
        }
    }

    /// Waits until Tallygate is ready, and replaces its ports from then on.
    fn wait_until_ready(&mut self, output: impl std::io::Read + Send + 'static) {
        let mut lines = BufReader::new(output);
        loop {
            let mut line = String::new();
            assert!(lines.read_line(&mut line).expect("text") > 0, "the server ended");
            let port = line.trim_end().rsplit_once(':').map(|(_, port)| port.to_owned());
            match line.split_once(' ') {
                Some(("http", _)) => self.replace_tallygate(HTTP, port),
                Some(("resp", _)) => self.replace_tallygate(RESP, port),
                Some(("grpc", _)) => self.replace_tallygate(GRPC, port),
                _ if line == "tallygate ready\n" => break,
                _ => panic!("the server printed {line:?}"),
            }
        }
        // Nothing that it prints later may fill the pipe.
        std::thread::spawn(move || lines.read_to_end(&mut Vec::new()));
    }

    fn replace_tallygate(&mut self, port: &str, by: Option<String>) {
        self.replaced.retain(|(text, _)| text != port);
        self.replace(port, by.expect("a port"));
    }

    fn wait_until_it_listens(&mut self, block: &Block) {
        let address = block.address().map(|address| self.replaced(&address));
        let address = address.unwrap_or_else(|| panic!("line {}: no address", block.line));
        let started = Instant::now();
        let child = self.servers.last_mut().expect("it was started");
        while TcpStream::connect(&address).is_err() {
            let ended = child.try_wait().expect("the process can be asked");
            assert!(
                ended.is_none() && started.elapsed() < PATIENCE,
                "line {}: nothing listens at {address}: {ended:?}\n{}",
                block.line,
                block.text
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Block {
    /// The address that a server of this block listens on, from its remark `# listens on ADDRESS`.
    fn address(&self) -> Option<String> {
        let (_, address) = self.text.split_once("# listens on ")?;
        address.split_whitespace().next().map(str::to_owned)
    }
}

impl Drop for Walkthrough {
    fn drop(&mut self) {
        for server in &mut self.servers {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// The folder into which the scripts install clients.
pub(crate) fn clients() -> PathBuf {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/test-clients");
    std::fs::canonicalize(path).expect("clients are installed: run scripts/install-test-clients")
}
