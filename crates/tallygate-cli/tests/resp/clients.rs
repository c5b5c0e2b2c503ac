//! Tests with the Redis clients that people use, at their defaults.
//!
//! Code that unpacks six values must get six numbers, whichever protocol a client speaks by default. A reply that is a
//! map would unpack to six names, which are all true.

use std::path::PathBuf;
use std::process::Command;

use crate::common::Served;

/// A policy with a burst of 5 that does not refill during a test.
const API: &str = r#"
    [policies.api]
    limit = 1
    window = "1000h"
    burst = 5
"#;

pub(crate) fn redis_cli(words: &[&str]) -> String {
    run(Command::new("redis-cli").args(words))
}

/// Runs a program, which must succeed, and returns its output.
#[track_caller]
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().expect("it is installed: run scripts/install-test-clients");
    let (printed, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && errors.is_empty(), "{command:?}: {printed}{errors}");
    printed.into_owned()
}

/// Returns the directory in which scripts/install-test-clients installs the clients.
fn clients() -> PathBuf {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/test-clients");
    std::fs::canonicalize(path).expect("clients: run scripts/install-test-clients")
}

/// Checks that a client at its defaults was allowed 5 of 50 requests.
#[track_caller]
fn five_of_fifty(printed: &str) {
    assert_eq!(printed, "5 of 50\n");
}

#[test]
fn redis_cli_works() {
    let served = Served::start(&[], None);
    let port = served.resp_port();
    let throttle = ["-p", port, "CL.THROTTLE", "k", "1", "1", "1000"];
    assert_eq!(redis_cli(&throttle), "0\n2\n1\n-1\n1000\n");
    for protocol in ["-2", "-3"] {
        let peek = redis_cli(&["-p", port, protocol, "TG.PEEK", "demo", "k", "COST", "0"]);
        assert_eq!(peek, "1\n5\n5\n0\n0\n0\n");
    }
    let named = redis_cli(&["-p", port, "-3", "TG.PEEKV", "demo", "k", "COST", "0"]);
    assert_eq!(named.lines().next(), Some("allowed 1"), "{named}");
    assert!(redis_cli(&["-p", port, "INFO"]).contains("tallygate_version:"));
    assert_eq!(redis_cli(&["-p", port, "-r", "3", "PING"]), "PONG\nPONG\nPONG\n");
    assert!(redis_cli(&["-p", port, "-3", "COMMAND", "DOCS"]).contains("TG.CHECK policy key"));
}

#[test]
fn redis_benchmark_works() {
    let served = Served::start(&[], None);
    let arguments = ["-q", "-n", "20000", "-P", "16", "-r", "1000", "-p", served.resp_port()];
    let throttle = ["CL.THROTTLE", "key:__rand_int__", "15", "30", "60"];
    let printed = run(Command::new("redis-benchmark").args(arguments).args(throttle));
    assert!(printed.contains("requests per second"), "{printed}");
    assert!(!printed.to_lowercase().contains("err"), "{printed}");
}

fn python(script: &str, served: &Served) -> String {
    let mut python = Command::new("python3");
    python.env("PYTHONPATH", clients().join("python")).args(["-c", script, served.resp_port()]);
    run(&mut python)
}

#[test]
fn redis_py_at_its_defaults_limits() {
    let served = Served::start(&[], Some(API));
    let script = r#"
import redis, sys
r = redis.Redis(port=int(sys.argv[1]))
passed = 0
for _ in range(50):
    allowed, limit, remaining, retry_ms, reset_ms, delay_ms = r.execute_command("TG.CHECK", "api", "py")
    if allowed:
        passed += 1
print(passed, "of 50")
"#;
    five_of_fifty(&python(script, &served));
    // A pipeline is a transaction by default.
    let script = r#"
import redis, sys
r = redis.Redis(port=int(sys.argv[1]))
pipeline = r.pipeline()
for _ in range(50):
    pipeline.execute_command("TG.CHECK", "api", "pipeline")
print(sum(reply[0] for reply in pipeline.execute()), "of 50")
pipeline = r.pipeline()
pipeline.execute_command("TG.RESERVE", "api", "other", 60000, "COST", 5)
pipeline.execute_command("TG.CHECK", "nothing", "other")
try:
    pipeline.execute()
    raise SystemExit("the mistake was accepted")
except redis.ResponseError as error:
    assert "no policy is named" in str(error), error
assert r.execute_command("TG.PEEK", "api", "other", "COST", 0)[2] == 5, "it failed and charged"
"#;
    five_of_fifty(&python(script, &served));
}

#[test]
fn redis_py_works_in_both_protocols() {
    let served = Served::start(&[], None);
    let script = r#"
import redis, sys
for protocol in (2, 3):
    r = redis.Redis(port=int(sys.argv[1]), protocol=protocol, client_name="test", decode_responses=True)
    assert r.ping() is True
    key = f"py{protocol}"
    assert r.execute_command("CL.THROTTLE", key, 1, 1, 1000) == [0, 2, 1, -1, 1000]
    assert r.execute_command("TG.CHECK", "demo", key, "COST", 6) == [0, 5, 5, -1, 0, 0]
    assert r.execute_command("TG.CHECKALL", "demo", key, "AND", "demo", "other" + key)[6] == -1
    named = r.execute_command("TG.PEEKV", "demo", key, "COST", 0)
    named = named if protocol == 3 else dict(zip(named[::2], named[1::2]))
    assert (named["allowed"], named["limit"], named["remaining"]) == (1, 5, 4), named
    reserved = r.execute_command("TG.RESERVE", "demo", "work" + key, 60000, "COST", 5)
    assert reserved[0] == 1 and r.execute_command("TG.SETTLE", reserved[6], 2)[2] == 3
    pipeline = r.pipeline(transaction=False)
    for _ in range(100):
        pipeline.execute_command("CL.THROTTLE", "many" + key, 49, 1, 1000)
    assert [reply[0] for reply in pipeline.execute()] == [0] * 50 + [1] * 50
    try:
        r.execute_command("CL.THROTTLE", key, "inf", 1, 60)
        raise SystemExit("the command was accepted")
    except redis.ResponseError as error:
        assert "(got 'inf')" in str(error), error
    assert r.info("server")["redis_version"].startswith("7.")
    assert r.client_getname() == "test"
    assert "tg.check" in r.command()
    assert r.command_count() == len(r.command_list())
    assert r.select(0) and r.echo("hello") == "hello"
    assert r.client_setinfo("LIB-NAME", "test")
    assert r.execute_command("CL.THROTTLE", b"\xff\x00", 1, 1, 1000)[0] == 0
    r.execute_command("QUIT")
print("done")
"#;
    assert_eq!(python(script, &served), "done\n");
}

#[test]
fn node_redis_at_its_defaults_limits() {
    let served = Served::start(&[], Some(API));
    let script = r#"
const { createClient } = require("redis");
(async () => {
    const client = createClient({ url: `redis://127.0.0.1:${process.argv[1]}` });
    client.on("error", (error) => { throw error; });
    await client.connect();
    let passed = 0;
    for (let i = 0; i < 50; i++) {
        const [allowed, limit, remaining] = await client.sendCommand(["TG.CHECK", "api", "node"]);
        if (allowed) passed++;
    }
    console.log(passed, "of 50");
    const multi = client.multi();
    for (let i = 0; i < 50; i++) multi.addCommand(["TG.CHECK", "api", "multi"]);
    const replies = await multi.exec();
    if (replies.filter(([allowed]) => allowed).length !== 5) throw new Error(JSON.stringify(replies));
    await client.close();
})();
"#;
    five_of_fifty(&node("node", script, &served));
}

#[test]
fn node_redis_works_in_both_protocols() {
    let served = Served::start(&[], None);
    let script = r#"
const assert = require("node:assert");
const { createClient } = require("redis");
(async () => {
    for (const RESP of [2, 3]) {
        const client = createClient({ url: `redis://127.0.0.1:${process.argv[1]}`, RESP, name: "test" });
        client.on("error", (error) => { throw error; });
        await client.connect();
        assert.equal(await client.ping(), "PONG");
        const ask = (...words) => client.sendCommand(words);
        assert.deepEqual(await ask("CL.THROTTLE", `node${RESP}`, "1", "1", "1000"), [0, 2, 1, -1, 1000]);
        // Sent at once, without waiting for the replies.
        const many = [];
        for (let i = 0; i < 100; i++) many.push(ask("CL.THROTTLE", `many${RESP}`, "49", "1", "1000"));
        assert.equal((await Promise.all(many)).filter((reply) => reply[0] === 0).length, 50);
        assert.deepEqual(await ask("TG.PEEK", "demo", "node", "COST", "0"), [1, 5, 5, 0, 0, 0]);
        await assert.rejects(ask("CL.THROTTLE", "k", "-1", "1", "60"), /max_burst must be a whole number/);
        assert.ok((await client.commandInfo(["tg.check"]))[0].flags.has("write"));
        assert.match(await client.info(), /tallygate_version:/);
        assert.equal(await client.select(0), undefined);
        await client.close();
    }
    console.log("done");
})();
"#;
    assert_eq!(node("node", script, &served), "done\n");
}

#[test]
fn ioredis_at_its_defaults_limits() {
    let served = Served::start(&[], Some(API));
    let script = r#"
const { Redis } = require("ioredis");
(async () => {
    const client = new Redis(process.argv[1]);
    client.on("error", (error) => { throw error; });
    let passed = 0;
    for (let i = 0; i < 50; i++) {
        const [allowed, limit, remaining] = await client.call("TG.CHECK", "api", "io");
        if (allowed) passed++;
    }
    console.log(passed, "of 50");
    const multi = client.multi();
    for (let i = 0; i < 50; i++) multi.call("TG.CHECK", "api", "multi");
    const replies = await multi.exec();
    const allowed = replies.filter(([error, reply]) => error === null && reply[0]);
    if (allowed.length !== 5) throw new Error(JSON.stringify(replies));
    await client.quit();
})();
"#;
    five_of_fifty(&node("ioredis", script, &served));
}

#[test]
fn ioredis_works_in_both_protocols() {
    let served = Served::start(&[], None);
    let script = r#"
const assert = require("node:assert");
const { Redis } = require("ioredis");
(async () => {
    for (const protocol of [2, 3]) {
        const client = new Redis({ port: process.argv[1], connectionName: "test", protocol });
        client.on("error", (error) => { throw error; });
        assert.equal(await client.ping(), "PONG");
        const ask = (...words) => client.call(...words);
        const key = `io${protocol}`;
        assert.deepEqual(await ask("CL.THROTTLE", key, 1, 1, 1000), [0, 2, 1, -1, 1000]);
        const pipeline = client.pipeline();
        for (let i = 0; i < 100; i++) pipeline.call("CL.THROTTLE", `many ${key}`, 49, 1, 1000);
        const replies = await pipeline.exec();
        assert.equal(replies.filter(([error, reply]) => error === null && reply[0] === 0).length, 50);
        assert.deepEqual(await ask("TG.PEEK", "demo", key, "COST", 0), [1, 5, 5, 0, 0, 0]);
        await assert.rejects(ask("CL.THROTTLE", key, "-1", 1, 60), /max_burst must be a whole number/);
        assert.equal(await client.client("GETNAME"), "test");
        assert.equal((await client.call("CL.THROTTLE", Buffer.from([255, 0]), 1, 1, 1000))[1], 2);
        assert.equal(await client.quit(), "OK");
    }
    console.log("done");
})();
"#;
    assert_eq!(node("ioredis", script, &served), "done\n");
}

/// Runs a script that uses one of the clients and returns its output.
#[track_caller]
fn node(client: &str, script: &str, served: &Served) -> String {
    let modules = clients().join(client).join("node_modules");
    let arguments = ["-e", script, served.resp_port()];
    run(Command::new("node").env("NODE_PATH", modules).args(arguments))
}

#[test]
fn the_redis_crate_at_its_defaults_limits() {
    let served = Served::start(&[], Some(API));
    let mut client =
        redis::Client::open(format!("redis://{}", served.resp())).expect("the address is valid");
    let mut pipeline = redis::pipe();
    pipeline.atomic();
    for _ in 0..50 {
        pipeline.cmd("TG.CHECK").arg(&["api", "atomic"]);
    }
    type Numbers = (bool, u64, u64, i64, u64, u64);
    let replies: Vec<Numbers> = pipeline.query(&mut client).expect("there are decisions");
    assert_eq!(replies.iter().filter(|(allowed, ..)| *allowed).count(), 5);
    let one = redis::cmd("TG.CHECK").arg(&["api", "one"]).query::<Numbers>(&mut client);
    let (allowed, limit, remaining, ..) = one.expect("there is a decision");
    assert_eq!((allowed, limit, remaining), (true, 5, 4));
}

#[test]
fn the_redis_crate_works_in_both_protocols() {
    let served = Served::start(&[], None);
    for protocol in ["resp2", "resp3"] {
        let url = format!("redis://{}/?protocol={protocol}", served.resp());
        let mut client = redis::Client::open(url).expect("the address is valid");
        let reply: Vec<i64> = redis::cmd("CL.THROTTLE")
            .arg(&[protocol, "1", "1", "1000"])
            .query(&mut client)
            .expect("there is a decision");
        assert_eq!(reply, [0, 2, 1, -1, 1000]);
        let reply: Vec<i64> = redis::cmd("TG.PEEK")
            .arg(&["demo", protocol, "COST", "0"])
            .query(&mut client)
            .expect("there is a decision");
        assert_eq!(reply, [1, 5, 5, 0, 0, 0]);
        let mut pipeline = redis::pipe();
        for _ in 0..100 {
            pipeline.cmd("CL.THROTTLE").arg(format!("many {protocol}")).arg(&[49, 1, 1000]);
        }
        let reply: Vec<Vec<i64>> = pipeline.query(&mut client).expect("there are decisions");
        assert_eq!(reply.iter().filter(|reply| reply[0] == 0).count(), 50);
        let error = redis::cmd("CL.THROTTLE").arg(&["k", "1", "1"]).query::<()>(&mut client);
        let error = error.expect_err("there are too few arguments").to_string();
        assert!(error.contains("CL.THROTTLE key max_burst"), "{error}");
    }
}

#[test]
fn go_redis_at_its_defaults_limits() {
    let served = Served::start(&[], Some(API));
    five_of_fifty(&go_redis(
        served.resp(),
        r#"
	passed := 0
	for i := 0; i < 50; i++ {
		reply, err := client.Do(ctx, "TG.CHECK", "api", "go").Int64Slice()
		if err != nil {
			panic(err)
		}
		if reply[0] == 1 {
			passed++
		}
	}
	fmt.Println(passed, "of 50")
"#,
    ));
}

#[test]
fn go_redis_works_in_both_protocols() {
    let served = Served::start(&[], Some(API));
    let printed = go_redis(
        served.resp(),
        r#"
	for _, protocol := range []int{2, 3} {
		client := redis.NewClient(&redis.Options{Addr: os.Args[1], Protocol: protocol})
		key := fmt.Sprint("go", protocol)
		check := func(pipe redis.Pipeliner) error {
			for i := 0; i < 3; i++ {
				pipe.Do(ctx, "TG.CHECK", "api", key, "COST", 2)
			}
			return nil
		}
		show := func(commands []redis.Cmder, err error) {
			for _, command := range commands {
				reply, _ := command.(*redis.Cmd).Int64Slice()
				fmt.Print(reply[:3], " ")
			}
			fmt.Println(err)
		}
		show(client.TxPipelined(ctx, check))
		show(client.Pipelined(ctx, check))
		reserved, _ := client.Do(ctx, "TG.RESERVE", "api", key, 60000).Slice()
		canceled, _ := client.Do(ctx, "TG.CANCEL", reserved[6]).Int64Slice()
		fmt.Println(reserved[:3], canceled[:3], client.Do(ctx, "TG.CANCEL", reserved[6]).Err())
		fmt.Println(client.Do(ctx, "TG.CHECKALL", "api", "other", "AND", "api", key, "COST", 9).Int64Slice())
		fmt.Println(client.Do(ctx, "TG.CHECK", "ap", key).Err())
		named, _ := client.Do(ctx, "TG.PEEKV", "api", key, "COST", 0).Result()
		if list, ok := named.([]interface{}); ok {
			fmt.Println(list[6], list[7])
		} else {
			fmt.Println("remaining", named.(map[interface{}]interface{})["remaining"])
		}
		client.Close()
	}
"#,
    );
    let expected = "[1 5 3] [1 5 1] [0 5 1] <nil>\n\
        [0 5 1] [0 5 1] [0 5 1] <nil>\n\
        [1 5 0] [1 5 1] ERR the reservation is already settled\n\
        …\n\
        ERR no policy is named \"ap\"; did you mean \"api\"?\n\
        remaining 1\n";
    // Times pass.
    let is_joint = |line: &&str| line.starts_with("[0 5 1 -1 ") && line.ends_with(" 0 1] <nil>");
    let shown: String = printed
        .lines()
        .map(|line| if is_joint(&line) { "…\n".into() } else { format!("{line}\n") })
        .collect();
    assert_eq!(shown, expected.repeat(2), "{printed}");
}

/// Runs statements of Go with a client of go-redis 9 at its defaults.
fn go_redis(address: &str, statements: &str) -> String {
    let program = format!(
        r#"package main

import (
	"context"
	"fmt"
	"os"

	"github.com/redis/go-redis/v9"
)

func main() {{
	ctx := context.Background()
	client := redis.NewClient(&redis.Options{{Addr: os.Args[1]}})
	defer client.Close()
{statements}}}
"#
    );
    let folder = tempfile::tempdir().expect("there is a folder");
    std::fs::write(folder.path().join("main.go"), program).expect("the program is written");
    let go = |arguments: &[&str]| {
        let mut go = Command::new(clients().join("go/go/bin/go"));
        go.args(arguments).current_dir(folder.path()).env("GOENV", clients().join("go.env"));
        go.env("GOPATH", folder.path().join("path")).output().expect("Go is installed")
    };
    for arguments in [&["mod", "init", "test"][..], &["get", "github.com/redis/go-redis/v9"]] {
        let output = go(arguments);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let output = go(&["run", ".", address]);
    let (printed, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && errors.is_empty(), "{printed}{errors}");
    printed.into_owned()
}
