//! What the terminal UI does besides drawing: turns, threads, goals.

use futures::StreamExt as _;
use serde_json::{Map, json};

use super::command::Goal;
use super::event::{self, ViewEvent};
use super::state::{Action, Effect};
use crate::client::{Client, ClientError, Event, Listed, Turn, TurnOptions};
use crate::console::{text_of, threads};
use threadkeep_config::Config;
use threadkeep_records::{NewThread, Records, RecordsError};

/// The owner of threads created by the terminal UI.
const USER: &str = "default";
/// The maximum number of threads to choose from.
const LISTED: usize = 200;

/// Shown for a thread whose last turn was stopped or killed.
const UNFINISHED: &str = "the last turn of this thread did not end; /continue goes on with it";

/// What is cached of the thread's row.
struct Row {
    title: Option<String>,
}

/// The client and the current thread.
pub(super) struct Session {
    client: Client,
    /// The gateway's records, through which its search finds threads.
    records: Records,
    thread: Option<String>,
    /// `None` until it is read.
    row: Option<Row>,
    model: Option<String>,
    turn: Option<Turn>,
}

impl Session {
    pub(super) async fn open(client: Client) -> Result<Self, ClientError> {
        let records = client.records().await?.clone();
        Ok(Self { client, records, thread: None, row: None, model: None, turn: None })
    }

    /// Stops the turn, waits for its last writes, and closes the stores. Subagents are left to be continued.
    pub(super) async fn close(mut self) {
        self.client.stop();
        self.turn = None;
        self.client.close().await;
    }

    /// Executes an effect; returns the actions that show the result.
    pub(super) async fn carry_out(&mut self, effect: Effect) -> Vec<Action> {
        let done = match effect {
            Effect::Say(text) => return self.begin(Some(&text)).await,
            Effect::Continue => return self.begin(None).await,
            Effect::Stop => {
                if let Some(turn) = &self.turn {
                    turn.cancel();
                }
                return Vec::new();
            }
            // The event loop handles it.
            Effect::Quit => return Vec::new(),
            Effect::Switch(named) => {
                return self
                    .switch(&named)
                    .await
                    .unwrap_or_else(|error| vec![Action::Error(text_of(&error))]);
            }
            Effect::ListThreads => match self.client.listed_threads(LISTED).await {
                Ok(Listed { list, damaged }) => {
                    let unread = threads::unread(&damaged).map(Action::Error);
                    return unread.into_iter().chain([Action::Threads(list.thread_list)]).collect();
                }
                Err(error) => Err(error),
            },
            Effect::Goal(goal) => self.goal(goal).await.map(Action::Notice),
            Effect::Model(name) => Ok(self.choose(name).await),
            Effect::Tools => Ok(Action::Notice(self.tools())),
            Effect::Config => Ok(Action::Notice(described(&*self.client.config().await))),
        };
        vec![done.unwrap_or_else(|error| Action::Error(text_of(&error)))]
    }

    /// Begins a turn with this message; without one, the thread goes on where it stopped.
    async fn begin(&mut self, text: Option<&str>) -> Vec<Action> {
        // As a run reads it: an edit of the file applies from the next turn on.
        let hides_tokens = !self.client.config().await.token_usage.enabled;
        let options = TurnOptions { model_name: self.model.clone(), ..TurnOptions::default() };
        let turn = match (text, &self.thread) {
            (None, Some(thread)) => self.client.resume(thread, options),
            (text, thread) => self.client.stream(text.unwrap_or_default(), thread.as_deref(), options),
        };
        let thread = turn.thread_id().to_owned();
        if self.thread.replace(thread.clone()).is_none() {
            self.row = None;
        }
        self.turn = Some(turn);
        vec![Action::HidesTokens(hides_tokens), Action::Began(thread), Action::View(ViewEvent::RunStarted)]
    }

    /// Switches to the thread, as the view did.
    pub(super) fn follow(&mut self, thread: Option<&str>) {
        if self.thread.as_deref() != thread {
            (self.thread, self.row) = (thread.map(str::to_owned), None);
        }
    }

    /// The next event of the turn; pending forever without a turn. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<Event, ClientError> {
        let Some(turn) = &mut self.turn else { return std::future::pending().await };
        turn.next().await.unwrap_or(Err(ClientError::Died))
    }

    /// The actions that show an event.
    ///
    /// # Errors
    /// [`ClientError::Died`]: the turn's task panicked and wrote to the terminal; redraw it.
    pub(super) async fn happened(
        &mut self,
        item: Result<Event, ClientError>,
    ) -> Result<Vec<Action>, ClientError> {
        if let Err(ClientError::Died) = item {
            return Err(ClientError::Died);
        }
        if matches!(item, Ok(Event::End(_)) | Err(_)) {
            self.turn = None;
        }
        let mut actions: Vec<Action> = event::of(&item).into_iter().map(Action::View).collect();
        if let Ok(Event::Values(values)) = &item
            && let Err(error) = self.enter(values.title.as_deref()).await
        {
            let text = format!("cannot add this thread to the gateway's list: {error}");
            actions.push(Action::Error(text));
        }
        Ok(actions)
    }

    /// Adds the thread to the gateway's records, with its title.
    async fn enter(&mut self, title: Option<&str>) -> Result<(), RecordsError> {
        let Some(thread) = &self.thread else { return Ok(()) };
        let known = if let Some(row) = self.row.take() {
            row.title
        } else {
            let row = NewThread {
                thread_id: thread.clone(),
                user_id: Some(USER.to_owned()),
                metadata: Map::from_iter([("source".to_owned(), json!("tui"))]),
                ..NewThread::default()
            };
            self.records.threads().create(row).await?.row.display_name
        };
        if title.is_some() && known.as_deref() != title {
            self.records.threads().set_display_name(thread, known.as_deref(), title).await?;
        }
        self.row = Some(Row { title: title.map(str::to_owned).or(known) });
        Ok(())
    }

    async fn switch(&mut self, named: &str) -> Result<Vec<Action>, ClientError> {
        let thread = threads::named(&self.client, named).await?;
        let values = self.client.get_values(&thread).await?.unwrap_or_default();
        let unfinished = self.client.is_unfinished(&thread).await?;
        self.follow(Some(&thread));
        let notice = unfinished.then(|| Action::Notice(UNFINISHED.to_owned()));
        Ok([Action::Switched(thread, values)].into_iter().chain(notice).collect())
    }

    async fn goal(&self, goal: Goal) -> Result<String, ClientError> {
        let thread = self.thread.as_deref().unwrap_or_default();
        let shown = match goal {
            Goal::Show => self.client.get_goal(thread).await?,
            Goal::Set(objective) => Some(self.client.set_goal(thread, &objective, None).await?),
            Goal::Clear => {
                self.client.clear_goal(thread).await?;
                None
            }
        };
        let Some(goal) = shown else { return Ok("the thread has no goal".to_owned()) };
        let reason = goal["last_evaluation"]["reason"].as_str().map(|reason| format!("; {reason}"));
        let objective = goal["objective"].as_str().unwrap_or_default();
        Ok(format!("the goal is: {objective}{}", reason.unwrap_or_default()))
    }

    async fn choose(&mut self, name: Option<String>) -> Action {
        let models = self.client.models().await;
        let Some(name) = name else {
            let line = |model: &crate::client::ModelInfo| {
                format!("{}  {}", model.name, model.description.as_deref().unwrap_or(&model.model))
            };
            return Action::Notice(models.iter().map(line).collect::<Vec<_>>().join("\n"));
        };
        if !models.iter().any(|model| model.name == name) {
            return Action::Error(format!("there is no model '{name}'; /model lists the models"));
        }
        self.model = Some(name.clone());
        Action::Model(name)
    }

    fn tools(&self) -> String {
        let line =
            |(name, what): (String, String)| format!("{name}: {}", what.lines().next().unwrap_or_default());
        self.client.tools().into_iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

/// Selected settings, none of which can contain a credential. Mode and cadence are not shown anywhere.
fn described(config: &Config) -> String {
    let models: Vec<&str> = config.models.iter().map(|model| model.name.as_str()).collect();
    let on = |on: bool| if on { "on" } else { "off" };
    let lines = [
        format!("project root   {}", config.root.display()),
        format!("state          {}", config.state_dir.display()),
        format!("store          {:?}", config.database.backend).to_lowercase(),
        format!("models         {}", models.join(", ")),
        format!("titles         {}", on(config.title.enabled)),
        format!("summarization  {}", on(config.summarization.enabled)),
        format!("host shell     {}", on(config.sandbox.allow_host_bash)),
    ];
    lines.join("\n")
}
