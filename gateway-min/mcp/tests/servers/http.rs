//! A server over streamable HTTP.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::routing::post;
use axum::{Json, Router};
use futures::stream;
use serde_json::{Value, json};
use threadkeep_config::{McpServer, Secret};
use threadkeep_testing::Log;
use tokio::net::TcpListener;
use tracing::{Metadata, Subscriber};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::{Layer as _, Registry, fmt};

use crate::support::{Scene, call, names, server};

/// What is logged when a connection was given up.
const UNAVAILABLE: &str = "an MCP server is not available";

type Seen = Arc<Mutex<Vec<(String, String)>>>;

async fn answer(State(seen): State<Seen>, headers: HeaderMap, Json(request): Json<Value>) -> Response {
    let key =
        headers.get(header::AUTHORIZATION).map(|key| key.to_str().unwrap().to_owned()).unwrap_or_default();
    let method = request["method"].as_str().unwrap_or_default().to_owned();
    seen.lock().unwrap().push((method.clone(), key));
    let result = match method.as_str() {
        "initialize" => json!({
            "protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
            "serverInfo": {"name": "ours", "version": "1"},
        }),
        "tools/list" if request["params"]["cursor"].is_null() => {
            json!({"tools": [{"name": "one", "inputSchema": {"type": "object"}}], "nextCursor": "2"})
        }
        "tools/list" => json!({"tools": [{"name": "two", "inputSchema": {"type": "object"}}]}),
        "tools/call" => json!({"content": [{"type": "text", "text": request["params"]["name"]}]}),
        _ => return StatusCode::ACCEPTED.into_response(),
    };
    Json(json!({"jsonrpc": "2.0", "id": request["id"], "result": result})).into_response()
}

async fn listen(router: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}/mcp", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    address
}

fn at(url: &str) -> McpServer {
    let headers = [("Authorization".to_owned(), Secret::new("Bearer sk-1"))].into();
    McpServer { url: Some(Secret::new(url)), headers, ..server() }
}

#[tokio::test]
async fn all_pages_of_tools_are_listed_and_every_request_has_the_headers() {
    let seen = Seen::default();
    let url = listen(Router::new().route("/mcp", post(answer)).with_state(Arc::clone(&seen))).await;
    let mut scene = Scene::new("");
    scene.configured = [("web".to_owned(), at(&url))].into();
    let tools = scene.connected().await;
    assert_eq!(names(&tools), ["mcp_web_one", "mcp_web_two"]);
    assert_eq!(call(&tools[1], json!({})).await.unwrap().content, "two");
    let seen = seen.lock().unwrap();
    assert!(seen.len() >= 4 && seen.iter().all(|(_, key)| key == "Bearer sk-1"), "{seen:?}");
}

#[test]
fn a_proxy_of_the_environment_is_not_used_for_a_server_on_this_machine() {
    // The variable must be set before the process starts, so a test runs again in its own process.
    let rerun = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "http::all_pages_of_tools_are_listed_and_every_request_has_the_headers"])
        .env("http_proxy", "http://127.0.0.1:1")
        .env_remove("no_proxy")
        .env_remove("NO_PROXY")
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&rerun.stdout);
    assert!(rerun.status.success() && printed.contains("1 passed"), "{printed}");
}

/// Waits until a connection was given up, or this is so. On a busy machine a run does not wait that long.
async fn until_given_up_or(log: &Log, otherwise: impl Fn() -> bool) {
    let given_up = async {
        while !log.text().contains(UNAVAILABLE) && !otherwise() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), given_up).await.expect("it is never given up");
}

/// A redirect would hand the headers to somebody else.
#[tokio::test]
async fn a_redirect_is_not_followed() {
    let log = Log::default();
    let _logged = tracing::subscriber::set_default(logging(&log));
    let seen = Seen::default();
    let other = listen(Router::new().route("/mcp", post(answer)).with_state(Arc::clone(&seen))).await;
    let url =
        listen(Router::new().route("/mcp", post(move || async move { Redirect::temporary(&other) }))).await;
    let mut scene = Scene::new("");
    scene.configured = [("web".to_owned(), at(&url))].into();
    assert!(scene.tools().await.is_empty());
    until_given_up_or(&log, || !seen.lock().unwrap().is_empty()).await;
    assert!(seen.lock().unwrap().is_empty());
}

/// Many servers redirect to their own path with a slash at its end, or to that without one.
#[tokio::test]
async fn a_redirect_to_another_path_of_the_server_is_followed() {
    let seen = Seen::default();
    let router = Router::new()
        .route("/mcp", post(|| async { Redirect::temporary("/mcp/") }))
        .route("/mcp/", post(answer))
        .with_state(Arc::clone(&seen));
    let mut scene = Scene::new("");
    scene.configured = [("web".to_owned(), at(&listen(router).await))].into();
    let tools = scene.connected().await;
    assert_eq!(call(&tools[0], json!({})).await.unwrap().content, "one");
    assert!(seen.lock().unwrap().iter().all(|(_, key)| key == "Bearer sk-1"));
    // Without an end.
    let loops = Router::new().route("/mcp", post(|| async { Redirect::permanent("/mcp") }));
    scene.configured = [("web".to_owned(), at(&listen(loops).await))].into();
    assert!(scene.tools().await.is_empty());
}

#[tokio::test]
async fn a_server_that_nobody_runs_or_with_a_header_that_is_none_is_left_out() {
    let mut scene = Scene::new("");
    let mut broken = at("http://127.0.0.1:1/mcp");
    scene.configured = [("web".to_owned(), broken.clone())].into();
    assert!(scene.tools().await.is_empty());
    broken.headers = [("Not a header".to_owned(), Secret::new("x"))].into();
    scene.configured = [("web".to_owned(), broken)].into();
    assert!(scene.tools().await.is_empty());
}

/// A server that gives each connection a session, knows only the newest one, and answers all others with this.
fn forgetful(newest: Arc<Mutex<usize>>, refusal: fn() -> Response) -> Router {
    let answer = move |headers: HeaderMap, Json(request): Json<Value>| {
        let newest = Arc::clone(&newest);
        async move {
            let method = request["method"].as_str().unwrap_or_default();
            let mut newest = newest.lock().unwrap();
            if method == "initialize" {
                *newest += 1;
            } else if headers
                .get("mcp-session-id")
                .is_none_or(|id| id.to_str().unwrap() != newest.to_string())
            {
                return refusal();
            }
            let result = match method {
                "initialize" => json!({
                    "protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                    "serverInfo": {"name": "ours", "version": "1"},
                }),
                "tools/list" => {
                    let tool = |name: &str| json!({"name": name, "inputSchema": {"type": "object"}});
                    let tools = ["say", "fail"].map(tool);
                    json!({ "tools": tools })
                }
                "tools/call" if request["params"]["name"] == "fail" => {
                    let error = json!({"code": -32603, "message": "Internal server error"});
                    let answer = json!({"jsonrpc": "2.0", "id": null, "error": error});
                    return (StatusCode::INTERNAL_SERVER_ERROR, Json(answer)).into_response();
                }
                "tools/call" => json!({"content": [{"type": "text", "text": "said"}]}),
                _ => return StatusCode::ACCEPTED.into_response(),
            };
            let answer = Json(json!({"jsonrpc": "2.0", "id": request["id"], "result": result}));
            ([("mcp-session-id", newest.to_string())], answer).into_response()
        }
    };
    Router::new().route("/mcp", post(answer))
}

fn no_session(id: &Value, message: &str) -> Response {
    let error = json!({"code": -32000, "message": message});
    (StatusCode::BAD_REQUEST, Json(json!({"jsonrpc": "2.0", "id": id, "error": error}))).into_response()
}

/// Servers that were started again know no session. The protocol wants 404 then; these are what many say instead.
#[tokio::test]
async fn a_server_that_has_lost_its_sessions_is_connected_to_again() {
    let refusals: [fn() -> Response; 5] = [
        || StatusCode::NOT_FOUND.into_response(),
        || no_session(&Value::Null, "Bad Request: No valid session ID provided"),
        || no_session(&json!("server-error"), "Bad Request: No valid session ID provided"),
        || no_session(&Value::Null, "Bad Request: Server not initialized"),
        || (StatusCode::BAD_REQUEST, "Invalid session ID").into_response(),
    ];
    for (index, refusal) in refusals.into_iter().enumerate() {
        let newest = Arc::<Mutex<usize>>::default();
        let url = listen(forgetful(Arc::clone(&newest), refusal)).await;
        let mut scene = Scene::new("");
        scene.configured = [("web".to_owned(), at(&url))].into();
        let tools = scene.connected().await;
        assert_eq!(call(&tools[0], json!({})).await.unwrap().content, "said");
        *newest.lock().unwrap() += 1;
        assert_eq!(call(&tools[0], json!({})).await.unwrap().content, "said", "refusal {index}");
    }
}

/// It is an error at once, not when the time of the call is up.
#[tokio::test]
async fn an_error_without_the_id_of_the_call_is_that_of_the_call() {
    let url = listen(forgetful(Arc::default(), || StatusCode::NOT_FOUND.into_response())).await;
    let mut scene = Scene::new("");
    scene.configured = [("web".to_owned(), at(&url))].into();
    let tools = scene.connected().await;
    let error = call(&tools[1], json!({})).await.unwrap_err().to_string();
    assert!(error.starts_with("the call of the server 'web' failed: Internal server error"), "{error}");
}

/// Writes what is logged at any level, except by the libraries of the client, which are kept out of the log by their
/// targets, and by the tests' own server.
fn logging(log: &Log) -> impl Subscriber + use<> {
    let is_logged = |metadata: &Metadata<'_>| {
        let target = metadata.target();
        !threadkeep_mcp::is_of_client(target) && !target.starts_with("axum")
    };
    let lines = fmt::layer().with_ansi(false).with_span_events(FmtSpan::NEW).with_writer(log.clone());
    Registry::default().with(lines.with_filter(filter_fn(is_logged)))
}

/// A server that answers calls of tools in ways that fail, each of which repeats the address.
async fn fail(OriginalUri(uri): OriginalUri, headers: HeaderMap, Json(request): Json<Value>) -> Response {
    let echo = format!("cannot use http://{}{uri}", headers[header::HOST].to_str().unwrap());
    let result = match request["method"].as_str().unwrap_or_default() {
        "initialize" => json!({
            "protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
            "serverInfo": {"name": "ours", "version": "1"},
        }),
        "tools/list" => {
            let tool = |name: &str| json!({"name": name, "inputSchema": {"type": "object"}});
            let tools = ["refuse", "page", "garbage", "challenge", "hang_up"].map(tool);
            json!({ "tools": tools })
        }
        "tools/call" => match request["params"]["name"].as_str().unwrap() {
            "refuse" => {
                let error = json!({"code": -32000, "message": echo});
                return Json(json!({"jsonrpc": "2.0", "id": request["id"], "error": error})).into_response();
            }
            "page" => return (StatusCode::BAD_REQUEST, echo).into_response(),
            "garbage" => return ([(header::CONTENT_TYPE, "application/json")], echo).into_response(),
            "challenge" => {
                let challenge = format!("Bearer resource_metadata=\"{echo}\"");
                return (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, challenge)]).into_response();
            }
            _ => {
                let hangs_up =
                    stream::once(async { Err::<Bytes, _>(io::Error::other("the server is gone")) });
                let json = [(header::CONTENT_TYPE, "application/json")];
                return (json, Body::from_stream(hangs_up)).into_response();
            }
        },
        _ => return StatusCode::ACCEPTED.into_response(),
    };
    Json(json!({"jsonrpc": "2.0", "id": request["id"], "result": result})).into_response()
}

/// A server for a large interface may have thousands of tools.
#[tokio::test]
async fn tools_beyond_the_most_are_left_out_with_a_warning() {
    for (count, is_warned) in [(512, false), (513, true)] {
        let log = Log::default();
        let _logged = tracing::subscriber::set_default(logging(&log));
        let answer = move |Json(request): Json<Value>| async move {
            let tool = |index: u32| json!({"name": format!("t{index}"), "inputSchema": {"type": "object"}});
            let result = match request["method"].as_str().unwrap_or_default() {
                "initialize" => json!({
                    "protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                    "serverInfo": {"name": "ours", "version": "1"},
                }),
                "tools/list" => json!({"tools": (0..count).map(tool).collect::<Vec<_>>()}),
                _ => return StatusCode::ACCEPTED.into_response(),
            };
            Json(json!({"jsonrpc": "2.0", "id": request["id"], "result": result})).into_response()
        };
        let mut scene = Scene::new("");
        let url = listen(Router::new().route("/mcp", post(answer))).await;
        scene.configured = [("web".to_owned(), at(&url))].into();
        assert_eq!(scene.connected().await.len(), 512);
        let logged = log.text();
        assert_eq!(logged.contains("more tools than are used"), is_warned, "{logged}");
    }
}

#[tokio::test]
async fn no_text_names_the_address_of_a_server() {
    let log = Log::default();
    let _logged = tracing::subscriber::set_default(logging(&log));
    let mut said = Vec::new();
    let url = format!("{}/key-1?token=key-2", listen(Router::new().fallback(post(fail))).await);
    for (url, is_there) in [(url.as_str(), true), ("http://127.0.0.1:1/mcp/key-1?token=key-2", false)] {
        let mut scene = Scene::new("");
        scene.configured = [("web".to_owned(), at(url))].into();
        let tools = if is_there { scene.connected().await } else { scene.tools().await };
        until_given_up_or(&log, || is_there).await;
        for tool in tools {
            said.push(call(&tool, json!({})).await.unwrap_err().to_string());
        }
    }
    assert_eq!(said.len(), 5, "{said:?}");
    assert!(said.iter().all(|said| said.contains("the server 'web'")), "{said:?}");
    let logged = log.text();
    assert!(logged.contains(UNAVAILABLE), "{logged}");
    for secret in ["key-1", "key-2", "127.0.0.1", "sk-1"] {
        for text in said.iter().chain([&logged]) {
            assert!(!text.contains(secret), "{secret} in {text}");
        }
    }
}
