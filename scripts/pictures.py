"""Pictures of every place of the page, and how soon each is painted.

A gateway with a scripted model serves threads that this makes: a conversation with branches and delegations, a batch, a
question, a long thread. Chromium opens each place in a wide and a narrow window, light and dark. The pictures are in
target/pictures; with --docs those that the README shows are renewed as well. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / os.environ.get("CARGO_TARGET_DIR", "target")
WIDE, NARROW = 1120, 400
# How often a place is opened for its times; the first time is not counted.
OPENED = 7
# The pictures that the README shows: their name in docs/pictures, the place.
SHOWN = {"conversation": "conversation", "checkpoints": "checkpoints", "storage": "storage with a plan"}


def task(what: str) -> dict:
    prompt = f"Find out what {what} costs a turn, and say which figures decide."
    return {"name": "task", "args": {"description": what, "prompt": prompt, "subagent_type": "general-purpose"}}


def item(key: str) -> dict:
    return {"key": key, "prompt": f"Read the report of {key}."}


BATCH = {"name": "batch_task", "args": {"title": "Reports of the week", "subagent_type": "general-purpose",
         "items": [item("monday"), item("tuesday"), item("wednesday"), item("thursday")]}}
QUESTION = {"name": "ask_clarification", "args": {"question": "Which of them may be deleted?", "options": ["Drafts", "All but the last"]}}
USAGE = {"input_tokens": 612, "output_tokens": 44}
SCRIPT = {"rules": [
    {"when": {"caller": "middleware"}, "answers": [{"text": "Which store for the ledger?"}]},
    {"when": {"caller": "subagent", "contains": ["thursday"]}, "answers": [{"text": "never", "gate": {"name": "shut"}}]},
    {"when": {"caller": "subagent", "contains": ["wednesday"]}, "answers": [{"error": {"kind": "fatal", "message": "the report of wednesday is empty"}}]},
    {"when": {"caller": "subagent"}, "answers": [
        {"text": "I look at what is measured.", "tool_calls": [{"name": "ls", "args": {}}], "delay_ms": 300, "usage": USAGE},
        {"text": "One flush a turn decides: 1.1 ms on this disk, whatever the size.", "usage": USAGE}]},
    {"when": {"contains": ["compare"]}, "answers": [
        {"text": "I will have the two looked at side by side, and write down what decides.",
         "tool_calls": [task("SQLite with group commit"), task("Postgres at one millisecond")], "usage": USAGE},
        {"text": "SQLite: one flush a turn, no network. Postgres waits for the network as well; it pays off once several machines write.\n\n"
                 "So:\n\n```\none machine    SQLite\nseveral        Postgres\n```\n", "usage": USAGE}]},
    {"when": {"contains": ["read the reports"]}, "answers": [{"text": "One agent for each.", "tool_calls": [BATCH]}, {"text": "They are being read."}]},
    {"when": {"contains": ["clean up"]}, "answers": [{"text": "I ask first.", "tool_calls": [QUESTION]}]},
    {"answers": [{"text": "Noted: {{input}}", "usage": USAGE}]},
]}


class Gateway:
    def __init__(self, binary: str, directory: str) -> None:
        Path(directory, "script.json").write_text(json.dumps(SCRIPT))
        config = {
            "config_version": 49,
            "database": {"backend": "sqlite"},
            "run_events": {"backend": "db"},
            "subagent_batches": {"enabled": True, "poll_interval_seconds": 0.1, "max_attempts": 1},
            "models": [{"name": "demo", "use": "scripted", "model": "demo", "script": "script.json"}],
        }
        Path(directory, "config.yaml").write_text(json.dumps(config))
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SVC_", "GATEWAY_"))}
        env["SVC_HOME"] = str(Path(directory, "state"))
        self.process = subprocess.Popen([binary, "serve", "--port", "0"], cwd=directory, env=env, stderr=subprocess.PIPE, text=True)
        said = []
        for line in self.process.stderr:
            said.append(line)
            if found := re.search(r"serving on (http[^, ]*)", line):
                self.url = found[1]
                break
        else:
            sys.exit("the gateway did not start:\n" + "".join(said))

    def post(self, path: str, body: dict) -> dict:
        return call(self.url + path, body)

    def turn(self, thread: str, text: str, wait: bool = True, **more: object) -> dict:
        body = {"assistant_id": "lead_agent", "input": {"messages": [{"type": "human", "content": text}]}, **more}
        return self.post(f"/api/threads/{thread}/runs{'/wait' if wait else ''}", body)

    def head(self, thread: str) -> str:
        return call(f"{self.url}/api/threads/{thread}/state")["checkpoint"]["checkpoint_id"]


# The proxy of the environment does not know this machine's servers.
urllib.request.install_opener(urllib.request.build_opener(urllib.request.ProxyHandler({})))


def call(url: str, body: dict | None = None, method: str | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=600) as answer:
        text = answer.read()
    return json.loads(text) if text else {}


class Browser:
    def __init__(self, directory: str) -> None:
        missing = [package for package, command in [("chromium", "chromium"), ("chromium-driver", "chromedriver")] if not which(command)]
        if missing:
            subprocess.run([ROOT / "scripts/install.sh", *missing], check=True)
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        port = next(found[1] for line in self.driver.stdout if (found := re.search(r"started successfully on port (\d+)", line)))
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
                     "--disable-background-networking", f"--user-data-dir={directory}/profile"]
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": {"args": arguments}}}}
        base = f"http://127.0.0.1:{port}/session"
        self.session = f"{base}/{call(base, wanted)['value']['sessionId']}"

    def cdp(self, name: str, **params: object) -> dict:
        return call(f"{self.session}/goog/cdp/execute", {"cmd": name, "params": params})["value"]

    def value(self, script: str) -> object:
        body = {"script": f"return (async () => {{ {script} }})()", "args": []}
        return call(f"{self.session}/execute/sync", body)["value"]

    def open(self, url: str, width: int, height: int, scheme: str) -> None:
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width == NARROW)
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        call(f"{self.session}/url", {"url": url})

    def picture(self, path: Path, whole: bool) -> None:
        taken = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def quit(self) -> None:
        call(self.session, method="DELETE")
        self.driver.terminate()
        self.driver.wait()


def which(command: str) -> bool:
    return any(Path(place, command).exists() for place in os.environ["PATH"].split(":"))


def fill(gateway: Gateway) -> dict[str, str]:
    """Makes the threads; returns the path of each place."""
    ledger = gateway.post("/api/threads", {"thread_id": "ledger"})["thread_id"]
    gateway.turn(ledger, "Which store for a ledger of conversations?")
    first = gateway.head(ledger)
    gateway.turn(ledger, "Assume three machines.")
    branch = {"checkpoint": {"checkpoint_id": first}}
    gateway.turn(ledger, "Assume a laptop.", **branch)
    gateway.turn(ledger, "And a slow disk.")
    gateway.turn(ledger, "Assume one machine with 64 clients.", **branch)
    gateway.turn(ledger, "Please compare the two for us.", context={"subagent_enabled": True})
    week = gateway.post("/api/threads", {"thread_id": "reports"})["thread_id"]
    gateway.turn(week, "Please read the reports of the week.", context={"subagent_enabled": True})
    asked = gateway.post("/api/threads", {"thread_id": "attic"})["thread_id"]
    gateway.turn(asked, "Please clean up the attic.")
    say = lambda at: {"type": "human" if at % 2 == 0 else "ai", "id": f"m{at}", "content": f"message {at}"}
    steps = [{"updates": [{"as_node": "model", "values": {"messages": [say(at)]}}]} for at in range(10_000)]
    long = gateway.post("/api/threads", {"thread_id": "long", "supersteps": steps})["thread_id"]

    history = gateway.post(f"/api/threads/{ledger}/history", {"limit": 30})
    ids = [found["checkpoint"]["checkpoint_id"] for found in history]
    runs = call(f"{gateway.url}/api/threads/{ledger}/runs")
    places = {
        "threads": "/",
        "conversation": f"/threads/{ledger}",
        "checkpoints": f"/threads/{ledger}/checkpoints",
        "state": f"/threads/{ledger}/checkpoints/{ids[0]}",
        "difference": f"/threads/{ledger}/diff?a={ids[8]}&b={ids[0]}",
        "storage": f"/threads/{ledger}/storage",
        "storage with a plan": f"/threads/{ledger}/storage?keep=latest",
        "runs": f"/threads/{ledger}/runs",
        "run": f"/threads/{ledger}/runs/{runs[0]['run_id']}",
        "deletion": f"/threads/{ledger}/delete",
        "question": f"/threads/{asked}",
        "batch": "",
        "execution": "",
        "long thread": f"/threads/{long}",
        "its checkpoints": f"/threads/{long}/checkpoints",
        "runs of all threads": "/runs",
        "status": "/status",
    }
    return places


def link(browser: Browser, page: str, pattern: str) -> str:
    """The first link of a page that matches."""
    browser.open(page, WIDE, 900, "light")
    found = browser.value(f"return [...document.querySelectorAll('a')].map((a) => a.getAttribute('href')).find((to) => /{pattern}/.test(to))")
    if not found:
        sys.exit(f"{page} has no link to {pattern}")
    return str(found)


def bytes_of(url: str) -> int:
    with urllib.request.urlopen(url, timeout=600) as answer:
        return len(answer.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", default=os.environ.get("THREADKEEP_BINARY", str(TARGET / "release/threadkeep")))
    parser.add_argument("--docs", action="store_true", help="renew the pictures that the README shows")
    arguments = parser.parse_args()
    out = TARGET / "pictures"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        gateway = Gateway(str(Path(arguments.binary).resolve()), directory)
        browser = None
        try:
            browser = Browser(directory)
            places = fill(gateway)
            places["batch"] = link(browser, f"{gateway.url}/threads/reports/runs", "batches")
            places["execution"] = link(browser, gateway.url + places["conversation"], "executions")
            print(f"{'place':<22} {'page':>9} {'answered':>10} {'painted':>9}   (bytes as sent; medians of {OPENED - 1}, ms from the request)")
            for name, path in places.items():
                times = []
                for _ in range(OPENED):
                    browser.open(gateway.url + path, WIDE, 900, "light")
                    times.append(browser.value(
                        "let paint; for (const start = Date.now(); !paint && Date.now() - start < 10000;) {"
                        " await new Promise((done) => setTimeout(done, 10));"
                        " paint = performance.getEntriesByName('first-contentful-paint')[0]?.startTime; }"
                        " return [performance.getEntriesByType('navigation')[0].responseEnd, paint];"))
                answered, painted = (statistics.median(column) for column in zip(*times[1:]))
                print(f"{name:<22} {bytes_of(gateway.url + path) / 1000:>6.1f} kB {answered:>10.1f} {painted:>9.1f}", flush=True)
                for width in (WIDE, NARROW):
                    for scheme in ("light", "dark"):
                        browser.open(gateway.url + path, width, 900, scheme)
                        file = f"{name.replace(' ', '-')}-{'wide' if width == WIDE else 'narrow'}-{scheme}.png"
                        browser.picture(out / file, whole=not name.startswith(("long", "its")))
            if arguments.docs:
                for file, name in SHOWN.items():
                    browser.open(gateway.url + places[name], WIDE, 800, "light")
                    browser.picture(ROOT / "docs/pictures" / f"{file}.png", whole=True)
        finally:
            gateway.process.terminate()
            gateway.process.wait()
            if browser:
                browser.quit()
    print(f"pictures in {out}")


if __name__ == "__main__":
    main()
