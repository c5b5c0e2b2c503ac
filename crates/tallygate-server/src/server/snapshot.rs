//! When clients are saved and where: at the end, and every so often if it is asked for; and read again at the start.
//!
//! A snapshot that is damaged keeps the server from starting: whoever wants to forgive everybody says so by moving it
//! away. One that cannot be written to is told at the start, not at the end.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::config::Config;
use crate::gate::{Gate, Remembered};
use crate::options::ServeOptions;

/// Where clients are saved, and how often.
#[derive(Clone)]
pub(super) struct Snapshot {
    path: PathBuf,
    every: Option<Duration>,
    /// One at a time.
    saving: Arc<Mutex<()>>,
}

impl Snapshot {
    /// What flags or the configuration ask for. Only what is kept in memory can be lost.
    pub(super) fn asked_for(
        options: &ServeOptions,
        config: &Config,
        in_memory: bool,
    ) -> anyhow::Result<Option<Self>> {
        let Some(path) = options.snapshot.as_ref().or(config.snapshot.as_ref()) else {
            anyhow::ensure!(
                options.snapshot_every.is_none(),
                "--snapshot-every without --snapshot saves nothing; say where"
            );
            return Ok(None);
        };
        anyhow::ensure!(
            in_memory,
            "a snapshot is for store = \"memory\", and Redis keeps its clients itself; leave out one of the two"
        );
        let every = options.snapshot_every.or(config.snapshot_every);
        Ok(Some(Self { path: path.clone(), every, saving: Arc::default() }))
    }

    /// Reads who is remembered.
    pub(super) fn read(&self, config: &Config, max_keys: usize) -> anyhow::Result<Remembered> {
        let path = self.path.display();
        let started = Instant::now();
        let read = Remembered::read(&self.path, config, max_keys)
            .with_context(|| format!("the snapshot {path} is refused"))?;
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        tempfile::tempfile_in(folder)
            .with_context(|| format!("snapshots cannot be written to {}", folder.display()))?;
        let Some(read) = read else {
            tracing::info!(path = %path, "there is no snapshot yet; nobody is remembered");
            return Ok(Remembered::default());
        };
        tracing::info!(path = %path, clients = read.keys, took = ?started.elapsed(), "the snapshot was read");
        for policy in &read.gone {
            tracing::warn!(
                policy = &**policy,
                "a policy of the snapshot is no longer there; what was used under it is dropped"
            );
        }
        if read.evicted > 0 {
            tracing::warn!(
                clients = read.evicted,
                max_keys,
                "the snapshot has more clients than are kept now; the least used are forgotten"
            );
        }
        Ok(read)
    }

    /// Saves every so often, for as long as it is polled.
    pub(super) async fn keep_saving(&self, gate: &Arc<Gate>) {
        let Some(every) = self.every else { return std::future::pending().await };
        loop {
            tokio::time::sleep(every).await;
            if let Err(error) = self.save(gate).await {
                tracing::error!(error = format!("{error:#}"), "the one before stays");
            }
        }
    }

    /// Saves once.
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
            .with_context(|| format!("the snapshot {} cannot be written", self.path.display()))?;
        tracing::debug!(clients = saved.keys, bytes = saved.bytes, "clients were saved");
        Ok(())
    }
}
