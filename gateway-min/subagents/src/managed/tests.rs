use std::path::Path;

use proptest::prelude::*;
use threadkeep_records::{Records, RecordsOptions};

use super::*;

/// A store of each kind; the directory holds the files.
async fn stores(directory: &Path) -> Vec<(&'static str, Box<dyn ManagedStore>)> {
    let records = Records::open_memory(RecordsOptions::default()).await.unwrap();
    vec![
        ("file", Box::new(FileStore::new(directory)) as Box<dyn ManagedStore>),
        ("db", Box::new(DbStore::new(records.subagents()))),
    ]
}

async fn contents(store: &dyn ManagedStore) -> Vec<(String, Vec<u8>)> {
    let documents = store.documents().await.unwrap().into_iter();
    let mut contents: Vec<_> = documents.map(|document| (document.name, document.content.unwrap())).collect();
    contents.sort();
    contents
}

#[tokio::test]
async fn s73_files_and_rows_behave_alike() {
    let directory = tempfile::tempdir().unwrap();
    for (kind, store) in stores(directory.path()).await {
        assert!(contents(&*store).await.is_empty(), "{kind}");
        assert!(!store.remove("a").await.unwrap());
        assert_eq!(store.replace("a", b"", b"1").await.unwrap(), Replaced::Missing);
        assert!(store.insert("b", b"{}").await.unwrap());
        assert!(store.insert("a", b"1").await.unwrap());
        assert!(!store.insert("a", b"2").await.unwrap());
        assert_eq!(store.replace("a", b"2", b"3").await.unwrap(), Replaced::Changed);
        assert_eq!(store.replace("a", b"1", b"3").await.unwrap(), Replaced::Done);
        let pair = |name: &str, content: &str| (name.to_owned(), content.as_bytes().to_vec());
        assert_eq!(contents(&*store).await, [pair("a", "3"), pair("b", "{}")], "{kind}");
        assert!(store.remove("b").await.unwrap());
        assert_eq!(contents(&*store).await, [pair("a", "3")], "{kind}");
    }
}

#[tokio::test]
async fn a_name_never_leads_out_of_the_directory() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("keys.json"), "secret").unwrap();
    let store = FileStore::new(directory.path());
    for name in ["../keys", "/etc/x", "a/b", ".", "", "a.b", "a\0"] {
        assert!(store.insert(name, b"{}").await.is_err(), "{name:?}");
        assert!(store.replace(name, b"secret", b"{}").await.is_err(), "{name:?}");
        assert!(store.remove(name).await.is_err(), "{name:?}");
    }
    assert_eq!(std::fs::read_to_string(directory.path().join("keys.json")).unwrap(), "secret");
}

#[cfg(unix)]
#[tokio::test]
async fn files_are_their_owners_alone_and_one_that_cannot_be_read_is_reported() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().unwrap();
    let store = FileStore::new(directory.path());
    store.insert("a", b"{}").await.unwrap();
    store.replace("a", b"{}", b"[]").await.unwrap();
    let mode =
        |path: &str| std::fs::metadata(directory.path().join(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("subagents"), mode("subagents/a.json")), (0o700, 0o600));
    // A directory has the name of a file. Other files are somebody else's.
    std::fs::create_dir(directory.path().join("subagents/b.json")).unwrap();
    std::fs::write(directory.path().join("subagents/notes.txt"), "").unwrap();
    let documents = store.documents().await.unwrap();
    let unreadable: Vec<&str> = documents
        .iter()
        .filter(|document| document.content.is_err())
        .map(|document| document.name.as_str())
        .collect();
    assert_eq!((documents.len(), unreadable), (2, vec!["b"]));
}

#[test]
fn what_is_not_stored_has_its_default() {
    let document = |content: &str| Document { name: "a".to_owned(), content: Ok(content.into()) };
    let short = r#"{"name": "a", "description": "d", "system_prompt": "p"}"#;
    assert_eq!(Managed::of_document(&document(short)), Ok(Managed::new("a", "d", "p")));
    for (wrong, problem) in [
        (r#"{"name": "b", "description": "d", "system_prompt": "p"}"#, "name of another"),
        (r#"{"name": "a", "description": " ", "system_prompt": "p"}"#, "blank"),
        (r#"{"name": "a", "description": "d", "system_prompt": "p", "max_turns": 0}"#, "at least 1"),
        (r#"{"name": "a", "description": "d", "system_prompt": "p", "max_turns": true}"#, "invalid type"),
        (r#"{"name": "a", "description": "d"}"#, "system_prompt"),
        ("\u{feff}", "expected value"),
    ] {
        let found = Managed::of_document(&document(wrong)).unwrap_err();
        assert!(found.contains(problem), "{wrong}: {found}");
    }
    let capitals = Document { name: "A".to_owned(), content: Ok(short.replace("\"a\"", "\"A\"").into()) };
    assert!(Managed::of_document(&capitals).unwrap_err().contains("lowercase"));
}

#[test]
fn keys_that_nothing_reads_are_named() {
    let written = br#"{"name": "a", "description": "d", "system_prompt": "p", "disalowed_tools": ["bash"], "max_turn": 5}"#;
    let document = Document { name: "a".to_owned(), content: Ok(written.to_vec()) };
    let managed = Managed::of_document(&document).unwrap();
    assert_eq!(managed.unknown_keys(&document), ["disalowed_tools", "max_turn"]);
    let own = Document { content: Ok(managed.to_document()), ..document };
    assert_eq!(managed.unknown_keys(&own), [""; 0]);
}

fn managed() -> impl Strategy<Value = Managed> {
    let texts = || prop::collection::vec("[a-z_]{1,8}", 0..4);
    (
        ("[a-z0-9-]{1,64}", prop::option::of(".{1,9}"), "[^ ].{0,20}", "[^ ].{0,20}"),
        (prop::option::of(texts()), texts(), prop::option::of(texts()), "inherit|[a-z]{1,9}"),
        (1..u32::MAX, 1..u64::MAX, any::<bool>()),
    )
        .prop_map(|((name, display_name, description, system_prompt), lists, limits)| {
            let (tools, disallowed_tools, skills, model) = lists;
            let (max_turns, timeout_seconds, enabled) = limits;
            Managed {
                name,
                display_name,
                description,
                system_prompt,
                tools,
                disallowed_tools,
                skills,
                model: model.into(),
                max_turns,
                timeout_seconds,
                enabled,
            }
        })
        .prop_filter("blank", |one| {
            !one.description.trim().is_empty() && !one.system_prompt.trim().is_empty()
        })
}

proptest! {
    #[test]
    fn a_stored_definition_is_read_as_it_was(one in managed()) {
        let document = Document { name: one.name.clone(), content: Ok(one.to_document()) };
        prop_assert_eq!(Managed::of_document(&document), Ok(one));
    }
}
