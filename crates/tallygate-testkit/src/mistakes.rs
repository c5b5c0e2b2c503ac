//! The registry of seeded mistakes: each breaks the code in one way that a test must notice.
//!
//! They are in `mistakes/*.toml`, by area. A test checks that every text occurs exactly once, so that the registry stays
//! up to date when the code changes. `scripts/prove` makes each mistake in a copy of the tree and expects its tests to
//! fail.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// One way to break the code.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mistake {
    /// The name in `scripts/prove` and `docs/faults.md`.
    pub name: String,
    /// What goes wrong with this mistake.
    pub why: String,
    /// The tests that must fail.
    pub tests: Vec<TestName>,
    /// The changes to the code.
    #[serde(rename = "edit")]
    pub edits: Vec<Edit>,
}

/// A text in a file, and its replacement.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Edit {
    /// The file, from the root of the repository.
    pub file: PathBuf,
    /// The text, which must occur exactly once.
    pub find: String,
    /// The replacement.
    pub replace: String,
}

/// A test, as `package target name`. The target is the name of a test binary, `lib`, `bin`, or `loom` for a model of the
/// library.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct TestName {
    /// The package of the test.
    pub package: String,
    /// The target of the package.
    pub target: String,
    /// The path of the test within the target.
    pub name: String,
}

impl TryFrom<String> for TestName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.split(' ').collect::<Vec<_>>()[..] {
            [package, target, name] => Ok(Self {
                package: package.to_owned(),
                target: target.to_owned(),
                name: name.to_owned(),
            }),
            _ => Err(format!("a test is given as \"package target name\" (got {text:?})")),
        }
    }
}

impl fmt::Display for TestName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.package, self.target, self.name)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Area {
    mistake: Vec<Mistake>,
}

/// Reads all mistakes of a repository, sorted by name.
///
/// # Errors
/// Returns an error if a file cannot be read or parsed, or if two mistakes have the same name.
pub fn read_all(root: &Path) -> Result<Vec<Mistake>, String> {
    let folder = root.join("mistakes");
    let listed = fs::read_dir(&folder).map_err(|why| format!("{}: {why}", folder.display()))?;
    let mut all: Vec<Mistake> = Vec::new();
    for entry in listed {
        let path = entry.map_err(|why| format!("{}: {why}", folder.display()))?.path();
        let read = fs::read_to_string(&path).map_err(|why| format!("{}: {why}", path.display()))?;
        let area: Area =
            toml::from_str(&read).map_err(|why| format!("{}: {why}", path.display()))?;
        all.extend(area.mistake);
    }
    all.sort_by(|one, other| one.name.cmp(&other.name));
    let mut names = HashSet::new();
    match all.iter().find(|mistake| !names.insert(mistake.name.as_str())) {
        Some(twice) => Err(format!("two mistakes have the name {}", twice.name)),
        None => Ok(all),
    }
}

impl Mistake {
    /// Makes the mistake in a tree. Returns the original files, for [`undo`].
    ///
    /// # Errors
    /// Returns an error if a text does not occur exactly once, or if a file cannot be read or written. If a text is not
    /// found, no file changes.
    pub fn make(&self, root: &Path) -> Result<Vec<(PathBuf, String)>, String> {
        let mut before: Vec<(PathBuf, String)> = Vec::new();
        let mut after: Vec<(PathBuf, String)> = Vec::new();
        for edit in &self.edits {
            let path = root.join(&edit.file);
            let index = match after.iter().position(|(other, _)| *other == path) {
                Some(index) => index,
                None => {
                    let text = fs::read_to_string(&path)
                        .map_err(|why| format!("{}: {why}", edit.file.display()))?;
                    before.push((path.clone(), text.clone()));
                    after.push((path, text));
                    after.len() - 1
                }
            };
            let text = &mut after[index].1;
            match text.matches(&edit.find).count() {
                1 => *text = text.replacen(&edit.find, &edit.replace, 1),
                times => {
                    let file = edit.file.display();
                    return Err(format!("{file} has this text {times} times:\n{}", edit.find));
                }
            }
        }
        undo(&after)?;
        Ok(before)
    }
}

/// Restores the files that [`Mistake::make`] returned.
///
/// # Errors
/// Returns an error if a file cannot be written.
pub fn undo(files: &[(PathBuf, String)]) -> Result<(), String> {
    files.iter().try_for_each(|(path, text)| {
        fs::write(path, text).map_err(|why| format!("{}: {why}", path.display()))
    })
}
