//! Who may ask, and who may administer: tokens, from files and the environment.
//!
//! A token never stands in the configuration itself, and only its digest is kept: so there is nothing to print by
//! mistake, and comparing takes the same time wherever two tokens differ and however long they are. Several may be in
//! force at once: a new one is handed out before the old one is taken away.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{self, Deserializer};
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq as _};

/// The tokens in force.
#[derive(Default)]
pub(crate) struct Tokens {
    check: Vec<Digest>,
    admin: Vec<Digest>,
}

/// What a token lets its holder do. Who may administer may ask as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Ask for decisions.
    Check,
    /// Change what clients have used, and see who they are.
    Admin,
}

/// Why a client may not act in a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// It has presented no valid token.
    NoToken,
    /// Its token is for checks, and the role is the operator's.
    CheckToken,
    /// No admin token is configured, and the client is not the operator by where it connects from.
    AdminClosed,
}

/// A token as it was given, right or wrong.
#[derive(Clone, Copy)]
pub(crate) struct Given(Digest);

/// `[auth]`, as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct AuthTable {
    check: Vec<TokenSource>,
    admin: Vec<TokenSource>,
}

/// Where tokens come from: `"file:PATH"` or `"env:NAME"`.
#[derive(Debug)]
enum TokenSource {
    File(PathBuf),
    Variable(String),
}

type Digest = [u8; 32];

/// Shorter ones can be guessed.
const SHORTEST: usize = 16;
/// Longer ones are something else that got into the file.
const LONGEST: usize = 1024;

impl Tokens {
    /// Decides whether a client may act in a role, for every surface. The client's token, and whether it is the operator by
    /// where it connects from, are only looked up if they matter.
    pub(crate) fn admit(
        &self,
        role: Role,
        token: impl FnOnce() -> Option<Given>,
        is_operator: impl FnOnce() -> bool,
    ) -> Result<(), Denied> {
        match role {
            Role::Check if !self.guard_checks() => return Ok(()),
            Role::Admin if !self.guard_administration() => {
                return if is_operator() { Ok(()) } else { Err(Denied::AdminClosed) };
            }
            Role::Check | Role::Admin => {}
        }
        match (token().and_then(|token| self.role(token)), role) {
            (Some(Role::Admin), _) | (Some(Role::Check), Role::Check) => Ok(()),
            (Some(Role::Check), Role::Admin) => Err(Denied::CheckToken),
            (None, _) => Err(Denied::NoToken),
        }
    }

    /// Returns whether a token is one of the configuration.
    pub(crate) fn is_right(&self, given: Given) -> bool {
        self.role(given).is_some()
    }

    /// What a token lets its holder do; `None` if it is not one of the configuration.
    fn role(&self, given: Given) -> Option<Role> {
        // All of them are looked at: how long it takes tells nothing.
        let is_among = |known: &[Digest]| {
            let found =
                known.iter().fold(Choice::from(0), |found, one| found | one.ct_eq(&given.0));
            bool::from(found)
        };
        match (is_among(&self.admin), is_among(&self.check)) {
            (true, _) => Some(Role::Admin),
            (false, true) => Some(Role::Check),
            (false, false) => None,
        }
    }

    /// Returns tokens of which one administers: made at startup, for a server without a configuration.
    pub(crate) fn with_admin(token: &str) -> Self {
        Self { check: Vec::new(), admin: vec![Given::new(token.as_bytes()).0] }
    }

    /// Returns whether a check needs a token.
    pub(crate) fn guard_checks(&self) -> bool {
        !self.check.is_empty()
    }

    /// Returns whether the admin verbs need a token.
    pub(crate) fn guard_administration(&self) -> bool {
        !self.admin.is_empty()
    }
}

impl Given {
    pub(crate) fn new(token: &[u8]) -> Self {
        Self(Sha256::digest(token).into())
    }
}

impl AuthTable {
    /// The tokens that are there now. Files are looked for from a folder.
    pub(super) fn read(&self, folder: &Path) -> Result<Tokens, String> {
        let all = |role: &str, sources: &[TokenSource]| {
            let mut digests = Vec::new();
            for source in sources {
                source
                    .read_into(folder, &mut digests)
                    .map_err(|reason| format!("{role}: {reason}"))?;
            }
            Ok::<_, String>(digests)
        };
        Ok(Tokens { check: all("check", &self.check)?, admin: all("admin", &self.admin)? })
    }

    /// The files it names.
    pub(super) fn files(&self) -> impl Iterator<Item = &Path> {
        self.check.iter().chain(&self.admin).filter_map(|source| match source {
            TokenSource::File(path) => Some(&**path),
            TokenSource::Variable(_) => None,
        })
    }
}

impl TokenSource {
    fn read_into(&self, folder: &Path, digests: &mut Vec<Digest>) -> Result<(), String> {
        let text = match self {
            Self::File(path) => std::fs::read_to_string(folder.join(path))
                .map_err(|error| format!("cannot read {self}: {error}"))?,
            Self::Variable(name) => {
                std::env::var(name).map_err(|_| format!("{self} is not set, or is no text"))?
            }
        };
        let before = digests.len();
        for (index, token) in tokens_of(&text).enumerate() {
            let place = index + 1;
            if !(SHORTEST..=LONGEST).contains(&token.len()) {
                let length = token.len();
                return Err(format!(
                    "token {place} of {self} has {length} characters; use {SHORTEST} to {LONGEST}, such as from `openssl rand -hex 32`"
                ));
            }
            if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(format!(
                    "token {place} of {self} has characters that no header field can carry; use letters and digits"
                ));
            }
            digests.push(Given::new(token.as_bytes()).0);
        }
        if digests.len() == before {
            return Err(format!("{self} has no token; write one a line"));
        }
        Ok(())
    }
}

/// The tokens of a text: they stand apart by blanks or line ends, and from a word that begins with `#` on the rest of a line
/// is a remark.
pub fn tokens_of(text: &str) -> impl Iterator<Item = &str> {
    text.lines().flat_map(|line| line.split_whitespace().take_while(|word| !word.starts_with('#')))
}

impl<'de> Deserialize<'de> for TokenSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match text.split_once(':') {
            Some(("file", path)) if !path.is_empty() => Ok(Self::File(path.into())),
            Some(("env", name)) if !name.is_empty() => Ok(Self::Variable(name.into())),
            // What stands there may be a secret: it is not repeated.
            _ => Err(de::Error::custom(
                "tokens come from \"file:PATH\" or \"env:NAME\"; they do not stand here themselves",
            )),
        }
    }
}

impl fmt::Display for TokenSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Variable(name) => write!(f, "env:{name}"),
        }
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (check, admin) = (self.check.len(), self.admin.len());
        f.debug_struct("Tokens").field("check", &check).field("admin", &admin).finish()
    }
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Given(***)")
    }
}

/// Who may do what, for people.
impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = |f: &mut fmt::Formatter<'_>, count: usize, without: &str| match count {
            0 => f.write_str(without),
            1 => f.write_str("by token"),
            several => write!(f, "by any of {several} tokens"),
        };
        f.write_str("check ")?;
        by(f, self.check.len(), "by anybody")?;
        f.write_str(", admin ")?;
        by(f, self.admin.len(), "by the server's own user or root over a Unix socket")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "one-token-of-many-letters";
    const OTHER: &str = "other-token-of-many-letters";

    fn tokens(check: &[&str], admin: &[&str]) -> Tokens {
        let digests = |all: &[&str]| all.iter().map(|one| Given::new(one.as_bytes()).0).collect();
        Tokens { check: digests(check), admin: digests(admin) }
    }

    fn read(text: &str) -> Result<Tokens, String> {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("written");
        let folder = file.path().parent().expect("a folder");
        let name = PathBuf::from(file.path().file_name().expect("a name"));
        let table = AuthTable { check: vec![TokenSource::File(name)], admin: Vec::new() };
        table.read(folder).map_err(|error| error.replace(&*file.path().to_string_lossy(), "?"))
    }

    #[test]
    fn a_token_has_the_role_it_was_handed_out_for() {
        let tokens = tokens(&[ONE, "another"], &[OTHER]);
        let role = |token: &str| tokens.role(Given::new(token.as_bytes()));
        assert_eq!(role(ONE), Some(Role::Check));
        assert_eq!(role("another"), Some(Role::Check));
        assert_eq!(role(OTHER), Some(Role::Admin));
        for wrong in [
            "",
            "one",
            "one-token-of-many-letter",
            "one-token-of-many-letters ",
            "One-token-of-many-letters",
        ] {
            assert_eq!(role(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn who_may_act_in_a_role_depends_on_the_tokens_that_are_configured() {
        let none = || -> Option<Given> { None };
        let of = |token: &'static str| move || Some(Given::new(token.as_bytes()));
        let open = tokens(&[], &[]);
        assert_eq!(open.admit(Role::Check, none, || false), Ok(()));
        assert_eq!(open.admit(Role::Admin, none, || true), Ok(()));
        assert_eq!(open.admit(Role::Admin, of(ONE), || false), Err(Denied::AdminClosed));
        let guarded = tokens(&[ONE], &[OTHER]);
        for (role, token, admitted) in [
            (Role::Check, ONE, Ok(())),
            (Role::Check, OTHER, Ok(())),
            (Role::Check, "wrong", Err(Denied::NoToken)),
            (Role::Admin, ONE, Err(Denied::CheckToken)),
            (Role::Admin, OTHER, Ok(())),
            (Role::Admin, "wrong", Err(Denied::NoToken)),
        ] {
            // Where the client connects from does not matter once there are tokens.
            assert_eq!(guarded.admit(role, of(token), || true), admitted, "{role:?} {token}");
        }
        assert_eq!(guarded.admit(Role::Check, none, || true), Err(Denied::NoToken));
        assert_eq!(guarded.admit(Role::Admin, none, || true), Err(Denied::NoToken));
        let only_checks = tokens(&[ONE], &[]);
        assert_eq!(only_checks.admit(Role::Admin, none, || true), Ok(()));
        assert_eq!(only_checks.admit(Role::Admin, of(ONE), || false), Err(Denied::AdminClosed));
    }

    #[test]
    fn a_token_of_both_kinds_administers() {
        assert_eq!(tokens(&[ONE], &[ONE]).role(Given::new(ONE.as_bytes())), Some(Role::Admin));
    }

    #[test]
    fn a_file_has_any_number_of_tokens_and_remarks() {
        let text = format!(
            "# the old one, until May\n{ONE} #of-the-production-gateway\n\n  # the new one\n  {OTHER}\r\n"
        );
        let tokens = read(&text).expect("tokens");
        for token in [ONE, OTHER] {
            assert_eq!(tokens.role(Given::new(token.as_bytes())), Some(Role::Check), "{token}");
        }
        assert_eq!(tokens.check.len(), 2);
    }

    #[test]
    fn what_is_no_token_is_refused_without_being_told() {
        for (text, told) in [
            ("", "has no token"),
            ("# only a remark\n", "has no token"),
            ("a-token-that-is-long-enough\nhunter2\n", "token 2 of file:"),
            ("hunter2-hunter2-hünter2", "characters that no header field can carry"),
        ] {
            let reason = read(text).expect_err(text);
            assert!(reason.contains(told), "{reason}");
            assert!(!reason.contains("hunter2"), "{reason}");
        }
    }

    #[test]
    fn h10_nothing_printed_tells_a_token() {
        let tokens = tokens(&[ONE], &[OTHER, OTHER]);
        assert_eq!(format!("{tokens:?}"), "Tokens { check: 1, admin: 2 }");
        assert_eq!(tokens.to_string(), "check by token, admin by any of 2 tokens");
        assert_eq!(format!("{:?}", Given::new(b"x")), "Given(***)");
    }
}
