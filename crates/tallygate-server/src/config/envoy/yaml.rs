//! YAML as a tree whose nodes know their line.
//!
//! Only the parser is a library. The tree keeps the text of scalars as written, because the meaning of a scalar depends
//! on the field: `value: 404` is the text "404". Aliases and merge keys (`<<`) are resolved. The number of nodes is
//! bounded, so that a few lines of nested aliases cannot fill the memory.

use std::borrow::Cow;
use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

/// The maximum number of nodes of a file, copies by aliases included.
const MAX_NODES: usize = 1_000_000;
/// The maximum depth of a tree.
const MAX_DEPTH: usize = 64;

/// A node and its place in the file.
#[derive(Clone, Debug)]
pub(super) struct Node<'a> {
    pub(super) place: Place,
    pub(super) content: Content<'a>,
}

#[derive(Clone, Debug)]
pub(super) enum Content<'a> {
    Scalar {
        text: Cow<'a, str>,
        is_quoted: bool,
    },
    List(Vec<Node<'a>>),
    /// The entries in the order of the file.
    Map(Vec<(Node<'a>, Node<'a>)>),
}

/// A line and a column, both from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) line: usize,
    pub(super) column: usize,
}

/// An error and its place.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct YamlError {
    pub(super) place: Place,
    pub(super) reason: String,
}

impl Place {
    pub(super) const START: Self = Self { line: 1, column: 1 };

    pub(super) fn error(self, reason: impl Into<String>) -> YamlError {
        YamlError { place: self, reason: reason.into() }
    }

    fn of(span: Span) -> Self {
        Self { line: span.start.line(), column: span.start.col() + 1 }
    }
}

impl Node<'_> {
    pub(super) fn error(&self, reason: impl Into<String>) -> YamlError {
        self.place.error(reason)
    }

    /// Returns whether the node is missing: `key:` without a value, or `null`.
    pub(super) fn is_null(&self) -> bool {
        matches!(&self.content, Content::Scalar { text, is_quoted: false }
            if matches!(&**text, "" | "~" | "null" | "Null" | "NULL"))
    }

    /// Returns a word for error messages.
    pub(super) fn kind(&self) -> &'static str {
        match &self.content {
            Content::Scalar { .. } => "a single value",
            Content::List(_) => "a list",
            Content::Map(_) => "a map",
        }
    }
}

/// Parses a text into its documents. An empty document has no node.
///
/// # Errors
///
/// Fails if the text is not YAML, or is too large or too deep.
pub(super) fn parse(text: &str) -> Result<Vec<Node<'_>>, YamlError> {
    let mut reader =
        Reader { events: Parser::new_from_str(text), anchors: HashMap::new(), nodes: 0 };
    let mut documents = Vec::new();
    loop {
        match reader.next()? {
            (
                Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing,
                _,
            ) => {}
            (Event::StreamEnd, _) => return Ok(documents),
            (event, span) => {
                let node = reader.node(event, span, 0)?;
                if !node.is_null() {
                    documents.push(node);
                }
            }
        }
    }
}

struct Reader<'a> {
    events: Parser<'a, saphyr_parser::StrInput<'a>>,
    anchors: HashMap<usize, Node<'a>>,
    nodes: usize,
}

impl<'a> Reader<'a> {
    fn next(&mut self) -> Result<(Event<'a>, Span), YamlError> {
        match self.events.next() {
            Some(Ok(event)) => Ok(event),
            Some(Err(error)) => {
                let place = Place { line: error.marker().line(), column: error.marker().col() + 1 };
                Err(place.error(format!("not valid YAML: {}", error.info())))
            }
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn node(&mut self, event: Event<'a>, span: Span, depth: usize) -> Result<Node<'a>, YamlError> {
        let place = Place::of(span);
        if depth > MAX_DEPTH {
            return Err(place.error(format!("nested too deeply; use at most {MAX_DEPTH} levels")));
        }
        let (content, anchor) = match event {
            Event::Alias(anchor) => {
                let node = self.anchors.get(&anchor).cloned();
                let node = node.ok_or_else(|| place.error("unknown or recursive alias"))?;
                self.count(size(&node), place)?;
                return Ok(Node { place, ..node });
            }
            Event::Scalar(text, style, anchor, _) => {
                let is_quoted = style != ScalarStyle::Plain;
                (Content::Scalar { text, is_quoted }, anchor)
            }
            Event::SequenceStart(anchor, _) => (Content::List(self.list(depth)?), anchor),
            Event::MappingStart(anchor, _) => (Content::Map(self.map(depth)?), anchor),
            _ => return Err(place.error("not valid YAML: unexpected end")),
        };
        self.count(1, place)?;
        let node = Node { place, content };
        if anchor > 0 {
            self.count(size(&node), place)?;
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn list(&mut self, depth: usize) -> Result<Vec<Node<'a>>, YamlError> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(items),
                (event, span) => items.push(self.node(event, span, depth + 1)?),
            }
        }
    }

    fn map(&mut self, depth: usize) -> Result<Vec<(Node<'a>, Node<'a>)>, YamlError> {
        let mut entries: Vec<(Node<'a>, Node<'a>)> = Vec::new();
        let mut merged = Vec::new();
        loop {
            let key = match self.next()? {
                (Event::MappingEnd, _) => break,
                (event, span) => self.node(event, span, depth + 1)?,
            };
            let (event, span) = self.next()?;
            let value = self.node(event, span, depth + 1)?;
            if is_merge_key(&key) {
                merged.push(value);
                continue;
            }
            if let Some(name) = text_of(&key)
                && entries.iter().any(|(other, _)| text_of(other) == Some(name))
            {
                return Err(key.error(format!("duplicate key `{name}`")));
            }
            entries.push((key, value));
        }
        // The map's own entries win over merged ones, and earlier merged maps over later ones.
        for value in merged {
            let maps = match value.content {
                Content::List(maps) => maps,
                _ => vec![value],
            };
            for map in maps {
                let Content::Map(more) = map.content else {
                    return Err(map.place.error("`<<` merges a map; this is not one"));
                };
                for (key, value) in more {
                    if !entries.iter().any(|(other, _)| text_of(other) == text_of(&key)) {
                        entries.push((key, value));
                    }
                }
            }
        }
        Ok(entries)
    }

    fn count(&mut self, nodes: usize, place: Place) -> Result<(), YamlError> {
        self.nodes += nodes;
        if self.nodes > MAX_NODES {
            return Err(place.error(format!("more than {MAX_NODES} values; split the file")));
        }
        Ok(())
    }
}

fn is_merge_key(key: &Node<'_>) -> bool {
    matches!(&key.content, Content::Scalar { text, is_quoted: false } if text == "<<")
}

fn text_of<'n>(node: &'n Node<'_>) -> Option<&'n str> {
    match &node.content {
        Content::Scalar { text, .. } => Some(text),
        _ => None,
    }
}

fn size(node: &Node<'_>) -> usize {
    1 + match &node.content {
        Content::Scalar { .. } => 0,
        Content::List(items) => items.iter().map(size).sum::<usize>(),
        Content::Map(entries) => entries.iter().map(|(key, value)| size(key) + size(value)).sum(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(node: &Node<'_>) -> String {
        match &node.content {
            Content::Scalar { text, is_quoted: false } => text.to_string(),
            Content::Scalar { text, .. } => format!("{text:?}"),
            Content::List(items) => {
                format!("[{}]", items.iter().map(shown).collect::<Vec<_>>().join(", "))
            }
            Content::Map(entries) => {
                let entry = |(key, value): &(Node<'_>, Node<'_>)| {
                    format!("{}: {}", shown(key), shown(value))
                };
                format!("{{{}}}", entries.iter().map(entry).collect::<Vec<_>>().join(", "))
            }
        }
    }

    #[test]
    fn scalars_keep_their_text_and_places() {
        let text = "# a comment\na: 0x10\nb:\n  - yes\n  - \"no\"\n";
        let documents = parse(text).unwrap();
        assert_eq!(shown(&documents[0]), "{a: 0x10, b: [yes, \"no\"]}");
        let Content::Map(entries) = &documents[0].content else { panic!("a map") };
        assert_eq!(entries[1].0.place, Place { line: 3, column: 1 });
        let Content::List(items) = &entries[1].1.content else { panic!("a list") };
        assert_eq!(items[1].place, Place { line: 5, column: 5 });
    }

    #[test]
    fn aliases_and_merge_keys_are_resolved() {
        let text = "a: &x {unit: day, n: 1}\nb: *x\nc: {<<: *x, n: 2}\n";
        let shown = shown(&parse(text).unwrap()[0]);
        assert_eq!(shown, "{a: {unit: day, n: 1}, b: {unit: day, n: 1}, c: {n: 2, unit: day}}");
    }

    #[test]
    fn documents_are_separate_and_empty_ones_are_left_out() {
        let documents = parse("---\na: 1\n---\n---\nb: 2\n").unwrap();
        assert_eq!(documents.iter().map(shown).collect::<Vec<_>>(), ["{a: 1}", "{b: 2}"]);
        assert!(parse("").unwrap().is_empty());
        assert!(parse("# nothing\n").unwrap().is_empty());
    }

    #[test]
    fn duplicate_keys_broken_text_and_recursion_are_errors_with_a_line() {
        for (text, line, reason) in [
            ("a: 1\na: 2\n", 2, "duplicate key `a`"),
            ("a: [1\nb: 2\n", 2, "not valid YAML"),
            ("a: &x [*x]\n", 1, "alias"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.reason.contains(reason), "{error:?}");
            assert_eq!(error.place.line, line, "{error:?}");
        }
    }

    #[test]
    fn nested_aliases_and_deep_lists_are_bounded() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..12 {
            let item = format!("*a{}", level - 1);
            let items = [item.as_str(); 10].join(", ");
            text.push_str(&format!("a{level}: &a{level} [{items}]\n"));
        }
        assert!(parse(&text).unwrap_err().reason.contains("more than"));
        let deep = format!("{}{}", "[".repeat(100), "]".repeat(100));
        assert!(parse(&deep).unwrap_err().reason.contains("nested too deeply"));
    }
}
