//! Slash commands.

/// What a line that begins with `/` asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Command {
    Help,
    New,
    Clear,
    Threads,
    /// The thread with this id or title.
    Switch(String),
    Goal(Goal),
    /// The model to use from now on; none lists them.
    Model(Option<String>),
    Tools,
    Usage,
    Details,
    Config,
    Quit,
    /// Nothing: this is why.
    Refused(String),
}

/// What is to become of the thread's goal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Goal {
    Show,
    Set(String),
    Clear,
}

/// The commands with what they do.
pub(super) const HELP: [(&str, &str); 13] = [
    ("/help", "this list"),
    ("/new", "begin a new thread"),
    ("/clear", "empty the screen; the thread stays as it is"),
    ("/threads", "choose one of the threads"),
    ("/switch THREAD", "go on with the thread that has this id or title"),
    ("/resume [THREAD]", "the same; without a name as /threads"),
    ("/goal [TEXT|clear]", "show, set or clear the thread's goal"),
    ("/model [NAME]", "list the models, or use this one"),
    ("/tools", "the tools of the agent"),
    ("/usage", "what the turns since the start have cost"),
    ("/details", "show or hide what tools were asked and answered"),
    ("/config", "what is configured, without credentials"),
    ("/quit", "leave; Ctrl-C stops a turn, and leaves if there is none"),
];

/// Commands of the service that this gateway has nothing behind.
const NOT_HERE: [&str; 5] = ["skills", "mcp", "memory", "uploads", "artifacts"];

/// Reads a line; `None` if it is no command but a message.
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
        ("goal", None) => Command::Goal(Goal::Show),
        ("goal", Some(text)) if text == "clear" => Command::Goal(Goal::Clear),
        ("goal", Some(text)) => Command::Goal(Goal::Set(text)),
        ("model", name) => Command::Model(name),
        ("tools", _) => Command::Tools,
        ("usage", _) => Command::Usage,
        ("details", _) => Command::Details,
        ("config", _) => Command::Config,
        ("quit" | "exit", _) => Command::Quit,
        (name, _) if NOT_HERE.contains(&name) => {
            Command::Refused(format!("/{name} is not here: this gateway has no {name}"))
        }
        (name, _) => Command::Refused(format!("there is no command /{name}; /help lists them")),
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
            ("/mcp x", refused("/mcp is not here: this gateway has no mcp")),
            ("/", refused("there is no command /; /help lists them")),
            ("/etc/passwd is a file", refused("there is no command /etc/passwd; /help lists them")),
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
        for name in NOT_HERE {
            assert!(matches!(parse(&format!("/{name}")), Some(Command::Refused(_))));
        }
    }
}
