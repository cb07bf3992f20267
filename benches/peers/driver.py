"""Sends the operations of the workloads `lean` and `lead` to one of LangGraph's savers and measures them.

The workload runner starts it with a job (JSON) as its only argument, as it starts itself for our savers, and takes the last line
of its output: a row of the same schema (benches/README.md). Only the calls of the saver are timed, not the making of
their arguments.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import os
import random
import resource
import sys
import threading
import time
import uuid
from contextlib import AsyncExitStack
from importlib.metadata import version
from queue import Empty

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.serde.types import _DeltaSnapshot

WORDS = (
    "the of and to in is that for it as with on be this by are at from or an have not agent thread state store write "
    "read value model tool message result search file plan error token cache query index table page commit replay "
    "history snapshot channel"
).split()
HOOKS_BEFORE, HOOKS_AFTER, COUNTING_HOOK = 7, 11, 6
POINTS = 40
PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


# ---- what is sent


def text(turn: int, role: int, size: int) -> str:
    x, picked, length = 2 * turn + role + 1, [], 0
    while length < size:
        x = (1664525 * x + 1013904223) % 2**32
        picked.append(WORDS[(x >> 16) % len(WORDS)])
        length += len(picked[-1]) + 1
    return " ".join(picked)[:size].ljust(size, ".")


class Conversation:
    """The calls of one thread. A call is (method, config, arguments); its values are live, so use it before the next."""

    def __init__(self, case: dict, index: int):
        self.thread, self.size, self.lead = f"t{index}", case["size"], case["workload"] == "lead"
        self.every = int(case["mode"].partition(":")[2]) if case["mode"].startswith("delta") else None
        self.random, self.index = random.Random(index), index
        self.messages: list = []
        self.versions: dict[str, str] = {}
        self.seen: dict[str, dict] = {"__input__": {}}
        self.step, self.made, self.parent, self.since = -2, 0, None, (0, 0)
        self.raw_bytes = self.turns = self.checkpoints = 0

    def config(self) -> dict:
        at = {"checkpoint_id": self.parent} if self.parent else {}
        return {"configurable": {"thread_id": self.thread, "checkpoint_ns": "", **at}}

    def put(self, source: str, bumped: list[str], written: list[str], values: dict):
        self.step, self.made = self.step + 1, self.made + 1
        new = dict.fromkeys(bumped, f"{self.made:032d}.0.{self.random.randrange(10**16):016d}")
        self.versions.update(new)
        metadata = {"source": source, "step": self.step, "parents": {}}
        if self.every is None:
            if "messages" in self.versions:
                values = {**values, "messages": self.messages}
        else:
            updates, steps = self.since[0] + ("messages" in written), self.since[1] + 1
            if updates >= self.every:
                values, self.since = {**values, "messages": _DeltaSnapshot(self.messages)}, (0, 0)
            else:
                self.since = (updates, steps)
                metadata["counters_since_delta_snapshot"] = {"messages": self.since}
        n = self.made
        checkpoint = {
            "v": 4,
            "ts": f"2025-01-01T{n // 3600 % 24:02d}:{n // 60 % 60:02d}:{n % 60:02d}.000000+00:00",
            # A version 6 UUID: text order is creation order.
            "id": f"1f{self.index % 2**24:06x}-{n >> 12:04x}-6{n % 4096:03x}-8000-{0:012x}",
            "channel_values": values,
            "channel_versions": dict(self.versions),
            "versions_seen": {node: dict(seen) for node, seen in self.seen.items()},
            "updated_channels": sorted(written),
        }
        call = ("put", self.config(), (checkpoint, metadata, new))
        self.parent = checkpoint["id"]
        self.checkpoints += 1
        return call

    def chain(self, human, ai):
        """The nodes of a turn, each with what it sends to `messages`."""
        yield "__start__", [human]
        if self.lead:
            stamp = {"run_id": None, "timestamp": "2025-01-01T00:00:00.000000+00:00"}
            stamped = HumanMessage(id=human.id, content=human.content, name="user-input", additional_kwargs=stamp)
            for hook in range(HOOKS_BEFORE):
                yield f"Middleware{hook:02d}.before_model", [*self.messages[:-1], stamped] if hook == 0 else None
        yield "model", [ai]
        if self.lead:
            usage = {"input_tokens": 1000, "output_tokens": 100, "total_tokens": 1100}
            counted = AIMessage(id=ai.id, content=ai.content, usage_metadata=usage)
            for hook in range(HOOKS_AFTER):
                yield f"Middleware{hook:02d}.after_model", [counted] if hook == COUNTING_HOOK else None

    def turn(self):
        t, self.turns = self.turns, self.turns + 1
        human = HumanMessage(id=f"h-{t:08d}", content=text(t, 0, self.size))
        ai = AIMessage(id=f"a-{t:08d}", content=text(t, 1, self.size))
        yield self.put("input", ["__start__"], ["__start__"], {"__start__": {"messages": [human]}})
        nodes = self.chain(human, ai)
        current = next(nodes, None)
        while current:
            node, sent = current
            if sent:
                self.raw_bytes += size_of(sent[-1])
                self.fold(sent)
            # The next node may read the messages.
            following = next(nodes, None)
            writes = [("messages", sent)] if sent else []
            if following:
                writes.append((f"branch:to:{following[0]}", None))
            task = str(uuid.UUID(int=self.random.getrandbits(128), version=4))
            yield "put_writes", self.config(), (writes or [("__no_writes__", None)], task, f"~__pregel_pull, {node}")
            trigger = "__start__" if node == "__start__" else f"branch:to:{node}"
            self.seen[node] = {trigger: self.versions[trigger]}
            written = [channel for channel, _ in writes] or ["__no_writes__"]
            yield self.put("loop", [trigger, *written], written, {c: None for c in written if c != "messages"})
            current = following

    def fold(self, sent: list) -> None:
        # Build a new list, because the saver may still hold the previous one.
        if len(sent) > 1:
            self.messages = list(sent)
        elif self.messages and self.messages[-1].id == sent[0].id:
            self.messages = [*self.messages[:-1], sent[0]]
        else:
            self.messages = [*self.messages, sent[0]]


def size_of(message) -> int:
    new = {"type": message.type, "id": message.id, "content": message.content}
    if message.name:
        new |= {"name": message.name, "additional_kwargs": message.additional_kwargs}
    if getattr(message, "usage_metadata", None):
        new["usage_metadata"] = message.usage_metadata
    return len(json.dumps(new, separators=(",", ":")))


def digest(messages) -> str:
    lines = "".join(f"{m.type}\n{m.id}\n{m.content}\n" for m in messages)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


# ---- the savers


class Store:
    """A saver under one calling convention."""

    def __init__(self, saver, is_async: bool):
        self.saver, self.is_async = saver, is_async

    async def call(self, name: str, *arguments, **named):
        if self.is_async:
            return await getattr(self.saver, "a" + name)(*arguments, **named)
        return getattr(self.saver, name)(*arguments, **named)

    async def list(self, config: dict, limit: int) -> int:
        count = 0
        if self.is_async:
            async for _ in self.saver.alist(config, limit=limit):
                count += 1
        else:
            for _ in self.saver.list(config, limit=limit):
                count += 1
        return count

    async def messages(self, config: dict) -> list:
        """All messages at a checkpoint, rebuilt from what the saver returns as the runtime does it."""
        found = await self.call("get_tuple", config)
        value = found.checkpoint["channel_values"].get("messages")
        if value is not None:
            return getattr(value, "value", value)
        history = await self.call("get_delta_channel_history", config=found.config, channels=["messages"])
        path = history["messages"]
        seed = path.get("seed")
        messages = list(getattr(seed, "value", seed) or [])
        places = {message.id: place for place, message in enumerate(messages)}
        for _, _, sent in path["writes"]:
            for message in sent:
                if message.id in places:
                    messages[places[message.id]] = message
                else:
                    places[message.id] = len(messages)
                    messages.append(message)
        return messages


async def open_store(stack: AsyncExitStack, case: dict, target: str) -> Store:
    match case["backend"]:
        case "langgraph-sqlite":
            from langgraph.checkpoint.sqlite import SqliteSaver

            saver = stack.enter_context(SqliteSaver.from_conn_string(target))
            saver.setup()
            return Store(saver, False)
        case "langgraph-async":
            from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

            saver = await stack.enter_async_context(AsyncSqliteSaver.from_conn_string(target))
            await saver.setup()
            return Store(saver, True)
        case "langgraph-postgres":
            from langgraph.checkpoint.postgres import PostgresSaver

            saver = stack.enter_context(PostgresSaver.from_conn_string(target))
            saver.setup()
            return Store(saver, False)
        case other:
            raise SystemExit(f"{other} is not one of LangGraph's savers")


async def settings(case: dict, store: Store) -> str:
    """Versions, and what a commit waits for: asked of the connection that is measured, as each has its own settings."""
    versions = f"langgraph {version('langgraph')}, Python {sys.version.split()[0]}"
    connection = store.saver.conn
    if case["backend"] == "langgraph-postgres":
        names = ("server_version", "fsync", "synchronous_commit")
        found = [connection.execute(f"SHOW {name}").fetchone()[name] for name in names]
        saver = f"checkpoint-postgres {version('langgraph-checkpoint-postgres')}"
        return f"{versions}, {saver}, Postgres {found[0]}, fsync={found[1]}, synchronous_commit={found[2]}"
    import sqlite3

    found = []
    for name in ("journal_mode", "synchronous"):
        if store.is_async:
            async with connection.execute(f"PRAGMA {name}") as cursor:
                row = await cursor.fetchone()
        else:
            row = connection.execute(f"PRAGMA {name}").fetchone()
        found.append(row[0])
    mode, synchronous = found[0], ("OFF", "NORMAL", "FULL", "EXTRA")[found[1]]
    saver = f"checkpoint-sqlite {version('langgraph-checkpoint-sqlite')}"
    return f"{versions}, {saver}, SQLite {sqlite3.sqlite_version}, {mode}, synchronous={synchronous}"


def stored(case: dict, target: str) -> int:
    if case["backend"] == "langgraph-postgres":
        import psycopg

        tables = "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
        with psycopg.connect(target) as session:
            return int(session.execute(tables).fetchone()[0])
    return sum(os.path.getsize(target + end) for end in ("", "-wal") if os.path.exists(target + end))


# ---- measuring


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def at(ordered: list[float], percent: float) -> float:
    return round(ordered[round((len(ordered) - 1) * percent / 100)] * 1000, 4)


def median(values: list[float]) -> float:
    return at(sorted(values), 50)


def describe(turns: list[float]) -> dict:
    ordered, tenth = sorted(turns), max(1, len(turns) // 10)
    return {
        "turns_done": len(turns),
        "turn_p50_ms": at(ordered, 50),
        "turn_p99_ms": at(ordered, 99),
        "turn_first10pct_ms": median(turns[:tenth]),
        "turn_last10pct_ms": median(turns[-tenth:]),
        "turn_sum_s": round(sum(turns), 3),
        "percentiles": [(percent, at(ordered, percent)) for percent in PERCENTS],
    }


async def one_turn(store: Store, conversation: Conversation) -> tuple[float, float]:
    wall = cpu = 0.0
    for method, config, arguments in conversation.turn():
        busy, started = time.process_time(), time.perf_counter()
        await store.call(method, config, *arguments)
        wall += time.perf_counter() - started
        cpu += time.process_time() - busy
    return wall, cpu


async def repeated(times: int, read) -> float:
    taken: list[float] = []
    while len(taken) < times and (not taken or sum(taken) < 2):
        started = time.perf_counter()
        await read()
        taken.append(time.perf_counter() - started)
    return median(taken)


async def single(case: dict, target: str, report) -> None:
    async with AsyncExitStack() as stack:
        store = await open_store(stack, case, target)
        conversation = Conversation(case, 0)
        row = {"settings": await settings(case, store), "rss_base": peak()}
        every, started = -(-case["turns"] // POINTS), time.perf_counter()
        turns, cpu, curve = [], [], []
        for n in range(1, case["turns"] + 1):
            wall, busy = await one_turn(store, conversation)
            turns.append(wall)
            cpu.append(busy)
            if n % every == 0:
                point = {"turn": n, "ms": median(turns[-every:]), "cpu_ms": median(cpu[-every:])}
                curve.append(point | {"bytes": stored(case, target), "raw_bytes": conversation.raw_bytes})
            if time.perf_counter() - started > case["cap_s"] and n < case["turns"]:
                row["capped"] = "time"
                break
        row |= describe(turns)
        row |= {"wall_s": round(time.perf_counter() - started, 3), "cpu_s": round(sum(cpu), 3), "curve": curve}
        row |= {"rss_peak": peak(), "raw_bytes": conversation.raw_bytes, "checkpoints": conversation.checkpoints}
        if len(cpu) >= 30:
            row |= {"cpu_turn_at20_ms": median(cpu[10:30]), "cpu_turn_end_ms": median(cpu[-20:])}
        row["bytes_open"] = row["bytes_closed"] = stored(case, target)
        report(row)

        head = {"configurable": {"thread_id": "t0", "checkpoint_ns": ""}}
        found = await store.messages(head)
        row |= {"messages": len(found), "digest": digest(found), "ok": digest(found) == digest(conversation.messages)}
        back = (await store.call("get_tuple", head)).parent_config
        row["back_digest"] = digest(await store.messages(back))
        row["head_warm_ms"] = await repeated(20, lambda: store.messages(head))
        row["back_warm_ms"] = await repeated(20, lambda: store.messages(back))
        for limit in (10, 50, 100, 200):
            row[f"list{limit}_ms"] = await repeated(5, lambda: store.list(head, limit))
            report(row)
    row |= {"bytes_closed": stored(case, target), "rss_peak_all": peak()}
    report(row)


async def cold(case: dict, target: str, phase: str, report) -> None:
    started = time.perf_counter()
    async with AsyncExitStack() as stack:
        store = await open_store(stack, case, target)
        opened = time.perf_counter() - started
        config = {"configurable": {"thread_id": "t0", "checkpoint_ns": ""}}
        if phase == "cold-back":
            config = (await store.call("get_tuple", config)).parent_config
        started = time.perf_counter()
        found = await store.messages(config)
        read = round((time.perf_counter() - started) * 1000, 4)
    if phase == "cold-back":
        report({"cold_back_ms": read})
    else:
        report({"cold_open_ms": round(opened * 1000, 4), "cold_head_ms": read, "cold_digest": digest(found)})


async def write_all(store: Store, case: dict, writer: int) -> tuple[list[float], list[str], bool]:
    """Runs one turn per conversation of a writer in rotation; returns latencies, digests, and whether it was capped."""
    conversations = [Conversation(case, index) for index in range(writer, case["threads"], case["writers"])]
    deadline, taken = time.perf_counter() + case["cap_s"], []
    for _ in range(case["turns"]):
        for conversation in conversations:
            if time.perf_counter() > deadline:
                return taken, [], True
            taken.append((await one_turn(store, conversation))[0])
    return taken, [digest(conversation.messages) for conversation in conversations], False


def process_writer(case: dict, target: str, writer: int, barrier, results) -> None:
    # A parent that is killed cannot end its daemons, whose output the runner would wait for.
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()

    async def run() -> None:
        async with AsyncExitStack() as stack:
            store = await open_store(stack, case, target)
            barrier.wait()
            started, busy = time.perf_counter(), time.process_time()
            written = await write_all(store, case, writer)
            ended, used = time.perf_counter(), time.process_time() - busy
            results.put((written, started, ended, used, await settings(case, store)))

    asyncio.run(run())


def gathered(queue, processes: list) -> list:
    """What each process puts into the queue. One that ends without success would be waited for, for ever."""
    found: list = []
    while len(found) < len(processes):
        try:
            found.append(queue.get(timeout=1))
        except Empty:
            if failed := [process.exitcode for process in processes if process.exitcode]:
                raise SystemExit(f"a writer failed: it ended with {failed[0]}") from None
    return found


async def concurrent(case: dict, target: str, report) -> None:
    """Runs each saver in its best layout: threads, tasks, or processes with one connection each."""
    layout = {"langgraph-sqlite": "threads", "langgraph-async": "tasks", "langgraph-postgres": "processes"}[case["backend"]]
    async with AsyncExitStack() as stack:
        store = await open_store(stack, case, target)
        row = {"settings": await settings(case, store), "layout": layout, "rss_base": peak()}
        busy = time.process_time()
        started, results = time.perf_counter(), []
        if layout == "tasks":
            results = await asyncio.gather(*(write_all(store, case, writer) for writer in range(case["writers"])))
        elif layout == "threads":
            run = lambda writer: results.append(asyncio.run(write_all(store, case, writer)))
            threads = [threading.Thread(target=run, args=(writer,)) for writer in range(case["writers"])]
            for thread in threads:
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join)
        else:
            context = multiprocessing.get_context("spawn")
            barrier, queue = context.Barrier(case["writers"]), context.Queue()
            arguments = [(case, target, writer, barrier, queue) for writer in range(case["writers"])]
            # Daemons end with this process, which does not wait for them if one has failed.
            processes = [context.Process(target=process_writer, args=each, daemon=True) for each in arguments]
            for process in processes:
                process.start()
            ended = gathered(queue, processes)
            row["settings"] = " | ".join(sorted({each[-1] for each in ended}))
            for process in processes:
                process.join()
            results = [written for written, *_ in ended]
        wall, cpu = time.perf_counter() - started, time.process_time() - busy
        if layout == "processes":
            # The clock is machine-wide, so all processes agree on it.
            wall = max(end for _, _, end, _, _ in ended) - min(start for _, start, *_ in ended)
            cpu = sum(used for *_, used, _ in ended)
        if len(results) != case["writers"]:
            raise SystemExit("a writer failed")
        taken = [turn for turns, _, _ in results for turn in turns]
        row |= describe(taken) | {"wall_s": round(wall, 3), "cpu_s": round(cpu, 3), "rss_peak": peak()}
        row |= {"turns_per_s": round(len(taken) / wall, 1), "bytes_open": stored(case, target)}
        if any(capped for _, _, capped in results):
            row["capped"] = "time"
        else:
            expected = {d for _, digests, _ in results for d in digests}
            heads = [{"configurable": {"thread_id": f"t{n}", "checkpoint_ns": ""}} for n in range(case["threads"])]
            row["ok"] = {digest(await store.messages(head)) for head in heads} == expected
    row["bytes_closed"] = stored(case, target)
    report(row)


def main() -> None:
    job = json.loads(sys.argv[1])
    case = job["case"]

    def report(found: dict) -> None:
        print(json.dumps({"v": 1, **case, **found}), flush=True)

    if job["phase"] != "write":
        asyncio.run(cold(case, job["target"], job["phase"], report))
    elif case["threads"] > 1:
        asyncio.run(concurrent(case, job["target"], report))
    else:
        asyncio.run(single(case, job["target"], report))


if __name__ == "__main__":
    main()
