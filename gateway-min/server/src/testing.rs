//! What the tests of this crate need from inside.

use std::sync::Arc;

use serde_json::{Map, json};

use crate::app::App;
use crate::auth::Principal;
use crate::runs::admission::OnThread;
use crate::runs::request::{
    Delegation, OnDisconnect, RunConfig, RunInput, RunOptions, RunRequest, StreamMode,
};

/// A finished turn of another agent, as threads of gateways with several agents have them. Returns the run's id.
///
/// # Errors
/// The text of the refusal.
pub async fn turn_of(app: &Arc<App>, thread: &str, agent: &str, text: &str) -> Result<String, String> {
    let message = json!({"type": "human", "content": text, "id": app.ids.text()});
    let request = RunRequest {
        assistant_id: Some(agent.to_owned()),
        agent: Some(agent.to_owned()),
        input: RunInput::Values(Map::from_iter([("messages".to_owned(), json!([message]))])),
        metadata: Map::new(),
        config: RunConfig { recursion_limit: 100, ..RunConfig::default() },
        delegation: Delegation::default(),
        checkpoint: None,
        options: RunOptions {
            stream_modes: vec![StreamMode::Values],
            on_disconnect: OnDisconnect::Continue,
            ..RunOptions::default()
        },
        kwargs: json!({}),
    };
    let caller = Principal::single_user();
    let created = app.runs.create(thread, OnThread::Existing(&caller), request, None, None).await;
    let created = created.map_err(|error| error.to_string())?;
    created.stream.ended().await;
    app.runs.ended(&created.run.run_id).await.map_err(|error| error.to_string())?;
    Ok(created.run.run_id)
}

/// An execution of a subagent for a thread, by a run that has no row.
#[cfg(test)]
pub(crate) async fn execution_of(
    records: &threadkeep_records::Records,
    thread: &str,
) -> Result<threadkeep_records::ExecutionRow, threadkeep_records::RecordsError> {
    use threadkeep_records::{Delegating, ExecutionKind, NewExecution};
    let new = NewExecution {
        execution_id: "e".into(),
        thread_id: thread.into(),
        run_id: "r".into(),
        delegating: Delegating::Unrecorded,
        parent_execution: None,
        kind: ExecutionKind::Task,
        tool_call_id: "c".into(),
        agent_name: "general-purpose".into(),
        definition: Map::new(),
        definition_digest: String::new(),
        description: "work".into(),
        deadline: records.now(),
    };
    Ok(records.executions().open(new).await?.row)
}
