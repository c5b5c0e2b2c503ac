//! What one process does with the checks of one key: which it answers by itself, and what it asks the store.
//!
//! Three things keep a check from being a call of its own. A *lease* is served from. A *refusal* of the store holds
//! until it said, for at most a second at a time. And while a call is under way, checks that come queue, and then travel
//! in one call as a *list of costs*, which the store decides in order.
//!
//! The queue is sent when a reply comes, when it is long enough for a call of its own, or when its first check has
//! waited for a small part of the time budget: so several calls of one key can be under way, and a check waits for one
//! round trip and not for two. Calls and queue are bounded. A check that cannot be answered in its time leaves the queue
//! without being charged, and is denied as overloaded.
//!
//! A pure state machine, as the algorithms are: a question or a reply and `now` go in, answers and calls come out.
//! `now` is nanoseconds by the process's own monotonic clock; the store's times, in microseconds, are only ever
//! carried on by what has passed here since the call was sent. There is no timer here: whoever holds desks
//! [sweeps](Desk::sweep) them.

use std::sync::Arc;
use std::time::Duration;

use tallygate::{
    Algorithm as _, Answer as _, Bounds, Cost, Decision, Kind, Limit, Outcome, Policy, Source,
    Standing, Tick, Ticks, Timed,
};

use crate::lease::calls::Taken;
use crate::lease::slice::{self, Slice};
use crate::lease::{Leases, by_any_clock};

/// What the checks of a policy are decided by.
#[derive(Debug)]
pub(crate) struct Terms {
    /// In microseconds.
    policy: Arc<Policy>,
    caches_refusals: bool,
    leases: Option<Leases>,
    /// How long a quota that was used up is not asked about again.
    pace: Ticks,
    /// Whether a refusal tells only of its own cost.
    tells_one_cost: bool,
    /// How long a check waits for others to share its call while a call is under way.
    patience: Ticks,
}

/// Somebody who waits for an answer.
pub(crate) type Waiter = u64;

/// A call's own number: somebody whom it is for, and how many calls there were before. Desks come and go, and a reply
/// that is late must not be taken for that to another call.
pub(crate) type Number = (Waiter, u64);

/// What came of a question: an answer, or one later; and a call, perhaps.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) answer: Option<Timed>,
    pub(crate) call: Option<Call>,
    /// When the queue is to be [sent](Desk::flush) at the latest, if the check waits in it.
    pub(crate) flush_at: Option<Tick>,
    /// Whether it was turned away because the queue is full.
    pub(crate) is_overloaded: bool,
}

/// A call to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) number: Number,
    pub(crate) what: What,
    /// How many checks it is for.
    pub(crate) checks: usize,
    /// When the time of the last of them is over.
    pub(crate) until: Tick,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// Ask for costs, one after the other.
    Check(Box<[Cost]>),
    Take(Slice),
}

/// What the store decided on one cost.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) is_allowed: bool,
    /// How the store stood after it.
    pub(crate) state: Box<[Standing]>,
    pub(crate) shadow: Option<usize>,
    /// What else the request has to fit into, where the key was asked for under several policies.
    pub(crate) bounds: Bounds,
}

/// What became of a call.
#[derive(Debug)]
pub(crate) enum Came {
    Checked {
        at: Tick,
        /// One of each cost, in order.
        answers: Vec<Checked>,
    },
    Taken(Taken),
    /// The scripts do not decide on this key now.
    Undecided,
    /// The store answers, but not this call in time.
    Late,
    /// There was no answer.
    Nothing,
}

/// What somebody who waited is told.
#[derive(Debug)]
pub(crate) enum Verdict {
    Told(Timed),
    /// To ask for oneself, by another way.
    Alone,
    /// It was not decided in time, although the store answers.
    Overloaded,
    /// The store gave no answer.
    Nothing,
}

/// What came of a reply.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    pub(crate) verdicts: Vec<(Waiter, Verdict)>,
    pub(crate) call: Option<Call>,
}

/// What is left of a slice, to be given back. It is not served from any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GivenBack {
    pub(crate) amount: Cost,
    /// When it was taken, by the store's clock.
    pub(crate) taken: Tick,
}

/// What one process knows of one key.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    /// The first to end first.
    held: Vec<Held>,
    known: Option<Known>,
    under_way: Vec<UnderWay>,
    /// In the order in which they came.
    waiting: Vec<Queued>,
    /// What a call takes on average.
    round_trip: Ticks,
    demand: Demand,
    /// Until when the store is not asked for slices.
    rests_until: Tick,
    /// Until when no slices are taken, because the store did not decide on one.
    unleased_until: Tick,
    asked_at: Tick,
    calls: u64,
    /// What was paid for and not served, since somebody last asked.
    pub(crate) lapsed: Cost,
}

/// What is left of a slice.
#[derive(Debug)]
struct Held {
    left: Cost,
    /// Until when it is served from, by the clock here.
    until: Tick,
    /// How the store stood when it was taken.
    known: Known,
}

/// How the store stood when it last said.
#[derive(Clone, Debug)]
struct Known {
    state: Box<[Standing]>,
    /// When that was, by the store's clock.
    at: Tick,
    /// When it was asked, by the clock here.
    sent: Tick,
    /// The cost that was refused; what is less may be admitted.
    cost: Cost,
    shadow: Option<usize>,
    bounds: Bounds,
}

#[derive(Debug)]
struct UnderWay {
    number: Number,
    /// The slice that is asked for, if it is one.
    slice: Option<Slice>,
    /// When the time of the last of the checks is over.
    until: Tick,
    sent: Tick,
    asked: Vec<(Waiter, Cost)>,
}

/// A check that waits to be sent.
#[derive(Clone, Copy, Debug)]
struct Queued {
    waiter: Waiter,
    cost: Cost,
    since: Tick,
    /// When its time budget is over.
    until: Tick,
}

/// Of a call that no check waits for.
const FOREVER: Tick = Tick(i64::MAX);
/// How many checks one call takes: the server does nothing else meanwhile.
const MOST_TOGETHER: usize = 128;
/// How many calls of one key are under way at once.
const MOST_UNDER_WAY: usize = 32;
/// How many checks of one key wait to be sent. More are denied at once.
const MOST_WAITING: usize = 4096;
/// How long a refusal holds without asking again, in nanoseconds.
const REFUSED_FOR: Ticks = Ticks(1_000_000_000);
/// How many requests in half a life make a key hot. Below, a slice would hardly serve anybody.
const HOT: u64 = 8;
/// Which part of a life a used up quota rests.
const RESTS: u64 = 8;
const NANOS: u64 = 1000;
/// How long no slices are taken of a key that no script takes slices of, in nanoseconds.
const UNLEASED_FOR: Ticks = Ticks(10_000_000_000);
/// Which part of the time budget a check waits for others to share its call.
const PATIENCE: u32 = 16;

impl Terms {
    pub(crate) fn new(policy: Arc<Policy>, caches_refusals: bool, leases: Option<Leases>) -> Self {
        let leases = leases.filter(|_| Leases::serve(&policy));
        let leases = leases.and_then(|leases| leases.shortened_for(&policy));
        let has_penalty = policy.limits().iter().any(|limit| limit.penalty().is_some());
        let tells_one_cost =
            policy.limits().iter().any(|limit| limit.numbers().kind == Kind::SlidingWindowLog);
        Self {
            // A refusal counts towards a penalty: the store has to hear of it.
            caches_refusals: caches_refusals && !has_penalty,
            pace: leases.map_or(Ticks::ZERO, |leases| pace(&policy, leases)),
            leases,
            tells_one_cost,
            policy,
            patience: Ticks(1_000_000),
        }
    }

    /// The same for a time budget: checks wait for a small part of it to share a call.
    pub(crate) fn within(mut self, budget: Duration) -> Self {
        self.patience = Ticks::from_duration(budget / PATIENCE);
        self
    }

    /// Whether something is remembered of a key between its calls.
    pub(crate) const fn leases(&self) -> Option<Leases> {
        self.leases
    }

    fn half_life(&self) -> Ticks {
        Ticks(self.leases.map_or(0, |leases| leases.in_process().0 / 2).max(1))
    }
}

/// A while in which a bucket does not overflow even if nobody comes for a quarter of it.
fn pace(policy: &Policy, leases: Leases) -> Ticks {
    let longest = leases.in_process().0 / RESTS;
    let fills = policy.plain().map(Limit::numbers).filter(|n| n.kind.is_bucket()).map(|n| {
        let fills = u128::from(n.burst) * u128::from(n.window.0) * u128::from(NANOS)
            / u128::from(n.limit.max(1));
        u64::try_from(fills / 4).unwrap_or(u64::MAX)
    });
    Ticks(longest.min(fills.unwrap_or(u64::MAX)))
}

impl Desk {
    /// Asks for a cost, at least 1, to be answered until a time.
    pub(crate) fn ask(
        &mut self,
        terms: &Terms,
        waiter: Waiter,
        cost: Cost,
        (now, until): (Tick, Tick),
    ) -> Asked {
        self.note(terms, cost, now);
        if let Some(answer) = self.answer(terms, cost, now) {
            let call = self.top_up(terms, waiter, now);
            return Asked { answer: Some(answer), call, flush_at: None, is_overloaded: false };
        }
        if self.waiting.len() >= MOST_WAITING {
            return Asked { answer: None, call: None, flush_at: None, is_overloaded: true };
        }
        if self.waiting.is_empty() && self.under_way.is_empty() && !self.is_hot(terms, now) {
            // Nearly every key: it has no queue.
            let asked = (vec![(waiter, cost)], until);
            let call = Some(self.call(waiter, What::Check([cost].into()), asked, now));
            return Asked { answer: None, call, flush_at: None, is_overloaded: false };
        }
        self.waiting.push(Queued { waiter, cost, since: now, until });
        let call = if self.is_due(terms, now) { self.next_call(terms, now) } else { None };
        let flush_at = match call {
            Some(_) => None,
            None => now.after(terms.patience),
        };
        Asked { answer: None, call, flush_at, is_overloaded: false }
    }

    /// Sends the queue if its first check has waited long enough for a reply. Says when to look again otherwise.
    pub(crate) fn flush(&mut self, terms: &Terms, now: Tick) -> Heard {
        let mut verdicts = Vec::new();
        let mut call = None;
        if self.is_due(terms, now) {
            self.drop_late(terms, now, &mut verdicts);
            call = self.next_call(terms, now);
        }
        Heard { verdicts, call }
    }

    /// Takes checks out of the queue whose callers have gone: they are not charged.
    pub(crate) fn retain(&mut self, waits: impl Fn(Waiter) -> bool) {
        self.waiting.retain(|queued| waits(queued.waiter));
    }

    /// Whether the queue is to be sent.
    fn is_due(&self, terms: &Terms, now: Tick) -> bool {
        let Some(first) = self.waiting.first() else { return false };
        self.under_way.is_empty()
            || self.waiting.len() >= MOST_TOGETHER
            || now.since(first.since) >= terms.patience
    }

    /// Turns away checks that have waited and could not be answered in time any more.
    fn drop_late(&mut self, terms: &Terms, now: Tick, verdicts: &mut Vec<(Waiter, Verdict)>) {
        let answered = now.after(self.round_trip).unwrap_or(now);
        self.waiting.retain(|queued| {
            let has_waited = now.since(queued.since) > terms.patience;
            let is_late = queued.until <= now || has_waited && queued.until < answered;
            if is_late {
                verdicts.push((queued.waiter, Verdict::Overloaded));
            }
            !is_late
        });
    }

    /// Answers a cost where nothing has to be sent: `None` if it has to be asked for.
    pub(crate) fn answer_at_once(&mut self, terms: &Terms, cost: Cost, now: Tick) -> Option<Timed> {
        if self.wants_more(terms, cost, now) {
            return None;
        }
        let answer = self.answer(terms, cost, now)?;
        self.note(terms, cost, now);
        Some(answer)
    }

    /// Takes the reply to a call. That of a call that was given up already is nothing.
    pub(crate) fn hear(&mut self, terms: &Terms, number: Number, came: Came, now: Tick) -> Heard {
        let place = self.under_way.iter().position(|under_way| under_way.number == number);
        let Some(under_way) = place.map(|at| self.under_way.remove(at)) else {
            return Heard::default();
        };
        let UnderWay { slice, until, sent, asked, .. } = under_way;
        if !matches!(came, Came::Nothing | Came::Late) {
            let took = now.since(sent).0;
            let before = self.round_trip.0;
            self.round_trip =
                Ticks(if before == 0 { took } else { before - before / 4 + took / 4 });
        }
        let mut verdicts = Vec::with_capacity(asked.len());
        match came {
            Came::Late => {
                verdicts.extend(asked.into_iter().map(|(waiter, _)| (waiter, Verdict::Overloaded)));
            }
            Came::Nothing => {
                verdicts.extend(asked.into_iter().map(|(waiter, _)| (waiter, Verdict::Nothing)));
            }
            Came::Undecided if slice.is_some() => {
                // The key may be under several policies, whose units are not leased: they are asked for one by one.
                self.known = None;
                self.unleased_until = sent.after(UNLEASED_FOR).unwrap_or(sent);
                let again = asked.into_iter().map(|(waiter, cost)| Queued {
                    waiter,
                    cost,
                    since: sent,
                    until,
                });
                self.waiting.splice(..0, again);
            }
            Came::Undecided => {
                self.known = None;
                verdicts.extend(asked.into_iter().map(|(waiter, _)| (waiter, Verdict::Alone)));
            }
            Came::Taken(taken) => {
                self.hold(terms, &taken, sent, now);
                if let Some(slice) = slice
                    && taken.amount < slice.want
                {
                    self.rests_until = sent.after(terms.pace).unwrap_or(sent);
                }
                let known = Known::of_slice(taken.state, taken.at, sent);
                for (waiter, cost) in asked {
                    let told = self.serve(terms, cost, now).unwrap_or_else(|| {
                        let left = self.left_for(terms, cost);
                        known.refusal(terms, cost, left, known.at)
                    });
                    // It was asked for in this call: whoever waited was answered by the store.
                    verdicts.push((waiter, Verdict::Told(by(Source::Store, told))));
                }
                self.known = Some(known);
            }
            Came::Checked { at, answers } => {
                // Calls that were under way at one time may be answered in any order.
                let is_news = self.known.as_ref().is_none_or(|known| known.at <= at);
                let mut last = None;
                for ((waiter, cost), Checked { is_allowed, state, shadow, bounds }) in
                    asked.into_iter().zip(answers)
                {
                    let known = Known { state, at, sent, cost, shadow, bounds };
                    let told = if is_allowed {
                        let outcome = Outcome::Admitted(cost);
                        let mut told = Timed::of(&*terms.policy, &known.state, at, outcome, shadow);
                        known.bounds.complete(&mut told.decision, &terms.policy, at, None);
                        told
                    } else {
                        known.refusal(terms, cost, 0, at)
                    };
                    last = (!is_allowed).then_some(known);
                    verdicts.push((waiter, Verdict::Told(by(Source::Store, told))));
                }
                if is_news {
                    self.known = last;
                }
            }
        }
        if self.waiting.is_empty() {
            return Heard { verdicts, call: None };
        }
        let queue = std::mem::take(&mut self.waiting);
        for queued in queue {
            match self.answer(terms, queued.cost, now) {
                Some(told) => verdicts.push((queued.waiter, Verdict::Told(told))),
                None => self.waiting.push(queued),
            }
        }
        self.drop_late(terms, now, &mut verdicts);
        let call = self.next_call(terms, now);
        Heard { verdicts, call }
    }

    /// Forgets what the store said: it was changed from here.
    pub(crate) fn changed(&mut self) {
        self.known = None;
        self.rests_until = Tick(i64::MIN);
    }

    /// Gives up what is held, as if it had never been taken: the key was made fresh.
    pub(crate) fn reset(&mut self) {
        self.changed();
        self.held.clear();
    }

    /// Takes what is to be given back: of keys that nobody asks for any more, and before it is too late.
    pub(crate) fn sweep(&mut self, terms: &Terms, now: Tick) -> Vec<GivenBack> {
        self.lapse(now);
        let Some(leases) = terms.leases else { return Vec::new() };
        let quarter = leases.in_process().0 / 4;
        let is_idle = now.since(self.asked_at).0 >= quarter;
        self.give_back(terms, |held| is_idle || held.until.since(now).0 <= quarter)
    }

    /// Takes all that is held, to be given back: the process ends.
    pub(crate) fn close(&mut self, terms: &Terms, now: Tick) -> Vec<GivenBack> {
        self.lapse(now);
        self.give_back(terms, |_| true)
    }

    /// Whether nothing would be lost if it were forgotten.
    pub(crate) fn is_idle(&self, terms: &Terms, now: Tick) -> bool {
        self.under_way.is_empty()
            && self.waiting.is_empty()
            && self.held.is_empty()
            && self.lapsed == 0
            && self.demand.is_over(now, terms.half_life())
            && self.known.as_ref().is_none_or(|known| !known.refuses(terms, known.cost, now))
    }

    /// Whether a call is under way.
    #[cfg(test)]
    pub(crate) const fn is_asking(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Whether it waits for the reply to a call.
    #[cfg(test)]
    pub(crate) fn waits_for(&self, number: Number) -> bool {
        self.under_way.iter().any(|under_way| under_way.number == number)
    }

    fn give_back(&mut self, terms: &Terms, which: impl Fn(&Held) -> bool) -> Vec<GivenBack> {
        if !slice::gives_back(&terms.policy) {
            return Vec::new();
        }
        let back = self.held.extract_if(.., |held| which(held));
        back.map(|held| GivenBack { amount: held.left, taken: held.known.at }).collect()
    }

    /// Drops what has ended.
    fn lapse(&mut self, now: Tick) {
        let lapsed = &mut self.lapsed;
        self.held.retain(|held| {
            let lives = held.until > now;
            if !lives {
                *lapsed = lapsed.saturating_add(held.left);
            }
            lives
        });
    }

    fn left(&self) -> Cost {
        self.held.iter().fold(0, |left: Cost, held| left.saturating_add(held.left))
    }

    /// What is left towards a cost. Nothing towards one that the policy never admits at once.
    fn left_for(&self, terms: &Terms, cost: Cost) -> Cost {
        if cost <= terms.policy.capacity() { self.left() } else { 0 }
    }

    /// Keeps a slice. Its life began when it was asked for, and that of a window ends with the window.
    fn hold(&mut self, terms: &Terms, taken: &Taken, sent: Tick, now: Tick) {
        let Some(leases) = terms.leases.filter(|_| taken.amount > 0) else { return };
        let mut life = leases.in_process();
        if !slice::notes_what_is_out(&terms.policy) {
            let window = terms.policy.facts(&taken.state, taken.at, None).reset_after;
            life = life.min(by_any_clock(Ticks(window.0.saturating_mul(NANOS))));
        }
        let known = Known::of_slice(taken.state.clone(), taken.at, sent);
        let until = sent.after(life).unwrap_or(sent);
        self.held.push(Held { left: taken.amount, until, known });
        self.lapse(now);
    }

    /// Answers without the store, if that can be.
    fn answer(&mut self, terms: &Terms, cost: Cost, now: Tick) -> Option<Timed> {
        if let Some(served) = self.serve(terms, cost, now) {
            return Some(served);
        }
        let known = self.known.as_ref()?;
        let left = self.left_for(terms, cost);
        if terms.caches_refusals && known.refuses(terms, cost - left, now) {
            let told = known.refusal(terms, cost, left, known.store_time(now));
            return Some(by(Source::DenyCache, told));
        }
        if now < self.rests_until {
            let mut told = known.refusal(terms, cost, left, known.store_time(now));
            let rests = Ticks(self.rests_until.since(now).0.div_ceil(NANOS));
            told.decision.remaining = told.decision.remaining.min(left);
            told.decision.retry_after = told.decision.retry_after.map(|wait| wait.max(rests));
            told.decision.refused_by = Some(0);
            return Some(by(Source::Lease, told));
        }
        None
    }

    /// Serves a cost from what is held.
    fn serve(&mut self, terms: &Terms, cost: Cost, now: Tick) -> Option<Timed> {
        if self.held.is_empty() {
            return None;
        }
        self.lapse(now);
        if self.left_for(terms, cost) < cost {
            return None;
        }
        let mut wanted = cost;
        let mut told = None;
        for held in &mut self.held {
            if wanted == 0 {
                break;
            }
            let part = wanted.min(held.left);
            // Ahead of it is what the slice came on top of, and what of the slice was served before.
            let outcome = Outcome::Admitted(held.left);
            let at = held.known.store_time(now);
            told = Some(Timed::of(&*terms.policy, &held.known.state, at, outcome, None));
            held.left -= part;
            wanted -= part;
        }
        self.held.retain(|held| held.left > 0);
        let mut told = told?;
        let there = told.decision.remaining.saturating_add(self.left());
        told.decision.remaining = there.min(told.decision.limit.saturating_sub(cost));
        Some(by(Source::Lease, told))
    }

    fn note(&mut self, terms: &Terms, cost: Cost, now: Tick) {
        self.asked_at = now;
        if terms.leases.is_some() {
            self.demand.note(cost, now, terms.half_life());
        }
    }

    /// Whether so little is left after a cost that more should be asked for before all is used.
    fn wants_more(&self, terms: &Terms, cost: Cost, now: Tick) -> bool {
        !self.held.is_empty()
            && !self.is_taking()
            && now >= self.rests_until
            && self.left().saturating_sub(cost) < self.demand.expected() / 4
            && self.is_hot(terms, now)
    }

    fn top_up(&mut self, terms: &Terms, waiter: Waiter, now: Tick) -> Option<Call> {
        if !self.wants_more(terms, 0, now) {
            return None;
        }
        let want = self.demand.expected();
        Some(self.call(waiter, What::Take(Slice { need: 0, want }), (Vec::new(), FOREVER), now))
    }

    /// Asks for those who wait, in the order in which they came.
    fn next_call(&mut self, terms: &Terms, now: Tick) -> Option<Call> {
        if self.under_way.len() >= MOST_UNDER_WAY {
            return None;
        }
        let waiter = self.waiting.first()?.waiter;
        let is_hot = self.is_hot(terms, now);
        let count = if is_hot { usize::MAX } else { MOST_TOGETHER };
        let count = self.waiting.len().min(count);
        let until = self.waiting[..count].iter().map(|queued| queued.until).max()?;
        let asked: Vec<(Waiter, Cost)> =
            self.waiting.drain(..count).map(|queued| (queued.waiter, queued.cost)).collect();
        if !is_hot {
            let costs = asked.iter().map(|(_, cost)| *cost).collect();
            return Some(self.call(waiter, What::Check(costs), (asked, until), now));
        }
        let fitting = asked.iter().filter(|(_, cost)| *cost <= terms.policy.capacity());
        let sum = fitting.fold(0, |sum: Cost, (_, cost)| sum.saturating_add(*cost));
        let need = sum.saturating_sub(self.left());
        // While a slice is on its way, only what is needed now is taken on top of it.
        let expected = if self.is_taking() { 0 } else { self.demand.expected() };
        let slice = Slice { need, want: need.max(expected) };
        Some(self.call(waiter, What::Take(slice), (asked, until), now))
    }

    /// Whether a slice is being asked for.
    fn is_taking(&self) -> bool {
        self.under_way.iter().any(|under_way| under_way.slice.is_some())
    }

    fn call(
        &mut self,
        waiter: Waiter,
        what: What,
        (asked, until): (Vec<(Waiter, Cost)>, Tick),
        now: Tick,
    ) -> Call {
        self.calls += 1;
        let number = (waiter, self.calls);
        let slice = match &what {
            What::Take(slice) => Some(*slice),
            What::Check(_) => None,
        };
        let call = Call { number, what, checks: asked.len(), until };
        // Most keys have one call under way.
        self.under_way.reserve_exact(1);
        self.under_way.push(UnderWay { number, slice, until, sent: now, asked });
        call
    }

    fn is_hot(&self, terms: &Terms, now: Tick) -> bool {
        terms.leases.is_some() && now >= self.unleased_until && self.demand.requests() >= HOT
    }
}

impl Known {
    fn of_slice(state: Box<[Standing]>, at: Tick, sent: Tick) -> Self {
        Self { state, at, sent, cost: 1, shadow: None, bounds: Bounds::default() }
    }

    /// The store's time, as far as it can be: what has passed since it was asked is at least what has passed since
    /// it answered.
    fn store_time(&self, now: Tick) -> Tick {
        let since = now.since(self.sent).0.div_ceil(NANOS);
        self.at.after(Ticks(since)).unwrap_or(self.at)
    }

    /// Whether the store is known to refuse a cost.
    fn refuses(&self, terms: &Terms, cost: Cost, now: Tick) -> bool {
        let tells = cost == self.cost || (cost > self.cost && !terms.tells_one_cost);
        let at = self.store_time(now);
        tells
            && now.since(self.sent) < REFUSED_FOR
            && !(terms.policy.admits(&self.state, at, cost) && self.bounds.have_room(at, cost))
    }

    /// A refusal of a cost, of which something is left here.
    fn refusal(&self, terms: &Terms, cost: Cost, left: Cost, at: Tick) -> Timed {
        let outcome = Outcome::Refused(cost - left);
        let mut told = Timed::of(&*terms.policy, &self.state, at, outcome, self.shadow);
        self.bounds.complete(&mut told.decision, &terms.policy, at, Some(cost - left));
        let there = told.decision.remaining.saturating_add(left);
        told.decision.remaining = there.min(cost - 1);
        told
    }
}

fn by(source: Source, Timed { decision, at }: Timed) -> Timed {
    Timed { decision: Decision { source, ..decision }, at }
}

/// What was asked for in the present half of a life and in the one before.
#[derive(Debug, Default)]
struct Demand {
    half: i64,
    this: Counted,
    last: Counted,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    requests: u64,
    cost: Cost,
}

impl Demand {
    fn note(&mut self, cost: Cost, now: Tick, half_life: Ticks) {
        let half = half_of(now, half_life);
        if half != self.half {
            self.last = if half == self.half + 1 { self.this } else { Counted::default() };
            (self.half, self.this) = (half, Counted::default());
        }
        self.this.requests += 1;
        self.this.cost = self.this.cost.saturating_add(cost);
    }

    const fn requests(&self) -> u64 {
        if self.this.requests > self.last.requests {
            self.this.requests
        } else {
            self.last.requests
        }
    }

    /// What will be asked for in half a life.
    const fn expected(&self) -> Cost {
        if self.this.cost > self.last.cost { self.this.cost } else { self.last.cost }
    }

    fn is_over(&self, now: Tick, half_life: Ticks) -> bool {
        self.requests() == 0 || half_of(now, half_life) > self.half + 1
    }
}

fn half_of(now: Tick, half_life: Ticks) -> i64 {
    now.0.div_euclid(i64::try_from(half_life.0).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tallygate::Penalty;

    use super::*;
    use crate::lease::ledger::{self, Out};

    const MS: i64 = 1_000_000;

    /// A desk, and a store whose clock is the same in microseconds.
    struct Scene {
        terms: Terms,
        desk: Desk,
        state: Box<[Standing]>,
        out: Out,
        waiters: u64,
        calls: Vec<Call>,
    }

    impl Scene {
        fn new(policy: Policy, leases: Option<Leases>) -> Self {
            let policy = Arc::new(policy);
            let state = policy.first(Tick(0));
            let terms = Terms::new(policy, true, leases);
            let desk = Desk::default();
            Self { terms, desk, state, out: Out::default(), waiters: 0, calls: Vec::new() }
        }

        fn ask(&mut self, cost: Cost, now: i64) -> Asked {
            self.waiters += 1;
            let asked = self.desk.ask(&self.terms, self.waiters, cost, (Tick(now), FOREVER));
            self.calls.extend(asked.call.clone());
            asked
        }

        /// The store carries out the call that was made last, and it is heard later.
        fn reply(&mut self, at: i64, now: i64) -> Heard {
            let call = self.calls.last().unwrap().clone();
            let (policy, at) = (&self.terms.policy, Tick(at / 1000));
            let came = match call.what {
                What::Check(costs) => {
                    let answers = costs.iter().map(|cost| {
                        let is_allowed = policy.decide::<bool>(&mut self.state, at, *cost);
                        Checked {
                            is_allowed,
                            state: self.state.clone(),
                            shadow: None,
                            bounds: Bounds::default(),
                        }
                    });
                    Came::Checked { at, answers: answers.collect() }
                }
                What::Take(slice) => {
                    let life = self.terms.leases.unwrap().in_store();
                    let (state, out) = (&mut self.state, &mut self.out);
                    let amount = ledger::take(policy, state, out, at, slice, life);
                    Came::Taken(Taken { amount, at, state: self.state.clone() })
                }
            };
            let heard = self.desk.hear(&self.terms, call.number, came, Tick(now));
            self.calls.extend(heard.call.clone());
            heard
        }

        /// Asks, and has a call answered at once.
        fn check(&mut self, cost: Cost, now: i64) -> Decision {
            let asked = self.ask(cost, now);
            if let Some(told) = asked.answer {
                return told.decision;
            }
            let heard = self.reply(now, now);
            let told = heard.verdicts.into_iter().find(|(waiter, _)| *waiter == self.waiters);
            match told {
                Some((_, Verdict::Told(told))) => told.decision,
                other => panic!("{other:?}"),
            }
        }
    }

    fn tokens(limit: Cost, window: Duration, burst: Cost) -> Policy {
        let micros = u64::try_from(window.as_micros()).unwrap();
        Policy::token_bucket(limit).per(Ticks(micros)).burst(burst).build().unwrap()
    }

    fn second(limit: Cost, burst: Cost) -> Policy {
        tokens(limit, Duration::from_secs(1), burst)
    }

    #[test]
    fn a_key_that_no_slice_can_be_taken_of_is_asked_for_by_checks() {
        let leases = Leases { life: Duration::from_millis(100) };
        let mut scene = Scene::new(second(1000, 1000), Some(leases));
        let slice = loop {
            let asked = scene.ask(1, MS);
            match asked.call {
                Some(call) if matches!(call.what, What::Take(_)) => break call,
                Some(_) => drop(scene.reply(MS, MS)),
                None => panic!("a lease was taken already"),
            }
        };
        let waiter = scene.waiters;
        // As of a key under several policies.
        let heard = scene.desk.hear(&scene.terms, slice.number, Came::Undecided, Tick(2 * MS));
        assert!(heard.verdicts.is_empty(), "the check still waits: {:?}", heard.verdicts);
        let call = heard.call.unwrap();
        assert!(matches!(&call.what, What::Check(costs) if **costs == [1]), "{call:?}");
        scene.calls.push(call);
        let heard = scene.reply(2 * MS, 3 * MS);
        assert!(
            matches!(&heard.verdicts[..], [(told, Verdict::Told(_))] if *told == waiter),
            "{heard:?}"
        );
        let again = scene.ask(1, 4 * MS).call.unwrap();
        assert!(matches!(again.what, What::Check(_)), "no slices for a while: {again:?}");
    }

    #[test]
    fn a_refusal_holds_until_the_time_it_told_and_no_longer() {
        let mut scene = Scene::new(second(10, 1), None);
        assert!(scene.check(1, 0).allowed);
        let refused = scene.check(1, 1000);
        assert_eq!((refused.source, refused.retry_after), (Source::Store, Some(Ticks(99_999))));
        let calls = scene.calls.len();
        let again = scene.check(1, 40 * MS);
        assert_eq!((again.source, again.retry_after), (Source::DenyCache, Some(Ticks(60_000))));
        assert_eq!(scene.check(1, 100 * MS - 1001).source, Source::DenyCache);
        assert_eq!(scene.calls.len(), calls, "nobody was asked");
        assert!(scene.check(1, 100 * MS).allowed);
    }

    #[test]
    fn a_refusal_counts_from_when_the_call_was_sent() {
        let mut scene = Scene::new(second(10, 1), None);
        assert!(scene.check(1, 0).allowed);
        assert!(scene.ask(1, MS).answer.is_none());
        // Carried out late, and heard later still: 60 ms of it have passed by then, as far as anybody knows.
        scene.reply(20 * MS, 61 * MS);
        let told = scene.check(1, 61 * MS);
        assert_eq!((told.source, told.retry_after), (Source::DenyCache, Some(Ticks(20_000))));
        assert_eq!(scene.check(1, 81 * MS).source, Source::Store);
    }

    #[test]
    fn a_refusal_is_asked_about_again_after_a_second() {
        let mut scene = Scene::new(tokens(1, Duration::from_secs(3600), 1), None);
        assert!(scene.check(1, 0).allowed);
        assert_eq!(scene.check(1, 0).source, Source::Store);
        assert_eq!(scene.check(1, 999 * MS).source, Source::DenyCache);
        assert_eq!(scene.check(1, 1000 * MS).source, Source::Store);
    }

    #[test]
    fn a_refusal_is_of_its_cost_and_above() {
        let mut scene = Scene::new(second(10, 10), None);
        assert!(scene.check(8, 0).allowed);
        assert!(!scene.check(5, 0).allowed);
        let above = scene.check(6, 0);
        assert_eq!((above.source, above.retry_after), (Source::DenyCache, Some(Ticks(400_000))));
        assert_eq!(scene.check(2, 0).source, Source::Store, "less was not refused");
    }

    #[test]
    fn of_a_log_a_refusal_is_of_its_cost_alone() {
        let log = Policy::sliding_window_log(10).per(Ticks(1_000_000)).build().unwrap();
        let mut scene = Scene::new(log, None);
        assert!(scene.check(8, 0).allowed);
        assert!(!scene.check(5, 0).allowed);
        assert_eq!(scene.check(5, 0).source, Source::DenyCache);
        assert_eq!(scene.check(6, 0).source, Source::Store);
    }

    #[test]
    fn what_counts_towards_a_penalty_is_always_asked_for() {
        let penalty = Penalty::lasting(Ticks(1_000_000)).after(3);
        let policy = Policy::token_bucket(1).per(Ticks(1_000_000)).penalty(penalty);
        let mut scene = Scene::new(policy.build().unwrap(), None);
        assert!(scene.check(1, 0).allowed);
        for _ in 0..3 {
            assert_eq!(scene.check(1, 0).source, Source::Store);
        }
    }

    #[test]
    fn a_change_from_here_shows_at_once() {
        let mut scene = Scene::new(second(10, 1), None);
        assert!(scene.check(1, 0).allowed);
        assert!(!scene.check(1, 0).allowed);
        scene.state = scene.terms.policy.fresh(Tick(0));
        assert_eq!(scene.check(1, 0).source, Source::DenyCache);
        scene.desk.changed();
        assert!(scene.check(1, 0).allowed);
    }

    #[test]
    fn checks_at_one_time_become_one_call_and_are_told_what_each_would_be_told() {
        let policy = Policy::leaky_bucket(10).per(Ticks(1_000_000)).burst(100).build().unwrap();
        let mut scene = Scene::new(policy.clone(), None);
        for cost in [1, 2, 3, 4] {
            assert!(scene.ask(cost, 0).answer.is_none());
        }
        scene.reply(0, MS);
        assert_eq!(
            scene.calls.iter().map(|call| call.what.clone()).collect::<Vec<_>>(),
            [What::Check([1].into()), What::Check([2, 3, 4].into())]
        );
        let heard = scene.reply(2 * MS, 3 * MS);
        let mut alone = policy.first(Tick(0));
        let _ = policy.decide::<Timed>(&mut alone, Tick(0), 1);
        for ((_, verdict), cost) in heard.verdicts.into_iter().zip([2, 3, 4]) {
            let expected = policy.decide::<Timed>(&mut alone, Tick(2000), cost);
            let Verdict::Told(told) = verdict else { panic!("{verdict:?}") };
            assert_eq!((told.at, told.decision.allowed), (expected.at, true));
            assert_eq!(told.decision.remaining, expected.decision.remaining);
            assert_eq!(told.decision.delay, expected.decision.delay);
        }
        assert_eq!(scene.calls.len(), 2);
    }

    #[test]
    fn of_those_who_do_not_fit_together_as_many_are_admitted_as_one_by_one() {
        for there in 1..12 {
            let mut scene = Scene::new(second(1, 100), None);
            scene.terms.policy.charge(&mut scene.state, Tick(0), i128::from(100 - there));
            let mut told = Vec::new();
            (0..40).for_each(|_| assert!(scene.ask(1, 0).answer.is_none()));
            let mut made = 0;
            while made < scene.calls.len() {
                made = scene.calls.len();
                told.extend(scene.reply(0, 0).verdicts);
            }
            let admitted = told.iter().filter(|(_, verdict)| match verdict {
                Verdict::Told(told) => told.decision.allowed,
                other => panic!("{other:?}"),
            });
            assert_eq!((admitted.count(), told.len()), (usize::try_from(there).unwrap(), 40));
            assert_eq!(made, 2, "calls for 40");
        }
    }

    /// A key that is asked for so often that it is leased.
    fn hot(policy: Policy) -> Scene {
        let mut scene = Scene::new(policy, Some(Leases::default()));
        for _ in 0..HOT {
            assert!(scene.check(1, 0).allowed);
        }
        scene
    }

    #[test]
    fn a_cold_key_is_asked_for_and_a_hot_one_is_served_here() {
        let mut scene = hot(second(1_000_000, 1_000_000));
        assert_eq!(scene.calls.iter().filter(|call| matches!(call.what, What::Take(_))).count(), 1);
        let calls = scene.calls.len();
        for served in 1..HOT / 2 {
            let told = scene.check(1, MS);
            assert_eq!((told.allowed, told.source), (true, Source::Lease), "{served}");
        }
        assert_eq!(scene.calls.len(), calls);
    }

    #[test]
    fn slices_grow_with_what_is_asked_for() {
        let mut scene = hot(second(1_000_000, 1_000_000));
        for request in 0..20_000 {
            let now = request * MS / 100;
            let asked = scene.ask(1, now);
            if asked.call.is_some() {
                scene.reply(now, now);
            }
        }
        assert!(scene.calls.len() < 40, "{} calls for 20 000", scene.calls.len());
    }

    #[test]
    fn a_lease_is_not_served_from_after_its_life_counted_from_when_it_was_asked_for() {
        let mut scene = hot(second(1_000_000, 1_000_000));
        assert!(scene.desk.left() > 0);
        (0..scene.desk.left()).for_each(|_| {
            let _ = scene.ask(1, MS);
        });
        assert!(scene.ask(1, 2 * MS).answer.is_none() || scene.desk.is_asking());
        scene.reply(50 * MS, 90 * MS);
        assert!(scene.desk.left() > 0);
        let life = scene.terms.leases.unwrap().in_process();
        let ends = MS + i64::try_from(life.0).unwrap();
        assert_eq!(scene.check(1, ends - 1).source, Source::Lease);
        let held = scene.desk.left();
        assert!(held > 0);
        assert!(scene.ask(1, ends + MS).answer.is_none(), "it is over");
    }

    #[test]
    fn a_lease_of_a_window_ends_with_the_window() {
        let policy = Policy::fixed_window(1000).per(Ticks(30_000)).build().unwrap();
        let mut scene = Scene::new(policy, Some(Leases::default()));
        for _ in 0..HOT {
            assert!(scene.check(1, 28 * MS).allowed);
        }
        assert!(scene.desk.left() > 0);
        assert_eq!(scene.check(1, 29 * MS).source, Source::Lease);
        assert!(scene.desk.left() > 0);
        assert!(scene.ask(1, 30 * MS).answer.is_none(), "it is over with the window");
    }

    #[test]
    fn j17_a_lease_of_a_window_lives_for_a_tenth_of_it_at_most() {
        let policy = |window_us| Policy::fixed_window(1000).per(Ticks(window_us)).build().unwrap();
        let life = |window_us, life_ms| {
            let leases = Leases::default().life(Duration::from_millis(life_ms));
            Terms::new(Arc::new(policy(window_us)), true, Some(leases))
                .leases()
                .map(Leases::lives_for)
        };
        assert_eq!(life(1_000_000, 500), Some(Duration::from_millis(100)));
        assert_eq!(life(1_000_000, 5000), Some(Duration::from_millis(100)));
        assert_eq!(life(1_000_000, 50), Some(Duration::from_millis(50)));
        assert_eq!(life(5000, 100), None, "too short for any lease");
        let bucket = Terms::new(Arc::new(second(10, 10)), true, Some(Leases::default()));
        assert_eq!(bucket.leases(), Some(Leases::default()), "a bucket earns all the time");
    }

    #[test]
    fn what_is_left_is_given_back_once_when_nobody_asks_any_more() {
        let mut scene = hot(second(1_000_000, 1_000_000));
        let left = scene.desk.left();
        assert_eq!(scene.desk.sweep(&scene.terms, Tick(10 * MS)), []);
        let back = scene.desk.sweep(&scene.terms, Tick(25 * MS));
        assert_eq!(back, [GivenBack { amount: left, taken: Tick(0) }]);
        assert_eq!((scene.desk.left(), scene.desk.lapsed), (0, 0));
        assert_eq!(scene.desk.close(&scene.terms, Tick(26 * MS)), []);
        assert!(!scene.desk.is_idle(&scene.terms, Tick(26 * MS)));
        assert!(scene.desk.is_idle(&scene.terms, Tick(200 * MS)));
    }

    #[test]
    fn of_a_leaky_bucket_nothing_is_given_back_and_turns_go_on() {
        let policy = Policy::leaky_bucket(100).per(Ticks(1_000_000)).burst(100).build().unwrap();
        let mut scene = hot(policy);
        let first = scene.check(1, 0);
        let next = scene.check(1, 0);
        assert_eq!((first.source, next.source), (Source::Lease, Source::Lease));
        assert_eq!(next.delay.0 - first.delay.0, 10_000, "{first:?} {next:?}");
        assert_eq!(scene.desk.close(&scene.terms, Tick(MS)), []);
    }

    #[test]
    fn a_quota_that_is_used_up_is_asked_about_now_and_then() {
        let mut scene = hot(second(1000, 12));
        let mut admitted = HOT;
        for request in 0..10_000 {
            admitted += u64::from(scene.check(1, request * MS / 100).allowed);
        }
        assert!((100..=112).contains(&admitted), "{admitted}");
        assert!(scene.calls.len() < 60, "{} calls for 10 000 in 100 ms", scene.calls.len());
    }

    #[test]
    fn a_cost_above_the_capacity_is_never_put_together_from_slices() {
        let mut scene = hot(second(1_000_000, 100));
        assert!(scene.desk.left() > 0);
        let told = scene.check(101, 0);
        assert_eq!((told.allowed, told.retry_after), (false, None));
    }

    #[test]
    fn a_reply_to_a_call_that_was_given_up_is_nothing() {
        let mut scene = Scene::new(second(10, 1), None);
        assert!(scene.ask(1, 0).answer.is_none());
        let late = scene.calls[0].clone();
        scene.desk.hear(&scene.terms, late.number, Came::Nothing, Tick(50 * MS));
        scene.desk = Desk::default();
        assert!(scene.ask(1, 60 * MS).answer.is_none());
        let came = Came::Taken(Taken { amount: 9, at: Tick(0), state: scene.state.clone() });
        assert!(
            scene.desk.hear(&scene.terms, late.number, came, Tick(61 * MS)).verdicts.is_empty()
        );
        assert!(scene.desk.is_asking());
    }
}
