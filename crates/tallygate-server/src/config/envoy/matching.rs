//! Finds the rule of a descriptor.
//!
//! One level of the tree per entry of the descriptor: the exact key and value first, then the patterns of the key in the
//! order of the file, then the key without a value. There is no way back: if the chosen level has no rule for the next
//! entry, the descriptor has none. A rule applies to descriptors with exactly as many entries as its path has levels.

use std::collections::HashMap;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use tallygate::store::MAX_KEY_BYTES;
use tallygate::{Quota, Ticks};

/// The maximum number of entries of a descriptor. Files are not nested more deeply.
pub(crate) const MAX_ENTRIES: usize = 32;

/// The domains of a configuration, by name.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    by_name: HashMap<Arc<str>, Domain>,
}

/// The rules of a domain.
#[derive(Debug)]
pub(crate) struct Domain {
    /// The policy of limits that come with requests and match no rule.
    pub(crate) override_policy: Arc<str>,
    /// The file and line of its definition.
    pub(super) defined_in: Box<str>,
    pub(super) rules: Level,
}

/// The rules for one entry of a descriptor, by its key.
#[derive(Debug, Default)]
pub(super) struct Level {
    by_key: HashMap<Box<str>, KeyRules>,
}

/// The rules for the entries with one key.
#[derive(Debug, Default)]
struct KeyRules {
    by_value: HashMap<Box<str>, DescriptorRule>,
    /// In the order of the file.
    by_pattern: Vec<(Pattern, DescriptorRule)>,
    any_value: Option<DescriptorRule>,
}

/// What a descriptor of the file says.
#[derive(Debug, Default)]
pub(super) struct DescriptorRule {
    pub(super) limit: Option<Arc<EnvoyRule>>,
    pub(super) next: Level,
    /// Whether all values that match the pattern share one counter.
    pub(super) is_shared: bool,
    /// Whether metrics of the rules below show the value of this entry.
    pub(super) value_to_metric: bool,
    /// The line of its definition.
    pub(super) line: usize,
}

/// A `rate_limit` of the file.
#[derive(Debug)]
pub(crate) struct EnvoyRule {
    /// The name of its policy.
    pub(crate) policy: Arc<str>,
    pub(crate) limit: EnvoyLimit,
    /// Whether the file says `unlimited`.
    pub(crate) is_unlimited: bool,
    /// The name by which other limits replace it.
    pub(crate) name: Option<Box<str>>,
    /// The names of the limits that do not apply to a request that this one applies to.
    pub(crate) replaces: Vec<Box<str>>,
    pub(crate) mode: EnvoyMode,
    /// Whether requests fail while the store is unavailable, so that Envoy decides.
    pub(crate) fails_without_store: bool,
    /// Whether metrics show the values of all entries.
    pub(crate) detailed_metric: bool,
}

/// The numbers of a limit, as responses report them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EnvoyLimit {
    pub(crate) requests_per_unit: u32,
    pub(crate) unit: Unit,
    /// How many units the window has.
    pub(crate) unit_multiplier: u32,
}

impl EnvoyLimit {
    /// Returns the requests per window.
    pub(crate) fn quota(&self) -> Quota {
        let seconds = self.unit.seconds().saturating_mul(self.unit_multiplier.into());
        let window = Ticks(seconds.saturating_mul(Ticks::PER_SECOND));
        Quota { amount: self.requests_per_unit.into(), window }
    }
}

/// What a limit does to requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum EnvoyMode {
    #[default]
    Enforced,
    /// It counts, and denies nothing.
    Shadow,
    /// It counts and denies nothing, and the response lists the descriptors that are over their limit.
    Quota,
}

/// A unit of time. The numbers are those of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Unit {
    Second = 1,
    Minute = 2,
    Hour = 3,
    Day = 4,
    Month = 5,
    Year = 6,
    Week = 7,
}

impl Unit {
    pub(crate) const ALL: [(&'static str, Self); 7] = [
        ("SECOND", Self::Second),
        ("MINUTE", Self::Minute),
        ("HOUR", Self::Hour),
        ("DAY", Self::Day),
        ("MONTH", Self::Month),
        ("YEAR", Self::Year),
        ("WEEK", Self::Week),
    ];

    /// Returns the length: a month has 30 days and a year 365, as in envoyproxy/ratelimit.
    pub(crate) const fn seconds(self) -> u64 {
        const DAY: u64 = 86_400;
        match self {
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 3_600,
            Self::Day => DAY,
            Self::Week => 7 * DAY,
            Self::Month => 30 * DAY,
            Self::Year => 365 * DAY,
        }
    }

    /// Returns the name in the protocol.
    pub(crate) fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|(_, unit)| *unit == self).map_or("UNKNOWN", |(name, _)| name)
    }

    pub(crate) fn of_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().map(|(_, unit)| unit).find(|unit| *unit as i32 == number)
    }

    /// Returns the unit with this length.
    pub(crate) fn of_window(window: Ticks) -> Option<Self> {
        let units = Self::ALL.into_iter().map(|(_, unit)| unit);
        units.into_iter().find(|unit| unit.seconds() * Ticks::PER_SECOND == window.0)
    }

    /// Returns the unit with a name, in any case.
    pub(crate) fn of_name(name: &str) -> Option<Self> {
        let found = Self::ALL.into_iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map(|(_, unit)| unit)
    }
}

/// A text with `*` for any characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pattern(Box<str>);

impl Pattern {
    /// Returns a pattern if the value contains a `*`.
    pub(super) fn of(value: &str) -> Option<Self> {
        value.contains('*').then(|| Self(value.into()))
    }

    /// Compares in time linear in the length of the value for each `*`: every part is searched for once.
    fn matches(&self, value: &str) -> bool {
        let mut parts = self.0.split('*');
        let first = parts.next().unwrap_or_default();
        let Some(mut rest) = value.strip_prefix(first) else { return false };
        let Some(last) = parts.next_back() else { return rest.is_empty() };
        for part in parts {
            match rest.find(part) {
                Some(at) => rest = &rest[at + part.len()..],
                None => return false,
            }
        }
        rest.ends_with(last)
    }
}

/// The rule that a descriptor matches, and its key within the policy of the rule.
#[derive(Debug)]
pub(crate) struct RuleMatch<'a> {
    pub(crate) rule: &'a Arc<EnvoyRule>,
    pub(crate) key: Vec<u8>,
    /// The name for detailed metrics, if the configuration asks for one.
    pub(crate) metric: Option<String>,
}

impl Domains {
    pub(crate) fn get(&self, name: &str) -> Option<&Domain> {
        self.by_name.get(name)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Adds a domain that is new.
    pub(super) fn insert(&mut self, name: Arc<str>, domain: Domain) {
        self.by_name.insert(name, domain);
    }
}

impl Level {
    pub(super) fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Returns the descriptor of the file with a key and a value.
    pub(super) fn get(&self, key: &str, value: Option<&str>) -> Option<&DescriptorRule> {
        let rules = self.by_key.get(key)?;
        let Some(value) = value else { return rules.any_value.as_ref() };
        match Pattern::of(value) {
            None => rules.by_value.get(value),
            Some(pattern) => {
                let mut patterns = rules.by_pattern.iter();
                patterns.find(|(other, _)| *other == pattern).map(|(_, rule)| rule)
            }
        }
    }

    /// Adds a descriptor of the file that is new.
    pub(super) fn insert(&mut self, key: &str, value: Option<&str>, rule: DescriptorRule) {
        let rules = self.by_key.entry(key.into()).or_default();
        match value.map(|value| (value, Pattern::of(value))) {
            None => rules.any_value = Some(rule),
            Some((value, None)) => drop(rules.by_value.insert(value.into(), rule)),
            Some((_, Some(pattern))) => rules.by_pattern.push((pattern, rule)),
        }
    }
}

/// How an entry was matched.
enum EntryMatch<'a> {
    Exact,
    /// A pattern whose values share one counter.
    Shared(&'a Pattern),
    /// Any value, or a pattern: each value has its own counter.
    Each,
}

impl KeyRules {
    fn find(&self, value: &str) -> Option<(&DescriptorRule, EntryMatch<'_>)> {
        if let Some(rule) = self.by_value.get(value) {
            return Some((rule, EntryMatch::Exact));
        }
        let by_pattern = self.by_pattern.iter().find(|(pattern, _)| pattern.matches(value));
        if let Some((pattern, rule)) = by_pattern {
            let how = if rule.is_shared { EntryMatch::Shared(pattern) } else { EntryMatch::Each };
            return Some((rule, how));
        }
        self.any_value.as_ref().map(|rule| (rule, EntryMatch::Each))
    }
}

impl Domain {
    /// Finds the rule of a descriptor.
    pub(crate) fn find(&self, entries: &[(&str, &str)]) -> Option<RuleMatch<'_>> {
        let mut level = &self.rules;
        let mut found = None;
        let mut values = Vec::new();
        let mut steps = Vec::with_capacity(entries.len());
        for (key, value) in entries {
            let (rule, how) = level.by_key.get(*key)?.find(value)?;
            if matches!(how, EntryMatch::Each) {
                values.push(*value);
            }
            steps.push((rule.value_to_metric, how));
            level = &rule.next;
            found = rule.limit.as_ref();
        }
        let rule = found?;
        let is_detailed = rule.detailed_metric || steps.iter().any(|(shows, _)| *shows);
        let metric = is_detailed.then(|| metric_name(rule, entries, &steps));
        Some(RuleMatch { rule, key: key_of(&values), metric })
    }
}

/// Returns the path of a rule with values of the request in place of the values that the file leaves open.
fn metric_name(
    rule: &EnvoyRule,
    entries: &[(&str, &str)],
    steps: &[(bool, EntryMatch<'_>)],
) -> String {
    let domain = rule.policy.split('|').next().unwrap_or_default();
    let mut name = domain.to_owned();
    for ((key, value), (shows_value, how)) in entries.iter().zip(steps) {
        name.push('|');
        escape(&mut name, key);
        let shown = match how {
            EntryMatch::Exact => Some(*value),
            EntryMatch::Shared(pattern) => Some(&*pattern.0),
            EntryMatch::Each => (*shows_value || rule.detailed_metric).then_some(*value),
        };
        if let Some(value) = shown {
            name.push('=');
            escape(&mut name, value);
        }
    }
    name
}

/// Returns the key of the values that a rule leaves open. Different values have different keys.
fn key_of(values: &[&str]) -> Vec<u8> {
    match values {
        [] => b"all".to_vec(),
        // The number of values is the same for all keys of a rule, so a single value needs no separators.
        [value] => bounded(value.as_bytes().to_vec()),
        values => {
            let mut key = String::with_capacity(values.iter().map(|value| value.len() + 1).sum());
            for (place, value) in values.iter().enumerate() {
                if place > 0 {
                    key.push('|');
                }
                escape(&mut key, value);
            }
            bounded(key.into_bytes())
        }
    }
}

/// Returns the key of a descriptor that matches no rule, for limits that come with requests.
pub(crate) fn override_key(entries: &[(&str, &str)]) -> Vec<u8> {
    let mut text = String::new();
    for (place, (key, value)) in entries.iter().enumerate() {
        if place > 0 {
            text.push('|');
        }
        escape(&mut text, key);
        text.push('=');
        escape(&mut text, value);
    }
    bounded(text.into_bytes())
}

const DIGEST: &[u8] = b"sha256:";

/// Replaces a long key by its digest. A key that looks like a digest is replaced as well, so that no client can choose
/// the key of another one.
fn bounded(key: Vec<u8>) -> Vec<u8> {
    if key.len() <= MAX_KEY_BYTES && !key.starts_with(DIGEST) {
        return key;
    }
    let mut digest = DIGEST.to_vec();
    for byte in Sha256::digest(&key) {
        digest.extend(format!("{byte:02x}").bytes());
    }
    digest
}

/// Returns the name of a policy: `envoy:DOMAIN|key=value|key`.
pub(super) fn policy_name(domain: &str, path: &[(&str, Option<&str>)]) -> Arc<str> {
    let mut name = "envoy:".to_owned();
    escape(&mut name, domain);
    for (key, value) in path {
        name.push('|');
        escape(&mut name, key);
        if let Some(value) = value {
            name.push('=');
            escape(&mut name, value);
        }
    }
    name.into()
}

/// Appends a text with `\` before the characters that separate texts, and without control characters. Different texts
/// stay different.
fn escape(out: &mut String, text: &str) {
    for character in text.chars() {
        match character {
            '\\' | '|' | '=' => out.extend(['\\', character]),
            control if control.is_control() => out.extend(control.escape_unicode()),
            other => out.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_globs() {
        for (pattern, matching, other) in [
            ("*", vec!["", "a", "a/b"], vec![]),
            ("a*", vec!["a", "ab", "a*"], vec!["", "ba"]),
            ("*a", vec!["a", "ba", "aa"], vec!["", "ab"]),
            ("a*b*c", vec!["abc", "axbxc", "abbc", "abcbc"], vec!["ac", "acb", "abcd"]),
            ("a*a", vec!["aa", "aba"], vec!["a"]),
            ("/v1/*/items", vec!["/v1/x/items", "/v1//items"], vec!["/v1/items"]),
            ("a**b", vec!["ab", "axb"], vec!["a"]),
        ] {
            let pattern = Pattern::of(pattern).expect("a pattern");
            for value in matching {
                assert!(pattern.matches(value), "{pattern:?} {value:?}");
            }
            for value in other {
                assert!(!pattern.matches(value), "{pattern:?} {value:?}");
            }
        }
        assert_eq!(Pattern::of("a"), None);
    }

    /// Fault H8.
    #[test]
    fn different_values_have_different_keys() {
        let long = "x".repeat(MAX_KEY_BYTES + 1);
        let digest = String::from_utf8(key_of(&[&long])).unwrap();
        assert_eq!(digest.len(), "sha256:".len() + 64);
        let values: [&[&str]; 9] = [
            &["a", "b"],
            &["a|b", ""],
            &["a\\", "b"],
            &["a\\|b", ""],
            &["", "a|b"],
            &["a", "|b"],
            &[&long],
            &[&digest],
            &["a=b", "c"],
        ];
        let keys: std::collections::HashSet<_> =
            values.iter().map(|values| key_of(values)).collect();
        assert_eq!(keys.len(), values.len());
        let entries: [&[(&str, &str)]; 4] =
            [&[("a_b", "c")], &[("a", "b_c")], &[("a", "b|c=d")], &[("a", "b"), ("c", "d")]];
        let keys: std::collections::HashSet<_> =
            entries.iter().map(|entries| override_key(entries)).collect();
        assert_eq!(keys.len(), entries.len());
    }

    #[test]
    fn names_of_policies_are_readable_and_differ() {
        assert_eq!(
            &*policy_name("web", &[("path", Some("/a")), ("ip", None)]),
            "envoy:web|path=/a|ip"
        );
        assert_eq!(&*policy_name("a|b", &[("k=", Some("\n"))]), "envoy:a\\|b|k\\==\\u{a}");
    }
}
