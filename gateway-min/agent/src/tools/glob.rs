//! File patterns, translated to regular expressions.

use regex::{Regex, RegexBuilder};

/// The maximum size of a compiled expression, in bytes. The time to search a text is at most proportional to it, and
/// nothing can interrupt the search of one text.
const MAX_REGEX_BYTES: usize = 256 * 1024;
/// The maximum length of an expression.
const MAX_PATTERN_BYTES: usize = 4096;

/// Compiles an expression that the model chose, if a search for it cannot take long.
pub(super) fn bounded_regex(pattern: &str) -> Result<Regex, String> {
    if pattern.len() > MAX_PATTERN_BYTES {
        return Err(format!("it is longer than {MAX_PATTERN_BYTES} bytes"));
    }
    RegexBuilder::new(pattern).size_limit(MAX_REGEX_BYTES).build().map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => {
            "it is too large to search for: repeat less, or use `[A-Za-z]` instead of `\\w`".to_owned()
        }
        other => other.to_string(),
    })
}

/// A pattern for paths below a directory: `*` and `?` within a name, `**` across directories, `[a-z]`, `[!a-z]` and
/// `{one,two}`. A pattern without a slash matches file names at any depth.
pub(super) struct Pattern {
    regex: Regex,
    names_only: bool,
}

impl Pattern {
    /// Parses `pattern`; the error says what is wrong with it.
    pub(super) fn new(pattern: &str) -> Result<Self, String> {
        let regex = bounded_regex(&translate(pattern)?)
            .map_err(|error| format!("`{pattern}` is not a file pattern: {error}"))?;
        Ok(Self { regex, names_only: !pattern.contains('/') })
    }

    /// Whether `path`, relative to the start of the search, matches.
    pub(super) fn matches(&self, path: &str) -> bool {
        let name = path.rsplit('/').next().unwrap_or(path);
        self.regex.is_match(if self.names_only { name } else { path })
    }
}

fn translate(pattern: &str) -> Result<String, String> {
    let mut regex = String::from("^(?s:");
    let mut rest = pattern.trim_start_matches("./").chars().peekable();
    let mut open_groups = 0;
    while let Some(char) = rest.next() {
        match char {
            '*' if rest.next_if_eq(&'*').is_some() => {
                // `**/` also matches no directory at all.
                regex.push_str(if rest.next_if_eq(&'/').is_some() { "(?:.*/)?" } else { ".*" });
            }
            '*' => regex.push_str("[^/]*"),
            '?' => regex.push_str("[^/]"),
            '[' => {
                let class: String = rest.by_ref().take_while(|char| *char != ']').collect();
                let (not, members) = class.strip_prefix('!').map_or(("", &class[..]), |rest| ("^", rest));
                if members.is_empty() {
                    return Err(format!("`{pattern}` is not a file pattern: `[` without members or `]`"));
                }
                regex.extend(["[", not]);
                for member in members.chars() {
                    if matches!(member, '\\' | '[' | '^' | '&' | '~') {
                        regex.push('\\');
                    }
                    regex.push(member);
                }
                regex.push(']');
            }
            '{' => {
                open_groups += 1;
                regex.push_str("(?:");
            }
            '}' if open_groups > 0 => {
                open_groups -= 1;
                regex.push(')');
            }
            ',' if open_groups > 0 => regex.push('|'),
            other => regex.push_str(&regex::escape(other.encode_utf8(&mut [0; 4]))),
        }
    }
    if open_groups > 0 {
        return Err(format!("`{pattern}` is not a file pattern: `{{` without `}}`"));
    }
    regex.push_str(")$");
    Ok(regex)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_what_they_should() {
        let cases = [
            ("*.rs", "main.rs", true),
            ("*.rs", "src/deep/main.rs", true),
            ("*.rs", "main.rsx", false),
            ("src/*.rs", "src/main.rs", true),
            ("src/*.rs", "src/deep/main.rs", false),
            ("./src/*.rs", "src/main.rs", true),
            ("**/*.rs", "main.rs", true),
            ("**/*.rs", "a/b/main.rs", true),
            ("src/**", "src/a/b", true),
            ("src/**/x", "src/x", true),
            ("src/**/x", "src/a/b/x", true),
            ("src/**/x", "src/ax", false),
            ("?.txt", "a.txt", true),
            ("?.txt", "ab.txt", false),
            ("[ab]c", "ac", true),
            ("[!ab]c", "ac", false),
            ("[!ab]c", "xc", true),
            ("[a-c]", "b", true),
            ("[^]", "^", true),
            ("[a&&b~~c[\\]", "&", true),
            ("[a&&b~~c[\\]", "[", true),
            ("*.{rs,to?l}", "x.toml", true),
            ("*.{rs,to?l}", "x.md", false),
            ("a.b", "axb", false),
            ("a+(b)", "a+(b)", true),
            ("a,b}", "a,b}", true),
            ("\u{fc}*", "\u{fc}ber", true),
        ];
        for (pattern, path, expected) in cases {
            assert_eq!(Pattern::new(pattern).unwrap().matches(path), expected, "{pattern} {path}");
        }
    }

    #[test]
    fn malformed_patterns_are_refused() {
        for pattern in ["[", "[]", "[!]", "{a,b", "[z-a]"] {
            let error = Pattern::new(pattern).err().expect(pattern);
            assert!(error.starts_with(&format!("`{pattern}` is not a file pattern")), "{error}");
        }
    }
}
