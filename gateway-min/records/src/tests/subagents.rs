use super::support::*;
use crate::{RecordsOptions, ReplaceOutcome};

#[tokio::test]
async fn definitions_are_stored_replaced_and_removed_by_name() {
    let records = lone(RecordsOptions::default()).await;
    let subagents = records.subagents();
    assert_eq!(subagents.all().await.unwrap(), []);
    assert!(subagents.insert("b", "{\"x\": \"\\u0000\u{e9}\"}").await.unwrap());
    assert!(subagents.insert("a", "1").await.unwrap());
    assert!(!subagents.insert("a", "2").await.unwrap());
    let pair = |name: &str, definition: &str| (name.to_owned(), definition.to_owned());
    let b = pair("b", "{\"x\": \"\\u0000\u{e9}\"}");
    assert_eq!(subagents.all().await.unwrap(), [pair("a", "1"), b.clone()]);
    for (name, old, new, outcome) in [
        ("a", "0", "3", ReplaceOutcome::Changed),
        ("a", "1", "3", ReplaceOutcome::Replaced),
        ("a", "1", "4", ReplaceOutcome::Changed),
        ("c", "1", "4", ReplaceOutcome::Missing),
    ] {
        assert_eq!(subagents.replace(name, old, new).await.unwrap(), outcome, "{name} {old} {new}");
    }
    assert_eq!(subagents.all().await.unwrap(), [pair("a", "3"), b.clone()]);
    assert!(subagents.remove("a").await.unwrap());
    assert!(!subagents.remove("a").await.unwrap());
    assert_eq!(subagents.all().await.unwrap(), [b]);
}
