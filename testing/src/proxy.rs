//! A proxy before Postgres that counts requests, and can cut the connection at any of them.
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a part of tests: what it meets is their own doing"
)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use url::Url;

/// When a request that is cut is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// The server never sees it.
    Before,
    /// The server has carried it out; the client does not learn it.
    After,
    /// The server has carried it out; a message that does not belong there comes before its answer, as from a pooler that
    /// mixes up its clients.
    Stray,
    /// The server has carried it out; the client gets the answer to the request before it on that connection instead.
    Earlier,
}

/// The end of a copy that nobody began.
const STRAY: [u8; 5] = [b'c', 0, 0, 0, 4];

#[derive(Debug, Default)]
struct State {
    /// Requests that were passed on: each ends with a Sync, or is a simple query.
    requests: AtomicUsize,
    /// Bytes of these requests.
    bytes: AtomicUsize,
    /// Bytes of answers that were passed on.
    answered: AtomicUsize,
    /// How often a session was free after an answer, although another request was under way on it.
    overlaps: AtomicUsize,
    /// Connections that the server refused.
    refused: AtomicUsize,
    /// The texts of the statements in them: what the server parses.
    statements: Mutex<Vec<String>>,
    /// The number of the request that is cut, and when.
    cut: Mutex<Option<(usize, Cut)>>,
    done: Arc<AtomicBool>,
    hold: Mutex<Option<Hold>>,
    /// Holds up the first request on another connection once one was cut; its number does not matter.
    hold_retry: Mutex<Option<Hold>>,
}

/// A request that is held up.
#[derive(Debug)]
struct Hold {
    nth: usize,
    /// Notified when it arrives.
    come: Arc<Notify>,
    /// Waited for before it continues.
    go: Arc<Notify>,
}

/// The proxy. It ends with its runtime.
pub struct Proxy {
    url: String,
    state: Arc<State>,
}

impl Proxy {
    /// A proxy before the server at `url`.
    pub async fn before(url: &str) -> Self {
        let mut url = Url::parse(url).unwrap();
        let server = (url.host_str().unwrap().to_owned(), url.port().unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        url.set_port(Some(listener.local_addr().unwrap().port())).unwrap();
        // It has to see what passes.
        url.query_pairs_mut().append_pair("sslmode", "disable");
        let state = Arc::<State>::default();
        let shared = state.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (server, state) = (server.clone(), shared.clone());
                tokio::spawn(async move {
                    if let Ok(server) = TcpStream::connect(server).await {
                        server.set_nodelay(true).unwrap();
                        client.set_nodelay(true).unwrap();
                        pass(client, server, state).await;
                    }
                });
            }
        });
        Self { url: url.into(), state }
    }

    /// The URL through the proxy.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Requests passed on so far.
    pub fn requests(&self) -> usize {
        self.state.requests.load(Ordering::SeqCst)
    }

    /// Bytes of requests passed on so far.
    pub fn bytes(&self) -> usize {
        self.state.bytes.load(Ordering::SeqCst)
    }

    /// Bytes of answers passed on so far.
    pub fn answered(&self) -> usize {
        self.state.answered.load(Ordering::SeqCst)
    }

    /// How often a session was outside of a transaction after an answer, although another request was under way on it. If
    /// its client ends there, a pooler may give the session, and the answer that is still to come, to somebody else.
    pub fn overlaps(&self) -> usize {
        self.state.overlaps.load(Ordering::SeqCst)
    }

    /// Connections that the server refused so far.
    pub fn refused(&self) -> usize {
        self.state.refused.load(Ordering::SeqCst)
    }

    /// The statements passed on since this was asked last.
    pub fn statements(&self) -> Vec<String> {
        std::mem::take(&mut *self.state.statements.lock().unwrap())
    }

    /// Cuts the connection at the `nth` request from now on.
    pub fn cut(&self, nth: usize, cut: Cut) {
        *self.state.cut.lock().unwrap() = Some((self.requests() + nth, cut));
        self.state.done.store(false, Ordering::SeqCst);
    }

    /// Holds up the `nth` request from now on. The first one is notified when it has come; it continues when the second
    /// one is.
    pub fn hold(&self, nth: usize) -> (Arc<Notify>, Arc<Notify>) {
        let (come, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        *self.state.hold.lock().unwrap() =
            Some(Hold { nth: self.requests() + nth, come: come.clone(), go: go.clone() });
        (come, go)
    }

    /// As [`Self::hold`], of the first request on another connection after the planned cut.
    pub fn hold_retry(&self) -> (Arc<Notify>, Arc<Notify>) {
        let (come, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        *self.state.hold_retry.lock().unwrap() = Some(Hold { nth: 0, come: come.clone(), go: go.clone() });
        (come, go)
    }

    /// Set when the planned cut is made.
    pub fn was_cut(&self) -> Arc<AtomicBool> {
        self.state.done.clone()
    }

    /// Stops cutting. Returns whether something was cut.
    pub fn mend(&self) -> bool {
        *self.state.cut.lock().unwrap() = None;
        self.state.done.load(Ordering::SeqCst)
    }
}

impl State {
    /// Counts a request, holds it up if it is the one to hold; returns whether it is the one to cut. `was_cut` says
    /// that the connection it came on is the one that was cut.
    async fn next(&self, was_cut: bool) -> Option<Cut> {
        let number = self.requests.fetch_add(1, Ordering::SeqCst);
        let mut held = self.hold.lock().unwrap().take_if(|hold| hold.nth == number);
        if self.done.load(Ordering::SeqCst) && !was_cut {
            held = held.or_else(|| self.hold_retry.lock().unwrap().take());
        }
        if let Some(Hold { come, go, .. }) = held {
            come.notify_one();
            go.notified().await;
        }
        let mut planned = self.cut.lock().unwrap();
        match *planned {
            Some((nth, cut)) if nth == number => {
                *planned = None;
                self.done.store(true, Ordering::SeqCst);
                Some(cut)
            }
            _ => None,
        }
    }
}

async fn pass(client: TcpStream, server: TcpStream, state: Arc<State>) {
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // For each request that waits for its answer: what is to happen to the answer.
    let waiting = Arc::new(Mutex::new(VecDeque::from([None])));
    let forth = requests(from_client, to_server, state.clone(), waiting.clone());
    let back = answers(from_server, to_client, state, waiting);
    // Both sockets close when either direction ends.
    tokio::select! { () = forth => {}, () = back => {} }
}

/// Reads a message: its type, unless it is the first one of a client, and the rest.
async fn message(from: &mut (impl AsyncRead + Unpin), typed: bool) -> Option<Vec<u8>> {
    let mut bytes = vec![0; if typed { 5 } else { 4 }];
    from.read_exact(&mut bytes).await.ok()?;
    let len = u32::from_be_bytes(bytes[bytes.len() - 4..].try_into().unwrap()) as usize;
    let start = bytes.len();
    bytes.resize(start + len - 4, 0);
    from.read_exact(&mut bytes[start..]).await.ok()?;
    Some(bytes)
}

/// The text of the statement that a message wants to be parsed, if that is what it wants.
fn statement(message: &[u8]) -> Option<String> {
    let name = match message[0] {
        b'P' => 1,
        b'Q' => 0,
        _ => return None,
    };
    let text = message[5..].split(|byte| *byte == 0).nth(name).unwrap();
    Some(String::from_utf8(text.to_vec()).unwrap())
}

async fn requests(
    mut client: OwnedReadHalf,
    mut server: OwnedWriteHalf,
    state: Arc<State>,
    waiting: Arc<Mutex<VecDeque<Option<Cut>>>>,
) {
    let Some(startup) = message(&mut client, false).await else { return };
    if server.write_all(&startup).await.is_err() {
        return;
    }
    let mut request = Vec::new();
    let mut was_cut = false;
    while let Some(message) = message(&mut client, true).await {
        let kind = message[0];
        state.statements.lock().unwrap().extend(statement(&message));
        request.extend(message);
        match kind {
            b'S' | b'Q' => {
                let cut = state.next(was_cut).await;
                was_cut |= cut.is_some();
                if cut == Some(Cut::Before) {
                    return;
                }
                waiting.lock().unwrap().push_back(cut);
                state.bytes.fetch_add(request.len(), Ordering::SeqCst);
            }
            b'p' | b'X' => {}
            _ => continue,
        }
        if server.write_all(&std::mem::take(&mut request)).await.is_err() {
            return;
        }
    }
}

async fn answers(
    mut server: OwnedReadHalf,
    mut client: OwnedWriteHalf,
    state: Arc<State>,
    waiting: Arc<Mutex<VecDeque<Option<Cut>>>>,
) {
    let (mut answer, mut earlier) = (Vec::new(), Vec::new());
    let mut is_accepted = false;
    while let Some(message) = message(&mut server, true).await {
        let kind = message[0];
        let is_idle = message.last() == Some(&b'I');
        answer.extend(message);
        match kind {
            b'Z' => {
                is_accepted = true;
                let (cut, left) = {
                    let mut waiting = waiting.lock().unwrap();
                    (waiting.pop_front().flatten(), waiting.len())
                };
                if left > 0 && is_idle {
                    state.overlaps.fetch_add(1, Ordering::SeqCst);
                }
                match cut {
                    Some(Cut::Stray) => answer.splice(..0, STRAY).for_each(drop),
                    Some(Cut::Earlier) => answer.clone_from(&earlier),
                    Some(_) => return,
                    None => earlier.clone_from(&answer),
                }
            }
            b'E' if !is_accepted => {
                state.refused.fetch_add(1, Ordering::SeqCst);
            }
            // What is asked for a password, and what ends a session.
            b'R' | b'E' => {}
            _ => continue,
        }
        // Before the client can see it.
        state.answered.fetch_add(answer.len(), Ordering::SeqCst);
        if client.write_all(&std::mem::take(&mut answer)).await.is_err() {
            return;
        }
    }
    let _ = client.write_all(&answer).await;
}
