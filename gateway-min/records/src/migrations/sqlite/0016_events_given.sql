-- The highest number that the events of deleted runs of the thread had: no later event gets one of them.
ALTER TABLE threads_meta ADD COLUMN events_given BIGINT NOT NULL DEFAULT 0;
