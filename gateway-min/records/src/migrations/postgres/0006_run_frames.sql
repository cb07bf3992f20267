-- Whether a client of another process than the run's own follows it.
ALTER TABLE runs ADD COLUMN followed BOOLEAN NOT NULL DEFAULT FALSE;

-- What followed runs stream, for those processes: the last frames of each, and for a while after its end.
CREATE TABLE run_frames (
    run_id     TEXT COLLATE "C" NOT NULL,
    thread_id  TEXT COLLATE "C" NOT NULL,
    -- The numbers of the first frame and of the one behind the last.
    first_seq  BIGINT NOT NULL,
    next_seq   BIGINT NOT NULL,
    -- JSON text: a list of frames.
    frames     TEXT NOT NULL,
    -- Whether these are the last ones of the run.
    ends       BOOLEAN NOT NULL,
    created_at TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (run_id, next_seq, first_seq)
);

CREATE INDEX threadkeep_gateway_run_frames_by_thread ON run_frames (thread_id);
