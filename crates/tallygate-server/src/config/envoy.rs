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

use serde::Deserialize;

use super::PolicyConfig;
use super::mistake::Mistake;
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
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EnvoySettings {
    pub(crate) charge: Charge,
    pub(crate) headers: EnvoyHeaders,
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
    #[serde(default)]
    charge: Charge,
    #[serde(default)]
    headers: EnvoyHeaders,
}

impl EnvoyTable {
    pub(super) fn settings(&self) -> EnvoySettings {
        EnvoySettings { charge: self.charge, headers: self.headers }
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
            Mistake::in_line(1, 1, format!("cannot read it: {error}"))
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
            let text = fs::read_to_string(&file).map_err(|error| cannot_read(&file, &error))?;
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
        format!("{domains} domain{plural}, {charge}, headers {headers}")
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
    use tallygate::Kind;
    use tallygate::tiers::Access;

    use super::*;

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
";

    /// The descriptor of a request, and the policy and the key of the rule that it matches.
    type Case = (&'static [(&'static str, &'static str)], Option<(&'static str, &'static str)>);

    const CASES: [Case; 24] = [
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
        (&[("file", "docs/a/latest")], Some(("envoy:web|file=docs/*/latest", "all"))),
        (&[("file", "docs/b/c/latest")], Some(("envoy:web|file=docs/*/latest", "all"))),
        (&[("file", "docs/a")], None),
        (&[("file", "img/a")], Some(("envoy:web|file=img/*", "img/a"))),
        // A number in the file is a text.
        (&[("code", "404")], Some(("envoy:web|code=404", "all"))),
        // `a_b` and `c` do not meet `a` and `b_c`.
        (&[("a", "b_c")], None),
        // A descriptor without a limit is not limited.
        (&[("allowed", "x")], None),
    ];

    #[test]
    fn descriptors_match_as_in_envoyproxy_ratelimit() {
        let (config, policies) = EnvoyConfig::parse(RULES).unwrap();
        let domain = config.domains.get("web").unwrap();
        for (entries, expected) in CASES {
            let found = domain.find(entries);
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
        says(
            &limit(
                "      unit: day\n      requests_per_unit: 1\n      name: a\n      replaces: [{name: a}]\n",
            ),
            "8:18: the limit \"a\" cannot replace itself",
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
        says("domain: d\ndescriptors: 5\n", "2:14: `descriptors` must be a list, found a value");
        says(
            "domain: d\n---\ndomain: d\n",
            "3:9: domain \"d\" is already defined in rules.yaml:1; put all its descriptors in one place",
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
    fn what_envoyproxy_ratelimit_accepts_and_is_probably_not_meant_is_a_warning() {
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
                "{key: k, value: v, share_threshold: true}",
                "rules.yaml:3: `share_threshold` has no effect without a `value` that contains `*`",
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
  - key: user
    detailed_metric: true
    rate_limit: {unit: day, requests_per_unit: 1}
  - key: plain
    rate_limit: {unit: day, requests_per_unit: 1}
";
        let (config, _) = EnvoyConfig::parse(text).unwrap();
        let domain = config.domains.get("d").unwrap();
        let metric = |entries: &[(&str, &str)]| domain.find(entries).unwrap().metric;
        assert_eq!(metric(&[("plan", "gold"), ("ip", "::1")]).unwrap(), "envoy:d|plan=gold|ip");
        assert_eq!(metric(&[("user", "alice")]).unwrap(), "envoy:d|user=alice");
        assert_eq!(metric(&[("plain", "x")]), None);
    }
}
