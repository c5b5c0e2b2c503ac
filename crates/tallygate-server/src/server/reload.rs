//! Reloads the configuration: on SIGHUP, on an admin request, and when the file changes.
//!
//! The contents of the file, and of the tokens and certificates that it names, are compared twice per second. So a
//! rename, a symlink swap and a rewrite in place are all noticed. A change is applied when two comparisons in a row see
//! the same contents, so that a half-written file is not used. An invalid file changes nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use tokio::signal::unix::Signal;
use tokio::sync::{mpsc, oneshot};

use super::notify;
use crate::config::{Config, MAX_CONFIG_BYTES, RestartSettings, Tokens, envoy_files, read_file};
use crate::metrics::OutcomeLabels;
use crate::options::ServeOptions;
use crate::shared::{ReloadResult, Settings, Shared};

const POLL_EVERY: Duration = Duration::from_millis(500);
/// How often a file is read again if it changes while it is read.
const READ_ATTEMPTS: u32 = 10;

/// The configuration files that are watched.
pub(super) struct WatchedConfig {
    /// The configuration file; `None` if the server has only rules for Envoy.
    path: Option<PathBuf>,
    options: ServeOptions,
    text: Digest,
    /// The files that the configuration names.
    names: Vec<PathBuf>,
    /// The digest of all files when they were last read.
    in_force: Digest,
}

/// A digest of contents, so that secrets are not kept.
type Digest = [u8; 32];

impl WatchedConfig {
    /// Computes the first digest. This happens before the files are read, so that every later change is noticed. Returns
    /// `None` if the server was started without files.
    pub(super) fn new(options: &ServeOptions) -> Option<Self> {
        if options.config.is_none() && options.envoy_config.is_none() {
            return None;
        }
        let nothing = Digest::default();
        let (path, options) = (options.config.clone(), options.clone());
        let mut watched =
            Self { path, options, text: nothing, names: Vec::new(), in_force: nothing };
        watched.in_force = watched.digest_now();
        Some(watched)
    }

    /// Returns the digest of the current files.
    fn digest_now(&mut self) -> Digest {
        // Without free descriptors the files cannot be read; assume that nothing changed.
        self.try_digest().unwrap_or(self.in_force)
    }

    fn try_digest(&mut self) -> Result<Digest, NoDescriptors> {
        let text = match &self.path {
            Some(path) => contents(path)?,
            None => None,
        };
        let digest = digest(text.as_deref());
        if self.text != digest {
            self.text = digest;
            let text = text.as_deref().and_then(|text| std::str::from_utf8(text).ok());
            self.names = text.map(Config::files_named).unwrap_or_default();
        }
        let folder = self.path.as_deref().and_then(Path::parent).unwrap_or(Path::new(""));
        let mut all = Sha256::new_with_prefix(digest);
        let named = self.names.iter().map(|name| folder.join(name));
        for path in named.chain(self.options.envoy_config.clone()) {
            // A folder counts by its files, which may come and go.
            for file in envoy_files(&path).unwrap_or_else(|_| vec![path]) {
                all.update(self::digest(Some(file.as_os_str().as_encoded_bytes())));
                all.update(self::digest(contents(&file)?.as_deref()));
            }
        }
        Ok(all.finalize().into())
    }

    /// Reads the configuration, and returns it with its digest. If a file changes meanwhile, reads again, a few times.
    /// Without a configuration file, the tokens stay as they are.
    fn read(&mut self, tokens: &Arc<Tokens>) -> (Digest, anyhow::Result<Config>) {
        let mut before = self.digest_now();
        for _ in 0..READ_ATTEMPTS {
            let read = self.options.read_config().map(|(config, new_token)| match new_token {
                Some(_) => Config { tokens: tokens.clone(), ..config },
                None => config,
            });
            let after = self.digest_now();
            if before == after {
                return (after, read);
            }
            before = after;
        }
        (
            before,
            Err(anyhow::anyhow!("the files changed while they were read, several times in a row")),
        )
    }
}

/// The limit on open files is reached.
struct NoDescriptors;

/// Returns the contents of a file; `None` if it cannot be read, is not a regular file, or is too large.
fn contents(path: &Path) -> Result<Option<Vec<u8>>, NoDescriptors> {
    let no_more = [Errno::MFILE, Errno::NFILE].map(|error| Some(error.raw_os_error()));
    match read_file(path, MAX_CONFIG_BYTES) {
        Err(error) if no_more.contains(&error.raw_os_error()) => Err(NoDescriptors),
        read => Ok(read.ok()),
    }
}

fn digest(contents: Option<&[u8]>) -> Digest {
    let missing = [u8::from(contents.is_none())];
    Sha256::new_with_prefix(missing).chain_update(contents.unwrap_or_default()).finalize().into()
}

/// Watches the files until the server shuts down.
pub(super) async fn watch(
    mut config: Option<WatchedConfig>,
    mut hangup: Signal,
    shared: Arc<Shared>,
    mut asked: mpsc::Receiver<oneshot::Sender<ReloadResult>>,
) {
    let mut ticks = tokio::time::interval(POLL_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut seen = config.as_ref().map(|config| config.in_force);
    loop {
        let (is_automatic, reply) = tokio::select! {
            _ = hangup.recv() => (false, None),
            Some(reply) = asked.recv() => (false, Some(reply)),
            _ = ticks.tick() => {
                let Some(config) = &mut config else { continue };
                let found = Some(config.digest_now());
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
                let tokens = shared.settings.load().tokens.clone();
                let (found, read) = config.read(&tokens);
                let is_steady = seen == Some(found);
                seen = Some(found);
                // No client waits for this reload: try again at the next tick.
                if is_automatic && !is_steady {
                    continue;
                }
                notify::reloading();
                // An invalid configuration is not read again until it changes.
                config.in_force = found;
                put_in_force(read, &shared, &config.options)
            }
            None => {
                let reason = "the server was started without a configuration file; there is nothing to reload";
                tracing::warn!("{reason}");
                Err(reason.to_owned())
            }
        };
        notify::ready();
        if let Some(reply) = reply {
            let _ = reply.send(result);
        }
    }
}

fn put_in_force(
    read: anyhow::Result<Config>,
    shared: &Shared,
    options: &ServeOptions,
) -> ReloadResult {
    let count =
        |outcome| shared.gate.metrics.reloads.get_or_create(&OutcomeLabels { outcome }).inc();
    match read {
        Ok(config) => {
            shared.gate.put_in_force(&config);
            shared.settings.store(Arc::new(Settings::of(&config)));
            shared.renew(&config.tls);
            count("applied");
            tracing::info!(policies = config.policies.len(), "configuration reloaded");
            for warning in options.warnings(&config) {
                tracing::warn!("{warning}");
            }
            let needs_restart = shared.at_start.changed(&RestartSettings::of(&config));
            if !needs_restart.is_empty() {
                let settings = needs_restart.join(", ");
                tracing::warn!(
                    settings,
                    "the new configuration changes settings that need a restart; keeping the old ones until then"
                );
            }
            Ok(needs_restart)
        }
        Err(error) => {
            count("rejected");
            let error = format!("{error:#}");
            tracing::error!(
                error,
                "configuration reload failed; keeping the previous configuration"
            );
            Err(error)
        }
    }
}
