//! `tallygate backtest`: reads the options, shows the progress and prints the report.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tallygate_lab::backtest::{
    BacktestPlan, Bounds, Input, LogOptions, Progress, Report, Trial, backtest, grouped,
    write_html, write_text,
};

use tallygate_core::Policy;
use tallygate_server::{ConfiguredPolicy, configured_policies};

use crate::cli::Backtest;

/// Reads the logs and prints the report. The exit code is 1 if a log could not be read to its end.
pub(crate) fn run(options: &Backtest) -> anyhow::Result<ExitCode> {
    let plan = plan_of(options)?;
    let mut paths = options.logs.clone();
    if paths.is_empty() {
        paths.push(PathBuf::from("-"));
    }
    let inputs: Vec<Input> = paths.into_iter().map(Input::of_path).collect();
    let size = size_of(&inputs)?;
    let page = options.html.as_deref().map(|path| create(path).map(|file| (path, file)));
    let page = page.transpose()?;

    let bar = Bar::new(size);
    let report = backtest(inputs, &plan, &Bounds::NONE, &mut |progress| bar.show(progress));
    bar.end();
    let report = report?;

    if let Some((path, file)) = page {
        let mut file = BufWriter::new(file);
        let written = write_html(&report, &mut file).and_then(|()| file.flush());
        written.with_context(|| format!("cannot write {}", path.display()))?;
    }
    crate::unless_closed(print(&report, options.json))?;
    Ok(if report.is_complete() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn plan_of(options: &Backtest) -> anyhow::Result<BacktestPlan> {
    let policies = trials(options)?;
    let Some(first) = policies.first() else {
        anyhow::bail!(
            "no policy is given; add at least one, such as --policy \"token_bucket 100/1m\""
        );
    };
    let filters = options.filters.iter().chain(&options.status).chain(&options.exclude_agent);
    Ok(BacktestPlan {
        log: LogOptions {
            key: options.key.clone(),
            format: options.format,
            time: options.time.clone(),
            filters: filters.cloned().collect(),
        },
        peak: options.peak.unwrap_or(first.limits()[0].numbers().window),
        policies,
        suggest: options.suggest,
        top: options.top,
    })
}

/// Returns the policies to try: those written on the command line and those of the configuration file.
fn trials(options: &Backtest) -> anyhow::Result<Vec<Trial>> {
    let Some(path) = &options.config else {
        let parse = |text: &String| {
            Trial::parse(text).map_err(|error| anyhow::anyhow!("--policy {text:?}: {error}"))
        };
        return options.policies.iter().map(parse).collect();
    };
    let configured = configured_policies(path)?;
    if options.policies.is_empty() {
        return Ok(configured.iter().map(trial).collect());
    }
    let find = |text: &String| match configured.iter().find(|policy| policy.name == *text) {
        Some(policy) => Ok(trial(policy)),
        None => Trial::parse(text).map_err(|error| {
            let names: Vec<&str> = configured.iter().map(|policy| &*policy.name).collect();
            let (file, names) = (path.display(), names.join(", "));
            anyhow::anyhow!(
                "--policy {text:?} is not a policy of {file} ({names}), and not a limit: {error}"
            )
        }),
    };
    options.policies.iter().map(find).collect()
}

fn trial(configured: &ConfiguredPolicy) -> Trial {
    Trial::named(&*configured.name, Policy::clone(&configured.policy), configured.cost)
}

/// Returns the size of the logs, if it is known.
///
/// # Errors
/// Returns an error if a file cannot be opened, before anything is read.
fn size_of(inputs: &[Input]) -> anyhow::Result<Option<u64>> {
    let mut sum = Some(0_u64);
    for input in inputs {
        let size = input.size().with_context(|| format!("cannot open {}", input.name()))?;
        sum = sum.zip(size).map(|(sum, size)| sum.saturating_add(size));
    }
    Ok(sum)
}

fn create(path: &Path) -> anyhow::Result<File> {
    File::create(path).with_context(|| format!("cannot write {}", path.display()))
}

fn print(report: &Report, as_json: bool) -> io::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    if as_json {
        serde_json::to_writer(&mut out, report)?;
        out.write_all(b"\n")?;
    } else {
        write_text(report, &mut out)?;
    }
    out.flush()
}

/// The progress bar. It is drawn only if standard error is a terminal.
struct Bar {
    bar: ProgressBar,
    began: Instant,
}

impl Bar {
    fn new(size: Option<u64>) -> Self {
        let bar = ProgressBar::with_draw_target(size, ProgressDrawTarget::stderr());
        let shown = match size {
            Some(_) => "{bar:30} {percent:>3} %  {msg}  {eta} left",
            None => "{spinner} {bytes} read  {msg}",
        };
        if let Ok(style) = ProgressStyle::with_template(shown) {
            bar.set_style(style);
        }
        Self { bar, began: Instant::now() }
    }

    fn show(&self, progress: Progress) {
        if self.bar.is_hidden() {
            return;
        }
        let Progress::Reading { bytes, lines } = progress else {
            return self.bar.set_message("searching for the suggested limits");
        };
        let took = self.began.elapsed().max(Duration::from_millis(1)).as_millis();
        let rate = u128::from(lines) * 1000 / took;
        let lines = grouped(lines.into());
        self.bar.set_message(format!("{lines} lines, {} per second", grouped(rate)));
        self.bar.set_position(bytes);
    }

    fn end(&self) {
        self.bar.finish_and_clear();
    }
}
