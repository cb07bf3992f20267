//! `ls`, `glob` and `grep`.

use std::ops::ControlFlow;
use std::path::Path;

use async_trait::async_trait;
use regex::Regex;
use serde::Deserialize;
use serde_json::{Value, json};

use super::files::is_binary;
use super::glob::{Pattern, bounded_regex};
use super::pool::Stop;
use super::workspace::{MAX_WALK_ENTRIES, Workspace};
use super::{Tool, ToolContext, ToolError, ToolOutput, ToolSpec, blocking, parse};

/// How deep `ls` descends.
const LS_DEPTH: usize = 2;
/// The maximum number of files that `glob` lists.
const MAX_FILES: usize = 200;
/// The maximum number of lines that `grep` shows.
const MAX_LINES: usize = 100;
/// The maximum number of characters of a line that `grep` shows.
const MAX_LINE_CHARS: usize = 300;
/// How much of a line `grep` searches, in bytes: nothing can interrupt the search of one line.
const MAX_LINE_BYTES: usize = 64 * 1024;
/// The maximum number of bytes that one `grep` reads.
const MAX_SEARCHED_BYTES: usize = 256 * 1024 * 1024;

fn directory_property() -> Value {
    json!({
        "type": "string",
        "description": "The directory, relative to the working directory. Default: the working directory.",
    })
}

/// `ls`: lists a directory.
pub(super) struct Ls {
    max_chars: usize,
}

impl Ls {
    pub(super) fn new(max_chars: usize) -> Self {
        Self { max_chars }
    }
}

#[derive(Deserialize)]
struct LsArgs {
    path: Option<String>,
}

#[async_trait]
impl Tool for Ls {
    fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: "ls".to_owned(),
            description: "Lists a directory and its subdirectories, two levels deep. Directories end with \
                          a slash."
                .to_owned(),
            parameters: json!({"type": "object", "properties": {"path": directory_property()}}),
        }
    }

    fn output_max_chars(&self) -> usize {
        self.max_chars
    }

    async fn call(&self, context: &ToolContext, args: Value) -> Result<ToolOutput, ToolError> {
        let LsArgs { path } = parse(args)?;
        let root = context.root.clone();
        blocking(move |stop| {
            let workspace = Workspace::open(&root)?;
            let mut lines = Vec::new();
            let complete = workspace.walk(&path.unwrap_or_default(), |entry| {
                if stop.is_due() {
                    lines.push(Stop::notice());
                    return ControlFlow::Break(());
                }
                let slash = if entry.kind.is_dir() { "/" } else { "" };
                lines.push(format!("{}{slash}", workspace.shown(&entry.path)));
                ControlFlow::Continue(entry.depth < LS_DEPTH)
            })?;
            if !complete && !stop.is_due() {
                lines.push(format!("[stopped after {MAX_WALK_ENTRIES} entries: list a subdirectory]"));
            }
            Ok(listing(&lines, "(the directory is empty)"))
        })
        .await
    }
}

/// `glob`: finds files by a pattern.
pub(super) struct Glob;

#[derive(Deserialize)]
struct GlobArgs {
    pattern: String,
    path: Option<String>,
}

#[async_trait]
impl Tool for Glob {
    fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: "glob".to_owned(),
            description: format!(
                "Finds files by a pattern: `*` and `?` within a name, `**` across directories, `[a-z]`, \
                 `{{one,two}}`. A pattern without a slash matches file names at any depth. Lists at most \
                 {MAX_FILES} files."
            ),
            parameters: json!({
                "type": "object",
                "required": ["pattern"],
                "properties": {
                    "pattern": {"type": "string", "description": "The pattern, such as `src/**/*.rs`."},
                    "path": directory_property(),
                },
            }),
        }
    }

    async fn call(&self, context: &ToolContext, args: Value) -> Result<ToolOutput, ToolError> {
        let GlobArgs { pattern, path } = parse(args)?;
        let root = context.root.clone();
        blocking(move |stop| {
            let pattern = Pattern::new(&pattern).map_err(ToolError::Arguments)?;
            let workspace = Workspace::open(&root)?;
            let mut lines = Vec::new();
            let complete = each_file(&workspace, path.as_deref(), Some(&pattern), stop, |file| {
                if lines.len() == MAX_FILES {
                    lines.push(format!("[stopped after {MAX_FILES} files: use a narrower pattern]"));
                    return ControlFlow::Break(());
                }
                lines.push(workspace.shown(file));
                ControlFlow::Continue(())
            })?;
            if !complete && lines.len() <= MAX_FILES {
                lines.push(walk_ended(stop));
            }
            Ok(listing(&lines, "(no matching files)"))
        })
        .await
    }
}

/// `grep`: finds lines by a regular expression.
pub(super) struct Grep;

#[derive(Deserialize)]
struct GrepArgs {
    pattern: String,
    path: Option<String>,
    glob: Option<String>,
}

#[async_trait]
impl Tool for Grep {
    fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: "grep".to_owned(),
            description: format!(
                "Finds lines in text files by a regular expression (case-insensitive with `(?i)`) and shows \
                 them as `path:line: text`, at most {MAX_LINES} of them."
            ),
            parameters: json!({
                "type": "object",
                "required": ["pattern"],
                "properties": {
                    "pattern": {"type": "string", "description": "The regular expression."},
                    "path": {
                        "type": "string",
                        "description": "The directory or file to search, relative to the working directory. \
                                        Default: the working directory.",
                    },
                    "glob": {
                        "type": "string",
                        "description": "Only files that match this pattern, such as `*.md`. Default: all.",
                    },
                },
            }),
        }
    }

    async fn call(&self, context: &ToolContext, args: Value) -> Result<ToolOutput, ToolError> {
        let GrepArgs { pattern, path, glob } = parse(args)?;
        let root = context.root.clone();
        blocking(move |stop| {
            let regex = bounded_regex(&pattern)
                .map_err(|error| ToolError::Arguments(format!("argument `pattern` is invalid: {error}")))?;
            let glob = glob.map(|glob| Pattern::new(&glob)).transpose().map_err(ToolError::Arguments)?;
            let workspace = Workspace::open(&root)?;
            let mut search = Search::new(regex, stop);
            let complete = each_file(&workspace, path.as_deref(), glob.as_ref(), stop, |file| {
                // Skip unreadable and binary files.
                let content = workspace.read_resolved(file).unwrap_or_default();
                search.file(&workspace.shown(file), &content)
            })?;
            if !complete && !search.stopped {
                search.lines.push(walk_ended(stop));
            }
            if search.cut_lines > 0 {
                let notice = "longer than 65536 bytes, were searched only at their beginning";
                search.lines.push(format!("[{} lines, {notice}]", search.cut_lines));
            }
            Ok(listing(&search.lines, "(no matching lines)"))
        })
        .await
    }
}

/// A search in progress.
struct Search<'a> {
    regex: Regex,
    stop: &'a Stop,
    lines: Vec<String>,
    bytes_left: usize,
    /// Lines of which only the beginning was searched.
    cut_lines: usize,
    stopped: bool,
}

impl<'a> Search<'a> {
    fn new(regex: Regex, stop: &'a Stop) -> Self {
        let (lines, bytes_left) = (Vec::new(), MAX_SEARCHED_BYTES);
        Self { regex, stop, lines, bytes_left, cut_lines: 0, stopped: false }
    }

    fn file(&mut self, name: &str, content: &[u8]) -> ControlFlow<()> {
        if content.len() > self.bytes_left {
            return self
                .stop(format!("[stopped at {name} after {MAX_SEARCHED_BYTES} bytes: search fewer files]"));
        }
        self.bytes_left -= content.len();
        if is_binary(content) {
            return ControlFlow::Continue(());
        }
        let text = String::from_utf8_lossy(content);
        for (number, line) in (1..).zip(text.lines()) {
            if self.stop.is_due() {
                return self.stop(Stop::notice());
            }
            let searched = &line[..line.floor_char_boundary(MAX_LINE_BYTES)];
            self.cut_lines += usize::from(searched.len() < line.len());
            if !self.regex.is_match(searched) {
                continue;
            }
            if self.lines.len() == MAX_LINES {
                return self.stop(format!("[stopped after {MAX_LINES} lines: use a narrower pattern]"));
            }
            let mut shown: String = line.chars().take(MAX_LINE_CHARS).collect();
            if shown.len() < line.len() {
                shown.push('\u{2026}');
            }
            self.lines.push(format!("{name}:{number}: {shown}"));
        }
        ControlFlow::Continue(())
    }

    fn stop(&mut self, notice: String) -> ControlFlow<()> {
        self.lines.push(notice);
        self.stopped = true;
        ControlFlow::Break(())
    }
}

/// Visits the files at `path` whose path, relative to it, matches `pattern`. Returns whether it saw all of them.
fn each_file(
    workspace: &Workspace,
    path: Option<&str>,
    pattern: Option<&Pattern>,
    stop: &Stop,
    mut visit: impl FnMut(&Path) -> ControlFlow<()>,
) -> Result<bool, ToolError> {
    let path = path.unwrap_or_default();
    let start = workspace.resolve(path)?;
    workspace.walk(path, |entry| {
        if stop.is_due() {
            return ControlFlow::Break(());
        }
        let relative = entry.path.strip_prefix(&start).unwrap_or(&entry.path);
        // If the start is itself a file, match it by name.
        let relative = if relative.as_os_str().is_empty() { &entry.path } else { relative };
        let fits = pattern.is_none_or(|pattern| pattern.matches(&relative.to_string_lossy()));
        if entry.kind.is_file() && fits {
            visit(&entry.path)?;
        }
        ControlFlow::Continue(true)
    })
}

fn walk_ended(stop: &Stop) -> String {
    if stop.is_due() {
        return Stop::notice();
    }
    format!("[stopped after {MAX_WALK_ENTRIES} files and directories: search a subdirectory]")
}

fn listing(lines: &[String], otherwise: &str) -> ToolOutput {
    ToolOutput::text(if lines.is_empty() { otherwise.to_owned() } else { lines.join("\n") })
}

#[cfg(test)]
mod tests;
