//! The commands that a child ran: what its `bash` calls recorded.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use threadkeep_agent::model::message;

use crate::bounds::{first, last};

/// The maximum number of executions that are kept, the newest.
pub const MAX_EXECUTIONS: usize = 20;
/// The maximum length of a recorded command, in characters.
const MAX_COMMAND_CHARS: usize = 500;
/// The maximum length of the recorded end of an output, in characters.
pub(super) const MAX_TAIL_CHARS: usize = 1_000;
/// The names of tools that run commands.
const TOOLS: [&str; 2] = ["bash", "bash_tool"];

/// Whether a command succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecutionStatus {
    /// It ended with exit code 0.
    Success,
    /// It ended otherwise.
    Error,
}

/// One command that ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BashExecution {
    /// The tool message that reports it.
    pub message_id: String,
    /// The id that the model gave the call.
    pub tool_call_id: String,
    /// The tool.
    pub tool_name: String,
    /// The command, or the beginning of a long one.
    pub command: String,
    /// Whether that is only its beginning.
    pub command_truncated: bool,
    /// The end of its output.
    pub output_tail: String,
    /// Whether it succeeded.
    pub status: ExecutionStatus,
    /// What says so: its exit code.
    pub status_marker: Option<String>,
    /// Whether its shell also ran other commands; `None` if that is not known.
    pub shell_persistent: Option<bool>,
}

impl BashExecution {
    /// What `result`, the tool message of `call`, records. `None` if the tool runs no commands.
    ///
    /// The status is the exit code that the tool reports as data, never something in the text. A tool that reports none
    /// is not ours, so nothing is known of its shell.
    fn of(call: &Value, result: &Value) -> Option<Self> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let tool_name = call["name"].as_str().filter(|name| TOOLS.contains(name))?;
        let command = call["args"]["command"].as_str()?;
        let exit_code = result["artifact"].get("exit_code");
        let succeeded = exit_code.map_or(result["status"] == "success", |code| code == 0);
        let kept = first(command, MAX_COMMAND_CHARS);
        Some(Self {
            message_id: text(&result["id"]),
            tool_call_id: text(&result["tool_call_id"]),
            tool_name: tool_name.to_owned(),
            command: kept.to_owned(),
            command_truncated: kept.len() < command.len(),
            output_tail: last(&message::text(result), MAX_TAIL_CHARS).to_owned(),
            status: if succeeded { ExecutionStatus::Success } else { ExecutionStatus::Error },
            status_marker: exit_code.map(|code| match code.as_i64() {
                Some(code) => format!("exit code {code}"),
                None => "no exit code".to_owned(),
            }),
            shell_persistent: exit_code.map(|_| false),
        })
    }
}

/// The newest executions of a child, oldest first. It grows with the conversation and does not shrink with it: after a
/// compaction the conversation no longer has the early ones.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BashEvidence(Vec<BashExecution>);

impl BashEvidence {
    /// Adds the executions in `messages` that are newer than those it has. Providers repeat the ids of calls, so a result
    /// is known by the id of its message, and belongs to the last call before it with its call id.
    pub fn add(&mut self, messages: &[Value]) {
        let results = messages.iter().enumerate().filter(|(_, message)| message::kind(message) == "tool");
        let found = results.filter_map(|(at, result)| {
            let earlier = messages[..at].iter().rev().flat_map(message::tool_calls);
            let call = earlier.into_iter().find(|call| call["id"] == result["tool_call_id"])?;
            BashExecution::of(call, result)
        });
        let mut found: Vec<BashExecution> = found.collect();
        // What comes before one that is known was added once, and perhaps given up since: it must not come back as new.
        let new = found.iter().rposition(|execution| self.0.contains(execution)).map_or(0, |last| last + 1);
        self.0.extend(found.drain(new..));
        let excess = self.0.len().saturating_sub(MAX_EXECUTIONS);
        self.0.drain(..excess);
    }

    /// The executions, oldest first.
    pub fn executions(&self) -> &[BashExecution] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn call(id: &str, tool: &str, command: &str) -> Value {
        json!({"type": "ai", "content": "", "tool_calls": [{"id": id, "name": tool, "args": {"command": command}}]})
    }

    fn result(message: &str, id: &str, code: &Value, output: &str) -> Value {
        json!({
            "type": "tool", "id": message, "tool_call_id": id, "status": "success", "content": output,
            "artifact": {"exit_code": code},
        })
    }

    fn of(messages: &[Value]) -> Vec<BashExecution> {
        let mut evidence = BashEvidence::default();
        evidence.add(messages);
        evidence.0
    }

    #[test]
    fn an_execution_is_recorded_with_its_exit_code() {
        let found =
            of(&[call("c", "bash", "pytest"), result("m", "c", &json!(3), "1 failed\n[exit code 3]")]);
        assert_eq!(
            json!(found),
            json!([{
                "message_id": "m", "tool_call_id": "c", "tool_name": "bash", "command": "pytest",
                "command_truncated": false, "output_tail": "1 failed\n[exit code 3]", "status": "error",
                "status_marker": "exit code 3", "shell_persistent": false,
            }])
        );
        let stopped = of(&[call("c", "bash", "pytest"), result("m", "c", &Value::Null, "3 passed")]);
        assert_eq!(stopped[0].status, ExecutionStatus::Error, "killed, whatever it printed");
        assert_eq!(stopped[0].status_marker.as_deref(), Some("no exit code"));
    }

    #[test]
    fn nothing_is_known_of_the_shell_of_another_tool_and_other_tools_are_ignored() {
        let mut foreign = result("m", "c", &Value::Null, "3 passed\nExit Code: 0");
        foreign["artifact"] = Value::Null;
        let found = of(&[call("c", "bash_tool", "pytest"), foreign]);
        assert_eq!((found[0].shell_persistent, found[0].status_marker.as_deref()), (None, None));
        assert_eq!(of(&[call("c", "ls", "pytest"), result("m", "c", &json!(0), "")]), []);
        assert_eq!(of(&[result("m", "c", &json!(0), "")]), [], "a result without its call");
    }

    #[test]
    fn long_commands_and_outputs_are_cut_and_say_so() {
        let command = |count: usize| format!("pytest {}", "\u{e9}".repeat(count - 7));
        let run = |count| {
            of(&[call("c", "bash", &command(count)), result("m", "c", &json!(0), &"x".repeat(1_001))])
        };
        assert_eq!((run(500)[0].command_truncated, run(501)[0].command_truncated), (false, true));
        assert_eq!(run(501)[0].command.chars().count(), 500);
        assert_eq!(run(500)[0].output_tail.len(), 1_000);
    }

    /// Bug 13, of evidence: a provider starts the numbers of its calls again in each answer.
    #[test]
    fn results_with_the_same_call_id_are_told_apart_and_keep_their_order() {
        let messages = [
            call("call_0", "bash", "pytest a"),
            result("m1", "call_0", &json!(0), "1 passed"),
            call("call_0", "bash", "pytest b"),
            result("m2", "call_0", &json!(1), "1 failed"),
        ];
        let commands: Vec<String> = of(&messages).into_iter().map(|execution| execution.command).collect();
        assert_eq!(commands, ["pytest a", "pytest b"]);
    }

    /// Scenario 29.
    #[test]
    fn evidence_from_before_a_compaction_remains_and_the_newest_twenty_are_kept() {
        let run = |number: usize| {
            let id = format!("m{number}");
            [call("c", "bash", &format!("pytest {number}")), result(&id, "c", &json!(0), "1 passed")]
        };
        let mut evidence = BashEvidence::default();
        evidence.add(&run(0));
        evidence.add(&[run(0), run(1)].concat());
        evidence.add(&run(2));
        let commands = |evidence: &BashEvidence| {
            evidence.executions().iter().map(|execution| execution.command.clone()).collect::<Vec<_>>()
        };
        assert_eq!(
            commands(&evidence),
            ["pytest 0", "pytest 1", "pytest 2"],
            "the conversation has only the last"
        );
        evidence.add(&(3..25).flat_map(run).collect::<Vec<_>>());
        assert_eq!(commands(&evidence).len(), 20);
        assert_eq!(commands(&evidence)[0], "pytest 5");
    }

    /// The newest run decides, so an early one must not come back as new when the conversation is read again.
    #[test]
    fn an_execution_that_was_given_up_does_not_come_back() {
        let run = |number: usize| {
            let id = format!("m{number}");
            [call("c", "bash", &format!("pytest {number}")), result(&id, "c", &json!(0), "1 passed")]
        };
        let conversation: Vec<Value> = (0..30).flat_map(run).collect();
        let mut evidence = BashEvidence::default();
        for so_far in 1..=30 {
            evidence.add(&conversation[..so_far * 2]);
            evidence.add(&conversation[..so_far * 2]);
            let newest = evidence.executions().last().map(|execution| execution.command.clone());
            assert_eq!(newest, Some(format!("pytest {}", so_far - 1)));
        }
        let commands: Vec<_> = evidence.executions().iter().map(|e| e.command.clone()).collect();
        assert_eq!(commands, (10..30).map(|number| format!("pytest {number}")).collect::<Vec<_>>());
    }
}
