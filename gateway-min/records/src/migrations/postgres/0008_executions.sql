-- Executions of subagents: a row an attempt, written before its first checkpoint.
CREATE TABLE executions (
    execution_id      TEXT COLLATE "C" NOT NULL,
    attempt           BIGINT NOT NULL,
    -- The thread and the run that delegated.
    thread_id         TEXT COLLATE "C" NOT NULL,
    run_id            TEXT COLLATE "C" NOT NULL,
    parent_execution  TEXT COLLATE "C",
    kind              TEXT COLLATE "C" NOT NULL,
    tool_call_id      TEXT COLLATE "C" NOT NULL,
    -- The hidden thread with the subagent's checkpoints.
    child_thread      TEXT COLLATE "C" NOT NULL,
    agent_name        TEXT COLLATE "C" NOT NULL,
    -- JSON text: the definition as it was at dispatch.
    definition_json   TEXT COLLATE "C" NOT NULL,
    definition_digest TEXT COLLATE "C" NOT NULL,
    description       TEXT COLLATE "C" NOT NULL,
    status            TEXT COLLATE "C" NOT NULL,
    error             TEXT COLLATE "C",
    stop_reason       TEXT COLLATE "C",
    model_name        TEXT COLLATE "C",
    -- JSON text: tokens by model.
    usage_json        TEXT COLLATE "C" NOT NULL,
    waited_ms         BIGINT,
    -- Whether the parent has stored its result.
    delivered         BOOLEAN NOT NULL,
    deadline          TEXT COLLATE "C" NOT NULL,
    created_at        TEXT COLLATE "C" NOT NULL,
    started_at        TEXT COLLATE "C",
    completed_at      TEXT COLLATE "C",
    PRIMARY KEY (execution_id, attempt)
);

CREATE INDEX threadkeep_gateway_executions_by_thread ON executions (thread_id, created_at);
