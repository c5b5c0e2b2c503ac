//! Redis or Valkey, and the path of its binary.

use std::env;
use std::path::{Path, PathBuf};

/// The kind of server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flavor {
    /// Redis: the binary in `TALLYGATE_REDIS_SERVER`, or `redis-server` on the path.
    Redis,
    /// Valkey: the binary in `TALLYGATE_VALKEY_SERVER`, or `target/test-servers/valkey-server` of this workspace.
    Valkey,
}

impl Flavor {
    /// Both kinds.
    pub const ALL: [Self; 2] = [Self::Redis, Self::Valkey];

    /// Returns `redis` or `valkey`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Valkey => "valkey",
        }
    }

    /// Returns the path of the binary.
    ///
    /// # Panics
    ///
    /// Panics if it is not installed.
    #[must_use]
    pub fn binary(self) -> PathBuf {
        let binary = env::var_os(self.variable())
            .map(PathBuf::from)
            .or_else(|| match self {
                Self::Redis => on_path("redis-server"),
                Self::Valkey => Some(workspace().join("target/test-servers/valkey-server")),
            })
            .filter(|binary| binary.is_file());
        assert!(
            binary.is_some(),
            "{}-server not found; run scripts/install-test-servers, or set {} to its path",
            self.name(),
            self.variable(),
        );
        binary.expect("just asserted")
    }

    fn variable(self) -> &'static str {
        match self {
            Self::Redis => "TALLYGATE_REDIS_SERVER",
            Self::Valkey => "TALLYGATE_VALKEY_SERVER",
        }
    }
}

pub(super) fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn on_path(program: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?)
        .map(|folder| folder.join(program))
        .find(|binary| binary.is_file())
}
