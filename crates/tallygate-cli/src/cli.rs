//! The arguments of the command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser as _};
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use tallygate_core::{Anchor, Cost, Kind, Ticks};
use tallygate_lab::backtest::{Format, KeyFrom, LineFilter, Share};
use tallygate_lab::simulate::Pattern;
use tallygate_lab::{duration, limit_syntax};
use tallygate_server::ServeOptions;

/// A rate limiter: serve limits over HTTP, RESP and gRPC, check them from scripts, and try them on logs and simulated traffic.
#[derive(Debug, Parser)]
#[command(name = "tallygate", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Serve(Serve),
    CheckConfig(CheckConfig),
    Check(Check),
    Ping(Ping),
    Replay(Replay),
    Backtest(Backtest),
    Simulate(Simulate),
    Completions(Completions),
    Man(Man),
}

const SERVE: &str = "\
Examples:
  tallygate serve
      Try it without a configuration. Open the link that it prints in a browser.
  tallygate serve --config tallygate.toml --http 0.0.0.0:8080
      Serve your policies to the network.
  tallygate serve --config tallygate.toml --store redis://127.0.0.1:6379
      Share the quotas between all servers on one Redis or Valkey.
  tallygate serve --grpc 0.0.0.0:8081 --envoy-config ratelimit.yaml
      Serve Envoy with the configuration of envoyproxy/ratelimit.
  tallygate serve --http unix:/run/tallygate.sock --resp 127.0.0.1:0
      Listen on a Unix socket for a local proxy, and on any free port for RESP.

Configuration:
  [policies.api]                    # the name that requests use
  algorithm = \"token_bucket\"        # or gcra, leaky_bucket, fixed_window, sliding_window_log, sliding_window_counter
  limit = 100
  window = \"1m\"
  burst = 200                       # for buckets; default: the limit

  Flags override environment variables, and both override the file. `tallygate check-config FILE` validates a file and
  prints the effective settings. docs/server.md describes all settings.

Signals:
  SIGHUP            reload the configuration; if it is invalid, keep the previous one and log the error
  SIGTERM, SIGINT   stop accepting connections, answer pending requests, exit

Exit status:
  0  shut down by a signal; pending requests were answered or, after 10 s, dropped and logged
  2  the server could not start, or could not write its snapshot on shutdown; the message gives the reason";

/// Parses a duration that is longer than zero.
fn interval(text: &str) -> Result<Duration, String> {
    match duration::parse(text).map_err(|error| error.to_string())? {
        Duration::ZERO => Err("must be longer than 0s".to_owned()),
        time => Ok(time),
    }
}

/// Serve decisions over HTTP, RESP and gRPC.
///
/// Without a configuration file, the server listens on loopback with the policy "demo" and prints commands to try. On
/// startup it prints its listen addresses, one per line, and then `tallygate ready`. SIGTERM and SIGINT shut it down after
/// the pending requests. SIGHUP, or a change of the file, reloads the configuration.
#[derive(Args, Debug)]
#[command(after_long_help = SERVE)]
pub(crate) struct Serve {
    /// Configuration file (TOML)
    #[arg(long, value_name = "FILE", env = "TALLYGATE_CONFIG")]
    pub(crate) config: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) settings: Settings,

    /// OTLP collector for traces: `http://HOST:PORT` [default: the value of `OTEL_EXPORTER_OTLP_ENDPOINT`]
    #[cfg(feature = "otlp")]
    #[arg(
        long,
        value_name = "URL",
        env = "TALLYGATE_OTLP",
        hide_env_values = true,
        verbatim_doc_comment
    )]
    pub(crate) otlp: Option<String>,

    /// Log level; `debug` adds details about Tallygate, `trace` also about the libraries that it uses
    #[arg(long, value_name = "LEVEL", env = "TALLYGATE_LOG", value_enum, default_value_t = LogLevel::Info)]
    pub(crate) log: LogLevel,

    /// Format of the log, which goes to standard error
    #[arg(long, value_name = "FORMAT", env = "TALLYGATE_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,
}

/// Settings that take precedence over the configuration file.
#[derive(Args, Debug)]
pub(crate) struct Settings {
    /// HTTP listen address: `HOST:PORT` or `unix:/path`; port 0 picks a free port [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR", env = "TALLYGATE_HTTP")]
    pub(crate) http: Option<String>,

    /// RESP listen address: `HOST:PORT` or `unix:/path` [default: 127.0.0.1:6380]
    #[arg(long, value_name = "ADDR", env = "TALLYGATE_RESP")]
    pub(crate) resp: Option<String>,

    /// gRPC listen address for Envoy's rate limit service: `HOST:PORT` or `unix:/path` [default: none]
    #[arg(long, value_name = "ADDR", env = "TALLYGATE_GRPC")]
    pub(crate) grpc: Option<String>,

    /// Rules of Envoy's rate limit service: a YAML file of envoyproxy/ratelimit, or a folder of them
    #[arg(long, value_name = "PATH", env = "TALLYGATE_ENVOY_CONFIG")]
    pub(crate) envoy_config: Option<PathBuf>,

    /// Store for the keys: `memory`, or a redis://, rediss://, redis+cluster:// or redis+sentinel:// URL [default: memory]
    #[arg(
        long,
        value_name = "STORE",
        env = "TALLYGATE_STORE",
        hide_env_values = true,
        verbatim_doc_comment
    )]
    pub(crate) store: Option<String>,

    /// Number of this server, from 1, among the `instances` that share the quota of a policy (memory store only)
    ///
    /// It decides which servers get the remainder of a division. Without it, the server takes the smallest share.
    #[arg(long, value_name = "N", env = "TALLYGATE_INSTANCE", allow_negative_numbers = true, value_parser = number::<u32>)]
    pub(crate) instance: Option<u32>,

    /// Maximum number of keys kept in memory per policy, at least 1 [default: 1000000]
    #[arg(long, value_name = "N", env = "TALLYGATE_MAX_KEYS", allow_negative_numbers = true, value_parser = number::<usize>)]
    pub(crate) max_keys: Option<usize>,

    /// Snapshot file of the memory store: loaded on startup, written on shutdown
    #[arg(long, value_name = "PATH", env = "TALLYGATE_SNAPSHOT")]
    pub(crate) snapshot: Option<PathBuf>,

    /// Also write the snapshot at this interval, such as `30s`
    #[arg(long, value_name = "TIME", env = "TALLYGATE_SNAPSHOT_EVERY", value_parser = interval)]
    pub(crate) snapshot_every: Option<Duration>,
}

/// Returns the environment variables that any command understands.
fn variables() -> Vec<String> {
    let commands = Cli::command();
    let arguments = commands.get_subcommands().flat_map(clap::Command::get_arguments);
    arguments.filter_map(|argument| Some(argument.get_env()?.to_str()?.to_owned())).collect()
}

/// Parses a whole number.
fn number<T: std::str::FromStr>(text: &str) -> Result<T, &'static str> {
    text.parse().map_err(|_| match text.bytes().all(|byte| byte.is_ascii_digit()) {
        true if !text.is_empty() => "the number is too large",
        _ => "expected a whole number, without a sign or a unit",
    })
}

/// Parses a whole number of at least 1.
fn positive(text: &str) -> Result<Cost, &'static str> {
    match number(text)? {
        0 => Err("must be at least 1"),
        number => Ok(number),
    }
}

impl Settings {
    fn options(self, config: Option<PathBuf>) -> ServeOptions {
        ServeOptions {
            config,
            http: self.http,
            resp: self.resp,
            grpc: self.grpc,
            envoy_config: self.envoy_config,
            store: self.store,
            instance: self.instance,
            max_keys: self.max_keys,
            snapshot: self.snapshot,
            snapshot_every: self.snapshot_every,
            otlp: None,
            variables: variables(),
            log: LogLevel::Info.into(),
            log_format: LogFormat::Text.into(),
        }
    }
}

impl Serve {
    /// Returns the options of the server.
    pub(crate) fn options(self) -> ServeOptions {
        ServeOptions {
            #[cfg(feature = "otlp")]
            otlp: self.otlp,
            log: self.log.into(),
            log_format: self.log_format.into(),
            ..self.settings.options(self.config)
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

impl From<LogLevel> for tallygate_server::LogLevel {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::Error,
            LogLevel::Warn => Self::Warn,
            LogLevel::Info => Self::Info,
            LogLevel::Debug => Self::Debug,
            LogLevel::Trace => Self::Trace,
        }
    }
}

impl From<LogFormat> for tallygate_server::LogFormat {
    fn from(format: LogFormat) -> Self {
        match format {
            LogFormat::Text => Self::Text,
            LogFormat::Json => Self::Json,
        }
    }
}

/// Validate a configuration file, or rules for Envoy, and print the settings and policies in effect.
///
/// Flags and environment variables override the file, as they do for `tallygate serve`. Settings without an effect are reported as
/// warnings on standard error.
#[derive(Args, Debug)]
pub(crate) struct CheckConfig {
    /// Configuration file (TOML)
    #[arg(required_unless_present = "envoy_config")]
    file: Option<PathBuf>,

    #[command(flatten)]
    settings: Settings,
}

impl CheckConfig {
    /// Returns the options of the server that would be started.
    pub(crate) fn options(self) -> ServeOptions {
        self.settings.options(self.file)
    }
}

const CHECK: &str = "\
Examples:
  tallygate check demo \"$USER\" && make deploy
      Deploy only if the policy allows it.
  until tallygate check --quiet mail \"$address\"; do sleep 1; done
      Wait until the policy allows it.

Exit status:
  0  allowed
  1  denied; standard output says when to retry
  2  no decision; the message gives the reason";

const PING: &str = "\
Examples:
  tallygate ping
  tallygate ping --resp unix:/run/tallygate/resp.sock

A ping needs neither a policy nor a token, so it can be used for health checks.";

/// Check a limit on a running server: exit code 0 if allowed, 1 if denied, 2 on errors.
#[derive(Args, Debug)]
#[command(after_long_help = CHECK)]
pub(crate) struct Check {
    /// Name of the policy
    pub(crate) policy: String,

    /// Key of the client
    pub(crate) key: String,

    /// Units to charge [default: the cost set in the policy]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<Cost>)]
    pub(crate) cost: Option<Cost>,

    /// Tier of the client
    #[arg(long, value_name = "NAME")]
    pub(crate) tier: Option<String>,

    /// File with the token, for a server that requires one; the first token in the file is used
    #[arg(long, value_name = "FILE", env = "TALLYGATE_TOKEN_FILE")]
    pub(crate) token_file: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) to: Connect,

    /// Print nothing
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// Check that a server answers: exit code 0 if it does, 2 if not.
#[derive(Args, Debug)]
#[command(after_long_help = PING)]
pub(crate) struct Ping {
    #[command(flatten)]
    pub(crate) to: Connect,
}

/// The address of a server, and the TLS settings of the connection.
#[derive(Args, Debug)]
pub(crate) struct Connect {
    /// RESP address of the server: `HOST:PORT` or `unix:/path`
    #[arg(long, value_name = "ADDR", env = "TALLYGATE_RESP", default_value = "127.0.0.1:6380")]
    pub(crate) resp: String,

    /// Use TLS and trust the certificate authorities in this file (PEM)
    #[arg(long, value_name = "FILE", env = "TALLYGATE_CA")]
    pub(crate) ca: Option<PathBuf>,

    /// Client certificate, for a server that requires one (PEM)
    #[arg(long, value_name = "FILE", env = "TALLYGATE_CERT", requires_all = ["ca", "cert_key"])]
    pub(crate) cert: Option<PathBuf>,

    /// Private key of the client certificate (PEM)
    #[arg(long, value_name = "FILE", env = "TALLYGATE_CERT_KEY", requires = "cert")]
    pub(crate) cert_key: Option<PathBuf>,
}

/// Print a shell completion script.
#[derive(Args, Debug)]
pub(crate) struct Completions {
    /// Shell to print the script for
    pub(crate) shell: clap_complete::Shell,
}

/// Print the manual page, or write one page per command
///
///   tallygate man | man -l -
///   tallygate man /usr/local/share/man/man1
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Man {
    /// Existing folder to write all pages to; without it, the main page is printed
    #[arg(value_name = "FOLDER")]
    pub(crate) folder: Option<PathBuf>,
}

/// Decide a trace of requests and print each decision.
///
/// The input is a line with the capacity, a line with the window, a line with the number of instructions n, and then n
/// lines `request CLIENT TIMESTAMP [COST]`, or the same as a list: `["request", "alice", "0"]`. The output is `allow` or
/// `deny` per request. Requests are decided at their timestamps, not at the time of the clock.
///
/// A line that starts with another word counts as an instruction, but is ignored. All lines after the n-th instruction are
/// ignored. Ignored lines are reported on standard error. Blank lines do not count.
///
/// Without options, the algorithm is the textbook token bucket in whole units of time, including its rounding drift. With
/// --exact or --algorithm, the decisions are those of the server, and the capacity is the limit per window.
#[derive(Args, Debug)]
#[command(after_help = "Exit status:
  0  every request was decided
  2  an option or a line is invalid; the decisions before it are printed, and the message names the line")]
pub(crate) struct Replay {
    /// File to read [default: standard input]
    pub(crate) file: Option<PathBuf>,

    /// Use this algorithm, with the exact arithmetic of the server
    #[arg(long, value_name = "NAME", value_parser = kind())]
    pub(crate) algorithm: Option<Kind>,

    /// Use the exact token bucket of the server, which has no rounding drift
    #[arg(long, conflicts_with = "algorithm")]
    pub(crate) exact: bool,

    /// Units that a bucket allows at one instant [default: the capacity]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) burst: Option<Cost>,

    /// When a fixed window starts [default: clock]
    #[arg(long, value_name = "WHERE", value_enum)]
    pub(crate) anchor: Option<WindowAnchor>,

    /// Decide in Redis or Valkey, with keys of their own that are removed at the end
    ///
    /// `redis://HOST:PORT`, `rediss://…`, `redis+cluster://HOST,HOST` or `redis+sentinel://HOST,HOST/NAME`.
    #[arg(long, value_name = "URL", verbatim_doc_comment)]
    pub(crate) store: Option<String>,

    /// Print each decision as one line of JSON, with times in units of the trace
    #[arg(long)]
    pub(crate) json: bool,
}

/// Compare the algorithms on the same simulated traffic.
///
/// The same options and seed always give the same traffic, and the server would make the same decisions. The limit is
/// --limit units per --window. A flag that has no effect together with the other flags is an error.
#[derive(Args, Debug)]
pub(crate) struct Simulate {
    /// Units that a client may use per window
    #[arg(long, value_name = "N", default_value_t = 10, allow_negative_numbers = true, value_parser = number::<Cost>)]
    pub(crate) limit: Cost,

    /// Length of the window, such as `500ms`, `10s` or `1m`
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration::parse)]
    pub(crate) window: Duration,

    /// Units that a bucket allows at one instant [default: the limit]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<Cost>)]
    pub(crate) burst: Option<Cost>,

    /// Algorithm to run; may be given several times [default: all six]
    #[arg(long = "algorithm", value_name = "NAME", value_parser = kind())]
    pub(crate) algorithms: Vec<Kind>,

    /// Traffic pattern
    ///
    /// steady: evenly spaced. bursty: groups at one instant. poisson: random gaps. ramp: from zero to twice the rate. spike:
    /// the whole limit just before a window ends and again just after. retry: evenly spaced, and denied requests are
    /// retried. greedy: several normal clients and one greedy client.
    #[arg(long, value_name = "NAME", default_value = Pattern::Steady.name(), value_parser = pattern())]
    pub(crate) pattern: Pattern,

    /// Request rate, such as `90/m`, `2.5/s` or `600/h`; must be a whole number per minute
    #[arg(long, value_name = "N/TIME", default_value = "90/m", value_parser = per_minute)]
    pub(crate) rate: u64,

    /// Length of the simulation, such as `30s` or `5m`
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration::parse)]
    pub(crate) duration: Duration,

    /// Random seed: for --pattern poisson, for the jitter of --pattern retry, and for --instances [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<u64>)]
    pub(crate) seed: Option<u64>,

    /// Units that each request charges
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true, value_parser = number::<Cost>)]
    pub(crate) cost: Cost,

    /// With --pattern retry: ignore Retry-After, and retry after --naive-wait
    #[arg(long)]
    pub(crate) naive: bool,

    /// With --pattern retry: retry exactly on time, without jitter
    #[arg(long)]
    pub(crate) no_jitter: bool,

    /// With --pattern retry --naive: time to wait before a retry [default: 200ms]
    #[arg(long, value_name = "TIME", requires = "naive", value_parser = duration::parse)]
    pub(crate) naive_wait: Option<Duration>,

    /// With --pattern retry: maximum number of attempts per request [default: 5]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<u64>)]
    pub(crate) attempts: Option<u64>,

    /// With --pattern greedy: number of normal clients [default: 3]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<u64>)]
    pub(crate) clients: Option<u64>,

    /// With --pattern greedy: requests of the greedy client per request of a normal one [default: 20]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<u64>)]
    pub(crate) greedy_factor: Option<u64>,

    /// With --pattern bursty: requests per group [default: 8]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<u64>)]
    pub(crate) burst_size: Option<u64>,

    /// Divide the quota between this many instances behind a random load balancer
    ///
    /// Each instance decides alone with its share of the limit and burst, as servers with `store = "memory"` do.
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true, value_parser = number::<u64>)]
    pub(crate) instances: u64,

    /// Print the JSON of `POST /v1/simulate` instead of a table
    #[arg(long)]
    pub(crate) json: bool,

    /// Also write a self-contained HTML report
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,

    /// Draw with ASCII characters only
    #[arg(long, conflicts_with = "json")]
    pub(crate) ascii: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum WindowAnchor {
    /// At multiples of the window on the clock
    Clock,
    /// At the first allowed request of a client after its previous window has ended
    FirstRequest,
}

impl From<WindowAnchor> for Anchor {
    fn from(anchor: WindowAnchor) -> Self {
        match anchor {
            WindowAnchor::Clock => Self::Clock,
            WindowAnchor::FirstRequest => Self::FirstRequest,
        }
    }
}

fn kind() -> impl clap::builder::TypedValueParser<Value = Kind> {
    PossibleValuesParser::new(Kind::ALL.map(Kind::name)).try_map(|name| name.parse::<Kind>())
}

/// Report what policies would have done to the requests of an access log.
///
/// Reads combined logs of nginx and Apache, JSON lines and CSV, plain or gzip, in the order given. Decides every request
/// under every policy, at the time in the log. Reports the share of requests and clients that would have been denied,
/// which clients are denied most and when, and the peak rates of clients. Unreadable lines are counted, and the first few are
/// shown.
#[derive(Args, Debug)]
#[command(
    after_help = "A policy is an algorithm (token_bucket, gcra, leaky_bucket, fixed_window, sliding_window_log, \
sliding_window_counter), a limit and a window, and optionally a burst for buckets: \"gcra 5/s\", \"fixed_window 1000/1h\".

Examples:
  tallygate backtest access.log --policy \"token_bucket 100/1m burst 20\" --suggest 99.9
      Try a limit, and find the lowest one that affects at most 0.1 % of clients.
  tallygate backtest access.log.gz --config tallygate.toml --html report.html
      Try the policies of a server.
  tallygate backtest access.log --where path=/login --status 401,403 --policy \"sliding_window_log 5/10m\"
      Try a limit on failed logins only.

Exit status:
  0  the report is complete
  1  a log could not be read to its end; the report covers the part before the error
  2  there is no report: an option is invalid, or no line can be used, for example because the filters leave none"
)]
pub(crate) struct Backtest {
    /// Log files to read; `-` is standard input [default: -]
    #[arg(value_name = "LOG")]
    pub(crate) logs: Vec<PathBuf>,

    /// Source of the key, by which clients are distinguished: `ip`, `header:NAME` or `field:NAME`
    #[arg(long, value_name = "KEY", default_value = "ip")]
    pub(crate) key: KeyFrom,

    /// Policy to try, such as `token_bucket 100/1m burst 20`; may be given several times
    ///
    /// Commas separate several limits of one policy, of which a request must pass all: `gcra 5/s, fixed_window 1000/1h`.
    /// With --config, the name of a policy in the file, or `NAME/TIER`.
    #[arg(long = "policy", value_name = "POLICY", required_unless_present = "config")]
    pub(crate) policies: Vec<String>,

    /// Try the policies of this configuration file: all of them, or the ones that --policy names
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Only use lines with this value, such as `path=/login`, `path=/api/*` or `method!=GET`; may be given several times
    ///
    /// A line must match every --where. FIELD is the name of a field or `header:NAME`, as in --key. `path`, `method` and
    /// `status` match the usual names of these fields in JSON and CSV. A `*` at the end matches any text. Paths are
    /// compared without their query.
    #[arg(long = "where", value_name = "FIELD=VALUE")]
    pub(crate) filters: Vec<LineFilter>,

    /// Only use lines with one of these status codes, such as `200`, `404,429` or `5xx`
    #[arg(long, value_name = "CODES", value_parser = LineFilter::status)]
    pub(crate) status: Option<LineFilter>,

    /// Ignore lines whose user agent contains this text, such as `bot`; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = LineFilter::exclude_agent)]
    pub(crate) exclude_agent: Vec<LineFilter>,

    /// Format of the log [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = format())]
    pub(crate) format: Option<Format>,

    /// Field with the time, in JSON and CSV [default: `time`, `timestamp`, `ts`, `@timestamp`, `msec`, …]
    #[arg(long, value_name = "FIELD")]
    pub(crate) time: Option<String>,

    /// For each policy, find the lowest limit that allows all requests of this percentage of clients, such as 99.9
    #[arg(long, value_name = "SHARE")]
    pub(crate) suggest: Option<Share>,

    /// Window in which the peak rates of clients are measured [default: the window of the first policy]
    #[arg(long, value_name = "WINDOW", value_parser = limit_syntax::window)]
    pub(crate) peak: Option<Ticks>,

    /// Number of most-denied clients to list
    #[arg(long, value_name = "N", default_value_t = 10, allow_negative_numbers = true, value_parser = number::<usize>)]
    pub(crate) top: usize,

    /// Also write an HTML report with plots
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,

    /// Print the report as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

fn format() -> impl clap::builder::TypedValueParser<Value = Format> {
    let value = |format: Format| {
        PossibleValue::new(format.name()).help(match format {
            Format::Combined => "Combined and common logs of nginx and Apache",
            Format::Json => "One JSON object per line",
            Format::Csv => "Values separated by commas, semicolons or tabs, with a header line",
        })
    };
    PossibleValuesParser::new(Format::ALL.map(value)).try_map(|name| name.parse::<Format>())
}

fn pattern() -> impl clap::builder::TypedValueParser<Value = Pattern> {
    PossibleValuesParser::new(Pattern::ALL.map(Pattern::name))
        .try_map(|name| Pattern::of_name(&name).ok_or("unknown pattern"))
}

/// Parses a rate such as `2.5/s` and returns the requests per minute, which must be a whole number.
fn per_minute(rate: &str) -> Result<u64, String> {
    let expected = || format!("found `{rate}`; expected a rate such as 90/m, 2.5/s or 600/h");
    let (number, unit) = rate.split_once('/').ok_or_else(expected)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let is_number = |digits: &str| {
        (1..=9).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit())
    };
    if !is_number(whole) || !is_number(fraction) {
        return Err(expected());
    }
    let number = |digits: &str| digits.parse::<u64>().map_err(|_| expected());
    // In billionths, which nine digits after the point cannot exceed.
    let billionths = number(whole)? * BILLION + number(&format!("{fraction:0<9}"))?;
    let (times, per) = match unit {
        "s" => (60, BILLION),
        "m" => (1, BILLION),
        "h" => (1, 60 * BILLION),
        _ => return Err(expected()),
    };
    let requests = u128::from(billionths) * times;
    if !requests.is_multiple_of(per.into()) {
        return Err(format!(
            "{rate} is not a whole number of requests per minute; use a rate such as 90/m, 2.5/s or 600/h"
        ));
    }
    u64::try_from(requests / u128::from(per)).map_err(|_| expected())
}

const BILLION: u64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_a_whole_number_per_minute() {
        for (rate, expected) in [
            ("90/m", 90),
            ("2/s", 120),
            ("2.5/s", 150),
            ("0.05/s", 3),
            ("600/h", 10),
            ("1.50/m", 0),
        ] {
            assert_eq!(per_minute(rate).unwrap_or(0), expected, "{rate}");
        }
        for bad in
            ["", "90", "/s", "./s", "1./s", ".5/s", "-1/s", "1e3/s", "1/d", "1.23/s", "1,5/s"]
        {
            assert!(per_minute(bad).is_err(), "{bad}");
        }
    }
}
