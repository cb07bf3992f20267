//! Handlers and workers move the futures of the records between threads.

use chrono::TimeDelta;

use super::support::*;
use crate::*;

fn is_send(_: impl Future + Send) {}

#[tokio::test]
async fn every_future_is_send() {
    let fixture = fixture().await;
    let records = &fixture.records;
    is_send(Records::open(fixture.place.path(), RecordsOptions::default()));
    is_send(Records::open_memory(RecordsOptions::default()));
    is_send(records.close());

    let threads = records.threads();
    is_send(threads.create(NewThread::default()));
    is_send(threads.get("t", None));
    is_send(threads.owner("t"));
    is_send(threads.search(&ThreadQuery::default()));
    is_send(threads.patch_metadata("t", None, JsonObject::new()));
    is_send(threads.set_status("t", ThreadStatus::Idle));
    is_send(threads.set_display_name("t", None, None));

    let runs = records.runs();
    is_send(runs.admit(NewRun::default(), MultitaskStrategy::Reject));
    is_send(runs.start("r"));
    is_send(runs.progress("r", &RunTotals::default()));
    is_send(runs.request_cancel("r", CancelAction::Interrupt));
    is_send(runs.finish("r", &end(RunStatus::Success)));
    is_send(runs.get("r"));
    is_send(runs.get_by_idempotency_key("k"));
    is_send(runs.list_by_thread("t", &RunQuery { status: None, limit: 1, offset: 0 }));
    is_send(runs.active_for_thread("t"));
    is_send(runs.recover_orphans(fixture.clock.now(), TimeDelta::zero()));
    is_send(runs.reserve("t", WriterKind::Delete));
    is_send(records.delete_thread(runs.reserve("t", WriterKind::Delete).await.unwrap()));
    is_send(runs.reserve("u", WriterKind::Delete).await.unwrap().release());

    let events = records.events();
    is_send(events.append("t", "r", vec![]));
    is_send(events.append_if_absent("t", "r", NewEvent::new("a", "b", serde_json::Value::Null)));
    is_send(events.seed("t", vec![]));
    is_send(events.list(&EventQuery::new("t", "r")));
    is_send(events.count_messages("t"));
}
