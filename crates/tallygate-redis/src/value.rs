//! What is kept under a key: the state, and the policy it was left under. `docs/redis-format.md` has it in full.
//!
//! A value can be read by whoever finds it, whatever policies they have by then: so a change of policy keeps
//! what clients have used, and two versions of a program can share a server.

use std::borrow::Cow;
use std::sync::Arc;

use tallygate::{Algorithm as _, Allowance, DecodeError, Policy, Returns, Standing, Tick};

use crate::script::{double, whole};

/// The version of the format. Whoever changes it reads this one as well.
const VERSION: u8 = 1;
/// A policy and its state in doubles: the scripts decide on these.
const NUMBERS: u8 = b'n';
/// A policy and its state as the core encodes it: numbers that are not exact in doubles.
const WIDE: u8 = b'w';
/// What a key used under several policies.
const SEVERAL: u8 = b's';
/// The state of an algorithm of a user's own.
pub(crate) const OWN: [u8; 2] = [VERSION, b'o'];

/// The returns and resets that reservations have to know of.
const RETURNS: u8 = b'r';
/// As a double, a time before all others.
const NO_TIME: i128 = -(1 << 53);

/// Appends the returns and resets of a client; nothing if there are none.
///
/// A time comes first, up to which every charge returns nothing. Scripts that return units of a slice write only that.
pub(crate) fn write_returns(returns: &Returns) -> Vec<u8> {
    if *returns == Returns::default() {
        return Vec::new();
    }
    let mut out = vec![VERSION, RETURNS];
    out.extend(double(NO_TIME));
    returns.encode(&mut out);
    out
}

/// Reads the returns and resets of a client. Of what cannot be read, nothing is returned.
pub(crate) fn read_returns(value: &[u8], now: Tick) -> Returns {
    let read = || {
        let [VERSION, RETURNS, rest @ ..] = value else { return None };
        let (closed, rest) = rest.split_first_chunk::<8>()?;
        let closed = i64::try_from(whole(*closed)?).ok()?;
        let mut returns =
            if rest.is_empty() { Returns::default() } else { Returns::decode(rest).ok()? };
        if i128::from(closed) > NO_TIME {
            returns.close(closed, returns.until());
        }
        Some(returns)
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
pub(crate) type Under = (Arc<Policy>, Box<[Standing]>);

/// How a value begins that was left under a policy.
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

/// A value for a state, which scripts can decide on if it has numbers for them.
#[expect(clippy::borrowed_box, reason = "it is the policy's state")]
pub(crate) fn write(policy: &Policy, state: &Box<[Standing]>) -> Vec<u8> {
    let numbers = policy.numbers_of_state(state);
    if policy.script().is_some() && numbers.iter().all(|number| number.unsigned_abs() <= 1 << 53) {
        let mut out = head(policy);
        out.extend(numbers.into_iter().flat_map(double));
        return out;
    }
    let mut out = beginning(WIDE, policy);
    policy.encode(state, &mut out);
    out
}

/// A value for a key that was asked for under some policies.
pub(crate) fn write_all<'a>(
    under: impl Iterator<Item = (&'a Arc<Policy>, Cow<'a, Box<[Standing]>>)>,
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

/// Whether a value is of a key that was asked for under several policies.
pub(crate) fn is_of_several(value: &[u8]) -> bool {
    value.starts_with(&[VERSION, SEVERAL])
}

/// Reads a value that any version of a program has left: the state under each policy, and the allowance of each if
/// there are several.
pub(crate) fn read(value: &[u8]) -> Result<(Vec<Under>, Vec<Allowance>), DecodeError> {
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

fn read_one(value: &[u8]) -> Result<Under, DecodeError> {
    let [VERSION, format, rest @ ..] = value else {
        return Err(DecodeError::Field { name: "version" });
    };
    let mut rest = rest;
    let (NUMBERS | WIDE) = *format else { return Err(DecodeError::Field { name: "format" }) };
    let policy = Policy::of_description(take(&mut rest)?)?;
    let state = if *format == WIDE {
        policy.decode(rest)?
    } else {
        policy.state_of_numbers(&numbers(rest)?)?
    };
    Ok((Arc::new(policy), state))
}

fn take_allowance(bytes: &mut &[u8]) -> Result<Allowance, DecodeError> {
    let (last, rest) = bytes.split_first_chunk::<8>().ok_or(DecodeError::Truncated)?;
    let (level, rest) = rest.split_first_chunk::<16>().ok_or(DecodeError::Truncated)?;
    *bytes = rest;
    Ok(Allowance { last: Tick(i64::from_be_bytes(*last)), level: u128::from_be_bytes(*level) })
}

/// The numbers that some doubles are.
pub(crate) fn numbers(bytes: &[u8]) -> Result<Vec<i128>, DecodeError> {
    let (doubles, extra) = bytes.as_chunks::<8>();
    if !extra.is_empty() {
        return Err(DecodeError::Trailing { extra: extra.len() });
    }
    // With its room from the start, which `collect` into an option does not know.
    let mut numbers = Vec::with_capacity(doubles.len());
    for double in doubles {
        numbers.push(whole(*double).ok_or(DecodeError::Field { name: "number" })?);
    }
    Ok(numbers)
}

/// Takes bytes with their length before them.
fn take<'a>(bytes: &mut &'a [u8]) -> Result<&'a [u8], DecodeError> {
    let (length, rest) = bytes.split_first_chunk::<4>().ok_or(DecodeError::Truncated)?;
    let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
    let (taken, rest) = rest.split_at_checked(length).ok_or(DecodeError::Truncated)?;
    *bytes = rest;
    Ok(taken)
}
