//! The binary `tallygate`; what it does is in the library beside it.

use std::process::ExitCode;

fn main() -> ExitCode {
    tallygate_server::main()
}
