//! Scenarios as their users see them: `tallygate simulate`, `POST /v1/simulate` and `POST /v1/explain`, each the real
//! binary, and all of them compared with the core.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on says so")]

use std::process::{Command, Output};
use std::time::Duration;

use crate::common::Served;
use crate::http_client::post;
use serde_json::{Value, json};
use tallygate::{
    Algorithm as _, Decision, Kind, Limit, LimitState, Machine, Policy, Simulator, Tick, Ticks,
    simulate,
};

fn tallygate(options: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    command.arg("simulate").args(options).env_remove("COLUMNS").output().expect("the binary runs")
}

/// What a scenario comes to.
#[track_caller]
fn run(options: &str) -> Value {
    let options: Vec<&str> = options.split_whitespace().chain(["--json"]).collect();
    let output = tallygate(&options);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn numbers(list: &Value) -> Vec<u64> {
    let list = list.as_array().expect("a list");
    list.iter().map(|number| number.as_u64().unwrap_or_else(|| panic!("{number}"))).collect()
}

fn lane<'a>(report: &'a Value, algorithm: &str) -> &'a Value {
    let mut lanes = report["lanes"].as_array().expect("lanes").iter();
    lanes.find(|lane| lane["algorithm"] == algorithm).unwrap_or_else(|| panic!("no {algorithm}"))
}

fn events<'a>(lane: &'a Value, field: &str) -> &'a Value {
    &lane["events"][field]
}

/// The limit of a lane, in microseconds.
fn limit_of(report: &Value, lane: &Value) -> Limit {
    let scenario = &report["scenario"];
    let kind: Kind = lane["algorithm"].as_str().unwrap().parse().expect("one of the six");
    let number = |field: &str| scenario[field].as_u64().unwrap();
    let limit = Policy::of(kind, number("limit")).per(Ticks(number("window_ms") * 1000));
    let limit = if kind.is_bucket() { limit.burst(number("burst")) } else { limit };
    limit.limit().expect("a limit")
}

fn tick(at_us: u64) -> Tick {
    Tick(i64::try_from(at_us).unwrap())
}

const PATTERNS: [&str; 7] = ["steady", "bursty", "poisson", "ramp", "spike", "retry", "greedy"];

#[test]
fn steady_requests_come_at_the_microsecond_they_are_due() {
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
fn bursts_are_groups_at_one_instant_with_the_rate_as_their_mean() {
    let report = run("--pattern bursty --burst-size 5 --rate 100/m --duration 60s");
    let times = numbers(events(lane(&report, "gcra"), "at_us"));
    assert_eq!(times.len(), 100);
    for (group, times) in times.chunks(5).enumerate() {
        assert!(times.iter().all(|at| *at == group as u64 * 3_000_000), "{times:?}");
    }
}

#[test]
fn chance_has_the_rate_as_its_mean_and_gaps_of_every_length() {
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
fn a_ramp_begins_with_nothing_and_has_the_rate_as_its_mean() {
    let report = run("--pattern ramp --rate 120/m --duration 60s --algorithm gcra");
    let times = numbers(events(lane(&report, "gcra"), "at_us"));
    assert_eq!(times.len(), 119);
    // By half of the time a quarter has come.
    assert_eq!(times.iter().filter(|at| **at <= 30_000_000).count(), 30);
    let gaps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.windows(2).all(|pair| pair[1] <= pair[0] + 1), "{gaps:?}");
}

#[test]
fn a_spike_straddles_a_boundary_and_shows_the_double_burst_of_fixed_windows() {
    let report = run("--pattern spike");
    let times = numbers(events(lane(&report, "fixed_window"), "at_us"));
    let near = |from, to| times.iter().filter(|at| (from..to).contains(*at)).count();
    assert_eq!(near(19_500_000, 20_000_000), 10);
    // One of the background comes at the boundary itself.
    assert_eq!(near(20_000_000, 20_500_000), 11);
    assert_eq!(lane(&report, "fixed_window")["worst_window"]["count"], 20);
    assert_eq!(lane(&report, "sliding_window_log")["worst_window"]["count"], 10);
}

#[test]
fn a_log_never_admits_more_than_the_limit_in_any_window() {
    for pattern in PATTERNS {
        for seed in 1..=3 {
            let report = run(&format!("--pattern {pattern} --rate 300/m --seed {seed} --limit 7"));
            let worst = &lane(&report, "sliding_window_log")["worst_window"]["count"];
            assert!(worst.as_u64().unwrap() <= 7, "{pattern} {seed}: {worst}");
        }
    }
}

#[test]
fn who_obeys_is_admitted_when_it_comes_again_if_nobody_else_came() {
    // At 0 and at 600 ms, where one may come a second: the second is refused, and then alone.
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
fn who_is_told_that_it_can_never_fit_does_not_come_again() {
    let report = run("--pattern retry --cost 11 --rate 60/m");
    for lane in report["lanes"].as_array().unwrap() {
        let counts = ["refused", "retried", "gave_up"].map(|field| lane[field].as_u64().unwrap());
        assert_eq!(counts, [30, 0, 30]);
        assert!(lane["events"]["retry_after_us"].as_array().unwrap().iter().all(Value::is_null));
    }
}

#[test]
fn who_does_not_obey_asks_more_and_gets_no_more() {
    let count = |report: &Value, field: &str| lane(report, "token_bucket")[field].as_u64().unwrap();
    let naive = run("--pattern retry --naive --no-jitter --rate 120/m");
    let obeys = run("--pattern retry --no-jitter --rate 120/m");
    assert!(count(&naive, "allowed") <= count(&obeys, "allowed") + 1);
    assert!(count(&naive, "refused") > count(&obeys, "refused"));
    assert!(count(&naive, "gave_up") > 0);
    // A retry comes exactly that much later.
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
fn jitter_adds_at_most_as_much_again_and_lanes_that_decide_alike_stay_alike() {
    let report = run("--pattern retry --naive --rate 240/m --attempts 2");
    assert_eq!(
        lane(&report, "gcra")["events"]["at_us"],
        lane(&report, "token_bucket")["events"]["at_us"]
    );
    let only = lane(&report, "gcra");
    let (times, attempts) = (numbers(events(only, "at_us")), numbers(events(only, "attempt")));
    let refused: Vec<u64> = times
        .iter()
        .zip(&attempts)
        .zip(numbers(events(only, "allowed")))
        .filter(|((_, attempt), allowed)| **attempt == 1 && *allowed == 0)
        .map(|((at, _), _)| *at)
        .collect();
    let again: Vec<u64> =
        times.iter().zip(&attempts).filter(|(_, n)| **n == 2).map(|(at, _)| *at).collect();
    assert!(again.len() > 20);
    for at in &again {
        assert!(refused.iter().any(|first| (first + 200_000..=first + 400_000).contains(at)));
    }
    let on_time = again.iter().filter(|at| refused.contains(&(*at - 200_000))).count();
    assert!(on_time * 4 < again.len(), "{on_time} of {}", again.len());
}

#[test]
fn a_greedy_client_takes_nothing_from_the_others() {
    let polite = |factor: u64| {
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
    let modest = polite(1);
    assert_eq!(modest.len(), 6);
    assert_eq!(modest, polite(50));
    let report = run("--pattern greedy --clients 4 --rate 320/m --greedy-factor 50");
    let clients = &lane(&report, "token_bucket")["clients"];
    assert_eq!((&clients[0]["asked"], &clients[4]["asked"]), (&json!(40), &json!(2000)));
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_gives_others() {
    for pattern in PATTERNS {
        let once = |seed: &str| tallygate(&["--pattern", pattern, "--seed", seed, "--json"]).stdout;
        assert_eq!(once("1"), once("1"), "{pattern}");
        let has_chance = ["poisson", "retry"].contains(&pattern);
        let lanes = |seed| serde_json::from_slice::<Value>(&once(seed)).unwrap()["lanes"].clone();
        assert_eq!(lanes("1") != lanes("2"), has_chance, "{pattern}");
    }
}

#[test]
fn what_a_seed_gives_does_not_change_with_versions() {
    let report = run("--pattern poisson");
    let times = numbers(events(lane(&report, "gcra"), "at_us"));
    assert_eq!(times[..5], [378_779, 574_327, 593_945, 1_134_693, 1_675_582]);
}

#[test]
fn http_and_the_command_line_give_the_same_bytes() {
    let served = Served::start(&[], None);
    let asked = [
        (json!({}), "--pattern steady"),
        (json!({ "limit": 25 }), "--limit 25"),
        (
            json!({
                "limit": 7, "window_ms": 1500, "burst": 3, "algorithms": ["gcra", "fixed_window"],
                "pattern": "retry", "rate_per_minute": 360, "duration_ms": 20_000, "seed": 99, "cost": 2,
                "retry": { "obeys": false, "jitter": false, "naive_wait_ms": 50, "attempts": 3 },
            }),
            "--limit 7 --window 1500ms --burst 3 --algorithm gcra --algorithm fixed_window --pattern retry \
             --rate 6/s --duration 20s --seed 99 --cost 2 --naive --no-jitter --naive-wait 50ms --attempts 3",
        ),
        (
            json!({ "pattern": "greedy", "clients": 2, "greedy_factor": 3 }),
            "--pattern greedy --clients 2 --greedy-factor 3",
        ),
        (json!({ "pattern": "bursty", "burst_size": 4 }), "--pattern bursty --burst-size 4"),
        (json!({ "pattern": "poisson", "seed": 5 }), "--pattern poisson --seed 5"),
    ];
    for (body, options) in asked {
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
fn every_decision_is_the_library_s_own() {
    for pattern in PATTERNS {
        let report = run(&format!("--pattern {pattern} --rate 200/m --burst 4 --cost 2"));
        for lane in report["lanes"].as_array().unwrap() {
            let limit = limit_of(&report, lane);
            let trace = numbers(events(lane, "client"));
            let trace = trace.into_iter().zip(numbers(events(lane, "at_us")));
            let decided: Vec<Decision> =
                simulate(limit, trace.map(|(client, at)| (client, tick(at), 2))).collect();
            let told = |field: &str, told: &dyn Fn(&Decision) -> Value| {
                let expected: Vec<Value> = decided.iter().map(told).collect();
                assert_eq!(events(lane, field), &json!(expected), "{pattern} {field}");
            };
            told("allowed", &|decision| u8::from(decision.allowed).into());
            told("remaining", &|decision| decision.remaining.into());
            told("retry_after_us", &|decision| decision.retry_after.map(|wait| wait.0).into());
            told("delay_us", &|decision| decision.delay.0.into());
            told("reset_after_us", &|decision| decision.reset_after.0.into());
            let allowed = decided.iter().filter(|decision| decision.allowed).count();
            assert_eq!(lane["allowed"], allowed);
            assert_eq!(lane["refused"], decided.len() - allowed);
            let first = decided.iter().position(|decision| !decision.allowed);
            assert_eq!(
                lane["first_refused_us"].as_u64(),
                first.map(|i| numbers(events(lane, "at_us"))[i])
            );
        }
    }
}

/// The inner state of a client that has come, in thousandths.
fn level(simulator: &Simulator<Limit>, at_us: u64) -> u64 {
    let limit = simulator.rule();
    let first = limit.first(tick(at_us));
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
        // Behind by less than a whole tick may still be ahead by its fraction: not if it is behind.
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
#[allow(clippy::float_arithmetic, reason = "what JSON shows is compared with what it stands for")]
fn the_state_that_is_drawn_is_the_core_s_before_and_after_each_decision_and_between() {
    for pattern in PATTERNS {
        let report = run(&format!("--pattern {pattern} --limit 7 --rate 150/m"));
        for lane in report["lanes"].as_array().unwrap() {
            let mut simulator = Simulator::new(limit_of(&report, lane));
            let drawn = numbers(&lane["state"]["at_us"]);
            assert!(drawn.len() >= 241 && drawn.is_sorted(), "{pattern}");
            let values: Vec<f64> = lane["state"]["value"]
                .as_array()
                .unwrap()
                .iter()
                .map(|v| v.as_f64().unwrap())
                .collect();
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
            for (at, client) in times.into_iter().zip(numbers(events(lane, "client"))) {
                if client != 0 {
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

#[test]
fn the_worst_window_is_what_counting_every_window_finds() {
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
            // A worst window can begin with an admission.
            let most = (0..times.len()).map(|i| within(clients[i], times[i])).max().unwrap();
            let worst = &lane["worst_window"];
            assert_eq!(worst["count"], most, "{pattern}");
            let from = worst["from_us"].as_u64().unwrap();
            assert!(clients.iter().any(|client| within(*client, from) == most), "{pattern}");
        }
    }
}

/// The height of a line of corners at an instant, after all that happens then.
fn height(line: &Value, at_us: u64) -> u64 {
    let place = numbers(&line["at_us"]).partition_point(|at| *at <= at_us);
    numbers(&line["value"])[place - 1]
}

#[test]
fn lines_count_what_was_asked_and_what_was_admitted_and_buckets_stay_below_the_ideal() {
    for pattern in PATTERNS {
        let report = run(&format!("--pattern {pattern} --rate 200/m --cost 2 --burst 6"));
        for lane in report["lanes"].as_array().unwrap() {
            let (times, allowed) =
                (numbers(events(lane, "at_us")), numbers(events(lane, "allowed")));
            let attempts = numbers(events(lane, "attempt"));
            for &at in times.iter().step_by(7) {
                let until = times.partition_point(|other| *other <= at);
                let admitted: u64 = allowed[..until].iter().sum();
                assert_eq!(height(&lane["cumulative"], at), 2 * admitted, "{pattern}");
                let asked = attempts[..until].iter().filter(|attempt| **attempt == 1).count();
                assert_eq!(height(&report["offered"], at), 2 * asked as u64, "{pattern}");
                let kind: Kind = lane["algorithm"].as_str().unwrap().parse().unwrap();
                if kind.is_bucket() && pattern != "greedy" {
                    assert!(2 * admitted <= 6 + at * 10 / 10_000_000);
                }
            }
        }
        assert_eq!(report["ideal"], json!({ "at_us": [0, 30_000_000], "value": [6, 36] }));
    }
}

#[test]
fn an_explanation_is_of_that_very_decision() {
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
                    ["says", "formula", "value"].iter().all(|field| step[field].is_string())
                }));
            }
        }
    }
}

#[test]
fn what_cannot_be_explained_says_what_can() {
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
        "`algorithm` has \"gcar\"; use token_bucket, gcra, leaky_bucket, fixed_window, sliding_window_log, \
         sliding_window_counter",
    );
    says(
        json!({ "scenario": { "algorithms": ["gcra"] }, "algorithm": "token_bucket", "event": 0 }),
        "`algorithm` is token_bucket, which is none of the scenario's `algorithms`",
    );
    says(
        json!({ "scenario": { "limt": 1 }, "algorithm": "gcra", "event": 0 }),
        "`scenario`: unknown field `limt`; did you mean `limit`? (line 1, column 48)",
    );
}

#[test]
fn e15_a_scenario_with_a_mistake_names_the_field_and_what_would_do() {
    let served = Served::start(&[], None);
    let says = |body: &str, expected: &str| {
        let reply = post(served.http(), "/v1/simulate", body);
        assert_eq!(reply.status, 400, "{body}: {reply:?}");
        let problem = reply.problem();
        assert!(problem.contains(expected), "{body}: {problem}");
    };
    says("{\"limit\":0}", "`limit` is 0; use 1 to 1000000000");
    says("{\"limit\":1.5}", "`limit`: invalid type: floating point `1.5`");
    says("{\"window_ms\":0}", "`window_ms` is 0; use 1 to ");
    says("{\"burst\":0}", "`burst` is 0; use 1 to ");
    says("{\"cost\":0}", "`cost` is 0; use 1 to ");
    says("{\"rate_per_minute\":0}", "`rate_per_minute` is 0; use 1 to 60000000");
    says("{\"duration_ms\":86400001}", "`duration_ms` is 86400001; use 1 to 86400000");
    says("{\"seed\":9007199254740992}", "`seed` is 9007199254740992; use 0 to 9007199254740991");
    says("{\"clients\":16}", "`clients` is 16; use 1 to 15");
    says("{\"greedy_factor\":0}", "`greedy_factor` is 0; use 1 to ");
    says("{\"burst_size\":0}", "`burst_size` is 0; use 1 to ");
    says("{\"retry\":{\"attempts\":0}}", "`retry.attempts` is 0; use 1 to 100");
    says("{\"retry\":{\"naive_wait_ms\":0}}", "`retry.naive_wait_ms` is 0; use 1 to ");
    says("{\"retry\":{\"obey\":true}}", "`retry`: unknown field `obey`; did you mean `obeys`?");
    says("{\"retry\":{\"obeys\":1}}", "`obeys`: invalid type: integer `1`, expected a boolean");
    says("{\"algorithms\":[]}", "`algorithms` is empty");
    says("{\"algorithms\":[\"gcra\",\"gcra\"]}", "`algorithms` has gcra twice");
    says("{\"algorithms\":[\"leaky\"]}", "`algorithms` has \"leaky\"; use token_bucket, ");
    says("{\"pattern\":\"random\"}", "`pattern` has \"random\"; use steady, bursty, ");
    says("{\"limit\":1048577,\"window_ms\":10000000}", "no sliding_window_log can be made of this");
    says(
        "{\"limit\":1,\"burst\":1000000000,\"window_ms\":86400}",
        "`burst` is 1000000000, which a limit of 1 takes more than 285 years to earn",
    );
    says("{\"pattern\":\"spike\",\"duration_ms\":10000}", "a spike needs a longer one");
    says("[]", "expected an object");
}

#[test]
fn the_work_of_a_call_is_bounded() {
    let served = Served::start(&[], None);
    let says = |body: &str| {
        let reply = post(served.http(), "/v1/simulate", body);
        assert_eq!(reply.status, 400, "{body}");
        assert!(reply.problem().starts_with("more than 20000 requests would come"), "{reply:?}");
    };
    says(r#"{"rate_per_minute":40001}"#);
    says(r#"{"rate_per_minute":60000000,"duration_ms":86400000}"#);
    says(r#"{"pattern":"poisson","rate_per_minute":60000000,"duration_ms":86400000}"#);
    says(r#"{"pattern":"ramp","rate_per_minute":60000000,"duration_ms":86400000}"#);
    says(r#"{"pattern":"bursty","rate_per_minute":60000000,"duration_ms":86400000}"#);
    says(r#"{"pattern":"spike","limit":1000000}"#);
    says(r#"{"pattern":"greedy","greedy_factor":1000000}"#);
    // As many as there may be, all of them retried, end where there are too many.
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
fn whoever_comes_when_all_are_busy_is_told_to_come_again_and_checks_go_on() {
    /// Stands for a 503 that says so.
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
            // Some may be refused for what the replies to others hold.
            let is_busy = reply.status == 503 && reply.problem().contains("simulating");
            if is_busy { BUSY } else { reply.status }
        };
        let asking: Vec<_> = (0..60).map(|_| scope.spawn(ask)).collect();
        let began = std::time::Instant::now();
        let check = post(served.http(), "/v1/check", r#"{"policy":"demo","key":"alice"}"#);
        assert_eq!(check.status, 200);
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        asking.into_iter().map(|asking| asking.join().expect("a reply")).collect()
    });
    assert!(statuses.iter().all(|status| [200, 503, BUSY].contains(status)), "{statuses:?}");
    assert!(statuses.contains(&200) && statuses.contains(&BUSY), "{statuses:?}");
    assert_eq!(post(served.http(), "/v1/simulate", "{}").status, 200);
}

/// Expressions that are compiled here, with their text.
macro_rules! policies {
    ($($policy:expr),* $(,)?) => {
        [$((stringify!($policy), (|| -> Result<Policy, tallygate::PolicyError> { Ok($policy) })())),*]
    };
}

#[test]
fn the_rust_of_a_lane_compiles_and_means_the_same() {
    let bare = |text: &str| text.replace(char::is_whitespace, "");
    let written = policies![
        Policy::token_bucket(10)
            .per(Ticks::from_duration(Duration::from_secs(10)))
            .burst(10)
            .build()?,
        Policy::leaky_bucket(10)
            .per(Ticks::from_duration(Duration::from_secs(10)))
            .burst(10)
            .build()?,
        Policy::fixed_window(10).per(Ticks::from_duration(Duration::from_secs(10))).build()?,
        Policy::sliding_window_log(10)
            .per(Ticks::from_duration(Duration::from_secs(10)))
            .build()?,
        Policy::sliding_window_counter(10)
            .per(Ticks::from_duration(Duration::from_secs(10)))
            .build()?,
        Policy::gcra(10).per(Ticks::from_duration(Duration::from_secs(10))).burst(10).build()?,
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
        Policy::gcra(5).per(Ticks::from_duration(Duration::from_millis(1500))).burst(2).build()?,
    ];
    for (window, (text, policy)) in ["1s", "1m", "1h", "1d", "1500ms"].into_iter().zip(others) {
        let report = run(&format!("--limit 5 --burst 2 --window {window} --algorithm gcra"));
        assert_eq!(bare(report["lanes"][0]["rust"].as_str().unwrap()), bare(text));
        policy.expect("a policy");
    }
}

#[test]
fn the_toml_of_a_lane_is_a_configuration() {
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
fn the_terminal_shows_a_table_and_lanes_of_its_width() {
    let output = Command::new(env!("CARGO_BIN_EXE_tallygate"))
        .args(["simulate", "--pattern", "spike"])
        .env("COLUMNS", "60")
        .output()
        .expect("the binary runs");
    let shown = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(!shown.contains('\x1b'), "colour without a terminal: {shown}");
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
        [&fixed["allowed"], &fixed["refused"], &fixed["worst_window"]["count"]]
            .map(ToString::to_string)
    );
    let lanes = shown.lines().filter(|line| line.starts_with("fixed_window")).nth(1).unwrap();
    assert_eq!(lanes.chars().count(), 60, "{shown}");
    assert!(lanes.contains('▒') || lanes.contains('░'), "{lanes}");
    let ascii = tallygate(&["--ascii", "--pattern", "greedy"]);
    assert!(ascii.status.success() && ascii.stdout.is_ascii());
}

#[test]
fn the_document_shows_what_is_printed() {
    let shown = String::from_utf8(tallygate(&["--pattern", "spike"]).stdout).expect("UTF-8");
    assert!(include_str!("../../../../docs/simulate.md").contains(&shown), "{shown}");
}

#[test]
fn a_page_is_written_that_stands_alone() {
    let path = std::env::temp_dir().join(format!("tallygate-test-{}.html", std::process::id()));
    let output = tallygate(&["--html", path.to_str().unwrap(), "--json"]);
    let page = std::fs::read_to_string(&path).expect("a page");
    std::fs::remove_file(&path).expect("it is there");
    assert!(output.status.success());
    serde_json::from_slice::<Value>(&output.stdout).expect("JSON besides");
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
    let nowhere = tallygate(&["--html", "/nowhere/at/all.html"]);
    assert_eq!(nowhere.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("cannot write /nowhere/at/all.html"));
}

#[test]
fn flags_that_say_nothing_sensible_are_refused() {
    let says = |options: &[&str], expected: &str| {
        let output = tallygate(options);
        assert_eq!(output.status.code(), Some(2), "{options:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(expected), "{options:?}: {said}");
    };
    says(&["--rate", "90"], "found `90`; expected a rate such as 90/m");
    says(&["--rate", "100/h"], "100/h is no whole number a minute");
    says(&["--window", "1us"], "--window 1µs is no whole number of milliseconds");
    says(&["--pattern", "random"], "invalid value 'random'");
    says(&["--algorithm", "gcra", "--algorithm", "gcra"], "`algorithms` has gcra twice");
    says(&["--limit", "0"], "`limit` is 0; use 1 to 1000000000");
}
