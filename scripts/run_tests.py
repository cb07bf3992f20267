#!/usr/bin/env python3
"""Builds the tests and runs them, several programs at a time: most of them wait more than they compute.

A line per step when it ends: the result, how long it took, its CPU time, how many checks it made, its name. What a step
prints goes to a file in target/test-logs; a step that fails shows the end of its file. The last lines name every failed
test and say why it failed, then come the sums.

With --busy N they run beside N loops that never pause: no test may fail because a machine has other work. With --rounds N
everything runs N times, and with --suites only the conformance suites and the tests of the drivers.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / os.environ.get("CARGO_TARGET_DIR", "target")
LOGS = TARGET / "test-logs"

# Steps that run at the same time. Programs that wait leave the cores to others.
STREAMS = 3
# The programs that take longest. They start first, so that none of them runs alone at the end.
LONGEST = [
    "gateway-min/server/tests/http/main.rs",
    "drivers/postgres/tests/postgres/main.rs",
    "drivers/postgres/tests/conformance.rs",
    "gateway-min/records/src/lib.rs",
    "gateway-min/server/tests/process.rs",
]
# Characters of a line, and of a failed test's message: a dump may have thousands.
WIDTH = 300
# Lines of a failed step's file that are shown at once.
TAIL = 60

COUNTS = re.compile(r"^(?:test result: .*?)?(\d+) passed[,;] (\d+) failed", re.MULTILINE)
FAILED_TEST = re.compile(r"^ {4}(\S.*)$")
SECTION = re.compile(r"^---- (.+?)(?: stdout)? ----$")
# What follows a message: how to get a backtrace, or the backtrace itself.
AFTER_MESSAGE = re.compile(r"^(?:note: run with|stack backtrace:|\s+0: )")
# Of a backtrace. Where it is switched on, it would fill what is shown of a failed step.
FRAME = re.compile(r"^\s+(?:\d+: |at )")


class Step:
    """A command whose output goes to a file."""

    def __init__(self, name, command, cwd=ROOT, env=None, program=False):
        self.name = name
        self.command = command
        self.cwd = cwd
        self.env = env or {}
        # A test program without tests is not worth a line.
        self.program = program


def counts(text):
    """The sums of what programs say of themselves."""
    found = [(int(good), int(bad)) for good, bad in COUNTS.findall(text)]
    return sum(good for good, _ in found), sum(bad for _, bad in found)


def cut(line):
    return line if len(line) <= WIDTH else line[:WIDTH] + " ..."


def message(section):
    """Why a test failed: where and with which words it panicked, else what it printed last."""
    panicked = next((i for i, line in enumerate(section) if "panicked at" in line), None)
    if panicked is None:
        said = [line for line in section if line.strip()][-3:]
    else:
        said = []
        for line in section[panicked:]:
            if AFTER_MESSAGE.match(line):
                break
            said.append(line)
    return cut(" ".join(line.strip() for line in said if line.strip()))


def failures(text, status):
    """The failed tests of a step's output with their messages; the step's last words if it names none."""
    lines = text.splitlines()
    sections, names = {}, []
    current, listing = None, False
    for line in lines:
        if heading := SECTION.match(line):
            current, listing = sections.setdefault(heading[1], []), False
        elif line == "failures:":
            current, listing = None, True
        elif line.startswith("test result:"):
            current, listing = None, False
        elif current is not None:
            current.append(line)
        elif listing and (name := FAILED_TEST.match(line)):
            names.append(name[1])
    found = [(name, message(sections.get(name, []))) for name in dict.fromkeys(names)]
    if not found:
        last = " / ".join(line.strip() for line in lines if line.strip())[-WIDTH:]
        found = [(ended(status), last)]
    return found


def ended(status):
    return f"it ended with status {status}" if status >= 0 else f"it was ended by signal {-status}"


class Report:
    """Counts and prints what steps come to. Steps end in several threads."""

    def __init__(self, logs=LOGS, out=sys.stdout):
        self.logs = logs
        self.out = out
        self.lock = threading.Lock()
        self.began = time.monotonic()
        self.number = 0
        self.passed = self.failed = 0
        self.failures = []
        self.running = []
        self.children = set()
        self.stopped = False

    def run(self, step):
        """Runs a step to its end. Says whether it succeeded."""
        with self.lock:
            self.number += 1
            name = re.sub(r"[^a-zA-Z0-9]+", "-", step.name).strip("-")
            log = self.logs / f"{self.number:02}-{name}.log"
            self.running.append(step.name)
            self.show_running()
        began = time.monotonic()
        with open(log, "wb") as file:
            status, cpu = self.execute(step, file)
        seconds = time.monotonic() - began
        text = log.read_text(errors="replace")
        with self.lock:
            self.running.remove(step.name)
            if not self.stopped:
                self.end(step, status, (seconds, cpu), text, log)
            self.show_running()
        return status == 0

    def execute(self, step, file):
        """Runs a step's command. Its exit status, negative for a signal, and the CPU seconds of it and its children."""
        # A process starts under the lock: whatever stops the run either sees it or comes first.
        with self.lock:
            if self.stopped:
                return -signal.SIGTERM, 0
            try:
                child = subprocess.Popen(step.command, cwd=step.cwd, env={**os.environ, **step.env},
                                         stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
            except OSError as error:
                file.write(f"cannot run {step.command[0]}: {error}\n".encode())
                return 127, 0
            self.children.add(child.pid)
        # As `wait` would, which does not say how much CPU was used.
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        with self.lock:
            self.children.discard(child.pid)
        return child.returncode, used.ru_utime + used.ru_stime

    def end(self, step, status, took, text, log):
        good, bad = counts(text)
        if status == 0 and step.program and good + bad == 0:
            return
        # A step that fails without a count counts as one failure.
        if status != 0 and bad == 0:
            bad = 1
        self.passed += good
        self.failed += bad
        line = f"{took[0]:5.0f} s  {took[1]:5.0f} s CPU  {good:5} passed  {step.name}"
        if bad == 0:
            self.line(f"ok     {line}")
            return
        self.failures.append((step.name, log, failures(text, status)))
        self.line(f"FAILED {line}: {bad} failed; the end of {log}:")
        for line in [line for line in text.splitlines() if not FRAME.match(line)][-TAIL:]:
            self.line(f"    | {cut(line)}")

    def broke(self, step, error):
        """Counts a step whose result was lost, as with its file."""
        with self.lock:
            self.failed += 1
            self.failures.append((step.name, self.logs, [("its result is not known", cut(repr(error)))]))
            if step.name in self.running:
                self.running.remove(step.name)

    def line(self, text):
        # On a terminal the running steps are visible, and results replace them.
        clear = "\033[K" if self.out.isatty() else ""
        print(f"{clear}{text}", file=self.out, flush=True)

    def show_running(self):
        if self.out.isatty():
            print(f"... {', '.join(self.running)}"[:100], end="\033[K\r", file=self.out, flush=True)

    def stop(self):
        """Ends what runs."""
        with self.lock:
            self.stopped = True
            for pid in self.children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def sums(self):
        """The last lines. Says whether all is well."""
        if self.failures:
            self.line("\nfailed:")
        for name, log, tests in self.failures:
            self.line(f"  {name} ({log})")
            for test, why in tests:
                self.line(f"    {cut(test)}")
                self.line(f"      {why}")
        seconds = int(time.monotonic() - self.began)
        self.line(f"in {seconds // 60} min {seconds % 60} s; what each step printed is in {self.logs}")
        self.line(f"{self.passed} passed, {self.failed} failed")
        return self.failed == 0


def run_all(report, steps, streams):
    """Runs the steps in order, as many at a time as there are streams."""
    waiting = iter(steps)
    lock = threading.Lock()

    def stream():
        while not report.stopped:
            with lock:
                step = next(waiting, None)
            if step is None:
                return
            try:
                report.run(step)
            except Exception as error:  # It would end the thread, and the steps that are left would not run.
                report.broke(step, error)

    threads = [threading.Thread(target=stream, daemon=True) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        # A signal that comes just before the wait begins does not end it.
        while thread.is_alive():
            thread.join(1)


def built(lines):
    """The test programs and the gateway's binary among cargo's messages; no programs if the build failed."""
    programs, gateway, done = [], None, False
    for line in lines:
        told = json.loads(line)
        if told["reason"] == "build-finished":
            done = told["success"]
        elif told["reason"] != "compiler-artifact" or not told["executable"]:
            continue
        elif told["profile"]["test"]:
            programs.append(told)
        elif told["target"]["name"] == "threadkeep":
            gateway = told["executable"]
    return (programs, gateway) if done else ([], None)


def program_step(artifact):
    """A test program, as cargo would run it."""
    folder = Path(artifact["manifest_path"]).parent
    source = Path(artifact["target"]["src_path"]).relative_to(ROOT)
    env = {"CARGO_MANIFEST_DIR": str(folder), "CARGO_MANIFEST_PATH": artifact["manifest_path"]}
    return Step(str(source), [artifact["executable"]], folder, env, program=True)


def longest_first(programs):
    """The programs in the order in which they start."""
    names = [step.name for step in programs]
    if missing := [name for name in LONGEST if name not in names]:
        sys.exit(f"scripts/run_tests.py: LONGEST names programs that are not built: {', '.join(missing)}")
    rank = {name: number for number, name in enumerate(LONGEST)}
    return sorted(programs, key=lambda step: rank.get(step.name, len(LONGEST)))


def client_steps(gateway):
    """The tour and the SDK clients against gateways of their own."""
    env = {"THREADKEEP_BINARY": gateway}

    def against(name, mode, script, **more):
        return Step(name, ["scripts/with-gateway.sh", mode, f"scripts/{script}"], env={**env, **more})

    # The longest first.
    steps = [against("answers against the OpenAPI document", "full", "openapi-check.sh")]
    for mode in ("full", "delta"):
        steps += [
            against(f"tour, {mode} mode", mode, "tour.sh"),
            against(f"Python SDK, {mode} mode", mode, "sdk-check.sh"),
            against(f"JavaScript SDK, {mode} mode", mode, "sdk-check-js.sh"),
            against(f"useStream in React, {mode} mode", mode, "sdk-check-react.sh",
                    MODE=mode, SCRIPT="scripts/sdk_react.json"),
            against(f"useStream of @langchain/react, {mode} mode", mode, "sdk-check-react.sh",
                    MODE=mode, SCRIPT="scripts/sdk_protocol.json", PAGE="sdk_protocol"),
        ]
    steps.append(against("fields of the SDKs' requests", "full", "sdk-fields.sh"))
    steps.append(against("Python SDK with API keys", "delta", "sdk-check.sh", WITH_KEYS="1"))
    own_store = str(Path(gateway).parent / "examples" / "own_store")
    steps.append(against("Python SDK on a store of one's own", "delta", "sdk-check.sh", THREADKEEP_BINARY=own_store))
    return steps


@contextlib.contextmanager
def busy(loops):
    """Keeps the processors busy, as long as this process lives: it may be killed, or interrupted while it starts them."""
    children = []
    try:
        for _ in range(loops):
            loop = 'while kill -0 "$1"; do :; done 2> /dev/null'
            children.append(subprocess.Popen(["sh", "-c", loop, "busy", str(os.getpid())]))
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()


class Terminated(KeyboardInterrupt):
    """SIGTERM, which would end Python at once and leave what it has started."""


def terminate(*_):
    raise Terminated


def until_stopped(report, work):
    """Does the work. If it is interrupted or terminated, ends what runs; returns the exit status then."""
    signal.signal(signal.SIGTERM, terminate)
    try:
        work()
    except KeyboardInterrupt as stop:
        report.stop()
        return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
    return None


def alone(folder):
    """Locks a folder until the file that this returns is closed: of two runs each would delete the logs of the other."""
    lock = open(folder / "test-run.lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        sys.exit(f"scripts/run_tests.py: another run is at work in {folder}; wait for it, or set CARGO_TARGET_DIR")
    return lock


def main():
    arguments = argparse.ArgumentParser(description="Builds the tests and runs them.")
    arguments.add_argument("--busy", type=int, default=0, metavar="N", help="run beside N loops that never pause")
    arguments.add_argument("--rounds", type=int, default=1, metavar="N", help="how often to run everything")
    arguments.add_argument("--suites", action="store_true", help="only the conformance suites and the drivers' tests")
    given = arguments.parse_args()
    if given.rounds < 1:
        arguments.error("--rounds must be at least 1")
    os.chdir(ROOT)
    LOGS.mkdir(parents=True, exist_ok=True)
    _lock = alone(TARGET)
    for old in LOGS.iterdir():
        old.unlink()
    os.environ["CARGO_TERM_COLOR"] = "never"
    # The network may be slow. The other programs that install something are asked to try as often.
    os.environ.setdefault("CARGO_NET_RETRY", "10")
    report = Report()

    def work():
        steps = prepare(report, given.suites)
        with busy(given.busy):
            run_all(report, steps * given.rounds, STREAMS)

    if stopped := until_stopped(report, work):
        sys.exit(stopped)
    sys.exit(0 if report.sums() else 1)


def prepare(report, suites):
    """Builds the tests and installs what they need; the steps to run then, none if the tests could not be built."""
    messages = LOGS / "build.jsonl"
    build = "cargo test --workspace --locked --no-run --message-format=json-render-diagnostics"
    before = [Step("build the tests", ["sh", "-c", f"{build} > '{messages}'"])]
    if not suites:
        scripts = ("openapi-check.sh", "sdk-check-js.sh", "sdk-check-react.sh")
        clients = " && ".join(f"scripts/{script} --install" for script in scripts)
        # The clients come over the network; the build does not wait for them, nor they for it.
        before += [
            Step("install the SDKs and the tester of the document", ["sh", "-c", clients]),
            Step("the tests of this script", [sys.executable, "scripts/test_run_tests.py"]),
        ]
    run_all(report, before, len(before))
    with open(messages) as lines:
        programs, gateway = built(lines)
    if not programs:
        return []
    steps = longest_first([program_step(artifact) for artifact in programs])
    if suites:
        return [step for step in steps if step.name.startswith(("conformance/", "drivers/"))]
    python = Step("the Python package", ["scripts/python-test.sh"], env={"THREADKEEP_BINARY": gateway})
    examples = Step("examples in the documentation", ["cargo", "test", "--workspace", "--locked", "--doc"])
    return [*steps[:len(LONGEST)], python, examples, *client_steps(gateway), *steps[len(LONGEST):]]


if __name__ == "__main__":
    main()
