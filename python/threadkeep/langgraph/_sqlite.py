"""Savers on SQLite files."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path

from langgraph.checkpoint.serde.base import SerializerProtocol
from typing_extensions import Self

from threadkeep._core import Store, at_rest
from threadkeep.langgraph._saver import Fence, ThreadkeepSaver

_MEMORY = ":memory:"


class SqliteSaver(ThreadkeepSaver):
    """A saver on an SQLite file.

    ``conn`` is the file's path, ``":memory:"``, or a connection of :mod:`sqlite3` to it. A connection is closed, because
    two programs in one process must not have the file open: closing one would drop the other's locks. That waits for the
    running calls of other savers.

    A call waits for a lock that another process holds as long as the connection would (its ``timeout``; with 0 it does
    not wait), or 5 seconds if there is none. Each saver has a time of its own, also beside others on the same file.

    >>> saver = SqliteSaver(":memory:")
    >>> list(saver.list(None))
    []
    """

    def __init__(
        self,
        conn: sqlite3.Connection | str | os.PathLike[str],
        *,
        serde: SerializerProtocol | None = None,
        fence: Fence = "fork",
    ) -> None:
        try:
            path, busy_timeout = _place_of(conn)
        except TypeError:
            given = type(conn).__name__
            raise TypeError(f"SqliteSaver takes the path of a file or a connection of sqlite3 to it, not {given}") from None
        super().__init__(_store(path, fence, busy_timeout), serde=serde)

    @classmethod
    @contextmanager
    def from_conn_string(cls, conn_string: str, *, fence: Fence = "fork") -> Generator[Self, None, None]:
        """A saver on the file at a path, or in memory (``":memory:"``), closed at the end of the block."""
        saver = cls(conn_string, fence=fence)
        try:
            saver.setup()
            yield saver
        finally:
            saver.close()


class AsyncSqliteSaver(ThreadkeepSaver):
    """A saver on an SQLite file, for event loops.

    ``conn`` is the file's path, ``":memory:"``, or a connection of :mod:`sqlite3` to it, which is closed and says how
    long to wait for locks, as for :class:`SqliteSaver`. The event loop stands still while it is closed: make such
    savers before there is much to do. A connection of aiosqlite is refused.

    >>> import asyncio
    >>> async def main():
    ...     async with AsyncSqliteSaver.from_conn_string(":memory:") as saver:
    ...         return await saver.aget_tuple({"configurable": {"thread_id": "1"}})
    >>> print(asyncio.run(main()))
    None
    """

    def __init__(
        self,
        conn: sqlite3.Connection | str | os.PathLike[str],
        *,
        serde: SerializerProtocol | None = None,
        fence: Fence = "fork",
    ) -> None:
        try:
            path, busy_timeout = _place_of(conn)
        except TypeError:
            raise TypeError(
                f"AsyncSqliteSaver takes the path of a file, not {type(conn).__name__}: a connection of aiosqlite belongs to "
                "its own block, and closing it would drop the locks of the store. Pass the path, or use from_conn_string; to "
                "wait for locks as long as that connection did, pass sqlite3.connect(path, timeout=...)"
            ) from None
        super().__init__(_store(path, fence, busy_timeout), serde=serde)

    @classmethod
    @asynccontextmanager
    async def from_conn_string(cls, conn_string: str, *, fence: Fence = "fork") -> AsyncGenerator[Self, None]:
        """A saver on the file at a path, or in memory (``":memory:"``), closed at the end of the block."""
        saver = cls(conn_string, fence=fence)
        try:
            await saver.setup()
            yield saver
        finally:
            await saver.aclose()

    async def setup(self) -> None:  # type: ignore[override]
        """Opens the file and creates its tables. Doing it twice is harmless."""
        await self._store.setup()


def _place_of(conn: sqlite3.Connection | str | os.PathLike[str]) -> tuple[str, int | None]:
    """The file, and how many milliseconds to wait for locks, if a connection says so."""
    if not isinstance(conn, sqlite3.Connection):
        return os.fsdecode(conn), None
    # A cursor without the connection's `row_factory`, which may make anything of rows. One that is open would keep the file
    # open beyond the end of the connection.
    with closing(sqlite3.Cursor(conn)) as cursor:
        busy_timeout: int = cursor.execute("PRAGMA busy_timeout").fetchall()[0][0]
        # The first database is the main one. A `text_factory` may leave its path in bytes.
        path = os.fsdecode(cursor.execute("PRAGMA database_list").fetchall()[0][2])
    _close(conn, path)
    return path or _MEMORY, busy_timeout


def _close(conn: sqlite3.Connection, path: str) -> None:
    ends = [conn.close]
    if path:
        # The last connection that closes moves the log into the file, without the checksums of pages. One that may only
        # read does not.
        last = f"{Path(path).as_uri()}?mode=ro"
        with suppress(sqlite3.Error):
            reader = sqlite3.connect(last, uri=True, timeout=0)
            ends.append(reader.close)
            reader.execute("SELECT count(*) FROM sqlite_master").fetchall()
    # Other savers of this process may have the file open, and would lose their locks.
    at_rest(ends)


def _store(path: str, fence: Fence, busy_timeout: int | None) -> Store:
    if path == _MEMORY:
        return Store.memory(fence)
    # Of the directory where the saver was made: the file is opened by the first call, and again after a fork.
    return Store.sqlite(os.path.abspath(path), fence, busy_timeout)
