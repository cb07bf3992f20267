//! The house: links in pages lead somewhere, and each citation of the reference is a heading of it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

use std::fs;
use std::path::{Path, PathBuf};

/// Folders that are not ours, or that are made by building.
const SKIPPED: [&str; 5] = ["target", ".git", ".venv", ".svc", "node_modules"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Every file below a folder whose name ends like this, and its text; paths are relative to the root.
fn files(folder: &Path, ending: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if path.is_dir() {
                if !SKIPPED.contains(&name) {
                    folders.push(path);
                }
            } else if name.ends_with(ending) {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path.strip_prefix(root()).unwrap().to_owned(), text));
            }
        }
    }
    found.sort();
    found
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The headings of a page.
fn headings(page: &str) -> Vec<&str> {
    let (mut found, mut in_code) = (Vec::new(), false);
    for line in page.lines() {
        in_code ^= line.starts_with("```");
        if !in_code && line.starts_with('#') {
            found.push(line.trim_start_matches('#').trim());
        }
    }
    found
}

/// The comments of a source file as one text, so that a citation may go over the end of a line.
fn comments(source: &str) -> String {
    let comment = |line: &'_ str| {
        let (_, comment) = line.split_once("//")?;
        Some(comment.trim_start_matches(['/', '!']).trim().to_owned())
    };
    source.lines().filter_map(comment).collect::<Vec<_>>().join(" ")
}

#[test]
fn each_citation_of_the_reference_is_a_heading_of_it() {
    const CITED: &str = "service reference, ";
    let page = read("docs/reference.md");
    let headings = headings(&page);
    let (mut cited, mut wrong) = (0, Vec::new());
    for (path, source) in files(&root(), ".rs") {
        if path.ends_with("tests/house.rs") {
            continue;
        }
        let comments = comments(&source);
        for (_, rest) in comments.match_indices(CITED).map(|(at, _)| comments.split_at(at + CITED.len())) {
            cited += 1;
            let heading = rest.strip_prefix('"').and_then(|rest| rest.split_once('"'));
            if heading.is_none_or(|(heading, _)| !headings.contains(&heading)) {
                let shown: String = rest.chars().take(60).collect();
                wrong.push(format!("{}: {shown}", path.display()));
            }
        }
    }
    assert!(cited > 30, "only {cited} citations were found");
    assert!(wrong.is_empty(), "not a quoted heading of docs/reference.md:\n{}", wrong.join("\n"));
}

/// The values of the text constants of a source file.
fn texts(source: &str) -> Vec<String> {
    let constants = source.split("pub const ").skip(1).filter_map(|rest| {
        let (declaration, rest) = rest.split_once('=')?;
        let (value, _) = rest.split_once("\";")?;
        declaration.contains("&str").then_some(value.trim_start())
    });
    // A backslash at the end of a line swallows the space up to the next word.
    let value =
        |text: &str| text.trim_start_matches('"').split("\\\n").map(str::trim_start).collect::<String>();
    constants.map(value).collect()
}

#[test]
fn the_reference_has_every_fixed_text() {
    let page = read("docs/reference.md");
    let engine = texts(&read("engine/src/error.rs"));
    assert!(engine.len() >= 5, "{engine:?}");
    for text in engine {
        assert!(page.contains(&format!("`{text}`")), "docs/reference.md does not have: {text}");
    }
}

/// The targets of the links of a page, without those to other sites.
fn links(page: &str) -> Vec<&str> {
    let targets = page.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
    targets.filter(|target| !target.contains("://") && !target.contains(' ')).collect()
}

/// A heading as links name it.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase().replace(' ', "-");
    kept.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect()
}

#[test]
fn each_link_in_a_page_leads_somewhere() {
    let mut broken = Vec::new();
    for (path, page) in files(&root(), ".md") {
        for link in links(&page) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = root().join(&path).parent().unwrap().join(file);
            let target = if file.is_empty() { root().join(&path) } else { target };
            let whole = if !target.exists() {
                false
            } else if heading.is_empty() {
                true
            } else {
                let page = fs::read_to_string(&target).unwrap();
                headings(&page).iter().any(|found| anchor(found) == heading)
            };
            if !whole {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}
