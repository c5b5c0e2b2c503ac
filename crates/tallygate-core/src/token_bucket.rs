//! Token bucket: a client saves up to B tokens and earns L of them a window.
//!
//! The one to take when in doubt: bursts up to B at once, the average rate exact over any time. It
//! does not space requests out (the leaky bucket does) and says nothing about calendar windows.

use crate::bucket::{Bucket, Face};
use crate::limit::Kind;

/// The exact token bucket.
pub type TokenBucket<N = u64> = Bucket<Token, N>;

/// The face of a token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {}

impl Face for Token {
    const KIND: Kind = Kind::TokenBucket;
}
