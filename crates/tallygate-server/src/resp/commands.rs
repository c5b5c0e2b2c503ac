//! The commands: one row each, with everything that the server knows about it.

use std::fmt;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::time::{SystemTime, UNIX_EPOCH};

use super::arguments::Mistake;
use super::decide;
use super::parse::Arguments;
use super::reply::{Output, Quoted};
use super::session::{self, Session};
use crate::config::Role;
use crate::gate::Gate;

/// A command.
struct Command {
    /// In capital letters.
    name: &'static str,
    /// Its arguments, as messages show them.
    arguments: &'static str,
    /// How many words it may have, with its name.
    words: RangeInclusive<usize>,
    /// The role of the clients that may run it; `None` is every client, also before it has authenticated.
    role: Option<Role>,
    /// As `COMMAND` reports them.
    flags: &'static [&'static str],
    /// Where its key is among its words; 0 if it has none.
    key: u8,
    /// Whether it may be carried out while earlier commands of the connection are still being decided. Commands that
    /// charge a quota may, as they would from several connections. All others wait.
    may_overlap: bool,
    /// Loads the memory of its key before it is carried out.
    prefetch: Option<fn(&Gate, Arguments<'_>)>,
    run: Run,
}

/// Carries out a command: the reply is written, or comes later.
type Run = for<'a> fn(&mut Session, Arguments<'a>, &mut Output) -> Outcome<'a>;

/// How a command ended, or what is wrong with its arguments.
pub(super) type Outcome<'a> = Result<Ran, Mistake<'a>>;

/// How a command was carried out.
pub(super) enum Ran {
    /// Its reply is written.
    Done,
    /// Its reply comes later, as bytes.
    Later(Pin<Box<dyn Future<Output = Vec<u8>> + Send>>),
}

/// The reply of a command is written.
pub(super) const DONE: Outcome<'static> = Ok(Ran::Done);

const WRITES: &[&str] = &["write", "fast"];
const READS: &[&str] = &["readonly", "fast"];
const CHANGES: &[&str] = &["write", "admin", "fast"];

/// Any number of words.
const ANY: usize = usize::MAX;

/// A command that needs no key, for clients that may check.
const fn command(
    name: &'static str,
    arguments: &'static str,
    words: RangeInclusive<usize>,
    run: Run,
) -> Command {
    Command {
        name,
        arguments,
        words,
        role: Some(Role::Check),
        flags: &["fast"],
        key: 0,
        may_overlap: false,
        prefetch: None,
        run,
    }
}

/// The commands that are sent most come first.
static COMMANDS: [Command; 17] = [
    Command {
        flags: WRITES,
        key: 2,
        may_overlap: true,
        prefetch: Some(decide::prefetch_check),
        ..command("TG.CHECK", "policy key [COST n] [TIER name]", 3..=7, |session, words, out| {
            decide::check(session.gate(), words, out)
        })
    },
    Command {
        flags: WRITES,
        key: 1,
        may_overlap: true,
        prefetch: Some(decide::prefetch_throttle),
        ..command(
            "CL.THROTTLE",
            "key max_burst count period [quantity]",
            5..=6,
            |session, words, out| decide::throttle(session.gate(), words, out),
        )
    },
    Command {
        flags: READS,
        key: 2,
        ..command("TG.PEEK", "policy key [COST n] [TIER name]", 3..=7, |session, words, out| {
            decide::peek(session.gate(), words, out)
        })
    },
    Command {
        role: Some(Role::Admin),
        flags: CHANGES,
        key: 2,
        ..command("TG.REFUND", "policy key n", 4..=4, |session, words, out| {
            decide::refund(session.gate(), words, out)
        })
    },
    Command {
        role: Some(Role::Admin),
        flags: CHANGES,
        key: 2,
        ..command("TG.RESET", "policy key", 3..=3, |session, words, out| {
            decide::reset(session.gate(), words, out)
        })
    },
    command("PING", "[message]", 1..=2, |_, words, out| {
        match words.at(1) {
            Some(message) => out.bulk(message),
            None => out.simple("PONG"),
        }
        DONE
    }),
    command("ECHO", "message", 2..=2, |_, words, out| {
        out.bulk(words.at(1).unwrap_or_default());
        DONE
    }),
    command("SELECT", "0", 2..=2, |_, words, out| {
        match words.at(1) {
            Some(b"0") => out.simple("OK"),
            other => {
                let other = Quoted(other.unwrap_or_default());
                out.error("ERR", format_args!("there is no DB {other}; use 0"));
            }
        }
        DONE
    }),
    command("TIME", "", 1..=1, |_, _, out| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        out.array(2);
        out.bulk(now.as_secs().to_string());
        out.bulk(now.subsec_micros().to_string());
        DONE
    }),
    command("COMMAND", "[COUNT | DOCS | INFO [name ...] | LIST]", 1..=ANY, |_, words, out| {
        describe(words, out);
        DONE
    }),
    command("INFO", "[section ...]", 1..=ANY, |session, words, out| session.info(words, out)),
    command("CONFIG", "GET name ...", 2..=ANY, |_, words, out| session::config(words, out)),
    command(
        "CLIENT",
        "ID | GETNAME | SETNAME name | SETINFO name value | INFO | LIST",
        2..=ANY,
        Session::client,
    ),
    Command {
        role: None,
        ..command("HELLO", "[2|3 [AUTH user token] [SETNAME name]]", 1..=ANY, Session::hello)
    },
    Command { role: None, ..command("AUTH", "[user] token", 2..=3, Session::auth) },
    Command { role: None, ..command("RESET", "", 1..=1, |session, _, out| session.reset(out)) },
    Command { role: None, ..command("QUIT", "", 1..=ANY, |session, _, out| session.quit(out)) },
];

impl Command {
    fn find(name: &[u8]) -> Option<&'static Self> {
        COMMANDS.iter().find(|command| command.name.as_bytes().eq_ignore_ascii_case(name))
    }

    /// Writes what `COMMAND` reports about it. A negative arity is the least number of words.
    fn write(&self, out: &mut Output) {
        let least = i64::try_from(*self.words.start()).unwrap_or(i64::MAX);
        out.array(6);
        out.bulk(self.name.to_ascii_lowercase());
        out.integer(if self.words.start() == self.words.end() { least } else { -least });
        out.array(self.flags.len());
        self.flags.iter().for_each(|flag| out.simple(flag));
        out.integer(self.key.into());
        out.integer(self.key.into());
        out.integer(i64::from(self.key > 0));
    }
}

/// The form that it takes.
impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let space = if self.arguments.is_empty() { "" } else { " " };
        write!(f, "{}{space}{}", self.name, self.arguments)
    }
}

/// Carries out a command.
pub(super) fn run(session: &mut Session, words: Arguments<'_>, out: &mut Output) -> Ran {
    let command = Command::find(words.name());
    if !session.may(command.map_or(Some(Role::Check), |command| command.role), out) {
        return Ran::Done;
    }
    let Some(command) = command else {
        let use_ = "use CL.THROTTLE or TG.CHECK, PEEK, REFUND, RESET";
        out.error("ERR", format_args!("unknown command {}; {use_}", Quoted(words.name())));
        return Ran::Done;
    };
    let outcome = match command.words.contains(&words.len()) {
        true => (command.run)(session, words, out),
        false => Err(Mistake::Usage),
    };
    outcome.unwrap_or_else(|mistake| {
        mistake.write(command, out);
        Ran::Done
    })
}

/// Returns whether a command may be carried out while earlier ones are still being decided.
pub(super) fn may_overlap(words: Arguments<'_>) -> bool {
    Command::find(words.name()).is_some_and(|command| command.may_overlap)
}

/// Loads the memory that a command will need.
pub(super) fn prefetch(gate: &Gate, words: Arguments<'_>) {
    if let Some(prefetch) = Command::find(words.name()).and_then(|command| command.prefetch) {
        prefetch(gate, words);
    }
}

/// Carries out `COMMAND`.
fn describe(words: Arguments<'_>, out: &mut Output) {
    let what = words.at(1).unwrap_or_default().to_ascii_uppercase();
    match &*what {
        b"COUNT" => out.count(COMMANDS.len().try_into().unwrap_or(u64::MAX)),
        // Clients use it to help people who type, and can do without.
        b"DOCS" => out.map(0),
        b"LIST" => {
            out.array(COMMANDS.len());
            COMMANDS.iter().for_each(|command| out.bulk(command.name.to_ascii_lowercase()));
        }
        b"INFO" if words.len() > 2 => {
            out.array(words.len() - 2);
            for name in words.from(2) {
                match Command::find(name) {
                    Some(command) => command.write(out),
                    None => out.null(),
                }
            }
        }
        b"" | b"INFO" => {
            out.array(COMMANDS.len());
            COMMANDS.iter().for_each(|command| command.write(out));
        }
        other => out.error(
            "ERR",
            format_args!("unknown subcommand {}; use COUNT, DOCS, INFO or LIST", Quoted(other)),
        ),
    }
}
