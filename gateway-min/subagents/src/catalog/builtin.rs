//! The subagents of this program: `general-purpose` and `bash`.

use threadkeep_config::Config;

use super::definition::{Definition, ModelChoice, Source};
use super::resolve::seconds;

/// The name of the general one.
pub(super) const GENERAL_PURPOSE: &str = "general-purpose";
/// The name of the one that runs commands. It exists only if the configuration allows commands.
pub(crate) const BASH: &str = "bash";

/// The names, in the order in which they are offered.
pub(super) const NAMES: [&str; 2] = [GENERAL_PURPOSE, BASH];

/// Tools that no subagent has unless the configuration says so: it cannot delegate, has no user to ask, and its result
/// is a report, not files shown to a user.
pub(crate) const DISALLOWED_TOOLS: [&str; 3] = ["task", "ask_clarification", "present_files"];

const GENERAL_PURPOSE_PROMPT: &str = "You are a subagent. Another agent gave you one task, and it sees only your final \
answer, not your steps.

- Do the whole task on your own. Nobody can answer questions: where something is unclear, choose the most sensible \
reading, and say in your answer what you assumed.
- Stay within the task. Do not start work that it does not ask for.
- Prefer looking things up with your tools over guessing. Check what you did before you report it.
- If something cannot be done, say so, with the reason and with what you found out.

End with an answer that can be used without your conversation: first the result, then what supports it, with the paths of \
files that you created or changed.";

const BASH_PROMPT: &str = "You are a subagent that runs shell commands. Another agent gave you one task, and it sees only \
your final answer, not the output of your commands.

- Commands run without a terminal and without input, and each one starts in a new shell: set variables and change \
directories within the command that needs them.
- Run commands that depend on each other one after the other. Look at the exit code and the output of each before the \
next one.
- Look before you change or delete anything, and change only what the task names.
- When a command fails, find out why. Do not repeat it unchanged.

End with a short answer: what you ran, whether it succeeded, the part of the output that matters, and what failed, with its \
message.";

/// Both, with the limits that the configuration has for built-in subagents. Overrides of single subagents are not
/// applied.
pub(super) fn definitions(config: &Config) -> [Definition; 2] {
    let general = Definition {
        name: GENERAL_PURPOSE.to_owned(),
        display_name: None,
        description: "Works on a task of several steps by itself: research, reading many files, changes that need both. \
                      Use it to keep long work out of this conversation, or to work on independent parts at once."
            .to_owned(),
        system_prompt: GENERAL_PURPOSE_PROMPT.to_owned(),
        tools: None,
        disallowed_tools: DISALLOWED_TOOLS.map(str::to_owned).into(),
        skills: None,
        model: ModelChoice::Inherit,
        max_turns: config.subagents.max_turns.unwrap_or(150),
        timeout: seconds(config.subagents.timeout_seconds),
        source: Source::Builtin,
        token_budget: config.subagent_token_budget(GENERAL_PURPOSE),
    };
    let bash = Definition {
        name: BASH.to_owned(),
        description: "Runs shell commands: builds, tests, version control, processing of files. Use it for a series of \
                      commands, or for commands with long output."
            .to_owned(),
        system_prompt: BASH_PROMPT.to_owned(),
        tools: Some(["bash", "ls", "read_file", "write_file", "str_replace"].map(str::to_owned).into()),
        max_turns: config.subagents.max_turns.unwrap_or(60),
        token_budget: config.subagent_token_budget(BASH),
        ..general.clone()
    };
    [general, bash]
}
