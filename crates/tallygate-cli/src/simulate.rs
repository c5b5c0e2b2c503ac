//! `tallygate simulate`: builds a scenario from the flags and prints its report as a table, as JSON or as a page.

use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use anyhow::Context as _;
use tallygate_lab::simulate::{Pattern, Report, Retry, Scenario, Style, draw, page, report};

use crate::cli::Simulate;

/// Runs a scenario and prints its report.
pub(crate) fn run(options: &Simulate) -> anyhow::Result<()> {
    let scenario = scenario(options)?;
    anyhow::ensure!(
        options.seed.is_none() || scenario.is_random(),
        "--seed has no effect, because nothing in this traffic is random; use --pattern poisson, --pattern retry with \
         jitter, or --instances 2 or more, or remove --seed"
    );
    let report = report(scenario);
    let report = report.map_err(|error| anyhow::anyhow!(error.message(flag)))?;
    if let Some(path) = &options.html {
        let written = std::fs::write(path, page(&report));
        written.with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(crate::unless_closed(print(options, &report))?)
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
    check_effects(options)?;
    let default = Scenario::default();
    Ok(Scenario {
        limit: options.limit,
        window_ms: millis("window", options.window)?,
        burst: options.burst.unwrap_or(options.limit),
        algorithms: match &*options.algorithms {
            [] => default.algorithms,
            given => given.to_vec(),
        },
        pattern: options.pattern,
        rate_per_minute: options.rate,
        duration_ms: millis("duration", options.duration)?,
        seed: options.seed.unwrap_or(default.seed),
        cost: options.cost,
        retry: Retry {
            obeys: !options.naive,
            jitter: !options.no_jitter,
            naive_wait_ms: match options.naive_wait {
                Some(wait) => millis("naive-wait", wait)?,
                None => default.retry.naive_wait_ms,
            },
            attempts: options.attempts.unwrap_or(default.retry.attempts),
        },
        clients: options.clients.unwrap_or(default.clients),
        greedy_factor: options.greedy_factor.unwrap_or(default.greedy_factor),
        burst_size: options.burst_size.unwrap_or(default.burst_size),
        instances: options.instances,
    })
}

/// Rejects flags that have no effect in combination with the others.
fn check_effects(options: &Simulate) -> anyhow::Result<()> {
    for (flag, is_given, pattern) in [
        ("naive", options.naive, Pattern::Retry),
        ("no-jitter", options.no_jitter, Pattern::Retry),
        ("attempts", options.attempts.is_some(), Pattern::Retry),
        ("clients", options.clients.is_some(), Pattern::Greedy),
        ("greedy-factor", options.greedy_factor.is_some(), Pattern::Greedy),
        ("burst-size", options.burst_size.is_some(), Pattern::Bursty),
    ] {
        let (own, other) = (pattern.name(), options.pattern.name());
        anyhow::ensure!(
            !is_given || pattern == options.pattern,
            "--{flag} has no effect with --pattern {other}; use --pattern {own} or remove it"
        );
    }
    let has_bucket = options.algorithms.is_empty()
        || options.algorithms.iter().any(|algorithm| algorithm.is_bucket());
    anyhow::ensure!(
        options.burst.is_none() || has_bucket,
        "--burst has no effect without a bucket; add --algorithm token_bucket or remove it"
    );
    let retries = options.pattern == Pattern::Retry && options.attempts != Some(1);
    anyhow::ensure!(
        retries || !(options.naive || options.no_jitter),
        "--{} has no effect with --attempts 1, which never retries; use --attempts 2 or more, or remove it",
        if options.naive { "naive" } else { "no-jitter" }
    );
    Ok(())
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
