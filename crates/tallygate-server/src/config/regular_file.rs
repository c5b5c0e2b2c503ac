//! Reads the files of a configuration: regular files of a bounded size.
//!
//! The server reads them while it serves. A named pipe would block it until another process writes, and a device such as
//! `/dev/zero` never ends.

use std::fs::{Metadata, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;

/// The largest file with configuration or with rules for Envoy, in bytes.
pub(crate) const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// The largest file with tokens, a key or certificates, in bytes.
pub(super) const MAX_SECRET_BYTES: u64 = 1 << 20;

/// Reads a file, which may be a link.
///
/// # Errors
///
/// Fails if the file cannot be read, is not a regular file, or has more than `max_bytes` bytes.
pub(crate) fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    // Without this flag, opening a named pipe waits for a process that writes to it.
    let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        let kind = kind(&metadata);
        return Err(io::Error::other(format!(
            "it is {kind}; use a regular file, or a link to one"
        )));
    }
    let mut bytes = Vec::new();
    // The file can grow while it is read.
    let is_whole = metadata.len() <= max_bytes
        && file.take(max_bytes + 1).read_to_end(&mut bytes)? as u64 <= max_bytes;
    if !is_whole {
        let mib = max_bytes >> 20;
        return Err(io::Error::other(format!("it is larger than {mib} MiB; use a smaller file")));
    }
    Ok(bytes)
}

/// Reads a text file in UTF-8 as [`read`] does.
pub(super) fn read_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    let bytes = read(path, max_bytes)?;
    String::from_utf8(bytes).map_err(|_| io::Error::other("it is not a text file in UTF-8"))
}

fn kind(metadata: &Metadata) -> &'static str {
    match metadata.file_type() {
        kind if kind.is_dir() => "a folder",
        kind if kind.is_fifo() => "a named pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use rustix::fs::{CWD, Mode};

    use super::*;

    /// Fault G1.
    #[test]
    fn only_regular_files_of_a_bounded_size_are_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        fs::write(path("file"), "text").expect("written");
        symlink("file", path("link")).expect("linked");
        rustix::fs::mkfifoat(CWD, path("pipe"), Mode::RUSR | Mode::WUSR).expect("a pipe");
        symlink("/dev/zero", path("device")).expect("linked");
        fs::File::create(path("large"))
            .and_then(|file| file.set_len((1 << 20) + 1))
            .expect("large");
        for (name, expected) in [
            ("file", "text"),
            ("link", "text"),
            ("pipe", "it is a named pipe; use a regular file, or a link to one"),
            ("device", "it is a device; use a regular file, or a link to one"),
            (".", "it is a folder; use a regular file, or a link to one"),
            ("large", "it is larger than 1 MiB; use a smaller file"),
        ] {
            let (sender, receiver) = mpsc::channel();
            let path = path(name);
            thread::spawn(move || {
                let read = read_text(&path, MAX_SECRET_BYTES);
                sender.send(read.unwrap_or_else(|error| error.to_string()))
            });
            let read = receiver.recv_timeout(Duration::from_secs(20));
            assert_eq!(read.expect("reading does not block"), expected, "{name}");
        }
    }

    /// Fault G1.
    #[test]
    fn a_file_that_reports_no_size_is_bounded_as_well() {
        // The files of /proc report a size of 0.
        let read = read(Path::new("/proc/self/maps"), 10);
        assert!(read.is_err_and(|error| error.to_string().contains("larger than")));
    }
}
