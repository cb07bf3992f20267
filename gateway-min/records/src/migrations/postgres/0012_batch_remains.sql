-- The subagents' threads of deleted batch items that may have been at work: their processes may write after the deletion.
CREATE TABLE subagent_batch_remains (
    child_thread TEXT COLLATE "C" PRIMARY KEY NOT NULL,
    deleted_at   TEXT COLLATE "C" NOT NULL
);
