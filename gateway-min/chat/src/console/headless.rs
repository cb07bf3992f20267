//! One turn without a terminal.

use std::io::{self, ErrorKind, IsTerminal as _, Read as _, Write as _};
use std::process::ExitCode;

use futures::StreamExt as _;
use serde_json::json;
use threadkeep_agent::model::message::{self, ERROR_TYPE};

use super::signals::{Signal, Signals};
use super::terminal::{harmless, harmless_json};
use super::{ChatArgs, NO_MESSAGE, complain, note, refuse, text_of, withheld};
use crate::client::{Answer, Client, ClientError, Event, Turn, TurnOptions, Values};

/// What is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// The answer's text.
    Text,
    /// Every event, as a line of JSON.
    Json,
}

/// Why the turn failed.
enum Failure {
    /// The reader of stdout is gone, so there is nothing left to do.
    Deaf,
    /// An error with this message.
    Said(String),
    /// A signal asked for the end of the turn, which has ended.
    Stopped(Signal),
    /// Another signal followed: the process ends at once.
    Insisted(Signal),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe => Self::Deaf,
            _ => Self::Said(format!("cannot write to standard output: {error}")),
        }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self::Said(text_of(&error))
    }
}

pub(super) async fn run(args: &ChatArgs, form: Form, message: Option<String>) -> ExitCode {
    let message = match message {
        Some(message) => Ok(message),
        None => tokio::task::spawn_blocking(piped).await.unwrap_or_else(|error| Err(error.into())),
    };
    let done = match message {
        Ok(message) if message.trim().is_empty() && !args.continues() => return refuse(NO_MESSAGE),
        Ok(message) => have(args, form, &message).await,
        Err(error) => Err(Failure::Said(format!("cannot read standard input: {error}"))),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Deaf) => ExitCode::FAILURE,
        Err(Failure::Stopped(signal) | Failure::Insisted(signal)) => ExitCode::from(signal.exit_code()),
        Err(Failure::Said(text)) => {
            if form == Form::Json {
                // Ignore the result: stdout is no longer useful either way.
                let _ = put(form, &json!({"type": "error", "data": {"message": text}}).to_string());
            }
            complain(text);
            ExitCode::FAILURE
        }
    }
}

/// The text on standard input, unless it is a terminal; without the trailing line break.
fn piped() -> io::Result<String> {
    let (mut stdin, mut text) = (io::stdin(), String::new());
    if !stdin.is_terminal() {
        stdin.read_to_string(&mut text)?;
    }
    text.truncate(text.trim_end_matches(['\r', '\n']).len());
    Ok(text)
}

/// Runs the turn, and closes the client however the turn ends. Without a message the thread goes on where it stopped.
async fn have(args: &ChatArgs, form: Form, message: &str) -> Result<(), Failure> {
    let config = args.config().await?;
    if let Some(text) = withheld(&config) {
        note(&text);
    }
    let client = Client::open(args.client_options(config)).await?;
    if let Some(text) = client.difference() {
        note(text);
    }
    let done = async {
        let thread = args.thread(&client).await?;
        let turn = match &thread {
            Some(thread) if message.trim().is_empty() => client.resume(thread, TurnOptions::default()),
            _ => client.stream(message, thread.as_deref(), TurnOptions::default()),
        };
        show(&client, form, turn).await
    }
    .await;
    if !matches!(done, Err(Failure::Insisted(_))) {
        client.close().await;
    }
    done
}

async fn show(client: &Client, form: Form, mut turn: Turn) -> Result<(), Failure> {
    let (mut answer, mut fallback) = (Answer::default(), None);
    let (mut signals, mut stopped) = (Signals::listen(), None);
    loop {
        let event = tokio::select! {
            biased;
            signal = signals.next() => {
                if stopped.replace(signal).is_some() {
                    return Err(Failure::Insisted(signal));
                }
                if signal == Signal::Terminate {
                    client.stop();
                }
                turn.cancel();
                continue;
            }
            event = turn.next() => event,
        };
        let Some(event) = event else { break };
        let event = event?;
        if form == Form::Json {
            put(form, &serde_json::to_string(&event).map_err(io::Error::from)?)?;
        }
        answer.hear(&event);
        if let Event::Values(values) = event {
            fallback = failed_call(&values);
        }
    }
    if form == Form::Text {
        put(form, &answer.into_text())?;
    }
    if let Some(signal) = stopped {
        return Err(Failure::Stopped(signal));
    }
    fallback.map_or(Ok(()), |failed| Err(Failure::Said(failed)))
}

/// The error, if the conversation ends with a fallback for a failed model call.
pub(super) fn failed_call(values: &Values) -> Option<String> {
    let last = values.messages.iter().rfind(|it| message::kind(it) == "ai" || message::is_from_user(it))?;
    let reason = message::fallback_reason(last)?;
    let kind = last["additional_kwargs"][ERROR_TYPE].as_str().unwrap_or("unknown");
    Some(format!("LLM request failed (error_type={kind}, error_reason={reason})"))
}

/// Prints a line and flushes. A pipe gets the exact text, a terminal what it does not obey.
fn put(form: Form, line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let line = match form {
        _ if !out.is_terminal() => line.into(),
        Form::Text => harmless(line),
        Form::Json => harmless_json(line),
    };
    out.write_all(line.as_bytes())?;
    out.write_all(b"\n")?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use serde_json::Value as Json;

    use super::*;

    #[test]
    fn a_fallback_is_a_failure_if_the_conversation_ends_with_it() {
        let fallback = json!({"type": "ai", "content": "sorry", "additional_kwargs": {
            "svc_error_fallback": true, "svc_error_type": "rate_limited", "svc_error_reason": "slow down"}});
        let values = |messages: Vec<Json>| Values { messages, ..Values::default() };
        let told = "LLM request failed (error_type=rate_limited, error_reason=slow down)";
        assert_eq!(failed_call(&values(vec![fallback.clone()])).as_deref(), Some(told));
        let asked = json!({"type": "human", "content": "again"});
        assert_eq!(failed_call(&values(vec![fallback, asked])), None, "it belongs to an earlier turn");
        assert_eq!(failed_call(&values(vec![])), None);
    }
}
