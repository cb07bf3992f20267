//! Secrets that are kept out of what programs and servers say: they may quote a key that they were given.

use std::collections::BTreeMap;
use std::fmt;

use url::Url;

use crate::secret::{MASK, Secret};
use crate::sections::McpServer;

/// Shorter pieces, as the path `/`, hide nothing and would make texts unreadable.
const PIECE_MIN: usize = 4;

/// What a text must not contain.
#[derive(Clone, Default)]
pub struct Hidden {
    /// The longest first, so that none is left because a part of it was replaced.
    pieces: Vec<String>,
}

impl Hidden {
    /// The values of these variables. Any of them may be a secret, because the operator chooses their names.
    pub fn of_variables(variables: &BTreeMap<String, Secret>) -> Self {
        Self::default().with_values(variables.values().map(Secret::expose))
    }

    /// The variables of a program, or the address and the headers of a server over HTTP.
    pub fn of_server(server: &McpServer) -> Self {
        let hidden = Self::of_variables(&server.env);
        let hidden = hidden.with_headers(server.headers.values().map(Secret::expose));
        match &server.url {
            Some(url) => hidden.with_url(url.expose()),
            None => hidden,
        }
    }

    /// These too, and the lines of those that have several: a program may say one alone.
    #[must_use]
    pub fn with_values<'a>(self, values: impl IntoIterator<Item = &'a str>) -> Self {
        let pieces = values.into_iter().flat_map(|value| std::iter::once(value).chain(value.lines()));
        self.with(pieces.map(|piece| piece.trim().to_owned()))
    }

    /// The values of these headers too, with and without their scheme, as in `Bearer <key>`.
    #[must_use]
    pub fn with_headers<'a>(self, values: impl IntoIterator<Item = &'a str>) -> Self {
        let keys = |value: &'a str| value.split_once(' ').map(|(_, key)| key);
        self.with_values(values.into_iter().flat_map(|value| std::iter::once(value).chain(keys(value))))
    }

    /// This address too.
    #[must_use]
    pub fn with_url(self, url: &str) -> Self {
        // Libraries repeat it as configured, in its normal form, or in parts: a proxy's page names the path.
        let mut pieces = vec![url.to_owned()];
        if let Ok(url) = Url::parse(url) {
            let query = url.query().unwrap_or_default();
            let host = url.host_str().unwrap_or_default();
            pieces.extend(
                [url.as_str(), url.username(), url.password().unwrap_or_default(), host].map(str::to_owned),
            );
            pieces.extend(url.port().map(|port| format!("{host}:{port}")));
            pieces.extend([query, url.path()].map(str::to_owned));
            pieces.push(format!("{}?{query}", url.path()));
            pieces.extend(url.query_pairs().map(|(_, value)| value.into_owned()));
        }
        self.with(pieces)
    }

    fn with(mut self, pieces: impl IntoIterator<Item = String>) -> Self {
        for piece in pieces.into_iter().filter(|piece| piece.len() >= PIECE_MIN) {
            // As it is within JSON, where quotes, backslashes and control characters are escaped.
            let quoted = serde_json::Value::from(piece.as_str()).to_string();
            self.pieces.extend([quoted[1..quoted.len() - 1].to_owned(), piece]);
        }
        self.pieces.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        self.pieces.dedup();
        self
    }

    /// The text without them.
    pub fn from(&self, text: &str) -> String {
        self.pieces.iter().fold(text.to_owned(), |text, piece| text.replace(piece, MASK))
    }

    /// The text, which may have been cut at either side, without them, and without what a cut has left of one there. A
    /// cut within a character has left replacement characters, which are no part of a secret.
    pub fn from_cut(&self, text: &str) -> String {
        let mut text = self.from(text);
        let parts = |at: fn(&str, usize) -> Option<&str>| {
            let pieces = self.pieces.iter();
            pieces.flat_map(move |piece| (1..piece.len()).filter_map(move |index| at(piece, index)))
        };
        let whole = text.trim_start_matches(char::REPLACEMENT_CHARACTER);
        let start = text.len() - whole.len();
        let ends = parts(|piece, index| piece.get(index..)).filter(|part| whole.starts_with(part));
        if let Some(length) = ends.map(str::len).max().filter(|length| *length >= PIECE_MIN) {
            text.replace_range(..start + length, MASK);
        }
        let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let end = whole.len();
        let beginnings = parts(|piece, index| piece.get(..index)).filter(|part| whole.ends_with(part));
        if let Some(length) = beginnings.map(str::len).max().filter(|length| *length >= PIECE_MIN) {
            text.replace_range(end - length.., MASK);
        }
        text
    }
}

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hidden({} pieces)", self.pieces.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server() -> McpServer {
        McpServer {
            command: None,
            args: vec![],
            env: BTreeMap::new(),
            url: None,
            headers: BTreeMap::new(),
            enabled: true,
            timeout_seconds: 60,
            group: None,
            routing: BTreeMap::new(),
        }
    }

    fn variables(values: &[&str]) -> BTreeMap<String, Secret> {
        let named = values.iter().enumerate();
        named.map(|(index, value)| (format!("V{index}"), Secret::new(*value))).collect()
    }

    #[test]
    fn no_part_of_an_address_or_a_header_is_left() {
        let server = McpServer {
            url: Some(Secret::new("https://user:pass@Tools.Example:8443/mcp/key-1?token=key-2&a=b")),
            headers: [("Authorization".to_owned(), Secret::new("Bearer key-3"))].into(),
            ..server()
        };
        let hidden = Hidden::of_server(&server);
        let said = [
            "for url (https://user:pass@tools.example:8443/mcp/key-1?token=key-2&a=b)",
            "Cannot POST /mcp/key-1",
            "no such token: key-2",
            "tools.example:8443 refused user with pass",
            "who is Bearer key-3, or key-3?",
        ];
        let shown = said.map(|text| hidden.from(text)).join("\n");
        for secret in ["key-", "user", "pass", "example", "8443"] {
            assert!(!shown.contains(secret), "{secret} in {shown}");
        }
        assert!(shown.contains("Cannot POST ***"), "{shown}");
        assert_eq!(
            Hidden::of_server(&McpServer { url: None, headers: BTreeMap::new(), ..server }).from("/mcp"),
            "/mcp"
        );
    }

    #[test]
    fn no_variable_of_a_program_is_left_nor_a_line_of_one() {
        let env = variables(&["sk-1234", "sk-1234-5678", "-----BEGIN-----\nMIIE1\n-----END-----\n", "on"]);
        let hidden = Hidden::of_server(&McpServer { command: Some("server".into()), env, ..server() });
        assert_eq!(hidden.from("bad sk-1234-5678, sk-1234 or MIIE1, on"), "bad ***, *** or ***, on");
        assert_eq!(hidden.from("-----BEGIN-----\nMIIE1\n-----END-----"), "***");
        assert_eq!(hidden.from_cut("whole: nothing of it"), "whole: nothing of it");
        assert!(!format!("{hidden:?}").contains("sk-"), "{hidden:?}");
    }

    #[test]
    fn nothing_is_left_of_a_secret_that_was_cut() {
        let hidden = Hidden::of_variables(&variables(&["sk-secret-1", "geh\u{e4}im-2"]));
        assert_eq!(hidden.from_cut("ecret-1 was refused, says sk-secre"), "*** was refused, says ***");
        assert_eq!(hidden.from_cut("\u{e4}im-2 and geh\u{e4}"), "*** and ***");
        assert_eq!(hidden.from_cut("sk-secret-1"), "***");
        assert_eq!(hidden.from_cut("t-1 is short, and so is sk-"), "t-1 is short, and so is sk-");
        assert_eq!(hidden.from_cut(""), "");
    }

    #[test]
    fn nothing_is_left_of_a_secret_that_was_cut_within_a_character() {
        let secret = "key-\u{e4}\u{20ac}\u{1f511}-\u{1f511}\u{20ac}\u{e4}-yek";
        let hidden = Hidden::of_variables(&variables(&[secret]));
        // Less than four bytes at a side are shown, as those of any cut.
        for cut in 4..=secret.len() - 4 {
            let (before, after) = secret.as_bytes().split_at(cut);
            let ended = String::from_utf8_lossy(after);
            assert_eq!(hidden.from_cut(&format!("{ended} was refused")), "*** was refused", "{cut}");
            let begun = String::from_utf8_lossy(before);
            assert_eq!(hidden.from_cut(&format!("refused: {begun}")), "refused: ***", "{cut}");
            assert_eq!(hidden.from_cut(&format!("{ended} and {begun}")), "*** and ***", "{cut}");
        }
        // Other texts are left as they are.
        assert_eq!(hidden.from_cut("\u{fffd}rger \u{fffd} ja\u{fffd}"), "\u{fffd}rger \u{fffd} ja\u{fffd}");
    }

    #[test]
    fn nothing_is_left_of_a_secret_within_json() {
        let secret = "\"sk\\-1\"\nse\tcret\\\"2\u{1}\"";
        let hidden = Hidden::of_variables(&variables(&[secret, "a\"b"]))
            .with_url("https://tools.example/mcp?token=key%22%5C3");
        let said =
            serde_json::json!({"env": [secret, "se\tcret\\\"2\u{1}\""], "token": "key\"\\3"}).to_string();
        assert_eq!(hidden.from(&said), r#"{"env":["***","***"],"token":"***"}"#);
        assert_eq!(hidden.from(&format!("{secret} is none")), "*** is none");
        let quoted = serde_json::json!(secret).to_string();
        assert_eq!(hidden.from_cut(&quoted[3..]), r#"***\n***""#);
        assert_eq!(hidden.from_cut(&quoted[..quoted.len() - 2]), r#""***\n***"#);
        // Too short, although its escaped form is not.
        assert_eq!(hidden.from(r#"["a\"b"]"#), r#"["a\"b"]"#);
    }
}
