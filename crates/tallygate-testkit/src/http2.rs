//! HTTP/2 frames, written by hand, because HTTP client libraries cannot send what attackers send.

/// The connection preface.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Types of frames.
pub mod kind {
    /// A part of a body.
    pub const DATA: u8 = 0;
    /// A header block, or its beginning.
    pub const HEADERS: u8 = 1;
    /// Cancels a request.
    pub const RST_STREAM: u8 = 3;
    /// Settings for the peer.
    pub const SETTINGS: u8 = 4;
    /// A ping, to be answered with the same payload.
    pub const PING: u8 = 6;
    /// Announces the end of the connection.
    pub const GOAWAY: u8 = 7;
    /// Allows the peer to send more.
    pub const WINDOW_UPDATE: u8 = 8;
    /// The continuation of a header block.
    pub const CONTINUATION: u8 = 9;
}

/// A flag of HEADERS and DATA: the request is complete.
pub const END_STREAM: u8 = 1;
/// A flag of HEADERS and CONTINUATION: the header block is complete.
pub const END_HEADERS: u8 = 4;
/// A setting: how many bytes of each response the peer may send before a `WINDOW_UPDATE`.
pub const INITIAL_WINDOW_SIZE: u16 = 4;
/// An error code of GOAWAY: the client causes too much load.
pub const ENHANCE_YOUR_CALM: u32 = 11;

/// Returns a frame.
///
/// # Panics
///
/// Panics if the payload has 16 MiB or more.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).ok().filter(|length| *length < 1 << 24);
    let length = length.expect("the payload has less than 16 MiB").to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend_from_slice(&[kind, flags]);
    frame.extend_from_slice(&stream.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// Returns the start of a connection, with settings.
pub fn hello(settings: &[(u16, u32)]) -> Vec<u8> {
    let mut payload = Vec::new();
    for (name, value) in settings {
        payload.extend_from_slice(&name.to_be_bytes());
        payload.extend_from_slice(&value.to_be_bytes());
    }
    [PREFACE, &frame(kind::SETTINGS, 0, 0, &payload)].concat()
}

/// Returns the header fields of a request, without Huffman coding and without entries in the dynamic table.
///
/// # Panics
///
/// Panics if the path has more than 126 bytes.
pub fn fields(method: Method, path: &str) -> Vec<u8> {
    assert!(path.len() < 127, "the length of the path must fit one byte");
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

/// The method of a request.
#[derive(Clone, Copy, Debug)]
pub enum Method {
    /// GET, without a body.
    Get,
    /// POST, with a body.
    Post,
}

/// Returns a complete request.
pub fn request(stream: u32, path: &str, body: Option<&[u8]>) -> Vec<u8> {
    match body {
        None => frame(kind::HEADERS, END_HEADERS | END_STREAM, stream, &fields(Method::Get, path)),
        Some(body) => {
            [without_body(stream, path), frame(kind::DATA, END_STREAM, stream, body)].concat()
        }
    }
}

/// Returns the head of a request whose body does not follow.
pub fn without_body(stream: u32, path: &str) -> Vec<u8> {
    frame(kind::HEADERS, END_HEADERS, stream, &fields(Method::Post, path))
}

/// Returns the frame that cancels a request.
pub fn reset(stream: u32) -> Vec<u8> {
    const CANCEL: u32 = 8;
    frame(kind::RST_STREAM, 0, stream, &CANCEL.to_be_bytes())
}

/// Returns the header fields of a decompression bomb: a field of 4000 bytes that enters the table, and 8000 references to
/// it, which are 32 MB in 12 KB.
pub fn bomb() -> Vec<u8> {
    let mut block = fields(Method::Get, "/livez");
    // Add the field `x` to the table. Its value has a length of 127 + 3873.
    block.extend_from_slice(&[0x40, 1, b'x', 0x7f, 0xa1, 0x1e]);
    block.extend_from_slice(&[b'y'; 4000]);
    block.extend_from_slice(&[0xbe; 8000]);
    block
}
