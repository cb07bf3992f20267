//! What a read of many checkpoints asks the database.

use std::sync::Arc;

use threadkeep::saver::{ListQuery, Load};

use super::common::Talk;
use super::statements::Opened;
use crate::read::memory::Memory;
use crate::read::{queries, summary};
use crate::sql::Db;

/// Each checkpoint has an element that no other has.
#[tokio::test]
async fn a_page_and_a_whole_thread_are_read_with_few_statements() {
    const LENGTH: usize = 200;
    let (store, mut talk) = (Opened::new(), Talk::new("t"));
    for number in 0..LENGTH {
        store.say(&mut talk, number).await;
    }
    let db = Db::reader(&store.dir.path().join("db"), &store.options).unwrap();
    let asked = |read: &dyn Fn(&Memory) -> usize| {
        let before = db.statements.get();
        assert_eq!(read(&Memory::new(Arc::default())), LENGTH);
        db.statements.get() - before
    };
    let list = |memory: &Memory, load: Load| {
        let query = ListQuery { load, ..ListQuery::new(&talk.thread) };
        queries::list(&db, memory, &query).unwrap().len()
    };
    for (what, statements) in [
        ("a page", asked(&|memory| list(memory, Load::All))),
        ("a page without values", asked(&|memory| list(memory, Load::None))),
        (
            "the thread",
            asked(&|memory| queries::read_thread(&db, memory, &talk.thread).unwrap().checkpoints.len()),
        ),
        (
            "its summary",
            asked(&|memory| {
                let summary = summary::summary(&db, &memory.names, &talk.thread).unwrap();
                summary.values().map(|chain| usize::try_from(chain.checkpoints).unwrap()).sum()
            }),
        ),
    ] {
        assert!(statements <= 20, "{what}: {statements} statements");
    }
}
