//! The Tallygate server: configuration, gate, HTTP, RESP, gRPC, metrics and the page.
//!
//! To run a server from Rust, fill in [`ServeOptions`] and call [`serve`]. To run it from the command line, use the
//! binary `tallygate` of the crate `tallygate-cli`. To use limits within a program, use the crate `tallygate` instead.
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `otlp` | traces for a collector, over OTLP |

#![cfg_attr(docsrs, feature(doc_cfg))]

mod background;
mod client_budgets;
mod config;
mod connection;
mod descriptors;
mod envoy;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod gate;
mod grpc;
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
mod striped;
#[cfg(feature = "otlp")]
mod traces;
#[cfg(not(feature = "otlp"))]
#[path = "no_traces.rs"]
mod traces;
mod turn;

pub use config::{ConfiguredPolicy, configured_policies, tokens_of};
pub use logs::{LogFormat, LogLevel};
pub use options::{ServeOptions, check_config};

/// Runs a server until SIGTERM or SIGINT shuts it down. Errors are also logged to standard error.
///
/// # Errors
/// Returns an error if the server cannot start, or cannot write its snapshot on shutdown.
pub fn serve(options: &ServeOptions) -> anyhow::Result<()> {
    let logs = logs::Logs::start(options.log, options.log_format);
    let served = server::run(options);
    if let Err(error) = &served {
        match options.log_format {
            LogFormat::Text => logs.write_line(format!("tallygate: {error:#}")),
            LogFormat::Json => {
                tracing::error!(error = format!("{error:#}"), "the server failed; exiting");
            }
        }
    }
    logs.flush();
    served
}
