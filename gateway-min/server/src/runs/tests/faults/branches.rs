//! Branches and copies whose writes fail, or whose rows are in doubt.

use serde_json::json;
use threadkeep::id::ThreadId;

use super::super::{ask, everywhere};
use super::saver::{Fault, lost};
use super::{faulty, goes_on, post};

#[tokio::test]
async fn a_branch_whose_writes_fail_leaves_no_thread_and_its_source_as_it_was() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        gateway.run(ask("second")).await;
        let before = gateway.history().await;
        let messages = before[0].json("messages").unwrap().unwrap();
        let body = json!({"message_id": messages[3]["id"]});
        for k in 1..=2 {
            faults.write(k, Fault::Refused);
            let (status, answer) = post(&gateway, "/api/threads/t/branches", body.clone()).await;
            assert!(!faults.disarm());
            assert_eq!((status, &answer["detail"]), (500, &json!("Failed to create branch")), "{on:?} {k}");
            assert_eq!(
                gateway.app.threads.accessor().saver().threads(None, 9).await.unwrap(),
                [ThreadId::from("t")]
            );
            let (_, found) = post(&gateway, "/api/threads/search", json!({})).await;
            assert_eq!(found.as_array().unwrap().len(), 1);
            assert_eq!(gateway.history().await, before);
        }
        faults.write(3, Fault::Refused);
        let (status, _) = post(&gateway, "/api/threads/t/branches", body).await;
        assert!(faults.disarm(), "two checkpoints, and no more writes");
        assert_eq!(status, 200);
        goes_on(&gateway).await;
    }
}

#[tokio::test]
async fn a_branch_is_refused_with_what_any_of_its_reads_finds_lost() {
    for on in everywhere() {
        let (gateway, faults) = faulty(on, "none").await;
        gateway.run(ask("second")).await;
        let messages = gateway.head().await.unwrap().json("messages").unwrap().unwrap();
        let body = json!({"message_id": messages[3]["id"]});
        let text = json!(lost().to_string());
        for k in 1.. {
            faults.lose(k);
            let (status, answer) = post(&gateway, "/api/threads/t/branches", body.clone()).await;
            if faults.disarm() {
                assert_eq!(status, 200, "{answer}");
                break;
            }
            assert_eq!((status, &answer["detail"]), (409, &text), "{on:?} {k}");
        }
        goes_on(&gateway).await;
    }
}

/// A branch or copy whose row is stored, and whose response was lost, is a thread with its checkpoints.
#[tokio::test]
async fn a_branch_or_copy_whose_row_is_in_doubt_keeps_its_checkpoints() {
    for on in everywhere() {
        let (gateway, _) = faulty(on, "none").await;
        let messages = gateway.head().await.unwrap().json("messages").unwrap().unwrap();
        let branch = json!({"message_id": messages[1]["id"]});
        for (path, body) in [("/api/threads/t/branches", branch), ("/api/threads/t/copy", json!({}))] {
            for k in 1.. {
                gateway.app.records.doubt_commit(k);
                let (status, answer) = post(&gateway, path, body.clone()).await;
                let unused = gateway.app.records.fail_statement(0);
                let (_, found) = post(&gateway, "/api/threads/search", json!({"limit": 100})).await;
                for row in found.as_array().unwrap() {
                    let thread = ThreadId::from(row["thread_id"].as_str().unwrap());
                    let head = gateway.app.threads.accessor().known_head(&thread).await.unwrap();
                    assert!(head.id().is_some(), "{on:?} {path} {k}: {status} {answer}");
                }
                if unused {
                    assert_eq!(status, 200, "{answer}");
                    assert!(k > 2, "the reservation, the row");
                    break;
                }
            }
        }
        goes_on(&gateway).await;
    }
}

/// The same if nothing can be written after that, for as long as somebody tries.
#[tokio::test]
async fn a_branch_whose_row_stays_in_doubt_keeps_its_checkpoints() {
    for statement in 1.. {
        let (gateway, _) = faulty(("memory", "delta"), "none").await;
        let messages = gateway.head().await.unwrap().json("messages").unwrap().unwrap();
        let records = &gateway.app.records;
        // The reservation, and the row.
        records.doubt_commit(2);
        records.fail_from(statement);
        let body = json!({"message_id": messages[1]["id"]});
        let (status, answer) = post(&gateway, "/api/threads/t/branches", body).await;
        let unused = records.fail_statement(0);
        let (_, found) = post(&gateway, "/api/threads/search", json!({"limit": 100})).await;
        for row in found.as_array().unwrap() {
            let thread = ThreadId::from(row["thread_id"].as_str().unwrap());
            let head = gateway.app.threads.accessor().known_head(&thread).await.unwrap();
            assert!(head.id().is_some(), "{statement}: {status} {answer}");
        }
        if unused {
            assert!(statement > 2);
            break;
        }
    }
}
