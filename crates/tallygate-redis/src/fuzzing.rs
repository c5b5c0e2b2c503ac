//! The properties of all values and addresses, one function per fuzz target.

#![allow(clippy::missing_panics_doc, reason = "a fuzzer looks for failed assertions")]

use std::borrow::Cow;

use tallygate::algorithm::Algorithm as _;
use tallygate::store::Allowance;
use tallygate::{Decision, Tick};

use crate::address::Address;
use crate::value;

/// Checks a value: any bytes are rejected, or are states that decide within their limits and have one encoding.
pub fn redis_value(bytes: &[u8]) {
    if let Ok(numbers) = value::numbers(bytes) {
        assert_eq!(numbers.len() * 8, bytes.len());
    }
    let Ok((under, allowances)) = value::read(bytes) else { return };
    let write = |under: &[value::PolicyRecords], allowances: &[Allowance]| {
        let under = under.iter().map(|(policy, state)| (policy, Cow::Borrowed(state)));
        value::write_all(under, allowances.iter().copied())
    };
    let written = write(&under, &allowances);
    let (again, allowances) = value::read(&written).expect("a written value is valid");
    let rewritten = write(&again, &allowances);
    assert_eq!(written, rewritten, "a state has one value");
    for (policy, state) in under {
        for now in [Tick(0), Tick(i64::MAX), Tick(i64::MIN)] {
            let decision: Decision = policy.decide(&mut state.clone(), now, 1);
            assert!(decision.remaining <= decision.limit, "{decision:?}");
        }
    }
}

/// Checks an address: no message contains its password, whether the address is valid or not.
pub fn redis_address(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let message = match Address::parse(text) {
        Ok(address) => address.to_string(),
        Err(error) => error.to_string(),
    };
    let in_login = text.split_once("://").and_then(|(_, rest)| {
        let authority = rest.split('/').next()?;
        Some(authority.rsplit_once('@')?.0.split_once(':')?.1)
    });
    let in_query = text.split_once("?pass=").map(|(_, rest)| rest);
    for password in in_login.into_iter().chain(in_query) {
        // Short passwords may be part of the message by chance.
        let is_specific =
            password.len() >= 8 && password.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let is_elsewhere = text.matches(password).count() > 1;
        assert!(!is_specific || is_elsewhere || !message.contains(password), "{message}");
    }
}

#[cfg(test)]
mod tests {
    use tallygate_testkit::try_corpus;

    #[test]
    fn any_bytes_are_rejected_or_decide_within_their_limits() {
        try_corpus("redis_value", 5000, super::redis_value);
    }

    /// Fault H10.
    #[test]
    fn no_message_has_the_password_of_an_address() {
        try_corpus("redis_address", 5000, super::redis_address);
    }
}
