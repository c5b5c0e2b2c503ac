//! The Tallygate server: configuration, gate, HTTP, RESP, metrics and the page.
//!
//! [`serve`] runs a server until it is told to stop. Its surfaces (`http.rs`, `resp.rs`) ask the gate (`gate.rs`), which
//! holds the policies of the configuration (`config.rs`). The binary `tallygate` (crate `tallygate-cli`) parses the
//! arguments.

mod aside;
mod config;
mod connection;
mod descriptors;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod gate;
mod holdings;
mod http;
mod logs;
mod metrics;
mod options;
mod peer;
mod random;
mod repeats;
mod resp;
mod server;
mod shared;
#[cfg(feature = "otlp")]
mod traces;
#[cfg(not(feature = "otlp"))]
#[path = "no_traces.rs"]
mod traces;
mod turn;

pub use config::{show as check_config, tokens_of};
pub use logs::{LogFormat, LogLevel};
pub use options::ServeOptions;

/// Runs a server until it is told to stop. What goes wrong is logged to standard error, too.
///
/// # Errors
/// The server could not start, or could not save its clients at the end.
pub fn serve(options: &ServeOptions) -> anyhow::Result<()> {
    let logs = logs::Logs::start(options.log, options.log_format);
    let served = server::run(options);
    if let Err(error) = &served {
        logs.say(format!("tallygate: {error:#}"));
    }
    logs.flush();
    served
}
