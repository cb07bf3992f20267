//! Draws the terminal UI.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Position, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph};

use super::state::{Picker, State, TranscriptEntry};
use super::text::{clean, graphemes, wrap};

/// How much of a tool's arguments and result is shown without `/details`, in columns.
const BRIEF: usize = 60;

/// What stands for the rest of a text.
const ELLIPSIS: &str = "...";

/// Draws the state. `transparent` keeps the terminal's background.
pub(super) fn render(state: &State, transparent: bool, frame: &mut Frame<'_>) {
    let [head, body, foot, input] = areas(frame.area());
    let bar = if transparent { Style::new() } else { Style::new().bg(Color::Blue).fg(Color::White) };
    frame.render_widget(Paragraph::new(heading(state)).style(bar.add_modifier(Modifier::BOLD)), head);
    match &state.picker {
        Some(picker) => frame.render_widget(Paragraph::new(choices(picker, body)), body),
        None => frame.render_widget(Paragraph::new(transcript(state, body)), body),
    }
    frame.render_widget(Paragraph::new(status(state)).style(Style::new().fg(Color::DarkGray)), foot);
    let block = Block::bordered();
    let inside = block.inner(input);
    let (text, column) = state.input.shown(usize::from(inside.width).saturating_sub(2));
    frame.render_widget(Paragraph::new(format!("> {text}")).block(block), input);
    if state.picker.is_none() && inside.height > 0 && inside.width > 2 {
        let column = inside.x + 2 + u16::try_from(column).unwrap_or(0);
        frame.set_cursor_position(Position::new(column.min(inside.right() - 1), inside.y));
    }
}

fn areas(area: Rect) -> [Rect; 4] {
    let rows = [Constraint::Length(1), Constraint::Min(1), Constraint::Length(1), Constraint::Length(3)];
    Layout::vertical(rows).areas(area)
}

/// How many lines of the conversation are above the screen.
pub(super) fn hidden_lines(state: &State) -> usize {
    let [_, body, ..] = areas(Rect::new(0, 0, state.size.0, state.size.1));
    let all: usize = state.entries.iter().map(|entry| lines(entry, state, body.width).len()).sum();
    all.saturating_sub(usize::from(body.height))
}

fn heading(state: &State) -> String {
    let title = state.title.as_deref().unwrap_or("New thread");
    let thread = state.thread.as_deref().map(|id| format!("  [{}]", clean(id))).unwrap_or_default();
    let model = state.model.as_deref().map(|model| format!("  {}", clean(model))).unwrap_or_default();
    format!(" {title}{thread}{model}")
}

fn status(state: &State) -> String {
    let doing = match (&state.picker, state.running) {
        (Some(_), _) => "Up/Down and Enter choose a thread, Esc goes back",
        (None, true) => "working... Esc stops",
        (None, false) => "/help lists the commands, Ctrl-C leaves",
    };
    let above =
        if state.scrolled > 0 { format!("  ({} lines below)", state.scrolled) } else { String::new() };
    format!(" {} tokens  {doing}{above}", state.usage.total_tokens)
}

/// The visible lines of the conversation: built from its end, so that a long conversation costs no more.
fn transcript(state: &State, area: Rect) -> Vec<Line<'static>> {
    let (height, mut shown) = (usize::from(area.height), Vec::new());
    for entry in state.entries.iter().rev() {
        if shown.len() >= height + state.scrolled {
            break;
        }
        shown.extend(lines(entry, state, area.width).into_iter().rev());
    }
    let mut visible: Vec<Line<'static>> = shown.into_iter().skip(state.scrolled).take(height).collect();
    visible.reverse();
    visible
}

/// An entry, followed by an empty line.
fn lines(entry: &TranscriptEntry, state: &State, width: u16) -> Vec<Line<'static>> {
    let (details, width) = (state.details, usize::from(width));
    let plain = Style::new();
    let mut lines = match entry {
        TranscriptEntry::User(text) => block("> ", text, Style::new().fg(Color::Cyan), width),
        TranscriptEntry::Assistant { text, .. } => block("  ", text.trim_end(), plain, width),
        TranscriptEntry::Notice(text) => block("- ", text, Style::new().fg(Color::Yellow), width),
        TranscriptEntry::Error(text) => block("! ", text, Style::new().fg(Color::Red), width),
        TranscriptEntry::Task { task, result, .. } => {
            let style = Style::new().fg(match task.status.as_str() {
                "asked" | "running" => Color::Magenta,
                "completed" => Color::Green,
                _ => Color::Red,
            });
            let mut lines = one_line("* ", &format!("task {}", task.line(state.hides_tokens)), style, width);
            let gray = Style::new().fg(Color::DarkGray);
            match result {
                Some(result) if details => lines.extend(block("  = ", result, gray, width)),
                _ => lines.extend(one_line("  | ", task.latest.as_deref().unwrap_or("..."), gray, width)),
            }
            lines
        }
        TranscriptEntry::Call { name, args, result, .. } => {
            let style = Style::new().fg(Color::Magenta);
            let part = |text: &str| if details { text.to_owned() } else { brief(text) };
            let mut lines = block("* ", &format!("{name} {}", part(args)), style, width);
            let result = result.as_deref().map_or_else(|| "...".to_owned(), part);
            lines.extend(block("  = ", &result, Style::new().fg(Color::DarkGray), width));
            lines
        }
    };
    lines.push(Line::default());
    lines
}

/// A wrapped text after a mark.
fn block(mark: &'static str, text: &str, style: Style, width: usize) -> Vec<Line<'static>> {
    let wrapped = wrap(text, width.saturating_sub(mark.len()));
    let marked = |(row, line): (usize, String)| {
        let before = if row == 0 { mark.to_owned() } else { " ".repeat(mark.len()) };
        Line::from(vec![Span::styled(before, style.add_modifier(Modifier::BOLD)), Span::styled(line, style)])
    };
    wrapped.into_iter().enumerate().map(marked).collect()
}

/// The beginning of a text after a mark, on one line of the screen: what changes in place takes no more room.
fn one_line(mark: &'static str, text: &str, style: Style, width: usize) -> Vec<Line<'static>> {
    let room = width.saturating_sub(mark.len() + ELLIPSIS.len());
    block(mark, &first(text, room), style, width).into_iter().take(1).collect()
}

/// The beginning of a text, on one line.
fn brief(text: &str) -> String {
    first(text, BRIEF)
}

/// The first columns of a text, without line breaks.
fn first(text: &str, most: usize) -> String {
    let (mut shown, mut taken) = (String::new(), 0);
    for (part, columns) in graphemes(&text.trim().replace('\n', " ")) {
        taken += columns;
        if taken > most {
            return shown + ELLIPSIS;
        }
        shown.push_str(&part);
    }
    shown
}

/// The threads around the selected one.
fn choices(picker: &Picker, area: Rect) -> Vec<Line<'static>> {
    let height = usize::from(area.height).max(1);
    let first = picker.selected.saturating_sub(height - 1);
    let shown = picker.threads.iter().enumerate().skip(first).take(height);
    let line = |(at, thread): (usize, &crate::client::ThreadSummary)| {
        let title = clean(thread.title.as_deref().unwrap_or("(no title)")).replace('\n', " ");
        let when = thread.updated_at.get(..16).unwrap_or_default().replace('T', " ");
        let line = Line::raw(format!(" {when}  {title}  [{}]", clean(&thread.thread_id)));
        if at == picker.selected { line.style(Style::new().add_modifier(Modifier::REVERSED)) } else { line }
    };
    shown.map(line).collect()
}
