//! Replays a trace of requests against one limit and prints a decision per request.
//!
//! The input is read in chunks. The requests of a chunk are decided in batches, and their results are written before the
//! next chunk is read. Memory therefore grows with the number of clients only, and a user who types requests gets each
//! result at once.

mod clients;
mod engine;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod lines;
mod remote;

use std::borrow::Cow;
use std::fmt;
use std::io::{Read, Write};

use anyhow::Context as _;
use tallygate_core::{Anchor, Cost, Kind};

use crate::instruction::Instruction;
use clients::RequestBatch;
pub(crate) use clients::{Clients, Request};
use engine::{Engine, RuleTemplate};
pub(crate) use lines::{Line, Lines, MAX_LINE};
use remote::RedisRun;

/// The context of an error of the input.
const UNREADABLE: &str = "cannot read the input";

/// The rule that decides a trace, and the output format.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// One of the six production algorithms.
    pub algorithm: Option<Kind>,
    /// Use the exact token bucket. If this is false and `algorithm` is `None`, the textbook rule decides.
    pub exact: bool,
    /// The burst of a bucket. The default is the capacity.
    pub burst: Option<Cost>,
    /// The start of a fixed window.
    pub anchor: Option<Anchor>,
    /// Print each decision as a line of JSON.
    pub json: bool,
}

/// A replay that is ready to read its trace.
#[derive(Debug)]
pub struct Replay {
    rule: RuleTemplate,
    store: Option<RedisRun>,
}

impl Replay {
    /// Creates a replay. `store` is the URL of a Redis server that keeps the clients' states; without it, memory does.
    ///
    /// # Errors
    /// Returns an error if the options contradict each other or the URL is not valid.
    pub fn new(options: &Options, store: Option<&str>) -> anyhow::Result<Self> {
        let rule = RuleTemplate::new(options)?;
        Ok(Self { rule, store: store.map(RedisRun::open).transpose()? })
    }

    /// Decides the trace and returns the lines that were ignored. If a line fails, the decisions before it are written
    /// first.
    ///
    /// Reading stops after the last instruction. Only lines that have been read by then are reported as ignored.
    ///
    /// # Errors
    /// Returns an error if a line is not valid, if the store is unavailable, or if reading or writing fails with an
    /// [`std::io::Error`].
    pub fn run(self, input: impl Read, output: impl Write) -> anyhow::Result<IgnoredLines> {
        replay(&self.rule, self.store, Lines::new(input), output)
    }
}

/// The lines of a trace that were ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IgnoredLines {
    /// The number of instructions that do not start with `request`, and the line number of the first.
    pub other_instructions: Option<(u64, usize)>,
    /// The line number of the first line after the last instruction.
    pub after_the_end: Option<usize>,
}

impl IgnoredLines {
    fn skip(&mut self, line: usize) {
        let (count, _) = self.other_instructions.get_or_insert((0, line));
        *count += 1;
    }
}

impl fmt::Display for IgnoredLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.other_instructions {
            None => {}
            Some((1, line)) => {
                writeln!(f, "line {line}: ignored, because it does not start with `request`")?;
            }
            Some((count, line)) => writeln!(
                f,
                "line {line}: ignored, because it does not start with `request`; {count} such lines in all"
            )?,
        }
        match self.after_the_end {
            None => Ok(()),
            Some(line) => writeln!(
                f,
                "line {line}: ignored, like all lines after it, because it is after the last instruction"
            ),
        }
    }
}

fn replay(
    rule: &RuleTemplate,
    store: Option<RedisRun>,
    mut lines: Lines<impl Read>,
    mut output: impl Write,
) -> anyhow::Result<IgnoredLines> {
    let capacity = read_number(&mut lines, "the capacity, a whole 64-bit number")?;
    rule.check_number("limit", capacity).with_context(|| lines.line_label())?;
    let window = read_number(&mut lines, "the window, a whole 64-bit number")?;
    rule.check_number("window", window).with_context(|| lines.line_label())?;
    let mut engine = rule.engine(capacity, window, store).with_context(|| lines.line_label())?;
    let expected = "the number of instructions, a whole number, 0 or more";
    let count = read_number(&mut lines, expected)?;
    let Ok(count) = u64::try_from(count) else {
        anyhow::bail!("{}: found `{count}`; expected {expected}", lines.line_label());
    };

    let mut clients = Clients::default();
    let mut answers = Vec::new();
    let mut remaining = count;
    let mut ignored = IgnoredLines::default();
    while remaining > 0 {
        let result = decide_buffered(
            &mut lines,
            &mut remaining,
            &mut clients,
            &mut *engine,
            &mut answers,
            &mut ignored,
        );
        output.write_all(&answers)?;
        output.flush()?;
        answers.clear();
        result?;
        if remaining > 0 && !lines.read_more().context(UNREADABLE)? {
            let done = count - remaining;
            anyhow::bail!(
                "line {}: the input ended after {done} of {count} instructions",
                lines.line_number() + 1
            );
        }
    }
    ignored.after_the_end = lines.buffered_text();
    Ok(ignored)
}

/// Decides the instructions on the buffered lines.
fn decide_buffered(
    lines: &mut Lines<impl Read>,
    remaining: &mut u64,
    clients: &mut Clients,
    engine: &mut dyn Engine,
    answers: &mut Vec<u8>,
    ignored: &mut IgnoredLines,
) -> anyhow::Result<()> {
    let mut buffered = lines.buffered();
    let mut batch = RequestBatch::default();
    let mut read = || -> anyhow::Result<()> {
        while *remaining > 0 {
            let Some(line) = buffered.next() else { break };
            let line = complete_line(&line, buffered.line_number())?;
            match Instruction::parse(line).map_err(|error| error.at_line(buffered.line_number()))? {
                None => continue,
                Some(Instruction::Other) => ignored.skip(buffered.line_number()),
                Some(Instruction::Request { client, now, cost }) => {
                    if batch.is_full() {
                        batch.decide(clients, |requests| engine.decide(requests, answers))?;
                    }
                    match client {
                        Cow::Borrowed(client) => batch.add(clients, client, now, cost),
                        // A name with escapes is not part of the line, so it cannot wait in the batch.
                        Cow::Owned(client) => {
                            batch.decide(clients, |requests| engine.decide(requests, answers))?;
                            let client = clients.number_of(&client);
                            engine.decide(&[Request { client, now, cost }], answers)?;
                        }
                    }
                }
            }
            *remaining -= 1;
        }
        Ok(())
    };
    let result = read();
    let decided = batch.decide(clients, |requests| engine.decide(requests, answers));
    let position = buffered.position();
    lines.advance_to(position);
    result.and(decided)
}

fn complete_line<'a>(line: &Line<'a>, number: usize) -> anyhow::Result<&'a [u8]> {
    match *line {
        Line::Whole(line) => Ok(line),
        Line::TooLong => anyhow::bail!(
            "line {number}: found more than {MAX_LINE} bytes; expected a shorter line"
        ),
    }
}

/// Reads the number on the next line that is not blank.
fn read_number(lines: &mut Lines<impl Read>, expected: &'static str) -> anyhow::Result<i64> {
    loop {
        let mut buffered = lines.buffered();
        while let Some(line) = buffered.next() {
            let line = complete_line(&line, buffered.line_number())?;
            let number = Instruction::parse_number(line, expected)
                .map_err(|error| error.at_line(buffered.line_number()))?;
            if let Some(number) = number {
                let position = buffered.position();
                lines.advance_to(position);
                return Ok(number);
            }
        }
        let position = buffered.position();
        lines.advance_to(position);
        if !lines.read_more().context(UNREADABLE)? {
            anyhow::bail!("line {}: the input ended; expected {expected}", lines.line_number() + 1);
        }
    }
}
