//! `tollgate check`: asks a server, for scripts.

use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;

use crate::cli::Check;

const TIMEOUT: Duration = Duration::from_secs(5);

/// Asks; the exit code is the answer.
pub(crate) fn run(options: &Check) -> anyhow::Result<ExitCode> {
    let Check { policy, key, cost, tier, resp, quiet } = options;
    let cost = cost.map(|cost| cost.to_string());
    let mut words = vec!["TOLLGATE.CHECK", policy, key];
    words.extend(cost.iter().flat_map(|cost| ["COST", cost]));
    words.extend(tier.iter().flat_map(|tier| ["TIER", tier]));
    let reply = ask(resp, &words).with_context(|| format!("cannot ask {resp}"))?;
    let [allowed, limit, remaining, retry_after_ms, ..] = reply[..] else {
        anyhow::bail!(
            "{resp} answered with {} numbers; expected 6: is it a Tollgate server?",
            reply.len()
        );
    };
    if !quiet {
        let mut out = io::stdout().lock();
        match (allowed, retry_after_ms) {
            (1, _) => writeln!(out, "allowed, {remaining} of {limit} left")?,
            (_, ..0) => writeln!(out, "refused, and no wait will do")?,
            (_, wait) => writeln!(out, "refused, try again in {wait} ms")?,
        }
    }
    Ok(if allowed == 1 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

trait Connection: Read + Write {}

impl<T: Read + Write> Connection for T {}

/// A connection to `HOST:PORT` or `unix:/path`.
fn connect(address: &str) -> io::Result<Box<dyn Connection>> {
    if let Some(path) = address.strip_prefix("unix:") {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        return Ok(Box::new(stream));
    }
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    Ok(Box::new(stream))
}

/// Sends one command, and reads an array of numbers.
fn ask(address: &str, words: &[&str]) -> anyhow::Result<Vec<i64>> {
    let mut stream = connect(address)?;
    let mut request = format!("*{}\r\n", words.len());
    for word in words {
        request += &format!("${}\r\n{word}\r\n", word.len());
    }
    stream.write_all(request.as_bytes())?;
    let mut lines = BufReader::new(stream).lines();
    let mut line = || lines.next().context("the server closed the connection")?.context("no reply");
    let first = line()?;
    if let Some(error) = first.strip_prefix('-') {
        anyhow::bail!("{error}");
    }
    let count: usize = first
        .strip_prefix('*')
        .and_then(|count| count.parse().ok())
        .with_context(|| format!("found {first:?}; expected a list: is it a Tollgate server?"))?;
    let mut numbers = Vec::new();
    for _ in 0..count.min(16) {
        let number = line()?;
        let number = number.strip_prefix(':').and_then(|number| number.parse().ok());
        numbers.push(number.context("expected numbers")?);
    }
    Ok(numbers)
}
