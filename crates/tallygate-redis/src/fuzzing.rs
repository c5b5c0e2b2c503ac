//! What must hold of every value that is found under a key, and of every address: one function a fuzz target.

use std::borrow::Cow;

use tallygate::{Algorithm as _, Allowance, Decision, Tick};

use crate::address::Address;
use crate::value;

/// Values: any bytes are refused, or are states that decide within their limits and are written in one way.
pub fn redis_value(bytes: &[u8]) {
    if let Ok(numbers) = value::numbers(bytes) {
        assert_eq!(numbers.len() * 8, bytes.len());
    }
    let Ok((under, allowances)) = value::read(bytes) else { return };
    let write = |under: &[value::Under], allowances: &[Allowance]| {
        let under = under.iter().map(|(policy, state)| (policy, Cow::Borrowed(state)));
        value::write_all(under, allowances.iter().copied())
    };
    let written = write(&under, &allowances);
    let (again, allowances) = value::read(&written).expect("it was written");
    let rewritten = write(&again, &allowances);
    assert_eq!(written, rewritten, "a state has one value");
    for (policy, state) in under {
        for now in [Tick(0), Tick(i64::MAX), Tick(i64::MIN)] {
            let told: Decision = policy.decide(&mut state.clone(), now, 1);
            assert!(told.remaining <= told.limit, "{told:?}");
        }
    }
}

/// Addresses: a password is never told, neither of an address that is understood nor of one that is not.
pub fn redis_address(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let told = match Address::parse(text) {
        Ok(address) => address.to_string(),
        Err(error) => error.to_string(),
    };
    let in_login = text.split_once("://").and_then(|(_, rest)| {
        let authority = rest.split('/').next()?;
        Some(authority.rsplit_once('@')?.0.split_once(':')?.1)
    });
    let in_query = text.split_once("?pass=").map(|(_, rest)| rest);
    for password in in_login.into_iter().chain(in_query) {
        // Others may stand in the message by chance.
        let is_telling =
            password.len() >= 8 && password.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let is_elsewhere = text.matches(password).count() > 1;
        assert!(!is_telling || is_elsewhere || !told.contains(password), "{told}");
    }
}

#[cfg(test)]
mod tests {
    use tallygate_testkit::try_corpus;

    #[test]
    fn any_bytes_are_no_value_or_one_that_decides() {
        try_corpus("redis_value", 5000, super::redis_value);
    }

    #[test]
    fn h10_no_address_tells_its_password() {
        try_corpus("redis_address", 5000, super::redis_address);
    }
}
