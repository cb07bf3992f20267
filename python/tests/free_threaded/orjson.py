"""Stands in for orjson, which LangGraph imports and which refuses to be built for interpreters without the lock."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

JSONDecodeError = json.JSONDecodeError
JSONEncodeError = TypeError
OPT_NON_STR_KEYS, OPT_SERIALIZE_DATACLASS, OPT_SERIALIZE_NUMPY, OPT_SERIALIZE_UUID = (1 << place for place in range(4))


class Fragment:
    """JSON that is written as it is."""

    def __init__(self, contents: bytes | str) -> None:
        self.contents = contents


def dumps(obj: Any, default: Callable[[Any], Any] | None = None, option: int | None = None) -> bytes:
    """An object as JSON. Options are not needed here."""
    del option
    return json.dumps(obj, default=default).encode()


def loads(obj: bytes | bytearray | memoryview | str) -> Any:
    """The object of a JSON text."""
    return json.loads(bytes(obj) if isinstance(obj, memoryview) else obj)
