-- Runs, and the pseudo-runs by which other writers reserve a thread.
CREATE TABLE runs (
    -- The order of admission; "newest first" does not depend on clocks.
    admission_seq         BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id                TEXT COLLATE "C" NOT NULL UNIQUE,
    thread_id             TEXT COLLATE "C" NOT NULL,
    assistant_id          TEXT,
    user_id               TEXT COLLATE "C",
    status                TEXT COLLATE "C" NOT NULL,
    operation_kind        TEXT NOT NULL,
    -- True while a pending run waits for those before it to end.
    waiting               BOOLEAN NOT NULL,
    idempotency_key       TEXT COLLATE "C",
    model_name            TEXT,
    multitask_strategy    TEXT NOT NULL,
    metadata_json         TEXT NOT NULL,
    kwargs_json           TEXT NOT NULL,
    error                 TEXT,
    stop_reason           TEXT,
    message_count         BIGINT NOT NULL DEFAULT 0,
    first_human_message   TEXT,
    last_ai_message       TEXT,
    total_input_tokens    BIGINT NOT NULL DEFAULT 0,
    total_output_tokens   BIGINT NOT NULL DEFAULT 0,
    total_tokens          BIGINT NOT NULL DEFAULT 0,
    llm_call_count        BIGINT NOT NULL DEFAULT 0,
    lead_agent_tokens     BIGINT NOT NULL DEFAULT 0,
    subagent_tokens       BIGINT NOT NULL DEFAULT 0,
    middleware_tokens     BIGINT NOT NULL DEFAULT 0,
    token_usage_by_model  TEXT NOT NULL DEFAULT '{}',
    follow_up_to_run_id   TEXT,
    owner_worker_id       TEXT COLLATE "C",
    lease_expires_at      TEXT COLLATE "C",
    cancel_action         TEXT,
    cancel_requested_at   TEXT COLLATE "C",
    created_at            TEXT COLLATE "C" NOT NULL,
    updated_at            TEXT COLLATE "C" NOT NULL
);

-- A thread has at most one operation that may write, whoever asks and from whichever process.
CREATE UNIQUE INDEX threadkeep_gateway_runs_one_active_per_thread ON runs (thread_id)
    WHERE status IN ('pending', 'running') AND NOT waiting;

CREATE UNIQUE INDEX threadkeep_gateway_runs_idempotency_key ON runs (idempotency_key);

CREATE INDEX threadkeep_gateway_runs_by_thread ON runs (thread_id, admission_seq);
