"""What LangGraph's savers and ours cost through a real graph, in one run: CPU of the saver's calls, bytes, head and history.

A conversation of a graph with one node: a message in, a message out, a turn. Every saver plays the same one; the savers take
turns in pieces, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.postgres import PostgresSaver as TheirPostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver as TheirSqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver as TheirAsyncSqliteSaver
from langgraph.graph import START, MessagesState, StateGraph

from threadkeep.langgraph import AsyncSqliteSaver, PostgresSaver, SqliteSaver

WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not "
    "what all were we when your can said there use an each which she do how their if will up other about out many then"
).split()
CALLS = ["get_tuple", "put", "put_writes", "list", "aget_tuple", "aput", "aput_writes", "alist"]
CONFIG: Any = {"configurable": {"thread_id": "t"}}


def text(chance: random.Random, size: int) -> str:
    words: list[str] = []
    length = 0
    while length < size:
        words.append(chance.choice(WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[:size]


class Subject:
    """A saver, its graph, and what its calls took so far."""

    def __init__(self, name: str, saver: Any, size: int, reopen: Callable[[], Any], bytes_of: Callable[[], int]) -> None:
        self.name, self.saver, self.reopen, self.bytes_of = name, saver, reopen, bytes_of
        self.calls = self.process = 0.0
        self.chance = random.Random(1)
        self.is_async = name.startswith("Async") or " Async" in name
        answers = random.Random(2)

        def answer(state: MessagesState) -> dict[str, Any]:
            return {"messages": [AIMessage(text(answers, size), id=f"a-{len(state['messages']):08}")]}

        for call in CALLS:
            self.measure(call)
        builder = StateGraph(MessagesState)
        builder.add_node("model", answer)
        builder.add_edge(START, "model")
        self.graph = builder.compile(checkpointer=saver)
        self.size, self.turns = size, 0

    def measure(self, name: str) -> None:
        call = getattr(self.saver, name)

        def sync(*args: Any, **more: Any) -> Any:
            # Calls run in several threads, each counts its own.
            began = time.thread_time()
            try:
                return call(*args, **more)
            finally:
                self.calls += time.thread_time() - began

        if not name.startswith("a") and not name.endswith("list"):
            setattr(self.saver, name, sync)

    async def play(self, turns: int) -> None:
        began = time.process_time()
        for _ in range(turns):
            message = HumanMessage(text(self.chance, self.size), id=f"h-{self.turns:08}")
            if self.is_async:
                await self.graph.ainvoke({"messages": [message]}, CONFIG, durability="sync")
            else:
                self.graph.invoke({"messages": [message]}, CONFIG, durability="sync")
            self.turns += 1
        self.process += time.process_time() - began


def timed(call: Callable[[], Any], times: int) -> float:
    """The shortest of some times, in milliseconds."""
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best * 1000


def folder_size(folder: Path) -> Callable[[], int]:
    return lambda: sum(file.stat().st_size for file in folder.iterdir())


async def measure(size: int, turns: int, postgres: str | None, root: Path) -> list[dict[str, Any]]:
    subjects: list[Subject] = []
    rows = []
    async with AsyncExitStack() as stack:
        def add(name: str, kind: Any, **more: Any) -> Any:
            folder = root / f"{name} {size}".replace(" ", "-")
            folder.mkdir()
            path = str(folder / "a.db")
            return folder, path, lambda: kind.from_conn_string(path, **more)

        for name, kind in [("threadkeep SqliteSaver", SqliteSaver), ("langgraph SqliteSaver", TheirSqliteSaver)]:
            folder, _, opener = add(name, kind)
            saver = stack.enter_context(opener())
            subjects.append(Subject(name, saver, size, opener, folder_size(folder)))
        for name, kind, reader in [
            ("threadkeep AsyncSqliteSaver", AsyncSqliteSaver, SqliteSaver),
            ("langgraph AsyncSqliteSaver", TheirAsyncSqliteSaver, TheirSqliteSaver),
        ]:
            folder, path, opener = add(name, kind)
            saver = await stack.enter_async_context(opener())
            reopen = lambda reader=reader, path=path: reader.from_conn_string(path)  # noqa: E731
            subjects.append(Subject(name, saver, size, reopen, folder_size(folder)))
        if postgres:
            for name, kind in [("threadkeep PostgresSaver", PostgresSaver), ("langgraph PostgresSaver", TheirPostgresSaver)]:
                url = database(postgres, f"bench_{name.split()[0]}_{size}")
                opener = lambda kind=kind, url=url: kind.from_conn_string(url)  # noqa: E731
                saver = stack.enter_context(opener())
                saver.setup()
                subjects.append(Subject(name, saver, size, opener, lambda url=url: database_size(url)))
        while subjects[-1].turns < turns:
            for subject in subjects:
                await subject.play(min(25, turns - subject.turns))
    for subject in subjects:
        with ExitStack() as stack2:
            saver = stack2.enter_context(subject.reopen())
            saver.get_tuple({"configurable": {"thread_id": "none"}})
            # Later reads find what this one has remembered.
            history_first = timed(lambda: list(saver.list(CONFIG, limit=100)), 1)
        with ExitStack() as stack2:
            saver = stack2.enter_context(subject.reopen())
            saver.get_tuple({"configurable": {"thread_id": "none"}})
            first = timed(lambda: saver.get_tuple(CONFIG), 1)
            head = timed(lambda: saver.get_tuple(CONFIG), 5)
            history = timed(lambda: list(saver.list(CONFIG, limit=100)), 2)
        rows.append(
            {
                "saver": subject.name,
                "payload": size,
                "turns": turns,
                "calls_ms": None if subject.is_async else subject.calls / turns * 1000,
                "process_ms": subject.process / turns * 1000,
                "times_raw": subject.bytes_of() / (2 * size * turns),
                "head_cold_ms": first,
                "head_ms": head,
                "history_100_first_ms": history_first,
                "history_100_ms": history,
            }
        )
    return rows


def database(url: str, name: str) -> str:
    """A new database on a server."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name}")
        connection.execute(f"CREATE DATABASE {name}")
    base, _, query = url.partition("?")
    return base.rsplit("/", 1)[0] + f"/{name}" + (f"?{query}" if query else "")


def check_flushes(url: str) -> str:
    """Refuses a server that acknowledges what it has not flushed, as the savers on SQLite flush; else, its version and settings."""
    import psycopg

    found: dict[str, Any] = {}
    with psycopg.connect(url, autocommit=True) as connection:
        for name in ("server_version", "fsync", "synchronous_commit", "full_page_writes"):
            row = connection.execute(f"SHOW {name}").fetchone()
            assert row
            found[name] = row[0]
    release = found.pop("server_version")
    for name, value in found.items():
        if value != "on":
            raise SystemExit(f"the server of a measurement must flush, and its {name} is {value}")
    return f"Postgres {release}, " + ", ".join(f"{name}={value}" for name, value in found.items())


def database_size(url: str) -> int:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        tables = "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
        row = connection.execute(tables).fetchone()
        assert row
        return int(row[0])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--turns", type=int, default=500)
    arguments.add_argument("--sizes", type=int, nargs="+", default=[128, 2048])
    arguments.add_argument("--postgres", help="the program that starts a private Postgres that flushes, and prints its address")
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    root = Path(tempfile.mkdtemp(prefix="bench-python-"))
    server = None
    rows = []
    try:
        url = None
        if given.postgres:
            server = subprocess.Popen([given.postgres, "flushing"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert server.stdout
            url = server.stdout.readline().strip()
            print(check_flushes(url), end="\n\n", flush=True)
        for size in given.sizes:
            rows += asyncio.run(measure(size, given.turns, url, root))
    finally:
        if server and server.stdin:
            server.stdin.close()
            server.wait(60)
        shutil.rmtree(root, ignore_errors=True)
    print(f"| {given.turns} turns | bytes a message | CPU of the saver's calls | of the process | database / raw | head, first | head | list(100), first | list(100) |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        calls = "" if row["calls_ms"] is None else f"{row['calls_ms']:.2f} ms"
        print(
            f"| {row['saver']} | {row['payload']} | {calls} | {row['process_ms']:.2f} ms | {row['times_raw']:.2f} "
            f"| {row['head_cold_ms']:.1f} ms | {row['head_ms']:.1f} ms | {row['history_100_first_ms']:.0f} ms | {row['history_100_ms']:.0f} ms |"
        )
    if given.out:
        given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
