//! Redis or Valkey, and where its binary is.

use std::env;
use std::path::{Path, PathBuf};

/// Which server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flavor {
    /// `TALLYGATE_REDIS_SERVER`, or `redis-server` on the path.
    Redis,
    /// `TALLYGATE_VALKEY_SERVER`, or `target/test-servers/valkey-server` of this workspace.
    Valkey,
}

impl Flavor {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Redis, Self::Valkey];

    /// `redis` or `valkey`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Valkey => "valkey",
        }
    }

    /// The server's program.
    ///
    /// # Panics
    ///
    /// If it is not installed.
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
            "no {}-server: run scripts/install-test-servers, or say in {} where it is",
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

fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn on_path(program: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?)
        .map(|folder| folder.join(program))
        .find(|binary| binary.is_file())
}
