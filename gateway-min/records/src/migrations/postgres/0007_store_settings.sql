-- What the processes that share the database should agree on.
CREATE TABLE store_settings (
    name  TEXT PRIMARY KEY NOT NULL,
    value TEXT NOT NULL
);
