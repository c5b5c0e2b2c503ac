//! The table of commands.

use std::fmt;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::time::{SystemTime, UNIX_EPOCH};

use super::arguments::Mistake;
use super::decide::{self, Validity};
use super::parse::Arguments;
use super::reply::{Output, Quoted};
use super::session::{self, Session};
use super::transaction::Transaction;
use crate::config::Role;
use crate::gate::Gate;

/// A command.
struct Command {
    /// In capital letters.
    name: &'static str,
    /// The arguments, as error messages show them.
    arguments: &'static str,
    /// What the command does, for `COMMAND DOCS`.
    summary: &'static str,
    /// The possible numbers of words, including the name.
    words: RangeInclusive<usize>,
    /// The role that the command needs; `None` is every client, even before authentication.
    role: Option<Role>,
    /// The flags that `COMMAND` reports.
    flags: &'static [&'static str],
    /// The index of the key among the words; 0 if there is none.
    key: u8,
    /// Whether the command may run while earlier commands of the connection are still pending. Commands that charge a
    /// quota may, as they would from several connections. All others wait.
    may_overlap: bool,
    /// Whether the command waits for `EXEC` after `MULTI`.
    is_queued: bool,
    /// Loads the memory of the key before the command runs.
    prefetch: Option<fn(&Gate, Arguments<'_>)>,
    /// Checks the arguments of a command that will run later.
    validate: for<'a> fn(&Session, Arguments<'a>) -> Validity<'a>,
    run: Run,
}

/// Runs a command. The reply is written, or comes later.
type Run = for<'a> fn(&mut Session, Arguments<'a>, &mut Output) -> Outcome<'a>;

/// The result of a command, or an error in its arguments.
pub(super) type Outcome<'a> = Result<CommandResult, Mistake<'a>>;

/// The result of a command.
pub(super) enum CommandResult {
    /// The reply is written.
    Done,
    /// The reply comes later, as bytes.
    Later(Pin<Box<dyn Future<Output = Vec<u8>> + Send>>),
    /// The start of an array is written. The replies of these commands follow it.
    Execute(Box<Transaction>),
}

/// The reply of a command is written.
pub(super) const DONE: Outcome<'static> = Ok(CommandResult::Done);

const WRITES: &[&str] = &["write", "fast"];
const READS: &[&str] = &["readonly", "fast"];
const CHANGES: &[&str] = &["write", "admin", "fast"];

/// Any number of words.
const ANY: usize = usize::MAX;

/// A command that needs no key, for clients that may check.
const fn command(
    name: &'static str,
    arguments: &'static str,
    summary: &'static str,
    words: RangeInclusive<usize>,
    run: Run,
) -> Command {
    Command {
        name,
        arguments,
        summary,
        words,
        role: Some(Role::Check),
        flags: &["fast"],
        key: 0,
        may_overlap: false,
        is_queued: true,
        prefetch: None,
        validate: |_, _| Ok(()),
        run,
    }
}

/// The syntax of the commands that check one key.
const ONE_KEY: &str = "policy key [COST n] [TIER name]";

/// The most frequent commands come first.
static COMMANDS: [Command; 26] = [
    Command {
        flags: WRITES,
        key: 2,
        may_overlap: true,
        prefetch: Some(decide::prefetch_check),
        validate: decide::validate_check,
        ..command(
            "TG.CHECK",
            ONE_KEY,
            "Checks a key and charges it if the policy allows it. Replies with six integers: allowed, limit, remaining, \
             retry_after_ms (-1: never), reset_after_ms, delay_ms.",
            3..=7,
            decide::check,
        )
    },
    Command {
        flags: WRITES,
        key: 1,
        may_overlap: true,
        prefetch: Some(decide::prefetch_throttle),
        validate: decide::validate_throttle,
        ..command(
            "CL.THROTTLE",
            "key max_burst count period [quantity]",
            "Checks a key by limits that come with the command, as redis-cell does.",
            5..=6,
            decide::throttle,
        )
    },
    Command {
        flags: WRITES,
        key: 2,
        may_overlap: true,
        prefetch: Some(decide::prefetch_check),
        validate: decide::validate_check,
        ..command(
            "TG.CHECKV",
            ONE_KEY,
            "Does what TG.CHECK does, and replies with names and values.",
            3..=7,
            decide::check_with_names,
        )
    },
    Command {
        flags: READS,
        key: 2,
        validate: decide::validate_check,
        ..command(
            "TG.PEEK",
            ONE_KEY,
            "Replies as TG.CHECK would, and charges nothing.",
            3..=7,
            decide::peek,
        )
    },
    Command {
        flags: READS,
        key: 2,
        validate: decide::validate_check,
        ..command(
            "TG.PEEKV",
            ONE_KEY,
            "Replies as TG.CHECKV would, and charges nothing.",
            3..=7,
            decide::peek_with_names,
        )
    },
    Command {
        flags: WRITES,
        key: 2,
        may_overlap: true,
        validate: decide::validate_check_all,
        ..command(
            "TG.CHECKALL",
            "policy key [COST n] [TIER name] [AND policy key [COST n] [TIER name] ...]",
            "Checks several keys and charges all of them or none. Replies with the integers of TG.CHECK and the index \
             of the item that was denied (-1: none).",
            3..=ANY,
            decide::check_all,
        )
    },
    Command {
        flags: WRITES,
        key: 2,
        may_overlap: true,
        validate: decide::validate_reserve,
        ..command(
            "TG.RESERVE",
            "policy key ttl_ms [COST n] [TIER name]",
            "Charges an estimate that is settled later. Replies with the integers of TG.CHECK and the id of the \
             reservation (null: denied).",
            4..=8,
            decide::reserve,
        )
    },
    Command {
        flags: WRITES,
        validate: decide::validate_settle,
        ..command(
            "TG.SETTLE",
            "reservation actual",
            "Replaces the estimate of a reservation by the real cost.",
            3..=3,
            decide::settle,
        )
    },
    Command {
        flags: WRITES,
        ..command(
            "TG.CANCEL",
            "reservation",
            "Returns the units of a reservation, as settling with 0 does.",
            2..=2,
            decide::cancel,
        )
    },
    Command {
        role: Some(Role::Admin),
        flags: CHANGES,
        key: 2,
        validate: decide::validate_refund,
        ..command(
            "TG.REFUND",
            "policy key n",
            "Returns units to a key, at most up to its full quota.",
            4..=4,
            decide::refund,
        )
    },
    Command {
        role: Some(Role::Admin),
        flags: CHANGES,
        key: 2,
        validate: decide::validate_check,
        ..command("TG.RESET", "policy key", "Forgets all usage of a key.", 3..=3, decide::reset)
    },
    Command {
        is_queued: false,
        ..command("MULTI", "", "Queues the next commands until EXEC.", 1..=1, |session, _, out| {
            session.multi(out)
        })
    },
    Command {
        is_queued: false,
        ..command(
            "EXEC",
            "",
            "Runs the commands since MULTI in order, each atomic by itself; none if one was invalid.",
            1..=1,
            |session, _, out| session.exec(out),
        )
    },
    Command {
        is_queued: false,
        ..command("DISCARD", "", "Drops the commands since MULTI.", 1..=1, |session, _, out| {
            session.discard(out)
        })
    },
    command("PING", "[message]", "Replies PONG, or the message.", 1..=2, |_, words, out| {
        match words.at(1) {
            Some(message) => out.bulk(message),
            None => out.simple("PONG"),
        }
        DONE
    }),
    command("ECHO", "message", "Replies with the message.", 2..=2, |_, words, out| {
        out.bulk(words.at(1).unwrap_or_default());
        DONE
    }),
    command("SELECT", "0", "Selects database 0, the only one.", 2..=2, |_, words, out| {
        match words.at(1) {
            Some(b"0") => out.simple("OK"),
            other => {
                let other = Quoted(other.unwrap_or_default());
                out.error("ERR", format_args!("DB {other} does not exist; use 0"));
            }
        }
        DONE
    }),
    command("TIME", "", "Replies with seconds and microseconds.", 1..=1, |_, _, out| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        out.array(2);
        out.bulk(now.as_secs().to_string());
        out.bulk(now.subsec_micros().to_string());
        DONE
    }),
    command(
        "COMMAND",
        "[COUNT | DOCS [name ...] | INFO [name ...] | LIST]",
        "Describes the commands.",
        1..=ANY,
        |_, words, out| {
            describe(words, out);
            DONE
        },
    ),
    command("INFO", "[section ...]", "Describes the server.", 1..=ANY, |session, words, out| {
        session.info(words, out)
    }),
    command(
        "CONFIG",
        "GET name ...",
        "Replies with the requested settings.",
        2..=ANY,
        |_, words, out| session::config(words, out),
    ),
    command(
        "CLIENT",
        "ID | GETNAME | SETNAME name | SETINFO name value | INFO | LIST",
        "Names or describes this connection.",
        2..=ANY,
        Session::client,
    ),
    Command {
        role: None,
        ..command(
            "HELLO",
            "[2|3 [AUTH user token] [SETNAME name]]",
            "Selects the protocol and authenticates.",
            1..=ANY,
            Session::hello,
        )
    },
    Command {
        role: None,
        ..command("AUTH", "[user] token", "Authenticates.", 2..=3, Session::auth)
    },
    Command {
        role: None,
        is_queued: false,
        ..command("RESET", "", "Resets the connection.", 1..=1, |session, _, out| {
            session.reset(out)
        })
    },
    Command {
        role: None,
        is_queued: false,
        ..command("QUIT", "", "Closes the connection.", 1..=ANY, |session, _, out| {
            session.quit(out)
        })
    },
];

impl Command {
    fn find(name: &[u8]) -> Option<&'static Self> {
        COMMANDS.iter().find(|command| command.name.as_bytes().eq_ignore_ascii_case(name))
    }

    /// Writes the description that `COMMAND` reports. A negative arity is a minimum.
    fn write(&self, out: &mut Output) {
        let least = i64::try_from(*self.words.start()).unwrap_or(i64::MAX);
        out.array(10);
        out.bulk(self.name.to_ascii_lowercase());
        out.integer(if self.words.start() == self.words.end() { least } else { -least });
        out.set(self.flags.len());
        self.flags.iter().for_each(|flag| out.simple(flag));
        out.integer(self.key.into());
        out.integer(self.key.into());
        out.integer(i64::from(self.key > 0));
        // Categories, tips, key specifications and subcommands.
        out.set(0);
        (0..3).for_each(|_| out.array(0));
    }

    /// Writes the name and the text that `COMMAND DOCS` reports.
    fn write_docs(&self, out: &mut Output) {
        out.bulk(self.name.to_ascii_lowercase());
        let docs = [
            ("summary", format!("{} Use: {self}", self.summary)),
            ("since", env!("CARGO_PKG_VERSION").to_owned()),
            ("group", "module".to_owned()),
        ];
        out.map(docs.len());
        for (name, text) in docs {
            out.bulk(name);
            out.bulk(text);
        }
    }
}

/// Shows the syntax of the command.
impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let space = if self.arguments.is_empty() { "" } else { " " };
        write!(f, "{}{space}{}", self.name, self.arguments)
    }
}

/// Runs a command, or stores it after `MULTI`.
pub(super) fn run(session: &mut Session, words: Arguments<'_>, out: &mut Output) -> CommandResult {
    let command = Command::find(words.name());
    if !session.authorize(command.map_or(Some(Role::Check), |command| command.role), out) {
        session.break_transaction();
        return CommandResult::Done;
    }
    let Some(command) = command else {
        let use_ = "use TG.CHECK, TG.PEEK, CL.THROTTLE or another one that COMMAND LIST shows";
        out.error("ERR", format_args!("unknown command {}; {use_}", Quoted(words.name())));
        session.break_transaction();
        return CommandResult::Done;
    };
    let is_queued = command.is_queued && session.transaction.is_some();
    let outcome = match command.words.contains(&words.len()) {
        false => Err(Mistake::Count { given: words.len() - 1 }),
        true if is_queued => (command.validate)(session, words).map(|()| {
            session.queue(words, out);
            CommandResult::Done
        }),
        true => (command.run)(session, words, out),
    };
    outcome.unwrap_or_else(|mistake| {
        mistake.write(command, out);
        session.break_transaction();
        CommandResult::Done
    })
}

/// Returns whether a command may run while earlier ones are pending.
pub(super) fn may_overlap(words: Arguments<'_>) -> bool {
    Command::find(words.name()).is_some_and(|command| command.may_overlap)
}

/// Loads the memory that a command will need.
pub(super) fn prefetch(gate: &Gate, words: Arguments<'_>) {
    if let Some(prefetch) = Command::find(words.name()).and_then(|command| command.prefetch) {
        prefetch(gate, words);
    }
}

/// Runs `COMMAND`.
fn describe(words: Arguments<'_>, out: &mut Output) {
    let what = words.at(1).unwrap_or_default().to_ascii_uppercase();
    let named = || words.from(2).filter_map(Command::find);
    match &*what {
        b"COUNT" => out.count(COMMANDS.len().try_into().unwrap_or(u64::MAX)),
        b"DOCS" if words.len() > 2 => {
            out.map(named().count());
            named().for_each(|command| command.write_docs(out));
        }
        b"DOCS" => {
            out.map(COMMANDS.len());
            COMMANDS.iter().for_each(|command| command.write_docs(out));
        }
        b"LIST" => {
            out.array(COMMANDS.len());
            COMMANDS.iter().for_each(|command| out.bulk(command.name.to_ascii_lowercase()));
        }
        b"INFO" if words.len() > 2 => {
            out.array(words.len() - 2);
            for name in words.from(2) {
                match Command::find(name) {
                    Some(command) => command.write(out),
                    None => out.null_array(),
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
