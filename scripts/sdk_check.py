"""The official LangGraph SDK against a live gateway: threads, runs, streams, state, history.

Every check is a function named after what it shows; the output is a line each and a closing count.
"""

import asyncio
import sys
import traceback
import uuid

from langgraph_sdk import get_client, get_sync_client

QUESTION = {"messages": [{"role": "user", "content": "Hello there"}]}
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


async def thread_with_a_turn(client):
    thread = await client.threads.create()
    await client.runs.wait(thread["thread_id"], "lead_agent", input=QUESTION)
    return thread["thread_id"]


@check
async def a_thread_is_created_read_searched_patched_and_deleted(client):
    marker = str(uuid.uuid4())
    thread = await client.threads.create(metadata={"marker": marker})
    thread_id = thread["thread_id"]
    assert thread["status"] == "idle" and thread["metadata"]["marker"] == marker, thread
    assert (await client.threads.get(thread_id))["thread_id"] == thread_id
    found = await client.threads.search(metadata={"marker": marker})
    assert [t["thread_id"] for t in found] == [thread_id], found
    patched = await client.threads.update(thread_id, metadata={"more": 1})
    assert patched["metadata"] == {"marker": marker, "more": 1}, patched
    await client.threads.delete(thread_id)
    assert await client.threads.search(metadata={"marker": marker}) == []
    await expect_status(404, client.threads.get(thread_id))


@check
async def creating_a_thread_twice_returns_the_first(client):
    thread_id = str(uuid.uuid4())
    first = await client.threads.create(thread_id=thread_id, metadata={"a": 1})
    again = await client.threads.create(thread_id=thread_id, metadata={"a": 2}, if_exists="do_nothing")
    assert again["metadata"] == first["metadata"] == {"a": 1}, again


@check
async def a_fresh_thread_has_an_empty_state_and_one_checkpoint(client):
    thread = await client.threads.create()
    state = await client.threads.get_state(thread["thread_id"])
    assert state["values"] == {} and state["next"] == [], state
    history = await client.threads.get_history(thread["thread_id"])
    assert len(history) == 1 and history[0]["metadata"]["step"] == -1, history


@check
async def waiting_for_a_run_returns_the_final_values(client):
    thread = await client.threads.create()
    values = await client.runs.wait(thread["thread_id"], "lead_agent", input=QUESTION)
    kinds = [message["type"] for message in values["messages"]]
    assert kinds == ["human", "ai"], kinds
    assert values["title"], values


@check
async def a_stream_shows_metadata_values_and_message_chunks(client):
    thread = await client.threads.create()
    parts, created = [], []
    async for part in client.runs.stream(
        thread["thread_id"],
        "lead_agent",
        input=QUESTION,
        stream_mode=["values", "messages-tuple", "updates"],
        on_run_created=created.append,
    ):
        parts.append(part)
    names = [part.event for part in parts]
    assert names[0] == "metadata" and "error" not in names, names
    assert created and created[0]["run_id"] == parts[0].data["run_id"], created
    values = [part.data for part in parts if part.event == "values"]
    answer = values[-1]["messages"][-1]
    chunks = [part.data[0] for part in parts if part.event == "messages"]
    text = "".join(chunk["content"] for chunk in chunks if chunk["id"] == answer["id"])
    assert text == answer["content"] != "", (text, answer)
    assert {"model": {"messages": [answer], "title": values[-1]["title"]}} in [
        part.data for part in parts if part.event == "updates"
    ]


@check
async def subagents_are_streamed_inside_of_their_calls(client):
    thread = await client.threads.create()
    reports, answers = {}, []
    async for part in client.runs.stream(
        thread["thread_id"],
        "lead_agent",
        input={"messages": [{"role": "user", "content": "research three things"}]},
        context={"subagent_enabled": True},
        stream_mode=["messages-tuple", "updates"],
        stream_subgraphs=True,
    ):
        name, _, place = part.event.partition("|")
        if name == "messages" and part.data[0]["type"] == "AIMessageChunk":
            if place:
                reports[place] = reports.get(place, "") + part.data[0]["content"]
            else:
                answers.append(part.data[0]["content"])
    assert len(reports) == 3 and all(place.startswith("tools:") for place in reports), reports
    assert all(reports.values()) and "".join(answers), (reports, answers)


@check
async def a_background_run_is_joined_listed_and_read(client):
    thread = await client.threads.create()
    thread_id = thread["thread_id"]
    run = await client.runs.create(thread_id, "lead_agent", input=QUESTION)
    assert run["status"] in ("pending", "running", "success"), run
    values = await client.runs.join(thread_id, run["run_id"])
    assert values["messages"][-1]["type"] == "ai", values
    assert (await client.runs.get(thread_id, run["run_id"]))["status"] == "success"
    assert [r["run_id"] for r in await client.runs.list(thread_id)] == [run["run_id"]]


@check
async def a_finished_run_can_be_joined_as_a_stream(client):
    thread = await client.threads.create()
    run = await client.runs.create(thread["thread_id"], "lead_agent", input=QUESTION)
    await client.runs.join(thread["thread_id"], run["run_id"])
    names = [part.event async for part in client.runs.join_stream(thread["thread_id"], run["run_id"])]
    assert names[-1] == "end", names


@check
async def stateless_runs_need_no_thread(client):
    values = await client.runs.wait(None, "lead_agent", input=QUESTION)
    assert values["messages"][-1]["type"] == "ai", values
    names = [part.event async for part in client.runs.stream(None, "lead_agent", input=QUESTION)]
    assert names[0] == "metadata" and names[-1] == "end", names


@check
async def the_state_is_read_updated_and_forked(client):
    thread_id = await thread_with_a_turn(client)
    before = await client.threads.get_state(thread_id)
    written = await client.threads.update_state(thread_id, {"title": "Renamed"})
    assert written["checkpoint"]["checkpoint_id"], written
    after = await client.threads.get_state(thread_id)
    assert after["values"]["title"] == "Renamed", after["values"]
    assert after["values"]["messages"] == before["values"]["messages"]
    assert after["parent_checkpoint"]["checkpoint_id"] == before["checkpoint"]["checkpoint_id"]
    fork = await client.threads.update_state(
        thread_id, {"title": "Fork"}, checkpoint_id=before["checkpoint"]["checkpoint_id"]
    )
    head = await client.threads.get_state(thread_id)
    assert head["checkpoint"]["checkpoint_id"] == fork["checkpoint"]["checkpoint_id"]
    assert head["parent_checkpoint"]["checkpoint_id"] == before["checkpoint"]["checkpoint_id"]
    old = await client.threads.get_state(thread_id, checkpoint_id=after["checkpoint"]["checkpoint_id"])
    assert old["values"]["title"] == "Renamed", old["values"]


@check
async def history_is_newest_first_and_pages(client):
    thread_id = await thread_with_a_turn(client)
    history = await client.threads.get_history(thread_id, limit=100)
    ids = [entry["checkpoint"]["checkpoint_id"] for entry in history]
    assert ids == sorted(ids, reverse=True) and len(ids) >= 4, ids
    assert len(await client.threads.get_history(thread_id, limit=2)) == 2
    page = await client.threads.get_history(thread_id, limit=100, before=history[1]["checkpoint"])
    assert [entry["checkpoint"]["checkpoint_id"] for entry in page] == ids[1:], page


@check
async def turns_follow_each_other_on_one_thread(client):
    thread_id = await thread_with_a_turn(client)
    values = await client.runs.wait(thread_id, "lead_agent", input=QUESTION)
    assert [m["type"] for m in values["messages"]] == ["human", "ai", "human", "ai"], values
    assert len({m["id"] for m in values["messages"]}) == 4


@check
async def a_tool_call_writes_a_file_and_the_answer_follows(client):
    thread = await client.threads.create()
    question = {"messages": [{"role": "user", "content": "please write a file"}]}
    values = await client.runs.wait(thread["thread_id"], "lead_agent", input=question)
    kinds = [message["type"] for message in values["messages"]]
    assert kinds == ["human", "ai", "tool", "ai"], kinds
    assert values["messages"][2]["status"] == "success", values["messages"][2]


@check
async def a_breakpoint_is_resumed_with_a_value_and_a_value_for_nothing_is_refused(client):
    thread = await client.threads.create()
    thread_id = thread["thread_id"]
    await client.runs.wait(thread_id, "lead_agent", input=QUESTION, interrupt_before=["model"])
    assert (await client.threads.get_state(thread_id))["next"] == ["model"]
    values = await client.runs.wait(thread_id, "lead_agent", command={"resume": {"approved": True}})
    assert [m["type"] for m in values["messages"]] == ["human", "ai"], values
    await expect_status(409, client.runs.create(thread_id, "lead_agent", command={"resume": "blue"}))


@check
async def threads_are_counted_and_copied(client):
    marker = str(uuid.uuid4())
    thread = await client.threads.create(metadata={"marker": marker})
    await client.runs.wait(thread["thread_id"], "lead_agent", input=QUESTION)
    assert await client.threads.count(metadata={"marker": marker}) == 1
    await client.threads.copy(thread["thread_id"])
    found = await client.threads.search(metadata={"marker": marker})
    copies = [t["thread_id"] for t in found if t["thread_id"] != thread["thread_id"]]
    assert len(copies) == 1, found
    source = await client.threads.get_state(thread["thread_id"])
    copy = await client.threads.get_state(copies[0])
    assert copy["values"] == source["values"], copy


@check
async def the_state_is_read_by_checkpoint(client):
    thread_id = await thread_with_a_turn(client)
    history = await client.threads.get_history(thread_id, limit=100)
    for entry in history:
        state = await client.threads.get_state(thread_id, checkpoint=entry["checkpoint"])
        assert state["checkpoint"] == entry["checkpoint"], state


@check
async def runs_are_paged_deleted_and_cancelled_together(client):
    thread_id = await thread_with_a_turn(client)
    await client.runs.wait(thread_id, "lead_agent", input=QUESTION)
    runs = await client.runs.list(thread_id)
    assert [r["run_id"] for r in await client.runs.list(thread_id, limit=1, offset=1)] == [runs[1]["run_id"]]
    assert await client.runs.list(thread_id, status="error") == []
    await client.runs.delete(thread_id, runs[1]["run_id"])
    assert [r["run_id"] for r in await client.runs.list(thread_id)] == [runs[0]["run_id"]]
    await expect_status(404, client.runs.get(thread_id, runs[1]["run_id"]))
    await client.runs.cancel_many(thread_id=thread_id, run_ids=[runs[0]["run_id"]])
    assert (await client.runs.get(thread_id, runs[0]["run_id"]))["status"] == "success"


@check
async def the_lead_agent_is_the_one_assistant(client):
    found = await client.assistants.search(graph_id="lead_agent")
    assert [a["assistant_id"] for a in found] == ["lead_agent"], found
    assert await client.assistants.search(graph_id="other") == []
    assert (await client.assistants.get("lead_agent"))["graph_id"] == "lead_agent"
    assert "messages" in (await client.assistants.get_schemas("lead_agent"))["state_schema"]["properties"]
    assert (await client.assistants.get_graph("lead_agent"))["nodes"] == []
    await expect_status(404, client.assistants.get("other"))


@check
async def a_repeated_request_gets_the_run_of_the_first(client):
    thread = await client.threads.create()
    headers = {"Idempotency-Key": str(uuid.uuid4())}
    first = await client.runs.create(thread["thread_id"], "lead_agent", input=QUESTION, headers=headers)
    again = await client.runs.create(thread["thread_id"], "lead_agent", input=QUESTION, headers=headers)
    assert again["run_id"] == first["run_id"], again


@check
async def bad_requests_are_refused(client):
    await expect_status(404, client.threads.get_state(str(uuid.uuid4())))
    await expect_status(404, client.runs.create(str(uuid.uuid4()), "lead_agent", input=QUESTION))
    thread = await client.threads.create()
    await expect_status(
        422, client.runs.create(thread["thread_id"], "lead_agent", input=QUESTION, webhook="http://localhost/x")
    )
    await expect_status(
        400, client.runs.create(thread["thread_id"], "lead_agent", input=QUESTION, context={"model_name": "nope"})
    )


@check
async def the_synchronous_client_works_too(client):
    def turn(url):
        sync = get_sync_client(url=url)
        thread = sync.threads.create()
        values = sync.runs.wait(thread["thread_id"], "lead_agent", input=QUESTION)
        return [m["type"] for m in values["messages"]]

    assert await asyncio.to_thread(turn, sys.argv[1] + "/api") == ["human", "ai"]


async def expect_status(status, awaitable):
    try:
        answer = await awaitable
    except Exception as error:
        seen = getattr(getattr(error, "response", None), "status_code", None)
        assert seen == status, f"expected {status}, got {error!r}"
    else:
        raise AssertionError(f"expected {status}, got {answer!r}")


async def main():
    failed = 0
    async with get_client(url=sys.argv[1] + "/api") as client:
        for function in CHECKS:
            name = function.__name__.replace("_", " ")
            try:
                await function(client)
                print(f"ok    {name}")
            except Exception:
                failed += 1
                print(f"FAIL  {name}")
                traceback.print_exc()
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return 1 if failed else 0


sys.exit(asyncio.run(main()))
