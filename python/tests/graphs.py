"""Graphs that the tests run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Send, interrupt


def append(state: list[str], writes: Sequence[list[str]]) -> list[str]:
    """A reducer for which the order of writes matters."""
    return [*state, *(item for write in writes for item in write)]


class State(TypedDict, total=False):
    messages: Annotated[list[Any], add_messages]
    log: Annotated[list[str], DeltaChannel(append, snapshot_frequency=5)]
    turns: int


def answer(state: State) -> dict[str, Any]:
    turns = state.get("turns", 0)
    return {"messages": [("ai", f"answer {turns}")], "log": ["answer"], "turns": turns + 1}


def fan_out(state: State) -> list[Send]:
    return [Send("work", {"item": item}) for item in range(3)]


def work(item: dict[str, int]) -> dict[str, Any]:
    return {"log": [f"work {item['item']}"]}


def ask(state: State) -> dict[str, Any]:
    return {"log": [f"said {interrupt('what next?')}"]}


def conversation(saver: BaseCheckpointSaver[Any]) -> Any:
    """A model's answer, parallel work and a question to a person; one channel is stored whole, one as changes."""
    builder = StateGraph(State)
    builder.add_node("answer", answer)
    builder.add_node("work", work)
    builder.add_node("ask", ask)
    builder.add_edge(START, "answer")
    builder.add_conditional_edges("answer", fan_out, ["work"])
    builder.add_edge("work", "ask")
    builder.add_edge("ask", END)
    return builder.compile(checkpointer=saver)


def shown(state: Any) -> dict[str, Any]:
    """What a state shows, without ids and times."""
    return {
        "messages": [message.content for message in state.values.get("messages", [])],
        "log": state.values.get("log"),
        "turns": state.values.get("turns"),
        "next": state.next,
        "metadata": {key: state.metadata.get(key) for key in ("source", "step")},
        "tasks": [(task.name, [one.value for one in task.interrupts]) for task in state.tasks],
        "written": [sorted(task.result) if task.result else None for task in state.tasks],
    }


def play(saver: BaseCheckpointSaver[Any], durability: Any, turns: int = 8) -> list[dict[str, Any]]:
    """Runs a conversation with forks, and returns everything that can be seen of it."""
    graph = conversation(saver)
    config: RunnableConfig = {"configurable": {"thread_id": "t"}}
    seen = []
    for turn in range(turns):
        graph.invoke({"messages": [("user", f"turn {turn}")]}, config, durability=durability)
        seen.append(shown(graph.get_state(config)))
        graph.invoke(Command(resume=f"answer {turn}"), config, durability=durability)
        seen.append(shown(graph.get_state(config)))
    history = list(graph.get_state_history(config))
    seen += [shown(state) for state in history]
    # Forks: an update of an old state, and a run that goes on from it.
    graph.update_state(history[6].config, {"log": ["updated"]}, as_node="answer")
    seen.append(shown(graph.get_state(config)))
    graph.invoke(None, config, durability=durability)
    seen += [shown(state) for state in graph.get_state_history(config)]
    return seen


async def aplay(saver: BaseCheckpointSaver[Any], durability: Any, turns: int = 8) -> list[dict[str, Any]]:
    """:func:`play` in an event loop."""
    graph = conversation(saver)
    config: RunnableConfig = {"configurable": {"thread_id": "t"}}
    seen = []
    for turn in range(turns):
        await graph.ainvoke({"messages": [("user", f"turn {turn}")]}, config, durability=durability)
        seen.append(shown(await graph.aget_state(config)))
        await graph.ainvoke(Command(resume=f"answer {turn}"), config, durability=durability)
        seen.append(shown(await graph.aget_state(config)))
    history = [state async for state in graph.aget_state_history(config)]
    seen += [shown(state) for state in history]
    await graph.aupdate_state(history[6].config, {"log": ["updated"]}, as_node="answer")
    seen.append(shown(await graph.aget_state(config)))
    await graph.ainvoke(None, config, durability=durability)
    seen += [shown(state) async for state in graph.aget_state_history(config)]
    return seen
