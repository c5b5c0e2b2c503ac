//! A report in a terminal: a table of the algorithms, and each one's lane over time.
//!
//! A lane has a mark for each stretch of time (admitted, refused, both), and the inner state below it, as a part of
//! the most it can be.

use std::fmt::Write as _;

use super::report::{Lane, Report};
use super::scenario::{Pattern, Scenario};

/// How it is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// Whether only characters of ASCII are used.
    pub is_ascii: bool,
    /// Whether colors are used.
    pub is_colored: bool,
    /// The terminal's width, if it is known.
    pub columns: Option<usize>,
}

const USUAL_COLUMNS: usize = 80;
/// The width of names, and what drawings need at the least and at the most.
const NAMES: usize = 24;
const DRAWN: std::ops::RangeInclusive<usize> = 16..=400;

/// What happened in a stretch of time.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stretch {
    allowed: bool,
    refused: bool,
}

/// Returns a report as text for a terminal.
#[must_use]
pub fn draw(report: &Report, style: Style) -> String {
    let mut out = String::new();
    // Writing into a string cannot fail.
    let _ = write_all(&mut out, report, style);
    out
}

fn write_all(out: &mut String, report: &Report, style: Style) -> std::fmt::Result {
    let scenario = &report.scenario;
    write_scenario(out, scenario)?;
    write_table(out, report)?;
    if scenario.pattern == Pattern::Greedy {
        write_clients(out, report)?;
    }
    let columns = style.columns.unwrap_or(USUAL_COLUMNS);
    let width = columns.saturating_sub(NAMES).clamp(*DRAWN.start(), *DRAWN.end());
    let duration_us = scenario.duration_us();
    for lane in &report.lanes {
        writeln!(out)?;
        write_lane(out, lane, duration_us, width, style)?;
    }
    let (allowed, refused, both) =
        (mark(true, false, style), mark(false, true, style), mark(true, true, style));
    let end = seconds(duration_us);
    let space = width.saturating_sub(1);
    writeln!(out, "\n{:NAMES$}0{end:>space$}", "")?;
    writeln!(out, "{:NAMES$}{allowed} allowed  {refused} refused  {both} both", "")
}

fn write_scenario(out: &mut String, scenario: &Scenario) -> std::fmt::Result {
    let Scenario { limit, burst, rate_per_minute, seed, cost, .. } = scenario;
    let window = seconds(scenario.window_us());
    write!(
        out,
        "{} traffic, {rate_per_minute} a minute for {}, seed {seed}; limit {limit} per {window}",
        scenario.pattern.name(),
        seconds(scenario.duration_us())
    )?;
    if burst != limit {
        write!(out, ", burst {burst}")?;
    }
    if *cost != 1 {
        write!(out, ", cost {cost}")?;
    }
    out.write_str("\n\n")
}

fn write_table(out: &mut String, report: &Report) -> std::fmt::Result {
    let retries = report.scenario.pattern == Pattern::Retry;
    write!(out, "{:NAMES$}{:>8}{:>9}", "", "allowed", "refused")?;
    if retries {
        write!(out, "{:>9}{:>9}", "retried", "gave up")?;
    }
    writeln!(out, "{:>14}{:>16}", "worst window", "first refused")?;
    for lane in &report.lanes {
        let first = lane.first_refused_us.map_or_else(|| "never".to_owned(), seconds);
        write!(out, "{:NAMES$}{:>8}{:>9}", lane.algorithm.name(), lane.allowed, lane.refused)?;
        if retries {
            write!(out, "{:>9}{:>9}", lane.retried, lane.gave_up)?;
        }
        write!(out, "{:>14}{first:>16}", lane.worst_window.count)?;
        if let Some(cut) = lane.cut_at_us {
            write!(out, "  (cut at {}: too many)", seconds(cut))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// How much of what it asked for each client was allowed.
fn write_clients(out: &mut String, report: &Report) -> std::fmt::Result {
    let names = report.lanes.first().map(|lane| &lane.clients);
    write!(out, "\n{:NAMES$}", "")?;
    for client in names.into_iter().flatten() {
        write!(out, "{:>11}", client.name)?;
    }
    writeln!(out)?;
    for lane in &report.lanes {
        write!(out, "{:NAMES$}", lane.algorithm.name())?;
        for client in &lane.clients {
            write!(out, "{:>11}", format!("{}/{}", client.allowed, client.asked))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn write_lane(
    out: &mut String,
    lane: &Lane,
    duration_us: u64,
    width: usize,
    style: Style,
) -> std::fmt::Result {
    let place = |at_us: u64| {
        let place = u128::from(at_us) * width as u128 / u128::from(duration_us.max(1));
        usize::try_from(place).unwrap_or(width).min(width - 1)
    };
    let mut stretches = vec![Stretch { allowed: false, refused: false }; width];
    for (&at_us, &allowed) in lane.events.at_us.iter().zip(&lane.events.allowed) {
        let stretch = &mut stretches[place(at_us)];
        stretch.allowed |= allowed == 1;
        stretch.refused |= allowed == 0;
    }
    write!(out, "{:NAMES$}", lane.algorithm.name())?;
    for stretch in stretches {
        out.push_str(&mark(stretch.allowed, stretch.refused, style));
    }
    // The last sample of each stretch; a stretch without one goes on as the one before.
    let mut levels: Vec<Option<u64>> = vec![None; width];
    for (&at_us, value) in lane.state.at_us.iter().zip(&lane.state.value) {
        levels[place(at_us)] = Some(value.0);
    }
    let name: String = lane.state.name.chars().take(NAMES - 3).collect();
    write!(out, "\n  {name:rest$}", rest = NAMES - 2)?;
    let mut level = 0;
    let bars = levels.into_iter().map(|sample| {
        level = sample.unwrap_or(level);
        bar(level, lane.state.capacity.0, style)
    });
    let bars: String = bars.collect();
    writeln!(out, "{}", bars.trim_end())
}

fn mark(allowed: bool, refused: bool, style: Style) -> String {
    let (blocks, ascii, color) = match (allowed, refused) {
        (false, false) => return if style.is_ascii { ".".into() } else { "·".into() },
        (true, false) => ('█', '#', 32),
        (false, true) => ('░', 'x', 31),
        (true, true) => ('▒', '%', 33),
    };
    let mark = if style.is_ascii { ascii } else { blocks };
    if style.is_colored { format!("\x1b[{color}m{mark}\x1b[0m") } else { mark.to_string() }
}

/// A part of a whole as the height of a bar. Only nothing at all is shown as nothing.
fn bar(part: u64, whole: u64, style: Style) -> char {
    const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    const ASCII: [char; 10] = ['_', '1', '2', '3', '4', '5', '6', '7', '8', '9'];
    let bars: &[char] = if style.is_ascii { &ASCII } else { &BLOCKS };
    let highest = bars.len() - 1;
    let height = (u128::from(part) * highest as u128).div_ceil(u128::from(whole.max(1)));
    bars[usize::try_from(height).unwrap_or(highest).min(highest)]
}

/// Microseconds as seconds, to the millisecond.
pub(super) fn seconds(at_us: u64) -> String {
    let (whole, millis) = (at_us / 1_000_000, at_us / 1000 % 1000);
    match millis {
        0 => format!("{whole}s"),
        _ => format!("{whole}.{millis:03}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::report;

    const PLAIN: Style = Style { is_ascii: true, is_colored: false, columns: Some(44) };

    #[test]
    fn a_drawing_is_as_wide_as_it_may_be_and_ascii_is_ascii() {
        for pattern in Pattern::ALL {
            let report = report(Scenario { pattern, ..Scenario::default() }).unwrap();
            let drawn = draw(&report, PLAIN);
            assert!(drawn.is_ascii(), "{drawn}");
            let lanes = drawn.lines().rfind(|line| line.starts_with("fixed_window "));
            assert_eq!(lanes.map(str::len), Some(44), "{drawn}");
            let blocks = draw(&report, Style { is_ascii: false, ..PLAIN });
            assert!(blocks.contains('█') && !blocks.contains('\x1b'), "{blocks}");
            let colored = draw(&report, Style { is_colored: true, ..PLAIN });
            assert!(colored.contains("\x1b[32m#\x1b[0m"), "{colored}");
        }
    }

    #[test]
    fn marks_and_bars_stand_where_things_happened() {
        let scenario = Scenario {
            limit: 1,
            burst: 1,
            window_ms: 1000,
            duration_ms: 4000,
            rate_per_minute: 60,
            algorithms: vec![tallygate_core::Kind::FixedWindow],
            ..Scenario::default()
        };
        let steady = draw(&report(scenario.clone()).unwrap(), PLAIN);
        assert!(steady.contains("fixed_window            #....#....#....#....\n"), "{steady}");
        let two = Scenario { pattern: Pattern::Bursty, burst_size: 2, ..scenario };
        let bursty = draw(&report(two).unwrap(), PLAIN);
        assert!(bursty.contains("fixed_window            %.........%.........\n"), "{bursty}");
        assert!(bursty.contains("99999_____99999_____\n"), "{bursty}");
    }

    #[test]
    fn only_nothing_is_shown_as_nothing() {
        assert_eq!([0, 1, 500, 1000].map(|part| bar(part, 1000, PLAIN)), ['_', '1', '5', '9']);
    }
}
