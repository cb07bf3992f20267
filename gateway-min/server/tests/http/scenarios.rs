//! The page that maps scenarios to tests names only tests that exist.

use std::collections::BTreeSet;
use std::path::Path;

/// The names of all functions in the sources under a directory.
fn functions(dir: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            functions(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let names = text.split("fn ").skip(1).filter_map(|rest| rest.split_once('('));
            found.extend(names.map(|(name, _)| name.to_owned()));
        }
    }
}

#[test]
fn every_scenario_names_tests_that_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let mut found = BTreeSet::new();
    for part in ["gateway-min", "engine", "conformance/src"] {
        functions(&root.join(part), &mut found);
    }
    let page = include_str!("../scenarios.md");
    let named: Vec<&str> = page.split('`').skip(1).step_by(2).filter(|name| name.contains('_')).collect();
    assert!(named.len() > 150, "{}", named.len());
    let missing: Vec<&str> = named.into_iter().filter(|name| !found.contains(*name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
