//! Renders the report as plain text.

use std::io::{self, Write};

use super::report::{PolicyReport, Report, SuggestionReport};

/// Writes a report as plain text.
///
/// # Errors
/// Returns an error if writing to `out` fails.
pub fn write(report: &Report, out: &mut impl Write) -> io::Result<()> {
    write!(out, "{} lines", count(report.lines))?;
    write!(out, ", {} unreadable", count(report.unreadable))?;
    if report.filtered > 0 {
        write!(out, ", {} filtered out", count(report.filtered))?;
    }
    if report.without_key > 0 {
        write!(out, ", {} without {}", count(report.without_key), report.key)?;
    }
    writeln!(out)?;
    for note in &report.filters_without_effect {
        writeln!(out, "{note}")?;
    }
    write!(out, "{} requests from {} clients", count(report.requests), count(report.clients))?;
    if let (Some(from), Some(to)) = (&report.from, &report.to) {
        write!(out, ", {from} to {to}")?;
    }
    writeln!(out, "\n")?;
    comparison(report, out)?;
    for policy in &report.policies {
        details(report, policy, out)?;
    }
    writeln!(out, "Peaks: the most requests per client in {}", report.peaks.window)?;
    for quantile in &report.peaks.quantiles {
        let requests = count(quantile.requests.into());
        writeln!(out, "  {:>7} of clients: at most {requests}", format!("{} %", quantile.share))?;
    }
    problems(report, out)
}

/// Explains the last two columns of the table that compares the policies.
pub(super) const ONLY_BY: &str = "only by this one: requests that this policy denies and the first policy allows; \
                                  only by first: the reverse";

/// Writes the table that compares the policies.
fn comparison(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let width = report.policies.iter().map(|policy| policy.policy.chars().count()).max();
    let width = width.unwrap_or(0).max("policy".len());
    writeln!(
        out,
        "{:width$}  {:>14} {:>9}  {:>14} {:>9}  {:>16} {:>13}",
        "policy", "denied", "", "clients denied", "", "only by this one", "only by first"
    )?;
    for policy in &report.policies {
        writeln!(
            out,
            "{:width$}  {:>14} {:>9}  {:>14} {:>9}  {:>16} {:>13}",
            policy.policy,
            count(policy.denied),
            percent(policy.denied, report.requests),
            count(policy.clients_denied),
            percent(policy.clients_denied, report.clients),
            count(policy.denied_here_only),
            count(policy.denied_by_first_only),
        )?;
    }
    if report.policies.len() > 1 {
        writeln!(out, "{ONLY_BY}")?;
    }
    writeln!(out)
}

fn details(report: &Report, policy: &PolicyReport, out: &mut impl Write) -> io::Result<()> {
    if policy.denied == 0 && policy.suggestion.is_none() {
        return Ok(());
    }
    writeln!(out, "{}", policy.policy)?;
    if let Some(worst) = &policy.worst {
        let step = step(report.over_time.step_s);
        let (denied, requests) = (count(worst.denied), count(worst.requests));
        writeln!(out, "  worst {step} starts at {}: {denied} of {requests} denied", worst.time)?;
        writeln!(
            out,
            "  {:>12} {:>12} {:>8}  {:24} {:24} client",
            "denied", "of requests", "peak", "first denied", "last denied"
        )?;
    }
    for client in &policy.most_denied {
        writeln!(
            out,
            "  {:>12} {:>12} {:>8}  {:24} {:24} {}",
            count(client.denied),
            count(client.requests),
            count(client.peak.into()),
            client.first_denied,
            client.last_denied,
            client.client.escape_debug(),
        )?;
    }
    if let Some(suggestion) = &policy.suggestion {
        writeln!(out, "  {}", suggested(suggestion))?;
    }
    writeln!(out)
}

/// Returns a suggestion as a sentence.
pub(super) fn suggested(suggestion: &SuggestionReport) -> String {
    let share = suggestion.share;
    match (&suggestion.policy, suggestion.clients_denied, &suggestion.reason) {
        (Some(policy), Some(denied), _) => {
            let denied = count(denied);
            format!(
                "suggestion: {policy} allows all requests of at least {share} % of clients (it denies {denied} clients)"
            )
        }
        (_, _, reason) => {
            let reason = reason.as_deref().unwrap_or_default();
            format!("no suggestion for {share} % of clients: {reason}")
        }
    }
}

fn problems(report: &Report, out: &mut impl Write) -> io::Result<()> {
    if !report.unreadable_lines.is_empty() {
        writeln!(out, "\nFirst unreadable lines")?;
    }
    for line in &report.unreadable_lines {
        let text = line.text.escape_debug();
        writeln!(out, "  {}, line {}: {}: {text}", line.input, line.line, line.reason)?;
    }
    for cut in &report.cut_short {
        writeln!(out, "\n{} was read only in part: {}", cut.input, cut.reason)?;
    }
    Ok(())
}

/// Formats a time step.
pub(super) fn step(seconds: u64) -> String {
    let span = tallygate_core::Ticks(seconds.saturating_mul(1_000_000_000));
    crate::limit_syntax::Span(span).to_string()
}

fn count(number: u64) -> String {
    grouped(number.into())
}

/// Formats a number with its digits in groups of three.
#[must_use]
pub fn grouped(number: u128) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(digit);
    }
    out
}

/// Formats a share in percent, rounded to three decimal places. A share above 0 is never shown as 0, and one below 100 %
/// never as 100 %.
pub(super) fn percent(part: u64, all: u64) -> String {
    if all == 0 {
        return "0 %".to_owned();
    }
    let (part, all) = (u128::from(part), u128::from(all));
    let thousandths = (part * 100_000 + all / 2) / all;
    match thousandths {
        0 if part > 0 => "<0.001 %".to_owned(),
        100_000 if part < all => ">99.999 %".to_owned(),
        _ => format!("{}.{:03} %", thousandths / 1000, thousandths % 1000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped_in_threes() {
        for (number, shown) in
            [(0, "0"), (999, "999"), (1_000, "1 000"), (12_345_678, "12 345 678")]
        {
            assert_eq!(grouped(number), shown);
        }
    }

    #[test]
    fn a_share_is_shown_as_none_or_all_only_if_it_is() {
        assert_eq!(percent(0, 0), "0 %");
        assert_eq!(percent(0, 7), "0.000 %");
        assert_eq!(percent(1, 1_000_000), "<0.001 %");
        assert_eq!(percent(1, 3), "33.333 %");
        assert_eq!(percent(2, 3), "66.667 %");
        assert_eq!(percent(999_999, 1_000_000), ">99.999 %");
        assert_eq!(percent(7, 7), "100.000 %");
        assert_eq!(percent(u64::MAX, u64::MAX), "100.000 %");
    }
}
