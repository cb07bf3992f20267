"""Where LangGraph's model is not the store's, each difference with its test."""

from __future__ import annotations

import asyncio
import copy
import operator
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier, Event
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import pytest
from langchain_core.messages import HumanMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME, _DeltaSnapshot
from langgraph.graph import START, StateGraph
from langgraph.types import Command, StateUpdate, interrupt

from conftest import Opener
from graphs import append, conversation
from kit import NULL_TASK, at, made, put, read, replayed, writes
from threadkeep import ConflictError, InvalidInputError
from threadkeep.langgraph import SqliteSaver

COUNTED = {"source": "loop", "step": 1, "parents": {}, "counters_since_delta_snapshot": {"d": [1, 1]}}


def test_a_child_applies_what_its_parent_has_in_the_order_of_paths(open_saver: Opener) -> None:
    with open_saver() as saver:
        root = put(saver, at(), made({"d": _DeltaSnapshot(["seed"])}))
        # Neither the order of arrival nor that of the ids is the order of the paths.
        for task, path in [("f", "p2"), ("a", "p3"), ("c", "p1"), ("b", "p1")]:
            saver.put_writes(root, [("d", [f"{path} {task} 0"]), ("d", [f"{path} {task} 1"])], task, path)
        child = put(saver, root, made({}, {"d": 2}), COUNTED)
        order = [["p1 b"], ["p1 c"], ["p2 f"], ["p3 a"]]
        expected = [[f"{who} {n}"] for [who] in order for n in range(2)]
        assert replayed(saver, child) == (_DeltaSnapshot(["seed"]), expected)
        assert [value for *_, value in writes(saver, root)] == expected
        # What arrives later is no history of the child.
        saver.put_writes(root, [("d", ["late"])], "z", "p0")
        assert replayed(saver, child) == (_DeltaSnapshot(["seed"]), expected)
        assert writes(saver, root)[0] == ("z", "d", ["late"])


def test_the_longest_list_of_a_task_is_shown(open_saver: Opener) -> None:
    def shown(*expected: tuple[str, Any]) -> None:
        assert writes(saver, root) == [(NULL_TASK, channel, value) for channel, value in expected]

    with open_saver() as saver:
        root = put(saver, at(), made({"a": 1}))
        saver.put_writes(root, [("a", 1)], NULL_TASK)
        saver.put_writes(root, [("a", 1), ("b", 2)], NULL_TASK)
        shown(("a", 1), ("b", 2))
        saver.put_writes(root, [("a", "other"), ("b", "other")], NULL_TASK)
        saver.put_writes(root, [("a", 1)], NULL_TASK)
        shown(("a", 1), ("b", 2))
        # A list that nobody put is never shown.
        saver.put_writes(root, [("a", "other"), ("b", "other"), ("a", 3), (RESUME, "yes")], NULL_TASK)
        shown((RESUME, "yes"), ("a", "other"), ("b", "other"), ("a", 3))


def test_a_task_that_runs_again_for_another_child_may_write_more(open_saver: Opener) -> None:
    with open_saver() as saver:
        runs_again(lambda: saver)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_task_may_write_more_in_another_process(open_saver: Opener) -> None:
    with ExitStack() as stack:
        # Each knows only what it reads from the store.
        runs_again(lambda: stack.enter_context(open_saver()))


def runs_again(opened: Callable[[], Any]) -> None:
    root = put(opened(), at(), made({"d": _DeltaSnapshot(["seed"])}))
    children, expected = [], []
    # Each child makes what it applied final.
    for length in (1, 3, 4, 8):
        # The second of them goes to a row that is not final.
        for more in (length, length + 1):
            saver = opened()
            saver.put_writes(root, [("d", [f"a {n}"]) for n in range(more)], "a", "p")
            saver.put_writes(root, [("d", ["b"])], "b", "p")
            # The beginning of it again.
            saver.put_writes(root, [("d", ["a 0"])], "a", "p")
            assert writes(saver, root) == [*(("a", "d", [f"a {n}"]) for n in range(more)), ("b", "d", ["b"])]
        expected.append([value for *_, value in writes(opened(), root)])
        children.append(put(opened(), root, made({}, {"d": 2}), COUNTED))
        for child, history in zip(children, expected, strict=True):
            assert replayed(opened(), child) == (_DeltaSnapshot(["seed"]), history)


def test_runs_that_write_other_things_for_one_task_replay_their_own(open_saver: Opener) -> None:
    with open_saver() as saver:
        root = put(saver, at(), made({"d": _DeltaSnapshot(["seed"])}))
        children = []
        for texts in (["one"], ["two"], ["three", "four"], ["five"]):
            saver.put_writes(root, [("d", [text]) for text in texts], "t", "p")
            children.append(put(saver, root, made({}, {"d": 2}), COUNTED))
        expected = [[["one"]], [["two"]], [["three"], ["four"]], [["five"]]]
        assert [replayed(saver, one)[1] for one in children] == expected
        assert [value for *_, value in writes(saver, root)] == [["three"], ["four"]]


# What two processes do, in which order: each puts writes of the task, then a checkpoint.
ORDERS = ["write one, put one, write two, put two", "write one, write two, put one, put two", "write one, write two, put two, put one"]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 2), (2, 1)])
def test_processes_that_write_other_things_for_one_task_replay_their_own(
    open_saver: Opener, order: str, lengths: tuple[int, int]
) -> None:
    with open_saver() as saver, open_saver() as other:
        root = put(saver, at(), made({"d": _DeltaSnapshot(["seed"])}))
        read(other, root)
        children: dict[str, Any] = {}
        lists = {
            who: [("d", [f"{who} {n}"]) for n in range(length)] for who, length in zip(["one", "two"], lengths, strict=True)
        }
        for step in order.split(", "):
            what, who = step.split()
            of = saver if who == "one" else other
            if what == "write":
                of.put_writes(root, lists[who], "t", "p")
            else:
                children[who] = put(of, root, made({}, {"d": 2}), COUNTED)
        for reader in (saver, other):
            for who, child in children.items():
                assert replayed(reader, child)[1] == [value for _, value in lists[who]], who


class Asked(TypedDict):
    log: Annotated[list[Any], DeltaChannel(append)]


def test_two_answers_at_one_time_are_two_branches(open_saver: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = {"configurable": {"thread_id": "t"}}
    both_read, stored, both_stored = Barrier(2), set[str](), Event()

    def ask(_: Asked) -> dict[str, Any]:
        answer = interrupt("what?")
        both_read.wait(600)
        return {"log": [answer]}

    def last(_: Asked) -> dict[str, Any]:
        interrupt("go on?")
        # The checkpoints come once the writes of both answers are stored.
        assert both_stored.wait(600)
        return {"log": ["last"]}

    with open_saver() as saver:
        builder = StateGraph(Asked).add_node("ask", ask).add_node("last", last)
        graph = builder.add_edge(START, "ask").add_edge(START, "last").compile(checkpointer=saver)
        graph.invoke({"log": ["start"]}, config)
        questions = {one.name: one.interrupts[0].id for one in graph.get_state(config).tasks}
        put_writes = saver.put_writes

        def noted(config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
            put_writes(config, writes, task_id, task_path)
            stored.update(value[0] for channel, value in writes if channel == "log" and value[0] in ("yes", "no"))
            if len(stored) == 2:
                both_stored.set()

        monkeypatch.setattr(saver, "put_writes", noted)

        def answered(answer: str) -> Any:
            resume = Command(resume={questions["ask"]: answer, questions["last"]: "yes"})
            try:
                return graph.invoke(resume, config)["log"]
            except ConflictError:
                # It drew the id of its checkpoint first and stored it second: it was overtaken, and says so.
                return None

        with ThreadPoolExecutor(2) as threads:
            both = list(threads.map(answered, ["yes", "no"]))
        results = [result for result in both if result is not None]
        assert results == [["start", answer, "last"] for answer, result in zip(("yes", "no"), both) if result] != []
        ends = [state.values["log"] for state in graph.get_state_history(config) if not state.next]
        assert sorted(ends) == sorted(results)


def test_two_updates_of_one_step_are_both_read_back(open_saver: Opener) -> None:
    config: Any = {"configurable": {"thread_id": "t"}}
    with open_saver() as saver:
        builder = StateGraph(Asked).add_node("one", lambda state: {"log": ["one"]}).add_node("two", lambda state: {"log": ["two"]})
        graph = builder.add_edge(START, "one").add_edge("one", "two").compile(checkpointer=saver)
        graph.invoke({"log": ["start"]}, config)
        # A caller may name one task for both; some versions of LangGraph do so where neither node is next.
        task = str(uuid4())
        updates = [StateUpdate({"log": ["a"]}, "one", task), StateUpdate({"log": ["b"]}, "two", task)]
        graph.bulk_update_state(config, [updates])
        assert sorted(graph.get_state(config).values["log"]) == ["a", "b", "one", "start", "two"]


def talked(saver: Any) -> Any:
    """A graph with one node, which has run."""
    return StateGraph(Asked).add_node("one", lambda state: {"log": ["one"]}).add_edge(START, "one").compile(checkpointer=saver)


def test_two_updates_at_one_time_are_two_branches(open_saver: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = {"configurable": {"thread_id": "t"}}
    both_stored = Barrier(2)
    with open_saver() as saver:
        graph = talked(saver)
        graph.invoke({"log": ["start"]}, config)
        put_writes = saver.put_writes

        def noted(config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
            put_writes(config, writes, task_id, task_path)
            both_stored.wait(600)

        monkeypatch.setattr(saver, "put_writes", noted)

        def updated(text: str) -> Any:
            try:
                return graph.update_state(config, {"log": [text]}, as_node="one")
            except ConflictError:
                # It drew the id of its checkpoint first and stored it second: it was overtaken, and says so.
                return None

        with ThreadPoolExecutor(2) as threads:
            branches = dict(zip("ab", threads.map(updated, "ab"), strict=True))
        logs = {text: graph.get_state(branch).values["log"] for text, branch in branches.items() if branch}
        assert logs == {text: ["start", "one", text] for text in logs} != {}
        copies = {text: graph.update_state(branches[text], None, as_node="__copy__") for text in logs}
        assert {text: graph.get_state(copy).values["log"] for text, copy in copies.items()} == logs


async def test_two_updates_at_one_time_in_an_event_loop_are_two_branches(
    open_async: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = {"configurable": {"thread_id": "t"}}
    stored, both_stored = set[str](), asyncio.Event()
    async with open_async() as saver:
        graph = talked(saver)
        await graph.ainvoke({"log": ["start"]}, config)
        put_writes = saver.aput_writes

        async def noted(config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
            await put_writes(config, writes, task_id, task_path)
            stored.update(value[0] for channel, value in writes if channel == "log")
            if len(stored) == 2:
                both_stored.set()
            await asyncio.wait_for(both_stored.wait(), 600)

        monkeypatch.setattr(saver, "aput_writes", noted)

        async def updated(text: str) -> Any:
            try:
                return await graph.aupdate_state(config, {"log": [text]}, as_node="one")
            except ConflictError:
                return None

        branches = dict(zip("ab", await asyncio.gather(*map(updated, "ab")), strict=True))
        logs = {text: (await graph.aget_state(branch)).values["log"] for text, branch in branches.items() if branch}
        assert logs == {text: ["start", "one", text] for text in logs} != {}


def test_a_call_that_goes_on_keeps_its_number(open_saver: Opener) -> None:
    class Task:
        """A task that is cancelled, and whose call is executed all the same."""

    with open_saver() as saver:
        task = Task()
        kept = weakref.ref(task)
        call = saver._store.get("t", "", None, (False, id(task), task))
        del task
        # Another one would get its address, and what it wrote.
        assert kept() is not None
        assert call.wait() is None
        del call
        assert kept() is None


def test_an_answer_has_nothing_of_an_update_that_came_meanwhile(open_saver: Opener) -> None:
    config: Any = {"configurable": {"thread_id": "t"}}
    answering, updated = Event(), Event()

    def ask(_: Asked) -> dict[str, Any]:
        answer = interrupt("what?")
        if answer == "yes":
            answering.set()
            assert updated.wait(600)
        return {"log": [answer]}

    with open_saver() as saver:
        graph = StateGraph(Asked).add_node("ask", ask).add_edge(START, "ask").compile(checkpointer=saver)
        graph.invoke({"log": ["start"]}, config)
        with ThreadPoolExecutor(1) as threads:
            answered = threads.submit(lambda: graph.invoke(Command(resume="yes"), config)["log"])
            assert answering.wait(600)
            # The update is stored under the checkpoint that the other run goes on from, as a task that this does not
            # have.
            other = graph.invoke(Command(resume="no", update={"log": ["note"]}), config)["log"]
            updated.set()
            results = [answered.result(600), other]
        assert results == [["start", "yes"], ["start", "note", "no"]]
        ends = [state.values["log"] for state in graph.get_state_history(config) if not state.next]
        assert sorted(ends) == sorted(results)


def test_a_write_may_be_any_pair(open_saver: Opener) -> None:
    with open_saver() as saver:
        root = put(saver, at(), made({"a": 1}))
        # As LangGraph's cache of nodes gives them.
        saver.put_writes(root, [["a", 1], ("b", [2])], "t")
        assert writes(saver, root) == [("t", "a", 1), ("t", "b", [2])]
        for wrong in (["a"], ("a", 1, 2), [1, 2]):
            with pytest.raises((TypeError, ValueError)):
                saver.put_writes(root, [wrong], "t")


def test_a_special_row_is_replaced_alone_and_stays_among_others(open_saver: Opener) -> None:
    with open_saver() as saver:
        root = put(saver, at(), made({"a": 1}))
        saver.put_writes(root, [(INTERRUPT, "one")], "t")
        saver.put_writes(root, [(INTERRUPT, "two")], "t")
        assert writes(saver, root) == [("t", INTERRUPT, "two")]
        saver.put_writes(root, [("a", 1), (INTERRUPT, "three"), (ERROR, "four")], "t")
        assert writes(saver, root) == [("t", INTERRUPT, "two"), ("t", ERROR, "four"), ("t", "a", 1)]
        # Also once a child has applied the task's other writes.
        put(saver, root, made({"a": 1}))
        saver.put_writes(root, [(INTERRUPT, "five")], "t")
        assert writes(saver, root) == [("t", INTERRUPT, "five"), ("t", ERROR, "four"), ("t", "a", 1)]


def test_writes_may_arrive_before_their_checkpoint(open_saver: Opener) -> None:
    with open_saver() as saver:
        root = put(saver, at(), made({"d": _DeltaSnapshot([])}))
        child = made({}, {"d": 2})
        config = at(checkpoint=child["id"])
        saver.put_writes(config, [("d", ["early"])], "t")
        assert saver.get_tuple(config) is None
        put(saver, root, child, COUNTED)
        assert writes(saver, config) == [("t", "d", ["early"])]
        grandchild = put(saver, config, made({}, {"d": 3}), {**COUNTED, "counters_since_delta_snapshot": {"d": [2, 2]}})
        assert replayed(saver, grandchild) == (_DeltaSnapshot([]), [["early"]])


def test_writes_that_wait_for_a_checkpoint_are_bounded(open_saver: Opener) -> None:
    with open_saver() as saver:
        absent = at(checkpoint=made({})["id"])
        with pytest.raises(InvalidInputError, match="does not exist.*put the checkpoint first"):
            for task in range(100):
                saver.put_writes(absent, [("a", "x" * 1_000_000)], str(task))


def test_a_channel_may_have_a_version_and_no_value(open_saver: Opener) -> None:
    with open_saver() as saver:
        root = put(saver, at(), made({"a": 1}, {"a": 1, "consumed": 1, "d": 1}), {**COUNTED, "step": -1})
        child = put(saver, root, made({"a": 1}, {"a": 1, "consumed": 2, "d": 1}), COUNTED, new={"consumed": 2})
        for config, consumed in [(root, 1), (child, 2)]:
            checkpoint = read(saver, config).checkpoint
            assert checkpoint["channel_values"] == {"a": 1}
            assert checkpoint["channel_versions"] == {"a": 1, "consumed": consumed, "d": 1}
        assert replayed(saver, child) == (None, [])
        # None is a value.
        null = put(saver, child, made({"a": None}, {"a": 2, "consumed": 2}))
        assert read(saver, null).checkpoint["channel_values"] == {"a": None}


def test_a_version_does_not_name_a_value(open_saver: Opener) -> None:
    with open_saver() as saver:
        configs = [at()]
        for value in ["one", "two", ["three"], ["three", "four"]]:
            configs.append(put(saver, configs[-1], made({"a": value}, {"a": 1})))
        values = [read(saver, config).checkpoint["channel_values"]["a"] for config in configs[1:]]
        assert values == ["one", "two", ["three"], ["three", "four"]]
        assert all(read(saver, config).checkpoint["channel_versions"] == {"a": 1} for config in configs[1:])


@pytest.mark.parametrize(
    "metadata",
    [
        {"step": -2},
        {"source": "input", "step": -1, "parents": {"": str(made({})["id"])}, "run_id": "r", "score": 1.5, "who": "me"},
        {"source": "elsewhere", "step": 2, "parents": {"": "no id"}, "nested": {"a": [1, None, {"b": True}]}},
        {"source": None, "step": None, "parents": None, "who": None},
    ],
)
def test_what_langgraph_keeps_beside_channels_comes_back(open_saver: Opener, metadata: dict[str, Any]) -> None:
    seen = {"__input__": {}, "agent": {"a": "00000000000000000000000000000002.0.5", "b": 3, "c": 1.5}}
    checkpoint = made({"a": 1}, versions_seen=seen, updated_channels=["a"], pending_sends=[HumanMessage("x")], more=1)
    with open_saver() as saver:
        config = put(saver, at(), checkpoint, metadata)
        found = read(saver, config)
        assert found.checkpoint == checkpoint
        assert found.metadata == metadata
        assert [listed.metadata for listed in saver.list(at())] == [metadata]
        next_version = saver.get_next_version(None, None)
        step = made({"a": 1}, {"a": next_version}, versions_seen={**seen, "agent": {"a": next_version}})
        assert read(saver, put(saver, config, step)).checkpoint == step


@pytest.mark.parametrize(
    "value",
    [None, b"bytes", bytearray(b"more"), {1, 2}, [None, b"x", {"a": {1}}], [], {}, "", 2**63, [[1], [[2]]], object],
)
def test_values_of_every_type_come_back(open_saver: Opener, value: Any) -> None:
    with open_saver() as saver:
        saver.serde = JsonPlusSerializer(pickle_fallback=True)
        config = put(saver, at(), made({"a": value}))
        saver.put_writes(config, [("a", value)], "t")
        found = read(saver, config)
        expected = JsonPlusSerializer(pickle_fallback=True)
        assert found.checkpoint["channel_values"]["a"] == expected.loads_typed(expected.dumps_typed(value))
        assert writes(saver, config) == [("t", "a", found.checkpoint["channel_values"]["a"])]


def test_an_encrypting_serializer_is_refused() -> None:
    class Cipher:
        def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
            return "xor", os.urandom(12) + plaintext

        def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
            return ciphertext[12:]

    with pytest.raises(ValueError, match="nonce.*encrypt the disk"):
        SqliteSaver(":memory:", serde=EncryptedSerializer(Cipher()))


def test_ids_are_the_texts_that_langgraph_draws(open_saver: Opener) -> None:
    with open_saver() as saver:
        checkpoint = made({"a": 1})
        for wrong in ["1", checkpoint["id"].upper(), checkpoint["id"].replace("-", "")]:
            with pytest.raises(InvalidInputError, match="not a UUID"):
                put(saver, at(), {**checkpoint, "id": wrong})
        assert put(saver, at(), checkpoint)["configurable"]["checkpoint_id"] == checkpoint["id"]


def test_no_namespace_is_that_of_the_graph(open_saver: Opener) -> None:
    with open_saver() as saver:
        # As a request has it that was made from JSON.
        asked: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": None, "checkpoint_id": None}}
        stored = put(saver, asked, made({"a": 1}))
        assert read(saver, asked).config == read(saver, at()).config == stored == at(checkpoint=stored["configurable"]["checkpoint_id"])
        saver.put_writes({"configurable": {**asked["configurable"], **stored["configurable"], "checkpoint_ns": None}}, [("a", 2)], "task")
        assert writes(saver, stored) == [("task", "a", 2)]


def test_a_moved_head_is_forked(open_saver: Opener) -> None:
    with open_saver() as saver:
        forked(saver, saver)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_head_that_another_saver_moved_is_forked(open_saver: Opener) -> None:
    with open_saver() as saver, open_saver() as other:
        forked(saver, other)


def forked(saver: Any, other: Any) -> None:
    root = put(saver, at(), made({"a": 0}))
    theirs = put(other, root, made({"a": 1}))
    ours = put(saver, root, made({"a": 2}))
    for config, value in [(theirs, 1), (ours, 2)]:
        found = read(saver, config)
        assert found.checkpoint["channel_values"] == {"a": value}
        assert found.parent_config == root
    assert read(saver, at()).config == ours


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_moved_head_is_an_error_if_asked(open_saver: Opener) -> None:
    with open_saver(fence="error") as saver, open_saver(fence="error") as other:
        root = put(saver, at(), made({"a": 0}))
        ours, theirs = read(saver, at()), read(other, at())
        assert name(ours.config) == name(theirs.config) == name(root)
        head = put(other, theirs.config, made({"a": 1}))
        with pytest.raises(ConflictError, match="read the head again"):
            put(saver, ours.config, made({"a": 2}))
        assert read(saver, at()).config == head
        # A fork that was asked for is none of that: its writer saw the head.
        older = read(saver, root).config
        fork = put(saver, older, made({"a": 3}))
        assert read(saver, at()).config == fork
        # Another one that saw the same head comes second.
        with pytest.raises(ConflictError):
            put(saver, older, made({"a": 4}))


def name(config: Any) -> str:
    return str(config["configurable"]["checkpoint_id"])


@pytest.mark.parametrize("wanted", ["head", "older", "root", "head by its id", "only a root"])
def test_a_copy_of_a_checkpoint_is_no_conflict(open_saver: Opener, wanted: str) -> None:
    with open_saver(fence="error") as saver:
        graph = conversation(saver)
        config: Any = {"configurable": {"thread_id": "t"}}
        if wanted == "only a root":
            put(saver, at(), made({"turns": 1}), {"source": "input", "step": -1, "parents": {}})
        else:
            graph.invoke({"messages": [("user", "hello")]}, config)
        history = list(graph.get_state_history(config))
        at_place = {"older": 1, "root": -1}.get(wanted, 0)
        copied = history[at_place]
        graph.update_state(config if wanted in ("head", "only a root") else copied.config, None, as_node="__copy__")
        found = read(saver, at())
        assert found.metadata["source"] == "fork"
        assert (found.parent_config and name(found.parent_config)) == (copied.parent_config and name(copied.parent_config))
        assert len(list(saver.list(at()))) == len(history) + 1


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_copy_of_a_checkpoint_that_another_writer_overtook_is_a_conflict(open_saver: Opener) -> None:
    with open_saver(fence="error") as saver, open_saver(fence="error") as other:
        root = put(saver, at(), made({"a": 0}))
        for _ in range(2):
            # First the copied checkpoint has no parent, then it has one.
            head = read(saver, at())
            by_id = read(saver, head.config)
            overtaking = put(other, read(other, at()).config, made({"a": 1}))
            for seen in (head, by_id):
                parent = seen.parent_config or {"configurable": {**seen.config["configurable"], "checkpoint_id": None}}
                with pytest.raises(ConflictError):
                    put(saver, parent, made({"a": 2}))
            assert name(read(saver, at()).config) == name(overtaking)
        assert name(root) == name(list(saver.list(at()))[-1].config)


class Noted(TypedDict, total=False):
    text: str
    notes: Annotated[list[str], operator.add]


class Shown(TypedDict):
    text: str


def with_memory(saver: Any) -> Any:
    """A graph with a subgraph that remembers, once a thread, what it was given."""
    inner = (
        StateGraph(Noted)
        .add_node("note", lambda state: {"notes": [state["text"]]})
        .add_node("say", lambda state: {"text": ", ".join(state["notes"])})
        .add_edge(START, "note")
        .add_edge("note", "say")
        .compile(checkpointer=True)
    )
    return (
        StateGraph(Shown)
        .add_node("first", lambda state: {"text": f"{state['text']}!"})
        .add_node("sub", inner)
        .add_edge(START, "first")
        .add_edge("first", "sub")
        .compile(checkpointer=saver)
    )


@pytest.mark.parametrize("fence", ["fork", "error"])
def test_going_back_across_a_subgraph_that_remembers_is_no_conflict(open_saver: Opener, fence: str) -> None:
    config: Any = {"configurable": {"thread_id": "t"}}
    with open_saver(fence=fence) as saver:
        graph = with_memory(saver)
        assert graph.invoke({"text": "one"}, config) == {"text": "one!"}
        assert graph.invoke({"text": "two"}, config) == {"text": "one!, two!"}
        newer, older = [state.config for state in graph.get_state_history(config) if state.next == ("sub",)]
        assert graph.invoke(None, newer) == {"text": "one!, two!"}, "it had a checkpoint then"
        assert graph.invoke(None, older) == {"text": "one!"}, "it had none"
        assert graph.invoke({"text": "three"}, config) == {"text": "one!, three!"}


@pytest.mark.parametrize("fence", ["fork", "error"])
async def test_going_back_across_a_subgraph_that_remembers_is_no_conflict_in_an_event_loop(
    open_async: Opener, fence: str
) -> None:
    config: Any = {"configurable": {"thread_id": "t"}}
    async with open_async(fence=fence) as saver:
        graph = with_memory(saver)
        for text in ("one", "two"):
            await graph.ainvoke({"text": text}, config)
        places = [state.config async for state in graph.aget_state_history(config) if state.next == ("sub",)]
        assert [await graph.ainvoke(None, place) for place in places] == [{"text": "one!, two!"}, {"text": "one!"}]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_listed_checkpoint_that_another_writer_overtook_is_fenced(open_saver: Opener) -> None:
    with open_saver(fence="error") as saver, open_saver(fence="error") as other:
        for namespace in ("", "sub"):
            root = put(saver, at(namespace=namespace), made({"a": 0}))
            head = put(saver, root, made({"a": 1}))
            listed = list(saver.list(at(namespace=namespace)))
            assert [name(found.config) for found in listed] == [name(head), name(root)]
            # Each says which head was there, so a fork of an older one is none that was overtaken.
            fork = put(saver, listed[1].config, made({"a": 2}))
            with pytest.raises(ConflictError):
                put(other, listed[1].config, made({"a": 3}))
            assert name(read(saver, at(namespace=namespace)).config) == name(fork)


def test_checkpoints_of_another_thread_are_put_as_any_others(open_saver: Opener) -> None:
    with open_saver(fence="error") as saver:
        config = at("source")
        for number in range(4):
            config = put(saver, config, made({"a": number}))
        saver.copy_thread("source", "copy")
        copied = put(saver, read(saver, at("copy")).config, made({"a": 4}))
        assert name(read(saver, at("copy")).config) == name(copied)

        def moved(config: Any, thread: str) -> Any:
            return {"configurable": {**config["configurable"], "thread_id": thread}}

        for number, reader in enumerate([lambda one: one, lambda one: read(saver, one.config)]):
            thread = f"put {number}"
            for one in reversed(list(saver.list(at("source")))):
                found = reader(one)
                put(saver, moved(found.parent_config or at(thread), thread), found.checkpoint)
            expected = [found.checkpoint for found in saver.list(at("source"))]
            assert [found.checkpoint for found in saver.list(at(thread))] == expected
        # A run that goes on there from what was read here.
        older = read(saver, list(saver.list(at("source")))[1].config)
        put(saver, at("another"), older.checkpoint)
        head = put(saver, moved(older.config, "another"), made({"a": 5}))
        assert name(read(saver, at("another")).config) == name(head)


def test_what_others_read_does_not_move_the_fence_of_a_run(open_saver: Opener) -> None:
    with open_saver(fence="error") as saver:
        root = put(saver, at(), made({"a": 0}))
        ours, by_id = read(saver, at()).config, read(saver, root).config
        head = put(saver, read(saver, at()).config, made({"a": 1}))
        # Somebody looks at an older checkpoint: at that of our run.
        assert read(saver, root).checkpoint["channel_values"] == {"a": 0}
        for config in (ours, by_id):
            with pytest.raises(ConflictError):
                put(saver, config, made({"a": 2}))
        assert read(saver, at()).config == head


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**40])
def test_an_integer_in_metadata_is_kept_or_refused(open_saver: Opener, number: int) -> None:
    with open_saver() as saver:
        largest = {"source": "loop", "step": 1, "parents": {}, "n": [2**64 - 1, -(2**63)]}
        config = put(saver, at(), made({"a": 0}), largest)
        assert read(saver, config).metadata == largest
        with pytest.raises(InvalidInputError, match="metadata"):
            put(saver, config, made({"a": 1}), {"step": 2, "nested": {"n": [number]}})
        with pytest.raises(InvalidInputError, match="metadata"):
            list(saver.list(at(), filter={"n": number}))
        assert read(saver, at()).config == config


@pytest.mark.parametrize("metadata", [{"who": "a\ud800b"}, {"nested": [{"\udfff": 1}]}])
def test_metadata_that_is_no_unicode_is_refused(open_saver: Opener, metadata: dict[str, Any]) -> None:
    with open_saver() as saver:
        config = put(saver, at(), made({"a": 0}), {"step": 1, "who": "ab"})
        with pytest.raises(InvalidInputError, match="metadata: .*surrogates"):
            put(saver, config, made({"a": 1}), metadata)
        with pytest.raises(InvalidInputError, match="metadata: .*surrogates"):
            list(saver.list(at(), filter=metadata))
        assert read(saver, at()).config == config


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_metadata_that_is_no_number_of_json_is_refused(open_saver: Opener, number: float) -> None:
    with open_saver() as saver:
        config = put(saver, at(), made({"a": 0}), {"step": 1})
        with pytest.raises(InvalidInputError, match="metadata"):
            put(saver, config, made({"a": 1}), {"step": 2, "nested": [number]})
        with pytest.raises(InvalidInputError, match="metadata"):
            list(saver.list(at(), filter={"n": number}))
        assert read(saver, at()).config == config


@pytest.mark.parametrize("version", [float("nan"), float("inf")])
def test_a_version_that_cannot_be_stored_is_refused(open_saver: Opener, version: float) -> None:
    with open_saver() as saver:
        for checkpoint in (made({"a": 0}, {"a": version}), made({"a": 0}, versions_seen={"n": {"a": version}})):
            with pytest.raises(ValueError, match="finite"):
                put(saver, at(), checkpoint)
        assert saver.get_tuple(at()) is None


def test_lists_and_deletions_go_over_all_threads(open_saver: Opener) -> None:
    with open_saver() as saver:
        stored = []
        for number in range(12):
            run = {"source": "loop", "step": number, "parents": {}, "run_id": f"r{number % 2}"}
            stored.append(put(saver, at(f"t{number % 3}", f"n{number % 2}"), made({"a": number}), run))
        assert [found.config for found in saver.list(None)] == stored[::-1]
        assert [found.config for found in saver.list(None, limit=5)] == stored[:-6:-1]
        assert [found.config for found in saver.list(None, filter={"run_id": "r1"}, before=stored[8])] == stored[7::-2]
        assert [found.config for found in saver.list(stored[4])] == [stored[4]]
        saver.delete_for_runs(["r0", "none"])
        assert [found.config for found in saver.list(None)] == stored[::-2]


def test_one_id_is_not_taken_for_many(open_saver: Opener) -> None:
    with open_saver() as saver:
        stored = [put(saver, at(one), made({"a": 1}), {"source": "loop", "step": 1, "parents": {}, "run_id": one}) for one in "12"]
        for call in (
            lambda: saver.prune("12", strategy="delete"),
            lambda: asyncio.run(saver.aprune("12", strategy="delete")),
            lambda: saver.delete_for_runs("12"),
            lambda: asyncio.run(saver.adelete_for_runs("12")),
        ):
            with pytest.raises(TypeError, match=r"pass \['12'\]"):
                call()
        assert [found.config for found in saver.list(None)] == stored[::-1]
        for call in (
            lambda: saver.get_delta_channel_history(config=stored[0], channels="ab"),
            lambda: asyncio.run(saver.aget_delta_channel_history(config=stored[0], channels="ab")),
        ):
            with pytest.raises(TypeError, match=r"channels must be a sequence of channels, .* pass \['ab'\] for one channel"):
                call()


def test_filters_compare_as_in_langgraph(open_saver: Opener) -> None:
    filters: list[dict[str, Any]] = [
        {"n": 1},
        {"n": 1.0},
        {"n": 1.5},
        {"absent": None},
        {"none": None},
        {"who": None},
        {"step": 2.0},
        {"step": 2, "who": "x"},
        {"source": "elsewhere"},
        {"source": None},
        {"n": True},
        {"zero": False},
        {"zero": 0},
        {"zero": -0.0},
        {"yes": 1},
        {"yes": 1.0},
        {"yes": True},
        {"yes": False},
        {"deep": {"a": [True, {"b": 0}]}},
        {"deep": {"a": [1, {"b": False}]}},
        {"deep": {"a": [1.0, {"b": "0"}]}},
        # More digits than a float has.
        {"large": 2**53},
        {"large": 2**53 + 1},
        {"large": float(2**53)},
        {"large": 2**64 - 1},
        {"large": float(2**64)},
    ]
    metadata: list[dict[str, Any]] = [
        {"step": 1, "n": 1, "who": "x", "source": "loop"},
        {"step": 2, "n": 1.0, "who": "x", "none": None, "source": "elsewhere"},
        {"step": 3, "n": 1.5, "who": "y"},
        {"step": 2, "who": "y", "none": "x", "source": "input"},
        {"step": 4, "n": True, "yes": True, "zero": False, "deep": {"a": [True, {"b": False}]}, "large": 2**53},
        {"step": 5, "n": False, "yes": 1, "zero": 0, "deep": {"a": [1, {"b": 0}]}, "large": 2**53 + 1},
        {"step": 6, "yes": 1.0, "zero": 0.0, "deep": {"a": [1.0, {"b": 0.0}]}, "large": float(2**53)},
        {"step": 7, "yes": "1", "zero": "", "deep": {"a": ["1", {"b": None}]}, "large": 2**64 - 1},
    ]
    with open_saver() as ours:
        theirs = InMemorySaver()
        config = at()
        for number, one in enumerate(metadata):
            checkpoint = made({"a": number})
            put(theirs, config, checkpoint, one)
            config = put(ours, config, checkpoint, one)
        for wanted in filters:
            for limit in (None, 1, 3):
                expected = [found.metadata for found in theirs.list(at(), filter=wanted, limit=limit)]
                assert [found.metadata for found in ours.list(at(), filter=wanted, limit=limit)] == expected, wanted
            assert [found.metadata for found in ours.list(None, filter=wanted, limit=9)] == [
                found.metadata for found in theirs.list(None, filter=wanted, limit=9)
            ], wanted


def test_a_saver_is_copied_with_its_store(open_saver: Opener) -> None:
    with open_saver() as saver:
        saver.serde = JsonPlusSerializer(allowed_msgpack_modules=[])
        clone = saver.with_allowlist([("kit", "made")])
        assert clone is not saver and type(clone) is type(saver) and clone.serde is not saver.serde
        config = put(clone, at(), made({"a": 1}))
        assert read(saver, config) == read(copy.copy(clone), config)


def test_what_delta_channels_are_replayed_from_is_not_deleted(open_saver: Opener) -> None:
    def run(number: int) -> dict[str, Any]:
        counters = {} if number == 0 else {"counters_since_delta_snapshot": {"d": [number, number]}}
        return {"source": "loop", "step": number, "parents": {}, "run_id": f"r{number}", **counters}

    with open_saver() as saver:
        older = put(saver, at(), made({"d": _DeltaSnapshot(["old"])}), {**run(0), "run_id": "old"})
        configs = [put(saver, older, made({"d": _DeltaSnapshot(["seed"])}, {"d": 2}), run(0))]
        for number in range(1, 4):
            saver.put_writes(configs[-1], [("d", [number])], f"task {number}")
            configs.append(put(saver, configs[-1], made({}, {"d": number + 2}), run(number)))
        expected = (_DeltaSnapshot(["seed"]), [[1], [2], [3]])
        assert replayed(saver, configs[-1]) == expected
        saver.prune(["t"])
        assert [found.config for found in saver.list(at())] == configs[::-1], "the path to the seed stays"
        saver.delete_for_runs(["r1", "r3"])
        assert [found.config for found in saver.list(at())] == configs[-2::-1], "the head goes, its path stays"
        saver.copy_thread("t", "copy")
        head = at("copy", checkpoint=configs[2]["configurable"]["checkpoint_id"])
        assert replayed(saver, head) == (_DeltaSnapshot(["seed"]), [[1], [2]])
        saver.prune(["t"], strategy="delete")
        assert list(saver.list(at())) == []
        assert replayed(saver, head) == (_DeltaSnapshot(["seed"]), [[1], [2]])


FENCES = pytest.mark.parametrize("fence", ["fork", "error"])
# What LangGraph's loop puts besides channels.
BESIDES: dict[str, Any] = {"pending_sends": [], "versions_seen": {"n": {"a": 1}}}


@FENCES
def test_a_checkpoint_that_is_put_again_is_replaced(open_saver: Opener, fence: str) -> None:
    with open_saver(fence=fence) as saver:
        root = put(saver, at(), made({"a": 1, "b": ["kept"]}, **BESIDES))
        checkpoint = made({"a": 2, "b": ["kept"]}, {"a": 2, "b": 1}, **BESIDES)
        config = put(saver, root, checkpoint, new={"a": 2})
        saver.put_writes(config, [("a", 3)], "t")
        child = put(saver, config, made({"a": 3, "b": ["kept"]}, {"a": 3, "b": 1}, **BESIDES), new={"a": 3})
        for again in [checkpoint, {**checkpoint, "channel_values": {"a": "other", "b": ["kept"]}}]:
            assert put(saver, root, again, new={"a": 2}) == config
            found = read(saver, config)
            assert (found.checkpoint, name(found.parent_config)) == (again, name(root))
            assert found.pending_writes == [("t", "a", 3)]
        assert read(saver, child).checkpoint["channel_values"] == {"a": 3, "b": ["kept"]}
        last = put(saver, child, made({"a": 4, "b": ["kept"]}, {"a": 4, "b": 1}, **BESIDES), new={"a": 4})
        assert [name(found.config) for found in saver.list(at())] == [name(one) for one in (last, child, config, root)]


@FENCES
@pytest.mark.parametrize("value", [1, "other"])
def test_a_run_goes_on_from_a_checkpoint_that_was_put_again(open_saver: Opener, fence: str, value: Any) -> None:
    with open_saver(fence=fence) as saver:
        checkpoint = made({"a": 1}, **BESIDES)
        root = put(saver, at(), checkpoint)
        assert put(saver, at(), {**checkpoint, "channel_values": {"a": value}}) == root
        put(saver, root, made({"a": 2}, **BESIDES))
        assert [found.checkpoint["channel_values"]["a"] for found in saver.list(at())] == [2, value]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@FENCES
def test_a_run_goes_on_from_a_checkpoint_that_another_process_replaced(open_saver: Opener, fence: str) -> None:
    with open_saver(fence=fence) as saver:
        config = put(saver, at(), made({"a": 0, "b": ["kept"]}, **BESIDES))
        for number in range(1, 4):
            parent, checkpoint = config, made({"a": number, "b": ["kept"]}, {"a": number, "b": 1}, **BESIDES)
            config = put(saver, parent, checkpoint, new={"a": number})
            replaced = {**checkpoint, "channel_values": {"a": "other", "b": ["other"]}, "pending_sends": [number]}
            with open_saver(fence=fence) as other:
                assert put(other, parent, replaced) == config
        last = made({"a": 4, "b": ["kept"]}, {"a": 4, "b": 1}, **BESIDES)
        put(saver, config, last, new={"a": 4})
        found = [found.checkpoint["channel_values"] for found in saver.list(at())]
        # A channel that has no new version is its parent's.
        assert found == [{"a": 4, "b": ["other"]}, *[{"a": "other", "b": ["other"]}] * 3, {"a": 0, "b": ["kept"]}]


@FENCES
async def test_a_run_goes_on_from_a_checkpoint_that_was_put_twice_at_once(open_async: Opener, fence: str) -> None:
    async with open_async(fence=fence) as saver:
        config, put_checkpoints = at(), []
        for number in range(40):
            checkpoint = made({"a": number}, **BESIDES)
            puts = [saver.aput(config, checkpoint, {"step": number}, {"a": 1}) for _ in range(3)]
            config, *others = await asyncio.gather(*puts)
            assert others == [config] * 2
            put_checkpoints.append(checkpoint)
        assert [found.checkpoint async for found in saver.alist(at())] == put_checkpoints[::-1]
