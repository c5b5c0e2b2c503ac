//! The scripts that run inside Redis: a port of the core's algorithms to Lua.
//!
//! A script is assembled from the files in `scripts/`: how to read a key, the kinds of limits of a policy, and the
//! task. So there are few scripts, one for each set of kinds, and the numbers of a policy are arguments: no key, number
//! or name is ever part of a script's text.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use redis::Cmd;
use tallygate::{Limit, Policy};

use crate::key::Key;

/// Parts that several scripts share, each with the mark that it replaces. A part may contain marks of later parts.
const PARTS: [(&str, &str); 5] = [
    ("--plain_bucket--", include_str!("scripts/plain_bucket.lua")),
    ("--plain_bucket_write--", include_str!("scripts/plain_bucket_write.lua")),
    ("--plain_window--", include_str!("scripts/plain_window.lua")),
    ("--plain_window_write--", include_str!("scripts/plain_window_write.lua")),
    ("--prelude--", include_str!("scripts/prelude.lua")),
];
const OPEN: &str = include_str!("scripts/open.lua");
/// What shadow limits need besides.
const SHADOW: &str = include_str!("scripts/shadow.lua");
const PRODUCT: &str = include_str!("scripts/product.lua");
const READ: &str = include_str!("scripts/read.lua");
const CHECK: &str = include_str!("scripts/check.lua");
const FORCE: &str = include_str!("scripts/force.lua");
const LOWER: &str = include_str!("scripts/lower.lua");
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

/// The scripts for one limit without options, by its kind: nearly all policies.
const ONES: [&str; 5] = [
    include_str!("scripts/one_bucket.lua"),
    "",
    include_str!("scripts/one_fixed_window.lua"),
    include_str!("scripts/one_sliding_window_counter.lua"),
    "",
];

/// Decides on keys that were written under other policies, and the two ways to call it.
const SEVERAL_POLICIES: &str = include_str!("scripts/several_policies.lua");
const SEVERAL_IN_CHECK: &str = include_str!("scripts/several_in_check.lua");
const SEVERAL_IN_MANY: &str = include_str!("scripts/several_in_many.lua");

/// Reads some keys, or writes them if their values have not changed.
pub(crate) static COMPARE_AND_SET: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/compare_and_set.lua")));

/// Takes, renews or returns places of requests in flight.
pub(crate) static PLACES: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/places.lua")));

/// Takes a slice of a bucket or a fixed window without options, or returns the rest of a slice of a bucket.
static LEASE_BUCKET: LazyLock<Arc<Script>> =
    LazyLock::new(|| with_outstanding_leases(include_str!("scripts/lease_bucket.lua")));
static LEASE_FIXED_WINDOW: LazyLock<Arc<Script>> =
    LazyLock::new(|| Arc::new(Script::plain(include_str!("scripts/lease_fixed_window.lua"))));
pub(crate) static RETURN_BUCKET: LazyLock<Arc<Script>> =
    LazyLock::new(|| with_outstanding_leases(include_str!("scripts/return_bucket.lua")));

/// Charges a bucket without options for the units that a process allowed during an outage.
pub(crate) static CHARGE_BUCKET: LazyLock<Script> =
    LazyLock::new(|| Script::plain(include_str!("scripts/charge_bucket.lua")));

fn with_outstanding_leases(text: &str) -> Arc<Script> {
    Arc::new(Script::plain(&text.replace("--out--", include_str!("scripts/out.lua"))))
}

/// Replaces the marks by the shared parts.
fn with_parts(text: &str) -> String {
    let put = |text: String, (mark, part): &(&str, &str)| text.replace(mark, part.trim_end());
    PARTS.iter().fold(text.into(), put)
}

/// A script, and the hash that a server knows it by.
#[derive(Debug)]
pub(crate) struct Script {
    text: String,
    hash: String,
    /// The first 64 bits of the hash.
    pub(crate) id: u64,
}

impl Script {
    fn new(text: &str) -> Self {
        let hash: String = redis::Script::new(text).get_hash().into();
        let id = hash.get(..16).and_then(|digits| u64::from_str_radix(digits, 16).ok());
        Self { text: text.into(), id: id.unwrap_or_default(), hash }
    }

    /// Makes a script for one limit without options. It leaves values of other policies to the client.
    fn plain(text: &str) -> Self {
        Self::new(&with_parts(text).replace("--several--", ""))
    }

    /// Returns a call of the script, by its hash or its text.
    pub(crate) fn call(&self, keys: &[&Key], arguments: &[&[u8]], form: ScriptForm) -> Cmd {
        let (name, script) = match form {
            ScriptForm::Hash => ("EVALSHA", &self.hash),
            ScriptForm::Text => ("EVAL", &self.text),
        };
        let keys_bytes: usize = keys.iter().map(|key| key.name.len()).sum();
        let bytes: usize = arguments.iter().map(|argument| argument.len()).sum();
        // Reserve all capacity at once: a growing command would be copied several times.
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

/// How a call names its script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScriptForm {
    Hash,
    Text,
}

/// The scripts of a policy, and their arguments.
#[derive(Debug)]
pub(crate) struct Scripted {
    /// Checks a cost: charges it if all limits allow it.
    pub(crate) check: Arc<Script>,
    /// Charges or returns units unconditionally; `None` if no script can do that for the kinds.
    pub(crate) force: Option<Arc<Script>>,
    /// Settles a reservation, or refunds units; `None` if no script can do that for the kinds and options.
    pub(crate) lower: Option<Arc<Script>>,
    /// Checks several costs, one after the other.
    pub(crate) many: Arc<Script>,
    kinds: u8,
    options: LimitOptions,
    /// Takes a slice; `None` if the policy cannot be leased.
    pub(crate) lease: Option<Arc<Script>>,
    /// The constants of all limits, in doubles.
    constants: Vec<u8>,
}

/// The files that a script is made of.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Recipe {
    /// One bit per kind.
    kinds: u8,
    options: LimitOptions,
    task: Task,
    /// Whether it is for one limit without options.
    is_plain: bool,
}

/// The options that any limit of a policy has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct LimitOptions {
    penalty: bool,
    shadow: bool,
}

/// The task of a script.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Task {
    Check,
    Force,
    Lower,
    Many,
}

impl Scripted {
    /// Returns the scripts of a policy; `None` if its numbers are not exact in doubles.
    pub(crate) fn new(policy: &Policy) -> Option<Self> {
        let limits = policy.script()?.limits;
        let kinds = limits.iter().fold(0, |kinds, limit| kinds | 1 << (limit[0] - 1));
        let options = LimitOptions {
            penalty: policy.limits().iter().any(|limit| limit.penalty().is_some()),
            shadow: policy.limits().iter().any(Limit::is_shadow),
        };
        let is_plain = policy.plain().is_some();
        let recipe = |task| Recipe { kinds, options, task, is_plain };
        let forces = kinds & (DEEP_BUCKET | LOG) == 0;
        let lowers = kinds & DEEP_BUCKET == 0 && !options.penalty && !options.shadow;
        let lease = match kinds {
            BUCKET if is_plain => Some(LEASE_BUCKET.clone()),
            FIXED_WINDOW if is_plain => Some(LEASE_FIXED_WINDOW.clone()),
            _ => None,
        };
        Some(Self {
            lease,
            check: cached_script(recipe(Task::Check)),
            force: forces.then(|| cached_script(recipe(Task::Force))),
            lower: lowers.then(|| cached_script(recipe(Task::Lower))),
            many: many(kinds, options),
            kinds,
            options,
            constants: limits.iter().flatten().flat_map(|n| double(i128::from(*n))).collect(),
        })
    }

    /// Returns whether the policy is one bucket without options, whose numbers are exact.
    pub(crate) fn is_plain_bucket(&self) -> bool {
        self.lease.is_some() && self.kinds == BUCKET
    }

    /// Returns the constants of the limits, in doubles.
    pub(crate) fn constants(&self) -> &[u8] {
        &self.constants
    }

    /// Returns the numbers for a script that charges buckets beyond the policy's bound on debt.
    pub(crate) fn numbers_past_debt(&self, amount: i64) -> Vec<u8> {
        let mut numbers = self.numbers(amount);
        for constants in numbers[8..].chunks_exact_mut(80) {
            let read = |place: usize| {
                constants[place * 8..][..8].try_into().ok().and_then(whole).unwrap_or_default()
            };
            // A count beyond the bound of a window is not a valid state.
            if u8::try_from(read(0)) != Ok(BUCKET) {
                continue;
            }
            // The level of a bucket counts in fractions of a unit, and has to stay exact.
            let unit = read(5).max(1);
            let bound = read(4).saturating_mul(DEEPER).min((1_i128 << 52) / unit).max(read(4));
            constants[4 * 8..][..8].copy_from_slice(&double(bound));
        }
        numbers
    }

    /// Returns the script that checks several keys of these policies at once.
    pub(crate) fn of_all(all: &[&Self]) -> Arc<Script> {
        let kinds = all.iter().fold(0, |kinds, one| kinds | one.kinds);
        let penalty = all.iter().any(|one| one.options.penalty);
        let shadow = all.iter().any(|one| one.options.shadow);
        many(kinds, LimitOptions { penalty, shadow })
    }

    /// Returns the numbers for a script: an amount, and the constants.
    pub(crate) fn numbers(&self, amount: i64) -> Vec<u8> {
        let mut numbers = Vec::with_capacity(8 + self.constants.len());
        numbers.extend(double(i128::from(amount)));
        numbers.extend(&self.constants);
        numbers
    }
}

/// How many times the policy's bound on debt a client may owe after an outage.
const DEEPER: i128 = 4;

fn many(kinds: u8, options: LimitOptions) -> Arc<Script> {
    cached_script(Recipe { kinds, options, task: Task::Many, is_plain: false })
}

const BUCKET: u8 = 1;
/// The kinds that only compare-and-set charges unconditionally: one would have to divide numbers of two doubles, the
/// other to take a list apart.
const DEEP_BUCKET: u8 = 1 << 1;
const LOG: u8 = 1 << 4;
const FIXED_WINDOW: u8 = 1 << 2;
const COUNTER: u8 = 1 << 3;
/// The kinds whose states a script can carry over from one policy to another.
const CHANGEABLE: u8 = BUCKET | FIXED_WINDOW | COUNTER;

/// Encodes a whole number as Lua's `struct` does. A double has to hold it exactly.
pub(crate) fn double(number: i128) -> [u8; 8] {
    #[expect(
        clippy::cast_precision_loss,
        reason = "at most 2⁵² in magnitude, or it is not scripted"
    )]
    let double = number as f64;
    double.to_be_bytes()
}

/// Decodes a double; `None` if it is not a whole number, or not exact.
pub(crate) fn whole(bytes: [u8; 8]) -> Option<i128> {
    let double = f64::from_be_bytes(bytes);
    if double.abs() > 9_007_199_254_740_992.0 || double.fract() != 0.0 {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, reason = "whole, and within the range")]
    Some(double as i128)
}

/// Returns the script of a recipe, which is made once.
fn cached_script(recipe: Recipe) -> Arc<Script> {
    static MADE: LazyLock<Mutex<HashMap<Recipe, Arc<Script>>>> = LazyLock::new(Mutex::default);
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    made.entry(recipe).or_insert_with(|| Arc::new(Script::new(&text(recipe)))).clone()
}

fn text(recipe: Recipe) -> String {
    let kinds = (0..KINDS.len()).filter(|kind| recipe.kinds & 1 << kind != 0);
    let product = if recipe.kinds & (DEEP_BUCKET | COUNTER) != 0 { PRODUCT } else { "" };
    let one = kinds.clone().map(|kind| ONES[kind]).next().unwrap_or_default();
    if recipe.is_plain && recipe.task == Task::Check && !one.is_empty() {
        // Products are needed only if two of them seem equal, which is rare.
        let one = with_parts(one);
        return one.replace("--product--", product).replace("--several--", &several(recipe));
    }
    let (open, rest) = match recipe.task {
        Task::Check => (OPEN, [READ, CHECK, CLOSE]),
        Task::Force => (OPEN, [READ, FORCE, CLOSE]),
        Task::Lower => (OPEN, [READ, LOWER, CLOSE]),
        Task::Many => (MANY_OPEN, [MANY, "", ""]),
    };
    let several = several(recipe);
    let open = with_parts(open);
    let shadow = if recipe.options.shadow { SHADOW } else { "" };
    let mut text = format!("{}{product}{shadow}", open.replace("--several--", &several));
    kinds.for_each(|kind| text += KINDS[kind]);
    text.extend(rest.map(|part| part.replace("--several--", &several)));
    // Options are commented out in the files, because most policies have none.
    if recipe.options.penalty {
        text = text.replace("--[[penalty", "").replace("penalty]]", "");
    }
    if recipe.options.shadow {
        text = text.replace("--[[shadow", "").replace("shadow]]", "");
    }
    if recipe.task == Task::Lower {
        // The client needs the second key as well to decide.
        let second = ", redis.call('GET', KEYS[2]) or ''}";
        text = text
            .replace("return {-1, now, value}", &format!("return {{-1, now, value or ''{second}"))
            .replace(
                "return {-1, now, value or ''}",
                &format!("return {{-1, now, value or ''{second}"),
            );
    }
    text
}

/// Returns the part of a script that decides on values of other policies; empty if no script can.
fn several(recipe: Recipe) -> String {
    let call = match recipe.task {
        Task::Check => SEVERAL_IN_CHECK,
        Task::Many => SEVERAL_IN_MANY,
        Task::Force | Task::Lower => return String::new(),
    };
    if recipe.kinds & !CHANGEABLE != 0 || recipe.options.penalty {
        return String::new();
    }
    let mut kinds = format!("{PRODUCT}{SHADOW}");
    for (kind, text) in KINDS.iter().enumerate() {
        if CHANGEABLE & 1 << kind != 0 {
            kinds += text;
        }
    }
    let text = call.replace("--several--", &SEVERAL_POLICIES.replace("--kinds--", &kinds));
    // It is long and part of many scripts, so it has no comments and no indentation.
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with("--"));
    lines.flat_map(|line| [line, "\n"]).collect()
}
