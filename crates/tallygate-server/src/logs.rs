//! A separate thread writes log lines to standard error, so that logging never blocks.
//!
//! If standard error is slow (an unread pipe, a full disk), lines wait in memory up to a bound. Further lines are
//! dropped and counted, and the number is logged when writing works again. One event is one line: values from clients
//! cannot start a new line. `repeats.rs` decides which events are logged.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::time::{Duration, Instant};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::repeats::Repeats;

/// Log level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogLevel {
    /// Only errors.
    Error,
    /// Errors and warnings.
    Warn,
    /// Also what an operator wants to know.
    #[default]
    Info,
    /// Also details of Tallygate for debugging.
    Debug,
    /// Everything, including the libraries: for example every frame of HTTP/2.
    Trace,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// A line of text per event.
    #[default]
    Text,
    /// A JSON object per event.
    Json,
}

/// Maximum bytes of lines that wait to be written. Further lines are dropped.
const MOST_WAITING_BYTES: usize = 1 << 20;

/// How long shutdown waits for the last lines to be written.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// How often repeated events are reported.
const REPEATS_EVERY: Duration = Duration::from_secs(1);

static LINES_LOST: AtomicU64 = AtomicU64::new(0);

/// Returns the number of dropped lines.
pub(crate) fn lines_lost() -> u64 {
    LINES_LOST.load(Ordering::Relaxed)
}

/// The log of the process.
pub(crate) struct Logs {
    lines: Lines,
}

/// The queue of lines. As a writer, it makes one line per event.
#[derive(Clone)]
struct Lines {
    to: Sender<LogMessage>,
    waiting_bytes: Arc<AtomicUsize>,
}

enum LogMessage {
    Line(Vec<u8>),
    /// Requests a message when all lines before it are written.
    Flush(SyncSender<()>),
}

impl Logs {
    /// Logs to standard error from now on, panics included.
    pub(crate) fn start(level: LogLevel, format: LogFormat) -> Self {
        let (to, sent) = mpsc::channel();
        let lines = Lines { to, waiting_bytes: Arc::default() };
        let repeats = Repeats::default();
        let (waiting_bytes, repeated) = (lines.waiting_bytes.clone(), repeats.clone());
        // A separate handle, so that other writers to standard error do not wait for this thread.
        match io::stderr().as_fd().try_clone_to_owned() {
            Ok(out) => {
                let out = File::from(out);
                std::thread::spawn(move || write_all(&sent, &waiting_bytes, out, &repeated));
            }
            // Without a descriptor there is no log, and every line counts as dropped.
            Err(_) => drop(sent),
        }
        let text = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(lines.clone());
        let text = match format {
            LogFormat::Text => text.boxed(),
            LogFormat::Json => text.json().boxed(),
        };
        tracing_subscriber::registry().with(text).with(repeats).with(filter(level)).init();
        std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
        Self { lines }
    }

    /// Writes a line that is not an event.
    pub(crate) fn write_line(&self, mut line: String) {
        line.push('\n');
        self.lines.send(line.into_bytes());
    }

    /// Waits until all lines are written, for a short time at most.
    pub(crate) fn flush(&self) {
        let (done, is_done) = mpsc::sync_channel(1);
        if self.lines.to.send(LogMessage::Flush(done)).is_ok() {
            // An unread log must not block shutdown.
            let _ = is_done.recv_timeout(FLUSH_TIMEOUT);
        }
    }
}

/// Returns which events are logged. Libraries log every frame of a connection at the level debug, which would hide the
/// events of Tallygate.
fn filter(level: LogLevel) -> Targets {
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => return Targets::new().with_default(LevelFilter::TRACE),
    };
    // A target is the path of a module, so this is the prefix of all our crates.
    Targets::new().with_default(level.min(LevelFilter::INFO)).with_target("tallygate", level)
}

/// Writes lines until all senders are gone.
fn write_all(
    sent: &Receiver<LogMessage>,
    waiting_bytes: &AtomicUsize,
    mut out: impl Write,
    repeats: &Repeats,
) {
    let mut reported = 0;
    loop {
        match sent.recv_timeout(REPEATS_EVERY) {
            Ok(LogMessage::Line(line)) => {
                let written = out.write_all(&line);
                waiting_bytes.fetch_sub(line.len(), Ordering::AcqRel);
                let lost = match written {
                    Ok(()) => lines_lost(),
                    Err(_) => {
                        LINES_LOST.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                };
                if lost > reported {
                    let lines = lost - reported;
                    reported = lost;
                    tracing::warn!(
                        lines,
                        "log lines were dropped because standard error did not accept them in time"
                    );
                }
            }
            Ok(LogMessage::Flush(done)) => {
                repeats.log_repeats(Instant::now(), Duration::ZERO);
                // Also write the lines about repeats.
                while let Ok(LogMessage::Line(line)) = sent.try_recv() {
                    let _ = out.write_all(&line);
                    waiting_bytes.fetch_sub(line.len(), Ordering::AcqRel);
                }
                let _ = done.send(());
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        repeats.log_repeats(Instant::now(), crate::repeats::PERIOD);
    }
}

impl Lines {
    fn send(&self, line: Vec<u8>) {
        let length = line.len();
        let waiting = self.waiting_bytes.fetch_add(length, Ordering::AcqRel);
        if waiting + length > MOST_WAITING_BYTES || self.to.send(LogMessage::Line(line)).is_err() {
            self.waiting_bytes.fetch_sub(length, Ordering::AcqRel);
            LINES_LOST.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A line that is being built; it is sent when it is dropped.
struct Line<'a> {
    lines: &'a Lines,
    bytes: Vec<u8>,
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { lines: self, bytes: Vec::new() }
    }
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        self.lines.send(one_line(std::mem::take(&mut self.bytes)));
    }
}

/// Returns the text as one line: control characters and line ends are escaped.
fn one_line(mut text: Vec<u8>) -> Vec<u8> {
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    let mut line = Vec::with_capacity(text.len() + 1);
    for byte in text {
        match byte {
            b'\t' => line.push(byte),
            b'\n' => line.extend(b"\\n"),
            b'\r' => line.extend(b"\\r"),
            // Escaped as in JSON.
            byte if byte.is_ascii_control() => line.extend(format!("\\u{byte:04x}").bytes()),
            byte => line.push(byte),
        }
    }
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logged(format: LogFormat, log: impl FnOnce()) -> Vec<String> {
        let (to, sent) = mpsc::channel();
        let lines = Lines { to, waiting_bytes: Arc::default() };
        let text = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(lines);
        let text = match format {
            LogFormat::Text => text.boxed(),
            LogFormat::Json => text.json().boxed(),
        };
        tracing::subscriber::with_default(tracing_subscriber::registry().with(text), log);
        let lines = sent.try_iter().map(|sent| match sent {
            LogMessage::Line(line) => String::from_utf8(line).expect("text"),
            LogMessage::Flush(_) => unreachable!("no flush was requested"),
        });
        lines.collect()
    }

    /// Whatever the key of a client contains, and however it is logged.
    ///
    /// Fault H5.
    #[test]
    fn one_event_is_one_line_whatever_is_in_it() {
        let key = "alice\r\n2026-01-01T00:00:00Z ERROR root: forged\u{1b}[2J\u{0}\u{7f}";
        for format in [LogFormat::Text, LogFormat::Json] {
            let lines = logged(format, || {
                tracing::warn!(key, "as a value");
                tracing::warn!(key = %key, "as it displays");
                tracing::warn!(key = ?key, "for debugging");
                tracing::warn!("in the message: {key}");
            });
            assert_eq!(lines.len(), 4);
            for line in lines {
                let text = line.strip_suffix('\n').expect("a line end");
                assert!(!text.contains(|c: char| c.is_ascii_control()), "{text:?}");
                // In a quoted text within a quoted text, backslashes are doubled.
                let text = text.replace("\\\\", "\\");
                assert!(text.contains("alice\\r\\n2026"), "{text:?}");
                if matches!(format, LogFormat::Json) {
                    let value: serde_json::Value = serde_json::from_str(&line).expect("JSON");
                    assert!(value.is_object());
                }
            }
        }
    }

    /// A writer that is blocked forever uses bounded memory.
    ///
    /// Fault I3.
    #[test]
    fn lines_that_wait_for_a_reader_are_bounded_and_the_rest_are_counted() {
        let (to, sent) = mpsc::channel();
        let lines = Lines { to, waiting_bytes: Arc::default() };
        let before = lines_lost();
        for _ in 0..3 * 1024 {
            lines.send(vec![b'x'; 1024]);
        }
        assert_eq!(lines_lost() - before, 2 * 1024);
        assert_eq!(sent.try_iter().count(), 1024);
    }

    /// Fault I3.
    #[test]
    fn the_number_of_lost_lines_is_logged_when_there_is_room_again() {
        let (to, sent) = mpsc::channel();
        let lines = Lines { to, waiting_bytes: Arc::default() };
        for _ in 0..2 * 1024 {
            lines.send(vec![b'x'; 1024]);
        }
        let lost = lines_lost();
        let (written, read) = mpsc::channel();
        let waiting_bytes = lines.waiting_bytes.clone();
        let text = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(lines);
        std::thread::spawn(move || {
            let log = tracing_subscriber::registry().with(text);
            tracing::subscriber::with_default(log, || {
                write_all(&sent, &waiting_bytes, LineSender(written), &Repeats::default());
            });
        });
        assert!(read.iter().take(1024).all(|line| line.starts_with('x')), "the waiting lines");
        let line = read.recv_timeout(Duration::from_secs(20)).expect("one more line");
        let expected = format!("did not accept them in time lines={lost}\n");
        assert!(line.ends_with(&expected), "{line}");
    }

    /// Forwards every line.
    struct LineSender(Sender<String>);

    impl Write for LineSender {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            let text = String::from_utf8_lossy(line).into_owned();
            self.0.send(text).map_err(|_| io::ErrorKind::BrokenPipe)?;
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
}
