//! Properties of every trace, log and limit, also of hostile ones: one function per fuzz target.
//!
//! cargo-fuzz calls the functions with generated input (`fuzz/`, `scripts/fuzz`); the tests below call them with the seeds
//! in `fuzz/corpus` and mutations of the seeds. A function panics if its property does not hold.

#![allow(clippy::missing_panics_doc, reason = "a fuzzer looks for failed assertions")]

use std::io::{self, Read};

use tallygate_core::Ticks;

use crate::backtest::{
    BacktestError, BacktestPlan, Bounds, Format, Input, LogOptions, Report, Share, Trial, backtest,
};
use crate::limit_syntax;

pub use crate::replay::fuzzing::replay;

/// Backtests a log, plain or compressed. The report does not depend on how the log is split into reads, and its counts add up.
pub fn log_line(input: &[u8]) {
    let [choice, size, log @ ..] = input else { return };
    let formats = [None, Some(Format::Combined), Some(Format::Json), Some(Format::Csv)];
    let keys = ["ip", "header:x-api-key", "field:user", "header:user-agent"];
    let suggest = if choice & 16 == 0 { None } else { "99.9".parse::<Share>().ok() };
    let trial = |text| Trial::parse(text).expect("the policy is valid");
    let filters = ["path!=/a", "user=*"].map(|filter| filter.parse().expect("the filter is valid"));
    let plan = BacktestPlan {
        log: LogOptions {
            key: keys[usize::from(choice >> 2 & 3)].parse().expect("the key is valid"),
            format: formats[usize::from(choice & 3)],
            time: (choice & 32 != 0).then(|| "when".to_owned()),
            filters: if choice & 128 == 0 { Vec::new() } else { filters.to_vec() },
        },
        policies: vec![
            trial("token_bucket 2/1m"),
            trial("sliding_window_log 3/1s, sliding_window_counter 9/1h"),
        ],
        peak: Ticks(60_000_000_000),
        suggest,
        top: 3,
    };
    let whole = run_backtest(log.to_vec(), usize::MAX, &plan);
    let pieces = run_backtest(log.to_vec(), usize::from(*size) + 1, &plan);
    match (&whole, &pieces) {
        (Ok(whole), Ok(pieces)) => assert_eq!(whole, pieces),
        // If there are several errors, the one that is found first depends on the size of the reads.
        (Err(_), Err(_)) => {}
        _ => unreachable!("whole: {whole:?}; in pieces of {size} + 1 bytes: {pieces:?}"),
    }
    if !log.starts_with(&[0x1f, 0x8b]) && choice & 64 != 0 {
        let packed = run_backtest(gzip(log), usize::MAX, &plan);
        assert_eq!(whole.ok(), packed.ok(), "the compressed log gives the same report");
    }
}

fn run_backtest(
    log: Vec<u8>,
    piece: usize,
    plan: &BacktestPlan,
) -> Result<serde_json::Value, BacktestError> {
    let bounds = Bounds { unpacked_bytes: 1 << 20, memory_bytes: 1 << 20 };
    let report: Report =
        backtest(vec![Input::upload(Pieces::new(log, piece))], plan, &bounds, &mut |_| {})?;
    let lines = report.requests + report.unreadable + report.without_key + report.filtered;
    assert_eq!(report.lines, lines);
    for policy in &report.policies {
        assert_eq!(policy.allowed + policy.denied, report.requests, "{}", policy.policy);
        assert!(policy.clients_denied <= report.clients);
    }
    Ok(serde_json::to_value(&report).expect("the report serializes to JSON"))
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let level = flate2::Compression::fast();
    let mut packed = Vec::new();
    flate2::bufread::GzEncoder::new(bytes, level)
        .read_to_end(&mut packed)
        .expect("compressing into memory succeeds");
    packed
}

/// A reader that returns at most `piece` bytes per read.
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

/// Parses a limit, prints it and parses it again: the result is the same limit.
pub fn limit_syntax(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    match limit_syntax::parse(text) {
        Ok(limit) => {
            let printed = limit_syntax::LimitText::new(&limit).to_string();
            let reparsed = limit_syntax::parse(&printed);
            let reparsed = reparsed.unwrap_or_else(|error| unreachable!("{printed:?}: {error}"));
            assert_eq!(limit.numbers(), reparsed.numbers(), "{printed}");
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
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
        log_line: 500, a_report_does_not_depend_on_the_size_of_reads;
        replay: 1000, a_replay_does_not_depend_on_the_size_of_reads;
        limit_syntax: 5000, a_printed_limit_parses_as_the_same_limit;
    }
}
