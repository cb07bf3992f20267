//! Many runs in one process release everything they used.

use std::time::Duration;

use futures::future::join_all;
use threadkeep::state::HistoryQuery;

use super::{Gateway, MODES, ask, script};
use threadkeep_records::{NewThread, RunQuery};

const THREADS: usize = 100;
const RUNS: usize = 10;

/// Scenario 24.
#[tokio::test]
async fn a_thousand_runs_leave_nothing_in_memory_but_what_has_a_bound() {
    for mode in MODES {
        let gateway = Gateway::start(mode, &script()).await;
        let app = &gateway.app;
        for thread in (0..THREADS).map(|n| format!("t{n}")) {
            let row = NewThread { thread_id: thread, ..NewThread::default() };
            app.records.threads().create(row).await.unwrap();
        }
        for turn in 0..RUNS {
            let turns = (0..THREADS).map(async |n| {
                let thread = format!("t{n}");
                let request = ask(&format!("turn {turn}"));
                let created = gateway.create_on(&thread, request, None).await.unwrap();
                app.runs.ended(&created.run.run_id).await.unwrap();
            });
            join_all(turns).await;
        }
        assert_eq!(app.runs.local.all().len(), 0, "{mode}");
        assert!(app.threads.accessor().remembered() <= 64, "`accessor_graph_max` of them");
        // The time for clients to reconnect at the end of their streams is over.
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(61)).await;
        while app.streams.counts().0 > 0 {
            tokio::task::yield_now().await;
        }
        tokio::time::resume();
        assert_eq!(app.background.len(), 0);
        // All of them ran.
        let every = RunQuery { status: None, limit: 100, offset: 0 };
        for thread in (0..THREADS).map(|n| format!("t{n}")) {
            assert_eq!(app.records.runs().list_by_thread(&thread, &every).await.unwrap().len(), RUNS);
            let history = app
                .threads
                .accessor()
                .history(&thread.as_str().into(), HistoryQuery::default())
                .await
                .unwrap();
            assert_eq!(history.len(), 3 * RUNS, "{mode}: input, answer and note of each");
        }
    }
}
