//! One call of an external agent, from its start to the end of its last process.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value as Json, json};
use threadkeep_agent::tools::HeadAndTail;
use threadkeep_config::{AcpAgent, Hidden};
use threadkeep_processes::{Guard, Guarded, Program, SpawnError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::process::{ChildStdin, ChildStdout};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::connection::{Connection, Dialogue, RequestError, Sent};
use crate::protocol::{self, AUTH_REQUIRED, Initialized, Prompted, SessionCreated, VERSION, sign_in};

/// How long an agent has to stop by itself when its prompt is cancelled. With the time that its processes then have to end
/// it is less than three seconds.
pub(crate) const CANCEL_WITHIN: Duration = Duration::from_secs(2);

/// The longest time limit: a hundred years. A clock has no time that is much later.
const LONGEST: Duration = Duration::from_hours(100 * 365 * 24);
/// An agent that said nothing.
const NO_RESPONSE: &str = "(no response)";
/// The reason to stop of an agent that has done what it was asked for.
const END_TURN: &str = "end_turn";
/// The longest note about the reason for which an agent stopped, in characters.
const NOTE_MAX: usize = 160;
/// How much of an agent's standard error is shown.
const SAID_MAX: usize = 500;

/// What is to be done, and by whom.
pub(crate) struct Invocation<'a> {
    pub(crate) guard: &'a Guard,
    pub(crate) agent: &'a AcpAgent,
    /// What must not be shown of what it says on its standard error.
    pub(crate) hidden: &'a Hidden,
    pub(crate) prompt: &'a str,
    /// The agent's working directory: absolute, and there.
    pub(crate) directory: PathBuf,
    /// The MCP servers that it may use, as the protocol describes them.
    pub(crate) servers: &'a [Json],
    /// The longest answer, in characters.
    pub(crate) max_chars: usize,
    pub(crate) cancel: CancellationToken,
}

/// Why there is no answer. A text may quote a secret that the agent was given: show it without what is [`Hidden`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum InvocationError {
    #[error("it took longer than it may")]
    TimedOut,
    #[error("the run was cancelled")]
    Cancelled,
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("it speaks version {0} of the Agent Client Protocol; version {VERSION} is supported")]
    Version(String),
    /// One of the above, and the end of what the agent wrote to its standard error.
    #[error("{error}. The end of its standard error: {said}")]
    Explained { error: Box<InvocationError>, said: String },
}

/// A prompt that the agent works on.
struct Prompting {
    session: String,
    sent: Sent,
}

impl Invocation<'_> {
    /// Calls the agent and returns its answer. When this returns, none of its processes is left. Nothing is left either, a
    /// little later, if the future is dropped.
    pub(crate) async fn carry_out(&self) -> Result<String, InvocationError> {
        let deadline = Instant::now() + Duration::from_secs(self.agent.timeout_seconds).min(LONGEST);
        let (guarded, stdin, stdout) = self.guard.spawn(&self.program())?;
        let mut connection = Connection::new(stdout, stdin);
        let mut dialogue = Dialogue {
            approve: self.agent.auto_approve_permissions,
            said: HeadAndTail::new(self.max_chars.saturating_sub(NOTE_MAX)),
            has_said: false,
        };
        let ended = self.converse(&mut connection, &mut dialogue, deadline).await;
        let said = end(guarded, connection, self.hidden).await;
        match ended {
            Ok(stop_reason) => Ok(text(dialogue, &stop_reason)),
            Err(error @ InvocationError::Request(_)) if !said.is_empty() => {
                Err(InvocationError::Explained { error: Box::new(error), said })
            }
            Err(error) => Err(error),
        }
    }

    fn program(&self) -> Program {
        Program {
            command: self.agent.command.clone(),
            args: self.agent.args.clone(),
            env: self.agent.env.clone(),
            directory: self.directory.clone(),
        }
    }

    /// The dialogue, until the deadline or the run's cancellation, when an agent with a prompt is asked to stop.
    async fn converse<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
        &self,
        connection: &mut Connection<R, W>,
        dialogue: &mut Dialogue,
        deadline: Instant,
    ) -> Result<String, InvocationError> {
        let mut prompting = None;
        let ended = tokio::select! {
            ended = timeout_at(deadline, self.talk(connection, dialogue, &mut prompting)) => {
                ended.unwrap_or(Err(InvocationError::TimedOut))
            }
            () = self.cancel.cancelled() => Err(InvocationError::Cancelled),
        };
        if let (Err(InvocationError::TimedOut | InvocationError::Cancelled), Some(prompting)) =
            (&ended, prompting)
        {
            cancel(connection, dialogue, &prompting).await;
        }
        ended
    }

    /// The dialogue, up to the reason for which the agent stops.
    async fn talk<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
        &self,
        connection: &mut Connection<R, W>,
        dialogue: &mut Dialogue,
        prompting: &mut Option<Prompting>,
    ) -> Result<String, InvocationError> {
        let sent = connection.send("initialize", &protocol::initialize());
        let initialized = connection.answer::<Initialized>(sent, dialogue).await?;
        let Initialized { protocol_version, agent_capabilities, auth_methods } = initialized;
        if protocol_version != Some(VERSION) {
            let version = protocol_version.map_or_else(|| "no".to_owned(), |version| version.to_string());
            return Err(InvocationError::Version(version));
        }
        // Servers without a type are on standard input and output, which every agent can use.
        let can_use = |server: &&Json| server["type"].is_null() || agent_capabilities.mcp_capabilities.http;
        let servers: Vec<Json> = self.servers.iter().filter(can_use).cloned().collect();
        let params = protocol::new_session(&self.directory, &servers, self.agent.model.as_deref());
        let sent = connection.send("session/new", &params);
        let mut created = connection.answer::<SessionCreated>(sent, dialogue).await;
        if let Err(RequestError::Refused { error, .. }) = &created
            && error.code == AUTH_REQUIRED
            && let Some(method) = sign_in(&auth_methods, |name| self.agent.env.contains_key(name))
        {
            // Many agents do not look at their keys before they are asked to.
            let sent = connection.send("authenticate", &protocol::authenticate(method));
            connection.answer::<Json>(sent, dialogue).await?;
            let sent = connection.send("session/new", &params);
            created = connection.answer(sent, dialogue).await;
        }
        let SessionCreated { session_id } = created?;
        let sent = connection.send("session/prompt", &protocol::prompt(&session_id, self.prompt));
        *prompting = Some(Prompting { session: session_id, sent });
        let Prompted { stop_reason } = connection.answer(sent, dialogue).await?;
        Ok(stop_reason)
    }
}

/// Asks the agent to stop, and gives it a moment to do so. It gets no permissions any more.
async fn cancel<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    connection: &mut Connection<R, W>,
    dialogue: &mut Dialogue,
    prompting: &Prompting,
) {
    dialogue.approve = false;
    connection.notify("session/cancel", &json!({"sessionId": prompting.session}));
    // Whatever it answers, it is ended next.
    let _ = timeout(CANCEL_WITHIN, connection.answer::<Json>(prompting.sent, dialogue)).await;
}

/// Ends the agent, and returns the end of what it said on its standard error.
async fn end(guarded: Guarded, connection: Connection<ChildStdout, ChildStdin>, hidden: &Hidden) -> String {
    let mut guarded = guarded;
    drop(connection.into_writer());
    guarded.ended().await;
    // Before it is cut, which would leave a part of what is hidden.
    let said = hidden.from_cut(&guarded.said());
    let skipped = said.chars().count().saturating_sub(SAID_MAX);
    said.chars().skip(skipped).collect()
}

fn text(dialogue: Dialogue, stop_reason: &str) -> String {
    let mut text = if dialogue.has_said { dialogue.said.into_text() } else { NO_RESPONSE.to_owned() };
    if stop_reason != END_TURN {
        text.push_str("\n\n[the agent stopped early: ");
        text.extend(stop_reason.chars().take(100));
        text.push(']');
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use threadkeep_processes::ENDS_WITHIN;
    use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, DuplexStream};

    use super::*;

    const ANSWERS: [&str; 2] = [r#"{"protocolVersion":1}"#, r#"{"sessionId":"s"}"#];

    /// An agent that answers the first requests, this many, and then only a cancellation if it is `polite`.
    async fn agent(stream: DuplexStream, answers: usize, polite: bool) {
        let (reader, mut writer) = tokio::io::split(stream);
        let mut lines = BufReader::new(reader).lines();
        let mut say = async |id: usize, result: &str| {
            let line = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{result}}}\n");
            writer.write_all(line.as_bytes()).await.unwrap();
        };
        let mut heard = 0;
        while let Ok(Some(line)) = lines.next_line().await {
            if let Some(answer) = ANSWERS[..answers].get(heard) {
                say(heard, answer).await;
            }
            if polite && line.contains("session/cancel") {
                say(2, r#"{"stopReason":"cancelled"}"#).await;
            }
            heard += 1;
        }
    }

    /// How long a call of this agent takes until its processes are ended, and how it ended.
    async fn called(answers: usize, polite: bool, cancel: CancellationToken) -> (Duration, InvocationError) {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        tokio::spawn(agent(theirs, answers, polite));
        let (reader, writer) = tokio::io::split(ours);
        let mut connection = Connection::new(reader, writer);
        let mut dialogue = Dialogue { approve: false, said: HeadAndTail::new(100), has_said: false };
        let limited = AcpAgent {
            command: "unused".to_owned(),
            args: Vec::new(),
            env: BTreeMap::new(),
            description: String::new(),
            model: None,
            auto_approve_permissions: false,
            timeout_seconds: 1800,
        };
        let invocation = Invocation {
            guard: &Guard::program("unused"),
            agent: &limited,
            hidden: &Hidden::default(),
            prompt: "Do it",
            directory: "/".into(),
            servers: &[],
            max_chars: 1_000,
            cancel,
        };
        let begun = Instant::now();
        let limit = begun + Duration::from_secs(limited.timeout_seconds);
        let ended = invocation.converse(&mut connection, &mut dialogue, limit).await;
        (begun.elapsed(), ended.unwrap_err())
    }

    /// Check 12 of the design, on a clock that only waits move: an agent that hangs is let go at its limit, or two seconds
    /// later if it has a prompt, and then its processes have less than one to end.
    #[tokio::test(start_paused = true)]
    async fn s75_a_call_ends_within_its_limit_and_three_seconds() {
        let limit = Duration::from_mins(30);
        for (answers, polite, expected) in
            [(0, false, limit), (1, false, limit), (2, true, limit), (2, false, limit + CANCEL_WITHIN)]
        {
            let (took, error) = called(answers, polite, CancellationToken::new()).await;
            assert!(matches!(error, InvocationError::TimedOut), "{error}");
            // A timer fires within a millisecond.
            let late = took.checked_sub(expected).expect("not before");
            assert!(late < Duration::from_millis(5), "{answers} answers: {took:?}");
            assert!(took + ENDS_WITHIN < limit + Duration::from_secs(3), "{answers} answers: {took:?}");
        }
        let cancel = CancellationToken::new();
        cancel.cancel();
        let (took, error) = called(2, false, cancel).await;
        assert!(matches!(error, InvocationError::Cancelled), "{error}");
        assert!(took + ENDS_WITHIN < Duration::from_secs(3), "{took:?}");
    }
}
