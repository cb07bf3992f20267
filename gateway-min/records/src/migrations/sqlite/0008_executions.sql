-- Executions of subagents: a row an attempt, written before its first checkpoint.
CREATE TABLE executions (
    execution_id      TEXT NOT NULL,
    attempt           BIGINT NOT NULL,
    -- The thread and the run that delegated.
    thread_id         TEXT NOT NULL,
    run_id            TEXT NOT NULL,
    parent_execution  TEXT,
    kind              TEXT NOT NULL,
    tool_call_id      TEXT NOT NULL,
    -- The hidden thread with the subagent's checkpoints.
    child_thread      TEXT NOT NULL,
    agent_name        TEXT NOT NULL,
    -- JSON text: the definition as it was at dispatch.
    definition_json   TEXT NOT NULL,
    definition_digest TEXT NOT NULL,
    description       TEXT NOT NULL,
    status            TEXT NOT NULL,
    error             TEXT,
    stop_reason       TEXT,
    model_name        TEXT,
    -- JSON text: tokens by model.
    usage_json        TEXT NOT NULL,
    waited_ms         BIGINT,
    -- Whether the parent has stored its result.
    delivered         BOOLEAN NOT NULL,
    deadline          TEXT NOT NULL,
    created_at        TEXT NOT NULL,
    started_at        TEXT,
    completed_at      TEXT,
    PRIMARY KEY (execution_id, attempt)
);

CREATE INDEX executions_by_thread ON executions (thread_id, created_at);
