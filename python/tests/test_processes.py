"""Processes, threads and event loops around a saver."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiosqlite
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from conftest import Opener
from kit import apatiently, at, made, patiently, put, read, threadkeep
from threadkeep import ConflictError, UnavailableError
from threadkeep._core import at_rest, thread_number
from threadkeep.langgraph import AsyncPostgresSaver, AsyncSqliteSaver, PostgresSaver, SqliteSaver
from threadkeep.langgraph._sqlite import _in_loop

# Long: all cores may be busy.
PATIENCE = 600
# From 3.12 on, Python warns when a process with threads forks. Ours does so on purpose: the package makes it safe.
MAY_FORK = ["-W", "ignore:This process:DeprecationWarning"]

WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from kit import at, made, put
from threadkeep.langgraph import PostgresSaver, SqliteSaver
opened = SqliteSaver.from_conn_string(sys.argv[1])
if len(sys.argv) > 3:
    opened = PostgresSaver.from_conn_string(sys.argv[1], schema=sys.argv[3])
with opened as saver:
    found = saver.get_tuple(at())
    items = found.checkpoint["channel_values"]["items"] if found else []
    config = found.config if found else at()
    while True:
        items = [*items, f"item {len(items)}"]
        config = put(saver, config, made({"items": items}, {"items": saver.get_next_version(None, None)}))
        saver.put_writes(config, [("items", f"written {len(items)}")], f"task {len(items)}")
        print(len(items), flush=True)
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_killed_process_loses_nothing_that_was_acknowledged(place: dict[str, str], open_saver: Opener) -> None:
    with open_saver():
        pass  # The tables are there.
    address, *schema = place.values()
    acknowledged: set[int] = set()
    chance = random.Random(1)
    for _ in range(6):
        command = [sys.executable, "-c", WRITER, address, str(Path(__file__).parent), *schema]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout
            for _ in range(chance.randrange(1, 30)):
                acknowledged.add(int(writer.stdout.readline()))
            writer.kill()
            # What it had printed before it was killed counts, too.
            for line in writer.stdout:
                if line.endswith("\n"):
                    acknowledged.add(int(line))
        with open_saver() as saver:
            stored = list(saver.list(at()))
            items = stored[0].checkpoint["channel_values"]["items"]
            assert items == [f"item {n}" for n in range(len(items))]
            # A server may store what it was sent by a writer that is dead by then, beside what the next writer puts.
            by_length: dict[int, list[Any]] = {}
            for found in stored:
                by_length.setdefault(len(found.checkpoint["channel_values"]["items"]), []).append(found.pending_writes)
            for count in acknowledged:
                assert [(f"task {count}", "items", f"written {count}")] in by_length[count]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_forked_process_goes_on_with_its_parents_saver(open_saver: Opener) -> None:
    with open_saver() as saver:
        root = put(saver, at(), made({"a": 0}))

        def child(number: int) -> None:
            found = patiently(lambda: read(saver, root))
            assert found.checkpoint["channel_values"] == {"a": 0}
            checkpoint = made({"a": number})
            patiently(lambda: put(saver, at(f"child {number}"), checkpoint))

        def in_loop(number: int) -> None:
            async def go() -> None:
                assert await apatiently(lambda: saver.aget_tuple(root)) is not None
                child(number)

            asyncio.run(go())

        fork = multiprocessing.get_context("fork")
        children = [fork.Process(target=target, args=(n,)) for n, target in enumerate([child, in_loop, child])]
        for process in children:
            process.start()
        for process in children:
            process.join(PATIENCE)
            assert process.exitcode == 0
        put(saver, root, made({"a": 9}))
        for number in range(3):
            assert read(saver, at(f"child {number}")).checkpoint["channel_values"] == {"a": number}


DRAWN = """
import ctypes, os, sys
from threadkeep.langgraph import SqliteSaver
fork = os.fork if sys.argv[1] == "fork" else ctypes.PyDLL(None).fork
saver = SqliteSaver(":memory:")
saver.get_next_version(None, None)
reads, writes = os.pipe()
for _ in range(2):
    child = fork()
    if child == 0:
        os.write(writes, saver.get_next_version(None, None).encode() + b"\\n")
        os._exit(0)
    os.waitpid(child, 0)
os.close(writes)
print(os.read(reads, 1000).decode() + saver.get_next_version(None, None))
"""


@pytest.mark.parametrize("how", ["fork", "without hooks"])
def test_forked_processes_draw_versions_of_their_own(how: str) -> None:
    command = [sys.executable, *MAY_FORK, "-c", DRAWN, how]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout.split()
    assert len(drawn) == len(set(drawn)) == 3, drawn


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_process_never_takes_the_values_of_a_forked_one_for_its_own(
    kind: str, place: dict[str, str], open_saver: Opener
) -> None:
    with open_saver() as saver:
        root = put(saver, at(), made({"a": 0}, {"a": saver.get_next_version(None, None)}))
        version = read(saver, root).checkpoint["channel_versions"]["a"]
        parent, child = multiprocessing.Pipe()

        def go(value: str) -> Any:
            return put(saver, root, made({"a": value}, {"a": saver.get_next_version(version, None)}))

        def in_child() -> None:
            child.recv()  # The parent has put its own.
            child.send(go("child"))

        process = multiprocessing.get_context("fork").Process(target=in_child)
        process.start()
        ours = go("parent")
        parent.send("go on")
        assert parent.poll(PATIENCE)
        theirs = parent.recv()
        process.join(PATIENCE)
        for config in (at(), theirs):
            found = read(saver, config)
            assert found.config == theirs
            assert found.checkpoint["channel_values"] == {"a": "child"}
        assert read(saver, ours).checkpoint["channel_values"] == {"a": "parent"}
    if kind == "sqlite":
        threadkeep("verify", "--all", "--sqlite", place["conn_string"])


def holds_locks(process: int) -> bool:
    # The table is read in pieces: a line may be missed while others take locks.
    for _ in range(200):
        if any(f" {process} " in line for line in Path("/proc/locks").read_text().splitlines()):
            return True
        time.sleep(0.005)
    return False


STRANGER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
connection.close()
"""


def test_a_forked_process_holds_locks_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.db"
    says, hears = multiprocessing.Pipe()
    saver = SqliteSaver(path)
    root = put(saver, at(), made({"a": 0}))

    def child() -> None:
        config = put(saver, root, made({"a": 1}))
        says.send(holds_locks(os.getpid()))
        says.recv_bytes()  # The parent and the other program have left.
        for number in range(2, 6):
            config = put(saver, config, made({"a": number}))
            says.send(number)
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert hears.poll(PATIENCE) and hears.recv()
    assert put(saver, at("parent"), made({"a": 9})) and holds_locks(os.getpid())
    saver.close()
    # The last process to close a database moves the log into it and deletes the log.
    subprocess.run([sys.executable, "-c", STRANGER, path], check=True)
    hears.send_bytes(b"go on")
    for number in range(2, 6):
        assert hears.poll(PATIENCE) and hears.recv() == number
    process.join(PATIENCE)
    with SqliteSaver.from_conn_string(str(path)) as again:
        assert [found.checkpoint["channel_values"]["a"] for found in again.list(at())] == [5, 4, 3, 2, 1, 0]
        assert read(again, at("parent")).checkpoint["channel_values"] == {"a": 9}


@pytest.mark.parametrize("given", [(SqliteSaver, sqlite3), (AsyncSqliteSaver, aiosqlite)], ids=["sqlite3", "aiosqlite"])
def test_a_saver_keeps_its_locks_when_another_one_is_given_a_connection(given: Any, tmp_path: Path) -> None:
    saver_class, module = given
    path = tmp_path / "checkpoints.db"
    with SqliteSaver.from_conn_string(str(path)) as saver:
        config = put(saver, at(), made({"a": 0}))
        other = saver_class(module.connect(path))
        assert read(saver, at()).config == config
        subprocess.run([sys.executable, "-c", STRANGER, path], check=True)
        config = put(saver, config, made({"a": 1}))
        assert read(other, at()).config == config
        other.close()


UNTOLD = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[2])
from kit import at, made, put, read
from threadkeep import UnavailableError
from threadkeep.langgraph import SqliteSaver
saver = SqliteSaver(sys.argv[1])
put(saver, at(), made({"a": 0}))
# Runs no hooks, as some servers do.
child = ctypes.PyDLL(None).fork()
if child == 0:
    for call in [lambda: saver.get_tuple(at()), lambda: put(saver, at("child"), made({"a": 1}))]:
        try:
            call()
            os._exit(1)
        except UnavailableError as error:
            if "make the saver after the fork" not in str(error):
                os._exit(2)
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
put(saver, at("parent"), made({"a": 2}))
saver.close()
sys.exit(status)
"""


def test_a_fork_that_python_is_not_told_of_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNTOLD, str(tmp_path / "checkpoints.db"), str(Path(__file__).parent)]
    assert subprocess.run(command, timeout=PATIENCE).returncode == 0


def fork_and_put(path: Path) -> None:
    """A child puts into the store, with locks of its own."""

    def child() -> None:
        with SqliteSaver.from_conn_string(str(path)) as saver:
            put(saver, at(str(os.getpid())), made({"a": "x" * 100_000}))
            assert holds_locks(os.getpid())

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0


def test_a_process_forks_after_a_saver_that_nobody_closed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.db"
    for number in range(10):
        saver = SqliteSaver(path)
        put(saver, at(f"parent {number}"), made({"a": "x" * 100_000}))
        del saver
        fork_and_put(path)
    with SqliteSaver.from_conn_string(str(path)) as saver:
        assert len(list(saver.list(None))) == 20


def test_a_process_forks_while_the_last_call_of_a_dropped_saver_runs(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.db"
    for number in range(10):
        loop = asyncio.new_event_loop()
        saver = SqliteSaver(path)
        checkpoint = made({"a": "x" * 100_000})
        task = loop.create_task(saver.aput(at(f"parent {number}"), checkpoint, {"step": 1}, {"a": 1}))
        # The call begins.
        loop.call_soon(loop.stop)
        loop.run_forever()
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        # Nobody but the call refers to the store.
        del saver, task
        fork_and_put(path)
        loop.close()
    with SqliteSaver.from_conn_string(str(path)) as saver:
        # A call may begin only after the fork.
        give_up = time.monotonic() + PATIENCE
        while len(list(saver.list(None))) < 20:
            assert time.monotonic() < give_up


def test_a_process_forks_while_its_threads_use_the_saver(open_saver: Opener, kind: str) -> None:
    with open_saver() as saver:
        stop = threading.Event()
        steps = [0, 0, 0]

        def run(number: int) -> None:
            config = at(f"t{number}")
            while not stop.is_set():
                # Writes that wait for their checkpoint are those of this process.
                checkpoint = made({"a": steps[number]})
                early = at(f"t{number}", checkpoint=checkpoint["id"])
                patiently(partial(saver.put_writes, early, [("a", steps[number])], "task"))
                config = patiently(partial(put, saver, config, checkpoint))
                steps[number] += 1

        async def in_loop(number: int) -> None:
            config = at(f"t{number}")
            while not stop.is_set():
                config = await apatiently(partial(saver.aput, config, made({"a": steps[number]}), {"step": 1}, {"a": 1}))
                steps[number] += 1

        def child(number: int) -> None:
            patiently(partial(put, saver, at(f"child {number}"), made({"a": number})))
            found = patiently(lambda: read(saver, at(f"child {number}")))
            assert found.checkpoint["channel_values"] == {"a": number}

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        threads.append(threading.Thread(target=lambda: asyncio.run(in_loop(2))))
        for thread in threads:
            thread.start()
        # On a busy machine they would begin after the last fork.
        deadline = time.monotonic() + PATIENCE
        while not all(steps) and time.monotonic() < deadline:
            time.sleep(0.001)
        fork = multiprocessing.get_context("fork")
        children = [fork.Process(target=child, args=(number,)) for number in range(12)]
        for process in children:
            process.start()
        for process in children:
            process.join(PATIENCE)
            assert process.exitcode == 0
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        for number in range(3):
            stored = list(saver.list(at(f"t{number}")))
            assert len(stored) == steps[number] > 0
            assert number == 2 or all(len(found.pending_writes or []) == 1 for found in stored)
        for number in range(12 if kind != "memory" else 0):
            assert read(saver, at(f"child {number}")).checkpoint["channel_values"] == {"a": number}


def test_an_interrupt_comes_after_a_connection_is_closed() -> None:
    came = threading.Event()
    early: list[bool] = []

    async def close() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        # An interrupt that does not wait for it would come now.
        early.append(came.wait(0.2))

    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            try:
                _in_loop(close())
            finally:
                came.set()
    finally:
        signal.signal(signal.SIGINT, old)
    assert early == [False]


def test_what_is_closed_at_rest_is_closed_although_another_close_fails() -> None:
    closed: list[int] = []

    def fails() -> None:
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        at_rest([fails, partial(closed.append, 1)])
    assert closed == [1]
    at_rest([partial(closed.append, 2)])
    assert closed == [1, 2]


AT_REST = """
import asyncio, os, sqlite3, sys
import aiosqlite
sys.path.insert(0, sys.argv[2])
beside = []

def call_others():
    # What Python runs on a thread that has brought the savers to rest: a destructor, say, or the handler of a signal.
    for saver in beside[:1]:
        try:
            saver.get_tuple(at())
        except UnavailableError as error:
            assert "this thread forks" in str(error), error
            print("refused", flush=True)
    for saver in beside[1:]:
        saver.close()

# Is called after what the package registers when it is imported.
os.register_at_fork(before=call_others)
from kit import at, made, put, read
from threadkeep import UnavailableError
from threadkeep._core import at_rest
from threadkeep.langgraph import AsyncSqliteSaver, SqliteSaver
from threadkeep.langgraph._sqlite import _in_loop

class Connection(sqlite3.Connection):
    def close(self):
        if beside:
            # Closes a connection to another file.
            SqliteSaver(sqlite3.connect(sys.argv[1] + ".third")).close()
            call_others()
        super().close()

class Awaited(sqlite3.Connection):
    # On the thread of a connection of aiosqlite, which may collect garbage there.
    def close(self):
        third = SqliteSaver, sqlite3.connect(sys.argv[1] + ".third")
        for call, given in (third, (asyncio.run, beside[0].aget_tuple(at()))):
            try:
                call(given)
            except UnavailableError as error:
                assert "this thread forks" in str(error), error
            else:
                raise AssertionError(call)
        call_others()
        super().close()

async def in_loop():
    call_others()

for way in ("connection", "loop", "aiosqlite", "fork"):
    beside[:] = [SqliteSaver(sys.argv[1] + name) for name in (".one", ".two")]
    for saver in beside:
        put(saver, at(way), made({"a": way}))
    if way == "connection":
        SqliteSaver(sqlite3.connect(sys.argv[1], factory=Connection)).close()
    elif way == "loop":
        # As a connection of aiosqlite is closed.
        at_rest([lambda: _in_loop(in_loop())])
    elif way == "aiosqlite":
        AsyncSqliteSaver(aiosqlite.connect(sys.argv[1], factory=Awaited)).close()
    elif (child := os.fork()) == 0:
        os._exit(0)
    else:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    # Nothing waits for the end of the rest any more.
    saver, closed = beside
    assert read(saver, at(way)).checkpoint["channel_values"] == {"a": way}
    try:
        closed.get_tuple(at(way))
    except UnavailableError as error:
        assert "was closed" in str(error), error
        print("closed", flush=True)
    beside.clear()
    saver.close()
"""


def test_a_thread_that_brought_savers_to_rest_does_not_wait_for_itself(tmp_path: Path) -> None:
    command = [sys.executable, *MAY_FORK, "-c", AT_REST, str(tmp_path / "checkpoints.db"), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.split() == ["refused", "closed"] * 4


@pytest.mark.parametrize("run", [asyncio.run, _in_loop], ids=["thread", "thread of its own"])
def test_a_call_that_began_before_its_thread_is_waited_for_is_refused_too(run: Any, tmp_path: Path) -> None:
    saver = SqliteSaver(tmp_path / "checkpoints.db")
    numbers: list[int] = []
    outcomes: list[Any] = []
    waits = threading.Event()

    async def call() -> None:
        begun = asyncio.ensure_future(saver.aget_tuple(at()))
        # It waits for the end of the rest then.
        await asyncio.sleep(0)
        waits.set()
        outcomes.append(await begun)

    def called() -> None:
        numbers.append(thread_number())
        try:
            run(call())
        except UnavailableError as error:
            outcomes.append(str(error))

    thread = threading.Thread(target=called)

    def wait_for_it() -> None:
        at_rest([partial(thread.join, PATIENCE)], numbers[0])

    at_rest([thread.start, partial(waits.wait, PATIENCE), wait_for_it])
    thread.join(PATIENCE)
    assert len(outcomes) == 1 and "this thread forks" in str(outcomes[0]), outcomes
    saver.close()


def test_an_interrupt_comes_after_the_call_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SqliteSaver.from_conn_string(str(tmp_path / "checkpoints.db")) as saver:
        hears, says = os.pipe()
        held, interrupted, released = threading.Event(), threading.Event(), threading.Event()
        made_call = saver._put

        def waiting(*arguments: Any) -> Any:
            steps = [partial(os.write, says, b"."), partial(made_call(*arguments).wait)]
            # No Python runs between them: a signal that is sent after the first is handled in the second, or after it.
            return SimpleNamespace(wait=lambda: list(map(partial.__call__, steps)))

        def interrupt() -> None:
            held.set()
            if os.read(hears, 1):
                os.kill(os.getpid(), signal.SIGINT)
                # An interrupt that does not wait for the call would come now.
                interrupted.wait(0.2)
            released.set()

        monkeypatch.setattr(saver, "_put", waiting)
        old = signal.signal(signal.SIGINT, signal.default_int_handler)
        # Calls wait while it runs, as while a process forks: without a limit, unlike for a lock of the file.
        thread = threading.Thread(target=at_rest, args=([interrupt],))
        thread.start()
        checkpoint, came = made({"a": 1}), None
        try:
            assert held.wait(PATIENCE)
            put(saver, at(), checkpoint)
        except KeyboardInterrupt:
            came = "late" if released.is_set() else "early"
        finally:
            signal.signal(signal.SIGINT, old)
            interrupted.set()
            os.close(says)
            thread.join(PATIENCE)
            os.close(hears)
        assert came == "late"
        assert read(saver, at()).checkpoint["id"] == checkpoint["id"]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_put_that_was_interrupted_may_be_repeated(open_saver: Opener) -> None:
    with open_saver() as saver:
        config, stored, interrupts = at(), [], 0
        # An interrupt is raised once each time, and only within the call: elsewhere it would end the test.
        armed = False

        def raise_once(*_: object) -> None:
            nonlocal armed
            if armed:
                armed = False
                raise KeyboardInterrupt

        stop = threading.Event()

        def interrupt() -> None:
            while not stop.wait(0.003):
                os.kill(os.getpid(), signal.SIGINT)

        old = signal.signal(signal.SIGINT, raise_once)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            deadline = time.monotonic() + PATIENCE
            while interrupts < 20 and time.monotonic() < deadline:
                checkpoint = made({"a": len(stored)})
                try:
                    armed = True
                    stored_as = put(saver, config, checkpoint)
                    armed = False
                except KeyboardInterrupt:
                    interrupts += 1
                    # Whether it was stored is not known, and putting it again is safe.
                    stored_as = put(saver, config, checkpoint)
                config = stored_as
                stored.append(config)
        finally:
            stop.set()
            thread.join(PATIENCE)
            signal.signal(signal.SIGINT, old)
        assert interrupts == 20
        assert [found.config for found in saver.list(at())] == stored[::-1]


def test_event_loops_come_and_go(open_saver: Opener) -> None:
    with open_saver() as saver:
        config = at()

        async def step(number: int) -> None:
            nonlocal config
            config = await saver.aput(config, made({"a": number}), {"step": number}, {"a": 1})
            found = await saver.aget_tuple(config)
            assert found is not None and found.checkpoint["channel_values"] == {"a": number}

        for number in range(5):
            asyncio.run(step(number))
        assert len(list(saver.list(at()))) == 5


async def test_a_cancelled_task_leaves_the_store_whole(open_async: Opener) -> None:
    async with open_async() as saver:
        config = at()
        for number in range(40):
            checkpoint = made({"a": number})
            task = asyncio.ensure_future(saver.aput(config, checkpoint, {"step": number}, {"a": 1}))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            # Putting it again is safe, whether it was stored or not.
            config = await saver.aput(config, checkpoint, {"step": number}, {"a": 1})
        assert len([found async for found in saver.alist(at())]) == 40


def test_a_loop_that_is_closed_early_does_no_harm(open_saver: Opener) -> None:
    with open_saver() as saver:
        checkpoint = made({"a": 1})
        loop = asyncio.new_event_loop()
        task = loop.create_task(saver.aput(at(), checkpoint, {"step": 1}, {"a": 1}))
        loop.call_soon(loop.stop)
        loop.run_forever()
        task.cancel()
        loop.close()
        put(saver, at(), checkpoint, {"step": 1})
        assert read(saver, at()).checkpoint["id"] == checkpoint["id"]


def test_two_writers_of_one_thread_lose_nothing(open_saver: Opener) -> None:
    with open_saver() as saver:
        root = put(saver, at(), made({"a": 0}))
        stored: list[Any] = []

        def run(number: int) -> None:
            config = root
            for step in range(10):
                while True:
                    try:
                        config = put(saver, config, made({"a": f"{number} {step}"}))
                        break
                    except ConflictError:
                        continue  # The other one's checkpoint, made later, was stored first: make another one.
                stored.append(config)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        found = {one.config["configurable"]["checkpoint_id"] for one in saver.list(at())}
        assert found == {one["configurable"]["checkpoint_id"] for one in [root, *stored]}
        assert len(stored) == 40


def test_a_closed_saver_says_so(open_saver: Opener) -> None:
    with open_saver() as saver:
        pass
    with pytest.raises(UnavailableError, match="closed"):
        saver.get_tuple(at())
    with pytest.raises(UnavailableError, match="closed"):
        put(saver, at(), made({}))


def test_a_saver_that_is_closed_while_it_is_opened_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.db"
    SqliteSaver.from_conn_string(str(path)).__enter__().close()

    def is_it(file: Path) -> bool:
        try:
            return file.samefile(path)
        except OSError:
            return False  # Another thread has closed it since it was listed.

    def opened() -> int:
        return sum(is_it(Path("/proc/self/fd") / name) for name in os.listdir("/proc/self/fd"))

    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    before = opened()
    saver = SqliteSaver(path)
    outcomes: list[Any] = []

    def first_call() -> None:
        try:
            outcomes.append(saver.get_tuple(at()))
        except UnavailableError as error:
            outcomes.append(error)

    calls = [threading.Thread(target=first_call), threading.Thread(target=saver.close)]
    calls[0].start()
    deadline = time.monotonic() + PATIENCE
    # It gives up by itself where it has waited for the lock too long.
    while opened() == before and calls[0].is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    calls[1].start()
    # A close that does not wait for the opening is over by then.
    calls[1].join(1)
    other.close()
    for call in calls:
        call.join(600)
        assert not call.is_alive()
    assert len(outcomes) == 1
    with pytest.raises(UnavailableError, match="closed"):
        saver.get_tuple(at())
    assert opened() == 0


async def test_what_a_store_warns_of_is_logged(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    # A setting with which a crash loses what was acknowledged.
    parts = conninfo_to_dict(postgres_url)
    address = make_conninfo("", **{**parts, "options": "-c synchronous_commit=off"})
    for number in range(2):
        saver = (PostgresSaver, AsyncPostgresSaver)[number](address, schema=f"t{uuid.uuid4().hex}")
        if done := saver.setup():
            await done
        said = [record for record in caplog.records if record.name == "threadkeep.postgres"]
        assert any("the server has synchronous_commit=off: " in record.getMessage() for record in said), caplog.text
        assert all(record.levelname == "WARNING" for record in said)
        caplog.clear()
        await saver.aclose()


async def test_a_saver_may_be_used_without_a_context(tmp_path: Path) -> None:
    saver = AsyncSqliteSaver(tmp_path / "checkpoints.db")
    config = await saver.aput(at(), made({"a": 1}), {"step": 1}, {"a": 1})
    await saver.aclose()
    again = SqliteSaver(tmp_path / "checkpoints.db")
    assert read(again, config).metadata == {"step": 1}
    again.close()


def test_a_call_may_be_made_where_another_one_ends(open_saver: Opener) -> None:
    with open_saver() as saver:
        config = put(saver, at(), made({"a": 1}))
        found: list[Any] = []

        class Loop(asyncio.SelectorEventLoop):
            # What Python runs on the thread that hands a result over: so may a destructor, whenever memory is collected.
            def call_soon_threadsafe(self, *args: Any, **more: Any) -> Any:
                found.append(saver.get_tuple(config))
                return super().call_soon_threadsafe(*args, **more)

        loop = Loop()
        again = loop.run_until_complete(asyncio.wait_for(saver.aget_tuple(config), PATIENCE))
        loop.close()
        assert found == [again]


def test_a_connection_may_be_closed_where_a_call_ends(open_saver: Opener) -> None:
    with open_saver() as saver:
        config = put(saver, at(), made({"a": 1}))
        threads: list[int] = []

        class Loop(asyncio.SelectorEventLoop):
            # On the thread that hands a result over, as above.
            def call_soon_threadsafe(self, *args: Any, **more: Any) -> Any:
                at_rest([lambda: threads.append(threading.get_ident())])
                return super().call_soon_threadsafe(*args, **more)

        loop = Loop()
        found = loop.run_until_complete(asyncio.wait_for(saver.aget_tuple(config), PATIENCE))
        loop.close()
        assert len(threads) == 1 and threads[0] != threading.get_ident()
        assert found == read(saver, config)


async def test_a_panic_of_an_awaited_call_is_raised(postgres_url: str) -> None:
    def fails(error: BaseException) -> None:
        raise error

    with pytest.raises(ValueError, match="looked at"):
        # The class of what is raised for a panic exists once an error was looked at.
        at_rest([partial(fails, ValueError("looked at"))])
    # Other packages have one of this name, too. Theirs are errors like others.
    classes = [error for error in BaseException.__subclasses__() if error.__name__ == "PanicException"]
    # A warning of the store, which is passed on where the call ends.
    address = make_conninfo("", **{**conninfo_to_dict(postgres_url), "options": "-c synchronous_commit=off"})
    logger, raised = logging.getLogger("threadkeep.postgres"), list[str]()
    for error in classes:

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord, error: type[BaseException] = error) -> None:
                raise error("panics")

        with pytest.raises(error, match="at rest"):
            at_rest([partial(fails, error("at rest"))])
        handler = Handler()
        saver = AsyncPostgresSaver(address, schema=f"t{uuid.uuid4().hex}")
        logger.addHandler(handler)
        try:
            await asyncio.wait_for(saver.setup(), PATIENCE)
        except error as panic:
            raised.append(str(panic))
        finally:
            logger.removeHandler(handler)
        # Whatever was raised, other calls go on.
        assert await saver.aget_tuple(at()) is None
        await saver.aclose()
    assert raised == ["panics"]


LAST_CALL = """
import asyncio, os, sys, time
sys.path.insert(0, sys.argv[2])
from kit import at, made
from threadkeep.langgraph import AsyncSqliteSaver

class Loop(asyncio.SelectorEventLoop):
    # Hands the result over, and goes on running Python while the loop has it and the process ends.
    def call_soon_threadsafe(self, *args, **more):
        handle = super().call_soon_threadsafe(*args, **more)
        for _ in range(300):
            time.sleep(0.001)
        print("handed over", flush=True)
        return handle

async def work():
    saver = AsyncSqliteSaver(sys.argv[1])
    await saver.aput(at(), made({"a": 1}), {"step": 1}, {"a": 1})

for _ in range(int(sys.argv[3])):
    child = os.fork()
    if child == 0:
        loop = asyncio.SelectorEventLoop() if sys.argv[4] == "plain" else Loop()
        loop.run_until_complete(work())
        break
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        print("a child ended with", status, flush=True)
        sys.exit(1)
"""


@pytest.mark.parametrize(("loop", "runs"), [("plain", 60), ("slow", 3)])
def test_a_process_may_exit_as_soon_as_its_last_call_returns(tmp_path: Path, loop: str, runs: int) -> None:
    path = tmp_path / "checkpoints.db"
    command = [sys.executable, *MAY_FORK, "-c", LAST_CALL, str(path), str(Path(__file__).parent), str(runs), loop]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.count("handed over") == (0 if loop == "plain" else runs), "what was begun is complete"
    with SqliteSaver.from_conn_string(str(path)) as saver:
        assert len(list(saver.list(at()))) == runs


AT_EXIT = """
import asyncio, atexit, sys
sys.path.insert(0, sys.argv[2])

async def work():
    saver = AsyncSqliteSaver(sys.argv[1])
    await saver.aput(at(), made({"a": 1}), {"step": 1}, {"a": 1})
    await saver.aclose()
    print("stored", flush=True)

# Runs after what the package registers when it is imported.
atexit.register(lambda: asyncio.run(work()))
from kit import at, made
from threadkeep.langgraph import AsyncSqliteSaver
"""


def test_a_saver_may_be_used_at_exit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path / "checkpoints.db"), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stored\n", "")
