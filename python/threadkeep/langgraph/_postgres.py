"""Savers on Postgres."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

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
        schema: str | None = None,
        fence: Fence = "fork",
    ) -> None:
        if pipe is not None:
            raise ValueError("pipe is not supported: a commit is one round trip already; leave it out")
        address = address_of(conn)
        super().__init__(Store.postgres(address, schema or _schema_of(address), fence), serde=serde)


class PostgresSaver(_Postgres):
    """A saver on a Postgres database. ``conn`` is its address, or a connection or pool of ``psycopg`` to it, of which only
    the address is used. Call :meth:`setup` once to create the tables. They are in ``schema``, else in the schema that the
    address names as its ``search_path``, else in ``public``::

        with PostgresSaver.from_conn_string("postgresql://localhost/app", schema="checkpoints") as saver:
            saver.setup()
            graph = builder.compile(checkpointer=saver)
    """

    @classmethod
    @contextmanager
    def from_conn_string(
        cls, conn_string: str, *, pipeline: bool = False, schema: str | None = None, fence: Fence = "fork"
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
    """A saver on a Postgres database, for event loops. ``await saver.setup()`` once creates the tables, where
    :class:`PostgresSaver` does::

        async with AsyncPostgresSaver.from_conn_string("postgresql://localhost/app") as saver:
            await saver.setup()
            graph = builder.compile(checkpointer=saver)
    """

    @classmethod
    @asynccontextmanager
    async def from_conn_string(
        cls,
        conn_string: str,
        *,
        pipeline: bool = False,
        serde: SerializerProtocol | None = None,
        schema: str | None = None,
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


# What a saver connects with.
_PARAMETERS = {
    *("application_name", "channel_binding", "connect_timeout", "dbname", "host", "hostaddr", "keepalives", "keepalives_count"),
    *("keepalives_idle", "keepalives_interval", "options", "password", "port", "sslmode", "sslrootcert"),
    *("target_session_attrs", "user"),
}
# What libpq says of its own ways to connect, which change nothing of where.
_OF_LIBPQ = {"client_encoding", "fallback_application_name", "gssencmode", "sslcertmode", "sslcompression", "sslsni"}
# What psycopg adds to the parameters of a connection.
_OF_PSYCOPG = {"autocommit", "binary", "context", "cursor_factory", "prepare_threshold", "row_factory"}


def address_of(conn: Any) -> str:
    """The address of a database: of a connection or a pool of psycopg, or as it is given."""
    if isinstance(conn, str):
        scheme, *_ = conn.split("://")
        if scheme.startswith(("postgres+", "postgresql+")):
            raise ValueError(f"{scheme}:// begins an address of SQLAlchemy: begin it with postgresql://")
        return conn
    if hasattr(conn, "conninfo"):  # A pool.
        from psycopg.conninfo import conninfo_to_dict

        if callable(conn.conninfo) or callable(conn.kwargs):
            raise ValueError("this pool computes its address for each connection: pass the address of the database instead")
        kwargs: dict[str, Any] = conn.kwargs or {}
        more = {name: value for name, value in kwargs.items() if name not in _OF_PSYCOPG}
        return _joined({**conninfo_to_dict(conn.conninfo), **more})
    if not hasattr(conn, "info"):
        raise TypeError(f"pass the address of the database, or a connection or pool of psycopg, not {type(conn).__name__}")
    return _joined({**conn.info.get_parameters(), "password": conn.info.password})


def _joined(parts: dict[str, Any]) -> str:
    given = {name: str(value) for name, value in parts.items() if value not in (None, "") and name not in _OF_LIBPQ}
    if unknown := sorted(set(given) - _PARAMETERS):
        raise ValueError(f"a saver cannot connect with {', '.join(unknown)}: pass the address of the database without it")
    # A URL: in words, the driver reads neither a file of certificates nor the modes that check them.
    single = [(name, one) for name, value in given.items() for one in (value.split(",") if name == "host" else [value])]
    return "postgresql://?" + "&".join(f"{name}={quote(value, safe='')}" for name, value in single)


# What other programs call the schema in an address. Postgres knows it as a setting only.
_SCHEMA_OF_OTHERS = ("search_path", "currentSchema")
# A parameter in an address of words, as libpq reads it.
_WORD = re.compile(r"(\w+)\s*=\s*(?:'((?:\\.|[^'\\])*)'|((?:\\.|[^\s'\\])*))", re.DOTALL)
# The setting in the options of a connection.
_SEARCH_PATH = re.compile(r"(?:^|\s)(?:-c\s*|--)search[_-]path=((?:\\.|[^\s\\])*)")
_NAME = re.compile(r'([A-Za-z_][\w$]*)|"([^"]+)"')


# How an address begins that is a URL.
_URLS = ("postgres://", "postgresql://")
# The words of which an address has at least one that is none.
_WHERE = {"dbname", "host", "hostaddr", "service"}


def is_address(text: str) -> bool:
    """Whether a text is the address of a database, a URL or libpq's words. Any other is the path of a file."""
    # Also one of SQLAlchemy, which a saver refuses with what to write.
    if text.startswith(_URLS) or (text.startswith(("postgres+", "postgresql+")) and "://" in text):
        return True
    names = {name for name, *_ in _WORD.findall(text)}
    return not names.isdisjoint(_WHERE) and not _WORD.sub("", text).strip()


def _schema_of(address: str) -> str:
    """The schema that an address names. LangGraph's savers leave it to the server, which looks for it in the search path."""
    if address.startswith(_URLS):
        given = parse_qsl(urlsplit(address).query.replace("+", "%2B"))
    else:
        given = [(name, _unescaped(quoted or plain)) for name, quoted, plain in _WORD.findall(address)]
    for name, value in given:
        if name in _SCHEMA_OF_OTHERS:
            raise ValueError(f"the address has {name}, which is no parameter of Postgres: leave it out, and pass schema={value!r}")
    set_to = [path for name, value in given if name == "options" for path in _SEARCH_PATH.findall(value)]
    if not set_to:
        return "public"
    path = _unescaped(set_to[-1])
    named = _NAME.fullmatch(path.strip())
    if not named or named[2] == "$user":
        raise ValueError(
            f"the address sets search_path to {path!r}, and a saver has its tables in one schema: pass schema= with its name"
        )
    return named[2] or str(named[1]).lower()


def _unescaped(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL)
