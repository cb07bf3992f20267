"""A plugin of pytest: LangGraph's own tests, unchanged, with our savers in the place of LangGraph's.

LangGraph's modules give out our classes, so that `from langgraph.checkpoint.sqlite import SqliteSaver` in a test imports ours. All of
them open stores of the kind in THREADKEEP_STORE: SQLite files, or schemas of a Postgres (THREADKEEP_POSTGRES_TEST_URL).
A test that opens no store of ours shows nothing of them and does not count as passed.
"""

from __future__ import annotations

import os
import tempfile
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from threadkeep._core import Store
from threadkeep.langgraph import ThreadkeepSaver

ADDRESS = os.environ.get("THREADKEEP_POSTGRES_TEST_URL", "")
IS_POSTGRES = os.environ["THREADKEEP_STORE"] == "postgres"


class Opened:
    """The savers that the running test opened."""

    folder = Path(tempfile.mkdtemp())
    savers: list[ThreadkeepSaver] = []
    tests = 0


def store() -> Store:
    if IS_POSTGRES:
        return Store.postgres(ADDRESS, f"t{secrets.token_hex(16)}", "fork")
    return Store.sqlite(str(Opened.folder / f"{secrets.token_hex(16)}.db"), "fork")


class Saver(ThreadkeepSaver):
    """Takes what the constructors of all of LangGraph's savers take, and opens an empty store."""

    def __init__(self, *connection: Any, serde: Any = None, factory: Any = None, pipe: Any = None) -> None:
        super().__init__(store(), serde=serde)
        # What subclasses of InMemorySaver in the tests use.
        self.stack = ExitStack()
        self._store.setup().wait()
        Opened.savers.append(self)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @classmethod
    @contextmanager
    def from_conn_string(cls, conn_string: str, *, pipeline: bool = False) -> Iterator[Any]:
        yield cls()


class AsyncSaver(Saver):
    @classmethod
    @asynccontextmanager
    async def from_conn_string(cls, conn_string: str, **more: Any) -> Any:
        yield cls(serde=more.get("serde"))

    async def setup(self) -> None:  # type: ignore[override]
        await self._store.setup()


class MemorySaver(Saver):
    """In the place of InMemorySaver: the tests ask which savers are that one. Its async methods call the others, which the tests'
    subclasses change."""

    async def aput(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        return self.put(config, checkpoint, metadata, new_versions)

    # LangGraph looks for the parameter `task_path`.
    async def aput_writes(self, config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
        self.put_writes(config, writes, task_id, task_path)

    async def aget_delta_channel_history(self, *, config: Any, channels: Any) -> Any:
        return self.get_delta_channel_history(config=config, channels=channels)


def substitute() -> None:
    import langgraph.checkpoint.memory
    import langgraph.checkpoint.postgres
    import langgraph.checkpoint.postgres.aio
    import langgraph.checkpoint.sqlite
    import langgraph.checkpoint.sqlite.aio

    langgraph.checkpoint.sqlite.SqliteSaver = Saver  # type: ignore[misc,assignment]
    langgraph.checkpoint.sqlite.aio.AsyncSqliteSaver = AsyncSaver  # type: ignore[misc,assignment]
    langgraph.checkpoint.postgres.PostgresSaver = Saver  # type: ignore[misc,assignment]
    langgraph.checkpoint.postgres.aio.AsyncPostgresSaver = AsyncSaver  # type: ignore[misc,assignment]
    langgraph.checkpoint.memory.InMemorySaver = MemorySaver  # type: ignore[misc,assignment]
    langgraph.checkpoint.memory.MemorySaver = MemorySaver  # type: ignore[misc,assignment]


substitute()


# Tests that ask for something else than what ours promise, by the end of their names, and why. Names without parameters.
IDS = "uses ids that are no UUIDs, or parents that do not exist: refused"
TABLES = "looks into the tables of LangGraph's saver"
CHANNELS = "its checkpoints have no channels: writes of a channel that a checkpoint does not have are not among those that it applied"
CLOCK = "asks for times that a busy machine does not keep"
APART = {
    "test_memory.py::TestMemorySaver::test_search": IDS,
    "test_memory.py::TestMemorySaver::test_asearch": IDS,
    "test_memory.py::test_memory_saver": "uses InMemorySaver as its own context manager",
    "test_memory.py::TestInMemorySaverDeltaChannel::test_load_blobs_omits_delta_channel": TABLES,
    "test_memory.py::TestInMemorySaverDeltaChannel::test_get_channel_writes_collects_ancestor_writes_only": TABLES,
    "test_memory.py::TestInMemorySaverDeltaChannel::test_get_channel_writes_at_root_returns_empty": TABLES,
    "test_memory.py::TestInMemorySaverDeltaChannel::test_get_channel_writes_without_checkpoint_id_reads_the_latest": CHANNELS,
    "test_memory.py::TestBaseFallbackGetChannelWrites": TABLES,
    "test_memory.py::TestPreDeltaBlobTerminator": TABLES,
    "test_aiosqlite.py::TestAsyncSqliteSaver::test_asearch": IDS,
    "test_sqlite.py::TestSqliteSaver::test_search": IDS,
    "test_sqlite.py::TestSqliteSaver::test_informative_async_errors": "SqliteSaver has no async methods there; ours has",
    "test_sqlite.py::TestSqliteSaver::test_checkpoint_search_sql_injection_prevention": "any key may be filtered by: none gets into SQL",
    "test_sqlite.py::TestSqliteSaver::test_metadata_filter_keys_with_hyphens_and_digits": "filters by paths into values; no other saver does",
    "test_delta_parent_walk.py": IDS,
    "test_writes_task_path_migration.py": TABLES,
    "test_conformance_delta.py": "names a capability that the conformance suite on PyPI does not have",
    "test_channels.py::test_delta_channel_snapshot_version_based": TABLES,
    "test_delta_channel_supersteps_bound.py::test_counter_reset_after_supersteps_snapshot": "reads a snapshot from a later checkpoint: "
    "InMemorySaver keeps it under the channel's version. Ours, as LangGraph's SqliteSaver, gives it to who replays",
    "test_pregel.py::test_stream_subgraphs_during_execution": CLOCK,
    "test_pregel.py::test_stream_buffering_single_node": CLOCK,
    "test_retry.py::test_idle_timeout_resets_on_message_stream_callbacks": CLOCK,
    "test_delta_channel_update_state.py::test_bulk_update_state_replays_updates_in_the_order_given": TABLES,
}


def reason_apart(item: pytest.Item) -> str | None:
    name = item.nodeid.split("[")[0]
    return next((why for end, why in APART.items() if name.endswith(end) or f"/{end}::" in f"/{name}"), None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    apart = [item for item in items if reason_apart(item)]
    config.hook.pytest_deselected(items=apart)
    items[:] = [item for item in items if item not in set(apart)]


@pytest.fixture(autouse=True)
def _stores(tmp_path: Path) -> Iterator[None]:
    Opened.folder, Opened.savers = tmp_path, []
    yield
    Opened.tests += bool(Opened.savers)
    for saver in Opened.savers:
        saver._store.close().wait()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    stats = terminalreporter.stats
    failed = sum(len(stats.get(outcome, [])) for outcome in ("failed", "error"))
    apart = len(stats.get("deselected", []))
    terminalreporter.write_line(f"{Opened.tests - failed} tests passed on stores of ours; {failed} failed; {apart} are set apart")
