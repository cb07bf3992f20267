//! Models, health, the OpenAPI document, and properties common to all routes.

use std::collections::BTreeMap;

use axum::body::Body;
use axum::http::{Method, Request};
use serde_json::{Value, json};

use crate::support::Setup;

#[tokio::test]
async fn the_gateway_says_that_it_is_healthy_and_nothing_else() {
    let gateway = Setup::on("memory", "delta").start().await;
    assert_eq!(gateway.get("/health").await.ok(), json!({"status": "healthy", "service": "threadkeep"}));
}

/// A chat page for LangGraph that does not find it reports that it cannot connect.
#[tokio::test]
async fn the_gateway_says_what_it_is_as_langgraph_servers_do() {
    let gateway = Setup::default().start().await;
    let flags = json!({"assistants": true, "crons": false, "langsmith": false});
    let info = json!({"version": env!("CARGO_PKG_VERSION"), "flags": flags});
    for path in ["/api/info", "/api/langgraph/info"] {
        assert_eq!(gateway.get(path).await.ok(), info, "{path}");
    }
}

#[tokio::test]
async fn models_are_listed_without_secrets_and_follow_the_configuration() {
    let secret = "hunter2";
    let models = |name: &str| {
        json!([
            {"name": name, "use": "langchain_openai:ChatOpenAI", "model": "gpt", "display_name": "The Model",
             "description": "Good.", "supports_thinking": true, "supports_reasoning_effort": true,
             "api_key": secret, "base_url": format!("http://127.0.0.1:1/{secret}"), "extra_header": secret},
            {"name": "m", "use": "scripted", "model": "m", "script": "script.json"},
        ])
    };
    let sections = json!({"models": models("big")});
    let mut gateway = Setup { sections, ..Setup::default() }.start().await;
    let big = json!({"name": "big", "model": "gpt", "display_name": "The Model", "description": "Good.",
        "supports_thinking": true, "supports_reasoning_effort": true});
    let small = json!({"name": "m", "model": "m", "display_name": null, "description": null,
        "supports_thinking": false, "supports_reasoning_effort": false});
    let listed = gateway.get("/api/models").await.ok();
    assert_eq!(listed, json!({"models": [big, small], "token_usage": {"enabled": true}}));
    assert_eq!(gateway.get("/api/models/m").await.ok(), small);
    assert_eq!(gateway.get("/api/models/big").await.ok(), big);
    gateway.get("/api/models/x").await.refused(404, "Model 'x' not found");

    gateway.reconfigure(|setup| {
        setup.sections = json!({"models": models("renamed"), "token_usage": {"enabled": false}});
    });
    let listed = gateway.get("/api/models").await.ok();
    assert_eq!(listed["token_usage"], json!({"enabled": false}));
    assert_eq!(listed["models"][0]["name"], "renamed");
    gateway.get("/api/models/big").await.refused(404, "Model 'big' not found");
}

/// The operations of the document: method, path and operation.
fn operations(document: &Value) -> Vec<(Method, String, Value)> {
    let paths = document["paths"].as_object().unwrap();
    let operations = paths.iter().flat_map(|(path, item)| {
        let item = item.as_object().unwrap().iter();
        item.map(|(method, operation)| {
            (method.to_uppercase().parse().unwrap(), path.clone(), operation.clone())
        })
    });
    operations.collect()
}

#[tokio::test]
async fn the_description_is_the_one_that_was_reviewed() {
    let gateway = Setup::default().start().await;
    let mut document = gateway.get("/openapi.json").await.ok();
    document["info"]["version"] = json!("[version]");
    insta::assert_json_snapshot!("openapi", document);
}

/// What clients generate of it accepts what the gateway does and answers, and offers nothing else.
#[tokio::test]
async fn the_description_has_the_ids_errors_and_statuses_that_there_are() {
    let gateway = Setup::default().start().await;
    let document = gateway.get("/openapi.json").await.ok();
    for (method, path, operation) in operations(&document) {
        assert!(operation["responses"]["408"].is_object(), "{method} {path}");
        let parameters = operation["parameters"].as_array().into_iter().flatten();
        for id in parameters.filter(|parameter| parameter["name"] == "thread_id") {
            // An id from before there were rules for them can only be deleted.
            let any = method == Method::DELETE && path == "/api/threads/{thread_id}";
            assert_eq!(id["schema"]["pattern"].is_null(), any, "{method} {path}");
        }
    }
    gateway.delete("/api/threads/an%20older%20id").await.refused(404, "Thread an older id not found");
    let fields = &document["components"]["schemas"]["ErrorBody"]["properties"];
    assert_eq!(fields.as_object().unwrap().keys().collect::<Vec<_>>(), ["detail"]);
    // A turn limit has 32 bits without a sign, which `int32` does not hold.
    let turns = &document["components"]["schemas"]["NewSubagent"]["properties"]["max_turns"];
    assert_eq!((&turns["format"], &turns["maximum"]), (&json!("int64"), &json!(u32::MAX)));
}

#[tokio::test]
async fn every_described_operation_has_a_name_of_its_own_and_a_summary() {
    let gateway = Setup::default().start().await;
    let document = gateway.get("/openapi.json").await.ok();
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    for (method, path, operation) in operations(&document) {
        let name = operation["operationId"].as_str().unwrap().to_owned();
        let place = format!("{method} {path}");
        assert!(operation["summary"].is_string(), "{place}");
        if let Some(other) = names.insert(name.clone(), place.clone()) {
            panic!("{place} and {other} are both called {name}");
        }
    }
}

/// An unserved route would be 404 `Not Found`, or 405.
#[tokio::test]
async fn every_described_operation_answers_under_both_prefixes() {
    let gateway = Setup::default().start().await;
    let document = gateway.get("/openapi.json").await.ok();
    for (method, path, operation) in operations(&document) {
        let path = path.replace("{cron_id}", "none").replace("{namespace}", "none");
        let path = path.replace("{thread_id}", "none").replace("{run_id}", "none").replace("{name}", "none");
        let path = path.replace("{checkpoint_id}", "none").replace("{assistant_id}", "none");
        let body = (method == Method::POST || method == Method::PATCH)
            .then(|| json!({"limit": "not a number", "metadata": 5}));
        let direct = gateway.call(method.clone(), &path, body.clone()).await;
        let place = format!("{method} {path}: {} {}", direct.status, direct.body);
        assert_ne!(direct.status, 405, "{place}");
        assert_ne!(direct.body["detail"], "Not Found", "{place}");
        // What this gateway does not do, or not with a store in memory.
        let said = matches!(direct.status, 501 | 503).then(|| direct.status.to_string());
        assert!(
            direct.status < 500 || said.is_some_and(|status| operation["responses"][&status].is_object()),
            "{place}"
        );
        let Some(rest) = path.strip_prefix("/api/") else { continue };
        let proxied = gateway.call(method, &format!("/api/langgraph/{rest}"), body).await;
        assert_eq!((proxied.status, &proxied.body), (direct.status, &direct.body), "{place}");
    }
}

#[tokio::test]
async fn the_proxied_prefix_keeps_the_query_and_stands_for_the_api_only() {
    let gateway = Setup::default().start().await;
    gateway.post("/api/langgraph/threads", json!({"thread_id": "t"})).await.ok();
    let run = gateway.ask("t", "hello").await;
    let path = format!("threads/t/runs/{run}/events?limit=1");
    let one = gateway.get(&format!("/api/langgraph/{path}")).await.ok();
    assert_eq!(one.as_array().unwrap().len(), 1);
    for path in [
        "/api/langgraph",
        "/api/langgraph/",
        "/api/langgraph/health",
        "/api/langgraph/api/models",
        "/langgraph/models",
    ] {
        gateway.get(path).await.refused(404, "Not Found");
    }
}

#[tokio::test]
async fn unknown_paths_and_methods_and_great_bodies_are_refused_in_json() {
    let gateway = Setup::default().start().await;
    gateway.get("/api/nothing").await.refused(404, "Not Found");
    gateway.delete("/api/models").await.refused(405, "Method Not Allowed");
    let great = vec![b' '; 32 * 1024 * 1024 + 1];
    let request = Request::post("/api/threads").header("content-type", "application/json");
    let answer = gateway.send(request.body(Body::from(great)).unwrap()).await;
    answer.refused(413, "Request body is too large: at most 33554432 bytes are accepted");
}

async fn cors(origins: Option<&str>, origin: &str) -> (Option<String>, Option<String>) {
    let variables = origins.map(|origins| ("GATEWAY_CORS_ORIGINS", origins.to_owned())).into_iter().collect();
    let gateway = Setup { variables, ..Setup::default() }.start().await;
    let request = Request::get("/api/models").header("origin", origin).body(Body::empty()).unwrap();
    let answer = gateway.send(request).await;
    let header = |name: &str| answer.headers.get(name).map(|value| value.to_str().unwrap().to_owned());
    let preflight = Request::builder()
        .method(Method::OPTIONS)
        .uri("/api/langgraph/threads")
        .header("origin", origin)
        .header("access-control-request-method", "PATCH")
        .header("access-control-request-headers", "x-api-key");
    let preflight = gateway.send(preflight.body(Body::empty()).unwrap()).await;
    let allowed =
        preflight.headers.get("access-control-allow-origin").map(|v| v.to_str().unwrap().to_owned());
    assert_eq!(header("access-control-allow-origin"), allowed);
    if allowed.is_some() {
        assert_eq!(preflight.headers["access-control-allow-methods"], "PATCH");
        assert_eq!(preflight.headers["access-control-allow-headers"], "x-api-key");
    }
    (allowed, header("access-control-expose-headers"))
}

#[tokio::test]
async fn pages_of_other_origins_are_allowed_only_if_they_are_named() {
    let exposed = Some("content-location,location".to_owned());
    for (origins, origin, allowed) in [
        (Some("https://a.example, https://b.example"), "https://b.example", Some("https://b.example")),
        (Some("*"), "https://any.example", Some("*")),
    ] {
        let (found, headers) = cors(origins, origin).await;
        assert_eq!((found.as_deref(), headers), (allowed, exposed.clone()));
    }
    assert_eq!(cors(Some("https://a.example"), "https://b.example").await.0, None);
    for off in [None, Some(""), Some(" , ")] {
        assert_eq!(cors(off, "https://a.example").await, (None, None));
    }
}

#[tokio::test]
async fn the_lead_agent_is_the_one_assistant() {
    for mode in ["full", "delta"] {
        let gateway = Setup::on("memory", mode).start().await;
        let agent = gateway.get("/api/assistants/lead_agent").await.ok();
        assert_eq!(
            (&agent["assistant_id"], &agent["graph_id"]),
            (&json!("lead_agent"), &json!("lead_agent"))
        );
        assert_eq!((&agent["metadata"], &agent["version"]), (&json!({"created_by": "system"}), &json!(1)));
        for (body, found) in [
            (json!({}), 1),
            (json!({"graph_id": "lead_agent", "name": "Lead", "metadata": {"created_by": "system"}}), 1),
            (json!({"graph_id": "other"}), 0),
            (json!({"name": "other"}), 0),
            (json!({"metadata": {"created_by": "me"}}), 0),
        ] {
            let listed = gateway.post("/api/assistants/search", body.clone()).await.ok();
            assert_eq!(listed, json!(vec![&agent; found]), "{body}");
            assert_eq!(gateway.post("/api/assistants/count", body).await.ok(), json!(found));
        }
        assert_eq!(gateway.post("/api/assistants/search", json!({"offset": 1})).await.ok(), json!([]));
        let graph = gateway.get("/api/assistants/lead_agent/graph").await.ok();
        assert_eq!(graph, json!({"graph_id": "lead_agent", "nodes": [], "edges": []}));
        let schemas = gateway.get("/api/assistants/lead_agent/schemas").await.ok();
        assert!(schemas["state_schema"]["properties"]["messages"].is_object());
        for path in ["", "/graph", "/schemas"] {
            let absent = gateway.get(&format!("/api/assistants/x{path}")).await;
            absent.refused(404, "Assistant x not found");
        }
    }
}
