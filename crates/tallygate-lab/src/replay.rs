//! Replays: what a limit does to a trace.
//!
//! Input comes in chunks; the requests of a chunk are looked up and decided in batches; what they
//! were answered goes out before the next chunk is waited for. So memory grows with the clients
//! alone, and whoever types requests by hand is answered line by line.

mod clients;
mod engine;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod lines;
mod remote;

use std::io::{Read, Write};

use anyhow::Context as _;
use tallygate_core::{Anchor, Cost, Kind};

use crate::instruction::Instruction;
use clients::Batch;
pub(crate) use clients::{Clients, Request};
use engine::{Engine, Rule};
pub(crate) use lines::{Line, Lines, MAX_LINE};
use remote::Remote;

/// Which rule decides a trace, and how decisions are printed.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// One of the six algorithms of production.
    pub algorithm: Option<Kind>,
    /// The drift-free token bucket of production. Without it and without `algorithm`, the textbook rule decides.
    pub exact: bool,
    /// The most that is admitted at one instant, for buckets; the capacity without it.
    pub burst: Option<Cost>,
    /// Where a fixed window starts.
    pub anchor: Option<Anchor>,
    /// Prints each decision as a line of JSON.
    pub json: bool,
}

/// A replay that is ready to read its trace.
#[derive(Debug)]
pub struct Replay {
    rule: Rule,
    store: Option<Remote>,
}

impl Replay {
    /// Returns a replay by these options. `store` is the URL of a Redis server that keeps the clients; without it they are
    /// kept in memory.
    ///
    /// # Errors
    /// The options contradict each other, or the URL is not one.
    pub fn new(options: &Options, store: Option<&str>) -> anyhow::Result<Self> {
        let rule = Rule::new(options)?;
        Ok(Self { rule, store: store.map(Remote::open).transpose()? })
    }

    /// Decides the trace. The decisions before an error are written before the error is returned.
    ///
    /// # Errors
    /// A line cannot be read, the store does not answer, or `output` fails with an [`std::io::Error`].
    pub fn run(self, input: impl Read, output: impl Write) -> anyhow::Result<()> {
        replay(&self.rule, self.store, Lines::new(input), output)
    }
}

fn replay(
    rule: &Rule,
    store: Option<Remote>,
    mut lines: Lines<impl Read>,
    mut output: impl Write,
) -> anyhow::Result<()> {
    let capacity = number(&mut lines, "the capacity, a whole 64-bit number")?;
    rule.accepts("limit", capacity).with_context(|| lines.place())?;
    let window = number(&mut lines, "the window, a whole 64-bit number")?;
    rule.accepts("window", window).with_context(|| lines.place())?;
    let mut engine = rule.engine(capacity, window, store).with_context(|| lines.place())?;
    let expected = "the number of instructions, a whole number, 0 or more";
    let count = number(&mut lines, expected)?;
    let Ok(count) = u64::try_from(count) else {
        anyhow::bail!("{}: found `{count}`; expected {expected}", lines.place());
    };

    let mut clients = Clients::default();
    let mut answers = Vec::new();
    let mut left = count;
    while left > 0 {
        let result = decide_here(&mut lines, &mut left, &mut clients, &mut *engine, &mut answers);
        output.write_all(&answers)?;
        output.flush()?;
        answers.clear();
        result?;
        if left > 0 && !lines.read_more()? {
            let done = count - left;
            anyhow::bail!(
                "line {}: the input ended after {done} instructions; expected {count}",
                lines.taken() + 1
            );
        }
    }
    Ok(())
}

/// Decides the instructions on the lines that are here.
fn decide_here(
    lines: &mut Lines<impl Read>,
    left: &mut u64,
    clients: &mut Clients,
    engine: &mut dyn Engine,
    answers: &mut Vec<u8>,
) -> anyhow::Result<()> {
    let mut here = lines.here();
    let mut batch = Batch::default();
    let mut read = || -> anyhow::Result<()> {
        while *left > 0 {
            let Some(line) = here.next() else { break };
            let line = whole(&line, here.taken())?;
            match Instruction::parse(line).map_err(|error| error.at_line(here.taken()))? {
                None => continue,
                Some(Instruction::Other) => {}
                Some(Instruction::Request { client, now, cost }) => {
                    if batch.is_full() {
                        engine.decide(batch.resolve(clients), answers)?;
                    }
                    batch.add(clients, client, now, cost);
                }
            }
            *left -= 1;
        }
        Ok(())
    };
    let result = read();
    let decided = engine.decide(batch.resolve(clients), answers);
    let place = here.place();
    lines.take(place);
    result.and(decided)
}

fn whole<'a>(line: &Line<'a>, number: usize) -> anyhow::Result<&'a [u8]> {
    match *line {
        Line::Whole(line) => Ok(line),
        Line::TooLong => anyhow::bail!(
            "line {number}: found more than {MAX_LINE} bytes; expected a shorter line"
        ),
    }
}

/// The number on the next line that is not blank.
fn number(lines: &mut Lines<impl Read>, expected: &'static str) -> anyhow::Result<i64> {
    loop {
        let mut here = lines.here();
        while let Some(line) = here.next() {
            let line = whole(&line, here.taken())?;
            let number = Instruction::parse_number(line, expected)
                .map_err(|error| error.at_line(here.taken()))?;
            if let Some(number) = number {
                let place = here.place();
                lines.take(place);
                return Ok(number);
            }
        }
        let place = here.place();
        lines.take(place);
        if !lines.read_more()? {
            anyhow::bail!("line {}: the input ended; expected {expected}", lines.taken() + 1);
        }
    }
}
