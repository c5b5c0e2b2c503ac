//! `MULTI`, `EXEC` and `DISCARD`.
//!
//! Clients such as redis-py wrap their pipelines in `MULTI` and `EXEC` by default. The server stores the commands until
//! `EXEC` and then runs them in order, each atomic by itself: commands of other connections may run between them.
//!
//! Each command is validated when it arrives. If one is invalid, `EXEC` runs none of them, so that a mistake in the last
//! command cannot follow charges of the first.

use super::commands::{CommandResult, DONE, Outcome};
use super::parse::{Arguments, StoredCommands};
use super::reply::Output;
use super::session::Session;
use crate::client_budgets::HeldBytes;

/// The most memory that the commands of one transaction may take.
const MAX_BYTES: usize = 1 << 20;
/// The memory of stored commands is counted in steps of this size.
const STEP: usize = 4 << 10;

/// The commands since `MULTI`.
#[derive(Debug, Default)]
pub(super) struct Transaction {
    commands: StoredCommands,
    /// The memory of the commands, and the part of it that is counted.
    bytes: usize,
    held: Option<HeldBytes>,
    counted: usize,
    /// Whether a command was rejected.
    is_broken: bool,
}

impl Transaction {
    /// Returns the commands in order.
    pub(super) fn commands(&self) -> impl Iterator<Item = Arguments<'_>> {
        self.commands.iter()
    }

    /// Drops the commands, and makes `EXEC` fail.
    fn abort(&mut self) {
        *self = Self { is_broken: true, ..Self::default() };
    }
}

impl Session {
    /// Runs `MULTI`.
    pub(super) fn multi<'a>(&mut self, out: &mut Output) -> Outcome<'a> {
        if self.transaction.is_some() {
            out.error("ERR", "MULTI calls can not be nested");
        } else {
            self.transaction = Some(Box::default());
            out.simple("OK");
        }
        DONE
    }

    /// Runs `EXEC`: writes the start of an array. The replies of the commands follow it.
    pub(super) fn exec<'a>(&mut self, out: &mut Output) -> Outcome<'a> {
        match self.transaction.take() {
            None => out.error("ERR", "EXEC without MULTI"),
            Some(transaction) if transaction.is_broken => {
                out.error("EXECABORT", "Transaction discarded because of previous errors.");
            }
            Some(transaction) => {
                out.array(transaction.commands.len());
                return Ok(CommandResult::Execute(transaction));
            }
        }
        DONE
    }

    /// Runs `DISCARD`.
    pub(super) fn discard<'a>(&mut self, out: &mut Output) -> Outcome<'a> {
        match self.transaction.take() {
            None => out.error("ERR", "DISCARD without MULTI"),
            Some(_) => out.simple("OK"),
        }
        DONE
    }

    /// Makes `EXEC` run nothing, because a command was rejected.
    pub(super) fn break_transaction(&mut self) {
        if let Some(transaction) = &mut self.transaction {
            transaction.abort();
        }
    }

    /// Stores a valid command until `EXEC`.
    pub(super) fn queue(&mut self, words: Arguments<'_>, out: &mut Output) {
        let Some(mut transaction) = self.transaction.take() else { return };
        if transaction.is_broken {
            out.simple("QUEUED");
        } else if transaction.make_room(self, words) {
            transaction.commands.push(words);
            out.simple("QUEUED");
        } else {
            let most = MAX_BYTES;
            out.error(
                "ERR",
                format_args!("no room for this MULTI; send fewer commands (at most {most} bytes)"),
            );
            transaction.abort();
        }
        self.transaction = Some(transaction);
    }
}

impl Transaction {
    /// Counts the memory of one more command, if the limits allow it.
    fn make_room(&mut self, session: &Session, words: Arguments<'_>) -> bool {
        self.bytes += StoredCommands::memory_of(words);
        if self.bytes > MAX_BYTES || self.bytes <= self.counted {
            return self.bytes <= MAX_BYTES;
        }
        let (more, limits) = ((self.bytes - self.counted).next_multiple_of(STEP), session.limits());
        self.counted += more;
        match &mut self.held {
            Some(held) => held.grow(more, &limits),
            None => {
                self.held = session.hold(more, &limits);
                self.held.is_some()
            }
        }
    }
}
