//! Tests `tallygate replay`: input, output, messages and exit codes.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, Command, Stdio};

use crate::{Outcome, run};
use tallygate_testkit::{Expected, decision_cases, replay_cases};

fn command(options: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    command.arg("replay").args(options);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn start(options: &[&str]) -> Child {
    command(options).spawn().expect("the binary starts")
}

fn replay(options: &[&str], input: impl AsRef<[u8]>) -> Outcome {
    run("replay", options, input.as_ref())
}

#[track_caller]
fn succeeds(options: &[&str], input: impl AsRef<[u8]>, lines: &[&str]) {
    let Outcome { output, message, code } = replay(options, input);
    assert_eq!((code, message.as_str()), (Some(0), ""));
    assert_eq!(output.lines().collect::<Vec<_>>(), lines);
}

#[track_caller]
fn fails(options: &[&str], input: impl AsRef<[u8]>, lines: &[&str], expected: &str) {
    let Outcome { output, message, code } = replay(options, input);
    assert_eq!(code, Some(2), "{message}");
    assert_eq!(output.lines().collect::<Vec<_>>(), lines);
    assert_eq!(message, format!("tallygate: {expected}\n"));
}

#[test]
fn every_replay_vector_is_printed() {
    let cases = replay_cases();
    assert!(cases.len() >= 42, "all vectors are loaded");
    for case in cases {
        let Outcome { output, message, code } = replay(&[], &case.input);
        assert_eq!(code, Some(0), "{}: {message}", case.name);
        let is_report =
            |line: &str| line.starts_with("tallygate: line ") && line.contains(": ignored, ");
        assert!(message.lines().all(is_report), "{}: {message}", case.name);
        assert_eq!(output.lines().collect::<Vec<_>>(), case.output, "{}", case.name);
    }
}

#[test]
fn every_decision_vector_is_printed_as_json_and_as_verdicts() {
    for case in decision_cases() {
        let burst = case.burst.to_string();
        let options = ["--algorithm", &case.algorithm, "--burst", &burst];
        let replayed = replay(&[&options[..], &["--json"]].concat(), case.as_replay());
        assert_eq!(replayed.message, "");
        let read = |line| serde_json::from_str::<Expected>(line).expect("each line is a decision");
        let decisions: Vec<Expected> = replayed.output.lines().map(read).collect();
        assert_eq!(decisions, case.decisions, "{}", case.algorithm);
        let verdicts: Vec<&str> =
            case.decisions.iter().map(|d| if d.allowed { "allow" } else { "deny" }).collect();
        succeeds(&options, case.as_replay(), &verdicts);
        if case.algorithm == "token_bucket" {
            succeeds(&["--exact", "--burst", &burst], case.as_replay(), &verdicts);
        }
    }
}

#[test]
fn a_decision_in_json_has_the_documented_fields_in_order() {
    let input = "3\n10\n2\nrequest a 0 2\nrequest a 0 4\n";
    succeeds(
        &["--algorithm", "leaky_bucket", "--json"],
        input,
        &[
            r#"{"allowed":true,"limit":3,"remaining":1,"retry_after":0,"reset_after":7,"delay":0}"#,
            r#"{"allowed":false,"limit":3,"remaining":1,"retry_after":null,"reset_after":7,"delay":0}"#,
        ],
    );
}

#[test]
fn the_textbook_rule_accepts_every_number() {
    succeeds(&[], "-5\n10\n2\nrequest a 0\nrequest a 99 0\n", &["deny", "deny"]);
    succeeds(&[], "1\n-10\n2\nrequest a 0\nrequest a 99\n", &["allow", "deny"]);
    succeeds(&[], "1\n5\n3\nrequest a 10\nrequest a 3\nrequest a 14\n", &["allow", "deny", "deny"]);
    succeeds(
        &["--burst", "2"],
        "1\n5\n3\nrequest a 0\nrequest a 0\nrequest a 0\n",
        &["allow", "allow", "deny"],
    );
    let ends = format!("{0}\n{0}\n2\nrequest a {1}\nrequest a {0} {0}\n", i64::MAX, i64::MIN);
    succeeds(&[], ends, &["allow", "allow"]);
}

#[test]
fn other_instructions_count_and_blank_lines_do_not() {
    let input = "\n 2 \r\n\n10\n  \n4\n\nrequest a 0\n\nreset a\nrequest a 0\n#\nrequest a x y z\n";
    reports(
        input,
        &["allow", "allow"],
        "tallygate: line 10: ignored, because it does not start with `request`; 2 such lines in all\n\
         tallygate: line 13: ignored, like all lines after it, because it is after the last instruction\n",
    );
    succeeds(&[], "1\n1\n1\nrequest a 0", &["allow"]);
    succeeds(&[], "1\n1\n1\nrequest a 0\n\n  \n", &["allow"]);
}

/// Replays a trace, and compares the decisions and the report of ignored lines.
#[track_caller]
fn reports(input: &str, lines: &[&str], expected: &str) {
    let Outcome { output, message, code } = replay(&[], input);
    assert_eq!(code, Some(0), "{message}");
    assert_eq!(output.lines().collect::<Vec<_>>(), lines);
    assert_eq!(message, expected);
}

#[test]
fn ignored_lines_are_reported_on_standard_error() {
    reports(
        "1\n1\n0\nrequest a",
        &[],
        "tallygate: line 4: ignored, like all lines after it, because it is after the last instruction\n",
    );
    reports(
        "1\n1\n2\nreset a\nrequest a 0\n",
        &["allow"],
        "tallygate: line 4: ignored, because it does not start with `request`\n",
    );
    reports(
        "1\n1\n2\n[\"reset\", \"a\"]\n[\"request\", \"a\", \"0\"]\n",
        &["allow"],
        "tallygate: line 4: ignored, because it does not start with `request`\n",
    );
}

#[test]
fn an_instruction_can_be_a_list() {
    let input = "2\n10\n7\n[\"request\", \"alice\", \"0\"]\n  [\"request\",\"alice\",0] \nrequest alice 0\n\
                 [\"request\", \"al\\u0069ce\", \"10\", \"2\"],\r\n[\"request\", \"alice\", 10]\n\
                 [\"request\", \"a b\", -5]\n[\"request\", \"a b\", \"-5\", 3]\n";
    succeeds(&[], input, &["allow", "allow", "deny", "allow", "deny", "allow", "deny"]);
    let list = "a list of texts and whole numbers, such as [\"request\", \"alice\", \"0\"]";
    for (line, expected) in [
        (
            "[\"request\", \"a\", \"0\"",
            format!("found `[\"request\", \"a\", \"0\"`; expected {list}"),
        ),
        (
            "[\"request\", \"a\", 0.5]",
            format!("found `[\"request\", \"a\", 0.5]`; expected {list}"),
        ),
        (
            "[\"request\"]",
            "found the end of the line; expected a client after `request`".to_owned(),
        ),
        (
            "[\"request\", \"a\", \"x\"]",
            "found `x`; expected a timestamp, a whole 64-bit number".to_owned(),
        ),
        (
            "[\"request\", \"a\", 0, 1, 2]",
            "found `2`; expected the end of the line after the cost".to_owned(),
        ),
    ] {
        fails(&[], format!("1\n1\n1\n{line}\n"), &[], &format!("line 4: {expected}"));
    }
}

#[test]
fn the_anchor_option_sets_the_start_of_windows() {
    let input = "1\n10\n3\nrequest a 7\nrequest a 12\nrequest a 17\n";
    let fixed = ["--algorithm", "fixed_window", "--anchor"];
    succeeds(&[&fixed[..], &["clock"]].concat(), input, &["allow", "allow", "deny"]);
    succeeds(&[&fixed[..], &["first-request"]].concat(), input, &["allow", "deny", "allow"]);
}

#[test]
fn client_names_are_bytes_and_the_input_can_be_a_file() {
    succeeds(
        &[],
        b"1\n10\n3\nrequest \xff 0\nrequest \xfe 0\nrequest \xff 0\n",
        &["allow", "allow", "deny"],
    );
    let file = std::env::temp_dir().join(format!("tallygate-replay-{}", std::process::id()));
    std::fs::write(&file, "1\n10\n1\nrequest a 0\n").expect("the temporary file is written");
    succeeds(&[file.to_str().expect("there is a name")], "", &["allow"]);
    std::fs::remove_file(&file).expect("the file is removed");
    let gone = replay(&[file.to_str().expect("there is a name")], "");
    assert_eq!(gone.code, Some(2));
    assert!(gone.message.starts_with("tallygate: cannot open "), "{}", gone.message);
}

#[test]
fn a_malformed_line_is_an_error_after_the_results_before_it() {
    let after_one = |line: &str| format!("1\n10\n9\nrequest a 0\n{line}\n");
    for (line, expected) in [
        ("request a", "found the end of the line; expected a timestamp after the client"),
        ("request a 1e3", "found `1e3`; expected a timestamp, a whole 64-bit number"),
        ("request a 1 -1", "found `-1`; expected a cost, a whole 64-bit number without a sign"),
        ("request a 1 1 1", "found `1`; expected the end of the line after the cost"),
    ] {
        fails(&[], after_one(line), &["allow"], &format!("line 5: {expected}"));
        fails(&["--exact"], after_one(line), &["allow"], &format!("line 5: {expected}"));
    }
    fails(
        &[],
        "1\n10\n3\nrequest a 0\n\n",
        &["allow"],
        "line 6: the input ended after 1 of 3 instructions",
    );
    let long = format!("1\n1\n2\nrequest a 0\nrequest {} 0\n", "x".repeat(10 << 20));
    let expected = "line 5: found more than 65536 bytes; expected a shorter line";
    fails(&[], long, &["allow"], expected);
}

#[test]
fn the_error_of_a_malformed_header_names_its_line() {
    let capacity = "the capacity, a whole 64-bit number";
    fails(&[], "", &[], &format!("line 1: the input ended; expected {capacity}"));
    fails(&[], "x\n", &[], &format!("line 1: found `x`; expected {capacity}"));
    fails(&[], "+1\n", &[], &format!("line 1: found `+1`; expected {capacity}"));
    fails(&[], "1 2\n", &[], "line 1: found `2`; expected one number on this line");
    fails(
        &[],
        "1\n9223372036854775808\n",
        &[],
        "line 2: found `9223372036854775808`; expected the window, a whole 64-bit number",
    );
    let count = "the number of instructions, a whole number, 0 or more";
    fails(&[], "1\n1\n-1\n", &[], &format!("line 3: found `-1`; expected {count}"));
    fails(&[], "1\n1\n1.5\n", &[], &format!("line 3: found `1.5`; expected {count}"));
    let textbook = "(only the textbook rule accepts less)";
    fails(
        &["--exact"],
        "0\n1\n",
        &[],
        &format!("line 1: found `0`; expected a limit of at least 1 for token_bucket {textbook}"),
    );
    fails(
        &["--algorithm", "gcra"],
        "1\n-1\n",
        &[],
        &format!("line 2: found `-1`; expected a window of at least 1 for gcra {textbook}"),
    );
    fails(
        &["--algorithm", "sliding_window_log"],
        "1000000000\n1000000000\n",
        &[],
        "line 2: a sliding_window_log with limit 1000000000 per 1000000000 ticks may need 1000000000 \
         entries per key (at most 1048576); use a smaller limit or a sliding_window_counter",
    );
    fails(
        &["--algorithm", "fixed_window", "--burst", "2"],
        "3\n5\n",
        &[],
        "line 2: the burst of a fixed_window is its limit, 3 (got 2); leave burst out or use a bucket",
    );
}

#[test]
fn contradictory_options_are_errors_before_anything_is_read() {
    fails(
        &["--json"],
        "",
        &[],
        "--json needs --exact or --algorithm NAME: the textbook rule returns only allow or deny",
    );
    fails(
        &["--anchor", "clock"],
        "",
        &[],
        "--anchor applies only to fixed windows; add --algorithm fixed_window or remove --anchor",
    );
    fails(
        &["--algorithm", "gcra", "--anchor", "clock"],
        "",
        &[],
        "--anchor applies only to fixed windows (got --algorithm gcra); use fixed_window or remove \
         --anchor",
    );
    for (options, part) in [
        (vec!["--algorithm", "gcar"], "gcra"),
        (vec!["--burst", "0"], "must be at least 1"),
        (vec!["--burst", "-1"], "expected a whole number, without a sign or a unit"),
        (vec!["--burst", "1.5"], "expected a whole number, without a sign or a unit"),
        (vec!["--burst", "18446744073709551616"], "the number is too large"),
        (vec!["--burst", "1e3"], "1e3"),
        (vec!["--what"], "--what"),
    ] {
        let Outcome { output, message, code } = replay(&options, "");
        assert_eq!((code, output.as_str()), (Some(2), ""));
        assert!(message.contains(part), "{message}");
    }
}

/// A user who types requests gets each result before typing the next line.
#[test]
fn results_are_printed_while_the_input_pauses() {
    let mut child = start(&[]);
    let mut stdin = child.stdin.take().expect("the stream is piped");
    let mut results = BufReader::new(child.stdout.take().expect("the stream is piped"));
    let mut output = String::new();
    write!(stdin, "1\n10\n3\nrequest a 0\nrequ").expect("the write succeeds");
    results.read_line(&mut output).expect("the result arrives while the input is open");
    assert_eq!(output, "allow\n");
    write!(stdin, "est a 5\nrequest a 10\n").expect("the write succeeds");
    results.read_to_string(&mut output).expect("the command ends after three instructions");
    assert_eq!(output, "allow\ndeny\nallow\n");
    assert!(child.wait().expect("the process ends").success());
}

/// The results do not depend on how the input is split into reads.
#[test]
fn results_do_not_depend_on_the_size_of_reads() {
    let input =
        "2\n10\n6\nrequest a 0\nrequest bb 0 2\n\nrequest a 1\nword\nrequest a 2\nrequest a 30";
    let whole = replay(&[], input).output;
    let mut child = start(&[]);
    let mut stdin = child.stdin.take().expect("the stream is piped");
    for byte in input.as_bytes() {
        stdin.write_all(&[*byte]).expect("the write succeeds");
        stdin.flush().expect("the write succeeds");
    }
    drop(stdin);
    let pieces = child.wait_with_output().expect("the process ends");
    assert_eq!(String::from_utf8(pieces.stdout).expect("the text is UTF-8"), whole);
}

/// Memory grows with clients, not with requests.
#[cfg(target_os = "linux")]
#[test]
fn memory_does_not_grow_with_requests() {
    let mut child = start(&["--algorithm", "sliding_window_log"]);
    let mut stdin = child.stdin.take().expect("the stream is piped");
    let mut results = BufReader::new(child.stdout.take().expect("the stream is piped"));
    let reader = std::thread::spawn(move || {
        let mut count = 0_u64;
        let mut line = String::new();
        while results.read_line(&mut line).expect("the text is UTF-8") > 0 {
            count += 1;
            line.clear();
            if count == 2_000_000 {
                return count;
            }
        }
        count
    });
    writeln!(stdin, "100\n1000\n2000001").expect("the write succeeds");
    let mut lines = Vec::new();
    for request in 0..2_000_000_u64 {
        writeln!(lines, "request client-{} {request}", request % 1_000)
            .expect("writing to memory succeeds");
        if lines.len() > 100_000 {
            stdin.write_all(&lines).expect("the write succeeds");
            lines.clear();
        }
    }
    stdin.write_all(&lines).expect("the write succeeds");
    assert_eq!(reader.join().expect("the reader ends"), 2_000_000);
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id()))
        .expect("the process is running");
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the status has a peak");
    let kilobytes: u64 =
        peak.trim().trim_end_matches(" kB").parse().expect("the value is a number");
    assert!(kilobytes < 16 * 1024, "{kilobytes} kB for 1000 clients");
    drop(stdin);
    assert_eq!(
        child.wait().expect("the process ends").code(),
        Some(2),
        "one instruction is missing"
    );
}

/// Closing the output, as `head` does, is not an error.
#[test]
fn a_closed_output_ends_the_command_without_an_error() {
    let mut child = start(&[]);
    let mut stdin = child.stdin.take().expect("the stream is piped");
    drop(child.stdout.take());
    let mut input = b"1\n10\n1000000\n".to_vec();
    input.extend(b"request a 0\n".repeat(1_000_000));
    drop(stdin.write_all(&input));
    drop(stdin);
    let out = child.wait_with_output().expect("the process ends");
    assert_eq!((out.status.code(), out.stderr), (Some(0), Vec::new()));
}
