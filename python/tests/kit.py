"""Checkpoints by hand, and the command."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, CheckpointTuple
from langgraph.checkpoint.base.id import uuid6

from threadkeep import InDoubtError, UnavailableError

# Whether the interpreter has its lock. Without it nobody can say that an object is not held, so copies are given out.
LOCKED = getattr(sys, "_is_gil_enabled", lambda: True)()
NULL_TASK = "00000000-0000-0000-0000-000000000000"


def at(thread: str = "t", namespace: str = "", checkpoint: str | None = None) -> RunnableConfig:
    """The config of a checkpoint, or of a head."""
    place: dict[str, Any] = {"thread_id": thread, "checkpoint_ns": namespace}
    if checkpoint is not None:
        place["checkpoint_id"] = checkpoint
    return {"configurable": place}


def made(values: dict[str, Any], versions: dict[str, Any] | None = None, **more: Any) -> Checkpoint:
    """A checkpoint with these values."""
    checkpoint: dict[str, Any] = {
        "v": 4,
        "id": str(uuid6()),
        "ts": datetime.now(timezone.utc).isoformat(),
        "channel_values": values,
        "channel_versions": versions if versions is not None else dict.fromkeys(values, 1),
        "versions_seen": {},
        "updated_channels": None,
        **more,
    }
    return checkpoint  # type: ignore[return-value]


def put(
    saver: Any, parent: RunnableConfig, checkpoint: Checkpoint, metadata: dict[str, Any] | None = None, new: Any = None
) -> RunnableConfig:
    """Puts a checkpoint; all its versions are new unless said otherwise."""
    new = checkpoint["channel_versions"] if new is None else new
    stored: RunnableConfig = saver.put(parent, checkpoint, metadata or {"source": "loop", "step": 1, "parents": {}}, new)
    return stored


def read(saver: Any, config: RunnableConfig) -> CheckpointTuple:
    """A checkpoint that must exist."""
    found = saver.get_tuple(config)
    assert found is not None
    return found  # type: ignore[no-any-return]


def writes(saver: Any, config: RunnableConfig) -> list[tuple[str, str, Any]]:
    """The pending writes of a checkpoint."""
    return read(saver, config).pending_writes or []


def replayed(saver: Any, config: RunnableConfig, channel: str = "d") -> tuple[Any, list[Any]]:
    """A delta channel's seed, and the values written since."""
    history = saver.get_delta_channel_history(config=config, channels=[channel])[channel]
    return history.get("seed"), [value for _, _, value in history["writes"]]


# How long a process waits in all for a lock that others hold, in seconds.
_PATIENCE = 600


def _is_locked(error: Exception, began: float) -> bool:
    """Whether another process holds the lock of the file. A saver waits five seconds for it, and on a busy machine that
    process may get no core for longer: then the call is repeated, which is safe."""
    return "another process holds the lock" in str(error) and time.monotonic() - began < _PATIENCE


def patiently(call: Callable[[], Any]) -> Any:
    """Makes a call, however long other processes hold the lock of the file."""
    began = time.monotonic()
    while True:
        try:
            return call()
        except (UnavailableError, InDoubtError) as error:
            if not _is_locked(error, began):
                raise


async def apatiently(call: Callable[[], Awaitable[Any]]) -> Any:
    """:func:`patiently` in an event loop."""
    began = time.monotonic()
    while True:
        try:
            return await call()
        except (UnavailableError, InDoubtError) as error:
            if not _is_locked(error, began):
                raise


def threadkeep(*arguments: str) -> str:
    """Runs the installed command."""
    command = [str(Path(sys.executable).parent / "threadkeep"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout
