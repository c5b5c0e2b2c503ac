//! A folder that goes with its owner.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, io, process};

/// An empty folder among the system's temporary files, removed on drop.
#[derive(Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = env::temp_dir().join(format!("tallygate-server-{}-{number}", process::id()));
            let Err(error) = fs::create_dir(&path) else { return Self(path) };
            // One may be left of a killed process that had this one's id.
            assert_eq!(
                error.kind(),
                io::ErrorKind::AlreadyExists,
                "no folder at {path:?}: {error}"
            );
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// A file in it, for a command line.
    pub(super) fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A panic here would hide the test's own.
        drop(fs::remove_dir_all(&self.0));
    }
}
