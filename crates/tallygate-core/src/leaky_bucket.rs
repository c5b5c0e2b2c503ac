//! Leaky bucket: admits what the token bucket admits, and tells each request when it is its turn.
//!
//! What is ahead of a request drains at the rate; the `delay` of an admitted request is the time
//! that takes, rounded up. Whoever waits for it turns bursts into a flat output. The bucket itself
//! holds nothing back: waiting is the caller's part.

use crate::bucket::{Bucket, Face};
use crate::limit::Kind;

/// The exact leaky bucket.
pub type LeakyBucket<N = u64> = Bucket<Leaky, N>;

/// The face of a leaky bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaky {}

impl Face for Leaky {
    const KIND: Kind = Kind::LeakyBucket;
    const DELAYS: bool = true;
}
