-- Of items of batches: whether the sums of the batch contain all that the attempt used. Those that ended with tokens do.
UPDATE executions SET counted = TRUE
WHERE kind = 'batch_item' AND status NOT IN ('pending', 'running') AND usage_json <> '{}';

-- The others, whose tokens a worker reads from their checkpoints.
CREATE INDEX executions_uncounted_items ON executions (completed_at) WHERE kind = 'batch_item' AND NOT counted;
