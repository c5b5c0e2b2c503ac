//! What can be asked for on the command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser as _};
use clap::{Args, Parser, Subcommand, ValueEnum};
use tallygate_core::{Anchor, Cost, Kind, Limit, Ticks};
use tallygate_lab::backtest::{Format, KeyFrom, Share};
use tallygate_lab::simulate::Pattern;
use tallygate_lab::spelling;
use tallygate_server::ServeOptions;

/// A rate limiter that decides exactly.
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
}

const SERVE: &str = "\
Examples:
  tallygate serve
      Try it: the page is at http://127.0.0.1:8080, and it says what else to ask.
  tallygate serve --config tallygate.toml --http 0.0.0.0:8080
      Your policies, for a network.
  tallygate serve --config tallygate.toml --store redis://127.0.0.1:6379
      The same quota for all servers on one Redis or Valkey.
  tallygate serve --http unix:/run/tallygate.sock --resp 127.0.0.1:0
      A socket for a proxy beside it, and a free port.

Configuration:
  [policies.api]                    # asked for by this name
  algorithm = \"token_bucket\"        # or gcra, leaky_bucket, fixed_window, sliding_window_log, sliding_window_counter
  limit = 100
  window = \"1m\"
  burst = 200                       # for buckets; without it the limit

  Flags and environment variables go before the file. `tallygate check-config FILE` says what a file comes to, or what is
  wrong with it. All of it is in docs/server.md.

Signals:
  SIGHUP            read the configuration anew; one that is wrong changes nothing, and is logged
  SIGTERM, SIGINT   be unready, answer what has come, stop

Exit status:
  0  it was told to stop, and answered what had come; what takes longer than 10 s is dropped, and logged
  2  it could not start, or not save its clients at the end: the message says why";

/// A time that is not none.
fn some_time(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err("expected a time such as 30s or 5m".to_owned()),
    }
}

/// Serve decisions over HTTP and RESP.
///
/// Without a configuration it listens on loopback with a policy to try things with, and says what to try. Prints the
/// addresses it listens on, one a line, then `tallygate ready`. Stops on SIGTERM or SIGINT when its connections have
/// ended, reads its configuration anew on SIGHUP and when the file changes.
#[derive(Args, Debug)]
#[command(after_long_help = SERVE)]
pub(crate) struct Serve {
    /// The configuration, in TOML
    #[arg(long, value_name = "FILE", env = "TALLYGATE_CONFIG")]
    pub(crate) config: Option<PathBuf>,

    /// Where to listen for HTTP: `HOST:PORT` or `unix:/path`; port 0 picks a free one [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR", env = "TALLYGATE_HTTP")]
    pub(crate) http: Option<String>,

    /// Where to listen for RESP [default: 127.0.0.1:6380]
    #[arg(long, value_name = "ADDR", env = "TALLYGATE_RESP")]
    pub(crate) resp: Option<String>,

    /// Where clients are kept: `memory`, or redis://, rediss://, redis+cluster:// or redis+sentinel:// [default: memory]
    #[arg(
        long,
        value_name = "STORE",
        env = "TALLYGATE_STORE",
        hide_env_values = true,
        verbatim_doc_comment
    )]
    pub(crate) store: Option<String>,

    /// The most clients that are kept in memory, for each policy
    #[arg(long, value_name = "N", env = "TALLYGATE_MAX_KEYS", default_value_t = 1_000_000)]
    pub(crate) max_keys: usize,

    /// A file in which clients are saved when it stops, and read when it starts; for the store in memory
    #[arg(long, value_name = "PATH", env = "TALLYGATE_SNAPSHOT")]
    pub(crate) snapshot: Option<PathBuf>,

    /// Save them every so often as well, such as `30s`
    #[arg(long, value_name = "TIME", env = "TALLYGATE_SNAPSHOT_EVERY", value_parser = some_time)]
    pub(crate) snapshot_every: Option<Duration>,

    /// Where to send traces of requests, over OTLP: `http://HOST:PORT`; without it where `OTEL_EXPORTER_OTLP_ENDPOINT` says
    #[cfg(feature = "otlp")]
    #[arg(
        long,
        value_name = "URL",
        env = "TALLYGATE_OTLP",
        hide_env_values = true,
        verbatim_doc_comment
    )]
    pub(crate) otlp: Option<String>,

    /// How much is logged
    #[arg(long, value_name = "LEVEL", env = "TALLYGATE_LOG", value_enum, default_value_t = LogLevel::Info)]
    pub(crate) log: LogLevel,

    /// How it is logged, to standard error
    #[arg(long, value_name = "FORMAT", env = "TALLYGATE_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,
}

impl Serve {
    /// Returns what a server is started with.
    pub(crate) fn options(self) -> ServeOptions {
        ServeOptions {
            config: self.config,
            http: self.http,
            resp: self.resp,
            store: self.store,
            max_keys: self.max_keys,
            snapshot: self.snapshot,
            snapshot_every: self.snapshot_every,
            #[cfg(feature = "otlp")]
            otlp: self.otlp,
            #[cfg(not(feature = "otlp"))]
            otlp: None,
            log: self.log.into(),
            log_format: self.log_format.into(),
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

/// Say what is wrong with a configuration, or what it comes to.
#[derive(Args, Debug)]
pub(crate) struct CheckConfig {
    /// The configuration, in TOML
    pub(crate) file: PathBuf,
}

const CHECK: &str = "\
Examples:
  tallygate check demo \"$USER\" && make deploy
      Only as often as the policy lets you.
  until tallygate check --quiet mail \"$address\"; do sleep 1; done
      When there is room.

Exit status:
  0  allowed
  1  refused; standard output says when to come back
  2  no answer: the message says why";

const PING: &str = "\
Examples:
  tallygate ping
  tallygate ping --resp unix:/run/tallygate/resp.sock

It needs neither a policy nor a token, so it suits health checks.";

/// Ask a server whether a client may do something now: exit code 0 if so, 1 if not, 2 if it cannot be asked.
#[derive(Args, Debug)]
#[command(after_long_help = CHECK)]
pub(crate) struct Check {
    /// The policy
    pub(crate) policy: String,

    /// The client
    pub(crate) key: String,

    /// How much is asked for [default: the policy's]
    #[arg(long, value_name = "N")]
    pub(crate) cost: Option<Cost>,

    /// The client's tier
    #[arg(long, value_name = "NAME")]
    pub(crate) tier: Option<String>,

    /// A file with the token to ask with, in its first line
    #[arg(long, value_name = "FILE", env = "TALLYGATE_TOKEN_FILE")]
    pub(crate) token_file: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) to: Connect,

    /// Print nothing
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// Ask a server whether it is there: exit code 0 if it answers, 2 if not.
#[derive(Args, Debug)]
#[command(after_long_help = PING)]
pub(crate) struct Ping {
    #[command(flatten)]
    pub(crate) to: Connect,
}

/// Where a server is, and how it is spoken to.
#[derive(Args, Debug)]
pub(crate) struct Connect {
    /// Where the server listens for RESP: `HOST:PORT` or `unix:/path`
    #[arg(long, value_name = "ADDR", env = "TALLYGATE_RESP", default_value = "127.0.0.1:6380")]
    pub(crate) resp: String,

    /// Speak TLS, and trust the certificates of this file (PEM)
    #[arg(long, value_name = "FILE", env = "TALLYGATE_CA")]
    pub(crate) ca: Option<PathBuf>,

    /// Show the certificate of this file to a server that asks for one (PEM)
    #[arg(long, value_name = "FILE", env = "TALLYGATE_CERT", requires_all = ["ca", "cert_key"])]
    pub(crate) cert: Option<PathBuf>,

    /// The private key of that certificate (PEM)
    #[arg(long, value_name = "FILE", env = "TALLYGATE_CERT_KEY", requires = "cert")]
    pub(crate) cert_key: Option<PathBuf>,
}

/// Print completions for a shell.
#[derive(Args, Debug)]
pub(crate) struct Completions {
    pub(crate) shell: clap_complete::Shell,
}

/// Decide a trace of requests in virtual time.
///
/// Reads a line with the capacity, a line with the window, a line with the number of instructions n,
/// then n lines `request CLIENT TIMESTAMP [COST]`. Prints `allow` or `deny` a request. Lines with
/// another first word count and are skipped, blank lines do not count, lines after the n-th are
/// ignored.
///
/// Without options it follows the textbook token bucket in whole units of time to the letter,
/// including its drift. With --exact or --algorithm it decides as Tallygate does in production, and
/// the capacity is the limit of each window.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit code 2 means bad input or bad options: the message says which line, what \
was found and what was expected. Results of the lines before it are printed."
)]
pub(crate) struct Replay {
    /// Where to read; standard input without it
    pub(crate) file: Option<PathBuf>,

    /// Decide by one of the six algorithms of production
    #[arg(long, value_name = "NAME", value_parser = kind())]
    pub(crate) algorithm: Option<Kind>,

    /// Decide by the drift-free token bucket of production (the others have no drift to lose)
    #[arg(long)]
    pub(crate) exact: bool,

    /// The most that is admitted at one instant, for buckets [default: the capacity]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(Cost).range(1..))]
    pub(crate) burst: Option<Cost>,

    /// Where a fixed window starts [default: clock]
    #[arg(long, value_name = "WHERE", value_enum)]
    pub(crate) anchor: Option<WindowAnchor>,

    /// Keep the clients in Redis or Valkey, under names of this run that are removed at its end
    ///
    /// `redis://HOST:PORT`, `rediss://…`, `redis+cluster://HOST,HOST` or `redis+sentinel://HOST,HOST/NAME`. The
    /// times are those of the trace.
    #[arg(long, value_name = "URL", verbatim_doc_comment)]
    pub(crate) store: Option<String>,

    /// Print each decision as a line of JSON, with times in units of the trace
    #[arg(long)]
    pub(crate) json: bool,
}

/// See what each algorithm would do to the same traffic.
///
/// The traffic is made up, in virtual time, and is the same for the same options and seed. The limit is `limit` per
/// `window`; every decision is the one that would be served.
#[derive(Args, Debug)]
pub(crate) struct Simulate {
    /// How much a client may use a window
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(crate) limit: Cost,

    /// The window
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = humantime::parse_duration)]
    pub(crate) window: Duration,

    /// The most that is admitted at one instant, for buckets [default: the limit]
    #[arg(long, value_name = "N")]
    pub(crate) burst: Option<Cost>,

    /// An algorithm to show; may be given several times [default: all six]
    #[arg(long = "algorithm", value_name = "NAME", value_parser = kind())]
    pub(crate) algorithms: Vec<Kind>,

    /// How requests come
    ///
    /// steady: evenly. bursty: groups at one instant. poisson: at random. ramp: from none to twice the rate. spike: the
    /// limit just before a window's end and again just after, and little besides. retry: evenly, and whoever is refused
    /// comes again. greedy: some polite clients, and one that is not.
    #[arg(long, value_name = "NAME", default_value = Pattern::Steady.name(), value_parser = pattern())]
    pub(crate) pattern: Pattern,

    /// How many come, as `90/m`, `2/s` or `600/h`; whole requests a minute
    #[arg(long, value_name = "N/TIME", default_value = "90/m", value_parser = per_minute)]
    pub(crate) rate: u64,

    /// How long it goes on
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = humantime::parse_duration)]
    pub(crate) duration: Duration,

    /// What chance is made of: the same seed, the same traffic
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,

    /// What a request uses
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) cost: Cost,

    /// retry: come again after --naive-wait, whatever was said
    #[arg(long)]
    pub(crate) naive: bool,

    /// retry: come again on time, and not a random part later
    #[arg(long)]
    pub(crate) no_jitter: bool,

    /// retry: how long the naive wait
    #[arg(long, value_name = "TIME", default_value = "200ms", value_parser = humantime::parse_duration)]
    pub(crate) naive_wait: Duration,

    /// retry: how often a request is tried
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) attempts: u64,

    /// greedy: how many polite clients there are
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) clients: u64,

    /// greedy: how many times as much as a polite client the greedy one sends
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub(crate) greedy_factor: u64,

    /// bursty: how many come at one instant
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) burst_size: u64,

    /// Print what `POST /v1/simulate` replies instead of a table
    #[arg(long)]
    pub(crate) json: bool,

    /// Also write a report that stands alone
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,

    /// Draw with characters of ASCII only
    #[arg(long)]
    pub(crate) ascii: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum WindowAnchor {
    /// On multiples of the window
    Clock,
    /// At the first request admitted after the client was fresh
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

/// Say what limits would have done to the requests of a log.
///
/// Reads combined logs of nginx and Apache, JSON lines and CSV, plain or gzip, in the order given, and decides every
/// request under every policy, in the time of the log. Tells what share of requests and clients would have been
/// refused, who is hit hardest and when, and how busy clients are at their peak. Lines that cannot be read are counted,
/// and the first few are shown.
#[derive(Args, Debug)]
#[command(
    after_help = "A policy is an algorithm (token_bucket, gcra, leaky_bucket, fixed_window, sliding_window_log, \
sliding_window_counter), a limit and a window, and for buckets perhaps a burst: \"gcra 5/s\", \"fixed_window 1000/1h\".

Exit code 1 means that a log could not be read to its end; 2 that nothing was decided."
)]
pub(crate) struct Backtest {
    /// Where to read; standard input without any, or for `-`
    #[arg(value_name = "LOG")]
    pub(crate) logs: Vec<PathBuf>,

    /// Whose requests they are: `ip`, `header:NAME` or `field:NAME`
    #[arg(long, value_name = "KEY", default_value = "ip")]
    pub(crate) key: KeyFrom,

    /// A policy to try, such as `token_bucket 100/1m burst 20`; may be given several times
    #[arg(long = "policy", value_name = "POLICY", required = true, value_parser = spelling::parse)]
    pub(crate) policies: Vec<Limit>,

    /// How lines are written [default: found out]
    #[arg(long, value_name = "FORMAT", value_parser = format())]
    pub(crate) format: Option<Format>,

    /// The field with the time, in JSON and CSV (without it `time`, `timestamp`, `ts`, `@timestamp`, `msec`, …)
    #[arg(long, value_name = "FIELD")]
    pub(crate) time: Option<String>,

    /// Find for each policy the least limit that would have spared this share of clients, in percent, such as 99.9
    #[arg(long, value_name = "SHARE")]
    pub(crate) suggest: Option<Share>,

    /// The window of the clients' peaks [default: that of the first policy]
    #[arg(long, value_name = "WINDOW", value_parser = spelling::window)]
    pub(crate) peak: Option<Ticks>,

    /// How many of the clients that are hit hardest are told
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(crate) top: usize,

    /// Also write a page with plots
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,

    /// Print the figures as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

fn format() -> impl clap::builder::TypedValueParser<Value = Format> {
    let value = |format: Format| {
        PossibleValue::new(format.name()).help(match format {
            Format::Combined => "nginx's and Apache's combined and common logs",
            Format::Json => "A JSON object a line",
            Format::Csv => "Values with commas, semicolons or tabs between them, under a header",
        })
    };
    PossibleValuesParser::new(Format::ALL.map(value)).try_map(|name| name.parse::<Format>())
}

fn pattern() -> impl clap::builder::TypedValueParser<Value = Pattern> {
    PossibleValuesParser::new(Pattern::ALL.map(Pattern::name))
        .try_map(|name| Pattern::of_name(&name).ok_or("no such pattern"))
}

/// Whole requests a minute, written as a number of requests in a unit of time.
fn per_minute(rate: &str) -> Result<u64, String> {
    let expected = || format!("found `{rate}`; expected a rate such as 90/m, 2/s or 600/h");
    let (number, unit) = rate.split_once('/').ok_or_else(expected)?;
    let number: u64 = number.parse().map_err(|_| expected())?;
    match unit {
        "s" => number.checked_mul(60).ok_or_else(expected),
        "m" => Ok(number),
        "h" if number.is_multiple_of(60) => Ok(number / 60),
        "h" => Err(format!("{rate} is no whole number a minute; use a multiple of 60/h")),
        _ => Err(expected()),
    }
}
