//! Formulas over whole numbers: what they come to, and how they are shown.

use alloc::boxed::Box;
use core::fmt;
use core::ops::{Add, Mul, Sub};

/// A formula over whole numbers. What would pass 2¹²⁷ stops there, as levels and waits do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Formula {
    /// A number that speaks for itself.
    Number(i128),
    /// A number that is known: of the limit, of the state, of the request, or of an earlier step.
    Known {
        /// Its name.
        name: &'static str,
        /// What it is.
        value: i128,
    },
    /// Two formulas, combined.
    Of(Operation, Box<(Self, Self)>),
}

/// What is done to two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// a + b
    Plus,
    /// a − b
    Minus,
    /// max(0, a − b)
    Above,
    /// a · b
    Times,
    /// a / b, rounded down. Never by 0.
    Over,
    /// a / b, rounded up. Never by 0.
    OverRoundedUp,
    /// What is left of a after whole b, from 0 on. Never of 0.
    Modulo,
    /// The greatest number that divides both.
    CommonDivisor,
    /// Whether a ≤ b: 1 or 0.
    AtMost,
    /// Whether a < b: 1 or 0.
    Below,
}

impl Formula {
    /// What it comes to.
    #[must_use]
    pub fn value(&self) -> i128 {
        match self {
            Self::Number(value) | Self::Known { value, .. } => *value,
            Self::Of(operation, both) => operation.of(both.0.value(), both.1.value()),
        }
    }

    pub(super) fn is_answer(&self) -> bool {
        matches!(self, Self::Of(Operation::AtMost | Operation::Below, _))
    }

    pub(super) fn of(self, operation: Operation, other: Self) -> Self {
        Self::Of(operation, Box::new((self, other)))
    }

    pub(super) fn above(self, other: Self) -> Self {
        self.of(Operation::Above, other)
    }

    pub(super) fn over(self, other: Self) -> Self {
        self.of(Operation::Over, other)
    }

    pub(super) fn over_rounded_up(self, other: Self) -> Self {
        self.of(Operation::OverRoundedUp, other)
    }

    pub(super) fn at_most(self, other: Self) -> Self {
        self.of(Operation::AtMost, other)
    }

    /// Writes it with names, or with the numbers they stand for.
    fn write(&self, f: &mut fmt::Formatter<'_>, named: bool) -> fmt::Result {
        match self {
            Self::Known { name, .. } if named => f.write_str(name),
            Self::Known { value, .. } | Self::Number(value) => write!(f, "{value}"),
            Self::Of(operation, both) => {
                let (before, between, after) = operation.signs();
                f.write_str(before)?;
                both.0.write_within(f, named, *operation, false)?;
                f.write_str(between)?;
                both.1.write_within(f, named, *operation, true)?;
                f.write_str(after)
            }
        }
    }

    fn write_within(
        &self,
        f: &mut fmt::Formatter<'_>,
        named: bool,
        outer: Operation,
        is_right: bool,
    ) -> fmt::Result {
        let needs = match self {
            Self::Of(inner, _) => {
                inner.binds() < outer.holds() || (is_right && inner.binds() == outer.holds())
            }
            Self::Known { value, .. } => !named && *value < 0 && is_right,
            Self::Number(value) => *value < 0 && is_right,
        };
        if !needs {
            return self.write(f, named);
        }
        f.write_str("(")?;
        self.write(f, named)?;
        f.write_str(")")
    }
}

/// First with names, then with numbers, where there are names.
impl fmt::Display for Formula {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, true)?;
        if let Self::Of(..) = self {
            f.write_str(" = ")?;
            self.write(f, false)?;
        }
        Ok(())
    }
}

impl Operation {
    fn of(self, a: i128, b: i128) -> i128 {
        match self {
            Self::Plus => a.saturating_add(b),
            Self::Minus => a.saturating_sub(b),
            Self::Above => a.saturating_sub(b).max(0),
            Self::Times => a.saturating_mul(b),
            Self::Over => a.checked_div_euclid(b).unwrap_or(0),
            Self::OverRoundedUp => {
                let whole = a.checked_div_euclid(b).unwrap_or(0);
                whole + i128::from(a.checked_rem_euclid(b).unwrap_or(0) > 0)
            }
            Self::Modulo => a.checked_rem_euclid(b).unwrap_or(0),
            Self::CommonDivisor => {
                let (mut a, mut b) = (a, b);
                while b != 0 {
                    (a, b) = (b, a % b);
                }
                a
            }
            Self::AtMost => (a <= b).into(),
            Self::Below => (a < b).into(),
        }
    }

    const fn signs(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Plus => ("", " + ", ""),
            Self::Minus => ("", " − ", ""),
            Self::Above => ("max(0, ", " − ", ")"),
            Self::Times => ("", " · ", ""),
            Self::Over => ("⌊", " / ", "⌋"),
            Self::OverRoundedUp => ("⌈", " / ", "⌉"),
            Self::Modulo => ("", " mod ", ""),
            Self::CommonDivisor => ("gcd(", ", ", ")"),
            Self::AtMost => ("", " ≤ ", ""),
            Self::Below => ("", " < ", ""),
        }
    }

    /// How strongly it holds its sides.
    const fn holds(self) -> u8 {
        match self {
            Self::CommonDivisor => 0,
            Self::Above => Self::Minus.binds(),
            Self::Over | Self::OverRoundedUp => Self::Times.binds(),
            other => other.binds(),
        }
    }

    /// How strongly it holds together, seen from outside.
    const fn binds(self) -> u8 {
        match self {
            Self::AtMost | Self::Below => 0,
            Self::Plus | Self::Minus => 1,
            Self::Times | Self::Modulo => 2,
            Self::Above | Self::Over | Self::OverRoundedUp | Self::CommonDivisor => 3,
        }
    }
}

impl Add for Formula {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.of(Operation::Plus, other)
    }
}

impl Sub for Formula {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self.of(Operation::Minus, other)
    }
}

impl Mul for Formula {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        self.of(Operation::Times, other)
    }
}

pub(super) fn known(name: &'static str, value: impl Into<i128>) -> Formula {
    Formula::Known { name, value: value.into() }
}

pub(super) fn number(value: i128) -> Formula {
    Formula::Number(value)
}
