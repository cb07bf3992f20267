"""``threadkeep import-langgraph``: moves the threads of LangGraph's own savers into a store of Threadkeep."""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from langgraph.checkpoint.base import WRITES_IDX_MAP, CheckpointTuple
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import TASKS

from threadkeep import ThreadkeepError
from threadkeep._core import Store
from threadkeep.langgraph._ending import end_in_order
from threadkeep.langgraph._postgres import PostgresSaver, address_of, is_address
from threadkeep.langgraph._saver import ThreadkeepSaver
from threadkeep.langgraph._sqlite import SqliteSaver

# The version of checkpoints from which on waiting tasks are a channel, since LangGraph 0.5.
_WITH_TASKS = 4


@dataclass
class _Row:
    """A stored checkpoint of LangGraph, not decoded."""

    namespace: str
    id: str
    parent: str | None
    tag: str
    checkpoint: bytes
    metadata: bytes
    # Values that are stored beside it: channel, tag and bytes.
    values: list[tuple[str, str, bytes]] = field(default_factory=list[tuple[str, str, bytes]])
    # Task, path, channel, tag and bytes, in stored order.
    writes: list[tuple[str, str, str, str, bytes]] = field(default_factory=list[tuple[str, str, str, str, bytes]])


# The checkpoints of a thread, by namespace and id, and the tasks with writes under each: once for special writes, and
# once for others, because each kind is put by itself.
_Written = dict[tuple[str, str], set[tuple[str, bool]]]


class _Source(Protocol):
    """A database of one of LangGraph's savers."""

    def threads(self) -> list[str]:
        """The threads' ids."""
        ...

    def written(self, thread: str) -> _Written:
        """Which checkpoints a thread has, and which tasks have writes under them."""
        ...

    def rows(self, thread: str) -> Generator[_Row, None, None]:
        """The checkpoints of a thread at one moment, oldest first. It is over when the generator is closed."""
        ...

    def saver(self) -> Any:
        """LangGraph's saver on it, to compare with."""
        ...


class _SqliteSource:
    def __init__(self, path: str) -> None:
        address = f"{Path(path).absolute().as_uri()}?mode=ro"
        try:
            self.connection = sqlite3.connect(address, uri=True, check_same_thread=False)
            columns = {str(name) for _, name, *_ in self.connection.execute("PRAGMA table_info(writes)")}
        except sqlite3.Error as error:
            raise SystemExit(f"{path} cannot be read: {error}") from None
        if "idx" not in columns:
            raise SystemExit(
                f"{path} is not a database of LangGraph's SqliteSaver: it has no table of writes. If it is a copy of a file that "
                "a program has open, copy the file -wal beside that one, too"
            )
        self.path = "task_path" if "task_path" in columns else "''"

    def threads(self) -> list[str]:
        query = "SELECT DISTINCT thread_id FROM checkpoints ORDER BY thread_id"
        return [thread for (thread,) in self.connection.execute(query)]

    def written(self, thread: str) -> _Written:
        query = (
            "SELECT DISTINCT c.checkpoint_ns, c.checkpoint_id, w.task_id, w.channel FROM checkpoints c "
            "LEFT JOIN writes w USING (thread_id, checkpoint_ns, checkpoint_id) WHERE c.thread_id = ?"
        )
        return _by_checkpoint(self.connection.execute(query, (thread,)))

    def rows(self, thread: str) -> Generator[_Row, None, None]:
        # Graphs may go on meanwhile. A cursor alone ends the moment as soon as it has fetched the last checkpoint, before
        # the writes of that are read.
        self.connection.execute("BEGIN")
        try:
            yield from self._rows(thread)
        finally:
            self.connection.rollback()

    def _rows(self, thread: str) -> Iterator[_Row]:
        checkpoints = self.connection.execute(
            "SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, checkpoint, metadata FROM checkpoints "
            "WHERE thread_id = ? ORDER BY checkpoint_ns, checkpoint_id",
            (thread,),
        )
        for namespace, checkpoint_id, parent, tag, checkpoint, metadata in checkpoints:
            writes = self.connection.execute(
                f"SELECT task_id, {self.path}, channel, type, value FROM writes "
                "WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ? ORDER BY task_id, idx",
                (thread, namespace, checkpoint_id),
            )
            # Bytes may be stored as texts.
            yield _Row(
                namespace,
                checkpoint_id,
                parent or None,
                tag,
                _bytes(checkpoint),
                _bytes(metadata or "{}"),
                writes=[(task, path, channel, tag, _bytes(value)) for task, path, channel, tag, value in writes],
            )

    def saver(self) -> Any:
        from langgraph.checkpoint.sqlite import SqliteSaver as TheirSaver

        saver = TheirSaver(self.connection)
        # It would try to create its tables.
        saver.is_setup = True
        saver._has_task_path = self.path == "task_path"  # pyright: ignore[reportPrivateUsage]
        return saver


# Tags and bytes of values by channel and version; None where there is none beside the checkpoint. It may have a small one
# itself, or the channel has none.
_Blobs = dict[tuple[str, str], tuple[str, bytes] | None]


class _PostgresSource:
    def __init__(self, address: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            said = f"a database is read with psycopg, which cannot be imported ({error}): pip install 'psycopg[binary]'"
            raise SystemExit(said) from None
        try:
            # A pooler in transaction mode would lose prepared statements.
            self.connection = psycopg.connect(address_of(address), autocommit=True, prepare_threshold=None)
            self.connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            self.connection.read_only = True
            columns = self._columns("checkpoints")
            # Older savers have no paths.
            self.path = "task_path" if "task_path" in self._columns("checkpoint_writes") else "''::text"
        except (psycopg.Error, ValueError) as error:
            raise SystemExit(f"the source cannot be read: {error}") from None
        if "checkpoint" in columns and "checkpoint_id" not in columns:
            raise SystemExit("the source is a database of LangGraph's ShallowPostgresSaver, whose threads cannot be moved")
        if "checkpoint_id" not in columns:
            raise SystemExit(
                "the source has no tables of LangGraph's PostgresSaver. If they are in a schema of their own, name it in the "
                "address: options=-csearch_path=its_name"
            )

    def _columns(self, table: str) -> set[str]:
        """The columns of the table that the search path finds."""
        query = "SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        return {name for (name,) in self._query(query, table)}

    def _query(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            return cursor.execute(query.encode(), arguments).fetchall()

    def threads(self) -> list[str]:
        rows = self._query("SELECT DISTINCT thread_id FROM checkpoints ORDER BY thread_id")
        return [thread for (thread,) in rows]

    def written(self, thread: str) -> _Written:
        query = (
            "SELECT DISTINCT c.checkpoint_ns, c.checkpoint_id, w.task_id, w.channel FROM checkpoints c "
            "LEFT JOIN checkpoint_writes w USING (thread_id, checkpoint_ns, checkpoint_id) WHERE c.thread_id = %s"
        )
        return _by_checkpoint(self._query(query, thread))

    def rows(self, thread: str) -> Generator[_Row, None, None]:
        # Graphs may go on meanwhile.
        with self.connection.transaction():
            yield from self._rows(thread)

    def _rows(self, thread: str) -> Iterator[_Row]:
        # The values of the last checkpoint: those of all would be a list as often as it was changed.
        last, blobs = "", _Blobs()
        checkpoints = self._query(
            "SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id, checkpoint::text, metadata::text FROM checkpoints "
            "WHERE thread_id = %s ORDER BY checkpoint_ns, checkpoint_id",
            thread,
        )
        for namespace, checkpoint_id, parent, checkpoint, metadata in checkpoints:
            document: dict[str, Any] = json.loads(checkpoint)
            versions: dict[str, Any] = document.get("channel_versions", {})
            named = {(channel, str(version)) for channel, version in versions.items()}
            blobs = self._blobs(thread, namespace, named, blobs if namespace == last else {})
            last = namespace
            values = [(channel, *blob) for (channel, _), blob in blobs.items() if blob]
            if parent and document.get("v", _WITH_TASKS) < _WITH_TASKS and (waiting := self._waiting(thread, parent)):
                values.append((TASKS, "msgpack", waiting))
                document["channel_versions"] = {**versions, TASKS: _newest(versions)}
                checkpoint = json.dumps(document)
            writes = self._query(
                f"SELECT task_id, {self.path}, channel, type, blob FROM checkpoint_writes "
                "WHERE thread_id = %s AND checkpoint_ns = %s AND checkpoint_id = %s ORDER BY task_id, idx",
                thread,
                namespace,
                checkpoint_id,
            )
            yield _Row(
                namespace,
                checkpoint_id,
                parent or None,
                "",
                checkpoint.encode(),
                metadata.encode(),
                values,
                [(task, path, channel, tag, bytes(blob)) for task, path, channel, tag, blob in writes],
            )

    def _blobs(self, thread: str, namespace: str, named: set[tuple[str, str]], known: _Blobs) -> _Blobs:
        """The values of these versions, some of which are known."""
        blobs: _Blobs = {version: known.get(version) for version in sorted(named)}
        if new := [version for version in blobs if version not in known]:
            found = self._query(
                "SELECT channel, version, type, blob FROM checkpoint_blobs WHERE thread_id = %s AND checkpoint_ns = %s "
                "AND (channel, version) IN (SELECT * FROM unnest(%s::text[], %s::text[]))",
                thread,
                namespace,
                [channel for channel, _ in new],
                [version for _, version in new],
            )
            blobs |= {(channel, version): (tag, bytes(blob or b"")) for channel, version, tag, blob in found if tag != "empty"}
        return blobs

    def _waiting(self, thread: str, parent: str) -> bytes | None:
        """The tasks that wait in a checkpoint of an older version: its parent's writes, which newer ones have as a channel."""
        waiting = self._query(
            "SELECT type, blob FROM checkpoint_writes WHERE thread_id = %s AND checkpoint_id = %s AND channel = %s "
            f"ORDER BY {self.path}, task_id, idx",
            thread,
            parent,
            TASKS,
        )
        for tag, _ in waiting:
            if tag != "msgpack":
                raise _NotMoved(f"a waiting task of checkpoint {parent} was written as {tag!r}, which cannot be put into a list")
        return _list(bytes(blob) for _, blob in waiting) if waiting else None

    def saver(self) -> Any:
        from langgraph.checkpoint.postgres import PostgresSaver as TheirSaver
        from psycopg.rows import dict_row

        self.connection.row_factory = dict_row  # type: ignore[assignment] # pyright: ignore[reportAttributeAccessIssue]
        saver: Any = TheirSaver(self.connection)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
        if self.path != "task_path":
            # It asks for a column that the table does not have.
            saver.SELECT_SQL = saver.SELECT_SQL.replace("cw.task_path", self.path)
            saver.SELECT_PENDING_SENDS_SQL = saver.SELECT_PENDING_SENDS_SQL.replace("task_path", self.path)
        return saver


def _by_checkpoint(rows: Iterable[tuple[Any, ...]]) -> _Written:
    """Of namespaces, ids, tasks and channels."""
    written: _Written = {}
    for namespace, checkpoint_id, task, channel in rows:
        tasks = written.setdefault((namespace, checkpoint_id), set())
        if task is not None:
            tasks.add((task, channel in WRITES_IDX_MAP))
    return written


@dataclass
class Report:
    """What was moved, and what was not."""

    threads: int = 0
    checkpoints: int = 0
    writes: int = 0
    # What was not moved, or is not equal afterwards: where, and why.
    problems: list[str] = field(default_factory=list[str])


class _NotMoved(Exception):
    """Why a thread is not moved."""


def move(source: _Source, target: ThreadkeepSaver | None, *, compare: bool = True) -> Report:
    """Moves every thread of a source; without a target, only reads them."""
    report = Report()
    threads = source.threads()
    store = target._store if target else None  # pyright: ignore[reportPrivateUsage]
    for number, thread in enumerate(threads):
        _progress(number, len(threads), "threads")
        try:
            if target and _has(target, thread):
                raise _NotMoved(_there(source, target, thread))
            _move_thread(source, store, thread, report)
        except (_NotMoved, ThreadkeepError) as error:
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


def _there(source: _Source, target: ThreadkeepSaver, thread: str) -> str:
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


def _move_thread(source: _Source, store: Store | None, thread: str, report: Report) -> None:
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
            raise _NotMoved(f"{error}; {left}") from error
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


def _move_row(store: Store | None, thread: str, row: _Row, put: _Put, moved: Report) -> None:
    parent = row.parent
    if parent is not None and (row.namespace, parent) not in put:
        place = f"thread {thread!r}, checkpoint {row.id}"
        # Clocks of several machines differ.
        why = "has a newer id" if parent > row.id else "is missing"
        moved.problems.append(f"{place}: its parent {parent} {why}; it was moved without one")
        parent = None
    if row.tag not in ("", "msgpack"):
        raise _NotMoved(f"checkpoint {row.id} was written as {row.tag!r}, which cannot be cut apart")
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


def _progress(done: int, total: int, what: str) -> None:
    if sys.stderr.isatty():
        width = 30 * done // max(total, 1)
        end = "\n" if done == total else ""
        print(f"\r[{'#' * width}{' ' * (30 - width)}] {done} of {total} {what}", end=end, file=sys.stderr, flush=True)


def _newest(versions: dict[str, Any]) -> Any:
    """The version under which LangGraph shows waiting tasks."""
    try:
        return max(versions.values(), default=Store.next_version(None))
    except TypeError as error:
        raise _NotMoved(f"its channels have versions of several types: {error}") from error


def _list(items: Iterable[bytes]) -> bytes:
    """The MessagePack of a list of these."""
    parts = list(items)
    if len(parts) < 16:
        return bytes([0x90 | len(parts)]) + b"".join(parts)
    head = (b"\xdc", 2) if len(parts) < 1 << 16 else (b"\xdd", 4)
    return head[0] + len(parts).to_bytes(head[1], "big") + b"".join(parts)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


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
    end_in_order()
    source = _PostgresSource(given.source) if is_address(given.source) else _SqliteSource(given.source)
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
