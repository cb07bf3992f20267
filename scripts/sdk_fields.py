"""Every field that the official LangGraph SDKs can send is done by the gateway, or refused by name.

    sdk_fields.py URL JSLINES [--print]

The fields are taken from the installed packages: every method of the Python clients is called with every parameter that it
has, and JSLINES holds the requests of sdk_fields.mjs. Each field is then sent to the gateway at URL: with a value that it
takes, and with one that it cannot take. What the gateway does must be what the table in docs/fields.md says; a field that
is in neither, a method and a parameter that are not known here fail. With --print the table is printed.
"""

import inspect
import json
import pathlib
import re
import sys
import typing
import uuid

import httpx
from langgraph_sdk import schema
from langgraph_sdk.client import SyncLangGraphClient

TABLE = pathlib.Path(__file__).parent.parent / "docs/fields.md"

# Parameters that a client keeps to itself, or sends as headers of its own.
LOCAL = {"headers", "params", "on_run_created", "raise_error", "version", "last_event_id", "response_format", "transport"}
# Methods that are a protocol of their own: docs/thread-protocol.md, and tests of the gateway.
OTHER = {"threads.stream"}
VALUES = {
    "action": "rollback", "after_seconds": 1, "as_node": "model", "assistant_id": "$ASSISTANT", "before": "$CHECKPOINT",
    "cancel_on_disconnect": True, "checkpoint": {"checkpoint_id": "$CHECKPOINT"}, "checkpoint_during": True,
    "checkpoint_id": "$CHECKPOINT", "command": {"update": {"title": "T"}}, "config": {"configurable": {}}, "context": {"a": 1},
    "cron_id": "$CRON", "delete_threads": True, "description": "d", "durability": "sync", "enabled": True, "end_time": None,
    "extract": {"a": "values.title"}, "feedback_keys": ["k"], "filter": {"a": 1}, "goto": "model", "graph_id": "lead_agent",
    "ids": ["$THREAD"], "if_exists": "do_nothing", "if_not_exists": "create", "include": ["ttl"], "index": ["a"],
    "input": {"messages": []}, "interrupt_after": ["tools"], "interrupt_before": ["model"], "key": "k",
    "langsmith_tracing": {"project_name": "p"}, "limit": 3, "max_depth": 2, "metadata": {"a": 1},
    "multitask_strategy": "enqueue", "name": "n", "namespace": "ns", "namespace_prefix": ["a"], "offset": 1,
    "on_completion": "complete", "on_disconnect": "continue", "on_run_completed": "keep", "payloads": [{"assistant_id": "$ASSISTANT"}],
    "prefix": ["a"], "query": "q", "recurse": True, "refresh_ttl": True, "return_minimal": True, "run_id": "$RUN",
    "run_ids": ["$RUN"], "schedule": "* * * * *", "select": ["$SELECT"], "sort_by": "created_at", "sort_order": "asc",
    "status": "$STATUS", "strategy": "keep_latest", "stream_mode": ["values"], "stream_resumable": True,
    "stream_subgraphs": True, "strict_resume": True, "subgraphs": True, "suffix": ["a"],
    "supersteps": [{"updates": [{"values": {"title": "T"}, "as_node": "model"}]}], "thread_id": "$THREAD",
    "thread_ids": ["$NONE"], "timezone": "UTC", "ttl": 3, "value": {"a": 1}, "values": {"title": "T"}, "version": 1,
    "wait": True, "webhook": "https://example.org", "xray": True,
}
BY_METHOD = {
    "store.put_item.namespace": ["a"], "store.get_item.namespace": ["a"], "store.delete_item.namespace": ["a"],
    "assistants.set_latest.version": 1, "threads.join_stream.stream_mode": ["lifecycle"], "runs.cancel_many.status": None,
}
# Values of the keys of typed dictionaries.
WITHIN = {
    "command": (schema.Command, {"goto": "model", "update": {"title": "T"}, "resume": "yes"}),
    "config": (schema.Config, {"tags": ["a"], "recursion_limit": 5, "configurable": {"a": 1}}),
    "checkpoint": (
        schema.Checkpoint,
        {"thread_id": "$THREAD", "checkpoint_ns": "", "checkpoint_id": "$CHECKPOINT", "checkpoint_map": None},
    ),
}
# Of which any value can be made something.
ANY = {"command.resume", "config.recursion_limit"}
RUN_ROUTES = re.compile(r"POST (/threads/\{thread_id\})?/runs(/stream|/wait)?$")
PLACES = {"THREAD": "thread_id", "RUN": "run_id", "ASSISTANT": "assistant_id", "CHECKPOINT": "checkpoint_id", "CRON": "cron_id"}
problems = []


def recorded(call):
    """The request that a call of the Python client makes."""
    sent = []

    def answer(request):
        sent.append(request)
        if request.url.path.endswith("/stream"):
            return httpx.Response(200, text="event: end\ndata: null\n\n", headers={"content-type": "text/event-stream"})
        return httpx.Response(200, json={})

    client = SyncLangGraphClient(httpx.Client(base_url="http://sdk", transport=httpx.MockTransport(answer)))
    result = call(client)
    if inspect.isgenerator(result):
        list(result)
    request = sent[0]
    query = {}
    for name, value in request.url.params.multi_items():
        query.setdefault(name, []).append(value)
    return {
        "method": request.method, "path": request.url.path, "query": {k: v if len(v) > 1 else v[0] for k, v in query.items()},
        "body": json.loads(request.content) if request.content else None,
        "headers": {"Prefer": request.headers["prefer"]} if "prefer" in request.headers else {},
    }


def python_requests():
    """A request for each parameter of each method of the Python clients."""
    client = SyncLangGraphClient(httpx.Client())
    for group in ["threads", "runs", "assistants", "crons", "store"]:
        for name, method in inspect.getmembers(getattr(client, group), inspect.ismethod):
            if name.startswith("_") or f"{group}.{name}" in OTHER:
                continue
            signature = inspect.signature(method).parameters
            value = lambda p: BY_METHOD.get(f"{group}.{name}.{p}", VALUES.get(p))
            unknown = [p for p in signature if p not in LOCAL and p not in VALUES and f"{group}.{name}.{p}" not in BY_METHOD]
            problems.extend(f"{group}.{name}: the parameter {p} is not known to sdk_fields.py" for p in unknown)
            required = {p: value(p) for p, s in signature.items() if s.default is inspect.Parameter.empty}
            optional = [p for p in signature if p not in required and p not in LOCAL and value(p) is not None]
            calls = [{}] + [{p: value(p)} for p in optional]
            for more in calls:
                try:
                    first = [v for p, v in required.items() if signature[p].kind is inspect.Parameter.POSITIONAL_ONLY]
                    named = {p: v for p, v in required.items() if signature[p].kind is not inspect.Parameter.POSITIONAL_ONLY}
                    request = recorded(lambda c: getattr(getattr(c, group), name)(*first, **named, **more))
                except Exception as error:  # noqa: BLE001
                    problems.append(f"{group}.{name}({more}): {error!r}")
                    continue
                yield {"call": f"{group}.{name}", **request}


def template(path):
    for name, parameter in PLACES.items():
        path = path.replace(f"${name}", f"{{{parameter}}}").replace(f"%24{name}", f"{{{parameter}}}")
    return re.sub(r"/subgraphs/ns$", "/subgraphs/{namespace}", path)


def fields(requests):
    """Every field of the requests, with a value: (route, place, name) -> value."""
    found = {}
    for request in requests:
        route = f"{request['method']} {template(request['path'])}"
        bodies = request["body"] if isinstance(request["body"], list) else [request["body"] or {}]
        for place, names in [("query", request["query"]), ("header", request.get("headers", {}))] + [("body", b) for b in bodies]:
            for name, value in names.items():
                if route == "POST /runs/batch":
                    # The JavaScript client sends its own names here.
                    name = re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), name)
                found.setdefault((route, place, name), value)
    for (route, place, name), _ in list(found.items()):
        if name in WITHIN and "crons" not in route and "assistants" not in route:
            typed, values = WITHIN[name]
            for key in typing.get_type_hints(typed):
                if key not in values:
                    problems.append(f"{name}.{key} is not known to sdk_fields.py")
                found[(route, place, f"{name}.{key}")] = values.get(key)
    return found


class Gateway:
    """The gateway, and what there is on it."""

    def __init__(self, url):
        self.http = httpx.Client(base_url=f"{url}/api", timeout=600, limits=httpx.Limits(max_keepalive_connections=0))
        self.known = {"ASSISTANT": "lead_agent", "NONE": "none", "CRON": "c"}
        self.renew()

    def renew(self):
        """A thread with a turn."""
        thread = self.known["THREAD"] = str(uuid.uuid4())
        self.http.post("/threads", json={"thread_id": thread}).raise_for_status()
        run = self.http.post(f"/threads/{thread}/runs", json={"input": {"messages": ["hi"]}}).json()
        self.http.get(f"/threads/{thread}/runs/{run['run_id']}/join").raise_for_status()
        self.known["RUN"] = run["run_id"]
        state = self.http.get(f"/threads/{thread}/state").json()
        self.known["CHECKPOINT"] = state["checkpoint_id"]

    def filled(self, value, route):
        if isinstance(value, dict):
            return {key: self.filled(inner, route) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.filled(inner, route) for inner in value]
        if not isinstance(value, str) or not value.startswith(("$", "[\"$")):
            return value
        select = "graph_id" if "assistants" in route else "run_id" if route.endswith("/runs") else "checkpoint" if "sta" in route or "history" in route else "thread_id"
        status = "success" if route.endswith("/runs") else "idle"
        for name, known in {**self.known, "SELECT": select, "STATUS": status}.items():
            value = value.replace(f"${name}", known)
        return value

    def send(self, route, place, name, value, base):
        """The status and body of the answer to a request with this field."""
        self.renew()
        method, path = route.split(" ", 1)
        for key, parameter in PLACES.items():
            path = path.replace(f"{{{parameter}}}", self.known[key])
        path = path.replace("{namespace}", "ns")
        parts = {"query": {}, "body": dict(base), "header": {}}
        target = parts[place]
        *outer, last = name.split(".")
        for key in outer:
            target = target.setdefault(key, {})
        target[last] = value
        if last == "checkpoint_map":
            target["checkpoint_id"] = self.known["CHECKPOINT"]
        body = self.filled(parts["body"], route) if method in ("POST", "PUT", "PATCH") else None
        if route == "POST /runs/batch":
            body = [body]
        query = {k: v if isinstance(v, (str, list)) else json.dumps(v) for k, v in self.filled(parts["query"], route).items()}
        headers = {key: str(value) for key, value in parts["header"].items()}
        request = self.http.build_request(method, path, params=query, json=body, headers=headers)
        answer = self.http.send(request, stream=True)
        try:
            # The stream of a thread does not end.
            text = "" if answer.headers["content-type"].startswith("text/event-stream") else answer.read().decode()
        except KeyError:
            text = ""
        finally:
            answer.close()
        return answer.status_code, text


def names(text, name):
    """Whether an answer names the field."""
    return all(f'"{part}"' in text or part in text for part in name.split("."))


def verdict(gateway, route, place, name, value, required):
    """What the gateway does with a field: done, refused, or what is wrong."""
    base = {key: v for key, v in required.items() if key != name.split(".")[0]}
    status, text = gateway.send(route, place, name, value, base)
    if status == 501 and "not supported" in text or status == 501 and "cannot be" in text:
        return "refused"
    if status == 422 and names(text, name):
        return "refused"
    # A resume that answers nothing; a run that has ended.
    if status >= 300 and not (status == 409 and (name == "command.resume" or route.endswith("/cancel"))):
        return f"{status} {text[:200]}"
    if place == "header" or name in ANY:
        return "done"
    wrong = {"wrong": ["\x01"]} if place == "body" else "\x01wrong"
    status, text = gateway.send(route, place, name, wrong, base)
    if status in (400, 422) and (names(text, name) or "): wrong" in text):
        return "done"
    # Any object is a value of it.
    free = isinstance(value, dict) and status < 300
    return "done" if free else f"not read: a wrong value gives {status} {text[:200]}"


def expected_rows():
    rows = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) >= 4:
            rows[tuple(cells[:3])] = cells[3]
    return rows


def row_of(route, place, name):
    """The row of a field: the runs' routes have one body, and some routes do nothing."""
    if RUN_ROUTES.match(route) or route == "POST /runs/batch":
        route = "create a run"
    for pattern, what in [("/crons", "cron jobs"), ("/store/", "store"), ("(POST|PATCH|DELETE) /assistants(/{assistant_id})?$", "change assistants")]:
        if re.search(pattern, route):
            return (f"`{what}`", "any", "`*`")
    return (f"`{route}`", place, f"`{name}`")


def main():
    url, lines = sys.argv[1], pathlib.Path(sys.argv[2]).read_text().splitlines()
    requests = list(python_requests()) + [json.loads(line) for line in lines]
    found = fields(requests)
    gateway = Gateway(url)
    required = {
        "POST /threads/prune": {"thread_ids": ["none"]}, "POST /runs/cancel": {"thread_id": "$THREAD", "run_ids": ["$RUN"]},
        "POST /assistants/{assistant_id}/latest": {"version": 1},
    }
    seen = {}
    for (route, place, name), value in sorted(found.items()):
        if name == "status" and route == "POST /runs/cancel":
            continue
        result = verdict(gateway, route, place, name, value, required.get(route, {}))
        seen.setdefault(row_of(route, place, name), set()).add(result)
    if "--print" in sys.argv:
        for row, results in sorted(seen.items()):
            print(f"| {' | '.join(row)} | {' / '.join(sorted(results))} |")
        return
    rows = expected_rows()
    passed = 0
    for row, results in sorted(seen.items()):
        if results == {rows.get(row)}:
            passed += 1
        else:
            problems.append(f"{' '.join(row)}: docs/fields.md says {rows.get(row)}, the gateway: {'; '.join(sorted(results))}")
    problems.extend(f"{' '.join(row)}: in docs/fields.md, and no SDK sends it" for row in rows if row not in seen)
    for problem in problems:
        print(f"FAILED {problem}")
    print(f"{passed} passed, {len(problems)} failed")
    sys.exit(bool(problems))


main()
