//! Commands on threads that LangGraph wrote to: its checkpoints stay as they are, and nothing of them is replayed.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};
use threadkeep::checkpoint::Stored;
use threadkeep::id::{CheckpointId, Namespace};
use threadkeep::mode::ChannelMode;
use threadkeep::saver::ThreadImage;
use threadkeep::state::Update;
use threadkeep::value::ChannelValue;
use threadkeep_langgraph::Seed;
use threadkeep_sqlite::SqliteSaver;

use super::graph::{Entry, Graph};
use super::store::{OTHER, Store, TALK, said, turn_of};

/// A thread whose messages are a plain channel.
const PLAIN: &str = "plain";
/// A thread whose messages are a delta channel.
const CHANGES: &str = "changes";
/// A thread that the gateway and LangGraph wrote to.
const BOTH: &str = "both";

/// The messages of a conversation of this length.
fn messages(count: u8) -> Json {
    (0..count).map(|n| said("human", &format!("m{n}"))[0].clone()).collect()
}

/// Graphs of LangGraph beside the gateway's threads.
async fn with_graphs(store: &Store) {
    let saver = store.open().await;
    let plain = Graph::on(saver.clone(), PLAIN);
    for n in 0..6 {
        plain.put(n, vec![("messages", Entry::Value(messages(n)))]).await;
    }
    let changes = Graph::on(saver.clone(), CHANGES);
    for n in 0..6 {
        let entry = match n {
            0 | 3 => Entry::Snapshot(messages(n)),
            // Whatever the graph's reducer does with it.
            _ => Entry::Changed(messages(1)),
        };
        changes.put(n, vec![("messages", entry)]).await;
    }
    saver.close().await;
}

/// What LangGraph reads of every checkpoint of [`BOTH`].
async fn read(store: &Store) -> BTreeMap<CheckpointId, BTreeMap<String, ChannelValue>> {
    let saver = store.open().await;
    let values = Graph::on(saver.clone(), BOTH).values().await;
    saver.close().await;
    values
}

/// What LangGraph replays the channel `log` from at the newest checkpoint of [`BOTH`].
async fn replayed(store: &Store) -> (Option<Seed>, Vec<ChannelValue>) {
    let (_, head) = store.image(BOTH).await.checkpoints.into_keys().next_back().unwrap();
    let saver = store.open().await;
    let replayed = Graph::on(saver.clone(), BOTH).replayed(head, "log").await;
    saver.close().await;
    replayed
}

fn stored<'i>(image: &'i ThreadImage, id: &str, channel: &str) -> &'i Stored {
    let found = image.checkpoints.iter().find(|((_, at), _)| at.to_string() == id).unwrap().1;
    &found.checkpoint.channels[channel].stored
}

#[tokio::test]
async fn a_conversion_leaves_what_langgraph_wrote_as_it_is() {
    for mode in [ChannelMode::Full, ChannelMode::Delta] {
        let store = Store::new(mode).await;
        with_graphs(&store).await;
        let states = store.states_in(ChannelMode::Delta, TALK).await;
        let images = [store.image(PLAIN).await, store.image(CHANGES).await];
        for to in ["delta", "full", "delta"] {
            let dry = store.run(&["convert", "--all", "--to", to, "--dry-run", "--json"]).json();
            let done = store.run(&["convert", "--all", "--to", to, "--frequency", "2", "--json"]).json();
            for (dry, done) in dry.iter().zip(&done) {
                let (of, is_theirs) =
                    (&done["thread"], [PLAIN, CHANGES].contains(&done["thread"].as_str().unwrap()));
                assert_eq!(done["of_langgraph"], if is_theirs { 6 } else { 0 }, "{of} to {to}");
                assert_eq!(done["of_langgraph"], dry["of_langgraph"], "{of} to {to}");
            }
            for (thread, image) in [PLAIN, CHANGES].into_iter().zip(&images) {
                assert!(store.image(thread).await == *image, "{thread} to {to}");
            }
            let delta = store.image(TALK).await.checkpoints.values().all(|tuple| tuple.metadata.is_delta());
            assert_eq!(delta, to == "delta", "the gateway's threads are converted");
            assert_eq!(store.states_in(ChannelMode::Delta, TALK).await, states);
            let again = store.run(&["convert", "--all", "--to", to]).done();
            assert!(
                again.contains("12 checkpoints stay as they are: LangGraph wrote them")
                    && again.contains("Nothing to convert: every other checkpoint"),
                "{again}"
            );
        }
        store.run(&["verify", "--all"]).done();
    }
}

/// Turns of the gateway, steps of a graph, and turns of the gateway after them.
async fn with_both(store: &Store, mode: ChannelMode, steps: [Vec<(&str, Entry)>; 2]) {
    let saver = store.open().await;
    let accessor = store.accessor(&saver, mode);
    for turn in 0..3 {
        turn_of(&accessor, BOTH, turn).await;
    }
    let head = accessor.get(&BOTH.into(), None).await.unwrap().unwrap().key.id;
    let graph = Graph::on(saver.clone(), BOTH);
    let [first, second] = steps;
    graph.put_after(Some(head), 0, first).await;
    graph.put(1, second).await;
    for turn in 3..6 {
        turn_of(&accessor, BOTH, turn).await;
    }
    saver.close().await;
}

/// The ids of the checkpoints that LangGraph wrote to [`BOTH`].
fn theirs(saver: &Arc<SqliteSaver>) -> [(Namespace, CheckpointId); 2] {
    let graph = Graph::on(saver.clone(), BOTH);
    [0, 1].map(|n| (Namespace::root(), graph.id(n)))
}

#[tokio::test]
async fn a_thread_of_both_is_converted_around_what_langgraph_wrote() {
    for (mode, targets) in
        [(ChannelMode::Full, ["delta", "full", "delta"]), (ChannelMode::Delta, ["full", "delta", "full"])]
    {
        let store = Store::new(mode).await;
        let plain = |n| vec![("messages", Entry::Value(messages(n)))];
        with_both(&store, mode, [plain(7), plain(8)]).await;
        let before = store.image(BOTH).await;
        let states = store.states_in(ChannelMode::Delta, BOTH).await;
        let read_before = read(&store).await;
        let saver = store.open().await;
        let theirs = theirs(&saver);
        saver.close().await;
        for to in targets {
            let done = store.run(&["convert", "--thread", BOTH, "--to", to, "--json"]).json();
            assert_eq!(
                (&done[0]["checkpoints"], &done[0]["of_langgraph"]),
                (&json!(20), &json!(2)),
                "to {to}"
            );
            let image = store.image(BOTH).await;
            for (place, tuple) in &image.checkpoints {
                if theirs.contains(place) {
                    assert!(*tuple == before.checkpoints[place], "LangGraph's {place:?} to {to}");
                } else {
                    assert_eq!(tuple.metadata.is_delta(), to == "delta", "{place:?}");
                }
            }
            assert_eq!(store.states_in(ChannelMode::Delta, BOTH).await, states, "as the gateway reads it");
            assert_eq!(read(&store).await, read_before, "as LangGraph reads it");
            if to == "full" {
                assert_eq!(store.states_in(ChannelMode::Full, BOTH).await, states);
            }
            let again = store.run(&["convert", "--thread", BOTH, "--to", to, "--json"]).json();
            assert_eq!(again[0]["changed"], 0, "to {to}");
        }
        store.run(&["verify", "--all"]).done();
    }
}

/// Steps of a graph with a delta channel that the gateway does not know.
fn with_log() -> [Vec<(&'static str, Entry)>; 2] {
    [
        vec![("messages", Entry::Value(messages(7))), ("log", Entry::Snapshot(json!(["begun"])))],
        vec![("messages", Entry::Value(messages(8))), ("log", Entry::Changed(json!(["more"])))],
    ]
}

#[tokio::test]
async fn a_delta_channel_of_langgraph_stays_one_where_the_gateway_went_on() {
    let store = Store::new(ChannelMode::Delta).await;
    with_both(&store, ChannelMode::Delta, with_log()).await;
    let states = store.states_in(ChannelMode::Delta, BOTH).await;
    let (values, log) = (read(&store).await, replayed(&store).await);
    assert!(log.0.is_some() && log.1.len() == 1, "{log:?}");
    let done = store.run(&["convert", "--thread", BOTH, "--to", "full", "--json"]).json();
    assert_eq!(done[0]["of_langgraph"], 2 + 9, "LangGraph's, and the gateway's after them: {}", done[0]);
    let image = store.image(BOTH).await;
    let head = image.checkpoints.keys().next_back().unwrap().1.to_string();
    assert!(matches!(stored(&image, &head, "messages"), Stored::Value(_)));
    assert_eq!(stored(&image, &head, "log"), &Stored::Sentinel);
    assert_eq!(store.states_in(ChannelMode::Delta, BOTH).await, states);
    assert_eq!((read(&store).await, replayed(&store).await), (values, log));
    store.run(&["verify", "--all"]).done();
}

#[tokio::test]
async fn a_state_is_not_computed_from_changes_of_langgraph() {
    let store = Store::new(ChannelMode::Delta).await;
    with_graphs(&store).await;
    let saver = store.open().await;
    let graph = Graph::on(saver.clone(), CHANGES);
    let [snapshot, change] = [3, 4].map(|n| graph.id(n).to_string());
    saver.close().await;
    let get = ["state", "get", "--thread", CHANGES, "--json", "--checkpoint"];
    let shown = store.run(&[&get[..], &[&snapshot]].concat()).json();
    assert_eq!(shown[0]["values"]["messages"], messages(3));
    // Nor are its messages counted.
    let listed = store.run(&["checkpoints", "list", "--thread", CHANGES, "--json"]).json();
    let counts: Vec<&Json> = listed.iter().rev().map(|row| &row["messages"]).collect();
    assert_eq!(counts, [&json!(0), &Json::Null, &Json::Null, &json!(3), &Json::Null, &Json::Null]);
    let refused = store.run(&[&get[..], &[&change]].concat());
    let why = format!(
        "thread {CHANGES}, checkpoint {change}: LangGraph stored channel messages as changes, and only the graph that \
         wrote them can replay them; read and continue the thread with that graph"
    );
    assert!(refused.code == 1 && refused.err.contains(&why), "{refused:?}");
    let diff = store.run(&["checkpoints", "diff", &snapshot, &change, "--thread", CHANGES]);
    assert!(diff.code == 1 && diff.err.contains(&why), "{diff:?}");
    let shown = store.run(&["checkpoints", "show", &change, "--thread", CHANGES, "--json"]).json();
    assert_eq!(shown[0]["messages"], Json::Null, "{shown:?}");
}

#[tokio::test]
async fn a_branch_that_the_gateway_made_from_before_langgraph_came_hides_nothing_from_a_check() {
    let store = Store::new(ChannelMode::Delta).await;
    let saver = store.open().await;
    let accessor = store.accessor(&saver, ChannelMode::Delta);
    turn_of(&accessor, BOTH, 0).await;
    let head = accessor.get(&BOTH.into(), None).await.unwrap().unwrap().key.id;
    let graph = Graph::on(saver.clone(), BOTH);
    graph.put_after(Some(head), 0, vec![("messages", Entry::Snapshot(messages(2)))]).await;
    // Our reducer could not apply this.
    graph.put(1, vec![("messages", Entry::Changed(json!({"replace": 1})))]).await;
    // The newest checkpoint has no ancestor of LangGraph's.
    let writes = vec![accessor.write("title", json!("branch"), false).unwrap()];
    let update = Update { at: Some(head), node: "n".into(), writes, extra: Map::new() };
    accessor.update(&BOTH.into(), update).await.unwrap();
    saver.close().await;
    store.run(&["verify", "--all"]).done();
}

#[tokio::test]
async fn a_prune_replays_nothing_that_langgraph_wrote() {
    let store = Store::new(ChannelMode::Delta).await;
    with_graphs(&store).await;
    with_both(&store, ChannelMode::Delta, with_log()).await;
    let (image, both) = (store.image(CHANGES).await, store.image(BOTH).await);
    let keep = ["--keep", "latest", "--boundary", "fresh-snapshot"];
    let plan = store.run(&[&["prune", "plan", "--thread", CHANGES][..], &keep].concat()).done();
    assert!(plan.contains("needed to replay a kept checkpoint"), "{plan}");
    store.run(&[&["prune", "apply", "--all", "--yes"][..], &keep].concat()).done();

    // The head is replayed from the snapshot of the checkpoint 3.
    let pruned = store.image(CHANGES).await;
    let kept: Vec<_> = pruned.checkpoints.keys().collect();
    assert_eq!(kept, image.checkpoints.keys().skip(3).collect::<Vec<_>>());
    for (place, tuple) in pruned.checkpoints.iter().skip(1) {
        assert!(*tuple == image.checkpoints[place], "{place:?}");
    }
    // The head of this one is the gateway's, and continues a channel of LangGraph's.
    let pruned = store.image(BOTH).await;
    let (place, head) = pruned.checkpoints.last_key_value().unwrap();
    assert!(*head == both.checkpoints[place]);
    assert_eq!(pruned.checkpoints.len(), 2 + 9, "LangGraph's, and the gateway's after them");
    // What nobody but the gateway wrote gets its snapshot.
    for (thread, namespaces) in [(TALK, 2), (OTHER, 1), (PLAIN, 1)] {
        assert_eq!(store.image(thread).await.checkpoints.len(), namespaces, "{thread}");
    }
    store.run(&["verify", "--all"]).done();
}
