//! Takes secrets out of text. Pure.
//!
//! Three nets, each for what passes the one before: values that are known to be secret (tokens that were read on the
//! way), forms that only secrets have (JWTs, private keys, bearer credentials, passwords in URLs), and values of keys whose
//! name says so. A word too many taken out costs a reader little; a token left in costs a cluster.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};

/// Stands where a secret stood.
pub(crate) const REDACTED: &str = "[REDACTED]";

/// A shorter known value is likelier a common word than a secret.
const SHORTEST_KNOWN: usize = 8;

/// Shortest run that counts as a JWT or as a credential after its scheme.
const SHORTEST_TOKEN: usize = 24;

/// Ends of keys, in lower case and without `-` and `_`, whose values are secret.
const SECRET_KEYS: &[&str] = &[
    "token",
    "password",
    "passwd",
    "secret",
    "apikey",
    "privatekey",
    "keydata",
    "authorization",
    "credential",
    "credentials",
    "cookie",
];

/// What is known to be secret.
#[derive(Debug, Default)]
pub(crate) struct Redactor {
    known: Vec<String>,
}

impl Redactor {
    /// From now on, this value and its base64 are taken out wherever they stand.
    pub(crate) fn know(&mut self, secret: &str) {
        let secret = secret.trim();
        if secret.len() >= SHORTEST_KNOWN && !self.known.iter().any(|known| known == secret) {
            self.known.push(secret.to_owned());
            self.known.push(STANDARD_NO_PAD.encode(secret));
            self.known.push(STANDARD.encode(secret));
            // The longest first, so that no part of one stays behind.
            self.known.sort_by_key(|known| std::cmp::Reverse(known.len()));
        }
    }

    /// The text without secrets. What is not UTF-8 is replaced.
    pub(crate) fn apply(&self, text: &[u8]) -> String {
        let mut text = String::from_utf8_lossy(text).into_owned();
        for known in &self.known {
            text = text.replace(known.as_str(), REDACTED);
        }
        let text = without_private_keys(&text);
        let text = without_tokens(&text);
        let text = without_passwords_in_urls(&text);
        without_named_values(&text)
    }
}

/// PEM blocks (RFC 7468), also where line breaks are escaped. One that has no end goes to the end of the text.
fn without_private_keys(text: &str) -> String {
    const BEGIN: &str = "-----BEGIN ";
    const END: &str = "PRIVATE KEY-----";
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(BEGIN) {
        let label = &rest[start + BEGIN.len()..];
        let is_key = label
            .find("-----")
            .is_some_and(|end| label[..end].ends_with("PRIVATE KEY"));
        if !is_key {
            out.push_str(&rest[..start + BEGIN.len()]);
            rest = label;
            continue;
        }
        out.push_str(&rest[..start]);
        out.push_str(REDACTED);
        let after_begin = label.find(END).map_or("", |end| &label[end + END.len()..]);
        rest = after_begin
            .find(END)
            .map_or("", |end| &after_begin[end + END.len()..]);
    }
    out.push_str(rest);
    out
}

fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_.~+/=".contains(&byte)
}

/// JWTs (they begin with the base64 of `{"`), the same once more in base64, and credentials behind their HTTP scheme.
fn without_tokens(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let length = rest.bytes().take_while(|byte| is_token_byte(*byte)).count();
        if length == 0 {
            let next = rest.chars().next().map_or(1, char::len_utf8);
            out.push_str(&rest[..next]);
            rest = &rest[next..];
            continue;
        }
        let run = &rest[..length];
        // Behind `key=` in the same run.
        let value = run.rfind("=eyJ").map_or(run, |equals| &run[equals + 1..]);
        let is_jwt = value.len() >= SHORTEST_TOKEN && (value.starts_with("eyJ") || value.starts_with("ZXlK"));
        let before = out.trim_end_matches(' ');
        let has_scheme = before.len() < out.len()
            && ["bearer", "basic"].iter().any(|scheme| {
                let start = before.len().checked_sub(scheme.len());
                start
                    .and_then(|start| before.get(start..))
                    .is_some_and(|word| word.eq_ignore_ascii_case(scheme))
            });
        if is_jwt {
            out.push_str(&run[..run.len() - value.len()]);
            out.push_str(REDACTED);
        } else if has_scheme && length >= SHORTEST_KNOWN {
            out.push_str(REDACTED);
        } else {
            out.push_str(run);
        }
        rest = &rest[length..];
    }
    out
}

/// `scheme://user:password@host` (RFC 3986 section 3.2.1).
fn without_passwords_in_urls(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("://") {
        let authority = &rest[start + 3..];
        out.push_str(&rest[..start + 3]);
        let end = authority
            .find(|c: char| c == '/' || c == '"' || c.is_whitespace())
            .unwrap_or(authority.len());
        rest = match authority[..end].rfind('@') {
            Some(at) => {
                out.push_str(REDACTED);
                &authority[at..]
            }
            None => authority,
        };
    }
    out.push_str(rest);
    out
}

fn is_secret_key(key: &str) -> bool {
    let key: String = key
        .chars()
        .filter(|c| !matches!(c, '-' | '_' | '.'))
        .map(|c| c.to_ascii_lowercase())
        .collect();
    SECRET_KEYS.iter().any(|end| key.ends_with(end))
}

/// Values of keys that say so: `key: value` (YAML), `"key":"value"` (JSON, also inside a JSON string), `key=value` (flags,
/// environment). Structures stay, and what is inside is judged by itself.
fn without_named_values(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    // Indentation of a YAML key whose block of lines is being left out.
    let mut block: Option<usize> = None;
    for line in text.split_inclusive('\n') {
        let indentation = line.len() - line.trim_start_matches([' ', '-']).len();
        if let Some(key) = block {
            if line.trim().is_empty() || line.len() - line.trim_start().len() > key {
                continue;
            }
            block = None;
        }
        let (line, begins_block) = without_named_values_in(line);
        out.push_str(&line);
        if begins_block {
            block = Some(indentation);
        }
    }
    out
}

fn without_named_values_in(line: &str) -> (String, bool) {
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(separator) = rest.find([':', '=']) {
        let (before, after) = rest.split_at(separator + 1);
        out.push_str(before);
        rest = after;
        if !is_secret_key(key_before(&out[..out.len() - 1])) {
            continue;
        }
        let value = rest.trim_start_matches([' ', '\t']);
        let space = &rest[..rest.len() - value.len()];
        let length = value_length(value);
        if matches!(value[..length].trim_end(), "|" | ">" | "|-" | ">-" | "|+" | ">+") {
            out.push_str(space);
            out.push_str(REDACTED);
            out.push('\n');
            return (out, true);
        }
        if length == 0 || matches!(&value[..length], "null" | "true" | "false" | "\"\"" | "''") {
            continue;
        }
        out.push_str(space);
        let quote = if value.starts_with("\\\"") {
            "\\\""
        } else {
            quote_of(value)
        };
        out.push_str(quote);
        out.push_str(REDACTED);
        out.push_str(quote);
        rest = &value[length..];
    }
    out.push_str(rest);
    (out, false)
}

fn quote_of(value: &str) -> &str {
    if value.starts_with(['"', '\'']) {
        &value[..1]
    } else {
        ""
    }
}

/// The word that ends here, without its quotes.
fn key_before(text: &str) -> &str {
    let text = text.trim_end().trim_end_matches(['"', '\'', '\\']);
    let start = text.rfind(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')));
    start.map_or(text, |start| {
        let next = text[start..].chars().next().map_or(1, char::len_utf8);
        &text[start + next..]
    })
}

/// Bytes of the value that begins here; none for a structure.
fn value_length(value: &str) -> usize {
    if let Some(inner) = value.strip_prefix("\\\"") {
        return inner.find("\\\"").map_or(value.len(), |end| end + 4);
    }
    let quote = quote_of(value);
    if let Some(quote) = quote.chars().next() {
        let mut escaped = false;
        for (at, c) in value.char_indices().skip(1) {
            if c == quote && !escaped {
                return at + 1;
            }
            escaped = c == '\\' && !escaped;
        }
        return value.trim_end().len();
    }
    if value.starts_with(['{', '[']) {
        return 0;
    }
    value
        .find(|c: char| c.is_whitespace() || matches!(c, ',' | '}' | ']' | ';' | '&' | '"'))
        .unwrap_or(value.len())
}

#[cfg(test)]
mod tests;
