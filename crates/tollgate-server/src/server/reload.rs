//! Keeps the configuration current: on SIGHUP, when asked, and when the file changes.
//!
//! The file is looked at twice a second, by its contents: so a rename, a symlink swap and a rewrite in place are all
//! noticed. What is found is taken after two equal looks, so that a file being written is not half taken. A file with a
//! mistake changes nothing.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::Signal;
use tokio::sync::{mpsc, oneshot};

use super::{ConfigPath, Settings, Shared, notify};
use crate::config::Config;
use crate::metrics::OutcomeLabels;

const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Watches until the server stops. `in_force` is the file as it was when the configuration was read first.
pub(super) async fn watch(
    path: ConfigPath,
    mut in_force: Option<Vec<u8>>,
    mut hangup: Signal,
    shared: Arc<Shared>,
    mut asked: mpsc::Receiver<oneshot::Sender<Result<(), String>>>,
) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut seen = in_force.clone();
    loop {
        let tell = tokio::select! {
            _ = hangup.recv() => None,
            Some(tell) = asked.recv() => Some(tell),
            _ = ticks.tick() => {
                let Some(path) = path.as_deref() else { continue };
                let found = look(path);
                let is_steady = found == seen;
                seen = found;
                if !is_steady || seen == in_force {
                    continue;
                }
                None
            }
        };
        notify::reloading();
        let result = match path.as_deref() {
            Some(path) => {
                // Also what is refused is not looked at again until it changes.
                in_force = look(path);
                seen.clone_from(&in_force);
                put_in_force(path, &shared)
            }
            None => {
                Err("no configuration was given at the start; there is nothing to read".to_owned())
            }
        };
        notify::ready();
        if let Some(tell) = tell {
            let _ = tell.send(result);
        }
    }
}

pub(super) fn look(path: &Path) -> Option<Vec<u8>> {
    std::fs::read(path).ok()
}

fn put_in_force(path: &Path, shared: &Shared) -> Result<(), String> {
    let count =
        |outcome| shared.gate.metrics.reloads.get_or_create(&OutcomeLabels { outcome }).inc();
    match Config::read(path) {
        Ok(config) => {
            shared.gate.put_in_force(&config);
            shared.settings.store(Arc::new(Settings::of(&config)));
            count("applied");
            tracing::info!(policies = config.policies.len(), "the configuration was read anew");
            Ok(())
        }
        Err(error) => {
            count("refused");
            let error = format!("{error:#}");
            tracing::error!(
                error,
                "the configuration has a mistake; the one before stays in force"
            );
            Err(error)
        }
    }
}
