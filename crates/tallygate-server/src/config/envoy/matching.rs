//! Finds the rule of a descriptor.
//!
//! One level of the tree per entry of the descriptor: the exact key and value first, then the patterns in the order of the
//! file, then the key without a value. A pattern has a `*` in its value or in its key. There is no way back: if the chosen
//! level has no rule for the next entry, the descriptor has none. A rule applies to descriptors with exactly as many
//! entries as its path has levels.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use memchr::memmem::Finder;
use sha2::{Digest as _, Sha256};
use tallygate::store::MAX_KEY_BYTES;
use tallygate::{Quota, Ticks};

use crate::turn::{ENTRY_BYTE, PATTERN, PATTERN_BYTE, PATTERN_PART, TimeSlice};

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

/// The rules for one entry of a descriptor.
#[derive(Debug, Default)]
pub(super) struct Level {
    by_key: HashMap<Box<str>, KeyRules>,
    /// The rules whose key is a pattern, in the order of the file.
    by_key_pattern: Vec<PatternRule>,
    /// The number of patterns.
    patterns: usize,
}

/// The rules for the entries with one key.
#[derive(Debug, Default)]
struct KeyRules {
    by_value: HashMap<Box<str>, DescriptorRule>,
    /// The rules whose value is a pattern, in the order of the file.
    by_pattern: Vec<PatternRule>,
    any_value: Option<DescriptorRule>,
}

/// A rule with a pattern.
#[derive(Debug)]
struct PatternRule {
    /// The place among the patterns of the level.
    place: usize,
    key: Glob,
    /// `None` is any value.
    value: Option<Glob>,
    rule: DescriptorRule,
}

impl PatternRule {
    async fn matches_value(&self, value: &str, slice: &mut TimeSlice) -> bool {
        match &self.value {
            None => true,
            Some(pattern) => pattern.matches(value, slice).await,
        }
    }
}

/// What a descriptor of the file says.
#[derive(Debug)]
pub(super) struct DescriptorRule {
    pub(super) limit: Option<Arc<EnvoyRule>>,
    pub(super) next: Level,
    /// Whether all values that match the pattern share one counter.
    pub(super) is_shared: bool,
    /// Whether metrics of the rules below show the value of this entry.
    pub(super) value_to_metric: bool,
    /// The file and line of its definition.
    pub(super) file: Arc<str>,
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
    /// Whether a request looked at it, with 0 hits, since the server last warned about it.
    pub(crate) is_looked_at: AtomicBool,
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

/// A text with `*` for any characters. Without a `*`, it matches only itself.
#[derive(Debug)]
pub(super) struct Glob {
    text: Box<str>,
    /// The places of the first and of the last `*`.
    stars: Option<(usize, usize)>,
    /// The texts between two `*`.
    inner: Box<[Finder<'static>]>,
}

impl Glob {
    pub(super) fn is_open(text: &str) -> bool {
        text.contains('*')
    }

    fn new(text: &str) -> Self {
        let stars = text.find('*').zip(text.rfind('*'));
        let inner = stars.map_or("", |(first, last)| &text[first..last]);
        let inner = inner.split('*').filter(|part| !part.is_empty());
        let inner = inner.map(|part| Finder::new(part).into_owned()).collect();
        Self { text: text.into(), stars, inner }
    }

    /// Returns whether a value matches. Both ends are compared first. Each other part is searched for once, so the time is
    /// linear in the length of the value.
    async fn matches(&self, value: &str, slice: &mut TimeSlice) -> bool {
        slice.spend(PATTERN).await;
        let Some((first, last)) = self.stars else { return *self.text == *value };
        let (begin, end) = (&self.text[..first], &self.text[last + 1..]);
        let rest = value.strip_prefix(begin).and_then(|rest| rest.strip_suffix(end));
        let Some(rest) = rest else { return false };
        if self.inner.is_empty() {
            return true;
        }
        slice.spend(PATTERN_PART * self.inner.len() + PATTERN_BYTE * rest.len()).await;
        let mut rest = rest.as_bytes();
        self.inner.iter().all(|part| match part.find(rest) {
            Some(at) => {
                rest = &rest[at + part.needle().len()..];
                true
            }
            None => false,
        })
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

    /// Takes a domain out, to extend it.
    pub(super) fn take(&mut self, name: &str) -> Option<Domain> {
        self.by_name.remove(name)
    }

    /// Adds a domain that is new.
    pub(super) fn insert(&mut self, name: Arc<str>, domain: Domain) {
        self.by_name.insert(name, domain);
    }
}

impl Level {
    pub(super) fn is_empty(&self) -> bool {
        self.by_key.is_empty() && self.by_key_pattern.is_empty()
    }

    /// Returns the descriptor of the file with a key and a value.
    pub(super) fn get(&self, key: &str, value: Option<&str>) -> Option<&DescriptorRule> {
        let of_key = self.by_key.get(key);
        let patterns = match of_key {
            _ if Glob::is_open(key) => &self.by_key_pattern,
            Some(rules) if value.is_some_and(Glob::is_open) => &rules.by_pattern,
            rules => {
                return match value {
                    Some(value) => rules?.by_value.get(value),
                    None => rules?.any_value.as_ref(),
                };
            }
        };
        let is_same = |pattern: &&PatternRule| {
            &*pattern.key.text == key && pattern.value.as_ref().map(|glob| &*glob.text) == value
        };
        patterns.iter().find(is_same).map(|pattern| &pattern.rule)
    }

    /// Adds a descriptor of the file that is new.
    pub(super) fn insert(&mut self, key: &str, value: Option<&str>, rule: DescriptorRule) {
        let place = self.patterns;
        let is_key_open = Glob::is_open(key);
        if !is_key_open && !value.is_some_and(Glob::is_open) {
            let rules = self.by_key.entry(key.into()).or_default();
            match value {
                None => rules.any_value = Some(rule),
                Some(value) => drop(rules.by_value.insert(value.into(), rule)),
            }
            return;
        }
        self.patterns += 1;
        let value = value.map(Glob::new);
        let pattern = PatternRule { place, key: Glob::new(key), value, rule };
        match is_key_open {
            true => self.by_key_pattern.push(pattern),
            false => self.by_key.entry(key.into()).or_default().by_pattern.push(pattern),
        }
    }

    async fn find(
        &self,
        (key, value): (&str, &str),
        slice: &mut TimeSlice,
    ) -> Option<(&DescriptorRule, EntryMatch<'_>)> {
        let rules = self.by_key.get(key);
        if let Some(rule) = rules.and_then(|rules| rules.by_value.get(value)) {
            return Some((rule, EntryMatch::Exact));
        }
        let (mut by_value, mut by_key) = (None, None);
        for pattern in rules.iter().flat_map(|rules| &rules.by_pattern) {
            if pattern.matches_value(value, slice).await {
                by_value = Some(pattern);
                break;
            }
        }
        for pattern in &self.by_key_pattern {
            if pattern.key.matches(key, slice).await && pattern.matches_value(value, slice).await {
                by_key = Some(pattern);
                break;
            }
        }
        if let Some(pattern) = by_value.into_iter().chain(by_key).min_by_key(|found| found.place) {
            return Some((&pattern.rule, EntryMatch::Pattern(pattern)));
        }
        let any_value = rules.and_then(|rules| rules.any_value.as_ref());
        any_value.map(|rule| (rule, EntryMatch::AnyValue))
    }
}

/// How an entry was matched.
enum EntryMatch<'a> {
    Exact,
    Pattern(&'a PatternRule),
    AnyValue,
}

impl EntryMatch<'_> {
    /// Adds the texts of the entry that the file leaves open: each of them has its own counter. The number of texts is the
    /// same for all entries of a rule.
    fn add_open<'e>(&self, (key, value): (&'e str, &'e str), open: &mut Vec<&'e str>) {
        match self {
            Self::Exact => {}
            Self::AnyValue => open.push(value),
            Self::Pattern(pattern) => {
                if Glob::is_open(&pattern.key.text) {
                    open.push(key);
                }
                let is_fixed =
                    pattern.value.as_ref().is_some_and(|value| !Glob::is_open(&value.text));
                if !pattern.rule.is_shared && !is_fixed {
                    open.push(value);
                }
            }
        }
    }
}

impl Domain {
    /// Finds the rule of a descriptor. The time grows with the number of patterns, so this yields between them.
    pub(crate) async fn find(
        &self,
        entries: &[(&str, &str)],
        slice: &mut TimeSlice,
    ) -> Option<RuleMatch<'_>> {
        let mut level = &self.rules;
        let mut found = None;
        let mut open = Vec::new();
        let mut steps = Vec::with_capacity(entries.len());
        for &(key, value) in entries {
            slice.spend(ENTRY_BYTE * (key.len() + value.len())).await;
            let (rule, how) = level.find((key, value), slice).await?;
            how.add_open((key, value), &mut open);
            steps.push((rule.value_to_metric, how));
            level = &rule.next;
            found = rule.limit.as_ref();
        }
        let rule = found?;
        let is_detailed = rule.detailed_metric || steps.iter().any(|(shows, _)| *shows);
        let metric = is_detailed.then(|| self.metric_name(rule, entries, &steps));
        Some(RuleMatch { rule, key: key_of(&open), metric })
    }

    /// Returns the path of a rule for metrics. An entry is shown as in the request if the file asks for it, otherwise as in
    /// the file. So different rules have different names: an entry that looks like a pattern of the file also matches that
    /// pattern, or an earlier one.
    fn metric_name(
        &self,
        rule: &EnvoyRule,
        entries: &[(&str, &str)],
        steps: &[(bool, EntryMatch<'_>)],
    ) -> String {
        // The policy of the domain has the domain as its name.
        let mut name = (*self.override_policy).to_owned();
        for (&(key, value), (shows_value, how)) in entries.iter().zip(steps) {
            let shows_value = *shows_value || rule.detailed_metric;
            let (key, value) = match how {
                EntryMatch::Pattern(pattern) if !shows_value || pattern.rule.is_shared => {
                    (&*pattern.key.text, pattern.value.as_ref().map(|value| &*value.text))
                }
                EntryMatch::Exact | EntryMatch::Pattern(_) => (key, Some(value)),
                EntryMatch::AnyValue => (key, shows_value.then_some(value)),
            };
            add_entry(&mut name, key, value);
        }
        name
    }
}

/// Appends an entry to a name: `|key=value` or `|key`.
fn add_entry(name: &mut String, key: &str, value: Option<&str>) {
    name.push('|');
    escape(name, key);
    if let Some(value) = value {
        name.push('=');
        escape(name, value);
    }
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
        add_entry(&mut name, key, *value);
    }
    name.into()
}

/// Appends a text with `\` before the characters that separate texts, and without control characters. Different texts
/// stay different.
fn escape(out: &mut String, mut text: &str) {
    let is_special =
        |character: char| matches!(character, '\\' | '|' | '=') || character.is_control();
    while let Some(at) = text.find(is_special) {
        let (plain, rest) = text.split_at(at);
        out.push_str(plain);
        let mut characters = rest.chars();
        match characters.next() {
            Some(special @ ('\\' | '|' | '=')) => out.extend(['\\', special]),
            control => out.extend(control.into_iter().flat_map(char::escape_unicode)),
        }
        text = characters.as_str();
    }
    out.push_str(text);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turn::count_polls;

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
            ("aa*aa", vec!["aaaa"], vec!["aaa"]),
            ("*é*", vec!["é", "caféx"], vec!["e", "è"]),
            ("*a*a*", vec!["aa", "xaya"], vec!["a"]),
            ("a", vec!["a"], vec!["ab", ""]),
        ] {
            let pattern = Glob::new(pattern);
            let matches = |value: &str| {
                tallygate::block_on(pattern.matches(value, &mut TimeSlice::default()))
            };
            for value in matching {
                assert!(matches(value), "{pattern:?} {value:?}");
            }
            for value in other {
                assert!(!matches(value), "{pattern:?} {value:?}");
            }
        }
    }

    /// Fault J4.
    #[test]
    fn many_patterns_and_long_values_take_many_time_slices() {
        let rule = || DescriptorRule {
            limit: None,
            next: Level::default(),
            is_shared: false,
            value_to_metric: false,
            file: "rules.yaml".into(),
            line: 1,
        };
        let mut level = Level::default();
        for number in 0..300 {
            level.insert("key", Some(&format!("*/{number}/*")), rule());
            level.insert(&format!("*/{number}/*"), None, rule());
        }
        let long = "/".repeat(30_000);
        for (key, value) in [("key", &*long), (&*long, "value")] {
            let find =
                async { level.find((key, value), &mut TimeSlice::default()).await.is_some() };
            let (is_found, polls) = count_polls(find);
            assert!(!is_found && polls >= 300, "{polls} polls");
        }
        let mut level = Level::default();
        for number in 0..10_000 {
            level.insert("key", Some(&format!("{number}*")), rule());
        }
        let find = async { level.find(("key", "x"), &mut TimeSlice::default()).await.is_some() };
        assert!(count_polls(find).1 >= 4, "patterns that do not match cost time as well");
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
