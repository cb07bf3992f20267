//! Compares the command of a criterion with a command line that ran.

use super::arguments::{self, Same};
use super::line::{changes_shell, is_proven, is_silent};
use super::shell::{self, Command, Line};

/// What a recorded command line is to a criterion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Match {
    /// It ran the criterion's command.
    Yes {
        /// Whether its output is that of the criterion's command alone.
        attributable: bool,
    },
    /// It may have run it.
    Unprovable,
    /// It ran something else.
    No,
}

/// Programs that run what their arguments say.
const WRAPPERS: [&str; 28] = [
    "bash", "sh", "dash", "zsh", "ksh", "eval", "exec", "command", "builtin", "env", "sudo", "su", "nice",
    "nohup", "timeout", "stdbuf", "setsid", "script", "xargs", "parallel", "watch", "find", "docker", "uv",
    "uvx", "poetry", "npx", "pipenv",
];

/// Compares the `criterion` with the `executed` line, which `succeeded` or not.
pub(super) fn compare(criterion: &str, executed: &str, succeeded: bool) -> Match {
    match (shell::parse(criterion), shell::parse(executed)) {
        (Some(wanted), Some(line)) => compare_lines(&wanted, &line, succeeded),
        // Equal texts do the same, whatever it is.
        _ if same_text(criterion, executed) => {
            Match::Yes { attributable: !executed.contains(['<', '>', '|']) }
        }
        (Some(wanted), None) if names(&wanted).iter().any(|name| mentions(executed, name)) => {
            Match::Unprovable
        }
        _ => Match::No,
    }
}

fn compare_lines(wanted: &Line, line: &Line, succeeded: bool) -> Match {
    let (count, total) = (wanted.commands.len(), line.commands.len());
    if count == 0 {
        return Match::No;
    }
    for start in (0..=total.saturating_sub(count)).rev().filter(|start| start + count <= total) {
        let run = &line.commands[start..start + count];
        match same_commands(&wanted.commands, run) {
            Same::No => {}
            // What follows it decides the exit code and adds to the output.
            _ if start + count < total => return Match::Unprovable,
            Same::Unprovable => return Match::Unprovable,
            Same::Yes => return in_context(wanted, line, start, succeeded),
        }
    }
    let names = names(wanted);
    let hides = |command: &Command| {
        let Some(program) = arguments::program(command) else { return false };
        program.is_doubtful
            || (is_wrapper(arguments::base_name(&program.value))
                && command.words.iter().any(|word| names.iter().any(|name| mentions(&word.value, name))))
    };
    if line.commands.iter().any(hides) { Match::Unprovable } else { Match::No }
}

/// The commands are the same; whether they ran, and printed what was recorded, depends on those around them.
fn in_context(wanted: &Line, line: &Line, start: usize, succeeded: bool) -> Match {
    let (before, run) = line.commands.split_at(start);
    let unclear = wanted.ends_in_background
        || line.ends_in_background
        || before.iter().any(changes_shell)
        || !is_proven(&wanted.commands, line, start, succeeded);
    if unclear {
        return Match::Unprovable;
    }
    let redirected = run.last().is_none_or(|last| !last.redirections.is_empty());
    Match::Yes { attributable: !redirected && before.iter().all(is_silent) }
}

fn same_commands(wanted: &[Command], run: &[Command]) -> Same {
    let mut all = Same::Yes;
    for (at, (wanted_one, run_one)) in wanted.iter().zip(run).enumerate() {
        let is_last = at + 1 == wanted.len();
        match arguments::compare(wanted_one, run_one) {
            Same::No => return Same::No,
            Same::Unprovable => all = Same::Unprovable,
            // The last one's redirections only make the output something else's.
            Same::Yes if !is_last && wanted_one.redirections != run_one.redirections => {
                all = Same::Unprovable;
            }
            Same::Yes => {}
        }
    }
    all
}

/// The programs that a line runs, without their directories.
fn names(line: &Line) -> Vec<&str> {
    let programs = line.commands.iter().filter_map(arguments::program);
    programs.map(|program| arguments::base_name(&program.value)).collect()
}

fn is_wrapper(program: &str) -> bool {
    WRAPPERS.contains(&program) || program.starts_with("python")
}

/// Whether a word of `text` is `name`.
fn mentions(text: &str, name: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
    text.match_indices(name).any(|(at, _)| {
        !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_')
            && !text[at + name.len()..].starts_with(part)
    })
}

/// Whether two lines are the same text, but for space where space does not matter.
fn same_text(one: &str, other: &str) -> bool {
    let (one, other) = (one.trim(), other.trim());
    let words =
        |text: &str| text.split([' ', '\t']).filter(|word| !word.is_empty()).map(str::to_owned).collect();
    let matters = |text: &str| text.contains(['\'', '"', '\\', '\n']);
    one == other || (!matters(one) && !matters(other) && Vec::<String>::eq(&words(one), &words(other)))
}
