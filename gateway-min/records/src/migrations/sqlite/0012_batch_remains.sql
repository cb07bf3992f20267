-- The subagents' threads of deleted batch items that may have been at work: their processes may write after the deletion.
CREATE TABLE subagent_batch_remains (
    child_thread TEXT PRIMARY KEY NOT NULL,
    deleted_at   TEXT NOT NULL
);
