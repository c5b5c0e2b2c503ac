//! What clients used, from one process to the next.
//!
//! Saved are the clients of every policy with the overrides that were set at run time, and those of `CL.THROTTLE`.
//! Overrides of the configuration are not: the next one says what they are. A policy that is gone by then is passed over,
//! and so is what was used under it. Reservations end with the process that made them, and stay charged.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use tallygate::{
    Access, Capacity, MemoryStore, Override, Plan, Policy, SnapshotError, SnapshotReader,
    SystemClock, Tiers, save_snapshot,
};

use super::cell::Cell;
use super::{Gate, Limiter};
use crate::config::Config;

/// Stores that were read from a snapshot, until somebody takes them.
#[derive(Default)]
pub(crate) struct Remembered {
    pub(super) policies: HashMap<Box<str>, RememberedPolicy>,
    pub(super) throttle: Option<MemoryStore<Cell>>,
    /// How many clients there are.
    pub(crate) keys: usize,
    /// How many there was no room for.
    pub(crate) evicted: u64,
    /// The policies that are no longer there.
    pub(crate) gone: Vec<Box<str>>,
}

pub(super) struct RememberedPolicy {
    pub(super) store: MemoryStore<Plan>,
    pub(super) overrides: Vec<(Box<[u8]>, Override)>,
}

/// What was saved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Saved {
    pub(crate) keys: u64,
    pub(crate) bytes: u64,
}

/// No policy of a configuration has a control character in its name.
const THROTTLE: &str = "\u{1}cl.throttle";

impl Remembered {
    /// Reads a snapshot, whole or not at all; `None` if there is none.
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
                all.policies.insert(name, RememberedPolicy { store, overrides });
                usage
            } else {
                all.gone.push(section.name().into());
                continue;
            };
            all.keys += usage.keys;
            // A client that has used much may find no place either.
            all.evicted += usage.evicted + usage.refused;
        }
        Ok(Some(all))
    }
}

/// The policies of some rules.
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
    /// Saves what clients have used. Clients in Redis are saved there.
    pub(crate) fn save(&self, path: &Path) -> io::Result<Saved> {
        let mut keys = 0;
        let bytes = save_snapshot(path, |snapshot| {
            for entry in self.policies() {
                let Limiter::Memory(limiter) = &entry.limiter else { continue };
                keys += limiter.store().save(&entry.name, &limiter.overrides(), snapshot)?;
            }
            if let Some(store) = self.throttle.in_memory_store() {
                keys += store.save_states(&Cell::any(), THROTTLE, snapshot)?;
            }
            Ok(())
        })?;
        Ok(Saved { keys, bytes })
    }
}
