//! Decides which checks of one key this process answers by itself, and which calls it makes.
//!
//! Three mechanisms save calls. A *lease* serves checks from units that were taken in advance. A *denial* of the store
//! is repeated until its retry time, for at most one second. And while a call is in flight, new checks are queued, and
//! then sent in one call as a *list of costs*, which the store decides in order.
//!
//! The queue is sent when a reply arrives, when it is long enough for its own call, or when its first check has waited
//! for a small part of the time budget. So several calls of one key can be in flight, and a check waits for one round
//! trip instead of two. The number of calls and the queue are bounded. A check that cannot be answered in time leaves
//! the queue without being charged, and is denied as overloaded.
//!
//! This is a pure state machine, as the algorithms are: a check or a reply and `now` go in, decisions and calls come
//! out. `now` is in nanoseconds by the monotonic clock of this process. The times of the store, in microseconds, are
//! only advanced by the time that has passed in this process since the call was sent. There is no timer: the owner of
//! the broker [sweeps](KeyBroker::sweep) it.

mod demand;
mod status;
mod terms;
#[cfg(test)]
mod tests;

use tallygate::algorithm::{Algorithm as _, Answer as _, LimitRecord, Outcome, Timed};
use tallygate::store::Bounds;
use tallygate::{Cost, Decision, Source, Tick, Ticks};

use self::demand::Demand;
use self::status::StoreStatus;
pub(crate) use self::terms::Terms;
use crate::lease::by_any_clock;
use crate::lease::slice::{self, Slice, TakenSlice};

/// The number of a waiting caller.
pub(crate) type Waiter = u64;

/// The number of a call: one of its waiting callers, and the count of calls before it. Brokers come and go, and a late
/// reply must not be matched to another call.
pub(crate) type Number = (Waiter, u64);

/// The outcome of asking for a decision.
#[derive(Debug)]
pub(crate) enum AskOutcome {
    /// The check is decided. The call, if there is one, takes the next slice.
    Decided(Timed, Option<Call>),
    /// The decision follows with the reply to a call: this one, or one for the queue.
    Waits {
        call: Option<Call>,
        /// When to [flush](KeyBroker::flush) the queue at the latest, if the check waits in it.
        flush_at: Option<Tick>,
    },
    /// The queue is full.
    Overloaded,
}

/// A call to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) number: Number,
    pub(crate) kind: CallKind,
    /// How many checks wait for it.
    pub(crate) checks: usize,
    /// When the time budget of the last of these checks ends.
    pub(crate) until: Tick,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallKind {
    /// Checks several costs, one after the other.
    Check(Box<[Cost]>),
    Take(Slice),
}

/// The store's decision on one cost.
#[derive(Debug)]
pub(crate) struct CostDecision {
    pub(crate) is_allowed: bool,
    /// The state in the store after it.
    pub(crate) state: Box<[LimitRecord]>,
    pub(crate) shadow: Option<usize>,
    /// The bounds of the other policies that the key was checked under.
    pub(crate) bounds: Bounds,
}

/// The result of a call.
#[derive(Debug)]
pub(crate) enum CallResult {
    Checked {
        at: Tick,
        /// One per cost, in order.
        answers: Vec<CostDecision>,
    },
    Taken(TakenSlice),
    /// No script can decide on the key now.
    Undecided,
    /// The store answers, but it did not answer this call in time.
    Late,
    /// The store did not answer.
    NoReply,
}

/// The result for a waiting caller.
#[derive(Debug)]
pub(crate) enum Verdict {
    Decided(Timed),
    /// The caller has to check without a script.
    AskAlone,
    /// The check was not decided in time, although the store answers.
    Overloaded,
    /// The store did not answer.
    NoReply,
}

/// The outcome of a reply: results for waiting callers, and perhaps the next call.
#[derive(Debug, Default)]
pub(crate) struct ReplyOutcome {
    pub(crate) verdicts: Vec<(Waiter, Verdict)>,
    pub(crate) call: Option<Call>,
}

/// The unused rest of a slice, to be returned to the store. This process does not serve from it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnusedSlice {
    pub(crate) amount: Cost,
    /// When it was taken, by the store's clock.
    pub(crate) taken: Tick,
}

/// The knowledge of one process about one key.
#[derive(Debug, Default)]
pub(crate) struct KeyBroker {
    /// In the order in which they end.
    held: Vec<HeldSlice>,
    status: Option<StoreStatus>,
    sent_calls: Vec<SentCall>,
    /// In order of arrival.
    waiting: Vec<QueuedCheck>,
    /// The average time of a call.
    round_trip: Ticks,
    demand: Demand,
    /// Until when no slice is requested, because the quota was used up.
    rests_until: Tick,
    /// Until when no slice is requested, because the store could not decide on one.
    unleased_until: Tick,
    asked_at: Tick,
    calls: u64,
    /// Units that were charged in the store and not served, since this was last read.
    pub(crate) expired_units: Cost,
}

/// The rest of a slice.
#[derive(Debug)]
struct HeldSlice {
    left: Cost,
    /// Until when it may be used, by the clock of this process.
    until: Tick,
    /// The state in the store when it was taken.
    status: StoreStatus,
}

#[derive(Debug)]
struct SentCall {
    number: Number,
    /// The slice that it requests, if it does.
    slice: Option<Slice>,
    /// When the time budget of the last of its checks ends.
    until: Tick,
    sent: Tick,
    asked: Vec<(Waiter, Cost)>,
}

/// A check that waits to be sent.
#[derive(Clone, Copy, Debug)]
struct QueuedCheck {
    waiter: Waiter,
    cost: Cost,
    since: Tick,
    /// When its time budget ends.
    until: Tick,
}

/// The end of a call that no check waits for.
const FOREVER: Tick = Tick(i64::MAX);
/// How many checks one call has at most: the server does nothing else meanwhile.
const MAX_CHECKS_PER_CALL: usize = 128;
/// How many calls of one key are in flight at most.
const MAX_CALLS: usize = 32;
/// How many checks of one key are queued at most. Further checks are denied at once.
const MAX_WAITING: usize = 4096;
/// How many requests in half the life of a lease make a key hot. With fewer, a slice would serve hardly any checks.
const HOT: u64 = 8;
/// Nanoseconds per microsecond.
const NANOS_PER_MICRO: u64 = 1000;
/// How long no slice of a key is requested after no script could take one, in nanoseconds.
const UNLEASED_FOR: Ticks = Ticks(10_000_000_000);

impl KeyBroker {
    /// Asks for a decision on a cost of at least 1, within a time.
    pub(crate) fn ask(
        &mut self,
        terms: &Terms,
        waiter: Waiter,
        cost: Cost,
        (now, until): (Tick, Tick),
    ) -> AskOutcome {
        self.record_demand(terms, cost, now);
        if let Some(answer) = self.answer(terms, cost, now) {
            return AskOutcome::Decided(answer, self.top_up(terms, waiter, now));
        }
        if self.waiting.len() >= MAX_WAITING {
            return AskOutcome::Overloaded;
        }
        if self.waiting.is_empty() && self.sent_calls.is_empty() && !self.is_hot(terms, now) {
            // The common case: the key has no queue.
            let asked = (vec![(waiter, cost)], until);
            let call = Some(self.call(waiter, CallKind::Check([cost].into()), asked, now));
            return AskOutcome::Waits { call, flush_at: None };
        }
        self.waiting.push(QueuedCheck { waiter, cost, since: now, until });
        let call = if self.is_due(terms, now) { self.next_call(terms, now) } else { None };
        let flush_at = match call {
            Some(_) => None,
            None => now.after(terms.max_wait),
        };
        AskOutcome::Waits { call, flush_at }
    }

    /// Returns a call for the queue if its first check has waited long enough.
    pub(crate) fn flush(&mut self, terms: &Terms, now: Tick) -> ReplyOutcome {
        let mut verdicts = Vec::new();
        let mut call = None;
        if self.is_due(terms, now) {
            self.drop_late(terms, now, &mut verdicts);
            call = self.next_call(terms, now);
        }
        ReplyOutcome { verdicts, call }
    }

    /// Removes queued checks whose callers have gone: they are not charged.
    pub(crate) fn retain(&mut self, waits: impl Fn(Waiter) -> bool) {
        self.waiting.retain(|queued| waits(queued.waiter));
    }

    /// Returns whether the queue is to be sent.
    fn is_due(&self, terms: &Terms, now: Tick) -> bool {
        let Some(first) = self.waiting.first() else { return false };
        self.sent_calls.is_empty()
            || self.waiting.len() >= MAX_CHECKS_PER_CALL
            || now.since(first.since) >= terms.max_wait
    }

    /// Denies queued checks that can no longer be answered in time.
    fn drop_late(&mut self, terms: &Terms, now: Tick, verdicts: &mut Vec<(Waiter, Verdict)>) {
        let answered = now.after(self.round_trip).unwrap_or(now);
        self.waiting.retain(|queued| {
            let has_waited = now.since(queued.since) > terms.max_wait;
            let is_late = queued.until <= now || has_waited && queued.until < answered;
            if is_late {
                verdicts.push((queued.waiter, Verdict::Overloaded));
            }
            !is_late
        });
    }

    /// Returns the decision on a cost if no call is needed.
    pub(crate) fn answer_at_once(&mut self, terms: &Terms, cost: Cost, now: Tick) -> Option<Timed> {
        if self.wants_more(terms, cost, now) {
            return None;
        }
        let answer = self.answer(terms, cost, now)?;
        self.record_demand(terms, cost, now);
        Some(answer)
    }

    /// Handles the reply to a call. Ignores the reply to a call that was abandoned.
    pub(crate) fn handle_reply(
        &mut self,
        terms: &Terms,
        number: Number,
        result: CallResult,
        now: Tick,
    ) -> ReplyOutcome {
        let place = self.sent_calls.iter().position(|call| call.number == number);
        let Some(call) = place.map(|at| self.sent_calls.remove(at)) else {
            return ReplyOutcome::default();
        };
        let SentCall { slice, until, sent, asked, .. } = call;
        if !matches!(result, CallResult::NoReply | CallResult::Late) {
            let took = now.since(sent).0;
            let before = self.round_trip.0;
            self.round_trip =
                Ticks(if before == 0 { took } else { before - before / 4 + took / 4 });
        }
        let mut verdicts = Vec::with_capacity(asked.len());
        match result {
            CallResult::Late => {
                verdicts.extend(asked.into_iter().map(|(waiter, _)| (waiter, Verdict::Overloaded)));
            }
            CallResult::NoReply => {
                verdicts.extend(asked.into_iter().map(|(waiter, _)| (waiter, Verdict::NoReply)));
            }
            CallResult::Undecided if slice.is_some() => {
                // The key may be under several policies, which cannot be leased: its checks are sent one by one.
                self.status = None;
                self.unleased_until = sent.after(UNLEASED_FOR).unwrap_or(sent);
                let again = asked.into_iter().map(|(waiter, cost)| QueuedCheck {
                    waiter,
                    cost,
                    since: sent,
                    until,
                });
                self.waiting.splice(..0, again);
            }
            CallResult::Undecided => {
                self.status = None;
                verdicts.extend(asked.into_iter().map(|(waiter, _)| (waiter, Verdict::AskAlone)));
            }
            CallResult::Taken(taken) => {
                self.hold(terms, &taken, sent, now);
                if let Some(slice) = slice
                    && taken.amount < slice.want
                {
                    self.rests_until = sent.after(terms.pace).unwrap_or(sent);
                }
                let status = StoreStatus::of_slice(taken.state, taken.at, sent);
                for (waiter, cost) in asked {
                    let timed = self.serve(terms, cost, now).unwrap_or_else(|| {
                        let left = self.left_for(terms, cost);
                        status.denial(terms, cost, left, status.at)
                    });
                    // The store decided on these checks, by this call.
                    verdicts.push((waiter, Verdict::Decided(with_source(Source::Store, timed))));
                }
                self.status = Some(status);
            }
            CallResult::Checked { at, answers } => {
                // Calls that were in flight at the same time may be answered in any order.
                let is_news = self.status.as_ref().is_none_or(|status| status.at <= at);
                let mut last = None;
                for ((waiter, cost), CostDecision { is_allowed, state, shadow, bounds }) in
                    asked.into_iter().zip(answers)
                {
                    let status = StoreStatus { state, at, sent, cost, shadow, bounds };
                    let timed = if is_allowed {
                        let outcome = Outcome::Charged(cost);
                        let mut timed =
                            Timed::from_outcome(&*terms.policy, &status.state, at, outcome, shadow);
                        status.bounds.complete(&mut timed.decision, &terms.policy, at, None);
                        timed
                    } else {
                        status.denial(terms, cost, 0, at)
                    };
                    last = (!is_allowed).then_some(status);
                    verdicts.push((waiter, Verdict::Decided(with_source(Source::Store, timed))));
                }
                if is_news {
                    self.status = last;
                }
            }
        }
        if self.waiting.is_empty() {
            return ReplyOutcome { verdicts, call: None };
        }
        let queue = std::mem::take(&mut self.waiting);
        for queued in queue {
            match self.answer(terms, queued.cost, now) {
                Some(timed) => verdicts.push((queued.waiter, Verdict::Decided(timed))),
                None => self.waiting.push(queued),
            }
        }
        self.drop_late(terms, now, &mut verdicts);
        let call = self.next_call(terms, now);
        ReplyOutcome { verdicts, call }
    }

    /// Forgets the known state, because this process has changed the key in the store.
    pub(crate) fn changed(&mut self) {
        self.status = None;
        self.rests_until = Tick(i64::MIN);
    }

    /// Drops all held slices, because the key was reset.
    pub(crate) fn reset(&mut self) {
        self.changed();
        self.held.clear();
    }

    /// Takes the slices that are to be returned: of keys without recent checks, and slices that end soon.
    pub(crate) fn sweep(&mut self, terms: &Terms, now: Tick) -> Vec<UnusedSlice> {
        self.lapse(now);
        let Some(leases) = terms.leases else { return Vec::new() };
        let quarter = leases.in_process().0 / 4;
        let is_idle = now.since(self.asked_at).0 >= quarter;
        self.return_units(terms, |held| is_idle || held.until.since(now).0 <= quarter)
    }

    /// Takes all held slices, to be returned before the process ends.
    pub(crate) fn close(&mut self, terms: &Terms, now: Tick) -> Vec<UnusedSlice> {
        self.lapse(now);
        self.return_units(terms, |_| true)
    }

    /// Returns whether the broker has nothing to remember.
    pub(crate) fn is_idle(&self, terms: &Terms, now: Tick) -> bool {
        self.sent_calls.is_empty()
            && self.waiting.is_empty()
            && self.held.is_empty()
            && self.expired_units == 0
            && self.demand.is_over(now, terms.half_life())
            && self.status.as_ref().is_none_or(|status| !status.denies(terms, status.cost, now))
    }

    /// Returns whether a call is in flight.
    #[cfg(test)]
    pub(crate) const fn is_asking(&self) -> bool {
        !self.sent_calls.is_empty()
    }

    /// Returns whether a call with this number is in flight.
    #[cfg(test)]
    pub(crate) fn waits_for(&self, number: Number) -> bool {
        self.sent_calls.iter().any(|call| call.number == number)
    }

    fn return_units(
        &mut self,
        terms: &Terms,
        which: impl Fn(&HeldSlice) -> bool,
    ) -> Vec<UnusedSlice> {
        if !slice::returns_unused(&terms.policy) {
            return Vec::new();
        }
        let back = self.held.extract_if(.., |held| which(held));
        back.map(|held| UnusedSlice { amount: held.left, taken: held.status.at }).collect()
    }

    /// Drops slices whose lease has ended.
    fn lapse(&mut self, now: Tick) {
        let expired_units = &mut self.expired_units;
        self.held.retain(|held| {
            let lives = held.until > now;
            if !lives {
                *expired_units = expired_units.saturating_add(held.left);
            }
            lives
        });
    }

    fn left(&self) -> Cost {
        self.held.iter().fold(0, |left: Cost, held| left.saturating_add(held.left))
    }

    /// Returns the units that are held for a cost: none if the policy never allows the cost at once.
    fn left_for(&self, terms: &Terms, cost: Cost) -> Cost {
        if cost <= terms.policy.capacity() { self.left() } else { 0 }
    }

    /// Keeps a slice. Its life begins when its call was sent, and ends with the window if it is of a window.
    fn hold(&mut self, terms: &Terms, taken: &TakenSlice, sent: Tick, now: Tick) {
        let Some(leases) = terms.leases.filter(|_| taken.amount > 0) else { return };
        let mut life = leases.in_process();
        if !slice::tracks_outstanding(&terms.policy) {
            let window = terms.policy.facts(&taken.state, taken.at, None).reset_after;
            life = life.min(by_any_clock(Ticks(window.0.saturating_mul(NANOS_PER_MICRO))));
        }
        let status = StoreStatus::of_slice(taken.state.clone(), taken.at, sent);
        let until = sent.after(life).unwrap_or(sent);
        self.held.push(HeldSlice { left: taken.amount, until, status });
        self.lapse(now);
    }

    /// Decides without a call, if possible.
    fn answer(&mut self, terms: &Terms, cost: Cost, now: Tick) -> Option<Timed> {
        if let Some(served) = self.serve(terms, cost, now) {
            return Some(served);
        }
        let status = self.status.as_ref()?;
        let left = self.left_for(terms, cost);
        if terms.caches_denials && status.denies(terms, cost - left, now) {
            let timed = status.denial(terms, cost, left, status.store_time(now));
            return Some(with_source(Source::DenyCache, timed));
        }
        if now < self.rests_until {
            let mut timed = status.denial(terms, cost, left, status.store_time(now));
            let rests = Ticks(self.rests_until.since(now).0.div_ceil(NANOS_PER_MICRO));
            timed.decision.remaining = timed.decision.remaining.min(left);
            timed.decision.retry_after = timed.decision.retry_after.map(|wait| wait.max(rests));
            timed.decision.denied_by = Some(0);
            return Some(with_source(Source::Lease, timed));
        }
        None
    }

    /// Charges a cost to the held slices, if they have enough units.
    fn serve(&mut self, terms: &Terms, cost: Cost, now: Tick) -> Option<Timed> {
        if self.held.is_empty() {
            return None;
        }
        self.lapse(now);
        if self.left_for(terms, cost) < cost {
            return None;
        }
        let mut wanted = cost;
        let mut timed = None;
        for held in &mut self.held {
            if wanted == 0 {
                break;
            }
            let part = wanted.min(held.left);
            // The request comes after the units that were charged before the slice, and after those of the slice that
            // were served before.
            let outcome = Outcome::Charged(held.left);
            let at = held.status.store_time(now);
            timed =
                Some(Timed::from_outcome(&*terms.policy, &held.status.state, at, outcome, None));
            held.left -= part;
            wanted -= part;
        }
        self.held.retain(|held| held.left > 0);
        let mut timed = timed?;
        let available = timed.decision.remaining.saturating_add(self.left());
        timed.decision.remaining = available.min(timed.decision.limit.saturating_sub(cost));
        Some(with_source(Source::Lease, timed))
    }

    fn record_demand(&mut self, terms: &Terms, cost: Cost, now: Tick) {
        self.asked_at = now;
        if terms.leases.is_some() {
            self.demand.note(cost, now, terms.half_life());
        }
    }

    /// Returns whether so few units remain after a cost that a new slice should be requested.
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
        Some(self.call(waiter, CallKind::Take(Slice { need: 0, want }), (Vec::new(), FOREVER), now))
    }

    /// Returns a call for the queued checks, in order of arrival.
    fn next_call(&mut self, terms: &Terms, now: Tick) -> Option<Call> {
        if self.sent_calls.len() >= MAX_CALLS {
            return None;
        }
        let waiter = self.waiting.first()?.waiter;
        let is_hot = self.is_hot(terms, now);
        let count = if is_hot { usize::MAX } else { MAX_CHECKS_PER_CALL };
        let count = self.waiting.len().min(count);
        let until = self.waiting[..count].iter().map(|queued| queued.until).max()?;
        let asked: Vec<(Waiter, Cost)> =
            self.waiting.drain(..count).map(|queued| (queued.waiter, queued.cost)).collect();
        if !is_hot {
            let costs = asked.iter().map(|(_, cost)| *cost).collect();
            return Some(self.call(waiter, CallKind::Check(costs), (asked, until), now));
        }
        let fitting = asked.iter().filter(|(_, cost)| *cost <= terms.policy.capacity());
        let sum = fitting.fold(0, |sum: Cost, (_, cost)| sum.saturating_add(*cost));
        let need = sum.saturating_sub(self.left());
        // While a slice is being requested, take only the units that are needed now.
        let expected = if self.is_taking() { 0 } else { self.demand.expected() };
        let slice = Slice { need, want: need.max(expected) };
        Some(self.call(waiter, CallKind::Take(slice), (asked, until), now))
    }

    /// Returns whether a slice is being requested.
    fn is_taking(&self) -> bool {
        self.sent_calls.iter().any(|call| call.slice.is_some())
    }

    fn call(
        &mut self,
        waiter: Waiter,
        kind: CallKind,
        (asked, until): (Vec<(Waiter, Cost)>, Tick),
        now: Tick,
    ) -> Call {
        self.calls += 1;
        let number = (waiter, self.calls);
        let slice = match &kind {
            CallKind::Take(slice) => Some(*slice),
            CallKind::Check(_) => None,
        };
        let call = Call { number, kind, checks: asked.len(), until };
        // Most keys have one call in flight.
        self.sent_calls.reserve_exact(1);
        self.sent_calls.push(SentCall { number, slice, until, sent: now, asked });
        call
    }

    fn is_hot(&self, terms: &Terms, now: Tick) -> bool {
        terms.leases.is_some() && now >= self.unleased_until && self.demand.requests() >= HOT
    }
}

fn with_source(source: Source, Timed { decision, at }: Timed) -> Timed {
    Timed { decision: Decision { source, ..decision }, at }
}
