"""A desk that answers requests: it looks things up in parallel, asks a person before it acts, and can go back in time.

Run it twice: the second time it continues in the same file, where the first one stopped.

    python approval.py checkpoints.db

Nothing here is special to Threadkeep but the import of the saver.
"""

from __future__ import annotations

import operator
import sys
from typing import Annotated, Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

from threadkeep.langgraph import SqliteSaver

PRICES = {"desk": 300, "lamp": 40, "chair": 120}


class State(MessagesState, total=False):
    """The conversation, and what the request needs."""

    offers: Annotated[list[tuple[str, int]], operator.add]
    orders: int


def look_up(state: State) -> list[Send]:
    """Each thing that the request names is looked up by a task of its own."""
    request = str(state["messages"][-1].content)
    return [Send("price", {"thing": thing}) for thing in PRICES if thing in request]


def price(task: dict[str, str]) -> dict[str, Any]:
    return {"offers": [(task["thing"], PRICES[task["thing"]])]}


def approve(state: State) -> dict[str, Any]:
    """Stops until a person has answered. The answer may come from another process, days later."""
    things, total = [thing for thing, _ in state["offers"]], sum(cost for _, cost in state["offers"])
    answer = interrupt(f"Buy {' and '.join(things)} for {total}?")
    if answer != "yes":
        return {"messages": [AIMessage("Then not.")]}
    return {"messages": [AIMessage(f"Bought for {total}.")], "orders": state.get("orders", 0) + 1}


def desk() -> StateGraph[Any, Any, Any, Any]:
    builder = StateGraph(State)
    builder.add_node("price", price)
    builder.add_node("approve", approve)
    builder.add_conditional_edges(START, look_up, ["price"])
    builder.add_edge("price", "approve")
    builder.add_edge("approve", END)
    return builder


def main(path: str) -> None:
    config: RunnableConfig = {"configurable": {"thread_id": "office"}}
    with SqliteSaver.from_conn_string(path) as saver:
        graph = desk().compile(checkpointer=saver)
        state = graph.get_state(config)
        if not state.next:
            asked = graph.invoke({"messages": [HumanMessage("a desk and a lamp, please")]}, config)
            print("asks:", asked["__interrupt__"][0].value)
            print("Run it again to answer.")
            return
        print("continues:", state.tasks[0].interrupts[0].value)
        print("yes:", graph.invoke(Command(resume="yes"), config)["messages"][-1].content)

        # Back to the question, and another answer: a fork. What happened in the meantime stays in the history.
        before = next(state for state in graph.get_state_history(config) if state.next == ("approve",))
        graph.invoke(None, before.config)
        print("no:", graph.invoke(Command(resume="no"), config)["messages"][-1].content)
        print("orders:", graph.get_state(config).values.get("orders", 0))

        kept = len(list(saver.list(config)))
        saver.prune(["office"])
        print(f"{kept} checkpoints, after pruning {len(list(saver.list(config)))}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "checkpoints.db")
