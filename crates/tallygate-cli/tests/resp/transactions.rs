//! `MULTI` and `EXEC`, which clients send around their pipelines.

use std::io::{Read as _, Write as _};

use tallygate_testkit::servers::{Flavor, Server};

use crate::common::Served;
use crate::{DEMO, POLICIES, ask, command, connect, exchange};

fn script(lines: &[&str]) -> Vec<u8> {
    lines.iter().flat_map(|line| command(&line.split(' ').collect::<Vec<_>>())).collect()
}

fn replies(served: &Served, lines: &[&str]) -> String {
    exchange(served.resp(), &script(lines)).trim_end().replace("\r\n", " ")
}

#[test]
fn exec_answers_in_order_on_memory_and_on_redis() {
    for store in [None, Some(Server::start(Flavor::Redis))] {
        let url = store.as_ref().map(Server::url);
        let options = url.as_ref().map_or(vec![], |url| vec!["--store", url]);
        let served = Served::start(&options, Some(DEMO));
        let lines =
            ["MULTI", "CL.THROTTLE k 0 1 1000", "ECHO a", "CL.THROTTLE k 0 1 1000", "EXEC", "PING"];
        assert_eq!(
            replies(&served, &lines),
            "+OK +QUEUED +QUEUED +QUEUED *3 *5 :0 :1 :0 :-1 :1000 $1 a *5 :1 :1 :0 :1000 :1000 +PONG"
        );
    }
}

#[test]
fn a_long_transaction_on_redis_keeps_the_order_of_its_replies() {
    let redis = Server::start(Flavor::Redis);
    let served = Served::start(&["--store", &redis.url()], Some(DEMO));
    let mut bytes = script(&["MULTI"]);
    let mut expected = "+OK\r\n".to_owned() + &"+QUEUED\r\n".repeat(2_000) + "*2000\r\n";
    for round in 0..1_000 {
        bytes.extend(command(&[
            "CL.THROTTLE",
            &format!("k{round}"),
            "9",
            "1",
            "1000",
            &(round % 10).to_string(),
        ]));
        bytes.extend(command(&["ECHO", &round.to_string()]));
        let (left, reset) = (10 - round % 10, round % 10 * 1000);
        let echo = round.to_string();
        expected += &format!(
            "*5\r\n:0\r\n:10\r\n:{left}\r\n:-1\r\n:{reset}\r\n${}\r\n{echo}\r\n",
            echo.len()
        );
    }
    bytes.extend(script(&["EXEC"]));
    assert_eq!(exchange(served.resp(), &bytes), expected);
}

/// A mistake in the last command must not follow charges of the first.
#[test]
fn a_transaction_with_a_mistake_charges_nothing() {
    let served = Served::start(&[], Some(POLICIES));
    let long = "x".repeat(70_000);
    let mistakes = [
        "SET a b",
        "TG.CHECK api",
        "TG.CHECK api k COST -1",
        "TG.CHECK nothing k",
        "TG.CHECK api k TIER nothing",
        "TG.CHECKALL api k AND nothing k",
        "TG.RESERVE api k 0",
        "TG.SETTLE x y",
        "TG.REFUND api k x",
        "TG.RESET nothing k",
        "CL.THROTTLE k x 1 1000",
        "CL.THROTTLE k 9 1 999999999",
        &format!("TG.CHECK api {long}"),
    ];
    for mistake in mistakes {
        let reply =
            replies(&served, &["MULTI", "TG.CHECK api k", mistake, "TG.CHECK api k", "EXEC"]);
        let [ok, queued, ..] = reply.split(' ').collect::<Vec<_>>()[..] else { panic!("{reply}") };
        assert_eq!((ok, queued), ("+OK", "+QUEUED"), "{mistake:.80}: {reply}");
        assert!(reply.contains(" -ERR "), "{mistake:.80}: {reply}");
        assert!(
            reply
                .ends_with(" +QUEUED -EXECABORT Transaction discarded because of previous errors."),
            "{mistake:.80}: {reply}"
        );
    }
    assert_eq!(ask(&served, "TG.PEEK api k COST 0"), "*6 :1 :5 :5 :0 :0 :0");
}

#[test]
fn a_transaction_can_be_dropped() {
    let served = Served::start(&[], Some(POLICIES));
    assert_eq!(
        replies(
            &served,
            &["EXEC", "DISCARD", "MULTI", "MULTI", "TG.CHECK api k", "DISCARD", "EXEC"]
        ),
        "-ERR EXEC without MULTI -ERR DISCARD without MULTI +OK -ERR MULTI calls can not be nested +QUEUED +OK \
         -ERR EXEC without MULTI"
    );
    assert_eq!(replies(&served, &["MULTI", "EXEC"]), "+OK *0");
    assert_eq!(
        replies(&served, &["MULTI", "TG.CHECK api k", "RESET", "EXEC"]),
        "+OK +QUEUED +RESET -ERR EXEC without MULTI"
    );
    assert_eq!(replies(&served, &["MULTI", "TG.CHECK api k", "QUIT"]), "+OK +QUEUED +OK");
    // A connection that ends within a transaction runs nothing.
    assert_eq!(replies(&served, &["MULTI", "TG.CHECK api k"]), "+OK +QUEUED");
    assert_eq!(ask(&served, "TG.PEEK api k COST 0"), "*6 :1 :5 :5 :0 :0 :0");
}

/// The commands of a transaction are stored, so their memory is bounded.
///
/// Fault E3.
#[test]
fn the_commands_of_a_transaction_take_a_bounded_amount_of_memory() {
    let served = Served::start(&[], Some(DEMO));
    let before = served.resident_kib();
    let mut stream = connect(served.resp());
    stream.write_all(&script(&["MULTI"])).expect("the write succeeds");
    stream.read_exact(&mut [0; 5]).expect("the reply arrives");
    let echo = command(&[&b"ECHO"[..], &[b'x'; 60_000]]);
    let mut rejected = 0;
    for _ in 0..200 {
        stream.write_all(&echo).expect("the write succeeds");
        let mut reply = Vec::new();
        while !reply.ends_with(b"\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("the reply arrives");
            reply.push(byte[0]);
        }
        rejected += usize::from(reply.starts_with(b"-ERR no room for this MULTI"));
    }
    let grown = served.resident_kib().saturating_sub(before);
    assert!(grown < 4096, "{grown} KiB for 12 MB of commands");
    assert_eq!(rejected, 1, "the commands after a rejected one are not stored");
    stream.write_all(&script(&["EXEC", "PING"])).expect("the write succeeds");
    let mut reply = [0; 69];
    stream.read_exact(&mut reply).expect("the reply arrives");
    let reply = String::from_utf8_lossy(&reply);
    assert!(reply.starts_with("-EXECABORT ") && reply.ends_with("+PONG\r\n"), "{reply}");
}
