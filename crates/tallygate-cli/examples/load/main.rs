//! Measures the store under load: several servers share one remote Redis, with one hot key and a thousand others.
//!
//! ```text
//! load SERVER [--seconds N] [--write FILE]
//! ```
//!
//! Every combination of round-trip time, demand and kind of request is measured for the same time. A row has the allowed
//! requests compared with the bound over every interval, the used share of the quota, the sources, the latency, and the
//! calls per decision. The program fails if a bound is broken, if a failure setting made a decision, or if less than 95 %
//! of the quota was used at twice the demand or more. If the machine stalled meanwhile, only a broken bound is a failure:
//! the row is measured again, and in the end reported as not measured. `scripts/load` builds and runs this.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the program prints a report")]
#![allow(
    clippy::float_arithmetic,
    clippy::cast_precision_loss,
    reason = "floats are only measured values"
)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tallygate_testkit::servers::{Flavor, Proxy, Server};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufStream};
use tokio::net::TcpStream;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const ROUND_TRIPS_MS: [u64; 5] = [0, 1, 5, 20, 40];
const DEMANDS: [f64; 3] = [0.5, 2.0, 10.0];
const SERVERS: usize = 3;
/// The number of connections, over all servers, that check the hot key.
const CONNECTIONS: usize = 150;
/// The number of requests per pipeline.
const PIPELINE: usize = 8;
const LIMIT: f64 = 200.0;
const BURST: f64 = 20.0;
/// The other tier has the same rate and this burst.
const OTHER_BURST: f64 = 40.0;

const CONFIG: &str = r#"
[policies.hot]
algorithm = "token_bucket"
limit = 200
window = "1s"
burst = 20
[policies.hot.tiers.pro]
algorithm = "token_bucket"
limit = 200
window = "1s"
burst = 40
[policies.address]
algorithm = "token_bucket"
limit = 1000000
window = "1s"
[policies.others]
algorithm = "token_bucket"
limit = 1000000
window = "1s"
"#;

/// The kind of requests for the hot key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Single,
    Pipelines,
    All,
    MixedTiers,
}

impl Kind {
    const EACH: [Self; 4] = [Self::Single, Self::Pipelines, Self::All, Self::MixedTiers];

    const fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Pipelines => "pipelines",
            Self::All => "all",
            Self::MixedTiers => "tiers",
        }
    }

    fn body(self, key: &str, number: usize) -> String {
        match self {
            Self::All => format!(
                r#"{{"all":[{{"policy":"address","key":"{}"}},{{"policy":"hot","key":"{key}"}}]}}"#,
                number % 50
            ),
            Self::MixedTiers if number.is_multiple_of(2) => {
                format!(r#"{{"policy":"hot","key":"{key}","tier":"pro"}}"#)
            }
            Self::Single | Self::Pipelines | Self::MixedTiers => {
                format!(r#"{{"policy":"hot","key":"{key}"}}"#)
            }
        }
    }

    /// Returns the largest burst; with several tiers, their sum.
    fn burst(self) -> f64 {
        if self == Self::MixedTiers { BURST + OTHER_BURST } else { BURST }
    }
}

fn main() -> ExitCode {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    match runtime.map_err(Failure::from).and_then(|runtime| runtime.block_on(run())) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

const HEAD: &str = "\
| round trip | demand | requests | allowed | worst interval against its bound | share of the quota | sources | p50 | p99 | other keys p99 | calls per decision | verdict |
|---|---|---|---|---|---|---|---|---|---|---|---|
";

async fn run() -> Result<bool, Failure> {
    let mut words = std::env::args().skip(1);
    let binary = PathBuf::from(words.next().ok_or("expected the path of the server binary")?);
    let (mut seconds, mut write) = (60.0, None);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--seconds" => {
                seconds = words.next().ok_or("expected a number after --seconds")?.parse()?;
            }
            "--write" => {
                write = Some(PathBuf::from(words.next().ok_or("expected a file after --write")?));
            }
            other => return Err(format!("{other:?} is not known; use --seconds or --write").into()),
        }
    }
    let rows = ROUND_TRIPS_MS.len() * DEMANDS.len() * Kind::EACH.len();
    let each = Duration::from_secs_f64(seconds / rows as f64);
    let mut table = String::from(HEAD);
    print!("{table}");
    let (mut held, mut not_measured) = (true, 0_u32);
    for round_trip_ms in ROUND_TRIPS_MS {
        let fleet = Fleet::start(&binary, Duration::from_millis(round_trip_ms))?;
        for (at, kind) in Kind::EACH.into_iter().enumerate() {
            for (which, demand) in DEMANDS.into_iter().enumerate() {
                let mut tries = 0;
                let (row, verdict) = loop {
                    let key = format!("hot-{at}-{which}-{tries}");
                    let stalls = Stalls::watch();
                    let (row, verdict) = fleet.measure(kind, demand, &key, each).await?;
                    let longest = stalls.longest();
                    tries += 1;
                    if !verdict.may_be_a_stall() || longest < fleet.longest_stall() {
                        break (row, verdict);
                    }
                    eprintln!(
                        "the machine stalled for {longest:?} during this row: {row} {} |",
                        verdict.text()
                    );
                    if tries == TRIES {
                        break (row, Verdict::NotMeasured);
                    }
                };
                let row = format!("{row} {} |\n", verdict.text());
                print!("{row}");
                table.push_str(&row);
                match verdict {
                    Verdict::Held => {}
                    Verdict::NotMeasured => not_measured += 1,
                    Verdict::BoundBroken | Verdict::FailureSetting | Verdict::QuotaNotUsed => {
                        held = false;
                    }
                }
            }
        }
    }
    if let Some(path) = write {
        put(&path, &table)?;
    }
    if not_measured > 0 {
        println!("\n{not_measured} of {rows} rows were not measured, because the machine stalled");
    }
    Ok(held)
}

/// The time budget of a check, by default.
const BUDGET: Duration = Duration::from_millis(50);
/// How often a row is measured if the machine stalls each time.
const TRIES: usize = 5;

/// What a row says about the promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Held,
    BoundBroken,
    FailureSetting,
    QuotaNotUsed,
    NotMeasured,
}

impl Verdict {
    const fn text(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::BoundBroken => "BOUND BROKEN",
            Self::FailureSetting => "A FAILURE SETTING DECIDED",
            Self::QuotaNotUsed => "QUOTA NOT USED",
            Self::NotMeasured => "not measured",
        }
    }

    /// Returns whether a machine that stalls can be the cause. Nothing excuses a broken bound.
    const fn may_be_a_stall(self) -> bool {
        matches!(self, Self::FailureSetting | Self::QuotaNotUsed)
    }
}

/// Measures stalls of the machine: how late a thread wakes that sleeps for a millisecond at a time.
struct Stalls {
    is_over: Arc<AtomicBool>,
    watcher: std::thread::JoinHandle<Duration>,
}

impl Stalls {
    fn watch() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = is_over.clone();
        let watcher = std::thread::spawn(move || {
            let mut longest = Duration::ZERO;
            while !ends.load(Ordering::Relaxed) {
                let start = Instant::now();
                std::thread::sleep(Duration::from_millis(1));
                longest = longest.max(start.elapsed());
            }
            longest
        });
        Self { is_over, watcher }
    }

    fn longest(self) -> Duration {
        self.is_over.store(true, Ordering::Relaxed);
        self.watcher.join().unwrap_or_default()
    }
}

/// Replaces the table in a document.
fn put(path: &Path, table: &str) -> Result<(), Failure> {
    const BEGIN: &str = "<!-- measured: load -->\n";
    const END: &str = "<!-- end -->";
    let document = std::fs::read_to_string(path)?;
    let (before, rest) = document.split_once(BEGIN).ok_or("the document has no start marker")?;
    let (_, after) = rest.split_once(END).ok_or("the document has no end marker")?;
    std::fs::write(path, format!("{before}{BEGIN}\n{table}\n{END}{after}"))?;
    Ok(())
}

/// Servers that share a remote Redis.
struct Fleet {
    servers: Vec<Process>,
    round_trip: Duration,
    // Dropped after the servers.
    _proxy: Proxy,
    _redis: Server,
}

/// A server that runs until it is dropped.
struct Process {
    child: Child,
    /// Keeps the pipe of standard output open.
    _output: BufReader<ChildStdout>,
    http: String,
    config: PathBuf,
}

impl Process {
    fn start(binary: &Path, number: usize, store: &str) -> Result<Self, Failure> {
        let name = format!("tallygate-load-{}-{number}.toml", std::process::id());
        let config = std::env::temp_dir().join(name);
        std::fs::write(&config, CONFIG)?;
        let mut child = Command::new(binary)
            .args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--store", store])
            .arg("--config")
            .arg(&config)
            .env("TALLYGATE_LOG", "error")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut output = BufReader::new(child.stdout.take().ok_or("no output")?);
        let mut http = String::new();
        loop {
            let mut line = String::new();
            if output.read_line(&mut line)? == 0 {
                return Err("the server ended before it was ready".into());
            }
            match line.trim_end().split_once(' ') {
                Some(("http", address)) => address.clone_into(&mut http),
                Some(("tallygate", "ready")) => break,
                _ => {}
            }
        }
        Ok(Self { child, _output: output, http, config })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop((self.child.kill(), self.child.wait()));
        drop(std::fs::remove_file(&self.config));
    }
}

/// One decision.
#[derive(Clone, Debug)]
struct Answer {
    sent: Instant,
    received: Instant,
    allowed: bool,
    source: String,
}

impl Fleet {
    fn start(binary: &Path, round_trip: Duration) -> Result<Self, Failure> {
        let redis = Server::start(Flavor::Redis);
        let proxy = Proxy::start(&redis.address());
        proxy.delay(round_trip);
        let url = proxy.url();
        let servers = (0..SERVERS).map(|number| Process::start(binary, number, &url));
        let servers = servers.collect::<Result<_, _>>()?;
        Ok(Self { servers, round_trip, _proxy: proxy, _redis: redis })
    }

    /// Returns the longest stall of the machine that is no excuse for a failed row: with a longer one, little may be left
    /// of the time budget after the round trip, through no fault of the servers or of Redis.
    fn longest_stall(&self) -> Duration {
        (BUDGET - self.round_trip) / 4
    }

    async fn calls(&self) -> Result<f64, Failure> {
        let mut calls = 0.0;
        for server in &self.servers {
            let mut client = Client::connect(&server.http).await?;
            let text = client.ask("GET /metrics", "").await?;
            let line = text.lines().find_map(|l| l.strip_prefix("tallygate_store_calls_total "));
            calls += line.ok_or("the metrics have no count of calls")?.trim().parse::<f64>()?;
        }
        Ok(calls)
    }

    /// Checks a hot key for a while. Returns a row of the table, without its last column, and the verdict.
    async fn measure(
        &self,
        kind: Kind,
        demand: f64,
        key: &str,
        lasts: Duration,
    ) -> Result<(String, Verdict), Failure> {
        let before = self.calls().await?;
        let together = if kind == Kind::Pipelines { PIPELINE } else { 1 };
        let pause = CONNECTIONS as f64 * together as f64 / (LIMIT * demand);
        let start = Instant::now() + Duration::from_millis(50);
        let end = start + lasts;
        let key: Arc<str> = key.into();
        let mut tasks = Vec::new();
        for connection in 0..CONNECTIONS {
            let (http, key) = (self.servers[connection % SERVERS].http.clone(), key.clone());
            // The callers start at different times, so that requests are evenly spaced.
            let mut next =
                start + Duration::from_secs_f64(pause * connection as f64 / CONNECTIONS as f64);
            tasks.push(tokio::spawn(async move {
                let mut client = Client::connect(&http).await?;
                let mut answers = Vec::new();
                let mut number = connection;
                while next < end {
                    tokio::time::sleep_until(next.into()).await;
                    let bodies: Vec<_> =
                        (0..together).map(|at| kind.body(&key, number + at)).collect();
                    number += 1;
                    answers.extend(client.check(&bodies).await?);
                    next = (next + Duration::from_secs_f64(pause)).max(Instant::now());
                }
                Ok::<_, Failure>(answers)
            }));
        }
        let others: Vec<_> = (0..SERVERS)
            .map(|server| {
                let http = self.servers[server].http.clone();
                tokio::spawn(async move {
                    let mut client = Client::connect(&http).await?;
                    let (mut answers, mut number) = (Vec::new(), server);
                    while Instant::now() < end {
                        number += SERVERS;
                        let body = format!(r#"{{"policy":"others","key":"{}"}}"#, number % 1000);
                        answers.extend(client.check(&[body]).await?);
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                    Ok::<_, Failure>(answers)
                })
            })
            .collect();
        let mut answers = Vec::new();
        for task in tasks {
            answers.extend(task.await??);
        }
        let mut of_others = Vec::new();
        for task in others {
            of_others.extend(task.await??);
        }
        let calls = self.calls().await? - before;
        Ok(self.row(kind, demand, &answers, &of_others, calls))
    }

    fn row(
        &self,
        kind: Kind,
        demand: f64,
        answers: &[Answer],
        of_others: &[Answer],
        calls: f64,
    ) -> (String, Verdict) {
        let mut sources = BTreeMap::<&str, u64>::new();
        for answer in answers {
            *sources.entry(&answer.source).or_default() += 1;
        }
        let allowed: Vec<_> = answers.iter().filter(|answer| answer.allowed).collect();
        let excess = worst_excess(&allowed, LIMIT, kind.burst());
        let first = answers.iter().map(|answer| answer.sent).min();
        let last = answers.iter().map(|answer| answer.received).max();
        let lasted = first.zip(last).map_or(0.0, |(first, last)| (last - first).as_secs_f64());
        let quota = LIMIT * (lasted - self.round_trip.as_secs_f64()).max(0.0);
        let share = allowed.len() as f64 / quota.min(answers.len() as f64).max(1.0);
        let failed = ["failed_open", "failed_closed", "local"];
        let by_failure: u64 = failed.iter().filter_map(|source| sources.get(source)).sum();
        let others_failed =
            of_others.iter().filter(|answer| failed.contains(&&*answer.source)).count();
        let is_used = demand < 2.0 || share >= 0.95;
        let verdict = match () {
            () if excess > 0.0 => Verdict::BoundBroken,
            () if by_failure > 0 || others_failed > 0 => Verdict::FailureSetting,
            () if !is_used => Verdict::QuotaNotUsed,
            () => Verdict::Held,
        };
        let sources_text: Vec<_> =
            sources.iter().map(|(name, count)| format!("{name} {count}")).collect();
        let decisions = (answers.len() + of_others.len()) as f64;
        let mut row = String::new();
        let _ = write!(
            row,
            "| {} ms | {demand} × | {} | {} of {} | {:+.1} | {:.0} % | {} | {:.1} ms | {:.1} ms | {:.1} ms | {:.2} |",
            self.round_trip.as_millis(),
            kind.name(),
            allowed.len(),
            answers.len(),
            excess,
            100.0 * share,
            sources_text.join(", "),
            quantile_ms(answers, 0.5),
            quantile_ms(answers, 0.99),
            quantile_ms(of_others, 0.99),
            calls / decisions.max(1.0),
        );
        (row, verdict)
    }
}

/// Returns by how much the worst interval exceeds the bound (negative if it stays below). An interval starts when a request
/// was sent and ends when one was answered, and counts the decisions that certainly lie within it.
fn worst_excess(allowed: &[&Answer], limit: f64, burst: f64) -> f64 {
    let mut by_end: Vec<_> = allowed.iter().map(|answer| (answer.received, answer.sent)).collect();
    by_end.sort_unstable();
    let mut worst = f64::NEG_INFINITY;
    for start in by_end.iter().map(|(_, sent)| *sent) {
        let mut count = 0_u32;
        for (received, sent) in &by_end {
            if *sent >= start {
                count += 1;
                let earned =
                    (received.saturating_duration_since(start).as_secs_f64() * limit).floor();
                worst = worst.max(f64::from(count) - burst - earned);
            }
        }
    }
    worst
}

fn quantile_ms(answers: &[Answer], quantile: f64) -> f64 {
    let mut took: Vec<_> = answers.iter().map(|answer| answer.received - answer.sent).collect();
    took.sort_unstable();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index of a list"
    )]
    let at = (took.len() as f64 * quantile) as usize;
    took.get(at.min(took.len().saturating_sub(1))).map_or(0.0, |took| took.as_secs_f64() * 1000.0)
}

/// An HTTP/1.1 connection.
struct Client {
    stream: BufStream<TcpStream>,
    host: String,
}

impl Client {
    async fn connect(host: &str) -> Result<Self, Failure> {
        let stream = TcpStream::connect(host).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream: BufStream::new(stream), host: host.to_owned() })
    }

    async fn ask(&mut self, what: &str, body: &str) -> Result<String, Failure> {
        self.send(what, body).await?;
        self.stream.flush().await?;
        self.receive().await
    }

    /// Sends all requests at once and waits for all replies.
    async fn check(&mut self, bodies: &[String]) -> Result<Vec<Answer>, Failure> {
        let sent = Instant::now();
        for body in bodies {
            self.send("POST /v1/check", body).await?;
        }
        self.stream.flush().await?;
        let mut answers = Vec::with_capacity(bodies.len());
        for _ in bodies {
            let text = self.receive().await?;
            let json: serde_json::Value = serde_json::from_str(&text)?;
            let allowed = json["allowed"]
                .as_bool()
                .ok_or_else(|| format!("the reply is not a decision: {text}"))?;
            let source = json["source"].as_str().unwrap_or_default().to_owned();
            answers.push(Answer { sent, received: Instant::now(), allowed, source });
        }
        Ok(answers)
    }

    async fn send(&mut self, what: &str, body: &str) -> Result<(), Failure> {
        let (host, length) = (&self.host, body.len());
        let head = format!(
            "{what} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        self.stream.write_all(head.as_bytes()).await?;
        Ok(())
    }

    async fn receive(&mut self) -> Result<String, Failure> {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if self.stream.read_line(&mut line).await? == 0 {
                return Err("the server closed the connection".into());
            }
            let line = line.trim_end().to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
            if line.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).await?;
        Ok(String::from_utf8(body)?)
    }
}
