-- Any number of runs may wait for a thread (`enqueue`); they get it in the order of their admission.
DROP INDEX runs_one_waiting_per_thread;

CREATE INDEX runs_waiting ON runs (thread_id, admission_seq) WHERE waiting;
