//! Static dispatch on a limit's algorithm: the state machine is chosen once, not for every request.

use tallygate_core::{Algorithm, Limit, Machine};

/// Code that runs with the concrete algorithm of a limit.
pub(crate) trait MachineVisitor {
    type Output;

    fn visit<A: Algorithm<State: Send> + Send + 'static>(self, rule: A) -> Self::Output;
}

/// Calls the visitor with the algorithm of a limit.
pub(crate) fn visit_machine<M: MachineVisitor>(limit: &Limit, visitor: M) -> M::Output {
    match *limit.machine() {
        Machine::Bucket(rule) => visitor.visit(rule),
        Machine::WideBucket(rule) => visitor.visit(rule),
        Machine::FixedWindow(rule) => visitor.visit(rule),
        Machine::SlidingWindowLog(rule) => visitor.visit(rule),
        Machine::SlidingWindowCounter(rule) => visitor.visit(rule),
    }
}
