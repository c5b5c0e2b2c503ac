//! Snapshots of the memory store: loaded at startup, written on shutdown and, if configured, periodically.
//!
//! A damaged snapshot prevents startup: to start with an empty store, the operator moves the file away. A directory
//! that is not writable is detected at startup, not on shutdown.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::config::Config;
use crate::gate::{Gate, RestoredStores};

/// The path and the interval of snapshots.
#[derive(Clone)]
pub(super) struct Snapshot {
    path: PathBuf,
    every: Option<Duration>,
    /// Held while a snapshot is written.
    saving: Arc<Mutex<()>>,
}

impl Snapshot {
    /// Returns the settings of the configuration; `None` if there are no snapshots.
    pub(super) fn of(config: &Config) -> Option<Self> {
        let path = config.snapshot.clone()?;
        Some(Self { path, every: config.snapshot_every, saving: Arc::default() })
    }

    /// Loads the snapshot.
    pub(super) fn read(&self, config: &Config, max_keys: usize) -> anyhow::Result<RestoredStores> {
        let path = self.path.display();
        let started = Instant::now();
        let read = RestoredStores::read(&self.path, config, max_keys)
            .with_context(|| format!("cannot load the snapshot {path}"))?;
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        tempfile::tempfile_in(folder).with_context(|| {
            format!("cannot write snapshots to the directory {}", folder.display())
        })?;
        let Some(read) = read else {
            tracing::info!(path = %path, "no snapshot found; starting with an empty store");
            return Ok(RestoredStores::default());
        };
        tracing::info!(path = %path, keys = read.keys, took = ?started.elapsed(), "snapshot loaded");
        for policy in &read.gone {
            tracing::warn!(
                policy = &**policy,
                "the snapshot has a policy that is not in the configuration; dropping its keys"
            );
        }
        if read.evicted > 0 {
            tracing::warn!(
                keys = read.evicted,
                max_keys,
                "the snapshot has more keys than max_keys; dropping the least used"
            );
        }
        Ok(read)
    }

    /// Writes snapshots periodically. Never returns.
    pub(super) async fn keep_saving(&self, gate: &Arc<Gate>) {
        let Some(every) = self.every else { return std::future::pending().await };
        loop {
            tokio::time::sleep(every).await;
            if let Err(error) = self.save(gate).await {
                tracing::error!(
                    error = format!("{error:#}"),
                    "snapshot failed; keeping the previous one"
                );
            }
        }
    }

    /// Writes one snapshot.
    pub(super) async fn save(&self, gate: &Arc<Gate>) -> anyhow::Result<()> {
        let (this, gate) = (self.clone(), gate.clone());
        let saved = tokio::task::spawn_blocking(move || {
            let _alone = this.saving.lock().unwrap_or_else(PoisonError::into_inner);
            let started = Instant::now();
            let saved = gate.save(&this.path);
            let snapshots = &gate.metrics.snapshots;
            match &saved {
                Ok(saved) => snapshots.written(saved.keys, saved.bytes, started.elapsed()),
                Err(_) => snapshots.failed(),
            }
            saved
        });
        let saved = saved
            .await?
            .with_context(|| format!("cannot write the snapshot {}", self.path.display()))?;
        tracing::debug!(keys = saved.keys, bytes = saved.bytes, "snapshot written");
        Ok(())
    }
}
