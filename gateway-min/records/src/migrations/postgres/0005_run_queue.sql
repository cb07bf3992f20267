-- Any number of runs may wait for a thread (`enqueue`); they get it in the order of their admission.
CREATE INDEX threadkeep_gateway_runs_waiting ON runs (thread_id, admission_seq) WHERE waiting;
