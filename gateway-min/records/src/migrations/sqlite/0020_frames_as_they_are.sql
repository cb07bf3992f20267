-- SQLite compresses nothing.
SELECT 1;
