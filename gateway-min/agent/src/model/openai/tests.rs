//! The client with an in-process stub of the protocol.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, Response as HttpResponse};
use axum::routing::post;
use reqwest::header::HeaderValue;
use serde_json::{Value, json};
use threadkeep_config::Secret;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::super::{ChunkAssembler, ModelKind, RetryingModel, ToolSpec, build, message};
use super::*;

const KEY: &str = "sk-very-secret-key";

/// A server that sends prepared responses, one per request, and records the requests.
struct Stub {
    base_url: String,
    requests: Arc<Mutex<Vec<(HeaderMap, Value)>>>,
}

type Prepared = Arc<Mutex<VecDeque<HttpResponse<Body>>>>;
type Requests = Arc<Mutex<Vec<(HeaderMap, Value)>>>;

impl Stub {
    async fn start(responses: impl IntoIterator<Item = HttpResponse<Body>>) -> Self {
        let prepared: Prepared = Arc::new(Mutex::new(responses.into_iter().collect()));
        let requests = Requests::default();
        let app = Router::new()
            .route("/v1/chat/completions", post(respond))
            .with_state((prepared, Arc::clone(&requests)));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base_url = format!("http://{}/v1", listener.local_addr().unwrap());
        // Ends with the test's runtime.
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { base_url, requests }
    }

    fn settings(&self) -> ModelSettings {
        let mut settings = ModelSettings::new("stub", ModelKind::OpenAiCompatible, "gpt-x");
        settings.base_url = Some(self.base_url.clone());
        settings.api_key = Some(Secret::new(KEY));
        settings
    }

    fn model(&self) -> Arc<dyn ChatModel> {
        build(self.settings()).unwrap()
    }

    fn request_count(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

async fn respond(
    State((prepared, requests)): State<(Prepared, Requests)>,
    RawQuery(query): RawQuery,
    mut headers: HeaderMap,
    body: Bytes,
) -> HttpResponse<Body> {
    // Recorded as if it were a header.
    if let Some(query) = query {
        headers.insert("test-query", HeaderValue::try_from(query).unwrap());
    }
    requests.lock().unwrap().push((headers, serde_json::from_slice(&body).unwrap()));
    prepared.lock().unwrap().pop_front().expect("one request too many")
}

fn sse(data: &[String]) -> String {
    data.iter().map(|data| ["data: ", data, "\n\n"].concat()).collect()
}

fn response(status: u16, content_type: &str, body: Body) -> HttpResponse<Body> {
    HttpResponse::builder().status(status).header("content-type", content_type).body(body).unwrap()
}

fn events(data: &[String]) -> HttpResponse<Body> {
    let body = sse(data);
    response(200, "text/event-stream; charset=utf-8", body.into())
}

/// Sends the events, then nothing more while the connection stays open.
fn hanging(data: &[String]) -> HttpResponse<Body> {
    let body = sse(data);
    let parts = stream::iter([Ok::<_, std::io::Error>(Bytes::from(body))]).chain(stream::pending());
    response(200, "text/event-stream", Body::from_stream(parts))
}

/// A server that sends the events to its one client and then closes the connection in the middle of the HTTP response.
async fn breaking(data: &[String]) -> Arc<dyn ChatModel> {
    let body = sse(data);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut settings = ModelSettings::new("breaking", ModelKind::OpenAiCompatible, "gpt-x");
    settings.base_url = Some(format!("http://{}", listener.local_addr().unwrap()));
    tokio::spawn(async move {
        let (mut client, _) = listener.accept().await.unwrap();
        read_request(&mut client).await;
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        let response = format!("{head}{:x}\r\n{body}\r\n", body.len());
        client.write_all(response.as_bytes()).await.unwrap();
    });
    build(settings).unwrap()
}

/// Reads a whole request: closing a connection with unread data would discard what was sent.
async fn read_request(client: &mut tokio::net::TcpStream) {
    let mut received = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&received).to_lowercase();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.split("content-length:").nth(1).unwrap().lines().next().unwrap();
            if body.len() == length.trim().parse::<usize>().unwrap() {
                return;
            }
        }
        assert_ne!(client.read_buf(&mut received).await.unwrap(), 0, "the request ended early");
    }
}

fn delta(delta: Value) -> String {
    json!({"id": "chatcmpl-7", "choices": [{"index": 0, "delta": delta, "finish_reason": null}]}).to_string()
}

fn finish(reason: &str) -> String {
    json!({"id": "chatcmpl-7", "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}).to_string()
}

fn usage(input: u64, output: u64) -> String {
    let usage = json!({
        "prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output,
    });
    json!({"id": "chatcmpl-7", "choices": [], "usage": usage}).to_string()
}

fn done() -> String {
    "[DONE]".to_owned()
}

fn hello() -> HttpResponse<Body> {
    events(&[
        delta(json!({"role": "assistant", "content": ""})),
        delta(json!({"content": "Hel"})),
        delta(json!({"content": "lo \u{4f60}"})),
        finish("stop"),
        usage(9, 3),
        done(),
    ])
}

fn asking() -> ModelRequest {
    ModelRequest { messages: vec![message::human("Hi")], ..ModelRequest::default() }
}

async fn collect(model: &dyn ChatModel) -> Result<Vec<ModelChunk>, ModelError> {
    model.stream(&asking()).await?.collect::<Vec<_>>().await.into_iter().collect()
}

fn assemble(chunks: &[ModelChunk]) -> Value {
    let mut assembler = ChunkAssembler::new("id", "gpt-x");
    for chunk in chunks {
        assembler.push(chunk);
    }
    assembler.finish()
}

/// The result of a failing response: the chunks before the failure, and the failure.
async fn failure(response: HttpResponse<Body>) -> (Vec<ModelChunk>, ModelError) {
    failure_of(&*Stub::start([response]).await.model()).await
}

async fn failure_of(model: &dyn ChatModel) -> (Vec<ModelChunk>, ModelError) {
    let mut stream = match model.stream(&asking()).await {
        Ok(stream) => stream,
        Err(error) => return (Vec::new(), error),
    };
    let mut chunks = Vec::new();
    while let Some(item) = stream.next().await {
        match item {
            Ok(chunk) => chunks.push(chunk),
            Err(error) => {
                assert!(stream.next().await.is_none(), "nothing follows a failure");
                return (chunks, error);
            }
        }
    }
    panic!("the answer succeeded: {chunks:?}");
}

async fn retried(stub: &Stub) -> Vec<ModelChunk> {
    let model = RetryingModel::with_sleeper(stub.model(), Arc::new(|_| Box::pin(async {})));
    model.stream(asking()).collect().await
}

#[tokio::test]
async fn text_is_streamed_and_usage_comes_last() {
    let stub = Stub::start([hello()]).await;
    let chunks = collect(&*stub.model()).await.unwrap();
    let texts: Vec<&str> = chunks.iter().map(|chunk| chunk.text.as_str()).collect();
    assert_eq!(texts, ["Hel", "lo \u{4f60}", ""]);
    let message = assemble(&chunks);
    assert_eq!(message["content"], "Hello \u{4f60}");
    assert_eq!(message["usage_metadata"]["total_tokens"], 12);
    assert_eq!(
        message["response_metadata"],
        json!({"finish_reason": "stop", "model_name": "gpt-x", "id": "chatcmpl-7"})
    );

    let requests = stub.requests.lock().unwrap();
    let (headers, body) = &requests[0];
    assert_eq!(headers["authorization"], format!("Bearer {KEY}"));
    assert_eq!((&body["model"], &body["stream"]), (&json!("gpt-x"), &json!(true)));
    assert_eq!(body["messages"], json!([{"role": "user", "content": "Hi"}]));
}

#[tokio::test]
async fn a_chunk_arrives_before_the_answer_is_complete() {
    let stub = Stub::start([hanging(&[delta(json!({"content": "first"}))])]).await;
    let mut stream = stub.model().stream(&asking()).await.unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap().text, "first");
}

#[tokio::test]
async fn parallel_tool_calls_are_put_together() {
    let call = |call: Value| delta(json!({"tool_calls": [call]}));
    let stub = Stub::start([events(&[
        call(json!({"index": 0, "id": "a", "type": "function", "function": {"name": "ls", "arguments": ""}})),
        call(json!({"index": 0, "function": {"arguments": "{\"path\":"}})),
        call(
            json!({"index": 1, "id": "b", "type": "function", "function": {"name": "glob", "arguments": ""}}),
        ),
        call(json!({"index": 0, "function": {"arguments": "\".\"}"}})),
        call(json!({"index": 1, "function": {"arguments": "{\"pattern\":\"*\"}"}})),
        finish("tool_calls"),
        done(),
    ])])
    .await;
    let message = assemble(&collect(&*stub.model()).await.unwrap());
    assert_eq!(
        message["tool_calls"],
        json!([
            {"type": "tool_call", "name": "ls", "args": {"path": "."}, "id": "a"},
            {"type": "tool_call", "name": "glob", "args": {"pattern": "*"}, "id": "b"},
        ])
    );
    assert_eq!(message["response_metadata"]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn without_a_key_no_authorization_is_sent() {
    let stub = Stub::start([hello()]).await;
    let model = build(ModelSettings { api_key: None, ..stub.settings() }).unwrap();
    collect(&*model).await.unwrap();
    assert!(!stub.requests.lock().unwrap()[0].0.contains_key("authorization"));
}

#[tokio::test]
async fn default_headers_and_query_are_sent_beside_the_body_and_masked_in_errors() {
    let said = r#"{"error": {"message": "no access for hush-1, hush-2 or hush-3"}}"#;
    let stub = Stub::start([hello(), response(401, "application/json", said.into())]).await;
    let with = |extra: Value| {
        let extra = extra.as_object().unwrap().clone();
        build(ModelSettings { extra, ..stub.settings() })
    };
    let model = with(json!({
        "default_headers": {"X-Key": "hush-1", "Authorization": "Basic hush-2", "X-Number": 7},
        "default_query": {"token": "hush-3"},
    }))
    .unwrap();
    collect(&*model).await.unwrap();
    {
        let requests = stub.requests.lock().unwrap();
        let (headers, body) = &requests[0];
        assert_eq!(headers["x-key"], "hush-1");
        assert_eq!(headers["x-number"], "7");
        assert_eq!(headers.get_all("authorization").iter().collect::<Vec<_>>(), ["Basic hush-2"]);
        assert_eq!(headers["test-query"], "token=hush-3");
        assert!(!body.to_string().contains("hush") && body.get("default_headers").is_none(), "{body}");
    }
    let error = collect(&*model).await.unwrap_err().to_string();
    assert!(error.contains("no access for ***, *** or ***"), "{error}");
    for (key, value) in [("default_headers", json!({"a b": "hush"})), ("default_query", json!(["hush"]))] {
        let error = with(json!({ key: value })).err().unwrap().to_string();
        assert!(error.contains(&format!("`{key}")) && !error.contains("hush"), "{error}");
    }
}

#[tokio::test]
async fn too_many_requests_then_an_answer() {
    let mut busy = response(429, "application/json", r#"{"error": {"message": "slow down"}}"#.into());
    busy.headers_mut().insert("retry-after", HeaderValue::from_static("7"));
    let stub = Stub::start([busy, hello()]).await;
    let pauses = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&pauses);
    let model = RetryingModel::with_sleeper(
        stub.model(),
        Arc::new(move |pause| {
            noted.lock().unwrap().push(pause);
            Box::pin(async {})
        }),
    );
    let chunks: Vec<ModelChunk> = model.stream(asking()).collect().await;
    assert_eq!(assemble(&chunks)["content"], "Hello \u{4f60}");
    assert_eq!(*pauses.lock().unwrap(), [Duration::from_secs(7)]);
    assert_eq!(stub.request_count(), 2);
}

#[tokio::test]
async fn three_server_errors_give_the_fallback() {
    let broken = || response(503, "text/html", "<h1>Service Unavailable</h1>".into());
    let stub = Stub::start([broken(), broken(), broken()]).await;
    let message = assemble(&retried(&stub).await);
    assert_eq!(stub.request_count(), 3);
    assert_eq!(message["additional_kwargs"]["svc_error_type"], "server_error");
    assert_eq!(
        message::fallback_reason(&message),
        Some(
            "model `stub`: the provider failed: 127.0.0.1: HTTP 503: <h1>Service Unavailable</h1> (attempts: 3)"
        )
    );
}

#[tokio::test]
async fn a_refusal_is_not_retried() {
    let stub =
        Stub::start([response(400, "application/json", r#"{"error": {"message": "bad"}}"#.into())]).await;
    let message = assemble(&retried(&stub).await);
    assert_eq!(stub.request_count(), 1);
    assert_eq!(message["additional_kwargs"]["svc_error_type"], "rejected");
}

#[tokio::test]
async fn a_cut_stream_is_a_connection_failure() {
    let parts = [delta(json!({"content": "half"}))];
    for (chunks, error) in [failure(events(&parts)).await, failure_of(&*breaking(&parts).await).await] {
        assert_eq!(chunks.len(), 1);
        assert_eq!(error.kind, ModelErrorKind::Connection, "{error}");
    }
    let (chunks, error) = failure(events(&[])).await;
    assert_eq!((chunks.len(), error.kind), (0, ModelErrorKind::Connection));
}

#[tokio::test]
async fn an_answer_with_its_reason_is_complete_however_the_stream_ends() {
    let parts = [delta(json!({"content": "all"})), finish("stop")];
    for model in [Stub::start([events(&parts)]).await.model(), breaking(&parts).await] {
        let chunks = collect(&*model).await.unwrap();
        assert_eq!(chunks.last().unwrap().finish_reason.as_deref(), Some("stop"));
    }
}

#[tokio::test]
async fn malformed_streams_are_protocol_failures() {
    let raw = |bytes: &'static [u8]| response(200, "text/event-stream", Body::from(bytes));
    for malformed in [
        events(&["{\"choices\": [".into()]),
        raw(b"data: \xff\xfe\n\n"),
        response(200, "application/json", r#"{"choices": []}"#.into()),
    ] {
        let (_, error) = failure(malformed).await;
        assert_eq!(error.kind, ModelErrorKind::Protocol, "{error}");
    }
}

#[tokio::test]
async fn an_event_without_an_end_is_refused() {
    let endless = futures::stream::repeat_with(|| Ok::<_, std::io::Error>(vec![b'x'; 1 << 20]));
    let endless = response(200, "text/event-stream", Body::from_stream(endless));
    let (chunks, error) = failure(endless).await;
    assert_eq!((chunks.len(), error.kind), (0, ModelErrorKind::TooLarge));
    assert!(error.detail.contains("more than 4194304 bytes"), "{error}");
}

#[tokio::test]
async fn an_error_in_the_stream_is_classified() {
    let overloaded = json!({"error": {"message": "overloaded", "type": "server_error"}}).to_string();
    let (chunks, error) = failure(events(&[delta(json!({"content": "a"})), overloaded])).await;
    assert_eq!((chunks.len(), error.kind), (1, ModelErrorKind::Server));
    assert!(error.detail.ends_with("overloaded"), "{error}");
}

#[tokio::test]
async fn an_error_instead_of_a_stream_is_classified() {
    let said = r#"{"error": {"message": "slow down", "code": 429}}"#;
    let (_, error) = failure(response(200, "Application/JSON", said.into())).await;
    assert_eq!(error.kind, ModelErrorKind::RateLimited);
    assert!(error.detail.ends_with("slow down"), "{error}");
}

#[tokio::test]
async fn a_pause_between_chunks_has_a_limit() {
    let stub = Stub::start([hanging(&[delta(json!({"content": "half"}))])]).await;
    let mut settings = stub.settings();
    settings.stream_chunk_timeout = Duration::from_millis(20);
    let model = build(settings).unwrap();
    let items: Vec<_> = model.stream(&asking()).await.unwrap().collect().await;
    let error = items.last().unwrap().as_ref().unwrap_err();
    assert_eq!(error.kind, ModelErrorKind::Timeout);
    assert!(error.detail.contains("20ms (stream_chunk_timeout)"), "{error}");
}

#[tokio::test]
async fn an_answer_must_begin_within_the_request_timeout() {
    // The operating system accepts connections to it; nothing answers.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut settings = ModelSettings::new("silent", ModelKind::OpenAiCompatible, "gpt-x");
    settings.base_url = Some(format!("http://{}", silent.local_addr().unwrap()));
    settings.extra.insert("request_timeout".into(), json!(0.02));
    let error = build(settings).unwrap().stream(&asking()).await.err().unwrap();
    assert_eq!(error.kind, ModelErrorKind::Timeout);
    assert!(error.detail.contains("request_timeout"), "{error}");
}

#[tokio::test]
async fn nobody_listening_is_a_connection_failure_that_names_the_host() {
    // A port that is taken, so that no other test listens there, and without a listener.
    let taken = tokio::net::TcpSocket::new_v4().unwrap();
    taken.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = taken.local_addr().unwrap();
    let mut settings = ModelSettings::new("gone", ModelKind::OpenAiCompatible, "gpt-x");
    settings.base_url = Some(format!("http://user:pass-word@{address}/v1?key=pass-word"));
    let error = build(settings).unwrap().stream(&asking()).await.err().unwrap();
    assert_eq!(error.kind, ModelErrorKind::Connection);
    assert!(error.detail.starts_with("127.0.0.1: "), "{error}");
    assert!(!format!("{error} {error:?}").contains("pass-word"), "{error:?}");
}

#[tokio::test]
async fn a_redirect_is_refused_with_its_remedy() {
    let mut moved = response(308, "text/plain", Body::empty());
    moved.headers_mut().insert("location", HeaderValue::from_static("http://127.0.0.1:1/elsewhere"));
    let (_, error) = failure(moved).await;
    assert_eq!(error.kind, ModelErrorKind::Rejected);
    assert!(error.detail.contains("`base_url`"), "{error}");
}

/// Of too many tools OpenAI says no more than "array too long".
#[tokio::test]
async fn a_refusal_of_a_request_with_many_tools_names_their_number_and_the_remedy() {
    let said = json!({"error": {"message": "Invalid 'tools': array too long."}}).to_string();
    for (count, is_named) in [(128, false), (129, true)] {
        let stub = Stub::start([response(400, "application/json", said.clone().into())]).await;
        let (name, description) = ("do".to_owned(), "Does it".to_owned());
        let tool = ToolSpec { name, description, parameters: json!({"type": "object"}) };
        let request = ModelRequest { tools: vec![tool; count], ..asking() };
        let error = stub.model().stream(&request).await.err().unwrap();
        assert_eq!(error.kind, ModelErrorKind::Rejected);
        assert_eq!(error.detail.contains("129 tools"), is_named, "{error}");
        assert_eq!(error.detail.contains("`tool_search.enabled`"), is_named, "{error}");
        assert!(error.detail.ends_with(": Invalid 'tools': array too long."), "{error}");
    }
}

#[tokio::test]
async fn a_missing_model_or_address_is_refused_with_the_settings_to_check() {
    for status in [404, 405] {
        let (_, error) = failure(response(status, "text/plain", "404 page not found".into())).await;
        assert_eq!(error.kind, ModelErrorKind::Rejected);
        assert!(error.detail.contains("`model` and `base_url`"), "{error}");
        assert!(error.detail.ends_with(": 404 page not found"), "{error}");
    }
}

#[tokio::test]
async fn the_key_is_in_no_error_text() {
    let quoting = format!("{{\"error\": {{\"message\": \"Incorrect API key: {KEY}\"}}}}");
    let (_, refused) = failure(response(401, "application/json", quoting.clone().into())).await;
    assert_eq!(refused.kind, ModelErrorKind::Authentication);
    let (_, streamed) = failure(events(&[quoting])).await;
    let (_, malformed) = failure(events(&[format!("no json but {KEY}")])).await;
    for error in [refused, streamed, malformed] {
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains(KEY) && shown.contains("***"), "{shown}");
    }
}

#[tokio::test]
async fn a_long_error_body_is_cut() {
    let (_, error) = failure(response(500, "text/plain", "x".repeat(1_000_000).into())).await;
    let quote = error.detail.strip_prefix("127.0.0.1: ").unwrap();
    assert_eq!(quote.chars().count(), 500);
    assert!(quote.starts_with("HTTP 500: xxx"), "{quote}");
}

#[test]
fn unusable_settings_are_refused_when_building() {
    let refused = |change: &dyn Fn(&mut ModelSettings)| {
        let mut settings = ModelSettings::new("bad", ModelKind::OpenAiCompatible, "gpt-x");
        change(&mut settings);
        let error = build(settings).err().expect("refused");
        assert_eq!((error.kind, error.model.as_str()), (ModelErrorKind::Configuration, "bad"));
        error.detail
    };
    for url in ["no url", "ftp://host/v1", "mailto:a@b"] {
        assert!(refused(&|settings| settings.base_url = Some(url.into())).contains("`base_url`"), "{url}");
    }
    assert!(refused(&|settings| settings.api_key = Some(Secret::new("a\nb"))).contains("`api_key`"));
    for timeout in [json!(0), json!(-1), json!("30"), json!(1e300)] {
        let detail =
            refused(&|settings| drop(settings.extra.insert("request_timeout".into(), timeout.clone())));
        assert!(detail.contains("`request_timeout`"), "{timeout}");
    }
}

#[test]
fn only_addresses_of_this_machine_are_loopback() {
    let loopback = |url| is_loopback(&Url::parse(url).unwrap());
    for url in ["http://127.0.0.1:1", "http://localhost/v1", "http://[::1]:80/"] {
        assert!(loopback(url), "{url}");
    }
    for url in ["http://10.0.0.1", "https://api.openai.com", "http://localhost.example.com"] {
        assert!(!loopback(url), "{url}");
    }
}

#[test]
fn a_proxy_of_the_environment_is_not_used_for_this_machine() {
    // The variable must be set before the process starts, so the test runs again in its own process.
    let rerun = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "model::openai::tests::text_is_streamed_and_usage_comes_last"])
        .env("http_proxy", "http://127.0.0.1:1")
        .env_remove("no_proxy")
        .env_remove("NO_PROXY")
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&rerun.stdout);
    assert!(rerun.status.success() && printed.contains("1 passed"), "{printed}");
}

#[test]
fn a_base_url_that_is_the_endpoint_is_refused_with_what_to_leave_out() {
    for url in ["https://host/v1/chat/completions", "https://host/v1/chat/completions/?version=1"] {
        let error = endpoint(url).unwrap_err();
        assert!(error.contains("`base_url`") && error.contains("leave out /chat/completions"), "{error}");
    }
}

#[test]
fn the_endpoint_extends_the_base_url() {
    let extended = |base| endpoint(base).unwrap().to_string();
    assert_eq!(extended("https://host/v1"), "https://host/v1/chat/completions");
    assert_eq!(extended("https://host/v1/"), "https://host/v1/chat/completions");
    assert_eq!(extended("http://host?version=1"), "http://host/chat/completions?version=1");
}
