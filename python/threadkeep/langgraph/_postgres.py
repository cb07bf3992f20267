"""Savers on Postgres."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from langgraph.checkpoint.serde.base import SerializerProtocol
from typing_extensions import Self

from threadkeep._core import Store
from threadkeep.langgraph._saver import Fence, ThreadkeepSaver


class _Postgres(ThreadkeepSaver):
    def __init__(
        self,
        conn: Any,
        pipe: Any = None,
        serde: SerializerProtocol | None = None,
        *,
        schema: str = "public",
        fence: Fence = "fork",
    ) -> None:
        if pipe is not None:
            raise ValueError("pipe is not supported: a commit is one round trip already; leave it out")
        super().__init__(Store.postgres(_address(conn), schema, fence), serde=serde)


class PostgresSaver(_Postgres):
    """A saver on a Postgres database. ``conn`` is its address, or a connection or pool of ``psycopg`` to it, of which only
    the address is used. Call :meth:`setup` once to create the tables.
    """

    @classmethod
    @contextmanager
    def from_conn_string(
        cls, conn_string: str, *, pipeline: bool = False, schema: str = "public", fence: Fence = "fork"
    ) -> Generator[Self, None, None]:
        """A saver on the database at an address, closed at the end of the block. A commit is always one round trip, so
        ``pipeline`` changes nothing.
        """
        saver = cls(conn_string, schema=schema, fence=fence)
        try:
            yield saver
        finally:
            saver.close()


class AsyncPostgresSaver(_Postgres):
    """A saver on a Postgres database, for event loops. ``await saver.setup()`` once creates the tables."""

    @classmethod
    @asynccontextmanager
    async def from_conn_string(
        cls,
        conn_string: str,
        *,
        pipeline: bool = False,
        serde: SerializerProtocol | None = None,
        schema: str = "public",
        fence: Fence = "fork",
    ) -> AsyncGenerator[Self, None]:
        """A saver on the database at an address, closed at the end of the block."""
        saver = cls(conn_string, serde=serde, schema=schema, fence=fence)
        try:
            yield saver
        finally:
            await saver.aclose()

    async def setup(self) -> None:  # type: ignore[override]
        """Creates the tables. Doing it twice is harmless."""
        await self._store.setup()


def _address(conn: Any) -> str:
    if isinstance(conn, str):
        return conn
    if (address := getattr(conn, "conninfo", None)) is not None:  # A pool.
        return str(address)
    info = conn.info
    parts = {**info.get_parameters(), "password": info.password}
    quoted = (f"{key}='{_escaped(str(value))}'" for key, value in parts.items() if value)
    return " ".join(quoted)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "\\'")
