//! The scripts that run inside Redis: the core's algorithms in Lua.
//!
//! A script is put together from the files in `scripts/`: how to read a key, the kinds of limits that a
//! policy has, and what is to be done. So there are few scripts, one for each set of kinds, and a policy's
//! numbers are arguments: no key, no number and no name is ever part of a script's text.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use redis::Cmd;
use tallygate::Policy;

use crate::key::Key;

/// Parts that several scripts begin or end with, each by the mark that stands for it. A part may hold marks that come later.
const PARTS: [(&str, &str); 5] = [
    ("--plain_bucket--", include_str!("scripts/plain_bucket.lua")),
    ("--plain_bucket_write--", include_str!("scripts/plain_bucket_write.lua")),
    ("--plain_window--", include_str!("scripts/plain_window.lua")),
    ("--plain_window_write--", include_str!("scripts/plain_window_write.lua")),
    ("--prelude--", include_str!("scripts/prelude.lua")),
];
const OPEN: &str = include_str!("scripts/open.lua");
const PRODUCT: &str = include_str!("scripts/product.lua");
const READ: &str = include_str!("scripts/read.lua");
const CHECK: &str = include_str!("scripts/check.lua");
const FORCE: &str = include_str!("scripts/force.lua");
const MANY_OPEN: &str = include_str!("scripts/many_open.lua");
const MANY: &str = include_str!("scripts/many.lua");
const CLOSE: &str = include_str!("scripts/close.lua");
const KINDS: [&str; 5] = [
    include_str!("scripts/bucket.lua"),
    include_str!("scripts/deep_bucket.lua"),
    include_str!("scripts/fixed_window.lua"),
    include_str!("scripts/sliding_window_counter.lua"),
    include_str!("scripts/sliding_window_log.lua"),
];

/// The same of one limit without options, by its kind: nearly every policy is one of these.
const ONES: [&str; 5] = [
    include_str!("scripts/one_bucket.lua"),
    "",
    include_str!("scripts/one_fixed_window.lua"),
    include_str!("scripts/one_sliding_window_counter.lua"),
    "",
];

/// Decides on keys that were left under other policies, and how a check and a request for many keys call it.
const SEVERAL_POLICIES: &str = include_str!("scripts/several_policies.lua");
const SEVERAL_IN_CHECK: &str = include_str!("scripts/several_in_check.lua");
const SEVERAL_IN_MANY: &str = include_str!("scripts/several_in_many.lua");

/// Reads some keys, or writes them if they are still what they were.
pub(crate) static COMPARE_AND_SET: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/compare_and_set.lua")));

/// Takes, prolongs or gives back places of requests in flight.
pub(crate) static PLACES: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/places.lua")));

/// Takes a slice of a bucket or of a fixed window without options, or gives back what is left of one of a bucket.
static LEASE_BUCKET: LazyLock<Arc<Script>> =
    LazyLock::new(|| with_what_is_out(include_str!("scripts/lease_bucket.lua")));
static LEASE_FIXED_WINDOW: LazyLock<Arc<Script>> =
    LazyLock::new(|| Arc::new(Script::plain(include_str!("scripts/lease_fixed_window.lua"))));
pub(crate) static RETURN_BUCKET: LazyLock<Arc<Script>> =
    LazyLock::new(|| with_what_is_out(include_str!("scripts/return_bucket.lua")));

/// Charges a bucket without options for what a process allowed while the server was away.
pub(crate) static CHARGE_BUCKET: LazyLock<Script> =
    LazyLock::new(|| Script::plain(include_str!("scripts/charge_bucket.lua")));

fn with_what_is_out(text: &str) -> Arc<Script> {
    Arc::new(Script::plain(&text.replace("--out--", include_str!("scripts/out.lua"))))
}

/// Puts the common parts in the place of their marks.
fn with_parts(text: &str) -> String {
    let put = |text: String, (mark, part): &(&str, &str)| text.replace(mark, part.trim_end());
    PARTS.iter().fold(text.into(), put)
}

/// A script, and the name that a server knows it by once it has seen it.
#[derive(Debug)]
pub(crate) struct Script {
    text: String,
    hash: String,
    /// The beginning of the hash.
    pub(crate) id: u64,
}

impl Script {
    fn new(text: &str) -> Self {
        let hash: String = redis::Script::new(text).get_hash().into();
        let id = hash.get(..16).and_then(|digits| u64::from_str_radix(digits, 16).ok());
        Self { text: text.into(), id: id.unwrap_or_default(), hash }
    }

    /// A script for one limit without options that leaves values of other policies to the client.
    fn plain(text: &str) -> Self {
        Self::new(&with_parts(text).replace("--several--", ""))
    }

    /// A call of it, by its name or by its text.
    pub(crate) fn call(&self, keys: &[&Key], arguments: &[&[u8]], by: By) -> Cmd {
        let (name, script) = match by {
            By::Name => ("EVALSHA", &self.hash),
            By::Text => ("EVAL", &self.text),
        };
        let keys_bytes: usize = keys.iter().map(|key| key.name.len()).sum();
        let bytes: usize = arguments.iter().map(|argument| argument.len()).sum();
        // Room for all of it at once: a command that grows is copied several times.
        let mut command = Cmd::with_capacity(
            3 + keys.len() + arguments.len(),
            name.len() + script.len() + 8 + keys_bytes + bytes,
        );
        command.arg(name).arg(script).arg(keys.len());
        for key in keys {
            command.arg(&key.name);
        }
        command.arg(arguments);
        command
    }
}

/// How a server is told which script to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    Name,
    Text,
}

/// What the scripts of a policy are, and what they are given.
#[derive(Debug)]
pub(crate) struct Scripted {
    /// Asks, and charges if all limits admit.
    pub(crate) check: Arc<Script>,
    /// Charges without asking, or gives back; where the kinds can do that in Lua.
    pub(crate) force: Option<Arc<Script>>,
    /// Asks for several costs, one after the other.
    pub(crate) many: Arc<Script>,
    kinds: u8,
    has_penalty: bool,
    /// Takes a slice of it, if that can be leased.
    pub(crate) lease: Option<Arc<Script>>,
    /// The constants of all limits, in doubles.
    constants: Vec<u8>,
}

/// Which files a script is made of.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Recipe {
    /// A bit for each kind.
    kinds: u8,
    has_penalty: bool,
    task: Task,
    /// Whether it is for one limit without options.
    is_plain: bool,
}

/// What a script does.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Task {
    Check,
    Force,
    Many,
}

impl Scripted {
    /// The scripts of a policy; `None` if its numbers are not exact in doubles.
    pub(crate) fn new(policy: &Policy) -> Option<Self> {
        let limits = policy.script()?.limits;
        let kinds = limits.iter().fold(0, |kinds, limit| kinds | 1 << (limit[0] - 1));
        let has_penalty = policy.limits().iter().any(|limit| limit.penalty().is_some());
        let is_plain = policy.plain().is_some();
        let recipe = |task| Recipe { kinds, has_penalty, task, is_plain };
        let forces = kinds & (DEEP_BUCKET | LOG) == 0;
        let lease = match kinds {
            BUCKET if is_plain => Some(LEASE_BUCKET.clone()),
            FIXED_WINDOW if is_plain => Some(LEASE_FIXED_WINDOW.clone()),
            _ => None,
        };
        Some(Self {
            lease,
            check: made(recipe(Task::Check)),
            force: forces.then(|| made(recipe(Task::Force))),
            many: many(kinds, has_penalty),
            kinds,
            has_penalty,
            constants: limits.iter().flatten().flat_map(|n| double(i128::from(*n))).collect(),
        })
    }

    /// Whether it is one bucket without options, whose numbers are exact.
    pub(crate) fn is_plain_bucket(&self) -> bool {
        self.lease.is_some() && self.kinds == BUCKET
    }

    /// The constants of its limits, in doubles.
    pub(crate) fn constants(&self) -> &[u8] {
        &self.constants
    }

    /// The numbers that a script is given to charge past the policy's bound on debt.
    pub(crate) fn numbers_past_debt(&self, amount: i64) -> Vec<u8> {
        let mut numbers = self.numbers(amount);
        for constants in numbers[8..].chunks_exact_mut(80) {
            let read = |place: usize| {
                constants[place * 8..][..8].try_into().ok().and_then(whole).unwrap_or_default()
            };
            // Of buckets the level counts in units, and stays exact.
            let unit = if read(0) == 1 { read(5).max(1) } else { 1 };
            let bound = read(4).saturating_mul(DEEPER).min((1_i128 << 52) / unit).max(read(4));
            constants[4 * 8..][..8].copy_from_slice(&double(bound));
        }
        numbers
    }

    /// The script that asks for several keys of these policies at once.
    pub(crate) fn of_all(all: &[&Self]) -> Arc<Script> {
        let (kinds, has_penalty) = all.iter().fold((0, false), |(kinds, has_penalty), one| {
            (kinds | one.kinds, has_penalty | one.has_penalty)
        });
        many(kinds, has_penalty)
    }

    /// The numbers that a script is given: an amount, and the constants.
    pub(crate) fn numbers(&self, amount: i64) -> Vec<u8> {
        let mut numbers = Vec::with_capacity(8 + self.constants.len());
        numbers.extend(double(i128::from(amount)));
        numbers.extend(&self.constants);
        numbers
    }
}

/// How many times the policy's bound on debt a client may owe after an outage.
const DEEPER: i128 = 4;

fn many(kinds: u8, has_penalty: bool) -> Arc<Script> {
    made(Recipe { kinds, has_penalty, task: Task::Many, is_plain: false })
}

const BUCKET: u8 = 1;
/// The kinds that are charged without asking by compare-and-set: one would have to divide numbers of two
/// doubles, the other to take a list apart.
const DEEP_BUCKET: u8 = 1 << 1;
const LOG: u8 = 1 << 4;
const FIXED_WINDOW: u8 = 1 << 2;
const COUNTER: u8 = 1 << 3;
/// The kinds whose states a script takes over from one policy to another.
const CHANGEABLE: u8 = BUCKET | FIXED_WINDOW | COUNTER;

/// A whole number as Lua's `struct` packs it. It is one that a double holds exactly.
pub(crate) fn double(number: i128) -> [u8; 8] {
    #[expect(
        clippy::cast_precision_loss,
        reason = "at most 2⁵² in magnitude, or it is not scripted"
    )]
    let double = number as f64;
    double.to_be_bytes()
}

/// The number that a double is; `None` if it is no whole one that is exact.
pub(crate) fn whole(bytes: [u8; 8]) -> Option<i128> {
    let double = f64::from_be_bytes(bytes);
    if double.abs() > 9_007_199_254_740_992.0 || double.fract() != 0.0 {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, reason = "whole, and within the range")]
    Some(double as i128)
}

/// The script of a recipe, made once.
fn made(recipe: Recipe) -> Arc<Script> {
    static MADE: LazyLock<Mutex<HashMap<Recipe, Arc<Script>>>> = LazyLock::new(Mutex::default);
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    made.entry(recipe).or_insert_with(|| Arc::new(Script::new(&text(recipe)))).clone()
}

fn text(recipe: Recipe) -> String {
    let kinds = (0..KINDS.len()).filter(|kind| recipe.kinds & 1 << kind != 0);
    let product = if recipe.kinds & (DEEP_BUCKET | COUNTER) != 0 { PRODUCT } else { "" };
    let one = kinds.clone().map(|kind| ONES[kind]).next().unwrap_or_default();
    if recipe.is_plain && recipe.task == Task::Check && !one.is_empty() {
        // Only where two products seem equal: seldom, and what is not made costs nothing.
        let one = with_parts(one);
        return one.replace("--product--", product).replace("--several--", &several(recipe));
    }
    let (open, rest) = match recipe.task {
        Task::Check => (OPEN, [READ, CHECK, CLOSE]),
        Task::Force => (OPEN, [READ, FORCE, CLOSE]),
        Task::Many => (MANY_OPEN, [MANY, "", ""]),
    };
    let several = several(recipe);
    let open = with_parts(open);
    let mut text = format!("{}{product}", open.replace("--several--", &several));
    kinds.for_each(|kind| text += KINDS[kind]);
    text.extend(rest.map(|part| part.replace("--several--", &several)));
    if recipe.has_penalty {
        // What concerns penalties is commented out in the files: most policies have none.
        text = text.replace("--[[penalty", "").replace("penalty]]", "");
    }
    text
}

/// The part of a script that decides on values which were left under other policies; empty where no script does.
fn several(recipe: Recipe) -> String {
    let call = match recipe.task {
        Task::Check => SEVERAL_IN_CHECK,
        Task::Many => SEVERAL_IN_MANY,
        Task::Force => return String::new(),
    };
    if recipe.kinds & !CHANGEABLE != 0 || recipe.has_penalty {
        return String::new();
    }
    let mut kinds = String::from(PRODUCT);
    for (kind, text) in KINDS.iter().enumerate() {
        if CHANGEABLE & 1 << kind != 0 {
            kinds += text;
        }
    }
    let text = call.replace("--several--", &SEVERAL_POLICIES.replace("--kinds--", &kinds));
    // It is long, and part of many scripts: without comments and indentation.
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with("--"));
    lines.flat_map(|line| [line, "\n"]).collect()
}
