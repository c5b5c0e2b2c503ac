//! The allowances of a client's policies, and the requests that have room in them.

use tallygate_core::{Cost, Tick};

use crate::allowance::{Allowance, Rate};

use super::{ClientState, MAX_POLICIES, OtherPolicies};

/// The rates of the listed policies, in their order.
pub(super) type Rates = [Option<Rate>; MAX_POLICIES];

/// The allowances.
impl ClientState {
    pub(super) fn rates(&self) -> Rates {
        let mut rates = [None; MAX_POLICIES];
        if self.others.is_some() {
            for (rate, state) in rates.iter_mut().zip(self.each()) {
                *rate = Rate::of(&state.policy);
            }
        }
        rates
    }

    pub(super) fn allowances_mut(&mut self) -> impl Iterator<Item = &mut Allowance> {
        self.others.iter_mut().flat_map(|others| {
            let OtherPolicies { own, listed } = &mut **others;
            [own].into_iter().chain(listed.iter_mut().map(|one| &mut one.allowance))
        })
    }

    pub(super) fn rated_allowances(&self) -> impl Iterator<Item = (Rate, Allowance)> {
        self.rates()
            .into_iter()
            .zip(self.allowances())
            .filter_map(|(rate, allowance)| rate.map(|rate| (rate, allowance)))
    }

    /// Calls a function with each allowance that a request under the first policy must fit into, with its rate and
    /// capacity.
    pub(super) fn each_bound(&self, mut show: impl FnMut(&Allowance, &Rate, Cost)) {
        if self.others.is_none() {
            return;
        }
        let rates = self.rates();
        let Some(own) = rates[0] else { return };
        for (rate, allowance) in rates.iter().zip(self.allowances()) {
            if let Some(rate) = rate.filter(|rate| own.is_at_most(rate)) {
                show(&allowance, &rate, rate.shared_capacity(&rates));
            }
        }
    }

    /// Changes the same allowances.
    pub(super) fn change_allowances(
        &mut self,
        mut change: impl FnMut(&mut Allowance, &Rate, Cost),
    ) {
        if self.others.is_none() {
            return;
        }
        let rates = self.rates();
        let Some(own) = rates[0] else { return };
        for (rate, allowance) in rates.iter().zip(self.allowances_mut()) {
            if let Some(rate) = rate.filter(|rate| own.is_at_most(rate)) {
                change(allowance, &rate, rate.shared_capacity(&rates));
            }
        }
    }

    /// Returns an amount that was charged at a time to some of the allowances.
    pub(super) fn give_back_allowances(
        &mut self,
        now: Tick,
        amount: u128,
        charged_at: Tick,
        was_charged: impl Fn(&Rate) -> bool,
    ) {
        let rates = self.rates();
        for (rate, allowance) in rates.iter().zip(self.allowances_mut()) {
            if let Some(rate) = rate.filter(|rate| was_charged(rate)) {
                allowance.return_units(&rate, now, amount, charged_at);
            }
        }
    }

    /// Returns whether the allowances have room for a cost.
    pub(super) fn is_shared_out(&self, now: Tick, cost: Cost) -> bool {
        let mut has_room = true;
        self.each_bound(|allowance, rate, capacity| {
            has_room &= allowance.has_room(rate, capacity, now, cost);
        });
        has_room
    }

    /// Drops policies under which nothing is used, if no allowance needs their capacity, so that a client whose policy
    /// changed once is soon a client of one policy again.
    pub(super) fn drop_stale(&mut self, now: Tick) {
        let mut place = 1;
        loop {
            let rates = self.rates();
            let (Some(others), Some(first)) = (&mut self.others, &self.first) else { return };
            let Some(one) = others.listed.get(place - 1) else { return };
            let is_fresh = one.state.fresh_at().is_some_and(|fresh| fresh <= now);
            if !is_fresh || !is_spare(place, &rates, others, now) {
                place += 1;
            } else if others.listed.len() > 1 {
                others.listed.remove(place - 1);
            } else {
                // If it is the last one, the state of the first policy must account for its whole allowance.
                let is_covered =
                    |rate: Rate| others.own.is_within(&rate, first.used_of(&rate, now), now);
                if rates[0].is_none_or(is_covered) {
                    self.others = None;
                }
                return;
            }
        }
    }
}

/// Whether nothing of a policy's allowance is used, and the allowances of faster policies do not need its capacity.
fn is_spare(place: usize, rates: &Rates, others: &OtherPolicies, now: Tick) -> bool {
    let Some(rate) = rates[place] else { return true };
    let mut without = *rates;
    without[place] = None;
    rates.iter().zip(others.allowances()).enumerate().all(|(index, (other, allowance))| match other
    {
        Some(other) if index == place => allowance.level_at(other, now) == 0,
        Some(other) if rate.is_at_most(other) => {
            allowance.fits_into(other, other.shared_capacity(&without), now)
        }
        _ => true,
    })
}
