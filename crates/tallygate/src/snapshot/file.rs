//! A snapshot as a file: the one before or the new one, whole, whatever happens meanwhile.
//!
//! It is written beside its place, brought to the disk, and then takes the place; so who is killed at any moment leaves
//! a whole one. One process a path: two that save to the same one are told so, or the later one wins.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

use super::{SnapshotError, SnapshotReader, SnapshotWriter};

/// Writes a snapshot to a path, and says how many bytes it has. Until it is whole, the one before stays in its place.
/// Meanwhile it lies beside it, as `PATH.new`; only its owner may read it.
///
/// ```
/// use tallygate::{Capacity, Policy, PolicyStore, RateLimiter, SnapshotReader, SystemClock, save_snapshot};
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
/// It cannot be written. The one before is then still in its place, unless it was only the folder that could not be brought
/// to the disk.
pub fn save_snapshot(
    path: impl AsRef<Path>,
    write: impl FnOnce(&mut SnapshotWriter<File>) -> io::Result<()>,
) -> io::Result<u64> {
    let path = path.as_ref();
    let new = beside(path);
    let (file, bytes) = save_beside(&new, write)?;
    // If it is somebody else's by now, it is left alone.
    is_still(&file, &new)?;
    if let Err(error) = fs::rename(&new, path) {
        let _ = fs::remove_file(&new);
        return Err(error);
    }
    sync_folder(path)?;
    Ok(bytes)
}

impl SnapshotReader<BufReader<File>> {
    /// Begins to read a file; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be read, is no snapshot, or of another version.
    pub fn open(path: impl AsRef<Path>) -> Result<Option<Self>, SnapshotError> {
        match File::open(path) {
            Ok(file) => Self::new(BufReader::new(file)).map(Some),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

fn save_beside(
    new: &Path,
    write: impl FnOnce(&mut SnapshotWriter<File>) -> io::Result<()>,
) -> io::Result<(File, u64)> {
    // One that a killed process left behind, or that somebody else put there to be followed.
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
            // What is left of it is of no use, if it is ours; the error that is told is the first one.
            if is_still(&file, new).is_ok() {
                let _ = fs::remove_file(new);
            }
            Err(error)
        }
    }
}

/// Whether the file at a path is the one that was written, and not that of another process.
#[cfg(unix)]
fn is_still(file: &File, path: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt as _;
    let (ours, there) = (file.metadata()?, fs::symlink_metadata(path)?);
    if (ours.dev(), ours.ino()) == (there.dev(), there.ino()) {
        return Ok(());
    }
    Err(io::Error::other("another process saves to the same path; give each its own"))
}

#[cfg(not(unix))]
fn is_still(_: &File, _: &Path) -> io::Result<()> {
    Ok(())
}

/// The new name is on the disk when its folder is.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}
