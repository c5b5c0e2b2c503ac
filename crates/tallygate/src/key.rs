//! Builds one key from several parts.

/// Joins the parts of a key so that different parts never make the same key: `a:b` and `c` differ from `a` and `b:c`.
///
/// ```
/// use tallygate::joined_key;
///
/// assert_ne!(joined_key(["a:b", "c"]), joined_key(["a", "b:c"]));
/// assert_ne!(joined_key(["ab"]), joined_key(["a", "b"]));
/// ```
pub fn joined_key<K: AsRef<[u8]>>(parts: impl IntoIterator<Item = K>) -> Vec<u8> {
    let mut key = Vec::new();
    for part in parts {
        let part = part.as_ref();
        // The length of each part precedes it, as digits and a colon. The first colon ends the digits.
        key.extend_from_slice(part.len().to_string().as_bytes());
        key.push(b':');
        key.extend_from_slice(part);
    }
    key
}
