"""Threads of LangGraph's own savers move into ours, and are equal there."""

from __future__ import annotations

import operator
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.checkpoint.postgres import PostgresSaver as TheirPostgresSaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import TASKS, _DeltaSnapshot
from langgraph.checkpoint.sqlite import SqliteSaver as TheirSqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Send
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from graphs import conversation, play, shown
from kit import at, made, put, read, replayed, writes
from threadkeep import ThreadkeepError, UnavailableError
from threadkeep.langgraph import PostgresSaver, SqliteSaver, _sources
from threadkeep.langgraph._moving import move
from threadkeep.langgraph._postgres import is_address
from threadkeep.langgraph._sources import PostgresSource, SqliteSource


def run(*arguments: str) -> tuple[int, str]:
    command = [str(Path(sys.executable).parent / "threadkeep"), "import-langgraph", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    # A target's server may be one that flushes nothing, as that of the tests.
    said = [line for line in done.stderr.splitlines() if not line.startswith("the server has ")]
    assert said == [], done.stderr
    return done.returncode, done.stdout


def refused(*arguments: str) -> str:
    """What is said of a source or a target that cannot be used."""
    command = [str(Path(sys.executable).parent / "threadkeep"), "import-langgraph", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


def in_words(address: str) -> str:
    """An address as libpq's words."""
    return make_conninfo(**conninfo_to_dict(address))


def history(saver: Any) -> list[Any]:
    graph = conversation(saver)
    return [shown(state) for state in graph.get_state_history({"configurable": {"thread_id": "t"}})]


@pytest.fixture(params=["sqlite", "postgres"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Opens LangGraph's saver, and its address."""
    if request.param == "sqlite":
        # A name with what means something in an address.
        path = str(tmp_path / "old#1%41.db")
        return lambda: TheirSqliteSaver.from_conn_string(path), path
    import psycopg

    url = request.getfixturevalue("postgres_url")
    name = f"old{uuid.uuid4().hex}"
    with psycopg.connect(url, autocommit=True) as connection:
        # The server copies no database that somebody uses, as its own vacuum may use template1.
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0".encode())
    base, _, query = url.partition("?")
    address = base.rsplit("/", 1)[0] + f"/{name}" + (f"?{query}" if query else "")
    return lambda: TheirPostgresSaver.from_conn_string(address), address


@pytest.mark.parametrize("durability", ["sync", "exit"])
def test_a_conversation_goes_on_after_the_move(old: Any, durability: str, tmp_path: Path) -> None:
    opener, address = old
    with opener() as theirs:
        theirs.setup()
        play(theirs, durability, turns=6)
        put(theirs, at("second", "nested"), made({"a": [1, None, b"x"], "n": None}), {"step": -2})
        expected = history(theirs)
    new = str(tmp_path / "new.db")
    assert run(address, new, "--dry-run")[0] == 0
    assert not Path(new).exists(), "a dry run changes nothing"
    status, said = run(address, new)
    assert (status, said.count("and are equal")) == (0, 1), said
    with SqliteSaver.from_conn_string(new) as ours:
        assert history(ours) == expected
        assert read(ours, at("second", "nested")).checkpoint["channel_values"] == {"a": [1, None, b"x"], "n": None}
        play(ours, durability, turns=2)
    status, said = run(address, new)
    assert status == 3 and said.count("the target has a thread of this id") == 2, said


def all_of(saver: Any) -> dict[str, Any]:
    """What each checkpoint of the thread has, by id."""
    return {found.checkpoint["id"]: (found.checkpoint, found.metadata, found.pending_writes) for found in saver.list(at())}


@pytest.mark.parametrize("version", [lambda n: n, lambda n: f"{n:032}.0123456789012345", lambda n: f"{n:032}.5", lambda n: f"v{n}"])
def test_a_value_that_was_changed_in_place_is_moved(old: Any, version: Any, tmp_path: Path) -> None:
    opener, address = old
    states: list[dict[str, Any]] = [
        {"list": [1, [2]], "text": "one", "number": 1, "kept": ["x"], "goes": [1]},
        {"list": [1, [2], 3], "text": "two", "number": True, "kept": ["x"], "comes": "new"},
        {"list": [1, [2, 2]], "text": "two", "number": 1.0, "kept": ["x"], "goes": [1], "comes": ["new"]},
        {"list": [1, [2]], "text": "one", "number": 1, "kept": ["x"], "goes": "1", "comes": None},
        {"list": "no list", "text": ["one"], "number": [1], "kept": ["x"], "delta": _DeltaSnapshot([1])},
        {"list": [], "text": "", "number": None, "kept": ["x"], "delta": [1]},
    ]
    # Every version stays as it is.
    versions = dict.fromkeys(["list", "text", "number", "kept", "goes", "comes", "delta"], version(1))
    with opener() as theirs:
        theirs.setup()
        first = put(theirs, at(), made(states[0], versions))
        config = first
        for state in states[1:]:
            config = put(theirs, config, made(state, versions), new={})
        # Another child of the first, with other values; then one with a new version, and one in place again.
        fork = put(theirs, first, made({**states[0], "text": "fork", "list": [1]}, versions), new={})
        newer = {**versions, "text": version(2), "list": version(2)}
        fork = put(theirs, fork, made({**states[1], "text": "newer"}, newer), new={"text": version(2), "list": version(2)})
        put(theirs, fork, made({**states[2], "text": "newest"}, newer), new={})
        expected = all_of(theirs)
    new = str(tmp_path / "new.db")
    status, said = run(address, new)
    assert (status, said.count("and are equal")) == (0, 1), said
    with SqliteSaver.from_conn_string(new) as ours:
        found = all_of(ours)
        assert found == expected
        # Also those that are equal to each other.
        for one, (checkpoint, *_) in expected.items():
            values = found[one][0]["channel_values"]
            assert {name: repr(value) for name, value in values.items()} == {
                name: repr(value) for name, value in checkpoint["channel_values"].items()
            }
        # A run goes on from there.
        last = {**expected[max(expected)][0]["channel_values"], "text": "ours"}
        config = put(ours, read(ours, at()).config, made(last, {**newer, "text": version(3)}), new={"text": version(3)})
        assert read(ours, config).checkpoint["channel_values"] == last


def name(config: Any) -> str:
    return str(config["configurable"]["checkpoint_id"])


def test_writes_of_a_task_that_have_two_paths_are_moved(old: Any, tmp_path: Path) -> None:
    opener, address = old
    counted = {"source": "update", "step": 1, "parents": {}, "counters_since_delta_snapshot": {"d": [1, 1]}}
    with opener() as theirs:
        theirs.setup()
        root = put(theirs, at(), made({"d": _DeltaSnapshot([])}))
        theirs.put_writes(root, [("d", ["a"])], "t", "p1")
        # As of an update of a finished task: LangGraph gives it the task's id, and its savers add what it has more.
        theirs.put_writes(root, [("d", ["a"]), ("d", ["b"]), ("d", ["c"])], "t", "p2")
        child = put(theirs, root, made({}, {"d": 2}), counted)
        expected = replayed(theirs, child)
    new = str(tmp_path / "new.db")
    status, said = run(address, new)
    assert (status, said.count("and are equal")) == (0, 1), said
    with SqliteSaver.from_conn_string(new) as ours:
        assert replayed(ours, child) == expected == (_DeltaSnapshot([]), [["a"], ["b"], ["c"]])


class Old(TypedDict):
    log: Annotated[list[str], operator.add]


def sender() -> Any:
    return (
        StateGraph(Old)
        .add_node("work", lambda item: {"log": [f"work {item['n']}"]})
        .add_node("plan", lambda _: {})
        .add_edge(START, "plan")
        .add_conditional_edges("plan", lambda _: [Send("work", {"n": n}) for n in range(3)], ["work"])
    )


def test_tasks_that_waited_before_version_4_of_checkpoints_are_moved(old: Any, tmp_path: Path) -> None:
    opener, address = old
    with opener() as theirs:
        theirs.setup()
        sends = [Send("work", {"n": n}) for n in range(40)]
        versions = {"log": f"{3:032}.5", "branch:to:plan": f"{2:032}.9"}
        root = put(theirs, at(), {**made({"log": ["one"]}, versions), "v": 1, "pending_sends": []})
        # Of several tasks, not in order.
        theirs.put_writes(root, [(TASKS, sends[2]), ("log", ["x"]), (TASKS, sends[3])], "task b", "path 2")
        theirs.put_writes(root, [(TASKS, sends[0])], "task c", "path 1")
        theirs.put_writes(root, [(TASKS, sends[1])], "task a", "path 2")
        # The SQLite saver of that time kept them in the next checkpoint.
        in_order = [sends[0], sends[1], sends[2], sends[3]]
        kept = in_order if isinstance(theirs, TheirSqliteSaver) else []
        child = put(theirs, root, {**made({"log": ["one"]}, versions), "v": 3, "pending_sends": kept}, new={})
        # A sibling has them, too; a child of it has those of its parent, which are more than a short list may have.
        put(theirs, root, {**made({"log": ["other"]}, {"log": 7}), "v": 2, "pending_sends": kept}, new={"log": 7})
        theirs.put_writes(child, [(TASKS, send) for send in sends], "task", "path")
        kept = sends if isinstance(theirs, TheirSqliteSaver) else []
        last = put(theirs, child, {**made({"log": ["two"]}, versions), "v": 3, "pending_sends": kept}, new={})
        # One of today has its own.
        put(theirs, last, {**made({"log": ["two"], TASKS: sends[:1]}, {**versions, TASKS: f"{4:032}.1"})})
        expected = all_of(theirs)
        waiting = sender().compile(checkpointer=theirs).get_state(last)
        assert len(waiting.tasks) == 40
    new = str(tmp_path / "new.db")
    assert run(address, new, "--dry-run")[0] == 0
    status, said = run(address, new)
    assert (status, said.count("and are equal")) == (0, 1), said
    with SqliteSaver.from_conn_string(new) as ours:
        assert all_of(ours) == expected
        graph = sender().compile(checkpointer=ours)
        assert [task.id for task in graph.get_state(last).tasks] == [task.id for task in waiting.tasks]
        done = graph.invoke(None, last)
        log = expected[name(last)][0]["channel_values"]["log"]
        assert done["log"] == [*log, *(f"work {n}" for n in range(40))]


@pytest.mark.parametrize("old", ["postgres"], indirect=True)
def test_waiting_tasks_in_an_older_format_are_not_moved(old: Any, tmp_path: Path) -> None:
    opener, address = old
    with opener() as theirs:
        theirs.setup()
        root = put(theirs, at(), {**made({"a": 1}), "v": 1})
        theirs.put_writes(root, [(TASKS, Send("work", 1))], "task")
        put(theirs, root, {**made({"a": 2}), "v": 1})
        theirs.conn.execute("UPDATE checkpoint_writes SET type = 'json'")
    status, said = run(address, str(tmp_path / "new.db"), "--no-compare")
    assert status == 3
    assert "thread 't' was not moved" in said and "waiting task" in said and "'json'" in said


@pytest.mark.parametrize("old", ["postgres"], indirect=True)
def test_a_database_from_before_the_paths_of_tasks_is_moved(old: Any, tmp_path: Path) -> None:
    opener, address = old
    with opener() as theirs:
        theirs.setup()
        versions = {"log": f"{3:032}.5"}
        root = put(theirs, at(), {**made({"log": ["one"]}, versions), "v": 3})
        theirs.put_writes(root, [("log", ["x"]), (TASKS, Send("work", {"n": 1}))], "task")
        put(theirs, root, {**made({"log": ["one"]}, versions), "v": 3}, new={})
        expected = all_of(theirs)
        # As in databases whose saver was not set up again since.
        theirs.conn.execute("ALTER TABLE checkpoint_writes DROP COLUMN task_path")
    new = str(tmp_path / "new.db")
    status, said = run(address, new)
    assert (status, said.count("and are equal")) == (0, 1), said
    with SqliteSaver.from_conn_string(new) as ours:
        assert all_of(ours) == expected
        assert TASKS in read(ours, at()).checkpoint["channel_values"]


@pytest.mark.parametrize("old", ["postgres"], indirect=True)
def test_no_statement_is_prepared_which_a_pooler_would_lose(old: Any, tmp_path: Path) -> None:
    opener, address = old
    with opener() as theirs:
        theirs.setup()
        for n in range(9):
            put(theirs, at(f"t{n}"), made({"a": [n]}))
    source = PostgresSource(address)
    with SqliteSaver.from_conn_string(str(tmp_path / "new.db")) as ours:
        report = move(source, ours, compare=False)
    assert (report.threads, report.problems) == (9, [])
    assert source._query("SELECT statement FROM pg_prepared_statements") == []


@pytest.mark.parametrize("old", ["postgres"], indirect=True)
def test_a_long_thread_is_read_in_pieces(old: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sources, "_AT_ONCE", 2)
    opener, address = old
    with opener() as theirs:
        theirs.setup()
        for namespace in ("", "a", "b"):
            config = at("t", namespace)
            for n in range(3):
                config = put(theirs, config, made({"a": n}, {"a": n + 1}))
        expected = all_of(theirs)
    source, sizes = PostgresSource(address), list[int]()
    query = source._query

    def noted(asked: str, *arguments: Any) -> Any:
        found = query(asked, *arguments)
        if "checkpoint::text" in asked:
            sizes.append(len(found))
        return found

    monkeypatch.setattr(source, "_query", noted)
    with SqliteSaver.from_conn_string(str(tmp_path / "new.db")) as ours:
        report = move(source, ours)
        assert (report.checkpoints, report.problems) == (9, [])
        assert all_of(ours) == expected
    assert sizes == [2, 2, 2, 2, 1, 0]


@pytest.mark.parametrize("old", ["postgres"], indirect=True)
def test_tables_that_a_role_may_not_read_are_named(old: Any, tmp_path: Path) -> None:
    opener, address = old
    role = f"reader{uuid.uuid4().hex}"
    with opener() as theirs:
        theirs.setup()
        theirs.conn.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'".encode())
    reader = make_conninfo(**{**conninfo_to_dict(address), "user": role, "password": "secret"})
    said = refused(reader, str(tmp_path / "new.db"))
    with opener() as theirs:
        theirs.conn.execute(f"DROP ROLE {role}".encode())
    assert said.startswith("the source cannot be read: ") and "checkpoints" in said, said


@pytest.mark.parametrize("old", ["postgres"], indirect=True)
def test_a_database_that_is_no_source_is_named(old: Any, tmp_path: Path) -> None:
    opener, address = old
    new = str(tmp_path / "new.db")
    missing = make_conninfo(**{**conninfo_to_dict(address), "dbname": "missing"})
    assert refused(missing, new).startswith("the source cannot be read: ")
    assert "begin it with postgresql://" in refused(address.replace("://", "+psycopg://", 1), new)
    assert "the source has no tables of LangGraph's PostgresSaver" in refused(address, new)
    with opener() as theirs:
        theirs.conn.execute("CREATE TABLE checkpoints (thread_id text, checkpoint_ns text, checkpoint jsonb, metadata jsonb)")
    assert "LangGraph's ShallowPostgresSaver" in refused(address, new)
    assert not Path(new).exists()


def test_a_target_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    old, other, link = (str(tmp_path / name) for name in ("old.db", "other.db", "link.db"))
    for path in (old, other):
        with TheirSqliteSaver.from_conn_string(path) as theirs:
            put(theirs, at(), made({"a": 1}))
    assert refused(old, other).startswith("the target cannot be opened: ")
    # One process must not have a file open in two SQLites.
    Path(link).symlink_to(old)
    for target in (old, link):
        assert refused(old, target) == "the target cannot be opened: it is the file of the source; name another one\n"
    assert "begin it with postgresql://" in refused(old, "postgresql+psycopg://ann:secret@db/threads")


# Moves where LangGraph's saver is not installed.
ALONE = """
import sys

sys.modules["langgraph.checkpoint.sqlite"] = None
from threadkeep.langgraph import _moving

sys.exit(_moving.main(sys.argv[1:]))
"""


def test_nothing_is_moved_where_it_cannot_be_compared(tmp_path: Path) -> None:
    old, new = str(tmp_path / "old.db"), str(tmp_path / "new.db")
    with TheirSqliteSaver.from_conn_string(old) as theirs:
        put(theirs, at(), made({"a": 1}))

    def alone(*more: str) -> tuple[int, str]:
        command = [sys.executable, "-c", ALONE, old, new, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        return done.returncode, done.stdout + done.stderr

    status, said = alone()
    assert status == 1 and "pip install langgraph-checkpoint-sqlite, or pass --no-compare" in said, said
    assert not Path(new).exists()
    assert alone("--dry-run")[0] == 0
    status, said = alone("--no-compare")
    assert (status, said) == (0, "1 threads with 1 checkpoints and 0 writes were moved.\n")


def test_a_terminal_shows_how_far_the_move_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = str(tmp_path / "old.db")
    with TheirSqliteSaver.from_conn_string(old) as theirs:
        for thread in "ab":
            put(theirs, at(thread), made({"a": 1}))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with SqliteSaver.from_conn_string(str(tmp_path / "new.db")) as ours:
        assert move(SqliteSource(old), ours).problems == []
    first, *bars = capsys.readouterr().err.split("\r")
    expected = [
        f"[{'#' * 15 * done}{' ' * 15 * (2 - done)}] {done} of 2 {what}" + ("\n" if done == 2 else "")
        for what in ("threads", "threads compared")
        for done in range(3)
    ]
    assert (first, bars) == ("", expected)


def test_what_cannot_be_moved_is_named(tmp_path: Path) -> None:
    old, new = str(tmp_path / "old.db"), str(tmp_path / "new.db")
    with TheirSqliteSaver.from_conn_string(old) as theirs:
        put(theirs, at("good"), made({"a": 1}))
        put(theirs, at("no uuid"), {**made({"a": 1}), "id": "1"})
        root = put(theirs, at("orphan"), made({"a": 1}))
        put(theirs, root, made({"a": 2}))
        gone = root["configurable"]["checkpoint_id"]  # type: ignore[typeddict-item]
        theirs.conn.execute("DELETE FROM checkpoints WHERE checkpoint_id = ?", (gone,))
        put(theirs, at("pickled"), made({"a": 1}))
        theirs.conn.execute("UPDATE checkpoints SET type = 'pickle' WHERE thread_id = 'pickled'")
        theirs.conn.commit()
    status, said = run(old, new, "--no-compare")
    assert status == 3
    lines = said.splitlines()
    assert "thread 'no uuid' was not moved" in lines[0] and "not a UUID" in lines[0]
    assert "thread 'orphan'" in lines[1] and f"its parent {gone} is missing" in lines[1]
    assert "thread 'pickled' was not moved" in lines[2] and "'pickle'" in lines[2]
    assert lines[3] == "2 threads with 2 checkpoints and 0 writes were moved."
    with SqliteSaver.from_conn_string(new) as ours:
        assert read(ours, at("good")).checkpoint["channel_values"] == {"a": 1}
        assert read(ours, at("orphan")).checkpoint["channel_values"] == {"a": 2}
        assert ours.get_tuple(at("pickled")) is None


def test_a_parent_with_a_newer_id_is_not_called_missing(tmp_path: Path) -> None:
    old = str(tmp_path / "old.db")
    with TheirSqliteSaver.from_conn_string(old) as theirs:
        # As from a machine whose clock is late.
        child = made({"a": 2})
        root = put(theirs, at(), made({"a": 1}))
        put(theirs, root, child)
    status, said = run(old, str(tmp_path / "new.db"))
    problem, sums = said.splitlines()
    assert problem == f"thread 't', checkpoint {child['id']}: its parent {name(root)} has a newer id; it was moved without one"
    assert (status, sums) == (3, "1 threads with 2 checkpoints and 0 writes were moved.")


def test_a_thread_that_cannot_be_decoded_is_moved_and_named(old: Any, tmp_path: Path) -> None:
    opener, address = old
    new = str(tmp_path / "new.db")
    with opener() as theirs:
        theirs.setup()
        for thread in "ab":
            root = put(theirs, at(thread), made({"a": 1}))
            theirs.put_writes(root, [("a", 2)], "task")
        theirs.serde = JsonPlusSerializer(pickle_fallback=True)
        theirs.put_writes(read(theirs, at("a")).config, [("x", object)], "pickling")
    status, said = run(address, new)
    compared, sums = said.splitlines()
    assert compared.startswith("thread 'a': cannot be compared: ") and "pickle" in compared, said
    assert (status, sums) == (3, "2 threads with 2 checkpoints and 3 writes were moved.")
    with opener() as theirs:
        put(theirs, at("c"), made({"a": 3}))
    status, said = run(address, new)
    *there, sums = said.splitlines()
    assert there == [f"thread '{thread}' was not moved: the target has a thread of this id" for thread in "ab"]
    assert (status, sums) == (3, "1 threads with 1 checkpoints and 0 writes were moved.")
    with SqliteSaver.from_conn_string(new) as ours:
        assert read(ours, at("c")).checkpoint["channel_values"] == {"a": 3}
        ours.serde = JsonPlusSerializer(pickle_fallback=True)
        assert ("pickling", "x", object) in writes(ours, at("a"))


def test_a_damaged_thread_does_not_keep_others_from_being_moved(tmp_path: Path) -> None:
    old, new = str(tmp_path / "old.db"), str(tmp_path / "new.db")
    with TheirSqliteSaver.from_conn_string(old) as theirs:
        for thread in "abc":
            root = put(theirs, at(thread), made({"a": 1}))
            theirs.put_writes(root, [("a", 2)], "task")
        theirs.conn.execute("UPDATE writes SET value = NULL WHERE thread_id = 'a'")
        theirs.conn.execute("UPDATE checkpoints SET metadata = CAST(x'ff' AS TEXT) WHERE thread_id = 'b'")
        theirs.conn.commit()
    status, said = run(old, new)
    first, second, sums = said.splitlines()
    assert first.startswith("thread 'a' was not moved: TypeError: "), said
    assert second.startswith("thread 'b' was not moved: OperationalError: "), said
    assert (status, sums) == (3, "1 threads with 1 checkpoints and 1 writes were moved.")
    with SqliteSaver.from_conn_string(new) as ours:
        assert writes(ours, at("c")) == [("task", "a", 2)]
        assert ours.get_tuple(at("a")) is None and ours.get_tuple(at("b")) is None


def test_a_thread_of_the_target_is_never_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = str(tmp_path / "old.db"), str(tmp_path / "new.db")
    with TheirSqliteSaver.from_conn_string(old) as theirs:
        put(theirs, at(), made({"a": "theirs"}))

    def busy(*_: Any, **__: Any) -> Any:
        raise UnavailableError("the store is busy")

    with SqliteSaver.from_conn_string(new) as ours:
        put(ours, at(), made({"a": "ours"}))
        monkeypatch.setattr(ours, "_list", busy)
        report = move(SqliteSource(old), ours, compare=False)
        assert (report.threads, len(report.problems)) == (0, 1) and "busy" in report.problems[0]
        assert read(ours, at()).checkpoint["channel_values"] == {"a": "ours"}


def test_a_thread_is_moved_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = str(tmp_path / "old.db"), str(tmp_path / "new.db")
    with TheirSqliteSaver.from_conn_string(old) as theirs:
        root = put(theirs, at(), made({"a": 1}))
        theirs.put_writes(root, [("a", 2)], "task")
        last = put(theirs, root, made({"a": 2}))["configurable"]["checkpoint_id"]  # type: ignore[typeddict-item]
        theirs.conn.execute("UPDATE checkpoints SET type = 'pickle' WHERE checkpoint_id = ?", (last,))
        theirs.conn.commit()
    with SqliteSaver.from_conn_string(new) as ours:
        report = move(SqliteSource(old), ours, compare=False)
        assert report.threads == 0 and "pickle" in report.problems[0]
        assert (report.checkpoints, report.writes) == (0, 0)
        assert ours.get_tuple(at()) is None
        # Also if somebody stops it: half of a thread would be taken for one that was moved before.
        source = SqliteSource(old)
        rows = list(source.rows("t"))

        def stopped(_: str) -> Any:
            yield rows[0]
            raise KeyboardInterrupt

        monkeypatch.setattr(source, "rows", stopped)
        with pytest.raises(KeyboardInterrupt):
            move(source, ours, compare=False)
        assert ours.get_tuple(at()) is None


# Moves a thread, and sends itself a signal after the first checkpoint.
ENDING = """
import os, signal, sys
from threadkeep.langgraph import _moving

source, target, name = sys.argv[1:]
number, rows = signal.Signals[name], _moving.SqliteSource.rows
if number != signal.SIGKILL:
    signal.signal(number, signal.SIG_DFL)

def ending(self, thread):
    first, *others = rows(self, thread)
    yield first
    os.kill(os.getpid(), number)
    yield from others

_moving.SqliteSource.rows = ending
sys.exit(_moving.main([source, target]))
"""


def ended_by(name: str, tmp_path: Path) -> tuple[str, str]:
    """Two stores: one with a thread of two checkpoints, and one to which they were moved until a signal came."""
    old, new = str(tmp_path / "old.db"), str(tmp_path / "new.db")
    with TheirSqliteSaver.from_conn_string(old) as theirs:
        put(theirs, put(theirs, at(), made({"a": 1})), made({"a": 2}))
    done = subprocess.run([sys.executable, "-c", ENDING, old, new, name], capture_output=True, text=True, timeout=600)
    number = signal.Signals[name]
    assert done.returncode == (-number if name == "SIGKILL" else 128 + number), done.stderr
    return old, new


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_to_end_leaves_no_part_of_a_thread(name: str, tmp_path: Path) -> None:
    old, new = ended_by(name, tmp_path)
    with SqliteSaver.from_conn_string(new) as ours:
        assert ours.get_tuple(at()) is None
    status, said = run(old, new)
    assert (status, said.count("and are equal")) == (0, 1), said


def test_what_a_killed_import_left_is_named(tmp_path: Path) -> None:
    old, new = ended_by("SIGKILL", tmp_path)
    status, said = run(old, new)
    assert status == 3 and "thread 't' was not moved: the target has a thread of this id, which lacks 1 of its 2 checkpoints" in said
    with SqliteSaver.from_conn_string(new) as ours:
        ours.delete_thread("t")
    status, said = run(old, new)
    assert (status, said.count("and are equal")) == (0, 1), said


def test_writes_that_a_killed_import_left_out_are_named(old: Any, tmp_path: Path) -> None:
    opener, address = old
    with opener() as theirs:
        theirs.setup()
        root = put(theirs, at(), made({"a": 1}))
        theirs.put_writes(root, [("a", 2)], "task")
    new = str(tmp_path / "new.db")
    assert run(address, new)[0] == 0
    status, said = run(address, new)
    assert status == 3 and "the target has a thread of this id\n" in said, said
    # The store is as if it had been killed between the last checkpoint and these writes.
    with opener() as theirs:
        theirs.put_writes(root, [("__resume__", "yes")], "task")
        theirs.put_writes(root, [("a", 3), ("b", 3)], "other task")
    status, said = run(address, new)
    assert status == 3 and "of this id, which lacks the writes of 2 tasks: if an import" in said, said
    with opener() as theirs:
        put(theirs, root, made({"a": 2}))
    status, said = run(address, new)
    assert status == 3 and "which lacks 1 of its 2 checkpoints and the writes of 2 tasks: if an import" in said, said


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("postgres://localhost/app", True),
        ("postgresql:///app?host=/run/postgresql", True),
        ("dbname=app host=db", True),
        (" host = '/a b' user=x ", True),
        ("service=app", True),
        ("checkpoints.db", False),
        ("/data/host=5/checkpoints of dbname=app.db", False),
        ("a=b.db", False),
        ("postgresql+psycopg://ann@db/app", True),
        ("postgresql+notes.db", False),
    ],
)
def test_a_database_is_not_taken_for_a_file(text: str, is_one: bool) -> None:
    assert is_address(text) == is_one


@pytest.mark.parametrize("old", ["postgres"], indirect=True)
def test_a_source_may_be_named_in_words(old: Any, tmp_path: Path) -> None:
    opener, address = old
    with opener() as theirs:
        theirs.setup()
        put(theirs, at(), made({"a": 1}))
    status, said = run(in_words(address), str(tmp_path / "new.db"))
    assert (status, said.count("and are equal")) == (0, 1), said


@pytest.mark.parametrize("old", ["postgres"], indirect=True)
def test_a_target_may_be_named_in_words(old: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with TheirSqliteSaver.from_conn_string("old.db") as theirs:
        put(theirs, at(), made({"a": 1}))
    words = in_words(old[1])
    status, said = run("old.db", words)
    assert (status, said.count("and are equal")) == (0, 1), said
    assert not [found for found in tmp_path.iterdir() if "=" in found.name]
    with PostgresSaver.from_conn_string(words) as ours:
        assert read(ours, at()).checkpoint["channel_values"] == {"a": 1}


def test_the_last_checkpoint_of_a_file_is_read_at_the_moment_of_the_others(tmp_path: Path) -> None:
    old, asked = str(tmp_path / "old.db"), list[str]()
    with TheirSqliteSaver.from_conn_string(old) as theirs:
        root = put(theirs, at(), made({"a": 1}))
        theirs.put_writes(root, [("a", 2)], "task")
        source = SqliteSource(old)

        def beside(statement: str) -> None:
            # Before the statement begins.
            if "FROM writes" in statement and not asked:
                asked.append(statement)
                theirs.put_writes(root, [("a", 3)], "later")

        source.connection.set_trace_callback(beside)
        [row] = source.rows("t")
        assert [task for task, *_ in row.writes] == ["task"]
        assert [task for task, *_ in writes(theirs, at())] == ["later", "task"], "it was written before they were read"
        [row] = source.rows("t")
        assert [task for task, *_ in row.writes] == ["later", "task"]


@pytest.mark.parametrize("old", ["postgres"], indirect=True)
def test_a_thread_is_read_at_one_moment(old: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opener, address = old
    with opener() as theirs, SqliteSaver.from_conn_string(str(tmp_path / "new.db")) as ours:
        theirs.setup()
        config = put(theirs, at(), made({"a": [1], "b": [0]}))
        source = PostgresSource(address)
        query, count = source._query, 1

        def beside(*arguments: Any) -> Any:
            nonlocal config, count
            found = query(*arguments)
            count += 1
            config = put(theirs, config, made({"a": [count], "b": [0]}, {"a": count, "b": 1}), new={"a": count})
            return found

        monkeypatch.setattr(source, "_query", beside)
        report = move(source, ours, compare=False)
        assert (report.threads, report.problems) == (1, [])
        moved = [found.checkpoint for found in ours.list(at())]
        # Some may have been put before the moment.
        assert report.checkpoints == len(moved) > 0 and count > 2
        for found in moved:
            assert found["channel_values"] == {"a": [found["channel_versions"]["a"]], "b": [0]}


def test_what_somebody_else_writes_meanwhile_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = str(tmp_path / "old.db"), str(tmp_path / "new.db")
    with TheirSqliteSaver.from_conn_string(old) as theirs:
        root = put(theirs, at(), made({"a": 1}))
        put(theirs, root, made({"a": 2}))
    with SqliteSaver.from_conn_string(new) as ours, SqliteSaver.from_conn_string(new) as graph:
        source = SqliteSource(old)
        rows = list(source.rows("t"))

        def checkpoint() -> Any:
            return put(graph, root, made({"a": "theirs"}))

        def write() -> Any:
            return graph.put_writes(root, [("a", "theirs")], "their task")

        for act, ends in [(checkpoint, None), (write, ThreadkeepError), (write, KeyboardInterrupt)]:

            def beside(_: str, act: Any = act, ends: Any = ends) -> Any:
                yield rows[0]
                act()
                if ends:
                    raise ends("it ends")
                # Older than the head by now, so it is refused.
                yield rows[1]

            monkeypatch.setattr(source, "rows", beside)
            if ends is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    move(source, ours, compare=False)
                said = capsys.readouterr().err
            else:
                report = move(source, ours, compare=False)
                assert report.threads == 0
                [said] = report.problems
            assert "thread 't' was not moved" in said and "another program writes to that thread" in said
            if act is checkpoint:
                assert [found.checkpoint["channel_values"]["a"] for found in graph.list(at())] == ["theirs", 1]
            else:
                assert read(graph, root).pending_writes == [("their task", "a", "theirs")]
            graph.delete_thread("t")


def test_a_copy_of_a_file_without_its_log_is_named(tmp_path: Path) -> None:
    old, copy = tmp_path / "old.db", tmp_path / "copy.db"
    with TheirSqliteSaver.from_conn_string(str(old)) as theirs:
        put(theirs, at(), made({"a": 1}))
        copy.write_bytes(old.read_bytes())
    assert "copy the file -wal beside that one, too" in refused(str(copy), str(tmp_path / "new.db"))


def test_a_file_beside_which_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    old = tmp_path / "old.db"
    with TheirSqliteSaver.from_conn_string(str(old)) as theirs:
        put(theirs, at(), made({"a": 1}))
    # As on a file system that is mounted for reading only: SQLite opens no link.
    (tmp_path / "old.db-shm").symlink_to(tmp_path / "nowhere")
    said = refused(str(old), str(tmp_path / "new.db"))
    assert "unable to open database file" in said and "to a directory that can be written" in said, said


def test_another_database_is_refused(tmp_path: Path) -> None:
    with SqliteSaver.from_conn_string(str(tmp_path / "ours.db")) as saver:
        put(saver, at(), made({"a": 1}))
    command = [str(Path(sys.executable).parent / "threadkeep"), "import-langgraph"]
    done = subprocess.run([*command, str(tmp_path / "ours.db"), str(tmp_path / "new.db")], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "not a database of LangGraph's SqliteSaver" in done.stderr
    (tmp_path / "text").write_text("no database\n" * 99)
    for name in ("missing.db", "text"):
        new = tmp_path / "new.db"
        done = subprocess.run([*command, str(tmp_path / name), str(new)], capture_output=True, text=True, timeout=600)
        assert done.returncode == 1 and done.stderr.startswith(f"{tmp_path / name} cannot be read: "), done.stderr
        assert not new.exists()
