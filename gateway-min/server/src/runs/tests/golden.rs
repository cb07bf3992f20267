//! Golden transcripts: the exact bytes of a run's stream, per stream mode and for all at once, with ids and times masked.

use std::collections::HashMap;

use axum::body::to_bytes;
use regex::Regex;
use serde_json::{Value as Json, json};

use super::{Gateway, STREAM_MODES, ask, options};
use crate::http::sse;
use crate::runs::request::{RunRequest, StreamMode};

/// A turn with a tool call, streamed in few chunks.
fn script() -> Json {
    json!({"chunk_chars": 12, "rules": [{"answers": [
        {"text": "I will write.", "tool_calls": [{"id": "call_1", "name": "write_file", "args": {"path": "a.txt", "content": "A"}}],
         "usage": {"input_tokens": 11, "output_tokens": 7}},
        {"text": "Done: it is there.", "usage": {"input_tokens": 19, "output_tokens": 5}},
    ]}]})
}

/// The transcript with every UUID replaced by its order of appearance, and times by placeholders.
fn masked(transcript: &str) -> String {
    let uuid = Regex::new("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").unwrap();
    let mut seen = HashMap::new();
    let numbered = uuid.replace_all(transcript, |found: &regex::Captures<'_>| {
        let next = seen.len() + 1;
        format!("<uuid {}>", seen.entry(found[0].to_owned()).or_insert(next))
    });
    let time = Regex::new(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00").unwrap();
    let numbered = time.replace_all(&numbered, "<time>");
    Regex::new(r"(?m)^id: \d+-").unwrap().replace_all(&numbered, "id: <ms>-").into_owned()
}

async fn transcript(mode: &'static str, modes: &[StreamMode]) -> String {
    let gateway = Gateway::start(mode, &script()).await;
    let request = RunRequest { options: options(modes), ..ask("write it") };
    let created = gateway.create(request).await.unwrap();
    let response = sse::response(created.stream, &"t".into(), &created.run.run_id);
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    // On a busy machine there may be fifteen seconds between two frames.
    masked(&std::str::from_utf8(&body).unwrap().replace(": heartbeat\n", ""))
}

#[tokio::test]
async fn the_transcript_of_each_stream_mode() {
    for mode in STREAM_MODES {
        insta::assert_snapshot!(mode.event(), transcript("full", &[mode]).await);
    }
    insta::assert_snapshot!("all", transcript("full", &STREAM_MODES).await);
}

/// No event says the mode, or what belongs to it.
#[tokio::test]
async fn delta_mode_streams_what_full_mode_streams() {
    for mode in STREAM_MODES {
        assert_eq!(transcript("delta", &[mode]).await, transcript("full", &[mode]).await);
    }
}
