"""What LangGraph's own savers get wrong, shown on them, and on ours not.

A test of theirs that fails here means that a new version of LangGraph has mended it: then say so in the README.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres import PostgresSaver as TheirPostgresSaver
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.checkpoint.sqlite import SqliteSaver as TheirSqliteSaver

from conftest import Opener
from kit import at, made, put, read, replayed
from threadkeep import ConflictError, NotFoundError
from threadkeep.langgraph import SqliteSaver

COUNTED = {"source": "loop", "step": 1, "parents": {}, "counters_since_delta_snapshot": {"d": [1, 1]}}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """LangGraph's savers."""
    if request.param == "memory":
        yield InMemorySaver()
    elif request.param == "postgres":
        with TheirPostgresSaver.from_conn_string(request.getfixturevalue("postgres_url")) as saver:
            saver.setup()
            saver.delete_thread("t")
            yield saver
    else:
        with TheirSqliteSaver.from_conn_string(str(tmp_path / "theirs.db")) as saver:
            yield saver


def late_row(saver: Any) -> list[Any]:
    """The history of a checkpoint after another task wrote under its parent: a fork's, or one that never finished."""
    root = put(saver, at(), made({"d": _DeltaSnapshot(["seed"])}))
    saver.put_writes(root, [("d", ["mine"])], "b", "p")
    child = put(saver, root, made({}, {"d": 2}), COUNTED)
    before = replayed(saver, child)[1]
    saver.put_writes(root, [("d", ["a stranger's"])], "a", "p")
    assert before == [["mine"]]
    return replayed(saver, child)[1]


def test_their_history_changes_afterwards(theirs: Any) -> None:
    assert late_row(theirs) == [["a stranger's"], ["mine"]]


def test_our_history_never_changes(open_saver: Opener) -> None:
    with open_saver() as saver:
        assert late_row(saver) == [["mine"]]


def two_writers(saver: Any, other: Any) -> Any:
    """Two runs read the same head and both go on from it. What the head says afterwards."""
    put(saver, at(), made({"a": ["start"]}))
    ours, theirs = read(saver, at()).config, read(other, at()).config
    put(other, theirs, made({"a": ["start", "theirs"]}, {"a": 2}))
    put(saver, ours, made({"a": ["start", "ours"]}, {"a": 3}))
    return read(saver, at()).checkpoint["channel_values"]["a"]


def test_their_second_writer_hides_what_the_first_wrote(theirs: Any) -> None:
    assert two_writers(theirs, theirs) == ["start", "ours"]


def test_our_second_writer_is_refused_if_asked(tmp_path: Path) -> None:
    path = str(tmp_path / "ours.db")
    with SqliteSaver.from_conn_string(path, fence="error") as one, SqliteSaver.from_conn_string(path) as other:
        with pytest.raises(ConflictError):
            two_writers(one, other)
        assert read(one, at()).checkpoint["channel_values"]["a"] == ["start", "theirs"]


def orphan(saver: Any) -> Any:
    """A put of a run whose thread was deleted meanwhile."""
    root = put(saver, at(), made({"d": _DeltaSnapshot(["important"])}))
    saver.put_writes(root, [("d", ["more"])], "t")
    saver.delete_thread("t")
    child = put(saver, root, made({}, {"d": 2}), COUNTED)
    return replayed(saver, child)


def test_their_lost_ancestor_reads_as_an_empty_channel(theirs: Any) -> None:
    assert orphan(theirs) == (None, [])


def test_our_lost_ancestor_is_an_error(open_saver: Opener) -> None:
    with open_saver() as saver, pytest.raises(NotFoundError):
        orphan(saver)


def test_their_list_locks_the_saver_until_it_is_read_to_its_end(tmp_path: Path) -> None:
    with TheirSqliteSaver.from_conn_string(str(tmp_path / "theirs.db")) as saver:
        for number in range(3):
            put(saver, at(), made({"a": number}))
        listing = saver.list(at())
        next(listing)
        assert saver.lock.locked(), "any call now waits for ever"
        listing.close()  # type: ignore[attr-defined]


def test_our_list_leaves_the_saver_free(open_saver: Opener) -> None:
    with open_saver() as saver:
        for number in range(3):
            put(saver, at(), made({"a": number}))
        for found in saver.list(at()):
            put(saver, at("copy"), made(found.checkpoint["channel_values"]))
        assert len(list(saver.list(at("copy")))) == 3


def test_their_threads_grow_with_the_square_of_their_length(tmp_path: Path) -> None:
    sizes = []
    for name, saver_class in [("theirs", TheirSqliteSaver), ("ours", SqliteSaver)]:
        folder = tmp_path / name
        folder.mkdir()
        with saver_class.from_conn_string(str(folder / "a.db")) as saver:  # type: ignore[attr-defined]
            messages: list[Any] = []
            config = at()
            for number in range(150):
                messages.append(HumanMessage(f"{number} " * 100, id=str(number)))
                versions = {"messages": saver.get_next_version(None, None)}
                config = put(saver, config, made({"messages": list(messages)}, versions))
        sizes.append(sum(file.stat().st_size for file in folder.iterdir()))
    assert sizes[0] > 20 * sizes[1], sizes


def delta_thread(saver: Any) -> Any:
    """A thread of two checkpoints with a delta channel; its head."""
    root = put(saver, at(), made({"d": _DeltaSnapshot(["seed"])}))
    saver.put_writes(root, [("d", ["more"])], "t")
    return put(saver, root, made({}, {"d": 2}), COUNTED)


def test_their_saver_prunes_no_thread_with_a_delta_channel(postgres_url: str) -> None:
    with TheirPostgresSaver.from_conn_string(postgres_url) as saver:
        saver.setup()
        saver.delete_thread("t")
        delta_thread(saver)
        with pytest.raises(NotImplementedError, match="can't prune threads that use a DeltaChannel"):
            saver.prune(["t"])


def test_our_pruned_delta_channel_is_what_it_was(open_saver: Opener) -> None:
    with open_saver() as saver:
        head = delta_thread(saver)
        saver.prune(["t"])
        seed, writes = replayed(saver, head)
        assert (seed.value, writes) == (["seed"], [["more"]])


@pytest.mark.parametrize("method", ["delete_for_runs", "copy_thread"])
def test_their_saver_on_postgres_lacks_methods_of_the_interface(postgres_url: str, method: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {"delete_for_runs": (["r"],), "copy_thread": ("a", "b")}
    with TheirPostgresSaver.from_conn_string(postgres_url) as saver, pytest.raises(NotImplementedError):
        getattr(saver, method)(*arguments[method])


@pytest.mark.parametrize("method", ["delete_for_runs", "copy_thread", "prune"])
def test_their_saver_lacks_methods_of_the_interface(tmp_path: Path, method: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "delete_for_runs": (["r"],),
        "copy_thread": ("a", "b"),
        "prune": (["a"],),
    }
    with sqlite3.connect(tmp_path / "theirs.db") as connection:
        with pytest.raises(NotImplementedError):
            getattr(TheirSqliteSaver(connection), method)(*arguments[method])
    connection.close()
    with SqliteSaver.from_conn_string(":memory:") as saver:
        getattr(saver, method)(*arguments[method])
