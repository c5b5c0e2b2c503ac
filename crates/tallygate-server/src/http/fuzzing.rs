//! Fuzz targets for bodies, queries and header fields.

#![allow(clippy::missing_panics_doc, reason = "a fuzzer looks for failed assertions")]

use std::cell::RefCell;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use futures_util::FutureExt as _;
use hyper::HeaderMap;
use hyper::header::HeaderValue;
use ipnet::IpNet;
use serde_json::Value;
use tallygate::address::{key, parse};

use super::problem::Problem;
use super::query::{self, Query};
use super::{Reply, address, headers, operations, overrides, simulate};
use crate::client_budgets::BudgetOwner;
use crate::config::Config;
use crate::gate::{Gate, Verb};
use crate::peer::Peer;
use crate::turn::count_polls;

/// Checks that bodies of checks, reservations and overrides are answered or rejected, in JSON, whatever their spaces
/// and escapes. The first byte selects the request.
pub fn json(input: &[u8]) {
    let Some((&choice, body)) = input.split_first() else { return };
    let gate = gate();
    let (status, reply) = status_and_body(call(&gate, choice, body));
    let read = serde_json::from_slice::<Value>(body);
    if status != 200 {
        assert!((400..500).contains(&status), "{status}: {reply}");
        return;
    }
    let results = match reply.get("results") {
        Some(results) => results.as_array().expect("a list").clone(),
        None => vec![reply],
    };
    for result in results {
        if let (Some(remaining), Some(limit)) = (result.get("remaining"), result.get("limit")) {
            assert!(remaining.as_u64() <= limit.as_u64(), "{result}");
        }
    }
    let written = read.expect("only valid JSON gets 200").to_string();
    // A reservation can only be settled once.
    if choice % 7 != 5 {
        let (again, reply) = status_and_body(call(&gate, choice, written.as_bytes()));
        assert_eq!(again, 200, "the same in other words: {reply}");
    }
}

/// A client without an address.
const PEER: Peer = Peer { address: None, is_same_user: true };

fn call(gate: &Arc<Gate>, choice: u8, body: &[u8]) -> Result<Reply, Problem> {
    let query = (choice >= 128).then_some("headers=all");
    let ask = |verb| count_polls(operations::ask(gate, verb, query, body, |_| Ok(None))).0;
    match choice % 7 {
        0 => ask(Verb::Check),
        1 => ask(Verb::Peek),
        2 => ask(Verb::Refund),
        3 => ask(Verb::Reset),
        4 => operations::reserve(gate, BudgetOwner::of(PEER, &[]), body)
            .now_or_never()
            .expect("memory answers at once"),
        5 => operations::settle(gate, body).now_or_never().expect("memory answers at once"),
        _ => count_polls(overrides::set(gate, body)).0,
    }
}

/// Returns a gate with policies of every kind. It is replaced from time to time, so that it does not fill up.
fn gate() -> Arc<Gate> {
    const POLICIES: &str = include_str!("../../../../fuzz/corpus/config/shapes.toml");
    const TURNS: usize = 10_000;
    thread_local! {
        static GATE: RefCell<(usize, Option<Arc<Gate>>)> = const { RefCell::new((0, None)) };
    }
    GATE.with_borrow_mut(|(turn, gate)| {
        *turn += 1;
        if *turn % TURNS == 0 {
            *gate = None;
        }
        let config = || Config::parse(POLICIES, Path::new("")).expect("a configuration");
        gate.get_or_insert_with(|| crate::fuzzing::shared(&config()).gate).clone()
    })
}

/// Returns the status and the body of a reply. The body must be JSON, and short if it is an error.
fn status_and_body(answer: Result<Reply, Problem>) -> (u16, Value) {
    /// The longest detail with every byte escaped, and the rest of the body.
    const MAX_PROBLEM: usize = 6 * 512 + 200;
    let is_problem = answer.is_err();
    let reply = answer.unwrap_or_else(Problem::reply);
    let status = reply.status().as_u16();
    let body = reply.into_body();
    assert!(!is_problem || body.len() < MAX_PROBLEM, "{} bytes about a problem", body.len());
    (status, serde_json::from_slice(&body).expect("JSON"))
}

/// Checks that scenarios and explanations are simulated or rejected, and that the counts add up.
pub fn scenario(input: &[u8]) {
    let Some((&choice, body)) = input.split_first() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let (status, reply) = status_and_body(runtime.expect("a runtime").block_on(async {
        if choice % 2 == 0 {
            simulate::simulate(body, |_| Ok(None)).await
        } else {
            simulate::explain(body, |_| Ok(None)).await
        }
    }));
    assert!([200, 400].contains(&status), "{status}: {reply}");
    let Some(lanes) = reply.get("lanes").and_then(Value::as_array) else { return };
    for lane in lanes {
        let count = |name: &str| lane[name].as_u64().expect("a count");
        let events = lane["events"]["allowed"].as_array().expect("a list").len() as u64;
        assert_eq!(count("allowed") + count("denied"), events, "each is decided");
    }
}

/// Checks that queries and names in paths are decoded or rejected, and that encoding and decoding returns the same
/// bytes.
pub fn query(input: &[u8]) {
    for is_query in [true, false] {
        let decoded = query::decoded(&query::encoded(input), is_query).expect("it was encoded");
        assert_eq!(decoded, input);
    }
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Ok(name) = query::decoded(text, false) {
        assert!(name.len() <= text.len());
    }
    match Query::with_lists(Some(text), &["policy", "key", "top", "headers"], &["policy"]) {
        Ok(query) => {
            let given = text.split('&').filter(|pair| !pair.is_empty()).count();
            let lists = query.texts("policy").map_or(given, |texts| texts.len());
            let others =
                ["key", "top", "headers"].iter().filter(|name| query.bytes(name).is_some());
            assert!(lists + others.count() >= given, "nothing is left out");
            if let Ok(Some(number)) = query.number("top") {
                let digits = query.text("top").expect("text").expect("it is there");
                assert_eq!(
                    digits.trim_start_matches('0'),
                    number.to_string().trim_start_matches('0')
                );
            }
            if let Err(problem) = headers::wanted_dialects(&query, &[]) {
                status_and_body(Err(problem));
            }
        }
        Err(problem) => assert_eq!(status_and_body(Err(problem)).0, 400),
    }
}

/// Checks addresses that proxies forward. The lines are the peer, the trusted networks, and the lines of
/// `X-Forwarded-For`.
pub fn headers(input: &[u8]) {
    let mut lines = input.split(|byte| *byte == b'\n');
    let peer = lines.next().and_then(parse);
    let trusted = lines.next().unwrap_or_default().split(|byte| *byte == b',');
    let trusted: Vec<IpNet> =
        trusted.filter_map(|net| std::str::from_utf8(net).ok()?.parse().ok()).collect();
    let forwarded: Vec<&[u8]> = lines.collect();
    let found = |lines: &[&[u8]]| -> Option<Option<IpAddr>> {
        let mut fields = HeaderMap::new();
        for line in lines {
            fields.append("x-forwarded-for", HeaderValue::from_bytes(line).ok()?);
        }
        Some(address::client(Peer { address: peer, is_same_user: false }, &fields, &trusted))
    };
    let Some(client) = found(&forwarded) else { return };
    let is_trusted = |address: &IpAddr| trusted.iter().any(|net| net.contains(address));
    if let Some(peer) = peer.filter(|peer| !is_trusted(peer)) {
        assert_eq!(client, Some(peer), "a stranger is itself");
    }
    if let Some(client) = client {
        let reply = forwarded.iter().flat_map(|line| line.split(|byte| *byte == b','));
        assert!(
            peer == Some(client) || reply.filter_map(parse).any(|reply| reply == client),
            "{client} came from nowhere"
        );
        if !is_trusted(&client) {
            let forged = [&[&b"6.6.6.6"[..]][..], &forwarded].concat();
            assert_eq!(found(&forged), Some(Some(client)), "what strangers write changes nothing");
        }
        let key = key(client);
        match client {
            IpAddr::V4(_) => assert_eq!(parse(key.as_bytes()), Some(client)),
            IpAddr::V6(_) => {
                let net: IpNet = key.parse().expect("a network");
                assert!(net.contains(&client) && net.prefix_len() == 64);
            }
        }
        assert_eq!(parse(client.to_string().as_bytes()), Some(client));
    }
    if !forwarded.is_empty() {
        let joined = forwarded.join(&b", "[..]);
        assert_eq!(found(&[&joined]), Some(client), "several lines are one list");
    }
}
