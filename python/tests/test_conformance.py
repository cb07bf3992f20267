"""LangGraph's conformance suite, all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from langgraph.checkpoint.conformance import checkpointer_test, validate

from conftest import Opener

# How many tests each capability has: a suite that finds fewer has not run.
TESTS = {
    "put": 17,
    "put_writes": 10,
    "get_tuple": 10,
    "list": 16,
    "delete_thread": 5,
    "delete_for_runs": 7,
    "copy_thread": 8,
    "prune": 8,
}


async def test_the_suite_passes(open_async: Opener) -> None:
    @checkpointer_test(name="threadkeep")
    async def saver() -> AsyncIterator[Any]:
        async with open_async() as opened:
            yield opened

    report = await validate(saver)
    failures = [failure for result in report.results.values() for failure in result.failures]
    assert failures == []
    assert {name: result.tests_passed for name, result in report.results.items()} == TESTS
    assert sum(TESTS.values()) == 81
