//! Backups of a gateway's stores while its clients take turns, and the copy that another gateway serves.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value as Json, json};
use threadkeep_testing::unconfigured;
use tokio::task::JoinHandle;

use super::{Gateway, configured, texts};

/// How many clients take turns, each on a thread of its own.
const CLIENTS: usize = 4;
const ROUNDS: usize = 5;

/// What a command prints, which must succeed.
fn done(dir: &Path, arguments: &[&str]) -> String {
    let mut command = unconfigured(env!("CARGO_BIN_EXE_threadkeep"));
    let output =
        command.current_dir(dir).args(arguments).env("SVC_HOME", dir.join("state")).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Takes a turn, whose answer says that it is stored.
async fn take_turn(gateway: &Gateway, thread: &str, text: &str) -> Json {
    let input = json!({"messages": [{"role": "user", "content": text}]});
    let path = format!("/api/threads/{thread}/runs/wait");
    let (status, values) = gateway.post(&path, json!({ "input": input })).await;
    assert!(status == 200 && values.get("status").is_none(), "{status}: {values}");
    values
}

/// The number of turns of each client that were acknowledged, once each has taken one after `before`.
async fn after_another(
    turns: &[AtomicUsize; CLIENTS],
    before: [usize; CLIENTS],
    clients: &[JoinHandle<()>],
) -> [usize; CLIENTS] {
    let gone_on = async {
        loop {
            let now: [usize; CLIENTS] = std::array::from_fn(|client| turns[client].load(Ordering::SeqCst));
            if now.iter().zip(before).all(|(now, before)| *now > before) {
                return now;
            }
            assert!(clients.iter().all(|client| !client.is_finished()), "a client has failed");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), gone_on).await.expect("a client takes no turn any more")
}

/// What is asked in a turn. The answer comes in many pieces, so that a backup meets runs in the middle.
fn question(turn: usize) -> String {
    format!("slow {turn}")
}

/// The first turns of a conversation.
fn said(turns: usize) -> Vec<String> {
    (0..turns).flat_map(|turn| [question(turn), "one two three four".to_owned()]).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_under_runs_is_served_with_every_turn_that_was_acknowledged_before() {
    for mode in ["full", "delta"] {
        let dir = configured(mode);
        let gateway = Arc::new(Gateway::start(dir.path()));
        let (stop, turns) = (Arc::<AtomicBool>::default(), Arc::<[AtomicUsize; CLIENTS]>::default());
        let clients: Vec<JoinHandle<()>> = (0..CLIENTS)
            .map(|client| {
                let (gateway, stop, turns) = (gateway.clone(), stop.clone(), turns.clone());
                tokio::spawn(async move {
                    let thread = format!("t{client}");
                    gateway.post("/api/threads", json!({ "thread_id": thread })).await;
                    for turn in 0.. {
                        if stop.load(Ordering::SeqCst) {
                            return;
                        }
                        take_turn(&gateway, &thread, &question(turn)).await;
                        turns[client].store(turn + 1, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        let mut acknowledged = [0; CLIENTS];
        for round in 0..ROUNDS {
            acknowledged = after_another(&turns, acknowledged, &clients).await;
            let backup = format!("backup-{round}.db");
            done(dir.path(), &["backup", "--out", &backup]);
            done(dir.path(), &["verify", "--all", "--sqlite", &backup]);
            let listed = done(dir.path(), &["threads", "list", "--json", "--sqlite", &backup]);
            let listed: Vec<Json> = listed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(listed.len(), CLIENTS, "{listed:?}");
            assert!(listed.iter().all(|thread| thread["status"].is_string()), "no record: {listed:?}");
        }
        stop.store(true, Ordering::SeqCst);
        for client in clients {
            client.await.unwrap();
        }
        drop(gateway);

        // As `docs/backup.md` describes it.
        let place = configured(mode);
        let from = dir.path().join(format!("backup-{}", ROUNDS - 1));
        let data = place.path().join("state/data");
        std::fs::create_dir_all(&data).unwrap();
        for (copied, name) in [("db", "checkpoints.db"), ("gateway.db", "gateway.db")] {
            std::fs::copy(from.with_extension(copied), data.join(name)).unwrap();
        }
        done(place.path(), &["verify", "--all"]);
        let restored = Gateway::start(place.path());
        for (client, before) in acknowledged.into_iter().enumerate() {
            let thread = format!("t{client}");
            let state = restored.get(&format!("/api/threads/{thread}/state")).await;
            let there = texts(&state["values"]);
            assert!(there.len() >= 2 * before, "{mode}, {thread}: {before} turns before, {there:?}");
            assert_eq!(there[..2 * before], said(before), "{mode}, {thread}");
            let values = take_turn(&restored, &thread, "after").await;
            let now = texts(&values);
            assert_eq!(now[..there.len()], there, "{mode}, {thread}");
            assert_eq!(now[there.len()..], ["after", "You said: after"], "{mode}, {thread}");
            assert_eq!(restored.get(&format!("/api/threads/{thread}")).await["status"], "idle");
        }
    }
}
