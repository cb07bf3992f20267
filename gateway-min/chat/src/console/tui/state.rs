//! The state of the terminal UI and its changes: without a terminal, a client or a clock.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::Value as Json;
use threadkeep_agent::model::message;
use threadkeep_subagents::ledger::TASK;

use super::command::{self, Command, Goal};
use super::event::ViewEvent;
use super::input::Input;
use super::task::Task;
use super::text::clean;
use super::view;
use crate::client::{ThreadSummary, Usage, Values};

/// Shown when a command is refused because a turn is running.
const BUSY: &str = "a turn is running; Esc stops it";

/// An entry of the conversation view. Texts contain no control characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TranscriptEntry {
    User(String),
    Assistant {
        id: String,
        text: String,
    },
    Call {
        id: String,
        name: String,
        args: String,
        result: Option<String>,
    },
    /// A call of the tool `task`.
    Task {
        id: String,
        task: Task,
        result: Option<String>,
    },
    Notice(String),
    Error(String),
}

/// An input from the user or the agent.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Action {
    Key(KeyEvent),
    Paste(String),
    /// The size of the terminal: columns and rows.
    Resize(u16, u16),
    View(ViewEvent),
    /// The turn runs on this thread.
    Began(String),
    /// The user switched to this thread, with these values.
    Switched(String, Values),
    Threads(Vec<ThreadSummary>),
    /// The model for future turns.
    Model(String),
    /// Whether the configuration hides the tokens of delegations.
    HidesTokens(bool),
    Notice(String),
    Error(String),
}

/// What to do beyond changing the view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Effect {
    /// Send this message on the thread.
    Say(String),
    /// Go on with the thread's last turn.
    Continue,
    /// Stop the turn.
    Stop,
    /// Switch to the thread with this id or title.
    Switch(String),
    ListThreads,
    Goal(Goal),
    Model(Option<String>),
    Tools,
    Config,
    Quit,
}

/// The threads to choose from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Picker {
    pub(super) threads: Vec<ThreadSummary>,
    pub(super) selected: usize,
}

/// The state of the terminal UI.
#[derive(Debug, Default)]
pub(super) struct State {
    /// `None` before the first message.
    pub(super) thread: Option<String>,
    pub(super) title: Option<String>,
    /// `None` for the first configured model.
    pub(super) model: Option<String>,
    pub(super) entries: Vec<TranscriptEntry>,
    pub(super) input: Input,
    /// Whether a turn is running.
    pub(super) running: bool,
    /// Whether tool arguments and results are shown in full.
    pub(super) details: bool,
    /// Whether the lines of delegations are without tokens (`token_usage.enabled: false`).
    pub(super) hides_tokens: bool,
    /// Of all turns since the start.
    pub(super) usage: Usage,
    /// How many lines the view is scrolled up from the end.
    pub(super) scrolled: usize,
    pub(super) picker: Option<Picker>,
    /// Columns and rows.
    pub(super) size: (u16, u16),
}

impl State {
    /// Applies an action; returns what else to do.
    pub(super) fn update(&mut self, action: Action) -> Option<Effect> {
        match action {
            Action::Key(key) => return self.key(key),
            Action::Paste(text) => self.input.insert(&text),
            Action::Resize(columns, rows) => {
                self.size = (columns, rows);
                self.scroll(0);
            }
            Action::View(event) => self.show(event),
            Action::Began(thread) => self.thread = Some(thread),
            Action::Switched(thread, values) => self.switched(thread, &values),
            Action::Threads(threads) if threads.is_empty() => self.notice("there are no threads yet"),
            Action::Threads(threads) => self.picker = Some(Picker { threads, selected: 0 }),
            Action::Model(name) => {
                self.notice(&format!("switched to model {name}"));
                self.model = Some(name);
            }
            Action::HidesTokens(hides) => self.hides_tokens = hides,
            Action::Notice(text) => self.notice(&text),
            Action::Error(text) => self.add(TranscriptEntry::Error(clean(&text))),
        }
        None
    }

    /// Adds a message from the gateway or the UI itself.
    fn notice(&mut self, text: &str) {
        self.add(TranscriptEntry::Notice(clean(text)));
    }

    fn add(&mut self, entry: TranscriptEntry) {
        self.entries.push(entry);
    }

    fn show(&mut self, event: ViewEvent) {
        match event {
            ViewEvent::RunStarted => self.running = true,
            ViewEvent::AssistantDelta { id, text } => {
                let text = clean(&text);
                match self.entries.last_mut() {
                    Some(TranscriptEntry::Assistant { id: last, text: shown }) if *last == id => {
                        shown.push_str(&text);
                    }
                    _ => self.add(TranscriptEntry::Assistant { id, text }),
                }
            }
            ViewEvent::ToolCall { id, name, args } => self.add(call(id, &name, &args)),
            ViewEvent::ToolResult { call, message } => self.answered(&call, &message),
            ViewEvent::Task { call, event } => {
                if let Some(TranscriptEntry::Task { task, .. }) = self.call(&call) {
                    task.follow(&event);
                }
            }
            ViewEvent::Title(title) => self.title = Some(clean(&title).replace('\n', " ")),
            ViewEvent::Usage(usage) => {
                self.usage.input_tokens += usage.input_tokens;
                self.usage.output_tokens += usage.output_tokens;
                self.usage.total_tokens += usage.total_tokens;
            }
            ViewEvent::AssistantError(text) => self.add(TranscriptEntry::Error(clean(&text))),
            ViewEvent::RunEnded => self.running = false,
        }
    }

    /// Adds a tool's result to its call.
    fn answered(&mut self, answers: &str, message: &Json) {
        let text = clean(&message::text(message));
        match self.call(answers) {
            Some(TranscriptEntry::Call { result, .. }) => *result = Some(text),
            Some(TranscriptEntry::Task { task, result, .. }) => {
                task.answered(message);
                *result = Some(text);
            }
            _ => {}
        }
    }

    /// The newest call with this id: providers repeat the ids of calls.
    fn call(&mut self, call: &str) -> Option<&mut TranscriptEntry> {
        let is_it = |entry: &&mut TranscriptEntry| matches!(entry, TranscriptEntry::Call { id, .. } | TranscriptEntry::Task { id, .. } if id == call);
        self.entries.iter_mut().rev().find(is_it)
    }

    fn switched(&mut self, thread: String, values: &Values) {
        self.forget();
        self.thread = Some(thread);
        self.title = values.title.as_deref().map(|title| clean(title).replace('\n', " "));
        for message in &values.messages {
            let id = |key: &str| message[key].as_str().unwrap_or_default().to_owned();
            let text = clean(&message::text(message));
            match message::kind(message) {
                "human" if message::is_from_user(message) => self.add(TranscriptEntry::User(text)),
                "ai" => {
                    if !text.is_empty() {
                        self.add(TranscriptEntry::Assistant { id: id("id"), text });
                    }
                    let calls = message::tool_calls(message).iter();
                    for asked in calls.chain(message::invalid_tool_calls(message)) {
                        let text = |key: &str| asked[key].as_str().unwrap_or_default();
                        self.add(call(text("id").to_owned(), text("name"), &asked["args"]));
                    }
                }
                "tool" => self.answered(&id("tool_call_id"), message),
                _ => {}
            }
        }
    }

    /// Clears the view, for another thread.
    fn forget(&mut self) {
        self.entries.clear();
        (self.thread, self.title, self.scrolled, self.picker) = (None, None, 0, None);
    }

    fn key(&mut self, key: KeyEvent) -> Option<Effect> {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if control => Some(if self.running { Effect::Stop } else { Effect::Quit }),
            KeyCode::Char('d') if control => Some(Effect::Quit),
            _ if self.picker.is_some() => self.pick(key.code),
            KeyCode::Esc => self.running.then_some(Effect::Stop),
            KeyCode::PageUp => self.scroll(self.page()),
            KeyCode::PageDown => self.scroll(-self.page()),
            KeyCode::Up => self.scroll(1),
            KeyCode::Down => self.scroll(-1),
            KeyCode::Enter if !key.modifiers.contains(KeyModifiers::ALT) => self.enter(),
            _ => {
                self.input.key(key);
                None
            }
        }
    }

    fn page(&self) -> isize {
        isize::from(i16::try_from(self.size.1 / 2).unwrap_or(i16::MAX)).max(1)
    }

    /// Scrolls the view up by this many lines, within its ends.
    fn scroll(&mut self, by: isize) -> Option<Effect> {
        let most = view::hidden_lines(self);
        self.scrolled = self.scrolled.saturating_add_signed(by).min(most);
        None
    }

    fn pick(&mut self, key: KeyCode) -> Option<Effect> {
        let picker = self.picker.as_mut()?;
        match key {
            KeyCode::Up => picker.selected = picker.selected.saturating_sub(1),
            KeyCode::Down => picker.selected = (picker.selected + 1).min(picker.threads.len() - 1),
            KeyCode::Esc => self.picker = None,
            KeyCode::Enter => {
                let picker = self.picker.take()?;
                return picker.threads.get(picker.selected).map(|it| Effect::Switch(it.thread_id.clone()));
            }
            _ => {}
        }
        None
    }

    /// Enter was pressed.
    fn enter(&mut self) -> Option<Effect> {
        let line = self.input.take();
        let text = line.trim();
        if text.is_empty() {
            return None;
        }
        self.scrolled = 0;
        let Some(asked) = command::parse(text) else {
            if self.running {
                self.input.insert(&line);
                self.notice(BUSY);
                return None;
            }
            self.add(TranscriptEntry::User(clean(text)));
            return Some(Effect::Say(text.to_owned()));
        };
        // It may be a message that begins with a path.
        if matches!(asked, Command::Refused(_)) && text[1..].contains(|c: char| c == '/' || c.is_whitespace())
        {
            self.input.insert(&line);
        }
        self.command(asked)
    }

    fn command(&mut self, asked: Command) -> Option<Effect> {
        let moves = matches!(
            asked,
            Command::New
                | Command::Clear
                | Command::Threads
                | Command::Switch(_)
                | Command::Continue
                | Command::Goal(_)
        );
        if self.running && moves {
            self.notice(BUSY);
            return None;
        }
        match asked {
            Command::Help => {
                let widest = command::HELP.iter().map(|(usage, _)| usage.len()).max().unwrap_or(0);
                let lines = command::HELP.map(|(usage, does)| format!("{usage:widest$}  {does}"));
                self.notice(&lines.join("\n"));
            }
            Command::New => {
                self.forget();
                self.notice("your next message starts a new thread");
            }
            Command::Clear => (self.entries, self.scrolled) = (Vec::new(), 0),
            Command::Threads => return Some(Effect::ListThreads),
            Command::Switch(thread) => return Some(Effect::Switch(thread)),
            Command::Goal(_) | Command::Continue if self.thread.is_none() => {
                self.notice("there is no thread yet: send a message first");
            }
            Command::Continue => return Some(Effect::Continue),
            Command::Goal(goal) => return Some(Effect::Goal(goal)),
            Command::Model(name) => return Some(Effect::Model(name)),
            Command::Tools => return Some(Effect::Tools),
            Command::Usage => {
                let Usage { input_tokens, output_tokens, total_tokens } = self.usage;
                self.notice(&format!(
                    "{total_tokens} tokens: {input_tokens} asked, {output_tokens} answered"
                ));
            }
            Command::Details => {
                self.details = !self.details;
                self.scroll(0);
            }
            Command::Config => return Some(Effect::Config),
            Command::Quit => return Some(Effect::Quit),
            Command::Refused(why) => self.notice(&why),
        }
        None
    }
}

fn call(id: String, name: &str, args: &Json) -> TranscriptEntry {
    if name == TASK {
        return TranscriptEntry::Task { id, task: Task::asked(args), result: None };
    }
    let args = match args {
        Json::String(text) => clean(text),
        other => clean(&other.to_string()),
    };
    TranscriptEntry::Call { id, name: clean(name), args, result: None }
}
