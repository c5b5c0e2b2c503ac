//! The scripts that a server has.

use std::sync::{PoisonError, RwLock};

/// The scripts that a server is known to have. The list is cleared for a new connection, which may lead to another
/// server.
#[derive(Debug, Default)]
pub(crate) struct LoadedScripts(RwLock<Vec<u64>>);

impl LoadedScripts {
    pub(crate) fn has(&self, script: u64) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).contains(&script)
    }

    pub(crate) fn add(&self, script: u64) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if !known.contains(&script) {
            known.push(script);
        }
    }

    pub(crate) fn remove(&self, script: u64) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).retain(|known| *known != script);
    }

    pub(crate) fn clear(&self) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
