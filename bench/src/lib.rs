//! What the benchmarks of limiters share.
//!
//! | question | file |
//! |---|---|
//! | Who takes part, and how are they asked? | `rivals.rs` |
//! | Which keys, in which order, under which limit? | `workload.rs` |
//! | How does one take part? | `entrants.rs` |
//! | How is time taken, fairly? | `rounds.rs` |
//! | How much memory does a key take? | `resident.rs` |
//! | How does a curve become a picture? | `plot.rs` |

pub mod entrants;
pub mod plot;
pub mod resident;
pub mod rivals;
pub mod rounds;
pub mod workload;
