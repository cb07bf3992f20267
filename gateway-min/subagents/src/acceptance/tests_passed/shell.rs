//! Splits a command line of bash into commands and words.
//!
//! It knows the plain part of the language. A line with more, such as compound commands, subshells, here-documents or a
//! syntax error, is not parsed at all. A word whose value only the shell knows is marked.

use std::iter::Peekable;
use std::str::Chars;

/// How a command follows the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joint {
    /// It is the first.
    Start,
    /// After `;` or a new line.
    Sequence,
    /// After `&&`.
    And,
    /// After `||`.
    Or,
    /// After `|` or `|&`.
    Pipe,
    /// After `&`.
    Background,
}

/// A word of a command.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Word {
    /// As written.
    pub(super) raw: String,
    /// Without its quotes.
    pub(super) value: String,
    /// Whether the shell may make something else of it: an expansion, an escape, a special character.
    pub(super) is_doubtful: bool,
    /// Whether it is a pattern for names of files.
    pub(super) is_glob: bool,
    /// Whether a part of it is quoted.
    pub(super) is_quoted: bool,
}

/// A command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Command {
    /// How it follows the one before it.
    pub(super) joint: Joint,
    /// Its words, with assignments before the program.
    pub(super) words: Vec<Word>,
    /// Its redirections, as written.
    pub(super) redirections: Vec<String>,
}

/// A parsed line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) commands: Vec<Command>,
    /// Whether its last command runs in the background.
    pub(super) ends_in_background: bool,
}

/// Words that start a compound command, or end one.
const RESERVED: [&str; 23] = [
    "if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac", "select",
    "function", "time", "coproc", "in", "!", "{", "}", "[[", "]]", "((",
];

/// Parses a line; `None` for one that is not of the plain part, or has a syntax error.
pub(super) fn parse(text: &str) -> Option<Line> {
    let mut parser = Parser {
        chars: text.chars().peekable(),
        line: Line { commands: Vec::new(), ends_in_background: false },
        command: Command { joint: Joint::Start, words: Vec::new(), redirections: Vec::new() },
        target: None,
    };
    parser.run()?;
    Some(parser.line)
}

struct Parser<'a> {
    chars: Peekable<Chars<'a>>,
    line: Line,
    command: Command,
    /// The operator of a redirection whose target is still missing.
    target: Option<String>,
}

impl Parser<'_> {
    fn run(&mut self) -> Option<()> {
        while let Some(&next) = self.chars.peek() {
            match next {
                ' ' | '\t' => {
                    self.chars.next();
                }
                '#' => while self.chars.next_if(|c| *c != '\n').is_some() {},
                '\n' => {
                    self.chars.next();
                    self.newline()?;
                }
                ';' => {
                    self.chars.next();
                    self.end(Joint::Sequence)?;
                }
                '&' | '|' => self.operator()?,
                '<' | '>' => self.redirection(String::new())?,
                '(' | ')' => return None,
                _ => self.word()?,
            }
        }
        self.finish()
    }

    /// A new line ends a command, if there is one.
    fn newline(&mut self) -> Option<()> {
        if self.target.is_some() {
            return None;
        }
        if self.is_empty() { Some(()) } else { self.end(Joint::Sequence) }
    }

    fn is_empty(&self) -> bool {
        self.command.words.is_empty() && self.command.redirections.is_empty()
    }

    fn operator(&mut self) -> Option<()> {
        let first = self.chars.next()?;
        let twice = self.chars.next_if_eq(&first).is_some();
        match (first, twice) {
            ('&', true) => self.end(Joint::And),
            ('&', false) if self.chars.peek() == Some(&'>') => self.redirection("&".to_owned()),
            ('&', false) => self.end(Joint::Background),
            (_, true) => self.end(Joint::Or),
            (_, false) => {
                self.chars.next_if_eq(&'&');
                self.end(Joint::Pipe)
            }
        }
    }

    /// The operator of a redirection; `before` is what belongs to it and was read already.
    fn redirection(&mut self, before: String) -> Option<()> {
        if self.target.is_some() {
            return None;
        }
        let mut operator = before;
        while let Some(part) = self.chars.next_if(|c| matches!(c, '<' | '>' | '&' | '|')) {
            operator.push(part);
        }
        let plain = operator.trim_start_matches(|c: char| c.is_ascii_digit());
        if !["<", ">", ">>", ">|", "<>", ">&", "<&", "<<<", "&>", "&>>"].contains(&plain) {
            return None;
        }
        // `<(` and `>(` are substitutions.
        if self.chars.peek() == Some(&'(') {
            return None;
        }
        self.target = Some(operator);
        Some(())
    }

    fn word(&mut self) -> Option<()> {
        let mut word = Word::default();
        while let Some(&next) = self.chars.peek() {
            match next {
                ' ' | '\t' | '\n' | ';' | '&' | '|' => break,
                '<' | '>' => {
                    let is_descriptor = !word.is_quoted && word.raw.bytes().all(|b| b.is_ascii_digit());
                    if is_descriptor && self.target.is_none() {
                        return self.redirection(word.raw);
                    }
                    break;
                }
                '(' | ')' => return None,
                c if c.is_control() => return None,
                '\'' | '"' => self.quoted(&mut word)?,
                '\\' => {
                    self.chars.next();
                    let escaped = self.chars.next()?;
                    word.raw.extend(['\\', escaped]);
                    word.value.push(escaped);
                    word.is_doubtful = true;
                }
                plain => {
                    self.chars.next();
                    word.raw.push(plain);
                    word.value.push(plain);
                    word.is_glob |= matches!(plain, '*' | '?' | '[');
                }
            }
        }
        // The criterion does not say which shell it means, so quotes do not settle these.
        word.is_doubtful |= word.value.contains(['$', '`', '\\', '^', '{', '}', '~', '#', '!'])
            || word.value.matches('%').count() > 1;
        match self.target.take() {
            Some(operator) => self.command.redirections.push(operator + &word.raw),
            None => self.command.words.push(word),
        }
        Some(())
    }

    fn quoted(&mut self, word: &mut Word) -> Option<()> {
        let quote = self.chars.next()?;
        word.raw.push(quote);
        word.is_quoted = true;
        loop {
            let next = self.chars.next()?;
            word.raw.push(next);
            match next {
                '\\' if quote == '"' => {
                    let escaped = self.chars.next()?;
                    word.raw.push(escaped);
                    word.value.push(escaped);
                    word.is_doubtful = true;
                }
                next if next == quote => return Some(()),
                next if next.is_control() && next != '\t' && next != '\n' => return None,
                next => word.value.push(next),
            }
        }
    }

    /// Ends a command, which another one may follow.
    fn end(&mut self, next: Joint) -> Option<()> {
        if self.is_empty() || self.target.is_some() {
            return None;
        }
        let program = self.command.words.iter().find(|word| assignment(word).is_none());
        if program.is_some_and(|word| RESERVED.contains(&word.value.as_str())) {
            return None;
        }
        let command = Command { joint: next, words: Vec::new(), redirections: Vec::new() };
        self.line.commands.push(std::mem::replace(&mut self.command, command));
        Some(())
    }

    fn finish(&mut self) -> Option<()> {
        if !self.is_empty() || self.target.is_some() {
            return self.end(Joint::Sequence);
        }
        match self.command.joint {
            Joint::Start | Joint::Sequence => {}
            Joint::Background => self.line.ends_in_background = true,
            Joint::And | Joint::Or | Joint::Pipe => return None,
        }
        Some(())
    }
}

/// The name and the value, if a word is an assignment.
pub(super) fn assignment(word: &Word) -> Option<(&str, &str)> {
    // A quote before the `=` makes it an ordinary word.
    let name = word.raw.split_once('=')?.0;
    let plain = name.trim_end_matches('+');
    let starts = plain.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    let valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '[' | ']');
    (starts && plain.chars().all(valid))
        .then(|| (name, word.value.split_once('=').map_or("", |(_, value)| value)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A line as text again: joints, words with what is special about them, redirections.
    fn shown(text: &str) -> String {
        let Some(line) = parse(text) else { return "none".to_owned() };
        let mut shown = Vec::new();
        for command in line.commands {
            shown.push(
                match command.joint {
                    Joint::Start => "",
                    Joint::Sequence => ";",
                    Joint::And => "&&",
                    Joint::Or => "||",
                    Joint::Pipe => "|",
                    Joint::Background => "&",
                }
                .to_owned(),
            );
            for word in command.words {
                let mark = if word.is_doubtful { "?" } else { "" };
                let glob = if word.is_glob { "*" } else { "" };
                shown.push(format!("<{}>{mark}{glob}", word.value));
            }
            shown.extend(command.redirections.into_iter().map(|redirection| format!("R{redirection}")));
        }
        if line.ends_in_background {
            shown.push("&".to_owned());
        }
        shown.join(" ").trim().to_owned()
    }

    #[test]
    fn words_and_quotes() {
        for (text, expected) in [
            ("pytest  -q\ttests/a.py", "<pytest> <-q> <tests/a.py>"),
            ("pytest 'a b' \"c d\" e'f'g ''", "<pytest> <a b> <c d> <efg> <>"),
            ("echo 'a;b|c&d#e'", "<echo> <a;b|c&d#e>?"),
            ("echo a#b # comment; pytest", "<echo> <a#b>?"),
            ("# only a comment", ""),
            (
                "pytest $X \"$Y\" `z` a\\ b {c,d} ~/e %F% 50%",
                "<pytest> <$X>? <$Y>? <`z`>? <a b>? <{c,d}>? <~/e>? <%F%>? <50%>",
            ),
            ("pytest *.py 'x*' t[1]", "<pytest> <*.py>* <x*> <t[1]>*"),
            ("FOO=1 pytest", "<FOO=1> <pytest>"),
        ] {
            assert_eq!(shown(text), expected, "{text}");
        }
    }

    #[test]
    fn operators_and_new_lines() {
        for (text, expected) in [
            ("a; b && c || d | e |& f & g", "<a> ; <b> && <c> || <d> | <e> | <f> & <g>"),
            ("a\n\n b # x\nc;\n", "<a> ; <b> ; <c>"),
            ("a &&\n b |\n c", "<a> && <b> | <c>"),
            ("a;", "<a>"),
            ("a &", "<a> &"),
            ("a 2>&1 >out &>all < in <<<word 3<> x y", "<a> <y> R2>&1 R>out R&>all R<in R<<<word R3<>x"),
            ("> x", "R>x"),
            ("a2>x", "<a2> R>x"),
        ] {
            assert_eq!(shown(text), expected, "{text}");
        }
    }

    #[test]
    fn what_is_not_plain_is_not_parsed() {
        for text in [
            "(pytest)",
            "a $(b)",
            "f() { pytest; }",
            "if true; then pytest; fi",
            "for x in a; do b; done",
            "! pytest",
            "time pytest",
            "[[ a ]] && pytest",
            "cat <<EOF\npytest\nEOF",
            "diff <(a) b",
            "a 'b",
            "a \"b",
            "a \\",
            "; a",
            "a ;; b",
            "&& a",
            "a\n&& b",
            "a\n|| b",
            "a &&",
            "a |",
            "a >",
            "a > ; b",
            "a\rb",
            "a\u{0}b",
            "X=1 if a",
            "a=(1 2)",
            "{ a; }",
            "a && && b",
            "a & ; b",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn assignments_are_known_by_their_unquoted_name() {
        let of = |text: &str| {
            let line = parse(text).unwrap();
            assignment(&line.commands[0].words[0]).map(|(name, value)| format!("{name}:{value}"))
        };
        assert_eq!(of("A=1"), Some("A:1".to_owned()));
        assert_eq!(of("A_1='x y'=z"), Some("A_1:x y=z".to_owned()));
        assert_eq!(of("A+=1"), Some("A+:1".to_owned()));
        assert_eq!(of("A[0]=1"), Some("A[0]:1".to_owned()));
        for word in ["'A'=1", "1A=1", "--a=1", "a-b=1", "=1", "A"] {
            assert_eq!(of(word), None, "{word}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics_and_its_result_is_bounded_by_the_text(text in r"(?s).{0,200}") {
            if let Some(line) = parse(&text) {
                let words: usize = line.commands.iter().map(|c| c.words.len() + c.redirections.len()).sum();
                prop_assert!(words <= text.chars().count() && line.commands.len() <= text.chars().count());
            }
        }

        #[test]
        fn so_with_the_characters_of_the_language(text in r#"([a-z'"\\;&|<>()$#`= \n]){0,60}"#) {
            if let Some(line) = parse(&text) {
                for command in &line.commands {
                    prop_assert!(!command.words.is_empty() || !command.redirections.is_empty());
                }
                // The words of a line are found in it, in order.
                let mut rest = text.as_str();
                for command in &line.commands {
                    for word in &command.words {
                        let at = rest.find(&word.raw);
                        prop_assert!(at.is_some(), "{:?} in {:?}", word, text);
                        rest = &rest[at.unwrap() + word.raw.len()..];
                    }
                }
            }
        }
    }
}
