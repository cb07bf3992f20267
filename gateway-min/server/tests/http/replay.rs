//! Preparing to run a turn again, and running it.

use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;
use uuid::Uuid;

use crate::support::{ALL, Answer, Gateway, MODES, Setup, id, texts};

const NONE: &str = "unknown";

async fn messages(gateway: &Gateway, thread: &str) -> Vec<Value> {
    gateway.state(thread).await["values"]["messages"].as_array().unwrap().clone()
}

fn id_at(messages: &[Value], at: usize) -> &str {
    messages[at]["id"].as_str().unwrap()
}

async fn regenerate(gateway: &Gateway, thread: &str, message: &str) -> Answer {
    gateway
        .post(&format!("/api/threads/{thread}/runs/regenerate/prepare"), json!({"message_id": message}))
        .await
}

async fn edit(gateway: &Gateway, thread: &str, message: &str, text: &str) -> Answer {
    let body = json!({"human_message_id": message, "replacement_text": text});
    gateway.post(&format!("/api/threads/{thread}/runs/edit-regenerate/prepare"), body).await
}

/// Runs what was prepared.
async fn run(gateway: &Gateway, thread: &str, prepared: &Value) {
    let body = json!({"input": prepared["input"], "checkpoint": prepared["checkpoint"],
        "metadata": prepared["metadata"]});
    gateway.post(&format!("/api/threads/{thread}/runs/wait"), body).await.ok();
}

/// A thread `t` with the turns one and two.
async fn two_turns(setup: Setup) -> Gateway {
    let gateway = setup.start().await;
    gateway.create("t").await;
    gateway.ask("t", "one").await;
    gateway.ask("t", "two").await;
    gateway
}

#[tokio::test]
async fn the_last_answer_is_made_again_in_its_place() {
    for (backend, mode) in ALL {
        for frequency in [1, 2, 10] {
            let gateway = two_turns(Setup { frequency, ..Setup::on(backend, mode) }).await;
            let before = messages(&gateway, "t").await;
            let (head, history) = (gateway.state("t").await, gateway.history("t").await);
            let prepared = regenerate(&gateway, "t", id_at(&before, 3)).await.ok();
            assert_eq!(gateway.history("t").await, history, "nothing is written");
            let base = prepared["checkpoint"]["checkpoint_id"].as_str().unwrap();
            let run_id = head["values"]["messages"][2]["additional_kwargs"]["run_id"].as_str().unwrap();
            assert_eq!(
                prepared["metadata"],
                json!({"regenerate_from_message_id": id_at(&before, 3), "regenerate_from_run_id": run_id,
                       "regenerate_checkpoint_id": base})
            );
            assert_eq!(prepared["target_run_id"], run_id);
            assert_eq!(
                prepared["checkpoint"],
                json!({"checkpoint_ns": "", "checkpoint_id": base, "checkpoint_map": null})
            );
            let mut question = before[2].clone();
            question["additional_kwargs"] = json!({});
            assert_eq!(prepared["input"], json!({"messages": [question], "title": "one"}));
            let state = gateway.get(&format!("/api/threads/t/state/{base}")).await.ok();
            assert_eq!((texts(&state), &state["next"]), (vec!["one", "You said: one"], &json!([])));

            run(&gateway, "t", &prepared).await;
            let gateway = if backend == "memory" { gateway } else { gateway.reopen(mode).await };
            let after = messages(&gateway, "t").await;
            let ids: Vec<&str> = (0..4).map(|at| id_at(&after, at)).collect();
            assert_eq!(after.len(), 4);
            assert_eq!(ids[..3], [id_at(&before, 0), id_at(&before, 1), id_at(&before, 2)]);
            assert_ne!(ids[3], id_at(&before, 3));
            assert!(id(&gateway.state("t").await) > id(&head));
            assert_eq!(gateway.state("t").await["values"]["title"], "one", "sent along with the question");
        }
    }
}

/// Scenario 53: a regenerated answer on a branch replaces the old one.
#[tokio::test]
async fn an_answer_of_a_branch_is_made_again_in_its_place() {
    for (backend, mode) in ALL {
        for frequency in [1, 2, 10, 1000] {
            let gateway = two_turns(Setup { frequency, ..Setup::on(backend, mode) }).await;
            let source = messages(&gateway, "t").await;
            let body = json!({"message_id": id_at(&source, 3)});
            let branch = gateway.post("/api/threads/t/branches", body).await.ok();
            let branch = branch["thread_id"].as_str().unwrap();
            gateway.delete("/api/threads/t").await.ok();
            for _ in 0..2 {
                let before = messages(&gateway, branch).await;
                let prepared = regenerate(&gateway, branch, id_at(&before, 3)).await.ok();
                run(&gateway, branch, &prepared).await;
                let after = messages(&gateway, branch).await;
                assert_eq!(after.len(), 4, "{backend} {mode} {frequency}");
                assert_eq!(id_at(&after, 2), id_at(&source, 2));
                assert_ne!(id_at(&after, 3), id_at(&before, 3));
            }
            let gateway = if backend == "memory" { gateway } else { gateway.reopen(mode).await };
            let after = messages(&gateway, branch).await;
            let prepared = edit(&gateway, branch, id_at(&after, 2), "other").await.ok();
            run(&gateway, branch, &prepared).await;
            let expected = ["one", "You said: one", "other", "You said: other"];
            assert_eq!(texts(&gateway.state(branch).await), expected);
        }
    }
}

#[tokio::test]
async fn an_edited_message_takes_the_place_of_the_turn() {
    for (backend, mode) in ALL {
        let gateway = two_turns(Setup::on(backend, mode)).await;
        let before = messages(&gateway, "t").await;
        let history = gateway.history("t").await;
        let prepared = edit(&gateway, "t", id_at(&before, 2), " better ").await.ok();
        assert_eq!(gateway.history("t").await, history, "nothing is written");
        let question = &prepared["input"]["messages"][0];
        let new = question["id"].as_str().unwrap();
        assert_ne!(new, id_at(&before, 2));
        assert_eq!((&question["content"], &prepared["input"]["title"]), (&json!("better"), &json!("one")));
        let base = &prepared["checkpoint"]["checkpoint_id"];
        let run_id = &before[2]["additional_kwargs"]["run_id"];
        let metadata = json!({
            "regenerate_from_message_id": id_at(&before, 3), "regenerate_from_run_id": run_id,
            "regenerate_checkpoint_id": base, "replacement_human_message_id": new,
            "source_message_ids": [id_at(&before, 2), id_at(&before, 3)], "replay_kind": "edit",
            "edit_from_message_id": id_at(&before, 2), "edit_message_id": new,
            "edit_version_group_id": id_at(&before, 2),
        });
        assert_eq!((&prepared["metadata"], &prepared["target_run_id"]), (&metadata, run_id));
        run(&gateway, "t", &prepared).await;
        assert_eq!(texts(&gateway.state("t").await), ["one", "You said: one", "better", "You said: better"]);
        let again = edit(&gateway, "t", new, "best").await.ok();
        assert_eq!(
            again["metadata"]["edit_version_group_id"],
            id_at(&before, 2),
            "one group for all versions"
        );
        let first = edit(&gateway, "t", id_at(&before, 0), "x").await;
        first.refused(409, "Only the latest completed user turn can be edited");
    }
}

#[tokio::test]
async fn the_first_turn_has_no_title_before_it() {
    for mode in MODES {
        let gateway = Setup::on("memory", mode).start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let before = messages(&gateway, "t").await;
        let edited = edit(&gateway, "t", id_at(&before, 0), "uno").await.ok();
        assert!(edited["input"].get("title").is_none());
        assert_eq!(regenerate(&gateway, "t", id_at(&before, 1)).await.ok()["input"]["title"], "one");
        run(&gateway, "t", &edited).await;
        assert_eq!(texts(&gateway.state("t").await), ["uno", "You said: uno"]);
    }
}

#[tokio::test]
async fn what_cannot_be_made_again_is_refused_and_nothing_is_written() {
    for mode in MODES {
        let script = json!({"rules": [
            {"when": {"contains": ["ask me"]}, "answers": [
                {"tool_calls": [{"name": "ask_clarification", "args": {"question": "Which?"}}]},
            ]},
            {"answers": [{"text": "You said: {{input}}"}]},
        ]});
        let gateway = two_turns(Setup { script, ..Setup::on("sqlite", mode) }).await;
        gateway.create("empty").await;
        let said = messages(&gateway, "t").await;
        let rows = gateway.rows().await;
        let again = async |message: &str| regenerate(&gateway, "t", message).await;
        again(NONE).await.refused(404, "Message unknown not found");
        again(id_at(&said, 2)).await.refused(409, "Only visible assistant messages can be regenerated");
        again(id_at(&said, 1)).await.refused(409, "Only the latest assistant message can be regenerated");
        regenerate(&gateway, "empty", NONE).await.refused(404, "Message unknown not found");
        regenerate(&gateway, "none", NONE).await.refused(404, "Thread none not found");
        again("").await.invalid("string_too_short", &json!(["body", "message_id"]));

        let change = async |message: &str, text: &str| edit(&gateway, "t", message, text).await;
        change(id_at(&said, 2), "  ").await.refused(409, "Edited message cannot be empty");
        edit(&gateway, "none", NONE, "").await.refused(409, "Edited message cannot be empty");
        edit(&gateway, "none", NONE, "x").await.refused(404, "Thread none not found");
        change(NONE, "x").await.refused(404, "Message unknown not found");
        change(id_at(&said, 3), "x").await.refused(409, "Only the latest completed user turn can be edited");
        change(id_at(&said, 2), "two ").await.refused(409, "Edited message is unchanged");
        assert_eq!(gateway.rows().await, rows, "nothing was written");

        gateway.post("/api/threads/t/state", json!({"values": {"goal": {"status": "active"}}})).await.ok();
        change(id_at(&said, 2), "x").await.refused(409, "Cannot edit while a goal is active");
        gateway.post("/api/threads/t/state", json!({"values": {"goal": null}})).await.ok();
        change(id_at(&said, 2), "x").await.ok();

        gateway.ask("t", "ask me").await;
        let said = messages(&gateway, "t").await;
        change(id_at(&said, 4), "x").await.refused(409, "Only completed assistant text turns can be edited");
        let values = json!({"messages": [
            {"type": "ai", "id": "a", "content": "unasked"},
        ]});
        gateway.post("/api/threads/t/state", json!({ "values": values })).await.ok();
        again("a").await.refused(409, "Could not find the user message for this assistant response");
        let values = json!({"messages": [
            {"type": "human", "id": "h", "content": "?"}, {"type": "ai", "id": "a", "content": "!"},
        ]});
        gateway.post("/api/threads/t/state", json!({ "values": values })).await.ok();
        again("a").await.refused(409, "Could not find source run for assistant message");
    }
}

#[tokio::test]
async fn only_successful_runs_are_edited() {
    for mode in MODES {
        let gateway = two_turns(Setup::on("sqlite", mode)).await;
        let said = messages(&gateway, "t").await;
        let run = said[2]["additional_kwargs"]["run_id"].as_str().unwrap().to_owned();
        let gateway = gateway
            .reopen_after(mode, |data| async move {
                let db = crate::support::connect(&data.join("gateway.db"));
                let sql = "UPDATE runs SET status = 'error' WHERE run_id = $1";
                assert_eq!(db.execute(sql, [run]).unwrap(), 1);
            })
            .await;
        let text = "Only successful assistant runs can be edited and rerun";
        edit(&gateway, "t", id_at(&said, 2), "x").await.refused(409, text);
        regenerate(&gateway, "t", id_at(&said, 3)).await.ok();
    }
}

/// Scenario 22: if an ancestor was deleted by hand, nothing is used in its place.
#[tokio::test]
async fn a_lost_ancestor_is_told_and_not_replaced_by_a_guess() {
    for mode in MODES {
        let gateway = two_turns(Setup { frequency: 1, ..Setup::on("sqlite", mode) }).await;
        let said = messages(&gateway, "t").await;
        let prepared = regenerate(&gateway, "t", id_at(&said, 3)).await.ok();
        let base = &prepared["checkpoint"]["checkpoint_id"];
        let history = gateway.history("t").await;
        let next = history.iter().find(|entry| entry["parent_checkpoint"]["checkpoint_id"] == *base).unwrap();
        let lost: Uuid = id(next).parse().unwrap();
        let gateway = gateway
            .reopen_after(mode, |data| async move {
                let db = crate::support::connect(&data.join("checkpoints.db"));
                let sql = "DELETE FROM checkpoint WHERE id = $1";
                assert_eq!(db.execute(sql, [lost.as_bytes().to_vec()]).unwrap(), 1);
            })
            .await;
        let text = "Could not safely resolve the checkpoint before the target user message";
        regenerate(&gateway, "t", id_at(&said, 3)).await.refused(409, text);
        edit(&gateway, "t", id_at(&said, 2), "x").await.refused(409, text);
        assert_eq!(messages(&gateway, "t").await, said, "the conversation itself is whole");
    }
}

#[tokio::test]
async fn the_answer_that_an_interrupted_run_did_not_leave_is_made_again() {
    for mode in MODES {
        let name = format!("replay-{mode}");
        let script = json!({"rules": [
            {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": name}}]},
            {"answers": [{"text": "You said: {{input}}"}]},
        ]});
        let gateway = Setup { script, ..Setup::on("sqlite", mode) }.start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        regenerate(&gateway, "t", "lost").await.refused(404, "Message lost not found");
        let run_id = gateway.start_run("t", "wait").await;
        gate(&name).reached().await;
        let cancel = format!("/api/threads/t/runs/{run_id}/cancel?wait=1");
        assert_eq!(gateway.post(&cancel, json!({})).await.status, 204);
        gate(&name).open();
        let prepared = regenerate(&gateway, "t", "lost").await.ok();
        assert_eq!(prepared["target_run_id"], json!(run_id));
        assert_eq!(prepared["metadata"]["regenerate_from_message_id"], "lost");
        run(&gateway, "t", &prepared).await;
        assert_eq!(texts(&gateway.state("t").await), ["one", "You said: one", "wait", "late"]);
    }
}

#[tokio::test]
async fn a_thread_without_a_base_or_in_the_other_mode_is_refused() {
    for mode in MODES {
        let gateway = Setup::on("sqlite", mode).start().await;
        let question = json!({"input": {"messages": [{"role": "user", "content": "alone"}]}});
        let answer = gateway.post("/api/runs/wait", question).await;
        let place = answer.headers["content-location"].to_str().unwrap().to_owned();
        let alone = place.split('/').nth(3).unwrap();
        let said = messages(&gateway, alone).await;
        let nothing = "Could not find an addressable checkpoint before the target user message";
        regenerate(&gateway, alone, id_at(&said, 1)).await.refused(409, nothing);
        edit(&gateway, alone, id_at(&said, 0), "x").await.refused(409, nothing);
    }
    let gateway = two_turns(Setup::on("sqlite", "delta")).await;
    let said = messages(&gateway, "t").await;
    let gateway = gateway.reopen("full").await;
    let rows = gateway.rows().await;
    regenerate(&gateway, "t", id_at(&said, 3)).await.refused(500, "Failed to read latest checkpoint");
    edit(&gateway, "t", id_at(&said, 2), "x").await.refused(500, "Failed to read latest checkpoint");
    assert_eq!(gateway.rows().await, rows);
}
