//! Fault H11: `deny.toml` allows all dependencies, by name, license and source.
//!
//! cargo-deny checks the same and more (`scripts/supply-chain`), but takes five minutes to build. This takes a second.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

/// The rules of `deny.toml` that are checked.
struct Rules {
    licenses: Vec<String>,
    banned: Vec<String>,
}

impl Rules {
    fn read(text: &str) -> Self {
        let file: toml::Table = text.parse().expect("deny.toml");
        let list = |of: &toml::Value| of.as_array().expect("a list").clone();
        let licenses = list(&file["licenses"]["allow"]);
        let banned = list(&file["bans"]["deny"]);
        assert_eq!(file["sources"]["unknown-registry"].as_str(), Some("deny"));
        assert_eq!(file["sources"]["unknown-git"].as_str(), Some("deny"));
        assert_eq!(file["bans"]["wildcards"].as_str(), Some("deny"));
        let text = |value: &toml::Value| value.as_str().expect("text").to_owned();
        Self {
            licenses: licenses.iter().map(text).collect(),
            banned: banned.iter().map(|ban| text(&ban["crate"])).collect(),
        }
    }

    /// Returns the problems of the packages in the output of `cargo metadata`.
    fn complaints(&self, metadata: &Value) -> Vec<String> {
        let packages = metadata["packages"].as_array().expect("packages");
        packages.iter().flat_map(|package| self.complaints_about(package)).collect()
    }

    fn complaints_about(&self, package: &Value) -> Vec<String> {
        let name = package["name"].as_str().expect("a name");
        let license = package["license"].as_str().unwrap_or_default();
        let mut found = Vec::new();
        if !self.allow(license) {
            found.push(format!("{name}: the license {license:?} is not allowed"));
        }
        if self.banned.iter().any(|banned| banned == name) {
            found.push(format!("{name} is banned"));
        }
        match package["source"].as_str() {
            Some(source) if source.starts_with("registry+") => {}
            Some(source) => found.push(format!("{name} comes from {source}")),
            // A package of this workspace.
            None => {
                let dependencies = package["dependencies"].as_array().expect("dependencies");
                let anything = dependencies
                    .iter()
                    .filter(|needed| needed["req"] == "*" && needed["path"].is_null());
                found.extend(anything.map(|needed| format!("{name} takes any {}", needed["name"])));
            }
        }
        found
    }

    /// Returns whether the allowed licenses satisfy a license expression. Older expressions have `/` for `OR`.
    fn allow(&self, expression: &str) -> bool {
        let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
        let words: Vec<_> = spaced.split_whitespace().collect();
        let mut rest = &words[..];
        self.any_of(&mut rest) && rest.is_empty()
    }

    fn any_of(&self, words: &mut &[&str]) -> bool {
        let mut allowed = self.all_of(words);
        while let ["OR", rest @ ..] = words {
            *words = rest;
            allowed |= self.all_of(words);
        }
        allowed
    }

    fn all_of(&self, words: &mut &[&str]) -> bool {
        let mut allowed = self.one(words);
        while let ["AND", rest @ ..] = words {
            *words = rest;
            allowed &= self.one(words);
        }
        allowed
    }

    fn one(&self, words: &mut &[&str]) -> bool {
        match *words {
            ["(", rest @ ..] => {
                *words = rest;
                let allowed = self.any_of(words);
                let [")", rest @ ..] = words else { return false };
                *words = rest;
                allowed
            }
            // A license with an exception is a different license.
            [license, "WITH", exception, rest @ ..] => {
                *words = rest;
                self.licenses.contains(&format!("{license} WITH {exception}"))
            }
            [license, rest @ ..] => {
                *words = rest;
                self.licenses.iter().any(|allowed| allowed == license)
            }
            [] => false,
        }
    }
}

fn top() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn rules() -> Rules {
    Rules::read(&std::fs::read_to_string(top().join("deny.toml")).expect("deny.toml"))
}

/// Fault H11.
#[test]
fn all_dependencies_are_allowed() {
    // Not `--offline`: the metadata covers all platforms, and a machine that has built for one platform lacks the crates
    // of the others. Cargo downloads them, and uses no network if it has them all.
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--locked", "--all-features", "--format-version", "1"])
        .current_dir(top())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(metadata["packages"].as_array().is_some_and(|packages| packages.len() > 100));
    let complaints = rules().complaints(&metadata);
    assert!(complaints.is_empty(), "{complaints:#?}");
}

/// Fault H11.
#[test]
fn registry_packages_are_pinned_by_checksum() {
    let lock = std::fs::read_to_string(top().join("Cargo.lock")).expect("Cargo.lock");
    let lock: toml::Table = lock.parse().expect("TOML");
    for package in lock["package"].as_array().expect("packages") {
        let checksum = package.get("checksum").and_then(toml::Value::as_str);
        assert_eq!(package.get("source").is_some(), checksum.is_some(), "{package:?}");
    }
}

/// Fault H11.
#[test]
fn forbidden_dependencies_are_reported() {
    let rules = rules();
    let package = |name: &str, license: &str, source: Value, req: &str| {
        json!({"packages": [{
            "name": name, "license": license, "source": source,
            "dependencies": [{"name": "other", "req": req, "path": null}],
        }]})
    };
    let registry = json!("registry+index");
    let reports = |metadata: Value, expected: &[&str]| {
        assert_eq!(rules.complaints(&metadata), expected);
    };
    reports(package("a", "MIT OR GPL-3.0-only", registry.clone(), "*"), &[]);
    reports(package("a", "(MIT OR Apache-2.0) AND Unicode-3.0", registry.clone(), "1"), &[]);
    reports(package("a", "Unlicense/MIT", registry.clone(), "1"), &[]);
    reports(
        package("a", "MIT AND GPL-3.0-only", registry.clone(), "1"),
        &["a: the license \"MIT AND GPL-3.0-only\" is not allowed"],
    );
    reports(package("a", "", registry.clone(), "1"), &["a: the license \"\" is not allowed"]);
    reports(package("openssl-sys", "MIT", registry, "1"), &["openssl-sys is banned"]);
    reports(package("a", "MIT", json!("git+https://a"), "1"), &["a comes from git+https://a"]);
    reports(package("a", "MIT", Value::Null, "*"), &["a takes any \"other\""]);
}
