//! Renders a report as text: a table of the algorithms, then one lane per algorithm that shows its decisions over time.
//!
//! A lane has one mark per time slice (allowed, denied or both). Below it, one row of bars shows how many units leave in
//! each slice, and another the algorithm's state as a share of its largest value.

use std::fmt::Write as _;

use super::report::{AlgorithmReport, ClientReport, Division, Report};
use super::scenario::{Pattern, Scenario};

/// The options of [`draw`].
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// Whether to use only ASCII characters.
    pub is_ascii: bool,
    /// Whether to use colors.
    pub is_colored: bool,
    /// The width of the terminal, if known.
    pub columns: Option<usize>,
}

const DEFAULT_COLUMNS: usize = 80;
/// The width of the names, and the range of widths of a lane.
const NAMES: usize = 24;
const DRAWN: std::ops::RangeInclusive<usize> = 16..=400;

/// The decisions in a time slice.
#[derive(Clone, Copy, PartialEq, Eq)]
struct TimeSlice {
    allowed: bool,
    denied: bool,
}

/// Renders a report as text for a terminal.
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
    let columns = style.columns.unwrap_or(DEFAULT_COLUMNS);
    let width = columns.saturating_sub(NAMES).clamp(*DRAWN.start(), *DRAWN.end());
    let duration_us = scenario.duration_us();
    let outputs: Vec<Vec<u64>> =
        report.lanes.iter().map(|lane| outputs(lane, scenario.cost, duration_us, width)).collect();
    // One scale for all algorithms, so that their outputs can be compared.
    let most = outputs.iter().flatten().copied().max().unwrap_or(0);
    for (lane, output) in report.lanes.iter().zip(outputs) {
        writeln!(out)?;
        write_lane(out, lane, duration_us, width, style)?;
        write_bars(out, "output", output.into_iter().map(|units| bar(units, most, style)))?;
        write_state(out, lane, duration_us, width, style)?;
    }
    let (allowed, denied, both) =
        (mark(true, false, style), mark(false, true, style), mark(true, true, style));
    let end = seconds(duration_us);
    let space = width.saturating_sub(1);
    writeln!(out, "\n{:NAMES$}0{end:>space$}", "")?;
    writeln!(out, "{:NAMES$}{allowed} allowed  {denied} denied  {both} both", "")?;
    let slice = seconds(duration_us / width as u64);
    let full = bar(1, 1, style);
    writeln!(
        out,
        "{:NAMES$}output: units that leave, after their delay; {full} is {most} in {slice}",
        ""
    )
}

fn write_scenario(out: &mut String, scenario: &Scenario) -> std::fmt::Result {
    let Scenario { limit, burst, rate_per_minute, cost, .. } = scenario;
    let window = seconds(scenario.window_us());
    let seed =
        if scenario.is_random() { format!(", seed {}", scenario.seed) } else { String::new() };
    write!(
        out,
        "{} traffic, {rate_per_minute} per minute for {}{seed}; limit {limit} per {window}",
        scenario.pattern.name(),
        seconds(scenario.duration_us())
    )?;
    if burst != limit {
        write!(out, ", burst {burst}")?;
    }
    if *cost != 1 {
        write!(out, ", cost {cost}")?;
    }
    if scenario.instances > 1 {
        write!(out, ", divided between {} instances", scenario.instances)?;
    }
    out.write_str("\n\n")
}

fn write_table(out: &mut String, report: &Report) -> std::fmt::Result {
    let retries = report.scenario.pattern == Pattern::Retry;
    write!(out, "{:NAMES$}{:>8}{:>9}", "", "allowed", "denied")?;
    if retries {
        write!(out, "{:>9}{:>9}", "retried", "gave up")?;
    }
    let is_divided = report.scenario.instances > 1;
    if is_divided {
        write!(out, "{:>11}{:>16}", "if shared", "room elsewhere")?;
    }
    writeln!(out, "{:>14}{:>16}", "worst window", "first denied")?;
    for lane in &report.lanes {
        let first = lane.first_denied_us.map_or_else(|| "never".to_owned(), seconds);
        write!(out, "{:NAMES$}{:>8}{:>9}", lane.algorithm.name(), lane.allowed, lane.denied)?;
        if retries {
            write!(out, "{:>9}{:>9}", lane.retried, lane.gave_up)?;
        }
        if let Some(division) = &lane.division {
            let Division { allowed_if_shared, denied_with_room_elsewhere, .. } = division;
            write!(out, "{allowed_if_shared:>11}{denied_with_room_elsewhere:>16}")?;
        }
        write!(out, "{:>14}{first:>16}", lane.worst_window.count)?;
        if let Some(cut) = lane.cut_at_us {
            write!(out, "  (stopped at {}: too many requests)", seconds(cut))?;
        }
        writeln!(out)?;
    }
    if is_divided {
        out.push_str(
            "\nif shared: allowed by one quota for all instances\n\
             room elsewhere: denied, although another instance would have allowed it\n",
        );
    }
    Ok(())
}

/// Writes how many of its requests each client was allowed.
fn write_clients(out: &mut String, report: &Report) -> std::fmt::Result {
    let names = report.lanes.first().map(|lane| &lane.clients);
    write!(out, "\n{:NAMES$}", "allowed/requests")?;
    for client in names.into_iter().flatten() {
        write!(out, "{:>11}", client.name)?;
    }
    writeln!(out)?;
    for lane in &report.lanes {
        write!(out, "{:NAMES$}", lane.algorithm.name())?;
        for client in &lane.clients {
            write!(out, "{:>11}", format!("{}/{}", client.allowed, client.requests))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn write_lane(
    out: &mut String,
    lane: &AlgorithmReport,
    duration_us: u64,
    width: usize,
    style: Style,
) -> std::fmt::Result {
    let mut slices = vec![TimeSlice { allowed: false, denied: false }; width];
    for (&at_us, &allowed) in lane.events.at_us.iter().zip(&lane.events.allowed) {
        let slice = &mut slices[slice_of(at_us, duration_us, width)];
        slice.allowed |= allowed == 1;
        slice.denied |= allowed == 0;
    }
    write!(out, "{:NAMES$}", lane.algorithm.name())?;
    for slice in slices {
        out.push_str(&mark(slice.allowed, slice.denied, style));
    }
    writeln!(out)
}

/// Returns the units that leave in each slice, of all clients. Requests that leave after the end are not counted.
fn outputs(lane: &AlgorithmReport, cost: u64, duration_us: u64, width: usize) -> Vec<u64> {
    let mut outputs = vec![0; width];
    let events = &lane.events;
    for ((&at_us, &delay_us), _) in
        events.at_us.iter().zip(&events.delay_us).zip(&events.allowed).filter(|(_, a)| **a == 1)
    {
        let leaves_us = at_us.saturating_add(delay_us);
        if leaves_us < duration_us {
            outputs[slice_of(leaves_us, duration_us, width)] += cost;
        }
    }
    outputs
}

/// Returns the slice that contains a time.
fn slice_of(at_us: u64, duration_us: u64, width: usize) -> usize {
    let place = u128::from(at_us) * width as u128 / u128::from(duration_us.max(1));
    usize::try_from(place).unwrap_or(width).min(width - 1)
}

fn write_state(
    out: &mut String,
    lane: &AlgorithmReport,
    duration_us: u64,
    width: usize,
    style: Style,
) -> std::fmt::Result {
    let Some(ClientReport { state, .. }) = lane.clients.first() else { return Ok(()) };
    // Each slice shows its last sample. A slice without a sample repeats the one before.
    let mut levels: Vec<Option<u64>> = vec![None; width];
    for (&at_us, value) in state.at_us.iter().zip(&state.value) {
        levels[slice_of(at_us, duration_us, width)] = Some(value.0);
    }
    let mut level = 0;
    let bars = levels.into_iter().map(|sample| {
        level = sample.unwrap_or(level);
        bar(level, state.capacity.0, style)
    });
    write_bars(out, state.name, bars)
}

/// Writes a row of bars below a lane.
fn write_bars(out: &mut String, name: &str, bars: impl Iterator<Item = char>) -> std::fmt::Result {
    let name: String = name.chars().take(NAMES - 3).collect();
    let bars: String = bars.collect();
    writeln!(out, "  {name:rest$}{}", bars.trim_end(), rest = NAMES - 2)
}

fn mark(allowed: bool, denied: bool, style: Style) -> String {
    let (blocks, ascii, color) = match (allowed, denied) {
        (false, false) => return if style.is_ascii { ".".into() } else { "·".into() },
        (true, false) => ('█', '#', 32),
        (false, true) => ('░', 'x', 31),
        (true, true) => ('▒', '%', 33),
    };
    let mark = if style.is_ascii { ascii } else { blocks };
    if style.is_colored { format!("\x1b[{color}m{mark}\x1b[0m") } else { mark.to_string() }
}

/// Returns the bar that shows a part of a whole. Only zero is shown as an empty bar.
fn bar(part: u64, whole: u64, style: Style) -> char {
    const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    const ASCII: [char; 10] = ['_', '1', '2', '3', '4', '5', '6', '7', '8', '9'];
    let bars: &[char] = if style.is_ascii { &ASCII } else { &BLOCKS };
    let highest = bars.len() - 1;
    let height = (u128::from(part) * highest as u128).div_ceil(u128::from(whole.max(1)));
    bars[usize::try_from(height).unwrap_or(highest).min(highest)]
}

/// Formats microseconds as seconds, to the millisecond.
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
    fn a_lane_fills_the_width_and_ascii_style_is_ascii() {
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
    fn marks_and_bars_are_at_the_times_of_the_requests() {
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
    fn only_zero_is_shown_as_an_empty_bar() {
        assert_eq!([0, 1, 500, 1000].map(|part| bar(part, 1000, PLAIN)), ['_', '1', '5', '9']);
    }
}
