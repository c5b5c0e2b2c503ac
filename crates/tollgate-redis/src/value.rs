//! What is kept under a key: the state, and the policy it was left under. `docs/redis-format.md` has it in full.
//!
//! A value can be read by whoever finds it, whatever policies they have by then: so a change of policy keeps
//! what clients have used, and two versions of a program can share a server.

use std::borrow::Cow;
use std::sync::Arc;

use tollgate::{Algorithm as _, DecodeError, Policy, Standing};

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
) -> Vec<u8> {
    let mut values: Vec<_> = under.map(|(policy, state)| write(policy, &state)).collect();
    if values.len() == 1 {
        return values.remove(0);
    }
    let mut out = vec![VERSION, SEVERAL];
    for value in values {
        out.extend(length(&value));
        out.extend(value);
    }
    out
}

/// Whether a value is of a key that was asked for under several policies.
pub(crate) fn is_of_several(value: &[u8]) -> bool {
    value.starts_with(&[VERSION, SEVERAL])
}

/// Reads a value that any version of a program has left.
pub(crate) fn read(value: &[u8]) -> Result<Vec<Under>, DecodeError> {
    let [VERSION, format, rest @ ..] = value else {
        return Err(DecodeError::Field { name: "version" });
    };
    match *format {
        SEVERAL => {
            let (mut rest, mut under) = (rest, Vec::new());
            while !rest.is_empty() {
                let one = take(&mut rest)?;
                if one.get(1) == Some(&SEVERAL) {
                    return Err(DecodeError::Field { name: "format" });
                }
                under.extend(read(one)?);
            }
            Ok(under)
        }
        format @ (NUMBERS | WIDE) => {
            let mut rest = rest;
            let policy = Policy::of_description(take(&mut rest)?)?;
            let state = if format == WIDE {
                policy.decode(rest)?
            } else {
                policy.state_of_numbers(&numbers(rest)?)?
            };
            Ok(vec![(Arc::new(policy), state)])
        }
        _ => Err(DecodeError::Field { name: "format" }),
    }
}

/// The numbers that some doubles are.
pub(crate) fn numbers(bytes: &[u8]) -> Result<Vec<i128>, DecodeError> {
    let (doubles, extra) = bytes.as_chunks::<8>();
    if !extra.is_empty() {
        return Err(DecodeError::Trailing { extra: extra.len() });
    }
    let numbers = doubles.iter().map(|double| whole(*double));
    numbers.collect::<Option<_>>().ok_or(DecodeError::Field { name: "number" })
}

/// Takes bytes with their length before them.
fn take<'a>(bytes: &mut &'a [u8]) -> Result<&'a [u8], DecodeError> {
    let (length, rest) = bytes.split_first_chunk::<4>().ok_or(DecodeError::Truncated)?;
    let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
    let (taken, rest) = rest.split_at_checked(length).ok_or(DecodeError::Truncated)?;
    *bytes = rest;
    Ok(taken)
}
