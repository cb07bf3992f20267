-- Subagents that administrators define, if agent_storage.backend is db.
CREATE TABLE subagents (
    name       TEXT PRIMARY KEY NOT NULL,
    -- JSON text.
    definition TEXT NOT NULL
);
