"""Whatever is done to messages between puts: what is stored is what LangGraph's saver in memory stores, byte for byte."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel, ConfigDict, PrivateAttr, model_serializer

from kit import LOCKED, at, made, put, read
from threadkeep.langgraph import SqliteSaver


class Noted(BaseModel):
    model_config = ConfigDict(extra="allow")
    text: Any = ""
    parts: Any = None
    _note: Any = PrivateAttr(None)


class Plain(BaseModel):
    text: Any = ""
    inner: Any = None


class Shown(BaseModel):
    """What its own code stores of it depends on more than its values."""

    text: Any = ""
    inner: Any = None

    @model_serializer(mode="wrap")
    def dumped(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}


class Unset(BaseModel):
    text: Any = ""
    inner: Any = None

    def model_dump(self, **more: Any) -> dict[str, Any]:
        return super().model_dump(**{**more, "exclude_unset": True})


@dataclass
class Data:
    text: Any = ""
    parts: Any = field(default_factory=list[Any])


class Pair(NamedTuple):
    one: Any
    other: Any


class Kind(Enum):
    ONE = 1
    TRUE = "1"


class Number(IntEnum):
    ONE = 1
    TWO = 2


class Name(str):
    """A text that is no `str` of its own."""


class Sub(dict[Any, Any]):
    """A dictionary with attributes."""


# Values that are equal to each other and are not stored alike are among them.
LEAVES: list[Any] = [
    *[1, True, 1.0, "1", b"1", 0, False, 0.0, -0.0, None, "", "text", 2**40, -1],
    *[Kind.ONE, Kind.TRUE, Number.ONE, Number.TWO, Pair(1, True), Pair(1.0, [1]), (1, 1.0), {1}, frozenset({True})],
    *[Decimal("1.0"), Decimal("1.00"), UUID(int=1), Name("1"), Sub(a=1), bytearray(b"1"), deque([1])],
]


def message(chance: random.Random, odd: float) -> Any:
    """A message, or with this probability something else."""
    name = f"{chance.randrange(10**9)}"
    calls = [{"name": "search", "args": {"q": [name, {"deep": name}], "n": 1}, "id": f"c{name}", "type": "tool_call"}]
    makers: list[Callable[[], Any]] = [
        lambda: HumanMessage(name, id=f"h{name}"),
        lambda: HumanMessage([{"type": "text", "text": name}], id=f"h{name}", additional_kwargs={"more": {"n": name}}),
        lambda: AIMessage(name, id=f"a{name}", tool_calls=calls, response_metadata={"model": "m", "n": [1, 2]}),
        lambda: AIMessage("", id=f"a{name}", usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}),
        lambda: ToolMessage(name, tool_call_id=f"c{name}", id=f"t{name}", artifact={"rows": [[1], [2]]}),
        lambda: SystemMessage(name),
        lambda: {"role": "user", "content": name, "more": [1, {"a": 1}]},
        lambda: Noted(text=name, parts=(1, [2], {"a": name}), more={"b": 1}),
        lambda: Plain(text=name, inner=Plain(text="inner", inner=[name])),
        lambda: Shown(text=name, inner=[name]),
        lambda: Shown(inner=Unset(text=name)),
        lambda: Unset(text=name, inner=Shown(text=[name])),
        lambda: Plain(text=Unset(text=name), inner=Data(name, [name])),
        lambda: {"data": Data(name, [{"a": name}]), "pair": Pair(name, [name]), "kind": Kind.ONE},
        lambda: HumanMessage(name, additional_kwargs={"shown": Shown(text=name), "data": Data(name)}),
    ]
    return chance.choice(makers if chance.random() < odd else makers[:6])()


def holders(value: Any) -> list[Any]:
    """All that can be changed in a value, and it itself."""
    found: list[Any] = []
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, BaseModel):
            found.append(one)
            todo += [one.__dict__, one.__pydantic_extra__, one.__pydantic_private__]
        elif isinstance(one, Data):
            todo.append(one.__dict__)
        elif isinstance(one, dict):
            found.append(one)
            todo += one.values()
        elif isinstance(one, list):
            found.append(one)
            todo += one
        elif isinstance(one, tuple):
            todo += one
    return found


def change(chance: random.Random, of: Any) -> None:
    """Changes one thing in a message, perhaps to what it was."""
    held = chance.choice(holders(of))
    leaf = deepcopy(chance.choice(LEAVES))
    if isinstance(held, list):
        place = chance.randrange(len(held) + 1)
        chance.choice(
            [
                lambda: held.insert(place, leaf),
                lambda: held.insert(place, {"new": [leaf]}),
                lambda: held.__setitem__(place, leaf),
                lambda: held.__setitem__(place, [held[place]]),
                lambda: held.pop(place),
                lambda: held.reverse(),
                lambda: held.clear(),
            ]
        )()
        return
    if isinstance(held, dict):
        name = chance.choice([*held, "new"])
        other = chance.choice([*held, "other", "new"])
        chance.choice(
            [
                lambda: held.update({name: leaf}),
                lambda: held.update({name: {}}),
                lambda: held.update({name: [held[name]]}),
                lambda: held.update({name: type(held[name])(held[name])}),
                # The same value under another name, and the same names in another order.
                lambda: held.update({other: held.pop(name)}),
                lambda: held.update({name: held.pop(name)}),
                lambda: held.update({name: held[other], other: held[name]}),
                lambda: held.pop(name),
            ]
        )()
        return
    name = chance.choice([*held.__dict__, "new"])
    chance.choice(
        [
            lambda: setattr(held, name, leaf),
            lambda: held.__dict__.update({name: leaf}),
            # Another dictionary, perhaps with the same contents.
            lambda: object.__setattr__(held, "__dict__", {**held.__dict__, name: leaf}),
            lambda: object.__setattr__(held, "__dict__", dict(held.__dict__)),
            lambda: object.__setattr__(held, "__pydantic_extra__", {"extra": leaf}),
            lambda: object.__setattr__(held, "__pydantic_private__", {"_note": [leaf]}),
            lambda: object.__setattr__(held, "__pydantic_private__", None),
            lambda: object.__setattr__(held, "__pydantic_fields_set__", {name}),
            lambda: held.model_fields_set.add(name),
            # As many as before, and another one.
            lambda: (held.model_fields_set.pop(), held.model_fields_set.add(name)),
            lambda: (held.model_fields_set.discard("inner"), held.model_fields_set.add("text")),
            lambda: (held.model_fields_set.discard("text"), held.model_fields_set.add("inner")),
            lambda: setattr(held, "_note", leaf),
            lambda: setattr(held, "__class__", chance.choice([HumanMessage, SystemMessage, AIMessage, Plain, Shown, Unset])),
        ]
    )()


def edit(chance: random.Random, items: list[Any], odd: float) -> None:
    place = chance.randrange(len(items) + 1)
    match chance.randrange(9):
        case 0:
            items.insert(place, message(chance, odd))
        case 1:
            del items[place : place + 1]
        case 2 if items:
            items.append(chance.choice(items))
        case 3 if items:
            # Parts of one in another one.
            one, other = chance.choice(items), chance.choice(items)
            if isinstance(one, BaseModel) and isinstance(other, BaseModel):
                one.__dict__.update({name: other.__dict__[name] for name in one.__dict__ if name in other.__dict__})
        case 4:
            items.extend(message(chance, odd) for _ in range(chance.choice([1, 2, 200 if odd < 0.5 else 3])))
        case 5 if items:
            # As many fields were set as before, and others.
            for model in holders(chance.choice(items)):
                if isinstance(model, BaseModel) and model.__dict__:
                    object.__setattr__(model, "__pydantic_fields_set__", {chance.choice(list(model.__dict__))})
        case _ if items:
            # Some changes do not fit what they are made to.
            with suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
                change(chance, chance.choice(items))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(12))
def test_what_is_stored_is_what_langgraphs_saver_stores(seed: int) -> None:
    chance = random.Random(seed)
    serde = JsonPlusSerializer()
    theirs = InMemorySaver()
    with SqliteSaver.from_conn_string(":memory:") as ours:
        stored: list[Any] = []
        # Mostly messages, so that long runs have nothing else; or few of them.
        odd = chance.choice([0.1, 0.9])
        config, items = at(), [message(chance, odd) for _ in range(chance.choice([2, 127, 128, 300] if odd < 0.5 else [2, 5]))]
        held: list[Any] = []
        for version in range(1, 60):
            items = list(items) if chance.random() < 0.5 else items
            for _ in range(chance.randrange(3)):
                edit(chance, items, odd)
            checkpoint = made({"items": items}, {"items": f"{version:032}.0"})
            try:
                serde.dumps_typed(items)
            except Exception:
                # A graph could not put it, either.
                items = held = []
                continue
            parent, config = config, put(theirs, config, checkpoint)
            assert put(ours, parent, checkpoint)["configurable"] == config["configurable"]
            stored.append(config)
            kept = chance.choice(stored)
            expected = read(theirs, kept).checkpoint["channel_values"]["items"]
            found = read(ours, kept).checkpoint["channel_values"]["items"]
            assert serde.dumps_typed(found) == serde.dumps_typed(expected)
            again = read(ours, kept).checkpoint["channel_values"]["items"]
            assert not {id(one) for one in again if holders(one)} & {id(one) for one in found}
            if chance.random() < 0.4:
                config, items = kept, found
            # Readers that keep what they have, and change it.
            held = chance.choice([[], found, again, held])
            for _ in range(3 if held else 0):
                with suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
                    change(chance, chance.choice(held))


# An interpreter without the lock is not asked.
if LOCKED:

    @pytest.mark.parametrize(
        "model",
        [HumanMessage("a"), AIMessage("a"), ToolMessage("a", tool_call_id="a"), SystemMessage("a"), Plain(), Noted()],
    )
    def test_the_interpreter_shows_the_parts_of_models(model: BaseModel) -> None:
        """Lists are compared by them. Elsewhere each message is asked for its attributes: right, but slower."""
        shown = gc.get_referents(model)
        extra, given, private = model.__pydantic_extra__, model.__pydantic_fields_set__, model.__pydantic_private__
        parts = [extra, given, private, model.__dict__, type(model)]
        assert len(shown) == len(parts) and all(found is part for found, part in zip(shown, parts, strict=True))
