-- Frames are read once or twice and deleted soon: Postgres would take three quarters of the time of an insert to compress them.
ALTER TABLE run_frames ALTER COLUMN frames SET STORAGE EXTERNAL;
