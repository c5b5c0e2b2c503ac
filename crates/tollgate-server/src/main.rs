//! The binary `tollgate`.
//!
//! Flags are parsed in `cli.rs`; each command is a module with one `run`.

mod cli;
mod config;
mod gate;
mod metrics;
mod replay;

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    let cli::Cli { command } = cli::Cli::parse();
    let result = match command {
        cli::Command::Replay(options) => replay::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Where nobody can be told, the exit code still tells.
            let _ = writeln!(std::io::stderr(), "tollgate: {error:#}");
            ExitCode::from(2)
        }
    }
}
