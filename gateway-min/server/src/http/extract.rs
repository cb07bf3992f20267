//! Extractors that refuse invalid requests with the service's error bodies.

use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use axum::extract::{FromRequest, FromRequestParts, Query, RawPathParams, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use futures::StreamExt as _;
use serde_json::map::Entry;
use serde_json::{Map, Value};
use threadkeep::id::ThreadId;

use super::error::{ApiError, MAX_BODY_BYTES};
use super::fields::{Fields, Flaw, FromFields, Loc, Pattern, Problems};
use super::serve::BodyTimeout;

/// How much of an oversized body is read from the client and discarded.
const MAX_DISCARDED_BYTES: usize = 256 * 1024 * 1024;
/// For how long.
const MAX_DISCARDING: Duration = Duration::from_secs(30);
/// The maximum number of objects in a list.
const MAX_ITEMS: usize = 100;
/// The maximum number of values in a body. Once it is parsed, an object of eight bytes takes hundreds: a body of
/// nothing else would take gigabytes.
const MAX_VALUES: usize = 1_000_000;

/// The JSON body of a request. Without a `Content-Type` it is read as JSON; any other content type is refused.
#[derive(Debug, Clone, Copy)]
pub struct ApiJson<T>(pub T);

/// The JSON body of a request that is a list of objects, at most 100.
#[derive(Debug, Clone)]
pub struct ApiJsonList<T>(pub Vec<T>);

/// The query of a request. A repeated parameter is a list of its values.
#[derive(Debug, Clone, Copy)]
pub struct ApiQuery<T>(pub T);

/// The path parameters of a request, for example [`ThreadPath`].
#[derive(Debug, Clone, Copy)]
pub struct ApiPath<T>(pub T);

/// The path of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreadPath {
    /// `{thread_id}`, which matches [`Pattern::THREAD_ID`].
    pub thread_id: ThreadId,
}

impl FromFields for ThreadPath {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let thread_id = fields.field("thread_id").required().text_matching(&Pattern::THREAD_ID);
        Self { thread_id: thread_id.unwrap_or_default().into() }
    }
}

/// The path of a run of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunPath {
    /// `{thread_id}`, which matches [`Pattern::THREAD_ID`].
    pub thread_id: ThreadId,
    /// `{run_id}`: any string.
    pub run_id: String,
}

impl FromFields for RunPath {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let ThreadPath { thread_id } = ThreadPath::from_fields(fields);
        Self { thread_id, run_id: fields.field("run_id").required().text().unwrap_or_default() }
    }
}

impl<S: Send + Sync, T: FromFields> FromRequest<S> for ApiJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let json = is_json(request.headers());
        let body = collected(request.into_body(), MAX_BODY_BYTES).await?;
        read(whole(&body, json, T::BODY_OPTIONAL)?, vec!["body".into()]).map(Self)
    }
}

impl<S: Send + Sync, T: FromFields> FromRequest<S> for ApiJsonList<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let json = is_json(request.headers());
        let body = collected(request.into_body(), MAX_BODY_BYTES).await?;
        let refuse = |flaw, input| Err(Problems::one(vec!["body".into()], flaw, input).into());
        let list = match parsed(&body, json)? {
            Value::Array(list) if list.len() <= MAX_ITEMS => list,
            Value::Array(list) => return refuse(Flaw::too_long(MAX_ITEMS, list.len()), Value::Null),
            other => return refuse(Flaw::new("list_type", "Input should be a valid list"), other),
        };
        let items = list.into_iter().enumerate().map(|(index, item)| match item {
            Value::Object(values) => read(values, vec!["body".into(), index.into()]),
            other => Err(Problems::one(vec!["body".into(), index.into()], Flaw::no_object(), other).into()),
        });
        items.collect::<Result<_, _>>().map(Self)
    }
}

impl<S: Sync, T: FromFields> FromRequestParts<S> for ApiQuery<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        read(query_of(&parts.uri)?, vec!["query".into()]).map(Self)
    }
}

impl<S: Send + Sync, T: FromFields> FromRequestParts<S> for ApiPath<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = RawPathParams::from_request_parts(parts, state)
            .await
            .map_err(|_| ApiError::bad_request("Path could not be read"))?;
        read(path.iter().map(|(key, value)| (key.to_owned(), value.into())).collect(), vec!["path".into()])
            .map(Self)
    }
}

/// The parameters of a query.
pub(super) fn query_of(uri: &Uri) -> Result<Map<String, Value>, ApiError> {
    let query = Query::<Vec<(String, String)>>::try_from_uri(uri)
        .map_err(|_| ApiError::bad_request("Query string could not be read"))?;
    let mut values = Map::new();
    for (key, value) in query.0 {
        match values.entry(key) {
            Entry::Vacant(free) => _ = free.insert(value.into()),
            Entry::Occupied(mut held) => match held.get_mut() {
                Value::Array(list) => list.push(value.into()),
                first => *first = Value::Array(vec![first.take(), value.into()]),
            },
        }
    }
    Ok(values)
}

/// The body, if it has at most `limit` bytes.
pub(super) async fn collected(body: Body, limit: usize) -> Result<Vec<u8>, ApiError> {
    let mut chunks = body.into_data_stream();
    let mut collected = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| {
            if BodyTimeout::caused(&error) {
                return ApiError::new(StatusCode::REQUEST_TIMEOUT, "Request body did not arrive in time");
            }
            ApiError::bad_request("Request body could not be read")
        })?;
        if collected.len() + chunk.len() > limit {
            drop(collected);
            discard(chunks).await;
            let text = format!("Request body is too large: at most {limit} bytes are accepted");
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, text));
        }
        collected.extend_from_slice(&chunk);
    }
    Ok(collected)
}

/// Reads a body that a response does not depend on, and keeps nothing of it: a connection whose request was not read
/// cannot be used again.
pub(super) async fn drained(body: Body) {
    let (mut chunks, mut left) = (body.into_data_stream(), MAX_BODY_BYTES);
    // A body that cannot be read ends its connection anyway.
    while let Some(Ok(chunk)) = chunks.next().await {
        let Some(rest) = left.checked_sub(chunk.len()) else { return discard(chunks).await };
        left = rest;
    }
}

/// Reads the rest of what the client sends, within bounds: a client that is cut off while sending sees a broken
/// connection instead of the response.
async fn discard(mut chunks: BodyDataStream) {
    let mut left = MAX_DISCARDED_BYTES;
    let discarding = async {
        while let Some(Ok(chunk)) = chunks.next().await
            && left > chunk.len()
        {
            left -= chunk.len();
        }
    };
    // A client that is too slow is cut off anyway.
    let _ = tokio::time::timeout(MAX_DISCARDING, discarding).await;
}

/// Reads the fields of this part of the request.
pub(super) fn read<T: FromFields>(values: Map<String, Value>, loc: Vec<Loc>) -> Result<T, ApiError> {
    let mut problems = Problems::default();
    let mut fields = Fields::new(values, loc, &mut problems);
    let value = T::from_fields(&mut fields);
    fields.deny_others();
    if problems.is_empty() { Ok(value) } else { Err(problems.into()) }
}

/// The body as an object.
fn whole(body: &[u8], json: bool, optional: bool) -> Result<Map<String, Value>, ApiError> {
    if body.is_empty() && optional {
        return Ok(Map::new());
    }
    match parsed(body, json)? {
        Value::Object(values) => Ok(values),
        Value::Null if optional => Ok(Map::new()),
        other => Err(Problems::one(vec!["body".into()], Flaw::no_object(), other).into()),
    }
}

/// The value of the body.
fn parsed(body: &[u8], json: bool) -> Result<Value, ApiError> {
    let refuse = |flaw| Err(Problems::one(vec!["body".into()], flaw, Value::Null).into());
    if body.is_empty() {
        return refuse(Flaw::missing());
    }
    if !json {
        return refuse(Flaw::no_object());
    }
    // Each takes a byte, so a short body need not be gone through.
    if body.len() > MAX_VALUES && values(body) > MAX_VALUES {
        let text = format!("Request body has too many values: at most {MAX_VALUES} are accepted");
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, text));
    }
    threadkeep::json::from_slice(body).map_err(|error| {
        let loc = vec!["body".into(), Loc::Index(offset(body, &error))];
        Problems::one(loc, Flaw::json_invalid(&error), Value::Object(Map::new())).into()
    })
}

/// The number of objects, lists and commas in JSON: it has at most one value more.
fn values(text: &[u8]) -> usize {
    let (mut count, mut is_text, mut is_escaped) = (0, false, false);
    for byte in text {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = is_text,
            b'"' => is_text = !is_text,
            b'{' | b'[' | b',' if !is_text => count += 1,
            _ => {}
        }
    }
    count
}

/// The byte offset of the error in the body.
fn offset(body: &[u8], error: &serde_json::Error) -> usize {
    let before = body.split_inclusive(|byte| *byte == b'\n').take(error.line().saturating_sub(1));
    before.map(<[u8]>::len).sum::<usize>() + error.column().saturating_sub(1)
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return true };
    let essence = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let essence = essence.to_ascii_lowercase();
    essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"))
}

#[cfg(test)]
mod tests {
    use axum::body::{Bytes, to_bytes};
    use axum::routing::{Router, post};
    use serde_json::json;
    use tower::ServiceExt;

    use super::*;

    struct Limit(i64);

    impl FromFields for Limit {
        const BODY_OPTIONAL: bool = true;

        fn from_fields(fields: &mut Fields<'_>) -> Self {
            Self(fields.field("limit").integer(&(1..=100)).unwrap_or(10))
        }
    }

    struct Named(String);

    impl FromFields for Named {
        fn from_fields(fields: &mut Fields<'_>) -> Self {
            Self(fields.field("name").required().text().unwrap_or_default())
        }
    }

    fn app() -> Router {
        Router::new()
            .route(
                "/limit",
                post(|ApiQuery(query): ApiQuery<Limit>, ApiJson(body): ApiJson<Limit>| async move {
                    format!("{} {}", query.0, body.0)
                }),
            )
            .route("/named", post(|ApiJson(body): ApiJson<Named>| async move { body.0 }))
            .route(
                "/threads/{thread_id}",
                post(|ApiPath(path): ApiPath<ThreadPath>| async move { path.thread_id.to_string() }),
            )
            .route(
                "/threads/{thread_id}/runs/{run_id}",
                post(|ApiPath(path): ApiPath<RunPath>| async move {
                    format!("{} {}", path.thread_id, path.run_id)
                }),
            )
    }

    async fn send(path: &str, kind: Option<&str>, body: impl Into<Body>) -> (u16, String) {
        let mut request = Request::builder().method("POST").uri(path);
        if let Some(kind) = kind {
            request = request.header(header::CONTENT_TYPE, kind);
        }
        let response = app().oneshot(request.body(body.into()).unwrap()).await.unwrap();
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    /// The body of a 422 with one problem.
    fn problem(item: &Value) -> (u16, Value) {
        (422, json!({"detail": [item]}))
    }

    async fn refused(path: &str, kind: Option<&str>, body: &'static str) -> (u16, Value) {
        let (status, text) = send(path, kind, body).await;
        (status, serde_json::from_str(&text).unwrap())
    }

    #[tokio::test]
    async fn a_body_is_read_whatever_way_json_is_announced() {
        for kind in [
            None,
            Some("application/json"),
            Some("Application/JSON; charset=utf-8"),
            Some("application/merge-patch+json"),
        ] {
            assert_eq!(send("/limit", kind, r#"{"limit": 7}"#).await, (200, "10 7".into()), "{kind:?}");
        }
        let no_object = json!({
            "type": "model_attributes_type", "loc": ["body"], "input": null,
            "msg": "Input should be a valid dictionary or object to extract fields from",
        });
        for kind in ["text/plain", "application/x-www-form-urlencoded", "text/json", "application/jsonp", ""]
        {
            assert_eq!(refused("/limit", Some(kind), r#"{"limit": 7}"#).await, problem(&no_object), "{kind}");
        }
    }

    #[tokio::test]
    async fn a_body_that_is_no_object_is_a_422() {
        let no_object = |input: Value| {
            json!({
                "type": "model_attributes_type", "loc": ["body"], "input": input,
                "msg": "Input should be a valid dictionary or object to extract fields from",
            })
        };
        for body in ["[1]", "\"text\"", "null", "3"] {
            let input = serde_json::from_str(body).unwrap();
            assert_eq!(refused("/named", None, body).await, problem(&no_object(input)), "{body}");
        }
        for (body, offset, reason) in [
            ("{", 0, "EOF while parsing an object"),
            ("{\"name\": nul}", 12, "expected ident"),
            ("{\n \"name\":\n x}", 12, "expected value"),
            ("{} {}", 3, "trailing characters"),
            ("{\"name\": NaN}", 9, "expected value"),
            ("{\n \"name\": [18446744073709551616]}", 12, "integer 18446744073709551616 is out of range"),
            ("{\"name\": -9223372036854775809}", 9, "integer -9223372036854775809 is out of range"),
        ] {
            let (status, answer) = refused("/named", None, body).await;
            let item = &answer["detail"][0];
            assert_eq!(
                (status, &item["type"], &item["loc"]),
                (422, &json!("json_invalid"), &json!(["body", offset])),
                "{body}"
            );
            assert_eq!((&item["msg"], &item["input"]), (&json!("JSON decode error"), &json!({})));
            assert!(item["ctx"]["error"].as_str().unwrap().contains(reason), "{body}: {item}");
        }
        assert_eq!(send("/named", None, &b"{\"name\": \"\xff\"}"[..]).await.0, 422, "not UTF-8");
        let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
        let refused = whole(deep.as_bytes(), true, false).unwrap_err();
        assert_eq!(refused.status(), 422, "nested too deeply for the stack");
    }

    #[tokio::test]
    async fn a_body_of_a_million_values_at_most_is_parsed() {
        let list = |items: usize| format!("[{}0]", "0,".repeat(items - 1));
        assert_eq!(send("/named", None, list(MAX_VALUES)).await.0, 422, "it is no object");
        let detail = "{\"detail\":\"Request body has too many values: at most 1000000 are accepted\"}";
        assert_eq!(send("/named", None, list(MAX_VALUES + 1)).await, (413, detail.to_owned()));
        let objects = format!("{{\"name\":[{}{{}}]}}", "{},".repeat(MAX_VALUES / 2));
        assert_eq!(send("/named", None, objects).await, (413, detail.to_owned()));
        // In a text they are none.
        let name = format!("\\{}\"", ",[{".repeat(MAX_VALUES));
        assert_eq!(send("/named", None, json!({"name": name}).to_string()).await, (200, name));
    }

    #[tokio::test]
    async fn an_absent_body_is_missing_unless_the_route_does_without() {
        assert_eq!(send("/limit", None, "").await, (200, "10 10".into()));
        let missing = json!({"type": "missing", "loc": ["body"], "msg": "Field required", "input": null});
        assert_eq!(refused("/named", Some("application/json"), "").await, problem(&missing));
    }

    #[tokio::test]
    async fn problems_say_which_part_of_the_request_they_are_in() {
        let item = |part: &str, input: Value| {
            json!({
                "type": "greater_than_equal", "loc": [part, "limit"], "input": input, "ctx": {"ge": 1},
                "msg": "Input should be greater than or equal to 1",
            })
        };
        assert_eq!(refused("/limit", None, r#"{"limit": 0}"#).await, problem(&item("body", json!(0))));
        assert_eq!(refused("/limit?limit=0", None, "").await, problem(&item("query", json!("0"))));
        assert_eq!(send("/limit?limit=%35", None, "{}").await, (200, "5 10".into()));
        // Neither of two values is dropped.
        let item = json!({
            "type": "int_type", "loc": ["query", "limit"], "input": ["3", "5"],
            "msg": "Input should be a valid integer",
        });
        assert_eq!(refused("/limit?limit=3&limit=5", None, "").await, problem(&item));
    }

    #[tokio::test]
    async fn a_field_that_the_route_does_not_read_is_refused_by_name() {
        let item = |part: &str| {
            json!({
                "type": "extra_forbidden", "loc": [part, "lmit"], "input": "7",
                "msg": "Extra inputs are not permitted",
            })
        };
        assert_eq!(refused("/limit", None, r#"{"limit": 1, "lmit": "7"}"#).await, problem(&item("body")));
        assert_eq!(refused("/limit?lmit=7", None, "").await, problem(&item("query")));
        assert_eq!(refused("/named", None, r#"{"name": "n", "lmit": "7"}"#).await, problem(&item("body")));
    }

    #[tokio::test]
    async fn a_thread_id_in_the_path_keeps_to_its_pattern() {
        assert_eq!(send("/threads/a-Z_9", None, "").await, (200, "a-Z_9".into()));
        assert_eq!(send("/threads/t/runs/a%20b.c", None, "").await, (200, "t a b.c".into()));
        let pattern = "^[A-Za-z0-9_-]{1,64}$";
        for (path, input) in [
            ("/threads/a.b", "a.b".to_owned()),
            ("/threads/a%2Fb", "a/b".to_owned()),
            ("/threads/a.b/runs/r", "a.b".to_owned()),
            (&*format!("/threads/{}", "a".repeat(65)), "a".repeat(65)),
        ] {
            let item = json!({
                "type": "string_pattern_mismatch", "loc": ["path", "thread_id"], "input": input,
                "msg": format!("String should match pattern '{pattern}'"), "ctx": {"pattern": pattern},
            });
            assert_eq!(refused(path, None, "").await, problem(&item), "{path}");
        }
        assert_eq!(
            refused("/threads/%ff", None, "").await,
            (400, json!({"detail": "Path could not be read"}))
        );
    }

    #[tokio::test]
    async fn a_body_above_the_limit_is_a_413_and_taken_to_its_end() {
        let chunks = |count: usize| {
            let (sent, body) = futures::channel::mpsc::unbounded();
            for _ in 0..count {
                sent.unbounded_send(Ok::<_, std::io::Error>(Bytes::from_static(&[b'x'; 50]))).unwrap();
            }
            (sent, Body::from_stream(body))
        };
        let (sent, body) = chunks(2);
        drop(sent);
        assert_eq!(collected(body, 100).await.unwrap().len(), 100);
        let (sent, body) = chunks(5);
        let refused = tokio::spawn(collected(body, 100));
        // The response comes after the client has sent everything.
        while !sent.is_empty() {
            tokio::task::yield_now().await;
        }
        assert!(!refused.is_finished());
        drop(sent);
        let refused = refused.await.unwrap().unwrap_err();
        assert_eq!(refused.status(), 413);
        assert!(refused.to_string().contains("at most 100 bytes"), "{refused}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_stalls_with_too_much_is_not_waited_for() {
        let (sent, body) = futures::channel::mpsc::unbounded::<Result<Bytes, std::io::Error>>();
        sent.unbounded_send(Ok(Bytes::from_static(&[b'x'; 101]))).unwrap();
        assert_eq!(collected(Body::from_stream(body), 100).await.unwrap_err().status(), 413);
        drop(sent);
    }

    #[tokio::test]
    async fn a_body_that_breaks_off_is_a_400() {
        let broken = futures::stream::iter([Ok(Bytes::new()), Err(std::io::Error::other("gone"))]);
        assert_eq!(collected(Body::from_stream(broken), 100).await.unwrap_err().status(), 400);
    }
}
