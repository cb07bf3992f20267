"""Errors whose remedy is another one than a backup, and what they say to do in Python."""

from __future__ import annotations

import sqlite3
import uuid
from pathlib import Path

import aiosqlite
import psycopg
import pytest
from langgraph.checkpoint.sqlite import SqliteSaver as TheirSqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver as TheirAsyncSqliteSaver

from kit import at, made, put, read
from threadkeep import (
    CorruptError,
    HistoryLostError,
    InvalidInputError,
    NewerFormatError,
    ThreadkeepError,
    UnavailableError,
)
from threadkeep.langgraph import AsyncPostgresSaver, AsyncSqliteSaver, PostgresSaver, SqliteSaver

# "THKP", which marks a database of Threadkeep.
APPLICATION = 0x54484B50


def test_a_store_of_a_newer_version_says_to_upgrade(tmp_path: Path, postgres_url: str) -> None:
    path = tmp_path / "newer.db"
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute("PRAGMA user_version = 1000")
    connection.close()
    with pytest.raises(NewerFormatError, match="format version 1000.*upgrade threadkeep"):
        SqliteSaver(path).setup()
    schema = f"t{uuid.uuid4().hex}"
    with PostgresSaver.from_conn_string(postgres_url, schema=schema) as saver:
        saver.setup()
        put(saver, at(), made({"a": 1}))
    with psycopg.connect(postgres_url, autocommit=True) as server:
        server.execute(f"UPDATE {schema}.threadkeep_format SET version = 1000".encode())
    with (
        pytest.raises(NewerFormatError, match="format version 1000.*upgrade threadkeep"),
        PostgresSaver.from_conn_string(postgres_url, schema=schema) as saver,
    ):
        saver.setup()


def test_a_history_that_the_server_lost_says_to_repeat_what_is_missing(postgres_url: str) -> None:
    schema = f"t{uuid.uuid4().hex}"
    with (
        PostgresSaver.from_conn_string(postgres_url, schema=schema) as saver,
        psycopg.connect(postgres_url, autocommit=True) as server,
    ):
        saver.setup()
        kept = put(saver, at(), made({"a": 1}))
        tables = server.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)).fetchall()
        for (table,) in tables:
            server.execute(f"CREATE TABLE {schema}.backup_{table} AS TABLE {schema}.{table}".encode())
        lost = put(saver, kept, made({"a": 2}))
        # As a server is after a backup was restored.
        names = ", ".join(f"{schema}.{table}" for (table,) in tables)
        server.execute(f"TRUNCATE {names} CASCADE".encode())
        for (table,) in tables:
            server.execute(f"INSERT INTO {schema}.{table} OVERRIDING SYSTEM VALUE TABLE {schema}.backup_{table}".encode())
        with pytest.raises(HistoryLostError, match="read the thread again and repeat what is missing"):
            put(saver, lost, made({"a": 3}))
        assert read(saver, at()).config == kept
        again = put(saver, kept, made({"a": 2}))
        assert read(saver, at()).config == again


def test_no_remedy_of_theirs_is_a_backup() -> None:
    for error in (HistoryLostError, NewerFormatError):
        assert issubclass(error, ThreadkeepError) and not issubclass(error, CorruptError)
        assert error.__doc__ and "Restore a backup" not in error.__doc__


def test_a_file_of_langgraphs_saver_says_how_its_threads_are_moved(tmp_path: Path) -> None:
    path = str(tmp_path / "theirs.db")
    with TheirSqliteSaver.from_conn_string(path) as theirs:
        put(theirs, at(), made({"a": 1}))
    with pytest.raises(InvalidInputError, match="another program.*`threadkeep import-langgraph` moves its threads"):
        SqliteSaver(path).setup()
    with TheirSqliteSaver.from_conn_string(path) as theirs:
        assert read(theirs, at()).checkpoint["channel_values"] == {"a": 1}


async def test_a_connection_to_a_file_of_langgraphs_saver_says_how_its_threads_are_moved(tmp_path: Path) -> None:
    path = str(tmp_path / "theirs.db")
    async with TheirAsyncSqliteSaver.from_conn_string(path) as theirs:
        await theirs.aput(at(), made({"a": 1}), {"step": 1}, {"a": 1})
    async with aiosqlite.connect(path) as connection:
        saver = AsyncSqliteSaver(connection)
        with pytest.raises(InvalidInputError, match="another program.*`threadkeep import-langgraph` moves its threads"):
            await saver.setup()
    async with TheirAsyncSqliteSaver.from_conn_string(path) as theirs:
        found = await theirs.aget_tuple(at())
        assert found is not None and found.checkpoint["channel_values"] == {"a": 1}


async def test_a_database_without_tables_says_to_call_setup(postgres_url: str) -> None:
    schema = f"t{uuid.uuid4().hex}"
    says = r"the tables are missing.*saver\.setup\(\)"
    with PostgresSaver.from_conn_string(postgres_url, schema=schema) as saver:
        with pytest.raises(UnavailableError, match=says):
            saver.get_tuple(at())
        saver.setup()
        assert saver.get_tuple(at()) is None
    async with AsyncPostgresSaver.from_conn_string(postgres_url, schema=f"{schema}b") as other:
        with pytest.raises(UnavailableError, match=says):
            await other.aget_tuple(at())
