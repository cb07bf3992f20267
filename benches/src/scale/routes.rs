//! The routes of a gateway that read: every one of its OpenAPI document that needs no other name than a thread's.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use reqwest::{Client, RequestBuilder};
use serde_json::{Value as Json, json};

use super::{Grows, Used};
use crate::load::client;
use crate::load::gateway::Gateway;
use crate::measure::ms;

/// The thread that is asked about.
const THREAD: &str = "long-delta";
/// Measured requests to a route, after one that is not measured.
const REQUESTS: u32 = 3;
/// The longest that an answer may take.
const PATIENCE: Duration = Duration::from_mins(2);

pub(super) async fn measure(gateway: &Gateway) -> Result<Vec<(String, Grows, Used)>> {
    let client = client::http()?;
    let document: Json = client.get(format!("{}/openapi.json", gateway.base())).send().await?.json().await?;
    let paths = document["paths"].as_object().context("the OpenAPI document has no paths")?;
    let mut asked: Vec<(String, RequestBuilder)> = Vec::new();
    for (path, operations) in paths {
        let filled = path.replace("{thread_id}", THREAD);
        // A stream has no end of its own.
        if operations.get("get").is_some() && !filled.contains('{') && !filled.ends_with("stream") {
            asked.push((path.clone(), client.get(format!("{}{filled}", gateway.base()))));
        }
    }
    let threads = gateway.api().threads;
    for (name, url, body) in [
        ("/api/threads/search", format!("{threads}/search"), json!({"limit": 10})),
        ("/api/threads/count", format!("{threads}/count"), json!({})),
        ("/api/threads/{thread_id}/history", format!("{threads}/{THREAD}/history"), json!({"limit": 10})),
    ] {
        asked.push((format!("{name} (POST)"), client.post(url).json(&body)));
    }
    let mut rows = Vec::with_capacity(asked.len());
    for (name, request) in asked {
        let used = route(gateway, &client, &request).await.with_context(|| name.clone())?;
        if let Some(used) = used {
            rows.push((name.clone(), grows(&name), used));
        }
    }
    Ok(rows)
}

/// Some answers have all of a thread's messages, or a figure that is made from them.
fn grows(name: &str) -> Grows {
    const THREAD: [&str; 5] = ["{thread_id}", "/state", "/history", "/history (POST)", "/token-usage"];
    if THREAD.iter().any(|end| name.ends_with(end)) { Grows::Thread } else { Grows::No }
}

/// What a request uses; none if the route refuses a request without more parameters, or has nothing to show.
async fn route(gateway: &Gateway, client: &Client, request: &RequestBuilder) -> Result<Option<Used>> {
    let send = async || {
        let request = request.try_clone().context("a body that cannot be sent twice")?.timeout(PATIENCE);
        let answer = client.execute(request.build()?).await?;
        let good = answer.status().is_success();
        anyhow::Ok((good, answer.bytes().await?.len() as u64))
    };
    if !send().await?.0 {
        return Ok(None);
    }
    let process = gateway.process();
    let (cpu, read) = (process.cpu(), process.read());
    let began = Instant::now();
    let mut printed = 0;
    for _ in 0..REQUESTS {
        printed = send().await?.1;
    }
    let each = |time: Duration| ms(time / REQUESTS);
    Ok(Some(Used {
        wall_ms: each(began.elapsed()),
        cpu_ms: each(process.cpu().saturating_sub(cpu)),
        peak: process.peak(),
        read: (process.read() - read) / u64::from(REQUESTS),
        printed,
    }))
}
