//! The runs of all threads, and the errors of the process: who sees them, over the API and on the page.

use axum::body::Body;
use axum::http::{Method, Request};
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;

use crate::page::{Guarded, html};
use crate::support::{DURABLE, Setup, question};

fn setup(backend: &'static str, gate: &str) -> Setup {
    let script = json!({"rules": [
        {"when": {"contains": ["wait"]}, "answers": [{"text": "late", "gate": {"name": gate}}]},
        {"when": {"contains": ["fail"]}, "answers": [{"error": {"kind": "fatal", "message": "no luck"}}]},
        {"answers": [{"text": "You said: {{input}}"}]},
    ]});
    Setup { script, ..Setup::on(backend, "delta") }
}

#[tokio::test]
async fn runs_of_all_threads_are_listed_by_what_became_of_them() {
    for backend in DURABLE {
        let name = format!("page-overview-{backend}");
        let gateway = setup(backend, &name).start().await;
        for thread in ["a", "b", "c"] {
            gateway.create(thread).await;
        }
        gateway.ask("a", "hello").await;
        gateway.post("/api/threads/b/runs/wait", question("please fail")).await;
        let running = gateway.start_run("c", "wait").await;
        gate(&name).reached().await;
        let mut body = question("then <i>this");
        body["multitask_strategy"] = json!("enqueue");
        let waiting = gateway.post("/api/threads/c/runs", body).await.ok();

        let listed = async |query: &str| {
            let runs = gateway.get(&format!("/api/runs{query}")).await.ok();
            let shown = |run: &Value| {
                (run["thread_id"].as_str().unwrap().to_owned(), run["status"].as_str().unwrap().to_owned())
            };
            runs.as_array().unwrap().iter().map(shown).collect::<Vec<_>>()
        };
        let pairs = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect::<Vec<_>>()
        };
        assert_eq!(
            listed("").await,
            pairs(&[("c", "pending"), ("c", "running"), ("b", "error"), ("a", "success")])
        );
        assert_eq!(listed("?status=running").await, pairs(&[("c", "running")]));
        assert_eq!(listed("?status=error").await, pairs(&[("b", "error")]));
        assert_eq!(listed("?limit=1&offset=3").await, pairs(&[("a", "success")]));
        assert_eq!(listed("?status=interrupted").await, []);
        for query in ["limit=0", "limit=101", "offset=-1", "status=done"] {
            assert_eq!(gateway.get(&format!("/api/runs?{query}")).await.status, 422, "{query}");
        }
        let run = gateway.get("/api/runs?status=pending").await.ok()[0].clone();
        assert_eq!(
            (&run["run_id"], &run["waiting"], &run["question"]),
            (&waiting["run_id"], &json!(true), &json!("then <i>this"))
        );
        let failed = gateway.get("/api/runs?status=error").await.ok()[0].clone();
        assert!(failed["error"].as_str().unwrap().contains("no luck"), "{failed}");

        let page = gateway.get("/runs").await;
        let shown = html(&page);
        for part in [
            &format!("href=\"/threads/c/runs/{running}\""),
            "then &lt;i&gt;this",
            "no luck",
            &format!("data-of=\"c\" data-post=\"/runs/{running}/cancel\""),
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert!(!shown.contains("hello"), "what ended well is not shown: {shown}");
        gate(&name).open();
        gateway.join("c", waiting["run_id"].as_str().unwrap()).await;
        let page = gateway.get("/runs").await;
        assert!(html(&page).contains("No run is at work.") && html(&page).contains("No run waits."));
    }
}

#[tokio::test]
async fn nobody_sees_runs_on_threads_of_others_nor_errors_without_being_an_administrator() {
    let guarded = Guarded::with(setup("sqlite", "page-overview-of-users")).await;
    let (_, ann) = guarded.signed_in("ann").await;
    let (_, bob) = guarded.signed_in("bob").await;
    let token = guarded.token(&ann).await;
    let send = async |path: &str, body: Value| {
        let request = Request::builder().method(Method::POST).uri(path).header("cookie", &ann);
        let request = request.header("x-page-token", &token).header("content-type", "application/json");
        guarded.gateway.send(request.body(Body::from(body.to_string())).unwrap()).await
    };
    send("/api/threads", json!({"thread_id": "t"})).await.ok();
    send("/api/threads/t/runs/wait", question("fail in secret")).await;
    let own = guarded.api(Method::GET, "/api/runs?status=error", &ann, None).await.ok();
    assert_eq!(own[0]["question"], "fail in secret");
    assert!(html(&guarded.get("/runs", &ann).await).contains("fail in secret"));
    assert_eq!(guarded.api(Method::GET, "/api/runs", &bob, None).await.ok(), json!([]));
    assert!(!html(&guarded.get("/runs", &bob).await).contains("secret"));

    let errors = guarded.api(Method::GET, "/api/errors", &ann, None).await;
    errors.refused(403, "Admin privileges are required to read errors.");
    assert!(!html(&guarded.get("/status", &ann).await).contains("Errors of the last hour"));
    let open = Setup::default().start().await;
    assert!(open.get("/api/errors").await.ok().is_array());
    assert!(html(&open.get("/status").await).contains("Errors of the last hour"));
}
