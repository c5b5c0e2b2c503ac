//! Tests `tallygate simulate`, `POST /v1/simulate` and `POST /v1/explain` with the real binary, and compares the results
//! with the core.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a failing test panics")]

use std::process::{Command, Output};
use std::time::Duration;

use crate::common::Served;
use crate::http_client::post;
use serde_json::{Value, json};
use tallygate::algorithm::{Algorithm as _, LimitState, Machine, Simulator, simulate};
use tallygate::{Decision, Kind, Limit, Policy, Tick, Ticks};

fn tallygate(options: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    command.arg("simulate").args(options).env_remove("COLUMNS").output().expect("the binary runs")
}

/// Runs a scenario and returns its report.
#[track_caller]
fn run(options: &str) -> Value {
    let options: Vec<&str> = options.split_whitespace().chain(["--json"]).collect();
    let output = tallygate(&options);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("the text is JSON")
}

fn numbers(list: &Value) -> Vec<u64> {
    let list = list.as_array().expect("the value is a list");
    list.iter().map(|number| number.as_u64().unwrap_or_else(|| panic!("{number}"))).collect()
}

fn lane<'a>(report: &'a Value, algorithm: &str) -> &'a Value {
    let mut lanes = report["lanes"].as_array().expect("there are lanes").iter();
    lanes.find(|lane| lane["algorithm"] == algorithm).unwrap_or_else(|| panic!("no {algorithm}"))
}

fn events<'a>(lane: &'a Value, field: &str) -> &'a Value {
    &lane["events"][field]
}

/// Returns the limit of a lane, with a tick of a microsecond.
fn limit_of(report: &Value, lane: &Value) -> Limit {
    let scenario = &report["scenario"];
    let kind: Kind = lane["algorithm"].as_str().unwrap().parse().expect("the algorithm is known");
    let number = |field: &str| scenario[field].as_u64().unwrap();
    let limit = Policy::of(kind, number("limit")).per(Ticks(number("window_ms") * 1000));
    let limit = if kind.is_bucket() { limit.burst(number("burst")) } else { limit };
    limit.limit().expect("the limit is valid")
}

fn tick(at_us: u64) -> Tick {
    Tick(i64::try_from(at_us).unwrap())
}

const PATTERNS: [&str; 7] = ["steady", "bursty", "poisson", "ramp", "spike", "retry", "greedy"];
/// The patterns that depend on the seed.
const RANDOM: [&str; 2] = ["poisson", "retry"];

#[test]
fn steady_requests_arrive_at_exact_times() {
    for rate in [7, 90, 100, 1234] {
        let report = run(&format!("--pattern steady --rate {rate}/m"));
        let due: Vec<u64> =
            (0..).map(|i| i * 60_000_000 / rate).take_while(|at| *at < 30_000_000).collect();
        for lane in report["lanes"].as_array().unwrap() {
            assert_eq!(numbers(events(lane, "at_us")), due);
        }
    }
}

#[test]
fn bursts_are_simultaneous_requests_with_the_given_mean_rate() {
    let report = run("--pattern bursty --burst-size 5 --rate 100/m --duration 60s");
    let times = numbers(events(lane(&report, "gcra"), "at_us"));
    assert_eq!(times.len(), 100);
    for (group, times) in times.chunks(5).enumerate() {
        assert!(times.iter().all(|at| *at == group as u64 * 3_000_000), "{times:?}");
    }
}

#[test]
fn random_arrivals_have_the_given_mean_rate_and_exponential_gaps() {
    let mut gaps = Vec::new();
    for seed in 1..=5 {
        let options = "--pattern poisson --rate 6000/m --duration 100s --algorithm gcra";
        let report = run(&format!("{options} --seed {seed}"));
        let times = numbers(events(lane(&report, "gcra"), "at_us"));
        // 10 000 are expected, with a deviation of 100.
        assert!((9_600..=10_400).contains(&times.len()), "{seed}: {}", times.len());
        gaps.extend(times.windows(2).map(|pair| pair[1] - pair[0]));
    }
    // Longer than the mean is one in e; longer than three times that, one in e³.
    let longer = |than| gaps.iter().filter(|gap| **gap > than).count() * 1000 / gaps.len();
    assert!((358..=378).contains(&longer(10_000)), "{}", longer(10_000));
    assert!((45..=55).contains(&longer(30_000)), "{}", longer(30_000));
}

#[test]
fn a_ramp_starts_at_zero_and_has_the_given_mean_rate() {
    let report = run("--pattern ramp --rate 120/m --duration 60s --algorithm gcra");
    let times = numbers(events(lane(&report, "gcra"), "at_us"));
    assert_eq!(times.len(), 119);
    // After half of the time, a quarter of the requests has arrived.
    assert_eq!(times.iter().filter(|at| **at <= 30_000_000).count(), 30);
    let gaps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.windows(2).all(|pair| pair[1] <= pair[0] + 1), "{gaps:?}");
}

#[test]
fn a_spike_around_a_boundary_shows_the_double_burst_of_fixed_windows() {
    let report = run("--pattern spike");
    let times = numbers(events(lane(&report, "fixed_window"), "at_us"));
    let near = |from, to| times.iter().filter(|at| (from..to).contains(*at)).count();
    assert_eq!(near(19_500_000, 20_000_000), 10);
    // One request of the background traffic arrives exactly at the boundary.
    assert_eq!(near(20_000_000, 20_500_000), 11);
    assert_eq!(lane(&report, "fixed_window")["worst_window"]["count"], 20);
    assert_eq!(lane(&report, "sliding_window_log")["worst_window"]["count"], 10);
}

#[test]
fn a_sliding_log_never_allows_more_than_the_limit_in_any_window() {
    for pattern in PATTERNS {
        let seeds =
            if RANDOM.contains(&pattern) { &["", "--seed 2", "--seed 3"][..] } else { &[""] };
        for seed in seeds {
            let report = run(&format!("--pattern {pattern} --rate 300/m --limit 7 {seed}"));
            let worst = &lane(&report, "sliding_window_log")["worst_window"]["count"];
            assert!(worst.as_u64().unwrap() <= 7, "{pattern} {seed}: {worst}");
        }
    }
}

#[test]
fn a_lone_client_that_waits_for_retry_after_is_allowed() {
    // Requests at 0 and 600 ms with a limit of one per second: the second is denied, and no other request follows.
    let report =
        run("--pattern retry --no-jitter --limit 1 --window 1s --rate 100/m --duration 1200ms");
    for lane in report["lanes"].as_array().unwrap() {
        let wait = lane["events"]["retry_after_us"][1].as_u64().unwrap();
        assert!((400_000..=400_001).contains(&wait), "{lane}");
        assert_eq!(numbers(events(lane, "at_us")), [0, 600_000, 600_000 + wait]);
        assert_eq!(numbers(events(lane, "attempt")), [1, 1, 2]);
        assert_eq!(numbers(events(lane, "allowed")), [1, 0, 1]);
        assert_eq!((&lane["retried"], &lane["gave_up"]), (&json!(1), &json!(0)));
    }
}

#[test]
fn a_client_whose_cost_can_never_fit_does_not_retry() {
    let report = run("--pattern retry --cost 11 --rate 60/m");
    for lane in report["lanes"].as_array().unwrap() {
        let counts = ["denied", "retried", "gave_up"].map(|field| lane[field].as_u64().unwrap());
        assert_eq!(counts, [30, 0, 30]);
        assert!(lane["events"]["retry_after_us"].as_array().unwrap().iter().all(Value::is_null));
    }
}

#[test]
fn a_client_that_ignores_retry_after_sends_more_and_gets_no_more() {
    let count = |report: &Value, field: &str| lane(report, "token_bucket")[field].as_u64().unwrap();
    let naive = run("--pattern retry --naive --no-jitter --rate 120/m");
    let obeys = run("--pattern retry --no-jitter --rate 120/m");
    assert!(count(&naive, "allowed") <= count(&obeys, "allowed") + 1);
    assert!(count(&naive, "denied") > count(&obeys, "denied"));
    assert!(count(&naive, "gave_up") > 0);
    // Each retry arrives exactly 200 ms after the previous attempt.
    let only = lane(&naive, "token_bucket");
    let (times, attempts) = (numbers(events(only, "at_us")), numbers(events(only, "attempt")));
    let first: Vec<u64> =
        times.iter().zip(&attempts).filter(|(_, n)| **n == 1).map(|(at, _)| *at).collect();
    for (at, attempt) in times.iter().zip(&attempts) {
        assert!(first.contains(&(at - (attempt - 1) * 200_000)), "{at} {attempt}");
        assert!((1..=5).contains(attempt));
    }
}

#[test]
fn jitter_at_most_doubles_a_wait_and_is_the_same_for_every_algorithm() {
    let report = run("--pattern retry --naive --rate 240/m --attempts 2");
    assert_eq!(
        lane(&report, "gcra")["events"]["at_us"],
        lane(&report, "token_bucket")["events"]["at_us"]
    );
    let only = lane(&report, "gcra");
    let (times, attempts) = (numbers(events(only, "at_us")), numbers(events(only, "attempt")));
    let denied: Vec<u64> = times
        .iter()
        .zip(&attempts)
        .zip(numbers(events(only, "allowed")))
        .filter(|((_, attempt), allowed)| **attempt == 1 && *allowed == 0)
        .map(|((at, _), _)| *at)
        .collect();
    let retries: Vec<u64> =
        times.iter().zip(&attempts).filter(|(_, n)| **n == 2).map(|(at, _)| *at).collect();
    assert!(retries.len() > 20);
    for at in &retries {
        assert!(denied.iter().any(|first| (first + 200_000..=first + 400_000).contains(at)));
    }
    let on_time = retries.iter().filter(|at| denied.contains(&(*at - 200_000))).count();
    assert!(on_time * 4 < retries.len(), "{on_time} of {}", retries.len());
}

#[test]
fn a_greedy_client_takes_nothing_from_the_others() {
    let normal = |factor: u64| {
        let report =
            run(&format!("--pattern greedy --clients 4 --rate 320/m --greedy-factor {factor}"));
        let lanes = report["lanes"].as_array().unwrap().iter();
        lanes
            .map(|lane| {
                let clients = lane["clients"].as_array().unwrap();
                assert_eq!(clients[4]["greedy"], true);
                assert!(clients[..4].iter().all(|client| client["greedy"] == false));
                let of = numbers(events(lane, "client"));
                let decided = (0..of.len()).filter(|i| of[*i] < 4).map(|i| {
                    ["at_us", "client", "allowed", "remaining", "retry_after_us", "reset_after_us"]
                        .map(|field| lane["events"][field][i].clone())
                });
                (decided.collect::<Vec<_>>(), clients[..4].to_vec())
            })
            .collect::<Vec<_>>()
    };
    let modest = normal(1);
    assert_eq!(modest.len(), 6);
    assert_eq!(modest, normal(50));
    let report = run("--pattern greedy --clients 4 --rate 320/m --greedy-factor 50");
    let clients = &lane(&report, "token_bucket")["clients"];
    assert_eq!((&clients[0]["requests"], &clients[4]["requests"]), (&json!(40), &json!(2000)));
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_seed_does_not() {
    let served = Served::start(&[], None);
    for pattern in PATTERNS {
        let once = |seed: u64| {
            let body = json!({ "pattern": pattern, "seed": seed });
            post(served.http(), "/v1/simulate", &body.to_string())
        };
        assert_eq!(once(1).body, once(1).body, "{pattern}");
        let lanes = |seed| once(seed).json()["lanes"].clone();
        assert_eq!(lanes(1) != lanes(2), RANDOM.contains(&pattern), "{pattern}");
    }
}

#[test]
fn a_seed_is_rejected_if_nothing_is_random() {
    for pattern in PATTERNS {
        let seeded = |more: &[&str]| {
            let options = [&["--pattern", pattern, "--seed", "2"], more].concat();
            let output = tallygate(&options);
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            (output.status.code(), message.contains("--seed has no effect"))
        };
        let is_random = RANDOM.contains(&pattern);
        assert_eq!(seeded(&[]), (Some(if is_random { 0 } else { 2 }), !is_random), "{pattern}");
        assert_eq!(seeded(&["--instances", "2"]), (Some(0), false), "{pattern}");
    }
    for fixed in [&["--no-jitter"][..], &["--attempts", "1"]] {
        let options = [&["--pattern", "retry", "--seed", "2"], fixed].concat();
        assert_eq!(tallygate(&options).status.code(), Some(2), "{fixed:?}");
    }
}

#[test]
fn the_traffic_of_a_seed_does_not_change_between_versions() {
    let report = run("--pattern poisson");
    let times = numbers(events(lane(&report, "gcra"), "at_us"));
    assert_eq!(times[..5], [378_779, 574_327, 593_945, 1_134_693, 1_675_582]);
}

#[test]
fn http_and_the_command_line_give_the_same_bytes() {
    let served = Served::start(&[], None);
    let scenarios = [
        (json!({}), "--pattern steady"),
        (json!({ "limit": 25 }), "--limit 25"),
        (
            json!({
                "limit": 7, "window_ms": 1500, "burst": 3, "algorithms": ["gcra", "fixed_window"],
                "pattern": "retry", "rate_per_minute": 360, "duration_ms": 20_000, "cost": 2,
                "retry": { "obeys": false, "jitter": false, "naive_wait_ms": 50, "attempts": 3 },
            }),
            "--limit 7 --window 1500ms --burst 3 --algorithm gcra --algorithm fixed_window --pattern retry \
             --rate 6/s --duration 20s --cost 2 --naive --no-jitter --naive-wait 50ms --attempts 3",
        ),
        (
            json!({ "pattern": "greedy", "clients": 2, "greedy_factor": 3 }),
            "--pattern greedy --clients 2 --greedy-factor 3",
        ),
        (json!({ "pattern": "bursty", "burst_size": 4 }), "--pattern bursty --burst-size 4"),
        (json!({ "pattern": "poisson", "seed": 5 }), "--pattern poisson --seed 5"),
        (json!({ "instances": 4, "rate_per_minute": 150 }), "--instances 4 --rate 2.5/s"),
    ];
    for (body, options) in scenarios {
        let reply = post(served.http(), "/v1/simulate", &body.to_string());
        assert_eq!((reply.status, reply.field("content-type")), (200, Some("application/json")));
        let options: Vec<&str> = options.split_whitespace().chain(["--json"]).collect();
        let printed = String::from_utf8(tallygate(&options).stdout).unwrap();
        assert!(printed == reply.body.clone() + "\n", "{body}");
        for (field, given) in body.as_object().unwrap() {
            assert_eq!(reply.json()["scenario"][field], *given);
        }
    }
}

#[test]
fn every_decision_equals_that_of_the_library() {
    for pattern in PATTERNS {
        let report = run(&format!("--pattern {pattern} --rate 200/m --burst 4 --cost 2"));
        for lane in report["lanes"].as_array().unwrap() {
            let limit = limit_of(&report, lane);
            let trace = numbers(events(lane, "client"));
            let trace = trace.into_iter().zip(numbers(events(lane, "at_us")));
            let decided: Vec<Decision> =
                simulate(limit, trace.map(|(client, at)| (client, tick(at), 2))).collect();
            let has = |field: &str, value: &dyn Fn(&Decision) -> Value| {
                let expected: Vec<Value> = decided.iter().map(value).collect();
                assert_eq!(events(lane, field), &json!(expected), "{pattern} {field}");
            };
            has("allowed", &|decision| u8::from(decision.allowed).into());
            has("remaining", &|decision| decision.remaining.into());
            has("retry_after_us", &|decision| decision.retry_after.map(|wait| wait.0).into());
            has("delay_us", &|decision| decision.delay.0.into());
            has("reset_after_us", &|decision| decision.reset_after.0.into());
            let allowed = decided.iter().filter(|decision| decision.allowed).count();
            assert_eq!(lane["allowed"], allowed);
            assert_eq!(lane["denied"], decided.len() - allowed);
            let first = decided.iter().position(|decision| !decision.allowed);
            assert_eq!(
                lane["first_denied_us"].as_u64(),
                first.map(|i| numbers(events(lane, "at_us"))[i])
            );
        }
    }
}

/// Returns the state of the only client, as reports show it, in thousandths.
fn level(simulator: &Simulator<Limit>, at_us: u64) -> u64 {
    let limit = simulator.rule();
    let first = limit.initial(tick(at_us));
    let state = simulator.state(0).unwrap_or(&first);
    let rounded = |numerator: u128, denominator: u128| {
        u64::try_from((numerator * 2 + denominator) / (2 * denominator)).unwrap()
    };
    if let (Machine::Bucket(bucket), LimitState::Bucket(state)) = (limit.machine(), state)
        && limit.numbers().kind == Kind::Gcra
    {
        let time = bucket.arrival_time(state);
        let (part, of) = (u128::from(time.fraction.0), u128::from(time.fraction.1));
        let ahead = i128::from(time.tick.0) - i128::from(at_us);
        // An arrival time in the past counts as 0, whatever its fraction.
        return u128::try_from(ahead).map_or(0, |ahead| rounded(ahead * of + part, of));
    }
    let used = limit.used(state, tick(at_us));
    let (part, of) = (u128::from(used.part.0), u128::from(used.part.1));
    let used = u128::from(used.whole) * of + part;
    match limit.numbers().kind {
        Kind::TokenBucket => rounded((u128::from(limit.capacity()) * of - used) * 1000, of),
        _ => rounded(used * 1000, of),
    }
}

#[test]
#[allow(
    clippy::float_arithmetic,
    reason = "the numbers in JSON are compared with the expected ones"
)]
fn the_state_series_of_every_client_equals_the_state_of_the_core() {
    for pattern in PATTERNS {
        let report = run(&format!("--pattern {pattern} --limit 7 --rate 150/m"));
        for lane in report["lanes"].as_array().unwrap() {
            for (client, shown) in lane["clients"].as_array().unwrap().iter().enumerate() {
                let mut simulator = Simulator::new(limit_of(&report, lane));
                let drawn = numbers(&shown["state"]["at_us"]);
                assert!(drawn.len() >= 241 && drawn.is_sorted(), "{pattern}");
                let values = shown["state"]["value"].as_array().unwrap().iter();
                let values: Vec<f64> = values.map(|value| value.as_f64().unwrap()).collect();
                assert!((0..=240).all(|step| drawn.contains(&(step * 125_000))), "{pattern}");
                let shows = |at_us: u64, thousandths: u64| {
                    let first = drawn.partition_point(|at| *at < at_us);
                    let here =
                        drawn[first..].iter().take_while(|at| **at == at_us).zip(&values[first..]);
                    let mut here = here.map(|(_, value)| *value);
                    assert!(
                        here.any(|value| (value * 1000.0 - thousandths as f64).abs() < 0.01),
                        "{pattern} {} at {at_us}: {thousandths}",
                        lane["algorithm"]
                    );
                };
                let mut next = 0;
                let times = numbers(events(lane, "at_us"));
                for (at, of) in times.into_iter().zip(numbers(events(lane, "client"))) {
                    if of != client as u64 {
                        continue;
                    }
                    while next <= at {
                        shows(next, level(&simulator, next));
                        next += 125_000;
                    }
                    shows(at, level(&simulator, at));
                    simulator.step::<bool>(0, tick(at), 1);
                    shows(at, level(&simulator, at));
                }
            }
        }
    }
}

#[test]
fn the_worst_window_is_the_maximum_over_all_windows() {
    for pattern in PATTERNS {
        let report = run(&format!("--pattern {pattern} --rate 200/m --window 3s --cost 2"));
        for lane in report["lanes"].as_array().unwrap() {
            let (times, clients, allowed) = (
                numbers(events(lane, "at_us")),
                numbers(events(lane, "client")),
                numbers(events(lane, "allowed")),
            );
            let within = |client: u64, from: u64| {
                let counted = (0..times.len()).filter(|&i| {
                    clients[i] == client
                        && allowed[i] == 1
                        && (from..from + 3_000_000).contains(&times[i])
                });
                counted.count() as u64 * 2
            };
            // One of the worst windows starts with an allowed request.
            let most = (0..times.len()).map(|i| within(clients[i], times[i])).max().unwrap();
            let worst = &lane["worst_window"];
            assert_eq!(worst["count"], most, "{pattern}");
            let from = worst["from_us"].as_u64().unwrap();
            assert!(clients.iter().any(|client| within(*client, from) == most), "{pattern}");
        }
    }
}

/// Returns the value of a step curve at a time, after all rises at that time.
fn height(line: &Value, at_us: u64) -> u64 {
    let place = numbers(&line["at_us"]).partition_point(|at| *at <= at_us);
    numbers(&line["value"])[place - 1]
}

#[test]
fn the_curves_of_every_client_count_its_units_and_buckets_stay_below_the_ideal() {
    for pattern in PATTERNS {
        let report = run(&format!("--pattern {pattern} --rate 200/m --cost 2 --burst 6"));
        for lane in report["lanes"].as_array().unwrap() {
            let field = |name: &str| numbers(events(lane, name));
            let (times, allowed, attempts) = (field("at_us"), field("allowed"), field("attempt"));
            let (clients, delays) = (field("client"), field("delay_us"));
            for (client, shown) in lane["clients"].as_array().unwrap().iter().enumerate() {
                let own: Vec<usize> =
                    (0..times.len()).filter(|&i| clients[i] == client as u64).collect();
                let count =
                    |of: &dyn Fn(usize) -> bool| 2 * own.iter().filter(|i| of(**i)).count() as u64;
                for &at in own.iter().map(|i| &times[*i]).step_by(7) {
                    let units = count(&|i| allowed[i] == 1 && times[i] <= at);
                    assert_eq!(height(&shown["cumulative"], at), units, "{pattern}");
                    let left = count(&|i| allowed[i] == 1 && times[i] + delays[i] <= at);
                    assert_eq!(height(&shown["departures"], at), left, "{pattern}");
                    let requested = count(&|i| attempts[i] == 1 && times[i] <= at);
                    assert_eq!(height(&report["offered"][client], at), requested, "{pattern}");
                    let kind: Kind = lane["algorithm"].as_str().unwrap().parse().unwrap();
                    if kind.is_bucket() {
                        assert!(units <= 6 + at * 10 / 10_000_000);
                    }
                }
            }
        }
        assert_eq!(report["ideal"], json!({ "at_us": [0, 30_000_000], "value": [6, 36] }));
    }
}

#[test]
fn requests_leave_a_leaky_bucket_at_an_even_rate_and_a_token_bucket_at_once() {
    let report = run("--pattern bursty --burst-size 10 --limit 10 --window 10s --rate 20/m");
    let rises = |algorithm: &str| {
        let line = &lane(&report, algorithm)["clients"][0]["departures"];
        let (at, value) = (numbers(&line["at_us"]), numbers(&line["value"]));
        let corners = at.into_iter().zip(value).collect::<Vec<_>>();
        corners
            .windows(2)
            .filter(|pair| pair[1].1 > pair[0].1)
            .map(|pair| (pair[1].0, pair[1].1 - pair[0].1))
            .collect::<Vec<_>>()
    };
    assert_eq!(rises("token_bucket"), [(0, 10)]);
    let leaky = rises("leaky_bucket");
    assert_eq!(leaky.len(), 10, "{leaky:?}");
    assert!(
        leaky.iter().zip(0..).all(|(rise, second)| *rise == (second * 1_000_000, 1)),
        "{leaky:?}"
    );
    assert_eq!(lane(&report, "leaky_bucket")["longest_delay_us"], 9_000_000);
    assert_eq!(lane(&report, "token_bucket")["longest_delay_us"], 0);

    // The text report shows the same: one tall bar, and an even row of low ones.
    let shown =
        tallygate(&["--ascii", "--pattern", "bursty", "--burst-size", "10", "--rate", "20/m"]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    let row = |algorithm: &str| {
        let mut lines = shown.lines().skip_while(|line| line.is_empty() || !line.contains('#'));
        let at = lines.by_ref().find(|line| line.starts_with(algorithm));
        assert!(at.is_some(), "{shown}");
        lines.next().unwrap()[24..].to_owned()
    };
    assert!(row("token_bucket").starts_with("9___"), "{shown}");
    assert_eq!(row("leaky_bucket").matches('1').count(), 10, "{shown}");
    assert!(!row("leaky_bucket").contains(|bar: char| ('2'..='9').contains(&bar)), "{shown}");
}

#[test]
fn instances_with_a_share_each_deny_requests_that_another_instance_would_allow() {
    let report = run("--pattern bursty --burst-size 10 --instances 3 --limit 10 --rate 60/m");
    for lane in report["lanes"].as_array().unwrap() {
        let limits: Vec<Limit> = [4, 3, 3]
            .map(|share| {
                let kind: Kind = lane["algorithm"].as_str().unwrap().parse().unwrap();
                Policy::of(kind, share).per(Ticks(10_000_000)).limit().unwrap()
            })
            .to_vec();
        let mut instances: Vec<Simulator<Limit>> = limits.into_iter().map(Simulator::new).collect();
        let field = |name: &str| numbers(events(lane, name));
        let (times, instance, allowed) = (field("at_us"), field("instance"), field("allowed"));
        assert!((0..3).all(|one| instance.contains(&one)), "{instance:?}");
        let mut elsewhere = 0;
        for i in 0..times.len() {
            let one = usize::try_from(instance[i]).unwrap();
            let is_allowed = instances[one].step::<bool>(0, tick(times[i]), 1);
            assert_eq!(u64::from(is_allowed), allowed[i], "{} {i}", lane["algorithm"]);
            let fits = |other: &Simulator<Limit>| match other.state(0) {
                Some(state) => other.rule().allows(state, tick(times[i]), 1),
                None => true,
            };
            elsewhere += u64::from(!is_allowed && instances.iter().any(fits));
        }
        let division = &lane["division"];
        assert_eq!(division["denied_with_room_elsewhere"], elsewhere, "{}", lane["algorithm"]);
        assert!(elsewhere > 0, "{}", lane["algorithm"]);
        let sum = |name: &str| numbers(&division[name]).into_iter().sum::<u64>();
        assert_eq!((sum("requests"), sum("allowed")), (30, lane["allowed"].as_u64().unwrap()));
        // One quota for all instances.
        let shared = run("--pattern bursty --burst-size 10 --limit 10 --rate 60/m");
        let shared = super::simulate::lane(&shared, lane["algorithm"].as_str().unwrap());
        assert_eq!(division["allowed_if_shared"], shared["allowed"]);
        assert!(lane["allowed"].as_u64() < shared["allowed"].as_u64(), "{}", lane["algorithm"]);
        assert!(shared.get("division").is_none());
    }
    let shown = tallygate(&["--instances", "3"]).stdout;
    let shown = String::from_utf8(shown).unwrap();
    assert!(
        shown.contains("divided between 3 instances") && shown.contains("room elsewhere"),
        "{shown}"
    );
}

#[test]
fn a_worst_window_above_the_limit_is_explained() {
    let report = run("--pattern spike");
    let reason = |algorithm: &str| lane(&report, algorithm)["worst_window_reason"].as_str();
    assert_eq!(
        reason("token_bucket"),
        Some("A burst of 10 at once, plus up to 9 earned back within the window: up to 19.")
    );
    assert!(reason("fixed_window").unwrap().ends_with("up to 20."));
    assert!(reason("sliding_window_counter").unwrap().ends_with("up to 20."));
    assert_eq!(reason("sliding_window_log"), None);
}

#[test]
fn an_explanation_matches_its_decision() {
    let served = Served::start(&[], None);
    for pattern in PATTERNS {
        let scenario = json!({ "pattern": pattern, "rate_per_minute": 200, "cost": 2 });
        let report = post(served.http(), "/v1/simulate", &scenario.to_string()).json();
        for lane in report["lanes"].as_array().unwrap() {
            let last = numbers(events(lane, "at_us")).len() - 1;
            for event in [0, 1, 6, last / 2, last] {
                let body =
                    json!({ "scenario": scenario, "algorithm": lane["algorithm"], "event": event });
                let reply = post(served.http(), "/v1/explain", &body.to_string());
                assert_eq!(reply.status, 200, "{reply:?}");
                let why = reply.json();
                for field in ["at_us", "client", "attempt"] {
                    assert_eq!(why[field], lane["events"][field][event], "{pattern} {field}");
                }
                let decision = &why["decision"];
                for field in ["remaining", "retry_after_us", "reset_after_us", "delay_us"] {
                    assert_eq!(decision[field], lane["events"][field][event], "{pattern} {field}");
                }
                assert_eq!(decision["limit"], lane["capacity"]);
                let allowed = lane["events"]["allowed"][event] == 1;
                assert_eq!(
                    (&why["allowed"], &decision["allowed"]),
                    (&json!(allowed), &json!(allowed))
                );
                let steps = why["steps"].as_array().unwrap();
                let decided = steps.iter().find(|step| step["name"] == "allowed").unwrap();
                assert_eq!(decided["value"], if allowed { "yes" } else { "no" });
                assert!(steps.iter().all(|step| {
                    ["description", "formula", "value"].iter().all(|field| step[field].is_string())
                }));
            }
        }
    }
}

#[test]
fn the_error_of_an_invalid_explanation_names_valid_values() {
    let served = Served::start(&[], None);
    let says = |body: Value, expected: &str| {
        let reply = post(served.http(), "/v1/explain", &body.to_string());
        assert_eq!(reply.status, 400, "{reply:?}");
        assert_eq!(reply.problem(), expected);
    };
    says(json!({ "algorithm": "gcra", "event": 45 }), "`event` is 45; use 0 to 44");
    says(json!({ "algorithm": "gcra" }), "missing field `event`");
    says(json!({ "event": 1 }), "missing field `algorithm`");
    says(
        json!({ "algorithm": "gcar", "event": 0 }),
        "`algorithm` \"gcar\" is unknown; use one of token_bucket, gcra, leaky_bucket, fixed_window, sliding_window_log, \
         sliding_window_counter",
    );
    says(
        json!({ "scenario": { "algorithms": ["gcra"] }, "algorithm": "token_bucket", "event": 0 }),
        "`algorithm` is token_bucket, which is not among the `algorithms` of the scenario",
    );
    says(
        json!({ "scenario": { "limt": 1 }, "algorithm": "gcra", "event": 0 }),
        "`scenario`: unknown field `limt`; did you mean `limit`? (line 1, column 48)",
    );
}

/// Fault E15.
#[test]
fn the_error_of_an_invalid_scenario_names_the_field_and_valid_values() {
    let served = Served::start(&[], None);
    let says = |body: &str, expected: &str| {
        let reply = post(served.http(), "/v1/simulate", body);
        assert_eq!(reply.status, 400, "{body}: {reply:?}");
        let problem = reply.problem();
        assert!(problem.contains(expected), "{body}: {problem}");
    };
    says("{\"limit\":0}", "`limit` is 0; use 1 to 1000000000");
    says("{\"limit\":1.5}", "`limit`: found the number `1.5`; expected a whole number");
    says("{\"window_ms\":0}", "`window_ms` is 0 ms; use 1 to 31622400000 ms (366d)");
    says("{\"burst\":0}", "`burst` is 0; use 1 to ");
    says("{\"cost\":0}", "`cost` is 0; use 1 to ");
    says(
        "{\"rate_per_minute\":0}",
        "`rate_per_minute` is 0 per minute; use 1 to 60000000 per minute",
    );
    says("{\"duration_ms\":86400001}", "`duration_ms` is 86400001 ms; use 1 to 86400000 ms (1d)");
    says("{\"seed\":9007199254740992}", "`seed` is 9007199254740992; use 0 to 9007199254740991");
    says("{\"clients\":16}", "`clients` is 16; use 1 to 15");
    says("{\"greedy_factor\":0}", "`greedy_factor` is 0; use 1 to ");
    says("{\"burst_size\":0}", "`burst_size` is 0; use 1 to ");
    says("{\"instances\":17}", "`instances` is 17; use 1 to 16");
    says(
        "{\"instances\":11}",
        "`limit` is 10, less than one unit for each of 11 instances; use at least 11, or reduce `instances`",
    );
    says(
        "{\"instances\":5,\"burst\":4}",
        "`burst` is 4, less than one unit for each of 5 instances",
    );
    says("{\"retry\":{\"attempts\":0}}", "`retry.attempts` is 0; use 1 to 100");
    says("{\"retry\":{\"naive_wait_ms\":0}}", "`retry.naive_wait_ms` is 0 ms; use 1 to ");
    says("{\"retry\":{\"obey\":true}}", "`retry`: unknown field `obey`; did you mean `obeys`?");
    says("{\"retry\":{\"obeys\":1}}", "`obeys`: found the number `1`; expected true or false");
    says("{\"algorithms\":[]}", "`algorithms` is empty");
    says("{\"algorithms\":[\"gcra\",\"gcra\"]}", "`algorithms` has gcra twice");
    says(
        "{\"algorithms\":[\"leaky\"]}",
        "`algorithms` \"leaky\" is unknown; use one of token_bucket, ",
    );
    says(
        "{\"pattern\":\"random\"}",
        "`pattern` \"random\" is unknown; use one of steady, bursty, ",
    );
    says(
        "{\"limit\":1048577,\"window_ms\":10000000}",
        "these numbers are not a valid sliding_window_log",
    );
    says(
        "{\"limit\":1,\"burst\":1000000000,\"window_ms\":86400}",
        "`burst` is 1000000000, which takes more than 285 years to refill at a limit of 1",
    );
    says(
        "{\"pattern\":\"spike\",\"duration_ms\":10000}",
        "a spike needs a duration longer than the window of 10000 ms",
    );
    says("[]", "expected an object");
}

#[test]
fn the_work_per_simulation_is_bounded() {
    let served = Served::start(&[], None);
    let says = |body: &str| {
        let reply = post(served.http(), "/v1/simulate", body);
        assert_eq!(reply.status, 400, "{body}");
        assert!(
            reply.problem().starts_with("the scenario has more than 20000 requests"),
            "{reply:?}"
        );
    };
    says(r#"{"rate_per_minute":40001}"#);
    says(r#"{"rate_per_minute":60000000,"duration_ms":86400000}"#);
    says(r#"{"pattern":"poisson","rate_per_minute":60000000,"duration_ms":86400000}"#);
    says(r#"{"pattern":"ramp","rate_per_minute":60000000,"duration_ms":86400000}"#);
    says(r#"{"pattern":"bursty","rate_per_minute":60000000,"duration_ms":86400000}"#);
    says(r#"{"pattern":"spike","limit":1000000}"#);
    says(r#"{"pattern":"greedy","greedy_factor":1000000}"#);
    // The most first attempts, each of them retried: the run stops at the maximum number of decisions.
    let most = json!({
        "pattern": "retry", "rate_per_minute": 40_000, "retry": { "obeys": false, "attempts": 100 },
    });
    let reply = post(served.http(), "/v1/simulate", &most.to_string());
    assert_eq!(reply.status, 200);
    for lane in reply.json()["lanes"].as_array().unwrap() {
        let times = numbers(events(lane, "at_us"));
        assert_eq!(times.len(), 20_000);
        assert!(lane["cut_at_us"].as_u64().unwrap() >= *times.last().unwrap());
    }
    assert!(run("")["lanes"][0].get("cut_at_us").is_none());
}

#[test]
fn simulations_beyond_the_limit_get_503_and_checks_continue() {
    /// Matches a 503 that names simulations as its reason.
    const BUSY: u16 = 0;
    let served = Served::start(&[], None);
    let most =
        json!({ "pattern": "retry", "rate_per_minute": 40_000, "retry": { "obeys": false } });
    let most = most.to_string();
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let ask = || {
            let reply = post(served.http(), "/v1/simulate", &most);
            if reply.status == 503 {
                assert_eq!(reply.field("retry-after"), Some("1"));
            }
            // Some may get a 503 because the replies to others fill the response buffers.
            let is_busy =
                reply.status == 503 && reply.problem().contains("simulations are running");
            if is_busy { BUSY } else { reply.status }
        };
        let asking: Vec<_> = (0..60).map(|_| scope.spawn(ask)).collect();
        let began = std::time::Instant::now();
        let check = post(served.http(), "/v1/check", r#"{"policy":"demo","key":"alice"}"#);
        assert_eq!(check.status, 200);
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        asking.into_iter().map(|asking| asking.join().expect("there is a reply")).collect()
    });
    assert!(statuses.iter().all(|status| [200, 503, BUSY].contains(status)), "{statuses:?}");
    assert!(statuses.contains(&200) && statuses.contains(&BUSY), "{statuses:?}");
    assert_eq!(post(served.http(), "/v1/simulate", "{}").status, 200);
}

/// Compiles expressions and returns them with their text.
macro_rules! policies {
    ($($policy:expr),* $(,)?) => {
        [$((stringify!($policy), (|| -> Result<Policy, tallygate::PolicyError> { Ok($policy) })())),*]
    };
}

#[test]
fn the_rust_code_of_a_lane_compiles_to_the_same_limit() {
    let bare = |text: &str| text.replace(char::is_whitespace, "");
    let written = policies![
        Policy::token_bucket(10).per(Duration::from_secs(10)).burst(10).build()?,
        Policy::leaky_bucket(10).per(Duration::from_secs(10)).burst(10).build()?,
        Policy::fixed_window(10).per(Duration::from_secs(10)).build()?,
        Policy::sliding_window_log(10).per(Duration::from_secs(10)).build()?,
        Policy::sliding_window_counter(10).per(Duration::from_secs(10)).build()?,
        Policy::gcra(10).per(Duration::from_secs(10)).burst(10).build()?,
    ];
    let report = run("");
    for (lane, (text, policy)) in report["lanes"].as_array().unwrap().iter().zip(written) {
        assert_eq!(bare(lane["rust"].as_str().unwrap()), bare(text));
        let (meant, numbers) = (limit_of(&report, lane), *policy.unwrap().limits()[0].numbers());
        assert_eq!(numbers.kind, meant.numbers().kind);
        assert_eq!(numbers.window.0, meant.numbers().window.0 * 1000);
        assert_eq!((numbers.limit, numbers.burst), (meant.numbers().limit, meant.numbers().burst));
    }
    let others = policies![
        Policy::gcra(5).per_second().burst(2).build()?,
        Policy::gcra(5).per_minute().burst(2).build()?,
        Policy::gcra(5).per_hour().burst(2).build()?,
        Policy::gcra(5).per_day().burst(2).build()?,
        Policy::gcra(5).per(Duration::from_millis(1500)).burst(2).build()?,
    ];
    for (window, (text, policy)) in ["1s", "1m", "1h", "1d", "1500ms"].into_iter().zip(others) {
        let report = run(&format!("--limit 5 --burst 2 --window {window} --algorithm gcra"));
        assert_eq!(bare(report["lanes"][0]["rust"].as_str().unwrap()), bare(text));
        policy.expect("the policy is valid");
    }
}

#[test]
fn the_toml_of_a_lane_is_a_valid_configuration() {
    let divided = run("--limit 7 --burst 3 --window 1500ms --instances 3");
    let toml = lane(&divided, "gcra")["toml"].as_str().unwrap();
    assert!(toml.ends_with("burst = 3\ninstances = 3\n"), "{toml}");
    let served = Served::start(&[], Some(toml));
    let look = post(served.http(), "/v1/peek", r#"{"policy":"example","key":"a","cost":0}"#);
    assert_eq!(look.json()["limit"], 1);
    let rust = lane(&divided, "gcra")["rust"].as_str().unwrap();
    assert!(rust.ends_with(".build()?.share(Instance { index: 0, count: 3 })?"), "{rust}");
    let report = run("--limit 7 --burst 3 --window 1500ms");
    let shown = report["lanes"].as_array().unwrap().iter().map(|lane| {
        let served = Served::start(&[], lane["toml"].as_str());
        let look = post(served.http(), "/v1/peek", r#"{"policy":"example","key":"a","cost":0}"#);
        (lane["capacity"].clone(), look.json()["limit"].clone())
    });
    for (capacity, served) in shown {
        assert_eq!(capacity, served);
    }
}

#[test]
fn the_text_report_has_a_table_and_lanes_as_wide_as_the_terminal() {
    let output = Command::new(env!("CARGO_BIN_EXE_tallygate"))
        .args(["simulate", "--pattern", "spike"])
        .env("COLUMNS", "60")
        .output()
        .expect("the binary runs");
    let shown = String::from_utf8(output.stdout).expect("the text is UTF-8");
    assert!(!shown.contains('\x1b'), "colors without a terminal: {shown}");
    let table: Vec<&str> = shown
        .lines()
        .find(|line| line.starts_with("fixed_window"))
        .unwrap()
        .split_whitespace()
        .collect();
    let report = run("--pattern spike");
    let fixed = lane(&report, "fixed_window");
    assert_eq!(
        table[1..4],
        [&fixed["allowed"], &fixed["denied"], &fixed["worst_window"]["count"]]
            .map(ToString::to_string)
    );
    let lanes = shown.lines().filter(|line| line.starts_with("fixed_window")).nth(1).unwrap();
    assert_eq!(lanes.chars().count(), 60, "{shown}");
    assert!(lanes.contains('▒') || lanes.contains('░'), "{lanes}");
    let ascii = tallygate(&["--ascii", "--pattern", "greedy"]);
    assert!(ascii.status.success() && ascii.stdout.is_ascii());
}

#[test]
fn the_documented_output_is_current() {
    let shown =
        String::from_utf8(tallygate(&["--pattern", "spike"]).stdout).expect("the text is UTF-8");
    assert!(include_str!("../../../../docs/simulate.md").contains(&shown), "{shown}");
}

#[test]
fn the_html_option_writes_a_complete_page() {
    let path = std::env::temp_dir().join(format!("tallygate-test-{}.html", std::process::id()));
    let output = tallygate(&["--html", path.to_str().unwrap(), "--json"]);
    let page = std::fs::read_to_string(&path).expect("the page is readable");
    std::fs::remove_file(&path).expect("the file exists");
    assert!(output.status.success());
    serde_json::from_slice::<Value>(&output.stdout).expect("the output is JSON");
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
    let nowhere = tallygate(&["--html", "/nowhere/at/all.html"]);
    assert_eq!(nowhere.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("cannot write /nowhere/at/all.html"));
}

#[test]
fn invalid_options_are_errors_that_name_valid_values() {
    let says = |options: &[&str], expected: &str| {
        let output = tallygate(options);
        assert_eq!(output.status.code(), Some(2), "{options:?}");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(message.contains(expected), "{options:?}: {message}");
    };
    says(&["--rate", "90"], "found `90`; expected a rate such as 90/m");
    says(&["--rate", "100/h"], "100/h is not a whole number of requests per minute");
    says(&["--rate", "0/m"], "--rate is 0 per minute; use 1 to 60000000 per minute");
    says(
        &["--rate", "1000000/m"],
        "more than 20000 requests; use a lower --rate or a shorter --duration",
    );
    says(&["--window", "0s"], "--window is 0 ms; use 1 to ");
    says(&["--pattern", "retry", "--attempts", "0"], "--attempts is 0; use 1 to 100");
    says(
        &["--pattern", "retry", "--naive", "--naive-wait", "0s"],
        "--naive-wait is 0 ms; use 1 to ",
    );
    says(&["--pattern", "bursty", "--burst-size", "0"], "--burst-size is 0; use 1 to ");
    says(&["--pattern", "greedy", "--greedy-factor", "0"], "--greedy-factor is 0; use 1 to ");
    says(
        &["--pattern", "spike", "--duration", "10s"],
        "--duration is 10000 ms; a spike needs a duration longer than the window of 10000 ms",
    );
    says(&["--instances", "11"], "--limit is 10, less than one unit for each of 11 instances");
    says(&["--window", "1us"], "found \"1us\"; expected a duration such as \"500ms\"");
    says(&["--pattern", "random"], "invalid value 'random'");
    says(&["--algorithm", "gcra", "--algorithm", "gcra"], "--algorithm has gcra twice");
    says(&["--limit", "0"], "--limit is 0; use 1 to 1000000000");
}

#[test]
fn flags_without_effect_are_rejected() {
    for (options, expected) in [
        (
            &["--attempts", "3"][..],
            "--attempts has no effect with --pattern steady; use --pattern retry or remove it",
        ),
        (&["--naive"], "--naive has no effect with --pattern steady"),
        (&["--pattern", "retry", "--clients", "3"], "--clients has no effect with --pattern retry"),
        (
            &["--pattern", "spike", "--burst-size", "3"],
            "--burst-size has no effect with --pattern spike",
        ),
        (
            &["--algorithm", "fixed_window", "--burst", "3"],
            "--burst has no effect without a bucket; add --algorithm token_bucket or remove it",
        ),
        (&["--pattern", "retry", "--naive-wait", "1s"], "--naive"),
        (
            &["--pattern", "retry", "--attempts", "1", "--naive"],
            "--naive has no effect with --attempts 1, which never retries",
        ),
        (
            &["--pattern", "retry", "--attempts", "1", "--no-jitter"],
            "--no-jitter has no effect with --attempts 1",
        ),
        (
            &["--seed", "7"],
            "--seed has no effect, because nothing in this traffic is random; use --pattern poisson, --pattern retry with \
             jitter, or --instances 2 or more, or remove --seed",
        ),
        (&["--json", "--ascii"], "cannot be used with"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
        let output = command.arg("simulate").args(options).output().expect("the binary runs");
        assert_eq!(output.status.code(), Some(2), "{options:?}");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(message.contains(expected), "{options:?}: {message}");
    }
}
