//! Draws what each of the six algorithms does with the same traffic, for `docs/choosing-an-algorithm.md`.
//!
//! ```sh
//! cargo run -p tallygate-core --example pictures docs/pictures
//! ```
//!
//! The crate itself decides everything that is drawn. The figures on that page that no picture shows are asserted by
//! [`check_figures`] first, so that the pictures are not redrawn next to figures that are no longer true.

#![allow(
    clippy::incompatible_msrv,
    reason = "an example is built with the toolchain of the workspace"
)]

use std::error::Error;
use std::fmt::{self, Write as _};
use std::path::PathBuf;
use std::{env, fs};

use tallygate_core::{
    Anchor, BucketState, Cost, Decision, FixedWindowState, Kind, Limit, LimitBuilder, LimitState,
    MAX_LOG_ENTRIES, Machine, Policy, PolicyError, Simulator, SlidingWindowCounterState,
    SlidingWindowLogState, Tick, Ticks, simulate,
};

/// L, and also B, because no burst is set.
const LIMIT: Cost = 10;
/// W.
const WINDOW: i64 = 100;

/// The traffic, in order of time.
const TRAFFIC: [Phase; 5] = [
    Phase { label: Label::Left, first: 95, every: 0, requests: 14 },
    Phase { label: Label::Right, first: 105, every: 0, requests: 14 },
    Phase { label: Label::Over, first: 110, every: 5, requests: 19 },
    Phase { label: Label::Right, first: 305, every: 0, requests: 14 },
    Phase { label: Label::Right, first: 405, every: 0, requests: 14 },
];

/// A burst at one tick, or requests at regular intervals.
struct Phase {
    label: Label,
    first: i64,
    every: i64,
    requests: i64,
}

/// Where the label of a phase is drawn, so that neighboring labels do not overlap.
#[derive(Clone, Copy)]
enum Label {
    Left,
    Right,
    Over,
}

impl Phase {
    fn times(&self) -> impl Iterator<Item = Tick> {
        (0..self.requests).map(|index| Tick(self.first + index * self.every))
    }

    const fn last(&self) -> i64 {
        self.first + (self.requests - 1) * self.every
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let Some(folder) = env::args_os().nth(1).map(PathBuf::from) else {
        return Err("usage: pictures FOLDER, such as docs/pictures".into());
    };
    check_figures()?;
    fs::create_dir_all(&folder)?;
    for kind in Kind::ALL {
        let mut svg = String::new();
        draw(&mut svg, kind, &Run::of(limit(kind).limit()?))?;
        fs::write(folder.join(format!("{kind}.svg")), svg)?;
    }
    Ok(())
}

fn limit(kind: Kind) -> LimitBuilder {
    Policy::of(kind, LIMIT).per(Ticks(WINDOW.cast_unsigned()))
}

/// The decisions on the traffic.
struct Run {
    requests: Vec<Request>,
    /// Times and the remaining units, before and after each change.
    remaining: Vec<(i64, i64)>,
    /// Times and how far the theoretical arrival time is ahead (GCRA only; empty otherwise).
    ahead: Vec<(i64, i64)>,
}

struct Request {
    phase: usize,
    at: i64,
    /// The number of earlier requests at the same tick.
    rank: i64,
    decision: Decision,
}

impl Run {
    fn of(limit: Limit) -> Self {
        let mut simulator = Simulator::new(limit);
        let mut run = Self { requests: Vec::new(), remaining: Vec::new(), ahead: Vec::new() };
        for at in FROM..=TO {
            run.record_state(&mut simulator, at);
            let due = TRAFFIC.iter().enumerate().flat_map(|(phase, traffic)| {
                traffic.times().filter(|&time| time == Tick(at)).map(move |_| phase)
            });
            for (rank, phase) in (0..).zip(due) {
                let decision = simulator.step(0, Tick(at), 1);
                run.requests.push(Request { phase, at, rank, decision });
            }
            run.record_state(&mut simulator, at);
        }
        run.ahead.dedup();
        run
    }

    /// Records the state at a time, without a request.
    fn record_state(&mut self, simulator: &mut Simulator<Limit>, at: i64) {
        let decision: Decision = simulator.step(0, Tick(at), 0);
        self.remaining.push((at, decision.remaining.cast_signed()));
        if let (Machine::Bucket(bucket), Some(LimitState::Bucket(state))) =
            (simulator.rule().machine(), simulator.state(0))
            && simulator.rule().numbers().kind == Kind::Gcra
        {
            let arrival = bucket.arrival_time(state);
            self.ahead.push((at, arrival.tick.since(Tick(at)).0.cast_signed()));
        }
    }

    fn allowed(&self) -> impl Iterator<Item = &Request> {
        self.requests.iter().filter(|request| request.decision.allowed)
    }

    fn allowed_of(&self, phase: usize) -> usize {
        self.allowed().filter(|request| request.phase == phase).count()
    }

    /// Returns the wait of the first denied request.
    fn first_wait(&self) -> Ticks {
        let mut denied = self.requests.iter().filter(|request| !request.decision.allowed);
        denied.find_map(|request| request.decision.retry_after).unwrap_or_default()
    }

    /// Returns when each allowed request departs if it waits for its delay.
    fn departures(&self) -> impl Iterator<Item = i64> {
        self.allowed().map(|request| request.at + request.decision.delay.0.cast_signed())
    }

    fn longest_delay(&self) -> Ticks {
        self.allowed().map(|request| request.decision.delay).max().unwrap_or_default()
    }
}

// The page, in pixels. A tick is 8/5 pixels wide, so that all requests are at whole pixels.
const FROM: i64 = 60;
const TO: i64 = 510;
const LEFT: i64 = 40;
const RIGHT: i64 = x(TO);
const WIDTH: i64 = RIGHT + 16;
/// The height of a request.
const PITCH: i64 = 6;

const fn x(at: i64) -> i64 {
    LEFT + (at - FROM) * 8 / 5
}

/// Where the windows of the clock begin.
fn edges() -> impl Iterator<Item = i64> {
    (1..).map(|window| window * WINDOW).take_while(|&edge| edge < TO)
}

/// A strip of the page with its own scale on the left.
struct Panel {
    /// The position of 0.
    foot: i64,
    /// The height of 10.
    ten: i64,
    /// The largest value.
    top: i64,
    /// The numbers on the scale.
    numbers: &'static [i64],
}

const REQUESTS: Panel = Panel { foot: 164, ten: 10 * PITCH, top: 14, numbers: &[0, 5, 10] };
const QUOTA: Panel = Panel { foot: 264, ten: 60, top: 10, numbers: &[0, 5, 10] };
const ARRIVAL_TIME: Panel = Panel { foot: 354, ten: 5, top: 100, numbers: &[0, 50, 100] };
const DEPARTURES: Panel = Panel { foot: 310, ten: 10, top: 12, numbers: &[] };

impl Panel {
    const fn y(&self, value: i64) -> i64 {
        self.foot - value * self.ten / 10
    }

    fn draw(&self, svg: &mut String, name: impl fmt::Display, over: i64) -> fmt::Result {
        for edge in edges() {
            path(svg, "edge", format_args!("M{} {}V{}", x(edge), self.y(self.top), self.foot))?;
        }
        for &number in self.numbers {
            path(svg, "rule", format_args!("M{LEFT} {}H{RIGHT}", self.y(number)))?;
            text(svg, "end", (LEFT - 6, self.y(number) + 4), number)?;
        }
        path(svg, "", format_args!("M{LEFT} {}H{RIGHT}", self.foot))?;
        text(svg, "", (LEFT, self.y(self.top) - over), name)
    }
}

const STYLE: &str = "\
text{font:12px system-ui,sans-serif;fill:#57606a}\
.name{font-weight:600;font-size:14px}\
.end{text-anchor:end}.mid{text-anchor:middle}\
path{fill:none;stroke:#57606a}\
.edge{stroke-opacity:.4;stroke-dasharray:3 3}\
.rule{stroke-opacity:.2}\
.yes{fill:#0969da;stroke:none}\
.no{stroke:#bc4c00;stroke-width:1.5}\
.line{stroke:#0969da;stroke-width:1.5}\
@media(prefers-color-scheme:dark){\
text{fill:#9198a1}path{stroke:#9198a1}\
.yes{fill:#4493f8}.no{stroke:#f0883e}.line{stroke:#4493f8}}";

fn draw(svg: &mut String, kind: Kind, run: &Run) -> fmt::Result {
    let lowest = match kind {
        Kind::Gcra => ARRIVAL_TIME,
        Kind::LeakyBucket => DEPARTURES,
        _ => QUOTA,
    };
    let (foot, height) = (lowest.foot, lowest.foot + 40);
    let (allowed, all) = (run.allowed().count(), run.requests.len());
    let times: Vec<_> = run.allowed().map(|request| (request.at, 1)).collect();
    let (most, wait) = (most_in_a_window(&times), run.first_wait());

    writeln!(
        svg,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-labelledby="t d">"#
    )?;
    writeln!(svg, r#"<title id="t">{kind}: {allowed} of {all} requests allowed</title>"#)?;
    write!(svg, r#"<desc id="d">Limit {LIMIT} per {WINDOW} ticks."#)?;
    for (index, phase) in TRAFFIC.iter().enumerate() {
        let Phase { first, every, requests, .. } = *phase;
        write!(svg, " {} of {requests} allowed ", run.allowed_of(index))?;
        match every {
            0 => write!(svg, "at tick {first}.")?,
            _ => write!(svg, "from tick {first} to {}, one every {every}.", phase.last())?,
        }
    }
    writeln!(svg, " At most {most} in any {WINDOW} ticks.</desc>")?;
    writeln!(svg, "<style>{STYLE}</style>")?;

    text(svg, "name", (LEFT, 18), kind)?;
    let summary = format_args!(
        "{allowed} of {all} allowed, at most {most} in any {WINDOW} ticks; \
         the first denied request must wait {wait}"
    );
    text(svg, "", (LEFT, 36), summary)?;
    legend(svg)?;
    for edge in edges() {
        text(svg, "mid", (x(edge), foot + 16), edge)?;
    }
    text(svg, "end", (RIGHT, foot + 32), "time in ticks; dashed lines: multiples of the window")?;

    requests(svg, run)?;
    remaining(svg, run)?;
    match kind {
        Kind::Gcra => arrival_time(svg, run)?,
        Kind::LeakyBucket => departures(svg, run)?,
        _ => {}
    }
    writeln!(svg, "</svg>")
}

fn legend(svg: &mut String) -> fmt::Result {
    path(svg, "yes", Square((RIGHT - 130, 14)))?;
    text(svg, "", (RIGHT - 122, 18), "allowed")?;
    path(svg, "no", Cross((RIGHT - 56, 14)))?;
    text(svg, "", (RIGHT - 48, 18), "denied")
}

/// Draws the requests. Requests at the same tick are stacked, the first one at the bottom.
fn requests(svg: &mut String, run: &Run) -> fmt::Result {
    REQUESTS.draw(svg, "requests, stacked if they are at the same tick", 24)?;
    let (mut yes, mut no) = (String::new(), String::new());
    for request in &run.requests {
        let place = (x(request.at), REQUESTS.y(request.rank) - PITCH / 2);
        if request.decision.allowed {
            write!(yes, "{}", Square(place))?;
        } else {
            write!(no, "{}", Cross(place))?;
        }
    }
    path(svg, "yes", yes)?;
    path(svg, "no", no)?;
    for (index, phase) in TRAFFIC.iter().enumerate() {
        let top = REQUESTS.y(phase.requests) - 6;
        let (class, place) = match phase.label {
            Label::Left => ("end", (x(phase.first) + 4, top)),
            Label::Right => ("", (x(phase.first) - 4, top)),
            Label::Over => {
                ("mid", (x(i64::midpoint(phase.first, phase.last())), REQUESTS.y(1) - 6))
            }
        };
        text(svg, class, place, format_args!("{} of {}", run.allowed_of(index), phase.requests))?;
    }
    Ok(())
}

/// Draws the remaining units as steps.
fn remaining(svg: &mut String, run: &Run) -> fmt::Result {
    QUOTA.draw(svg, "remaining quota", 8)?;
    let mut line = String::new();
    for pair in run.remaining.windows(2) {
        if let [(_, before), (at, after)] = *pair
            && before != after
        {
            write!(line, "H{}V{}", x(at), QUOTA.y(after))?;
        }
    }
    path(svg, "line", format_args!("M{LEFT} {}{line}H{RIGHT}", QUOTA.y(LIMIT.cast_signed())))
}

/// Draws how far the theoretical arrival time is ahead. Only the corners of the line are written.
fn arrival_time(svg: &mut String, run: &Run) -> fmt::Result {
    ARRIVAL_TIME.draw(svg, "theoretical arrival time, ticks ahead of now", 8)?;
    let mut line = String::new();
    for around in run.ahead.windows(3) {
        if let [before, (at, ahead), after] = *around
            && (at - before.0) * (after.1 - ahead) != (ahead - before.1) * (after.0 - at)
        {
            write!(line, "L{} {}", x(at), ARRIVAL_TIME.y(ahead))?;
        }
    }
    let end = run.ahead.last().map_or(0, |&(_, ahead)| ahead);
    let foot = ARRIVAL_TIME.foot;
    path(svg, "line", format_args!("M{LEFT} {foot}{line}L{RIGHT} {}", ARRIVAL_TIME.y(end)))
}

fn departures(svg: &mut String, run: &Run) -> fmt::Result {
    let name =
        format_args!("departures: arrival plus delay, which is at most {}", run.longest_delay());
    DEPARTURES.draw(svg, name, 8)?;
    let mut marks = String::new();
    for at in run.departures() {
        write!(marks, "M{} {}v-12", x(at), DEPARTURES.foot)?;
    }
    path(svg, "line", marks)
}

fn path(svg: &mut String, class: &str, d: impl fmt::Display) -> fmt::Result {
    writeln!(svg, r#"<path class="{class}" d="{d}"/>"#)
}

fn text(
    svg: &mut String,
    class: &str,
    (x, y): (i64, i64),
    words: impl fmt::Display,
) -> fmt::Result {
    writeln!(svg, r#"<text class="{class}" x="{x}" y="{y}">{words}</text>"#)
}

/// The mark of an allowed request, around its center.
struct Square((i64, i64));

impl fmt::Display for Square {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (x, y) = self.0;
        write!(f, "M{} {}h6v4h-6z", x - 3, y - 2)
    }
}

/// The mark of a denied request, around its center.
struct Cross((i64, i64));

impl fmt::Display for Cross {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (x, y) = self.0;
        write!(f, "M{} {}l4 4m0-4l-4 4", x - 2, y - 2)
    }
}

/// Asserts the figures on the page that no picture shows.
fn check_figures() -> Result<(), PolicyError> {
    // Bytes per key on a 64-bit machine.
    assert_eq!(size_of::<BucketState>(), 16);
    assert_eq!(size_of::<BucketState<u128>>(), 32);
    assert_eq!(size_of::<FixedWindowState>(), 24);
    assert_eq!(size_of::<SlidingWindowCounterState>(), 32);
    assert_eq!(size_of::<SlidingWindowLogState>(), 48);
    assert_eq!(size_of::<(Tick, u64)>(), 16); // an entry of the log
    assert_eq!(size_of::<LimitState>(), 48);
    let prime_per_day = Policy::token_bucket(1_000_003).per_day().limit()?;
    assert!(matches!(prime_per_day.machine(), Machine::WideBucket(_)));

    // The buckets are one state machine: only the delay of the leaky bucket differs.
    let decisions = |kind| -> Result<Vec<Decision>, PolicyError> {
        Ok(Run::of(limit(kind).limit()?).requests.iter().map(|request| request.decision).collect())
    };
    let tokens = decisions(Kind::TokenBucket)?;
    let mut leaky = decisions(Kind::LeakyBucket)?;
    assert_eq!(tokens, decisions(Kind::Gcra)?);
    assert_ne!(tokens, leaky);
    leaky.iter_mut().for_each(|decision| decision.delay = Ticks::ZERO);
    assert_eq!(tokens, leaky);

    // Leaky bucket: departures are at least 10 ticks apart.
    let departures: Vec<_> = Run::of(limit(Kind::LeakyBucket).limit()?).departures().collect();
    assert_eq!(departures.windows(2).map(|pair| pair[1] - pair[0]).min(), Some(10));

    // With a burst of 1 and a request at every tick, 10 are allowed in any 100 ticks.
    let every_tick: Vec<_> = (0..1_000).map(|at| (at, 1)).collect();
    let smooth = allowed(limit(Kind::TokenBucket).burst(1), &every_tick)?;
    assert_eq!(most_in_a_window(&smooth), 10);

    // A cost above the burst never fits, even if the limit is larger.
    let small_burst = Policy::token_bucket(100).per(Ticks(100)).burst(20);
    assert_eq!(last_wait(small_burst, &[(0, 21)])?, None);

    // Fixed window: 20 in two neighboring ticks. If the window starts at a request: 19, and 32 of the traffic in the
    // pictures.
    let edge = [(99, 10), (100, 10)];
    assert_eq!(allowed(limit(Kind::FixedWindow), &edge)?, edge);
    let edge = [(50, 1), (149, 9), (150, 10)];
    let anchored = limit(Kind::FixedWindow).anchor(Anchor::FirstRequest);
    assert_eq!(allowed(anchored.clone(), &edge)?, edge);
    let drawn: Vec<_> = TRAFFIC.iter().flat_map(Phase::times).map(|time| (time.0, 1)).collect();
    assert_eq!(allowed(anchored, &drawn)?.len(), 32);

    // Sliding window log: a limit that could need too many entries is an error.
    assert_eq!(MAX_LOG_ENTRIES, 1_048_576);
    Policy::sliding_window_log(MAX_LOG_ENTRIES).per_day().limit()?;
    let longer = Policy::sliding_window_log(MAX_LOG_ENTRIES + 1).per_day().limit();
    assert!(matches!(longer, Err(PolicyError::LogTooLong { .. })));

    // Sliding window counter: 20 in the 100 ticks from 99 to 198.
    let mut end_and_greed = vec![(99, 10)];
    end_and_greed.extend((100..=198).map(|at| (at, 1)));
    let counted = allowed(limit(Kind::SlidingWindowCounter), &end_and_greed)?;
    assert_eq!(most_in_a_window(&counted), 20);

    // If time goes back by 50, the request is decided at 1000. If it goes back by 120, the state is rebased.
    for (back, wait) in [(950, 60), (880, 10)] {
        let last = last_wait(limit(Kind::TokenBucket), &[(1_000, 10), (back, 1)])?;
        assert_eq!(last, Some(Ticks(wait)));
    }
    Ok(())
}

fn decide(
    limit: LimitBuilder,
    trace: &[(i64, Cost)],
) -> Result<impl Iterator<Item = Decision>, PolicyError> {
    Ok(simulate(limit.limit()?, trace.iter().map(|&(at, cost)| ((), Tick(at), cost))))
}

/// Returns the times and costs that are allowed.
fn allowed(limit: LimitBuilder, trace: &[(i64, Cost)]) -> Result<Vec<(i64, Cost)>, PolicyError> {
    let decided = trace.iter().zip(decide(limit, trace)?);
    Ok(decided.filter(|(_, decision)| decision.allowed).map(|(&request, _)| request).collect())
}

/// Returns the wait of the last request.
fn last_wait(limit: LimitBuilder, trace: &[(i64, Cost)]) -> Result<Option<Ticks>, PolicyError> {
    Ok(decide(limit, trace)?.last().and_then(|decision| decision.retry_after))
}

/// Returns the most units that are allowed in any half-open window.
fn most_in_a_window(allowed: &[(i64, Cost)]) -> Cost {
    let ending = |end: i64| {
        let recent = allowed.iter().filter(move |(at, _)| (0..WINDOW).contains(&(end - at)));
        recent.map(|(_, cost)| cost).sum()
    };
    allowed.iter().map(|&(end, _)| ending(end)).max().unwrap_or(0)
}
