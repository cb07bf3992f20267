//! `threadkeep delegations`: what a thread's runs delegated to subagents, and whether the records of it are true.

use std::collections::HashMap;

use clap::{Args, Subcommand};
use serde_json::{Value as Json, json};
use threadkeep::id::{Namespace, ThreadId};
use threadkeep_records::{ExecutionRow, Executions};
use threadkeep_subagents::recheck;

use super::Exit;
use super::error::{OpsError, Result};
use super::output::{Columns, Out, number, one_line, or_dash, short, things, time};
use super::target::{StoreArgs, Target};

/// The longest description in a table.
const DESCRIPTION_CHARS: usize = 40;

/// Follow what a thread delegated to subagents: tree, show, verify.
#[derive(Debug, Subcommand)]
pub(crate) enum DelegationsCommand {
    /// Show what the runs of a thread delegated, oldest first.
    #[command(
        after_help = "Example:\n  threadkeep delegations tree my-thread\n\n--json prints one document per line."
    )]
    Tree(OfThread),
    /// Show one execution: its task, what it did, what it reported.
    #[command(
        after_help = "Example:\n  threadkeep delegations show my-thread 0ec7b888-0136-49a4-b095-626db5c77d00"
    )]
    Show {
        #[command(flatten)]
        of: OfThread,
        /// The execution, or the beginning of its id.
        #[arg(value_name = "EXECUTION")]
        execution: String,
    },
    /// Check what is recorded of executions against the checkpoints of their subagents.
    ///
    /// Reports, digests, receipts, citations, tokens and criteria about commands are computed again. Exits with 3 if
    /// something differs.
    #[command(after_help = "Example:\n  threadkeep delegations verify my-thread")]
    Verify(OfThread),
}

/// The thread, and where it is.
#[derive(Debug, Args)]
pub(crate) struct OfThread {
    /// The thread that delegated.
    #[arg(value_name = "THREAD")]
    thread: String,
    #[command(flatten)]
    store: StoreArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl DelegationsCommand {
    fn of(&self) -> &OfThread {
        match self {
            Self::Tree(of) | Self::Verify(of) | Self::Show { of, .. } => of,
        }
    }

    pub(crate) fn store(&self) -> &StoreArgs {
        &self.of().store
    }

    pub(crate) async fn run(&self, target: &Target, out: &mut Out) -> Result<Exit> {
        let of = self.of();
        let thread = ThreadId::from(of.thread.as_str());
        // A thread that does not exist is an error, not one without delegations.
        target.newest(&thread).await?;
        let Some(records) = target.needed_records()? else {
            return Err(OpsError::Unsupported(
                "executions are in the gateway's records, which are not beside this store".to_owned(),
            ));
        };
        let rows = records.executions().of_thread(&of.thread).await?;
        match self {
            Self::Tree(_) => tree(out, &rows, of.json)?,
            Self::Show { execution, .. } => {
                show(target, records.executions(), out, &rows, of, execution).await?;
            }
            Self::Verify(_) => return verify(target, out, &thread, &rows, of.json).await,
        }
        Ok(Exit::Done)
    }
}

fn tree(out: &mut Out, rows: &[ExecutionRow], json: bool) -> Result<()> {
    if json {
        for row in rows {
            out.json(&document(row))?;
        }
        return Ok(());
    }
    let mut table =
        Columns::new(&["EXECUTION", "SUBAGENT", "WORK", "STATUS", "TOKENS>", "WAITED>", "STARTED"]);
    for (depth, row) in nested(rows) {
        table.row([
            format!("{}{}", "  ".repeat(depth), row.execution_id),
            one_line(&row.agent_name),
            short(&row.description, DESCRIPTION_CHARS),
            status(row),
            or_dash(row.tokens().map(|tokens| number(tokens.total_tokens))),
            or_dash(row.waited_ms.map(|waited| format!("{waited} ms"))),
            or_dash(row.started_at.map(time)),
        ]);
    }
    out.table_or(&table, "Nothing was delegated.")?;
    Ok(())
}

/// Each row with its depth, followed by those below it. A thread may have thousands, so that none is looked for among all
/// others. What an execution delegated is below the first of its attempts.
fn nested(rows: &[ExecutionRow]) -> Vec<(usize, &ExecutionRow)> {
    let mut below = HashMap::<Option<&str>, Vec<&ExecutionRow>>::new();
    for row in rows {
        below.entry(row.parent_execution.as_deref()).or_default().push(row);
    }
    let mut nested = Vec::with_capacity(rows.len());
    let (mut parent, mut depth) = (None, 0);
    let mut waiting = Vec::<(usize, &ExecutionRow)>::new();
    loop {
        waiting.extend(below.remove(&parent).into_iter().flatten().rev().map(|row| (depth, row)));
        let Some((of, row)) = waiting.pop() else { break };
        nested.push((of, row));
        (parent, depth) = (Some(row.execution_id.as_str()), of + 1);
    }
    nested
}

fn status(row: &ExecutionRow) -> String {
    let mut text = row.status.to_string();
    if let Some(reason) = &row.stop_reason {
        text = format!("{text}, {reason}");
    }
    if row.attempt > 1 {
        text = format!("{text}, attempt {}", row.attempt);
    }
    text
}

async fn show(
    target: &Target,
    executions: &Executions,
    out: &mut Out,
    rows: &[ExecutionRow],
    of: &OfThread,
    wanted: &str,
) -> Result<()> {
    let found: Vec<&ExecutionRow> = rows.iter().filter(|row| row.execution_id.starts_with(wanted)).collect();
    if found.is_empty() {
        return Err(OpsError::Unsupported(format!(
            "the thread has no execution '{}': {} lists them",
            one_line(wanted),
            target.again.command_on("delegations tree", &of.thread)
        )));
    }
    for row in found {
        let messages = messages(target, &row.child_thread).await?;
        if of.json {
            let mut document = document(row);
            document["definition"] = json!(executions.definition(row).await?);
            document["messages"] = json!(messages);
            out.json(&document)?;
            continue;
        }
        out.line(format!("{} by {}: {}", row.execution_id, one_line(&row.agent_name), status(row)))?;
        out.line(format!("  work:        {}", one_line(&row.description)))?;
        out.line(format!("  run, call:   {}, {}", row.run_id, one_line(&row.tool_call_id)))?;
        out.line(format!("  definition:  sha256 {}", row.definition_digest))?;
        out.line(format!("  checkpoints: thread {}", row.child_thread))?;
        if let Some(error) = &row.error {
            out.line(format!("  error:       {}", one_line(error)))?;
        }
        for message in &messages {
            let kind = message["type"].as_str().unwrap_or("?");
            let calls = message["tool_calls"].as_array().map_or(0, Vec::len);
            let calls = if calls > 0 { format!(" [{}]", things(calls, "call")) } else { String::new() };
            let text = text(message);
            out.line(format!("  {kind:<6}{calls} {}", short(&text, 100)))?;
        }
    }
    Ok(())
}

async fn verify(
    target: &Target,
    out: &mut Out,
    thread: &ThreadId,
    rows: &[ExecutionRow],
    json: bool,
) -> Result<Exit> {
    let accessor = target.accessor(&Namespace::default());
    let parent = messages(target, thread.as_str()).await?;
    let mut differing = 0;
    for row in rows {
        let child = accessor.get(&ThreadId::from(row.child_thread.as_str()), None).await;
        let found = child.and_then(|child| recheck(row, child.as_ref(), &parent));
        let found = match found.map_err(OpsError::Checkpoints) {
            // It says nothing of the other subagents.
            Err(error) if error.is_of_one_thread() => {
                vec![format!("its checkpoints cannot be read: {error}")]
            }
            found => found?,
        };
        differing += usize::from(!found.is_empty());
        for text in found {
            if json {
                out.json(&json!({"execution_id": row.execution_id, "attempt": row.attempt, "found": text}))?;
            } else {
                out.line(format!("{}: {}", row.execution_id, one_line(&text)))?;
            }
        }
    }
    if json {
        out.json(&json!({"executions": rows.len(), "differing": differing}))?;
    } else if differing == 0 {
        out.line(format!("{}: what is recorded is what happened.", things(rows.len(), "execution")))?;
    } else {
        out.line(format!("{}: the records of {differing} differ.", things(rows.len(), "execution")))?;
    }
    Ok(if differing == 0 { Exit::Done } else { Exit::Found })
}

/// The text of a message; its blocks without text are left out.
fn text(message: &Json) -> String {
    match &message["content"] {
        Json::String(text) => text.clone(),
        Json::Array(blocks) => blocks.iter().filter_map(|block| block["text"].as_str()).collect(),
        _ => String::new(),
    }
}

/// The conversation at the head of a thread; empty if the thread has no checkpoint.
async fn messages(target: &Target, thread: &str) -> Result<Vec<Json>> {
    let accessor = target.accessor(&Namespace::default());
    let state = accessor.get(&ThreadId::from(thread), None).await.map_err(OpsError::Checkpoints)?;
    let messages =
        state.map(|state| state.json("messages")).transpose().map_err(OpsError::Checkpoints)?.flatten();
    Ok(messages.and_then(|messages| messages.as_array().cloned()).unwrap_or_default())
}

fn document(row: &ExecutionRow) -> Json {
    json!({
        "execution_id": row.execution_id, "attempt": row.attempt, "run_id": row.run_id,
        "parent_execution": row.parent_execution, "kind": row.kind.as_str(), "tool_call_id": row.tool_call_id,
        "agent_name": row.agent_name, "description": row.description, "status": row.status.as_str(),
        "error": row.error, "stop_reason": row.stop_reason, "model_name": row.model_name,
        "usage_by_model": row.usage, "waited_ms": row.waited_ms, "delivered": row.delivered,
        "definition_digest": row.definition_digest, "child_thread": row.child_thread,
        "created_at": row.created_at, "started_at": row.started_at, "completed_at": row.completed_at,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use chrono::DateTime;
    use proptest::prelude::*;
    use threadkeep_records::{ExecutionKind, ExecutionStatus};

    use super::*;

    fn row(id: usize, parent: Option<usize>) -> ExecutionRow {
        ExecutionRow {
            execution_id: id.to_string(),
            attempt: 1,
            thread_id: "t".to_owned(),
            run_id: "r".to_owned(),
            parent_execution: parent.map(|parent| parent.to_string()),
            kind: ExecutionKind::Task,
            tool_call_id: String::new(),
            child_thread: String::new(),
            agent_name: String::new(),
            definition: None,
            definition_digest: String::new(),
            description: String::new(),
            status: ExecutionStatus::Completed,
            error: None,
            stop_reason: None,
            model_name: None,
            usage: BTreeMap::new(),
            waited_ms: None,
            delivered: true,
            counted: true,
            deadline: DateTime::UNIX_EPOCH,
            created_at: DateTime::UNIX_EPOCH,
            started_at: None,
            completed_at: None,
        }
    }

    fn below(rows: &[ExecutionRow], parent: Option<&str>, depth: usize) -> Vec<(usize, String)> {
        let children = rows.iter().filter(|row| row.parent_execution.as_deref() == parent);
        let each = |row: &ExecutionRow| {
            let own = (depth, row.execution_id.clone());
            [vec![own], below(rows, Some(&row.execution_id), depth + 1)].concat()
        };
        children.flat_map(each).collect()
    }

    proptest! {
        #[test]
        fn each_execution_is_followed_by_those_below_it(parents in prop::collection::vec(any::<Option<prop::sample::Index>>(), 0..30)) {
            // Each is delegated by one before it, or by the run.
            let of = |(id, parent): (usize, &Option<prop::sample::Index>)| {
                row(id, parent.filter(|_| id > 0).map(|parent| parent.index(id)))
            };
            let rows: Vec<_> = parents.iter().enumerate().map(of).collect();
            let found: Vec<_> = nested(&rows).into_iter().map(|(depth, row)| (depth, row.execution_id.clone())).collect();
            prop_assert_eq!(found, below(&rows, None, 0));
        }
    }
}
