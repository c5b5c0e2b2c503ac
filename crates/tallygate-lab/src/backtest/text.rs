//! The report as plain text, for terminals and mails.

use std::io::{self, Write};

use super::report::{PolicyReport, Report, Suggested};

/// Writes a report as text for a terminal.
///
/// # Errors
/// It cannot be written to `out`.
pub fn write(report: &Report, out: &mut impl Write) -> io::Result<()> {
    write!(out, "{} lines", count(report.lines))?;
    write!(out, ", {} unreadable", count(report.unreadable))?;
    if report.without_key > 0 {
        write!(out, ", {} without {}", count(report.without_key), report.key)?;
    }
    writeln!(out)?;
    write!(out, "{} requests of {} clients", count(report.requests), count(report.clients))?;
    if let (Some(from), Some(to)) = (&report.from, &report.to) {
        write!(out, ", {from} to {to}")?;
    }
    writeln!(out, "\n")?;
    comparison(report, out)?;
    for policy in &report.policies {
        one(report, policy, out)?;
    }
    writeln!(out, "Peaks: the most requests of a client in {}", report.peaks.window)?;
    for quantile in &report.peaks.quantiles {
        let requests = count(quantile.requests.into());
        writeln!(out, "  {:>7} of clients  {requests:>12}", format!("{} %", quantile.share))?;
    }
    problems(report, out)
}

/// The policies beside each other.
fn comparison(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let width = report.policies.iter().map(|policy| policy.policy.chars().count()).max();
    let width = width.unwrap_or(0).max("policy".len());
    writeln!(
        out,
        "{:width$}  {:>14} {:>9}  {:>10} {:>9}  {:>16} {:>15}",
        "policy", "refused", "", "clients", "", "not by the first", "only by it"
    )?;
    for policy in &report.policies {
        writeln!(
            out,
            "{:width$}  {:>14} {:>9}  {:>10} {:>9}  {:>16} {:>15}",
            policy.policy,
            count(policy.refused),
            percent(policy.refused, report.requests),
            count(policy.clients_refused),
            percent(policy.clients_refused, report.clients),
            count(policy.refused_here_only),
            count(policy.refused_by_first_only),
        )?;
    }
    writeln!(out)
}

fn one(report: &Report, policy: &PolicyReport, out: &mut impl Write) -> io::Result<()> {
    if policy.refused == 0 && policy.suggestion.is_none() {
        return Ok(());
    }
    writeln!(out, "{}", policy.policy)?;
    if let Some(worst) = &policy.worst {
        let step = step(report.over_time.step_s);
        let (refused, requests) = (count(worst.refused), count(worst.requests));
        writeln!(out, "  most in {step} from {}: {refused} of {requests} refused", worst.time)?;
        writeln!(
            out,
            "  {:>12} {:>12} {:>8}  {:24} {:24} client",
            "refused", "of requests", "peak", "first refused", "last refused"
        )?;
    }
    for hit in &policy.hardest_hit {
        writeln!(
            out,
            "  {:>12} {:>12} {:>8}  {:24} {:24} {}",
            count(hit.refused),
            count(hit.requests),
            count(hit.peak.into()),
            hit.first_refused,
            hit.last_refused,
            hit.client.escape_debug(),
        )?;
    }
    if let Some(suggestion) = &policy.suggestion {
        writeln!(out, "  {}", suggested(suggestion))?;
    }
    writeln!(out)
}

/// A suggestion in words.
pub(super) fn suggested(suggestion: &Suggested) -> String {
    let share = suggestion.share;
    match (&suggestion.policy, suggestion.clients_refused, &suggestion.reason) {
        (Some(policy), Some(refused), _) => {
            let refused = count(refused);
            format!("to spare {share} % of clients: {policy} ({refused} would be refused)")
        }
        (_, _, reason) => {
            let reason = reason.as_deref().unwrap_or_default();
            format!("no limit spares {share} % of clients: {reason}")
        }
    }
}

fn problems(report: &Report, out: &mut impl Write) -> io::Result<()> {
    if !report.unreadable_lines.is_empty() {
        writeln!(out, "\nThe first lines that could not be read")?;
    }
    for line in &report.unreadable_lines {
        let text = line.text.escape_debug();
        writeln!(out, "  {}, line {}: {}: {text}", line.input, line.line, line.reason)?;
    }
    for cut in &report.cut_short {
        writeln!(out, "\n{} was not read to its end: {}", cut.input, cut.reason)?;
    }
    Ok(())
}

/// A step of time in words.
pub(super) fn step(seconds: u64) -> String {
    let span = tallygate_core::Ticks(seconds.saturating_mul(1_000_000_000));
    crate::spelling::Span(span).to_string()
}

fn count(number: u64) -> String {
    grouped(number.into())
}

/// A number with its digits in threes.
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

/// A share in percent, to three places, rounded to the nearest. What is not nothing is not shown as nothing.
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
    fn numbers_are_grouped_in_threes() {
        for (number, shown) in
            [(0, "0"), (999, "999"), (1_000, "1 000"), (12_345_678, "12 345 678")]
        {
            assert_eq!(grouped(number), shown);
        }
    }

    #[test]
    fn a_share_is_never_shown_as_nothing_or_all_if_it_is_not() {
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
