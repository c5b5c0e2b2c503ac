//! The format of values: the state, and the policy that it was written under. `docs/redis-format.md` describes it in
//! full.
//!
//! Every process can read a value, whatever policies it has. So a change of policy keeps the usage of clients, and two
//! versions of a program can share a server.

use std::borrow::Cow;
use std::sync::Arc;

use tallygate::algorithm::{Algorithm as _, DecodeError, LimitRecord, Returns};
use tallygate::store::Allowance;
use tallygate::{Policy, Tick};

use crate::script::{double, whole};

/// The version of the format. A later version has to read this one as well.
const VERSION: u8 = 1;
/// A policy and its state in doubles, which scripts can decide on.
const NUMBERS: u8 = b'n';
/// A policy and its state as the core encodes it, for numbers that are not exact in doubles.
const WIDE: u8 = b'w';
/// The states of a key under several policies.
const SEVERAL: u8 = b's';
/// The state of a user-defined algorithm.
pub(crate) const OWN: [u8; 2] = [VERSION, b'o'];

/// The returns and resets that reservations have to know of.
const RETURNS: u8 = b'r';
/// The same in doubles, which scripts can read and write.
const RETURNS_IN_DOUBLES: u8 = b't';
/// A time before all others, exact in doubles.
const NO_TIME: i128 = -(1 << 53);

/// The returns of a key as scripts write them: under one policy, whose numbers are exact in doubles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReturnsForm<'a> {
    pub(crate) policy: &'a Policy,
    /// The first bytes of a value that was written under the policy.
    pub(crate) head: &'a [u8],
    /// Whether a client can have several policies, and its receipts name them.
    pub(crate) is_of_client: bool,
}

impl ReturnsForm<'_> {
    /// Returns the byte before the policy.
    pub(crate) const fn flag(&self) -> u8 {
        if self.is_of_client { b'c' } else { b'p' }
    }
}

/// Writes the returns and resets of a client, for scripts if there is a form and they are of that form; returns nothing
/// if there are none.
///
/// A time comes first: charges up to that time return nothing. Scripts that return units of a slice change only that
/// time.
pub(crate) fn write_returns(returns: &Returns, form: Option<ReturnsForm<'_>>) -> Vec<u8> {
    if *returns == Returns::default() {
        return Vec::new();
    }
    let numbers = form.and_then(|form| {
        let numbers = returns.to_numbers(form.policy, form.is_of_client)?;
        let are_exact = numbers.iter().all(|number| number.unsigned_abs() <= 1 << 53);
        are_exact.then_some((form, numbers))
    });
    if let Some((form, numbers)) = numbers {
        let (closed, rest) = numbers.split_at(1);
        let mut out = vec![VERSION, RETURNS_IN_DOUBLES];
        out.extend(closed.iter().copied().flat_map(double));
        out.push(form.flag());
        out.extend(form.head);
        out.extend(rest.iter().copied().flat_map(double));
        return out;
    }
    let mut out = vec![VERSION, RETURNS];
    out.extend(double(NO_TIME));
    returns.encode(&mut out);
    out
}

/// Reads the returns and resets of a client. If they cannot be read, no earlier charge returns anything.
pub(crate) fn read_returns(value: &[u8], now: Tick) -> Returns {
    let read = || match value {
        [VERSION, RETURNS, rest @ ..] => {
            let (closed, rest) = rest.split_first_chunk::<8>()?;
            let closed = i64::try_from(whole(*closed)?).ok()?;
            let mut returns =
                if rest.is_empty() { Returns::default() } else { Returns::decode(rest).ok()? };
            if i128::from(closed) > NO_TIME {
                returns.close(closed, returns.until());
            }
            Some(returns)
        }
        [VERSION, RETURNS_IN_DOUBLES, rest @ ..] => {
            let (closed, rest) = rest.split_first_chunk::<8>()?;
            let (flag, rest) = rest.split_first()?;
            let mut rest = rest.strip_prefix(&[VERSION, NUMBERS])?;
            let policy = Arc::new(Policy::from_description(take(&mut rest).ok()?).ok()?);
            let mut all = vec![whole(*closed)?];
            all.extend(numbers(rest).ok()?);
            Returns::from_numbers(&all, &policy, *flag == b'c').ok()
        }
        _ => None,
    };
    if value.is_empty() {
        return Returns::default();
    }
    read().unwrap_or_else(|| {
        let mut returns = Returns::default();
        returns.close(now.0, now);
        returns
    })
}

/// The states of a key, each with its policy.
pub(crate) type PolicyRecords = (Arc<Policy>, Box<[LimitRecord]>);

/// Returns the first bytes of a value that was written under a policy.
pub(crate) fn head(policy: &Policy) -> Vec<u8> {
    beginning(NUMBERS, policy)
}

fn beginning(format: u8, policy: &Policy) -> Vec<u8> {
    let mut description = Vec::new();
    policy.describe(&mut description);
    let mut out = vec![VERSION, format];
    out.extend(length(&description));
    out.extend(description);
    out
}

fn length(bytes: &[u8]) -> [u8; 4] {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes()
}

/// Writes a state. Scripts can decide on the value if its numbers are exact in doubles.
#[expect(clippy::borrowed_box, reason = "it is the policy's state")]
pub(crate) fn write(policy: &Policy, state: &Box<[LimitRecord]>) -> Vec<u8> {
    let numbers = policy.state_to_numbers(state);
    if policy.script().is_some() && numbers.iter().all(|number| number.unsigned_abs() <= 1 << 53) {
        let mut out = head(policy);
        out.extend(numbers.into_iter().flat_map(double));
        return out;
    }
    let mut out = beginning(WIDE, policy);
    policy.encode(state, &mut out);
    out
}

/// Writes the states of a key that was checked under some policies.
pub(crate) fn write_all<'a>(
    under: impl Iterator<Item = (&'a Arc<Policy>, Cow<'a, Box<[LimitRecord]>>)>,
    allowances: impl Iterator<Item = Allowance>,
) -> Vec<u8> {
    let mut values: Vec<_> = under.map(|(policy, state)| write(policy, &state)).collect();
    if values.len() == 1 {
        return values.remove(0);
    }
    let mut out = vec![VERSION, SEVERAL];
    for (value, allowance) in values.into_iter().zip(allowances) {
        out.extend(length(&value));
        out.extend(value);
        out.extend(allowance.last.0.to_be_bytes());
        out.extend(allowance.level.to_be_bytes());
    }
    out
}

/// Returns whether a value has the states of several policies.
pub(crate) fn is_of_several(value: &[u8]) -> bool {
    value.starts_with(&[VERSION, SEVERAL])
}

/// Reads a value of any version: the state under each policy, and the allowance of each if there are several.
pub(crate) fn read(value: &[u8]) -> Result<(Vec<PolicyRecords>, Vec<Allowance>), DecodeError> {
    let [VERSION, SEVERAL, rest @ ..] = value else {
        return Ok((vec![read_one(value)?], Vec::new()));
    };
    let (mut rest, mut under, mut allowances) = (rest, Vec::new(), Vec::new());
    while !rest.is_empty() {
        under.push(read_one(take(&mut rest)?)?);
        allowances.push(take_allowance(&mut rest)?);
    }
    Ok((under, allowances))
}

fn read_one(value: &[u8]) -> Result<PolicyRecords, DecodeError> {
    let [VERSION, format, rest @ ..] = value else {
        return Err(DecodeError::Field { name: "version" });
    };
    let mut rest = rest;
    let (NUMBERS | WIDE) = *format else { return Err(DecodeError::Field { name: "format" }) };
    let policy = Policy::from_description(take(&mut rest)?)?;
    let state = if *format == WIDE {
        policy.decode(rest)?
    } else {
        policy.state_from_numbers(&numbers(rest)?)?
    };
    Ok((Arc::new(policy), state))
}

fn take_allowance(bytes: &mut &[u8]) -> Result<Allowance, DecodeError> {
    let (last, rest) = bytes.split_first_chunk::<8>().ok_or(DecodeError::Truncated)?;
    let (level, rest) = rest.split_first_chunk::<16>().ok_or(DecodeError::Truncated)?;
    *bytes = rest;
    Ok(Allowance { last: Tick(i64::from_be_bytes(*last)), level: u128::from_be_bytes(*level) })
}

/// Converts doubles to whole numbers.
pub(crate) fn numbers(bytes: &[u8]) -> Result<Vec<i128>, DecodeError> {
    let (doubles, extra) = bytes.as_chunks::<8>();
    if !extra.is_empty() {
        return Err(DecodeError::Trailing { extra: extra.len() });
    }
    // `collect` into a `Result` would not reserve the capacity.
    let mut numbers = Vec::with_capacity(doubles.len());
    for double in doubles {
        numbers.push(whole(*double).ok_or(DecodeError::Field { name: "number" })?);
    }
    Ok(numbers)
}

/// Takes bytes that are preceded by their length.
fn take<'a>(bytes: &mut &'a [u8]) -> Result<&'a [u8], DecodeError> {
    let (length, rest) = bytes.split_first_chunk::<4>().ok_or(DecodeError::Truncated)?;
    let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
    let (taken, rest) = rest.split_at_checked(length).ok_or(DecodeError::Truncated)?;
    *bytes = rest;
    Ok(taken)
}
