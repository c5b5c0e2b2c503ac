//! Drops idle keys of the memory store in the background, a few at a time.
//!
//! A table reuses the places of fresh keys only when new keys need them. Without new keys, idle ones would stay, and memory
//! and gauges would show the most clients that there ever were. A sweep visits every table once per interval, in pieces that
//! are spread over the interval, so that no request waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::gate::Gate;

/// How many buckets of a table are visited at a time. This takes less than a millisecond.
const PIECE: usize = 1_024;
/// The shortest pause between two pieces.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);

/// Sweeps until the server shuts down; does nothing without an interval.
pub(super) async fn keep_sweeping(gate: &Arc<Gate>, every: Option<Duration>) {
    let Some(every) = every else { return std::future::pending().await };
    loop {
        let began = Instant::now();
        let tables = gate.tables();
        if tables.is_empty() {
            tokio::time::sleep(every).await;
            continue;
        }
        let share = every / u32::try_from(tables.len()).unwrap_or(u32::MAX);
        for (table, end) in tables.iter().zip(1..) {
            let end = began + share * end;
            loop {
                let left = table.sweep(gate, PIECE);
                let time = end.saturating_duration_since(Instant::now());
                tokio::time::sleep(pause(time, left)).await;
                if left == 0 {
                    break;
                }
            }
        }
    }
}

/// Returns the pause until the next piece, so that the rest of a table takes the rest of its time.
fn pause(time: Duration, buckets_left: usize) -> Duration {
    let pieces = u32::try_from(buckets_left.div_ceil(PIECE)).unwrap_or(u32::MAX).max(1);
    (time / pieces).max(SHORTEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pieces_of_a_table_are_spread_over_its_time() {
        let minute = Duration::from_secs(60);
        assert_eq!(pause(minute, 0), minute, "the table is done; wait for the next one");
        assert_eq!(pause(minute, 60 * PIECE), Duration::from_secs(1));
        assert_eq!(
            pause(minute, usize::MAX),
            SHORTEST_PAUSE,
            "it may take longer, but never hurries"
        );
        assert_eq!(pause(Duration::ZERO, 1), SHORTEST_PAUSE);
    }
}
