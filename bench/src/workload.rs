//! Which keys, in which order, under which limit.

use std::time::Duration;

/// A bucket: what it holds when full, and how long one more takes.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    pub burst: u32,
    pub one_per: Duration,
}

/// Enough for every request of a run on many keys, and so slow to refill that a key which was asked
/// once is not fresh again, and not swept, before the run ends.
pub const PLENTY: Limit = Limit { burst: 10_000_000, one_per: Duration::from_secs(86) };

/// Enough for every request of a run on one key.
pub const PLENTY_FOR_ONE: Limit = Limit { burst: 1_000_000_000, one_per: Duration::from_secs(1) };

/// Two requests, and none after: what the denied are denied by.
pub const TWO_A_DAY: Limit = Limit { burst: 2, one_per: Duration::from_secs(43_200) };

/// Keys, and the order in which requests come.
#[derive(Debug)]
pub struct Workload {
    pub keys: Vec<String>,
    pub order: Vec<u32>,
}

/// Requests between two looks at the time.
pub const CHUNK: usize = 1 << 13;

impl Workload {
    /// Requests of so many keys, uniformly at random. The order is made beforehand, so that no time
    /// goes into choosing; that a scattered key must itself be fetched is every rival's cost alike.
    pub fn of(keys: usize) -> Self {
        let span = u32::try_from(keys).expect("keys are numbered by 32 bits");
        let mut random = Random::new();
        let requests = (4 * keys).clamp(1 << 18, 1 << 24).next_multiple_of(CHUNK);
        if std::env::var_os("STREAM").is_some() {
            let mut order: Vec<u32> = (0..span).collect();
            for i in (1..order.len()).rev() { order.swap(i, random.below(i as u32 + 1) as usize); }
            let keys2 = order.iter().map(|n| format!("client-{n:010}")).collect();
            return Self { keys: keys2, order: (0..requests).map(|n| (n % keys) as u32).collect() };
        }
        Self {
            keys: names(0..keys),
            order: (0..requests).map(|_| random.below(span)).collect(),
        }
    }

    /// The requests from one position of the order on, as many as are made between two looks at the
    /// time.
    pub fn chunk(&self, turn: usize) -> &[u32] {
        let chunks = self.order.len() / CHUNK;
        &self.order[turn % chunks * CHUNK..][..CHUNK]
    }
}

/// Clients' names, of 17 bytes each.
pub fn names(numbers: std::ops::Range<usize>) -> Vec<String> {
    numbers.map(|number| format!("client-{number:010}")).collect()
}

/// `SplitMix64`: cheap, and random enough to defeat a prefetcher.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    pub const fn new() -> Self {
        Self(0x7011_9a7e)
    }

    #[inline]
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    #[inline]
    pub const fn below(&mut self, span: u32) -> u32 {
        ((self.next() >> 32) * span as u64 >> 32) as u32
    }
}

impl Default for Random {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether the run is to show that it works, not how fast.
pub fn quick() -> bool {
    std::env::var_os("BENCH_QUICK").is_some()
}

/// A size, or a fiftieth of it in a quick run.
pub fn scaled(size: usize) -> usize {
    if quick() { size.div_ceil(50) } else { size }
}
