//! Commands that delete: a plan changes nothing, and applying it does what it said.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use insta::assert_snapshot;
use redis::AsyncCommands as _;
use serde_json::Value as Json;
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::id::{CheckpointId, Version};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Rewrite, Saver};
use threadkeep::step::StepWriter;

use super::store::{MODES, OTHER, Store, TALK, said, step, threadkeep};

fn texts(list: &Json) -> BTreeSet<String> {
    list.as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()).collect()
}

/// Plans and applies the same deletion, on a database of its own.
async fn planned_and_applied(mode: ChannelMode, what: &[&str]) {
    let store = Store::new(mode).await;
    let (command, flags) = what.split_first().unwrap();
    let args = |verb: &'static str, more: &[&'static str]| -> Vec<String> {
        let args = [&[*command, verb, "--thread", TALK, "--json"], flags, more].concat();
        args.into_iter().map(str::to_owned).collect()
    };
    let run = |args: Vec<String>| store.run(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let (before, other, states) =
        (store.image(TALK).await, store.image(OTHER).await, store.states(TALK).await);

    let plan = run(args("plan", &[])).json().remove(0);
    assert!(store.image(TALK).await == before, "a plan changes nothing, not even the revision");
    let checkpoints = plan["checkpoints"].as_array().unwrap();
    assert_eq!(checkpoints.len(), before.checkpoints.len(), "each checkpoint has a verdict");
    assert!(checkpoints.iter().all(|line| !line["because"].as_str().unwrap().is_empty()));
    let planned: BTreeSet<String> = checkpoints
        .iter()
        .filter(|line| line["verdict"] == "goes")
        .map(|line| line["checkpoint"].as_str().unwrap().to_owned())
        .collect();
    assert!(!planned.is_empty(), "{what:?} removes something");

    let refused = run(args("apply", &[]));
    assert_eq!((refused.code, refused.out.as_str()), (4, ""), "{}", refused.err);
    assert!(refused.err.contains("--yes"), "{}", refused.err);
    assert!(store.image(TALK).await == before, "a refused command changes nothing");

    let applied = run(args("apply", &["--yes"])).json().remove(0);
    assert_eq!(texts(&applied["removed"]), planned);
    assert_eq!(applied["stats_before"], plan["stats_before"]);
    assert_eq!(applied["stats_after"], plan["stats_after"]);
    // The image is in the order of the ids, so the last of a namespace is its head. With nothing kept there is none.
    let mut heads: BTreeMap<String, String> = before
        .checkpoints
        .keys()
        .map(|(namespace, id)| (namespace.as_str().to_owned(), id.to_string()))
        .collect();
    heads.retain(|_, id| !planned.contains(id));
    assert_eq!(plan["protected_head_ids"], serde_json::json!(heads), "{what:?}");
    assert_eq!(applied["protected_head_ids"], plan["protected_head_ids"]);
    let after = store.image(TALK).await;
    let left: BTreeSet<String> = after.checkpoints.keys().map(|(_, id)| id.to_string()).collect();
    let all: BTreeSet<String> = before.checkpoints.keys().map(|(_, id)| id.to_string()).collect();
    assert_eq!(left, all.difference(&planned).cloned().collect());
    for (place, values) in store.states(TALK).await {
        assert_eq!(values, states[&place], "{place:?} has another state than before");
    }
    assert!(store.image(OTHER).await == other, "another thread is as it was");
    store.run(&["verify", "--all"]).done();
}

#[tokio::test]
async fn what_is_applied_is_what_was_planned() {
    for mode in MODES {
        planned_and_applied(mode, &["retention"]).await;
        planned_and_applied(mode, &["retention", "--leaf-sibling-branches", "--max-delete-per-run", "1"])
            .await;
        planned_and_applied(mode, &["retention", "--graft-duration-links", "--no-pending-write-guard"]).await;
        planned_and_applied(mode, &["prune", "--keep", "last:3"]).await;
        planned_and_applied(mode, &["prune", "--keep", "latest", "--boundary", "fresh-snapshot"]).await;
        planned_and_applied(mode, &["prune", "--keep", "since:2023-11-14T22:14:40Z"]).await;
        planned_and_applied(mode, &["prune", "--keep", "nothing"]).await;
    }
}

#[tokio::test]
async fn plans_and_summaries_are_tables_for_people() {
    for mode in MODES {
        let store = Store::new(mode).await;
        let plan = store.run(&["retention", "plan", "--thread", TALK, "--leaf-sibling-branches"]).done();
        assert_snapshot!(format!("retention_plan_{mode}"), plan);
        let plan = store.run(&["prune", "plan", "--all", "--keep", "last:2", "--summary"]).done();
        assert_snapshot!(format!("prune_plan_{mode}"), plan);
        let apply = ["prune", "apply", "--all", "--keep", "last:2", "--boundary", "fresh-snapshot", "--yes"];
        let applied = store.run(&apply).done();
        assert!(applied.contains("22 checkpoints of 2 threads were removed."), "{applied}");
        assert!(
            applied.contains(" kB -> ") && applied.contains("`threadkeep vacuum --sqlite DB`"),
            "{applied}"
        );
    }
}

#[tokio::test]
async fn a_protected_checkpoint_stays_and_one_that_is_not_there_is_an_error() {
    let store = Store::new(ChannelMode::Delta).await;
    let image = store.image(TALK).await;
    let id = image.checkpoints.keys().nth(4).unwrap().1.to_string();
    let args =
        ["prune", "apply", "--thread", TALK, "--keep", "latest", "--boundary", "fresh-snapshot", "--yes"];
    let nobody = CheckpointId::from_bytes([7; 16]).to_string();
    let refused = store.run(&[&args[..], &["--protect", &nobody]].concat());
    assert_eq!(refused.code, 1);
    assert!(refused.err.contains(&nobody), "{}", refused.err);
    assert!(store.image(TALK).await == image);
    store.run(&[&args[..], &["--protect", &id]].concat()).done();
    let left = store.image(TALK).await;
    assert!(left.checkpoints.keys().any(|(_, left)| left.to_string() == id));
    assert_eq!(left.checkpoints.len(), 3, "two heads and the protected one");
}

#[tokio::test]
async fn batches_and_passes_go_on_until_nothing_is_left() {
    for mode in MODES {
        let keep =
            ["prune", "apply", "--thread", TALK, "--keep", "latest", "--boundary", "fresh-snapshot", "--yes"];
        let (batches, whole) = (Store::new(mode).await, Store::new(mode).await);
        batches.run(&[&keep[..], &["--batch", "4"]].concat()).done();
        whole.run(&keep).done();
        let ids =
            |image: &threadkeep::saver::ThreadImage| image.checkpoints.keys().cloned().collect::<Vec<_>>();
        assert_eq!(ids(&batches.image(TALK).await), ids(&whole.image(TALK).await));

        let store = Store::new(mode).await;
        let pass = ["retention", "apply", "--thread", TALK, "--leaf-sibling-branches", "--yes", "--json"];
        let one = texts(&store.run(&pass).json()[0]["removed"]).len();
        let rest = texts(&store.run(&[&pass[..], &["--until-done"]].concat()).json()[0]["removed"]).len();
        assert_eq!((one, rest), (1, 7), "the side branch goes leaf by leaf");
        assert!(texts(&store.run(&pass).json()[0]["removed"]).is_empty());
        store.run(&["verify", "--all"]).done();
    }
}

#[tokio::test]
async fn writers_go_on_while_threads_are_pruned_and_space_is_given_back() {
    let prune = ["prune", "apply", "--keep", "last:2", "--boundary", "fresh-snapshot", "--yes", "--thread"];
    for mode in MODES {
        let store = Arc::new(Store::new(mode).await);
        let saver = store.open().await;
        let accessor = store.accessor(&saver, mode);
        // One writer keeps writing to a neighbouring thread.
        let mut beside = StepWriter::open(&accessor, &"beside".into(), None).await.unwrap();
        let done = AtomicBool::new(false);
        let commands = async {
            // Another writer's thread is pruned between two of its steps, without its knowledge.
            let mut writer = StepWriter::open(&accessor, &OTHER.into(), None).await.unwrap();
            for number in 0..5 {
                let message = said("ai", &format!("live {number}"));
                step(&mut writer, "model", &message, Source::Loop, "live").await;
                let store = store.clone();
                let commands = tokio::task::spawn_blocking(move || {
                    store.run(&[&prune[..], &[OTHER, TALK]].concat()).done();
                    store.run(&["vacuum"]).done();
                });
                commands.await.unwrap();
            }
            done.store(true, Ordering::SeqCst);
        };
        let writing = async {
            let mut count = 0;
            while !done.load(Ordering::SeqCst) {
                let message = said("ai", &format!("beside {count}"));
                step(&mut beside, "model", &message, Source::Loop, "beside").await;
                count += 1;
            }
            count
        };
        let ((), count) = tokio::join!(commands, writing);
        assert!(count > 5, "{mode}: {count} steps beside");
        for (thread, messages) in [("beside", count), (OTHER, 4 + 5)] {
            let head = accessor.get(&thread.into(), None).await.unwrap().unwrap();
            let there = head.json("messages").unwrap().unwrap();
            assert_eq!(there.as_array().unwrap().len(), messages, "{mode}, {thread}");
        }
        saver.close().await;
        store.run(&["verify", "--all"]).done();
    }
}

#[tokio::test]
async fn threads_are_converted_there_and_back() {
    let store = Store::new(ChannelMode::Delta).await;
    let (image, states) = (store.image(TALK).await, store.states(TALK).await);
    let dry = &store.run(&["convert", "--all", "--to", "full", "--dry-run", "--json"]).json();
    assert_eq!(dry.len(), 2);
    assert!(store.image(TALK).await == image, "a dry run changes nothing");
    let done = store.run(&["convert", "--all", "--to", "full", "--json"]).json();
    for (dry, done) in dry.iter().zip(&done) {
        assert_eq!((&dry["thread"], &dry["changed"]), (&done["thread"], &done["changed"]));
        assert_ne!(done["changed"], 0);
    }
    assert_eq!(
        store.states_in(ChannelMode::Full, TALK).await,
        states,
        "a process in full mode reads all of it"
    );
    store.run(&["verify", "--all"]).done();
    let again = store.run(&["convert", "--thread", TALK, "--to", "full", "--json"]).json();
    assert_eq!(again[0]["changed"], 0);
    store.run(&["convert", "--all", "--to", "delta", "--frequency", "4"]).done();
    assert_eq!(store.states(TALK).await, states);
    store.run(&["verify", "--all"]).done();
}

#[tokio::test]
async fn verify_names_violations_and_repairs_what_needs_no_guess() {
    let store = Store::new(ChannelMode::Delta).await;
    let saver = store.open().await;
    let image = saver.read_thread(&TALK.into()).await.unwrap();
    let mut tuple = image
        .checkpoints
        .values()
        .find(|tuple| tuple.metadata.counters.contains_key("messages"))
        .unwrap()
        .clone();
    tuple.metadata.delta_marker = false;
    let id = tuple.checkpoint.id.to_string();
    let rewrite = Rewrite { put: vec![tuple], ..Rewrite::default() };
    saver.rewrite_thread(&TALK.into(), &image.revision, rewrite).await.unwrap();
    saver.close().await;
    let broken = store.image(TALK).await;

    let found = store.run(&["verify", "--all"]);
    assert_eq!(found.code, 3, "{}", found.err);
    assert!(found.out.contains(&id) && found.out.contains("--repair"), "{}", found.out);
    let lines: Vec<Json> = store
        .run(&["verify", "--thread", TALK, "--json"])
        .out
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        (lines.len(), &lines[0]["checkpoint"], &lines[0]["rule"]),
        (2, &id.as_str().into(), &"marked".into())
    );
    assert_eq!(lines[1]["violations"], 1);
    store.run(&["verify", "--thread", OTHER]).done();

    let refused = store.run(&["verify", "--all", "--repair"]);
    assert_eq!(refused.code, 4, "{}", refused.err);
    assert!(store.image(TALK).await == broken);
    let repaired = store.run(&["verify", "--all", "--repair", "--yes"]).done();
    assert!(repaired.contains("no violations, 1 was repaired"), "{repaired}");
    assert!(store.image(TALK).await.checkpoints == image.checkpoints);
}

/// What a repair leaves is what the operator has to do something about.
#[tokio::test]
async fn a_repair_prints_what_it_cannot_repair_as_well() {
    let store = Store::new(ChannelMode::Delta).await;
    let saver = store.open().await;
    let image = saver.read_thread(&TALK.into()).await.unwrap();
    let counts = |tuple: &&CheckpointTuple| tuple.metadata.counters.contains_key("messages");
    let counted: Vec<_> = image.checkpoints.values().filter(counts).collect();
    let mut unmarked = counted[0].clone();
    unmarked.metadata.delta_marker = false;
    // A version that is older than the parent's.
    let mut older = counted[1].clone();
    older.checkpoint.channels.get_mut("messages").unwrap().version = Version { counter: 0, random: 0 };
    let ids = [&unmarked, &older].map(|tuple| tuple.checkpoint.id.to_string());
    let rewrite = Rewrite { put: vec![unmarked, older], ..Rewrite::default() };
    saver.rewrite_thread(&TALK.into(), &image.revision, rewrite).await.unwrap();
    saver.close().await;

    let refused = store.run(&["verify", "--all", "--repair"]);
    assert_eq!(refused.code, 4, "{refused:?}");
    assert!(ids.iter().all(|id| refused.out.contains(id)), "{refused:?}");
    let refused = store.run(&["verify", "--all", "--repair", "--json"]);
    assert!(refused.code == 4 && ids.iter().all(|id| refused.out.contains(id)), "{refused:?}");

    let repaired = store.run(&["verify", "--all", "--repair", "--yes", "--json"]);
    assert_eq!(repaired.code, 3, "{repaired:?}");
    let lines: Vec<Json> = repaired.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (totals, lines) = lines.split_last().unwrap();
    let of = |id: &str, repaired: bool| {
        lines.iter().filter(|line| line["checkpoint"] == id && line["repaired"] == repaired).count()
    };
    assert_eq!((of(&ids[0], true), of(&ids[0], false)), (1, 0), "{lines:?}");
    assert!(of(&ids[1], true) == 0 && of(&ids[1], false) > 0, "{lines:?}");
    assert_eq!(totals["repaired"], 1, "{totals}");
    assert_eq!(totals["violations"], lines.len() - 1, "{totals}");

    let again = store.run(&["verify", "--all", "--repair", "--yes"]);
    assert!(again.code == 3 && again.out.contains(&ids[1]) && !again.out.contains(&ids[0]), "{again:?}");
}

#[tokio::test]
async fn freed_space_is_given_back() {
    let store = Store::new(ChannelMode::Full).await;
    let saver = store.open().await;
    let accessor = store.accessor(&saver, ChannelMode::Full);
    let mut writer = StepWriter::open(&accessor, &"large".into(), None).await.unwrap();
    let mut random = 7_u64;
    for number in 0..60 {
        // Text that no dictionary compresses.
        let noise = std::iter::repeat_with(|| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            char::from(b'0' + u8::try_from(random >> 58).unwrap())
        });
        let text = format!("{number} {}", noise.take(8_000).collect::<String>());
        step(&mut writer, "model", &said("ai", &text), Source::Loop, "r").await;
    }
    saver.close().await;
    store.run(&["prune", "apply", "--thread", "large", "--keep", "nothing", "--yes"]).done();
    let len = || std::fs::metadata(store.path()).unwrap().len();
    let before = len();
    let done = &store.run(&["vacuum", "--json"]).json()[0];
    assert_eq!((&done["bytes_before"], &done["free_after"]), (&before.into(), &0.into()), "{done}");
    assert!(len() < before, "{} bytes of {before}", len());
    assert_eq!(done["bytes_after"], len());
    store.run(&["vacuum", "--full"]).done();
    store.run(&["verify", "--all"]).done();
}

#[tokio::test]
async fn a_prune_purges_the_thread_from_the_gateways_redis_and_looking_does_not() {
    let store = Store::new(ChannelMode::Delta).await;
    let url = threadkeep_testing::redis().unwrap().url();
    let prefix = format!("ops:{}:", uuid::Uuid::new_v4());
    let config = store.file("config.yaml");
    let database = serde_json::json!({
        "backend": "sqlite",
        "sqlite_dir": store.path().parent().unwrap(),
        "checkpoint_channel_mode": "delta",
        "checkpoint_cache": {"type": "redis", "redis_url": url, "key_prefix": prefix},
    });
    std::fs::write(&config, serde_json::json!({"config_version": 49, "database": database}).to_string())
        .unwrap();
    let mut redis = redis::Client::open(url).unwrap().get_multiplexed_async_connection().await.unwrap();
    let keys = [TALK, OTHER].map(|thread| format!("{prefix}{thread}"));
    for key in &keys {
        let () = redis.hset(key, "path:0::messages", "what a gateway knows").await.unwrap();
    }
    let mut there = async || {
        let talk: bool = redis.exists(&keys[0]).await.unwrap();
        (talk, redis.exists::<_, bool>(&keys[1]).await.unwrap())
    };
    let prune = ["prune", "plan", "--thread", TALK, "--keep", "last:3", "--config", &config];
    threadkeep(&prune).done();
    threadkeep(&["threads", "show", TALK, "--config", &config]).done();
    threadkeep(&["state", "get", "--thread", TALK, "--config", &config]).done();
    assert_eq!(there().await, (true, true));
    let prune = ["prune", "apply", "--thread", TALK, "--keep", "last:3", "--yes", "--config", &config];
    threadkeep(&prune).done();
    assert_eq!(there().await, (false, true));
}
