//! A run's stream as an HTTP response: server-sent events.

use std::convert::Infallible;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use serde_json::Value;
use threadkeep::id::ThreadId;
use tokio::time::timeout;

use crate::runs::request::StreamMode;
use crate::streams::bridge::{Event, Frame, Gap, HEARTBEAT, Subscription};

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
pub(super) const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// The bytes of data from which on subscribers share them instead of each having a copy.
const SHARED: usize = 4 << 10;

/// The response that follows `subscription`. It closes after the `end` frame, or without one after a `gap` frame.
///
/// The headers keep proxies from buffering frames, and tell a client which run it follows and where to reconnect
/// (service reference, "Run routes").
pub fn response(subscription: Subscription, thread: &ThreadId, run_id: &str) -> Response {
    streaming(run_headers(thread, run_id), subscription.map(|frame| encode(&frame)))
}

/// As [`response`], with only the frames of these modes, and those of the run's beginning and end.
pub(super) fn response_in(
    modes: Vec<StreamMode>,
    subscription: Subscription,
    thread: &ThreadId,
    run_id: &str,
) -> Response {
    let shown = move |frame: &Frame| match frame {
        Frame::Event(event) => {
            let name = event.name.split('|').next().unwrap_or_default();
            matches!(name, "metadata" | "error") || modes.iter().any(|mode| mode.event() == name)
        }
        Frame::Gap(_) | Frame::End => true,
        Frame::Heartbeat => false,
    };
    let frames = subscription.filter(move |frame| std::future::ready(shown(frame)));
    streaming(run_headers(thread, run_id), kept_open(frames.map(|frame| encode(&frame))))
}

/// The frames of a client that does not want all, with heartbeats: those of a subscription say when a run does nothing,
/// not when nothing was sent.
pub(super) fn kept_open(
    frames: impl Stream<Item = Vec<Bytes>> + Send + 'static,
) -> impl Stream<Item = Vec<Bytes>> + Send + 'static {
    stream::unfold(Box::pin(frames), |mut frames| async move {
        let next = timeout(HEARTBEAT, frames.next()).await;
        let pieces = next.unwrap_or_else(|_late| Some(encode(&Frame::Heartbeat)))?;
        Some((pieces, frames))
    })
}

/// A response of server-sent events, each in pieces, with these further headers.
pub(super) fn streaming(
    further: HeaderMap,
    frames: impl Stream<Item = Vec<Bytes>> + Send + 'static,
) -> Response {
    let frames = Body::from_stream(frames.flat_map(stream::iter).map(Ok::<_, Infallible>));
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::CONNECTION, HeaderValue::from_static("keep-alive")),
        (X_ACCEL_BUFFERING, HeaderValue::from_static("no")),
    ];
    (headers, further, frames).into_response()
}

/// The headers that identify the run of a response.
///
/// - `Content-Location`: the run. Clients parse its id from the end, so nothing may follow it.
/// - `Location`: its stream, to reconnect to. Clients append it to the base address of the API, which ends in `/api`.
pub fn run_headers(thread: &ThreadId, run_id: &str) -> HeaderMap {
    located(thread, run_id, "stream")
}

/// As [`run_headers`], of an answer that is the run's result: a client whose connection breaks off in it expects the
/// same answer at its `Location`.
pub(super) fn result_headers(thread: &ThreadId, run_id: &str) -> HeaderMap {
    located(thread, run_id, "join")
}

fn located(thread: &ThreadId, run_id: &str, again: &str) -> HeaderMap {
    let run = format!("/threads/{thread}/runs/{run_id}");
    let places =
        [(header::CONTENT_LOCATION, format!("/api{run}")), (header::LOCATION, format!("{run}/{again}"))];
    // Ids created by this gateway are valid in a header; any other path is omitted.
    places.into_iter().filter_map(|(name, place)| Some((name, place.try_into().ok()?))).collect()
}

/// The `Last-Event-ID` of a client that reconnects.
pub fn last_event_id(headers: &HeaderMap) -> Option<&str> {
    headers.get(LAST_EVENT_ID)?.to_str().ok()
}

/// The text of a frame, in pieces.
pub(super) fn encode(frame: &Frame) -> Vec<Bytes> {
    match frame {
        Frame::Event(event) => encode_event(event),
        Frame::Gap(gap) => vec![format!("event: gap\ndata: {}\n\n", gap_data(gap)).into()],
        // One newline: after a comment, the JavaScript client's decoder takes an empty line for an empty event.
        Frame::Heartbeat => vec![Bytes::from_static(b": heartbeat\n")],
        Frame::End => vec![Bytes::from_static(b"event: end\ndata: null\n\n")],
    }
}

fn encode_event(event: &Event) -> Vec<Bytes> {
    encode_named(&event.id.to_string(), event)
}

/// The text of an event among those of other runs, in pieces.
pub(super) fn encode_event_of(run_id: &str, event: &Event) -> Vec<Bytes> {
    encode_named(&format!("{}:{}", run_id.replace(['\r', '\n'], " "), event.id), event)
}

fn encode_named(id: &str, event: &Event) -> Vec<Bytes> {
    let Event { name, data, .. } = event;
    // Node names become part of event names; a line break would forge a field.
    let name = name.replace(['\r', '\n'], " ");
    let (before, after) = (format!("event: {name}\ndata: "), format!("\nid: {id}\n\n"));
    if data.len() < SHARED {
        return vec![[before.as_bytes(), data, after.as_bytes()].concat().into()];
    }
    vec![before.into(), data.clone(), after.into()]
}

fn gap_data(gap: &Gap) -> String {
    let run_id = Value::from(&*gap.run_id);
    let requested = Value::from(gap.requested.map(|id| id.to_string()));
    let (earliest, latest) = (gap.earliest, gap.latest);
    format!(
        r#"{{"code":"stream_replay_gap","run_id":{run_id},"requested_event_id":{requested},"earliest_available_event_id":"{earliest}","latest_available_event_id":"{latest}","recovery":"reload_durable_state"}}"#
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::body::to_bytes;
    use axum::routing::{Router, get};
    use serde_json::json;
    use threadkeep::id::Clock;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::streams::bridge::{BridgeOptions, EventId, Publisher, StreamBridge};

    struct Fixed;

    impl Clock for Fixed {
        fn now_ms(&self) -> u64 {
            1_700_000_000_000
        }
    }

    fn run(size: usize) -> (StreamBridge, Publisher) {
        let options = BridgeOptions { queue_maxsize: size, ..BridgeOptions::default() };
        let bridge = StreamBridge::with_clock(options, Fixed);
        let publisher = bridge.open("run-1");
        (bridge, publisher)
    }

    async fn text(response: Response) -> String {
        String::from_utf8(to_bytes(response.into_body(), usize::MAX).await.unwrap().to_vec()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn the_bytes_of_a_stream_are_exactly_these() {
        let (bridge, run) = run(8);
        run.publish("metadata", &json!({"run_id": "run-1", "thread_id": "t"}));
        run.publish("values", &json!({"messages": [{"content": "z\u{fc}rich\n\u{1f980}\r\n\u{2028}"}]}));
        run.publish("messages|task:1", &json!([{"content": ""}, {}]));
        let response = response(bridge.subscribe("run-1", None), &"t".into(), "run-1");
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(31)).await;
            run.publish("error", &json!({"message": "boom", "name": "RuntimeError"}));
            run.end();
        });
        assert_eq!(
            text(response).await,
            concat!(
                "event: metadata\ndata: {\"run_id\":\"run-1\",\"thread_id\":\"t\"}\nid: 1700000000000-0\n\n",
                "event: values\ndata: {\"messages\":[{\"content\":\"z\u{fc}rich\\n\u{1f980}\\r\\n\u{2028}\"}]}\n",
                "id: 1700000000000-1\n\n",
                "event: messages|task:1\ndata: [{\"content\":\"\"},{}]\nid: 1700000000000-2\n\n",
                ": heartbeat\n",
                ": heartbeat\n",
                "event: error\ndata: {\"message\":\"boom\",\"name\":\"RuntimeError\"}\nid: 1700000000000-3\n\n",
                "event: end\ndata: null\n\n",
            )
        );
    }

    /// The run is at work, and does nothing that this client wants to see.
    #[tokio::test(start_paused = true)]
    async fn a_client_that_wants_few_frames_gets_heartbeats_between_them() {
        let (bridge, run) = run(8);
        let subscription = bridge.subscribe("run-1", None);
        let response = response_in(vec![StreamMode::Values], subscription, &"t".into(), "run-1");
        tokio::spawn(async move {
            for n in 0..4 {
                tokio::time::sleep(Duration::from_secs(8)).await;
                run.publish("messages", &json!(n));
            }
            run.publish("values", &json!({}));
            run.end();
        });
        assert_eq!(
            text(response).await,
            concat!(
                ": heartbeat\n",
                ": heartbeat\n",
                "event: values\ndata: {}\nid: 1700000000000-4\n\n",
                "event: end\ndata: null\n\n",
            )
        );
    }

    /// Whatever their size, and large data is the same for all subscribers.
    #[tokio::test(start_paused = true)]
    async fn large_data_is_shared() {
        let (bridge, run) = run(8);
        for size in [SHARED - 3, SHARED - 2, 100_000] {
            run.publish("custom", &json!("x".repeat(size)));
        }
        run.end();
        let mut expected = String::new();
        let mut subscription = bridge.subscribe("run-1", None);
        for n in 0..3 {
            let Some(Frame::Event(event)) = subscription.next().await else { panic!("event {n}") };
            let data = std::str::from_utf8(&event.data).unwrap();
            expected.extend(["event: custom\ndata: ", data, "\nid: 1700000000000-", &n.to_string(), "\n\n"]);
            let shared = encode_event(&event).iter().any(|piece| piece.as_ptr() == event.data.as_ptr());
            assert_eq!(shared, n > 0);
        }
        expected += "event: end\ndata: null\n\n";
        assert_eq!(text(response(bridge.subscribe("run-1", None), &"t".into(), "run-1")).await, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn a_gap_closes_the_answer_without_an_end() {
        let (bridge, run) = run(2);
        for n in 0..5 {
            run.publish("custom", &json!(n));
        }
        run.end();
        let subscription = bridge.subscribe("run-1", Some("1700000000000-1"));
        assert_eq!(
            text(response(subscription, &"t".into(), "run-1")).await,
            concat!(
                "event: gap\ndata: {\"code\":\"stream_replay_gap\",\"run_id\":\"run-1\",",
                "\"requested_event_id\":\"1700000000000-1\",\"earliest_available_event_id\":\"1700000000000-3\",",
                "\"latest_available_event_id\":\"1700000000000-4\",\"recovery\":\"reload_durable_state\"}\n\n",
            )
        );
    }

    #[test]
    fn the_data_of_a_gap_is_json_whatever_the_run_is_called_and_whether_or_not_an_event_was_seen() {
        let id = |seq| EventId { unix_ms: 1, seq };
        let gap = Gap { run_id: "a\"b\n".into(), requested: None, earliest: id(2), latest: id(3) };
        let data = gap_data(&gap);
        assert!(!data.contains('\n'));
        assert_eq!(
            serde_json::from_str::<Value>(&data).unwrap(),
            json!({
                "code": "stream_replay_gap", "run_id": "a\"b\n", "requested_event_id": null,
                "earliest_available_event_id": "1-2", "latest_available_event_id": "1-3",
                "recovery": "reload_durable_state",
            })
        );
    }

    #[tokio::test(start_paused = true)]
    async fn an_unknown_run_is_one_end_frame() {
        let (bridge, _run) = run(2);
        let response = response(bridge.subscribe("gone", Some("1-1")), &"t".into(), "gone");
        assert_eq!(text(response).await, "event: end\ndata: null\n\n");
    }

    #[test]
    fn an_event_name_cannot_forge_a_field() {
        let id = EventId { unix_ms: 1, seq: 0 };
        let event = Event { id, name: "values|a\r\ndata: x".into(), data: "1".into() };
        assert_eq!(encode_event(&event).concat(), b"event: values|a  data: x\ndata: 1\nid: 1-0\n\n");
    }

    #[tokio::test(start_paused = true)]
    async fn the_headers_are_those_of_the_reference() {
        let (bridge, _run) = run(2);
        let response = response(bridge.subscribe("run-1", None), &"t-1".into(), "run-1");
        assert_eq!(response.status(), 200);
        let found: Vec<_> =
            response.headers().iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        for expected in [
            ("content-type", "text/event-stream"),
            ("cache-control", "no-cache"),
            ("connection", "keep-alive"),
            ("x-accel-buffering", "no"),
            ("content-location", "/api/threads/t-1/runs/run-1"),
            ("location", "/threads/t-1/runs/run-1/stream"),
        ] {
            assert!(found.contains(&expected), "{expected:?} in {found:?}");
        }
        assert_eq!(found.len(), 6, "{found:?}");
    }

    #[test]
    fn a_run_whose_id_fits_no_header_is_not_announced() {
        assert_eq!(run_headers(&"t".into(), "a\nb"), HeaderMap::new());
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_the_client_drops_abandons_the_run_it_owns() {
        let (bridge, run) = run(2);
        drop(response(bridge.subscribe("run-1", None), &"t".into(), "run-1"));
        assert!(!run.abandoned().is_cancelled());
        drop(response(bridge.subscribe("run-1", None).owning(), &"t".into(), "run-1"));
        assert!(run.abandoned().is_cancelled());
    }

    /// Over a socket, where the server itself must notice that the client is gone.
    #[tokio::test]
    async fn a_client_that_hangs_up_abandons_the_run_it_owns() {
        let (bridge, run) = run(2);
        run.publish("metadata", &json!({}));
        let handler = move || {
            let subscription = bridge.subscribe("run-1", None).owning();
            async move { response(subscription, &"t".into(), "run-1") }
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = Router::new().route("/", get(handler));
        let server = tokio::spawn(async move { axum::serve(listener, app).await });

        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        let mut received = Vec::new();
        // A heartbeat may follow, on a busy machine in the same read.
        while !String::from_utf8_lossy(&received).contains("id: 1700000000000-0\n\n\r\n") {
            assert_ne!(client.read_buf(&mut received).await.unwrap(), 0, "the stream is open");
        }
        assert!(!run.abandoned().is_cancelled());
        drop(client);
        run.abandoned().cancelled().await;
        server.abort();
    }

    #[test]
    fn the_last_event_id_is_what_the_client_sent() {
        let mut headers = HeaderMap::new();
        assert_eq!(last_event_id(&headers), None);
        headers.insert("Last-Event-ID", HeaderValue::from_static("-1"));
        assert_eq!(last_event_id(&headers), Some("-1"));
        headers.insert("Last-Event-ID", HeaderValue::from_bytes(b"\xff").unwrap());
        assert_eq!(last_event_id(&headers), None);
    }
}
