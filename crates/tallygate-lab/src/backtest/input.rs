//! The source of a log: a file, standard input or an upload, plain or gzip. The first two bytes identify gzip.

use std::fmt;
use std::fs::File;
use std::io::{self, Cursor, Read};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::bufread::MultiGzDecoder;

/// A log to read, with its name for messages.
#[derive(Debug)]
pub struct Input {
    pub(super) name: String,
    source: Source,
}

enum Source {
    File(PathBuf),
    StandardInput,
    Upload(Box<dyn Read + Send>),
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::StandardInput => f.write_str("StandardInput"),
            Self::Upload(_) => f.write_str("Upload(..)"),
        }
    }
}

const GZIP: [u8; 2] = [0x1f, 0x8b];

impl Input {
    /// Reads a file, or standard input if the path is `-`.
    #[must_use]
    pub fn of_path(path: PathBuf) -> Self {
        if path.as_os_str() == "-" {
            return Self { name: "standard input".to_owned(), source: Source::StandardInput };
        }
        Self { name: path.display().to_string(), source: Source::File(path) }
    }

    /// Reads an upload.
    pub fn upload(body: impl Read + Send + 'static) -> Self {
        Self { name: "request body".to_owned(), source: Source::Upload(Box::new(body)) }
    }

    /// Returns the name of the input, for messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the size before decompression, if known.
    ///
    /// # Errors
    /// Returns an error if the input is a file that cannot be opened.
    pub fn size(&self) -> io::Result<Option<u64>> {
        match &self.source {
            Source::File(path) => {
                let metadata = File::open(path)?.metadata()?;
                if metadata.is_dir() {
                    return Err(io::ErrorKind::IsADirectory.into());
                }
                Ok(metadata.is_file().then_some(metadata.len()))
            }
            Source::StandardInput | Source::Upload(_) => Ok(None),
        }
    }

    /// Opens the input. The reader adds the bytes read, before decompression, to `bytes_read`.
    pub(super) fn open(self, bytes_read: Arc<AtomicU64>) -> io::Result<Box<dyn Read + Send>> {
        let source: Box<dyn Read + Send> = match self.source {
            Source::File(path) => Box::new(File::open(path)?),
            Source::StandardInput => Box::new(io::stdin()),
            Source::Upload(body) => body,
        };
        let mut source = CountingReader { source, bytes_read };
        let mut start = Vec::with_capacity(GZIP.len());
        source.by_ref().take(GZIP.len() as u64).read_to_end(&mut start)?;
        let is_gzip = start == GZIP;
        let whole = Cursor::new(start).chain(source);
        Ok(if is_gzip {
            Box::new(MultiGzDecoder::new(io::BufReader::with_capacity(64 * 1024, whole)))
        } else {
            Box::new(whole)
        })
    }
}

struct CountingReader<R> {
    source: R,
    bytes_read: Arc<AtomicU64>,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer)?;
        self.bytes_read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}
