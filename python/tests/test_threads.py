"""Threads share a saver and the objects that they put. Without the interpreter's lock they do so at the same moment."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from conftest import Opener
from kit import at, made, put, read
from threadkeep.langgraph import SqliteSaver


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Makes the calls at the same time. One that fails fails the test."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [call.result() for call in [pool.submit(call) for call in calls]]


@contextmanager
def meanwhile(step: Callable[[], Any]) -> Iterator[None]:
    """Repeats a step in another thread."""
    done = threading.Event()

    def repeat() -> None:
        while not done.is_set():
            step()

    with ThreadPoolExecutor(1) as pool:
        repeating = pool.submit(repeat)
        try:
            yield
        finally:
            done.set()
        repeating.result()


def message(number: int) -> AIMessage:
    more = {f"k{place}": place for place in range(40)}
    return AIMessage([{"type": "text", "text": f"answer {number}"}], id=f"m{number}", additional_kwargs={"more": more})


def test_threads_share_a_saver_and_messages(open_saver: Opener) -> None:
    shared = [message(number) for number in range(8)]
    with open_saver() as saver:

        def run(number: int) -> None:
            chance, config = random.Random(number), at(f"t{number}")
            expected: list[list[Any]] = []
            held: list[Any] = []
            for step in range(12):
                # What was read goes on, as in a graph; some is changed, which only its reader may see.
                held = [*held, chance.choice(shared), HumanMessage(f"{number} {step}", id=f"h{number} {step}")]
                if chance.random() < 0.3:
                    held[chance.randrange(len(held))] = changed = deepcopy(chance.choice(held))
                    changed.additional_kwargs["by"] = f"{number} {step}"
                config = put(saver, config, made({"messages": held}, {"messages": step + 1}))
                expected.append(deepcopy(held))
                held = read(saver, config).checkpoint["channel_values"]["messages"]
                assert held == expected[-1]
                if chance.random() < 0.3 and isinstance(held[-1], HumanMessage):
                    held[-1].content = f"changed by {number}"
            stored = [one.checkpoint["channel_values"]["messages"] for one in saver.list(at(f"t{number}"))]
            assert stored == expected[::-1]

        in_threads(*(lambda number=number: run(number) for number in range(8)))
        assert shared == [message(number) for number in range(8)]


def test_messages_may_change_while_they_are_put() -> None:
    messages = [message(number) for number in range(4)]
    chance = random.Random(1)

    def change() -> None:
        one = chance.choice(messages)
        more, name = one.additional_kwargs["more"], f"k{chance.randrange(400)}"
        match chance.randrange(4):
            case 0:
                more[name] = name
            case 1:
                more.pop(name, None)
            case 2:
                one.content = [*one.content, {"type": "text", "text": name}][-5:]
            case _:
                one.additional_kwargs = {**one.additional_kwargs, "other": name}

    with SqliteSaver.from_conn_string(":memory:") as saver:

        def write(number: int) -> int:
            config, stored = at(f"t{number}"), 0
            for step in range(200):
                # Python's serializer may meet a dictionary that changes, and says so.
                with suppress(RuntimeError):
                    config = put(saver, config, made({"messages": list(messages)}, {"messages": step + 1}))
                    stored += 1
                    assert len(read(saver, config).checkpoint["channel_values"]["messages"]) == 4
            return stored

        with meanwhile(change):
            stored = in_threads(lambda: write(0), lambda: write(1))
        for number in range(2):
            assert len(list(saver.list(at(f"t{number}")))) == stored[number] > 0
        config = put(saver, at("end"), made({"messages": messages}))
        assert read(saver, config).checkpoint["channel_values"]["messages"] == messages


def test_what_was_put_while_a_message_changed_to_and_fro_is_never_taken_for_what_it_is() -> None:
    texts = itertools.cycle(["one", "other"])
    shown = ["one", "other"]

    for number in range(200):
        one = HumanMessage("one", id=f"m{number}")
        states = [deepcopy(one), deepcopy(one)]
        states[1].content = shown[1]
        with SqliteSaver.from_conn_string(":memory:") as saver:

            def change(one: HumanMessage = one) -> None:
                one.content = next(texts)

            with meanwhile(change):
                for step in range(20):
                    put(saver, at(f"t{step}"), made({"messages": [one]}))
            for content, expected in zip(shown, states, strict=True):
                one.content = content
                config = put(saver, at(content), made({"messages": [one]}))
                assert read(saver, config).checkpoint["channel_values"]["messages"] == [expected]


def test_a_reader_never_sees_what_another_reader_does_to_its_result() -> None:
    messages = [message(number) for number in range(4)]
    with SqliteSaver.from_conn_string(":memory:") as saver:
        config = put(saver, at(), made({"messages": messages}))

        def run() -> None:
            for step in range(150):
                found = read(saver, config).checkpoint["channel_values"]["messages"]
                assert found == messages
                for one in found:
                    one.additional_kwargs["more"]["by"] = step
                    one.content[0]["text"] = "changed"

        in_threads(*[run] * 4)


def test_a_serializer_may_change_the_dictionary_of_values() -> None:
    values: dict[str, Any] = {f"c{number}": {number} for number in range(4)}

    class Changing(JsonPlusSerializer):
        def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
            values[f"more {len(values)}"] = 1
            return super().dumps_typed(obj)

    with SqliteSaver.from_conn_string(":memory:") as saver:
        saver.serde = Changing()
        config = put(saver, at(), made(values, {f"c{number}": 1 for number in range(4)}))
        assert len(values) > 4
        stored = read(saver, config).checkpoint["channel_values"]
        assert stored == {f"c{number}": {number} for number in range(4)}
