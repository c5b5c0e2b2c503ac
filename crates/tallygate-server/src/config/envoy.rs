//! The configuration of Envoy's rate limit service: YAML files in the format of envoyproxy/ratelimit.
//!
//! | question | file |
//! |---|---|
//! | Which rule does a descriptor match? | `matching.rs` |
//! | Which fields does a file have? | `fields.rs` |
//! | Where in the file is a value? | `yaml.rs` |
//!
//! Each `rate_limit` becomes a policy, whose name is the path of its descriptor, and the values of a request's descriptor
//! become the key. So limits of Envoy have the same stores, metrics, snapshots and admin requests as all policies.

mod fields;
mod matching;
mod yaml;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tallygate_lab::duration::DurationText;
use toml::Spanned;

use super::PolicyConfig;
use super::file::Window;
use super::limits::LONGEST_TIME;
use super::mistake::Mistake;
use super::regular_file::{MAX_CONFIG_BYTES, read_text};
use matching::Domains;
pub(crate) use matching::{EnvoyLimit, EnvoyMode, EnvoyRule, MAX_ENTRIES, Unit, override_key};

/// The configuration of Envoy's rate limit service.
#[derive(Debug, Default)]
pub(crate) struct EnvoyConfig {
    pub(crate) domains: Domains,
    pub(crate) settings: EnvoySettings,
    /// What works and is probably not meant.
    pub(super) warnings: Vec<String>,
}

/// The settings that envoyproxy/ratelimit does not have in its files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EnvoySettings {
    pub(crate) charge: Charge,
    pub(crate) headers: EnvoyHeaders,
    /// The longest window of a limit that comes with a request: the store keeps its counter for so long.
    pub(crate) max_window: Duration,
    /// Whether several files may define descriptors of one domain.
    merge_domains: bool,
    /// Whether no request is denied: only the statuses of its descriptors say that it would be.
    pub(crate) shadow_mode: bool,
}

impl Default for EnvoySettings {
    fn default() -> Self {
        Self {
            charge: Charge::default(),
            headers: EnvoyHeaders::default(),
            // The longest unit of the protocol is a year.
            max_window: Duration::from_secs(366 * 86_400),
            merge_domains: false,
            shadow_mode: false,
        }
    }
}

/// What a denied request charges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Charge {
    /// All descriptors of a request are charged, or none is.
    #[default]
    AllOrNothing,
    /// Each descriptor is charged by itself, also if it or another one is denied, as in envoyproxy/ratelimit.
    Always,
}

/// The header fields that the service asks Envoy to add to responses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EnvoyHeaders {
    /// As in envoyproxy/ratelimit by default. Envoy itself can add fields (`enable_x_ratelimit_headers`).
    #[default]
    None,
    /// `X-RateLimit-Limit`, `-Remaining` and `-Reset`.
    X,
    /// `RateLimit-Policy` and `RateLimit` of the IETF draft.
    Draft,
    All,
}

/// The table `[envoy]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EnvoyTable {
    pub(super) config: Option<PathBuf>,
    charge: Option<Charge>,
    headers: Option<EnvoyHeaders>,
    max_window: Option<Spanned<Window>>,
    merge_domains: Option<bool>,
    shadow_mode: Option<bool>,
}

impl EnvoyTable {
    /// Returns the settings.
    ///
    /// # Errors
    ///
    /// Fails if a value is out of range: the place in the text, and the reason.
    pub(super) fn settings(&self) -> Result<EnvoySettings, (usize, String)> {
        let default = EnvoySettings::default();
        let max_window = match &self.max_window {
            None => default.max_window,
            Some(given) => {
                let at = given.span().start;
                let Window(window) = given.get_ref();
                if window.is_zero() || *window > LONGEST_TIME {
                    let (given, most) = (DurationText(*window), DurationText(LONGEST_TIME));
                    return Err((
                        at,
                        format!("max_window must be above 0 and at most {most} (got {given})"),
                    ));
                }
                *window
            }
        };
        Ok(EnvoySettings {
            charge: self.charge.unwrap_or_default(),
            headers: self.headers.unwrap_or_default(),
            max_window,
            merge_domains: self.merge_domains.unwrap_or_default(),
            shadow_mode: self.shadow_mode.unwrap_or_default(),
        })
    }

    /// Returns the settings that the table has, except for the path of the rules.
    pub(super) fn set(&self) -> Vec<&'static str> {
        let all = [
            ("charge", self.charge.is_some()),
            ("headers", self.headers.is_some()),
            ("max_window", self.max_window.is_some()),
            ("merge_domains", self.merge_domains.is_some()),
            ("shadow_mode", self.shadow_mode.is_some()),
        ];
        all.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name).collect()
    }
}

/// The policies of a configuration, by name.
type Policies = BTreeMap<Arc<str>, PolicyConfig>;

impl EnvoyConfig {
    /// Reads a file, or all YAML files of a folder, and adds a policy per rate limit to `policies`.
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be read or is invalid.
    pub(super) fn read(
        path: &Path,
        settings: EnvoySettings,
        policies: &mut Policies,
    ) -> Result<Self, Mistake> {
        let cannot_read = |path: &Path, error: &io::Error| {
            Mistake::in_line(1, 1, format!("cannot read the file: {error}"))
                .in_file(&path.display().to_string())
        };
        let mut config = Self { settings, ..Self::default() };
        let files = files(path).map_err(|error| cannot_read(path, &error))?;
        if files.is_empty() {
            config.warnings.push(format!(
                "{}: the folder has no files for Envoy, so no request of Envoy is limited; add a file whose name ends in \
                 .yaml or .yml and does not begin with a dot",
                path.display()
            ));
        }
        for file in files {
            let text =
                read_text(&file, MAX_CONFIG_BYTES).map_err(|error| cannot_read(&file, &error))?;
            config.add(&text, &file.display().to_string(), policies)?;
        }
        Ok(config)
    }

    /// Adds the domains of a text.
    fn add(&mut self, text: &str, file: &str, policies: &mut Policies) -> Result<(), Mistake> {
        fields::add(text, file, self, policies).map_err(|error| {
            Mistake::in_line(error.place.line, error.place.column, error.reason).in_file(file)
        })
    }

    /// Describes the configuration.
    pub(super) fn summary(&self) -> String {
        let domains = self.domains.len();
        let charge = match self.settings.charge {
            Charge::AllOrNothing => "a denied request charges nothing",
            Charge::Always => "a denied request is charged as well",
        };
        let headers = match self.settings.headers {
            EnvoyHeaders::None => "none",
            EnvoyHeaders::X => "x",
            EnvoyHeaders::Draft => "draft",
            EnvoyHeaders::All => "all",
        };
        let plural = if domains == 1 { "" } else { "s" };
        let max_window = DurationText(self.settings.max_window);
        let mut summary = format!(
            "{domains} domain{plural}, {charge}, headers {headers}, max_window {max_window}"
        );
        if self.settings.merge_domains {
            summary.push_str(", domains of several files are merged");
        }
        if self.settings.shadow_mode {
            summary.push_str(", shadow_mode (no request is denied)");
        }
        summary
    }

    /// Returns the configuration of a text, and its policies.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn parse(text: &str) -> Result<(Self, Policies), Mistake> {
        let (mut config, mut policies) = (Self::default(), Policies::new());
        config.add(text, "rules.yaml", &mut policies)?;
        Ok((config, policies))
    }
}

/// Returns the file itself, or the YAML files of a folder, by name. Hidden files are left out: Kubernetes keeps the
/// versions of a volume in them.
pub(crate) fn files(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !fs::metadata(path)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path)? {
        let file = entry?.path();
        let name = file.file_name().and_then(|name| name.to_str()).unwrap_or(".");
        let is_yaml = file.extension().is_some_and(|kind| kind == "yaml" || kind == "yml");
        if is_yaml && !name.starts_with('.') {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tallygate::Kind;
    use tallygate::tiers::Access;

    use super::matching::{Domain, RuleMatch};
    use super::*;
    use crate::turn::TimeSlice;

    fn find<'a>(domain: &'a Domain, entries: &[(&str, &str)]) -> Option<RuleMatch<'a>> {
        tallygate::block_on(domain.find(entries, &mut TimeSlice::default()))
    }

    const RULES: &str = "
domain: web
descriptors:
  - key: plan
    value: free
    rate_limit: {unit: minute, requests_per_unit: 10}
    descriptors:
      - key: path
        value: /search
        rate_limit: {unit: second, requests_per_unit: 1}
      - key: path
        rate_limit: {unit: hour, requests_per_unit: 100}
      - key: ip
        descriptors:
          - key: user
            rate_limit: {unit: day, requests_per_unit: 7}
  - key: plan
    value: f*
    rate_limit: {unit: minute, requests_per_unit: 20}
  - key: plan
    value: fr*
    rate_limit: {unit: minute, requests_per_unit: 30}
  - key: plan
    rate_limit: {unit: minute, requests_per_unit: 40}
    descriptors:
      - key: path
        value: /only-here
        rate_limit: {unit: minute, requests_per_unit: 41}
  - key: file
    value: docs/*/latest
    share_threshold: true
    rate_limit: {unit: hour, requests_per_unit: 5}
  - key: file
    value: img/*
    rate_limit: {unit: hour, requests_per_unit: 6}
  - key: code
    value: 404
    rate_limit: {unit: hour, requests_per_unit: 8}
  - key: a_b
    value: c
    rate_limit: {unit: hour, requests_per_unit: 9}
  - key: allowed
  - key: file
    value: docs/a/latest
    rate_limit: {unit: hour, requests_per_unit: 50}
  - key: any
    value: '*'
    rate_limit: {unit: hour, requests_per_unit: 51}
  - key: x-*
    rate_limit: {unit: hour, requests_per_unit: 57}
    descriptors:
      - key: user
        rate_limit: {unit: hour, requests_per_unit: 58}
  - key: x-late
    value: v*
    rate_limit: {unit: hour, requests_per_unit: 59}
  - key: x-late
    value: exact
    rate_limit: {unit: hour, requests_per_unit: 60}
  - key: y-*
    share_threshold: true
    rate_limit: {unit: hour, requests_per_unit: 61}
  - key: y-early
    rate_limit: {unit: hour, requests_per_unit: 62}
  - key: z-first
    value: v*
    rate_limit: {unit: hour, requests_per_unit: 63}
  - key: z-*
    value: v1
    rate_limit: {unit: hour, requests_per_unit: 64}
  - key: region
    value: eu-*
    share_threshold: true
    descriptors:
      - key: host
        value: h*-*x
        share_threshold: true
        descriptors:
          - key: user
            rate_limit: {unit: hour, requests_per_unit: 52}
      - key: host
        value: each-*
        rate_limit: {unit: hour, requests_per_unit: 53}
      - key: host
        value: one
        rate_limit: {unit: hour, requests_per_unit: 54}
  - key: region
    value: us-*
    descriptors:
      - key: host
        value: h*
        share_threshold: true
        rate_limit: {unit: hour, requests_per_unit: 55}
      - key: region
        value: us-*
        rate_limit: {unit: hour, requests_per_unit: 56}
";

    /// The descriptor of a request, and the policy and the key of the rule that it matches.
    type Case = (&'static [(&'static str, &'static str)], Option<(&'static str, &'static str)>);

    const CASES: [Case; 48] = [
        // The exact value is first, whatever the order of the file.
        (&[("plan", "free")], Some(("envoy:web|plan=free", "all"))),
        // Patterns are tried in the order of the file; each value has its own key.
        (&[("plan", "friend")], Some(("envoy:web|plan=f*", "friend"))),
        (&[("plan", "f")], Some(("envoy:web|plan=f*", "f"))),
        // The key without a value matches the rest, also an empty value.
        (&[("plan", "gold")], Some(("envoy:web|plan", "gold"))),
        (&[("plan", "")], Some(("envoy:web|plan", ""))),
        // Keys and values are compared with case.
        (&[("plan", "Free")], Some(("envoy:web|plan", "Free"))),
        (&[("Plan", "free")], None),
        // One level per entry.
        (
            &[("plan", "free"), ("path", "/search")],
            Some(("envoy:web|plan=free|path=/search", "all")),
        ),
        (&[("plan", "free"), ("path", "/x")], Some(("envoy:web|plan=free|path", "/x"))),
        // The order of the entries matters.
        (&[("path", "/x"), ("plan", "free")], None),
        // A rule applies to descriptors of its own depth only.
        (&[("plan", "free"), ("ip", "::1")], None),
        (
            &[("plan", "free"), ("ip", "::1"), ("user", "u")],
            Some(("envoy:web|plan=free|ip|user", "::1|u")),
        ),
        (&[("plan", "free"), ("path", "/x"), ("user", "u")], None),
        (&[], None),
        // There is no way back: `free` matches exactly, so the rule of `/only-here` below the bare key is not reached.
        (
            &[("plan", "free"), ("path", "/only-here")],
            Some(("envoy:web|plan=free|path", "/only-here")),
        ),
        (
            &[("plan", "gold"), ("path", "/only-here")],
            Some(("envoy:web|plan|path=/only-here", "gold")),
        ),
        (&[("plan", "friend"), ("path", "/only-here")], None),
        // Values that match a shared pattern have one key.
        (&[("file", "docs/x/latest")], Some(("envoy:web|file=docs/*/latest", "all"))),
        (&[("file", "docs/b/c/latest")], Some(("envoy:web|file=docs/*/latest", "all"))),
        (&[("file", "docs/a")], None),
        (&[("file", "img/a")], Some(("envoy:web|file=img/*", "img/a"))),
        // A number in the file is a text.
        (&[("code", "404")], Some(("envoy:web|code=404", "all"))),
        // `a_b` and `c` do not meet `a` and `b_c`.
        (&[("a", "b_c")], None),
        // A descriptor without a limit is not limited.
        (&[("allowed", "x")], None),
        // The exact value is first, also after a pattern in the file.
        (&[("file", "docs/a/latest")], Some(("envoy:web|file=docs/a/latest", "all"))),
        // `*` matches every value, each with its own key.
        (&[("any", "")], Some(("envoy:web|any=*", ""))),
        (&[("any", "x")], Some(("envoy:web|any=*", "x"))),
        // Shared patterns on several levels: only the other values are part of the key.
        (
            &[("region", "eu-1"), ("host", "h1-2x"), ("user", "u")],
            Some(("envoy:web|region=eu-*|host=h*-*x|user", "u")),
        ),
        (
            &[("region", "eu-2"), ("host", "h3-x"), ("user", "u")],
            Some(("envoy:web|region=eu-*|host=h*-*x|user", "u")),
        ),
        (
            &[("region", "eu-2"), ("host", "each-1")],
            Some(("envoy:web|region=eu-*|host=each-*", "each-1")),
        ),
        (&[("region", "eu-2"), ("host", "one")], Some(("envoy:web|region=eu-*|host=one", "all"))),
        // A pattern that is not shared keeps its value in the key of the levels below it.
        (&[("region", "us-1"), ("host", "h1")], Some(("envoy:web|region=us-*|host=h*", "us-1"))),
        (&[("region", "us-2"), ("host", "h9")], Some(("envoy:web|region=us-*|host=h*", "us-2"))),
        // The same key on two levels.
        (
            &[("region", "us-1"), ("region", "us-2")],
            Some(("envoy:web|region=us-*|region=us-*", "us-1|us-2")),
        ),
        // A prefix and a suffix of a pattern do not overlap.
        (&[("region", "eu-1"), ("host", "h-"), ("user", "u")], None),
        // A key with a `*` matches keys. Each key and value has its own counter.
        (&[("x-a", "1")], Some(("envoy:web|x-*", "x-a|1"))),
        (&[("x-", "")], Some(("envoy:web|x-*", "x-|"))),
        (&[("x-a", "1"), ("user", "u")], Some(("envoy:web|x-*|user", "x-a|1|u"))),
        (&[("ax-a", "1")], None),
        // The exact value is first, then the patterns of keys and values in the order of the file, then the bare key.
        (&[("x-late", "v")], Some(("envoy:web|x-*", "x-late|v"))),
        (&[("x-late", "exact")], Some(("envoy:web|x-late=exact", "all"))),
        (&[("y-early", "v")], Some(("envoy:web|y-*", "y-early"))),
        (&[("z-first", "v1")], Some(("envoy:web|z-first=v*", "v1"))),
        (&[("z-other", "v1")], Some(("envoy:web|z-*=v1", "z-other"))),
        (&[("z-other", "v2")], None),
        // With `share_threshold`, all values of a key share a counter.
        (&[("y-a", "1")], Some(("envoy:web|y-*", "y-a"))),
        // A level above the limit has none itself, and no other region matches.
        (&[("region", "eu-1")], None),
        (&[("region", "ap-1"), ("host", "one")], None),
    ];

    #[test]
    fn descriptors_match_as_in_envoyproxy_ratelimit() {
        let (config, policies) = EnvoyConfig::parse(RULES).unwrap();
        let domain = config.domains.get("web").unwrap();
        for (entries, expected) in CASES {
            let found = find(domain, entries);
            let found = found.map(|found| {
                assert!(policies.contains_key(&found.rule.policy), "{}", found.rule.policy);
                (found.rule.policy.to_string(), String::from_utf8(found.key).unwrap())
            });
            let expected = expected.map(|(policy, key)| (policy.to_owned(), key.to_owned()));
            assert_eq!(found, expected, "{entries:?}");
        }
        assert!(config.domains.get("other").is_none());
    }

    #[test]
    fn units_algorithms_and_options_become_policies() {
        let day = 86_400;
        for (fields, kind, limit, seconds, burst) in [
            ("unit: second, requests_per_unit: 3", Kind::FixedWindow, 3, 1, 3),
            ("unit: MINUTE, requests_per_unit: 3", Kind::FixedWindow, 3, 60, 3),
            ("unit: Hour, requests_per_unit: 3", Kind::FixedWindow, 3, 3_600, 3),
            ("unit: WEEK, requests_per_unit: 0x10", Kind::FixedWindow, 16, 7 * day, 16),
            ("unit: mOnTh, requests_per_unit: 1_000", Kind::FixedWindow, 1_000, 30 * day, 1_000),
            ("unit: YEAR, requests_per_unit: 010", Kind::FixedWindow, 8, 365 * day, 8),
            ("unit: day, requests_per_unit: 3", Kind::FixedWindow, 3, day, 3),
            ("unit: week, requests_per_unit: 3", Kind::FixedWindow, 3, 7 * day, 3),
            ("unit: month, requests_per_unit: 3", Kind::FixedWindow, 3, 30 * day, 3),
            (
                "unit: year, requests_per_unit: 4294967295",
                Kind::FixedWindow,
                u32::MAX.into(),
                365 * day,
                u32::MAX.into(),
            ),
            (
                "unit: hour, requests_per_unit: 3, unit_multiplier: 5",
                Kind::FixedWindow,
                3,
                5 * 3_600,
                3,
            ),
            (
                "unit: second, requests_per_unit: 3, algorithm: token_bucket, burst: 9",
                Kind::TokenBucket,
                3,
                1,
                9,
            ),
            ("unit: second, requests_per_unit: 3, algorithm: gcra", Kind::Gcra, 3, 1, 3),
            (
                "unit: second, requests_per_unit: 3, algorithm: leaky_bucket",
                Kind::LeakyBucket,
                3,
                1,
                3,
            ),
            (
                "unit: second, requests_per_unit: 3, algorithm: sliding_window_log",
                Kind::SlidingWindowLog,
                3,
                1,
                3,
            ),
            (
                "unit: second, requests_per_unit: 3, algorithm: sliding_window_counter",
                Kind::SlidingWindowCounter,
                3,
                1,
                3,
            ),
        ] {
            let text = format!("domain: d\ndescriptors: [{{key: k, rate_limit: {{{fields}}}}}]");
            let (_, policies) = EnvoyConfig::parse(&text).unwrap();
            let Access::Limited(policy) = policies["envoy:d|k"].tiers.base() else {
                panic!("{fields}")
            };
            let numbers = policy.limits()[0].numbers();
            let window = numbers.window.0 / tallygate::Ticks::PER_SECOND;
            assert_eq!(
                (numbers.kind, numbers.limit, window, numbers.burst),
                (kind, limit, seconds, burst),
                "{fields}"
            );
        }
        for (fields, access) in [
            ("unlimited: true", Access::Unlimited),
            ("unlimited: y, requests_per_unit: 5", Access::Unlimited),
            ("unit: day, requests_per_unit: 0", Access::Blocked),
        ] {
            let text = format!("domain: d\ndescriptors: [{{key: k, rate_limit: {{{fields}}}}}]");
            let (_, policies) = EnvoyConfig::parse(&text).unwrap();
            assert_eq!(policies["envoy:d|k"].tiers.base(), access);
        }
    }

    #[track_caller]
    fn says(text: &str, expected: &str) {
        let mistake = EnvoyConfig::parse(text).map(|_| ()).expect_err("a mistake");
        assert_eq!(mistake.to_string(), format!("rules.yaml:{expected}"));
    }

    /// Fault G6.
    #[test]
    fn an_error_has_its_line_and_the_nearest_valid_name() {
        says("", "1:1: the file is empty; it needs a `domain` and `descriptors`");
        says("descriptors: []\n", "1:1: `domain` is missing or empty; each file needs one");
        says(
            "domain: d\ndescriptor: []\n",
            "2:1: unknown field `descriptor`; did you mean `descriptors`?",
        );
        says(
            "domain: d\ndescriptors:\n  - value: x\n",
            "3:5: `key` is missing or empty; each descriptor needs one",
        );
        let limit = |fields: &str| {
            format!("domain: d\ndescriptors:\n  - key: k\n    rate_limit:\n{fields}")
        };
        says(
            &limit("      unit: fortnight\n      requests_per_unit: 1\n"),
            "5:13: unknown unit \"fortnight\"; use second, minute, hour, day, week, month or year",
        );
        says(
            &limit("      unit: day\n      request_per_unit: 1\n"),
            "6:7: unknown field `request_per_unit`; did you mean `requests_per_unit`?",
        );
        says(
            &limit("      unit: day\n      requests_per_unit: -1\n"),
            "6:26: `requests_per_unit` must be a whole number from 0 to 4294967295 (got \"-1\")",
        );
        for number in ["1.5", "1e3", "0x", "09", "0b2", "4294967296", "0x+1", "five"] {
            let error = EnvoyConfig::parse(&limit(&format!(
                "      unit: day\n      requests_per_unit: {number}\n"
            )));
            let error = error.map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("must be a whole number"), "{error}");
        }
        says(
            &limit("      unit: day\n      requests_per_unit: 1\n      algorithms: gcra\n"),
            "7:7: unknown field `algorithms`; did you mean `algorithm`?",
        );
        says(
            &limit(
                "      unit: day\n      requests_per_unit: 1\n      burst: 2\n      algorithm: fixed_windw\n",
            ),
            "8:18: unknown algorithm \"fixed_windw\"; did you mean `fixed_window`?",
        );
        says(
            &limit("      unlimited: true\n      unit: day\n"),
            "6:13: `unit` cannot be combined with `unlimited: true`; remove one of them",
        );
        for value in ["", "    value: v\n"] {
            let line = 4 + value.lines().count();
            says(
                &format!("domain: d\ndescriptors:\n  - key: k\n{value}    share_threshold: true\n"),
                &format!(
                    "{line}:22: `share_threshold` needs a `value` that contains `*`; add a `*`, or remove `share_threshold`"
                ),
            );
        }
        says(
            &limit("      unlimited: true\n      algorithm: gcraa\n"),
            "6:18: unknown algorithm \"gcraa\"; did you mean `gcra`?",
        );
        says(
            &limit(
                "      unit: day\n      requests_per_unit: 1\n      name: a\n      replaces: [{name: a}]\n",
            ),
            "8:18: the limit \"a\" cannot replace itself",
        );
        says(
            &limit("      unit: year\n      requests_per_unit: 1\n      unit_multiplier: 101\n"),
            "7:24: unit_multiplier must be at most 100 with this unit (got 101): a window has at most 36500d",
        );
        says(
            &limit("      unit: day\n      requests_per_unit: 1\n      on_store_error: local\n"),
            "7:23: `on_store_error: local` divides the quota between servers; set `instances` to their number (at least 1)",
        );
        says(
            "domain: d\ndescriptors:\n  - key: k\n  - key: k\n",
            "4:5: duplicate descriptor d|k; its key and value are already on line 3; remove one of them",
        );
        let limited = "key: k, value: a*, rate_limit: {unit: day, requests_per_unit: 1}";
        says(
            &format!("domain: d\ndescriptors:\n  - {{{limited}}}\n  - key: x\n  - {{{limited}}}\n"),
            "5:5: duplicate descriptor d|k=a*; its key and value are already on line 3; remove one of them",
        );
        says(
            "domain: d\ndescriptors: 5\n",
            "2:14: `descriptors` must be a list, found a single value",
        );
        says(
            "domain: d\n---\ndomain: d\n",
            "3:9: domain \"d\" is already defined in rules.yaml:1; put all its descriptors in one place, or set \
             `merge_domains = true` in `[envoy]`",
        );
        says(
            "domain: [\n",
            "2:1: not valid YAML: while parsing a node, did not find expected node content",
        );
    }

    #[test]
    fn the_files_of_a_folder_are_read_by_name_and_hidden_files_are_not() {
        let folder = tempfile::tempdir().unwrap();
        for (name, domain) in
            [("b.yaml", "b"), ("a.yml", "a"), ("..data.yaml", "hidden"), ("c.txt", "text")]
        {
            fs::write(folder.path().join(name), format!("domain: {domain}\n")).unwrap();
        }
        let mut policies = Policies::new();
        let config =
            EnvoyConfig::read(folder.path(), EnvoySettings::default(), &mut policies).unwrap();
        assert_eq!(policies.keys().map(|name| &**name).collect::<Vec<_>>(), ["envoy:a", "envoy:b"]);
        assert!(config.domains.get("a").is_some() && config.domains.get("hidden").is_none());
        fs::write(folder.path().join("c.yaml"), "domain: a\n").unwrap();
        let mistake =
            EnvoyConfig::read(folder.path(), EnvoySettings::default(), &mut Policies::new());
        let mistake = mistake.map(|_| ()).unwrap_err().to_string();
        let first = folder.path().join("a.yml");
        let expected = format!("domain \"a\" is already defined in {}:1", first.display());
        assert!(mistake.contains("c.yaml:1:9: ") && mistake.contains(&expected), "{mistake}");
    }

    #[test]
    fn several_files_may_define_one_domain_if_the_configuration_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let rule = |value: &str| {
            format!(
                "  - {{key: k, value: {value}, rate_limit: {{unit: day, requests_per_unit: 5}}}}\n"
            )
        };
        let write = |name: &str, rules: &[&str]| {
            let rules: String = rules.iter().map(|value| rule(value)).collect();
            fs::write(folder.path().join(name), format!("domain: d\ndescriptors:\n{rules}"))
                .unwrap();
        };
        let settings = EnvoySettings { merge_domains: true, ..EnvoySettings::default() };
        let read = || {
            let mut policies = Policies::new();
            EnvoyConfig::read(folder.path(), settings, &mut policies)
                .map(|config| (config, policies))
        };
        write("a.yaml", &["a*", "x"]);
        write("b.yaml", &["ab*", "y"]);
        let (config, policies) = read().unwrap();
        assert_eq!((config.domains.len(), policies.len()), (1, 5));
        let domain = config.domains.get("d").unwrap();
        for (value, policy) in [("x", "k=x"), ("y", "k=y"), ("abc", "k=a*")] {
            let found = find(domain, &[("k", value)]).unwrap();
            assert_eq!(*found.rule.policy, *format!("envoy:d|{policy}"));
        }
        write("b.yaml", &["y", "x"]);
        let mistake = read().map(|_| ()).unwrap_err().to_string();
        let first = folder.path().join("a.yaml");
        let expected = format!(
            "b.yaml:4:5: duplicate descriptor d|k=x; its key and value are already on line 4 of {}; remove one of them",
            first.display()
        );
        assert!(mistake.contains(&expected), "{mistake}");
    }

    #[test]
    fn a_probable_mistake_that_envoyproxy_ratelimit_accepts_is_a_warning() {
        let warnings = |descriptor: &str| {
            let text = format!("domain: d\ndescriptors:\n  - {descriptor}\n");
            let (config, policies) = EnvoyConfig::parse(&text).unwrap();
            (config.warnings.join("\n"), policies)
        };
        let (missing, policies) = warnings("{key: k, rate_limit: {unit: day}}");
        assert_eq!(
            missing,
            "rules.yaml:3: `requests_per_unit` is missing, so every request is denied, as in envoyproxy/ratelimit; \
             set it, or set it to 0 to say so"
        );
        assert_eq!(policies["envoy:d|k"].tiers.base(), Access::Blocked);
        for (descriptor, expected) in [
            ("{key: k, rate_limit: {unit: day, requests_per_unit: 0}}", ""),
            ("{key: k, rate_limit: {unlimited: true}}", ""),
            (
                "{key: k, shadow_mode: true}",
                "rules.yaml:3: `shadow_mode` has no effect on a descriptor without `rate_limit`",
            ),
            (
                "{key: k, detailed_metric: true}",
                "rules.yaml:3: `detailed_metric` has no effect on a descriptor without `rate_limit`",
            ),
            ("{key: k*, share_threshold: true}", ""),
            // envoyproxy/ratelimit rejects only the units that it knows.
            (
                "{key: k, rate_limit: {unlimited: true, unit: fortnight}}",
                "rules.yaml:3: `unit` has no effect with `unlimited: true`",
            ),
            ("{key: k, rate_limit: {unlimited: true, unit: ''}}", ""),
            (
                "{key: k, shadow_mode: true, rate_limit: {unlimited: true, burst: 5}}",
                "rules.yaml:3: `burst` has no effect with `unlimited: true`\n\
                 rules.yaml:3: `shadow_mode` has no effect with `unlimited: true`",
            ),
            (
                "{key: k, rate_limit: {unit: day, requests_per_unit: 0, algorithm: gcra, on_store_error: allow}}",
                "rules.yaml:3: `algorithm` has no effect with `requests_per_unit: 0`\n\
                 rules.yaml:3: `on_store_error` has no effect with `requests_per_unit: 0`",
            ),
            (
                "{key: k, rate_limit: {unit: day, requests_per_unit: 1, shadow_mode: true}}",
                "rules.yaml:3: `shadow_mode` has no effect here, as in envoyproxy/ratelimit; it belongs to a descriptor",
            ),
            (
                "{key: k, unlimited: true}",
                "rules.yaml:3: `unlimited` has no effect here, as in envoyproxy/ratelimit; it belongs to `rate_limit`",
            ),
            (
                "{key: k, metadata: {service: {name: any}}, rate_limit: {unlimited: true}}",
                "rules.yaml:3: `metadata` has no effect: responses do not contain it",
            ),
        ] {
            assert_eq!(warnings(descriptor).0, expected, "{descriptor}");
        }
    }

    #[test]
    fn a_folder_without_files_is_a_warning_that_says_what_would_work() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("rules.txt"), "domain: d\n").unwrap();
        let read =
            || EnvoyConfig::read(folder.path(), EnvoySettings::default(), &mut Policies::new());
        let warnings = read().unwrap().warnings;
        assert!(
            warnings[0].contains("add a file whose name ends in .yaml or .yml"),
            "{warnings:?}"
        );
        fs::write(folder.path().join("rules.yaml"), "domain: d\n").unwrap();
        assert_eq!(read().unwrap().warnings, Vec::<String>::new());
    }

    #[test]
    fn detailed_metrics_show_the_values_that_the_file_asks_for() {
        let text = "
domain: d
descriptors:
  - key: plan
    value_to_metric: true
    descriptors:
      - key: ip
        rate_limit: {unit: day, requests_per_unit: 1}
      - key: path
        value: /a/*
        share_threshold: true
        value_to_metric: true
        rate_limit: {unit: day, requests_per_unit: 1}
      - key: path
        value: /b/*
        value_to_metric: true
        rate_limit: {unit: day, requests_per_unit: 1}
  - key: user
    detailed_metric: true
    rate_limit: {unit: day, requests_per_unit: 1}
  - key: plain
    rate_limit: {unit: day, requests_per_unit: 1}
";
        let (config, _) = EnvoyConfig::parse(text).unwrap();
        let domain = config.domains.get("d").unwrap();
        let metric = |entries: &[(&str, &str)]| find(domain, entries).unwrap().metric;
        assert_eq!(metric(&[("plan", "gold"), ("ip", "::1")]).unwrap(), "envoy:d|plan=gold|ip");
        assert_eq!(
            metric(&[("plan", "gold"), ("path", "/a/1")]).unwrap(),
            "envoy:d|plan=gold|path=/a/*"
        );
        assert_eq!(metric(&[("plan", "x"), ("path", "/b/1")]).unwrap(), "envoy:d|plan=x|path=/b/1");
        assert_eq!(metric(&[("user", "alice")]).unwrap(), "envoy:d|user=alice");
        assert_eq!(metric(&[("plain", "x")]), None);
    }

    /// Each rule of a level has requests whose texts look like the other rules.
    const METRICS: &str = "
domain: a|b
descriptors:
  - key: plan
    value_to_metric: true
    descriptors: &leaves
      - key: path
        rate_limit: {unit: day, requests_per_unit: 1}
      - key: path
        value: /b
        rate_limit: {unit: day, requests_per_unit: 1}
      - key: path
        value: /b/*
        rate_limit: {unit: day, requests_per_unit: 1}
      - key: path
        value: /c/*
        value_to_metric: true
        rate_limit: {unit: day, requests_per_unit: 1}
      - key: path
        value: /d/*
        share_threshold: true
        rate_limit: {unit: day, requests_per_unit: 1}
      - key: path
        value: /e/*
        detailed_metric: true
        rate_limit: {unit: day, requests_per_unit: 1}
      - key: pat*
        value: /f
        rate_limit: {unit: day, requests_per_unit: 1}
      - key: pa*
        value: /g/*
        detailed_metric: true
        rate_limit: {unit: day, requests_per_unit: 1}
      - key: p*
        share_threshold: true
        rate_limit: {unit: day, requests_per_unit: 1}
  - key: plan
    value: g*
    descriptors: *leaves
  - key: plan
    value: h*
    value_to_metric: true
    descriptors: *leaves
  - key: plan
    value: i*
    share_threshold: true
    value_to_metric: true
    descriptors: *leaves
  - key: plan
    value: gold
    value_to_metric: true
    descriptors: *leaves
  - key: pl*
    value_to_metric: true
    descriptors: *leaves
  - key: b
    detailed_metric: true
    rate_limit: {unit: day, requests_per_unit: 1}
---
domain: a|c
descriptors:
  - key: b
    detailed_metric: true
    rate_limit: {unit: day, requests_per_unit: 1}
---
domain: a
descriptors:
  - key: b|b
    detailed_metric: true
    rate_limit: {unit: day, requests_per_unit: 1}
";

    #[test]
    fn different_rules_have_different_names_in_the_metrics() {
        let (config, _) = EnvoyConfig::parse(METRICS).unwrap();
        let plans = ["", "x", "g*", "h*", "i*", "gold", "green", "hot", "p|path=/b", "g", "pl*"];
        let paths = [
            "", "/b", "/b/*", "/b/1", "/c/*", "/c/1", "/d/*", "/d/1", "/e/*", "/f", "/g/*", "/g/1",
            "/h",
        ];
        let mut rules_by_name: BTreeMap<String, BTreeSet<Arc<str>>> = BTreeMap::new();
        let mut add = |domain: &str, entries: &[(&str, &str)]| {
            let found = find(config.domains.get(domain).unwrap(), entries);
            if let Some((name, rule)) = found.and_then(|found| Some((found.metric?, found.rule))) {
                rules_by_name.entry(name).or_default().insert(rule.policy.clone());
            }
        };
        for (plan_key, path_key) in
            [("plan", "path"), ("pl*", "p*"), ("plx", "pat*"), ("plan", "pa*"), ("plan", "pb")]
        {
            for plan in plans {
                for path in paths {
                    add("a|b", &[(plan_key, plan), (path_key, path)]);
                }
            }
        }
        for domain in ["a|b", "a|c"] {
            add(domain, &[("b", "x")]);
        }
        add("a", &[("b|b", "x")]);
        assert!(rules_by_name.len() > 100, "{rules_by_name:#?}");
        for (name, rules) in rules_by_name {
            assert_eq!(rules.len(), 1, "{name}: {rules:?}");
        }
    }
}
