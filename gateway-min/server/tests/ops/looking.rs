//! Commands that only read.

use insta::assert_snapshot;
use serde_json::Value as Json;
use threadkeep::checkpoint::{Checkpoint, CheckpointTuple};
use threadkeep::id::{CheckpointId, IdSource};
use threadkeep::metadata::{Metadata, Source};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Revision, Rewrite, Saver as _};
use threadkeep_records::{NewThread, Records, RecordsOptions};

use super::store::{MODES, OTHER, Store, TALK};

/// The gateway's record of the thread, next to the checkpoints.
async fn noted(store: &Store) {
    let path = store.path().with_file_name("gateway.db");
    let records = Records::open(&path, RecordsOptions::default()).await.unwrap();
    let new = NewThread {
        thread_id: TALK.to_owned(),
        display_name: Some("Tables".to_owned()),
        user_id: Some("ann".to_owned()),
        ..NewThread::default()
    };
    records.threads().create(new).await.unwrap();
    records.close().await;
}

#[tokio::test]
async fn threads_are_listed_with_the_names_that_the_gateway_knows() {
    let store = Store::new(ChannelMode::Delta).await;
    assert_snapshot!("threads_list_without_records", store.run(&["threads", "list"]).done());
    noted(&store).await;
    assert_snapshot!("threads_list", store.run(&["threads", "list"]).done());
    let page = store.run(&["threads", "list", "--limit", "1"]).done();
    assert!(page.contains(OTHER) && !page.contains(TALK) && page.contains("--after other"), "{page}");
    let page = store.run(&["threads", "list", "--limit", "1", "--json"]);
    assert_eq!((page.code, page.out.lines().count()), (0, 1), "{page:?}");
    assert_eq!(page.err, "There are more; continue with --after other\n");
    let rest = store.run(&["threads", "list", "--after", OTHER, "--json"]).json();
    assert_eq!(rest.len(), 1);
    assert_eq!(
        (&rest[0]["thread"], &rest[0]["owner"], &rest[0]["title"]),
        (&TALK.into(), &"ann".into(), &"Tables".into())
    );
    let shown = &store.run(&["threads", "show", TALK, "--json"]).json()[0];
    assert_eq!(shown["record"]["owner"], "ann");
    assert_eq!(shown["namespaces"][0]["checkpoints"], 20);
    assert_eq!(shown["namespaces"][1]["namespace"], "inner");
    assert_eq!(shown["namespaces"][1]["checkpoints"], 2);
    assert!(shown["stored_bytes"].as_u64().unwrap() > 0, "{shown}");
}

#[tokio::test]
async fn a_thread_and_what_threads_take_are_shown() {
    for mode in MODES {
        let store = Store::new(mode).await;
        let show = store.run(&["threads", "show", TALK]).done();
        // Stored sizes are checked by the driver's tests.
        let show: Vec<&str> = show.lines().map(|line| line.split(" writes: ").next().unwrap()).collect();
        assert_snapshot!(format!("threads_show_{mode}"), show.join("\n"));
        let du = store.run(&["threads", "du"]).done();
        let first: Vec<&str> = du.lines().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(first, ["THREAD", "talk", "other", "total", "The"], "{du}");
        let usages = store.run(&["threads", "du", "--json"]).json();
        assert_eq!(usages.len(), 2);
        let sizes: Vec<u64> = usages.iter().map(|usage| usage["stored_bytes"].as_u64().unwrap()).collect();
        assert!(sizes[0] > sizes[1] && sizes[1] > 0, "the largest first: {sizes:?}");
        let twice = store.run(&["threads", "du", "--thread", TALK, TALK, "--json"]).json();
        assert_eq!(twice, usages[..1], "it takes its space once");
    }
}

#[tokio::test]
async fn checkpoints_are_listed_and_drawn() {
    for mode in MODES {
        let store = Store::new(mode).await;
        let list = store.run(&["checkpoints", "list", "--thread", TALK]).done();
        assert_snapshot!(format!("checkpoints_list_{mode}"), list);
        let lines = store.run(&["checkpoints", "list", "--thread", TALK, "--json"]).json();
        assert_eq!(lines.len(), 22);
        assert_eq!(lines[0]["pending_rows"], 1, "{}", lines[0]);
        let inner =
            store.run(&["checkpoints", "list", "--thread", TALK, "--namespace", "inner", "--json"]).json();
        assert_eq!(inner.iter().map(|line| line["messages"].clone()).collect::<Vec<_>>(), [2, 1]);
        let graph = store.run(&["checkpoints", "list", "--thread", TALK, "--graph"]).done();
        assert_snapshot!(format!("checkpoints_graph_{mode}"), graph);
    }
}

#[tokio::test]
async fn a_walk_with_a_limit_shows_checkpoints_of_one_id_in_two_namespaces() {
    let store = Store::new(MODES[0]).await;
    let source = IdSource::default();
    let older = source.checkpoint_after(None);
    let shared = source.checkpoint_after(Some(older));
    let tuple = |namespace: &str, id: CheckpointId| CheckpointTuple {
        thread: "twins".into(),
        namespace: namespace.into(),
        checkpoint: Checkpoint { id, channels: [].into(), next: Vec::new(), applied: Vec::new() },
        parent: None,
        metadata: Metadata::new(Source::Input, 0),
        writes: Vec::new(),
    };
    let put = vec![tuple("a", older), tuple("a", shared), tuple("b", shared)];
    let saver = store.open().await;
    let rewrite = Rewrite { put, ..Rewrite::default() };
    saver.rewrite_thread(&"twins".into(), &Revision::absent(), rewrite).await.unwrap();
    saver.close().await;

    let text = |line: &Json, key: &str| line[key].as_str().unwrap().to_owned();
    let (mut shown, mut before) = (Vec::new(), Vec::new());
    loop {
        let list = ["checkpoints", "list", "--thread", "twins", "--limit", "1", "--json"];
        let before_it: Vec<&str> = before.iter().map(String::as_str).collect();
        let page = store.run(&[&list[..], &before_it].concat()).json();
        let Some(last) = page.last() else { break };
        before = vec!["--before".to_owned(), text(last, "checkpoint")];
        shown.extend(page.iter().map(|line| (text(line, "namespace"), text(line, "checkpoint"))));
    }
    shown.sort();
    let pair = |namespace: &str, id: CheckpointId| (namespace.to_owned(), id.to_string());
    assert_eq!(shown, [pair("a", older), pair("a", shared), pair("b", shared)]);
    let said = store.run(&["checkpoints", "list", "--thread", "twins", "--limit", "1"]).done();
    assert!(said.contains(&format!("continue with --before {shared}")), "{said}");
}

/// The ids of the thread's own graph, newest first.
fn ids(store: &Store) -> Vec<String> {
    let lines = store.run(&["checkpoints", "list", "--thread", TALK, "--namespace", "", "--json"]).json();
    lines.iter().map(|line| line["checkpoint"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn one_checkpoint_and_the_difference_of_two_are_shown() {
    for mode in MODES {
        let store = Store::new(mode).await;
        let ids = ids(&store);
        let show = ["checkpoints", "show", "--thread", TALK];
        assert_snapshot!(format!("checkpoints_show_{mode}"), store.run(&show).done());
        let json = &store.run(&[&show[..], &[&ids[0], "--json"]].concat()).json()[0];
        assert_eq!(json["rows"][0]["node"], "tools");
        assert_eq!(json["rows"][0]["pending"], true);
        assert_eq!(json["channels"]["title"]["stored"], "value");
        // The head has a different fourth answer and a title, and lacks what came after.
        let diff = ["checkpoints", "diff", &ids[2], &ids[0], "--thread", TALK];
        assert_snapshot!(format!("checkpoints_diff_{mode}"), store.run(&diff).done());
        let same = store.run(&["checkpoints", "diff", &ids[2], &ids[2], "--thread", TALK]).done();
        assert_eq!(same, "The states are equal.\n");
        let changes = &store.run(&[&diff[..], &["--json"]].concat()).json()[0];
        assert_eq!(changes["channels"]["title"]["change"], "added");
    }
}

#[tokio::test]
async fn the_state_is_the_one_that_a_run_sees() {
    for mode in MODES {
        let store = Store::new(mode).await;
        for ((namespace, id), values) in store.states(TALK).await {
            let (namespace, id) = (namespace.to_string(), id.to_string());
            let get = ["state", "get", "--thread", TALK, "--namespace", &namespace, "--checkpoint", &id];
            let said = &store.run(&[&get[..], &["--json"]].concat()).json()[0];
            assert_eq!(said["values"], Json::Object(values.clone()), "{id}");
            assert_eq!(said["mode"], mode.as_str());
            let text = store.run(&get).done();
            let (heading, json) = text.split_once('\n').unwrap();
            assert!(heading.contains(&id) && heading.contains(mode.as_str()), "{heading}");
            assert_eq!(serde_json::from_str::<Json>(json).unwrap(), Json::Object(values));
        }
    }
}
