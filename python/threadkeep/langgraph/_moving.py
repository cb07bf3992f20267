"""``threadkeep import-langgraph``: moves the threads of LangGraph's own savers into a store of Threadkeep."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from langgraph.checkpoint.base import WRITES_IDX_MAP, CheckpointTuple
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from threadkeep import ThreadkeepError
from threadkeep._core import Store
from threadkeep.langgraph._ending import end_in_order
from threadkeep.langgraph._postgres import PostgresSaver, is_address
from threadkeep.langgraph._saver import ThreadkeepSaver
from threadkeep.langgraph._sources import NotMoved, PostgresSource, Row, Source, SqliteSource
from threadkeep.langgraph._sqlite import SqliteSaver


@dataclass
class Report:
    """What was moved, and what was not."""

    threads: int = 0
    checkpoints: int = 0
    writes: int = 0
    # What was not moved, or is not equal afterwards: where, and why.
    problems: list[str] = field(default_factory=list[str])


def move(source: Source, target: ThreadkeepSaver | None, *, compare: bool = True) -> Report:
    """Moves every thread of a source; without a target, only reads them."""
    report = Report()
    threads = source.threads()
    store = target._store if target else None  # pyright: ignore[reportPrivateUsage]
    for number, thread in enumerate(threads):
        _progress(number, len(threads), "threads")
        try:
            if target and _has(target, thread):
                raise NotMoved(_there(source, target, thread))
            _move_thread(source, store, thread, report)
        except (NotMoved, ThreadkeepError) as error:
            report.problems.append(f"thread {thread!r} was not moved: {error}")
        except Exception as error:  # Whatever a damaged row raises: the other threads are moved all the same.
            report.problems.append(f"thread {thread!r} was not moved: {type(error).__name__}: {error}")
    _progress(len(threads), len(threads), "threads")
    if target and compare:
        report.problems += _differences(source.saver(), target, [t for t in threads if not _named(report, t)])
    return report


def _has(target: ThreadkeepSaver, thread: str) -> bool:
    """Whether a store has a thread. Its values may be of a serializer that this process does not have: none is decoded."""
    config: Any = {"configurable": {"thread_id": thread}}
    return bool(target._list(config, None, None, 1).wait())  # pyright: ignore[reportPrivateUsage]


def _there(source: Source, target: ThreadkeepSaver, thread: str) -> str:
    """What is said of a thread that the target has. An import that was killed may have left a part of it."""
    store = target._store  # pyright: ignore[reportPrivateUsage]
    found = {(namespace, checkpoint_id): set(tasks) for namespace, checkpoint_id, tasks in store.written(thread).wait()}
    written = source.written(thread)
    both = written.keys() & found.keys()
    lacking: list[str] = []
    if checkpoints := len(written.keys() - found.keys()):
        lacking.append(f"{checkpoints} of its {len(written)} checkpoints")
    # The writes of the last checkpoint come after it.
    if tasks := len({(at, task) for at in both for task, _ in written[at] - found[at]}):
        lacking.append(f"the writes of {tasks} task{'s' if tasks > 1 else ''}")
    said = "the target has a thread of this id"
    if both and lacking:
        said += f", which lacks {' and '.join(lacking)}: if an import that was killed has left it so, delete it there and move "
        said += "it again"
    return said


def _named(report: Report, thread: str) -> bool:
    return any(problem.startswith(f"thread {thread!r} ") for problem in report.problems)


# The checkpoints that were put, by namespace and id, and the tasks with writes under each.
_Put = dict[tuple[str, str], set[str]]


def _move_thread(source: Source, store: Store | None, thread: str, report: Report) -> None:
    """Moves a thread that the target does not have."""
    put: _Put = {}
    moved = Report()
    try:
        with closing(source.rows(thread)) as rows:
            for row in rows:
                _move_row(store, thread, row, put, moved)
    except BaseException as error:
        # Also if somebody stops it: a part would be taken for a thread that was moved before.
        left = _take_back(store, thread, put) if store and put else None
        if left and isinstance(error, Exception):
            raise NotMoved(f"{error}; {left}") from error
        if left:
            print(f"thread {thread!r} was not moved: {left}", file=sys.stderr)
        raise
    report.threads += 1
    report.checkpoints += moved.checkpoints
    report.writes += moved.writes
    report.problems += moved.problems


def _take_back(store: Store, thread: str, put: _Put) -> str | None:
    """Deletes what was put of a thread. Returns what is left of it, and why."""
    try:
        if store.take_back(thread, put).wait():
            return None
    except ThreadkeepError as error:
        return f"a part of it is in the target: {error}. Delete the thread there before you move it again"
    return "a part of it stays in the target, because another program writes to that thread"


def _move_row(store: Store | None, thread: str, row: Row, put: _Put, moved: Report) -> None:
    parent = row.parent
    if parent is not None and (row.namespace, parent) not in put:
        place = f"thread {thread!r}, checkpoint {row.id}"
        # Clocks of several machines differ.
        why = "has a newer id" if parent > row.id else "is missing"
        moved.problems.append(f"{place}: its parent {parent} {why}; it was moved without one")
        parent = None
    if row.tag not in ("", "msgpack"):
        raise NotMoved(f"checkpoint {row.id} was written as {row.tag!r}, which cannot be cut apart")
    # Without a store it is only parsed.
    checked = Store.moved(thread, row.namespace, row.id, parent, row.tag, row.checkpoint, row.values, row.metadata)
    tasks = put.setdefault((row.namespace, row.id), set())
    moved.checkpoints += 1
    moved.writes += len(row.writes)
    if store is None:
        return
    if parent is not None and (learn := store.learn(thread, row.namespace, parent)):
        learn.wait()
    store.put_moved(checked).wait()
    # LangGraph keeps a stored special write if it comes among others: so each kind comes alone. All others of a task come in
    # one call, by position, whatever their paths: an update adds to what the node has written, under a path of its own.
    parts: dict[tuple[str, bool], tuple[str, list[tuple[str, str, bytes]]]] = {}
    for task, path, channel, tag, value in row.writes:
        _, writes = parts.setdefault((task, channel in WRITES_IDX_MAP), (path, []))
        writes.append((channel, tag, value))
    for (task, _), (path, writes) in parts.items():
        tasks.add(task)
        store.put_moved_writes(thread, row.namespace, row.id, task, path, writes).wait()


def _differences(theirs: Any, ours: ThreadkeepSaver, threads: Sequence[str]) -> Iterator[str]:
    """What is not equal in both."""
    for number, thread in enumerate(threads):
        _progress(number, len(threads), "threads compared")
        try:
            yield from _differences_of(theirs, ours, thread)
        except Exception as error:  # Whatever a serializer raises: the other threads are compared all the same.
            yield f"thread {thread!r}: cannot be compared: {type(error).__name__}: {error}"
    _progress(len(threads), len(threads), "threads compared")


def _differences_of(theirs: Any, ours: ThreadkeepSaver, thread: str) -> Iterator[str]:
    config: Any = {"configurable": {"thread_id": thread}}
    our_tuples = {_place(found): found for found in ours.list(config)}
    for expected in theirs.list(config):
        found = our_tuples.pop(_place(expected), None)
        if found is None or _shown(found) != _shown(expected):
            yield f"thread {thread!r}, checkpoint {_place(expected)[1]}: not equal after the move"
    for place in our_tuples:
        yield f"thread {thread!r}, checkpoint {place[1]}: not in the source"


def _place(found: CheckpointTuple) -> tuple[str, str]:
    configurable = found.config.get("configurable", {})
    return configurable.get("checkpoint_ns", ""), configurable["checkpoint_id"]


def _shown(found: CheckpointTuple) -> Any:
    # Serialized: objects of some classes are not equal to their copies.
    serde = JsonPlusSerializer()
    checkpoint = {key: value for key, value in found.checkpoint.items() if key != "channel_values"}
    values = {name: serde.dumps_typed(value) for name, value in found.checkpoint["channel_values"].items()}
    writes = sorted((task, channel, serde.dumps_typed(value)) for task, channel, value in found.pending_writes or [])
    return checkpoint, values, dict(found.metadata), writes


def _is_one_file(source: str, target: str) -> bool:
    try:
        return os.path.samefile(source, target)
    except (OSError, ValueError):  # One of them is missing, or is an address.
        return False


def _progress(done: int, total: int, what: str) -> None:
    if sys.stderr.isatty():
        width = 30 * done // max(total, 1)
        end = "\n" if done == total else ""
        print(f"\r[{'#' * width}{' ' * (30 - width)}] {done} of {total} {what}", end=end, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """The command. Its exit status: 0 if everything was moved and is equal, else 3."""
    parser = argparse.ArgumentParser(prog="threadkeep import-langgraph", description=__doc__)
    parser.add_argument("source", help="the file of LangGraph's SqliteSaver, or the address of the database of its PostgresSaver")
    parser.add_argument("target", help="the file or the address of the new store, created if missing")
    parser.add_argument("--dry-run", action="store_true", help="only read, and name what could not be moved")
    parser.add_argument("--no-compare", action="store_true", help="do not compare the stores afterwards")
    given = parser.parse_args(arguments)
    theirs = "postgres" if is_address(given.source) else "sqlite"
    if not given.dry_run and not given.no_compare and find_spec(f"langgraph.checkpoint.{theirs}") is None:
        raise SystemExit(
            "the stores are compared with LangGraph's saver, which is not installed: "
            f"pip install langgraph-checkpoint-{theirs}, or pass --no-compare"
        )
    # Python's SQLite would have it open beside the store's, and locks do not keep two apart in one process.
    if not given.dry_run and _is_one_file(given.source, given.target):
        raise SystemExit("the target cannot be opened: it is the file of the source; name another one")
    end_in_order()
    source = PostgresSource(given.source) if is_address(given.source) else SqliteSource(given.source)
    with ExitStack() as stack:
        target: ThreadkeepSaver | None = None
        if not given.dry_run:
            of = PostgresSaver if is_address(given.target) else SqliteSaver
            try:
                target = stack.enter_context(of.from_conn_string(given.target))
                target.setup()
            except (ThreadkeepError, ValueError) as error:
                raise SystemExit(f"the target cannot be opened: {error}") from None
        report = move(source, target, compare=not given.no_compare)
    for problem in report.problems:
        print(problem)
    done = "would be moved" if given.dry_run else "were moved"
    equal = "" if given.dry_run or given.no_compare or report.problems else ", and are equal"
    print(f"{report.threads} threads with {report.checkpoints} checkpoints and {report.writes} writes {done}{equal}.")
    return 3 if report.problems else 0
