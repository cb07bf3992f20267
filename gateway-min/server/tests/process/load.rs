//! The load figure of `make load`, with few turns: it runs, and its report is complete.

use std::path::PathBuf;

use tempfile::TempDir;
use threadkeep_benches::case::Mode;
use threadkeep_benches::load::{Load, Row, StoreKind, table};

fn load(gateway: PathBuf, scratch: &TempDir) -> Load {
    Load {
        gateway,
        langgraph: None,
        scratch: scratch.path().to_owned(),
        stores: vec![StoreKind::Sqlite, StoreKind::Postgres],
        modes: vec![Mode::Full, Mode::Delta(2)],
        threads: 4,
        turns: 2,
        frames: vec!["values".to_owned(), "messages-tuple".to_owned()],
        follow: false,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_load_ends_well_on_every_store_in_every_mode() {
    let (scratch, mut out) = (TempDir::new().unwrap(), Vec::new());
    let rows = load(env!("CARGO_BIN_EXE_threadkeep").into(), &scratch).run(&mut out).await.unwrap();
    let cases: Vec<_> = rows.iter().map(|row| (row.store, row.mode, row.threads, row.turns_done)).collect();
    let expected = [
        (StoreKind::Sqlite, Mode::Full, 4, 8),
        (StoreKind::Sqlite, Mode::Delta(2), 4, 8),
        (StoreKind::Postgres, Mode::Full, 4, 8),
        (StoreKind::Postgres, Mode::Delta(2), 4, 8),
    ];
    assert_eq!(cases, expected);
    for row in &rows {
        assert!(row.turns_per_s > 0.0 && row.gateway_cpu_ms > 0.0, "{row:?}");
        assert!(0.0 < row.first_frame_p50_ms && row.first_frame_p50_ms <= row.first_frame_p99_ms, "{row:?}");
        assert!(row.first_frame_p99_ms <= row.turn_p99_ms && row.turn_p50_ms <= row.turn_p99_ms, "{row:?}");
        assert!(row.rss_end > 0 && row.rss_end <= row.rss_peak, "{row:?}");
        assert!(row.turn_first10pct_ms > 0.0 && row.turn_last10pct_ms > 0.0, "{row:?}");
        assert!(row.gateway_calls > 0.0 && row.gateway_waits > 0.0, "{row:?}");
        assert!(row.record_statements.is_some_and(|count| count > 0.0), "{row:?}");
        assert_eq!((row.follower_cpu_ms, row.frame_delay_p50_ms), (None, None), "nobody follows");
        assert_eq!(row.gateway_cpu_last10pct_ms, None, "threads are not at the same turn");
        let sqlite = row.store == StoreKind::Sqlite;
        assert_eq!(row.record_round_trips.is_some_and(|trips| trips > 0.0), !sqlite, "{row:?}");
        assert_eq!(
            (row.checkpoint_flushes.is_some(), row.server_cpu_ms.is_some()),
            (sqlite, !sqlite),
            "{row:?}"
        );
    }
    let text = String::from_utf8(out).unwrap();
    let kept: Vec<Row> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(table(&kept), table(&rows));
    assert_eq!(table(&rows).lines().count(), 5, "{}", table(&rows));
    assert!(
        std::fs::read_dir(scratch.path()).unwrap().next().is_none(),
        "the gateways' directories are gone"
    );
}

/// Of a single thread the row says what its first and its last turns cost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_of_one_thread_shows_whether_a_turn_grows_with_it() {
    let scratch = TempDir::new().unwrap();
    let mut load = load(env!("CARGO_BIN_EXE_threadkeep").into(), &scratch);
    (load.stores, load.modes) = (vec![StoreKind::Sqlite], vec![Mode::Full]);
    (load.threads, load.frames) = (1, vec!["updates".to_owned()]);
    for turns in [1, 12] {
        load.turns = turns;
        let rows = load.run(std::io::sink()).await.unwrap();
        let row = &rows[0];
        assert_eq!((row.turns_done, rows.len()), (turns, 1), "{row:?}");
        let tenths = [row.gateway_cpu_first10pct_ms, row.gateway_cpu_last10pct_ms];
        assert_eq!(tenths.map(|cpu| cpu.is_some()), [turns > 1; 2], "{row:?}");
        assert!(row.turn_first10pct_ms > 0.0 && row.turn_last10pct_ms > 0.0, "{row:?}");
    }
}

/// Each stream is read from a second process on the same database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_load_can_be_followed_on_another_process() {
    let (scratch, mut out) = (TempDir::new().unwrap(), Vec::new());
    let mut load = load(env!("CARGO_BIN_EXE_threadkeep").into(), &scratch);
    (load.stores, load.modes, load.follow) = (vec![StoreKind::Postgres], vec![Mode::Full], true);
    let rows = load.run(&mut out).await.unwrap();
    assert_eq!((rows.len(), rows[0].turns_done, rows[0].followed), (1, 8, true));
    assert!(table(&rows).contains("postgres, followed"), "{}", table(&rows));
    assert!(rows[0].follower_cpu_ms.is_some(), "the other process's work is in no other figure");
    let late = |p50: Option<f64>, p99: Option<f64>| assert!(p50.is_some() && p50 <= p99, "{p50:?} {p99:?}");
    late(rows[0].frame_delay_p50_ms, rows[0].frame_delay_p99_ms);
    late(rows[0].end_delay_p50_ms, rows[0].end_delay_p99_ms);
    load.stores = vec![StoreKind::Sqlite];
    let error = load.run(out).await.unwrap_err().to_string();
    assert!(error.contains("--store postgres"), "{error}");
}

#[tokio::test]
async fn a_gateway_that_does_not_start_is_an_error_that_says_so() {
    let scratch = TempDir::new().unwrap();
    let mut load = load("/bin/false".into(), &scratch);
    load.stores = vec![StoreKind::Sqlite];
    let error = load.run(std::io::sink()).await.unwrap_err();
    assert_eq!(format!("{error:#}"), "sqlite, full: the gateway ended: it printed nothing");
}
