//! The binary `tallygate`: arguments, and one call into the server or the lab.
//!
//! Arguments are parsed in `cli.rs`. Each command is a module with one `run`, or a call into `tallygate-server`.

mod backtest;
mod check;
mod cli;
mod replay;
mod simulate;

use std::io::{self, Write as _};
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
            let (mut command, mut script) = (cli::Cli::command(), Vec::new());
            clap_complete::generate(options.shell, &mut command, "tallygate", &mut script);
            print(&script)
        }
        Command::Man(options) => write_manual(options.folder.as_deref()),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            // If standard error is closed, the exit code still reports the failure.
            let _ = writeln!(io::stderr(), "tallygate: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Writes one manual page per command to a folder, or the main page to standard output.
fn write_manual(folder: Option<&Path>) -> anyhow::Result<ExitCode> {
    let command = cli::Cli::command();
    let Some(folder) = folder else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        return print(&page);
    };
    clap_mangen::generate_to(command, folder)
        .with_context(|| format!("cannot write manual pages to {}", folder.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints a text.
fn print(text: &[u8]) -> anyhow::Result<ExitCode> {
    unless_closed(io::stdout().lock().write_all(text))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the result of printing. It is no error that the reader of the output, such as `head`, has closed it.
fn unless_closed(printed: io::Result<()>) -> io::Result<()> {
    match printed {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        printed => printed,
    }
}
