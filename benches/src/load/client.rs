//! One thread and the client that talks to it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use futures::StreamExt as _;
use futures::future::try_join;
use reqwest::{Client, RequestBuilder, Response};
use serde_json::{Value as Json, json};

use super::gateway::Api;
use crate::transcript::Transcript;

/// How long a turn may take on any machine.
const PATIENCE: Duration = Duration::from_mins(1);

/// A client that keeps its connections alive.
pub(crate) fn http() -> Result<Client> {
    // Other code in this process may have installed one already.
    let _chosen = rustls::crypto::ring::default_provider().install_default();
    Ok(Client::builder().no_proxy().build()?)
}

/// The times of a turn, from the moment its request was sent.
#[derive(Debug, Clone)]
pub(crate) struct Turn {
    /// Until the first bytes of the stream.
    pub(crate) first_frame: Duration,
    /// Until the stream ended.
    pub(crate) whole: Duration,
    /// Of a turn that is followed.
    pub(crate) delays: Option<Delays>,
}

/// How much later than at a client of the gateway that works on the run, which joins it at the same time, something
/// arrives at the client of the other gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Delays {
    /// Each frame but the first.
    pub(crate) frames: Vec<Duration>,
    /// The end of the stream.
    pub(crate) end: Duration,
}

impl Delays {
    /// # Errors
    /// If the two streams have not the same frames.
    fn between(owner: &Shown, follower: &Shown) -> Result<Self> {
        let ids = |shown: &Shown| shown.frames.iter().map(|(id, _)| id.clone()).collect::<Vec<_>>();
        let (expected, found) = (ids(owner), ids(follower));
        ensure!(expected == found, "frames {expected:?} of the run are {found:?} at the other gateway");
        let pairs = owner.frames.iter().zip(&follower.frames);
        let frames = pairs.skip(1).map(|((_, here), (_, there))| there.saturating_duration_since(*here));
        Ok(Self { frames: frames.collect(), end: follower.ended.saturating_duration_since(owner.ended) })
    }
}

/// A stream that was read to its end.
#[derive(Debug)]
struct Shown {
    /// When its first bytes arrived.
    began: Instant,
    /// When each frame arrived, by its id. The end has none.
    frames: Vec<(String, Instant)>,
    ended: Instant,
}

/// A thread of the gateway.
pub(crate) struct Conversation {
    client: Client,
    id: String,
    api: Api,
    /// Another process's API, through which the turns are followed.
    follower: Option<Api>,
    frames: Vec<String>,
    messages: Transcript,
}

impl Conversation {
    /// Creates thread `number`, whose turns ask for these frames. With a follower, a turn is begun in the background
    /// and joined at both gateways, and its times count from the request to the follower for its stream.
    pub(crate) async fn create(
        client: &Client,
        api: Api,
        follower: Option<Api>,
        number: usize,
        frames: &[String],
    ) -> Result<Self> {
        // LangGraph's server takes no other ids.
        let id = format!("00000000-0000-0000-0000-{number:012x}");
        let answer = client.post(&api.threads).json(&json!({ "thread_id": id })).send().await?;
        answer.error_for_status()?;
        let messages = Transcript::new(u64::try_from(number)?);
        Ok(Self { client: client.clone(), id, api, follower, frames: frames.to_vec(), messages })
    }

    /// The thread's id.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Sends a question and reads the stream to its end.
    pub(crate) async fn turn(&mut self) -> Result<Turn> {
        let text = self.messages.human()["content"].take();
        let body = json!({
            "assistant_id": self.api.assistant,
            "input": {"messages": [{"role": "user", "content": text}]},
            "stream_mode": self.frames,
        });
        let turn = tokio::time::timeout(PATIENCE, self.stream(&body)).await;
        turn.with_context(|| format!("thread {}: the turn did not end within {PATIENCE:?}", self.id))?
            .with_context(|| format!("thread {}", self.id))
    }

    async fn stream(&self, body: &Json) -> Result<Turn> {
        let runs = format!("{}/{}/runs", self.api.threads, self.id);
        let Some(follower) = &self.follower else {
            let asked = Instant::now();
            let shown = self.read(self.client.post(format!("{runs}/stream")).json(body)).await?;
            return Ok(shown.turn(asked, None));
        };
        let begun: Json = successful(self.client.post(runs).json(body).send().await?).await?.json().await?;
        let run = begun["run_id"].as_str().context("the run has no id")?;
        let join = |api: &Api| self.client.get(format!("{}/{}/runs/{run}/stream", api.threads, self.id));
        let asked = Instant::now();
        let (there, here) = try_join(self.read(join(follower)), self.read(join(&self.api))).await?;
        let delays = Delays::between(&here, &there)?;
        Ok(there.turn(asked, Some(delays)))
    }

    /// Reads the stream that this request answers with to its end.
    async fn read(&self, request: RequestBuilder) -> Result<Shown> {
        let answer = successful(request.send().await?).await?;
        let (mut began, mut frames) = (None, Vec::new());
        let mut lines = Lines::default();
        let mut chunks = answer.bytes_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.context("the stream broke off")?;
            let now = Instant::now();
            began.get_or_insert(now);
            lines.take(&chunk);
            frames.extend(lines.ids.drain(..).map(|id| (id, now)));
        }
        let ended = Instant::now();
        ensure!(lines.errors == 0, "the stream has {} error events: {}", lines.errors, lines.error);
        ensure!(
            lines.last == self.api.last.as_bytes(),
            "the stream ends with {:?}",
            String::from_utf8_lossy(&lines.last)
        );
        Ok(Shown { began: began.context("the stream is empty")?, frames, ended })
    }

    /// Checks that the thread holds a question and an answer for each turn.
    pub(crate) async fn check(&self, turns: usize) -> Result<()> {
        let answer = self.client.get(format!("{}/{}/state", self.api.threads, self.id)).send().await?;
        let state: Json = answer.error_for_status()?.json().await?;
        let kept = state["values"]["messages"].as_array().map_or(0, Vec::len);
        ensure!(kept == 2 * turns, "thread {} has {kept} messages after {turns} turns", self.id);
        Ok(())
    }
}

impl Shown {
    /// The turn that was asked for at this time.
    fn turn(&self, asked: Instant, delays: Option<Delays>) -> Turn {
        let since = |at: Instant| at.saturating_duration_since(asked);
        Turn { first_frame: since(self.began), whole: since(self.ended), delays }
    }
}

async fn successful(answer: Response) -> Result<Response> {
    let status = answer.status();
    if !status.is_success() {
        bail!("{status}: {}", answer.text().await.unwrap_or_default());
    }
    Ok(answer)
}

/// The events' names and ids in a stream, parsed as it arrives. Data is skipped.
#[derive(Debug, Default)]
struct Lines {
    /// The line in progress, up to the length of a name.
    begun: Vec<u8>,
    /// The name of the last event.
    last: Vec<u8>,
    /// The ids that have arrived, each at the end of its event.
    ids: Vec<String>,
    errors: usize,
    /// What the first error says, cut.
    error: String,
}

impl Lines {
    /// Longer than any event name, and enough of an error; of a longer line the rest is not kept.
    const KEPT: usize = 300;

    fn take(&mut self, chunk: &[u8]) {
        for piece in chunk.split_inclusive(|byte| *byte == b'\n') {
            let (text, complete) = piece.strip_suffix(b"\n").map_or((piece, false), |text| (text, true));
            let room = Self::KEPT.saturating_sub(self.begun.len()).min(text.len());
            self.begun.extend_from_slice(&text[..room]);
            if complete {
                // LangGraph's server ends lines with both characters.
                let line = self.begun.strip_suffix(b"\r").unwrap_or(&self.begun);
                if let Some(name) = line.strip_prefix(b"event: ") {
                    self.last = name.to_vec();
                    self.errors += usize::from(name == b"error");
                } else if let Some(id) = line.strip_prefix(b"id: ") {
                    self.ids.push(String::from_utf8_lossy(id).into_owned());
                } else if self.errors == 1 && self.error.is_empty() && self.last == b"error" {
                    self.error = String::from_utf8_lossy(line).into_owned();
                }
                self.begun.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// Runs a turn against a gateway that sends this answer and hangs up.
    async fn turn_of(answer: String) -> Result<Turn> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let threads = format!("http://{}", listener.local_addr()?);
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await?;
            let mut request = vec![0; 1 << 16];
            let _read = stream.read(&mut request).await?;
            stream.write_all(answer.as_bytes()).await?;
            stream.shutdown().await
        });
        let mut conversation = Conversation {
            client: http()?,
            id: "t".to_owned(),
            api: Api { threads, assistant: "a", last: "end" },
            follower: None,
            frames: Vec::new(),
            messages: Transcript::new(1),
        };
        conversation.turn().await
    }

    #[tokio::test]
    async fn only_a_stream_that_ends_well_is_a_turn() {
        const HEAD: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\n";
        let events = "event: metadata\ndata: {}\n\n";
        let turn = turn_of(format!("{HEAD}\r\n{events}event: end\ndata: null\n\n")).await.unwrap();
        assert!(turn.first_frame <= turn.whole);
        for (answer, problem) in [
            (format!("{HEAD}\r\n{events}"), "the stream ends with \"metadata\""),
            (
                format!("{HEAD}\r\n{events}event: error\ndata: {{}}\n\nevent: end\n\n"),
                "the stream has 1 error events: data: {}",
            ),
            (format!("{HEAD}content-length: 99\r\n\r\n{events}"), "the stream broke off"),
            ("HTTP/1.1 409 Conflict\r\ncontent-length: 4\r\n\r\nbusy".to_owned(), "409 Conflict: busy"),
        ] {
            let error = format!("{:#}", turn_of(answer).await.unwrap_err());
            assert!(error.starts_with("thread t: ") && error.contains(problem), "{error}");
        }
    }

    #[test]
    fn each_frame_after_the_first_and_the_end_are_late_by_their_own_times() {
        let began = Instant::now();
        let shown = |frames: &[(&str, u64)], ended: u64| {
            let at = |ms| began + Duration::from_millis(ms);
            let frames = frames.iter().map(|(id, ms)| ((*id).to_owned(), at(*ms))).collect();
            Shown { began, frames, ended: at(ended) }
        };
        let owner = shown(&[("1-0", 0), ("1-1", 10), ("2-2", 20)], 30);
        let found = Delays::between(&owner, &shown(&[("1-0", 90), ("1-1", 13), ("2-2", 19)], 37)).unwrap();
        // A client that is served first is not late.
        let expected = [3, 0].map(Duration::from_millis);
        assert_eq!((found.frames.as_slice(), found.end), (expected.as_slice(), Duration::from_millis(7)));
        let error = Delays::between(&owner, &shown(&[("1-0", 90), ("2-2", 19)], 37)).unwrap_err();
        assert!(error.to_string().contains("1-1"), "a frame that is lost is not a fast one: {error}");
    }

    #[test]
    fn events_are_found_however_the_stream_is_cut() {
        let long = "x".repeat(100);
        let stream = format!(
            "event: metadata\ndata: {{}}\nid: 7-0\n\nevent: values\ndata: event: error{long}\nid: 7-1\n\n\
             event: end\n\n"
        );
        for size in [1, 3, 7, stream.len()] {
            let mut lines = Lines::default();
            stream.as_bytes().chunks(size).for_each(|chunk| lines.take(chunk));
            assert_eq!((lines.last.as_slice(), lines.errors), (b"end".as_slice(), 0), "{size}");
            assert_eq!(lines.ids, ["7-0", "7-1"], "{size}");
        }
        let mut lines = Lines::default();
        lines.take(b"event: values\r\ndata: {}\r\n\r\n");
        assert_eq!((lines.last.as_slice(), lines.errors), (b"values".as_slice(), 0));
        let mut lines = Lines::default();
        lines.take(b"event: error\ndata: {}\n\nevent: en");
        assert_eq!(
            (lines.last.as_slice(), lines.errors),
            (b"error".as_slice(), 1),
            "a truncated name does not count"
        );
    }
}
