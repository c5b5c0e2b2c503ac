//! Observers, which are notified of decisions.
//!
//! Observers are called after the decision, outside every lock. A panic in an observer is caught: the decision is unaffected,
//! and the other observers are notified.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tallygate_core::{Cost, Source, Tick};

/// A decision that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event<'a> {
    /// The name of the limiter. By default it is the name of the policy.
    pub policy: &'a str,
    /// The key of the client. Never use it as a label of a metric: clients choose their keys, so the number of keys is
    /// unbounded.
    pub key: &'a [u8],
    /// The cost of the request.
    pub cost: Cost,
    /// Whether the request was allowed.
    pub allowed: bool,
    /// The name of the limit that denied the request.
    pub denied_by: Option<&'a str>,
    /// The name of the first shadow limit that would have denied the request.
    pub shadow_denied_by: Option<&'a str>,
    /// The component that decided.
    pub source: Source,
    /// The time of the decision, by the clock of the store.
    pub at: Tick,
}

/// Receives an [`Event`] for every decision.
///
/// Several observers on one limiter are a tuple, or a [`Vec`] of boxed ones (`Vec<Box<dyn Observer>>`).
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use tallygate::observer::{Event, Observer};
/// use tallygate::{Policy, RateLimiter};
///
/// #[derive(Default)]
/// struct Denials(AtomicU64);
///
/// impl Observer for Denials {
///     fn decided(&self, event: &Event<'_>) {
///         self.0.fetch_add(u64::from(!event.allowed), Ordering::Relaxed);
///     }
/// }
///
/// let denials = Denials::default();
/// let policy = Policy::token_bucket(1).per_hour().build()?;
/// let limiter = RateLimiter::new(policy).observed_by(&denials);
/// limiter.check("alice")?;
/// limiter.check("alice")?;
/// assert_eq!(denials.0.load(Ordering::Relaxed), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Observer: Sync {
    /// Returns whether it wants to be notified. If not, events are not even prepared.
    fn observes(&self) -> bool {
        true
    }

    /// Records a decision.
    fn decided(&self, event: &Event<'_>);
}

/// Observes no decisions, at no cost.
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

/// Calls an observer and catches its panics, because the decision has been made.
pub(crate) fn notify(observe: impl FnOnce()) {
    // The panic hook has reported the panic. Its payload is leaked, because dropping it may panic as well.
    if let Err(payload) = catch_unwind(AssertUnwindSafe(observe)) {
        std::mem::forget(payload);
    }
}

/// Counts decisions through the [`metrics`] facade: `tallygate_decisions_total`, labeled by policy, outcome and source,
/// and `tallygate_shadow_denials_total`, labeled by policy and limit. No label is chosen by clients.
#[cfg(feature = "metrics")]
#[derive(Clone, Copy, Debug, Default)]
pub struct MetricsObserver;

#[cfg(feature = "metrics")]
impl Observer for MetricsObserver {
    fn decided(&self, event: &Event<'_>) {
        let outcome = if event.allowed { "allowed" } else { "denied" };
        metrics::counter!(
            "tallygate_decisions_total",
            "policy" => event.policy.to_owned(),
            "outcome" => outcome,
            "source" => event.source.name(),
        )
        .increment(1);
        if let Some(limit) = event.shadow_denied_by {
            metrics::counter!(
                "tallygate_shadow_denials_total",
                "policy" => event.policy.to_owned(),
                "limit" => limit.to_owned(),
            )
            .increment(1);
        }
    }
}
