//! Another SQLite program opens the stores of a running gateway, as an operator does who types `sqlite3 checkpoints.db`:
//! nothing is lost. A gateway that loses its locks on a file, which closing any other descriptor of that file does, has its
//! log deleted by the next program that closes the database.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Gateway, configured, texts};

fn beside(path: &Path, end: &str) -> PathBuf {
    PathBuf::from(format!("{}{end}", path.display()))
}

/// Asserts that a process has the database and its shared memory locked.
async fn assert_locked(process: u32, path: &Path) {
    for file in [path.to_owned(), beside(path, "-shm")] {
        let (process, inode) = (process.to_string(), format!(":{}", fs::metadata(&file).unwrap().ino()));
        let held = || {
            fs::read_to_string("/proc/locks").unwrap().lines().any(|line| {
                let fields: Vec<_> = line.split_whitespace().collect();
                fields.contains(&"POSIX")
                    && fields.contains(&process.as_str())
                    && fields.iter().any(|field| field.ends_with(&inode))
            })
        };
        // The system's table is read in pieces and can miss a line while others take locks. A lost lock stays lost.
        for attempt in 0.. {
            if held() {
                break;
            }
            assert!(attempt < 200, "no lock on {}", file.display());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Opens a database, reads, and cleans up if it was the last.
fn read(path: &Path, table: &str) {
    let other = rusqlite::Connection::open(path).unwrap();
    let count = format!("SELECT count(*) FROM {table}");
    assert!(other.query_row(&count, [], |row| row.get::<_, i64>(0)).unwrap() > 0);
}

#[tokio::test]
async fn another_sqlite_program_beside_a_gateway_loses_nothing() {
    for mode in ["full", "delta"] {
        let dir = configured(mode);
        let data = dir.path().join("state/data");
        let stores = [(data.join("checkpoints.db"), "checkpoint"), (data.join("gateway.db"), "runs")];
        let mut expected = Vec::new();
        for round in 0..2 {
            let gateway = Gateway::start(dir.path());
            if round == 0 {
                gateway.post("/api/threads", serde_json::json!({"thread_id": "t"})).await;
            }
            for turn in 0..3 {
                let text = format!("{round}-{turn}");
                gateway.ask(&text).await;
                expected.extend([text.clone(), format!("You said: {text}")]);
                for (path, table) in &stores {
                    assert_locked(gateway.child.id(), path).await;
                    let log = beside(path, "-wal");
                    let before = fs::metadata(&log).unwrap().ino();
                    read(path, table);
                    assert_eq!(fs::metadata(&log).unwrap().ino(), before, "{} was deleted", log.display());
                    assert_locked(gateway.child.id(), path).await;
                }
            }
            gateway.signal("-9");
        }
        let gateway = Gateway::start(dir.path());
        let state = gateway.get("/api/threads/t/state").await;
        assert_eq!(texts(&state["values"]), expected, "{mode}");
        let runs = gateway.get("/api/threads/t/runs").await;
        let ended = runs.as_array().unwrap().iter().filter(|run| run["status"] == "success").count();
        assert_eq!(ended, 6, "{runs}");
    }
}
