-- One row per conversation thread. Times are ISO-8601 text in UTC with six digits of a second and
-- the offset +00:00, so that text order is time order.
CREATE TABLE threads_meta (
    thread_id     TEXT COLLATE "C" PRIMARY KEY NOT NULL,
    assistant_id  TEXT,
    -- The owner; a row without one is shared by all users.
    user_id       TEXT COLLATE "C",
    display_name  TEXT,
    status        TEXT COLLATE "C" NOT NULL,
    metadata_json TEXT NOT NULL,
    -- Derived from metadata_json (svc_pinned is true), so that the order of a search needs no JSON.
    pinned        BOOLEAN NOT NULL,
    created_at    TEXT COLLATE "C" NOT NULL,
    updated_at    TEXT COLLATE "C" NOT NULL
);

CREATE INDEX threadkeep_gateway_threads_meta_search_order ON threads_meta (pinned DESC, updated_at DESC, thread_id DESC);
