//! What the command line says about a server.

use std::path::PathBuf;
use std::time::Duration;

use crate::logs::{LogFormat, LogLevel};

/// How a server is started. A field that is set here goes before the same field of the configuration.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The configuration file. Without it the server serves a policy to try things with.
    pub config: Option<PathBuf>,
    /// Where to listen for HTTP: `HOST:PORT` or `unix:/path`.
    pub http: Option<String>,
    /// Where to listen for RESP.
    pub resp: Option<String>,
    /// Where clients are kept: `memory`, or the URL of a Redis server.
    pub store: Option<String>,
    /// Maximum number of clients kept in memory per policy.
    pub max_keys: usize,
    /// The file that clients are saved in.
    pub snapshot: Option<PathBuf>,
    /// How often clients are saved while the server runs.
    pub snapshot_every: Option<Duration>,
    /// Where to send traces, over OTLP; ignored without the feature `otlp`.
    pub otlp: Option<String>,
    /// Log level.
    pub log: LogLevel,
    /// Format of log lines.
    pub log_format: LogFormat,
}
