-- The event feed of the threads.
CREATE TABLE run_events (
    id             BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    thread_id      TEXT COLLATE "C" NOT NULL,
    run_id         TEXT COLLATE "C" NOT NULL,
    user_id        TEXT COLLATE "C",
    event_type     TEXT COLLATE "C" NOT NULL,
    category       TEXT NOT NULL,
    -- JSON text.
    content        TEXT NOT NULL,
    event_metadata TEXT NOT NULL,
    -- 1, 2, 3 ... within the thread, without gaps.
    seq            BIGINT NOT NULL,
    created_at     TEXT COLLATE "C" NOT NULL
);

CREATE UNIQUE INDEX threadkeep_gateway_run_events_seq ON run_events (thread_id, seq);

CREATE INDEX threadkeep_gateway_run_events_by_run ON run_events (thread_id, run_id, seq);

-- A run has one delivery receipt.
CREATE UNIQUE INDEX threadkeep_gateway_run_events_one_delivery ON run_events (run_id) WHERE event_type = 'run.delivery';
