-- Whether the run repeats a turn with an edited question: the old turn comes back unless the run succeeds.
ALTER TABLE runs ADD COLUMN edits BOOLEAN NOT NULL DEFAULT FALSE;

-- As the build before noted it.
UPDATE runs SET edits = TRUE
WHERE status IN ('pending', 'running') AND metadata_json LIKE '%"replay_kind":"edit"%';
