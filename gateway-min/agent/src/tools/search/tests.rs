use std::time::Duration;

use super::*;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new(files: &[(&str, &str)]) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        for (path, content) in files {
            let path = place.0.path().join("root").join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        place
    }

    async fn call(&self, tool: &dyn Tool, args: Value) -> Result<String, String> {
        let context = ToolContext::new("t", "r", self.0.path().join("root"));
        let result = tool.call(&context, args).await;
        result.map(|output| output.content).map_err(|error| error.to_string())
    }

    async fn lines(&self, tool: &dyn Tool, args: Value) -> Vec<String> {
        self.call(tool, args).await.unwrap().lines().map(str::to_owned).collect()
    }
}

#[tokio::test]
async fn ls_shows_two_levels_sorted() {
    let place = Folder::new(&[("b.txt", ""), ("a/c/d.txt", ""), ("a/x.txt", "")]);
    let ls = Ls::new(1000);
    assert_eq!(place.lines(&ls, json!({})).await, ["a/", "a/c/", "a/x.txt", "b.txt"]);
    assert_eq!(place.lines(&ls, json!({"path": "a"})).await, ["a/c/", "a/c/d.txt", "a/x.txt"]);
    assert_eq!(place.lines(&ls, json!({"path": "b.txt"})).await, ["b.txt"]);
    let error = place.call(&ls, json!({"path": "nothing"})).await.unwrap_err();
    assert!(error.starts_with("cannot list `nothing`"), "{error}");
    let empty = Folder::new(&[]).call(&ls, json!({"path": "."})).await;
    assert_eq!(empty.unwrap(), "(the directory is empty)");
}

#[tokio::test]
async fn glob_finds_files_below_the_path() {
    let place = Folder::new(&[("src/main.rs", ""), ("src/a/b.rs", ""), ("readme.md", ""), ("dir.rs/x", "")]);
    assert_eq!(place.lines(&Glob, json!({"pattern": "*.rs"})).await, ["src/a/b.rs", "src/main.rs"]);
    let below = json!({"pattern": "a/*.rs", "path": "src"});
    assert_eq!(place.lines(&Glob, below).await, ["src/a/b.rs"]);
    assert_eq!(place.lines(&Glob, json!({"pattern": "*.py"})).await, ["(no matching files)"]);
    assert!(place.call(&Glob, json!({"pattern": "["})).await.unwrap_err().contains("file pattern"));
}

#[tokio::test]
async fn glob_stops_at_its_limit() {
    let names: Vec<String> = (0..=MAX_FILES).map(|n| format!("{n:04}.txt")).collect();
    let files: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "")).collect();
    let place = Folder::new(&files);
    let lines = place.lines(&Glob, json!({"pattern": "*.txt"})).await;
    assert_eq!(lines.len(), MAX_FILES + 1);
    assert_eq!(lines[MAX_FILES], "[stopped after 200 files: use a narrower pattern]");
    let lines = place.lines(&Glob, json!({"pattern": "00*.txt"})).await;
    assert_eq!(lines.len(), 100);
}

#[tokio::test]
async fn grep_shows_lines_with_their_places() {
    let place = Folder::new(&[
        ("a.md", "one\nTwo\nthree two"),
        ("b/c.txt", "two"),
        ("binary", "two\0two"),
        ("long.md", &format!("two{}", "x".repeat(500))),
    ]);
    let grep = async |args| place.lines(&Grep, args).await;
    let long = format!("long.md:1: two{}\u{2026}", "x".repeat(297));
    assert_eq!(grep(json!({"pattern": "two"})).await, ["a.md:3: three two", "b/c.txt:1: two", &long]);
    assert_eq!(
        grep(json!({"pattern": "(?i)^two$", "glob": "*.{md,txt}"})).await,
        ["a.md:2: Two", "b/c.txt:1: two"]
    );
    assert_eq!(grep(json!({"pattern": "two", "path": "b"})).await, ["b/c.txt:1: two"]);
    assert_eq!(grep(json!({"pattern": "o", "path": "b/c.txt", "glob": "*.txt"})).await, ["b/c.txt:1: two"]);
    assert_eq!(grep(json!({"pattern": "four"})).await, ["(no matching lines)"]);
    let error = place.call(&Grep, json!({"pattern": "("})).await.unwrap_err();
    assert!(error.starts_with("argument `pattern` is invalid"), "{error}");
}

#[tokio::test]
async fn grep_stops_at_its_limits() {
    let place = Folder::new(&[("a", &"x\n".repeat(MAX_LINES)), ("b", "x")]);
    let lines = place.lines(&Grep, json!({"pattern": "x"})).await;
    assert_eq!(lines.len(), MAX_LINES + 1);
    assert_eq!(lines[MAX_LINES], "[stopped after 100 lines: use a narrower pattern]");

    let regex = Regex::new("x").unwrap();
    let stop = Stop::after(LONG);
    let mut search = Search { bytes_left: 3, ..Search::new(regex, &stop) };
    assert!(search.file("a", b"x").is_continue());
    assert!(search.file("b", b"xxx").is_break());
    assert_eq!(search.lines, ["a:1: x", "[stopped at b after 268435456 bytes: search fewer files]"]);
}

const LONG: Duration = Duration::from_mins(10);

#[test]
fn a_search_stops_between_two_lines_when_its_time_is_up() {
    let stop = Stop::after(Duration::ZERO);
    let mut search = Search::new(Regex::new("x").unwrap(), &stop);
    assert!(search.file("a", b"x\nx").is_break());
    assert_eq!(search.lines, [Stop::notice()]);
    let place = Folder::new(&[("a/b/c", ""), ("d", "")]);
    let workspace = Workspace::open(&place.0.path().join("root")).unwrap();
    let mut seen = 0;
    let complete = each_file(&workspace, None, None, &stop, |_| {
        seen += 1;
        ControlFlow::Continue(())
    });
    assert_eq!((complete.unwrap(), seen), (false, 0));
    assert_eq!(walk_ended(&stop), Stop::notice());
}

/// The search of one line cannot be interrupted, so neither the pattern nor the line may be large.
#[tokio::test]
async fn patterns_and_lines_are_bounded() {
    let long = format!("{}needle", "x".repeat(MAX_LINE_BYTES - 3));
    let place = Folder::new(&[("a", "needle"), ("b", &long), ("c", &format!("needle{long}"))]);
    let lines = place.lines(&Grep, json!({"pattern": "needle"})).await;
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert_eq!(lines[2], "[2 lines, longer than 65536 bytes, were searched only at their beginning]");
    for pattern in ["(?:a?){3000}b", "\\w{500}", "((a{100}){100}){100}"] {
        let error = place.call(&Grep, json!({"pattern": pattern})).await.unwrap_err();
        assert!(error.contains("too large to search for"), "{pattern}: {error}");
    }
    let error = place.call(&Grep, json!({"pattern": "x".repeat(5000)})).await.unwrap_err();
    assert!(error.contains("longer than 4096 bytes"), "{error}");
    let error = place.call(&Glob, json!({"pattern": "[a-z]".repeat(2000)})).await.unwrap_err();
    assert!(error.contains("longer than 4096 bytes"), "{error}");
    for pattern in ["\\b\\w+\\s*\\(\\s*\\w+\\s*\\)", "^\\s*(pub\\s+)?(async\\s+)?fn\\s+\\w+", "[a-z0-9]{32}"]
    {
        assert_eq!(
            place.call(&Grep, json!({"pattern": pattern, "path": "a"})).await.unwrap(),
            "(no matching lines)"
        );
    }
}

#[tokio::test]
async fn a_file_that_is_being_written_is_not_listed() {
    let hidden = format!(".{}.tmp", "0123456789abcdef".repeat(2));
    let nested = format!("d/{hidden}");
    let place =
        Folder::new(&[(hidden.as_str(), "needle"), (nested.as_str(), "needle"), ("d/.mine.tmp", "needle")]);
    assert_eq!(place.lines(&Ls::new(1000), json!({})).await, ["d/", "d/.mine.tmp"]);
    assert_eq!(place.lines(&Glob, json!({"pattern": "**/*.tmp"})).await, ["d/.mine.tmp"]);
    assert_eq!(place.lines(&Grep, json!({"pattern": "needle"})).await, ["d/.mine.tmp:1: needle"]);
    let snapshot = crate::tools::Snapshot::take(&place.0.path().join("root")).unwrap();
    let changes = crate::tools::Snapshot::default().changes(&snapshot).unwrap();
    let changes = serde_json::to_value(changes).unwrap();
    assert_eq!(changes["created"], json!([{"path": "d/.mine.tmp", "size": 6}]));
}

#[tokio::test]
async fn every_search_is_confined_and_follows_no_link() {
    let place = Folder::new(&[("in.txt", "needle")]);
    std::fs::write(place.0.path().join("out.txt"), "needle").unwrap();
    std::os::unix::fs::symlink(place.0.path(), place.0.path().join("root/link")).unwrap();
    assert_eq!(place.lines(&Ls::new(1000), json!({})).await, ["in.txt", "link"]);
    assert_eq!(place.lines(&Glob, json!({"pattern": "*.txt"})).await, ["in.txt"]);
    assert_eq!(place.lines(&Grep, json!({"pattern": "needle"})).await, ["in.txt:1: needle"]);
    for path in ["..", "/", "link"] {
        for result in [
            place.call(&Ls::new(1000), json!({"path": path})).await,
            place.call(&Glob, json!({"pattern": "*", "path": path})).await,
            place.call(&Grep, json!({"pattern": "x", "path": path})).await,
        ] {
            assert!(result.unwrap_err().contains("is not allowed"), "{path}");
        }
    }
}
