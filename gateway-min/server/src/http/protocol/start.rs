//! The commands that start a run: `run.start`, `input.respond` and `state.fork`.

use std::sync::Arc;

use axum::http::HeaderMap;
use serde_json::{Value, json};
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::{Clock as _, ThreadId};
use threadkeep::saver::Load;

use super::event::Place;
use super::filter::strings;
use super::reply::{Code, Refusal};
use super::waiting::asked;
use crate::app::App;
use crate::auth::Principal;
use crate::http::error::{ApiError, OrApiError as _};
use crate::http::fields::{Fields, Flaw, FromFields, Problems};
use crate::http::run_body::{Forked, Responded, RunBody, Started, together};
use crate::http::runs::{Follow, checked, existing, idempotency_key, start};
use crate::runs::admission::{Created, OnThread};
use crate::streams::bridge::unix_ms;

const FAILED: &str = "Failed to read the thread's questions";
const RUN_FAILED: &str = "Failed to read run";

/// Who sent a command, about which thread.
pub(super) struct Sender<'a> {
    pub(super) app: &'a Arc<App>,
    pub(super) caller: &'a Principal,
    pub(super) thread: &'a ThreadId,
    pub(super) headers: &'a HeaderMap,
}

/// A run that a command started.
pub(super) struct Begun {
    pub(super) result: Value,
    /// Every event of the run has a greater number than this.
    pub(super) applied_through: u64,
}

/// The parameters of `input.respond`.
pub(super) struct Response {
    answers: Answers,
    run: Responded,
}

/// The answers to questions.
#[derive(Debug, Default)]
pub(super) struct Answers(Vec<Answer>);

#[derive(Debug)]
struct Answer {
    question: String,
    namespace: Vec<String>,
    value: Value,
}

impl Response {
    pub(super) fn into_parts(self) -> (Answers, Responded) {
        (self.answers, self.run)
    }
}

impl FromFields for Response {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let several = fields.peek("responses").is_some_and(|several| !several.is_null());
        let answers = if several {
            let list = fields.field("responses").items(Answer::from_fields).unwrap_or_default();
            if list.is_empty() {
                let flaw = Flaw::new("too_short", "List should have at least 1 item");
                fields.refuse("responses", flaw, json!([]));
            }
            list
        } else {
            _ = fields.field("responses").any();
            vec![Answer::from_fields(fields)]
        };
        Self { answers: Answers(answers), run: Responded::from_fields(fields) }
    }
}

impl Answer {
    fn from_fields(fields: &mut Fields<'_>) -> Self {
        let namespace = fields.field("namespace").required().read(|sent| strings(&sent));
        Self {
            question: fields.field("interrupt_id").required().text().unwrap_or_default(),
            namespace: namespace.unwrap_or_default(),
            value: fields.field("response").required().any().unwrap_or_default(),
        }
    }
}

impl Sender<'_> {
    /// Starts a run, on a new thread if there is none yet.
    pub(super) async fn start(&self, Started(body): Started) -> Result<Begun, Refusal> {
        self.begin(body, OnThread::Visible(self.caller)).await
    }

    /// Starts a run from a checkpoint.
    pub(super) async fn fork(&self, Forked(body): Forked) -> Result<Begun, Refusal> {
        existing(self.app, self.thread).await?;
        let mut begun = self.begin(body, OnThread::Existing(self.caller)).await?;
        begun.result["thread_id"] = self.thread.as_str().into();
        Ok(begun)
    }

    /// Continues a thread with the answers to its questions.
    pub(super) async fn respond(&self, Answers(answers): Answers, run: Responded) -> Result<Begun, Refusal> {
        existing(self.app, self.thread).await?;
        let questions = self.questions().await?;
        let is_asked = |answer: &Answer| answer.namespace.is_empty() && questions.contains(&answer.question);
        // It may be this very command that has answered it, when it came first.
        if let Some(answer) = answers.iter().find(|answer| !is_asked(answer))
            && !self.has_begun().await?
        {
            let text = format!("Thread {} does not ask {}", self.thread, answer.question);
            return Err(Refusal::absent(Code::NoSuchInterrupt, text));
        }
        let mut values: Vec<Value> = answers.into_iter().map(|answer| answer.value).collect();
        let answer = match values.len() {
            1 => values.remove(0),
            _ => together(values),
        };
        self.begin(run.with(answer), OnThread::Existing(self.caller)).await
    }

    /// Whether an earlier command with the same idempotency key has started a run.
    async fn has_begun(&self) -> Result<bool, ApiError> {
        let Some(key) = idempotency_key(self.headers, self.caller, self.thread)? else { return Ok(false) };
        let run = self.app.records.runs().get_by_idempotency_key(&key).await;
        Ok(run.or_internal(RUN_FAILED)?.is_some())
    }

    async fn questions(&self) -> Result<Vec<String>, ApiError> {
        let load = Load::Only([MESSAGES_CHANNEL.into()].into());
        let head = self.app.threads.accessor().get_loading(self.thread, None, load).await;
        let Some(head) = head.or_engine(self.thread, FAILED)? else { return Ok(Vec::new()) };
        let asked = asked(&head).or_engine(self.thread, FAILED)?;
        Ok(asked.into_iter().map(|asked| asked.id).collect())
    }

    async fn begin(&self, body: RunBody, place: OnThread<'_>) -> Result<Begun, Refusal> {
        if let Some((flaw, input)) = body.names_only(self.thread.as_str()) {
            let loc = ["body", "params", "config", "configurable", "thread_id"].map(Into::into).into();
            return Err(ApiError::from(Problems::one(loc, flaw, input)).into());
        }
        let now_ms = self.app.ids.now_ms();
        let key = idempotency_key(self.headers, self.caller, self.thread)?;
        let begun = async {
            let request = checked(self.app, body).await?;
            start(self.app, self.caller, self.thread, place, request, Follow::No, key).await
        };
        let begun = begun.await;
        let Created { run, .. } = begun.map_err(|error| Refusal::of(error, Code::NoSuchCheckpoint))?;
        // The run may be that of an earlier command with the same key.
        let applied_through = Place::before_ms(now_ms.min(unix_ms(run.created_at)));
        Ok(Begun { result: json!({ "run_id": run.run_id }), applied_through })
    }
}
