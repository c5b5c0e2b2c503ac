//! Who is told of decisions.
//!
//! Observers are called after the decision, outside every lock. One that panics is stopped at the
//! call: the decision stands, and nobody else notices.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tallygate_core::{Cost, Source};

/// A decision that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event<'a> {
    /// The limiter's name: its policy's, where it has one policy.
    pub policy: &'a str,
    /// Whose quota. Never use it as a label of a metric: clients choose it, and there is no end to
    /// them.
    pub key: &'a [u8],
    /// How much was asked for.
    pub cost: Cost,
    /// Whether it was allowed.
    pub allowed: bool,
    /// The limit that refused it.
    pub refused_by: Option<&'a str>,
    /// The shadow limit that would have refused it.
    pub shadow_refused_by: Option<&'a str>,
    /// Who answered.
    pub source: Source,
}

/// Is told of every decision.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use tallygate::{Event, Observer, Policy, RateLimiter};
///
/// #[derive(Default)]
/// struct Refusals(AtomicU64);
///
/// impl Observer for Refusals {
///     fn decided(&self, event: &Event<'_>) {
///         self.0.fetch_add(u64::from(!event.allowed), Ordering::Relaxed);
///     }
/// }
///
/// let refusals = Refusals::default();
/// let policy = Policy::token_bucket(1).per_hour().build()?;
/// let limiter = RateLimiter::new(policy).observed_by(&refusals);
/// limiter.check("alice")?;
/// limiter.check("alice")?;
/// assert_eq!(refusals.0.load(Ordering::Relaxed), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Observer: Sync {
    /// Whether there is anything to tell. Where there is not, nothing is prepared either.
    const OBSERVES: bool = true;

    /// A decision was made.
    fn decided(&self, event: &Event<'_>);
}

/// Nobody, at no cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl Observer for NoObserver {
    const OBSERVES: bool = false;

    fn decided(&self, _: &Event<'_>) {}
}

impl<O: Observer> Observer for &O {
    const OBSERVES: bool = O::OBSERVES;

    fn decided(&self, event: &Event<'_>) {
        (**self).decided(event);
    }
}

impl<O: Observer + Send> Observer for std::sync::Arc<O> {
    const OBSERVES: bool = O::OBSERVES;

    fn decided(&self, event: &Event<'_>) {
        (**self).decided(event);
    }
}

/// Runs what notifies an observer, and stops a panic in it: the decision was made and stands.
pub(crate) fn notify(observe: impl FnOnce()) {
    // The panic hook has reported the panic. Its payload is leaked, because dropping it may panic as well.
    if let Err(payload) = catch_unwind(AssertUnwindSafe(observe)) {
        std::mem::forget(payload);
    }
}

/// Counts decisions through the [`metrics`] facade: `tallygate_decisions_total`, labelled by policy,
/// outcome and source, and `tallygate_shadow_refusals_total`, labelled by policy and limit; by nothing
/// that clients choose.
#[cfg(feature = "metrics")]
#[derive(Clone, Copy, Debug, Default)]
pub struct MetricsObserver;

#[cfg(feature = "metrics")]
impl Observer for MetricsObserver {
    fn decided(&self, event: &Event<'_>) {
        let outcome = if event.allowed { "allowed" } else { "refused" };
        metrics::counter!(
            "tallygate_decisions_total",
            "policy" => event.policy.to_owned(),
            "outcome" => outcome,
            "source" => event.source.name(),
        )
        .increment(1);
        if let Some(limit) = event.shadow_refused_by {
            metrics::counter!(
                "tallygate_shadow_refusals_total",
                "policy" => event.policy.to_owned(),
                "limit" => limit.to_owned(),
            )
            .increment(1);
        }
    }
}
