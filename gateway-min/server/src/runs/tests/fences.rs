//! A run that stood still while another process took over its thread: what that one acknowledged stays, whatever the
//! run still writes.

use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use serde_json::{Map, json};
use threadkeep::id::{IdSource, ThreadId};
use threadkeep::state::{StateAccessor, StateSnapshot, Update};
use threadkeep_agent::model::scripted::gate;
use tower::ServiceExt as _;

use super::{Gateway, MODES, ask, everywhere, from, gated};
use crate::runs::admission::{EDIT, REPLAY_KIND};
use threadkeep_records::{CancelAction, RunStatus};

/// A turn of another process, which took the gateway's run for lost.
async fn turn_elsewhere(gateway: &Gateway, text: &str) -> StateSnapshot {
    let here = gateway.app.threads.accessor();
    let table = Arc::new(here.table().clone());
    let there = StateAccessor::new(Arc::clone(here.saver()), table, Arc::new(IdSource::default()));
    let message = json!([{"type": "human", "content": text, "id": text}]);
    let writes = vec![there.write("messages", message, false).unwrap()];
    let update = Update { at: None, node: "n".into(), writes, extra: Map::new() };
    there.update(&ThreadId::from("t"), update).await.unwrap()
}

async fn assert_kept(gateway: &Gateway, acknowledged: &StateSnapshot, what: &str) {
    let head = gateway.head().await.expect(what);
    assert_eq!(head.key, acknowledged.key, "{what}");
    assert_eq!(head.values().unwrap(), acknowledged.values().unwrap(), "{what}");
}

#[tokio::test]
async fn no_end_of_a_run_undoes_what_another_process_acknowledged() {
    for on @ (saver, mode) in everywhere() {
        for (first, edits, action) in [
            (true, false, CancelAction::Rollback),
            (false, false, CancelAction::Rollback),
            (true, true, CancelAction::Interrupt),
            (false, true, CancelAction::Interrupt),
            (true, false, CancelAction::Interrupt),
        ] {
            let what = format!("fence-{saver}-{mode}-{first}-{edits}-{action:?}");
            let gateway = Gateway::start_on(on, &gated(&what)).await;
            if !first {
                gateway.run(ask("before")).await;
            }
            let mut request = ask("wait");
            if edits {
                request.metadata.insert(REPLAY_KIND.to_owned(), EDIT.into());
            }
            let created = gateway.create(request).await.unwrap();
            gate(&what).reached().await;
            while gateway.head().await.is_none_or(|head| head.next.is_empty()) {
                tokio::task::yield_now().await;
            }
            let acknowledged = turn_elsewhere(&gateway, "acknowledged").await;
            gateway.app.runs.cancel(&created.run.run_id, action).await.unwrap();
            let row = gateway.row(&created.run.run_id).await;
            assert_eq!(row.status, RunStatus::Interrupted, "{what}");
            assert_kept(&gateway, &acknowledged, &what).await;
        }
    }
}

#[tokio::test]
async fn a_run_that_goes_on_beside_another_process_fails_and_leaves_its_turn() {
    for mode in MODES {
        for older in [false, true] {
            let name = format!("fence-goes-on-{mode}-{older}");
            let gateway = Gateway::start(mode, &gated(&name)).await;
            gateway.run(ask("one")).await;
            let selected = gateway.head().await.unwrap();
            gateway.run(ask("two")).await;
            let request = if older { from(&selected, ask("wait")) } else { ask("wait") };
            let created = gateway.create(request).await.unwrap();
            gate(&name).reached().await;
            while gateway.head().await.is_none_or(|head| head.next.is_empty()) {
                tokio::task::yield_now().await;
            }
            let acknowledged = turn_elsewhere(&gateway, "acknowledged").await;
            gate(&name).open();
            let row = gateway.row(&created.run.run_id).await;
            assert_eq!(row.status, RunStatus::Error, "{mode}");
            assert!(row.error.unwrap().contains("read the head again"), "{mode}");
            assert_kept(&gateway, &acknowledged, mode).await;
        }
    }
}

#[tokio::test]
async fn a_compaction_leaves_the_turn_that_came_while_the_model_wrote_the_summary() {
    for mode in MODES {
        let name = format!("fence-compact-{mode}");
        let gateway = Gateway::start(mode, &gated(&name)).await;
        gateway.configure("summarization", &json!({"enabled": true}));
        for text in ["wait", "second", "third", "fourth"] {
            turn_elsewhere(&gateway, text).await;
        }
        let body = json!({"keep": {"type": "messages", "value": 2}}).to_string();
        let request = Request::post("/api/threads/t/compact").header("content-type", "application/json");
        let router = crate::http::router(Arc::clone(&gateway.app));
        let answer = tokio::spawn(router.oneshot(request.body(Body::from(body)).unwrap()));
        gate(&name).reached().await;
        let acknowledged = turn_elsewhere(&gateway, "acknowledged").await;
        gate(&name).open();
        assert_eq!(answer.await.unwrap().unwrap().status(), 409, "{mode}");
        assert_kept(&gateway, &acknowledged, mode).await;
    }
}
