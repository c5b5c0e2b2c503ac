//! A report as a page that stands alone: tables and drawings in one file, without scripts, without anything from
//! elsewhere, in light and in dark.
//!
//! Drawings are stretched to the page's width, so that whatever has words stands beside them and not in them.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::report::{Lane, Report};
use super::scenario::Pattern;
use super::series::Steps;
use super::terminal::seconds;

/// The width of a drawing, in its own units.
const WIDTH: u128 = 2000;

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1d2733; --paper: #fff; --faint: #d9dee4; --yes: #1a7f4b; --no: #c2352b;
  --line: #2b62c4; --rest: #7a8694; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ee; --paper: #14181d; --faint: #343c46; --yes: #4cc38a; --no: #ff7b6e; --line: #7fb0ff; --rest: #93a0ae; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid var(--faint); }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
svg { display: block; width: 100%; background: none; margin: .3rem 0; border-bottom: 1px solid var(--faint); }
path { fill: none; vector-effect: non-scaling-stroke; stroke-width: 1.5; }
.yes { stroke: var(--yes); } .no { stroke: var(--no); } .line { stroke: var(--line); }
.rest { stroke: var(--rest); stroke-dasharray: 5 4; } .dots { stroke: var(--rest); stroke-dasharray: 1 3; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--faint); padding-left: .8rem; }
p.small { color: var(--rest); font-size: .85rem; margin: 0; display: flex; justify-content: space-between; }
";

/// Returns a report as a page of HTML.
#[must_use]
pub fn page(report: &Report) -> String {
    let mut out = String::new();
    // Writing into a string cannot fail.
    let _ = write_page(&mut out, report);
    out
}

fn write_page(out: &mut String, report: &Report) -> std::fmt::Result {
    let scenario = &report.scenario;
    let title =
        format!("{} traffic under {} algorithms", scenario.pattern.name(), report.lanes.len());
    let title = escaped(&title);
    write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
    )?;
    let asked = serde_json::to_string(scenario).unwrap_or_default();
    write!(
        out,
        "<p>{} requests a minute for {}, against {} per {}. Made by <code>tallygate simulate</code>; \
         the same scenario gives the same page.</p>\n<pre>{}</pre>\n",
        scenario.rate_per_minute,
        seconds(scenario.duration_us()),
        scenario.limit,
        seconds(scenario.window_us()),
        escaped(&asked)
    )?;
    write_table(out, report)?;
    for lane in &report.lanes {
        write_lane(out, report, lane)?;
    }
    out.push_str("</body>\n</html>\n");
    Ok(())
}

fn write_table(out: &mut String, report: &Report) -> std::fmt::Result {
    let retries = report.scenario.pattern == Pattern::Retry;
    out.push_str("<table>\n<tr><th>algorithm</th><th>allowed</th><th>refused</th>");
    if retries {
        out.push_str("<th>retried</th><th>gave up</th>");
    }
    out.push_str("<th>worst window</th><th>first refused</th></tr>\n");
    for lane in &report.lanes {
        let name = escaped(lane.algorithm.name());
        write!(out, "<tr><td>{name}</td><td>{}</td><td>{}</td>", lane.allowed, lane.refused)?;
        if retries {
            write!(out, "<td>{}</td><td>{}</td>", lane.retried, lane.gave_up)?;
        }
        let first = lane.first_refused_us.map_or_else(|| "never".to_owned(), seconds);
        writeln!(out, "<td>{}</td><td>{first}</td></tr>", lane.worst_window.count)?;
    }
    out.push_str("</table>\n");
    Ok(())
}

fn write_lane(out: &mut String, report: &Report, lane: &Lane) -> std::fmt::Result {
    let duration_us = report.scenario.duration_us();
    let x = |at_us: u64| u128::from(at_us) * WIDTH / u128::from(duration_us.max(1));
    let name = escaped(lane.algorithm.name());
    writeln!(
        out,
        "<h2>{name}</h2>\n<p class=\"small\"><span>{}</span></p>",
        escaped(&lane.policy)
    )?;
    let summary = format!("{}: {} allowed, {} refused", lane.algorithm, lane.allowed, lane.refused);
    open(out, 40, &summary)?;
    for (class, which, top, bottom) in [("yes", 1, 0, 20), ("no", 0, 20, 40)] {
        let events = lane.events.at_us.iter().zip(&lane.events.allowed);
        let places: BTreeSet<u128> =
            events.filter(|(_, allowed)| **allowed == which).map(|(at_us, _)| x(*at_us)).collect();
        write!(out, "<path class=\"{class}\" d=\"")?;
        for place in places {
            write!(out, "M{place} {top}V{bottom}")?;
        }
        out.push_str("\"/>");
    }
    out.push_str("</svg>\n");

    let capacity = u128::from(lane.state.capacity.0).max(1);
    let height = 80;
    let y = |value: u64| height - u128::from(value).min(capacity) * height / capacity;
    open(out, height, &format!("{} over time", lane.state.name))?;
    let points = lane.state.at_us.iter().zip(&lane.state.value);
    line(out, "line", points.map(|(at_us, value)| (x(*at_us), y(value.0))))?;
    out.push_str("</svg>\n");
    let (state, unit) = (escaped(lane.state.name), escaped(lane.state.unit));
    let most = lane.state.capacity.0 / 1000;
    writeln!(out, "<p class=\"small\"><span>{state}, 0 to {most} {unit}</span></p>")?;

    let height = 160;
    let last = |steps: &Steps| steps.value.last().copied().unwrap_or(0);
    let highest = [&lane.cumulative, &report.ideal, &report.offered].map(last).into_iter().max();
    let highest = u128::from(highest.unwrap_or(1).max(1));
    let y = |value: u64| height - u128::from(value) * height / highest;
    open(out, height, "admitted so far, against what a bucket may admit and what was asked for")?;
    for (class, steps) in
        [("rest", &report.ideal), ("dots", &report.offered), ("yes", &lane.cumulative)]
    {
        let points = steps.at_us.iter().zip(&steps.value);
        line(out, class, points.map(|(at_us, value)| (x(*at_us), y(*value))))?;
    }
    out.push_str("</svg>\n");
    let words = "admitted so far (solid), burst + rate (dashed), asked for (dotted)";
    let end = seconds(duration_us);
    writeln!(out, "<p class=\"small\"><span>{words}, 0 to {highest}</span><span>{end}</span></p>")?;
    writeln!(out, "<pre>{}</pre>", escaped(&lane.toml))
}

fn open(out: &mut String, height: u128, label: &str) -> std::fmt::Result {
    let label = escaped(label);
    write!(
        out,
        "<svg viewBox=\"0 0 {WIDTH} {height}\" height=\"{height}\" preserveAspectRatio=\"none\" role=\"img\" \
         aria-label=\"{label}\">"
    )
}

/// A line through points, those that fall together left out.
fn line(
    out: &mut String,
    class: &str,
    points: impl Iterator<Item = (u128, u128)>,
) -> std::fmt::Result {
    write!(out, "<path class=\"{class}\" d=\"")?;
    let mut last = None;
    for (x, y) in points {
        if last != Some((x, y)) {
            write!(out, "{}{x} {y}", if last.is_none() { 'M' } else { 'L' })?;
            last = Some((x, y));
        }
    }
    out.push_str("\"/>");
    Ok(())
}

/// Text that stays text, between tags and in attributes.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::{Scenario, report};

    #[test]
    fn a_page_stands_alone() {
        for pattern in Pattern::ALL {
            let page = page(&report(Scenario { pattern, ..Scenario::default() }).unwrap());
            for foreign in ["<script", "http://", "https://", "src=", "href=", "url(", "@import"] {
                assert!(!page.contains(foreign), "{foreign} in {pattern:?}");
            }
            assert_eq!(page.matches("<svg").count(), 6 * 3);
            assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
            assert!(page.contains("prefers-color-scheme: dark"));
            // Quotes of what is shown are escaped: outside of tags there is none.
            assert!(
                page.contains("&quot;pattern&quot;") && page.contains("window = &quot;10s&quot;")
            );
        }
    }

    #[test]
    fn text_stays_text() {
        assert_eq!(
            escaped("<a href='x'>\"&\"</a>"),
            "&lt;a href=&#39;x&#39;&gt;&quot;&amp;&quot;&lt;/a&gt;"
        );
    }
}
