"""Stores for tests: each test has one of its own."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from threadkeep.langgraph import AsyncPostgresSaver, AsyncSqliteSaver, PostgresSaver, SqliteSaver

# Opens a store of its own; the same store each time it is called in a test.
Opener = Callable[..., Any]


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A Postgres: the one at THREADKEEP_POSTGRES_TEST_URL, else a private one."""
    if url := os.environ.get("THREADKEEP_POSTGRES_TEST_URL"):
        yield url
        return
    program = os.environ.get("THREADKEEP_TEST_POSTGRES")
    assert program, "run scripts/python-test.sh, or set THREADKEEP_POSTGRES_TEST_URL to the address of a Postgres"
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout and server.stdin
        url = server.stdout.readline().strip()
        assert url, f"{program} did not start a server"
        yield url
        server.stdin.close()


@pytest.fixture(params=["sqlite", "postgres", "memory"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of store."""
    return str(request.param)


@pytest.fixture
def place(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """The arguments that open the test's store."""
    if kind == "sqlite":
        return {"conn_string": str(tmp_path / "checkpoints.db")}
    if kind == "memory":
        return {"conn_string": ":memory:"}
    return {"conn_string": request.getfixturevalue("postgres_url"), "schema": f"t{uuid.uuid4().hex}"}


@pytest.fixture
def open_saver(kind: str, place: dict[str, str]) -> Opener:
    """Opens the test's store for synchronous calls; a context manager."""
    return lambda **more: _Set(PostgresSaver if kind == "postgres" else SqliteSaver, {**place, **more})


@pytest.fixture
def open_async(kind: str, place: dict[str, str]) -> Opener:
    """Opens the test's store for event loops; an asynchronous context manager."""
    return lambda **more: _AsyncSet(AsyncPostgresSaver if kind == "postgres" else AsyncSqliteSaver, {**place, **more})


class _Set:
    """A saver that is set up."""

    def __init__(self, saver: Any, place: dict[str, str]) -> None:
        self.context = saver.from_conn_string(**place)

    def __enter__(self) -> Any:
        saver = self.context.__enter__()
        saver.setup()
        return saver

    def __exit__(self, *error: Any) -> Any:
        return self.context.__exit__(*error)


class _AsyncSet:
    """A saver for event loops that is set up."""

    def __init__(self, saver: Any, place: dict[str, str]) -> None:
        self.context = saver.from_conn_string(**place)

    async def __aenter__(self) -> Any:
        saver = await self.context.__aenter__()
        if isinstance(saver, AsyncPostgresSaver):
            await saver.setup()
        return saver

    async def __aexit__(self, *error: Any) -> Any:
        return await self.context.__aexit__(*error)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The sums, as every step of the project's tests prints them. A skipped test has not passed."""
    stats = terminalreporter.stats
    failed = sum(len(stats.get(outcome, [])) for outcome in ("failed", "error", "skipped", "xfailed", "xpassed"))
    terminalreporter.write_line(f"{len(stats.get('passed', []))} passed, {failed} failed")
