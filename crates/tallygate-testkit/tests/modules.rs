//! Crates and modules use each other only in the order that `ARCHITECTURE.md` lists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const SECTION: &str = "## The order of modules";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|why| unreachable!("{}: {why}", path.display()))
}

/// A crate with its layers. A layer has groups of modules: the modules of one group may use each other.
struct Crate {
    name: String,
    layers: Vec<Vec<BTreeSet<String>>>,
}

/// Reads the list in `ARCHITECTURE.md`: a crate per line, its layers indented below it.
fn order() -> Vec<Crate> {
    let document = read(&root().join("ARCHITECTURE.md"));
    let section = document.split_once(SECTION).expect("the section").1;
    let block = section.split("```").nth(1).expect("a block in the section");
    let mut crates: Vec<Crate> = Vec::new();
    for line in block.lines().skip(1).filter(|line| !line.trim().is_empty()) {
        if !line.starts_with(' ') {
            crates.push(Crate { name: line.trim().to_owned(), layers: Vec::new() });
            continue;
        }
        let layer = line.split(',').map(|group| {
            group.split('+').map(|module| module.trim().to_owned()).collect::<BTreeSet<_>>()
        });
        crates.last_mut().expect("a crate before its layers").layers.push(layer.collect());
    }
    crates
}

/// The modules of a crate, and the names that its root re-exports from each.
struct Root {
    modules: BTreeSet<String>,
    re_exports: BTreeMap<String, String>,
}

impl Root {
    fn of(source: &Path) -> Self {
        let text = fs::read_to_string(source.join("lib.rs"));
        let text = text.unwrap_or_else(|_| read(&source.join("main.rs")));
        let text = without_comments(&text);
        let words = |line: &str| line.trim().strip_suffix(';').map(str::to_owned);
        let modules: BTreeSet<String> = text
            .lines()
            .filter_map(words)
            .filter_map(|line| Some(line.rsplit_once("mod ")?.1.to_owned()))
            .collect();
        let mut re_exports = BTreeMap::new();
        for path in used(&text, "") {
            if let [module, .., name] = &path[..]
                && modules.contains(module)
            {
                re_exports.insert(name.clone(), module.clone());
            }
        }
        Self { modules, re_exports }
    }

    /// Returns the module of a path from the root, if it is a module of this crate.
    fn module(&self, path: &[String]) -> Option<&str> {
        let first = path.first()?;
        self.modules.get(first).or_else(|| self.re_exports.get(first)).map(String::as_str)
    }
}

fn without_comments(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or_default().to_owned() + "\n").collect()
}

/// Returns the paths of all `use` declarations that start with a prefix, without the prefix.
fn used(text: &str, prefix: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    for (place, _) in text.match_indices("use ") {
        let is_word = text[..place].chars().next_back().is_none_or(char::is_whitespace);
        let declaration = text[place + 4..].split(';').next().unwrap_or_default();
        if let Some(tree) = declaration.strip_prefix(prefix)
            && is_word
        {
            expand(tree, &[], &mut paths);
        }
    }
    paths
}

/// Expands `a::{b, c::d}` to its paths. New names after `as` are ignored.
fn expand(tree: &str, before: &[String], paths: &mut Vec<Vec<String>>) {
    let segments = |text: &str| -> Vec<String> {
        let text = text.split(" as ").next().unwrap_or_default();
        let named = text.split("::").map(str::trim).filter(|segment| !segment.is_empty());
        before.iter().cloned().chain(named.map(str::to_owned)).collect()
    };
    let Some((head, list)) = tree.split_once('{') else {
        paths.push(segments(tree));
        return;
    };
    let (head, list) = (segments(head), list.rsplit_once('}').map_or(list, |(list, _)| list));
    let (mut depth, mut start) = (0, 0);
    for (place, character) in list.char_indices().chain([(list.len(), ',')]) {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !list[start..place].trim().is_empty() {
                    expand(&list[start..place], &head, paths);
                }
                start = place + 1;
            }
            _ => {}
        }
    }
}

/// Returns the modules that a file uses. Its tests may use any module.
fn uses(text: &str, is_top: bool, root: &Root) -> BTreeSet<String> {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let code = without_comments(code);
    let mut paths = used(&code, "crate::");
    if is_top {
        paths.extend(used(&code, "super::"));
    }
    for (place, _) in code.match_indices("crate::") {
        let rest = &code[place + "crate::".len()..];
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        paths.push(vec![rest[..end].to_owned()]);
    }
    paths.iter().filter_map(|path| root.module(path)).map(str::to_owned).collect()
}

/// Returns the files of a folder that are part of the crate, without files for tests and fuzzing.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for path in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file").path()) {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|kind| kind == "rs")
            && !["lib", "main", "fuzzing"].contains(&&*name)
            && !name.ends_with("tests")
        {
            found.push(path);
        }
    }
    found
}

#[test]
fn every_crate_and_module_has_its_place() {
    let listed: BTreeSet<String> = order().into_iter().map(|listed| listed.name).collect();
    let folders = fs::read_dir(root().join("crates")).expect("a folder");
    let there: BTreeSet<String> = folders
        .map(|entry| entry.expect("a folder").file_name().to_string_lossy().into_owned())
        .collect();
    assert_eq!(listed, there);
    for Crate { name, layers } in order() {
        let mut modules = Root::of(&root().join("crates").join(&name).join("src")).modules;
        modules.remove("fuzzing");
        let mut listed = BTreeSet::new();
        for module in layers.into_iter().flatten().flatten() {
            assert!(listed.insert(module.clone()), "{name}: {module} is listed twice");
        }
        assert_eq!(listed, modules, "{name}: the list in ARCHITECTURE.md and the modules");
    }
}

#[test]
fn no_module_uses_one_below_it_in_the_list() {
    let mut wrong = Vec::new();
    for Crate { name, layers } in order() {
        let source = root().join("crates").join(&name).join("src");
        let root = Root::of(&source);
        let layer = |module: &str| {
            layers.iter().position(|groups| groups.iter().any(|group| group.contains(module)))
        };
        let are_joined = |one: &str, other: &str| {
            layers.iter().flatten().any(|group| group.contains(one) && group.contains(other))
        };
        for path in files(&source) {
            let inner = path.strip_prefix(&source).expect("below the source").with_extension("");
            let first = inner.iter().next().expect("a name").to_string_lossy().into_owned();
            // A file of the same module.
            let module = if first == "no_traces" { "traces" } else { &*first };
            let is_top = inner.iter().count() == 1;
            for other in uses(&read(&path), is_top, &root) {
                if other != module && !are_joined(module, &other) && layer(&other) >= layer(module)
                {
                    wrong.push(format!("{name}: {} uses {other}", inner.display()));
                }
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "these modules use modules that are not above them in the list:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn no_crate_depends_on_one_below_it_in_the_list() {
    let order: Vec<String> = order().into_iter().map(|listed| listed.name).collect();
    for (place, name) in order.iter().enumerate() {
        let manifest = read(&root().join("crates").join(name).join("Cargo.toml"));
        let manifest: toml::Table = toml::from_str(&manifest).expect("a manifest");
        let Some(toml::Value::Table(dependencies)) = manifest.get("dependencies") else { continue };
        for other in dependencies.keys().filter(|other| other.starts_with("tallygate")) {
            assert!(order[..place].contains(other), "{name} depends on {other}");
        }
    }
}

#[test]
fn declarations_are_read_as_the_compiler_reads_them() {
    let text =
        "use crate::{a, b::{C as D, e::F}};\npub(crate) use crate::g::H;\n// use crate::i;\n";
    let paths = used(&without_comments(text), "crate::");
    let paths: Vec<String> = paths.iter().map(|path| path.join("::")).collect();
    assert_eq!(paths, ["a", "b::C", "b::e::F", "g::H"]);
}
