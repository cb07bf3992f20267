-- Durable batches of delegations, and their items.
CREATE TABLE subagent_batches (
    id                TEXT PRIMARY KEY NOT NULL,
    user_id           TEXT,
    -- The thread, the run and the tool call that submitted it.
    thread_id         TEXT NOT NULL,
    run_id            TEXT NOT NULL,
    tool_call_id      TEXT NOT NULL,
    -- The same submission has the same key, so that repeating it is safe.
    submission_key    TEXT NOT NULL,
    title             TEXT NOT NULL,
    subagent_type     TEXT NOT NULL,
    status            TEXT NOT NULL,
    total_items       BIGINT NOT NULL,
    max_live_items    BIGINT NOT NULL,
    max_running_items BIGINT NOT NULL,
    max_attempts      BIGINT NOT NULL,
    -- JSON text for the worker; owners never see it.
    execution_spec    TEXT NOT NULL,
    created_at        TEXT NOT NULL,
    updated_at        TEXT NOT NULL,
    completed_at      TEXT
);

CREATE UNIQUE INDEX subagent_batches_by_submission ON subagent_batches (COALESCE(user_id, ''), submission_key);
CREATE INDEX subagent_batches_by_thread ON subagent_batches (thread_id, created_at);
CREATE INDEX subagent_batches_by_status ON subagent_batches (status, created_at);

CREATE TABLE subagent_batch_items (
    id                  TEXT PRIMARY KEY NOT NULL,
    batch_id            TEXT NOT NULL REFERENCES subagent_batches (id) ON DELETE CASCADE,
    item_key            TEXT NOT NULL,
    position            BIGINT NOT NULL,
    prompt              TEXT NOT NULL,
    -- JSON text.
    acceptance_criteria TEXT,
    acceptance_verdict  TEXT,
    status              TEXT NOT NULL,
    -- Claims that reached execution.
    attempt             BIGINT NOT NULL,
    lease_owner         TEXT,
    lease_expires_at    TEXT,
    cancel_requested_at TEXT,
    model_name          TEXT,
    result              TEXT,
    result_preview      TEXT,
    result_truncated    BOOLEAN NOT NULL,
    error               TEXT,
    stop_reason         TEXT,
    -- JSON text.
    token_usage         TEXT,
    started_at          TEXT,
    completed_at        TEXT,
    created_at          TEXT NOT NULL,
    updated_at          TEXT NOT NULL,
    UNIQUE (batch_id, item_key),
    UNIQUE (batch_id, position)
);

CREATE INDEX subagent_batch_items_to_claim ON subagent_batch_items (batch_id, status, lease_expires_at);
CREATE INDEX subagent_batch_items_in_order ON subagent_batch_items (batch_id, status, position);
