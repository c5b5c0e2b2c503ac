//! Reproducible random numbers: `SplitMix64` with a seed, and exponential gaps in integer arithmetic.
//!
//! The generator is implemented here because the same seed must give the same traffic on every machine and with every
//! version of every library. It is not suitable for secrets.

/// A stream of random numbers that depends only on its seed.
pub(super) struct RandomStream(u64);

const STRIDE: u64 = 0x9E37_79B9_7F4A_7C15;

impl RandomStream {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a separate stream for each item and time, so that no stream depends on the order in which others are used.
    pub(super) fn of(seed: u64, item: u64, time: u64) -> Self {
        Self(Self(Self(seed).next() ^ item).next() ^ time)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STRIDE);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number from 0 to `max`, inclusive.
    pub(super) fn up_to(&mut self, max: u64) -> u64 {
        // The high half of the product; its bias is less than one in 2⁶⁴ / max.
        let scaled = u128::from(self.next()) * (u128::from(max) + 1);
        u64::try_from(scaled >> 64).unwrap_or(max)
    }

    /// Returns a gap of a Poisson process, in units of 2⁻³² of the mean.
    pub(super) fn gap(&mut self) -> u64 {
        minus_ln(self.next())
    }
}

/// ln 2 in units of 2⁻⁶⁴.
const LN_2: u128 = 0xB172_17F7_D1CF_79AB;

/// Returns −ln((n + 1) / 2⁶⁴) in units of 2⁻³², rounded down. It uses n + 1 because ln 0 is not finite.
fn minus_ln(n: u64) -> u64 {
    // 64 − log₂ in units of 2⁻³²: squaring a mantissa between 1 and 2 gives one bit of the logarithm each time.
    let n = u128::from(n) + 1;
    let whole = n.ilog2();
    let mut mantissa = (n << (127 - whole)) >> 64;
    let mut log: u128 = whole.into();
    for _ in 0..32 {
        mantissa = (mantissa * mantissa) >> 63;
        log <<= 1;
        if mantissa >> 64 > 0 {
            mantissa >>= 1;
            log |= 1;
        }
    }
    let below = (64_u128 << 32) - log;
    u64::try_from((below * LN_2) >> 64).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_equals_the_published_splitmix64_values() {
        let mut random = RandomStream::new(1_234_567);
        let first = [(); 3].map(|()| random.next());
        assert_eq!(
            first,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    #[allow(clippy::float_arithmetic, reason = "the reference value is a float")]
    #[allow(clippy::cast_precision_loss, reason = "the tolerance allows for it")]
    fn logarithms_agree_with_the_standard_library() {
        let mut random = RandomStream::new(7);
        let some = (0..1000).map(|_| random.next() >> random.up_to(63));
        for n in some.chain([0, 1, u64::MAX, u64::MAX - 1, 1 << 63, (1 << 63) - 1]) {
            let expected = -(((n as f64) + 1.0) / 2_f64.powi(64)).ln() * 2_f64.powi(32);
            assert!((minus_ln(n) as f64 - expected).abs() < 3.0, "{n}: {} {expected}", minus_ln(n));
        }
    }

    #[test]
    fn gaps_have_the_right_mean_and_numbers_stay_within_their_bound() {
        let mut random = RandomStream::new(1);
        let sum: u128 = (0..100_000).map(|_| u128::from(random.gap())).sum();
        let mean_in_thousandths = (sum * 1000 / 100_000) >> 32;
        assert!((990..=1010).contains(&mean_in_thousandths), "{mean_in_thousandths}");
        let rolled: std::collections::BTreeSet<_> = (0..1000).map(|_| random.up_to(5)).collect();
        assert!(rolled.into_iter().eq(0..=5));
    }
}
