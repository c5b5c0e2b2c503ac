//! Chance that is the same everywhere: `SplitMix64` from a seed, and exponential gaps in integers.
//!
//! Written here because the stream is part of what is promised: the same seed gives the same traffic, whatever version
//! of whatever library, on any machine. It is not fit for anything that must not be guessed.

/// A stream of numbers that only its seed decides.
pub(super) struct Chance(u64);

const STRIDE: u64 = 0x9E37_79B9_7F4A_7C15;

impl Chance {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A stream of its own for each of many things, so that none depends on the order of the others.
    pub(super) fn of(seed: u64, thing: u64, time: u64) -> Self {
        Self(Self(Self(seed).next() ^ thing).next() ^ time)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STRIDE);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number from 0 to `most`.
    pub(super) fn up_to(&mut self, most: u64) -> u64 {
        // The high half of the product; its bias is below one in 2⁶⁴ / most.
        let scaled = u128::from(self.next()) * (u128::from(most) + 1);
        u64::try_from(scaled >> 64).unwrap_or(most)
    }

    /// A gap of a Poisson process, in 2⁻³² of the mean.
    pub(super) fn gap(&mut self) -> u64 {
        minus_ln(self.next())
    }
}

/// ln 2 in units of 2⁻⁶⁴.
const LN_2: u128 = 0xB172_17F7_D1CF_79AB;

/// −ln((n + 1) / 2⁶⁴) in units of 2⁻³², rounded down; n + 1 so that it ends.
fn minus_ln(n: u64) -> u64 {
    // 64 − log₂, in units of 2⁻³²: a mantissa from 1 to 2, squared, gives a bit of the logarithm each time.
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
    fn the_stream_is_the_published_one() {
        let mut chance = Chance::new(1_234_567);
        let first = [(); 3].map(|()| chance.next());
        assert_eq!(
            first,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    #[allow(clippy::float_arithmetic, reason = "what is compared with is a float")]
    #[allow(clippy::cast_precision_loss, reason = "the tolerance allows for it")]
    fn logarithms_are_those_of_mathematics() {
        let mut chance = Chance::new(7);
        let some = (0..1000).map(|_| chance.next() >> chance.up_to(63));
        for n in some.chain([0, 1, u64::MAX, u64::MAX - 1, 1 << 63, (1 << 63) - 1]) {
            let expected = -(((n as f64) + 1.0) / 2_f64.powi(64)).ln() * 2_f64.powi(32);
            assert!((minus_ln(n) as f64 - expected).abs() < 3.0, "{n}: {} {expected}", minus_ln(n));
        }
    }

    #[test]
    fn gaps_have_their_mean_and_numbers_stay_below_their_bound() {
        let mut chance = Chance::new(1);
        let sum: u128 = (0..100_000).map(|_| u128::from(chance.gap())).sum();
        let mean_in_thousandths = (sum * 1000 / 100_000) >> 32;
        assert!((990..=1010).contains(&mean_in_thousandths), "{mean_in_thousandths}");
        let rolled: std::collections::BTreeSet<_> = (0..1000).map(|_| chance.up_to(5)).collect();
        assert!(rolled.into_iter().eq(0..=5));
    }
}
