"""What python/benches/savers.py measures."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def savers() -> Any:
    """The program, as a module."""
    path = Path(__file__).parent.parent / "benches" / "savers.py"
    spec = importlib.util.spec_from_file_location("savers", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_server_that_does_not_flush_is_not_measured(savers: Any, postgres_url: str) -> None:
    lazy = f"{postgres_url}{'&' if '?' in postgres_url else '?'}options=-csynchronous_commit%3Doff"
    # The private server of the tests does not flush either.
    with pytest.raises(SystemExit, match="must flush, and its (fsync|synchronous_commit) is off"):
        savers.check_flushes(lazy)


def test_the_first_page_of_a_saver_that_was_just_opened_is_measured_too(savers: Any, tmp_path: Path) -> None:
    rows = asyncio.run(savers.measure(16, 2, None, tmp_path))
    names = ["threadkeep SqliteSaver", "langgraph SqliteSaver", "threadkeep AsyncSqliteSaver", "langgraph AsyncSqliteSaver"]
    assert [row["saver"] for row in rows] == names
    for row in rows:
        times = [row[name] for name in ("head_cold_ms", "head_ms", "history_100_first_ms", "history_100_ms")]
        assert min(times) > 0 and row["turns"] == 2 and row["times_raw"] > 0, row
