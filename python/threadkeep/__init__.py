"""Threadkeep: a checkpoint store for agent threads.

:mod:`threadkeep.langgraph` has savers for LangGraph.
"""

from threadkeep._core import (
    BrokenLineageError,
    ConflictError,
    CorruptError,
    HistoryLostError,
    InDoubtError,
    InvalidInputError,
    NewerFormatError,
    NotFoundError,
    StaleError,
    ThreadkeepError,
    UnavailableError,
)

__all__ = [
    "BrokenLineageError",
    "ConflictError",
    "CorruptError",
    "HistoryLostError",
    "InDoubtError",
    "InvalidInputError",
    "NewerFormatError",
    "NotFoundError",
    "StaleError",
    "ThreadkeepError",
    "UnavailableError",
]
