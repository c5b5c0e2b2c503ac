//! `tallygate simulate`: builds a scenario from the flags and prints its report as a table, as JSON or as a page.

use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use anyhow::Context as _;
use tallygate_lab::simulate::{Report, Retry, Scenario, Style, draw, page, report};

use crate::cli::Simulate;

/// Runs a scenario and prints its report.
pub(crate) fn run(options: &Simulate) -> anyhow::Result<()> {
    let report = report(scenario(options)?);
    let report = report.map_err(|error| anyhow::anyhow!(error.message(flag)))?;
    if let Some(path) = &options.html {
        let written = std::fs::write(path, page(&report));
        written.with_context(|| format!("cannot write {}", path.display()))?;
    }
    match print(options, &report) {
        // The reader of the output has closed it: `head`, for example.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}

fn print(options: &Simulate, report: &Report) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if options.json {
        out.write_all(&serde_json::to_vec(report)?)?;
        return writeln!(out);
    }
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let style = Style {
        is_ascii: options.ascii,
        is_colored: out.is_terminal() && !no_color,
        columns: std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()),
    };
    out.write_all(draw(report, style).as_bytes())
}

fn scenario(options: &Simulate) -> anyhow::Result<Scenario> {
    Ok(Scenario {
        limit: options.limit,
        window_ms: millis("window", options.window)?,
        burst: options.burst.unwrap_or(options.limit),
        algorithms: match &*options.algorithms {
            [] => Scenario::default().algorithms,
            given => given.to_vec(),
        },
        pattern: options.pattern,
        rate_per_minute: options.rate,
        duration_ms: millis("duration", options.duration)?,
        seed: options.seed,
        cost: options.cost,
        retry: Retry {
            obeys: !options.naive,
            jitter: !options.no_jitter,
            naive_wait_ms: millis("naive-wait", options.naive_wait)?,
            attempts: options.attempts,
        },
        clients: options.clients,
        greedy_factor: options.greedy_factor,
        burst_size: options.burst_size,
        instances: options.instances,
    })
}

/// Returns the flag that sets a field of a scenario.
fn flag(field: &'static str) -> String {
    let flag = match field {
        "algorithms" => "algorithm",
        "rate_per_minute" => "rate",
        "window_ms" => "window",
        "duration_ms" => "duration",
        "retry.naive_wait_ms" => "naive-wait",
        "retry.attempts" => "attempts",
        "burst_size" => "burst-size",
        "greedy_factor" => "greedy-factor",
        other => other,
    };
    format!("--{flag}")
}

fn millis(flag: &str, time: Duration) -> anyhow::Result<u64> {
    let millis = u64::try_from(time.as_millis()).ok();
    let whole = millis.filter(|millis| Duration::from_millis(*millis) == time);
    whole.with_context(|| format!("--{flag} must be a whole number of milliseconds (got {time:?})"))
}
