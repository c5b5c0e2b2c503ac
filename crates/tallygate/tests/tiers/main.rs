//! Tiers, overrides and changes of rules.

mod flips;
mod tiers;
