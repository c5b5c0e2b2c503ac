//! The stress campaign of `crates/tallygate/examples/stress`, with governor in the same runs.
//!
//! `stress [SECONDS]` exits with 1 if Tallygate allowed more than its limit, or less than it had to. Governor is shown for
//! comparison.

#[path = "../../../crates/tallygate/examples/stress/campaign/mod.rs"]
mod campaign;

use std::error::Error;
use std::io::stdout;
use std::process::ExitCode;
use std::time::Duration;

use tallygate_bench::rivals::{Governor, Limiter as _};
use tallygate_bench::workload::Limit;

use campaign::{AskRival, Rival};

const GOVERNOR: Rival = Rival { name: "governor", verb: "check_key", bucket: governor };

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let seconds = campaign::seconds(std::env::args().nth(1).as_deref())?;
    let passed = campaign::run(seconds, Some(&GOVERNOR), &mut stdout().lock())?;
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn governor(limit: u32, window: Duration) -> AskRival {
    let limiter = Governor::new(Limit { burst: limit, one_per: window / limit }, 1);
    Box::new(move |key| limiter.allows(key))
}
