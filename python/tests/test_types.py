"""What type checkers say of the package, and of a program that uses it, in strict mode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import threadkeep

PACKAGE = Path(threadkeep.__file__).parent
CONFIG = Path(__file__).parent.parent / "pyproject.toml"

PROGRAM = """
import sqlite3

import aiosqlite
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple

from threadkeep import ConflictError
from threadkeep.langgraph import AsyncPostgresSaver, AsyncSqliteSaver, PostgresSaver, SqliteSaver


def newest(saver: BaseCheckpointSaver[str], config: RunnableConfig) -> CheckpointTuple | None:
    try:
        return saver.get_tuple(config)
    except ConflictError:
        return None


def on(connection: aiosqlite.Connection) -> AsyncSqliteSaver:
    return AsyncSqliteSaver(connection)


async def use(config: RunnableConfig) -> list[CheckpointTuple | None]:
    with SqliteSaver.from_conn_string("a.db", fence="error") as one, PostgresSaver.from_conn_string("") as two:
        found = [newest(one, config), newest(two, config), newest(SqliteSaver(sqlite3.connect("b.db")), config)]
    async with AsyncSqliteSaver.from_conn_string("c.db") as three, AsyncPostgresSaver.from_conn_string("") as four:
        await four.setup()
        return [*found, await three.aget_tuple(config), *[tuple async for tuple in four.alist(None, limit=1)]]
"""

WRONG = PROGRAM.replace('fence="error"', 'fence="sometimes"')


def check(checker: str, *what: str) -> subprocess.CompletedProcess[str]:
    command = {
        "mypy": [sys.executable, "-m", "mypy", "--config-file", str(CONFIG), "--cache-dir", "/dev/null"],
        "pyright": [sys.executable, "-m", "pyright", "--pythonpath", sys.executable],
    }[checker]
    # The first pyright comes from npm, which asks twice again by itself.
    env = {**os.environ, "npm_config_fetch_retries": "10"}
    return subprocess.run([*command, *what], env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_the_package_and_a_program_are_typed(checker: str, tmp_path: Path) -> None:
    program, wrong = tmp_path / "program.py", tmp_path / "wrong.py"
    program.write_text(f"# pyright: strict\n{PROGRAM}")
    wrong.write_text(f"# pyright: strict\n{WRONG}")
    # As an installed package: its folder has the others, too.
    package = ["-p", "threadkeep"] if checker == "mypy" else [str(PACKAGE)]
    for what in (package, [str(program)]):
        done = check(checker, *what)
        assert done.returncode == 0, done.stdout + done.stderr
    done = check(checker, str(wrong))
    assert done.returncode == 1 and "sometimes" in done.stdout, done.stdout + done.stderr
