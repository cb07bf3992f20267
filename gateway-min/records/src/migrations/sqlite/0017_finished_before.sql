-- The tasks that had finished at the thread's head when the run went on from there, as a JSON array; NULL for a run that did
-- not.
ALTER TABLE runs ADD COLUMN finished_before TEXT;
