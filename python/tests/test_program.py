"""The program `threadkeep` reads what the savers wrote, and the savers what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, MessagesState, StateGraph

from graphs import conversation, play, shown
from kit import at, made, put, read, threadkeep
from threadkeep.langgraph import SqliteSaver


def test_it_verifies_what_graphs_wrote_and_what_deletions_left(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoints.db")
    with SqliteSaver.from_conn_string(path) as saver:
        play(saver, "sync")
        for number, durability in enumerate(["sync", "exit"]):
            saver.copy_thread("t", f"copy {number}")
            saver.delete_thread("t")
            play(saver, durability)
        saver.prune(["copy 0"])
    assert threadkeep("verify", "--all", "--sqlite", path) == "3 threads: no violations.\n"
    with SqliteSaver.from_conn_string(path) as saver:
        state = conversation(saver).get_state({"configurable": {"thread_id": "copy 0"}})
        assert len(shown(state)["log"]) > 10


def test_it_shows_messages_and_times(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoints.db")
    with SqliteSaver.from_conn_string(path) as saver:
        messages = [HumanMessage("hello", id="h"), AIMessage("hi", id="a")]
        # The time is that of the id.
        made_at = "2025-06-01T12:34:56.789000+00:00"
        put(saver, at("1"), made({"messages": messages}, id="1f03ee4d-35ab-6c50-9234-123456789abc", ts=made_at))
    state = json.loads(threadkeep("state", "get", "--thread", "1", "--sqlite", path, "--json").splitlines()[0])
    text = json.dumps(state)
    assert '"content": "hello"' in text and '"type": "ai"' in text, text
    listed = threadkeep("checkpoints", "list", "--thread", "1", "--sqlite", path)
    assert "2025-06-01 12:34:56.789Z" in listed, listed


def test_it_shows_the_state_of_a_graph_with_consumed_channels_and_values_that_are_no_json(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoints.db")
    with SqliteSaver.from_conn_string(path) as saver:

        class State(MessagesState):
            raw: bytes
            names: set[str]

        def answer(state: State) -> dict[str, object]:
            return {"messages": [("ai", "hello")], "raw": b"\x00\x01", "names": {"a"}}

        graph = StateGraph(State).add_node("answer", answer).add_edge(START, "answer").compile(checkpointer=saver)
        config = {"configurable": {"thread_id": "1"}}
        for said in ["one", "two"]:
            graph.invoke({"messages": [("user", said)]}, config)
        checkpoints = [found.config["configurable"]["checkpoint_id"] for found in saver.list(config)]
    for checkpoint in checkpoints:
        arguments = ["--thread", "1", "--sqlite", path, "--json", "--checkpoint", checkpoint]
        values = json.loads(threadkeep("state", "get", *arguments).splitlines()[0])["values"]
        # As stored, with the tag of its serializer.
        assert values.get("raw", {"not_json": {"bytes": 14}}) == {"not_json": {"bytes": 14}}, values
    newest = json.loads(threadkeep("state", "get", "--thread", "1", "--sqlite", path, "--json").splitlines()[0])["values"]
    assert [message["content"] for message in newest["messages"]] == ["one", "hello", "two", "hello"]
    assert "__start__" not in newest, "it was consumed"
    assert set(newest) >= {"messages", "raw", "names"}, newest
    threadkeep("checkpoints", "diff", *checkpoints[:2], "--thread", "1", "--sqlite", path)
    threadkeep("checkpoints", "show", checkpoints[0], "--thread", "1", "--sqlite", path)


def test_a_thread_is_exported_and_imported_whole(tmp_path: Path) -> None:
    old, new, exported = (str(tmp_path / name) for name in ("old.db", "new.db", "t.ndjson"))
    with SqliteSaver.from_conn_string(old) as saver:
        play(saver, "sync", turns=4)
        expected = list(saver.list(at()))
    threadkeep("export", "--thread", "t", "--sqlite", old, "--out", exported)
    with SqliteSaver.from_conn_string(new):
        pass  # The program does not create stores by accident.
    threadkeep("import", exported, "--sqlite", new)
    with SqliteSaver.from_conn_string(new) as saver:
        assert list(saver.list(at())) == expected
        play(saver, "sync", turns=2)
        assert read(saver, at()).config != expected[0].config


def test_a_package_without_the_program_says_so() -> None:
    command = [str(Path(sys.executable).parent / "threadkeep"), "verify"]
    environment = {name: value for name, value in os.environ.items() if name != "THREADKEEP_BINARY"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "built without the program" in done.stderr and "make wheel" in done.stderr
