//! Log lines go to standard error by a thread of their own: whoever logs never waits for whoever reads.
//!
//! A pipe that nobody empties, a full disk, a reader that is gone: lines wait in memory up to a bound, those beyond it are
//! lost and counted, and how many is told when there is room again. One event is one line: what somebody else made up
//! cannot begin another. `repeats.rs` says which events are told at all.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::time::{Duration, Instant};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::repeats::Repeats;

/// Log level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogLevel {
    /// Only errors.
    Error,
    /// Warnings, too.
    Warn,
    /// What an operator wants to know, too.
    #[default]
    Info,
    /// Details for debugging, too.
    Debug,
    /// Everything.
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

/// How many bytes of lines wait to be written; the next ones are lost.
const MOST_WAITING_BYTES: usize = 1 << 20;

/// How long the last lines have to be written when the server stops.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// How often it is looked whether something was repeated.
const LOOK_EVERY: Duration = Duration::from_secs(1);

static LINES_LOST: AtomicU64 = AtomicU64::new(0);

/// How many lines nobody will read.
pub(crate) fn lines_lost() -> u64 {
    LINES_LOST.load(Ordering::Relaxed)
}

/// The log of the process.
pub(crate) struct Logs {
    lines: Lines,
}

/// Where lines are put; what is made of it is one line.
#[derive(Clone)]
struct Lines {
    to: Sender<Sent>,
    waiting_bytes: Arc<AtomicUsize>,
}

enum Sent {
    Line(Vec<u8>),
    /// Asks to be told when all before it is written.
    Flush(SyncSender<()>),
}

impl Logs {
    /// Logs to standard error from now on, panics included.
    pub(crate) fn start(level: LogLevel, format: LogFormat) -> Self {
        let (to, sent) = mpsc::channel();
        let lines = Lines { to, waiting_bytes: Arc::default() };
        let repeats = Repeats::default();
        let (waiting_bytes, repeated) = (lines.waiting_bytes.clone(), repeats.clone());
        // A handle of its own: nobody who writes to standard error otherwise waits for this one.
        match io::stderr().as_fd().try_clone_to_owned() {
            Ok(out) => {
                let out = File::from(out);
                std::thread::spawn(move || write_all(&sent, &waiting_bytes, out, &repeated));
            }
            // Without a descriptor there is no log; every line counts as lost.
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

    /// Writes a line that is no event.
    pub(crate) fn say(&self, mut line: String) {
        line.push('\n');
        self.lines.send(line.into_bytes());
    }

    /// Waits until what was logged is written, but not for long.
    pub(crate) fn flush(&self) {
        let (done, is_done) = mpsc::sync_channel(1);
        if self.lines.to.send(Sent::Flush(done)).is_ok() {
            // Who does not read must not keep the server from stopping.
            let _ = is_done.recv_timeout(LAST_WORDS);
        }
    }
}

const fn filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    }
}

/// Writes what is sent, for as long as anybody can send.
fn write_all(
    sent: &Receiver<Sent>,
    waiting_bytes: &AtomicUsize,
    mut out: impl Write,
    repeats: &Repeats,
) {
    let mut lost_and_told = 0;
    loop {
        match sent.recv_timeout(LOOK_EVERY) {
            Ok(Sent::Line(line)) => {
                let written = out.write_all(&line);
                waiting_bytes.fetch_sub(line.len(), Ordering::AcqRel);
                let lost = match written {
                    Ok(()) => lines_lost(),
                    Err(_) => {
                        LINES_LOST.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                };
                if lost > lost_and_told {
                    let lines = lost - lost_and_told;
                    lost_and_told = lost;
                    tracing::warn!(lines, "lines of the log were lost: they could not be written");
                }
            }
            Ok(Sent::Flush(done)) => {
                repeats.tell(Instant::now(), Duration::ZERO);
                // What that came to belongs to the last words, too.
                while let Ok(Sent::Line(line)) = sent.try_recv() {
                    let _ = out.write_all(&line);
                    waiting_bytes.fetch_sub(line.len(), Ordering::AcqRel);
                }
                let _ = done.send(());
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        repeats.tell(Instant::now(), crate::repeats::PERIOD);
    }
}

impl Lines {
    fn send(&self, line: Vec<u8>) {
        let length = line.len();
        let waiting = self.waiting_bytes.fetch_add(length, Ordering::AcqRel);
        if waiting + length > MOST_WAITING_BYTES || self.to.send(Sent::Line(line)).is_err() {
            self.waiting_bytes.fetch_sub(length, Ordering::AcqRel);
            LINES_LOST.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A line being made; it is sent when it is dropped.
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

/// The same text as one line: whatever controls a terminal or ends a line is written out.
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
            // As JSON has it.
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
            Sent::Line(line) => String::from_utf8(line).expect("text"),
            Sent::Flush(_) => unreachable!("nobody asked"),
        });
        lines.collect()
    }

    /// Whatever a client calls itself, and however it is logged.
    #[test]
    fn h5_one_event_is_one_line_whatever_is_in_it() {
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
                // Where it is quoted in a text that is quoted, the strokes are, too.
                let text = text.replace("\\\\", "\\");
                assert!(text.contains("alice\\r\\n2026"), "{text:?}");
                if matches!(format, LogFormat::Json) {
                    let value: serde_json::Value = serde_json::from_str(&line).expect("JSON");
                    assert!(value.is_object());
                }
            }
        }
    }

    /// A writer that waits for somebody who does not come, in memory that is bounded.
    #[test]
    fn i3_what_waits_for_a_reader_is_bounded_and_the_rest_is_counted() {
        let (to, sent) = mpsc::channel();
        let lines = Lines { to, waiting_bytes: Arc::default() };
        let before = lines_lost();
        for _ in 0..3 * 1024 {
            lines.send(vec![b'x'; 1024]);
        }
        assert_eq!(lines_lost() - before, 2 * 1024);
        assert_eq!(sent.try_iter().count(), 1024);
    }

    #[test]
    fn i3_how_many_lines_were_lost_is_told_once_there_is_room_again() {
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
                write_all(&sent, &waiting_bytes, Handed(written), &Repeats::default());
            });
        });
        assert!(read.iter().take(1024).all(|line| line.starts_with('x')), "those that waited");
        let told = read.recv_timeout(Duration::from_secs(20)).expect("one more line");
        let expected = format!("were lost: they could not be written lines={lost}\n");
        assert!(told.ends_with(&expected), "{told}");
    }

    /// Hands every line on.
    struct Handed(Sender<String>);

    impl Write for Handed {
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
