//! Formulas over whole numbers: their values, and how they are written.

use alloc::boxed::Box;
use core::fmt;
use core::ops::{Add, Mul, Sub};

/// A formula over whole numbers. Values saturate at 2¹²⁷, as levels and waits do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Formula {
    /// A constant.
    Number(i128),
    /// A number with a name: from the limit, the state, the request or an earlier step.
    Named {
        /// The name.
        name: &'static str,
        /// The value.
        value: i128,
    },
    /// An operation on two formulas.
    Binary(Operation, Box<(Self, Self)>),
}

/// An operation on two numbers.
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
    /// a / b, rounded down. b is never 0.
    Over,
    /// a / b, rounded up. b is never 0.
    OverRoundedUp,
    /// a mod b, at least 0. b is never 0.
    Modulo,
    /// The greatest common divisor of a and b.
    CommonDivisor,
    /// 1 if a ≤ b, 0 otherwise.
    AtMost,
    /// 1 if a < b, 0 otherwise.
    Below,
}

impl Formula {
    /// Returns the value.
    #[must_use]
    pub fn value(&self) -> i128 {
        match self {
            Self::Number(value) | Self::Named { value, .. } => *value,
            Self::Binary(operation, both) => operation.of(both.0.value(), both.1.value()),
        }
    }

    pub(super) fn is_comparison(&self) -> bool {
        matches!(self, Self::Binary(Operation::AtMost | Operation::Below, _))
    }

    pub(super) fn of(self, operation: Operation, other: Self) -> Self {
        Self::Binary(operation, Box::new((self, other)))
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

    /// Writes the formula with names or with numbers.
    fn write(&self, f: &mut fmt::Formatter<'_>, named: bool) -> fmt::Result {
        match self {
            Self::Named { name, .. } if named => f.write_str(name),
            Self::Named { value, .. } | Self::Number(value) => write!(f, "{value}"),
            Self::Binary(operation, both) => {
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
        let needs_parentheses = match self {
            Self::Binary(inner, _) => {
                inner.precedence() < outer.operand_precedence()
                    || (is_right && inner.precedence() == outer.operand_precedence())
            }
            Self::Named { value, .. } => !named && *value < 0 && is_right,
            Self::Number(value) => *value < 0 && is_right,
        };
        if !needs_parentheses {
            return self.write(f, named);
        }
        f.write_str("(")?;
        self.write(f, named)?;
        f.write_str(")")
    }
}

/// Writes the formula with names and, if it has an operation, again with numbers.
impl fmt::Display for Formula {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, true)?;
        if let Self::Binary(..) = self {
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

    /// Returns the precedence below which an operand needs parentheses.
    const fn operand_precedence(self) -> u8 {
        match self {
            Self::CommonDivisor => 0,
            Self::Above => Self::Minus.precedence(),
            Self::Over | Self::OverRoundedUp => Self::Times.precedence(),
            other => other.precedence(),
        }
    }

    /// Returns the precedence of the operation as an operand.
    const fn precedence(self) -> u8 {
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

pub(super) fn named(name: &'static str, value: impl Into<i128>) -> Formula {
    Formula::Named { name, value: value.into() }
}

pub(super) fn number(value: i128) -> Formula {
    Formula::Number(value)
}
