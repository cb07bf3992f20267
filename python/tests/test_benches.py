"""What python/benches/savers.py measures."""

from __future__ import annotations

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
