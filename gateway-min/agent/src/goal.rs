//! The goal of a thread: when a run has finished, a model judges whether the goal is reached; if it is not and work can
//! continue, the run continues.
//!
//! | The goal is | What follows |
//! |---|---|
//! | reached | it is cleared |
//! | not reached, and nothing blocks it (`goal_not_met_yet`) | a hidden message tells the agent what is missing, and it continues |
//! | not reached for any other reason, or without a verdict | the goal is suspended |
//! | not reached, and the run was stopped early, or the continuations are used up, or two of them made no progress | the goal is suspended |
//!
//! An answer that was cut off because it was too long stops no goal: what is missing is in the next one.
//!
//! A suspended goal stays active, and its last evaluation says why: the next run of the thread is evaluated again. A
//! question to the user needs no evaluation: the goal is suspended until the answer. A run that fails, is cancelled or
//! stops at a breakpoint leaves the goal unchanged; so does a run that another run waits for, which is evaluated
//! instead.

use chrono::{DateTime, SecondsFormat, Utc};
use serde_json::{Map, Value as Json, json};
use threadkeep::metadata::Source;
use threadkeep::step::Durability;

use crate::agent::{conversation, next_step};
use crate::model::LENGTH_CAPPED;
use crate::model::message::{self, fallback_reason, kind};
use crate::summary::{ask, line, said, transcript};
use crate::tools::asks;
use crate::{Agent, AgentError, Ended, Input, ObserverError, Session, TaskInput};

/// The channel of the goal, and the node that writes it.
pub const CHANNEL: &str = "goal";
/// The maximum number of continuations of one goal.
pub const CONTINUATIONS_MAX: i64 = 8;
/// The number of continuations without progress after which a goal is suspended.
pub const NO_PROGRESS_MAX: i64 = 2;

/// The caller name for the judging model.
const CALLER: &str = "middleware:goal";
/// The name of the message that makes the agent continue.
const CONTINUATION: &str = "goal_continuation";
/// The approximate number of tokens from the end of the conversation that are used as evidence.
const EVIDENCE_TOKENS: u64 = 8000;
/// The maximum length of the reason and of the evidence summary, in characters.
const TEXT_MAX: usize = 1000;
const PROMPT: &str = "You check whether an assistant has reached a goal. Go by what the conversation shows and by nothing \
    else: what it does not show was not done. Answer with one JSON object and no other text: {\"satisfied\": true or \
    false, \"blocker\": one of \"none\" (the goal is reached), \"goal_not_met_yet\" (the assistant can go on by itself), \
    \"needs_user_input\", \"external_wait\" (something outside has to happen first), \"run_failed\", \
    \"missing_evidence\" (the conversation does not show enough to tell), \"reason\": what is missing, in one or two \
    sentences, \"evidence_summary\": what the conversation shows}";

/// What to do with a run that has finished.
#[derive(Debug)]
enum Pursuit {
    /// It has ended.
    Done,
    /// It was cancelled while its goal was evaluated.
    Cancelled,
    /// It continues with this input.
    GoOn(Map<String, Json>),
}

/// What blocks the goal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blocker {
    None,
    MissingEvidence,
    NeedsUserInput,
    RunFailed,
    ExternalWait,
    NotMetYet,
}

impl Blocker {
    const ALL: [Self; 6] = [
        Self::None,
        Self::MissingEvidence,
        Self::NeedsUserInput,
        Self::RunFailed,
        Self::ExternalWait,
        Self::NotMetYet,
    ];

    const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::MissingEvidence => "missing_evidence",
            Self::NeedsUserInput => "needs_user_input",
            Self::RunFailed => "run_failed",
            Self::ExternalWait => "external_wait",
            Self::NotMetYet => "goal_not_met_yet",
        }
    }
}

/// The result of evaluating a goal.
#[derive(Debug, Clone, PartialEq)]
struct Verdict {
    satisfied: bool,
    blocker: Blocker,
    reason: String,
    evidence: String,
    /// Why the goal is suspended, if not because of the blocker.
    stand_down: Option<&'static str>,
}

impl Verdict {
    /// The last verdict in a model's answer, which may contain other text around it. `None` if there is none: without
    /// an explicit verdict, a goal is not considered reached and the agent does not continue.
    fn read(answer: &str) -> Option<Self> {
        let object = |(at, _): (usize, &str)| {
            serde_json::Deserializer::from_str(&answer[at..]).into_iter::<Json>().next()?.ok()
        };
        let mut objects = answer.rmatch_indices('{').filter_map(object);
        Self::of(&objects.find(|object| object.get("satisfied").is_some())?)
    }

    fn of(verdict: &Json) -> Option<Self> {
        let satisfied = verdict["satisfied"].as_bool()?;
        let named = Blocker::ALL.into_iter().find(|blocker| verdict["blocker"] == blocker.as_str());
        let blocker = match (satisfied, named) {
            (true, None | Some(Blocker::None)) => Blocker::None,
            (false, Some(blocker)) if blocker != Blocker::None => blocker,
            _ => return None,
        };
        let text = |key: &str| verdict[key].as_str().unwrap_or_default().trim().to_owned();
        Some(Self {
            satisfied,
            blocker,
            reason: text("reason"),
            evidence: text("evidence_summary"),
            stand_down: None,
        })
    }

    /// The verdict when the agent has asked the user a question.
    fn asked() -> Self {
        Self::unfounded(Blocker::NeedsUserInput, "The assistant has asked the user a question.", None)
    }

    /// The verdict when the evaluation failed.
    fn failed() -> Self {
        let why = Some("evaluation_failed");
        Self::unfounded(Blocker::MissingEvidence, "The goal could not be evaluated.", why)
    }

    fn unfounded(blocker: Blocker, reason: &str, stand_down: Option<&'static str>) -> Self {
        Self { satisfied: false, blocker, reason: reason.to_owned(), evidence: String::new(), stand_down }
    }
}

/// An evaluated run.
struct Run<'a> {
    id: &'a str,
    now: DateTime<Utc>,
    /// What the run has said and done since its last instruction; a repetition is no progress.
    progress_key: String,
    /// Why the run was stopped early, if that would stop its next turn, too.
    stop_reason: Option<&'a str>,
}

/// The goal after an evaluation, and whether the agent continues.
fn evaluated(goal: &Json, verdict: &Verdict, run: &Run<'_>) -> (Json, bool) {
    if verdict.satisfied {
        return (Json::Null, false);
    }
    let count = |key: &str, default: i64| goal[key].as_i64().unwrap_or(default).max(0);
    let continuations = count("continuation_count", 0);
    let repeated = goal["last_evaluation"]["progress_key"] == *run.progress_key;
    let no_progress = if repeated { count("no_progress_count", 0) + 1 } else { 0 };
    let stand_down = if verdict.blocker != Blocker::NotMetYet {
        Some(verdict.stand_down.unwrap_or(verdict.blocker.as_str()))
    } else if run.stop_reason.is_some() {
        run.stop_reason
    } else if no_progress >= count("max_no_progress_continuations", NO_PROGRESS_MAX) {
        Some("no_progress")
    } else if continuations >= count("max_continuations", CONTINUATIONS_MAX).min(CONTINUATIONS_MAX) {
        Some("max_continuations")
    } else {
        None
    };
    let now = run.now.to_rfc3339_opts(SecondsFormat::Micros, false);
    let cut = |text: &str| text.chars().take(TEXT_MAX).collect::<String>();
    let mut evaluation = json!({
        "satisfied": false,
        "blocker": verdict.blocker.as_str(),
        "reason": cut(&verdict.reason),
        "evidence_summary": cut(&verdict.evidence),
        "run_id": run.id,
        "evaluated_at": now,
        "progress_key": run.progress_key,
    });
    if let Some(reason) = stand_down {
        evaluation["stand_down_reason"] = json!(reason);
    }
    let mut goal = goal.clone();
    goal["no_progress_count"] = json!(no_progress);
    goal["continuation_count"] = json!(continuations + i64::from(stand_down.is_none()));
    goal["last_evaluation"] = evaluation;
    goal["updated_at"] = json!(now);
    (goal, stand_down.is_none())
}

/// The agent's texts and tool results since the last message from anyone else.
fn progress_key(messages: &[Json]) -> String {
    let since = messages.iter().rposition(|message| kind(message) == "human").map_or(0, |at| at + 1);
    let mut hasher = blake3::Hasher::new();
    for message in &messages[since..] {
        hasher.update(line(message).as_bytes()).update(&[0]);
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

/// The thread's active goal and its objective.
fn active(session: &Session<'_>) -> Result<Option<(Json, String)>, AgentError> {
    let Some(state) = session.writer.state().filter(|state| state.next.is_empty()) else { return Ok(None) };
    let goal = state.json(CHANNEL)?.filter(|goal| goal["status"] == "active");
    Ok(goal.and_then(|goal| {
        let objective = goal["objective"].as_str().filter(|objective| !objective.is_empty())?.to_owned();
        Some((goal, objective))
    }))
}

impl Agent {
    /// Runs until the graph has nothing more to run and the thread's goal asks for nothing more. `yields` is called
    /// before the goal is evaluated: if it returns true, another run waits for the thread and takes over the goal. Not
    /// cancel-safe, like [`Agent::run`].
    ///
    /// # Errors
    /// As [`Agent::run`], and if the goal cannot be read or written, or `yields` fails.
    pub async fn work<F>(
        &self,
        session: &mut Session<'_>,
        input: Option<Input>,
        yields: impl Fn() -> F,
    ) -> Result<Ended, AgentError>
    where
        F: Future<Output = Result<bool, ObserverError>>,
    {
        let mut ended = self.run(session, input).await?;
        loop {
            if active(session)?.is_some() && yields().await.map_err(AgentError::Observer)? {
                return Ok(ended);
            }
            match self.pursue(session, &ended).await? {
                Pursuit::GoOn(input) => ended = self.run(session, Some(input.into())).await?,
                Pursuit::Done => return Ok(ended),
                Pursuit::Cancelled => return Ok(Ended::Cancelled),
            }
        }
    }

    /// Evaluates the thread's goal, if it has an active one, after a run that `ended`.
    ///
    /// # Errors
    /// [`AgentError`], if the goal cannot be read or written. A model without a verdict is not an error.
    async fn pursue(&self, session: &mut Session<'_>, ended: &Ended) -> Result<Pursuit, AgentError> {
        let Ended::Done { stop_reason, fallback: None } = ended else { return Ok(Pursuit::Done) };
        let Some((goal, objective)) = active(session)? else { return Ok(Pursuit::Done) };
        let messages = conversation(session.writer.state())?;
        let verdict = if asks(&messages) {
            Verdict::asked()
        } else {
            tokio::select! {
                biased;
                () = session.terms.cancel.cancelled() => return Ok(Pursuit::Cancelled),
                answer = self.evaluate(&objective, &messages) => {
                    session.observer.model_answered(self.model.name(), CALLER, &answer);
                    let usable = fallback_reason(&answer).is_none();
                    Some(said(&answer)).filter(|_| usable).and_then(|text| Verdict::read(&text))
                }
            }
            .unwrap_or_else(Verdict::failed)
        };
        let run = Run {
            id: &session.terms.run_id,
            now: session.writer.ids().now(),
            progress_key: progress_key(&messages),
            // The next answer may be as long again.
            stop_reason: stop_reason.as_deref().filter(|reason| *reason != LENGTH_CAPPED),
        };
        let (goal, goes_on) = evaluated(&goal, &verdict, &run);
        if goes_on {
            // As it is recorded: a judge may write at any length.
            let missing = goal["last_evaluation"]["reason"].as_str().unwrap_or_default();
            let told = format!(
                "The goal is not reached yet: {objective}\n\nWhat is missing: {missing}\n\nGo on by yourself until it is reached."
            );
            let messages = json!([message::hidden(CONTINUATION, told)]);
            return Ok(Pursuit::GoOn(Map::from_iter([
                ("messages".to_owned(), messages),
                (CHANNEL.to_owned(), goal),
            ])));
        }
        self.note(session, goal).await?;
        Ok(Pursuit::Done)
    }

    /// The answer of the judging model.
    async fn evaluate(&self, objective: &str, messages: &[Json]) -> Json {
        let lines = transcript(messages, EVIDENCE_TOKENS);
        let content = format!("The goal:\n{objective}\n\nThe conversation:\n{}", lines.join("\n"));
        ask(&self.model, CALLER, PROMPT, content).await
    }

    /// Writes the goal, in its own superstep.
    async fn note(&self, session: &mut Session<'_>, goal: Json) -> Result<(), AgentError> {
        let step = next_step(session.writer.state());
        let task = session.writer.start_task(&CHANNEL.into(), 0);
        session.observer.task_started(step, &task, TaskInput::State(session.writer.state()))?;
        let write = session.writer.write(CHANNEL, goal.clone(), false)?;
        let update = json!({ (CHANNEL): goal });
        session.observer.task_ended(step, &task, Ok(&update));
        session.writer.finish_task(task, vec![write], Durability::WithCommit).await?;
        session.commit(Source::Loop, Vec::new()).await?;
        match session.writer.state() {
            Some(state) => Ok(session.observer.committed(state)?),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn goal() -> Json {
        json!({"objective": "Ship it", "status": "active", "created_at": "c", "updated_at": "c",
               "continuation_count": 0, "max_continuations": 8,
               "no_progress_count": 0, "max_no_progress_continuations": 2})
    }

    fn not_yet() -> Verdict {
        Verdict::unfounded(Blocker::NotMetYet, "not shipped", None)
    }

    fn run(progress: &str) -> Run<'static> {
        Run { id: "r", now: DateTime::UNIX_EPOCH, progress_key: progress.to_owned(), stop_reason: None }
    }

    #[test]
    fn a_verdict_is_read_from_an_answer_and_must_be_plain() {
        let read = |json: Json| Verdict::read(&json.to_string());
        let said =
            "Here it is: {\"satisfied\": true, \"blocker\": \"none\", \"reason\": \" done \"} I hope so.";
        let verdict = Verdict::read(said).unwrap();
        assert_eq!(
            (verdict.satisfied, verdict.blocker, verdict.reason.as_str()),
            (true, Blocker::None, "done")
        );
        for blocker in Blocker::ALL {
            let verdict = read(json!({"satisfied": false, "blocker": blocker.as_str()}));
            assert_eq!(verdict.map(|verdict| verdict.blocker), Some(blocker).filter(|b| *b != Blocker::None));
        }
        for unclear in [
            json!({"satisfied": true, "blocker": "goal_not_met_yet"}),
            json!({"satisfied": false}),
            json!({"satisfied": false, "blocker": "tired"}),
            json!({"satisfied": "yes", "blocker": "none"}),
            json!({}),
        ] {
            assert_eq!(read(unclear.clone()), None, "{unclear}");
        }
        for text in ["", "yes", "}{", "{", "{satisfied: true}"] {
            assert_eq!(Verdict::read(text), None, "{text}");
        }
    }

    #[test]
    fn a_verdict_is_found_among_braces_that_are_no_part_of_it() {
        let verdict = r#"{"satisfied": false, "blocker": "goal_not_met_yet", "reason": "no {x} yet"}"#;
        let earlier = r#"{"satisfied": true, "blocker": "none"}"#;
        for text in [
            format!("The set {{a, b}} is empty.\n```json\n{verdict}\n```\nSo {{a}} is missing."),
            format!("If it were reached: {earlier}. But it is not: {verdict}"),
            format!("{{\"verdict\": {verdict}}}"),
        ] {
            let read = Verdict::read(&text).unwrap();
            assert_eq!((read.blocker, read.reason.as_str()), (Blocker::NotMetYet, "no {x} yet"), "{text}");
        }
        let unclear = format!("{earlier}, or rather {{\"satisfied\": false}}");
        assert_eq!(Verdict::read(&unclear), None);
    }

    #[test]
    fn a_reached_goal_is_cleared_and_one_that_can_be_reached_goes_on() {
        let reached = Verdict { satisfied: true, blocker: Blocker::None, ..not_yet() };
        assert_eq!(evaluated(&goal(), &reached, &run("a")), (Json::Null, false));
        let (after, goes_on) = evaluated(&goal(), &not_yet(), &run("a"));
        assert!(goes_on);
        let mut expected = goal();
        expected["continuation_count"] = json!(1);
        expected["updated_at"] = json!("1970-01-01T00:00:00.000000+00:00");
        expected["last_evaluation"] = json!({
            "satisfied": false, "blocker": "goal_not_met_yet", "reason": "not shipped", "evidence_summary": "",
            "run_id": "r", "evaluated_at": "1970-01-01T00:00:00.000000+00:00", "progress_key": "a",
        });
        assert_eq!(after, expected);
    }

    /// Evaluates until the goal is suspended; returns how often it continued, and why it stopped.
    fn pursued(mut goal: Json, progress: impl Fn(usize) -> String) -> (usize, Json) {
        for round in 0.. {
            let (next, goes_on) = evaluated(&goal, &not_yet(), &run(&progress(round)));
            if !goes_on {
                assert_eq!((&next["status"], &next["continuation_count"]), (&json!("active"), &json!(round)));
                return (round, next["last_evaluation"]["stand_down_reason"].clone());
            }
            goal = next;
        }
        unreachable!()
    }

    #[test]
    fn a_goal_has_a_bounded_number_of_continuations_and_two_without_progress() {
        let progress = |round: usize| round.to_string();
        assert_eq!(pursued(goal(), progress), (8, json!("max_continuations")));
        let mut few = goal();
        few["max_continuations"] = json!(3);
        assert_eq!(pursued(few.clone(), progress), (3, json!("max_continuations")));
        few["max_continuations"] = json!(0);
        assert_eq!(pursued(few.clone(), progress), (0, json!("max_continuations")));
        few["max_continuations"] = json!(1000);
        assert_eq!(pursued(few, progress).0, 8, "whatever the state says");
        assert_eq!(pursued(goal(), |_| "same".to_owned()), (2, json!("no_progress")));
        assert_eq!(pursued(goal(), |round| (round / 2).to_string()).0, 8, "every second one made progress");
        assert_eq!(
            pursued(json!({"objective": "x", "status": "active"}), progress).0,
            8,
            "a goal without numbers"
        );
    }

    #[test]
    fn a_goal_stands_down_for_whatever_stands_in_the_way_and_texts_are_cut() {
        for (verdict, reason) in [
            (Verdict::asked(), "needs_user_input"),
            (Verdict::failed(), "evaluation_failed"),
            (Verdict { blocker: Blocker::ExternalWait, ..not_yet() }, "external_wait"),
        ] {
            let (after, goes_on) = evaluated(&goal(), &verdict, &run("a"));
            assert_eq!((goes_on, &after["last_evaluation"]["stand_down_reason"]), (false, &json!(reason)));
            assert_eq!(after["continuation_count"], 0);
        }
        let stopped = Run { stop_reason: Some("loop_capped"), ..run("a") };
        let (after, goes_on) = evaluated(&goal(), &not_yet(), &stopped);
        assert_eq!((goes_on, &after["last_evaluation"]["stand_down_reason"]), (false, &json!("loop_capped")));
        let long = Verdict { reason: "ä".repeat(1001), evidence: "b".repeat(1001), ..not_yet() };
        let (after, _) = evaluated(&goal(), &long, &run("a"));
        for key in ["reason", "evidence_summary"] {
            assert_eq!(after["last_evaluation"][key].as_str().unwrap().chars().count(), 1000);
        }
    }

    #[test]
    fn progress_is_what_was_said_and_done_since_the_agent_was_last_told_something() {
        let say = |kind: &str, text: &str| json!({"type": kind, "content": text});
        let first = [say("human", "go"), say("ai", "I try"), say("tool", "x"), say("ai", "done")];
        let mut again = first.to_vec();
        again.push(message::hidden("n", "go on"));
        again.extend(first[1..].iter().cloned());
        assert_eq!(progress_key(&first), progress_key(&again));
        again.push(say("ai", "more"));
        assert_ne!(progress_key(&first), progress_key(&again));
        assert_eq!(progress_key(&[]).len(), 16);
    }
}
