//! Serves HTTP/1.1 on accepted connections, within the limits of the configuration's `gateway` section.

use std::error::Error;
use std::fmt;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::BoxError;
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::Response;
use axum::serve::Listener;
use futures::FutureExt as _;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::Service as _;

use crate::connections::{Connection, Connections, Exchange};
use crate::metrics::Refusal;

/// The maximum size of a request's head.
const MAX_HEAD_BYTES: usize = 64 * 1024;
/// What a client gets if all connections are at work.
const FULL: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
    content-length: 33\r\nconnection: close\r\n\r\n{\"detail\":\"Too many connections\"}";

/// Serves `router` until `stopping` ends and every response is complete. Connections without a request are closed then.
pub async fn serve<L>(
    mut listener: L,
    router: Router,
    connections: Arc<Connections>,
    stopping: impl Future<Output = ()>,
) where
    L: Listener<Io = TcpStream>,
{
    let (tasks, closing) = (TaskTracker::new(), CancellationToken::new());
    let mut stopping = pin!(stopping);
    loop {
        let io = tokio::select! {
            (io, _) = listener.accept() => io,
            () = &mut stopping => break,
        };
        match connections.admit() {
            Some(connection) => {
                let served =
                    serve_one(io, router.clone(), Arc::clone(&connections), connection, closing.clone());
                tasks.spawn(served);
            }
            // Without waiting: there is no room for it.
            None => drop(io.try_write(FULL)),
        }
    }
    drop(listener);
    closing.cancel();
    tasks.close();
    tasks.wait().await;
}

async fn serve_one(
    io: TcpStream,
    router: Router,
    connections: Arc<Connections>,
    connection: Arc<Connection>,
    closing: CancellationToken,
) {
    let (of, timeout) = (Arc::clone(&connection), connections.body_timeout);
    let service = hyper::service::service_fn(move |request: hyper::Request<Incoming>| {
        let exchange = Exchange::new(Arc::clone(&of));
        let request = request.map(|body| Body::new(Arriving::new(body, Arc::clone(&exchange), timeout)));
        let mut router = router.clone();
        async move {
            let answered = Answered(exchange);
            let response: Result<Response<Body>, _> = router.call(Request::from(request)).await;
            response.map(|response| response.map(|body| Leaving { body, _answered: answered }))
        }
    });
    let mut serving = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(connections.header_timeout)
            .max_buf_size(MAX_HEAD_BYTES)
            .serve_connection(TokioIo::new(io), service)
    );
    let mut leave = pin!(
        async {
            tokio::select! {
                () = connection.displaced.cancelled() => {}
                () = closing.cancelled() => {}
            }
        }
        .fuse()
    );
    loop {
        tokio::select! {
            ended = serving.as_mut() => {
                if ended.is_err_and(|error| error.is_timeout()) {
                    connections.refused(Refusal::HeaderTimeout);
                }
                return;
            }
            // A request may have arrived in the last moment; it is answered.
            () = &mut leave => if connection.is_working() {
                serving.as_mut().graceful_shutdown();
            } else {
                return;
            },
        }
    }
}

/// The body of a request, which must arrive in time.
struct Arriving {
    body: Incoming,
    exchange: Arc<Exchange>,
    deadline: Instant,
    /// Set once the body was waited for.
    timer: Option<Pin<Box<Sleep>>>,
}

/// A request's body did not arrive in time.
#[derive(Debug)]
pub(super) struct BodyTimeout;

impl fmt::Display for BodyTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the body of the request did not arrive in time")
    }
}

impl Error for BodyTimeout {}

impl BodyTimeout {
    /// Whether it is the cause of an error.
    pub(super) fn caused(error: &(dyn Error + 'static)) -> bool {
        let mut cause = Some(error);
        while let Some(error) = cause {
            if error.is::<Self>() {
                return true;
            }
            cause = error.source();
        }
        false
    }
}

impl Arriving {
    fn new(body: Incoming, exchange: Arc<Exchange>, timeout: Duration) -> Self {
        if body.is_end_stream() {
            exchange.arrived();
        }
        Self { body, exchange, deadline: Instant::now() + timeout, timer: None }
    }
}

impl HttpBody for Arriving {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = self.get_mut();
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            if this.body.is_end_stream() || !matches!(frame, Some(Ok(_))) {
                this.exchange.arrived();
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let deadline = this.deadline;
        let timer = this.timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        timer.as_mut().poll(cx).map(|()| {
            this.exchange.refused(Refusal::BodyTimeout);
            Some(Err(BodyTimeout.into()))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.exchange.arrived();
    }
}

/// Says that the response is complete when it is dropped.
struct Answered(Arc<Exchange>);

impl Drop for Answered {
    fn drop(&mut self) {
        self.0.answered();
    }
}

/// The body of a response.
struct Leaving {
    body: Body,
    _answered: Answered,
}

impl HttpBody for Leaving {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::net::SocketAddr;

    use axum::response::IntoResponse as _;
    use axum::routing::{get, post};
    use futures::{StreamExt as _, stream};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::sync::Notify;
    use tokio::time::timeout;

    use super::super::extract::collected;
    use super::*;
    use crate::metrics::Metrics;
    use threadkeep_config::Gateway;

    const PATIENCE: Duration = Duration::from_mins(10);
    const SHORT: Duration = Duration::from_millis(50);

    struct ServedApp {
        address: SocketAddr,
        connections: Arc<Connections>,
        metrics: Metrics,
        /// Lets `/stream` send its second frame.
        next: Arc<Notify>,
        stop: CancellationToken,
        served: tokio::task::JoinHandle<()>,
    }

    impl ServedApp {
        async fn new(max: usize, header_timeout: Duration, body_timeout: Duration) -> Self {
            let metrics = Metrics::new(None, Arc::default());
            let settings = Gateway { max_connections: max, ..Gateway::default() };
            let mut connections = Connections::new(&settings, metrics.clone());
            let limits = Arc::get_mut(&mut connections).unwrap();
            (limits.header_timeout, limits.body_timeout) = (header_timeout, body_timeout);
            let next = Arc::new(Notify::new());
            let waiting = Arc::clone(&next);
            let streaming = move || {
                let waiting = Arc::clone(&waiting);
                let second = async move {
                    waiting.notified().await;
                    Ok::<_, Infallible>("second")
                };
                Body::from_stream(stream::once(async { Ok("first") }).chain(stream::once(second)))
            };
            let router = Router::new()
                .route("/health", get(|| async { "ok" }))
                .route("/stream", get(|| async move { streaming() }))
                .route(
                    "/body",
                    post(|request: Request| async {
                        match collected(request.into_body(), 100).await {
                            Ok(body) => body.len().to_string().into_response(),
                            Err(error) => error.into_response(),
                        }
                    }),
                );
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let stop = CancellationToken::new();
            let stopping = stop.clone().cancelled_owned();
            let served = tokio::spawn(serve(listener, router, Arc::clone(&connections), stopping));
            Self { address, connections, metrics, next, stop, served }
        }

        /// A connection that has sent this.
        async fn send(&self, text: &str) -> Client {
            let mut client = TcpStream::connect(self.address).await.unwrap();
            client.write_all(text.as_bytes()).await.unwrap();
            Client(client)
        }

        async fn health(&self) -> String {
            self.send("GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.rest().await
        }

        fn refusals(&self, why: &str) -> bool {
            let text = self.metrics.rendered(crate::metrics::Snapshot::default());
            let counter = format!("threadkeep_refused_total{{reason=\"{why}\"}} ");
            text.lines().filter_map(|line| line.strip_prefix(&counter)).any(|count| count != "0")
        }
    }

    struct Client(TcpStream);

    impl Client {
        async fn until(&mut self, end: &str) -> String {
            let mut read = Vec::new();
            let reading = async {
                while !String::from_utf8_lossy(&read).contains(end) {
                    assert_ne!(self.0.read_buf(&mut read).await.unwrap(), 0, "closed before {end:?}");
                }
            };
            timeout(PATIENCE, reading).await.unwrap();
            String::from_utf8(read).unwrap()
        }

        /// Everything until the server closes.
        async fn rest(mut self) -> String {
            let mut read = Vec::new();
            // A connection that is cut off may also be reset.
            let _ =
                timeout(PATIENCE, self.0.read_to_end(&mut read)).await.expect("the connection stays open");
            String::from_utf8(read).unwrap()
        }
    }

    const HALF: &str = "GET /health HTTP/1.1\r\nhost:";
    const HALF_BODY: &str = "POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nab";
    const STREAM: &str = "GET /stream HTTP/1.1\r\nhost: x\r\n\r\n";

    #[tokio::test]
    async fn half_a_head_and_an_unused_connection_are_closed_and_a_stream_is_not() {
        let place = ServedApp::new(100, SHORT, PATIENCE).await;
        let mut stream = place.send(STREAM).await;
        stream.until("first").await;
        for text in ["", HALF] {
            place.send(text).await.rest().await;
        }
        let mut used = place.send("GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(used.until("ok").await.starts_with("HTTP/1.1 200"));
        used.rest().await;
        assert!(place.refusals("header_timeout"));
        // It was open for longer than the other three took to be closed.
        place.next.notify_one();
        stream.until("second").await;
    }

    #[tokio::test]
    async fn half_a_body_is_answered_with_408_and_a_stream_takes_as_long_as_it_takes() {
        let place = ServedApp::new(100, PATIENCE, SHORT).await;
        let mut stream = place.send(STREAM).await;
        stream.until("first").await;
        let answer = place.send(HALF_BODY).await.rest().await;
        assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
        assert!(answer.contains("did not arrive in time"), "{answer}");
        assert!(place.refusals("body_timeout"));
        // On a busy machine the time may be over between the head and the first look at the body.
        let patient = ServedApp::new(100, PATIENCE, PATIENCE).await;
        let whole = patient.send(&format!("{HALF_BODY}cdefghi")).await.until("\r\n\r\n9").await;
        assert!(whole.starts_with("HTTP/1.1 200"), "{whole}");
        place.next.notify_one();
        stream.until("second").await;
    }

    #[tokio::test]
    async fn connections_that_wait_make_room_and_those_that_work_do_not() {
        let place = ServedApp::new(3, PATIENCE, PATIENCE).await;
        let (head, body) = (place.send(HALF).await, place.send(HALF_BODY).await);
        let mut stream = place.send(STREAM).await;
        stream.until("first").await;
        assert!(place.health().await.ends_with("ok"), "it took the place of half a head");
        head.rest().await;
        let mut more = Vec::new();
        for _ in 0..2 {
            let mut stream = place.send(STREAM).await;
            stream.until("first").await;
            more.push(stream);
        }
        body.rest().await;
        assert!(place.refusals("displaced") && !place.refusals("full"));
        assert!(place.health().await.starts_with("HTTP/1.1 503"), "every connection works");
        assert!(place.refusals("full"));
        drop(more);
        while place.connections.open() > 1 {
            tokio::task::yield_now().await;
        }
        assert!(place.health().await.ends_with("ok"));
        place.next.notify_one();
        stream.until("second").await;
    }

    #[tokio::test]
    async fn stopping_closes_what_waits_and_completes_what_works() {
        let place = ServedApp::new(100, PATIENCE, PATIENCE).await;
        let (unused, head, body) =
            (place.send("").await, place.send(HALF).await, place.send(HALF_BODY).await);
        let mut stream = place.send(STREAM).await;
        stream.until("first").await;
        while place.connections.open() < 4 {
            tokio::task::yield_now().await;
        }
        place.stop.cancel();
        for client in [unused, head, body] {
            client.rest().await;
        }
        assert!(!place.served.is_finished());
        place.next.notify_one();
        stream.until("second").await;
        timeout(PATIENCE, place.served).await.unwrap().unwrap();
        assert_eq!(place.connections.open(), 0);
    }

    #[test]
    fn the_refusal_has_the_length_it_says() {
        let (head, body) = std::str::from_utf8(FULL).unwrap().split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())));
    }
}
