//! How much memory a key takes: the growth of the resident set of a process that does nothing else.

use std::fmt::Write as _;
use std::process::Command;

use crate::entrants::assert_kept;
use crate::rivals::Limiter;
use crate::workload::PLENTY;

/// The argument by which the process is told to fill a limiter and say how much it grew.
pub const FILL: &str = "--fill";

/// Bytes a key, found by a process of its own: this program, told to call [`fill`].
pub fn bytes_per_key(name: &str, keys: usize) -> Result<usize, Box<dyn std::error::Error>> {
    let told =
        Command::new(std::env::current_exe()?).args([FILL, name, &keys.to_string()]).output()?;
    if !told.status.success() {
        return Err(String::from_utf8_lossy(&told.stderr).into());
    }
    Ok(String::from_utf8(told.stdout)?.trim().parse()?)
}

/// Fills a limiter with so many keys, none of which is kept here; returns bytes a key.
pub fn fill<L: Limiter>(keys: usize) -> Result<usize, Box<dyn std::error::Error>> {
    let mut key = String::with_capacity(32);
    let before = resident()?;
    let limiter = L::new(PLENTY, keys);
    for number in 0..keys {
        key.clear();
        write!(key, "client-{number:010}")?;
        if !limiter.allows(&key) {
            return Err(format!("{} refused {key}", L::NAME).into());
        }
    }
    let grown = resident()? - before;
    assert_kept(&limiter, keys);
    Ok(grown / keys)
}

fn resident() -> Result<usize, Box<dyn std::error::Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: usize =
        line.and_then(|line| line.trim().strip_suffix(" kB")).ok_or("no VmRSS")?.parse()?;
    Ok(kib * 1024)
}
