//! The routes of a gateway: every one of its OpenAPI document that reads and needs no other name than that of a thread, a
//! run or a checkpoint, the pages for browsers, and those that carry out runs and make threads.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use reqwest::{Client, RequestBuilder};
use serde_json::{Value as Json, json};

use super::{Grows, Measured, Used};
use crate::load::client;
use crate::load::gateway::Gateway;
use crate::measure::ms;

/// The thread that is asked about.
const THREAD: &str = "long-delta";
/// How paths name it, a run of it, and a checkpoint of it.
const OF_THREAD: &str = "{thread_id}";
const OF_RUN: &str = "{run_id}";
const OF_CHECKPOINT: &str = "{checkpoint_id}";
/// Measured requests to a route, after one that is not measured.
const REQUESTS: usize = 3;
/// The longest that an answer may take.
const PATIENCE: Duration = Duration::from_mins(2);
/// What is part of the name of a page for browsers.
const PAGE: &str = " (page)";

/// Asks the routes that change nothing.
pub(super) async fn read(gateway: &Gateway) -> Result<Vec<Measured>> {
    let client = client::http()?;
    let mut asked = documented(gateway, &client, &[(OF_THREAD, THREAD)]).await?;
    let threads = gateway.api().threads;
    for (name, url, body) in [
        ("/api/threads/search", format!("{threads}/search"), json!({"limit": 10})),
        ("/api/threads/count", format!("{threads}/count"), json!({})),
        ("/api/threads/{thread_id}/history", format!("{threads}/{THREAD}/history"), json!({"limit": 10})),
    ] {
        asked.push((format!("{name} (POST)"), client.post(url).json(&body)));
    }
    for path in [
        "/",
        "/runs",
        "/status",
        "/threads/{thread_id}",
        "/threads/{thread_id}/runs",
        "/threads/{thread_id}/checkpoints",
        "/threads/{thread_id}/storage",
    ] {
        let url = format!("{}{}", gateway.base(), path.replace(OF_THREAD, THREAD));
        asked.push((format!("{path}{PAGE}"), client.get(url)));
    }
    let mut rows = Vec::with_capacity(asked.len());
    for (name, request) in asked {
        let used = route(gateway, &client, repeated(&request)?).await.with_context(|| name.clone())?;
        if let Some((used, _)) = used {
            rows.push((name.clone(), grows(&name), used));
        }
    }
    Ok(rows)
}

/// The routes of the document that read, with these names filled in: those that need no other one.
async fn documented(
    gateway: &Gateway,
    client: &Client,
    names: &[(&str, &str)],
) -> Result<Vec<(String, RequestBuilder)>> {
    let document: Json = client.get(format!("{}/openapi.json", gateway.base())).send().await?.json().await?;
    let paths = document["paths"].as_object().context("the OpenAPI document has no paths")?;
    let mut asked = Vec::new();
    for (path, operations) in paths {
        let filled = names.iter().fold(path.clone(), |path, (name, value)| path.replace(name, value));
        // A stream has no end of its own.
        if operations.get("get").is_some() && !filled.contains('{') && !filled.ends_with("stream") {
            asked.push((path.clone(), client.get(format!("{}{filled}", gateway.base()))));
        }
    }
    Ok(asked)
}

/// Asks the routes that carry out runs and make threads, which are deleted again, and those that read a run or the state at
/// a checkpoint, which is `old`. A branch begins at a turn before it.
pub(super) async fn change(
    gateway: &Gateway,
    old: &str,
    say: &mut impl FnMut(&str),
) -> Result<Vec<Measured>> {
    let thread = format!("{}/{THREAD}", gateway.api().threads);
    let asking = Asking { gateway, client: client::http()?, thread };
    let client = &asking.client;
    let mut rows = Vec::new();
    let run = json!({
        "assistant_id": gateway.api().assistant,
        "input": {"messages": [{"role": "user", "content": "How far is it?"}]},
        "stream_mode": ["updates"],
    });
    for path in ["runs/wait", "runs/stream"] {
        asking.post(path, &run, &mut rows, say).await?;
    }
    let runs = asking.json("runs").await?;
    let newest = &runs[0];
    if newest["status"] != "success" {
        say(&format!("a run of {THREAD} has status {}: its rows say what a failure costs", newest["status"]));
    }
    if let Some(run) = newest["run_id"].as_str() {
        let names = [(OF_THREAD, THREAD), (OF_RUN, run), (OF_CHECKPOINT, old)];
        for (name, request) in documented(gateway, client, &names).await? {
            if name.contains(OF_RUN) || name.contains(OF_CHECKPOINT) {
                asking.add(name, repeated(&request)?, &mut rows, say).await?;
            }
        }
    }
    let state = asking.json(&format!("state/{old}")).await?;
    let answer =
        answer_of_a_turn(&state["values"]["messages"]).context("no turn before an old checkpoint")?;
    let branches = asking.post("branches", &json!({ "message_id": answer }), &mut rows, say).await?;
    let copies = asking.post("copy", &json!({}), &mut rows, say).await?;
    let delete = |threads: Vec<String>| -> Vec<RequestBuilder> {
        let urls = threads.into_iter().map(|thread| format!("{}/{thread}", gateway.api().threads));
        urls.map(|url| client.delete(url)).collect()
    };
    for request in delete(made(&branches)) {
        request.timeout(PATIENCE).send().await?.error_for_status()?;
    }
    let deleted = delete(made(&copies));
    if !deleted.is_empty() {
        asking.add(format!("/api/threads/{OF_THREAD} (DELETE)"), deleted, &mut rows, say).await?;
    }
    // Last: it adds a checkpoint at which no turn ends.
    asking.post("state", &json!({"values": {"title": "A long thread"}}), &mut rows, say).await?;
    Ok(rows)
}

/// Who asks about the thread.
struct Asking<'g> {
    gateway: &'g Gateway,
    client: Client,
    /// The URL of the thread.
    thread: String,
}

impl Asking<'_> {
    /// What a route of the thread answers.
    async fn json(&self, path: &str) -> Result<Json> {
        let request = self.client.get(format!("{}/{path}", self.thread)).timeout(PATIENCE);
        Ok(request.send().await?.error_for_status()?.json().await?)
    }

    /// Adds the row of a route of the thread that is sent this body again and again. Returns the answers.
    async fn post(
        &self,
        path: &str,
        body: &Json,
        rows: &mut Vec<Measured>,
        say: &mut impl FnMut(&str),
    ) -> Result<Vec<Vec<u8>>> {
        let request = self.client.post(format!("{}/{path}", self.thread)).json(body);
        let name = format!("/api/threads/{OF_THREAD}/{path} (POST)");
        self.add(name, repeated(&request)?, rows, say).await
    }

    /// Adds a row, or says that the route refuses such a request. Returns the answers.
    async fn add(
        &self,
        name: String,
        requests: Vec<RequestBuilder>,
        rows: &mut Vec<Measured>,
        say: &mut impl FnMut(&str),
    ) -> Result<Vec<Vec<u8>>> {
        let used = route(self.gateway, &self.client, requests).await.with_context(|| name.clone())?;
        let Some((used, answers)) = used else {
            say(&format!("{name} is refused, and left out"));
            return Ok(Vec::new());
        };
        rows.push((name.clone(), grows(&name), used));
        Ok(answers)
    }
}

/// The last answer of a turn that another one follows, from the middle of these messages on; if there is none, before it.
fn answer_of_a_turn(messages: &Json) -> Option<&str> {
    let messages = messages.as_array()?;
    let ends = |pair: &&[Json]| pair[0]["type"] == "ai" && pair[1]["type"] == "human";
    let later = messages.windows(2).skip(messages.len() / 2).find(ends);
    let pair = later.or_else(|| messages.windows(2).rev().find(ends))?;
    pair[0]["id"].as_str()
}

/// The threads that answers name.
fn made(answers: &[Vec<u8>]) -> Vec<String> {
    let of = |answer: &Vec<u8>| {
        let answer: Json = serde_json::from_slice(answer).ok()?;
        answer["thread_id"].as_str().map(str::to_owned)
    };
    answers.iter().filter_map(of).collect()
}

/// Some answers have all of a thread's messages or a figure that is made from them, and a run gives them to its model.
fn grows(name: &str) -> Grows {
    const THREAD: [&str; 18] = [
        OF_THREAD,
        "/state",
        "/history",
        "/history (POST)",
        "/token-usage",
        OF_CHECKPOINT,
        "/join",
        "/events",
        "/runs/wait (POST)",
        "/runs/stream (POST)",
        "/branches (POST)",
        "/copy (POST)",
        "/state (POST)",
        "{thread_id} (DELETE)",
        // The sizes of the threads on it.
        "/ (page)",
        "{thread_id} (page)",
        "/checkpoints (page)",
        "/storage (page)",
    ];
    if THREAD.iter().any(|end| name.ends_with(end)) { Grows::Thread } else { Grows::No }
}

/// The requests of a row: the same one again and again.
fn repeated(request: &RequestBuilder) -> Result<Vec<RequestBuilder>> {
    let copy = |_| request.try_clone().context("a body that cannot be sent twice");
    (0..=REQUESTS).map(copy).collect()
}

/// What a request uses, on average of all but the first one, and every answer; nothing if the route refuses the first one:
/// it needs more parameters, or has nothing to show.
async fn route(
    gateway: &Gateway,
    client: &Client,
    requests: Vec<RequestBuilder>,
) -> Result<Option<(Used, Vec<Vec<u8>>)>> {
    let send = async |request: RequestBuilder| {
        let answer = client.execute(request.timeout(PATIENCE).build()?).await?;
        let good = answer.status().is_success();
        anyhow::Ok((good, answer.bytes().await?.to_vec()))
    };
    let mut requests = requests.into_iter();
    let (good, answer) = send(requests.next().context("no request")?).await?;
    if !good {
        return Ok(None);
    }
    let measured = u32::try_from(requests.len())?.max(1);
    let mut answers = vec![answer];
    let process = gateway.process();
    let (cpu, mut reads) = (process.cpu(), Vec::new());
    let began = Instant::now();
    for request in requests {
        let before = process.read();
        let (good, answer) = send(request).await?;
        ensure!(good, "a repeated request was refused: {}", String::from_utf8_lossy(&answer));
        reads.push(process.read() - before);
        answers.push(answer);
    }
    let each = |time: Duration| ms(time / measured);
    let used = Used {
        wall_ms: each(began.elapsed()),
        cpu_ms: each(process.cpu().saturating_sub(cpu)),
        peak: process.peak(),
        // The least: the gateway's own work in between reads, and what it writes empties the caches of its connections.
        read: reads.into_iter().min().unwrap_or_default(),
        printed: answers.last().map_or(0, |answer| answer.len() as u64),
    };
    Ok(Some((used, answers)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_branch_begins_at_the_last_answer_of_a_turn_that_another_one_follows() {
        let message = |number: usize| {
            let kind = ["human", "ai", "tool", "ai"][number % 4];
            json!({"type": kind, "id": format!("m{number}")})
        };
        let messages = |count: usize| (0..count).map(message).collect::<Json>();
        assert_eq!(answer_of_a_turn(&messages(20)), Some("m11"));
        assert_eq!(answer_of_a_turn(&messages(18)), Some("m11"));
        assert_eq!(answer_of_a_turn(&messages(8)), Some("m3"), "none follows the middle");
        assert_eq!(answer_of_a_turn(&messages(4)), None);
        assert_eq!(answer_of_a_turn(&Json::Null), None);
    }
}
