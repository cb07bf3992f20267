"""What does not change is neither serialized nor stored again, and what changes is never taken for what it was."""

from __future__ import annotations

import gc
import random
import string
import sys
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    computed_field,
    create_model,
    field_serializer,
    model_serializer,
)

from conftest import Opener
from kit import LOCKED, at, made, put, read
from threadkeep.langgraph import SqliteSaver


class Counting:
    """A serializer that counts its calls."""

    def __init__(self, serde: JsonPlusSerializer | None = None) -> None:
        self.serde = serde or JsonPlusSerializer()
        self.dumped = self.loaded = 0
        self.sizes: list[int] = []
        self.loaded_sizes: list[int] = []
        dumps, loads = self.serde.dumps_typed, self.serde.loads_typed

        def dumps_typed(value: Any) -> tuple[str, bytes]:
            self.dumped += 1
            dumped = dumps(value)
            self.sizes.append(len(dumped[1]))
            return dumped

        def loads_typed(data: tuple[str, bytes]) -> Any:
            self.loaded += 1
            self.loaded_sizes.append(len(data[1]))
            return loads(data)

        self.serde.dumps_typed = dumps_typed  # type: ignore[method-assign]
        self.serde.loads_typed = loads_typed  # type: ignore[method-assign]


def conversation(length: int) -> list[Any]:
    return [
        HumanMessage(f"question {n}", id=f"h{n}")
        if n % 2 == 0
        else AIMessage(
            [{"type": "text", "text": f"answer {n}"}],
            id=f"a{n}",
            tool_calls=[{"name": "search", "args": {"q": [n, {"deep": f"x{n}"}]}, "id": f"c{n}"}],
            additional_kwargs={"more": {"n": n}},
        )
        for n in range(length)
    ]


def test_a_message_is_serialized_once(open_saver: Opener) -> None:
    counting = Counting()
    with open_saver() as saver:
        saver.serde = counting.serde
        messages = conversation(50)
        config = put(saver, at(), made({"messages": messages}))
        assert counting.dumped == 1
        config = put(saver, config, made({"messages": [*messages, HumanMessage("new", id="n")]}, {"messages": 2}))
        assert counting.dumped == 2
        found = read(saver, config).checkpoint["channel_values"]["messages"]
        assert counting.loaded == 1
        again = read(saver, config).checkpoint["channel_values"]["messages"]
        assert counting.loaded == 1
        assert found == again == [*messages, HumanMessage("new", id="n")]
        config = put(saver, config, made({"messages": [*again[:-1], HumanMessage("last", id="l")]}, {"messages": 3}))
        assert counting.dumped == 3, "what was read is serialized once: its class may have filled in something"
        found = read(saver, config).checkpoint["channel_values"]["messages"]
        put(saver, config, made({"messages": [*found[:-1], HumanMessage("end", id="e")]}, {"messages": 4}))
        assert counting.dumped == 4 and counting.sizes[-1] < counting.sizes[0] / 10, "and not again"
        assert len(list(saver.list(at()))) == 4
        assert counting.loaded == 3


def test_a_message_is_serialized_once_in_strict_mode(open_saver: Opener) -> None:
    counting = Counting(JsonPlusSerializer(allowed_msgpack_modules=[]))
    with open_saver() as saver:
        saver.serde = counting.serde
        config = put(saver, at(), made({"messages": conversation(30)}))
        whole = counting.sizes[0]
        for turn in range(3):
            # As LangGraph does for each call of a graph.
            clone = saver.with_allowlist([("a", "B")])
            assert clone.serde is not saver.serde
            messages = read(clone, config).checkpoint["channel_values"]["messages"]
            messages.append(HumanMessage("new", id=f"new {turn}"))
            config = put(clone, config, made({"messages": messages}, {"messages": turn + 2}))
        # The first call knows nothing: the saver's own serializer allows less.
        assert counting.loaded_sizes[0] == whole and counting.sizes[1] > whole
        assert len(counting.loaded_sizes) == 3 and max(counting.loaded_sizes[1:]) < whole / 10
        assert len(counting.sizes) == 4 and max(counting.sizes[2:]) < whole / 10
        assert read(saver, config).checkpoint["channel_values"]["messages"] == messages


def test_copies_of_a_saver_share_what_they_know_only_if_they_do_the_same(tmp_path: Path) -> None:
    class Own(JsonPlusSerializer):
        pass

    with SqliteSaver.from_conn_string(str(tmp_path / "checkpoints.db")) as saver:

        def codec(serde: Any) -> Any:
            clone = copy(saver)
            clone.serde = serde
            return clone._codec_of()

        alike: list[Callable[[], Any]] = [
            JsonPlusSerializer,
            lambda: JsonPlusSerializer(allowed_msgpack_modules=[]),
            lambda: JsonPlusSerializer(allowed_msgpack_modules=[("a", "B"), ("c", "D")]),
            lambda: JsonPlusSerializer(allowed_json_modules=[("a", "B")]),
            lambda: JsonPlusSerializer(pickle_fallback=True),
        ]
        codecs = [codec(make()) for make in alike]
        assert [codec(make()) for make in alike] == codecs and len(set(codecs)) == len(codecs)
        alone: list[Callable[[], Any]] = [
            Own,
            lambda: Counting().serde,
            lambda: JsonPlusSerializer(__unpack_ext_hook__=lambda code, data: None),
        ]
        for make in alone:
            one, other = make(), make()
            assert codec(one) is codec(one) is not codec(other)
        for number in range(40):
            codec(JsonPlusSerializer(allowed_msgpack_modules=[("a", str(number))]))
        assert len(saver._codecs) == 8


class Gone(BaseModel):
    a: str


def test_a_dictionary_is_stored_as_one_also_if_it_was_read_in_place_of_an_object(open_saver: Opener) -> None:
    open_serde, strict = JsonPlusSerializer(), JsonPlusSerializer(allowed_msgpack_modules=[])

    def stored(saver: Any) -> list[Any]:
        """What others read once a process that may not make the class has put what it read."""
        saver.serde = open_serde
        config = put(saver, at(), made({"items": [Gone(a="x" * 40), {"b": "y" * 40}]}))
        saver.serde = strict
        for version in range(2, 5):
            items = read(saver, config).checkpoint["channel_values"]["items"]
            assert items == [{"a": "x" * 40}, {"b": "y" * 40}]
            config = put(saver, config, made({"items": items}, {"items": version}))
        saver.serde = open_serde
        found: list[Any] = read(saver, config).checkpoint["channel_values"]["items"]
        return found

    with open_saver() as saver:
        assert stored(saver) == stored(InMemorySaver()) == [{"a": "x" * 40}, {"b": "y" * 40}]


def test_an_input_is_stored_once(tmp_path: Path) -> None:
    chance = random.Random(1)

    def text() -> str:
        return "".join(chance.choices(string.printable, k=20480))

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(text(), id=f"a{len(state['messages'])}")]}

    path = tmp_path / "checkpoints.db"
    config: Any = {"configurable": {"thread_id": "1"}}
    asked = [HumanMessage(text(), id=f"h{n}") for n in range(20)]
    with SqliteSaver.from_conn_string(str(path)) as saver:
        graph = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer").compile(checkpointer=saver)
        for message in asked:
            graph.invoke({"messages": [message]}, config)
    with SqliteSaver.from_conn_string(str(path)) as saver:
        inputs = [found.checkpoint["channel_values"].get("__start__") for found in saver.list(config)]
    assert [found for found in inputs if found] == [{"messages": [message]} for message in reversed(asked)]
    # One of the two messages of a turn is also its input, which LangGraph keeps in a channel of its own.
    assert path.stat().st_size < 40 * 20480


CHANGES: list[Callable[[Any], Any]] = [
    lambda m: setattr(m, "content", "changed"),
    lambda m: setattr(m, "id", "another"),
    lambda m: m.additional_kwargs.update(new=1),
    lambda m: m.additional_kwargs["more"].update(n="changed"),
    lambda m: m.additional_kwargs["more"].clear(),
    lambda m: m.content[0].update(text="changed"),
    lambda m: m.content.append({"type": "text", "text": "more"}),
    lambda m: m.content.clear(),
    lambda m: m.tool_calls[0]["args"]["q"][1].update(deep="changed"),
    lambda m: m.tool_calls.append(dict(m.tool_calls[0])),
    lambda m: m.__dict__.update(name="changed"),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("was_read", [False, True])
def test_a_changed_message_is_serialized_again(change: Callable[[Any], Any], was_read: bool) -> None:
    with SqliteSaver.from_conn_string(":memory:") as saver:
        messages = conversation(4)
        config = put(saver, at(), made({"messages": messages}))
        if was_read:
            messages = read(saver, config).checkpoint["channel_values"]["messages"]
            messages = read(saver, config).checkpoint["channel_values"]["messages"]
        change(messages[1])
        changed = put(saver, config, made({"messages": messages}, {"messages": 2}))
        assert read(saver, changed).checkpoint["channel_values"]["messages"] == messages
        assert read(saver, config).checkpoint["channel_values"]["messages"] == conversation(4)


@pytest.mark.parametrize("seed", range(8))
def test_a_list_comes_back_as_it_was_put_whatever_was_done_to_it_before(seed: int, tmp_path: Path) -> None:
    """Beside deep copies: edits of the list that was put last, and of those that were read, with forks."""
    chance = random.Random(seed)

    def edit(items: list[Any]) -> None:
        place = chance.randrange(len(items)) if items else 0
        match chance.randrange(12):
            case 0:
                items[place : place + 1] = conversation(2)[1:]
            case 1:
                del items[place : place + 1]
            case 2:
                chance.shuffle(items)
            case 3:
                items.append(chance.choice(["plain", {"a": [place]}, 7]))
            case 4:
                items.extend(items[place : place + 1])
            case 5:
                del items[place:]
            case 6 | 7:
                # Some changes need what others took away.
                with suppress(AttributeError, IndexError, KeyError, TypeError):
                    chance.choice(CHANGES)(items[place])
            case _:
                items.extend(conversation(chance.randrange(1, 4)))

    path = str(tmp_path / "checkpoints.db")
    with SqliteSaver.from_conn_string(path) as saver, SqliteSaver.from_conn_string(path) as other:
        stored: list[tuple[Any, list[Any]]] = []
        config, items = at(), conversation(3)
        for version in range(1, 100):
            items = list(items) if chance.random() < 0.5 else items
            edit(items)
            config = put(saver, config, made({"items": items}, {"items": version}))
            stored.append((config, deepcopy(items)))
            kept, expected = chance.choice(stored)
            found = read(chance.choice([saver, other]), kept).checkpoint["channel_values"]["items"]
            assert found == expected
            if chance.random() < 0.3:
                config, items = kept, found


@pytest.mark.parametrize("change", CHANGES)
def test_what_one_reader_changes_another_does_not_see(change: Callable[[Any], Any]) -> None:
    with SqliteSaver.from_conn_string(":memory:") as saver:
        config = put(saver, at(), made({"messages": conversation(4)}))
        for _ in range(3):
            messages = read(saver, config).checkpoint["channel_values"]["messages"]
            assert messages == conversation(4)
            change(messages[1])


def test_an_object_is_given_again_only_if_nobody_holds_it_or_a_part_of_it() -> None:
    parts: list[Callable[[Any], Any]] = [
        lambda m: m,
        lambda m: m.__dict__,
        lambda m: m.content,
        lambda m: m.content[0],
        lambda m: m.additional_kwargs,
        lambda m: m.additional_kwargs["more"],
        lambda m: m.tool_calls[0]["args"]["q"][1],
        lambda m: m.model_fields_set,
        weakref.ref,
    ]
    with SqliteSaver.from_conn_string(":memory:") as saver:
        config = put(saver, at(), made({"messages": conversation(2)}))

        def second() -> Any:
            return read(saver, config).checkpoint["channel_values"]["messages"][1]

        names = frozenset(second().model_fields_set)
        for part in parts:
            held = part(second())
            one, other = second(), second()
            for message in (one, other):
                assert message == conversation(2)[1] and message.model_fields_set == names
                assert held is not part(message) or part is weakref.ref
            assert one is not other and one.tool_calls[0] is not other.tool_calls[0]
            if part is weakref.ref:
                assert held() is not one and held() is not other
            del message, one, other, held
        # Nobody holds anything: no copy is made.
        assert len({id(second()) for _ in range(10)}) == 1 or not LOCKED


def test_of_many_messages_those_that_changed_or_are_found_again_are_not_given_again() -> None:
    # More than are looked at in one call of the interpreter, of two classes.
    many = [HumanMessage(f"{n}", id=f"{n}") if n % 3 else AIMessage(f"{n}", id=f"{n}") for n in range(300)]
    with SqliteSaver.from_conn_string(":memory:") as saver:
        config = put(saver, at(), made({"messages": list(many)}))

        def found() -> Any:
            return read(saver, config).checkpoint["channel_values"]["messages"]

        messages = found()
        before = [id(message) for message in messages]
        names = [frozenset(message.model_fields_set) for message in messages]
        del messages
        assert [id(message) for message in found()] == before or not LOCKED
        messages = found()
        for n in (0, 127, 128, 299):
            # As many names as before, and others.
            messages[n].model_fields_set.remove("name")
            messages[n].model_fields_set.add("another")
        messages[5].model_fields_set.remove("name")
        messages[6].model_fields_set.add("another")
        messages[7].__dict__["name"] = "another"
        seen = {n: weakref.ref(messages[n]) for n in (1, 126, 129, 298)}
        del messages
        after = found()
        assert after == many and [message.model_fields_set for message in after] == names
        assert all(weak() is not after[n] for n, weak in seen.items())
        again = {n for n, message in enumerate(after) if id(message) == before[n]}
        assert again == set(range(300)) - {0, 127, 128, 299, 5, 6, 7, *seen} or not LOCKED


class Fixed(BaseModel):
    parts: tuple[list[str], ...]


def test_a_tuple_that_a_reader_holds_keeps_its_lists() -> None:
    with SqliteSaver.from_conn_string(":memory:") as saver:
        config = put(saver, at(), made({"items": [Fixed(parts=(["one"],))]}))

        def second() -> Any:
            return read(saver, config).checkpoint["channel_values"]["items"][0]

        held = second().parts
        second().parts[0].append("two")
        assert held == (["one"],)
        # Without it, no copy is made.
        del held
        assert len({id(second()) for _ in range(10)}) == 1 or not LOCKED


def test_a_reader_that_holds_one_result_at_a_time_is_given_two_objects_in_turn() -> None:
    counting = Counting()
    with SqliteSaver.from_conn_string(":memory:") as saver:
        saver.serde = counting.serde
        config = put(saver, at(), made({"messages": conversation(2)}))
        given, others = [], []
        found: Any = None
        for _ in range(10):
            found = read(saver, config).checkpoint["channel_values"]["messages"]
            given.append(id(found[1]))
            # Takes the memory of an object that was given up, so that a third object has another address.
            others.append(conversation(2))
        assert (given == [given[0], given[1]] * 5 and given[0] != given[1]) or not LOCKED
        assert counting.loaded == 1


def test_equal_elements_are_one_object_within_a_list_and_different_ones_between_lists() -> None:
    with SqliteSaver.from_conn_string(":memory:") as saver:
        messages = conversation(4)
        config = put(saver, at(), made({"messages": messages[:3]}))
        put(saver, config, made({"messages": messages}, {"messages": 2}))
        lists = [list(saver.list(at())) for _ in range(2)]
        (new, old), (new_again, _) = ([one.checkpoint["channel_values"]["messages"] for one in found] for found in lists)
        assert all(one is other for one, other in zip(new, old, strict=False))
        assert all(one is not other for one, other in zip(new, new_again, strict=True))


class Overridden(BaseModel):
    a: Any = None
    b: Any = None

    def model_dump(self, **more: Any) -> dict[str, Any]:
        return super().model_dump(**{**more, "exclude_unset": True})


class Wrapped(BaseModel):
    a: Any = None
    b: Any = None

    @model_serializer(mode="wrap")
    def shown(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}


class InAField(BaseModel):
    a: Any = None
    b: Any = None

    @field_serializer("a", "b")
    def shown(self, value: Any) -> Any:
        return [value, sorted(self.model_fields_set)]


class Computed(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: Any = None
    b: Any = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def c(self) -> list[str]:
        return sorted(self.model_fields_set - {"c"})


class Inherited(Wrapped):
    pass


def fields_set(of: Any) -> Any:
    return sorted(of.model_fields_set) if isinstance(of, BaseModel) else of


class Annotating(BaseModel):
    inner: Annotated[Any, PlainSerializer(fields_set)] = None


class Named(BaseModel):
    """Its fields are called as what a schema has."""

    default: Annotated[Any, PlainSerializer(fields_set)] = None
    metadata: Any = None
    type: Any = None


class Around(BaseModel):
    inner: list[Wrapped] = []


OWN: list[Callable[..., Any]] = [
    Overridden.model_construct,
    Wrapped.model_construct,
    InAField.model_construct,
    Computed.model_construct,
    Inherited.model_construct,
    lambda names, **parts: Annotating(inner=Plain.model_construct(names, **parts)),
    lambda names, **parts: Named(default=Plain.model_construct(names, **parts)),
    lambda names, **parts: Around(inner=[Wrapped.model_construct(names, **parts)]),
    lambda names, **parts: {"deep": [Wrapped.model_construct(names, **parts)]},
]


class Plain(BaseModel):
    a: Any = None
    b: Any = None


@pytest.mark.parametrize("make", OWN)
@pytest.mark.parametrize("was_read", [False, True])
def test_a_model_whose_dump_shows_which_fields_were_set_is_no_other_one(make: Callable[..., Any], was_read: bool) -> None:
    serde = JsonPlusSerializer()
    parts = {"a": "one", "b": "two"}
    # Of the same parts, and as many fields were set.
    models = [make({name}, **parts) for name in ("a", "b", "a")]
    assert serde.dumps_typed(models[0]) != serde.dumps_typed(models[1])
    with SqliteSaver.from_conn_string(":memory:") as saver:
        theirs = InMemorySaver()
        config = at()
        for version, model in enumerate(models, start=1):
            # One after the other in a list, at its place in the next list, and in a list of another channel.
            for items in ([model], [models[0], model], [*models, model]):
                checkpoint = made({"items": items, "other": items[::-1]}, dict.fromkeys(["items", "other"], f"{version:032}.{len(items)}"))
                parent, config = config, put(theirs, config, checkpoint)
                put(saver, parent, checkpoint)
                for channel in ("items", "other"):
                    expected = read(theirs, config).checkpoint["channel_values"][channel]
                    found = read(saver, config).checkpoint["channel_values"][channel]
                    assert serde.dumps_typed(found) == serde.dumps_typed(expected)
                    if was_read:
                        models[0] = found[0]


def test_what_code_of_its_own_shows_is_asked_each_time() -> None:
    counting = Counting()
    with SqliteSaver.from_conn_string(":memory:") as saver:
        saver.serde = counting.serde
        for make in OWN:
            item = make({"a"}, a="one", b="two")
            before = counting.dumped
            for version in range(3):
                put(saver, at(), made({"items": [item]}, {"items": version}))
            assert counting.dumped == before + 3, item


def test_a_reader_is_not_shown_which_fields_another_one_set() -> None:
    with SqliteSaver.from_conn_string(":memory:") as saver:
        config = put(saver, at(), made({"items": [Plain(a="one", b="two"), Around(), HumanMessage("a", id="1")]}))

        def items() -> list[Any]:
            found = read(saver, config).checkpoint["channel_values"]["items"]
            assert isinstance(found, list)
            return found

        expected = [set(item.model_fields_set) for item in items()]
        held: list[Any] = []
        for keep in (False, True, False):
            for item in items():
                # As many as before, and others.
                item.model_fields_set.pop()
                item.model_fields_set.add("another")
                held += [item] if keep else []
            del item
            for _ in range(3):
                assert [item.model_fields_set for item in items()] == expected


class Hidden(BaseModel):
    shown: int
    _hidden: int = PrivateAttr(default=0)


def test_what_has_other_parts_is_serialized_each_time() -> None:
    counting = Counting()
    with SqliteSaver.from_conn_string(":memory:") as saver:
        saver.serde = counting.serde
        for item in [Hidden(shown=1), {"a": {1, 2}}, {"a": object}, {("a", "b"): 1}, {"a": Hidden(shown=1)}]:
            before = counting.dumped
            try:
                counting.serde.dumps_typed([item])
            except TypeError:
                continue
            for version in range(3):
                put(saver, at(), made({"items": [item]}, {"items": version}))
            assert counting.dumped == before + 4, item


class Note(BaseModel):
    text: str


class LaterNote(BaseModel):
    text: str
    key: str = Field(default_factory=lambda: uuid.uuid4().hex)


LaterNote.__name__ = "Note"


def test_what_a_class_fills_in_when_it_is_read_is_stored_with_the_next_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "checkpoints.db")
    with SqliteSaver.from_conn_string(path) as saver:
        first = put(saver, at(), made({"notes": [Note(text="a"), {"deep": [Note(text="b")]}, Note(text="c")]}))
    # The next version of the program: the class has a field more.
    monkeypatch.setattr(sys.modules[__name__], "Note", LaterNote)
    with SqliteSaver.from_conn_string(path) as saver:
        notes = read(saver, first).checkpoint["channel_values"]["notes"]
        assert len({notes[0].key, notes[1]["deep"][0].key, notes[2].key}) == 3
        seen = deepcopy(notes)
        second = put(saver, first, made({"notes": notes}, {"notes": 2}))
        again = read(saver, second).checkpoint["channel_values"]["notes"]
        assert again == seen
        third = put(saver, second, made({"notes": again}, {"notes": 3}))
    for config in (second, third):
        with SqliteSaver.from_conn_string(path) as saver:
            assert read(saver, config).checkpoint["channel_values"]["notes"] == seen


def test_a_class_that_was_defined_again_is_the_one_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook of which a cell is run again."""
    with SqliteSaver.from_conn_string(":memory:") as saver:
        config = put(saver, at(), made({"notes": [Note(text="a"), {"deep": [Note(text="b")]}]}))

        def classes() -> list[type]:
            notes = read(saver, config).checkpoint["channel_values"]["notes"]
            return [type(notes[0]), type(notes[1]["deep"][0])]

        for now in (Note, LaterNote, Note):
            monkeypatch.setattr(sys.modules[__name__], "Note", now)
            for _ in range(3):
                assert classes() == [now, now]


def test_a_class_that_is_defined_later_is_the_one_that_is_read_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "checkpoints.db")
    notes = [Note(text="a"), Note(text="b")]
    with SqliteSaver.from_conn_string(path) as saver:
        config = put(saver, at(), made({"notes": notes}))
    with monkeypatch.context() as without:
        without.delattr(sys.modules[__name__], "Note")
        saver = SqliteSaver(path)
        for _ in range(2):
            assert read(saver, config).checkpoint["channel_values"]["notes"] == [{"text": "a"}, {"text": "b"}]
    assert read(saver, config).checkpoint["channel_values"]["notes"] == notes
    saver.close()


def test_types_that_are_made_while_a_program_runs_are_not_kept() -> None:
    with SqliteSaver.from_conn_string(":memory:") as saver:
        # A dataclass is only looked at. A model is known as long as objects of it are.
        types: list[Callable[[], Any]] = [
            lambda: make_dataclass("Made", ["text"], namespace={"__module__": __name__}),
            lambda: create_model("Made", __module__=__name__, text=str),
        ]
        made_types = []
        for make in types:
            of = make()
            put(saver, at(), made({"items": [of(text="a"), of(text="b")]}))
            made_types.append(weakref.ref(of))
            del of
        # More than is known at one time, with many parts each.
        many = [{"n": n, **{f"k{part}": part for part in range(240)}} for n in range(1500)]
        put(saver, at(), made({"items": many}))
        gc.collect()
        assert [of() for of in made_types] == [None, None]


def test_elements_have_the_bytes_that_the_whole_list_has() -> None:
    serde = JsonPlusSerializer()
    with SqliteSaver.from_conn_string(":memory:") as saver:
        for items in [
            conversation(20),
            [ToolMessage("x", tool_call_id="t", artifact={"a": (1, 2.5, b"x", None, True)})],
            [{"a": HumanMessage("nested", id="n"), "b": [Hidden(shown=3)]}, {}, {"x": 2**40}],
        ]:
            config = put(saver, at(), made({"items": items}))
            stored: list[tuple[str, bytes]] = []
            saver.serde = JsonPlusSerializer()
            saver.serde.loads_typed = lambda data: (stored.append(data), serde.loads_typed(data))[1]  # type: ignore[method-assign,func-returns-value]
            saver.get_tuple(config)
            saver.serde = serde
            assert stored == [serde.dumps_typed(items)]
            assert stored[0][0] == "msgpack"


def test_a_long_thread_takes_little_more_than_its_messages(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.db"
    chance, raw = random.Random(1), 0
    words = [f"w{n}" for n in range(3000)]
    with SqliteSaver.from_conn_string(str(path)) as saver:
        config, messages = at(), []
        for turn in range(300):
            for kind in (HumanMessage, AIMessage):
                text = " ".join(chance.choices(words, k=400))
                raw += len(text)
                messages.append(kind(text, id=f"{turn} {kind.__name__}"))
                versions = {"messages": saver.get_next_version(None, None)}
                config = put(saver, config, made({"messages": list(messages)}, versions))
        assert [m.content for m in read(saver, config).checkpoint["channel_values"]["messages"]] == [
            m.content for m in messages
        ]
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size < 0.7 * raw, f"{size} bytes for {raw} bytes of messages in 600 checkpoints"
