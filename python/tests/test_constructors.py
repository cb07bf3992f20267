"""What LangGraph's savers are made from: done, or refused with what to do instead."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import aiosqlite
import psycopg
import pytest
from langgraph.types import Command
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from graphs import conversation, shown
from kit import at, made, patiently, put, read
from threadkeep import InvalidInputError, UnavailableError
from threadkeep.langgraph import AsyncPostgresSaver, AsyncSqliteSaver, PostgresSaver, SqliteSaver


def works(saver: Any) -> None:
    thread = uuid.uuid4().hex
    config = put(saver, at(thread), made({"a": [1]}))
    assert read(saver, config).checkpoint["channel_values"] == {"a": [1]}
    saver.close()


async def works_in_a_loop(saver: Any) -> None:
    thread = uuid.uuid4().hex
    config = await saver.aput(at(thread), made({"a": [1]}), {"step": 1}, {"a": 1})
    found = await saver.aget_tuple(config)
    assert found.checkpoint["channel_values"] == {"a": [1]}
    await saver.aclose()


def test_sqlite_savers_are_made_from_paths_and_connections(tmp_path: Path) -> None:
    works(SqliteSaver(tmp_path / "a.db"))
    works(SqliteSaver(str(tmp_path / "a.db")))
    connection = sqlite3.connect(tmp_path / "a.db", check_same_thread=False)
    saver = SqliteSaver(connection)
    works(saver)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
    # As programs do when they end.
    saver.conn.close()
    assert not hasattr(SqliteSaver(tmp_path / "a.db"), "conn")
    works(SqliteSaver(sqlite3.connect(":memory:")))
    with pytest.raises(TypeError, match="path of a file or a connection of sqlite3.*not int"):
        SqliteSaver(1)  # type: ignore[arg-type]


def test_a_connection_may_make_anything_of_rows_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    connection = sqlite3.connect(path)
    connection.row_factory = lambda _, row: {"row": row}
    connection.text_factory = bytes
    saver = SqliteSaver(connection)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
    config = put(saver, at(), made({"a": [1]}))
    saver.close()
    with SqliteSaver.from_conn_string(str(path)) as again:
        assert read(again, config).checkpoint["channel_values"] == {"a": [1]}


@pytest.mark.parametrize("before", ["PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL", "SELECT * FROM sqlite_master"])
def test_a_connection_that_was_used_leaves_the_log_to_the_saver(before: str, tmp_path: Path) -> None:
    path, left = tmp_path / "a.db", tmp_path / "left? #1.db"
    with SqliteSaver.from_conn_string(str(path)) as saver:
        config = put(saver, at(), made({"a": [{"text": "x" * 9000}]}))
        # As a process leaves them that does not close its saver.
        for end in ("", "-wal"):
            subprocess.run(["cp", f"{path}{end}", f"{left}{end}"], check=True)
    connection = sqlite3.connect(left)
    connection.execute(before).fetchall()
    saver = SqliteSaver(connection)
    assert read(saver, config).checkpoint["channel_values"] == {"a": [{"text": "x" * 9000}]}
    saver.close()


# Holds the lock of a file until its input ends.
HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=600, isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
connection.execute("ROLLBACK")
"""


@pytest.mark.parametrize("connect", [sqlite3.connect, aiosqlite.connect], ids=["sqlite3", "aiosqlite"])
async def test_a_saver_waits_for_a_lock_as_long_as_its_connection_says(connect: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    hasty = SqliteSaver(sqlite3.connect(path, timeout=0))
    patient = AsyncSqliteSaver(connect(path, timeout=600))
    hasty.setup()
    await patient.setup()
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin and holder.stdout
        assert holder.stdout.readline() == "held\n"
        # If both waited for five seconds, this one would give up first.
        waiting = asyncio.create_task(patient.aput(at("patient"), made({"a": [1]}), {"step": 1}, {"a": 1}))
        await asyncio.sleep(0)
        says = r"another process holds the lock.*a longer timeout: SqliteSaver\(sqlite3\.connect\(path, timeout="
        with pytest.raises(UnavailableError, match=says):
            await asyncio.to_thread(put, hasty, at("hasty"), made({"a": [1]}))
        assert not waiting.done()
        holder.stdin.close()
        config = await waiting
    assert read(hasty, config).checkpoint["channel_values"] == {"a": [1]}
    assert patiently(lambda: put(hasty, at("hasty"), made({"a": [1]})))
    hasty.close()
    await patient.aclose()


def test_a_relative_path_is_that_of_the_directory_where_the_saver_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(here)
    saver, other = SqliteSaver("a.db"), AsyncSqliteSaver("a.db")
    os.chdir(elsewhere)
    config = put(saver, at(), made({"a": 1}))
    assert asyncio.run(other.aget_tuple(config)) is not None
    asyncio.run(other.aclose())

    def child() -> None:
        # It opens the file again.
        put(saver, config, made({"a": 2}))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(600)
    assert process.exitcode == 0
    assert read(saver, at()).checkpoint["channel_values"] == {"a": 2}
    saver.close()
    assert not list(elsewhere.iterdir())


async def test_setup_of_a_saver_for_event_loops_is_awaited(tmp_path: Path) -> None:
    saver = AsyncSqliteSaver(tmp_path / "a.db")
    await saver.setup()
    await saver.setup()
    assert (tmp_path / "a.db").exists()
    await works_in_a_loop(saver)


async def test_a_graph_runs_in_the_block_of_a_connection_of_aiosqlite(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    config: Any = {"configurable": {"thread_id": "t"}}
    async with aiosqlite.connect(path) as connection:
        graph = conversation(AsyncSqliteSaver(connection))
        await graph.ainvoke({"messages": [("user", "Hello")]}, config)
        asked = shown(await graph.aget_state(config))
        assert asked["next"] == ("ask",)
    # Nobody has closed the first saver, and the end of the block finds its connection closed.
    async with aiosqlite.connect(path) as connection:
        graph = conversation(AsyncSqliteSaver(connection))
        assert shown(await graph.aget_state(config)) == asked
        await graph.ainvoke(Command(resume="Bye"), config)
        said = shown(await graph.aget_state(config))
        assert said["log"][-1] == "said Bye" and said["next"] == ()
    with SqliteSaver.from_conn_string(str(path)) as saver:
        assert shown(conversation(saver).get_state(config)) == said


async def test_a_connection_of_aiosqlite_may_be_awaited_or_not(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    awaited = await aiosqlite.connect(path)
    await works_in_a_loop(AsyncSqliteSaver(awaited))
    with pytest.raises(ValueError, match="no active connection"):
        await awaited.execute("SELECT 1")
    saver = AsyncSqliteSaver(aiosqlite.connect(path))
    await saver.setup()
    await works_in_a_loop(saver)
    # As programs do when they end.
    await saver.conn.close()
    await awaited.close()
    closed = await aiosqlite.connect(path)
    await closed.close()
    with pytest.raises(ValueError, match="connection of aiosqlite is closed: pass one that is open.*or the path"):
        AsyncSqliteSaver(closed)
    with pytest.raises(TypeError, match="path of a file or a connection of aiosqlite or sqlite3.*not int"):
        AsyncSqliteSaver(1)  # type: ignore[arg-type]


async def test_a_connection_of_aiosqlite_that_cannot_be_opened_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    before = set(threading.enumerate())
    with pytest.raises(sqlite3.OperationalError, match="unable to open database file"):
        AsyncSqliteSaver(aiosqlite.connect(tmp_path / "none" / "a.db"))
    # Its own thread ends in order, too.
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(600)
            assert not thread.is_alive()
    assert not raised


def test_a_saver_on_a_connection_of_aiosqlite_needs_no_event_loop(tmp_path: Path) -> None:
    saver = AsyncSqliteSaver(aiosqlite.connect(tmp_path / "a.db"))
    config = put(saver, at(), made({"a": [1]}))
    works(copy.copy(saver))
    again = AsyncSqliteSaver(tmp_path / "a.db")
    assert read(again, config).checkpoint["channel_values"] == {"a": [1]}
    again.close()


async def test_calls_may_block_the_event_loop_of_a_connection_of_aiosqlite(tmp_path: Path) -> None:
    async with aiosqlite.connect(tmp_path / "a.db") as connection:
        works(AsyncSqliteSaver(connection))


async def test_several_savers_are_made_from_one_connection_of_aiosqlite(tmp_path: Path) -> None:
    async with aiosqlite.connect(tmp_path / "a.db") as connection:
        config = await AsyncSqliteSaver(connection).aput(at(), made({"a": [1]}), {"step": 1}, {"a": 1})
        # As in each request of a server.
        for _ in range(3):
            saver = AsyncSqliteSaver(connection)
            assert read(saver, config).checkpoint["channel_values"] == {"a": [1]}
            await saver.aclose()


async def test_a_connection_of_aiosqlite_to_memory_is_one_of_a_store_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with aiosqlite.connect(":memory:") as connection:
        await works_in_a_loop(AsyncSqliteSaver(connection))
        # An empty one in its place would not be what the first one has.
        with pytest.raises(ValueError, match="connection of aiosqlite is closed"):
            AsyncSqliteSaver(connection)
    assert not list(tmp_path.iterdir())


async def test_first_calls_come_at_once_and_one_is_cancelled(tmp_path: Path) -> None:
    async with aiosqlite.connect(tmp_path / "a.db") as connection:
        saver = AsyncSqliteSaver(connection)

        def begun(thread: str) -> asyncio.Task[Any]:
            return asyncio.create_task(saver.aput(at(thread), made({"a": [thread]}), {"step": 1}, {"a": 1}))

        cancelled = begun("cancelled")
        others = [begun(f"t{number}") for number in range(16)]
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        for number, config in enumerate(await asyncio.gather(*others)):
            assert read(saver, config).checkpoint["channel_values"] == {"a": [f"t{number}"]}
        await saver.aclose()


async def test_a_connection_of_aiosqlite_is_closed_between_the_calls_of_others(tmp_path: Path) -> None:
    path = tmp_path / "a.db"

    async def write(thread: str) -> None:
        config = at(thread)
        for number in range(1, 21):
            config = await saver.aput(config, made({"a": number}, {"a": number}), {"step": number}, {"a": number})

    async with AsyncSqliteSaver.from_conn_string(str(path)) as saver:
        tasks = [asyncio.create_task(write(f"t{number}")) for number in range(4)]
        for _ in range(10):
            await asyncio.sleep(0)
            other = AsyncSqliteSaver(aiosqlite.connect(path))
            await other.aget_tuple(at("t0"))
            await other.aclose()
        await asyncio.gather(*tasks)
        for number in range(4):
            assert read(saver, at(f"t{number}")).checkpoint["channel_values"] == {"a": 20}


async def test_python_reads_a_file_only_while_no_saver_has_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.db"
    connect, read_by_python = sqlite3.connect, 0

    def at_rest_only(*arguments: Any, **options: Any) -> sqlite3.Connection:
        nonlocal read_by_python
        read_by_python += 1
        # Locks do not keep two SQLites of one process apart: the other one clears the index of the log at its first read.
        with pytest.raises(UnavailableError, match="closes a connection"):
            saver.get_tuple(at())
        return connect(*arguments, **options)

    with SqliteSaver.from_conn_string(str(path)) as saver:
        put(saver, at(), made({"a": 1}))
        second, third = sqlite3.connect(path), await aiosqlite.connect(path)
        monkeypatch.setattr(sqlite3, "connect", at_rest_only)
        works(SqliteSaver(second))
        await works_in_a_loop(AsyncSqliteSaver(third))
        monkeypatch.undo()
        assert read_by_python == 2
        assert read(saver, at()).checkpoint["channel_values"] == {"a": 1}


@pytest.mark.parametrize("given", [(SqliteSaver, sqlite3), (AsyncSqliteSaver, aiosqlite)], ids=["sqlite3", "aiosqlite"])
async def test_the_rows_of_a_connection_may_have_any_form(given: Any, tmp_path: Path) -> None:
    saver_class, module = given

    def by_name(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
        return {column[0]: value for column, value in zip(cursor.description, row)}

    connection = module.connect(tmp_path / "a.db")
    if module is aiosqlite:
        await connection
    connection.row_factory, connection.text_factory = by_name, bytes
    await works_in_a_loop(saver_class(connection))
    assert (tmp_path / "a.db").exists()


def test_postgres_savers_are_made_from_addresses_connections_and_pools(postgres_url: str) -> None:
    saver = PostgresSaver(postgres_url)
    saver.setup()
    works(saver)
    with psycopg.connect(postgres_url) as connection:
        works(PostgresSaver(connection))
        assert connection.execute("SELECT 1").fetchone() == (1,), "the connection stays open"
    with ConnectionPool(postgres_url, kwargs={"autocommit": True, "prepare_threshold": 0}, min_size=1) as pool:
        works(PostgresSaver(pool))
    parts = conninfo_to_dict(postgres_url)
    secret = {"password": parts.pop("password", "x"), "autocommit": True}
    with ConnectionPool(psycopg.conninfo.make_conninfo("", **parts), kwargs=secret, min_size=1) as pool:
        works(PostgresSaver(pool))
        with pytest.raises(ValueError, match="pipe is not supported"):
            PostgresSaver(pool, object())
    with pytest.raises(ValueError, match="computes its address.*pass the address"):
        PostgresSaver(ConnectionPool(lambda: postgres_url, open=False))
    with pytest.raises(ValueError, match="cannot connect with sslcert, sslkey"):
        PostgresSaver(ConnectionPool(f"{postgres_url}?sslcert=a&sslkey=b", open=False))
    with pytest.raises(TypeError, match="pass the address of the database.*not int"):
        PostgresSaver(1)


def test_a_pool_may_say_all_that_an_address_may(postgres_url: str, tmp_path: Path) -> None:
    alive = {"keepalives": 1, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 5}
    saver = PostgresSaver(ConnectionPool(postgres_url, kwargs={**alive, "target_session_attrs": "primary"}, open=False))
    saver.setup()
    works(saver)
    roots = str(tmp_path / "our roots.pem")
    checked = ConnectionPool(postgres_url, kwargs={"sslmode": "verify-full", "sslrootcert": roots}, open=False)
    # Followed: the file is read.
    with pytest.raises(InvalidInputError, match=r"sslrootcert .*our roots\.pem"):
        PostgresSaver(checked).setup()


def test_an_address_of_sqlalchemy_is_refused_with_what_to_write() -> None:
    for saver in (PostgresSaver, AsyncPostgresSaver):
        with pytest.raises(ValueError, match=r"postgresql\+psycopg:// .*begin it with postgresql://$"):
            saver("postgresql+psycopg://ann:secret@db/threads")


def test_the_search_path_of_an_address_chooses_the_schema(postgres_url: str) -> None:
    schema = f"s{uuid.uuid4().hex}"
    mark = "&" if "?" in postgres_url else "?"
    parts = conninfo_to_dict(postgres_url)

    def keywords(options: str) -> str:
        return psycopg.conninfo.make_conninfo("", **{**parts, "options": options})

    def tables(schema: str) -> int:
        with psycopg.connect(postgres_url) as connection:
            query = "SELECT count(*) FROM pg_tables WHERE schemaname = %s"
            [(count,)] = connection.execute(query, (schema,)).fetchall()
            return int(count)

    config = at(schema)
    first = PostgresSaver(f"{postgres_url}{mark}options=-csearch_path%3D{schema}")
    first.setup()
    put(first, config, made({"a": 1}))
    first.close()
    assert tables(schema) > 0
    for address in [
        f"{postgres_url}{mark}options=-csearch_path%3D%22{schema}%22",
        keywords(f'-csearch_path=other --search-path="{schema}"'),
        keywords(f"-c statement_timeout=60000 -c search_path={schema.upper()}"),
    ]:
        saver = PostgresSaver(address)
        assert read(saver, config).checkpoint["channel_values"] == {"a": 1}, address
        saver.close()
    with ConnectionPool(postgres_url, kwargs={"options": f"-c search_path={schema}"}, open=False) as pool:
        saver = PostgresSaver(pool)
        assert read(saver, config).checkpoint["channel_values"] == {"a": 1}
        saver.close()
    # What is said with words counts.
    saver = PostgresSaver(keywords("-c search_path=other,public"), schema=schema)
    assert read(saver, config).checkpoint["channel_values"] == {"a": 1}
    saver.close()
    for several in [r"-c search_path=other,\ public", '-c search_path="$user"', "-csearch_path="]:
        with pytest.raises(ValueError, match="the address sets search_path to .*pass schema="):
            PostgresSaver(keywords(several))
    for name in ("search_path", "currentSchema"):
        with pytest.raises(ValueError, match=f"the address has {name}.*pass schema='x'"):
            PostgresSaver(f"{postgres_url}{mark}{name}=x")


async def test_async_postgres_savers_are_made_from_addresses_connections_and_pools(postgres_url: str) -> None:
    saver = AsyncPostgresSaver(postgres_url)
    await saver.setup()
    await works_in_a_loop(saver)
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await works_in_a_loop(AsyncPostgresSaver(connection))
    async with AsyncConnectionPool(postgres_url, min_size=1, open=False) as pool:
        await works_in_a_loop(AsyncPostgresSaver(pool))


def test_a_saver_is_copied_and_not_pickled(tmp_path: Path) -> None:
    saver = SqliteSaver(tmp_path / "a.db")
    for refused in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="SqliteSaver cannot be pickled.*with the same path"):
            refused(saver)
    works(copy.copy(saver))
