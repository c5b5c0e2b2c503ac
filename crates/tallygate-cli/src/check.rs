//! `tallygate check` and `tallygate ping`: ask a server, for scripts.

use std::fmt;
use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use tallygate_server::tokens_of;

use crate::cli::{Check, Connect, Ping};

/// The longest line that is read of an answer to a ping.
const LONGEST_LINE: u64 = 512;
/// The first byte that a TLS server sends to a client that does not use TLS.
const TLS_ALERT: char = '\u{15}';
const NEEDS_TLS: &str = "the server uses TLS on this port; use --ca FILE";
const NEEDS_TOKEN: &str = "the server needs a token; use --token-file FILE";
/// The most values that are read of a reply.
const MAX_VALUES: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(5);

/// Sends a check. The exit code is the answer.
pub(crate) fn run(options: &Check) -> anyhow::Result<ExitCode> {
    let Check { policy, key, cost, tier, token_file, to, quiet } = options;
    let resp = &to.resp;
    let cost = cost.map(|cost| cost.to_string());
    let mut words = vec!["TG.CHECKV", policy, key];
    words.extend(cost.iter().flat_map(|cost| ["COST", cost]));
    words.extend(tier.iter().flat_map(|tier| ["TIER", tier]));
    let token = token_file.as_deref().map(read_token).transpose()?;
    let failed = || format!("check on {resp} failed");
    let reply = connect(to)
        .and_then(|mut stream| ask(&mut *stream, token.as_deref(), &words))
        .map_err(|error| explain_tls(error, to))
        .with_context(failed)?;
    let decision = Decision::of(&reply).with_context(|| {
        format!("{resp} did not answer with a decision (is it a Tallygate server?)")
    })?;
    if !quiet {
        writeln!(io::stdout().lock(), "{decision}")?;
    }
    Ok(if decision.is_allowed { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// A decision of a server.
struct Decision<'a> {
    is_allowed: bool,
    /// `None` if the client is unlimited.
    limit: Option<u64>,
    remaining: Option<u64>,
    /// `None` if waiting does not help.
    retry_after_ms: Option<u64>,
    /// What decided: `store`, `failed_open` and so on.
    source: &'a str,
}

impl<'a> Decision<'a> {
    /// Reads a decision from a list of names and values.
    fn of(reply: &'a [Option<String>]) -> Option<Self> {
        let value = |name: &str| {
            let pair = reply.chunks_exact(2).find(|pair| pair[0].as_deref() == Some(name))?;
            Some(pair[1].as_deref())
        };
        let number = |name| value(name)?.map(str::parse).transpose().ok();
        Some(Self {
            is_allowed: number("allowed")?? == 1,
            limit: number("limit")?,
            remaining: number("remaining")?,
            retry_after_ms: number("retry_after_ms")?,
            source: value("source")??,
        })
    }
}

/// Shows the decision and its reason.
impl fmt::Display for Decision<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, remaining, .. } = *self;
        match (self.is_allowed, self.source) {
            // A blocked client has no units at all.
            (false, _) if limit == Some(0) => {
                return f.write_str("denied; the client is blocked");
            }
            (true, "failed_open") => {
                return f.write_str("allowed without a check, because the store is unavailable");
            }
            (true, _) => {
                return match (limit, remaining) {
                    (Some(limit), Some(remaining)) => {
                        write!(f, "allowed, {remaining} of {limit} left")
                    }
                    _ => f.write_str("allowed, unlimited"),
                };
            }
            (false, "failed_closed") => f.write_str("denied, because the store is unavailable")?,
            (false, "overloaded") => {
                f.write_str("denied, because the store did not decide in time")?;
            }
            (false, _) => f.write_str("denied")?,
        }
        match self.retry_after_ms {
            Some(wait) => write!(f, ", retry in {wait} ms"),
            None => f.write_str("; the cost is higher than the limit can ever allow"),
        }
    }
}

/// Checks that a server answers. Any reply counts, also an error about a missing token.
pub(crate) fn ping(options: &Ping) -> anyhow::Result<ExitCode> {
    let answer = |stream: &mut dyn Connection| -> anyhow::Result<String> {
        stream.write_all(command(&["PING"]).as_bytes())?;
        let mut line = String::new();
        BufReader::new(stream).take(LONGEST_LINE).read_line(&mut line).context("no reply")?;
        anyhow::ensure!(!line.is_empty(), "the server closed the connection");
        anyhow::ensure!(!line.starts_with(TLS_ALERT), NEEDS_TLS);
        Ok(line)
    };
    let resp = &options.to.resp;
    let answered = connect(&options.to)
        .and_then(|mut stream| answer(&mut *stream))
        .map_err(|error| explain_tls(error, &options.to));
    let line = answered.with_context(|| format!("ping of {resp} failed"))?;
    anyhow::ensure!(
        line.starts_with(['+', '-']),
        "{resp} answered {line:?}; expected PONG (is it a Tallygate server?)"
    );
    Ok(ExitCode::SUCCESS)
}

trait Connection: Read + Write {}

impl<T: Read + Write> Connection for T {}

/// Connects to `HOST:PORT` or `unix:/path`, by TLS if a certificate authority is given.
fn connect(to: &Connect) -> anyhow::Result<Box<dyn Connection>> {
    let address = &*to.resp;
    if let Some(ca) = &to.ca {
        return connect_by_tls(address, ca, to.cert.as_deref().zip(to.cert_key.as_deref()));
    }
    if let Some(path) = address.strip_prefix("unix:") {
        let stream = UnixStream::connect(path).map_err(unreachable_server)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        return Ok(Box::new(stream));
    }
    Ok(Box::new(connect_by_tcp(address)?))
}

/// Adds advice to the error of a connection that no server accepts.
fn unreachable_server(error: io::Error) -> anyhow::Error {
    match error.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => anyhow::anyhow!(
            "{error}; check that the server is running and that --resp is its RESP address"
        ),
        _ => error.into(),
    }
}

fn connect_by_tcp(address: &str) -> anyhow::Result<TcpStream> {
    let has_port = address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    anyhow::ensure!(has_port, "expected HOST:PORT or unix:/path");
    let stream = TcpStream::connect(address).map_err(unreachable_server)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// Connects to `HOST:PORT` by TLS. Verifies the certificate of the server, and presents a client certificate if there is
/// one.
fn connect_by_tls(
    address: &str,
    ca: &Path,
    own: Option<(&Path, &Path)>,
) -> anyhow::Result<Box<dyn Connection>> {
    let mut roots = rustls::RootCertStore::empty();
    for root in certificates(ca)? {
        roots.add(root)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let client = match own {
        None => client.with_no_client_auth(),
        Some((own, key)) => {
            let private = PrivateKeyDer::from_pem_file(key);
            let private = private.with_context(|| {
                format!("{} contains no valid private key; expected PEM", key.display())
            })?;
            client.with_client_auth_cert(certificates(own)?, private).map_err(|_| {
                let (own, key) = (own.display(), key.display());
                anyhow::anyhow!("{own} and {key} do not match; use the key of the certificate")
            })?
        }
    };
    let (host, _) = address.rsplit_once(':').context("expected HOST:PORT")?;
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let session = ClientConnection::new(Arc::new(client), ServerName::try_from(host)?)?;
    Ok(Box::new(StreamOwned::new(session, connect_by_tcp(address)?)))
}

/// Describes errors of TLS in plain words.
fn explain_tls(error: anyhow::Error, to: &Connect) -> anyhow::Error {
    use rustls::CertificateError as Invalid;
    let tls = error.chain().find_map(|cause| {
        let inner = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        cause.downcast_ref::<rustls::Error>().or_else(|| inner?.downcast_ref())
    });
    let ca = to.ca.as_deref().unwrap_or(Path::new("")).display();
    let reason = match tls {
        // Another authority with the same name makes the signature wrong.
        Some(rustls::Error::InvalidCertificate(Invalid::UnknownIssuer | Invalid::BadSignature)) => {
            format!("the server's certificate is not issued by an authority in {ca} (--ca)")
        }
        Some(rustls::Error::InvalidCertificate(
            Invalid::NotValidForName | Invalid::NotValidForNameContext { .. },
        )) => "the server's certificate is for another host name; connect by a name that it contains"
            .to_owned(),
        Some(rustls::Error::InvalidCertificate(
            Invalid::Expired | Invalid::ExpiredContext { .. },
        )) => "the server's certificate has expired".to_owned(),
        Some(rustls::Error::InvalidCertificate(Invalid::Other(other)))
            if other.to_string().contains("CaUsedAsEndEntity") =>
        {
            "the server's certificate is the certificate of an authority; issue one for the server".to_owned()
        }
        Some(rustls::Error::InvalidCertificate(_)) => {
            "the server's certificate is not valid".to_owned()
        }
        Some(rustls::Error::InvalidMessage(_)) => {
            "the server does not use TLS on this port; remove --ca".to_owned()
        }
        Some(rustls::Error::AlertReceived(_)) => {
            "the server rejected the TLS connection; it may require a client certificate (--cert, --cert-key)".to_owned()
        }
        _ => return error,
    };
    anyhow::anyhow!(reason)
}

/// Reads the certificates of a file.
fn certificates(path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let name = path.display();
    let all = CertificateDer::pem_file_iter(path).map_err(|error| match error {
        pem::Error::Io(error) => anyhow::anyhow!("cannot read {name}: {error}"),
        error => anyhow::anyhow!("cannot read {name}: {error}"),
    })?;
    let all = all.collect::<Result<Vec<_>, _>>();
    let all =
        all.with_context(|| format!("{name} contains an invalid certificate; expected PEM"))?;
    anyhow::ensure!(!all.is_empty(), "{name} contains no certificate; expected PEM");
    Ok(all)
}

fn read_token(path: &Path) -> anyhow::Result<String> {
    let name = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
    Ok(tokens_of(&text)
        .next()
        .with_context(|| format!("{name} contains no token; write one per line"))?
        .to_owned())
}

/// Sends one command, and reads an array of numbers and texts.
fn ask(
    stream: &mut dyn Connection,
    token: Option<&str>,
    words: &[&str],
) -> anyhow::Result<Vec<Option<String>>> {
    if let Some(token) = token {
        stream.write_all(command(&["AUTH", token]).as_bytes())?;
    }
    stream.write_all(command(words).as_bytes())?;
    let mut lines = BufReader::new(stream).lines();
    let mut line = || lines.next().context("the server closed the connection")?.context("no reply");
    let mut reply = || {
        let line = line()?;
        anyhow::ensure!(!line.starts_with(TLS_ALERT), NEEDS_TLS);
        match line.strip_prefix('-') {
            Some(error) if error.starts_with("NOAUTH") => anyhow::bail!(NEEDS_TOKEN),
            Some(error) => anyhow::bail!("{error}"),
            None => Ok(line),
        }
    };
    if token.is_some() {
        reply()?;
    }
    let first = reply()?;
    let count: usize = first
        .strip_prefix('*')
        .and_then(|count| count.parse().ok())
        .with_context(|| format!("found {first:?}; expected a list (is it a Tallygate server?)"))?;
    let mut values = Vec::new();
    for _ in 0..count.min(MAX_VALUES) {
        let value = line()?;
        values.push(match value.split_at_checked(1) {
            Some((":", number)) => Some(number.to_owned()),
            Some(("$", "-1")) => None,
            // No name or value of a decision has a line end.
            Some(("$", _)) => Some(line()?),
            _ => anyhow::bail!(
                "found {value:?}; expected a number or a text (is it a Tallygate server?)"
            ),
        });
    }
    Ok(values)
}

fn command(words: &[&str]) -> String {
    let mut command = format!("*{}\r\n", words.len());
    for word in words {
        command += &format!("${}\r\n{word}\r\n", word.len());
    }
    command
}
