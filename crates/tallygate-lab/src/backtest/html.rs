//! The report as a page that stands alone: no scripts, nothing from anywhere else, light or dark as the reader likes.
//!
//! Clients name themselves, so every text is escaped. Plots are drawn here, in whole units of their own.

use std::fmt;
use std::io::{self, Write};

use super::report::{PolicyReport, Report};
use super::text::{grouped, percent, step, suggested};

/// Writes a report as a page of HTML that stands alone.
///
/// # Errors
/// It cannot be written to `out`.
pub fn write(report: &Report, out: &mut impl Write) -> io::Result<()> {
    out.write_all(HEAD.as_bytes())?;
    writeln!(out, "<h1>Backtest</h1>")?;
    write!(out, "<p>{} requests", count(report.requests))?;
    write!(out, " of {} clients by <code>{}</code>", count(report.clients), Text(&report.key))?;
    if let (Some(from), Some(to)) = (&report.from, &report.to) {
        write!(out, ", {} to {}", Text(from), Text(to))?;
    }
    write!(out, "; {} lines", count(report.lines))?;
    write!(out, ", {} unreadable", count(report.unreadable))?;
    writeln!(out, ", {} without a key.</p>", count(report.without_key))?;
    comparison(report, out)?;
    over_time(report, out)?;
    peaks(report, out)?;
    for policy in &report.policies {
        hardest_hit(report, policy, out)?;
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
main { max-width: 64rem; margin: 0 auto; padding: 1rem 1.25rem 3rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.name { white-space: normal; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.axis { stroke: var(--line); stroke-width: 1; } .all { fill: var(--quiet); }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
</style>
<main>
"#;

/// How many colours there are for policies.
const COLOURS: usize = 6;

/// Text that is only text.
struct Text<'a>(&'a str);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // What turns the direction of writing, or cannot be seen, is shown by its number.
                '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                    write!(f, "\\u{{{:x}}}", u32::from(character))?;
                }
                character if character.is_control() => {
                    write!(f, "\\u{{{:x}}}", u32::from(character))?;
                }
                character => write!(f, "{character}")?,
            }
        }
        Ok(())
    }
}

fn count(number: u64) -> String {
    grouped(number.into())
}

/// `part` of `all`, in units of a length.
fn scaled(part: u64, all: u64, length: u64) -> u64 {
    let product = u128::from(part) * u128::from(length);
    u64::try_from(product / u128::from(all.max(1))).unwrap_or(length)
}

fn comparison(report: &Report, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "<h2>Policies</h2>\n<div class=\"wide\"><table>")?;
    writeln!(
        out,
        "<tr><th>policy<th class=\"n\">refused<th class=\"n\">share<th class=\"n\">clients refused\
         <th class=\"n\">share<th class=\"n\">not by the first<th class=\"n\">only by it</tr>"
    )?;
    for (place, policy) in report.policies.iter().enumerate() {
        writeln!(
            out,
            "<tr><td><span class=\"key\" style=\"background:var(--c{})\"></span>{}\
             <td class=\"n\">{}<td class=\"n\">{}<td class=\"n\">{}<td class=\"n\">{}<td class=\"n\">{}<td class=\"n\">{}</tr>",
            place % COLOURS,
            Text(&policy.policy),
            count(policy.refused),
            Text(&percent(policy.refused, report.requests)),
            count(policy.clients_refused),
            Text(&percent(policy.clients_refused, report.clients)),
            count(policy.refused_here_only),
            count(policy.refused_by_first_only),
        )?;
    }
    writeln!(out, "</table></div>")?;
    bars(report, out)?;
    for suggestion in report.policies.iter().filter_map(|policy| policy.suggestion.as_ref()) {
        writeln!(out, "<p>{}</p>", Text(&suggested(suggestion)))?;
    }
    Ok(())
}

/// The refused share of requests and of clients, policy by policy, on a scale that ends with the greatest.
fn bars(report: &Report, out: &mut impl Write) -> io::Result<()> {
    const LEFT: u64 = 150;
    const LENGTH: u64 = 640;
    const HEIGHT: u64 = 16;
    let shares = |policy: &PolicyReport| {
        [
            ("requests", policy.refused, report.requests),
            ("clients", policy.clients_refused, report.clients),
        ]
    };
    let millionths = |part: u64, all: u64| scaled(part, all, 1_000_000);
    let most = report.policies.iter().flat_map(shares).map(|(_, part, all)| millionths(part, all));
    let most = most.max().unwrap_or(0).max(1);
    let rows = report.policies.len() as u64 * 2;
    writeln!(
        out,
        "<svg viewBox=\"0 0 900 {}\" role=\"img\" aria-label=\"Refused shares of each policy\">",
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
                place % COLOURS,
                Text(&policy.policy),
                Text(&label),
                LEFT + length + 6,
                top + 12,
                Text(&label),
            )?;
            top += HEIGHT + 6;
        }
    }
    writeln!(out, "</svg>")
}

/// Requests as an area, and the refused share of each policy as a line.
fn over_time(report: &Report, out: &mut impl Write) -> io::Result<()> {
    const LEFT: u64 = 60;
    const WIDTH: u64 = 800;
    const TOP: u64 = 20;
    const HEIGHT: u64 = 200;
    const BOTTOM: u64 = TOP + HEIGHT;
    let points = &report.over_time.points;
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return Ok(()) };
    let step_s = step(report.over_time.step_s);
    writeln!(out, "<h2>Refused over time, in steps of {}</h2>", Text(&step_s))?;
    writeln!(
        out,
        "<svg viewBox=\"0 0 900 260\" role=\"img\" aria-label=\"Requests, and the refused share of each policy, over time\">"
    )?;
    let length = last.start.since(first.start).0 / 1_000_000_000 + report.over_time.step_s;
    let x = |at: u64| LEFT + scaled(at, length, WIDTH);
    let busiest = points.iter().map(|point| point.requests).max().unwrap_or(1);
    let share = |refused: u64, requests: u64| scaled(refused, requests, 1_000_000);
    let shares =
        points.iter().flat_map(|p| p.refused.iter().map(|refused| share(*refused, p.requests)));
    let most = shares.max().unwrap_or(0).max(1);
    for point in points {
        let at = point.start.since(first.start).0 / 1_000_000_000;
        let height = scaled(point.requests, busiest, HEIGHT);
        let (start, end) = (x(at), x(at + report.over_time.step_s));
        writeln!(
            out,
            "<rect class=\"all\" x=\"{start}\" y=\"{}\" width=\"{}\" height=\"{height}\"><title>{}: {} requests, refused {}</title></rect>",
            BOTTOM - height,
            (end - start).max(1),
            point.time,
            count(point.requests),
            point.refused.iter().map(|refused| count(*refused)).collect::<Vec<_>>().join(", "),
        )?;
    }
    for place in 0..report.policies.len() {
        write!(
            out,
            "<polyline fill=\"none\" stroke-width=\"2\" stroke-linejoin=\"round\" style=\"stroke:var(--c{})\" points=\"",
            place % COLOURS
        )?;
        for point in points {
            let at = point.start.since(first.start).0 / 1_000_000_000 + report.over_time.step_s / 2;
            let height = scaled(share(point.refused[place], point.requests), most, HEIGHT);
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
         <text x=\"{LEFT}\" y=\"12\">lines: refused share; area: up to {} requests</text>\
         <text x=\"{LEFT}\" y=\"240\">{}</text><text x=\"{}\" y=\"240\" text-anchor=\"end\">{}</text>\n</svg>",
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

/// How many clients had which peak.
fn peaks(report: &Report, out: &mut impl Write) -> io::Result<()> {
    const LEFT: u64 = 60;
    const WIDTH: u64 = 800;
    const BOTTOM: u64 = 180;
    const HEIGHT: u64 = 140;
    let bins = &report.peaks.histogram;
    if bins.is_empty() {
        return Ok(());
    }
    let window = Text(&report.peaks.window);
    writeln!(out, "<h2>Peaks: the most requests of a client in {window}</h2>")?;
    writeln!(
        out,
        "<svg viewBox=\"0 0 900 210\" role=\"img\" aria-label=\"How many clients had which peak\">"
    )?;
    writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"12\">clients, by peaks from here to below the next</text>"
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
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{BOTTOM}\" y2=\"{BOTTOM}\"/>\n</svg>",
        LEFT + WIDTH
    )?;
    write!(out, "<p>")?;
    for (place, quantile) in report.peaks.quantiles.iter().enumerate() {
        let comma = if place > 0 { "; " } else { "" };
        write!(out, "{comma}{} % at most {}", quantile.share, count(quantile.requests.into()))?;
    }
    writeln!(out, ".</p>")
}

fn hardest_hit(report: &Report, policy: &PolicyReport, out: &mut impl Write) -> io::Result<()> {
    let Some(most) = policy.hardest_hit.first().map(|hit| hit.refused) else { return Ok(()) };
    writeln!(out, "<h2>Hit hardest by {}</h2>", Text(&policy.policy))?;
    if let Some(worst) = &policy.worst {
        writeln!(
            out,
            "<p>Most in {} from {}: {} of {} requests refused.</p>",
            Text(&step(report.over_time.step_s)),
            worst.time,
            count(worst.refused),
            count(worst.requests),
        )?;
    }
    writeln!(
        out,
        "<div class=\"wide\"><table>\n<tr><th>client<th class=\"n\">refused<th><th class=\"n\">of requests\
         <th class=\"n\">peak<th>until<th>first refused<th>last refused</tr>"
    )?;
    for hit in &policy.hardest_hit {
        writeln!(
            out,
            "<tr><td class=\"name\">{}<td class=\"n\">{}<td><svg viewBox=\"0 0 120 12\" style=\"width:120px\" role=\"presentation\">\
             <rect width=\"{}\" height=\"12\" style=\"fill:var(--c0)\"/></svg><td class=\"n\">{}<td class=\"n\">{}<td>{}<td>{}<td>{}</tr>",
            Text(&hit.client),
            count(hit.refused),
            scaled(hit.refused, most, 120).max(1),
            count(hit.requests),
            count(hit.peak.into()),
            hit.peak_until,
            hit.first_refused,
            hit.last_refused,
        )?;
    }
    writeln!(out, "</table></div>")
}

fn problems(report: &Report, out: &mut impl Write) -> io::Result<()> {
    if !report.unreadable_lines.is_empty() {
        writeln!(out, "<h2>The first lines that could not be read</h2>\n<pre>")?;
        for line in &report.unreadable_lines {
            let (input, reason) = (Text(&line.input), Text(&line.reason));
            writeln!(out, "{input}, line {}: {reason}: {}", line.line, Text(&line.text))?;
        }
        writeln!(out, "</pre>")?;
    }
    for cut in &report.cut_short {
        let (input, reason) = (Text(&cut.input), Text(&cut.reason));
        writeln!(out, "<p>{input} was not read to its end: {reason}</p>")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_only_text() {
        let hostile = "<script>alert(\"a&'b\")</script>\u{202e}\n";
        let shown = "&lt;script&gt;alert(&quot;a&amp;&#39;b&quot;)&lt;/script&gt;\\u{202e}\\u{a}";
        assert_eq!(Text(hostile).to_string(), shown);
    }
}
