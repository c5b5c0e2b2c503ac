//! The two text formats of metrics, and the choice between them.

use hyper::HeaderMap;
use hyper::header::{self, HeaderValue};

/// A format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// The text format that every version of Prometheus reads.
    Text,
    OpenMetrics,
}

impl Format {
    /// Chooses the format by the field `Accept`: `OpenMetrics` if the client names it and does not prefer plain text.
    pub(crate) fn wanted(headers: &HeaderMap) -> Self {
        let (mut text, mut open_metrics) = (0, 0);
        let values = headers.get_all(header::ACCEPT).into_iter();
        let values = values.filter_map(|value| value.to_str().ok());
        let ranges = values.flat_map(|value| value.split(','));
        for range in ranges {
            let (name, parameters) = range.split_once(';').unwrap_or((range, ""));
            let quality = quality(parameters);
            match name.trim() {
                name if name.eq_ignore_ascii_case("application/openmetrics-text") => {
                    open_metrics = open_metrics.max(quality);
                }
                name if name.eq_ignore_ascii_case("text/plain") => text = text.max(quality),
                _ => {}
            }
        }
        if open_metrics > 0 && open_metrics >= text { Self::OpenMetrics } else { Self::Text }
    }

    pub(crate) const fn content_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        })
    }
}

/// Returns the quality `q` of a media range in thousandths; 1000 if there is none, 0 if it is invalid.
fn quality(parameters: &str) -> u32 {
    let quality = parameters.split(';').find_map(|parameter| {
        let (name, value) = parameter.split_once('=')?;
        name.trim().eq_ignore_ascii_case("q").then(|| value.trim())
    });
    let Some(quality) = quality else { return 1000 };
    let (whole, fraction) = quality.split_once('.').unwrap_or((quality, ""));
    let digits = format!("{fraction:0<3}");
    match (whole, digits.get(..3).and_then(|digits| digits.parse::<u32>().ok())) {
        ("1", Some(0)) => 1000,
        ("0", Some(thousandths)) => thousandths,
        _ => 0,
    }
}

/// Converts `OpenMetrics` to the text format. The samples are the same; the names of counters and infos in the comments
/// differ, and there are no units and no end mark.
pub(super) fn to_text(open_metrics: &str) -> String {
    let mut out = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        let comment = line.strip_prefix("# ").map(|comment| comment.splitn(3, ' '));
        let Some(mut words) = comment else {
            push(&mut out, &[line]);
            continue;
        };
        match (words.next(), words.next(), words.next()) {
            // The type follows, and decides on the name.
            (Some("HELP"), Some(_), text) => help = text,
            (Some("TYPE"), Some(name), Some(kind)) => {
                let (suffix, kind) = match kind {
                    "counter" => ("_total", kind),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    _ => ("", kind),
                };
                if let Some(help) = help.take() {
                    push(&mut out, &["# HELP ", name, suffix, " ", help]);
                }
                push(&mut out, &["# TYPE ", name, suffix, " ", kind]);
            }
            _ => {}
        }
    }
    out
}

fn push(out: &mut String, parts: &[&str]) {
    parts.iter().for_each(|part| out.push_str(part));
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_is_sent_to_clients_that_prefer_it() {
        let table = [
            ("", Format::Text),
            ("*/*", Format::Text),
            ("text/plain", Format::Text),
            ("text/html, application/json;q=0.9", Format::Text),
            ("application/openmetrics-text", Format::OpenMetrics),
            ("Application/OpenMetrics-Text; version=1.0.0", Format::OpenMetrics),
            // As Prometheus sends it.
            (
                "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,\
                 text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
                Format::OpenMetrics,
            ),
            ("text/plain;q=0.5, application/openmetrics-text;q=0.4", Format::Text),
            ("application/openmetrics-text;q=0", Format::Text),
            ("application/openmetrics-text;q=0.001", Format::OpenMetrics),
            ("application/openmetrics-text;q=2", Format::Text),
            ("application/openmetrics-text;q=x", Format::Text),
        ];
        for (accept, expected) in table {
            assert_eq!(wanted(&[accept]), expected, "{accept}");
        }
        let several = ["text/plain;q=0.1", "application/openmetrics-text;q=0.2"];
        assert_eq!(wanted(&several), Format::OpenMetrics);
        assert_eq!(wanted(&[]), Format::Text);
    }

    fn wanted(accept: &[&'static str]) -> Format {
        let fields = accept.iter().map(|value| (header::ACCEPT, HeaderValue::from_static(value)));
        Format::wanted(&HeaderMap::from_iter(fields))
    }

    #[test]
    fn the_text_format_names_counters_and_infos_by_their_samples() {
        let open_metrics = "\
            # HELP a_b A counter.\n# TYPE a_b counter\na_b_total{x=\"# HELP\"} 1\n\
            # HELP c A gauge.\n# TYPE c gauge\n# UNIT c bytes\nc 2\n\
            # HELP d About it.\n# TYPE d info\nd_info{v=\"1\"} 1\n# EOF\n";
        let text = "\
            # HELP a_b_total A counter.\n# TYPE a_b_total counter\na_b_total{x=\"# HELP\"} 1\n\
            # HELP c A gauge.\n# TYPE c gauge\nc 2\n\
            # HELP d_info About it.\n# TYPE d_info gauge\nd_info{v=\"1\"} 1\n";
        assert_eq!(to_text(open_metrics), text);
    }
}
