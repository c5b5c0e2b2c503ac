//! Which commands there are, and those by which clients introduce themselves and look around.
//!
//! What a client may not know about us is answered as Redis would, where there is a sensible answer: clients send
//! `HELLO`, `CLIENT SETINFO`, `SELECT 0`, `COMMAND DOCS` before anything else, and go away over an error.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use super::decide::{self, Ran};
use super::parse::Arguments;
use super::reply::{Output, Protocol, Quoted};
use crate::config::{Given, Limits, Role};
use crate::gate::Verb;
use crate::holdings::HeldBytes;
use crate::metrics::SurfaceLabels;
use crate::peer::Peer;
use crate::shared::Shared;

/// What a client has said about itself.
pub(super) struct Session {
    shared: Arc<Shared>,
    peer: Peer,
    id: u64,
    name: Box<[u8]>,
    /// The token it gave. What it is good for is asked anew with every batch of commands: it may have been taken away.
    token: Option<Given>,
    access: Access,
    /// It has said goodbye.
    pub(super) is_over: bool,
}

/// What a client may do, by its token and by where it is.
#[derive(Clone, Copy)]
struct Access {
    may_check: bool,
    may_administer: bool,
}

/// A command, as `COMMAND` tells it. A negative arity is the least number of arguments, with its name.
struct Command {
    name: &'static str,
    arity: i64,
    flags: &'static [&'static str],
    /// Where its key is.
    key: i64,
}

/// The longest name that a client may give itself, in bytes.
const LONGEST_NAME: usize = 256;

/// Longer ones are not even hashed: no token is as long.
const LONGEST_TOKEN: usize = 1024;

/// The version of Redis whose clients are understood.
const REDIS_VERSION: &str = "7.2.0";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The longest name of a command, in bytes.
const LONGEST: usize = 15;

const COMMANDS: [Command; 17] = {
    const fn command(
        name: &'static str,
        arity: i64,
        flags: &'static [&'static str],
        key: i64,
    ) -> Command {
        Command { name, arity, flags, key }
    }
    const WRITES: &[&str] = &["write", "fast"];
    const READS: &[&str] = &["readonly", "fast"];
    const TALKS: &[&str] = &["fast"];
    [
        command("auth", -2, TALKS, 0),
        command("cl.throttle", -5, WRITES, 1),
        command("client", -2, TALKS, 0),
        command("command", -1, TALKS, 0),
        command("config", -2, TALKS, 0),
        command("echo", 2, TALKS, 0),
        command("hello", -1, TALKS, 0),
        command("info", -1, TALKS, 0),
        command("ping", -1, TALKS, 0),
        command("quit", -1, TALKS, 0),
        command("reset", 1, TALKS, 0),
        command("select", 2, TALKS, 0),
        command("time", 1, TALKS, 0),
        command("tg.check", -3, WRITES, 2),
        command("tg.peek", -3, READS, 2),
        command("tg.refund", 4, &["write", "admin", "fast"], 2),
        command("tg.reset", 3, &["write", "admin", "fast"], 2),
    ]
};

/// What `CONFIG GET` knows: nothing is kept on a disk. redis-benchmark asks for it.
const CONFIG: [(&str, &str); 3] = [("save", ""), ("appendonly", "no"), ("databases", "1")];

/// Whether a command may be carried out while those before it are still being decided: those that take from a quota may,
/// as they would from several connections. All others wait.
pub(super) fn may_overlap(words: Arguments<'_>) -> bool {
    let name = words.name();
    name.eq_ignore_ascii_case(b"CL.THROTTLE") || name.eq_ignore_ascii_case(b"TG.CHECK")
}

impl Session {
    pub(super) fn new(shared: Arc<Shared>, peer: Peer) -> Self {
        static CONNECTED: AtomicU64 = AtomicU64::new(1);
        let id = CONNECTED.fetch_add(1, Ordering::Relaxed);
        let access = Access { may_check: false, may_administer: false };
        let mut session =
            Self { shared, peer, id, name: Box::default(), token: None, access, is_over: false };
        session.look_up_access();
        session
    }

    /// Room for bytes that this client makes the server hold, if there is any.
    pub(super) fn hold(&self, bytes: usize, limits: &Limits) -> Option<HeldBytes> {
        self.shared.hold(self.shared.holder(self.peer), bytes, limits)
    }

    /// Whether the client may check: it has presented a token, or needs none.
    pub(super) const fn may_check(&self) -> bool {
        self.access.may_check
    }

    /// Asks what the client may do, by the configuration that is in force now.
    pub(super) fn look_up_access(&mut self) {
        let settings = self.shared.settings.load();
        let tokens = &settings.tokens;
        let role = self.token.and_then(|token| tokens.role(token));
        self.access = Access {
            may_check: !tokens.guard_checks() || role.is_some(),
            may_administer: match tokens.guard_administration() {
                true => role == Some(Role::Admin),
                false => self.shared.is_operator(self.peer),
            },
        };
    }

    /// Says that a command is about to be carried out.
    pub(super) fn foresee(&self, words: Arguments<'_>) {
        decide::foresee(&self.shared.gate, words);
    }

    /// Carries out a command.
    pub(super) fn run(&mut self, words: Arguments<'_>, out: &mut Output) -> Ran {
        let mut upper = [0; LONGEST];
        let name = match upper.get_mut(..words.name().len()) {
            Some(upper) => {
                upper.copy_from_slice(words.name());
                upper.make_ascii_uppercase();
                &*upper
            }
            None => b"",
        };
        if !self.access.may_check && !matches!(name, b"AUTH" | b"HELLO" | b"RESET" | b"QUIT") {
            self.refuse("NOAUTH", "Authentication required.", out);
            return Ran::Done;
        }
        let gate = &self.shared.gate;
        match name {
            b"CL.THROTTLE" => return decide::throttle(gate, words, out),
            b"TG.CHECK" => return decide::ask(gate, Verb::Check, words, out),
            b"TG.PEEK" => return decide::ask(gate, Verb::Peek, words, out),
            b"TG.REFUND" if self.may_administer(out) => {
                return decide::ask(gate, Verb::Refund, words, out);
            }
            b"TG.RESET" if self.may_administer(out) => {
                return decide::ask(gate, Verb::Reset, words, out);
            }
            // It was told why not.
            b"TG.REFUND" | b"TG.RESET" => {}
            b"PING" => match (words.at(1), words.len()) {
                (None, _) => out.simple("PONG"),
                (Some(message), 2) => out.bulk(message),
                _ => wrong_number("PING [message]", out),
            },
            b"ECHO" => match (words.at(1), words.len()) {
                (Some(message), 2) => out.bulk(message),
                _ => wrong_number("ECHO message", out),
            },
            b"HELLO" => self.hello(words, out),
            b"AUTH" => self.auth(words, out),
            b"CLIENT" => self.client(words, out),
            b"SELECT" => match (words.at(1), words.len()) {
                (Some(b"0"), 2) => out.simple("OK"),
                (Some(other), 2) => {
                    out.error("ERR", format_args!("there is no DB {}; use 0", Quoted(other)));
                }
                _ => wrong_number("SELECT 0", out),
            },
            b"COMMAND" => command(words, out),
            b"INFO" => out.bulk(self.info(words)),
            b"CONFIG" => config(words, out),
            b"TIME" => time(out),
            b"RESET" => {
                self.token = None;
                self.look_up_access();
                self.name = Box::default();
                out.protocol = Protocol::Resp2;
                out.simple("RESET");
            }
            b"QUIT" => {
                self.is_over = true;
                out.simple("OK");
            }
            _ => unknown(words.name(), out),
        }
        Ran::Done
    }

    /// Whether it may change what clients have used; if not, it is told why.
    fn may_administer(&self, out: &mut Output) -> bool {
        if self.access.may_administer {
            return true;
        }
        let (kind, why) = match (
            self.shared.settings.load().tokens.guard_administration(),
            self.token,
        ) {
            (true, None) => ("NOAUTH", "Authentication required: AUTH with an admin token first"),
            (true, Some(_)) => ("NOPERM", "this is for the operator; your token lets you check"),
            (false, _) => (
                "NOPERM",
                "admin is closed: configure a token in `[auth] admin`, connect over a Unix socket as the server's own user, or set `[admin] loopback = true`",
            ),
        };
        self.refuse(kind, why, out);
        false
    }

    fn refuse(&self, kind: &'static str, why: &str, out: &mut Output) {
        let labels = SurfaceLabels { surface: "resp" };
        self.shared.gate.metrics.tokens_refused.get_or_create(&labels).inc();
        out.error(kind, why);
    }

    /// `AUTH [user] token`
    fn auth(&mut self, words: Arguments<'_>, out: &mut Output) {
        let token = match words.len() {
            2 => words.at(1),
            3 => words.at(2),
            _ => None,
        };
        match token {
            Some(token) if self.log_in(token, out) => out.simple("OK"),
            Some(_) => {}
            None => wrong_number("AUTH [user] token", out),
        }
    }

    /// Takes a token if it is a right one; if not, it is told so. There are no users: any name will do.
    fn log_in(&mut self, token: &[u8], out: &mut Output) -> bool {
        if token.len() > LONGEST_TOKEN {
            self.refuse("WRONGPASS", "invalid username-password pair or user is disabled.", out);
            return false;
        }
        let given = Given::new(token);
        let role = {
            let settings = self.shared.settings.load();
            let tokens = &settings.tokens;
            if !tokens.guard_checks() && !tokens.guard_administration() {
                let why =
                    "AUTH called without any password configured: the configuration has no tokens";
                out.error("ERR", why);
                return false;
            }
            tokens.role(given)
        };
        if role.is_none() {
            self.refuse("WRONGPASS", "invalid username-password pair or user is disabled.", out);
            return false;
        }
        self.token = Some(given);
        self.look_up_access();
        true
    }

    /// `HELLO [version [AUTH user token] [SETNAME name]]`: all of it, or nothing.
    fn hello(&mut self, words: Arguments<'_>, out: &mut Output) {
        let protocol = match words.at(1) {
            None => out.protocol,
            Some(b"2") => Protocol::Resp2,
            Some(b"3") => Protocol::Resp3,
            Some(_) => return out.error("NOPROTO", "unsupported protocol version; use 2 or 3"),
        };
        let (mut token, mut name) = (None, None);
        let mut options = words.from(2);
        while let Some(option) = options.next() {
            if option.eq_ignore_ascii_case(b"AUTH")
                && let (Some(_), Some(given)) = (options.next(), options.next())
            {
                token = Some(given);
            } else if option.eq_ignore_ascii_case(b"SETNAME")
                && let Some(given) = options.next()
            {
                name = Some(given);
            } else {
                let usage = "HELLO [2|3 [AUTH user token] [SETNAME name]]";
                let option = Quoted(option);
                return out
                    .error("ERR", format_args!("Syntax error in HELLO at {option}; use {usage}"));
            }
        }
        if name.is_some_and(|name| !is_name(name)) {
            return bad_name(out);
        }
        if token.is_some_and(|token| !self.log_in(token, out)) {
            return;
        }
        if !self.access.may_check {
            let why = "HELLO must be called with the client already authenticated, or with AUTH user token";
            return self.refuse("NOAUTH", why, out);
        }
        if let Some(name) = name {
            self.name = name.into();
        }
        out.protocol = protocol;
        out.map(7);
        out.bulk("server");
        out.bulk("tallygate");
        out.bulk("version");
        out.bulk(REDIS_VERSION);
        out.bulk("proto");
        out.integer(match protocol {
            Protocol::Resp2 => 2,
            Protocol::Resp3 => 3,
        });
        out.bulk("id");
        out.count(self.id);
        out.bulk("mode");
        out.bulk("standalone");
        out.bulk("role");
        out.bulk("master");
        out.bulk("modules");
        out.array(0);
    }

    fn client(&mut self, words: Arguments<'_>, out: &mut Output) {
        let what = words.at(1).unwrap_or_default().to_ascii_uppercase();
        match (&*what, words.at(2), words.len()) {
            (b"ID", None, _) => out.count(self.id),
            (b"GETNAME", None, _) if self.name.is_empty() => out.null(),
            (b"GETNAME", None, _) => out.bulk(&self.name),
            (b"SETNAME", Some(name), 3) if is_name(name) => {
                self.name = name.into();
                out.simple("OK");
            }
            (b"SETNAME", Some(_), 3) => bad_name(out),
            // What a client is made with, and what Redis may not forget: nothing here depends on it.
            (b"SETINFO", Some(_), 4) | (b"NO-EVICT" | b"NO-TOUCH", Some(_), 3) => out.simple("OK"),
            (b"INFO" | b"LIST", None, _) => out.bulk(self.line()),
            _ => out.error(
                "ERR",
                format_args!(
                    "unknown subcommand or wrong number of arguments for CLIENT {}",
                    Quoted(&what)
                ),
            ),
        }
    }

    /// The connection, as `CLIENT LIST` tells it. Nobody is told about others.
    fn line(&self) -> String {
        let Self { id, name, peer, .. } = self;
        let address = peer.address.map_or("unix".to_owned(), |address| address.to_string());
        let name = String::from_utf8_lossy(name);
        format!("id={id} addr={address} name={name} db=0 user=default\n")
    }

    fn info(&self, words: Arguments<'_>) -> String {
        use fmt::Write as _;
        let is_wanted = |section: &str| {
            words.len() == 1
                || words.from(1).any(|wanted| {
                    wanted.eq_ignore_ascii_case(section.as_bytes())
                        || ["all", "default", "everything"]
                            .iter()
                            .any(|all| wanted.eq_ignore_ascii_case(all.as_bytes()))
                })
        };
        let mut text = String::new();
        // Writing to a string cannot fail.
        if is_wanted("server") {
            let _ = write!(
                text,
                "# Server\r\nredis_version:{REDIS_VERSION}\r\nredis_mode:standalone\r\n\
                 server_name:tallygate\r\ntallygate_version:{VERSION}\r\nprocess_id:{}\r\n\r\n",
                std::process::id()
            );
        }
        if is_wanted("persistence") {
            text.push_str("# Persistence\r\nloading:0\r\n\r\n");
        }
        if is_wanted("replication") {
            text.push_str("# Replication\r\nrole:master\r\nconnected_slaves:0\r\n\r\n");
        }
        if is_wanted("cluster") {
            text.push_str("# Cluster\r\ncluster_enabled:0\r\n\r\n");
        }
        if is_wanted("tallygate") {
            text.push_str("# Tallygate\r\n");
            for policy in self.shared.gate.policies() {
                let name = policy.name.escape_default();
                let keys = policy.limiter.usage().map_or(0, |usage| usage.keys);
                let _ = write!(text, "policy_{name}:keys={keys}\r\n");
            }
        }
        text
    }
}

fn command(words: Arguments<'_>, out: &mut Output) {
    let what = words.at(1).unwrap_or_default().to_ascii_uppercase();
    match &*what {
        b"COUNT" => out.count(COMMANDS.len().try_into().unwrap_or(u64::MAX)),
        // Clients use it to help people who type, and can do without.
        b"DOCS" => out.map(0),
        b"LIST" => {
            out.array(COMMANDS.len());
            COMMANDS.iter().for_each(|command| out.bulk(command.name));
        }
        b"INFO" if words.len() > 2 => {
            out.array(words.len() - 2);
            for name in words.from(2) {
                let same = |command: &&Command| name.eq_ignore_ascii_case(command.name.as_bytes());
                match COMMANDS.iter().find(same) {
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

impl Command {
    fn write(&self, out: &mut Output) {
        out.array(6);
        out.bulk(self.name);
        out.integer(self.arity);
        out.array(self.flags.len());
        self.flags.iter().for_each(|flag| out.simple(flag));
        out.integer(self.key);
        out.integer(self.key);
        out.integer(i64::from(self.key > 0));
    }
}

fn config(words: Arguments<'_>, out: &mut Output) {
    if !words.at(1).is_some_and(|what| what.eq_ignore_ascii_case(b"GET")) || words.len() < 3 {
        return out.error("ERR", "only CONFIG GET is answered; the configuration is a file");
    }
    let is_wanted = |name: &str| {
        words.from(2).any(|wanted| wanted == b"*" || wanted.eq_ignore_ascii_case(name.as_bytes()))
    };
    let told: Vec<_> = CONFIG.iter().filter(|(name, _)| is_wanted(name)).collect();
    out.map(told.len());
    for (name, value) in told {
        out.bulk(name);
        out.bulk(value);
    }
}

fn time(out: &mut Output) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    out.array(2);
    out.bulk(now.as_secs().to_string());
    out.bulk(now.subsec_micros().to_string());
}

fn unknown(name: &[u8], out: &mut Output) {
    let use_ = "use CL.THROTTLE or TG.CHECK, PEEK, REFUND, RESET";
    out.error("ERR", format_args!("unknown command {}; {use_}", Quoted(name)));
}

fn wrong_number(usage: &str, out: &mut Output) {
    out.error("ERR", format_args!("wrong number of arguments; use {usage}"));
}

/// Whether a connection may be named so: it is told in a line of words.
fn is_name(name: &[u8]) -> bool {
    name.len() <= LONGEST_NAME && name.iter().all(u8::is_ascii_graphic)
}

fn bad_name(out: &mut Output) {
    out.error(
        "ERR",
        format_args!("Client names cannot contain spaces, newlines or special characters, nor have more than {LONGEST_NAME} bytes."),
    );
}
