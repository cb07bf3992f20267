//! The title of a thread whose first turn was interrupted or failed, so that lists do not show it without a name.
//!
//! An ordinary checkpoint on the head: the channel `title` gets a new version, and the next nodes, the rows of finished
//! tasks and the maps of durations are kept. The title is the local one, because a run that has ended calls no model.

use serde_json::{Value as Json, json};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::CheckpointId;
use threadkeep::metadata::Source;
use threadkeep::state::{KnownHead, StateAccessor};
use threadkeep::step::{Durability, StepWriter};
use threadkeep_agent::{duration, title};

use threadkeep_config::Title;

/// The node recorded as the writer of the title.
const TITLE_NODE: &str = "runtime_interrupt_title";

/// Gives the thread its title, if it is in its first exchange and has no title yet, and returns the checkpoint with it.
/// `head` is the one that the run wrote last.
///
/// # Errors
/// [`threadkeep::Error::Conflict`] if another writer moved the head, and the accessor's.
pub(crate) async fn write(
    accessor: &StateAccessor,
    head: KnownHead,
    run_id: &str,
    config: &Title,
) -> threadkeep::Result<Option<CheckpointId>> {
    let mut writer = StepWriter::open_known(accessor, head, None).await?;
    let Some(head) = writer.state().cloned() else { return Ok(None) };
    let titled = head.json("title")?.is_some_and(|title| !title.is_null());
    let messages = head.json(MESSAGES_CHANNEL)?.unwrap_or_default();
    let messages = messages.as_array().map_or(&[][..], Vec::as_slice);
    if !config.enabled || titled || !title::is_first_exchange(messages) {
        return Ok(None);
    }
    let title = Json::from(title::local(config, messages));
    let mut extra = head.metadata.extra.clone();
    duration::newest_maps(&**accessor.saver(), &head.key, &extra).await?.carry_to(&mut extra);
    // The run may have written nothing before.
    extra.insert("run_id".to_owned(), run_id.into());
    extra.insert("writes".to_owned(), json!({ TITLE_NODE: { "title": title } }));
    let task = writer.start_task(&TITLE_NODE.into(), 0);
    let writes = vec![writer.write("title", title, false)?];
    writer.finish_task(task, writes, Durability::WithCommit).await?;
    writer.begin_with(head.writes);
    let state = writer.commit(Source::Update, head.next, extra).await?;
    Ok(Some(state.key.id))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::Map;
    use threadkeep::id::ThreadId;
    use threadkeep::state::StateSnapshot;

    use super::super::request::{RunInput, RunRequest};
    use super::super::tests::{Gateway, ask};
    use super::*;
    use threadkeep_agent::duration::RunNotes;
    use threadkeep_agent::model::scripted::gate;
    use threadkeep_records::{CancelAction, RunStatus};

    fn script(gate: &str) -> Json {
        let waits = "until [ -e go ]; do sleep 0.01; done; echo slow";
        json!({"rules": [
            {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": gate}}]},
            {"when": {"contains": ["tools"]}, "answers": [
                {"tool_calls": [
                    {"name": "bash", "id": "slow", "args": {"command": waits}},
                    {"name": "bash", "id": "fast", "args": {"command": "echo once >> log"}},
                ]},
                {"text": "done"},
            ]},
            {"answers": [{"text": "You said: {{input}}"}]},
        ]})
    }

    async fn head(gateway: &Gateway) -> StateSnapshot {
        gateway.head().await.unwrap()
    }

    /// Runs until the gate and cancels there.
    async fn interrupted(gateway: &Gateway, name: &str, action: CancelAction) -> RunStatus {
        let created = gateway.create(ask("wait for it")).await.unwrap();
        gate(name).reached().await;
        // An earlier run may have reached the gate: until this one's input is there.
        while head(gateway).await.next.is_empty() {
            tokio::task::yield_now().await;
        }
        gateway.app.runs.cancel(&created.run.run_id, action).await.unwrap();
        gateway.row(&created.run.run_id).await.status
    }

    #[tokio::test]
    async fn the_title_is_a_new_version_on_a_checkpoint_that_goes_on_with_the_same_node_and_maps() {
        for mode in ["full", "delta"] {
            let name = format!("title-{mode}");
            let gateway = Gateway::start(mode, &script(&name)).await;
            let (accessor, thread) = (gateway.app.threads.accessor(), ThreadId::from("t"));
            accessor.create(&thread, Map::new()).await.unwrap();
            let notes = RunNotes { durations: [("r0".to_owned(), 7)].into(), messages: BTreeMap::new() };
            duration::note(accessor, &thread, None, &notes).await.unwrap();
            assert_eq!(interrupted(&gateway, &name, CancelAction::Interrupt).await, RunStatus::Interrupted);

            let (head, history) = (head(&gateway).await, gateway.history().await);
            let before = &history[1];
            assert_eq!((head.parent, head.metadata.step), (Some(before.key.id), before.metadata.step + 1));
            assert_eq!(head.json("title").unwrap(), Some(json!("wait for it")));
            assert!(before.version("title").is_none() && head.version("title").is_some());
            assert_eq!(head.version("messages"), before.version("messages"));
            assert_eq!((&head.next, head.next.len()), (&before.next, 1));
            assert_eq!(head.json("messages").unwrap(), before.json("messages").unwrap());
            let extra = &head.metadata.extra;
            assert_eq!(extra["writes"], json!({"runtime_interrupt_title": {"title": "wait for it"}}));
            assert_eq!(extra["run_durations"], json!({"r0": 7}));
            assert_eq!(extra["run_id"], before.metadata.extra["run_id"]);
            assert!(!head.metadata.is_duration_only());
            assert_eq!(head.metadata.delta_marker, mode == "delta");

            gate(&name).open();
            let go_on = RunRequest { input: RunInput::Continue, ..ask("") };
            let (_, row) = gateway.run(go_on).await;
            assert_eq!(row.status, RunStatus::Success);
            let messages = self::head(&gateway).await.json("messages").unwrap().unwrap();
            assert_eq!(messages[1]["content"], "late", "{mode}");
        }
    }

    #[tokio::test]
    async fn a_task_that_had_finished_is_not_run_again_for_the_title() {
        for mode in ["full", "delta"] {
            let gateway = Gateway::start(mode, &script("none")).await;
            let created = gateway.create(ask("two tools")).await.unwrap();
            let one_finished = async {
                while gateway.head().await.is_none_or(|head| head.writes.is_empty() || head.next.len() != 2) {
                    tokio::task::yield_now().await;
                }
            };
            tokio::time::timeout(std::time::Duration::from_mins(10), one_finished).await.unwrap();
            let rows = head(&gateway).await.writes;
            gateway.app.runs.cancel(&created.run.run_id, CancelAction::Interrupt).await.unwrap();
            gateway.row(&created.run.run_id).await;
            let titled = head(&gateway).await;
            assert_eq!(titled.json("title").unwrap(), Some(json!("two tools")));
            assert_eq!(titled.writes, rows, "{mode}");

            let dir = gateway.app.agents.thread_dir("t");
            std::fs::write(dir.join("go"), "").unwrap();
            gateway.run(RunRequest { input: RunInput::Continue, ..ask("") }).await;
            assert_eq!(std::fs::read_to_string(dir.join("log")).unwrap(), "once\n");
            let messages = head(&gateway).await.json("messages").unwrap().unwrap();
            let calls: Vec<&str> =
                messages.as_array().unwrap().iter().filter_map(|m| m["tool_call_id"].as_str()).collect();
            assert_eq!((calls, &messages[4]["content"]), (vec!["slow", "fast"], &json!("done")));
        }
    }

    #[tokio::test]
    async fn only_an_untitled_first_turn_gets_one_and_a_rolled_back_one_does_not() {
        for mode in ["full", "delta"] {
            let name = format!("no-title-{mode}");
            let gateway = Gateway::start(mode, &script(&name)).await;
            let accessor = gateway.app.threads.accessor();
            accessor.create(&ThreadId::from("t"), Map::new()).await.unwrap();
            assert_eq!(interrupted(&gateway, &name, CancelAction::Rollback).await, RunStatus::Error);
            assert_eq!(head(&gateway).await.json("title").unwrap(), None);
            gateway.run(ask("hello")).await;
            let answered = gateway.history().await.len();
            assert_eq!(interrupted(&gateway, &name, CancelAction::Interrupt).await, RunStatus::Interrupted);
            assert_eq!(gateway.history().await.len(), answered + 1, "the input, and no title");
            assert_eq!(head(&gateway).await.json("title").unwrap(), Some(json!("hello")));

            let off = Title { enabled: false, ..Title::default() };
            let thread = ThreadId::from("other");
            let human = json!([{"type": "human", "content": "hi", "id": "h"}]);
            let writes = vec![accessor.write("messages", human, false).unwrap()];
            let update = threadkeep::state::Update { at: None, node: "n".into(), writes, extra: Map::new() };
            accessor.update(&thread, update).await.unwrap();
            let known = async || accessor.known_head(&thread).await.unwrap();
            write(accessor, known().await, "r", &off).await.unwrap();
            assert_eq!(accessor.get(&thread, None).await.unwrap().unwrap().json("title").unwrap(), None);
            write(accessor, known().await, "r", &Title::default()).await.unwrap();
            write(accessor, known().await, "r", &Title::default()).await.unwrap();
            let query = threadkeep::state::HistoryQuery::default();
            let history = accessor.history(&thread, query).await.unwrap();
            assert_eq!(history.len(), 2, "once");
            assert_eq!(history[0].metadata.extra["run_id"], "r", "also if the run wrote nothing before");
        }
    }
}
