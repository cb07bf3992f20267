-- The newest checkpoint that the thread had when the run ended: empty if it had none, NULL while that is unknown.
ALTER TABLE runs ADD COLUMN left_checkpoint TEXT COLLATE "C";
