//! A policy as bytes. Stores keep it with a state, so that a process with another policy can read the state.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::Ticks;
use crate::codec::{self, DecodeError, Reader};
use crate::limit::Limit;
use crate::numbers::{Anchor, Kind};
use crate::penalty::Penalty;
use crate::policy::Policy;

impl Policy {
    /// Appends a description of the policy to `out`: everything except its name.
    pub fn describe(&self, out: &mut Vec<u8>) {
        codec::put(out, self.limits().len() as u64);
        for limit in self.limits() {
            let n = limit.numbers();
            codec::put(out, limit.name().len() as u64);
            out.extend_from_slice(limit.name().as_bytes());
            out.push(n.kind.tag());
            for number in [n.limit, n.window.0, n.burst, n.debt, n.start] {
                codec::put(out, number);
            }
            out.push(u8::from(n.anchor == Anchor::FirstRequest) | u8::from(limit.is_shadow()) << 1);
            codec::put(out, limit.penalty().map_or(0, Penalty::denials));
            codec::put(out, limit.penalty().map_or(0, |penalty| penalty.duration().0));
        }
    }

    /// Reads a policy from its [description](Self::describe). The policy has no name.
    ///
    /// # Errors
    /// Returns an error if the bytes are not the description of a valid policy.
    pub fn from_description(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader(bytes);
        let count: u64 = reader.number("number of limits")?;
        let mut limits = Vec::new();
        for _ in 0..count {
            limits.push(read_limit(&mut reader)?);
        }
        reader.end()?;
        if limits.is_empty() {
            return Err(DecodeError::Field { name: "number of limits" });
        }
        Ok(Self::new(Box::default(), limits.into()))
    }
}

fn read_limit(reader: &mut Reader<'_>) -> Result<Limit, DecodeError> {
    let length = reader.number("length of a name")?;
    let name = core::str::from_utf8(reader.bytes(length)?)
        .map_err(|_| DecodeError::Field { name: "name" })?;
    let tag = reader.byte()?;
    let kind = Kind::from_tag(tag).ok_or(DecodeError::Field { name: "algorithm" })?;
    let (limit, window) = (reader.number("limit")?, Ticks(reader.number("window")?));
    let (burst, debt) = (reader.number("burst")?, reader.number("debt")?);
    let start = reader.number("start")?;
    let flags = reader.byte()?;
    let (denials, duration): (u64, u64) =
        (reader.number("number of denials")?, reader.number("duration of the penalty")?);
    if flags > 3 {
        return Err(DecodeError::Field { name: "flags" });
    }
    let mut builder = Policy::of(kind, limit)
        .per(window)
        .burst(burst)
        .debt(debt)
        .starting_with(start)
        .named(name);
    if flags & 1 != 0 {
        builder = builder.anchor(Anchor::FirstRequest);
    }
    if flags & 2 != 0 {
        builder = builder.shadow();
    }
    if denials > 0 {
        builder = builder.penalty(Penalty::lasting(Ticks(duration)).after(denials));
    }
    builder.limit().map_err(|_| DecodeError::Field { name: "limit" })
}
