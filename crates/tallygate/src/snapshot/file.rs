//! Snapshot files. At any moment, the path has the complete previous snapshot or the complete new one.
//!
//! A snapshot is written to another file, flushed to the disk, and then renamed. So a process that is killed at any moment
//! leaves a complete snapshot. Each process needs its own path. If two processes save to the same path, one of them gets
//! an error, or the later snapshot stays.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

use super::{SnapshotError, SnapshotReader, SnapshotWriter};

/// Writes a snapshot to a path, and returns its length in bytes.
///
/// The snapshot is first written to `PATH.new`, which only its owner may read. The previous snapshot stays in place until
/// the new one is complete.
///
/// ```
/// use tallygate::clock::SystemClock;
/// use tallygate::snapshot::{SnapshotReader, save_snapshot};
/// use tallygate::store::{Capacity, PolicyStore};
/// use tallygate::{Policy, RateLimiter};
///
/// # let folder = std::env::temp_dir().join(format!("tallygate-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// let path = folder.join("clients");
/// let policy = Policy::token_bucket(2).per_hour().build()?;
/// let limiter = RateLimiter::new(policy.clone());
/// limiter.check("alice")?;
/// let bytes = save_snapshot(&path, |snapshot| {
///     limiter.store().save(&policy, "api", snapshot).map(|_| ())
/// })?;
/// assert_eq!(bytes, std::fs::metadata(&path)?.len());
///
/// let mut snapshot = SnapshotReader::open(&path)?.expect("it is there");
/// let mut section = snapshot.next_section()?.expect("it has one store");
/// let store = PolicyStore::restored(&policy, Capacity::default(), SystemClock::new(), &mut section)?;
/// assert_eq!(RateLimiter::with_store(policy, store).check("alice")?.remaining, 0);
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails if the snapshot cannot be written. The previous snapshot is then still in place, unless only flushing the folder
/// failed.
pub fn save_snapshot(
    path: impl AsRef<Path>,
    write: impl FnOnce(&mut SnapshotWriter<File>) -> io::Result<()>,
) -> io::Result<u64> {
    let path = path.as_ref();
    let new = temporary_path(path);
    let (file, bytes) = save_to_temporary(&new, write)?;
    // Another process may have replaced the file meanwhile; then leave it alone.
    check_is_same_file(&file, &new)?;
    if let Err(error) = fs::rename(&new, path) {
        let _ = fs::remove_file(&new);
        return Err(error);
    }
    sync_folder(path)?;
    Ok(bytes)
}

impl SnapshotReader<BufReader<File>> {
    /// Opens a snapshot file; returns `None` if it does not exist.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is not a regular file, is not a snapshot, or has another version.
    pub fn open(path: impl AsRef<Path>) -> Result<Option<Self>, SnapshotError> {
        // Opening a named pipe would wait for a process that writes to it.
        if fs::metadata(&path).is_ok_and(|metadata| !metadata.is_file()) {
            let error = io::Error::other("it is not a regular file; use the path of a file");
            return Err(error.into());
        }
        match File::open(path) {
            Ok(file) => Self::new(BufReader::new(file)).map(Some),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

fn temporary_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

fn save_to_temporary(
    new: &Path,
    write: impl FnOnce(&mut SnapshotWriter<File>) -> io::Result<()>,
) -> io::Result<(File, u64)> {
    // A killed process may have left a file there, or an attacker may have put a symbolic link there.
    match fs::remove_file(new) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(new)?;
    let written = || {
        let mut snapshot = SnapshotWriter::new(file.try_clone()?)?;
        write(&mut snapshot)?;
        snapshot.finish()?.sync_all()?;
        Ok(file.metadata()?.len())
    };
    match written() {
        Ok(bytes) => Ok((file, bytes)),
        Err(error) => {
            // Remove the incomplete file, if it is ours, and return the first error.
            if check_is_same_file(&file, new).is_ok() {
                let _ = fs::remove_file(new);
            }
            Err(error)
        }
    }
}

/// Returns an error if the file at a path is not the one that was written, but a file of another process.
#[cfg(unix)]
fn check_is_same_file(file: &File, path: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt as _;
    let (ours, there) = (file.metadata()?, fs::symlink_metadata(path)?);
    if (ours.dev(), ours.ino()) == (there.dev(), there.ino()) {
        return Ok(());
    }
    Err(io::Error::other("another process saves to the same path; give each its own"))
}

#[cfg(not(unix))]
fn check_is_same_file(_: &File, _: &Path) -> io::Result<()> {
    Ok(())
}

/// Flushes the folder of a path, so that the new name is on the disk.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}
