//! Renders the report as a self-contained HTML page, without scripts or external resources, with a light and a dark theme.
//!
//! Clients choose their names, so every text is escaped. Plots use whole numbers as coordinates.

use std::io::{self, Write};

use super::report::{PolicyReport, Report};
use super::text::{ONLY_BY, grouped, percent, step, suggested};
use crate::html_text::Text;

/// Writes a report as a self-contained HTML page.
///
/// # Errors
/// Returns an error if writing to `out` fails.
pub fn write(report: &Report, out: &mut impl Write) -> io::Result<()> {
    out.write_all(HEAD.as_bytes())?;
    writeln!(out, "<h1>Backtest</h1>")?;
    write!(out, "<p>{} requests", count(report.requests))?;
    write!(
        out,
        " from {} clients (key: <code>{}</code>)",
        count(report.clients),
        Text(&report.key)
    )?;
    if let (Some(from), Some(to)) = (&report.from, &report.to) {
        write!(out, ", {} to {}", Text(from), Text(to))?;
    }
    write!(out, "; {} lines", count(report.lines))?;
    write!(out, ", {} unreadable", count(report.unreadable))?;
    if report.filtered > 0 {
        write!(out, ", {} filtered out", count(report.filtered))?;
    }
    writeln!(out, ", {} without a key.</p>", count(report.without_key))?;
    for note in &report.filters_without_effect {
        writeln!(out, "<p>Note: {}.</p>", Text(note))?;
    }
    comparison(report, out)?;
    over_time(report, out)?;
    peaks(report, out)?;
    for policy in &report.policies {
        most_denied(report, policy, out)?;
    }
    problems(report, out)?;
    writeln!(out, "</main>")
}

const HEAD: &str = r#"<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Backtest</title>
<style>
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d0d7de; --soft: #57606a; --quiet: #dfe5eb;
  --c0: #0b62c4; --c1: #b3541e; --c2: #2c7a4b; --c3: #7a3fb0; --c4: #a8324a; --c5: #4a6b7c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #14181d; --line: #3a424c; --soft: #9aa5b1;
  --quiet: #2a3139; --c0: #6cb0ff; --c1: #f0a06a; --c2: #6fce94; --c3: #c79bf2; --c4: #f38ba0; --c5: #9fc3d6; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1rem 1.25rem 3rem; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.name { white-space: normal; overflow-wrap: anywhere; min-width: 24ch; } td.whole { overflow-wrap: normal; }
.note { color: var(--soft); font-size: .9rem; }
th { color: var(--soft); font-weight: 500; }
svg { display: block; width: 100%; height: auto; min-width: 46rem; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.axis { stroke: var(--line); stroke-width: 1; } .all { fill: var(--quiet); }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
pre { white-space: pre-wrap; }
@media (max-width: 40rem) { main { padding: .5rem 1rem 2rem; } svg { min-width: 34rem; }
  table, tbody, tr { display: block; } tr.head { display: none; } tr { padding: .4rem 0; border-bottom: 1px solid var(--line); }
  td, td.n { display: flex; justify-content: space-between; gap: 1rem; padding: 0; border: 0; }
  td.name { display: block; min-width: 0; font-weight: 600; } td.bar { display: none; }
  td::before { content: attr(data-label); color: var(--soft); } }
</style>
<main>
"#;

/// The number of characters of the longest address, which is an IPv6 network.
const LONGEST_ADDRESS: usize = "2001:db8:1234:5678:9abc:def0:1234:5678/128".len();

/// The number of colors for policies.
const COLORS: usize = 6;

/// Returns a number in groups of three digits, which no line break separates.
fn count(number: u64) -> String {
    grouped(number.into()).replace(' ', "\u{a0}")
}

/// Returns the class of a table cell with a name. The words of a name are not broken, unless one of them is longer than any
/// address.
fn name_class(name: &str) -> &'static str {
    let is_short = |word: &str| word.chars().count() <= LONGEST_ADDRESS;
    if name.split_whitespace().all(is_short) { "name whole" } else { "name" }
}

/// Returns the share `part / all` of a length.
fn scaled(part: u64, all: u64, length: u64) -> u64 {
    let product = u128::from(part) * u128::from(length);
    u64::try_from(product / u128::from(all.max(1))).unwrap_or(length)
}

/// Writes a table cell with a number. On a phone, the table has no columns, and the label stands beside the number.
fn number(label: &str, value: &str, out: &mut impl Write) -> io::Result<()> {
    write!(out, "<td class=\"n\" data-label=\"{label}\">{}", Text(value))
}

fn comparison(report: &Report, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "<h2>Policies</h2>\n<div class=\"wide\"><table>")?;
    writeln!(
        out,
        "<tr class=\"head\"><th>policy<th class=\"n\">denied<th class=\"n\">share<th class=\"n\">clients denied\
         <th class=\"n\">share<th class=\"n\">only by this one<th class=\"n\">only by first</tr>"
    )?;
    for (place, policy) in report.policies.iter().enumerate() {
        write!(
            out,
            "<tr><td class=\"{}\"><span class=\"key\" style=\"background:var(--c{})\"></span>{}",
            name_class(&policy.policy),
            place % COLORS,
            Text(&policy.policy),
        )?;
        for (label, value) in [
            ("denied", count(policy.denied)),
            ("share of requests", percent(policy.denied, report.requests)),
            ("clients denied", count(policy.clients_denied)),
            ("share of clients", percent(policy.clients_denied, report.clients)),
            ("only by this one", count(policy.denied_here_only)),
            ("only by first", count(policy.denied_by_first_only)),
        ] {
            number(label, &value, out)?;
        }
        writeln!(out, "</tr>")?;
    }
    writeln!(out, "</table></div>")?;
    if report.policies.len() > 1 {
        writeln!(out, "<p class=\"note\">{}.</p>", Text(ONLY_BY))?;
    }
    bars(report, out)?;
    for suggestion in report.policies.iter().filter_map(|policy| policy.suggestion.as_ref()) {
        writeln!(out, "<p>{}</p>", Text(&suggested(suggestion)))?;
    }
    Ok(())
}

/// Draws the share of denied requests and clients per policy, scaled to the largest share.
fn bars(report: &Report, out: &mut impl Write) -> io::Result<()> {
    const LEFT: u64 = 150;
    const LENGTH: u64 = 640;
    const HEIGHT: u64 = 16;
    let shares = |policy: &PolicyReport| {
        [
            ("requests", policy.denied, report.requests),
            ("clients", policy.clients_denied, report.clients),
        ]
    };
    let millionths = |part: u64, all: u64| scaled(part, all, 1_000_000);
    let most = report.policies.iter().flat_map(shares).map(|(_, part, all)| millionths(part, all));
    let most = most.max().unwrap_or(0).max(1);
    let rows = report.policies.len() as u64 * 2;
    writeln!(
        out,
        "<div class=\"wide\"><svg viewBox=\"0 0 900 {}\" role=\"img\" aria-label=\"Share of requests and clients that each policy denies\">",
        rows * (HEIGHT + 6) + 8
    )?;
    let mut top = 4;
    for (place, policy) in report.policies.iter().enumerate() {
        for (what, part, all) in shares(policy) {
            let length = scaled(millionths(part, all), most, LENGTH);
            let label = percent(part, all);
            writeln!(
                out,
                "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{what}</text>\
                 <rect x=\"{LEFT}\" y=\"{top}\" width=\"{length}\" height=\"{HEIGHT}\" style=\"fill:var(--c{})\">\
                 <title>{}: {} of {what}</title></rect><text x=\"{}\" y=\"{}\">{}</text>",
                LEFT - 8,
                top + 12,
                place % COLORS,
                Text(&policy.policy),
                Text(&label),
                LEFT + length + 6,
                top + 12,
                Text(&label),
            )?;
            top += HEIGHT + 6;
        }
    }
    writeln!(out, "</svg></div>")
}

/// Draws requests as an area, and the share that each policy denies as a line.
fn over_time(report: &Report, out: &mut impl Write) -> io::Result<()> {
    const LEFT: u64 = 80;
    const WIDTH: u64 = 800;
    const TOP: u64 = 20;
    const HEIGHT: u64 = 200;
    const BOTTOM: u64 = TOP + HEIGHT;
    let points = &report.over_time.points;
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return Ok(()) };
    let step_s = step(report.over_time.step_s);
    writeln!(out, "<h2>Denied over time, in steps of {}</h2>", Text(&step_s))?;
    writeln!(
        out,
        "<div class=\"wide\"><svg viewBox=\"0 0 900 260\" role=\"img\" aria-label=\"Requests over time, and the share that each policy denies\">"
    )?;
    let length = last.start.since(first.start).0 / 1_000_000_000 + report.over_time.step_s;
    let x = |at: u64| LEFT + scaled(at, length, WIDTH);
    let busiest = points.iter().map(|point| point.requests).max().unwrap_or(1);
    let share = |denied: u64, requests: u64| scaled(denied, requests, 1_000_000);
    let shares =
        points.iter().flat_map(|p| p.denied.iter().map(|denied| share(*denied, p.requests)));
    let most = shares.max().unwrap_or(0).max(1);
    for point in points {
        let at = point.start.since(first.start).0 / 1_000_000_000;
        let height = scaled(point.requests, busiest, HEIGHT);
        let (start, end) = (x(at), x(at + report.over_time.step_s));
        writeln!(
            out,
            "<rect class=\"all\" x=\"{start}\" y=\"{}\" width=\"{}\" height=\"{height}\"><title>{}: {} requests, {} denied</title></rect>",
            BOTTOM - height,
            (end - start).max(1),
            point.time,
            count(point.requests),
            point.denied.iter().map(|denied| count(*denied)).collect::<Vec<_>>().join(", "),
        )?;
    }
    for place in 0..report.policies.len() {
        write!(
            out,
            "<polyline fill=\"none\" stroke-width=\"2\" stroke-linejoin=\"round\" style=\"stroke:var(--c{})\" points=\"",
            place % COLORS
        )?;
        for point in points {
            let at = point.start.since(first.start).0 / 1_000_000_000 + report.over_time.step_s / 2;
            let height = scaled(share(point.denied[place], point.requests), most, HEIGHT);
            write!(out, "{},{} ", x(at), BOTTOM - height)?;
        }
        writeln!(out, "\"/>")?;
    }
    writeln!(
        out,
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{BOTTOM}\" y2=\"{BOTTOM}\"/>\
         <line class=\"axis\" x1=\"{LEFT}\" x2=\"{LEFT}\" y1=\"{TOP}\" y2=\"{BOTTOM}\"/>\
         <text x=\"{}\" y=\"{}\" text-anchor=\"end\">0 %</text>\
         <text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\
         <text x=\"{LEFT}\" y=\"12\">lines: share denied; area: requests, up to {}</text>\
         <text x=\"{LEFT}\" y=\"240\">{}</text><text x=\"{}\" y=\"240\" text-anchor=\"end\">{}</text>\n</svg></div>",
        LEFT + WIDTH,
        LEFT - 6,
        BOTTOM,
        LEFT - 6,
        TOP + 10,
        Text(&percent(most, 1_000_000)),
        count(busiest),
        first.time,
        LEFT + WIDTH,
        last.time,
    )
}

/// Draws how many clients had which peak.
fn peaks(report: &Report, out: &mut impl Write) -> io::Result<()> {
    const LEFT: u64 = 80;
    const WIDTH: u64 = 800;
    const BOTTOM: u64 = 180;
    const HEIGHT: u64 = 140;
    let bins = &report.peaks.histogram;
    if bins.is_empty() {
        return Ok(());
    }
    let window = Text(&report.peaks.window);
    writeln!(out, "<h2>Peaks: the most requests per client in {window}</h2>")?;
    writeln!(
        out,
        "<div class=\"wide\"><svg viewBox=\"0 0 900 210\" role=\"img\" aria-label=\"Number of clients by peak\">"
    )?;
    writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"12\">number of clients by peak; the label is the smallest peak of a bar</text>"
    )?;
    let most = bins.iter().map(|bin| bin.clients).max().unwrap_or(1);
    let each = (WIDTH / bins.len() as u64).min(90);
    for (place, bin) in bins.iter().enumerate() {
        let height = scaled(bin.clients, most, HEIGHT).max(1);
        let left = LEFT + place as u64 * each;
        let label = if bin.from == bin.to {
            bin.from.to_string()
        } else {
            format!("{}–{}", count(bin.from.into()), count(bin.to.into()))
        };
        writeln!(
            out,
            "<rect x=\"{left}\" y=\"{}\" width=\"{}\" height=\"{height}\" style=\"fill:var(--c0)\"><title>{label}: {} clients</title></rect>\
             <text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text><text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            BOTTOM - height,
            each.saturating_sub(6).max(1),
            count(bin.clients),
            left + each / 2,
            BOTTOM - height - 5,
            count(bin.clients),
            left + each / 2,
            BOTTOM + 16,
            count(bin.from.into()),
        )?;
    }
    writeln!(
        out,
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{BOTTOM}\" y2=\"{BOTTOM}\"/>\n</svg></div>",
        LEFT + WIDTH
    )?;
    write!(out, "<p>")?;
    for (place, quantile) in report.peaks.quantiles.iter().enumerate() {
        let comma = if place > 0 { "; " } else { "" };
        write!(
            out,
            "{comma}{} % of clients: at most {}",
            quantile.share,
            count(quantile.requests.into())
        )?;
    }
    writeln!(out, ".</p>")
}

fn most_denied(report: &Report, policy: &PolicyReport, out: &mut impl Write) -> io::Result<()> {
    let Some(most) = policy.most_denied.first().map(|client| client.denied) else { return Ok(()) };
    writeln!(out, "<h2>Most denied by {}</h2>", Text(&policy.policy))?;
    if let Some(worst) = &policy.worst {
        writeln!(
            out,
            "<p>Worst {} starts at {}: {} of {} requests denied.</p>",
            Text(&step(report.over_time.step_s)),
            worst.time,
            count(worst.denied),
            count(worst.requests),
        )?;
    }
    writeln!(
        out,
        "<div class=\"wide\"><table>\n<tr class=\"head\"><th>client<th class=\"n\">denied<th><th class=\"n\">of requests\
         <th class=\"n\">peak<th>peak until<th>first denied<th>last denied</tr>"
    )?;
    for client in &policy.most_denied {
        write!(out, "<tr><td class=\"{}\">{}", name_class(&client.client), Text(&client.client))?;
        number("denied", &count(client.denied), out)?;
        write!(
            out,
            "<td class=\"bar\"><svg viewBox=\"0 0 120 12\" style=\"width:120px;min-width:0\" role=\"presentation\">\
             <rect width=\"{}\" height=\"12\" style=\"fill:var(--c0)\"/></svg>",
            scaled(client.denied, most, 120).max(1)
        )?;
        number("of requests", &count(client.requests), out)?;
        number("peak", &count(client.peak.into()), out)?;
        for (label, time) in [
            ("peak until", &client.peak_until),
            ("first denied", &client.first_denied),
            ("last denied", &client.last_denied),
        ] {
            write!(out, "<td data-label=\"{label}\">{time}")?;
        }
        writeln!(out, "</tr>")?;
    }
    writeln!(out, "</table></div>")
}

fn problems(report: &Report, out: &mut impl Write) -> io::Result<()> {
    if !report.unreadable_lines.is_empty() {
        writeln!(out, "<h2>First unreadable lines</h2>\n<pre>")?;
        for line in &report.unreadable_lines {
            let (input, reason) = (Text(&line.input), Text(&line.reason));
            writeln!(out, "{input}, line {}: {reason}: {}", line.line, Text(&line.text))?;
        }
        writeln!(out, "</pre>")?;
    }
    for cut in &report.cut_short {
        let (input, reason) = (Text(&cut.input), Text(&cut.reason));
        writeln!(out, "<p>{input} was read only in part: {reason}</p>")?;
    }
    Ok(())
}
