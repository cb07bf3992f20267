#!/usr/bin/env python3
"""Three Postgres servers under Patroni with etcd, two gateways, clients that stream: what a crash costs, and what it loses.

    scripts/patroni.py [ROUNDS] [--untimed]

Each round crashes the primary, switches over, and loses the primary's machine, while six clients take turns at two gateways.
Prints how long it took from each event until a turn that began after it was acknowledged. Fails if an acknowledged turn is
missing, is there twice or in another order, or if writes did not go on in time: 5 s after a crash, ttl + 3 s after a lost
machine. With --untimed, the times are printed only. THREADKEEP_BINARY names a binary that is already built. On Debian:
apt-get install postgresql patroni etcd-server."""

import glob
import http.client
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

TTL, CRASH_LIMIT, LOST_LIMIT = 20, 5, 23
CLIENTS, NODES = 6, 3
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROCESSES = []


def port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def need(name, places=()):
    found = shutil.which(name) or next((path for place in places for path in glob.glob(f"{place}/{name}")), None)
    if not found:
        sys.exit(f"{name} is missing: apt-get install postgresql patroni etcd-server")
    return found


def start(home, name, command, env=None, user=None):
    log = open(f"{home}/{name}.log", "ab")
    process = subprocess.Popen(
        command, stdout=log, stderr=log, cwd=home, env={**os.environ, **(env or {})}, user=user, start_new_session=True
    )
    PROCESSES.append(process)
    return process


def until(what, holds, seconds=600):
    end = time.time() + seconds
    while time.time() < end:
        if holds():
            return
        time.sleep(0.1)
    sys.exit(f"not within {seconds} s: {what}")


def answer(address, method, path, body=None, timeout=30):
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None, {"content-type": "application/json"})
        got = connection.getresponse()
        return got.status, got.read()
    finally:
        connection.close()


class Cluster:
    def __init__(self, home):
        self.home = home
        self.user = "postgres" if os.getuid() == 0 else None
        self.etcd, self.api = port(), [port() for _ in range(NODES)]
        self.sql = [port() for _ in range(NODES)]
        self.patroni = [None] * NODES
        self.bin = os.path.dirname(need("pg_controldata", sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True)))
        start(home, "etcd", [
            need("etcd"), "--data-dir", f"{home}/etcd", "--listen-client-urls", f"http://127.0.0.1:{self.etcd}",
            "--advertise-client-urls", f"http://127.0.0.1:{self.etcd}", "--listen-peer-urls", f"http://127.0.0.1:{port()}",
        ], user=self.user)
        for node in range(NODES):
            self.start(node)
        until("a primary and two standbys", lambda: self.healthy())

    def start(self, node):
        settings = {
            "scope": "threads", "name": f"node{node}",
            "restapi": {"listen": f"127.0.0.1:{self.api[node]}", "connect_address": f"127.0.0.1:{self.api[node]}"},
            "etcd3": {"hosts": f"127.0.0.1:{self.etcd}"},
            "bootstrap": {
                "dcs": {
                    "ttl": TTL, "loop_wait": 5, "retry_timeout": 5, "synchronous_mode": True,
                    "synchronous_mode_strict": True,
                    "postgresql": {
                        "use_pg_rewind": True,
                        "parameters": {"wal_retrieve_retry_interval": "100ms", "shared_buffers": "32MB", "max_connections": 100},
                    },
                },
                "initdb": ["data-checksums", {"encoding": "UTF8"}],
                "pg_hba": ["host all all 127.0.0.1/32 scram-sha-256", "host replication all 127.0.0.1/32 scram-sha-256"],
            },
            "postgresql": {
                "listen": f"127.0.0.1:{self.sql[node]}", "connect_address": f"127.0.0.1:{self.sql[node]}",
                "data_dir": f"{self.home}/data{node}", "bin_dir": self.bin, "pgpass": f"{self.home}/pgpass{node}",
                "parameters": {"unix_socket_directories": self.home},
                "authentication": {
                    name: {"username": user, "password": "a-password"}
                    for name, user in [("superuser", "postgres"), ("replication", "replica"), ("rewind", "rewind")]
                },
            },
        }
        path = f"{self.home}/node{node}.yml"
        with open(path, "w") as file:
            json.dump(settings, file)  # JSON is YAML.
        self.patroni[node] = start(self.home, f"node{node}", [need("patroni"), path], user=self.user)

    def members(self):
        for api in self.api:
            try:
                status, body = answer(f"127.0.0.1:{api}", "GET", "/cluster", timeout=2)
                if status == 200:
                    return json.loads(body)["members"]
            except OSError:
                pass
        return []

    def primary(self):
        for node in range(NODES):
            try:
                if answer(f"127.0.0.1:{self.api[node]}", "GET", "/primary", timeout=2)[0] == 200:
                    return node
            except OSError:
                pass
        return None

    def healthy(self):
        members = self.members()
        follow = [member for member in members if member["state"] in ("running", "streaming") and member.get("lag", 1) == 0]
        synchronous = any(member["role"] == "sync_standby" for member in members)
        return self.primary() is not None and len(follow) == NODES - 1 and synchronous

    def server(self, node):
        with open(f"{self.home}/data{node}/postmaster.pid") as file:
            return int(file.readline())

    def kill_server(self, node):
        server = self.server(node)
        with open(f"/proc/{server}/task/{server}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        for pid in [server, *children]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def crash(self):
        self.kill_server(self.primary())

    def lose(self):
        node = self.primary()
        self.patroni[node].kill()
        self.patroni[node].wait()
        self.kill_server(node)
        return node

    def switch(self):
        node = self.primary()
        _, said = answer(f"127.0.0.1:{self.api[node]}", "POST", "/switchover", {"leader": f"node{node}"}, timeout=60)
        until(f"another primary after a switchover ({said!r})", lambda: self.primary() not in (None, node))

    def url(self):
        hosts = ",".join(f"127.0.0.1:{sql}" for sql in self.sql)
        return f"postgres://postgres:a-password@{hosts}/postgres?target_session_attrs=read-write"


class Client(threading.Thread):
    """Takes turns on a thread of its own, at one gateway after the other."""

    def __init__(self, n, gateways):
        super().__init__(daemon=True)
        self.name, self.gateways = f"t{n}", gateways
        self.acknowledged, self.times, self.wrong, self.refused, self.done = [], [], [], {}, False

    def run(self):
        n = 0
        while not self.done:
            n += 1
            began, text = time.time(), f"q{n}"
            try:
                self.turn(self.gateways[n % len(self.gateways)], text, began)
            except (OSError, http.client.HTTPException) as error:
                self.count(type(error).__name__)
                time.sleep(0.1)
            except Exception as error:  # An answer that cannot be read would end the thread unnoticed.
                self.wrong.append(f"{self.name}: the answer to {text}: {error!r}")
                return

    def count(self, what):
        self.refused[what] = self.refused.get(what, 0) + 1

    def turn(self, gateway, text, began):
        body = {"input": {"messages": [{"role": "user", "content": text}]}, "stream_mode": ["values"]}
        path = f"/api/threads/{self.name}/runs/stream"
        status, stream = answer(gateway, "POST", path, body, timeout=60)
        if status != 200:
            self.count(status)
            time.sleep(0.1)
            return
        events, values = [], None
        for frame in stream.decode().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in frame.splitlines() if ": " in line)
            if "event" in lines:
                events.append(lines["event"])
                if lines["event"] == "values":
                    values = json.loads(lines["data"])
        if "error" in events or not events or events[-1] != "end" or values is None:
            self.count("failed run" if "error" in events else "cut stream")
            return
        asked = [m["content"] for m in values["messages"] if m["type"] == "human"]
        if asked[-1:] != [text] or not is_within(self.acknowledged, asked):
            self.wrong.append(f"{self.name}: the answer to {text} shows {asked[-5:]}")
        self.acknowledged.append(text)
        self.times.append((began, time.time()))


def is_within(wanted, found):
    rest = iter(found)
    return len(set(found)) == len(found) and all(text in rest for text in wanted)


def main(rounds, untimed):
    home = tempfile.mkdtemp(prefix="threadkeep-patroni-")
    if os.getuid() == 0:
        os.chown(home, pwd.getpwnam("postgres").pw_uid, -1)
    cluster = Cluster(home)
    binary = os.environ.get("THREADKEEP_BINARY")
    if not binary:
        subprocess.check_call(["cargo", "build", "--locked", "-q", "-p", "threadkeep-gateway"], cwd=ROOT)
        binary = os.path.join(os.environ.get("CARGO_TARGET_DIR", f"{ROOT}/target"), "debug/threadkeep")
    with open(f"{home}/config.yaml", "w") as file:
        file.write("config_version: 49\ndatabase:\n  backend: postgres\n  postgres_url: $DATABASE_URL\n"
                   "  checkpoint_channel_mode: delta\n  pool_size: 8\n")
    gateways = []
    for n in range(2):
        env = {"SVC_HOME": f"{home}/state{n}", "SVC_CONFIG_PATH": f"{home}/config.yaml", "DATABASE_URL": cluster.url()}
        address = f"127.0.0.1:{port()}"
        process = start(home, f"gateway{n}", [binary, "serve", "--port", address.split(":")[1]], env)

        def serves():
            if process.poll() is not None:
                sys.exit(open(f"{home}/gateway{n}.log").read())
            try:
                return answer(address, "GET", "/health", timeout=2)[0] == 200
            except OSError:
                return False

        until("a gateway", serves)
        gateways.append(address)
    clients = [Client(n, gateways) for n in range(CLIENTS)]
    for client in clients:
        status, body = answer(gateways[0], "POST", "/api/threads", {"thread_id": client.name})
        if status != 200:
            sys.exit(f"cannot create a thread: {status} {body!r}")
        client.start()
    late = []
    for _ in range(rounds):
        for name, strike, limit in [("crash", cluster.crash, CRASH_LIMIT), ("switchover", cluster.switch, None),
                                    ("lost machine", cluster.lose, LOST_LIMIT)]:
            before = sum(len(client.times) for client in clients)
            until("writes go on", lambda: sum(len(client.times) for client in clients) > before + 50)
            began = time.time()
            lost = strike()
            after = lambda: min((ended for client in clients for start, ended in list(client.times) if start >= began),
                                default=None)
            until(f"a turn is acknowledged after a {name}", lambda: after() is not None)
            took = after() - began
            print(f"{name}: {took:.1f} s, load {os.getloadavg()[0]:.0f}", flush=True)
            if limit and took > limit:
                late.append(f"{name}: {took:.1f} s instead of {limit}")
            if lost is not None:
                cluster.start(lost)
            until("all servers follow again", cluster.healthy, 300)
    for client in clients:
        client.done = True
    for client in clients:
        client.join(90)
    wrong = [text for client in clients for text in client.wrong]
    refused = {}
    for client in clients:
        for what, n in client.refused.items():
            refused[what] = refused.get(what, 0) + n
        states = [json.loads(answer(gateway, "GET", f"/api/threads/{client.name}/state")[1]) for gateway in gateways]
        asked = [[m["content"] for m in state["values"]["messages"] if m["type"] == "human"] for state in states]
        if asked[0] != asked[1]:
            wrong.append(f"{client.name}: the gateways differ")
        if not is_within(client.acknowledged, asked[0]):
            wrong.append(f"{client.name}: of {len(client.acknowledged)} acknowledged turns some are missing or there twice")
    print(f"{sum(len(client.acknowledged) for client in clients)} turns acknowledged, not acknowledged: {refused}, "
          f"{len(wrong)} wrong")
    for text in wrong + late:
        print(text)
    return home, not wrong and (untimed or not late)


if __name__ == "__main__":
    home, right = None, False
    # As Ctrl-C: the servers end with this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        rounds = [argument for argument in sys.argv[1:] if argument != "--untimed"]
        home, right = main(int(rounds[0]) if rounds else 1, "--untimed" in sys.argv)
    finally:
        for process in reversed(PROCESSES):
            try:
                os.killpg(process.pid, signal.SIGTERM)
            except ProcessLookupError:
                pass
        for process in PROCESSES:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        if right:
            shutil.rmtree(home, ignore_errors=True)
    sys.exit(0 if right else 1)
