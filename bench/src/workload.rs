//! The keys, their order and the limit of a case.

use std::time::Duration;

/// A bucket: its burst, and the time that it needs to refill one unit.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    pub burst: u32,
    pub one_per: Duration,
}

/// Allows every request of a run on many keys. It refills so slowly that a key does not become fresh, and so is not
/// swept, before the run ends.
pub const PLENTY: Limit = Limit { burst: 10_000_000, one_per: Duration::from_secs(86) };

/// Allows every request of a run on one key.
pub const PLENTY_FOR_ONE: Limit = Limit { burst: 1_000_000_000, one_per: Duration::from_secs(1) };

/// Allows two requests and denies all later ones.
pub const TWO_PER_DAY: Limit = Limit { burst: 2, one_per: Duration::from_secs(43_200) };

/// Requests of clients in uniformly random order, generated before the measurement.
#[derive(Debug)]
pub struct Workload {
    pub clients: usize,
    /// The keys, which `order` refers to.
    pub keys: Vec<String>,
    /// The requests: the index of the key of each.
    pub order: Vec<u32>,
}

/// The number of requests between two readings of the clock.
pub const CHUNK: usize = 1 << 13;

impl Workload {
    /// Generates requests of the given number of clients.
    ///
    /// The keys of consecutive requests are next to each other in memory, as if they had just been read from the
    /// network, so that the benchmark measures the limiter. With `BENCH_KEYS=scattered`, the keys are scattered in
    /// memory, and reading one costs one or two cache misses, equally for every limiter.
    pub fn of(clients: usize) -> Self {
        let span = u32::try_from(clients).expect("the number of clients fits 32 bits");
        let requests = (4 * clients).clamp(1 << 15, 1 << 23).next_multiple_of(CHUNK);
        let mut random = Random::new();
        let drawn: Vec<u32> = (0..requests).map(|_| random.below(span)).collect();
        if std::env::var("BENCH_KEYS").is_ok_and(|keys| keys == "scattered") {
            return Self { clients, keys: names(0..clients), order: drawn };
        }
        let keys = drawn.iter().map(|client| name(*client as usize)).collect();
        Self { clients, keys, order: (0..).take(requests).collect() }
    }

    /// Returns the keys of the requests between two readings of the clock.
    pub fn chunk(&self, turn: usize) -> impl Iterator<Item = &String> {
        let chunks = self.order.len() / CHUNK;
        let order = &self.order[turn % chunks * CHUNK..][..CHUNK];
        order.iter().map(|key| &self.keys[*key as usize])
    }

    /// Returns the keys of a chunk in batches.
    pub fn batches<const N: usize>(&self, turn: usize) -> impl Iterator<Item = [&String; N]> {
        let mut chunk = self.chunk(turn);
        (0..CHUNK / N).map(move |_| {
            std::array::from_fn(|_| chunk.next().expect("a chunk is a whole number of batches"))
        })
    }
}

/// Returns the name of a client, which has 17 bytes.
pub fn name(client: usize) -> String {
    format!("client-{client:010}")
}

pub fn names(clients: std::ops::Range<usize>) -> Vec<String> {
    clients.map(name).collect()
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
        (((self.next() >> 32) * span as u64) >> 32) as u32
    }
}

impl Default for Random {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns whether the run only checks that the benchmark works.
pub fn quick() -> bool {
    std::env::var_os("BENCH_QUICK").is_some()
}

/// Returns a size, divided by 50 in a quick run.
pub fn scaled(size: usize) -> usize {
    if quick() { size.div_ceil(50) } else { size }
}
