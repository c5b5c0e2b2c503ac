//! Measures memory per key: the growth of the resident set of a process that only inserts keys.

use std::fmt::Write as _;
use std::process::Command;

use crate::entrants::assert_stored;
use crate::rivals::Limiter;
use crate::workload::PLENTY;

/// The argument that makes this program insert keys and print its growth.
pub const FILL: &str = "--fill";

/// Returns the bytes per key, measured in a separate process: this program, which calls [`fill`].
pub fn bytes_per_key(name: &str, keys: usize) -> Result<usize, Box<dyn std::error::Error>> {
    let output =
        Command::new(std::env::current_exe()?).args([FILL, name, &keys.to_string()]).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}

/// Inserts keys into a limiter, without storing them here, and returns the bytes per key.
pub fn fill<L: Limiter>(keys: usize) -> Result<usize, Box<dyn std::error::Error>> {
    let mut key = String::with_capacity(32);
    let before = resident()?;
    let limiter = L::new(PLENTY, keys);
    for number in 0..keys {
        key.clear();
        write!(key, "client-{number:010}")?;
        if !limiter.allows(&key) {
            return Err(format!("{} denied {key}", L::NAME).into());
        }
    }
    let grown = resident()? - before;
    assert_stored(&limiter, keys);
    Ok(grown / keys)
}

fn resident() -> Result<usize, Box<dyn std::error::Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: usize = line
        .and_then(|line| line.trim().strip_suffix(" kB"))
        .ok_or("the process status has no VmRSS")?
        .parse()?;
    Ok(kib * 1024)
}
