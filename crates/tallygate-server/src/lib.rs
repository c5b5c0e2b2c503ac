//! What the binary `tallygate` is made of: a library only so that tests and fuzzers reach its
//! parsers. Nothing of it is promised to anybody but `main.rs`.
//!
//! Flags are parsed in `cli.rs`; each command is a module with one `run`. `serve` is `server.rs`: its surfaces
//! (`http.rs`, `resp.rs`) ask the gate (`gate.rs`), which holds the policies of the configuration (`config.rs`).
#![doc(hidden)]

mod aside;
mod backtest;
mod check;
mod cli;
mod config;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod gate;
mod http;
mod logs;
mod machine;
mod metrics;
mod random;
mod repeats;
mod replay;
mod resp;
mod server;
mod simulate;
mod spelling;
#[cfg(feature = "otlp")]
mod traces;
#[cfg(not(feature = "otlp"))]
#[path = "no_traces.rs"]
mod traces;
mod turn;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use cli::Command;
use logs::Logs;

/// Runs the command that the command line names; how it ended.
#[must_use]
pub fn main() -> ExitCode {
    let cli::Cli { command } = cli::Cli::parse();
    let result = match command {
        Command::Serve(options) => {
            let logs = Logs::start(options.log, options.log_format);
            let served = server::run(&options);
            if let Err(error) = &served {
                logs.say(format!("tallygate: {error:#}"));
            }
            logs.flush();
            return if served.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(2) };
        }
        Command::CheckConfig(options) => config::show(&options.file).map(|()| ExitCode::SUCCESS),
        Command::Check(options) => check::run(&options),
        Command::Ping(options) => check::ping(&options),
        Command::Replay(options) => replay::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Backtest(options) => backtest::run(&options),
        Command::Simulate(options) => simulate::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Completions(options) => {
            let mut command = cli::Cli::command();
            clap_complete::generate(
                options.shell,
                &mut command,
                "tallygate",
                &mut std::io::stdout(),
            );
            Ok(ExitCode::SUCCESS)
        }
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            // Where nobody can be told, the exit code still tells.
            let _ = writeln!(std::io::stderr(), "tallygate: {error:#}");
            ExitCode::from(2)
        }
    }
}
