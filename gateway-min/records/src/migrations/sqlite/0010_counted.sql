-- Whether a run has counted what models did for the execution: set with the run's sums, in one transaction. Those from
-- before this column were counted when they were delivered.
ALTER TABLE executions ADD COLUMN counted BOOLEAN NOT NULL DEFAULT TRUE;
