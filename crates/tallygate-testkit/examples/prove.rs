//! Makes seeded mistakes in a copy of the tree, one at a time, and expects the tests of each mistake to fail.
//!
//! `scripts/prove` calls it. With arguments, it makes only the mistakes whose name contains one of them.

#![allow(clippy::print_stdout, reason = "a program that reports what it found")]

use std::error::Error;
use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tallygate_testkit::mistakes::{self, Mistake, TestName};

/// The longest time that a test may take. A test that hangs counts as failed.
const LONGEST: Duration = Duration::from_secs(60);

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
    let copy = Copy::of(&top)?;
    let is_chosen = |mistake: &Mistake| {
        words.is_empty() || words.iter().any(|word| mistake.name.contains(word.as_str()))
    };
    let (mut noticed, mut missed) = (0, 0);
    for mistake in mistakes::read_all(&copy.folder)?.into_iter().filter(is_chosen) {
        match copy.try_out(&mistake)? {
            None => {
                noticed += 1;
                println!("failed as it must  {}", mistake.name);
            }
            Some(problem) => {
                missed += 1;
                println!("NOT NOTICED        {:<40} {problem}", mistake.name);
            }
        }
    }
    println!("{noticed} mistakes noticed by every test that they name, {missed} not");
    Ok(if missed == 0 && noticed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A copy of the tree, which is removed on drop.
struct Copy {
    top: PathBuf,
    folder: PathBuf,
}

impl Copy {
    fn of(top: &Path) -> Result<Self, Box<dyn Error>> {
        let folder = std::env::temp_dir().join(format!("tallygate-prove-{}", std::process::id()));
        let copy = Self { top: top.to_owned(), folder };
        let mut list = Command::new("git");
        list.current_dir(top).args(["ls-files", "--cached", "--others", "--exclude-standard"]);
        for file in String::from_utf8(list.output()?.stdout)?.lines() {
            let (from, to) = (top.join(file), copy.folder.join(file));
            if from.is_file() {
                fs::create_dir_all(to.parent().ok_or("no folder")?)?;
                fs::copy(from, to)?;
            }
        }
        Ok(copy)
    }

    /// Makes a mistake, runs its tests, and undoes it. Returns the problem if not all tests failed.
    fn try_out(&self, mistake: &Mistake) -> Result<Option<String>, Box<dyn Error>> {
        let before = match mistake.make(&self.folder) {
            Ok(before) => before,
            Err(why) => return Ok(Some(why)),
        };
        let problems = mistake.tests.iter().map(|test| self.problem_of(test));
        let problem = problems.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().next();
        mistakes::undo(&before)?;
        Ok(problem)
    }

    /// Returns `None` if a test fails.
    fn problem_of(&self, test: &TestName) -> Result<Option<String>, Box<dyn Error>> {
        if !self.run(test, &["--no-run"], None)? {
            let log = fs::read_to_string(self.log())?;
            let error = log.lines().find(|line| line.starts_with("error")).unwrap_or("no message");
            return Ok(Some(format!("does not compile: {error}")));
        }
        let passed = self.run(test, &["--", "--exact", &test.name], Some(LONGEST))?;
        let log = fs::read_to_string(self.log())?;
        Ok(match passed {
            true if log.contains("running 0 tests") => Some(format!("there is no test {test}")),
            true => Some(format!("{test} passes")),
            false => None,
        })
    }

    /// Runs a test. Returns whether it passed.
    fn run(
        &self,
        test: &TestName,
        arguments: &[&str],
        longest: Option<Duration>,
    ) -> Result<bool, Box<dyn Error>> {
        let log = File::create(self.log())?;
        let mut command = Command::new(env!("CARGO"));
        let target = self.top.join("target");
        command
            .current_dir(&self.folder)
            .args(["test", "-q", "--locked", "-p", &test.package])
            .env("CARGO_TARGET_DIR", target.join("prove"))
            .env("TALLYGATE_VALKEY_SERVER", target.join("test-servers/valkey-server"))
            .env("TALLYGATE_TEST_CLIENTS", target.join("test-clients"))
            // A broken property fails within its first cases. Shrinking them is not needed here.
            .env("PROPTEST_MAX_SHRINK_ITERS", "0")
            .process_group(0)
            .stdout(Stdio::from(log.try_clone()?))
            .stderr(Stdio::from(log));
        match test.target.as_str() {
            "lib" => command.args(["--lib", "--all-features"]),
            "bin" => command.args(["--bins", "--all-features"]),
            "loom" => command
                .args(["--lib", "--release"])
                .env("RUSTFLAGS", "--cfg loom")
                .env("CARGO_TARGET_DIR", target.join("loom")),
            target => command.args(["--all-features", "--test", target]),
        };
        let mut child = command.args(arguments).spawn()?;
        let end = longest.map(|longest| Instant::now() + longest);
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(status.success());
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                // The test itself is a child of cargo.
                rustix::process::kill_process_group(Pid::from_child(&child), Signal::KILL)?;
                child.wait()?;
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn log(&self) -> PathBuf {
        self.folder.join("prove.log")
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.folder));
    }
}
