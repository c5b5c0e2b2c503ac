//! The serialized form of limits and policies (feature `serde`).
//!
//! Reading a policy checks its numbers, as [`LimitBuilder`] does: an invalid policy is an error of the deserializer.
//! Every field of a limit except `algorithm`, `limit` and `window` has the default of the builder.

use alloc::boxed::Box;
use alloc::vec::Vec;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::limit::Limit;
use crate::numbers::{Anchor, Kind};
use crate::penalty::Penalty;
use crate::policy::{LimitBuilder, Policy};
use crate::{Cost, Ticks};

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyForm {
    name: Box<str>,
    limits: Vec<LimitForm>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitForm {
    name: Option<Box<str>>,
    algorithm: Kind,
    limit: Cost,
    window: Ticks,
    burst: Option<Cost>,
    debt: Option<Cost>,
    start: Option<Cost>,
    #[serde(default)]
    anchor: Anchor,
    #[serde(default)]
    shadow: bool,
    penalty: Option<PenaltyForm>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PenaltyForm {
    duration: Ticks,
    after: u64,
}

impl Serialize for Policy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let limits = self.limits().iter().map(LimitForm::of).collect();
        PolicyForm { name: self.name().into(), limits }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Policy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let form = PolicyForm::deserialize(deserializer)?;
        let limits = form.limits.into_iter().map(LimitForm::into_builder);
        Self::all_of(form.name, limits).map_err(D::Error::custom)
    }
}

impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        LimitForm::of(self).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        LimitForm::deserialize(deserializer)?.into_builder().limit().map_err(D::Error::custom)
    }
}

impl LimitForm {
    fn of(limit: &Limit) -> Self {
        let numbers = limit.numbers();
        let penalty = |penalty: &Penalty| PenaltyForm {
            duration: penalty.duration(),
            after: penalty.denials(),
        };
        Self {
            name: Some(limit.name().into()),
            algorithm: numbers.kind,
            limit: numbers.limit,
            window: numbers.window,
            burst: Some(numbers.burst),
            debt: Some(numbers.debt),
            start: Some(numbers.start),
            anchor: numbers.anchor,
            shadow: limit.is_shadow(),
            penalty: limit.penalty().map(penalty),
        }
    }

    fn into_builder(self) -> LimitBuilder {
        let mut builder =
            Policy::of(self.algorithm, self.limit).per(self.window).anchor(self.anchor);
        if let Some(name) = self.name {
            builder = builder.named(name);
        }
        if let Some(burst) = self.burst {
            builder = builder.burst(burst);
        }
        if let Some(debt) = self.debt {
            builder = builder.debt(debt);
        }
        if let Some(start) = self.start {
            builder = builder.starting_with(start);
        }
        if let Some(PenaltyForm { duration, after }) = self.penalty {
            builder = builder.penalty(Penalty::lasting(duration).after(after));
        }
        if self.shadow { builder.shadow() } else { builder }
    }
}
