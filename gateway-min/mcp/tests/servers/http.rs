//! A server over streamable HTTP.

use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};
use threadkeep_config::{McpServer, Secret};
use tokio::net::TcpListener;

use crate::support::{Scene, call, names, server};

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
    let tools = scene.tools().await;
    assert_eq!(names(&tools), ["mcp_web_one", "mcp_web_two"]);
    assert_eq!(call(&tools[1], json!({})).await.unwrap().content, "two");
    let seen = seen.lock().unwrap();
    assert!(seen.len() >= 4 && seen.iter().all(|(_, key)| key == "Bearer sk-1"), "{seen:?}");
}

/// A redirect would hand the headers to somebody else.
#[tokio::test]
async fn a_redirect_is_not_followed() {
    let seen = Seen::default();
    let other = listen(Router::new().route("/mcp", post(answer)).with_state(Arc::clone(&seen))).await;
    let url =
        listen(Router::new().route("/mcp", post(move || async move { Redirect::temporary(&other) }))).await;
    let mut scene = Scene::new("");
    scene.configured = [("web".to_owned(), at(&url))].into();
    assert!(scene.tools().await.is_empty());
    assert!(seen.lock().unwrap().is_empty());
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
