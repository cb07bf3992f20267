//! The terminal UI. `state` is its state and how that changes, `view` draws it; both work without a terminal. `session`
//! handles turns, threads and goals. This file owns the terminal and the event loop.

mod command;
mod event;
mod input;
mod session;
mod state;
mod task;
#[cfg(test)]
mod tests;
mod text;
mod view;

use std::io;
use std::pin::Pin;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{
    self as keys, DisableBracketedPaste, EnableBracketedPaste, Event, KeyEventKind,
};
use ratatui::crossterm::execute;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::ChatArgs;
use super::signals::Signals;
use crate::client::{Client, ClientError, Event as TurnEvent};
use session::Session;
use state::{Action, Effect, State};

/// How long the key reader may take to notice that it is no longer needed.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The maximum number of keys or events handled between two redraws.
const BATCH: usize = 256;

/// Why the terminal UI ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum TuiError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("the terminal cannot be used: {0}")]
    Terminal(#[from] io::Error),
}

/// Runs the terminal UI until the user quits. The terminal is then restored, also after an error or a panic.
pub(super) async fn run(args: &ChatArgs, message: Option<String>) -> Result<(), TuiError> {
    let config = args.config().await?;
    let withheld = super::withheld(&config);
    let hides_tokens = !config.current_async().await.token_usage.enabled;
    let client = Client::open(args.client_options(config)).await?;
    // Report early errors on an unchanged terminal.
    let thread = args.thread(&client).await?;
    let difference = client.difference().map(str::to_owned);
    let mut session = Session::open(client).await?;
    let mut state = State { model: args.model.clone(), hides_tokens, ..State::default() };
    let notes: Vec<String> = withheld.into_iter().chain(difference).collect();
    if !notes.is_empty() {
        state.update(Action::Notice(notes.join("\n")));
    }
    if let Some(thread) = thread {
        carry_out(&mut session, &mut state, Effect::Switch(thread)).await;
    }
    let ended = async {
        // From here on, a signal does nothing else.
        let mut signals = Signals::listen();
        let asked_to_end = std::pin::pin!(async {
            signals.next().await;
        });
        let mut screen = Screen::take()?;
        talk(&mut session, &mut state, &mut screen, args.tui_transparent, message, asked_to_end).await
    }
    .await;
    session.close().await;
    ended
}

/// The terminal while the UI uses it. Restored on drop.
struct Screen(DefaultTerminal);

impl Screen {
    /// Takes over the terminal. A panic restores it before it is reported.
    fn take() -> io::Result<Self> {
        let taken = ratatui::try_init().inspect_err(|_| {
            // The terminal may be half set up.
            let _ = ratatui::try_restore();
        });
        let screen = Self(taken?);
        execute!(io::stdout(), EnableBracketedPaste)?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Best effort: restore as much as possible for whatever is printed next.
        let _ = execute!(io::stdout(), DisableBracketedPaste);
        ratatui::restore();
    }
}

/// What the event loop received.
enum Next {
    Key(Action),
    Event(Result<TurnEvent, ClientError>),
}

async fn talk(
    session: &mut Session,
    state: &mut State,
    screen: &mut Screen,
    transparent: bool,
    message: Option<String>,
    mut asked_to_end: Pin<&mut impl Future<Output = ()>>,
) -> Result<(), TuiError> {
    let mut keys = read_keys();
    let size = screen.0.size()?;
    state.update(Action::Resize(size.width, size.height));
    if let Some(message) = message {
        state.update(Action::Paste(message));
        let enter = keys::KeyEvent::from(keys::KeyCode::Enter);
        take(session, state, Action::Key(enter)).await;
    }
    loop {
        screen.0.draw(|frame| view::render(state, transparent, frame))?;
        let next = tokio::select! {
            () = &mut asked_to_end => return Ok(()),
            key = keys.recv() => Next::Key(key.unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()))?),
            item = session.next() => Next::Event(item),
        };
        let actions = match next {
            Next::Key(action) => vec![action],
            Next::Event(item) => session.happened(item).await?,
        };
        let more = std::iter::from_fn(|| keys.try_recv().ok()).take(BATCH);
        let more = more.collect::<io::Result<Vec<Action>>>()?;
        for action in actions.into_iter().chain(more) {
            if take(session, state, action).await {
                return Ok(());
            }
        }
    }
}

/// Applies an action and its effects; `true` if the user quits.
async fn take(session: &mut Session, state: &mut State, action: Action) -> bool {
    let Some(effect) = state.update(action) else {
        session.follow(state.thread.as_deref());
        return false;
    };
    let leaves = effect == Effect::Quit;
    carry_out(session, state, effect).await;
    leaves
}

async fn carry_out(session: &mut Session, state: &mut State, effect: Effect) {
    for action in session.carry_out(effect).await {
        state.update(action);
    }
}

/// Reads the terminal on its own thread, until the receiver is gone.
fn read_keys() -> UnboundedReceiver<io::Result<Action>> {
    let (sender, receiver) = unbounded_channel();
    std::thread::spawn(move || {
        while !sender.is_closed() {
            if let Err(error) = read_key(&sender) {
                let _ = sender.send(Err(error));
                return;
            }
        }
    });
    receiver
}

fn read_key(sender: &UnboundedSender<io::Result<Action>>) -> io::Result<()> {
    if !keys::poll(LOOK_EVERY)? {
        return Ok(());
    }
    let action = match keys::read()? {
        Event::Key(key) if key.kind != KeyEventKind::Release => Action::Key(key),
        Event::Paste(text) => Action::Paste(text),
        Event::Resize(columns, rows) => Action::Resize(columns, rows),
        _ => return Ok(()),
    };
    // An error means that the UI has ended.
    let _ = sender.send(Ok(action));
    Ok(())
}
