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

/// Requests of some clients, uniformly at random. They are drawn beforehand, so that no time goes
/// into choosing.
#[derive(Debug)]
pub struct Workload {
    pub clients: usize,
    /// Keys, by what `order` says of them.
    pub keys: Vec<String>,
    /// The requests, each by the position of its key.
    pub order: Vec<u32>,
}

/// Requests between two looks at the time.
pub const CHUNK: usize = 1 << 13;

impl Workload {
    /// Requests of so many clients.
    ///
    /// Each request has a key of its own, next to the one before, as if it had just been read from
    /// the network: what is measured is the limiter. With `BENCH_KEYS=scattered` the keys lie about in
    /// memory as the clients do, and fetching one is a cache miss or two, every rival's alike.
    pub fn of(clients: usize) -> Self {
        let span = u32::try_from(clients).expect("clients are numbered by 32 bits");
        let requests = (4 * clients).clamp(1 << 15, 1 << 23).next_multiple_of(CHUNK);
        let mut random = Random::new();
        let drawn: Vec<u32> = (0..requests).map(|_| random.below(span)).collect();
        if std::env::var("BENCH_KEYS").is_ok_and(|keys| keys == "scattered") {
            return Self { clients, keys: names(0..clients), order: drawn };
        }
        let keys = drawn.iter().map(|client| name(*client as usize)).collect();
        Self { clients, keys, order: (0..).take(requests).collect() }
    }

    /// The keys of the requests that are made between two looks at the time.
    pub fn chunk(&self, turn: usize) -> impl Iterator<Item = &String> {
        let chunks = self.order.len() / CHUNK;
        let order = &self.order[turn % chunks * CHUNK..][..CHUNK];
        order.iter().map(|key| &self.keys[*key as usize])
    }

    /// The same in batches.
    pub fn batches<const N: usize>(&self, turn: usize) -> impl Iterator<Item = [&String; N]> {
        let mut chunk = self.chunk(turn);
        (0..CHUNK / N).map(move |_| std::array::from_fn(|_| chunk.next().expect("whole batches")))
    }
}

/// A client's name, of 17 bytes.
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

/// Whether the run is to show that it works, not how fast.
pub fn quick() -> bool {
    std::env::var_os("BENCH_QUICK").is_some()
}

/// A size, or a fiftieth of it in a quick run.
pub fn scaled(size: usize) -> usize {
    if quick() { size.div_ceil(50) } else { size }
}
