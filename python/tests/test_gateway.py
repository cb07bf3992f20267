"""A thread goes from a graph to the gateway and back, while both have its store open."""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command

from conftest import Opener
from graphs import append, conversation, shown
from kit import at

CONFIG: RunnableConfig = {"configurable": {"thread_id": "t"}}
# Answers with the last message, and calls a tool where it is asked for one.
SCRIPT = {
    "rules": [
        {
            "when": {"contains": ["list"]},
            "answers": [
                {"text": "", "tool_calls": [{"name": "ls", "args": {}}], "usage": {"input_tokens": 5, "output_tokens": 1}},
                {"text": "listed"},
            ],
        },
        {"answers": [{"text": "gateway: {{input}}"}]},
    ]
}


class Gateway:
    """The program, serving one store."""

    def __init__(self, folder: Path, database: dict[str, Any]) -> None:
        (folder / "script.json").write_text(json.dumps(SCRIPT))
        config = {
            "config_version": 49,
            "database": database,
            "models": [{"name": "m", "use": "scripted", "model": "m", "script": "script.json"}],
        }
        (folder / "config.yaml").write_text(json.dumps(config))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SVC_", "GATEWAY_"))}
        self.process = subprocess.Popen(
            [os.environ["THREADKEEP_BINARY"], "serve", "--port", "0"],
            cwd=folder,
            env={**kept, "SVC_HOME": str(folder / "state")},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr
        said: list[str] = []
        for line in self.process.stderr:
            said.append(line)
            if "serving on " in line:
                self.base = line.split("serving on ")[1].split()[0].rstrip(",")
                break
        else:
            raise AssertionError("".join(said))

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.base}{path}", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from error

    def ask(self, text: str) -> list[dict[str, Any]]:
        """A turn; the messages after it. A thread that the gateway did not make needs a record before it can have runs."""
        self.call("/api/threads", {"thread_id": "t", "if_exists": "do_nothing"})
        messages = [{"role": "user", "content": text}]
        body = {"input": {"messages": messages}}
        found: list[dict[str, Any]] = self.call("/api/threads/t/runs/wait", body)["messages"]
        return found

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.call("/api/threads/t/state")
        return found

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.stderr
        self.process.stderr.read()
        assert self.process.wait(60) == 0


@pytest.fixture(params=["full", "delta"])
def mode(request: pytest.FixtureRequest) -> str:
    """How the gateway stores messages."""
    return str(request.param)


@pytest.fixture
def place(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """The store of the gateway."""
    if kind == "sqlite":
        (tmp_path / "data").mkdir()
        return {"conn_string": str(tmp_path / "data" / "checkpoints.db")}
    return {"conn_string": request.getfixturevalue("postgres_url"), "schema": f"t{uuid.uuid4().hex}"}


@pytest.fixture
def serve(kind: str, mode: str, place: dict[str, str], tmp_path: Path) -> Iterator[Callable[[], Gateway]]:
    """Starts the gateway on the store."""
    started: list[Gateway] = []

    def start() -> Gateway:
        if kind == "sqlite":
            database = {"backend": "sqlite", "sqlite_dir": str(tmp_path / "data")}
        else:
            database = {"backend": "postgres", "postgres_url": place["conn_string"], "postgres_schema": place["schema"]}
        delta = {"snapshot_frequency": 3}
        started.append(Gateway(tmp_path, {**database, "checkpoint_channel_mode": mode, "checkpoint_delta": delta}))
        return started[-1]

    yield start
    for gateway in started:
        gateway.stop()


def check(folder: Path, *arguments: str) -> str:
    """What the operator's command says of the gateway's store."""
    command = [str(Path(sys.executable).parent / "threadkeep"), *arguments, "--config", str(folder / "config.yaml")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def chat(saver: Any) -> Any:
    """A graph that answers."""

    def answer(state: MessagesState) -> dict[str, Any]:
        assert all(isinstance(message, HumanMessage | AIMessage) or message.type == "tool" for message in state["messages"])
        return {"messages": [("ai", f"graph: {state['messages'][-1].content}")]}

    builder = StateGraph(MessagesState)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    return builder.compile(checkpointer=saver)


def is_now(time: str) -> bool:
    return abs(datetime.now(timezone.utc) - datetime.fromisoformat(time.replace("Z", "+00:00"))) < timedelta(hours=1)


def said(*texts: str) -> list[tuple[str, str]]:
    """The types and contents of turns with these texts; one that begins with ``!`` went to the gateway."""
    return [
        one
        for text in texts
        for one in [("human", text.lstrip("!")), ("ai", f"gateway: {text[1:]}" if text[0] == "!" else f"graph: {text}")]
    ]


def of_graph(saver: Any) -> list[tuple[str, str]]:
    state = chat(saver).get_state(CONFIG)
    assert is_now(state.created_at), state.created_at
    return [(message.type, message.content) for message in state.values["messages"]]


def of_gateway(gateway: Gateway) -> list[tuple[str, str]]:
    state = gateway.state()
    assert is_now(state["created_at"]), state["created_at"]
    return [(message["type"], message["content"]) for message in state["values"]["messages"]]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("first", ["graph", "gateway"])
def test_a_thread_goes_from_one_to_the_other_and_back(
    first: str, tmp_path: Path, open_saver: Opener, serve: Callable[[], Gateway]
) -> None:
    with open_saver() as saver:
        gateway = serve()
        graph = chat(saver)
        turns = ["one", "two", "!three", "!four", "five", "!six", "seven", "!eight"]
        if first == "gateway":
            turns = [text[1:] if text[0] == "!" else f"!{text}" for text in turns]
        for number, text in enumerate(turns):
            if text[0] == "!":
                gateway.ask(text[1:])
            else:
                graph.invoke({"messages": [("user", text)]}, CONFIG)
            expected = said(*turns[: number + 1])
            assert of_gateway(gateway) == expected, "in the gateway"
            assert of_graph(saver) == expected, "in the graph"
        # Every checkpoint of the one is a state of the other, with the same messages.
        history = list(graph.get_state_history(CONFIG))
        entries = gateway.call("/api/threads/t/history", {"limit": 1000})
        assert [state.config["configurable"]["checkpoint_id"] for state in history] == [
            entry["checkpoint_id"] for entry in entries
        ]
        assert all(is_now(state.created_at) for state in history)
        ids = [message.id for message in history[0].values["messages"]]
        for state, entry in zip(history, entries, strict=True):
            contents = [message.content for message in state.values.get("messages", [])]
            assert contents == [content for _, content in said(*turns)][: len(contents)]
            assert [message.id for message in state.values.get("messages", [])] == ids[: len(contents)]
            assert is_now(entry["created_at"]) and state.metadata["step"] == entry["metadata"]["step"]
    assert check(tmp_path, "verify", "--all") == "1 thread: no violations.\n"
    listed = check(tmp_path, "checkpoints", "list", "--thread", "t")
    assert listed.count(str(datetime.now(timezone.utc).year)) >= len(history), listed
    with open_saver() as saver:
        assert of_graph(saver) == said(*turns), "read from the store alone"


class Topic(TypedDict):
    """A state without messages."""

    topic: str


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_graph_without_messages_leaves_the_conversation_as_it_is(
    turns: int, tmp_path: Path, open_saver: Opener, serve: Callable[[], Gateway]
) -> None:
    def route(state: Topic) -> dict[str, str]:
        return {"topic": f"{state['topic']}!"}

    with open_saver() as saver:
        gateway = serve()
        builder = StateGraph(Topic)
        builder.add_node("route", route)
        builder.add_edge(START, "route")
        router = builder.compile(checkpointer=saver)
        asked: list[str] = []
        for number in range(turns):
            asked.append(f"!turn {number}")
            gateway.ask(asked[-1][1:])
        for text in ["!more", "in between", "!at last"]:
            router.invoke({"topic": "x"}, CONFIG)
            assert router.get_state(CONFIG).values == {"topic": "x!"}
            assert of_gateway(gateway) == said(*asked), "in the gateway"
            assert of_graph(saver) == said(*asked), "in another graph"
            asked.append(text)
            if text[0] == "!":
                gateway.ask(text[1:])
            else:
                chat(saver).invoke({"messages": [("user", text)]}, CONFIG)
        assert of_gateway(gateway) == said(*asked)
        history = gateway.call("/api/threads/t/history", {"limit": 1000})
        assert len(history) == len(list(saver.list(CONFIG)))
    assert check(tmp_path, "verify", "--all") == "1 thread: no violations.\n"


@pytest.mark.parametrize("kind", ["sqlite"])
def test_a_message_of_the_gateway_is_one_of_langchain(
    open_saver: Opener, serve: Callable[[], Gateway]
) -> None:
    gateway = serve()
    stored = gateway.ask("list")
    with open_saver() as saver:
        found = chat(saver).get_state(CONFIG).values["messages"]
        assert [type(message).__name__ for message in found] == ["HumanMessage", "AIMessage", "ToolMessage", "AIMessage"]
        assert [call["name"] for call in found[1].tool_calls] == ["ls"]
        assert found[2].tool_call_id == found[1].tool_calls[0]["id"]
        assert found[1].usage_metadata["total_tokens"] == 6
        assert [message.id for message in found] == [message["id"] for message in stored]
        chat(saver).invoke({"messages": [("user", "more")]}, CONFIG)
        again = chat(saver).get_state(CONFIG).values["messages"]
        assert again[:4] == found
    state = gateway.state()["values"]["messages"]
    assert [message["content"] for message in state[-2:]] == ["more", "graph: more"]
    assert state[1]["tool_calls"] == stored[1]["tool_calls"]
    assert state[1]["usage_metadata"]["total_tokens"] == 6


class Changes(TypedDict):
    """A state whose messages are stored as changes."""

    messages: Annotated[list[Any], DeltaChannel(append)]


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_messages_of_the_gateway_are_not_replayed_by_a_graph(
    turns: int, open_saver: Opener, serve: Callable[[], Gateway]
) -> None:
    gateway = serve()
    edited: dict[str, Any] = {}
    for number in range(turns):
        edited = {**gateway.ask(f"turn {number}")[0], "content": f"edited {number}"}
        gateway.call("/api/threads/t/state", {"values": {"messages": [edited]}})
    seen: list[list[Any]] = []

    def answer(state: Changes) -> dict[str, Any]:
        seen.append(list(state["messages"]))
        return {"messages": [AIMessage("answer", id="a")]}

    with open_saver() as saver:
        builder = StateGraph(Changes)
        builder.add_node("answer", answer)
        builder.add_edge(START, "answer")
        graph = builder.compile(checkpointer=saver)
        graph.invoke({"messages": [HumanMessage("more", id="h")]}, CONFIG)
        found = graph.get_state(CONFIG).values["messages"]
        before = HumanMessage(edited["content"], id=edited["id"])
        assert [(message.type, message.content, message.id) for message in found] == [
            (message.type, message.content, message.id)
            for message in [before, HumanMessage("more", id="h"), AIMessage("answer", id="a")]
        ]
        assert seen == [found[:-1]]


@pytest.mark.parametrize("kind", ["sqlite"])
def test_what_the_gateway_does_not_know_of_a_thread_stays(
    mode: str, tmp_path: Path, open_saver: Opener, serve: Callable[[], Gateway]
) -> None:
    with open_saver() as saver:
        graph = conversation(saver)
        for number in range(3):
            graph.invoke({"messages": [("user", f"turn {number}")]}, CONFIG)
            graph.invoke(Command(resume=f"resumed {number}"), CONFIG)
        before = shown(graph.get_state(CONFIG))
        gateway = serve()
        if mode == "full":
            # The graph has a delta channel.
            with pytest.raises(AssertionError, match="Thread requires delta mode"):
                gateway.ask("hello")
            assert shown(graph.get_state(CONFIG)) == before
            return
        gateway.ask("hello")
        after = shown(graph.get_state(CONFIG))
        assert after["messages"] == [*before["messages"], "hello", "gateway: hello"]
        for channel in ("log", "turns", "next", "tasks"):
            assert after[channel] == before[channel], channel
        graph.invoke({"messages": [("user", "again")]}, CONFIG)
        graph.invoke(Command(resume="yes"), CONFIG)
        last = shown(graph.get_state(CONFIG))
        assert last["turns"] == before["turns"] + 1
        assert last["log"][: len(before["log"])] == before["log"] and len(last["log"]) > len(before["log"])
    assert check(tmp_path, "verify", "--all") == "1 thread: no violations.\n"
    with open_saver() as saver:
        assert shown(conversation(saver).get_state(CONFIG)) == last
        assert len(list(saver.list(at()))) > 20


class Plain(TypedDict):
    """A state whose messages are no objects of LangChain."""

    messages: Annotated[list[Any], operator.add]


OWN_MESSAGES: list[Any] = [
    {"role": "user", "content": "question"},
    {"type": "picture", "id": "1", "content": "of a cat"},
    {"type": "ai", "content": "without an id"},
    {"type": "ai", "id": "2", "content": {"no": "text"}},
    {"type": "tool", "id": "3", "content": "of no call"},
    {"type": ["human"], "id": "4", "content": "x"},
    "text",
    {},
]


@pytest.mark.parametrize("kind", ["sqlite"])
def test_messages_that_are_plain_dictionaries_stay_as_they_are_beside_the_gateway(
    open_saver: Opener, serve: Callable[[], Gateway]
) -> None:
    with open_saver() as saver:
        builder = StateGraph(Plain)
        builder.add_node("answer", lambda _: {"messages": [{"role": "assistant", "content": "answer"}]})
        builder.add_edge(START, "answer")
        graph = builder.compile(checkpointer=saver)
        graph.invoke({"messages": OWN_MESSAGES}, CONFIG)
        gateway = serve()
        gateway.call("/api/threads", {"thread_id": "t", "if_exists": "do_nothing"})
        gateway.call("/api/threads/t/state", {"values": {"title": "of the gateway"}})
        head = graph.get_state(CONFIG)
        assert head.metadata["source"] == "update"
        expected = [*OWN_MESSAGES, {"role": "assistant", "content": "answer"}]
        assert head.values["messages"] == expected
        assert next(graph.get_state_history(CONFIG)).values["messages"] == expected
        last = graph.invoke({"messages": [{"role": "user", "content": "more"}]}, CONFIG)
        expected += [{"role": "user", "content": "more"}, {"role": "assistant", "content": "answer"}]
        assert last["messages"] == graph.get_state(CONFIG).values["messages"] == expected
