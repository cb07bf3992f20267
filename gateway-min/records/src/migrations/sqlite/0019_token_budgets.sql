-- The limit of tokens that binds a batch: that of the turn in which a run submitted it, or its own.
ALTER TABLE subagent_batches ADD COLUMN budget_id TEXT;
CREATE INDEX subagent_batches_by_budget ON subagent_batches (budget_id);

-- Batches from before this column share that of their run.
UPDATE subagent_batches SET budget_id = thread_id || ':' || run_id;

-- What the runs of such a turn have used of its limit themselves and with their direct subagents.
CREATE TABLE token_budgets (
    id            TEXT PRIMARY KEY NOT NULL,
    thread_id     TEXT NOT NULL,
    input_tokens  BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    total_tokens  BIGINT NOT NULL
);

CREATE INDEX token_budgets_by_thread ON token_budgets (thread_id);
