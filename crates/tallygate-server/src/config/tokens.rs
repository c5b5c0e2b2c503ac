//! Tokens of clients and administrators, from files and environment variables.
//!
//! The configuration never contains a token itself, and the server keeps only digests. So a token cannot be printed by
//! mistake, and a comparison takes the same time wherever two tokens differ. Several tokens can be valid at once, so
//! that tokens can be rotated.

use std::env::VarError;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{self, Deserializer};
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq as _};

use super::regular_file::{MAX_SECRET_BYTES, read_text};

/// The valid tokens.
#[derive(Default)]
pub(crate) struct Tokens {
    check: Vec<Digest>,
    admin: Vec<Digest>,
}

/// What a token allows. An admin token also allows checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Check limits.
    Check,
    /// Change the state of clients, and list them.
    Admin,
}

/// Why a client does not have a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessDenied {
    /// The client presented no valid token.
    NoToken,
    /// The client presented a check token, but the role is admin.
    CheckToken,
    /// No admin token is configured, and the connection is not the operator's.
    AdminClosed,
}

/// The digest of a token that a client presented, valid or not.
#[derive(Clone, Copy)]
pub(crate) struct TokenDigest(Digest);

/// The table `[auth]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct AuthTable {
    check: Option<Vec<TokenSource>>,
    admin: Option<Vec<TokenSource>>,
}

/// The source of tokens: `"file:PATH"` or `"env:NAME"`.
#[derive(Debug)]
enum TokenSource {
    File(PathBuf),
    Variable(String),
}

type Digest = [u8; 32];

/// The shortest token: shorter ones could be guessed.
const SHORTEST: usize = 16;
/// The longest token, in bytes: longer ones are something else that got into the file. Longer ones of clients are not hashed.
pub(crate) const LONGEST_TOKEN: usize = 1024;

impl Tokens {
    /// Decides whether a client has a role, for every surface. Its token, and whether its connection is the operator's,
    /// are only evaluated if they matter.
    pub(crate) fn authorize(
        &self,
        role: Role,
        token: impl FnOnce() -> Option<TokenDigest>,
        is_operator: impl FnOnce() -> bool,
    ) -> Result<(), AccessDenied> {
        match role {
            Role::Check if !self.checks_need_token() => return Ok(()),
            Role::Admin if !self.admin_needs_token() => {
                return if is_operator() { Ok(()) } else { Err(AccessDenied::AdminClosed) };
            }
            Role::Check | Role::Admin => {}
        }
        match (token().and_then(|token| self.role(token)), role) {
            (Some(Role::Admin), _) | (Some(Role::Check), Role::Check) => Ok(()),
            (Some(Role::Check), Role::Admin) => Err(AccessDenied::CheckToken),
            (None, _) => Err(AccessDenied::NoToken),
        }
    }

    /// Returns whether a token is valid.
    pub(crate) fn is_valid(&self, digest: TokenDigest) -> bool {
        self.role(digest).is_some()
    }

    /// Returns the role of a token; `None` if it is not valid.
    fn role(&self, digest: TokenDigest) -> Option<Role> {
        // Compare with all tokens, so that the time reveals nothing.
        let is_among = |known: &[Digest]| {
            let found =
                known.iter().fold(Choice::from(0), |found, one| found | one.ct_eq(&digest.0));
            bool::from(found)
        };
        match (is_among(&self.admin), is_among(&self.check)) {
            (true, _) => Some(Role::Admin),
            (false, true) => Some(Role::Check),
            (false, false) => None,
        }
    }

    /// Returns tokens with one admin token, which is made at startup of a server without a configuration.
    pub(crate) fn with_admin(token: &str) -> Self {
        Self { check: Vec::new(), admin: vec![TokenDigest::new(token.as_bytes()).0] }
    }

    /// Returns whether a check needs a token.
    pub(crate) fn checks_need_token(&self) -> bool {
        !self.check.is_empty()
    }

    /// Returns whether the admin verbs need a token.
    pub(crate) fn admin_needs_token(&self) -> bool {
        !self.admin.is_empty()
    }
}

impl TokenDigest {
    pub(crate) fn new(token: &[u8]) -> Self {
        Self(Sha256::digest(token).into())
    }
}

impl AuthTable {
    /// Reads the tokens. Relative paths start at `folder`.
    pub(super) fn read(&self, folder: &Path) -> Result<Tokens, String> {
        if self.check.is_none() && self.admin.is_none() {
            return Err("the table is empty; set `check` or `admin`, or remove it".to_owned());
        }
        let all = |role: &str, sources: &Option<Vec<TokenSource>>| {
            let mut digests = Vec::new();
            if sources.as_ref().is_some_and(Vec::is_empty) {
                return Err(format!(
                    "{role} lists no tokens, so it would protect nothing; add \"file:PATH\" or \"env:NAME\", or remove it"
                ));
            }
            for source in sources.iter().flatten() {
                source
                    .read_into(folder, &mut digests)
                    .map_err(|reason| format!("{role}: {reason}"))?;
            }
            Ok::<_, String>(digests)
        };
        Ok(Tokens { check: all("check", &self.check)?, admin: all("admin", &self.admin)? })
    }

    /// Returns the files that the table names.
    pub(super) fn files(&self) -> impl Iterator<Item = &Path> {
        self.check.iter().chain(&self.admin).flatten().filter_map(|source| match source {
            TokenSource::File(path) => Some(&**path),
            TokenSource::Variable(_) => None,
        })
    }

    /// Returns the environment variables that the table names.
    pub(super) fn variables(&self) -> impl Iterator<Item = &str> {
        self.check.iter().chain(&self.admin).flatten().filter_map(|source| match source {
            TokenSource::File(_) => None,
            TokenSource::Variable(name) => Some(&**name),
        })
    }
}

impl TokenSource {
    fn read_into(&self, folder: &Path, digests: &mut Vec<Digest>) -> Result<(), String> {
        let text = match self {
            Self::File(path) => read_text(&folder.join(path), MAX_SECRET_BYTES)
                .map_err(|error| format!("cannot read {self}: {error}"))?,
            // Not the error itself, which would show a value that is not valid UTF-8.
            Self::Variable(name) => std::env::var(name).map_err(|error| {
                let reason = match error {
                    VarError::NotPresent => "is not set",
                    VarError::NotUnicode(_) => "is not valid UTF-8",
                };
                format!("the environment variable {name} {reason}")
            })?,
        };
        let before = digests.len();
        for (index, token) in tokens_of(&text).enumerate() {
            let place = index + 1;
            if !(SHORTEST..=LONGEST_TOKEN).contains(&token.len()) {
                let length = token.len();
                return Err(format!(
                    "token {place} of {self} has {length} characters; a token must have {SHORTEST} to {LONGEST_TOKEN} (try `openssl rand -hex 32`)"
                ));
            }
            if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(format!(
                    "token {place} of {self} has characters that are not allowed in a header field; use ASCII letters and digits"
                ));
            }
            digests.push(TokenDigest::new(token.as_bytes()).0);
        }
        if digests.len() == before {
            return Err(format!("{self} contains no token; write one per line"));
        }
        Ok(())
    }
}

/// Returns the tokens of a text. They are separated by white space; a word that starts with `#` begins a comment, up to
/// the end of the line.
pub fn tokens_of(text: &str) -> impl Iterator<Item = &str> {
    text.lines().flat_map(|line| line.split_whitespace().take_while(|word| !word.starts_with('#')))
}

impl<'de> Deserialize<'de> for TokenSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match text.split_once(':') {
            Some(("file", path)) if !path.is_empty() => Ok(Self::File(path.into())),
            Some(("env", name)) if !name.is_empty() => Ok(Self::Variable(name.into())),
            // Do not quote the value: it may be a secret.
            _ => Err(de::Error::custom(
                "expected \"file:PATH\" or \"env:NAME\"; a token itself must not be in the configuration",
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

impl fmt::Debug for TokenDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenDigest(***)")
    }
}

/// Shows who may check and who may administer.
impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let describe = |f: &mut fmt::Formatter<'_>, count: usize, without: &str| match count {
            0 => f.write_str(without),
            1 => f.write_str("needs a token"),
            several => write!(f, "needs one of {several} tokens"),
        };
        f.write_str("check ")?;
        describe(f, self.check.len(), "is open to everyone")?;
        f.write_str(", admin ")?;
        describe(
            f,
            self.admin.len(),
            "is open to the server's own user and root over a Unix socket",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "one-token-of-many-letters";
    const OTHER: &str = "other-token-of-many-letters";

    fn tokens(check: &[&str], admin: &[&str]) -> Tokens {
        let digests =
            |all: &[&str]| all.iter().map(|one| TokenDigest::new(one.as_bytes()).0).collect();
        Tokens { check: digests(check), admin: digests(admin) }
    }

    fn read(text: &str) -> Result<Tokens, String> {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("written");
        let folder = file.path().parent().expect("a folder");
        let name = PathBuf::from(file.path().file_name().expect("a name"));
        let table = AuthTable { check: Some(vec![TokenSource::File(name)]), admin: None };
        table.read(folder).map_err(|error| error.replace(&*file.path().to_string_lossy(), "?"))
    }

    #[test]
    fn a_token_has_the_role_of_its_list() {
        let tokens = tokens(&[ONE, "another"], &[OTHER]);
        let role = |token: &str| tokens.role(TokenDigest::new(token.as_bytes()));
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
    fn the_configured_tokens_determine_the_roles() {
        let none = || -> Option<TokenDigest> { None };
        let of = |token: &'static str| move || Some(TokenDigest::new(token.as_bytes()));
        let open = tokens(&[], &[]);
        assert_eq!(open.authorize(Role::Check, none, || false), Ok(()));
        assert_eq!(open.authorize(Role::Admin, none, || true), Ok(()));
        assert_eq!(open.authorize(Role::Admin, of(ONE), || false), Err(AccessDenied::AdminClosed));
        let guarded = tokens(&[ONE], &[OTHER]);
        for (role, token, allowed) in [
            (Role::Check, ONE, Ok(())),
            (Role::Check, OTHER, Ok(())),
            (Role::Check, "wrong", Err(AccessDenied::NoToken)),
            (Role::Admin, ONE, Err(AccessDenied::CheckToken)),
            (Role::Admin, OTHER, Ok(())),
            (Role::Admin, "wrong", Err(AccessDenied::NoToken)),
        ] {
            // With tokens, the origin of the connection does not matter.
            assert_eq!(guarded.authorize(role, of(token), || true), allowed, "{role:?} {token}");
        }
        assert_eq!(guarded.authorize(Role::Check, none, || true), Err(AccessDenied::NoToken));
        assert_eq!(guarded.authorize(Role::Admin, none, || true), Err(AccessDenied::NoToken));
        let only_checks = tokens(&[ONE], &[]);
        assert_eq!(only_checks.authorize(Role::Admin, none, || true), Ok(()));
        assert_eq!(
            only_checks.authorize(Role::Admin, of(ONE), || false),
            Err(AccessDenied::AdminClosed)
        );
    }

    #[test]
    fn a_token_of_both_kinds_administers() {
        assert_eq!(
            tokens(&[ONE], &[ONE]).role(TokenDigest::new(ONE.as_bytes())),
            Some(Role::Admin)
        );
    }

    #[test]
    fn a_file_has_any_number_of_tokens_and_comments() {
        let text = format!(
            "# the old one, until May\n{ONE} #of-the-production-gateway\n\n  # the new one\n  {OTHER}\r\n"
        );
        let tokens = read(&text).expect("tokens");
        for token in [ONE, OTHER] {
            assert_eq!(
                tokens.role(TokenDigest::new(token.as_bytes())),
                Some(Role::Check),
                "{token}"
            );
        }
        assert_eq!(tokens.check.len(), 2);
    }

    #[test]
    fn an_invalid_token_is_rejected_without_being_printed() {
        for (text, expected) in [
            ("", "contains no token"),
            ("# only a remark\n", "contains no token"),
            ("a-token-that-is-long-enough\nhunter2\n", "token 2 of file:"),
            ("hunter2-hunter2-hünter2", "characters that are not allowed in a header field"),
        ] {
            let reason = read(text).expect_err(text);
            assert!(reason.contains(expected), "{reason}");
            assert!(!reason.contains("hunter2"), "{reason}");
        }
    }

    /// Fault H10.
    #[test]
    fn no_printed_text_contains_a_token() {
        let tokens = tokens(&[ONE], &[OTHER, OTHER]);
        assert_eq!(format!("{tokens:?}"), "Tokens { check: 1, admin: 2 }");
        assert_eq!(tokens.to_string(), "check needs a token, admin needs one of 2 tokens");
        assert_eq!(format!("{:?}", TokenDigest::new(b"x")), "TokenDigest(***)");
    }
}
