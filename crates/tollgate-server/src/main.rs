//! The binary `tollgate`; what it does is in the library beside it.

use std::process::ExitCode;

fn main() -> ExitCode {
    tollgate_server::main()
}
