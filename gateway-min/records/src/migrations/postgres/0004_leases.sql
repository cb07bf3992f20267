-- How a run will end once all that belongs to it is written; until then it keeps its thread.
ALTER TABLE runs ADD COLUMN decided_status TEXT;

-- What is active, to be looked through for leases that are over.
CREATE INDEX threadkeep_gateway_runs_active_leases ON runs (lease_expires_at) WHERE status IN ('pending', 'running');
