"""Real graphs show the same on our savers as on LangGraph's saver in memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from conftest import Opener
from graphs import aplay, play
from scenarios import SCENARIOS
from threadkeep.langgraph import SqliteSaver


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_a_graph_shows_the_same(open_saver: Opener, durability: str) -> None:
    expected = play(InMemorySaver(), durability)
    with open_saver() as saver:
        assert play(saver, durability) == expected
    assert len(expected) > 40


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_a_graph_shows_the_same_in_an_event_loop(open_async: Opener, durability: str) -> None:
    expected = await aplay(InMemorySaver(), durability)
    async with open_async() as saver:
        assert await aplay(saver, durability) == expected


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_thread_goes_on_after_the_store_was_opened_again(open_saver: Opener) -> None:
    with open_saver() as saver:
        play(saver, "sync", turns=4)
        before = list(saver.list({"configurable": {"thread_id": "t"}}))
    with open_saver() as saver:
        assert list(saver.list({"configurable": {"thread_id": "t"}})) == before
        play(saver, "sync", turns=4)
        assert len(list(saver.list({"configurable": {"thread_id": "t"}}))) > len(before)


def test_a_run_that_stores_its_writes_at_its_end_leaves_no_names(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.db"
    with SqliteSaver.from_conn_string(str(path)) as saver:
        play(saver, "exit")
    with closing(sqlite3.connect(path)) as connection:
        # LangGraph puts the number of the step into the path of a task then.
        names = [name for (name,) in connection.execute("SELECT text FROM name")]
    assert names and not [name for name in names if name.startswith("~~")]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_what_langgraph_promises(open_saver: Opener, scenario: Callable[[Any], Any]) -> None:
    expected = scenario(InMemorySaver())
    with open_saver() as saver:
        assert scenario(saver) == expected
