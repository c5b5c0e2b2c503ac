//! Code that the benchmarks of limiters share.
//!
//! | question | file |
//! |---|---|
//! | Which limiters are compared, and how are they called? | `rivals.rs` |
//! | Which keys, in which order, under which limit? | `workload.rs` |
//! | How is one limiter measured? | `entrants.rs` |
//! | How is time measured fairly? | `rounds.rs` |
//! | How much memory does a key take? | `resident.rs` |
//! | How is a curve plotted? | `plot.rs` |

pub mod entrants;
pub mod plot;
pub mod resident;
pub mod rivals;
pub mod rounds;
pub mod workload;
