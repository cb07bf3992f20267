//! Retries failed model calls, and returns a fallback answer if that does not help.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use tracing::Instrument as _;

use super::{ChatModel, ChunkStream, Fallback, ModelChunk, ModelError, ModelErrorKind, ModelRequest};
use crate::spans;

/// The maximum number of attempts.
const ATTEMPTS: u32 = 3;
/// The pause after the first failure; it doubles with each further one.
const FIRST_DELAY: Duration = Duration::from_secs(1);
/// The longest pause that we choose.
const MAX_DELAY: Duration = Duration::from_secs(8);
/// The longest pause that a provider may request. Beyond it, waiting would only block the run, and an earlier retry
/// would be refused, so the call fails at once.
const MAX_RETRY_AFTER: Duration = Duration::from_mins(1);
/// The maximum size of an answer: its texts and the arguments of its tool calls, in bytes.
const MAX_ANSWER_BYTES: usize = 8 << 20;
/// The maximum number of tool calls in an answer.
const MAX_ANSWER_CALLS: usize = 256;
/// The finish reason of a fallback answer.
const FALLBACK_FINISH_REASON: &str = "error";

/// Waits for a duration. Tests replace it in order not to wait.
pub type Sleeper = Arc<dyn Fn(Duration) -> BoxFuture<'static, ()> + Send + Sync>;

/// A model whose calls never fail: transient failures are retried, and a remaining failure becomes a marked answer.
///
/// A call is tried three times, with pauses of 1 s and 2 s (doubling, at most 8 s) or as long as the provider's
/// `Retry-After` asks, up to a minute. It is retried only after a [transient](ModelErrorKind::is_transient) failure,
/// and only if no part of the answer has been passed on: a second answer after half of a first one would garble what
/// clients already show. So a failure in the middle of an answer ends it.
///
/// The fallback is an ordinary last chunk with a text for the user and a [`Fallback`]; the resulting message is marked,
/// so that the run ends as `error` with the fallback's reason ([`fallback_reason`](super::message::fallback_reason)).
#[derive(Clone)]
pub struct RetryingModel {
    inner: Arc<dyn ChatModel>,
    sleeper: Sleeper,
}

impl fmt::Debug for RetryingModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryingModel").field("name", &self.name()).finish_non_exhaustive()
    }
}

impl RetryingModel {
    /// Wraps `inner`; pauses use tokio's clock.
    pub fn new(inner: Arc<dyn ChatModel>) -> Self {
        Self::with_sleeper(inner, Arc::new(|delay| Box::pin(tokio::time::sleep(delay))))
    }

    /// Wraps `inner`; pauses use `sleeper`.
    pub fn with_sleeper(inner: Arc<dyn ChatModel>, sleeper: Sleeper) -> Self {
        Self { inner, sleeper }
    }

    /// The configured name of the model.
    pub fn name(&self) -> &str {
        self.inner.name()
    }

    /// The provider's short name.
    pub fn provider(&self) -> &str {
        self.inner.provider()
    }

    /// The chunks of the answer, the last of which has a finish reason. Lazy; dropping it abandons the call.
    pub fn stream(&self, request: ModelRequest) -> BoxStream<'static, ModelChunk> {
        let span = spans::model_call(self.name(), self.provider());
        let answer = answer(Arc::clone(&self.inner), Arc::clone(&self.sleeper), request);
        // The stream holds the span, which ends when the answer ends or is abandoned.
        stream::once(answer.instrument(span.clone()))
            .flatten()
            .inspect(move |chunk| spans::model_answered(&span, chunk))
            .boxed()
    }
}

/// Retries until an answer starts, or until none will.
async fn answer(
    model: Arc<dyn ChatModel>,
    sleeper: Sleeper,
    mut request: ModelRequest,
) -> BoxStream<'static, ModelChunk> {
    loop {
        let error = match begin(&*model, &request).await {
            Ok((first, rest)) => return pass_on(model.name().to_owned(), first, rest),
            Err(error) => error,
        };
        request.attempt += 1;
        let Some(delay) = delay_before_retry(&error, request.attempt) else {
            tracing::warn!(model = model.name(), attempts = request.attempt, %error, "model call failed");
            let reason = format!("{error} (attempts: {})", request.attempt);
            return stream::iter([fallback(error.kind, reason, "")]).boxed();
        };
        tracing::warn!(model = model.name(), attempt = request.attempt, ?delay, %error, "retrying model call");
        sleeper(delay).await;
    }
}

/// One attempt, up to the first chunk.
async fn begin(
    model: &dyn ChatModel,
    request: &ModelRequest,
) -> Result<(ModelChunk, ChunkStream), ModelError> {
    let mut chunks = model.stream(request).await?;
    match chunks.next().await {
        Some(first) => Ok((first?, chunks)),
        None => Err(cut_off(model.name())),
    }
}

/// An answer that has started: its chunks, and a fallback chunk if it breaks off.
fn pass_on(model: String, first: ModelChunk, rest: ChunkStream) -> BoxStream<'static, ModelChunk> {
    let chunks = stream::iter([Ok(first)]).chain(rest);
    stream::unfold(Some((chunks, Size::default())), move |answer| {
        let model = model.clone();
        async move {
            let (mut chunks, mut size) = answer?;
            let next = chunks.next().await.unwrap_or_else(|| Err(cut_off(&model)));
            match next.and_then(|chunk| size.add(&chunk, &model).map(|()| chunk)) {
                Ok(chunk) if chunk.is_last() => Some((chunk, None)),
                Ok(chunk) => Some((chunk, Some((chunks, size)))),
                Err(error) => {
                    tracing::warn!(model, %error, "model call failed in the middle of its answer");
                    let reason = format!("{error} (in the middle of the answer)");
                    Some((fallback(error.kind, reason, "\n\n"), None))
                }
            }
        }
    })
    .boxed()
}

/// The size of an answer so far. The answer is kept in memory, stored and streamed as a whole, so a model that does not
/// stop must be stopped.
#[derive(Debug, Default)]
struct Size {
    bytes: usize,
    calls: HashSet<u64>,
}

impl Size {
    fn add(&mut self, chunk: &ModelChunk, model: &str) -> Result<(), ModelError> {
        self.bytes += chunk.text.len() + chunk.reasoning.len();
        for piece in &chunk.tool_call_chunks {
            let names = [&piece.id, &piece.name].into_iter().flatten().map(String::len).sum::<usize>();
            let extra = piece.extra.as_ref().map_or(0, |extra| extra.to_string().len());
            self.bytes += piece.args.len() + names + extra;
            self.calls.insert(piece.index);
        }
        let detail = if self.bytes > MAX_ANSWER_BYTES {
            format!("the answer has more than {MAX_ANSWER_BYTES} bytes")
        } else if self.calls.len() > MAX_ANSWER_CALLS {
            format!("the answer has more than {MAX_ANSWER_CALLS} tool calls")
        } else {
            return Ok(());
        };
        Err(ModelError::new(model, ModelErrorKind::TooLarge, detail))
    }
}

fn cut_off(model: &str) -> ModelError {
    ModelError::new(model, ModelErrorKind::Connection, "the answer ended before it was complete")
}

/// How long to wait before the next attempt after `failures` failures; `None` to give up.
fn delay_before_retry(error: &ModelError, failures: u32) -> Option<Duration> {
    if failures >= ATTEMPTS || !error.kind.is_transient() {
        return None;
    }
    match error.retry_after {
        Some(asked) => (asked <= MAX_RETRY_AFTER).then_some(asked),
        None => Some(FIRST_DELAY.saturating_mul(2u32.saturating_pow(failures - 1)).min(MAX_DELAY)),
    }
}

fn fallback(kind: ModelErrorKind, reason: String, separator: &str) -> ModelChunk {
    ModelChunk {
        text: format!("{separator}{}", kind.remedy()),
        finish_reason: Some(FALLBACK_FINISH_REASON.to_owned()),
        fallback: Some(Fallback { error_type: kind.as_str().to_owned(), reason }),
        ..ModelChunk::default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::{ChunkAssembler, ToolCallChunk, message};
    use super::*;

    /// Plays one prepared stream, or failure to start one, per attempt.
    struct Prepared {
        attempts: Mutex<std::vec::IntoIter<Attempt>>,
        seen: Mutex<Vec<u32>>,
    }

    type Attempt = Result<Vec<Result<ModelChunk, ModelError>>, ModelError>;

    #[async_trait::async_trait]
    impl ChatModel for Prepared {
        fn name(&self) -> &'static str {
            "prepared"
        }
        fn provider(&self) -> &'static str {
            "test"
        }
        async fn stream(&self, request: &ModelRequest) -> Result<ChunkStream, ModelError> {
            self.seen.lock().unwrap().push(request.attempt);
            let attempt = self.attempts.lock().unwrap().next().expect("one attempt too many");
            attempt.map(|chunks| stream::iter(chunks).boxed())
        }
    }

    fn error(kind: ModelErrorKind) -> ModelError {
        ModelError::new("prepared", kind, "boom")
    }

    fn text(text: &str) -> ModelChunk {
        ModelChunk { text: text.into(), ..ModelChunk::default() }
    }

    fn last() -> ModelChunk {
        ModelChunk { finish_reason: Some("stop".into()), ..ModelChunk::default() }
    }

    struct Outcome {
        chunks: Vec<ModelChunk>,
        pauses: Vec<Duration>,
        attempts: Vec<u32>,
    }

    impl Outcome {
        fn text(&self) -> String {
            self.chunks.iter().map(|chunk| chunk.text.as_str()).collect()
        }
        fn fallback(&self) -> &Fallback {
            self.chunks.last().unwrap().fallback.as_ref().expect("a fallback")
        }
    }

    async fn play(attempts: Vec<Attempt>) -> Outcome {
        let model = Arc::new(Prepared { attempts: Mutex::new(attempts.into_iter()), seen: Mutex::default() });
        let pauses = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&pauses);
        let sleeper: Sleeper = Arc::new(move |delay| {
            noted.lock().unwrap().push(delay);
            Box::pin(async {})
        });
        let retrying = RetryingModel::with_sleeper(Arc::clone(&model) as Arc<dyn ChatModel>, sleeper);
        let chunks = retrying.stream(ModelRequest::default()).collect().await;
        let (pauses, attempts) = (pauses.lock().unwrap().clone(), model.seen.lock().unwrap().clone());
        Outcome { chunks, pauses, attempts }
    }

    #[tokio::test]
    async fn a_good_answer_passes_unchanged() {
        let outcome = play(vec![Ok(vec![Ok(text("a")), Ok(text("b")), Ok(last())])]).await;
        assert_eq!(outcome.chunks, [text("a"), text("b"), last()]);
        assert!(outcome.pauses.is_empty());
    }

    #[tokio::test]
    async fn transient_failures_are_retried_with_growing_pauses() {
        for kind in [
            ModelErrorKind::RateLimited,
            ModelErrorKind::Server,
            ModelErrorKind::Timeout,
            ModelErrorKind::Connection,
        ] {
            // The second failure is the first item of the stream, before anything was passed on.
            let outcome = play(vec![
                Err(error(kind)),
                Ok(vec![Err(error(kind))]),
                Ok(vec![Ok(text("ok")), Ok(last())]),
            ])
            .await;
            assert_eq!(outcome.chunks, [text("ok"), last()], "{kind:?}");
            assert_eq!(outcome.pauses, [Duration::from_secs(1), Duration::from_secs(2)]);
            assert_eq!(outcome.attempts, [0, 1, 2]);
        }
    }

    #[tokio::test]
    async fn the_third_failure_gives_a_marked_fallback() {
        let server = || Err(error(ModelErrorKind::Server));
        let outcome = play(vec![server(), server(), server()]).await;
        assert_eq!(outcome.attempts, [0, 1, 2]);
        assert_eq!(outcome.chunks.len(), 1);
        assert_eq!(outcome.fallback().error_type, "server_error");
        assert_eq!(outcome.fallback().reason, "model `prepared`: the provider failed: boom (attempts: 3)");
        assert_eq!(outcome.text(), ModelErrorKind::Server.remedy());

        let mut assembler = ChunkAssembler::new("id", "prepared");
        assembler.push(&outcome.chunks[0]);
        let message = assembler.finish();
        assert_eq!(message::fallback_reason(&message), Some(outcome.fallback().reason.as_str()));
    }

    #[tokio::test]
    async fn other_failures_are_not_retried() {
        for kind in [
            ModelErrorKind::Quota,
            ModelErrorKind::Authentication,
            ModelErrorKind::Rejected,
            ModelErrorKind::Protocol,
            ModelErrorKind::Configuration,
            ModelErrorKind::Script,
        ] {
            let outcome = play(vec![Err(error(kind))]).await;
            assert_eq!(outcome.attempts, [0], "{kind:?}");
            assert_eq!(outcome.fallback().error_type, kind.as_str());
            assert_eq!(outcome.text(), kind.remedy());
        }
    }

    #[tokio::test]
    async fn a_half_passed_answer_is_not_retried_and_keeps_its_text() {
        let outcome = play(vec![Ok(vec![Ok(text("half")), Err(error(ModelErrorKind::Server))])]).await;
        assert_eq!(outcome.attempts, [0]);
        assert_eq!(outcome.text(), format!("half\n\n{}", ModelErrorKind::Server.remedy()));
        assert!(outcome.fallback().reason.ends_with("(in the middle of the answer)"));
    }

    fn call(index: u64, args: &str) -> ModelChunk {
        let piece = ToolCallChunk { index, args: args.into(), ..ToolCallChunk::default() };
        ModelChunk { tool_call_chunks: vec![piece], ..ModelChunk::default() }
    }

    #[tokio::test]
    async fn an_answer_that_does_not_stop_is_stopped() {
        let part = "x".repeat(MAX_ANSWER_BYTES / 2);
        let reasoning = ModelChunk { reasoning: part.clone(), ..ModelChunk::default() };
        for chunk in [text(&part), reasoning, call(0, &part)] {
            let whole = play(vec![Ok(vec![Ok(chunk.clone()), Ok(chunk.clone()), Ok(last())])]).await;
            assert_eq!(whole.chunks.last(), Some(&last()), "an answer may have this size");
            let outcome =
                play(vec![Ok(vec![Ok(chunk.clone()), Ok(chunk.clone()), Ok(text("x")), Ok(last())])]);
            let outcome = outcome.await;
            assert_eq!(outcome.chunks.len(), 3);
            assert_eq!(outcome.fallback().error_type, "answer_too_large");
            assert!(
                outcome.fallback().reason.contains("more than 8388608 bytes"),
                "{:?}",
                outcome.fallback()
            );
            assert_eq!(outcome.attempts, [0], "it is not asked for again");
        }
        let calls = |count: u64| (0..count).map(|index| Ok(call(index, ""))).chain([Ok(last())]).collect();
        assert_eq!(play(vec![Ok(calls(256))]).await.chunks.last(), Some(&last()));
        let outcome = play(vec![Ok(calls(257))]).await;
        assert!(outcome.fallback().reason.contains("more than 256 tool calls"), "{:?}", outcome.fallback());
    }

    #[tokio::test]
    async fn an_answer_without_an_end_counts_as_cut_off() {
        let outcome = play(vec![Ok(vec![]), Ok(vec![Ok(text("half"))])]).await;
        assert_eq!(outcome.attempts, [0, 1]);
        assert_eq!(outcome.fallback().error_type, "connection_error");
    }

    #[tokio::test]
    async fn nothing_after_the_last_chunk_is_passed_on() {
        let outcome = play(vec![Ok(vec![Ok(last()), Err(error(ModelErrorKind::Server))])]).await;
        assert_eq!(outcome.chunks, [last()]);
    }

    #[tokio::test]
    async fn retry_after_replaces_the_pause_up_to_a_minute() {
        let asking = |seconds| {
            let retry_after = Some(Duration::from_secs(seconds));
            Err(ModelError { retry_after, ..error(ModelErrorKind::RateLimited) })
        };
        let outcome = play(vec![asking(0), asking(60), Ok(vec![Ok(last())])]).await;
        assert_eq!(outcome.pauses, [Duration::ZERO, Duration::from_mins(1)]);

        let outcome = play(vec![asking(61)]).await;
        assert_eq!((outcome.attempts.len(), outcome.pauses.len()), (1, 0));
        assert_eq!(outcome.fallback().error_type, "rate_limited");
    }

    #[test]
    fn the_pause_never_exceeds_eight_seconds() {
        let error = error(ModelErrorKind::Server);
        let pauses: Vec<u64> = (1..ATTEMPTS)
            .filter_map(|n| delay_before_retry(&error, n))
            .map(|pause| pause.as_secs())
            .collect();
        assert_eq!(pauses, [1, 2]);
        assert!(
            FIRST_DELAY * 2u32.pow(ATTEMPTS) <= MAX_DELAY,
            "more attempts than the bound was checked for"
        );
    }
}
