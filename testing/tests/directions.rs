//! The arrows between the crates of the workspace point one way. A new edge fails here: add it to the table if it keeps
//! the direction, else move what is shared into the lower crate.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value as Json;

/// Each crate, without `threadkeep-`, and the crates of the workspace that it may use outside its tests. A crate may use
/// only those above it in this table, so there is no cycle.
const EDGES: &[(&str, &[&str])] = &[
    ("engine", &[]),
    ("layout", &["engine"]),
    ("pages", &[]),
    ("memory", &["engine"]),
    ("redis", &["engine"]),
    ("sqlite", &["engine", "layout", "pages"]),
    ("postgres", &["engine", "layout"]),
    ("kv", &["engine", "layout"]),
    ("redb", &["engine", "kv"]),
    ("testing", &[]),
    ("conformance", &["engine", "kv", "memory", "pages", "postgres", "sqlite", "testing"]),
    ("torture", &["conformance", "engine", "memory", "pages", "postgres", "sqlite", "testing"]),
    ("langgraph", &["engine"]),
    ("python", &["engine", "langgraph", "memory", "postgres", "sqlite"]),
    ("files", &[]),
    ("config", &["files"]),
    ("records", &["engine", "files"]),
    ("storage", &["config", "engine", "files", "memory", "postgres", "records", "redis", "sqlite"]),
    ("processes", &["config"]),
    ("agent", &["config", "engine", "files", "processes"]),
    ("subagents", &["agent", "config", "engine", "files", "processes", "records"]),
    ("acp", &["agent", "config", "files", "processes"]),
    ("mcp", &["agent", "config", "processes"]),
    (
        "benches",
        &["agent", "config", "engine", "memory", "postgres", "records", "sqlite", "subagents", "testing"],
    ),
    ("ops", &["config", "engine", "files", "records", "storage", "subagents"]),
    ("chat", &["acp", "agent", "config", "engine", "mcp", "processes", "records", "storage", "subagents"]),
    ("page", &[]),
    (
        "gateway",
        &[
            "acp",
            "agent",
            "chat",
            "config",
            "engine",
            "files",
            "mcp",
            "ops",
            "page",
            "processes",
            "records",
            "storage",
            "subagents",
        ],
    ),
];

/// The crates of the workspace that each one uses: outside its tests, and in them.
fn edges() -> BTreeMap<String, (BTreeSet<String>, BTreeSet<String>)> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("Cargo.toml");
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline", "--manifest-path"])
        .arg(manifest)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Json = serde_json::from_slice(&output.stdout).unwrap();
    let short = |name: &Json| {
        let name = name.as_str().unwrap();
        name.strip_prefix("threadkeep-")
            .unwrap_or(if name == "threadkeep" { "engine" } else { name })
            .to_owned()
    };
    let mut edges = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let (mut normal, mut of_tests) = (BTreeSet::new(), BTreeSet::new());
        for dependency in package["dependencies"].as_array().unwrap() {
            if dependency["path"].is_string() {
                let to = if dependency["kind"] == "dev" { &mut of_tests } else { &mut normal };
                to.insert(short(&dependency["name"]));
            }
        }
        edges.insert(short(&package["name"]), (normal, of_tests));
    }
    edges
}

#[test]
fn a_crate_uses_only_the_crates_that_the_table_allows() {
    let found: BTreeMap<String, BTreeSet<String>> =
        edges().into_iter().map(|(name, (normal, _))| (name, normal)).collect();
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let allowed: BTreeMap<String, BTreeSet<String>> =
        EDGES.iter().map(|(name, uses)| ((*name).to_owned(), set(uses))).collect();
    assert_eq!(found, allowed, "the crates' manifests on the left, the table on the right");
}

#[test]
fn the_table_has_no_cycle_and_keeps_the_direction() {
    const DRIVERS: [&str; 5] = ["memory", "sqlite", "postgres", "redb", "redis"];
    let mut above = BTreeSet::new();
    for (name, uses) in EDGES {
        let later: Vec<_> = uses.iter().filter(|other| !above.contains(*other)).collect();
        assert!(later.is_empty(), "{name} uses {later:?}, which are not above it");
        assert!(above.insert(*name), "{name} is in the table twice");
    }
    for (name, uses) in EDGES {
        let drivers: Vec<_> = uses.iter().filter(|other| DRIVERS.contains(other)).collect();
        match *name {
            "engine" | "langgraph" | "files" | "config" | "records" | "agent" | "ops" | "chat" | "page"
            | "gateway" => {
                assert!(drivers.is_empty(), "{name} knows {drivers:?}; only storage chooses a driver");
            }
            name if DRIVERS.contains(&name) => assert!(drivers.is_empty(), "{name} knows {drivers:?}"),
            _ => {}
        }
    }
}

#[test]
fn no_crate_ships_what_is_for_tests() {
    const FOR_TESTS: [&str; 3] = ["testing", "torture", "benches"];
    for (name, (normal, _)) in edges() {
        // The suite's own command starts servers.
        if FOR_TESTS.contains(&name.as_str()) || name == "conformance" {
            continue;
        }
        let used: Vec<_> = normal.iter().filter(|other| FOR_TESTS.contains(&other.as_str())).collect();
        assert!(used.is_empty(), "{name} ships {used:?}");
    }
}

/// The code of a source file that ships: without its tests.
fn shipped(source: &str) -> &str {
    source.split("#[cfg(test)]\nmod tests {").next().unwrap()
}

/// What `use crate::...` and `crate::...` in this code name first.
fn modules_used(code: &str) -> BTreeSet<String> {
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let named = lines.flat_map(|line| line.split("crate::").skip(1).map(str::to_owned).collect::<Vec<_>>());
    let word = |rest: String| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    named.map(word).collect()
}

/// The top-level modules of a crate, each with those that it uses.
fn modules(source: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut paths = vec![source.to_owned()];
    while let Some(path) = paths.pop() {
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() {
            if name != "tests" {
                paths.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            }
        } else if path.extension() == Some("rs".as_ref())
            && !["tests.rs", "lib.rs", "main.rs", "fuzzing.rs"].contains(&name)
        {
            let first = path.strip_prefix(source).unwrap().components().next().unwrap();
            let module = first.as_os_str().to_str().unwrap().trim_end_matches(".rs").to_owned();
            let used = modules_used(shipped(&fs::read_to_string(&path).unwrap()));
            found.entry(module).or_default().extend(used);
        }
    }
    let names: BTreeSet<String> = found.keys().cloned().collect();
    for (module, used) in &mut found {
        used.retain(|other| other != module && names.contains(other));
    }
    found
}

/// Runs know nothing of HTTP, and nothing that the application puts together knows the application.
#[test]
fn the_modules_of_the_gateway_form_no_cycle() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("gateway-min/server/src");
    let mut left = modules(&source);
    assert!(left["http"].contains("app") && left["app"].contains("runs"), "{left:?}");
    while let Some(free) = left
        .iter()
        .find(|(_, used)| used.iter().all(|other| !left.contains_key(other)))
        .map(|(name, _)| name.clone())
    {
        left.remove(&free);
    }
    assert!(left.is_empty(), "these modules use each other, or what does: {left:#?}");
}
