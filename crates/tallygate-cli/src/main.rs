//! The binary `tallygate`: arguments, and one call into the server or the lab.
//!
//! Arguments are parsed in `cli.rs`. Each command is a module with one `run`, or a call into `tallygate-server`.

mod backtest;
mod check;
mod cli;
mod replay;
mod simulate;

use std::io::Write as _;
use std::process::ExitCode;

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
            tallygate_server::check_config(&options.file).map(|()| ExitCode::SUCCESS)
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
