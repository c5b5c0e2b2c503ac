//! The cases, how long each runs, and the report.
//!
//! Also compiled into `bench/`, which adds a rival: this file uses only the public interface of Tallygate.

mod bound;
mod crew;

use std::fmt;
use std::io::{self, Write};
use std::time::Duration;

use tallygate::clock::SystemClock;
use tallygate::store::{Capacity, PolicyStore};
use tallygate::{Decision, Kind, Policy, RateLimiter, Ticks, check_all};

use bound::Limit;
use crew::{Answers, Subject, Tally};

/// Threads that run at once. A machine has fewer processors than most of these.
const THREADS: [usize; 3] = [8, 32, 256];

/// One limit per window. The rates are so low that a debug build can exhaust them. No run is a multiple of its window,
/// because a window that begins at the very end could not be exhausted.
const WINDOWS: [Window; 4] = [
    Window { length: ms(1), limit: 100, runs: [ms(76); 3], is_shared: false },
    Window { length: ms(10), limit: 1000, runs: [ms(76); 3], is_shared: false },
    Window { length: ms(100), limit: 2000, runs: [ms(270), ms(270), ms(570)], is_shared: true },
    Window { length: ms(1000), limit: 2000, runs: [ms(600), ms(600), ms(2150)], is_shared: true },
];

/// The time budget for which the times of [`WINDOWS`] are given. Other budgets scale them.
const USUAL_SECONDS: u32 = 30;

/// The number of keys of a batch, which are all the same.
const BATCH: usize = 16;

/// How often a run is tried until every limiter has denied a request. On a busy machine, the system may run none of the
/// threads for most of a short run, and then there are too few checks to show anything.
const ATTEMPTS: usize = 5;

/// The share of what a limiter must allow below which it fails, in percent.
const LEAST_PERCENT: u64 = 95;

struct Window {
    length: Duration,
    limit: u32,
    /// The time of one run, for each number of threads.
    runs: [Duration; THREADS.len()],
    /// Whether the six algorithms share a run. A thread can be late by more than a window only in a run that is longer than
    /// the window, and one such run per algorithm would take too long.
    is_shared: bool,
}

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// The operation that is called on a limiter.
#[derive(Clone, Copy)]
enum Verb {
    IsAllowed,
    Check,
    CheckMany,
    CheckAll,
}

impl Verb {
    const ALL: [Self; 4] = [Self::IsAllowed, Self::Check, Self::CheckMany, Self::CheckAll];

    const fn name(self) -> &'static str {
        match self {
            Self::IsAllowed => "is_allowed",
            Self::Check => "check",
            Self::CheckMany => "check_many",
            Self::CheckAll => "check_all",
        }
    }
}

/// Checks a key once. Returns `true` if the limiter allowed the request.
pub(crate) type AskRival = Box<dyn Fn(&String) -> bool + Send + Sync>;

/// Another limiter that runs in the same campaign. It is shown, and cannot fail the campaign.
pub(crate) struct Rival {
    /// The name in the report.
    pub(crate) name: &'static str,
    /// The function that is called.
    pub(crate) verb: &'static str,
    /// Creates a bucket that allows this many units per window, and as many at once.
    pub(crate) bucket: fn(u32, Duration) -> AskRival,
}

/// One line of the report.
struct Case<'a> {
    name: String,
    verb: &'static str,
    is_ours: bool,
    subject: Subject<'a>,
}

/// Reads the time budget from the first argument.
///
/// # Errors
/// If it is not a whole number of seconds, at least 10: in less time, the runs are too short to exhaust the limits.
pub(crate) fn seconds(argument: Option<&str>) -> Result<u32, String> {
    let Some(argument) = argument else { return Ok(USUAL_SECONDS) };
    match argument.parse() {
        Ok(seconds @ 10..=86_400) => Ok(seconds),
        _ => Err(format!("the time budget must be 10 to 86400 whole seconds (got {argument:?})")),
    }
}

/// Runs every case, and returns whether all limiters of Tallygate stayed within their bounds. Takes about `seconds`.
///
/// # Errors
/// Returns an error if `out` cannot be written to.
pub(crate) fn run(seconds: u32, rival: Option<&Rival>, out: &mut impl Write) -> io::Result<bool> {
    let clock = SystemClock::new();
    let (mut cases, mut failed) = (0, 0);
    writeln!(
        out,
        "allowed: requests that were allowed; bound: the most that the limit allows in the time of the run;"
    )?;
    writeln!(
        out,
        "least: what the denials prove that it must have allowed; longest: the longest call, so how late a thread was"
    )?;
    for window in &WINDOWS {
        for (threads, time) in THREADS.into_iter().zip(window.runs) {
            writeln!(out, "\n{} per {:?}, {threads} threads", window.limit, window.length)?;
            writeln!(out, "{HEADINGS}")?;
            let time = time * seconds / USUAL_SECONDS;
            for cases_of_run in runs(&clock, window, rival) {
                let subjects: Vec<&Subject<'_>> =
                    cases_of_run.iter().map(|case| &case.subject).collect();
                let tallies = tallies(&clock, threads, time, &subjects);
                for (case, tally) in cases_of_run.iter().zip(tallies) {
                    let row = Row { case, tally };
                    writeln!(out, "{row}")?;
                    cases += u32::from(case.is_ours);
                    failed += u32::from(row.verdict() != PASSED);
                }
            }
            out.flush()?;
        }
    }
    writeln!(out, "\n{} of {cases} cases passed, {failed} failed", cases - failed)?;
    Ok(failed == 0)
}

/// Runs threads on the subjects, and repeats the run if there were too few checks.
fn tallies(
    clock: &SystemClock,
    threads: usize,
    time: Duration,
    subjects: &[&Subject<'_>],
) -> Vec<Tally> {
    let mut attempt = 1;
    loop {
        // A new key per attempt, so that each begins with a fresh state.
        let tallies = crew::run(clock, threads, time, subjects, &format!("hot-{attempt}"));
        let was_exceeded = tallies.iter().any(|tally| tally.allowed > tally.bound);
        let was_exhausted = tallies.iter().all(|tally| tally.least > 0);
        if was_exceeded || was_exhausted || attempt == ATTEMPTS {
            return tallies;
        }
        attempt += 1;
    }
}

/// The cases of a window, in the runs that they share.
fn runs<'a>(clock: &'a SystemClock, window: &Window, rival: Option<&Rival>) -> Vec<Vec<Case<'a>>> {
    let mut runs = Vec::new();
    for verb in Verb::ALL {
        let ours = Kind::ALL.into_iter().map(|kind| our_case(clock, window, kind, verb));
        // The rival returns only yes or no, so it runs beside our check that does the same.
        let theirs = rival.filter(|_| matches!(verb, Verb::IsAllowed));
        let cases = ours.chain(theirs.map(|rival| rival_case(window, rival)));
        if window.is_shared {
            runs.push(cases.collect());
        } else {
            runs.extend(cases.map(|case| vec![case]));
        }
    }
    runs
}

fn limit_of(window: &Window, kind: Kind) -> Limit {
    Limit { kind, limit: window.limit.into(), window: Ticks::from_duration(window.length) }
}

fn our_case<'a>(clock: &'a SystemClock, window: &Window, kind: Kind, verb: Verb) -> Case<'a> {
    let limit = limit_of(window, kind);
    let limiter = limiter(clock, limit);
    let ask: Box<dyn Fn(&String) -> Answers + Sync + 'a> = match verb {
        Verb::IsAllowed => Box::new(move |key| {
            Answers::one(limiter.is_allowed(key).expect("the store has room for one key"))
        }),
        Verb::Check => Box::new(move |key| {
            Answers::one(limiter.check(key).expect("the store has room for one key").allowed)
        }),
        Verb::CheckMany => Box::new(move |key| {
            let decisions: Vec<Decision> =
                limiter.check_many(&[key; BATCH]).expect("the store has room for one key");
            decisions.iter().map(|decision| Answers::one(decision.allowed)).sum()
        }),
        Verb::CheckAll => {
            // Twice the limit, so that the first one decides.
            let wider = self::limiter(clock, Limit { limit: 2 * limit.limit, ..limit });
            Box::new(move |key| {
                let asks = [limiter.joint(key), wider.joint(key)];
                let asks = asks.map(|ask| ask.expect("the key is short"));
                Answers::one(check_all(asks).expect("both have room").decision.allowed)
            })
        }
    };
    let subject = Subject { limit, ask };
    Case { name: kind.to_string(), verb: verb.name(), is_ours: true, subject }
}

fn limiter(clock: &SystemClock, limit: Limit) -> RateLimiter<Policy, PolicyStore<&SystemClock>> {
    let policy = Policy::of(limit.kind, limit.limit).per(limit.window).build();
    let policy = policy.expect("the limit is valid");
    let store = PolicyStore::new(&policy, Capacity::of(10), clock);
    RateLimiter::with_store(policy, store)
}

fn rival_case<'a>(window: &Window, rival: &Rival) -> Case<'a> {
    let ask = (rival.bucket)(window.limit, window.length);
    let subject = Subject {
        limit: limit_of(window, Kind::TokenBucket),
        ask: Box::new(move |key| Answers::one(ask(key))),
    };
    Case { name: rival.name.to_owned(), verb: rival.verb, is_ours: false, subject }
}

const HEADINGS: &str = "limiter                 verb           allowed     bound   ratio     least   ratio     denied   longest";

const PASSED: &str = "";

struct Row<'a> {
    case: &'a Case<'a>,
    tally: Tally,
}

impl Row<'_> {
    const fn verdict(&self) -> &'static str {
        let Tally { allowed, bound, least, .. } = self.tally;
        if !self.case.is_ours {
            // A rival reads its own clock, so its exact bound is not known.
            PASSED
        } else if allowed > bound {
            "TOO MUCH"
        } else if least == 0 {
            "NO DEMAND"
        } else if allowed * 100 < least * LEAST_PERCENT {
            "TOO LITTLE"
        } else {
            PASSED
        }
    }
}

impl fmt::Display for Row<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { allowed, denied, bound, least, longest } = self.tally;
        let Case { name, verb, .. } = self.case;
        write!(f, "{name:<23} {verb:<10} {allowed:>11} {bound:>9} {:>7}", Ratio(allowed, bound))?;
        write!(f, " {least:>9} {:>7} {denied:>10}", Ratio(allowed, least))?;
        write!(f, " {:>6} ms  {}", longest.0 / 1_000_000, self.verdict())
    }
}

/// Formats a quotient with three digits after the decimal point.
struct Ratio(u64, u64);

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (1000 * self.0).checked_div(self.1) {
            Some(thousandths) => {
                f.pad(&format!("{}.{:03}", thousandths / 1000, thousandths % 1000))
            }
            None => f.pad("-"),
        }
    }
}
