//! Compares one command of a criterion with one that ran: environment, program, arguments.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use super::runner::{Exclusion, Extra, Runner};
use super::shell::{Command, Word, assignment};

/// Whether a command that ran is the one of a criterion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Same {
    Yes,
    Unprovable,
    No,
}

/// Endings of files with tests, by which a target is known.
const SOURCES: [&str; 18] = [
    "py", "js", "jsx", "ts", "tsx", "mjs", "cjs", "go", "rs", "java", "kt", "rb", "php", "c", "cc", "cpp",
    "cs", "swift",
];

/// The program of a command: its first word that is no assignment.
pub(super) fn program(command: &Command) -> Option<&Word> {
    command.words.iter().find(|word| assignment(word).is_none())
}

/// The last part of a path.
pub(super) fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Compares the command `run` with the one that is `wanted`.
pub(super) fn compare(wanted: &Command, run: &Command) -> Same {
    let (environment, wanted_words) = split(wanted);
    let (run_environment, run_words) = split(run);
    let (Some((wanted_program, wanted_arguments)), Some((run_program, run_arguments))) =
        (wanted_words.split_first(), run_words.split_first())
    else {
        return Same::No;
    };
    if base_name(&wanted_program.value) != base_name(&run_program.value) {
        return Same::No;
    }
    let arguments = compare_arguments(wanted_program, wanted_arguments, run_arguments);
    let clear = |words: &[Word]| words.iter().all(|word| !word.is_doubtful);
    let same = environment == run_environment
        && clear(&wanted.words)
        && clear(&run.words)
        && same_program(wanted_program, run_program);
    match arguments {
        Same::Yes if !same => Same::Unprovable,
        found => found,
    }
}

/// The assignments before the program, each name with its last value, and the rest.
fn split(command: &Command) -> (BTreeMap<&str, &str>, &[Word]) {
    let count = command.words.iter().take_while(|word| assignment(word).is_some()).count();
    let (assignments, words) = command.words.split_at(count);
    (assignments.iter().filter_map(assignment).collect(), words)
}

/// Whether two programs with the same name are the same. A bare name is searched for, so a path to it may be what is
/// found; a path is that file.
fn same_program(wanted: &Word, run: &Word) -> bool {
    let normal = |path: &str| {
        let parts = Path::new(path).components().filter(|part| *part != Component::CurDir);
        parts.map(|part| part.as_os_str().to_owned()).collect::<Vec<_>>()
    };
    let climbs = |path: &str| Path::new(path).components().any(|part| part == Component::ParentDir);
    if wanted.is_glob || run.is_glob || climbs(&wanted.value) || climbs(&run.value) {
        return false;
    }
    let is_path = |word: &Word| word.value.contains('/');
    !is_path(wanted) || (is_path(run) && normal(&wanted.value) == normal(&run.value))
}

/// The arguments: those that are wanted, in order, and others only if they cannot change what is tested.
fn compare_arguments(program: &Word, wanted: &[Word], run: &[Word]) -> Same {
    let runner = Runner::of(base_name(&program.value), wanted);
    let prefix = runner.map_or(0, |runner| runner.prefix);
    let targets = runner.map(|runner| targets(runner, &wanted[prefix..])).unwrap_or_default();
    let (mut next, mut at, mut clear) = (0, 0, true);
    while at < run.len() {
        if let Some(word) = wanted.get(next)
            && word.value == run[at].value
        {
            // The shell makes names of files of a pattern, unless it is quoted.
            clear &= word.raw == run[at].raw || !(word.is_glob || run[at].is_glob);
            next += 1;
            at += 1;
            continue;
        }
        // An extra word after a flag may be the flag's value, or push its value away.
        let before = next.checked_sub(1).map(|before| wanted[before].value.as_str());
        let splits = before.is_some_and(|flag| {
            let is_whole = flag.contains('=') || runner.is_some_and(|runner| runner.is_plain_flag(flag));
            next > prefix && flag.starts_with('-') && !is_whole
        });
        let named = || wanted[prefix..next].iter().any(|word| !word.value.starts_with('-'));
        let splits = splits
            || runner.is_some_and(Runner::ends_targets_at_a_flag)
                && next > prefix
                && next < wanted.len()
                && named();
        let extra = match runner {
            Some(runner) if next >= prefix && !splits => runner.extra(run, at),
            _ => Extra::Unknown,
        };
        match extra {
            // After `--` the same words mean something else.
            Extra::Harmless(count) => {
                clear &= run[at].value != "--" || next == wanted.len();
                at += count;
            }
            Extra::Excludes(exclusion, count) => {
                clear &= !targets.is_empty() && targets.iter().all(|target| !overlaps(exclusion, target));
                at += count;
            }
            Extra::Target => {
                clear &= !targets.is_empty() && is_path_like(&run[at].value);
                at += 1;
            }
            Extra::Unknown => {
                clear = false;
                at += 1;
            }
        }
    }
    match (next == wanted.len(), clear) {
        (false, _) => Same::No,
        (true, true) => Same::Yes,
        (true, false) => Same::Unprovable,
    }
}

/// The paths that a criterion names to be tested. A word after a flag may be its value.
fn targets(runner: Runner, arguments: &[Word]) -> Vec<&str> {
    let values = || arguments.iter().map(|word| word.value.as_str());
    let follows_value_flag = |at: usize| {
        let before = at.checked_sub(1).and_then(|before| values().nth(before));
        before.is_some_and(|flag| flag.starts_with('-') && !flag.contains('=') && !runner.is_plain_flag(flag))
    };
    let is_target =
        |(at, text): &(usize, &str)| !text.starts_with('-') && is_path_like(text) && !follows_value_flag(*at);
    values().enumerate().filter(is_target).map(|(_, text)| text).collect()
}

fn is_path_like(text: &str) -> bool {
    let ending = text.rsplit_once('.').map(|(_, ending)| ending);
    text.contains('/') || text.contains("::") || ending.is_some_and(|ending| SOURCES.contains(&ending))
}

/// Whether an exclusion may leave out something of a target.
fn overlaps(exclusion: Exclusion<'_>, target: &str) -> bool {
    let file = |id: &'_ str| id.split("::").next().unwrap_or_default().to_owned();
    let target = file(target);
    match exclusion {
        Exclusion::Path(path) => {
            let (one, other) = (Path::new(path), Path::new(&target));
            let plain = |path: &Path| path.components().all(|part| matches!(part, Component::Normal(_)));
            // Anything but two plain relative paths may be the same by another spelling.
            !plain(one) || !plain(other) || one.starts_with(other) || other.starts_with(one)
        }
        // Ids are relative to a directory that pytest chooses, so only the name of the file can tell them apart.
        Exclusion::Id(id) => {
            let excluded = file(id);
            let name = base_name(&excluded);
            let is_file = |name: &str| Path::new(name).extension().is_some_and(|ending| ending == "py");
            !is_file(name)
                || !is_file(base_name(&target))
                || target.split('/').any(|part| part.starts_with(name))
        }
    }
}
