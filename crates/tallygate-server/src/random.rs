//! Unpredictable random numbers from the operating system.

use std::fmt::Write as _;

/// Returns 128 random bits.
///
/// # Panics
///
/// If the operating system provides no random numbers.
#[expect(clippy::expect_used, reason = "the kernel's generator does not fail once it has started")]
pub(crate) fn number() -> u128 {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the operating system has random numbers");
    u128::from_le_bytes(bytes)
}

/// Returns a token of 256 random bits, in hexadecimal.
pub(crate) fn token() -> String {
    let mut token = String::with_capacity(64);
    // Writing to a string cannot fail.
    let _ = write!(token, "{:032x}{:032x}", number(), number());
    token
}
