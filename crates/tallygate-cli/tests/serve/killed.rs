//! Kills the server under load many times: it starts clean on the same ports and socket paths.

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
            let stream = UnixStream::connect(path).expect("the connection opens");
            stream.set_read_timeout(Some(PATIENCE)).expect("the timeout is set");
            Box::new(stream)
        }
        None => {
            let stream = TcpStream::connect(address).expect("the connection opens");
            stream.set_read_timeout(Some(PATIENCE)).expect("the timeout is set");
            Box::new(stream)
        }
    }
}

/// Sends requests until the server is gone. Sends a message to `answered` after a few replies.
fn load(mut stream: Box<dyn Stream>, request: &[u8], depth: usize, answered: &mpsc::Sender<()>) {
    let (script, mut replies) = (request.repeat(depth), vec![0; 1 << 16]);
    for turn in 0.. {
        if stream.write_all(&script).is_err() || !matches!(stream.read(&mut replies), Ok(1..)) {
            return;
        }
        if turn == 5 {
            answered.send(()).expect("a client waits");
        }
    }
}

/// Returns whether a client has its full quota, so the server kept no state.
fn is_clean(resp: &str) -> bool {
    let mut stream = connect(resp);
    stream.write_all(b"TG.PEEK api load COST 0\r\n").expect("the write succeeds");
    let mut reply = [0; 31];
    stream.read_exact(&mut reply).expect("there is a reply");
    reply.starts_with(b"*6\r\n:1\r\n:1000000\r\n:1000000\r\n:0")
}

/// Fault I2.
#[test]
fn after_a_hundred_kills_under_load_the_server_starts_clean() {
    let path = std::env::temp_dir().join(format!("tallygate-killed-{}.sock", std::process::id()));
    let unix = format!("unix:{}", path.display());
    let (mut http_port, mut resp_port) = ("127.0.0.1:0".to_owned(), "127.0.0.1:0".to_owned());
    for round in 0..ROUNDS {
        // HTTP uses the socket path in the first half of the rounds, RESP in the second.
        let (http, resp) =
            if round < ROUNDS / 2 { (&unix, &resp_port) } else { (&http_port, &unix) };
        let served = Served::start(&["--http", http, "--resp", resp], Some(POLICY));
        assert!(is_clean(served.resp()), "after {round}");
        let loads = [(served.http(), HTTP, 1), (served.resp(), RESP, 1), (served.resp(), RESP, 50)]
            .map(|(address, request, depth)| (connect(address), request, depth));
        std::thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            let loads = loads.map(|(stream, request, depth)| {
                let sender = sender.clone();
                scope.spawn(move || load(stream, request, depth, &sender))
            });
            for _ in loads {
                receiver.recv_timeout(PATIENCE).expect("the server replies");
            }
            assert_eq!(served.log(), "", "the log is not empty");
            (http_port, resp_port) = ports(&served, http_port.clone(), resp_port.clone());
            served.kill();
        });
        assert!(path.exists(), "a killed server leaves its socket");
    }
    let mut last = Served::start(&["--http", &http_port, "--resp", &unix], Some(POLICY));
    assert!(is_clean(last.resp()));
    assert_eq!(last.stop(), Some(0));
    assert!(!Path::new(&path).exists(), "a stopped server removes its socket");
}

/// Returns the ports of this server, or the previous ones where it uses a socket path.
fn ports(served: &Served, http: String, resp: String) -> (String, String) {
    let given = |address: &str, before| match address.strip_prefix("unix:") {
        Some(_) => before,
        None => address.to_owned(),
    };
    (given(served.http(), http), given(served.resp(), resp))
}
