//! `tallygate replay`: reads a trace and prints a decision per request.

use std::fs::File;
use std::io::{self, Read, Write as _};

use anyhow::Context as _;
use tallygate_core::Anchor;
use tallygate_lab::replay;

use crate::cli::Replay;

/// Decides the trace, and reports the lines that were ignored on standard error. Decisions before an error are printed first.
pub(crate) fn run(options: &Replay) -> anyhow::Result<()> {
    let &Replay { algorithm, exact, burst, json, .. } = options;
    let anchor = options.anchor.map(Anchor::from);
    let rule = replay::Options { algorithm, exact, burst, anchor, json };
    let replay = replay::Replay::new(&rule, options.store.as_deref())?;
    let input: Box<dyn Read> = match &options.file {
        None => Box::new(io::stdin().lock()),
        Some(path) => {
            let shown = path.display();
            Box::new(File::open(path).with_context(|| format!("cannot open {shown}"))?)
        }
    };
    match replay.run(input, io::stdout().lock()) {
        // The reader of the output has closed it: `head`, for example.
        Err(error) if is_broken_pipe(&error) => Ok(()),
        Err(error) => Err(error),
        Ok(ignored) => {
            for line in ignored.to_string().lines() {
                // The decisions are complete, so a closed standard error is not a failure.
                let _ = writeln!(io::stderr(), "tallygate: {line}");
            }
            Ok(())
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
