"""Savers on SQLite files."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from langgraph.checkpoint.serde.base import SerializerProtocol
from typing_extensions import Self

from threadkeep._core import Store, at_rest, in_thread, thread_number
from threadkeep.langgraph._saver import Fence, ThreadkeepSaver

_MEMORY = ":memory:"

_T = TypeVar("_T")
# A file, and how many milliseconds to wait for locks, if a connection says so.
_Place = tuple[str, int | None]

# The files of connections of aiosqlite that were closed here: programs make several savers from one.
_PLACES: WeakKeyDictionary[Any, _Place] = WeakKeyDictionary()


class _AsyncConnection(Protocol):
    """A connection of aiosqlite, for programs that do not have it, too."""

    def __await__(self) -> Generator[Any, None, Any]: ...
    def close(self) -> Awaitable[None]: ...


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

    conn: Any
    """The connection that the saver was made from, if it was one. To close it again is harmless."""

    def __init__(
        self,
        conn: sqlite3.Connection | str | os.PathLike[str],
        *,
        serde: SerializerProtocol | None = None,
        fence: Fence = "fork",
    ) -> None:
        path, busy_timeout = _place_of(conn, "SqliteSaver takes the path of a file or a connection of sqlite3 to it")
        super().__init__(_store(path, fence, busy_timeout), serde=serde)
        if isinstance(conn, sqlite3.Connection):
            self.conn = conn

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

    ``conn`` is the file's path, ``":memory:"``, or a connection to it: of aiosqlite, awaited or not, or of
    :mod:`sqlite3`. A connection is closed and says how long to wait for locks, as for :class:`SqliteSaver`. The event
    loop does not run meanwhile: make such savers before there is much to do. The end of the connection's ``async with``
    block is harmless, and several savers may be made from one connection of aiosqlite to a file.

    >>> import asyncio
    >>> async def main():
    ...     async with AsyncSqliteSaver.from_conn_string(":memory:") as saver:
    ...         return await saver.aget_tuple({"configurable": {"thread_id": "1"}})
    >>> print(asyncio.run(main()))
    None
    """

    conn: Any
    """The connection that the saver was made from, if it was one. To close it again is harmless."""

    def __init__(
        self,
        conn: _AsyncConnection | sqlite3.Connection | str | os.PathLike[str],
        *,
        serde: SerializerProtocol | None = None,
        fence: Fence = "fork",
    ) -> None:
        is_async = _is_of_aiosqlite(conn)
        if is_async:
            path, busy_timeout = _place_of_aiosqlite(conn)
        else:
            takes = "AsyncSqliteSaver takes the path of a file or a connection of aiosqlite or sqlite3 to it"
            path, busy_timeout = _place_of(conn, takes)
        super().__init__(_store(path, fence, busy_timeout), serde=serde)
        if is_async or isinstance(conn, sqlite3.Connection):
            self.conn = conn

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


def _place_of(conn: Any, takes: str) -> _Place:
    if isinstance(conn, sqlite3.Connection):
        # A cursor without the connection's `row_factory`, which may make anything of rows. One that is open would keep the
        # file open beyond the end of the connection.
        with closing(sqlite3.Cursor(conn)) as cursor:
            busy_timeout: int = cursor.execute("PRAGMA busy_timeout").fetchall()[0][0]
            path = _main(cursor.execute("PRAGMA database_list").fetchall())
        return _closed(path, conn.close), busy_timeout
    try:
        return os.fsdecode(conn), None
    except TypeError:
        raise TypeError(f"{takes}, not {type(conn).__name__}") from None


def _main(databases: list[Any]) -> str:
    """The file of the main database, which is the first one. A `text_factory` may leave its path in bytes."""
    return os.fsdecode(databases[0][2])


def _is_of_aiosqlite(conn: object) -> bool:
    # A program that has such a connection has imported the module. The package does not need it.
    aiosqlite = sys.modules.get("aiosqlite")
    return aiosqlite is not None and isinstance(conn, aiosqlite.Connection)


def _place_of_aiosqlite(conn: Any) -> _Place:
    place = _PLACES.get(conn)
    if place is None:
        path, busy_timeout, thread = _in_loop(_asked(conn))

        def close() -> None:
            _in_loop(conn.close())

        place = _closed(path, close, thread), busy_timeout
        # What was in memory is gone.
        if place[0] != _MEMORY:
            _PLACES[conn] = place
    return place


async def _asked(conn: Any) -> tuple[str, int, int]:
    """The file of a connection of aiosqlite, its busy timeout, and the number of its thread."""
    try:
        conn.row_factory = None
    except ValueError:
        # It is not open. LangGraph's saver awaits one that nobody has awaited yet, too.
        try:
            await conn
        except RuntimeError as error:  # Its thread can be started only once.
            says = "the connection of aiosqlite is closed: pass one that is open or not awaited yet, or the path of its file"
            raise ValueError(says) from error
        conn.row_factory = None
    threads: list[int] = []

    def text(given: bytes) -> bytes:
        # Only the connection calls it, on its own thread.
        threads.append(thread_number())
        return given

    conn.text_factory = text
    databases: list[Any] = await conn.execute_fetchall("PRAGMA database_list")
    times: list[Any] = await conn.execute_fetchall("PRAGMA busy_timeout")
    return _main(databases), times[0][0], threads[0]


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that drops answers after its end: a connection that cannot be opened sends one more."""

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        with suppress(RuntimeError):
            return super().call_soon_threadsafe(callback, *args, context=context)
        return None


def _in_loop(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine in an event loop of its own, on another thread. The caller's loop does not run while its thread
    waits here. A connection of aiosqlite has a thread of its own, which answers any loop.
    """

    def run() -> _T:
        # Not by `asyncio.run`, which programs replace in notebooks.
        with closing(_Loop()) as loop:
            return loop.run_until_complete(coroutine)

    # Not by an executor, whose lock a thread that forks holds while it waits for what is at rest here. Not by a thread of
    # Python, whose start and end may be interrupted: while a connection is closing, no saver may have its file open.
    return in_thread(run)


def _closed(path: str, close: Callable[[], object], thread: int = 0) -> str:
    """The place of a connection to this file, after it was closed, on a thread of this number if it has its own. Python may
    collect garbage there meanwhile, and a destructor may call a saver.
    """
    readers: list[sqlite3.Connection] = []

    def read() -> None:
        # The last connection that closes moves the log into the file, without the checksums of pages. One that may only
        # read does not.
        if path:
            with suppress(sqlite3.Error):
                reader = sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True, timeout=0)
                readers.append(reader)
                reader.execute("SELECT count(*) FROM sqlite_master").fetchall()

    def end() -> None:
        for reader in readers:
            reader.close()

    # Other savers of this process may have the file open. Python's SQLite is another one than theirs, and locks do not
    # keep two apart in one process: its first read would clear the index of the log under them, and its end drop their
    # locks.
    at_rest([read, close, end], thread)
    return path or _MEMORY


def _store(path: str, fence: Fence, busy_timeout: int | None) -> Store:
    if path == _MEMORY:
        return Store.memory(fence)
    # Of the directory where the saver was made: the file is opened by the first call, and again after a fork.
    return Store.sqlite(os.path.abspath(path), fence, busy_timeout)
