//! All names in the registry of mistakes and in `docs/faults.md` exist.

#![allow(clippy::panic, reason = "a test, also where it is no #[test]")]

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use tallygate_testkit::mistakes::{self, TestName};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|why| panic!("{}: {why}", path.display()))
}

/// Returns the text of all Rust files in a folder.
fn rust_in(folder: &Path) -> String {
    let mut text = String::new();
    let Ok(listed) = fs::read_dir(folder) else { return text };
    for path in listed.map(|entry| entry.expect("readable").path()) {
        if path.is_dir() {
            text += &rust_in(&path);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            text += &read(&path);
        }
    }
    text
}

/// Every mistake can be made: each text is found exactly once.
#[test]
fn every_mistake_can_be_made() {
    let mut wrong = Vec::new();
    for mistake in mistakes::read_all(&root()).expect("the registry can be read") {
        assert!(!mistake.tests.is_empty() && !mistake.edits.is_empty(), "{}", mistake.name);
        for edit in &mistake.edits {
            let times = read(&root().join(&edit.file)).matches(&edit.find).count();
            if times != 1 {
                let file = edit.file.display();
                wrong.push(format!("{}: {times} times in {file}:\n{}", mistake.name, edit.find));
            }
            assert_ne!(edit.find, edit.replace, "{}", mistake.name);
        }
    }
    assert!(wrong.is_empty(), "{} texts:\n{}", wrong.len(), wrong.join("\n"));
}

/// Every test that a mistake names exists.
#[test]
fn every_test_of_a_mistake_exists() {
    let mut wrong = Vec::new();
    let shared = rust_in(&root().join("crates/tallygate-testkit/src"));
    for mistake in mistakes::read_all(&root()).expect("the registry can be read") {
        for test @ TestName { package, target, name } in &mistake.tests {
            let package = root().join("crates").join(package);
            let text = match target.as_str() {
                "lib" | "bin" | "loom" => rust_in(&package.join("src")),
                target => {
                    let folder = package.join("tests");
                    let file = fs::read_to_string(folder.join(format!("{target}.rs")));
                    let of_target = file.unwrap_or_default() + &rust_in(&folder.join(target));
                    // A macro defines some tests from functions that several packages share.
                    if of_target.is_empty() { of_target } else { of_target + &shared }
                }
            };
            let function = name.rsplit("::").next().unwrap_or(name);
            if !text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == function)
            {
                wrong.push(format!("{}: {test}", mistake.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{} tests:\n{}", wrong.len(), wrong.join("\n"));
}

/// Every test and mistake that `docs/faults.md` names exists.
#[test]
fn every_name_in_the_table_of_faults_exists() {
    let all = mistakes::read_all(&root()).expect("the registry can be read");
    let mistakes: HashSet<&str> = all.iter().map(|mistake| mistake.name.as_str()).collect();
    let tests = rust_in(&root().join("crates"));
    let mut wrong = Vec::new();
    let document = read(&root().join("docs/faults.md"));
    for line in document.lines().filter(|line| line.starts_with("| ")) {
        let columns: Vec<&str> = line.split(" | ").collect();
        let [id, _, _, proved, broken] = columns[..] else { continue };
        let quoted = |column: &str| -> Vec<String> {
            column.split('`').skip(1).step_by(2).map(str::to_owned).collect()
        };
        for name in quoted(proved) {
            let function = name.rsplit("::").next().unwrap_or(&name).to_owned();
            let is_name = |name: &str| name.contains('_') && !name.contains(['/', '.', ' ']);
            let is_there =
                ["(", "<"].iter().any(|next| tests.contains(&format!("fn {function}{next}")));
            if is_name(&function) && !is_there {
                wrong.push(format!("{id}: no test {name}"));
            }
            if name.contains('/') && name.contains('.') && !root().join(&name).exists() {
                wrong.push(format!("{id}: no file {name}"));
            }
        }
        for name in quoted(broken) {
            let is_name = name.contains('-') && !name.contains([' ', '/', '.', '_']);
            if is_name && !mistakes.contains(name.as_str()) {
                wrong.push(format!("{id}: no mistake {name}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} names:\n{}", wrong.len(), wrong.join("\n"));
}
