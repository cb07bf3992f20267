use super::support::*;
use crate::{CheckpointForm, RecordsOptions};

fn form(mode: &str, frequency: u64) -> CheckpointForm {
    CheckpointForm { mode: mode.to_owned(), frequency }
}

#[tokio::test]
async fn a_process_that_writes_another_form_learns_at_each_start_what_the_first_one_wrote() {
    let records = lone(RecordsOptions::default()).await;
    assert_eq!(records.agree_on_form(&form("full", 10)).await.unwrap(), None, "the first one");
    assert_eq!(records.agree_on_form(&form("full", 10)).await.unwrap(), None, "the same");
    for _ in 0..2 {
        for other in [form("delta", 10), form("full", 3), form("delta", 3)] {
            assert_eq!(records.agree_on_form(&other).await.unwrap(), Some(form("full", 10)));
        }
    }
    assert_eq!(records.agree_on_form(&form("full", 10)).await.unwrap(), None, "nobody has changed it");
    records.remember_form("delta", None).await.unwrap();
    assert_eq!(records.agree_on_form(&form("delta", 10)).await.unwrap(), None);
    assert_eq!(records.agree_on_form(&form("full", 10)).await.unwrap(), Some(form("delta", 10)));
    records.remember_form("delta", Some(3)).await.unwrap();
    assert_eq!(records.agree_on_form(&form("delta", 3)).await.unwrap(), None);
    assert_eq!(records.agree_on_form(&form("delta", 10)).await.unwrap(), Some(form("delta", 3)));
}

/// None of them finds that nothing is remembered, and overwrites what another one has remembered meanwhile.
#[tokio::test]
async fn of_processes_that_start_at_once_on_a_new_database_one_is_remembered() {
    let records = lone(RecordsOptions::default()).await;
    let forms = [form("full", 10), form("delta", 3), form("delta", 10)];
    let found = futures::future::join_all(forms.iter().map(|form| records.agree_on_form(form))).await;
    let agreeing: Vec<_> = forms.iter().zip(&found).filter(|(_, found)| matches!(found, Ok(None))).collect();
    let [(remembered, _)] = agreeing[..] else { panic!("{found:?}") };
    for found in &found {
        assert!(
            matches!(found, Ok(None)) || found.as_ref().unwrap().as_ref() == Some(remembered),
            "{found:?}"
        );
    }
}
