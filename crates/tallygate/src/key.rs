//! One key out of several parts.

/// Joins the parts of a key so that different parts never make the same key: `a:b` and `c` are not `a`
/// and `b:c`.
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
        // Its length goes before each part, in digits and a colon: the first colon ends it.
        key.extend_from_slice(part.len().to_string().as_bytes());
        key.push(b':');
        key.extend_from_slice(part);
    }
    key
}
