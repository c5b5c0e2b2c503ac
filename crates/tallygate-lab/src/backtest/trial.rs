//! A policy to try on a log, with the text that reports show for it.

use tallygate_core::{Cost, Limit, Policy, PolicyError};

use crate::limit_syntax::{self, LimitSyntaxError, LimitText};

/// A policy to try on a log.
#[derive(Clone, Debug)]
pub struct Trial {
    pub(super) policy: Policy,
    /// The name, if the policy comes from a configuration file.
    name: Option<String>,
    /// The units that each request charges.
    pub(super) cost: Cost,
}

impl Trial {
    /// Parses limits that are separated by commas, such as `token_bucket 5/s, fixed_window 1000/1h`.
    ///
    /// # Errors
    /// Returns an error if a limit is not valid or occurs twice.
    pub fn parse(text: &str) -> Result<Self, LimitSyntaxError> {
        limit_syntax::parse_policy(text).map(|policy| Self { policy, name: None, cost: 1 })
    }

    /// Tries a policy of a configuration file, with the units that it charges per request.
    #[must_use]
    pub fn named(name: impl Into<String>, policy: Policy, cost: Cost) -> Self {
        Self { policy, name: Some(name.into()), cost }
    }

    /// Returns the limits, of which there is at least one.
    #[must_use]
    pub fn limits(&self) -> &[Limit] {
        self.policy.limits()
    }

    /// Returns the text that reports show: the limits, after the name if there is one.
    pub(super) fn text(&self) -> String {
        let limits: Vec<String> = self
            .limits()
            .iter()
            .map(|limit| {
                let shadow = if limit.is_shadow() { " (shadow)" } else { "" };
                format!("{}{shadow}", LimitText::new(limit))
            })
            .collect();
        match &self.name {
            Some(name) => format!("{name}: {}", limits.join(", ")),
            None => limits.join(", "),
        }
    }

    /// Returns the same policy with another amount of its first limit. The other limits and all bursts keep their
    /// proportion, rounded up.
    pub(super) fn scaled(&self, amount: Cost) -> Result<Self, PolicyError> {
        let first = u128::from(self.limits()[0].numbers().limit);
        let limits = self.limits().iter().map(|limit| {
            let numbers = limit.numbers();
            let scaled = |units: Cost| {
                let units = (u128::from(units) * u128::from(amount)).div_ceil(first).max(1);
                u64::try_from(units).unwrap_or(u64::MAX)
            };
            let mut builder = Policy::of(numbers.kind, scaled(numbers.limit))
                .per(numbers.window)
                .burst(scaled(numbers.burst))
                .anchor(numbers.anchor)
                .named(limit.name());
            if limit.is_shadow() {
                builder = builder.shadow();
            }
            if let Some(penalty) = limit.penalty() {
                builder = builder.penalty(*penalty);
            }
            builder
        });
        let policy = Policy::all_of(self.policy.name(), limits)?;
        Ok(Self { policy, ..self.clone() })
    }
}
