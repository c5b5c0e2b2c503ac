//! A temporary folder.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, io, process};

/// An empty folder in the system's folder for temporary files. It is removed on drop.
#[derive(Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = env::temp_dir().join(format!("tallygate-server-{}-{number}", process::id()));
            let Err(error) = fs::create_dir(&path) else { return Self(path) };
            // A killed process with the same id may have left a folder.
            assert_eq!(
                error.kind(),
                io::ErrorKind::AlreadyExists,
                "cannot create the folder {path:?}: {error}"
            );
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the path of a file in the folder, for a command line.
    pub(super) fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A panic here would hide the panic of the test.
        drop(fs::remove_dir_all(&self.0));
    }
}
