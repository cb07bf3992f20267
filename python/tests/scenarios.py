"""What LangGraph promises of graphs with a checkpointer, one promise a function: each returns all that can be seen of it."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolCall, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send, StateUpdate, interrupt

CONFIG: RunnableConfig = {"configurable": {"thread_id": "t"}}
Saver = Any
SCENARIOS: list[Callable[[Saver], Any]] = []


def scenario(run: Callable[[Saver], Any]) -> Callable[[Saver], Any]:
    SCENARIOS.append(run)
    return run


class State(TypedDict, total=False):
    log: Annotated[list[str], operator.add]
    value: int


def seen(graph: Any, config: RunnableConfig = CONFIG) -> list[Any]:
    """The history, without ids and times."""
    return [
        (
            state.values,
            state.next,
            state.metadata.get("source"),
            state.metadata.get("step"),
            [(one.name, [i.value for i in one.interrupts], bool(one.error), one.result) for one in state.tasks],
        )
        for state in graph.get_state_history(config)
    ]


@scenario
def a_failed_task_is_run_again_and_the_others_are_not(saver: Saver) -> Any:
    ran: list[str] = []

    def good(state: State) -> State:
        ran.append("good")
        return {"log": ["good"]}

    def bad(state: State) -> State:
        ran.append("bad")
        # Its failure cancels what is not stored yet.
        deadline = time.monotonic() + 600
        while not any(channel == "log" for _, channel, _ in saver.get_tuple(CONFIG).pending_writes):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        if ran.count("bad") < 3:
            raise RuntimeError("not yet")
        return {"log": ["bad"]}

    builder = StateGraph(State)
    builder.add_node("good", good)
    builder.add_node("bad", bad)
    builder.add_edge(START, "good")
    builder.add_edge(START, "bad")
    graph = builder.compile(checkpointer=saver)
    said = []
    for start in ({"log": ["start"]}, None, None):
        try:
            said.append(graph.invoke(start, CONFIG, durability="sync"))
        except RuntimeError as error:
            said.append((str(error), seen(graph)))
    return said, sorted(ran), seen(graph)


@scenario
def nested_graphs_have_namespaces_of_their_own(saver: Saver) -> Any:
    def ask(state: State) -> State:
        return {"log": [f"inner {interrupt('inner?')}"]}

    inner = StateGraph(State)
    inner.add_node("ask", ask)
    inner.add_node("after", lambda state: {"value": state.get("value", 0) + 1})
    inner.add_edge(START, "ask")
    inner.add_edge("ask", "after")
    outer = StateGraph(State)
    outer.add_node("first", lambda state: {"log": ["first"]})
    outer.add_node("inner", inner.compile())
    outer.add_edge(START, "first")
    outer.add_edge("first", "inner")
    graph = outer.compile(checkpointer=saver)
    stopped = graph.invoke({"value": 1}, CONFIG)
    state = graph.get_state(CONFIG, subgraphs=True)
    nested = state.tasks[0].state
    assert nested is not None
    namespace = nested.config["configurable"]["checkpoint_ns"]
    shown = (nested.values, nested.next, namespace.split(":")[0])
    graph.update_state(nested.config, {"value": 10})
    done = graph.invoke(Command(resume="yes"), CONFIG)
    return stopped["__interrupt__"][0].value, shown, done, seen(graph), sorted(len(seen(graph, c)) for c in [CONFIG])


@scenario
def parallel_questions_are_answered_by_their_ids(saver: Saver) -> Any:
    builder = StateGraph(State)
    for name in ("a", "b"):
        builder.add_node(name, lambda state, name=name: {"log": [f"{name} {interrupt(name)}"]})
        builder.add_edge(START, name)
    graph = builder.compile(checkpointer=saver)
    asked = graph.invoke({"log": []}, CONFIG)["__interrupt__"]
    one = graph.invoke(Command(resume={one.id: "first" for one in asked if one.value == "a"}), CONFIG)
    left = [one.value for one in graph.get_state(CONFIG).interrupts]
    two = graph.invoke(Command(resume={one.id: "second" for one in asked if one.value == "b"}), CONFIG)
    return sorted(one.value for one in asked), one.get("log"), left, two, seen(graph)


@scenario
def a_replay_runs_what_followed_and_a_fork_what_is_new(saver: Saver) -> Any:
    builder = StateGraph(State)
    builder.add_node("add", lambda state: {"value": state["value"] + 1, "log": [f"added to {state['value']}"]})
    builder.add_node("double", lambda state: {"value": state["value"] * 2, "log": ["doubled"]})
    builder.add_edge(START, "add")
    builder.add_edge("add", "double")
    graph = builder.compile(checkpointer=saver)
    first = graph.invoke({"value": 1}, CONFIG)
    second = graph.invoke({"value": 5}, CONFIG)
    history = list(graph.get_state_history(CONFIG))
    before = [state for state in history if state.next == ("double",)]
    replayed = graph.invoke(None, before[1].config)
    forked = graph.invoke(None, graph.update_state(before[0].config, {"value": 100}))
    return first, second, replayed, forked, seen(graph), graph.get_state(before[1].config).values


@scenario
def a_command_goes_where_it_says_and_updates(saver: Saver) -> Any:
    def route(state: State) -> Command[str]:
        return Command(update={"log": ["routed"]}, goto=[Send("work", {"value": n}) for n in range(4)])

    builder = StateGraph(State)
    builder.add_node("route", route)
    builder.add_node("work", lambda state: {"log": [f"worked {state['value']}"]})
    builder.add_node("last", lambda state: {"log": ["last"]})
    builder.add_edge(START, "route")
    builder.add_edge("work", "last")
    graph = builder.compile(checkpointer=saver, interrupt_before=["last"])
    stopped = graph.invoke({"log": ["in"]}, CONFIG)
    waiting = graph.get_state(CONFIG).next
    return stopped, waiting, graph.invoke(None, CONFIG), seen(graph)


@scenario
def messages_are_replaced_and_removed_by_their_ids(saver: Saver) -> Any:
    def model(state: MessagesState) -> dict[str, Any]:
        last = state["messages"][-1]
        if isinstance(last, ToolMessage):
            return {"messages": [AIMessage(f"found {last.content}", id=f"a{len(state['messages'])}")]}
        call = ToolCall(name="find", args={"q": last.content}, id=f"c{len(state['messages'])}")
        return {"messages": [AIMessage("", id=f"a{len(state['messages'])}", tool_calls=[call])]}

    def tool(state: MessagesState) -> dict[str, Any]:
        last = state["messages"][-1]
        assert isinstance(last, AIMessage)
        results = [ToolMessage("it", tool_call_id=call["id"], id=f"t{call['id']}") for call in last.tool_calls]
        return {"messages": results}

    def more(state: MessagesState) -> str:
        last = state["messages"][-1]
        return "tool" if isinstance(last, AIMessage) and last.tool_calls else END

    builder = StateGraph(MessagesState)
    builder.add_node("model", model)
    builder.add_node("tool", tool)
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", more, ["tool", END])
    builder.add_edge("tool", "model")
    graph = builder.compile(checkpointer=saver)
    for turn in range(5):
        graph.invoke({"messages": [HumanMessage(f"where {turn}", id=f"h{turn}")]}, CONFIG)
    messages = graph.get_state(CONFIG).values["messages"]
    graph.update_state(CONFIG, {"messages": [RemoveMessage(id=message.id) for message in messages[:6]]})
    graph.update_state(CONFIG, {"messages": [HumanMessage("edited", id=messages[8].id)]})
    after = graph.invoke({"messages": [HumanMessage("last", id="h9")]}, CONFIG)
    return messages, after, seen(graph)


@scenario
def a_workflow_remembers_its_tasks_and_its_last_result(saver: Saver) -> Any:
    ran: list[int] = []

    @task
    def slow(n: int) -> int:
        ran.append(n)
        return n * n

    @entrypoint(checkpointer=saver)
    def flow(n: int, *, previous: Any = None) -> entrypoint.final[Any, Any]:
        squares = [future.result() for future in [slow(i) for i in range(n)]]
        answer = interrupt(squares)
        return entrypoint.final(value=(sum(squares), answer, previous), save=(previous or 0) + n)

    results = []
    for n in (3, 2):
        results += list(flow.stream(n, CONFIG))[-1:]
        results.append(flow.invoke(Command(resume=f"answer {n}"), CONFIG))
    return [str(one).split("id=")[0] for one in results], sorted(ran), flow.get_state(CONFIG).values


@scenario
def updates_are_applied_one_by_one_and_as_nodes(saver: Saver) -> Any:
    builder = StateGraph(State)
    builder.add_node("one", lambda state: {"log": ["one"]})
    builder.add_node("two", lambda state: {"log": ["two"]})
    builder.add_edge(START, "one")
    builder.add_edge("one", "two")
    graph = builder.compile(checkpointer=saver)
    graph.bulk_update_state(
        CONFIG, [[StateUpdate({"log": ["in"]}, "__input__")], [StateUpdate({"log": ["as one"]}, "one")]]
    )
    waiting = graph.get_state(CONFIG).next
    return waiting, graph.invoke(None, CONFIG), seen(graph)


@scenario
def states_are_filtered_and_paged(saver: Saver) -> Any:
    builder = StateGraph(State)
    builder.add_node("step", lambda state: {"value": state["value"] + 1})
    builder.add_edge(START, "step")
    graph = builder.compile(checkpointer=saver)
    for value in range(6):
        graph.invoke({"value": value}, {**CONFIG, "metadata": {"who": f"user {value % 2}"}})
    mine = [state.values for state in graph.get_state_history(CONFIG, filter={"who": "user 1"})]
    inputs = [state.metadata["step"] for state in graph.get_state_history(CONFIG, filter={"source": "input"}, limit=4)]
    third = list(graph.get_state_history(CONFIG))[2]
    older = [state.values for state in graph.get_state_history(CONFIG, before=third.config, limit=3)]
    return mine, inputs, older
