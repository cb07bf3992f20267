//! The event stream of a thread: its runs, one after the other, as events of the protocol.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt as _;
use serde_json::{Value, json};
use threadkeep::Error;
use threadkeep::channel::MESSAGES_CHANNEL;
use threadkeep::id::Clock as _;
use threadkeep::saver::Load;
use threadkeep::state::StateSnapshot;
use threadkeep_agent::serialize;
use threadkeep_records::{RunRow, RunStatus};

use super::event::{Data, Place, Said, Speaker};
use super::filter::Filter;
use super::translate::{GRAPH, Translator};
use super::waiting::asked;
use crate::app::App;
use crate::http::error::ApiError;
use crate::http::thread_runs::{RunsOf, Upcoming};
use crate::streams::bridge::{AHEAD_MS, Event, EventId, Frame, Subscription, unix_ms};
use crate::streams::verdict::UNREAD;

/// A client's place in the event stream of a thread.
pub(super) struct Following {
    runs: RunsOf,
    filter: Arc<Filter>,
    /// The runs that there were at the beginning. Later ones come after `filter.since`, whatever their numbers.
    earlier: BTreeSet<String>,
    current: Option<Current>,
    /// What is to be sent.
    said: VecDeque<Said>,
    /// What a read found that the store lost of what it had acknowledged. The next end of a run says it.
    lost: Option<String>,
}

/// The run that is followed.
struct Current {
    run: Box<RunRow>,
    stream: Subscription,
    translator: Translator,
}

impl Following {
    /// From the first event after `filter.since` on; without it, or if it lies in the future, from the beginning of the
    /// active run, or of the newest one.
    ///
    /// # Errors
    /// 500 if the records cannot be read.
    pub(super) async fn begin(mut runs: RunsOf, mut filter: Filter) -> Result<Self, ApiError> {
        // One that lies farther ahead is from before the clock was set back.
        let latest = Place::before_ms(runs.app().ids.now_ms().saturating_add(AHEAD_MS));
        filter.since = filter.since.filter(|since| *since <= latest);
        let since = filter.since;
        runs.with(|run| {
            run.status.is_active()
                || since.is_some_and(|since| Place::before_ms(unix_ms(run.updated_at) + 1) >= since)
        })
        .await?;
        let earlier = runs.known().clone();
        let filter = Arc::new(filter);
        Ok(Self { runs, filter, earlier, current: None, said: VecDeque::new(), lost: None })
    }

    fn app(&self) -> &Arc<App> {
        self.runs.app()
    }

    /// The next piece to send; `None` if the stream is over: the gateway stops, or the thread is gone or no longer the
    /// caller's.
    pub(super) async fn next(&mut self) -> Option<Vec<Bytes>> {
        loop {
            while let Some(said) = self.said.pop_front() {
                if self.filter.admits(&said) {
                    return Some(said.encode());
                }
            }
            let Some(current) = &mut self.current else {
                match self.runs.next().await? {
                    Upcoming::Run(run, _) => {
                        if self.filter.since.is_some() && !self.earlier.contains(&run.run_id) {
                            Arc::make_mut(&mut self.filter).since = None;
                        }
                        self.current = Some(self.follow(run));
                    }
                    Upcoming::Nothing => self.runs.check().await?,
                }
                continue;
            };
            match current.stream.next().await.unwrap_or(Frame::End) {
                Frame::Event(event) => {
                    let missed = current.translator.last().is_none() && self.has_missed(&event);
                    if missed {
                        self.snapshot(event.id).await?;
                    }
                    if let Some(current) = &mut self.current {
                        self.said.extend(current.translator.frame(&event));
                    }
                }
                Frame::Heartbeat => {}
                // The client was too slow: it gets the state, and what is still there.
                Frame::Gap(_) => {
                    if let Some(current) = self.current.take() {
                        self.current = Some(self.follow(current.run));
                    }
                }
                Frame::End => {
                    if let Some(current) = self.current.take() {
                        self.conclude(current).await?;
                    }
                }
            }
        }
    }

    fn follow(&self, run: Box<RunRow>) -> Current {
        let stream = self.app().streams.follow(&run, None);
        let translator = Translator::new(&run.run_id, Arc::clone(&self.filter));
        Current { run, stream, translator }
    }

    /// Whether frames before this one, the first that is there, are lost to the client.
    fn has_missed(&self, first: &Event) -> bool {
        first.id.seq > 0 && self.filter.since.is_none_or(|since| since < Place::of(first.id).before())
    }

    /// The state at the head in the place of what is lost before this frame; `None` if the thread is gone or no longer
    /// the caller's.
    async fn snapshot(&mut self, first: EventId) -> Option<()> {
        if !self.filter.wants("values") && !self.filter.wants("checkpoints") {
            return Some(());
        }
        let (app, thread) = (self.app(), self.runs.thread());
        let head = app.threads.accessor().get(thread, None).await;
        let shown = head.and_then(|head| {
            let shown =
                |head: &StateSnapshot| Ok((envelope(head), app.streams.rendered().values(head, &[])?));
            head.as_ref().map(shown).transpose()
        });
        match shown {
            Ok(Some((checkpoint, values))) => {
                // After the read: the head may be that of another user's thread.
                self.runs.check().await?;
                let speaker = Speaker::of("", first);
                let id = checkpoint["id"].as_str().unwrap_or_default().to_owned();
                self.said.push_back(speaker.snapshot("checkpoints", &id, Data::Json(checkpoint)));
                self.said.push_back(speaker.snapshot("values", &id, Data::Text(values.into())));
            }
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(%thread, %error, "cannot read the state for an event stream");
                self.keep_if_lost(&error);
            }
        }
        Some(())
    }

    /// A lost history is found once: the thread's next turn would not hear of it.
    fn keep_if_lost(&mut self, error: &Error) {
        if matches!(error, Error::HistoryLost { .. }) {
            self.lost = Some(error.to_string());
        }
    }

    /// Says how a run ended; `None` if it was deleted with its thread, or that is no longer the caller's.
    async fn conclude(&mut self, current: Current) -> Option<()> {
        let Current { run, mut translator, .. } = current;
        let app = Arc::clone(self.app());
        // What a client does next meets a run that has ended.
        let row = match app.runs.ended(&run.run_id).await {
            Ok(Some(row)) => row,
            Ok(None) => {
                self.runs.check().await?;
                *run
            }
            Err(error) => {
                tracing::debug!(run_id = run.run_id, %error, "cannot read how a run ended");
                *run
            }
        };
        // The same place if nothing is kept of it but its row: after the frames of that millisecond.
        let ended = EventId { unix_ms: unix_ms(row.updated_at), seq: EventId::PER_MS - 1 };
        let mut earlier = None;
        if translator.last().is_none() {
            earlier = self.end_before(&row).await;
            self.snapshot(ended).await?;
        }
        // An `error` may be this process's own, which has read the row: it has the time of that look.
        let last = if row.status.is_active() { translator.last() } else { translator.spoken() };
        let last = last.filter(|last| Place::of(*last) > Place::of(ended)).unwrap_or(ended);
        let speaker = Speaker::of(&row.run_id, last);
        let left = self.left_by(&row).await;
        let questions = match &left {
            Some(left) if row.status == RunStatus::Success => asked(left).unwrap_or_default(),
            _ => Vec::new(),
        };
        let waits = !questions.is_empty() || left.as_ref().is_some_and(|left| !left.next.is_empty());
        let lost = self.lost.take();
        // What is decided is how it ends, although that could not be written yet.
        let decided = row.decided_status.filter(|_| row.status.is_active());
        let status = match decided.unwrap_or(row.reported_status()) {
            _ if lost.is_some() => "failed",
            RunStatus::Interrupted => "interrupted",
            RunStatus::Error | RunStatus::Timeout => "failed",
            RunStatus::Success if waits => "interrupted",
            RunStatus::Success => "completed",
            // Its row could not be written, or not be read.
            RunStatus::Pending | RunStatus::Running => {
                translator.failed.get_or_insert_with(|| UNREAD.to_owned());
                "failed"
            }
        };
        let mut data = json!({ "event": status, "graph_name": GRAPH });
        if status == "failed" {
            let error = lost.or_else(|| row.error.clone()).or_else(|| translator.failed.clone());
            translator.failed = Some(error.clone().unwrap_or_default());
            data["error"] = error.into();
        }
        if let Some(left) = &left {
            data["checkpoint"] = json!({ "id": left.key.id.to_string() });
        }
        self.said.extend(translator.end(&speaker));
        let asks = questions.into_iter().zip(0..).map(|(asked, slot)| {
            let data = json!({ "interrupt_id": asked.id, "payload": asked.payload });
            speaker.ask(slot, &asked.id, data)
        });
        self.said.extend(asks);
        self.said.push_back(speaker.end(data));
        if let Some(earlier) = earlier {
            for said in &mut self.said {
                said.come_after(earlier);
            }
        }
        Some(())
    }

    /// The number of the last end of the thread's earlier runs. That of a run which only waited may be a smaller one: it
    /// was cancelled while another one was at work.
    async fn end_before(&self, run: &RunRow) -> Option<u64> {
        let ended = self.runs.ended_before(&run.run_id).await;
        let run_id = &run.run_id;
        let ended =
            ended.inspect_err(|error| tracing::debug!(run_id, %error, "cannot read when earlier runs ended"));
        // One that lies farther ahead is from before the clock was set back.
        let latest = self.app().ids.now_ms().saturating_add(AHEAD_MS);
        let times = ended.ok()?.into_iter().map(|run| unix_ms(run.updated_at));
        times.filter(|time| *time <= latest).max().map(|time| Place::before_ms(time + 1))
    }

    /// The checkpoint that the run has left, with its messages; `None` if it wrote none.
    async fn left_by(&mut self, run: &RunRow) -> Option<StateSnapshot> {
        let left = self.app().threads.left_by(run, &Load::Only([MESSAGES_CHANNEL.into()].into())).await;
        let run_id = &run.run_id;
        if let Err(error) = &left {
            tracing::debug!(run_id, %error, "cannot read what a run left");
            self.keep_if_lost(error);
        }
        let left = left.ok().flatten()?;
        (serialize::metadata(&left.metadata).get("run_id") == Some(&json!(run_id))).then_some(left)
    }
}

/// A checkpoint as the protocol describes it.
pub(super) fn envelope(state: &StateSnapshot) -> Value {
    let mut data = json!({
        "id": state.key.id.to_string(), "step": state.metadata.step, "source": state.metadata.source,
    });
    if let Some(parent) = state.parent {
        data["parent_id"] = parent.to_string().into();
    }
    data
}
