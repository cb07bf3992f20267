//! A server without room on its disk, which a trigger plays.

use threadkeep::Error;
use threadkeep::saver::{CheckpointSelector, Rewrite, Saver};

use crate::common::damage::connect;
use crate::common::talk::{Talk, note};
use crate::common::{database, open};

/// Raised where the change is made, or when it is committed.
const FULL: [&str; 3] = [
    "CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE OR DELETE ON threadkeep_checkpoint
        FOR EACH ROW EXECUTE FUNCTION full_disk()",
    "CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON threadkeep_thread
        FOR EACH ROW EXECUTE FUNCTION full_disk()",
    "CREATE CONSTRAINT TRIGGER full_disk AFTER INSERT OR UPDATE OR DELETE ON threadkeep_checkpoint
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION full_disk()",
];

fn is_full(result: &Result<(), Error>) -> bool {
    matches!(result, Err(Error::Unavailable { reason, .. }) if reason.contains("the server's disk is full; free some space"))
}

#[tokio::test]
async fn a_full_disk_of_the_server_is_named_and_nothing_is_stored_until_there_is_room() {
    let database = database().await;
    let saver = open(database.url()).await;
    let client = connect(database.url()).await;
    let function = "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$";
    client.batch_execute(function).await.unwrap();
    let mut talk = Talk::new("t");
    for number in 0..3 {
        let step = talk.say(&note(number));
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
    }
    for (number, full) in FULL.into_iter().enumerate() {
        let before = saver.read_thread(&talk.thread).await.unwrap();
        client.batch_execute(full).await.unwrap();
        let step = talk.say(&note(3 + number));
        let committed = saver.commit(step.clone()).await.map(|_| ());
        assert!(is_full(&committed), "{full}: {committed:?}");
        let newest = before.checkpoints.keys().next_back().unwrap().clone();
        let rewrite = Rewrite { remove: [newest].into(), put: Vec::new() };
        let rewritten = saver.rewrite_thread(&talk.thread, &before.revision, rewrite).await;
        assert!(is_full(&rewritten), "{full}: {rewritten:?}");
        assert!(
            saver.read_thread(&talk.thread).await.unwrap() == before,
            "{full}: reading goes on, of what was there"
        );
        client.batch_execute("DROP TRIGGER full_disk ON threadkeep_checkpoint").await.ok();
        client.batch_execute("DROP TRIGGER full_disk ON threadkeep_thread").await.ok();
        saver.commit(step.clone()).await.unwrap();
        talk.accept(&step);
        let head = saver.get(&CheckpointSelector::head(&talk.thread)).await.unwrap().unwrap();
        assert_eq!(head.checkpoint.id, step.checkpoint.id);
    }
}
