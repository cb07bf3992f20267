use super::support::*;
use crate::{CheckpointForm, RecordsOptions};

fn form(mode: &str, frequency: u64) -> CheckpointForm {
    CheckpointForm { mode: mode.to_owned(), frequency }
}

#[tokio::test]
async fn a_process_that_writes_another_form_learns_what_the_others_write() {
    let records = lone(RecordsOptions::default()).await;
    assert_eq!(records.agree_on_form(&form("full", 10)).await.unwrap(), None, "the first one");
    assert_eq!(records.agree_on_form(&form("full", 10)).await.unwrap(), None, "the same");
    // The mode is what the threads have, until they are converted.
    for _ in 0..2 {
        assert_eq!(records.agree_on_form(&form("delta", 10)).await.unwrap(), Some(form("full", 10)));
    }
    records.converted("delta").await.unwrap();
    assert_eq!(records.agree_on_form(&form("delta", 10)).await.unwrap(), None);
    assert_eq!(records.agree_on_form(&form("full", 10)).await.unwrap(), Some(form("delta", 10)));
    // Another frequency harms nobody: it is said once.
    assert_eq!(records.agree_on_form(&form("delta", 3)).await.unwrap(), Some(form("delta", 10)));
    assert_eq!(records.agree_on_form(&form("delta", 3)).await.unwrap(), None);
}
