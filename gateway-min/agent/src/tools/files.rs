//! `read_file`, `write_file` and `str_replace`.

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json};

use super::workspace::{MAX_FILE_BYTES, Workspace};
use super::{Tool, ToolContext, ToolError, ToolOutput, ToolSpec, blocking, parse};

/// `read_file`: the text of a file, or a range of its lines.
pub(super) struct ReadFile {
    max_chars: usize,
}

impl ReadFile {
    pub(super) fn new(max_chars: usize) -> Self {
        Self { max_chars }
    }
}

#[derive(Deserialize)]
struct ReadArgs {
    path: String,
    start_line: Option<u64>,
    end_line: Option<u64>,
}

#[async_trait]
impl Tool for ReadFile {
    fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: "read_file".to_owned(),
            description:
                "Reads a text file in the working directory. Long files are truncated; the notice at the \
                          end says at which line to continue."
                    .to_owned(),
            parameters: json!({
                "type": "object",
                "required": ["path"],
                "properties": {
                    "path": {"type": "string", "description": "The file, relative to the working directory."},
                    "start_line": {
                        "type": "integer", "minimum": 1,
                        "description": "The first line to read, counted from 1. Default: the first.",
                    },
                    "end_line": {
                        "type": "integer", "minimum": 1,
                        "description": "The last line to read, inclusive. Default: the last.",
                    },
                },
            }),
        }
    }

    fn output_max_chars(&self) -> usize {
        self.max_chars
    }

    async fn call(&self, context: &ToolContext, args: Value) -> Result<ToolOutput, ToolError> {
        let args: ReadArgs = parse(args)?;
        let (root, max_chars) = (context.root.clone(), self.max_chars);
        blocking(move |_| {
            let content = Workspace::open(&root)?.read(&args.path)?;
            let text = text(content, &args.path)?;
            lines(&text, &args, max_chars).map(ToolOutput::text)
        })
        .await
    }
}

/// The requested lines of `text`, as many whole lines as fit into `max_chars`, and a notice if some do not fit.
fn lines(text: &str, args: &ReadArgs, max_chars: usize) -> Result<String, ToolError> {
    /// Space reserved for the notice.
    const NOTICE_CHARS: usize = 120;
    let total = text.lines().count() as u64;
    let (start, end) = (args.start_line.unwrap_or(1).max(1), args.end_line.unwrap_or(total).min(total));
    if total == 0 {
        return Ok("(the file is empty)".to_owned());
    }
    if start > end {
        let detail = format!("no line from {start} to {end}: `{}` has {total} lines", args.path);
        return Err(ToolError::Arguments(detail));
    }
    let limit = max_chars.saturating_sub(NOTICE_CHARS);
    let (mut shown, mut used) = (String::new(), 0);
    for (number, line) in (1..=end).zip(text.split_inclusive('\n')).skip_while(|(number, _)| *number < start)
    {
        let length = line.chars().count();
        if used + length > limit {
            let next = if number == start {
                // Not even one line fits; its beginning is better than nothing.
                shown.extend(line.chars().take(limit));
                format!("in the middle of line {start} of {total}; the next one is start_line {}", start + 1)
            } else {
                format!("before line {number} of {total}; continue with start_line {number}")
            };
            shown.extend(["\n[output cut ", &next, "]"]);
            break;
        }
        used += length;
        shown.push_str(line);
    }
    Ok(shown)
}

/// `content` as text; invalid UTF-8 becomes U+FFFD.
fn text(content: Vec<u8>, path: &str) -> Result<String, ToolError> {
    if is_binary(&content) {
        return Err(ToolError::Failed(format!("`{path}` is not a text file")));
    }
    Ok(String::from_utf8(content)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// Whether a file is binary: it has a NUL byte near its beginning.
pub(super) fn is_binary(content: &[u8]) -> bool {
    content.iter().take(8192).any(|byte| *byte == 0)
}

/// `write_file`: creates or replaces a file.
pub(super) struct WriteFile;

#[derive(Deserialize)]
struct WriteArgs {
    path: String,
    content: String,
}

#[async_trait]
impl Tool for WriteFile {
    fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: "write_file".to_owned(),
            description:
                "Writes a text file in the working directory, replacing it if it exists and creating \
                          its directories."
                    .to_owned(),
            parameters: json!({
                "type": "object",
                "required": ["path", "content"],
                "properties": {
                    "path": {"type": "string", "description": "The file, relative to the working directory."},
                    "content": {"type": "string", "description": "The whole content."},
                },
            }),
        }
    }

    async fn call(&self, context: &ToolContext, args: Value) -> Result<ToolOutput, ToolError> {
        let WriteArgs { path, content } = parse(args)?;
        let root = context.root.clone();
        blocking(move |_| {
            let written = Workspace::open(&root)?.write(&path, content.as_bytes())?;
            let text = format!("Wrote {} bytes to {path}", content.len());
            Ok(ToolOutput { written: vec![written], ..ToolOutput::text(text) })
        })
        .await
    }
}

/// `str_replace`: replaces a text in a file.
pub(super) struct StrReplace;

#[derive(Deserialize)]
struct ReplaceArgs {
    path: String,
    old_str: String,
    new_str: String,
    #[serde(default)]
    replace_all: Option<bool>,
}

#[async_trait]
impl Tool for StrReplace {
    fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: "str_replace".to_owned(),
            description: "Replaces a text in a file of the working directory. The text must occur exactly \
                          once, unless replace_all is set."
                .to_owned(),
            parameters: json!({
                "type": "object",
                "required": ["path", "old_str", "new_str"],
                "properties": {
                    "path": {"type": "string", "description": "The file, relative to the working directory."},
                    "old_str": {
                        "type": "string",
                        "description": "The text to replace, exactly as it is in the file.",
                    },
                    "new_str": {"type": "string", "description": "The new text."},
                    "replace_all": {
                        "type": "boolean",
                        "description": "Replace every occurrence. Default: false.",
                    },
                },
            }),
        }
    }

    async fn call(&self, context: &ToolContext, args: Value) -> Result<ToolOutput, ToolError> {
        let args: ReplaceArgs = parse(args)?;
        let root = context.root.clone();
        blocking(move |_| {
            let mut count = 0;
            let written = Workspace::open(&root)?.edit(&args.path, |content| {
                let (changed, replaced) = replace(content, &args)?;
                count = replaced;
                Ok(changed)
            })?;
            let times = if count == 1 { "occurrence" } else { "occurrences" };
            let text = format!("Replaced {count} {times} in {}", args.path);
            Ok(ToolOutput { written: vec![written], ..ToolOutput::text(text) })
        })
        .await
    }
}

fn replace(content: Vec<u8>, args: &ReplaceArgs) -> Result<(Vec<u8>, usize), ToolError> {
    let ReplaceArgs { path, old_str, new_str, replace_all } = args;
    if old_str.is_empty() {
        return Err(ToolError::Arguments("argument `old_str` is empty".to_owned()));
    }
    // Replacing in a lossy copy would damage the rest of the file.
    let text = String::from_utf8(content)
        .map_err(|_| ToolError::Failed(format!("`{path}` is not a UTF-8 text file")))?;
    match text.matches(old_str.as_str()).count() {
        0 => Err(ToolError::Failed(format!(
            "`old_str` does not occur in `{path}`. Read the file and copy the text exactly"
        ))),
        count if count > 1 && *replace_all != Some(true) => Err(ToolError::Failed(format!(
            "`old_str` occurs {count} times in `{path}`. Make it longer until it is unique, or set replace_all"
        ))),
        // A short text that occurs often may become as many long ones.
        count if count.saturating_mul(new_str.len()) > MAX_FILE_BYTES => Err(ToolError::Failed(format!(
            "{count} times `new_str` are more than the {MAX_FILE_BYTES} bytes that a file may have"
        ))),
        count => Ok((text.replace(old_str.as_str(), new_str).into_bytes(), count)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new(files: &[(&str, &str)]) -> Self {
            let place = Self(tempfile::tempdir().unwrap());
            for (path, content) in files {
                std::fs::create_dir_all(place.context().root).unwrap();
                std::fs::write(place.context().root.join(path), content).unwrap();
            }
            place
        }

        fn context(&self) -> ToolContext {
            ToolContext::new("t", "r", self.0.path().join("threads/t"))
        }

        async fn call(&self, tool: &dyn Tool, args: Value) -> Result<String, String> {
            let result = tool.call(&self.context(), args).await;
            result.map(|output| output.content).map_err(|error| error.to_string())
        }

        fn read(&self, path: &str) -> String {
            std::fs::read_to_string(self.context().root.join(path)).unwrap()
        }
    }

    #[tokio::test]
    async fn a_file_is_written_into_the_directory_made_for_it_and_read_back() {
        let place = Folder::new(&[]);
        assert!(!place.context().root.exists());
        let written = place.call(&WriteFile, json!({"path": "notes/a.txt", "content": "h\u{e9}\n"})).await;
        assert_eq!(written.unwrap(), "Wrote 4 bytes to notes/a.txt");
        assert_eq!(place.read("notes/a.txt"), "h\u{e9}\n");
        let read = place.call(&ReadFile::new(1000), json!({"path": "notes/a.txt"})).await;
        assert_eq!(read.unwrap(), "h\u{e9}\n");
    }

    #[tokio::test]
    async fn every_file_tool_is_confined() {
        let place = Folder::new(&[]);
        std::fs::write(place.0.path().join("secret"), "x").unwrap();
        for path in ["../../secret", "/etc/passwd"] {
            for result in [
                place.call(&ReadFile::new(1000), json!({"path": path})).await,
                place.call(&WriteFile, json!({"path": path, "content": "y"})).await,
                place.call(&StrReplace, json!({"path": path, "old_str": "x", "new_str": "y"})).await,
            ] {
                let error = result.unwrap_err();
                assert!(error.contains("is not allowed") && error.contains("relative"), "{error}");
            }
        }
        assert_eq!(std::fs::read_to_string(place.0.path().join("secret")).unwrap(), "x");
    }

    #[tokio::test]
    async fn lines_can_be_chosen() {
        let place = Folder::new(&[("a", "1\n2\n3\n4"), ("empty", "")]);
        let read = async |args| place.call(&ReadFile::new(1000), args).await;
        assert_eq!(read(json!({"path": "a", "start_line": 2, "end_line": 3})).await.unwrap(), "2\n3\n");
        assert_eq!(read(json!({"path": "a", "start_line": 3})).await.unwrap(), "3\n4");
        assert_eq!(read(json!({"path": "a", "end_line": 99})).await.unwrap(), "1\n2\n3\n4");
        assert_eq!(read(json!({"path": "empty"})).await.unwrap(), "(the file is empty)");
        let error = read(json!({"path": "a", "start_line": 5})).await.unwrap_err();
        assert_eq!(error, "no line from 5 to 4: `a` has 4 lines");
    }

    #[tokio::test]
    async fn a_long_file_is_cut_between_lines_and_the_notice_leads_on() {
        let lines: Vec<String> = (1..=100).map(|n| format!("line {n}\n")).collect();
        let place = Folder::new(&[("a", &lines.concat()), ("b", &"x".repeat(1000))]);
        let tool = ReadFile::new(300);
        let (mut next, mut all) = (1, String::new());
        loop {
            let part = place.call(&tool, json!({"path": "a", "start_line": next})).await.unwrap();
            assert!(part.chars().count() <= 300, "{part}");
            let Some((content, notice)) = part.split_once("\n[output cut before line ") else {
                all.push_str(&part);
                break;
            };
            all.push_str(content);
            next = notice.split(' ').next().unwrap().parse().unwrap();
            assert_eq!(notice, format!("{next} of 100; continue with start_line {next}]"));
        }
        assert_eq!(all, lines.concat());

        let part = place.call(&tool, json!({"path": "b"})).await.unwrap();
        assert!(part.starts_with("xxx") && part.contains("in the middle of line 1 of 1"), "{part}");
        assert!(part.chars().count() <= 300);
    }

    #[tokio::test]
    async fn binary_files_are_refused_and_odd_bytes_replaced() {
        let place = Folder::new(&[("binary", "a\0b")]);
        std::fs::write(place.context().root.join("latin"), b"caf\xe9").unwrap();
        let tool = ReadFile::new(1000);
        let error = place.call(&tool, json!({"path": "binary"})).await.unwrap_err();
        assert_eq!(error, "`binary` is not a text file");
        assert_eq!(place.call(&tool, json!({"path": "latin"})).await.unwrap(), "caf\u{fffd}");
        let edit = json!({"path": "latin", "old_str": "caf", "new_str": "x"});
        assert!(place.call(&StrReplace, edit).await.unwrap_err().contains("UTF-8"));
        assert_eq!(std::fs::read(place.context().root.join("latin")).unwrap(), b"caf\xe9");
    }

    #[tokio::test]
    async fn a_text_is_replaced_only_where_it_is_meant() {
        let place = Folder::new(&[("a", "one two one")]);
        let edit = async |old: &str, all: Value| {
            let args = json!({"path": "a", "old_str": old, "new_str": "1", "replace_all": all});
            place.call(&StrReplace, args).await
        };
        assert!(edit("three", Value::Null).await.unwrap_err().contains("does not occur in `a`"));
        assert!(edit("one", Value::Null).await.unwrap_err().contains("occurs 2 times in `a`"));
        assert!(edit("", json!(true)).await.unwrap_err().contains("`old_str` is empty"));
        assert_eq!(place.read("a"), "one two one");
        assert_eq!(edit("two", json!(false)).await.unwrap(), "Replaced 1 occurrence in a");
        assert_eq!(edit("one", json!(true)).await.unwrap(), "Replaced 2 occurrences in a");
        assert_eq!(place.read("a"), "1 1 1");
    }

    /// 10,000 times a megabyte would take 10 GB before the size of the file is checked.
    #[tokio::test]
    async fn a_replacement_is_checked_before_it_is_built() {
        let many = "x".repeat(10_000);
        let place = Folder::new(&[("a", &many)]);
        let args = json!({"path": "a", "old_str": "x", "new_str": "y".repeat(1 << 20), "replace_all": true});
        let error = place.call(&StrReplace, args).await.unwrap_err();
        assert_eq!(error, "10000 times `new_str` are more than the 10485760 bytes that a file may have");
        assert_eq!(place.read("a"), many);
    }
}
