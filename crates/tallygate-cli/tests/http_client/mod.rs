//! A minimal HTTP/1.1 client that shows requests and replies as they are on the wire.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::panic, clippy::unwrap_used, reason = "a failing test panics")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(20);

/// A keep-alive connection.
pub(crate) struct Client {
    stream: BufReader<TcpStream>,
}

/// A reply.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    fields: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Client {
    pub(crate) fn connect(address: &str) -> Self {
        let stream = TcpStream::connect(address).expect("the connection opens");
        stream.set_read_timeout(Some(PATIENCE)).expect("the timeout is set");
        stream.set_write_timeout(Some(PATIENCE)).expect("the timeout is set");
        Self { stream: BufReader::new(stream) }
    }

    /// Connects from another loopback address.
    pub(crate) fn connect_from(source: &str, address: &str) -> Self {
        use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
        let socket =
            socket(AddressFamily::INET, SocketType::STREAM, None).expect("the socket is created");
        let source: std::net::IpAddr = source.parse().expect("the address is valid");
        bind(&socket, &std::net::SocketAddr::from((source, 0)))
            .expect("the loopback address is bound");
        connect(&socket, &address.parse::<std::net::SocketAddr>().unwrap())
            .expect("the connection opens");
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(PATIENCE)).expect("the timeout is set");
        Self { stream: BufReader::new(stream) }
    }

    /// Sends bytes as they are.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// Sends a request with some header fields.
    pub(crate) fn send(&mut self, line: &str, fields: &[(&str, &str)], body: &[u8]) {
        let mut request = format!("{line} HTTP/1.1\r\n").into_bytes();
        if !fields.iter().any(|(name, _)| *name == "host") {
            request.extend_from_slice(b"host: 127.0.0.1\r\n");
        }
        for (name, value) in fields {
            request.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
        }
        request.extend_from_slice(format!("content-length: {}\r\n\r\n", body.len()).as_bytes());
        request.extend_from_slice(body);
        self.write(&request).expect("the write succeeds");
    }

    /// Reads a reply. Returns `None` if the server closed the connection.
    pub(crate) fn read(&mut self) -> Option<Reply> {
        let mut line = String::new();
        if self.stream.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("{line:?} is not a status line"));
        let mut fields = Vec::new();
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            fields.push((name.to_owned(), value.to_owned()));
        }
        let mut reply = Reply { status, fields, body: String::new() };
        if status == 100 {
            return self.read();
        }
        let length = reply.field("content-length").map_or(0, |length| length.parse().unwrap());
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).ok()?;
        reply.body = String::from_utf8(body).expect("the text is UTF-8");
        Some(reply)
    }

    /// Waits for `100 Continue`.
    pub(crate) fn wait_for_continue(&mut self) {
        let (mut line, mut end) = (String::new(), String::new());
        self.stream.read_line(&mut line).expect("there is a line");
        self.stream.read_line(&mut end).expect("there is a line");
        assert_eq!((line.trim_end(), end.trim_end()), ("HTTP/1.1 100 Continue", ""));
    }

    /// Returns whether the server has closed the connection.
    pub(crate) fn is_closed(&mut self) -> bool {
        match self.stream.fill_buf() {
            Ok(rest) => rest.is_empty(),
            // The read timed out: the connection is open.
            Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
        }
    }
}

impl Reply {
    /// Parses a reply as `curl -i` prints it.
    pub(crate) fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
        let mut lines = head.split("\r\n");
        let status =
            lines.next().and_then(|line| line.split(' ').nth(1)).expect("there is a status");
        let fields = lines.filter_map(|line| line.split_once(": "));
        Self {
            status: status.parse().expect("the value is a number"),
            fields: fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            body: body.to_owned(),
        }
    }

    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let field = self.fields.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        field.map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the detail of a problem, and checks that the reply is one.
    #[track_caller]
    pub(crate) fn problem(&self) -> String {
        assert_eq!(self.field("content-type"), Some("application/problem+json"), "{self:?}");
        let json = self.json();
        assert_eq!(json["status"], self.status, "{self:?}");
        assert!(json["type"].is_string() && json["title"].is_string(), "{self:?}");
        json["detail"].as_str().expect("the problem has a detail").to_owned()
    }
}

pub(crate) fn ask(address: &str, line: &str, fields: &[(&str, &str)], body: &str) -> Reply {
    let mut client = Client::connect(address);
    client.send(line, fields, body.as_bytes());
    client.read().expect("there is a reply")
}

pub(crate) fn get(address: &str, path: &str) -> Reply {
    ask(address, &format!("GET {path}"), &[], "")
}

pub(crate) fn post(address: &str, path: &str, body: &str) -> Reply {
    ask(address, &format!("POST {path}"), &[], body)
}

/// Returns the remaining units of a client with a peek.
#[track_caller]
pub(crate) fn remaining(address: &str, policy: &str, key: &str) -> u64 {
    let body = serde_json::json!({ "policy": policy, "key": key, "cost": 0 }).to_string();
    let reply = post(address, "/v1/peek", &body);
    reply.json()["remaining"].as_u64().unwrap_or_else(|| panic!("{reply:?}"))
}
