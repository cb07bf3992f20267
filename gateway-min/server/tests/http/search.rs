//! Searching and counting threads.

use serde_json::{Value, json};

use crate::support::{Gateway, Setup};

async fn with_threads(threads: &[(&str, Value)]) -> Gateway {
    let gateway = Setup::default().start().await;
    for (id, metadata) in threads {
        gateway.post("/api/threads", json!({"thread_id": id, "metadata": metadata})).await.ok();
    }
    gateway
}

async fn found(gateway: &Gateway, body: Value) -> Vec<String> {
    let threads = gateway.post("/api/threads/search", body).await.ok();
    threads.as_array().unwrap().iter().map(|t| t["thread_id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn metadata_matches_exactly_by_type_and_the_count_agrees() {
    let gateway = with_threads(&[
        ("null", json!({"k": null})),
        ("true", json!({"k": true})),
        ("one", json!({"k": 1})),
        ("float", json!({"k": 1.5})),
        ("text", json!({"k": "1", "other": "x"})),
        ("absent", json!({})),
    ])
    .await;
    for (value, expected) in [
        (json!(null), "null"),
        (json!(true), "true"),
        (json!(1), "one"),
        (json!(1.5), "float"),
        (json!("1"), "text"),
    ] {
        let body = json!({"metadata": {"k": value}});
        assert_eq!(found(&gateway, body.clone()).await, [expected]);
        assert_eq!(gateway.post("/api/threads/count", body).await.ok(), json!(1));
    }
    assert_eq!(found(&gateway, json!({"metadata": {"k": "1", "other": "x"}})).await, ["text"]);
    assert_eq!(found(&gateway, json!({"metadata": {"k": "1", "other": "y"}})).await, Vec::<String>::new());
    for (body, count) in [
        (json!({}), 6),
        (json!({"metadata": null, "values": {}}), 6),
        (json!({"values": {"title": null}}), 6),
        (json!({"values": {"title": "x"}}), 0),
        (json!({"metadata": {"k": 2}}), 0),
        (json!({"status": "idle"}), 6),
        (json!({"status": "busy"}), 0),
        (json!({"status": "no such status"}), 0),
    ] {
        assert_eq!(gateway.post("/api/threads/count", body).await.ok(), json!(count));
    }
    let all = gateway.call(axum::http::Method::POST, "/api/threads/count", None).await;
    assert_eq!(all.ok(), json!(6), "a body is not needed");
}

/// Chat pages for LangGraph list threads so: its servers record the assistant in each thread's metadata.
#[tokio::test]
async fn threads_are_found_by_their_assistant() {
    let gateway = with_threads(&[
        ("plain", json!({"k": 1})),
        ("named", json!({"graph_id": "lead_agent"})),
        ("other", json!({"graph_id": "research"})),
        ("null", json!({"graph_id": null})),
    ])
    .await;
    for (metadata, expected) in [
        (json!({"graph_id": "lead_agent"}), vec!["named", "plain"]),
        (json!({"graph_id": "lead_agent", "k": 1}), vec!["plain"]),
        (json!({"graph_id": "research"}), vec!["other"]),
        (json!({"graph_id": "none"}), vec![]),
        (json!({"assistant_id": "lead_agent"}), vec!["null", "other", "named", "plain"]),
        (json!({"assistant_id": "none"}), vec![]),
    ] {
        let body = json!({ "metadata": metadata });
        let count = gateway.post("/api/threads/count", body.clone()).await.ok();
        assert_eq!(count, json!(expected.len()), "{body}");
        assert_eq!(found(&gateway, body.clone()).await, expected, "{body}");
    }
}

#[tokio::test]
async fn filters_that_cannot_be_used_are_refused_not_widened() {
    let gateway = with_threads(&[("t", json!({"good": 1}))]).await;
    for path in ["/api/threads/search", "/api/threads/count"] {
        for key in ["a b", "", "a.b", "\u{e4}"] {
            for filter in [json!({ key: 1 }), json!({ key: 1, "good": 1 })] {
                let answer = gateway.post(path, json!({ "metadata": filter })).await;
                let detail = format!(
                    "Invalid metadata filter entries: '{key}': a key has only letters, digits, '_' and '-'"
                );
                answer.refused(400, &detail);
            }
        }
        for value in [json!([]), json!({}), json!(u64::MAX)] {
            let answer = gateway.post(path, json!({"metadata": {"k": value, "good": 1}})).await;
            answer.invalid("metadata_filter_value", &json!(["body", "metadata", "k"]));
        }
        gateway.post(path, json!({"metadata": 1})).await.invalid("dict_type", &json!(["body", "metadata"]));
        gateway.post(path, json!({"ids": "t"})).await.invalid("list_type", &json!(["body", "ids"]));
    }
}

#[tokio::test]
async fn pages_have_bounds_and_follow_each_other_last_updated_first() {
    let ids = ["a", "b", "c", "d", "e"];
    let gateway = with_threads(&ids.map(|id| (id, json!({})))).await;
    for (field, value, kind) in [
        ("limit", 0, "greater_than_equal"),
        ("limit", 1001, "less_than_equal"),
        ("offset", -1, "greater_than_equal"),
    ] {
        gateway
            .post("/api/threads/search", json!({ field: value }))
            .await
            .invalid(kind, &json!(["body", field]));
    }
    assert_eq!(found(&gateway, json!({"limit": 1000})).await, ["e", "d", "c", "b", "a"]);
    gateway.patch("/api/threads/b", json!({"metadata": {"x": 1}})).await.ok();
    gateway.patch("/api/threads/a", json!({"metadata": {"svc_pinned": true}})).await.ok();
    assert_eq!(found(&gateway, json!({})).await, ["a", "b", "e", "d", "c"], "pinned, then by time");
    assert_eq!(found(&gateway, json!({"limit": 2})).await, ["a", "b"]);
    assert_eq!(found(&gateway, json!({"limit": 2, "offset": 2})).await, ["e", "d"]);
    assert_eq!(found(&gateway, json!({"limit": 2, "offset": 4})).await, ["c"]);
    assert_eq!(found(&gateway, json!({"ids": ["c", "a", "none"]})).await, ["a", "c"]);
    assert_eq!(found(&gateway, json!({"ids": []})).await, Vec::<String>::new());
    for (by, ascending) in [
        ("created_at", ["a", "b", "c", "d", "e"]),
        ("thread_id", ["a", "b", "c", "d", "e"]),
        ("updated_at", ["a", "c", "d", "e", "b"]),
        ("status", ["a", "b", "c", "d", "e"]),
    ] {
        let sorted = async |order: Value| found(&gateway, json!({"sort_by": by, "sort_order": order})).await;
        assert_eq!(sorted(json!("asc")).await, ascending, "{by}");
        let mut descending = ascending;
        descending.reverse();
        for order in [json!("desc"), json!(null)] {
            assert_eq!(sorted(order).await, descending, "{by}");
        }
    }
    assert_eq!(found(&gateway, json!({"sort_order": "asc"})).await, ["a", "c", "d", "e", "b"]);
}

#[tokio::test]
async fn a_found_thread_has_its_title_as_the_only_value() {
    let gateway = with_threads(&[("t", json!({})), ("untitled", json!({}))]).await;
    gateway.ask("t", "hello").await;
    let threads = gateway.post("/api/threads/search", json!({})).await.ok();
    assert_eq!(threads[0]["values"], json!({"title": "hello"}));
    assert_eq!((&threads[1]["thread_id"], &threads[1]["values"]), (&json!("untitled"), &json!({})));
}

/// The record has only the beginning of it.
#[tokio::test]
async fn a_thread_is_found_by_the_whole_of_a_long_title() {
    let gateway = with_threads(&[("t", json!({})), ("other", json!({}))]).await;
    let long = "\u{e4}".repeat(300);
    for (thread, title) in [("t", long.as_str()), ("other", "x")] {
        let body = json!({"values": {"title": title}});
        gateway.post(&format!("/api/threads/{thread}/state"), body).await.ok();
    }
    let body = json!({"values": {"title": long}});
    assert_eq!(found(&gateway, body.clone()).await, ["t"]);
    assert_eq!(gateway.post("/api/threads/count", body).await.ok(), json!(1));
}

/// A thread beyond the limit in bytes says that its metadata is left out; read alone, it has it.
#[tokio::test]
async fn metadata_beyond_the_limit_in_bytes_is_named_as_left_out() {
    for (bytes, shown) in [(0, json!({"svc_metadata_omitted": true})), (8 << 20, json!({"k": "1"}))] {
        let sections = json!({"gateway": {"history_max_bytes": bytes}});
        let gateway = Setup { sections, ..Setup::default() }.start().await;
        gateway.post("/api/threads", json!({"thread_id": "t", "metadata": {"k": "1"}})).await.ok();
        let found = gateway.post("/api/threads/search", json!({"metadata": {"k": "1"}})).await.ok();
        assert_eq!((&found[0]["thread_id"], &found[0]["metadata"]), (&json!("t"), &shown));
        assert_eq!(gateway.get("/api/threads/t").await.ok()["metadata"], json!({"k": "1"}));
    }
}
