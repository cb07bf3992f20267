//! `sandbox`: where tools run. Read once at start.

use std::collections::BTreeMap;

use crate::node::Node;
use crate::secret::Secret;

/// The `use` of the local sandbox, and the ending of its longer spellings.
const LOCAL: &str = "local";
const LOCAL_CLASS: &str = "LocalSandboxProvider";

/// How many shells a sandbox image keeps open.
const MAX_SHELL_SESSIONS: &str = "MAX_SHELL_SESSIONS";

/// What tools run in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SandboxProvider {
    /// Directories on this machine.
    Local,
}

/// The `sandbox` section. Without it, tools run in the local sandbox; if the section is present, its `use` is required.
#[derive(Debug, Clone, PartialEq)]
pub struct Sandbox {
    /// What tools run in, derived from `use`.
    pub provider: SandboxProvider,
    /// Whether commands may run on this machine in the local sandbox; default false.
    pub allow_host_bash: bool,
    /// Environment variables of the commands.
    pub environment: BTreeMap<String, Secret>,
    /// The maximum output kept of a command, in characters; default 20000.
    pub bash_output_max_chars: usize,
    /// The maximum part of a file read at once, in characters; default 50000.
    pub read_file_output_max_chars: usize,
    /// The maximum length of a listing, in characters; default 20000.
    pub ls_output_max_chars: usize,
    /// Seconds a command may take; at least 1, default 600.
    pub bash_command_timeout: u64,
}

impl Default for Sandbox {
    fn default() -> Self {
        Self {
            provider: SandboxProvider::Local,
            allow_host_bash: false,
            environment: BTreeMap::new(),
            bash_output_max_chars: 20_000,
            read_file_output_max_chars: 50_000,
            ls_output_max_chars: 20_000,
            bash_command_timeout: 600,
        }
    }
}

impl Sandbox {
    /// Reads the section; `max_running` is `subagent_runtime.max_running`, for which the shells must suffice.
    pub(crate) fn read(root: &Node<'_>, max_running: u32) -> Self {
        let default = Self::default();
        if !root.has("sandbox") {
            return default;
        }
        let node = root.section("sandbox");
        let class = node.required_text("use");
        let is_local = class == LOCAL || class.ends_with(LOCAL_CLASS);
        // A missing `use` has already been reported. Do not fall back to the local sandbox: it would run on this
        // machine what was meant for a container.
        if !is_local && !class.trim().is_empty() {
            node.problem(
                "use",
                format!("no sandbox {} in this build; it supports `use: {LOCAL}`", node.shown("use")),
            );
        }
        let environment = node.variables("environment");
        check_environment(&environment, max_running, &node.section("environment"));
        Self {
            provider: SandboxProvider::Local,
            allow_host_bash: node.bool("allow_host_bash", default.allow_host_bash),
            environment,
            bash_output_max_chars: node.int("bash_output_max_chars", default.bash_output_max_chars, 0..),
            read_file_output_max_chars: node.int(
                "read_file_output_max_chars",
                default.read_file_output_max_chars,
                0..,
            ),
            ls_output_max_chars: node.int("ls_output_max_chars", default.ls_output_max_chars, 0..),
            bash_command_timeout: node.int("bash_command_timeout", default.bash_command_timeout, 1..),
        }
    }
}

/// Checks that the names of variables are names, and that both can be given to a process.
pub(super) fn check_variables(environment: &BTreeMap<String, Secret>, node: &Node<'_>) {
    for (name, value) in environment {
        if name.is_empty() || name.contains(['=', '\0']) || value.expose().contains('\0') {
            node.problem(name, "is no environment variable: its name must not be empty or contain =, and neither may contain NUL");
        }
    }
}

/// Checks the variables, and that there are shells for all subagents and for the lead agent.
fn check_environment(environment: &BTreeMap<String, Secret>, max_running: u32, node: &Node<'_>) {
    check_variables(environment, node);
    let Some(sessions) = environment.get(MAX_SHELL_SESSIONS) else { return };
    let needed = u64::from(max_running) + 1;
    let found = match sessions.expose().trim().parse::<u64>() {
        Ok(sessions) if sessions >= needed => return,
        Ok(sessions) => sessions.to_string(),
        Err(_) => "no number".to_owned(),
    };
    let why = format!("subagent_runtime.max_running is {max_running}, and the lead agent needs a shell too");
    node.problem(MAX_SHELL_SESSIONS, format!("must be at least {needed} ({why}), got {found}"));
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::testing::{assert_refused, read};
    use super::*;

    fn sandbox(section: &Value) -> Result<Sandbox, String> {
        read(&json!({ "sandbox": section }), |root| Sandbox::read(root, 3))
    }

    #[test]
    fn no_section_is_the_local_sandbox_with_the_documented_defaults() {
        let expected = Sandbox {
            provider: SandboxProvider::Local,
            allow_host_bash: false,
            environment: BTreeMap::new(),
            bash_output_max_chars: 20_000,
            read_file_output_max_chars: 50_000,
            ls_output_max_chars: 20_000,
            bash_command_timeout: 600,
        };
        assert_eq!(read(&json!({}), |root| Sandbox::read(root, 3)).unwrap(), expected);
        assert_eq!(sandbox(&json!({"use": "local"})).unwrap(), expected);
    }

    #[test]
    fn a_section_that_is_written_needs_its_use_even_when_null() {
        assert_refused(
            "sandbox",
            &[(json!(null), "use"), (json!({}), "use"), (json!({"allow_host_bash": true}), "use")],
            |root| Sandbox::read(root, 3),
        );
    }

    #[test]
    fn the_local_sandbox_has_a_long_name_and_other_sandboxes_are_refused() {
        let provider = |class: &str| sandbox(&json!({ "use": class })).map(|sandbox| sandbox.provider);
        assert_eq!(provider("pkg.sandbox.local:LocalSandboxProvider"), Ok(SandboxProvider::Local));
        let error = provider("pkg.community:AioSandboxProvider").unwrap_err();
        assert!(error.contains("AioSandboxProvider") && error.contains("use: local"), "{error}");
    }

    #[test]
    fn every_key_is_read() {
        let section = sandbox(&json!({
            "use": "local", "allow_host_bash": "true", "environment": {"TOKEN": "t", "N": 5},
            "bash_output_max_chars": 0, "read_file_output_max_chars": 2, "ls_output_max_chars": 3,
            "bash_command_timeout": 4,
        }))
        .unwrap();
        assert_eq!(section.environment["TOKEN"], Secret::new("t"));
        assert_eq!(section.environment["N"], Secret::new("5"));
        assert!(section.allow_host_bash);
        assert_eq!(
            (section.bash_output_max_chars, section.read_file_output_max_chars, section.ls_output_max_chars),
            (0, 2, 3)
        );
        assert_eq!(section.bash_command_timeout, 4);
    }

    #[test]
    fn s80_shells_must_suffice_for_the_subagents() {
        let with = |sessions: Value| {
            sandbox(&json!({"use": "local", "environment": {"MAX_SHELL_SESSIONS": sessions}}))
        };
        assert!(with(json!(4)).is_ok());
        assert!(with(json!("4")).is_ok());
        for (sessions, found) in
            [(json!(3), "3"), (json!("2"), "2"), (json!("many"), "no number"), (json!(""), "no number")]
        {
            let error = with(sessions).unwrap_err();
            let text = format!(
                "sandbox.environment.MAX_SHELL_SESSIONS: must be at least 4 (subagent_runtime.max_running is 3, and the lead \
                 agent needs a shell too), got {found}"
            );
            assert!(error.contains(&text), "{error}");
        }
    }

    #[test]
    fn a_variable_that_no_command_can_have_is_a_problem() {
        for (name, value) in [("A=B", "x"), ("", "x"), ("A", "x\0y")] {
            let error = sandbox(&json!({"use": "local", "environment": {name: value}})).unwrap_err();
            assert!(error.contains("is no environment variable"), "{error}");
        }
    }

    #[test]
    fn values_outside_their_ranges_are_problems() {
        let with = |key: &str, value: i64| json!({"use": "local", key: value});
        assert_refused(
            "sandbox",
            &[
                (with("bash_output_max_chars", -1), "bash_output_max_chars"),
                (with("read_file_output_max_chars", -1), "read_file_output_max_chars"),
                (with("ls_output_max_chars", -1), "ls_output_max_chars"),
                (with("bash_command_timeout", 0), "bash_command_timeout"),
                (with("allow_host_bash", 7), "allow_host_bash"),
            ],
            |root| Sandbox::read(root, 3),
        );
    }
}
