//! Killed under load, again and again: it starts clean on the same ports and the same path, and serves.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use crate::common::Served;

const ROUNDS: usize = 100;
const PATIENCE: Duration = Duration::from_secs(20);

const POLICY: &str = "[policies.api]\nlimit = 1\nwindow = \"1h\"\nburst = 1000000\n";
const HTTP: &[u8] =
    b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 29\r\n\r\n{\"policy\":\"api\",\"key\":\"load\"}";
const RESP: &[u8] = b"TG.CHECK api load\r\n";

trait Stream: Read + Write + Send {}

impl<S: Read + Write + Send> Stream for S {}

fn connect(address: &str) -> Box<dyn Stream> {
    match address.strip_prefix("unix:") {
        Some(path) => {
            let stream = UnixStream::connect(path).expect("it listens");
            stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            Box::new(stream)
        }
        None => {
            let stream = TcpStream::connect(address).expect("it listens");
            stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            Box::new(stream)
        }
    }
}

/// Asks until nobody answers any more; says so once it was answered a few times.
fn load(mut stream: Box<dyn Stream>, request: &[u8], depth: usize, answered: &mpsc::Sender<()>) {
    let (script, mut replies) = (request.repeat(depth), vec![0; 1 << 16]);
    for turn in 0.. {
        if stream.write_all(&script).is_err() || !matches!(stream.read(&mut replies), Ok(1..)) {
            return;
        }
        if turn == 5 {
            answered.send(()).expect("somebody waits");
        }
    }
}

/// What is left to a client that has not asked yet: the server knows nobody.
fn is_clean(resp: &str) -> bool {
    let mut stream = connect(resp);
    stream.write_all(b"TG.PEEK api load COST 0\r\n").expect("it reads");
    let mut reply = [0; 31];
    stream.read_exact(&mut reply).expect("a reply");
    reply.starts_with(b"*6\r\n:1\r\n:1000000\r\n:1000000\r\n:0")
}

#[test]
fn i2_killed_a_hundred_times_under_load_it_starts_clean() {
    let path = std::env::temp_dir().join(format!("tallygate-killed-{}.sock", std::process::id()));
    let unix = format!("unix:{}", path.display());
    let (mut http_port, mut resp_port) = ("127.0.0.1:0".to_owned(), "127.0.0.1:0".to_owned());
    for round in 0..ROUNDS {
        // First HTTP has the path, then RESP.
        let (http, resp) =
            if round < ROUNDS / 2 { (&unix, &resp_port) } else { (&http_port, &unix) };
        let served = Served::start(&["--http", http, "--resp", resp], Some(POLICY));
        assert!(is_clean(served.resp()), "after {round}");
        let loads = [(served.http(), HTTP, 1), (served.resp(), RESP, 1), (served.resp(), RESP, 50)]
            .map(|(address, request, depth)| (connect(address), request, depth));
        std::thread::scope(|scope| {
            let (tell, told) = mpsc::channel();
            let loads = loads.map(|(stream, request, depth)| {
                let tell = tell.clone();
                scope.spawn(move || load(stream, request, depth, &tell))
            });
            for _ in loads {
                told.recv_timeout(PATIENCE).expect("it answers");
            }
            assert_eq!(served.log(), "", "it has nothing to complain about");
            (http_port, resp_port) = ports(&served, http_port.clone(), resp_port.clone());
            served.kill();
        });
        assert!(path.exists(), "it could not take its socket away");
    }
    let mut last = Served::start(&["--http", &http_port, "--resp", &unix], Some(POLICY));
    assert!(is_clean(last.resp()));
    assert_eq!(last.stop(), Some(0));
    assert!(!Path::new(&path).exists(), "told to stop, it leaves nothing behind");
}

/// The ports that it was given the first time, or those that it had.
fn ports(served: &Served, http: String, resp: String) -> (String, String) {
    let given = |address: &str, before| match address.strip_prefix("unix:") {
        Some(_) => before,
        None => address.to_owned(),
    };
    (given(served.http(), http), given(served.resp(), resp))
}
