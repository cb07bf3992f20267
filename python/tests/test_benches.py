"""What python/benches/savers.py and benches/peers/driver.py measure."""

from __future__ import annotations

import asyncio
import importlib.util
import queue
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def module(path: Path) -> Any:
    """A program, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def savers() -> Any:
    return module(Path(__file__).parent.parent / "benches" / "savers.py")


@pytest.fixture
def driver() -> Any:
    return module(Path(__file__).parent.parent.parent / "benches" / "peers" / "driver.py")


def test_a_server_that_does_not_flush_is_not_measured(savers: Any, postgres_url: str) -> None:
    lazy = f"{postgres_url}{'&' if '?' in postgres_url else '?'}options=-csynchronous_commit%3Doff"
    # The private server of the tests does not flush either.
    with pytest.raises(SystemExit, match="must flush, and its (fsync|synchronous_commit) is off"):
        savers.check_flushes(lazy)


def test_a_run_says_that_its_server_flushes(savers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"server_version": "17.2", "fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}

    def execute(statement: str) -> Any:
        return SimpleNamespace(fetchone=lambda: (settings[statement.removeprefix("SHOW ")],))

    connection = nullcontext(SimpleNamespace(execute=execute))
    monkeypatch.setattr("psycopg.connect", lambda *_, **__: connection)
    assert savers.check_flushes("") == "Postgres 17.2, fsync=on, synchronous_commit=on, full_page_writes=on"
    for name in ("fsync", "synchronous_commit", "full_page_writes"):
        settings[name] = "off"
        with pytest.raises(SystemExit, match=f"its {name} is off"):
            savers.check_flushes("")
        settings[name] = "on"


def test_the_first_page_of_a_saver_that_was_just_opened_is_measured_too(savers: Any, tmp_path: Path) -> None:
    rows = asyncio.run(savers.measure(16, 2, None, tmp_path))
    names = ["threadkeep SqliteSaver", "langgraph SqliteSaver", "threadkeep AsyncSqliteSaver", "langgraph AsyncSqliteSaver"]
    assert [row["saver"] for row in rows] == names
    for row in rows:
        times = [row[name] for name in ("head_cold_ms", "head_ms", "history_100_first_ms", "history_100_ms")]
        assert min(times) > 0 and row["turns"] == 2 and row["times_raw"] > 0, row


async def test_the_settings_of_a_row_are_those_of_the_connection_that_is_measured(
    driver: Any, savers: Any, postgres_url: str, tmp_path: Path
) -> None:
    for backend, change, expected in [
        ("langgraph-sqlite", "PRAGMA synchronous = OFF", "wal, synchronous=OFF"),
        ("langgraph-async", "PRAGMA synchronous = OFF", "wal, synchronous=OFF"),
        ("langgraph-postgres", "SET synchronous_commit = off", "synchronous_commit=off"),
    ]:
        case = {"backend": backend}
        is_postgres = backend == "langgraph-postgres"
        target = savers.database(postgres_url, "bench_settings") if is_postgres else str(tmp_path / f"{backend}.db")
        async with AsyncExitStack() as stack:
            store = await driver.open_store(stack, case, target)
            changed = store.saver.conn.execute(change)
            if store.is_async:
                await changed
            assert (await driver.settings(case, store)).endswith(expected)


def test_a_writer_that_ends_without_success_is_not_waited_for(driver: Any) -> None:
    killed, waiting = SimpleNamespace(exitcode=-9), SimpleNamespace(exitcode=None)
    results: Any = queue.Queue()
    results.put("a result")
    with pytest.raises(SystemExit, match="ended with -9"):
        driver.gathered(results, [waiting, killed])
