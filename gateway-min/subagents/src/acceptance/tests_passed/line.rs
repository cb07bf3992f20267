//! What the commands around others mean: whether those ran, and whether these printed something.

use std::path::{Component, Path};

use super::arguments::program;
use super::shell::{Command, Joint, Line, assignment};
use super::summary;

/// Where tools of other systems find a thread's files.
const VIRTUAL: [&str; 2] = ["/mnt/user-data/workspace", "/mnt/user-data/outputs"];

/// Whether the recorded outcome proves that the commands from `start` on ran, as the joints between the `wanted` ones
/// ask for.
pub(super) fn is_proven(wanted: &[Command], line: &Line, start: usize, succeeded: bool) -> bool {
    let commands = &line.commands;
    if commands.iter().any(|command| command.joint == Joint::Background) {
        return false;
    }
    let within = wanted.iter().zip(&commands[start..]).skip(1);
    let kept = |(wanted, run): (&Command, &Command)| match (wanted.joint, run.joint) {
        (Joint::Sequence, Joint::Sequence | Joint::And) | (Joint::And, Joint::And) => true,
        // A criterion's `&&` that ran as `;`, and what a pipe or `||` leaves open.
        _ => false,
    };
    if !within.into_iter().all(kept) {
        return false;
    }
    // The commands that can keep those from `start` on from running: the ones of the same list. The last command of a
    // pipe always runs.
    let first = (0..=start).rev().find(|at| matches!(commands[*at].joint, Joint::Start | Joint::Sequence));
    let first = first.unwrap_or_default();
    let joints = || (first + 1..commands.len()).map(|at| (at, commands[at].joint));
    // The outcome is that of the last list only.
    let last_list = joints().rfind(|(_, joint)| *joint == Joint::Sequence).map_or(first, |(at, _)| at);
    let mut ands = joints().filter(|(_, joint)| *joint == Joint::And);
    let ors = joints().filter(|(_, joint)| *joint == Joint::Or).count();
    match ors {
        0 => ands.next().is_none_or(|(at, _)| succeeded && at > last_list),
        // `a || b`: if the whole failed, both ran. What is more than that is not worth proving.
        1 => !succeeded && ands.next().is_none() && last_list == first && commands[start].joint == Joint::Or,
        _ => false,
    }
}

/// Builtins that change what later commands are or do, or whether they run.
const CHANGE_THE_SHELL: [&str; 21] = [
    ".", "alias", "break", "continue", "declare", "enable", "eval", "exec", "exit", "export", "hash", "kill",
    "local", "read", "readonly", "return", "set", "shopt", "source", "trap", "unset",
];

/// Whether a command changes the shell for later ones: its variables, its options, or whether it goes on.
pub(super) fn changes_shell(command: &Command) -> bool {
    command.words.iter().any(|word| assignment(word).is_some())
        || program(command).is_some_and(|program| CHANGE_THE_SHELL.contains(&program.value.as_str()))
}

/// Whether a command surely prints nothing that looks like a summary: only `cd` to a directory of the thread does.
pub(super) fn is_silent(command: &Command) -> bool {
    let [cd, target] = command.words.as_slice() else { return false };
    let is_literal = !target.is_doubtful && !target.is_glob && !target.value.is_empty();
    cd.raw == "cd"
        && command.redirections.is_empty()
        && is_literal
        && is_of_thread(&target.value)
        // `cd` prints its argument when it fails.
        && !target.value.lines().any(summary::resembles)
}

/// Whether a directory is one of the thread's, by its text. The working directory of a command is the thread's.
fn is_of_thread(directory: &str) -> bool {
    let path = Path::new(directory);
    // `cd -` goes anywhere; a colon or a backslash is a path of another system.
    let plain = !directory.starts_with('-') && !directory.contains([':', '\\']);
    let below = VIRTUAL.iter().find_map(|root| path.strip_prefix(root).ok()).unwrap_or(path);
    plain && below.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
}

#[cfg(test)]
mod tests {
    use super::super::shell::parse;
    use super::*;

    fn silent(text: &str) -> bool {
        is_silent(&parse(text).unwrap().commands[0])
    }

    #[test]
    fn only_cd_into_the_thread_is_silent() {
        for text in [
            "cd sub",
            "cd ./a/b",
            "cd 'my dir'",
            "cd /mnt/user-data/workspace",
            "cd /mnt/user-data/outputs/x",
            "cd .",
        ] {
            assert!(silent(text), "{text}");
        }
        for text in [
            "cd",
            "cd a b",
            "cd -",
            "cd ..",
            "cd a/../..",
            "cd /",
            "cd /tmp",
            "cd ~",
            "cd $X",
            "cd a*",
            "cd -P a",
            "cd ''",
            "cd a > b",
            "X=1 cd a",
            "pushd a",
            "true",
            "echo",
            "'cd' a",
            "cd '3 passed'",
            "cd /mnt/user-data",
            "cd /mnt/user-data/uploads",
            "cd /mnt/user-data/workspace/../../x",
            "cd 'OK'",
            "cd 'a\nok done'",
        ] {
            assert!(!silent(text), "{text}");
        }
    }

    /// Bug 28.
    #[test]
    fn a_windows_target_is_not_in_scope() {
        for text in ["cd C:/Users", "cd 'C:\\Users'", "cd D:", "cd '\\\\server\\share'"] {
            assert!(!silent(text), "{text}");
        }
    }
}
