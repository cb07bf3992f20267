"""LangGraph's interface on a store of Threadkeep."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, SupportsIndex, cast

from langchain_core.messages import messages_from_dict
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_id,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import (
    _DeltaSnapshot,  # pyright: ignore[reportPrivateUsage] # What graphs put for a snapshot.
)

from typing_extensions import Self

from threadkeep._core import Call, Codec, Decoder, InvalidInputError, RawHistory, RawTuple, StaleError, Store

Fence = Literal["fork", "error"]
"""What happens to a put whose thread moved on since its run read it: it forks the thread, as LangGraph expects, or it
fails with :class:`threadkeep.ConflictError`."""

_Tuples = list[RawTuple]
# Codecs by what their serializers do. Each holds its serializer: the identity of one that exists is not that of another.
_Codecs = dict[Hashable, tuple[SerializerProtocol, Codec]]
# How many of them a saver and its copies keep: allowlists differ by graph and by subgraph, and each codec has caches.
_CODECS = 8

# The key under which a config carries the head that its reader saw with the checkpoint that it names, as JSON: thread,
# namespace, id and head. A run that goes on from there passes it to its put. LangGraph keeps keys with underscores out of
# metadata.
_HEAD = "__threadkeep_head__"

# The key under which LangGraph passes the runtime of a run along with its configs.
_RUNTIME = "__pregel_runtime"

# How often a put starts again if others keep changing its parent.
_ATTEMPTS = 16


class ThreadkeepSaver(BaseCheckpointSaver[str]):
    """A checkpoint saver on one of Threadkeep's stores; use a subclass.

    Every method has an async twin, and both may be used on one saver, from any thread and any event loop. A call that
    returned has stored durably what it was given. A keyboard interrupt is raised after the call that it interrupts is
    complete, and cancelling a task does not undo a call that it awaited.

    Forked processes may go on using a saver: each opens the store for itself. A process that forks waits for its calls and
    closes an SQLite file before, and opens it again with the next call.
    """

    _store: Store
    _codec: tuple[SerializerProtocol, Codec] | None
    _codecs: _Codecs

    def __init__(self, store: Store, *, serde: SerializerProtocol | None = None) -> None:
        super().__init__(serde=serde)
        if isinstance(self.serde, EncryptedSerializer):
            raise ValueError(
                "EncryptedSerializer draws a new nonce for each value, so nothing could be stored once: "
                "encrypt the disk or the database instead, or keep LangGraph's saver for this graph"
            )
        self._store = store
        self._codec = None
        self._codecs = {}

    def __copy__(self) -> Self:
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: it holds an open store. "
            "Make one in the other process, with the same path or address"
        )

    # Reading.

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that ``config`` names, or the newest of its thread and namespace.

        >>> from threadkeep.langgraph import SqliteSaver
        >>> with SqliteSaver.from_conn_string(":memory:") as saver:
        ...     print(saver.get_tuple({"configurable": {"thread_id": "1"}}))
        None
        """
        return self._tuple(config, self._get(config).wait())

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """:meth:`get_tuple` in an event loop."""
        return self._tuple(config, await self._get(config))

    def _get(self, config: RunnableConfig) -> Call[RawTuple | None]:
        thread, namespace = _place(config)
        return self._store.get(thread, namespace, get_checkpoint_id(config) or None, _caller(config))

    def _tuple(self, config: RunnableConfig, raw: RawTuple | None) -> CheckpointTuple | None:
        if raw is None:
            return None
        return _decoded(raw, self._decoder(share=False), is_head=not get_checkpoint_id(config))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints, newest first: of a thread, or of all threads if ``config`` is ``None``.

        Equal elements of lists are one object within a call.

        >>> from langgraph.checkpoint.base import empty_checkpoint
        >>> from threadkeep.langgraph import SqliteSaver
        >>> thread = {"configurable": {"thread_id": "1", "checkpoint_ns": ""}}
        >>> with SqliteSaver.from_conn_string(":memory:") as saver:
        ...     stored = saver.put(thread, empty_checkpoint(), {"source": "input", "step": -1}, {})
        ...     print([found.metadata["step"] for found in saver.list(thread, limit=10)])
        [-1]
        """
        found = self._list(config, filter, before, limit).wait()
        decoder = self._decoder(share=True)
        for raw in found:
            yield _decoded(raw, decoder)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """:meth:`list` in an event loop."""
        found = await self._list(config, filter, before, limit)
        decoder = self._decoder(share=True)
        for raw in found:
            yield _decoded(raw, decoder)

    def _list(
        self,
        config: RunnableConfig | None,
        filter: dict[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> Call[_Tuples]:
        configurable = _configurable(config) if config else {}
        thread = str(configurable["thread_id"]) if config else None
        before_id = get_checkpoint_id(before) if before else None
        return self._store.list(
            thread,
            configurable.get("checkpoint_ns"),
            configurable.get("checkpoint_id") or None,
            before_id or None,
            None if limit is None else max(limit, 0),
            _json(filter or {}),
            _caller(config or {}),
        )

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """What delta channels are replayed from at a checkpoint: the nearest older value, and the writes since that the
        checkpoints on the way applied, oldest first.

        >>> from langgraph.checkpoint.base import empty_checkpoint
        >>> from threadkeep.langgraph import SqliteSaver
        >>> thread = {"configurable": {"thread_id": "1", "checkpoint_ns": ""}}
        >>> full = {**empty_checkpoint(), "channel_values": {"log": ["a"]}, "channel_versions": {"log": 1}}
        >>> delta = {**empty_checkpoint(), "channel_versions": {"log": 2}}
        >>> counted = {"source": "loop", "step": 0, "counters_since_delta_snapshot": {"log": [1, 1]}}
        >>> with SqliteSaver.from_conn_string(":memory:") as saver:
        ...     stored = saver.put(thread, full, {"source": "input", "step": -1}, {"log": 1})
        ...     saver.put_writes(stored, [("log", ["b"])], task_id="task")
        ...     stored = saver.put(stored, delta, counted, {"log": 2})
        ...     print(saver.get_delta_channel_history(config=stored, channels=["log"])["log"]["writes"])
        [('task', 'log', ['b'])]
        """
        if not channels:
            return {}
        return self._histories(self._history(config, channels).wait())

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """:meth:`get_delta_channel_history` in an event loop."""
        if not channels:
            return {}
        return self._histories(await self._history(config, channels))

    def _history(self, config: RunnableConfig, channels: Sequence[str]) -> Call[RawHistory]:
        thread, namespace = _place(config)
        names = set(_several("channels", channels, "channel"))
        return self._store.history(thread, namespace, get_checkpoint_id(config) or None, names)

    def _histories(self, raw: RawHistory) -> Mapping[str, DeltaChannelHistory]:
        return cast(Mapping[str, DeltaChannelHistory], raw.decode(self._decoder(share=False)))

    # Writing.

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Stores a checkpoint whose parent is the one that ``config`` names.

        >>> from langgraph.checkpoint.base import empty_checkpoint
        >>> from threadkeep.langgraph import SqliteSaver
        >>> thread = {"configurable": {"thread_id": "1", "checkpoint_ns": ""}}
        >>> with SqliteSaver.from_conn_string(":memory:") as saver:
        ...     stored = saver.put(thread, empty_checkpoint(), {"source": "input", "step": -1}, {})
        ...     print(saver.get_tuple(stored).metadata["source"])
        input
        """
        stored = _stored(config, checkpoint)
        for attempt in range(_ATTEMPTS):
            if learn := self._learn(config):
                learn.wait()
            try:
                self._put(config, checkpoint, metadata, new_versions).wait()
                break
            except StaleError:
                if attempt == _ATTEMPTS - 1:
                    raise
        return stored

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """:meth:`put` in an event loop."""
        stored = _stored(config, checkpoint)
        for attempt in range(_ATTEMPTS):
            if learn := self._learn(config):
                await learn
            try:
                await self._put(config, checkpoint, metadata, new_versions)
                break
            except StaleError:
                if attempt == _ATTEMPTS - 1:
                    raise
        return stored

    def _learn(self, config: RunnableConfig) -> Call[None] | None:
        parent = get_checkpoint_id(config)
        return self._store.learn(*_place(config), parent) if parent else None

    def _put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> Call[None]:
        thread, namespace = _place(config)
        return self._store.put(
            thread,
            namespace,
            get_checkpoint_id(config) or None,
            _seen(config),
            _caller(config),
            cast(dict[str, Any], checkpoint),
            _json(get_checkpoint_metadata(config, metadata)),
            new_versions,
            self._codec_of(),
        )

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Stores what a task wrote, under the checkpoint that it ran from.

        >>> from langgraph.checkpoint.base import empty_checkpoint
        >>> from threadkeep.langgraph import SqliteSaver
        >>> thread = {"configurable": {"thread_id": "1", "checkpoint_ns": ""}}
        >>> with SqliteSaver.from_conn_string(":memory:") as saver:
        ...     stored = saver.put(thread, empty_checkpoint(), {"source": "input", "step": -1}, {})
        ...     saver.put_writes(stored, [("answer", 42)], task_id="task")
        ...     print(saver.get_tuple(stored).pending_writes)
        [('task', 'answer', 42)]
        """
        self._put_writes(config, writes, task_id, task_path).wait()

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """:meth:`put_writes` in an event loop."""
        await self._put_writes(config, writes, task_id, task_path)

    def _put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> Call[None]:
        checkpoint_id = str(_configurable(config)["checkpoint_id"])
        return self._store.put_writes(
            *_place(config), checkpoint_id, _caller(config), writes, task_id, task_path, self._codec_of()
        )

    # Deleting.

    def delete_thread(self, thread_id: str) -> None:
        """Deletes a thread, in every namespace.

        >>> from langgraph.checkpoint.base import empty_checkpoint
        >>> from threadkeep.langgraph import SqliteSaver
        >>> thread = {"configurable": {"thread_id": "1", "checkpoint_ns": ""}}
        >>> with SqliteSaver.from_conn_string(":memory:") as saver:
        ...     stored = saver.put(thread, empty_checkpoint(), {"source": "input", "step": -1}, {})
        ...     saver.delete_thread("1")
        ...     print(saver.get_tuple(thread))
        None
        """
        self._store.delete_thread(str(thread_id)).wait()

    async def adelete_thread(self, thread_id: str) -> None:
        """:meth:`delete_thread` in an event loop."""
        await self._store.delete_thread(str(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Deletes the checkpoints that these runs made, in all threads.

        One that a delta channel of another checkpoint is replayed from stays.

        >>> from langgraph.checkpoint.base import empty_checkpoint
        >>> from threadkeep.langgraph import SqliteSaver
        >>> thread = {"configurable": {"thread_id": "1", "checkpoint_ns": ""}}
        >>> with SqliteSaver.from_conn_string(":memory:") as saver:
        ...     of_run = {"source": "input", "step": -1, "run_id": "run"}
        ...     stored = saver.put(thread, empty_checkpoint(), of_run, {})
        ...     saver.delete_for_runs(["run"])
        ...     print(saver.get_tuple(thread))
        None
        """
        self._store.delete_for_runs(set(_ids("run_ids", run_ids))).wait()

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """:meth:`delete_for_runs` in an event loop."""
        await self._store.delete_for_runs(set(_ids("run_ids", run_ids)))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copies a thread with all its checkpoints and writes to a thread that does not exist.

        >>> from langgraph.checkpoint.base import empty_checkpoint
        >>> from threadkeep.langgraph import SqliteSaver
        >>> thread = {"configurable": {"thread_id": "1", "checkpoint_ns": ""}}
        >>> with SqliteSaver.from_conn_string(":memory:") as saver:
        ...     stored = saver.put(thread, empty_checkpoint(), {"source": "input", "step": -1}, {})
        ...     saver.copy_thread("1", "2")
        ...     print(saver.get_tuple({"configurable": {"thread_id": "2"}}).metadata["step"])
        -1
        """
        self._store.copy_thread(str(source_thread_id), str(target_thread_id)).wait()

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """:meth:`copy_thread` in an event loop."""
        await self._store.copy_thread(str(source_thread_id), str(target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Deletes old checkpoints of threads.

        ``"keep_latest"`` keeps the newest of each namespace, and what its delta channels are replayed from;
        ``"delete"`` keeps none.

        >>> from langgraph.checkpoint.base import empty_checkpoint
        >>> from threadkeep.langgraph import SqliteSaver
        >>> thread = {"configurable": {"thread_id": "1", "checkpoint_ns": ""}}
        >>> with SqliteSaver.from_conn_string(":memory:") as saver:
        ...     stored = saver.put(thread, empty_checkpoint(), {"source": "input", "step": -1}, {})
        ...     stored = saver.put(stored, empty_checkpoint(), {"source": "loop", "step": 0}, {})
        ...     saver.prune(["1"])
        ...     print([found.metadata["step"] for found in saver.list(thread)])
        [0]
        """
        self._store.prune(_ids("thread_ids", thread_ids), strategy).wait()

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """:meth:`prune` in an event loop."""
        await self._store.prune(_ids("thread_ids", thread_ids), strategy)

    # Other.

    def get_next_version(self, current: str | int | float | None, channel: None) -> str:
        """The version of a channel after ``current``."""
        return self._store.next_version(None if current is None else str(current))

    def setup(self) -> None:
        """Opens the store and creates its tables. Doing it twice is harmless."""
        self._store.setup().wait()

    def close(self) -> None:
        """Closes the store. Later calls fail with :class:`threadkeep.UnavailableError`."""
        self._store.close().wait()

    async def aclose(self) -> None:
        """:meth:`close` in an event loop."""
        await self._store.close()

    def _decoder(self, *, share: bool) -> Decoder:
        return Decoder(self._codec_of(), share)

    def _codec_of(self) -> Codec:
        # A copy of a saver may have another serializer.
        if self._codec is None or self._codec[0] is not self.serde:
            self._codec = (self.serde, self._known_codec(self.serde))
        return self._codec[1]

    def _known_codec(self, serde: SerializerProtocol) -> Codec:
        """The codec of a serializer, shared by the copies of a saver: in strict mode LangGraph makes one for each call, with
        an equal serializer of its own, and what was serialized or read before would be unknown to it."""
        key = _likeness(serde)
        found = self._codecs.get(key)
        if found is None:
            # Other serializers may not give a list the bytes of its elements.
            codec = Codec(serde, _DeltaSnapshot, _messages, type(serde) is JsonPlusSerializer)
            found = self._codecs.setdefault(key, (serde, codec))
            # In one step, because other threads may add some meanwhile.
            for old in list(self._codecs)[:-_CODECS]:
                self._codecs.pop(old, None)
        return found[1]


def _likeness(serde: SerializerProtocol) -> Hashable:
    """Equal for serializers that do the same: those of LangGraph with equal settings. Any other is like itself alone."""
    if type(serde) is not JsonPlusSerializer:
        return id(serde)
    settings: dict[str, Any] = dict(vars(serde))
    if not settings.get("_custom_unpack_ext_hook"):
        # It is made of the settings.
        settings.pop("_unpack_ext_hook", None)
    for name in ("_allowed_json_modules", "_allowed_msgpack_modules"):
        allowed = settings.get(name)
        if allowed and allowed is not True:
            settings[name] = frozenset(allowed)
    try:
        return frozenset(settings.items())
    except TypeError:
        # Somebody has added what cannot be compared.
        return id(serde)


def _messages(found: Any) -> Any:
    """A list of messages in which those that the gateway wrote are objects of JSON."""
    if not isinstance(found, list):
        return found
    return [_message(item) for item in cast(Sequence[Any], found)]


def _message(item: Any) -> Any:
    """LangChain's message, if this is one that the gateway wrote. Other dictionaries are the graph's own."""
    if not isinstance(item, dict):
        return item
    data = cast(dict[str, Any], item)
    # Each message of the gateway has these; a message that it did not change has any form.
    has_form = (
        data.get("type") in ("human", "ai", "system", "tool")
        and isinstance(data.get("id"), str)
        and isinstance(data.get("content"), (str, list))
    )
    if not has_form:
        return data
    try:
        return messages_from_dict([{"type": data["type"], "data": data}])[0]
    except (KeyError, TypeError, ValueError):
        # LangChain refuses it, so it is none of its messages.
        return data


def _configurable(config: RunnableConfig) -> dict[str, Any]:
    return config.get("configurable", {})


def _place(config: RunnableConfig) -> tuple[str, str]:
    configurable = _configurable(config)
    # `None` is what a request has as JSON that names no subgraph.
    return str(configurable["thread_id"]), configurable.get("checkpoint_ns") or ""


def _several(name: str, given: Sequence[str], what: str) -> Sequence[str]:
    # A text is a sequence, too: its characters would be taken for ids, say.
    if isinstance(given, str):
        raise TypeError(f"{name} must be a sequence of {what}s, not a text: pass [{given!r}] for one {what}")
    return given


def _ids(name: str, ids: Sequence[str]) -> list[str]:
    return [str(one) for one in _several(name, ids, "id")]


def _config(thread: str, namespace: str, checkpoint_id: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": namespace, "checkpoint_id": checkpoint_id}}


def _stored(config: RunnableConfig, checkpoint: Checkpoint) -> RunnableConfig:
    configurable = _configurable(config)
    return _config(configurable["thread_id"], configurable.get("checkpoint_ns") or "", checkpoint["id"])


def _seen_at(config: RunnableConfig, head: str) -> RunnableConfig:
    seen = _JSON.encode([*_place(config), get_checkpoint_id(config), head])
    return {**config, "configurable": {**_configurable(config), _HEAD: seen}}


def _seen(config: RunnableConfig) -> str | None:
    """The head that the author of a put saw when it read the put's parent, or what it copies if that has none."""
    if not (seen := _configurable(config).get(_HEAD)):
        return None
    thread, namespace, read, head = json.loads(seen)
    parent = get_checkpoint_id(config) or read
    # A config may have been changed since, to name another checkpoint or another thread.
    return str(head) if (thread, namespace, read) == (*_place(config), parent) else None


def _caller(config: RunnableConfig) -> tuple[bool, int, object]:
    """Whose call it is, among those at this time. Each run of a graph has a runtime of its own in its configs. An update
    of the state has none: it makes its calls one after the other, in one task or thread. The call holds the object whose
    identity it is.
    """
    if (runtime := _configurable(config).get(_RUNTIME)) is not None:
        return True, id(runtime), runtime
    try:
        task = asyncio.current_task()
    except RuntimeError:  # No event loop runs in this thread.
        task = None
    return (False, threading.get_ident(), None) if task is None else (False, id(task), task)


# Made once: `json.dumps` makes one for each call.
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _json(value: Mapping[str, Any]) -> bytes:
    try:
        return _JSON.encode(value).encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"metadata: {error}") from error


def _decoded(raw: RawTuple, decoder: Decoder, *, is_head: bool = False) -> CheckpointTuple:
    """What was read. ``is_head``: the head was asked for, which needs no head beside it."""
    thread, namespace, checkpoint_id, parent = raw.place()
    checkpoint, metadata, writes = raw.decode(decoder)
    config = _config(thread, namespace, checkpoint_id)
    parent_config = _config(thread, namespace, parent) if parent else None
    if head := raw.head():
        # A copy is put on the parent of what it copies, or on none.
        if not is_head or parent_config is None:
            config = _seen_at(config, head)
        if parent_config is not None:
            parent_config = _seen_at(parent_config, head)
    return CheckpointTuple(
        config=config,
        checkpoint=cast(Checkpoint, checkpoint),
        metadata=cast(CheckpointMetadata, metadata),
        parent_config=parent_config,
        pending_writes=writes,
    )
