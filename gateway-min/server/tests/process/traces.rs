//! Traces as a collector receives them: the tree of a turn, what is left out, and an unreachable collector.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::{Span, Status, status::StatusCode as SpanStatus};
use prost::Message as _;
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use threadkeep_config::{KeyFile, Role};

use super::{Gateway, client, command};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// The requests that a collector received.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<(HeaderMap, Bytes)>>>);

impl Collector {
    /// Starts one; returns its address.
    async fn start() -> (Self, String) {
        Self::start_after(0).await
    }

    /// Starts one that says nothing on its first `silent` connections.
    async fn start_after(silent: usize) -> (Self, String) {
        async fn take(State(all): State<Collector>, headers: HeaderMap, body: Bytes) -> StatusCode {
            all.0.lock().unwrap().push((headers, body));
            StatusCode::OK
        }
        let collector = Self::default();
        let routes = Router::new().route("/v1/traces", post(take)).with_state(collector.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            let mut held = Vec::new();
            while held.len() < silent {
                held.push(listener.accept().await.unwrap());
            }
            axum::serve(listener, routes).await
        });
        (collector, address)
    }

    fn spans(&self) -> Vec<Span> {
        let all = self.0.lock().unwrap();
        let exports = all.iter().map(|(_, body)| ExportTraceServiceRequest::decode(body.clone()).unwrap());
        let scopes =
            exports.flat_map(|export| export.resource_spans).flat_map(|resource| resource.scope_spans);
        scopes.flat_map(|scope| scope.spans).collect()
    }

    /// The spans, as soon as all that are wanted are there. They come in several requests, and the gateway ends before
    /// a collector that is late has read them.
    async fn spans_once(&self, all_there: impl Fn(&[Span]) -> bool) -> Vec<Span> {
        let until = Instant::now() + Duration::from_mins(1);
        loop {
            let spans = self.spans();
            if Instant::now() >= until || all_there(&spans) {
                return spans;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// A gateway whose script produces what the tests look for.
fn configured(telemetry: Json) -> TempDir {
    let dir = TempDir::new().unwrap();
    let usage = json!({"input_tokens": 11, "output_tokens": 7});
    let call = json!({"name": "write_file", "args": {"path": "a.txt", "content": "words-of-the-file"}});
    let unknown = json!({"name": "words-of-the-model", "args": {}});
    let failure = json!({"kind": "fatal", "message": "words-of-the-provider"});
    let script = json!({"rules": [
        {"when": {"contains": ["fail"]}, "answers": [{"error": failure}]},
        {"answers": [
            {"text": "words-of-the-answer", "tool_calls": [call, unknown], "usage": usage},
            {"text": "words-of-the-end", "usage": usage},
        ]},
    ]});
    std::fs::write(dir.path().join("script.json"), script.to_string()).unwrap();
    let config = json!({
        "config_version": 49,
        "auth": {"enabled": true},
        "database": {"backend": "sqlite"},
        "models": [{"name": "m", "use": "scripted", "model": "m", "script": "script.json"}],
        "telemetry": {"traces": telemetry},
    });
    std::fs::write(dir.path().join("config.yaml"), config.to_string()).unwrap();
    dir
}

fn key(dir: &Path) -> String {
    let keys = KeyFile::new(&dir.join("state/api-keys.json"));
    keys.create("words-of-the-user", Role::Admin).unwrap().1.expose().to_owned()
}

async fn say(gateway: &Gateway, key: &str, text: &str) -> u16 {
    let input = json!({"messages": [{"role": "user", "content": text}]});
    let request = gateway.client.post(format!("{}/api/threads/t/runs/wait", gateway.base));
    let request = request.header("x-api-key", key).header("traceparent", format!("00-{TRACE}-{PARENT}-01"));
    request.json(&json!({ "input": input })).send().await.unwrap().status().as_u16()
}

async fn create_thread(gateway: &Gateway, key: &str) {
    let request = gateway.client.post(format!("{}/api/threads", gateway.base)).header("x-api-key", key);
    request.json(&json!({"thread_id": "t"})).send().await.unwrap().error_for_status().unwrap();
}

/// Stops it as an operator does, and waits for its end.
fn stop(gateway: &mut Gateway) {
    gateway.signal("-TERM");
    assert!(gateway.child.wait().unwrap().success());
}

fn hex(id: &[u8]) -> String {
    use std::fmt::Write as _;
    id.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn attributes(span: &Span) -> BTreeMap<&str, String> {
    let shown = |value: &Value| match value {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        other => format!("{other:?}"),
    };
    let attribute = |entry: &'_ opentelemetry_proto::tonic::common::v1::KeyValue| {
        shown(entry.value.as_ref().unwrap().value.as_ref().unwrap())
    };
    span.attributes.iter().map(|entry| (entry.key.as_str(), attribute(entry))).collect()
}

/// The names under the span with this id, each with its depth, ordered by start.
fn tree(spans: &[Span], id: &[u8], depth: usize, found: &mut Vec<String>) {
    let mut below: Vec<&Span> = spans.iter().filter(|span| span.parent_span_id == id).collect();
    below.sort_by_key(|span| span.start_time_unix_nano);
    for span in below {
        found.push(format!("{}{}", "  ".repeat(depth), span.name));
        tree(spans, &span.span_id, depth + 1, found);
    }
}

/// Whether it is of the request that no route matches.
fn is_unknown(span: &Span) -> bool {
    span.name == "GET unknown route"
}

fn is_in_trace(span: &Span) -> bool {
    hex(&span.trace_id) == TRACE
}

fn failed(span: &Span) -> bool {
    matches!(&span.status, Some(Status { code, .. }) if *code == SpanStatus::Error as i32)
}

// The collector answers while the test waits for the gateway to end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_is_a_tree_of_spans_that_tells_nothing_of_what_was_said() {
    let (collector, address) = Collector::start().await;
    let dir = configured(json!({
        "enabled": true, "endpoint": address, "service_name": "here", "headers": {"x-collector": "words-of-the-header"},
    }));
    let key = key(dir.path());
    let mut gateway = Gateway::start(dir.path());
    create_thread(&gateway, &key).await;
    assert_eq!(say(&gateway, &key, "words-of-the-question").await, 200);
    say(&gateway, &key, "fail with words-of-the-question").await;
    assert_eq!(say(&gateway, "wrong-key", "words-of-the-question").await, 401);
    let unknown = gateway.client.get(format!("{}/api/words-of-the-path", gateway.base));
    assert_eq!(unknown.header("x-api-key", &key).send().await.unwrap().status(), 404);
    stop(&mut gateway);

    let route = "POST /api/threads/{thread_id}/runs/wait";
    let expected = [
        route,
        "  run",
        "    superstep __input__",
        "      commit",
        "    superstep model",
        "      chat m",
        "      commit",
        "    superstep tools",
        "      tool write_file",
        "      tool _OTHER",
        "      commit",
        "    superstep model",
        "      chat m",
        "      commit",
        "    commit",
        route,
        "  run",
        "    superstep __input__",
        "      commit",
        "    superstep model",
        "      chat m",
        "      commit",
        route,
    ];
    let all_there = |spans: &[Span]| {
        let in_trace = spans.iter().filter(|span| is_in_trace(span)).count();
        in_trace >= expected.len() && spans.iter().any(is_unknown)
    };
    let spans = collector.spans_once(all_there).await;
    let mut found = Vec::new();
    let of_client: Vec<u8> =
        (0..8).map(|n| u8::from_str_radix(&PARENT[2 * n..2 * n + 2], 16).unwrap()).collect();
    tree(&spans, &of_client, 0, &mut found);
    assert_eq!(found, expected, "{found:#?}");

    let in_trace: Vec<&Span> = spans.iter().filter(|span| is_in_trace(span)).collect();
    assert_eq!(in_trace.len(), expected.len());
    let named = |name: &str| {
        in_trace.iter().filter(|span| span.name == name).map(|span| attributes(span)).collect::<Vec<_>>()
    };
    let statuses: Vec<String> =
        named(route).iter().map(|of| of["http.response.status_code"].clone()).collect();
    assert!(statuses.contains(&"401".to_owned()) && statuses.contains(&"200".to_owned()), "{statuses:?}");
    for request in named(route) {
        assert_eq!(
            (request["http.route"].as_str(), request["http.request.method"].as_str()),
            (&route[5..], "POST")
        );
    }
    let mut outcomes: Vec<String> =
        named("run").iter().map(|of| of["threadkeep.run.outcome"].clone()).collect();
    outcomes.sort();
    assert_eq!(outcomes, ["error", "success"]);
    for run in named("run") {
        assert_eq!((run["threadkeep.thread.id"].as_str(), run["gen_ai.request.model"].as_str()), ("t", "m"));
        assert_eq!(run["threadkeep.run.id"].len(), 36);
    }
    let asked = named("chat m");
    let tokens = |of: &BTreeMap<&str, String>| of.get("gen_ai.usage.input_tokens").cloned();
    assert_eq!(asked.iter().filter(|of| tokens(of).as_deref() == Some("11")).count(), 2, "{asked:?}");
    assert_eq!(asked.iter().filter(|of| of.contains_key("error.type")).count(), 1, "{asked:?}");
    assert!(named("commit").iter().all(|of| of["threadkeep.commit.outcome"] == "ok"));
    let mut wrong: Vec<&str> =
        in_trace.iter().filter(|span| failed(span)).map(|span| span.name.as_str()).collect();
    wrong.sort_unstable();
    assert_eq!(wrong, ["chat m", "run", "tool _OTHER"]);
    assert!(spans.iter().any(is_unknown), "{spans:?}");
    assert!(spans.iter().all(|span| span.events.is_empty()), "events carry texts");

    for (headers, body) in collector.0.lock().unwrap().iter() {
        assert_eq!(headers["x-collector"], "words-of-the-header");
        assert_eq!(headers["content-type"], "application/x-protobuf");
        let sent = String::from_utf8_lossy(body);
        assert!(sent.contains("here"), "the service's name");
        for secret in ["words-of", "a.txt", key.as_str(), "wrong-key"] {
            assert!(!sent.contains(secret), "{secret} is in what was sent: {sent}");
        }
    }
}

// The collector answers while the test waits for the gateway to end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_configured_header_is_sent_as_it_is_whatever_the_environment_has() {
    let (collector, address) = Collector::start().await;
    let dir = configured(json!({"enabled": true, "endpoint": address, "headers": {"x-token": "a%20b"}}));
    let key = key(dir.path());
    let mut command = command(dir.path());
    command.env("OTEL_EXPORTER_OTLP_HEADERS", "x-token=theirs,x-more=c%20d");
    let mut gateway = Gateway::start_by(&mut command);
    create_thread(&gateway, &key).await;
    stop(&mut gateway);
    assert!(!collector.spans_once(|spans| !spans.is_empty()).await.is_empty());
    for (headers, _) in collector.0.lock().unwrap().iter() {
        assert_eq!(headers["x-token"], "a%20b");
        assert_eq!(headers["x-more"], "c d");
    }
}

// The collector answers while the test waits for the gateway to end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_sent_unless_it_is_switched_on() {
    let (collector, address) = Collector::start().await;
    let dir = configured(json!({"endpoint": address}));
    let key = key(dir.path());
    let mut gateway = Gateway::start(dir.path());
    create_thread(&gateway, &key).await;
    assert_eq!(say(&gateway, &key, "hello").await, 200);
    stop(&mut gateway);
    assert!(collector.0.lock().unwrap().is_empty());
}

// The collector answers while the test waits for the gateway to end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_of_the_environment_is_not_used_for_a_collector_on_this_machine() {
    let (collector, address) = Collector::start().await;
    let dir = configured(json!({"enabled": true, "endpoint": address}));
    let key = key(dir.path());
    let mut command = command(dir.path());
    command.env("http_proxy", "http://127.0.0.1:1").env_remove("no_proxy").env_remove("NO_PROXY");
    let mut gateway = Gateway::start_by(&mut command);
    create_thread(&gateway, &key).await;
    stop(&mut gateway);
    assert!(!collector.spans_once(|spans| !spans.is_empty()).await.is_empty());
}

/// Serves a gateway with this configuration, with a thread; returns the path of its log.
async fn logged(dir: &TempDir, key: &str) -> (Gateway, PathBuf) {
    let log = dir.path().join("log");
    let mut command = command(dir.path());
    // Batches are sent while the gateway works, not only at its end.
    command.env("OTEL_BSP_SCHEDULE_DELAY", "20").stderr(std::fs::File::create(&log).unwrap());
    let child: Child = command.spawn().unwrap();
    let base = loop {
        let said = std::fs::read_to_string(&log).unwrap();
        // The line may be there in part.
        let address = said.split_once("serving on ").and_then(|(_, rest)| rest.split_once(','));
        if let Some((base, _)) = address {
            break base.to_owned();
        }
        tokio::task::yield_now().await;
    };
    let gateway = Gateway { child, base, client: client() };
    create_thread(&gateway, key).await;
    (gateway, log)
}

/// Serves a gateway with this configuration and stops it; returns its log.
async fn log_of_a_turn(dir: &TempDir, turns: usize) -> String {
    let key = key(dir.path());
    let (mut gateway, log) = logged(dir, &key).await;
    for _ in 0..turns {
        assert_eq!(say(&gateway, &key, "hello").await, 200);
    }
    stop(&mut gateway);
    std::fs::read_to_string(&log).unwrap()
}

#[tokio::test]
async fn a_collector_that_is_away_costs_one_warning() {
    // It is bound, so that nobody else gets the port, and does not listen.
    let bound = tokio::net::TcpSocket::new_v4().unwrap();
    bound.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = bound.local_addr().unwrap();
    let dir = configured(json!({"enabled": true, "endpoint": format!("http://{address}")}));
    let log = log_of_a_turn(&dir, 20).await;
    let warnings: Vec<&str> =
        log.lines().filter(|line| line.contains("collector") || line.contains("telemetry")).collect();
    assert_eq!(warnings.len(), 1, "{log}");
    assert!(warnings[0].contains("WARN") && warnings[0].contains(&address.to_string()), "{}", warnings[0]);
    drop(bound);
}

/// A collector that accepts connections and never answers delays the stop by a few seconds only: `stop` waits for it.
#[tokio::test]
async fn a_collector_that_never_answers_does_not_keep_the_gateway_from_stopping() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let dir = configured(json!({"enabled": true, "endpoint": format!("http://{address}")}));
    let log = log_of_a_turn(&dir, 2).await;
    assert!(log.contains("stopped"), "{log}");
    drop(listener);
}

// The collector answers while the test reads the log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_hangs_costs_a_warning_and_is_sent_to_again() {
    let (collector, address) = Collector::start_after(1).await;
    let dir = configured(json!({"enabled": true, "endpoint": address}));
    let key = key(dir.path());
    let (mut gateway, log) = logged(&dir, &key).await;
    // The gateway logs that when it has the answer, which is later than the collector has the spans.
    let again = "the collector accepts traces again";
    let turns = async {
        while !std::fs::read_to_string(&log).unwrap().contains(again) {
            assert_eq!(say(&gateway, &key, "hello").await, 200);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), turns).await.expect("nothing is sent again");
    assert!(!collector.spans().is_empty());
    stop(&mut gateway);
    let log = std::fs::read_to_string(&log).unwrap();
    for said in ["no answer in time", again] {
        assert_eq!(log.matches(said).count(), 1, "{said}: {log}");
    }
}
