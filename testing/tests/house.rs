//! The house: links in pages lead somewhere, the map names what there is, each citation of the reference is a heading
//! of it, pages name tests that are there, and what the configuration parses is read by somebody, or is listed as not
//! read.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Folders that are not ours, or that are made by building.
const SKIPPED: [&str; 6] = ["__pycache__", "target", ".git", ".venv", ".svc", "node_modules"];

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
    let (mut found, mut broken) = (0, Vec::new());
    for (path, page) in files(&root(), ".md") {
        for link in links(&page) {
            found += 1;
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
    assert!(found > 50, "only {found} links were found");
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// The fields of each public struct of some sources, with their types.
fn structs(sources: &[(PathBuf, String)]) -> BTreeMap<&str, Vec<(&str, &str)>> {
    let mut found = BTreeMap::new();
    for (_, source) in sources {
        for rest in source.split("\npub struct ").skip(1) {
            let Some((name, body)) = rest.split_once(" {\n") else { continue };
            let body = body.split("\n}").next().unwrap();
            let fields = body.lines().filter_map(|line| line.strip_prefix("    pub ")?.split_once(": "));
            found.insert(name, fields.map(|(field, of)| (field, of.trim_end_matches(','))).collect());
        }
    }
    found
}

/// The dotted paths of the settings below a struct, with the name of each one's field.
fn settings<'a>(
    structs: &BTreeMap<&'a str, Vec<(&'a str, &'a str)>>,
    name: &str,
    path: &str,
    found: &mut Vec<(String, &'a str)>,
) {
    for (field, of) in &structs[name] {
        // Words that Rust keeps for itself.
        let key = match *field {
            "kind" => "type",
            "class" => "use",
            other => other,
        };
        let path = if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        let inner = of.rsplit(['<', ' ']).next().unwrap().trim_end_matches('>');
        if structs.contains_key(inner) {
            settings(structs, inner, &path, found);
        } else {
            found.push((path, *field));
        }
    }
}

/// Whether a word occurs in a text, with no letters around it.
fn has_word(text: &str, word: &str) -> bool {
    let letter = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word)
        .any(|(at, _)| !text[at + word.len()..].starts_with(letter) && !text[..at].ends_with(letter))
}

/// Where a section is read under another name than its own: the section, a file of the gateway, and what the section is
/// called there. The name of a key alone would prove nothing: the fields of other structs have such names, too.
static READ_AS: [(&str, &str, &str); 33] = [
    ("gateway", "server/src/connections.rs", "settings"),
    ("database.checkpoint_graph_cache", "server/src/app.rs", "last_known()"),
    ("database.checkpoint_cache", "storage/src/cache.rs", "section"),
    ("models", "agent/src/builder.rs", "config"),
    ("models", "agent/src/builder.rs", "model"),
    ("models", "server/src/http/models.rs", "model"),
    ("run_ownership", "server/src/runs/ownership.rs", "section"),
    ("title", "agent/src/title.rs", "config"),
    ("summarization", "agent/src/builder.rs", "settings"),
    ("summarization", "agent/src/summary.rs", "settings"),
    ("loop_detection", "agent/src/tools/loop_detection/mod.rs", "settings"),
    ("loop_detection.tool_frequency", "agent/src/tools/loop_detection/mod.rs", "limits"),
    ("loop_detection.tool_freq_overrides", "agent/src/tools/loop_detection/mod.rs", "limits"),
    ("token_budget", "subagents/src/budget.rs", "settings"),
    ("subagents.token_budget", "subagents/src/budget.rs", "settings"),
    ("tool_search", "agent/src/tools/deferred/mod.rs", "settings"),
    ("tools", "config/src/lib.rs", "tool"),
    ("tool_groups", "config/src/lib.rs", "listed"),
    ("mcp_servers", "acp/src/servers.rs", "server"),
    ("mcp_servers", "mcp/src/connection.rs", "server"),
    ("mcp_servers", "mcp/src/server.rs", "config"),
    ("mcp_servers", "mcp/src/tool.rs", "config"),
    ("subagents.custom_agents", "subagents/src/catalog/resolve.rs", "agent"),
    ("subagent_runtime", "subagents/src/admission/mod.rs", "settings"),
    ("subagent_hooks", "subagents/src/hooks/command.rs", "command"),
    ("subagent_batches", "server/src/app.rs", "settings"),
    ("subagent_batches", "subagents/src/batches/worker.rs", "settings"),
    ("subagent_batches", "subagents/src/batches/submission.rs", "settings"),
    ("subagent_batches", "subagents/src/batches/tools.rs", "settings"),
    ("subagent_batches", "subagents/src/batches/ended.rs", "settings"),
    ("acp_agents", "acp/src/invocation.rs", "agent"),
    ("acp_agents", "acp/src/tool.rs", "agent"),
    ("telemetry.traces", "server/src/telemetry/mod.rs", "settings"),
];

/// A source without its tests at the end.
fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests {").next().unwrap()
}

#[test]
fn each_setting_is_read_by_somebody_or_listed_as_not_read() {
    // What a file says of itself; what is parsed into another field, or has only one value; and the overrides of
    // subagents, which are destructured, so that the compiler asks.
    const NONE_OF_THESE: [&str; 7] = [
        "config_version",
        "root",
        "state_dir",
        "extra",
        "models.use",
        "sandbox.provider",
        "subagents.agents",
    ];
    let sources = files(&root().join("gateway-min/config/src"), ".rs");
    let unread = read("gateway-min/config/src/unread.rs");
    let (_, list) = unread.split_once("pub const UNREAD").unwrap();
    let list = list.split_once("= [").unwrap().1.split_once("];").unwrap().0;
    let unread: Vec<&str> = list.split('"').skip(1).step_by(2).collect();

    let production = |path: &Path| {
        let name = path.to_str().unwrap();
        path.components().any(|part| part.as_os_str() == "src")
            && !name.starts_with("gateway-min/config/")
            && !["/tests/", "tests.rs", "/faults/"].iter().any(|part| name.contains(part))
    };
    let readers = files(&root().join("gateway-min"), ".rs").into_iter().filter(|(path, _)| production(path));
    let readers: String = readers.map(|(_, text)| without_tests(&text).to_owned()).collect();

    let mut all = Vec::new();
    settings(&structs(&sources), "Config", "", &mut all);
    assert!(all.len() > 100, "only {} settings were found", all.len());
    let is_in =
        |path: &str, list: &[&str]| list.iter().any(|of| path == *of || path.starts_with(&format!("{of}.")));
    let mut places: BTreeSet<&(&str, &str, &str)> = BTreeSet::new();
    let mut is_read = |path: &str, field: &str| {
        let (section, _) = path.rsplit_once('.').unwrap_or_default();
        let of_section = READ_AS.iter().filter(|(of, ..)| *of == section);
        let found: Vec<_> = of_section
            .filter(|(_, file, name)| {
                let text = read(&format!("gateway-min/{file}"));
                has_word(without_tests(&text), &format!("{name}.{field}"))
            })
            .collect();
        places.extend(found.iter().copied());
        let names = match section.rsplit('.').next() {
            None | Some("") => vec!["config", "current"],
            Some(own) => vec![own],
        };
        !found.is_empty() || names.iter().any(|name| has_word(&readers, &format!("{name}.{field}")))
    };
    let ignored: Vec<_> = all
        .iter()
        .filter(|(path, field)| {
            !is_in(path, &NONE_OF_THESE) && !is_in(path, &unread) && !is_read(path, field)
        })
        .map(|(path, _)| path)
        .collect();
    assert!(ignored.is_empty(), "nothing reads {ignored:?}: list them as unread, or read them");
    let idle: Vec<_> = READ_AS.iter().filter(|place| !places.contains(place)).collect();
    assert!(idle.is_empty(), "no setting is read there any more: {idle:?}");

    for path in unread {
        assert!(
            all.iter().any(|(setting, _)| setting == path || setting.starts_with(&format!("{path}."))),
            "{path} is listed as not read, and is no setting"
        );
        let place = path.replace(".type", ".kind");
        let places = if path.contains('.') {
            vec![place]
        } else {
            ["config", "current"].map(|of| format!("{of}.{path}")).to_vec()
        };
        for place in places {
            assert!(!has_word(&readers, &place), "{path} is listed as not read, and is read as {place}");
        }
    }
}

/// The texts in backquotes in the tables of the map that look like paths.
fn paths(page: &str) -> BTreeSet<&str> {
    let quoted = page.split('`').skip(1).step_by(2);
    quoted.filter(|text| text.contains('/') && !text.contains([' ', '<', '{', ':', '*', '=', '('])).collect()
}

#[test]
fn each_path_in_the_map_exists() {
    let page = read("ARCHITECTURE.md");
    let named = paths(&page);
    assert!(named.len() > 100, "only {} paths were found", named.len());
    let missing: Vec<_> =
        named.into_iter().filter(|path| !path.starts_with('/') && !root().join(path).exists()).collect();
    assert!(missing.is_empty(), "ARCHITECTURE.md names paths that do not exist: {missing:?}");
}

#[test]
fn each_folder_of_sources_is_in_the_map() {
    let page = read("ARCHITECTURE.md");
    let named = paths(&page);
    let is_test =
        |path: &Path| path.components().any(|part| part.as_os_str() == "tests") || path.ends_with("tests.rs");
    let mut unnamed = BTreeSet::new();
    for (path, _) in files(&root(), ".rs") {
        let folder = path.parent().unwrap();
        // Tests, examples and benches are next to the sources that they belong to.
        if is_test(&path) || !folder.components().any(|part| part.as_os_str() == "src") {
            continue;
        }
        let is_named =
            named.iter().map(Path::new).any(|path| path == folder || path.parent() == Some(folder));
        if !is_named {
            unnamed.insert(folder.to_owned());
        }
    }
    assert!(unnamed.is_empty(), "ARCHITECTURE.md does not name: {unnamed:#?}");
}

#[test]
fn the_readme_names_the_oldest_compiler() {
    let manifest = read("Cargo.toml");
    let (_, rest) = manifest.split_once("rust-version = \"").unwrap();
    let (version, _) = rest.split_once('"').unwrap();
    assert!(read("README.md").contains(&format!("Rust {version} or later")), "README.md: Rust {version}");
}

/// The names of all functions in a source, which `keyword` begins.
fn functions<'s>(source: &'s str, keyword: &'static str) -> impl Iterator<Item = &'s str> {
    source.split(keyword).skip(1).filter_map(|rest| rest.split_once('(')).map(|(name, _)| name)
}

/// The names of the tests in a source: a function that is none shows nothing.
fn tests(source: &str) -> impl Iterator<Item = &str> {
    let marked = ["#[test]", "#[tokio::test"].into_iter().flat_map(move |mark| source.split(mark).skip(1));
    marked.filter_map(|rest| functions(rest, "fn ").next())
}

#[test]
fn every_page_of_scenarios_and_that_of_defects_names_tests_that_are_there() {
    let folders = ["gateway-min", "engine", "conformance", "drivers", "testing", "python", "benches"];
    let sources: Vec<(PathBuf, String)> =
        folders.iter().flat_map(|folder| files(&root().join(folder), ".rs")).collect();
    let python = files(&root().join("python/tests"), ".py");
    // The cases of the conformance suite are plain functions.
    let cases = sources.iter().filter(|(path, _)| path.starts_with("conformance/src/cases"));
    let known: BTreeSet<&str> = sources
        .iter()
        .flat_map(|(_, source)| tests(source))
        .chain(cases.flat_map(|(_, source)| functions(source, "fn ")))
        .chain(python.iter().flat_map(|(_, source)| functions(source, "def ")))
        .collect();
    let mut pages = files(&root().join("gateway-min"), "scenarios.md");
    assert_eq!(pages.len(), 2, "the gateway's and delegation's");
    pages.push(("docs/defects.md".into(), read("docs/defects.md")));
    for (path, page) in &pages {
        let named: Vec<&str> = page.split('`').skip(1).step_by(2).filter(|name| name.contains('_')).collect();
        assert!(named.len() > 100, "{}: {}", path.display(), named.len());
        let missing: Vec<&str> = named.into_iter().filter(|name| !known.contains(name)).collect();
        assert_eq!(missing, [""; 0], "{}", path.display());
    }
}
