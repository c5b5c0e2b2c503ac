//! Checks one key from many more threads than processors in a tight loop, and verifies that exactly the units of the
//! limit are allowed.
//!
//! `stress [SECONDS]` exits with 1 if a limiter allowed more than its limit, or less than it had to. `scripts/stress` runs
//! the same campaign with governor beside it (`bench/src/bin/stress.rs`).

#![allow(clippy::incompatible_msrv, reason = "built with the toolchain of the workspace only")]

mod campaign;

use std::error::Error;
use std::io::stdout;
use std::process::ExitCode;

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let seconds = campaign::seconds(std::env::args().nth(1).as_deref())?;
    let passed = campaign::run(seconds, None, &mut stdout().lock())?;
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
