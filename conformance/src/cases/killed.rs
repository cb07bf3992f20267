//! What remains after a process was killed in the middle of its work, at the points where stores lose data.

use std::io;
use std::sync::Arc;

use serde_json::{Map, json};
use threadkeep::metadata::Source;
use threadkeep::mode::ChannelMode;
use threadkeep::saver::{Flush, Saver};
use threadkeep::step::Durability;
use tokio::task::{JoinSet, yield_now};

use super::atomic::{Call, Expected};
use super::concurrency::{first_judged, judged, whole};
use crate::case::{Case, Failure, Outcome, case, check, check_eq};
use crate::child::{Child, say};
use crate::factory::Store;
use crate::kit::{dump, head, id, says, scatter, task_id};
use crate::live::{LOG, accessor, at, create, open};

pub(super) const CASES: &[Case] = &[
    case!(
        Durability,
        killed_between_tasks_and_commit,
        "after a crash, finished tasks would run again, or their step would be lost",
        needs Killable
    ),
    case!(
        Durability,
        killed_in_a_burst_of_commits,
        "steps that were acknowledged would be gone after a crash",
        needs Killable
    ),
    case!(
        Durability,
        a_killed_call_happens_whole_or_not_at_all,
        "a crash would leave half a step, half a deletion, or a thread that is locked for ever",
        needs Killable
    ),
];

const TASKS: &str = "tasks";
const BURST: &str = "burst";
const THREADS: [&str; 3] = ["t0", "t1", "t2"];

/// The work of a child process.
pub(crate) async fn work(work: &str, saver: Arc<dyn Saver>) -> Outcome {
    match work.split_once(' ') {
        None if work == TASKS => finish_tasks(&saver).await,
        None if work == BURST => burst(&saver).await,
        Some((call, thread)) => {
            let call = Call::named(call);
            let call = call.ok_or_else(|| Failure::new(format_args!("the child knows no call {work:?}")))?;
            say("ready")?;
            call.make(&*saver, thread).await?;
            say("done")?;
            std::future::pending().await
        }
        None => Err(Failure::new(format_args!("the child knows no work {work:?}"))),
    }
}

const MODES: [(&str, ChannelMode); 2] = [("full", ChannelMode::Full), ("delta", ChannelMode::Delta)];

/// Finishes two of three parallel tasks in a thread of each mode, and waits for its end.
async fn finish_tasks(saver: &Arc<dyn Saver>) -> Outcome {
    for (thread, mode) in MODES {
        let accessor = accessor(saver, mode, 10)?;
        let mut writer = open(&accessor, thread, None).await?;
        for place in [2, 0] {
            let task = writer.start_task(&"worker".into(), place);
            let write = writer.write(LOG, json!([format!("task {place}")]), false)?;
            writer.finish_task(task, vec![write], Durability::Now).await?;
            say(&format!("{thread} {place}"))?;
        }
    }
    std::future::pending().await
}

async fn killed_between_tasks_and_commit(store: Store) -> Outcome {
    let saver = store.open().await?;
    for (thread, mode) in MODES {
        let accessor = accessor(&saver, mode, 10)?;
        create(&accessor, thread).await?;
        let mut writer = open(&accessor, thread, None).await?;
        let task = writer.start_task(&"planner".into(), 0);
        let write = writer.write(LOG, json!(["planned"]), false)?;
        writer.finish_task(task, vec![write], Durability::WithCommit).await?;
        writer.commit(Source::Loop, vec!["worker".into(); 3], Map::new()).await?;
    }
    drop(saver);
    let mut child = Child::start(&store, TASKS)?;
    for expected in ["full 2", "full 0", "delta 2", "delta 0"] {
        check_eq!(child.hear().await?, expected, "what the child has finished");
    }
    child.kill().await?;

    let saver = store.open().await?;
    for (thread, mode) in MODES {
        let accessor = accessor(&saver, mode, 10)?;
        let before = at(&accessor, thread, None).await?.json(LOG)?;
        check_eq!(before, Some(json!(["planned"])), "the state before the step, {thread}");
        let mut writer = open(&accessor, thread, None).await?;
        let recovered: Vec<_> = writer.recovered().iter().map(|row| (row.index, row.task)).collect();
        let places: Vec<u32> = recovered.iter().map(|(place, _)| *place).collect();
        check_eq!(places, [2, 0], "the tasks that need not run again, {thread}");
        for (_, task) in recovered {
            writer.adopt(task)?;
        }
        let task = writer.start_task(&"worker".into(), 1);
        let write = writer.write(LOG, json!(["task 1"]), false)?;
        writer.finish_task(task, vec![write], Durability::WithCommit).await?;
        writer.commit(Source::Loop, vec![], Map::new()).await?;
        let after = at(&accessor, thread, None).await?.json(LOG)?;
        check_eq!(after, Some(json!(["planned", "task 0", "task 1", "task 2"])), "the state, {thread}");
    }
    Ok(())
}

/// Continues three threads concurrently, forever.
async fn burst(saver: &Arc<dyn Saver>) -> Outcome {
    let mut threads = JoinSet::new();
    for thread in THREADS {
        let saver = saver.clone();
        threads.spawn(async move { go_on(&*saver, thread, u16::MAX, &|what| say(&what)).await });
    }
    while let Some(done) = threads.join_next().await {
        done??;
    }
    Ok(())
}

/// Adds steps to a thread, and reports what was stored.
async fn go_on(
    saver: &dyn Saver,
    thread: &str,
    steps: u16,
    report: &(dyn Fn(String) -> io::Result<()> + Sync),
) -> Outcome {
    let (first, mut all) = first_judged(thread)?;
    let (mut last, mut n) = match head(saver, thread).await? {
        None => (first.commit(saver).await?, 1),
        Some(head) => {
            let n = whole(saver, &head).await?;
            let list = head.checkpoint.channels.get("all").and_then(|entry| entry.stored.value());
            all = list.and_then(|list| list.as_list()).cloned().unwrap_or_default();
            (head.key(), u16::try_from(n)?)
        }
    };
    for _ in 0..steps {
        n += 1;
        let early = says(n, "a")?;
        saver.put_writes(&last, &early).await?;
        report(format!("{thread} put {n}"))?;
        let mut step = judged(&last, n, &mut all)?;
        // A process crash loses nothing, flushed or not.
        step.commit.flush = if n % 3 == 0 { Flush::Now } else { Flush::WithNext };
        last = step.commit(saver).await?;
        report(format!("{thread} committed {n}"))?;
    }
    Ok(())
}

async fn killed_in_a_burst_of_commits(store: Store) -> Outcome {
    const ROUNDS: u64 = 5;
    for round in 0..ROUNDS {
        let mut child = Child::start(&store, BURST)?;
        let patience = scatter(store.settings.seed.wrapping_add(round)) % 60;
        let mut heard = Vec::new();
        for _ in 0..=patience {
            heard.push(child.hear().await?);
        }
        heard.extend(child.kill().await?);
        let saver = store.open().await?;
        for thread in THREADS {
            survived(&*saver, thread, &heard).await?;
        }
    }
    let saver = store.open().await?;
    go_on(&*saver, THREADS[0], 3, &|_| Ok(())).await
}

/// Fails unless everything reported for a thread exists, and nothing is incomplete.
async fn survived(saver: &dyn Saver, thread: &str, heard: &[String]) -> Outcome {
    let found = dump(saver, thread).await?;
    for (tuple, n) in found.iter().rev().zip(1_u16..) {
        check_eq!(whole(saver, tuple).await?, u64::from(n), "the {n}-th checkpoint of {thread}");
        check_eq!(tuple.parent, (n > 1).then(|| id(n - 1)), "the parent of checkpoint {n} of {thread}");
    }
    for line in heard {
        let mut words = line.split(' ');
        let (Some(of), Some(what), Some(Ok(n))) = (words.next(), words.next(), words.next().map(str::parse))
        else {
            return Err(Failure::new(format_args!("the child said {line:?}")));
        };
        if of != thread {
            continue;
        }
        let there = |n: u16| found.iter().find(|tuple| tuple.checkpoint.id == id(n));
        if what == "committed" {
            check!(there(n).is_some(), "checkpoint {n} of {thread} was acknowledged and is gone");
        } else {
            let row = there(n - 1).and_then(|tuple| tuple.writes.iter().find(|row| row.task == task_id(n)));
            check!(row.is_some(), "the task of step {n} of {thread} was acknowledged and is gone");
        }
    }
    Ok(())
}

async fn a_killed_call_happens_whole_or_not_at_all(store: Store) -> Outcome {
    const ROUNDS: u64 = 5;
    for call in Call::ALL {
        let saver = store.open().await?;
        let expected = Expected::of(call, &*saver).await?;
        drop(saver);
        for round in 0..ROUNDS {
            let thread = format!("{call:?}-{round}");
            call.prepare(&*store.open().await?, &thread).await?;
            let mut child = Child::start(&store, &format!("{call:?} {thread}"))?;
            check_eq!(child.hear().await?, "ready", "what the child says first");
            for _ in 0..scatter(store.settings.seed.wrapping_add(round)) % 3_000 * round {
                yield_now().await;
            }
            let last = child.kill().await?;
            let saver = store.open().await?;
            let happened = expected.settle(&*saver, &thread, &format!("killed in {call:?}")).await?;
            let acknowledged = last.iter().any(|line| line == "done");
            check!(happened || !acknowledged, "{call:?} was acknowledged, and the kill undid it");
            // Nothing that the dead process held blocks others.
            saver.delete_thread(&thread.as_str().into()).await?;
            check_eq!(head(&*saver, &thread).await?, None, "the thread after its deletion");
        }
    }
    Ok(())
}
