//! What must hold of every trace, log and limit, however hostile: one function per fuzz target.
//!
//! cargo-fuzz runs them with what it makes up (`fuzz/`, `scripts/fuzz`), the tests below with the seeds in
//! `fuzz/corpus` and mutations of them. Each returns if the input is decided or refused as it should be, and panics if
//! not.

use std::fmt::Write as _;
use std::io::{self, Read};

use tallygate_core::Ticks;

use crate::backtest::{
    BacktestError, Bounds, Format, Input, Plan, Report, Share, Wanted, backtest,
};
use crate::spelling;

pub use crate::replay::fuzzing::replay;

/// Lines of a log, plain or packed: however they are cut into reads, the report is the same, and it adds up.
pub fn log_line(input: &[u8]) {
    let [choice, size, log @ ..] = input else { return };
    let formats = [None, Some(Format::Combined), Some(Format::Json), Some(Format::Csv)];
    let keys = ["ip", "header:x-api-key", "field:user", "header:user-agent"];
    let suggest = if choice & 16 == 0 { None } else { "99.9".parse::<Share>().ok() };
    let limit = |text| spelling::parse(text).expect("a limit");
    let plan = Plan {
        wanted: Wanted {
            key: keys[usize::from(choice >> 2 & 3)].parse().expect("a key"),
            format: formats[usize::from(choice & 3)],
            time: (choice & 32 != 0).then(|| "when".to_owned()),
        },
        policies: vec![limit("token_bucket 2/1m"), limit("sliding_window_log 3/1s")],
        peak: Ticks(60_000_000_000),
        suggest,
        top: 3,
    };
    let whole = reported(log.to_vec(), usize::MAX, &plan);
    let pieces = reported(log.to_vec(), usize::from(*size) + 1, &plan);
    match (&whole, &pieces) {
        (Ok(whole), Ok(pieces)) => assert_eq!(whole, pieces),
        // Which of several reasons is met first depends on how much was read by then.
        (Err(_), Err(_)) => {}
        _ => unreachable!("cut into pieces of {size} and one: {whole:?} and {pieces:?}"),
    }
    if !log.starts_with(&[0x1f, 0x8b]) && choice & 64 != 0 {
        let packed = reported(gzip(log), usize::MAX, &plan);
        assert_eq!(whole.ok(), packed.ok(), "packed, it is the same log");
    }
}

fn reported(log: Vec<u8>, piece: usize, plan: &Plan) -> Result<serde_json::Value, BacktestError> {
    let bounds = Bounds { unpacked_bytes: 1 << 20, memory_bytes: 1 << 20 };
    let report: Report =
        backtest(vec![Input::upload(Pieces::new(log, piece))], plan, &bounds, &mut |_| {})?;
    assert_eq!(report.lines, report.requests + report.unreadable + report.without_key);
    for policy in &report.policies {
        assert_eq!(policy.allowed + policy.refused, report.requests, "{}", policy.policy);
        assert!(policy.clients_refused <= report.clients);
    }
    Ok(serde_json::to_value(&report).expect("a report is JSON"))
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let level = flate2::Compression::fast();
    let mut packed = Vec::new();
    flate2::bufread::GzEncoder::new(bytes, level).read_to_end(&mut packed).expect("memory");
    packed
}

/// Bytes that come a few at a time.
pub(crate) struct Pieces {
    bytes: io::Cursor<Vec<u8>>,
    piece: usize,
}

impl Pieces {
    pub(crate) fn new(bytes: Vec<u8>, piece: usize) -> Self {
        Self { bytes: io::Cursor::new(bytes), piece }
    }
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let room = buffer.len().min(self.piece);
        self.bytes.read(&mut buffer[..room])
    }
}

/// A limit in a line: what is read is printed so that it is read as the same.
pub fn spelled(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    match spelling::parse(text) {
        Ok(limit) => {
            let printed = spelling::Spelled::new(&limit).to_string();
            let again = spelling::parse(&printed);
            let again = again.unwrap_or_else(|error| unreachable!("{printed:?}: {error}"));
            assert_eq!(limit.numbers(), again.numbers(), "{printed}");
        }
        Err(error) => {
            let mut told = String::new();
            write!(told, "{error}").expect("a message");
            assert!(!told.is_empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use tallygate_testkit::try_corpus;

    macro_rules! corpus {
        ($($target:ident: $mutations:expr, $sentence:ident;)*) => {$(
            #[test]
            fn $sentence() {
                try_corpus(stringify!($target), $mutations, super::$target);
            }
        )*};
    }

    corpus! {
        log_line: 500, a_log_is_the_same_in_any_pieces;
        replay: 1000, a_trace_is_decided_the_same_in_any_pieces;
        spelled: 5000, what_is_printed_of_a_limit_is_read_as_the_same;
    }
}
