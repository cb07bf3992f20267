//! How much memory clients without a key can take.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::Request;
use futures::stream;
use serde_json::json;

use super::COUNTING;
use super::support::Setup;

/// How many parts of 64 KiB are sent: 31 MiB, and a body may have 32.
const CHUNKS: usize = 496;
/// How much more memory the process may have meanwhile.
const MAX_GROWTH: u64 = 16 << 20;

/// The most memory that this process has had since the last reset, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[tokio::test]
async fn a_body_that_no_response_depends_on_is_not_kept() {
    let _alone = COUNTING.lock().await;
    let setup = Setup { sections: json!({"auth": {"enabled": true}}), ..Setup::on("sqlite", "delta") };
    let gateway = setup.start().await;
    for (method, path, status) in [("GET", "/health?x=1", 422), ("POST", "/sign-in", 404)] {
        // They share their bytes.
        let chunks = vec![Ok::<_, Infallible>(Bytes::from(vec![b'x'; 64 << 10])); CHUNKS];
        let body = Body::from_stream(stream::iter(chunks));
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        // Sets the peak to what is there now.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let before = peak();
        assert_eq!(gateway.send(request.body(body).unwrap()).await.status, status, "{path}");
        let growth = peak().saturating_sub(before);
        assert!(growth <= MAX_GROWTH, "{path}: {growth} bytes");
    }
}
