"""The databases of LangGraph's own savers, as sources of a move."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from langgraph.checkpoint.base import WRITES_IDX_MAP
from langgraph.checkpoint.serde.types import TASKS

from threadkeep._core import Store
from threadkeep.langgraph._postgres import address_of

# The version of checkpoints from which on waiting tasks are a channel, since LangGraph 0.5.
_WITH_TASKS = 4

# How many checkpoints of a database are read by one statement: all of a thread may be too much for the memory.
_AT_ONCE = 64


class NotMoved(Exception):
    """Why a thread is not moved."""


@dataclass
class Row:
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
Written = dict[tuple[str, str], set[tuple[str, bool]]]


class Source(Protocol):
    """A database of one of LangGraph's savers."""

    def threads(self) -> list[str]:
        """The threads' ids."""
        ...

    def written(self, thread: str) -> Written:
        """Which checkpoints a thread has, and which tasks have writes under them."""
        ...

    def rows(self, thread: str) -> Generator[Row, None, None]:
        """The checkpoints of a thread at one moment, oldest first. It is over when the generator is closed."""
        ...

    def saver(self) -> Any:
        """LangGraph's saver on it, to compare with."""
        ...


class SqliteSource:
    def __init__(self, path: str) -> None:
        address = f"{Path(path).absolute().as_uri()}?mode=ro"
        try:
            self.connection = sqlite3.connect(address, uri=True, check_same_thread=False)
            columns = {str(name) for _, name, *_ in self.connection.execute("PRAGMA table_info(writes)")}
        except sqlite3.Error as error:
            said = f"{path} cannot be read: {error}"
            if "unable to open" in str(error) and os.path.isfile(path) and os.access(path, os.R_OK):
                said += (
                    ". SQLite has to write files beside one in WAL mode: copy it, and the file -wal if there is one, to a "
                    "directory that can be written"
                )
            raise SystemExit(said) from None
        if "idx" not in columns:
            raise SystemExit(
                f"{path} is not a database of LangGraph's SqliteSaver: it has no table of writes. If it is a copy of a file that "
                "a program has open, copy the file -wal beside that one, too"
            )
        self.path = "task_path" if "task_path" in columns else "''"

    def threads(self) -> list[str]:
        query = "SELECT DISTINCT thread_id FROM checkpoints ORDER BY thread_id"
        return [thread for (thread,) in self.connection.execute(query)]

    def written(self, thread: str) -> Written:
        query = (
            "SELECT DISTINCT c.checkpoint_ns, c.checkpoint_id, w.task_id, w.channel FROM checkpoints c "
            "LEFT JOIN writes w USING (thread_id, checkpoint_ns, checkpoint_id) WHERE c.thread_id = ?"
        )
        return _by_checkpoint(self.connection.execute(query, (thread,)))

    def rows(self, thread: str) -> Generator[Row, None, None]:
        # Graphs may go on meanwhile. A cursor alone ends the moment as soon as it has fetched the last checkpoint, before
        # the writes of that are read.
        self.connection.execute("BEGIN")
        try:
            yield from self._rows(thread)
        finally:
            self.connection.rollback()

    def _rows(self, thread: str) -> Iterator[Row]:
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
            yield Row(
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


class PostgresSource:
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
        try:
            for table in ("checkpoints", "checkpoint_writes", "checkpoint_blobs"):
                self._query(f"SELECT thread_id FROM {table} LIMIT 0")
        except psycopg.Error as error:
            raise SystemExit(f"the source cannot be read: {error}") from None

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

    def written(self, thread: str) -> Written:
        query = (
            "SELECT DISTINCT c.checkpoint_ns, c.checkpoint_id, w.task_id, w.channel FROM checkpoints c "
            "LEFT JOIN checkpoint_writes w USING (thread_id, checkpoint_ns, checkpoint_id) WHERE c.thread_id = %s"
        )
        return _by_checkpoint(self._query(query, thread))

    def rows(self, thread: str) -> Generator[Row, None, None]:
        # Graphs may go on meanwhile.
        with self.connection.transaction():
            yield from self._rows(thread)

    def _rows(self, thread: str) -> Iterator[Row]:
        # The values of the last checkpoint: those of all would be a list as often as it was changed.
        last, blobs = "", _Blobs()
        for namespace, checkpoint_id, parent, checkpoint, metadata in self._checkpoints(thread):
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
            yield Row(
                namespace,
                checkpoint_id,
                parent or None,
                "",
                checkpoint.encode(),
                metadata.encode(),
                values,
                [(task, path, channel, tag, bytes(blob)) for task, path, channel, tag, blob in writes],
            )

    def _checkpoints(self, thread: str) -> Iterator[tuple[Any, ...]]:
        query = (
            "SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id, checkpoint::text, metadata::text FROM checkpoints "
            "WHERE thread_id = %s AND (checkpoint_ns, checkpoint_id) > (%s, %s) "
            f"ORDER BY checkpoint_ns, checkpoint_id LIMIT {_AT_ONCE}"
        )
        # No id is empty.
        namespace, checkpoint_id = "", ""
        while some := self._query(query, thread, namespace, checkpoint_id):
            yield from some
            namespace, checkpoint_id, *_ = some[-1]

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
                raise NotMoved(f"a waiting task of checkpoint {parent} was written as {tag!r}, which cannot be put into a list")
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


def _by_checkpoint(rows: Iterable[tuple[Any, ...]]) -> Written:
    """Of namespaces, ids, tasks and channels."""
    written: Written = {}
    for namespace, checkpoint_id, task, channel in rows:
        tasks = written.setdefault((namespace, checkpoint_id), set())
        if task is not None:
            tasks.add((task, channel in WRITES_IDX_MAP))
    return written


def _newest(versions: dict[str, Any]) -> Any:
    """The version under which LangGraph shows waiting tasks."""
    try:
        return max(versions.values(), default=Store.next_version(None))
    except TypeError as error:
        raise NotMoved(f"its channels have versions of several types: {error}") from error


def _list(items: Iterable[bytes]) -> bytes:
    """The MessagePack of a list of these."""
    parts = list(items)
    if len(parts) < 16:
        return bytes([0x90 | len(parts)]) + b"".join(parts)
    head = (b"\xdc", 2) if len(parts) < 1 << 16 else (b"\xdd", 4)
    return head[0] + len(parts).to_bytes(head[1], "big") + b"".join(parts)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
