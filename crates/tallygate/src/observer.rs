//! Observers, which are notified of decisions.
//!
//! Observers are called after the decision, outside every lock. A panic of an observer ends with its
//! call: the decision stands, and other observers are notified.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tallygate_core::{Cost, Source, Tick};

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
    /// What decided: the store, a lease, a failure policy.
    pub source: Source,
    /// When it was decided, by the clock of the store.
    pub at: Tick,
}

/// Is notified of every decision.
///
/// Several observers on one limiter are a tuple, or a [`Vec`] of boxed ones (`Vec<Box<dyn Observer>>`).
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
    /// Returns whether it wants to be notified. If not, events are not even prepared.
    fn observes(&self) -> bool {
        true
    }

    /// Takes note of a decision.
    fn decided(&self, event: &Event<'_>);
}

/// Observes nothing, at no cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl Observer for NoObserver {
    #[inline]
    fn observes(&self) -> bool {
        false
    }

    fn decided(&self, _: &Event<'_>) {}
}

macro_rules! observe_through {
    ($(($($bounds:tt)*) $pointer:ty),*) => { $(
        impl<$($bounds)*> Observer for $pointer {
            #[inline]
            fn observes(&self) -> bool {
                (**self).observes()
            }

            fn decided(&self, event: &Event<'_>) {
                (**self).decided(event);
            }
        }
    )* };
}

observe_through!(
    (O: Observer + ?Sized) &O,
    (O: Observer + ?Sized) Box<O>,
    (O: Observer + Send + ?Sized) std::sync::Arc<O>
);

/// Notifies each observer of a list, in order.
impl<O: Observer> Observer for Vec<O> {
    fn observes(&self) -> bool {
        self.iter().any(Observer::observes)
    }

    fn decided(&self, event: &Event<'_>) {
        self.iter().for_each(|observer| notify(|| observer.decided(event)));
    }
}

/// Notifies the observer, if there is one.
impl<O: Observer> Observer for Option<O> {
    #[inline]
    fn observes(&self) -> bool {
        self.as_ref().is_some_and(Observer::observes)
    }

    fn decided(&self, event: &Event<'_>) {
        if let Some(observer) = self {
            observer.decided(event);
        }
    }
}

macro_rules! observe_by_all {
    ($($name:ident)+) => {
        /// Notifies each observer in order.
        impl<$($name: Observer),+> Observer for ($($name,)+) {
            #[inline]
            fn observes(&self) -> bool {
                #[expect(non_snake_case, reason = "variables are named like their types")]
                let ($($name,)+) = self;
                $($name.observes())||+
            }

            fn decided(&self, event: &Event<'_>) {
                #[expect(non_snake_case, reason = "variables are named like their types")]
                let ($($name,)+) = self;
                $(notify(|| $name.decided(event));)+
            }
        }
    };
}

observe_by_all!(A B);
observe_by_all!(A B C);
observe_by_all!(A B C D);

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
