-- The event feed of the threads.
CREATE TABLE run_events (
    id             INTEGER PRIMARY KEY,
    thread_id      TEXT NOT NULL,
    run_id         TEXT NOT NULL,
    user_id        TEXT,
    event_type     TEXT NOT NULL,
    category       TEXT NOT NULL,
    -- JSON text.
    content        TEXT NOT NULL,
    event_metadata TEXT NOT NULL,
    -- 1, 2, 3 ... within the thread, without gaps.
    seq            BIGINT NOT NULL,
    created_at     TEXT NOT NULL
);

CREATE UNIQUE INDEX run_events_seq ON run_events (thread_id, seq);

CREATE INDEX run_events_by_run ON run_events (thread_id, run_id, seq);

-- A run has one delivery receipt.
CREATE UNIQUE INDEX run_events_one_delivery ON run_events (run_id) WHERE event_type = 'run.delivery';
