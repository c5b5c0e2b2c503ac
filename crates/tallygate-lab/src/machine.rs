//! A limit's own state machine, chosen once and not with every request.

use tallygate_core::{Algorithm, Limit, Machine};

/// Something that is made for one algorithm, whichever it turns out to be.
pub(crate) trait ForMachine {
    type Made;

    fn made<A: Algorithm<State: Send> + Send + 'static>(self, rule: A) -> Self::Made;
}

/// Makes it for the algorithm of a limit.
pub(crate) fn for_machine<M: ForMachine>(limit: &Limit, make: M) -> M::Made {
    match *limit.machine() {
        Machine::Bucket(rule) => make.made(rule),
        Machine::WideBucket(rule) => make.made(rule),
        Machine::FixedWindow(rule) => make.made(rule),
        Machine::SlidingWindowLog(rule) => make.made(rule),
        Machine::SlidingWindowCounter(rule) => make.made(rule),
    }
}
