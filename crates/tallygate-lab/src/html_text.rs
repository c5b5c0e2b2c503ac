//! Escapes text for HTML reports. Clients choose their names, so every text of a report is escaped.

use std::fmt;

/// Displays text with HTML special characters escaped.
pub(crate) struct Text<'a>(pub(crate) &'a str);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // Characters that are invisible or change the writing direction are shown as numbers.
                '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                    write!(f, "\\u{{{:x}}}", u32::from(character))?;
                }
                character if character.is_control() => {
                    write!(f, "\\u{{{:x}}}", u32::from(character))?;
                }
                character => write!(f, "{character}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        let hostile = "<script>alert(\"a&'b\")</script>\u{202e}\n";
        let shown = "&lt;script&gt;alert(&quot;a&amp;&#39;b&quot;)&lt;/script&gt;\\u{202e}\\u{a}";
        assert_eq!(Text(hostile).to_string(), shown);
    }
}
