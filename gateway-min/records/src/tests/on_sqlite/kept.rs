//! Files with rows, kept in the repository as SQL: whatever changes later, they are read as they were written, and can
//! be continued.
//!
//! `WRITE_FIXTURE=1 cargo test -p threadkeep-records on_sqlite::kept` writes that of the newest schema. Do it before a
//! migration changes rows that are there, and name the file in [`SCHEMAS`].

use rusqlite::Connection;
use serde_json::json;

use super::support::*;
use crate::*;

/// The number of migrations that each file has.
const SCHEMAS: [i64; 1] = [19];

fn path(schema: i64) -> std::path::PathBuf {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    dir.join(format!("schema_{schema}.sql"))
}

/// Writes the file of the newest schema.
async fn write_fixture() {
    let fixture = fixture_with(EventBackend::Database).await;
    for (thread, id, status) in [("t", "r", RunStatus::Success), ("u", "s", RunStatus::Error)] {
        create_thread(&fixture.records, thread).await;
        start(&fixture.records, thread, id).await;
        let event = NewEvent::new("run.end", "outputs", json!({"said": "gr\u{fc}\u{df}e"}));
        fixture.records.events().append(thread, id, vec![event]).await.unwrap();
        fixture.records.runs().finish(id, &end(status)).await.unwrap();
    }
    fixture.records.close().await;
    let connection = Connection::open(fixture.place.path()).unwrap();
    let texts = |sql: &str| -> Vec<String> {
        let mut statement = connection.prepare(sql).unwrap();
        let rows = statement.query_map([], |row| row.get::<_, String>(0)).unwrap();
        rows.map(Result::unwrap).collect()
    };
    let made = |kind: &str| {
        let own = "name NOT LIKE 'sqlite\\_%' ESCAPE '\\'";
        let made = "SELECT sql || ';' FROM sqlite_master WHERE sql IS NOT NULL";
        texts(&format!("{made} AND type {kind} 'table' AND {own} ORDER BY rowid"))
    };
    let mut lines = made("=");
    let tables =
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_stat%' ORDER BY rowid";
    for table in texts(tables) {
        let columns = format!("SELECT '\"' || name || '\"' FROM pragma_table_info('{table}') ORDER BY cid");
        let columns = texts(&columns);
        let values: Vec<_> = columns.iter().map(|column| format!("quote({column})")).collect();
        if table == "sqlite_sequence" {
            // The rows above have filled it.
            lines.push("DELETE FROM sqlite_sequence;".to_owned());
        }
        lines.extend(texts(&format!(
            "SELECT 'INSERT INTO {table} ({}) VALUES (' || {} || ');' FROM {table}",
            columns.join(", "),
            values.join(" || ', ' || ")
        )));
    }
    lines.extend(made("<>"));
    let newest = texts("SELECT CAST(MAX(version) AS TEXT) FROM _sqlx_migrations");
    let file = path(newest[0].parse().unwrap());
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, lines.join("\n") + "\n").unwrap();
}

#[tokio::test]
async fn a_file_with_rows_of_each_schema_is_read_as_it_was_written_and_goes_on() {
    if std::env::var_os("WRITE_FIXTURE").is_some() {
        write_fixture().await;
    }
    for schema in SCHEMAS {
        let file = path(schema);
        let sql = std::fs::read_to_string(&file)
            .unwrap_or_else(|error| panic!("the fixture {}: {error}", file.display()));
        let place = Location::file();
        let connection = Connection::open(place.path()).unwrap();
        connection.execute_batch(&format!("PRAGMA foreign_keys = OFF; BEGIN; {sql} COMMIT;")).unwrap();
        connection.close().unwrap();
        for opened in 0..2 {
            let event_backend = EventBackend::Database;
            let options = RecordsOptions { event_backend, ..RecordsOptions::default() };
            let records = place.try_open(options).await.unwrap();
            for (id, of, status) in [("t", "r", RunStatus::Success), ("u", "s", RunStatus::Error)] {
                assert_eq!(thread(&records, id).await.thread_id, id);
                let row = run(&records, of).await;
                assert_eq!((row.thread_id.as_str(), row.status), (id, status));
                let events = records.events().list(&EventQuery::new(id, of)).await.unwrap();
                let [event] = &events[..] else { panic!("one event: {events:?}") };
                assert_eq!(event.content, json!({"said": "gr\u{fc}\u{df}e"}));
                until_free(&records, id).await;
                let next = format!("{of}{opened}");
                start(&records, id, &next).await;
                records.runs().finish(&next, &end(RunStatus::Success)).await.unwrap();
            }
            records.close().await;
        }
    }
}
