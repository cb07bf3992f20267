//! Clients that take more than their share, over sockets: the others are still served.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use threadkeep_agent::model::scripted::gate;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::support::{Gateway, Setup};

/// Far more than any of this takes; an unserved client would wait for ever.
const BOUND: Duration = Duration::from_mins(10);

/// Serves the gateway on a local port.
async fn serve(gateway: &Gateway) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = gateway.router();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// Sends the head of a request, and its body if there is one.
async fn open(address: SocketAddr, method: &str, path: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

/// The whole answer to a request.
async fn answer(address: SocketAddr, method: &str, path: &str, body: &str) -> String {
    let mut stream = open(address, method, path, body).await;
    let mut answer = Vec::new();
    timeout(BOUND, stream.read_to_end(&mut answer)).await.expect("not served").unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

/// Another client: creates a thread and runs a turn on it.
async fn others_are_served(address: SocketAddr, thread: &str) {
    assert!(answer(address, "GET", "/health", "").await.starts_with("HTTP/1.1 200"));
    let body = json!({ "thread_id": thread }).to_string();
    assert!(answer(address, "POST", "/api/threads", &body).await.starts_with("HTTP/1.1 200"));
    let body = json!({"input": {"messages": [{"role": "user", "content": "hello"}]}}).to_string();
    let said = answer(address, "POST", &format!("/api/threads/{thread}/runs/wait"), &body).await;
    assert!(said.starts_with("HTTP/1.1 200") && said.contains("You said: hello"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_of_100_mb_is_refused_with_a_413_that_the_client_can_read() {
    const SIZE: usize = 100 * 1024 * 1024;
    let gateway = Setup::default().start().await;
    let address = serve(&gateway).await;
    for chunked in [false, true] {
        let framing =
            if chunked { "transfer-encoding: chunked".to_owned() } else { format!("content-length: {SIZE}") };
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!(
            "POST /api/threads HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n{framing}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // A client that sends everything before it reads the answer.
        let chunk = vec![b' '; 1024 * 1024];
        for n in 0..SIZE / chunk.len() {
            if chunked {
                stream.write_all(format!("{:x}\r\n", chunk.len()).as_bytes()).await.unwrap();
            }
            timeout(BOUND, stream.write_all(&chunk)).await.expect("stalled").unwrap();
            if chunked {
                stream.write_all(b"\r\n").await.unwrap();
            }
            if n == 50 {
                others_are_served(address, &format!("t-{chunked}")).await;
            }
        }
        if chunked {
            stream.write_all(b"0\r\n\r\n").await.unwrap();
        }
        let mut answer = String::new();
        timeout(BOUND, stream.read_to_string(&mut answer)).await.expect("no answer").unwrap();
        assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
        let body = r#"{"detail":"Request body is too large: at most 33554432 bytes are accepted"}"#;
        assert!(answer.ends_with(body), "{answer}");
    }
}

/// The run ends and every reader gets everything, although one client's buffers stay full.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_never_reads_holds_up_nobody() {
    // More than the system buffers for a socket.
    let long = "x".repeat(8 * 1024 * 1024);
    let script = json!({"chunk_chars": long.len(), "rules": [
        {"when": {"contains": ["long"]}, "answers": [{"text": long}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    let gateway = Setup { script, ..Setup::default() }.start().await;
    let address = serve(&gateway).await;
    gateway.create("t").await;
    let body = json!({
        "input": {"messages": [{"role": "user", "content": "long"}]},
        "stream_mode": ["values", "updates", "messages-tuple"], "on_disconnect": "continue",
    });
    let mut deaf = open(address, "POST", "/api/threads/t/runs/stream", &body.to_string()).await;
    // Its answer has begun, so the run is known; the client reads no more.
    deaf.read_exact(&mut [0; 1]).await.unwrap();
    others_are_served(address, "other").await;
    let run = gateway.get("/api/threads/t/runs").await.ok()[0]["run_id"].as_str().unwrap().to_owned();
    let read = answer(address, "GET", &format!("/api/threads/t/runs/{run}/stream"), "").await;
    assert!(read.contains("event: end") || read.contains("event: gap"), "{}", &read[..read.len().min(500)]);
    timeout(BOUND, gateway.join("t", &run)).await.expect("the run waits for its reader");
    assert_eq!(gateway.run("t", &run).await["status"], "success");
    drop(deaf);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_open_streams_leave_room_for_others_and_all_get_the_end() {
    const STREAMS: usize = 1000;
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    }
    let script = json!({"rules": [
        {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": "thousand"}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    let gateway = Setup { script, ..Setup::default() }.start().await;
    let address = serve(&gateway).await;
    gateway.create("t").await;
    let run = gateway.start_run("t", "wait").await;
    gate("thousand").reached().await;
    let path = format!("/api/threads/t/runs/{run}/stream");
    let mut streams = JoinSet::new();
    let (opened, mut open_now) = tokio::sync::mpsc::unbounded_channel();
    for _ in 0..STREAMS {
        let mut stream = open(address, "GET", &path, "").await;
        let opened = opened.clone();
        streams.spawn(async move {
            let mut read = Vec::new();
            while !String::from_utf8_lossy(&read).contains("event: metadata") {
                assert_ne!(stream.read_buf(&mut read).await.unwrap(), 0, "the stream is open");
            }
            opened.send(()).unwrap();
            stream.read_to_end(&mut read).await.unwrap();
            String::from_utf8_lossy(&read).contains("event: end")
        });
    }
    for _ in 0..STREAMS {
        timeout(BOUND, open_now.recv()).await.expect("a stream is not served").unwrap();
    }
    others_are_served(address, "other").await;
    gate("thousand").open();
    while let Some(ended) = timeout(BOUND, streams.join_next()).await.expect("a stream does not end") {
        assert!(ended.unwrap());
    }
}

/// A text of an error repeats what the request says, but not a megabyte of it. The letters have two bytes each: none is
/// cut in half.
#[tokio::test]
async fn no_error_repeats_a_megabyte_of_its_request() {
    const ANSWER_MAX: usize = 16 * 1024;
    let gateway = Setup::default().start().await;
    gateway.create("t").await;
    gateway.ask("t", "hello").await;
    let huge = "\u{e4}".repeat(512 * 1024);
    let many: Vec<String> = (0..100_000).map(|n| format!("mode-{n}")).collect();
    let run = "/api/threads/t/runs/wait";
    let requests = [
        (run, json!({"stream_mode": huge}), 422, "Unsupported stream mode(s): "),
        (run, json!({"stream_mode": many}), 422, "Unsupported stream mode(s): mode-0, mode-1"),
        (run, json!({"context": {"model_name": huge}}), 400, "Model '"),
        (run, json!({"context": {"model_name": {"a": huge}}}), 400, "Model '"),
        (run, json!({"checkpoint_id": huge}), 404, "Checkpoint "),
        (run, json!({"checkpoint": {huge.as_str(): null}}), 400, "checkpoint "),
        (run, json!({"checkpoint": {"checkpoint_ns": huge}}), 400, "checkpoint checkpoint_ns"),
        (run, json!({"input": {"messages": [{"role": huge, "content": "x"}]}}), 400, "Invalid message"),
        (run, json!({"assistant_id": huge}), 422, "Assistant not found"),
        (run, json!({huge.as_str(): 1}), 422, "Extra inputs"),
        (
            "/api/threads/t/state",
            json!({"values": {huge.as_str(): 1}}),
            422,
            "Unknown thread-state field(s): ",
        ),
        ("/api/threads/t/runs/regenerate/prepare", json!({"message_id": huge}), 404, "Message "),
    ];
    for (path, body, status, text) in requests {
        let answer = gateway.post(path, body).await;
        let said = answer.body.to_string();
        let shown: String = said.chars().take(300).collect();
        assert_eq!(answer.status, status, "{path}: {shown}");
        assert!(said.contains(text), "{path}: {shown}");
        assert!(said.len() < ANSWER_MAX, "{path}: {} bytes: {shown}", said.len());
    }
}
