-- Durable batches of delegations, and their items.
CREATE TABLE subagent_batches (
    id                TEXT COLLATE "C" PRIMARY KEY NOT NULL,
    user_id           TEXT COLLATE "C",
    -- The thread, the run and the tool call that submitted it.
    thread_id         TEXT COLLATE "C" NOT NULL,
    run_id            TEXT COLLATE "C" NOT NULL,
    tool_call_id      TEXT COLLATE "C" NOT NULL,
    -- The same submission has the same key, so that repeating it is safe.
    submission_key    TEXT COLLATE "C" NOT NULL,
    title             TEXT COLLATE "C" NOT NULL,
    subagent_type     TEXT COLLATE "C" NOT NULL,
    status            TEXT COLLATE "C" NOT NULL,
    total_items       BIGINT NOT NULL,
    max_live_items    BIGINT NOT NULL,
    max_running_items BIGINT NOT NULL,
    max_attempts      BIGINT NOT NULL,
    -- JSON text for the worker; owners never see it.
    execution_spec    TEXT COLLATE "C" NOT NULL,
    created_at        TEXT COLLATE "C" NOT NULL,
    updated_at        TEXT COLLATE "C" NOT NULL,
    completed_at      TEXT COLLATE "C"
);

CREATE UNIQUE INDEX threadkeep_gateway_subagent_batches_by_submission ON subagent_batches (COALESCE(user_id, ''), submission_key);
CREATE INDEX threadkeep_gateway_subagent_batches_by_thread ON subagent_batches (thread_id, created_at);
CREATE INDEX threadkeep_gateway_subagent_batches_by_status ON subagent_batches (status, created_at);

CREATE TABLE subagent_batch_items (
    id                  TEXT COLLATE "C" PRIMARY KEY NOT NULL,
    batch_id            TEXT COLLATE "C" NOT NULL REFERENCES subagent_batches (id) ON DELETE CASCADE,
    item_key            TEXT COLLATE "C" NOT NULL,
    position            BIGINT NOT NULL,
    prompt              TEXT COLLATE "C" NOT NULL,
    -- JSON text.
    acceptance_criteria TEXT COLLATE "C",
    acceptance_verdict  TEXT COLLATE "C",
    status              TEXT COLLATE "C" NOT NULL,
    -- Claims that reached execution.
    attempt             BIGINT NOT NULL,
    lease_owner         TEXT COLLATE "C",
    lease_expires_at    TEXT COLLATE "C",
    cancel_requested_at TEXT COLLATE "C",
    model_name          TEXT COLLATE "C",
    result              TEXT COLLATE "C",
    result_preview      TEXT COLLATE "C",
    result_truncated    BOOLEAN NOT NULL,
    error               TEXT COLLATE "C",
    stop_reason         TEXT COLLATE "C",
    -- JSON text.
    token_usage         TEXT COLLATE "C",
    started_at          TEXT COLLATE "C",
    completed_at        TEXT COLLATE "C",
    created_at          TEXT COLLATE "C" NOT NULL,
    updated_at          TEXT COLLATE "C" NOT NULL,
    UNIQUE (batch_id, item_key),
    UNIQUE (batch_id, position)
);

CREATE INDEX threadkeep_gateway_subagent_batch_items_to_claim ON subagent_batch_items (batch_id, status, lease_expires_at);
CREATE INDEX threadkeep_gateway_subagent_batch_items_in_order ON subagent_batch_items (batch_id, status, position);
