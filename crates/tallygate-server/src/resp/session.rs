//! The state of a connection, and the commands about it.
//!
//! Commands of Redis that have no meaning here are answered as Redis would, where that makes sense: clients send
//! `HELLO`, `CLIENT SETINFO`, `SELECT 0` or `COMMAND DOCS` first, and close the connection after an error.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::arguments::Mistake;
use super::commands::{CommandResult, DONE, Outcome};
use super::parse::Arguments;
use super::reply::{Output, Protocol};
use super::transaction::Transaction;
use crate::background::run_in_background_in_order;
use crate::client_budgets::{BudgetOwner, HeldBytes};
use crate::config::{AccessDenied, LONGEST_TOKEN, Limits, Role, TokenDigest};
use crate::gate::Gate;
use crate::metrics::SurfaceLabels;
use crate::peer::Peer;
use crate::shared::Shared;

const SURFACE: &str = "resp";

/// The state of a connection.
pub(super) struct Session {
    shared: Arc<Shared>,
    peer: Peer,
    id: u64,
    name: Box<[u8]>,
    /// The token of the client. Its role is looked up with every batch of commands, because the token may have been
    /// revoked.
    token: Option<TokenDigest>,
    /// Whether the client may check, according to the last lookup.
    may_check: bool,
    /// The commands since `MULTI`.
    pub(super) transaction: Option<Box<Transaction>>,
    /// Whether the client has sent `QUIT`.
    pub(super) is_over: bool,
}

/// The longest name of a connection, in bytes.
const LONGEST_NAME: usize = 256;

/// The version of Redis that is reported to clients.
const REDIS_VERSION: &str = "7.2.0";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The settings of `CONFIG GET`, which redis-benchmark reads.
const CONFIG: [(&str, &str); 3] = [("save", ""), ("appendonly", "no"), ("databases", "1")];

impl Session {
    pub(super) fn new(shared: Arc<Shared>, peer: Peer) -> Self {
        static CONNECTED: AtomicU64 = AtomicU64::new(1);
        let id = CONNECTED.fetch_add(1, Ordering::Relaxed);
        let (name, token) = (Box::default(), None);
        let (may_check, transaction, is_over) = (false, None, false);
        let mut session = Self { shared, peer, id, name, token, may_check, transaction, is_over };
        session.look_up_access();
        session
    }

    /// Counts buffered bytes of this client, if the limits allow it.
    pub(super) fn hold(&self, bytes: usize, limits: &Limits) -> Option<HeldBytes> {
        self.shared.hold(self.owner(), bytes, limits)
    }

    /// Returns the limits per client in force.
    pub(super) fn limits(&self) -> Limits {
        self.shared.limits()
    }

    /// Returns the owner of the budget of this connection.
    pub(super) fn owner(&self) -> BudgetOwner {
        self.shared.holder(self.peer)
    }

    /// Returns whether the client may check: it has presented a token, or needs none.
    pub(super) const fn may_check(&self) -> bool {
        self.may_check
    }

    /// Looks up whether the client may check, by the configuration in force.
    pub(super) fn look_up_access(&mut self) {
        let settings = self.shared.settings.load();
        self.may_check = settings.tokens.authorize(Role::Check, || self.token, || false).is_ok();
    }

    /// Returns the gate.
    pub(super) fn gate(&self) -> &Arc<Gate> {
        &self.shared.gate
    }

    /// Returns whether the client may run a command of a role. If not, writes an error.
    pub(super) fn authorize(&self, role: Option<Role>, out: &mut Output) -> bool {
        let denied = match role {
            None => return true,
            Some(Role::Check) if self.may_check => return true,
            Some(role) => {
                let is_operator = || self.shared.is_operator(self.peer);
                match self.shared.authorize(SURFACE, role, || self.token, is_operator) {
                    Ok(()) => return true,
                    Err(denied) => denied,
                }
            }
        };
        let (kind, why) = match (denied, role) {
            (AccessDenied::NoToken, Some(Role::Admin)) if self.may_check => {
                ("NOAUTH", "Authentication required: use AUTH with an admin token first")
            }
            (AccessDenied::NoToken, _) => ("NOAUTH", "Authentication required."),
            (AccessDenied::CheckToken, _) => {
                ("NOPERM", "this needs an admin token; the token sent is a check token")
            }
            (AccessDenied::AdminClosed, _) => (
                "NOPERM",
                "admin commands are disabled: configure a token in `[auth] admin`, connect over a Unix socket as the server's own user, or set `[admin] loopback = true`",
            ),
        };
        out.error(kind, why);
        false
    }

    fn reject_token(&self, kind: &'static str, why: &str, out: &mut Output) {
        let labels = SurfaceLabels { surface: SURFACE };
        self.shared.gate.metrics.tokens_rejected.get_or_create(&labels).inc();
        out.error(kind, why);
    }

    pub(super) fn auth<'a>(&mut self, words: Arguments<'a>, out: &mut Output) -> Outcome<'a> {
        let token = words.from(1).last().ok_or(Mistake::Usage)?;
        if self.authenticate(token, out) {
            out.simple("OK");
        }
        DONE
    }

    /// Accepts a valid token, or writes an error. There are no users, so any user name works.
    fn authenticate(&mut self, token: &[u8], out: &mut Output) -> bool {
        if token.len() > LONGEST_TOKEN {
            self.reject_token(
                "WRONGPASS",
                "invalid username-password pair or user is disabled.",
                out,
            );
            return false;
        }
        let given = TokenDigest::new(token);
        let is_valid = {
            let settings = self.shared.settings.load();
            let tokens = &settings.tokens;
            if !tokens.checks_need_token() && !tokens.admin_needs_token() {
                let why =
                    "AUTH called without any password configured: the configuration has no tokens";
                out.error("ERR", why);
                return false;
            }
            tokens.is_valid(given)
        };
        if !is_valid {
            self.reject_token(
                "WRONGPASS",
                "invalid username-password pair or user is disabled.",
                out,
            );
            return false;
        }
        self.token = Some(given);
        self.look_up_access();
        true
    }

    /// Runs `HELLO`: accepts the protocol, the token and the name, or none of them.
    pub(super) fn hello<'a>(&mut self, words: Arguments<'a>, out: &mut Output) -> Outcome<'a> {
        let protocol = match words.at(1) {
            None => out.protocol,
            Some(b"2") => Protocol::Resp2,
            Some(b"3") => Protocol::Resp3,
            Some(_) => {
                out.error("NOPROTO", "unsupported protocol version; use 2 or 3");
                return DONE;
            }
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
                return Err(Mistake::Usage);
            }
        }
        if name.is_some_and(|name| !is_name(name)) {
            return bad_name(out);
        }
        if token.is_some_and(|token| !self.authenticate(token, out)) {
            return DONE;
        }
        if !self.may_check {
            let why = "HELLO must be called with the client already authenticated, or with AUTH user token";
            self.reject_token("NOAUTH", why, out);
            return DONE;
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
        DONE
    }

    pub(super) fn client<'a>(&mut self, words: Arguments<'a>, out: &mut Output) -> Outcome<'a> {
        let what = words.at(1).unwrap_or_default().to_ascii_uppercase();
        match (&*what, words.at(2), words.len()) {
            (b"ID", None, _) => out.count(self.id),
            (b"GETNAME", None, _) if self.name.is_empty() => out.null(),
            (b"GETNAME", None, _) => out.bulk(&self.name),
            (b"SETNAME", Some(name), 3) if is_name(name) => {
                self.name = name.into();
                out.simple("OK");
            }
            (b"SETNAME", Some(_), 3) => return bad_name(out),
            // The library of a client and eviction hints do not matter here.
            (b"SETINFO", Some(_), 4) | (b"NO-EVICT" | b"NO-TOUCH", Some(_), 3) => out.simple("OK"),
            (b"INFO" | b"LIST", None, _) => out.bulk(self.line()),
            _ => return Err(Mistake::Usage),
        }
        DONE
    }

    /// Forgets the token, the name, the protocol and the commands since `MULTI`.
    pub(super) fn reset<'a>(&mut self, out: &mut Output) -> Outcome<'a> {
        self.transaction = None;
        self.token = None;
        self.look_up_access();
        self.name = Box::default();
        out.protocol = Protocol::Resp2;
        out.simple("RESET");
        DONE
    }

    pub(super) fn quit<'a>(&mut self, out: &mut Output) -> Outcome<'a> {
        self.is_over = true;
        out.simple("OK");
        DONE
    }

    /// Returns the line about this connection in `CLIENT LIST`, which lists no others.
    fn line(&self) -> String {
        let Self { id, name, peer, .. } = self;
        let address = peer.address.map_or("unix".to_owned(), |address| address.to_string());
        let name = String::from_utf8_lossy(name);
        format!("id={id} addr={address} name={name} db=0 user=default\n")
    }

    /// Answers `INFO`. The section that lists all policies is written in the background: a worker would be busy for longer
    /// with every policy of the configuration.
    pub(super) fn info<'a>(&self, words: Arguments<'a>, out: &mut Output) -> Outcome<'a> {
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
        if is_wanted("server") {
            // Writing to a string cannot fail.
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
        if !is_wanted("tallygate") {
            out.bulk(text);
            return DONE;
        }
        let (gate, mut reply) = (self.shared.gate.clone(), Output::new(out.protocol));
        Ok(CommandResult::Later(Box::pin(async move {
            match run_in_background_in_order(move || text + &list_policies(&gate)).await {
                Ok(text) => reply.bulk(text),
                Err(error) => reply.error("ERR", format_args!("cannot list the policies: {error}")),
            }
            reply.bytes
        })))
    }
}

/// Returns the section of `INFO` about the policies.
fn list_policies(gate: &Gate) -> String {
    let mut text = String::from("# Tallygate\r\n");
    for policy in gate.policies() {
        let name = policy.name.escape_default();
        let keys = policy.usage().map_or(0, |usage| usage.keys);
        let _ = write!(text, "policy_{name}:keys={keys}\r\n");
    }
    text
}

/// Answers `CONFIG GET`, and no other form of `CONFIG`.
pub(super) fn config<'a>(words: Arguments<'a>, out: &mut Output) -> Outcome<'a> {
    if !words.at(1).is_some_and(|what| what.eq_ignore_ascii_case(b"GET")) || words.len() < 3 {
        out.error("ERR", "only CONFIG GET is supported; change the configuration file instead");
        return DONE;
    }
    let is_wanted = |name: &str| {
        words.from(2).any(|wanted| wanted == b"*" || wanted.eq_ignore_ascii_case(name.as_bytes()))
    };
    let found: Vec<_> = CONFIG.iter().filter(|(name, _)| is_wanted(name)).collect();
    out.map(found.len());
    for (name, value) in found {
        out.bulk(name);
        out.bulk(value);
    }
    DONE
}

/// Returns whether a connection may have a name, which is shown in a line of words.
fn is_name(name: &[u8]) -> bool {
    name.len() <= LONGEST_NAME && name.iter().all(u8::is_ascii_graphic)
}

fn bad_name<'a>(out: &mut Output) -> Outcome<'a> {
    out.error(
        "ERR",
        format_args!("Client names cannot contain spaces, newlines or special characters, nor have more than {LONGEST_NAME} bytes."),
    );
    DONE
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::sync::oneshot;

    use super::*;
    use crate::config::Config;
    use crate::resp::commands;
    use crate::resp::parse::{Parsed, Parser};

    /// Fault J4.
    #[tokio::test]
    async fn info_lists_the_policies_in_the_background() {
        // Only one list is written at a time: INFO has to wait for this one.
        let (began, begun) = oneshot::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let other = tokio::spawn(run_in_background_in_order(move || {
            let _ = began.send(());
            let _ = ended.recv();
        }));
        begun.await.expect("the other list is begun");
        let shared = Arc::new(crate::fuzzing::shared(&Config::demo()));
        let mut session = Session::new(shared, Peer { address: None, is_same_user: true });
        let mut parser = Parser::default();
        let (_, Parsed::Command(words)) = parser.next(b"INFO\r\n") else { panic!("a command") };
        let mut out = Output::default();
        let CommandResult::Later(mut reply) = commands::run(&mut session, words, &mut out) else {
            panic!("INFO listed the policies at once")
        };
        assert!((&mut reply).now_or_never().is_none(), "it waits for the other list");
        end.send(()).expect("the other list waits");
        other.await.expect("it ends").expect("it was written");
        let text = String::from_utf8(reply.await).expect("text");
        assert!(text.contains("redis_version:") && text.contains("policy_demo:keys=0"), "{text}");
    }
}
