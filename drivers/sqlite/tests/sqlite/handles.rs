//! What a handle remembers of a thread to which another one writes.

use std::path::Path;

use threadkeep::checkpoint::Stored;
use threadkeep::saver::{CheckpointSelector, Rewrite, Saver};
use threadkeep::value::ListValue;
use threadkeep_sqlite::{Options, SqliteSaver};

use crate::common::{MESSAGES, Talk, message};

fn two(dir: &Path) -> (SqliteSaver, SqliteSaver) {
    // The transaction after a dictionary was trained reads it.
    let options = Options { compression: false, ..Options::default() };
    let open = || SqliteSaver::open(dir.join("db"), &options).unwrap();
    (open(), open())
}

async fn say(saver: &SqliteSaver, talk: &mut Talk, number: usize) {
    let step = talk.say(&message(number, 200));
    saver.commit(step.clone()).await.unwrap();
    talk.accept(&step);
}

async fn reads(saver: &SqliteSaver, talk: &Talk) {
    let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
    assert_eq!(head.checkpoint.channels[MESSAGES].stored.value(), Some(&talk.messages.clone().into()));
}

/// What others add to a thread is read, but not what is known of it.
#[tokio::test]
async fn a_step_beside_another_writer_reads_what_that_one_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let (mut mine, mut theirs, mut both) = (Talk::new("mine"), Talk::new("theirs"), Talk::new("both"));
    let mut most = Vec::new();
    for number in 0..400 {
        for (saver, talk) in [(&a, &mut mine), (&b, &mut theirs), ([&a, &b][number % 2], &mut both)] {
            say(saver, talk, number).await;
        }
        if number == 39 || number == 399 {
            most.extend([&a, &b].map(|saver| saver.stats().most_rows));
        }
    }
    assert!(most[0] > 5 && most[2..] == most[..2], "{most:?} rows in a transaction");
    for talk in [&mine, &theirs, &both] {
        reads(&a, talk).await;
        reads(&b, talk).await;
    }
    assert_eq!(a.check().await.unwrap(), []);
}

/// The other handle remembers where they were, and their numbers are those of other elements now.
#[tokio::test]
async fn elements_that_another_handle_deleted_are_stored_again() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let mut talk = Talk::new("t");
    for number in 0..6 {
        say(&b, &mut talk, number).await;
    }
    // Of the messages, only the first one is left.
    let mut image = a.read_thread(&talk.thread).await.unwrap();
    let (_, mut head) = image.checkpoints.pop_last().unwrap();
    head.parent = None;
    head.checkpoint.applied.clear();
    let first = talk.messages.iter().take(1).cloned().collect::<ListValue>();
    head.checkpoint.channels.get_mut(MESSAGES).unwrap().stored = Stored::Value(first.into());
    let rewrite = Rewrite { remove: image.checkpoints.into_keys().collect(), put: vec![head] };
    a.rewrite_thread(&talk.thread, &image.revision, rewrite).await.unwrap();
    talk.resume(&a.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap());
    say(&a, &mut talk, 77).await;
    say(&a, &mut talk, 78).await;
    for number in 1..6 {
        say(&b, &mut talk, number).await;
        reads(&a, &talk).await;
    }
    a.delete_thread(&talk.thread).await.unwrap();
    let mut again = Talk::new("t");
    for number in (0..6).rev() {
        say(if number > 3 { &a } else { &b }, &mut again, number).await;
        reads(&b, &again).await;
    }
    assert_eq!(b.check().await.unwrap(), []);
}
