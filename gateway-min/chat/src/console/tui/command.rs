//! Slash commands.

/// A line that begins with `/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Command {
    Help,
    New,
    Clear,
    Threads,
    /// The thread with this id or title.
    Switch(String),
    /// Go on with the turn in which the thread stopped.
    Continue,
    Goal(Goal),
    /// The model to use from now on; `None` lists the models.
    Model(Option<String>),
    Tools,
    Usage,
    Details,
    Config,
    Quit,
    /// An invalid command, with the reason.
    Refused(String),
}

/// What to do with the thread's goal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Goal {
    Show,
    Set(String),
    Clear,
}

/// The commands and their descriptions.
pub(super) const HELP: [(&str, &str); 14] = [
    ("/help", "this list"),
    ("/new", "start a new thread"),
    ("/clear", "clear the screen; the thread is unchanged"),
    ("/threads", "choose a thread"),
    ("/switch THREAD", "continue the thread with this id or title"),
    ("/resume [THREAD]", "the same; without a name like /threads"),
    ("/continue", "go on with the turn in which the thread stopped"),
    ("/goal [TEXT|clear]", "show, set or clear the thread's goal"),
    ("/model [NAME]", "list the models, or switch to one"),
    ("/tools", "list the agent's tools"),
    ("/usage", "show the token usage since the start"),
    ("/details", "show or hide tool arguments and results"),
    ("/config", "show the configuration, without credentials"),
    ("/quit", "quit; Ctrl-C stops a running turn, otherwise quits"),
];

/// Commands of the service that this terminal UI does not have, each with why, or what to do instead.
const NOT_HERE: [(&str, &str); 5] = [
    ("skills", "the agent has the skills of the configuration; docs/tools.md says where they are"),
    ("mcp", "/tools lists the tools of the MCP servers in the configuration"),
    ("memory", "this gateway has no memory"),
    ("uploads", "this gateway has no uploads"),
    ("artifacts", "this gateway has no artifacts"),
];

/// Parses a line; `None` if it is a message and not a command.
pub(super) fn parse(line: &str) -> Option<Command> {
    let rest = line.trim().strip_prefix('/')?;
    let (name, argument) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let argument = Some(argument.trim()).filter(|text| !text.is_empty()).map(str::to_owned);
    Some(match (name, argument) {
        ("help" | "?", _) => Command::Help,
        ("new", _) => Command::New,
        ("clear", _) => Command::Clear,
        ("threads", _) | ("resume", None) => Command::Threads,
        ("switch" | "resume", Some(thread)) => Command::Switch(thread),
        ("switch", None) => Command::Refused("/switch needs the id or the title of a thread".to_owned()),
        ("continue", _) => Command::Continue,
        ("goal", None) => Command::Goal(Goal::Show),
        ("goal", Some(text)) if text == "clear" => Command::Goal(Goal::Clear),
        ("goal", Some(text)) => Command::Goal(Goal::Set(text)),
        ("model", name) => Command::Model(name),
        ("tools", _) => Command::Tools,
        ("usage", _) => Command::Usage,
        ("details", _) => Command::Details,
        ("config", _) => Command::Config,
        ("quit" | "exit", _) => Command::Quit,
        (name, _) => Command::Refused(match NOT_HERE.iter().find(|(missing, _)| *missing == name) {
            Some((_, why)) => format!("/{name} is not supported: {why}"),
            None => format!("unknown command /{name}; /help lists the commands"),
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_messages_commands_or_refused() {
        let refused = |text: &str| Some(Command::Refused(text.to_owned()));
        for (line, command) in [
            ("hello /new", None),
            ("", None),
            ("  /new ", Some(Command::New)),
            ("/resume", Some(Command::Threads)),
            ("/resume my trip", Some(Command::Switch("my trip".to_owned()))),
            ("/switch", refused("/switch needs the id or the title of a thread")),
            ("/goal", Some(Command::Goal(Goal::Show))),
            ("/goal clear", Some(Command::Goal(Goal::Clear))),
            ("/goal clear the table", Some(Command::Goal(Goal::Set("clear the table".to_owned())))),
            ("/model", Some(Command::Model(None))),
            ("/model m", Some(Command::Model(Some("m".to_owned())))),
            ("/exit", Some(Command::Quit)),
            (
                "/mcp x",
                refused(
                    "/mcp is not supported: /tools lists the tools of the MCP servers in the configuration",
                ),
            ),
            ("/memory", refused("/memory is not supported: this gateway has no memory")),
            ("/", refused("unknown command /; /help lists the commands")),
            ("/etc/passwd is a file", refused("unknown command /etc/passwd; /help lists the commands")),
        ] {
            assert_eq!(parse(line), command, "{line}");
        }
        for (usage, _) in HELP {
            let name = usage.split(' ').next().unwrap();
            let argument = if name == "/switch" { " x" } else { "" };
            assert!(
                !matches!(parse(&format!("{name}{argument}")), None | Some(Command::Refused(_))),
                "{name}"
            );
        }
        for (name, _) in NOT_HERE {
            assert!(matches!(parse(&format!("/{name}")), Some(Command::Refused(_))));
        }
    }
}
