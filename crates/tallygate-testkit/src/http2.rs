//! Frames of HTTP/2 written by hand: what no well-behaved client can be made to send.

/// What a connection begins with.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Kinds of frames.
pub mod kind {
    /// A part of a body.
    pub const DATA: u8 = 0;
    /// A head, or its beginning.
    pub const HEADERS: u8 = 1;
    /// A request is taken back.
    pub const RST_STREAM: u8 = 3;
    /// What the other end should know.
    pub const SETTINGS: u8 = 4;
    /// To be answered with the same.
    pub const PING: u8 = 6;
    /// The connection ends.
    pub const GOAWAY: u8 = 7;
    /// More may be sent.
    pub const WINDOW_UPDATE: u8 = 8;
    /// More of a head.
    pub const CONTINUATION: u8 = 9;
}

/// Of HEADERS and DATA: the request ends here.
pub const END_STREAM: u8 = 1;
/// Of HEADERS and CONTINUATION: the head ends here.
pub const END_HEADERS: u8 = 4;
/// Of SETTINGS: how much of each reply may be sent before more is asked for.
pub const INITIAL_WINDOW_SIZE: u16 = 4;
/// Of GOAWAY: the client does too much of something.
pub const ENHANCE_YOUR_CALM: u32 = 11;

/// A frame.
///
/// # Panics
///
/// If the payload is longer than a frame can say.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).ok().filter(|length| *length < 1 << 24);
    let length = length.expect("a payload of less than 16 MiB").to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend_from_slice(&[kind, flags]);
    frame.extend_from_slice(&stream.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// The beginning of a connection, with some settings.
pub fn hello(settings: &[(u16, u32)]) -> Vec<u8> {
    let mut payload = Vec::new();
    for (name, value) in settings {
        payload.extend_from_slice(&name.to_be_bytes());
        payload.extend_from_slice(&value.to_be_bytes());
    }
    [PREFACE, &frame(kind::SETTINGS, 0, 0, &payload)].concat()
}

/// The fields of a request, without Huffman's code and without touching the table.
///
/// # Panics
///
/// If the path has more than 126 bytes.
pub fn fields(method: Method, path: &str) -> Vec<u8> {
    assert!(path.len() < 127, "a length of one byte");
    let method = match method {
        Method::Get => 0x82,
        Method::Post => 0x83,
    };
    let mut block = vec![method, 0x86];
    for (name, value) in [(0x01, "localhost"), (0x04, path)] {
        block.push(name);
        block.extend(u8::try_from(value.len()));
        block.extend_from_slice(value.as_bytes());
    }
    block
}

/// How a request is made.
#[derive(Clone, Copy, Debug)]
pub enum Method {
    /// Without a body.
    Get,
    /// With a body.
    Post,
}

/// A whole request.
pub fn request(stream: u32, path: &str, body: Option<&[u8]>) -> Vec<u8> {
    match body {
        None => frame(kind::HEADERS, END_HEADERS | END_STREAM, stream, &fields(Method::Get, path)),
        Some(body) => [
            frame(kind::HEADERS, END_HEADERS, stream, &fields(Method::Post, path)),
            frame(kind::DATA, END_STREAM, stream, body),
        ]
        .concat(),
    }
}

/// Takes a request back.
pub fn reset(stream: u32) -> Vec<u8> {
    const CANCEL: u32 = 8;
    frame(kind::RST_STREAM, 0, stream, &CANCEL.to_be_bytes())
}

/// The fields of a request with a field of 4000 bytes that is remembered, then 8000 times the byte that stands for it:
/// 32 MB in 12 KB.
pub fn bomb() -> Vec<u8> {
    let mut block = fields(Method::Get, "/livez");
    // Remembered: `x`, with a length of 127 and 3873.
    block.extend_from_slice(&[0x40, 1, b'x', 0x7f, 0xa1, 0x1e]);
    block.extend_from_slice(&[b'y'; 4000]);
    block.extend_from_slice(&[0xbe; 8000]);
    block
}
