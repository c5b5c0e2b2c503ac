//! The binary `tallygate`: arguments, and one call into the server or the lab.
//!
//! Arguments are parsed in `cli.rs`. Each command is a module with one `run`, or a call into `tallygate-server`.

mod backtest;
mod check;
mod cli;
mod replay;
mod simulate;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};

use cli::Command;

fn main() -> ExitCode {
    let cli::Cli { command } = cli::Cli::parse();
    let result = match command {
        Command::Serve(options) => {
            // A failure is in the log.
            let served = tallygate_server::serve(&options.options());
            return if served.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(2) };
        }
        Command::CheckConfig(options) => {
            tallygate_server::check_config(&options.options()).map(|()| ExitCode::SUCCESS)
        }
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
        Command::Man(options) => write_manual(options.folder.as_deref()),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            // If standard error is closed, the exit code still reports the failure.
            let _ = writeln!(std::io::stderr(), "tallygate: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Writes one manual page per command to a folder, or the main page to standard output.
fn write_manual(folder: Option<&Path>) -> anyhow::Result<ExitCode> {
    let command = cli::Cli::command();
    match folder {
        Some(folder) => clap_mangen::generate_to(command, folder)
            .with_context(|| format!("cannot write manual pages to {}", folder.display()))?,
        None => clap_mangen::Man::new(command).render(&mut std::io::stdout().lock())?,
    }
    Ok(ExitCode::SUCCESS)
}
