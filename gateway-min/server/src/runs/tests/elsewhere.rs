//! Following a run of another process.

use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _};
use serde_json::json;

use super::{Gateway, frames, script};
use crate::streams::bridge::{Frame, Subscription};
use threadkeep_records::{FrameBatch, MultitaskStrategy, NewRun, Records, RunEnd};

/// Waits until the run was looked at, and nothing was shown.
async fn looked(records: &Records, stream: &mut Subscription) {
    // A look is two statements. The first of these may belong to one that has begun before.
    let enough = records.commits().statements() + 4;
    while records.commits().statements() < enough {
        let shown = stream.next().now_or_never();
        assert!(matches!(shown, None | Some(Some(Frame::Heartbeat))), "{shown:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// So did the process that sends them.
#[tokio::test]
async fn the_last_frames_of_a_run_elsewhere_come_also_after_the_machine_stood_still() {
    let gateway = Gateway::start("full", &script()).await;
    let records = &gateway.app.records;
    // No task of this process works on it.
    let run = NewRun { run_id: "r".into(), thread_id: "t".into(), ..NewRun::default() };
    records.runs().admit(run, MultitaskStrategy::Reject).await.unwrap();
    let append = async |seq: u64, name: &str, ends: bool| {
        let frames = vec![json!([1, seq, name, "{}"])];
        let batch = FrameBatch { first_seq: seq, next_seq: seq + 1, frames, ends };
        records.runs().append_frames("t", "r", &batch, 0).await.unwrap();
    };
    append(0, "metadata", false).await;
    let run = records.runs().get("r").await.unwrap().unwrap();
    let mut stream = gateway.app.streams.follow(&run, None);
    while stream.next().await == Some(Frame::Heartbeat) {}

    records.runs().finish("r", &RunEnd::failed("no")).await.unwrap();
    looked(records, &mut stream).await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(10)).await;
    tokio::time::resume();
    looked(records, &mut stream).await;
    append(1, "values", true).await;
    let names: Vec<String> = frames(stream).await.into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["values", "end"]);
}
