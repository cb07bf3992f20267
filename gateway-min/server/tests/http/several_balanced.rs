//! Two gateways with a load balancer in front.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::http::Method;
use futures::future::join_all;
use reqwest::Client;
use serde_json::{Value, json};
use threadkeep_agent::model::scripted::gate;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use crate::several::two;
use crate::support::{Gateway, MODES, question, texts};

/// Forwards each connection to the next server in turn.
async fn balancer(servers: Vec<SocketAddr>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        for server in servers.iter().cycle() {
            let (mut client, _) = listener.accept().await.unwrap();
            let server = *server;
            tokio::spawn(async move {
                let mut server = TcpStream::connect(server).await.unwrap();
                // The first side to close ends it.
                let _ = copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    address
}

/// A client of both gateways, which opens a new connection, and so reaches the other gateway, for each request.
struct Balanced {
    base: String,
    client: Client,
}

impl Balanced {
    async fn before(gateways: [&Gateway; 2]) -> Arc<Self> {
        let servers = join_all(gateways.map(Gateway::listen)).await;
        rustls::crypto::ring::default_provider().install_default().ok();
        let client = Client::builder().no_proxy().pool_max_idle_per_host(0).build().unwrap();
        Arc::new(Self { base: format!("http://{}", balancer(servers).await), client })
    }

    async fn send(&self, method: Method, path: &str, body: Option<Value>, key: Option<&str>) -> (u16, Value) {
        let mut request = self.client.request(method, format!("{}{path}", self.base));
        if let Some(body) = body {
            request = request.json(&body);
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap_or_default())
    }

    async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        self.send(Method::POST, path, Some(body), None).await
    }
}

/// Scenario 15, with two processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_requests_through_a_balancer_one_gets_the_thread() {
    let (first, second) = two("delta", "several-parallel").await;
    let balanced = Balanced::before([&first, &second]).await;
    let asked = join_all((0..50).map(|_| {
        let balanced = Arc::clone(&balanced);
        tokio::spawn(async move { balanced.post("/api/threads/t/runs", question("work")).await })
    }));
    let answers: Vec<_> = asked.await.into_iter().map(Result::unwrap).collect();
    let statuses = |status| answers.iter().filter(|(found, _)| *found == status).count();
    assert_eq!((statuses(200), statuses(409)), (1, 49));

    // With one key, all get the same run.
    gate("several-parallel").open();
    let (_, run) = answers.into_iter().find(|(status, _)| *status == 200).unwrap();
    first.join("t", run["run_id"].as_str().unwrap()).await;
    let asked = join_all((0..10).map(|_| {
        let balanced = Arc::clone(&balanced);
        tokio::spawn(async move {
            balanced.send(Method::POST, "/api/threads/t/runs", Some(question("hi")), Some("k")).await
        })
    }));
    let mut runs: Vec<_> = asked.await.into_iter().map(|answer| answer.unwrap().1["run_id"].take()).collect();
    runs.dedup();
    assert!(runs.len() == 1 && runs[0].is_string(), "{runs:?}");
}

/// Scenario 6, with two processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_and_a_run_through_a_balancer_exclude_each_other() {
    let (first, second) = two("delta", "several-delete").await;
    let balanced = Balanced::before([&first, &second]).await;
    for round in 0..100 {
        let thread = format!("t{round}");
        first.create(&thread).await;
        let (place, runs) = (format!("/api/threads/{thread}"), format!("/api/threads/{thread}/runs"));
        let (deleted, created) = tokio::join!(
            balanced.send(Method::DELETE, &place, None, None),
            balanced.post(&runs, question("hello"))
        );
        match (deleted.0, created.0) {
            (409, 200) => {
                first.join(&thread, created.1["run_id"].as_str().unwrap()).await;
                assert_eq!(texts(&second.state(&thread).await), ["hello", "You said: hello"]);
            }
            (200, 404 | 409) => assert_eq!(second.get(&format!("{place}/state")).await.status, 404),
            // Both succeed if the run, or the deletion, had ended before the other began.
            (200, 200) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Many concurrent conversations whose turns alternate between two gateways.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conversations_over_a_balancer_are_whole() {
    for mode in MODES {
        let (first, second) = two(mode, "several-turns").await;
        let balanced = Balanced::before([&first, &second]).await;
        let talks = join_all((0..6).map(|n| {
            let balanced = Arc::clone(&balanced);
            tokio::spawn(async move {
                let thread = format!("talk{n}");
                balanced.post("/api/threads", json!({ "thread_id": thread })).await;
                for turn in 0..5 {
                    let wait = format!("/api/threads/{thread}/runs/wait");
                    let (status, body) = balanced.post(&wait, question(&format!("q{turn}"))).await;
                    assert_eq!(status, 200, "{body}");
                }
            })
        }));
        talks.await.into_iter().for_each(Result::unwrap);
        let expected: Vec<String> =
            (0..5).flat_map(|turn| [format!("q{turn}"), format!("You said: q{turn}")]).collect();
        for n in 0..6 {
            let state = first.state(&format!("talk{n}")).await;
            assert_eq!(texts(&state), expected);
            assert_eq!(second.state(&format!("talk{n}")).await, state);
        }
    }
}
