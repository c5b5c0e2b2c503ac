//! Keeps the configuration current: on SIGHUP, when asked, and when the file changes.
//!
//! The file and those it names, tokens and certificates, are looked at twice a second, by their contents: so a rename, a
//! symlink swap and a rewrite in place are all noticed. What is found is taken after two equal looks, so that a file
//! being written is not half taken. A file with a mistake changes nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use tokio::signal::unix::Signal;
use tokio::sync::{mpsc, oneshot};

use super::notify;
use crate::config::Config;
use crate::metrics::OutcomeLabels;
use crate::shared::{Settings, Shared};

const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How often a file that changes while it is read is read again.
const TRIES: u32 = 10;

/// The configuration, looked at again and again.
pub(super) struct Watched {
    path: PathBuf,
    text: Digest,
    /// The files that the text names.
    names: Vec<PathBuf>,
    /// All of it, as it was when it was read last.
    in_force: Digest,
}

/// What stands for contents, so that secrets need not be kept.
type Digest = [u8; 32];

impl Watched {
    /// Looks at it for the first time: before it is read, so that what changes from then on is noticed.
    pub(super) fn new(path: &Path) -> Self {
        let nothing = Digest::default();
        let mut watched =
            Self { path: path.to_owned(), text: nothing, names: Vec::new(), in_force: nothing };
        watched.in_force = watched.look();
        watched
    }

    /// What stands for everything that is there now.
    fn look(&mut self) -> Digest {
        // Without descriptors nothing can be seen, and nothing has changed.
        self.try_look().unwrap_or(self.in_force)
    }

    fn try_look(&mut self) -> Result<Digest, NoDescriptors> {
        let text = contents(&self.path)?;
        let digest = digest(text.as_deref());
        if self.text != digest {
            self.text = digest;
            let text = text.as_deref().and_then(|text| std::str::from_utf8(text).ok());
            self.names = text.map(Config::files_named).unwrap_or_default();
        }
        let folder = self.path.parent().unwrap_or(Path::new(""));
        let mut all = Sha256::new_with_prefix(digest);
        for name in &self.names {
            all.update(self::digest(contents(&folder.join(name))?.as_deref()));
        }
        Ok(all.finalize().into())
    }

    /// Reads it, and what stands for what was read: what changed meanwhile is read again, a few times.
    fn read(&mut self) -> (Digest, anyhow::Result<Config>) {
        let mut before = self.look();
        for _ in 0..TRIES {
            let read = Config::read(&self.path);
            let after = self.look();
            if before == after {
                return (after, read);
            }
            before = after;
        }
        (before, Err(anyhow::anyhow!("{} is being written all the time", self.path.display())))
    }
}

/// The system lets the server open nothing more at this time.
struct NoDescriptors;

/// What a file has in it, if it can be read.
fn contents(path: &Path) -> Result<Option<Vec<u8>>, NoDescriptors> {
    let no_more = [Errno::MFILE, Errno::NFILE].map(|error| Some(error.raw_os_error()));
    match std::fs::read(path) {
        Err(error) if no_more.contains(&error.raw_os_error()) => Err(NoDescriptors),
        read => Ok(read.ok()),
    }
}

fn digest(contents: Option<&[u8]>) -> Digest {
    let missing = [u8::from(contents.is_none())];
    Sha256::new_with_prefix(missing).chain_update(contents.unwrap_or_default()).finalize().into()
}

/// Watches until the server stops.
pub(super) async fn watch(
    mut config: Option<Watched>,
    mut hangup: Signal,
    shared: Arc<Shared>,
    mut asked: mpsc::Receiver<oneshot::Sender<Result<(), String>>>,
) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut seen = config.as_ref().map(|config| config.in_force);
    loop {
        let (is_own_idea, tell) = tokio::select! {
            _ = hangup.recv() => (false, None),
            Some(tell) = asked.recv() => (false, Some(tell)),
            _ = ticks.tick() => {
                let Some(config) = &mut config else { continue };
                let found = Some(config.look());
                let is_steady = found == seen;
                seen = found;
                if !is_steady || seen == Some(config.in_force) {
                    continue;
                }
                (true, None)
            }
        };
        let result = match &mut config {
            Some(config) => {
                let (found, read) = config.read();
                let is_steady = seen == Some(found);
                seen = Some(found);
                // Nobody waits: it is looked at again.
                if is_own_idea && !is_steady {
                    continue;
                }
                notify::reloading();
                // Also what is refused is not looked at again until it changes.
                config.in_force = found;
                put_in_force(read, &shared)
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

fn put_in_force(read: anyhow::Result<Config>, shared: &Shared) -> Result<(), String> {
    let count =
        |outcome| shared.gate.metrics.reloads.get_or_create(&OutcomeLabels { outcome }).inc();
    match read {
        Ok(config) => {
            shared.gate.put_in_force(&config);
            shared.settings.store(Arc::new(Settings::of(&config)));
            shared.renew(&config.tls);
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
