//! Counts the requests of a client and its peak, the most requests in a window, in 64 bytes per client.
//!
//! Time is divided into slices of an eighth of the window (rounded up to a nanosecond), aligned to 1970. The peak is the
//! most requests in eight consecutive slices. It is therefore at most the peak of an exact sliding window, and at least
//! the peak of a window of seven eighths the length (up to the rounding of a nanosecond).
//!
//! A late request counts in the client's newest slice, as limits treat late requests. If a request is more than eight
//! slices late, the log has gone back in time, and a new count begins.

use tallygate_core::{Tick, Ticks};

const SLICES: usize = 8;

/// A window, divided into slices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slices {
    width: i64,
    /// The slice found last and its start, cached because the next request is usually in the same slice.
    last: i64,
    last_start: i64,
}

/// The counts of one client.
#[derive(Clone, Debug)]
pub(super) struct Activity {
    pub(super) requests: u64,
    pub(super) peak: u32,
    sum: u32,
    /// The last slice of the peak.
    peak_slice: i64,
    newest: i64,
    counts: [u32; SLICES],
}

impl Slices {
    pub(super) fn of(window: Ticks) -> Self {
        let width = window.0.div_ceil(SLICES as u64).max(1);
        let width = i64::try_from(width).unwrap_or(i64::MAX);
        Self { width, last: 0, last_start: 0 }
    }

    /// Returns the slice that contains a time.
    #[inline]
    pub(super) fn slice(&mut self, now: Tick) -> i64 {
        let into = now.0.wrapping_sub(self.last_start);
        if into < 0 || into >= self.width || now.0 < self.last_start {
            self.last = now.0.div_euclid(self.width);
            self.last_start = self.last.saturating_mul(self.width);
        }
        self.last
    }

    /// Returns the end of a slice.
    pub(super) fn end(&self, slice: i64) -> Tick {
        Tick(slice.saturating_add(1).saturating_mul(self.width))
    }
}

impl Activity {
    pub(super) const fn new(slice: i64) -> Self {
        Self { requests: 0, peak: 0, sum: 0, peak_slice: slice, newest: slice, counts: [0; SLICES] }
    }

    #[inline]
    pub(super) fn add(&mut self, slice: i64) {
        if slice != self.newest {
            self.move_to(slice);
        }
        self.requests += 1;
        let count = &mut self.counts[slot(self.newest)];
        *count = count.saturating_add(1);
        self.sum = self.sum.saturating_add(1);
        if self.sum > self.peak {
            self.peak = self.sum;
            self.peak_slice = self.newest;
        }
    }

    /// Returns the last slice of the client's busiest window.
    pub(super) const fn peak_slice(&self) -> i64 {
        self.peak_slice
    }

    fn move_to(&mut self, slice: i64) {
        let ahead = slice.saturating_sub(self.newest);
        if ahead.unsigned_abs() >= SLICES as u64 {
            // Exactly eight slices late is still a late request.
            if ahead.unsigned_abs() == SLICES as u64 && ahead < 0 {
                return;
            }
            self.counts = [0; SLICES];
            self.sum = 0;
            self.newest = slice;
            return;
        }
        while self.newest < slice {
            self.newest += 1;
            let left = std::mem::take(&mut self.counts[slot(self.newest)]);
            self.sum = self.sum.saturating_sub(left);
        }
    }
}

fn slot(slice: i64) -> usize {
    // The lowest bits of a two's complement number are the remainder, also before 1970.
    usize::from(slice.to_le_bytes()[0]) % SLICES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peak_of(window: u64, times: &[i64]) -> u32 {
        let mut slices = Slices::of(Ticks(window));
        let mut activity = Activity::new(slices.slice(Tick(times[0])));
        for time in times {
            activity.add(slices.slice(Tick(*time)));
        }
        assert_eq!(activity.requests, times.len() as u64);
        activity.peak
    }

    #[test]
    fn the_peak_is_the_most_requests_in_eight_consecutive_slices() {
        assert_eq!(peak_of(8, &[0, 7]), 2);
        assert_eq!(peak_of(8, &[0, 8]), 1);
        assert_eq!(peak_of(8, &[0, 1, 7, 8, 9, 15, 16]), 3);
        assert_eq!(peak_of(80, &[9, 79]), 2);
        assert_eq!(peak_of(80, &[9, 80]), 1);
        assert_eq!(peak_of(80, &[-1, 0, 69]), 3);
    }

    #[test]
    fn late_requests_count_in_the_newest_slice_until_the_log_goes_back() {
        assert_eq!(peak_of(8, &[20, 21, 13, 14]), 4);
        assert_eq!(peak_of(8, &[20, 21, 12, 13]), 2);
        assert_eq!(peak_of(8, &[20, 21, 13, 28]), 3);
        assert_eq!(peak_of(8, &[100, 101, 20, 21, 22]), 3);
    }

    #[test]
    fn a_client_takes_one_cache_line() {
        assert_eq!(size_of::<Activity>(), 64);
    }

    #[test]
    fn the_earliest_and_latest_times_have_slices() {
        for window in [1, 7, 8, 60_000_000_000, u64::MAX] {
            let mut slices = Slices::of(Ticks(window));
            for time in [i64::MIN, -1, 0, 1, i64::MAX, i64::MIN] {
                let slice = slices.slice(Tick(time));
                assert_eq!(slice, time.div_euclid(slices.width), "{window} {time}");
            }
        }
    }
}
