//! Threads that check a key as often as they can, and count the decisions.

use std::iter::Sum;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use tallygate::clock::{Clock as _, SystemClock};
use tallygate::{Tick, Ticks};

use super::bound::{Denials, Limit};

/// The number of calls to one limiter before a thread continues with the next limiter of the run.
const TURN: usize = 16;

/// The number of threads per limiter from which on each thread uses only one limiter. Threads that contend for one lock
/// are late for the longest time.
const CROWD: usize = 8;

/// The time after the end of a run in which denials are still recorded, because threads start and end late.
const SLACK: Duration = Duration::from_secs(2);

/// A limiter, and the function that checks a key with it. (Governor takes a `&String`.)
pub(crate) struct Subject<'a> {
    pub(crate) limit: Limit,
    pub(crate) ask: Box<dyn Fn(&String) -> Answers + Sync + 'a>,
}

/// The answers to one call.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Answers {
    allowed: u64,
    denied: u64,
}

impl Answers {
    pub(crate) const fn one(allowed: bool) -> Self {
        Self { allowed: allowed as u64, denied: !allowed as u64 }
    }
}

impl Sum for Answers {
    fn sum<I: Iterator<Item = Self>>(answers: I) -> Self {
        answers.fold(Self::default(), |sum, one| Self {
            allowed: sum.allowed + one.allowed,
            denied: sum.denied + one.denied,
        })
    }
}

/// The results of all threads with one limiter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tally {
    pub(crate) allowed: u64,
    pub(crate) denied: u64,
    /// The most units that the limit allows during the run.
    pub(crate) bound: u64,
    /// The fewest units that must have been allowed, given the times of denials.
    pub(crate) least: u64,
    /// The longest call. If a thread was descheduled during the call, the time that it had read was as old as that.
    pub(crate) longest: Ticks,
}

/// The results of one thread with one limiter.
#[derive(Clone, Copy)]
struct Share {
    answers: Answers,
    first: Tick,
    last: Tick,
    longest: Ticks,
}

impl Share {
    const NOTHING: Self = Self {
        answers: Answers { allowed: 0, denied: 0 },
        first: Tick(i64::MAX),
        last: Tick(i64::MIN),
        longest: Ticks::ZERO,
    };

    fn add(self, other: Self) -> Self {
        Self {
            answers: [self.answers, other.answers].into_iter().sum(),
            first: self.first.min(other.first),
            last: self.last.max(other.last),
            longest: self.longest.max(other.longest),
        }
    }
}

/// Runs the threads, which check a key with the subjects for a time.
pub(crate) fn run(
    clock: &SystemClock,
    threads: usize,
    time: Duration,
    subjects: &[&Subject<'_>],
    key: &String,
) -> Vec<Tally> {
    let period = Ticks::from_duration(time + SLACK);
    let denials: Vec<Denials> =
        subjects.iter().map(|subject| Denials::new(subject.limit, clock.now(), period)).collect();
    let stays = threads >= subjects.len() * CROWD;
    let waiting = AtomicUsize::new(threads);
    // Set by the first thread that starts.
    let end = AtomicI64::new(i64::MAX);
    let time = Ticks::from_duration(time);
    let shares = thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|number| {
                let (waiting, end, denials) = (&waiting, &end, &denials);
                scope.spawn(move || {
                    // A `Barrier` would let them through one after the other, and the first would have ended before the
                    // last starts.
                    waiting.fetch_sub(1, Ordering::Relaxed);
                    while waiting.load(Ordering::Relaxed) > 0 {
                        thread::yield_now();
                    }
                    let own_end = clock.now().after(time).expect("the clock is far from its end");
                    let end = Tick(end.fetch_min(own_end.0, Ordering::Relaxed)).min(own_end);
                    ask_until(clock, end, (number, stays), subjects, denials, key)
                })
            })
            .collect();
        let shares = running.into_iter().map(|thread| thread.join().expect("no thread panicked"));
        shares.fold(vec![Share::NOTHING; subjects.len()], |sum, shares| {
            sum.into_iter().zip(shares).map(|(sum, share)| sum.add(share)).collect()
        })
    });
    let tallied = subjects.iter().zip(shares).zip(&denials);
    tallied
        .map(|((subject, share), denials)| Tally {
            allowed: share.answers.allowed,
            denied: share.answers.denied,
            bound: subject.limit.at_most(share.first, share.last),
            least: denials.at_least(),
            longest: share.longest,
        })
        .collect()
}

/// Checks the key with one subject if the thread uses only one, otherwise with all subjects in turn.
fn ask_until(
    clock: &SystemClock,
    end: Tick,
    (thread, stays): (usize, bool),
    subjects: &[&Subject<'_>],
    denials: &[Denials],
    key: &String,
) -> Vec<Share> {
    let mut shares = vec![Share::NOTHING; subjects.len()];
    let mut began = clock.now();
    for turn in thread.. {
        let number = if stays { thread } else { turn } % subjects.len();
        let (subject, denials) = (subjects[number], &denials[number]);
        let mut share = shares[number];
        share.first = share.first.min(began);
        for _ in 0..TURN {
            let answers = (subject.ask)(key);
            let ended = clock.now();
            if answers.denied > 0 {
                denials.record(began, ended);
            }
            share.answers = [share.answers, answers].into_iter().sum();
            share.longest = share.longest.max(ended.since(began));
            began = ended;
        }
        share.last = began;
        shares[number] = share;
        if began >= end {
            break;
        }
    }
    shares
}
