//! What one process does with the checks of one key: which it answers by itself, and what it asks the store.
//!
//! Three things keep a check from being a call of its own. A *lease* is served from. A *refusal* of the store holds
//! until it said, for at most a second at a time. And while a call is under way, those who come wait for it, and
//! are then asked for *together*.
//!
//! A pure state machine, as the algorithms are: a question or a reply and `now` go in, answers and calls come out.
//! `now` is nanoseconds by the process's own monotonic clock; the store's times, in microseconds, are only ever
//! carried on by what has passed here since the call was sent. There is no timer here: whoever holds desks
//! [sweeps](Desk::sweep) them.

use std::sync::Arc;

use tollgate::{
    Algorithm as _, Answer as _, Cost, Decision, Kind, Outcome, Policy, Source, Standing, Tick,
    Ticks, Timed,
};

use crate::lease::calls::Taken;
use crate::lease::ledger::{self, Slice};
use crate::lease::{Leases, by_any_clock, is_leasable};

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
}

/// A call to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) number: Number,
    pub(crate) what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// Ask for a cost, of one or of several together.
    Check(Cost),
    Take(Slice),
}

/// What became of a call.
#[derive(Debug)]
pub(crate) enum Came {
    Checked {
        is_allowed: bool,
        at: Tick,
        state: Box<[Standing]>,
        shadow: Option<usize>,
    },
    Taken(Taken),
    /// The scripts do not decide on this key now.
    Undecided,
    /// There was no answer.
    Nothing,
}

/// What somebody who waited is told.
#[derive(Debug)]
pub(crate) enum Verdict {
    Told(Timed),
    /// To ask for oneself, by another way.
    Alone,
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
    under_way: Option<UnderWay>,
    waiting: Vec<(Waiter, Cost)>,
    demand: Demand,
    /// Until when the store is not asked for slices.
    rests_until: Tick,
    asked_at: Tick,
    calls: u64,
    /// How many are asked for together at most, after some were refused together.
    together: Option<usize>,
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
}

#[derive(Debug)]
struct UnderWay {
    call: Call,
    sent: Tick,
    asked: Vec<(Waiter, Cost)>,
}

/// How long a refusal holds without asking again, in nanoseconds.
const REFUSED_FOR: Ticks = Ticks(1_000_000_000);
/// How many requests in half a life make a key hot. Below, a slice would hardly serve anybody.
const HOT: u64 = 8;
/// Which part of a life a used up quota rests.
const RESTS: u64 = 8;
const NANOS: u64 = 1000;

impl Terms {
    pub(crate) fn new(policy: Arc<Policy>, caches_refusals: bool, leases: Option<Leases>) -> Self {
        let leases = leases.filter(|_| is_leasable(&policy));
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
        }
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
    let fills =
        policy.plain().map(|limit| limit.numbers()).filter(|n| n.kind.is_bucket()).map(|n| {
            let fills = u128::from(n.burst) * u128::from(n.window.0) * u128::from(NANOS)
                / u128::from(n.limit.max(1));
            u64::try_from(fills / 4).unwrap_or(u64::MAX)
        });
    Ticks(longest.min(fills.unwrap_or(u64::MAX)))
}

impl Desk {
    /// Asks for a cost, at least 1.
    pub(crate) fn ask(&mut self, terms: &Terms, waiter: Waiter, cost: Cost, now: Tick) -> Asked {
        self.asked_at = now;
        if terms.leases.is_some() {
            self.demand.note(cost, now, terms.half_life());
        }
        match self.answer(terms, cost, now) {
            Some(answer) => Asked { answer: Some(answer), call: self.top_up(terms, waiter, now) },
            None => {
                self.waiting.push((waiter, cost));
                Asked { answer: None, call: self.next_call(terms, None, now) }
            }
        }
    }

    /// Takes the reply to a call. That of a call that was given up already is nothing.
    pub(crate) fn hear(&mut self, terms: &Terms, number: Number, came: Came, now: Tick) -> Heard {
        let Some(UnderWay { call, sent, asked }) =
            self.under_way.take_if(|under_way| under_way.call.number == number)
        else {
            return Heard::default();
        };
        let mut verdicts = Vec::with_capacity(asked.len());
        let mut room = None;
        match came {
            Came::Nothing => {
                verdicts.extend(asked.into_iter().map(|(waiter, _)| (waiter, Verdict::Nothing)));
            }
            Came::Undecided => {
                self.known = None;
                verdicts.extend(asked.into_iter().map(|(waiter, _)| (waiter, Verdict::Alone)));
            }
            Came::Taken(taken) => {
                self.hold(terms, &taken, sent, now);
                if let What::Take(slice) = call.what
                    && taken.amount < slice.want
                {
                    self.rests_until = sent.after(terms.pace).unwrap_or(sent);
                }
                let known = Known { state: taken.state, at: taken.at, sent, cost: 1, shadow: None };
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
            Came::Checked { is_allowed, at, state, shadow } => {
                let cost = asked.iter().fold(0, |sum: Cost, (_, cost)| sum.saturating_add(*cost));
                let known = Known { state, at, sent, cost, shadow };
                if is_allowed {
                    room = Some(terms.policy.facts(&known.state, at, None).remaining);
                    self.together = self.together.map(|most| most.saturating_mul(2));
                    verdicts = known.admissions(terms, asked);
                    self.known = None;
                } else if let [(waiter, cost)] = asked[..] {
                    let told = known.refusal(terms, cost, 0, at);
                    verdicts.push((waiter, Verdict::Told(by(Source::Store, told))));
                    self.known = Some(known);
                } else {
                    // Not all of them fit: fewer may.
                    self.together = Some(asked.len() / 2);
                    self.waiting.splice(0..0, asked);
                }
            }
        }
        if self.together.is_some_and(|most| most >= self.waiting.len()) {
            self.together = None;
        }
        for (waiter, cost) in std::mem::take(&mut self.waiting) {
            match self.answer(terms, cost, now) {
                Some(told) => verdicts.push((waiter, Verdict::Told(told))),
                None => self.waiting.push((waiter, cost)),
            }
        }
        let call = self.next_call(terms, room, now);
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
        self.under_way.is_none()
            && self.waiting.is_empty()
            && self.held.is_empty()
            && self.lapsed == 0
            && self.demand.is_over(now, terms.half_life())
            && self.known.as_ref().is_none_or(|known| !known.refuses(terms, known.cost, now))
    }

    /// Whether somebody waits for the store.
    pub(crate) const fn is_asking(&self) -> bool {
        self.under_way.is_some()
    }

    /// Whether it waits for the reply to a call.
    #[cfg(test)]
    pub(crate) fn waits_for(&self, number: Number) -> bool {
        self.under_way.as_ref().is_some_and(|under_way| under_way.call.number == number)
    }

    pub(crate) const fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    fn give_back(&mut self, terms: &Terms, which: impl Fn(&Held) -> bool) -> Vec<GivenBack> {
        if !ledger::gives_back(&terms.policy) {
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
        if !ledger::notes_what_is_out(&terms.policy) {
            let window = terms.policy.facts(&taken.state, taken.at, None).reset_after;
            life = life.min(by_any_clock(Ticks(window.0.saturating_mul(NANOS))));
        }
        let known = Known { state: taken.state.clone(), at: taken.at, sent, cost: 1, shadow: None };
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

    /// Asks for more before all is used.
    fn top_up(&mut self, terms: &Terms, waiter: Waiter, now: Tick) -> Option<Call> {
        if self.held.is_empty() || self.under_way.is_some() || now < self.rests_until {
            return None;
        }
        let want = self.demand.expected();
        if self.left() >= want / 4 || !self.is_hot(terms) {
            return None;
        }
        Some(self.call(waiter, What::Take(Slice { need: 0, want }), Vec::new(), now))
    }

    /// Asks for those who wait; for no more together than there is room for, if that is known.
    fn next_call(&mut self, terms: &Terms, room: Option<Cost>, now: Tick) -> Option<Call> {
        if self.under_way.is_some() {
            return None;
        }
        let &(waiter, first) = self.waiting.first()?;
        if self.is_hot(terms) {
            let fitting = self.waiting.iter().filter(|(_, cost)| *cost <= terms.policy.capacity());
            let sum = fitting.fold(0, |sum: Cost, (_, cost)| sum.saturating_add(*cost));
            let need = sum.saturating_sub(self.left());
            let slice = Slice { need, want: need.max(self.demand.expected()) };
            let asked = std::mem::take(&mut self.waiting);
            return Some(self.call(waiter, What::Take(slice), asked, now));
        }
        let most = terms.policy.capacity().min(room.unwrap_or(Cost::MAX)).max(first);
        let (mut sum, mut count) = (0, 0);
        for (_, cost) in self.waiting.iter().take(self.together.unwrap_or(usize::MAX).max(1)) {
            match cost.checked_add(sum) {
                Some(more) if more <= most => (sum, count) = (more, count + 1),
                _ => break,
            }
        }
        let asked = self.waiting.drain(..count).collect();
        Some(self.call(waiter, What::Check(sum), asked, now))
    }

    fn call(&mut self, waiter: Waiter, what: What, asked: Vec<(Waiter, Cost)>, now: Tick) -> Call {
        self.calls += 1;
        let call = Call { number: (waiter, self.calls), what };
        self.under_way = Some(UnderWay { call, sent: now, asked });
        call
    }

    fn is_hot(&self, terms: &Terms) -> bool {
        terms.leases.is_some() && self.demand.requests() >= HOT
    }
}

impl Known {
    /// The store's time, as far as it can be: what has passed since it was asked is at least what has passed since
    /// it answered.
    fn store_time(&self, now: Tick) -> Tick {
        let since = now.since(self.sent).0.div_ceil(NANOS);
        self.at.after(Ticks(since)).unwrap_or(self.at)
    }

    /// Whether the store is known to refuse a cost.
    fn refuses(&self, terms: &Terms, cost: Cost, now: Tick) -> bool {
        let tells = cost == self.cost || (cost > self.cost && !terms.tells_one_cost);
        tells
            && now.since(self.sent) < REFUSED_FOR
            && !terms.policy.admits(&self.state, self.store_time(now), cost)
    }

    /// A refusal of a cost, of which something is left here.
    fn refusal(&self, terms: &Terms, cost: Cost, left: Cost, at: Tick) -> Timed {
        let outcome = Outcome::Refused(cost - left);
        let mut told = Timed::of(&*terms.policy, &self.state, at, outcome, self.shadow);
        let there = told.decision.remaining.saturating_add(left);
        told.decision.remaining = there.min(cost - 1);
        told
    }

    /// What those are told who were admitted together: what each would have been told one after the other.
    fn admissions(&self, terms: &Terms, asked: Vec<(Waiter, Cost)>) -> Vec<(Waiter, Verdict)> {
        let mut from_here = self.cost;
        let mut told = Vec::with_capacity(asked.len());
        for (waiter, cost) in asked {
            let outcome = Outcome::Admitted(from_here);
            from_here -= cost;
            let mut timed = Timed::of(&*terms.policy, &self.state, self.at, outcome, self.shadow);
            timed.decision.remaining = timed.decision.remaining.saturating_add(from_here);
            told.push((waiter, Verdict::Told(timed)));
        }
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
