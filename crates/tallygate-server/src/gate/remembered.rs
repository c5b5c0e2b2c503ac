//! Snapshots of the memory store: usage survives a restart.
//!
//! A snapshot contains the keys of every policy, the overrides that were set at run time, and the keys of
//! `CL.THROTTLE`. It does not contain overrides of the configuration. If a policy is no longer configured, its keys are
//! dropped. Reservations end with the process, and stay charged.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use tallygate::clock::SystemClock;
use tallygate::snapshot::{SnapshotError, SnapshotReader, save_snapshot};
use tallygate::store::{Capacity, MemoryStore};
use tallygate::tiers::{Access, ClientRule, Override};
use tallygate::{Policy, Tiers};

use super::Gate;
use super::cell::Cell;
use crate::config::Config;

/// The stores of a snapshot, until the gate takes them.
#[derive(Default)]
pub(crate) struct RestoredStores {
    pub(super) policies: HashMap<Box<str>, RestoredPolicy>,
    pub(super) throttle: Option<MemoryStore<Cell>>,
    /// The number of keys.
    pub(crate) keys: usize,
    /// The number of keys dropped because `max_keys` is lower than before.
    pub(crate) evicted: u64,
    /// The policies that are no longer configured.
    pub(crate) gone: Vec<Box<str>>,
}

pub(super) struct RestoredPolicy {
    pub(super) store: MemoryStore<ClientRule>,
    pub(super) overrides: Vec<(Box<[u8]>, Override)>,
}

/// The size of a snapshot that was written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SnapshotSize {
    pub(crate) keys: u64,
    pub(crate) bytes: u64,
}

/// No policy of a configuration has a control character in its name.
const THROTTLE: &str = "\u{1}cl.throttle";

impl RestoredStores {
    /// Reads a snapshot; `None` if the file does not exist. Fails if any part of it is damaged.
    pub(crate) fn read(
        path: &Path,
        config: &Config,
        max_keys: usize,
    ) -> Result<Option<Self>, SnapshotError> {
        let Some(mut snapshot) = SnapshotReader::open(path)? else { return Ok(None) };
        let mut all = Self::default();
        while let Some(mut section) = snapshot.next_section()? {
            let (capacity, clock) = (Capacity::of(max_keys), SystemClock::new());
            let usage = if section.name() == THROTTLE {
                let rule = Cell::any();
                let store = MemoryStore::restored_states(&rule, capacity, clock, &mut section)?;
                all.throttle.insert(store).usage()
            } else if let Some(policy) = config.policies.get(section.name()) {
                let own = policies(&policy.tiers);
                let share = |saved: Policy| {
                    own.iter().find(|own| ***own == saved).cloned().unwrap_or_else(|| saved.into())
                };
                let store = MemoryStore::restored(capacity, clock, &mut section, share)?;
                let usage = store.usage();
                let overrides = section.overrides().to_vec();
                let name = section.name().into();
                all.policies.insert(name, RestoredPolicy { store, overrides });
                usage
            } else {
                all.gone.push(section.name().into());
                continue;
            };
            all.keys += usage.keys;
            all.evicted += usage.evicted;
        }
        Ok(Some(all))
    }
}

/// Returns the policies of the tiers.
fn policies(tiers: &Tiers) -> Vec<Arc<Policy>> {
    let tiers = [tiers.base()].into_iter().chain(tiers.by_name().into_iter().map(|(_, tier)| tier));
    tiers
        .filter_map(|access| match access {
            Access::Limited(policy) => Some(policy),
            Access::Unlimited | Access::Blocked => None,
        })
        .collect()
}

impl Gate {
    /// Writes a snapshot of the memory stores.
    pub(crate) fn save(&self, path: &Path) -> io::Result<SnapshotSize> {
        let mut keys = 0;
        let bytes = save_snapshot(path, |snapshot| {
            for entry in self.policies() {
                let Some(store) = entry.limiter.store().memory() else { continue };
                keys += store.save(&entry.name, &entry.limiter.overrides(), snapshot)?;
            }
            if let Some(store) = self.throttle.in_memory_store() {
                keys += store.save_states(&Cell::any(), THROTTLE, snapshot)?;
            }
            Ok(())
        })?;
        Ok(SnapshotSize { keys, bytes })
    }
}
