// The official LangGraph SDK for JavaScript against a live gateway: threads, runs, streams, state, history.
//
// Every check is named after what it shows; the output is one line per check and a final count.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { createServer as createHttpServer } from "node:http";
import { createServer, connect } from "node:net";

import { Client } from "@langchain/langgraph-sdk";

const QUESTION = { messages: [{ role: "user", content: "Hello there" }] };
const gateway = process.argv[2];
const at = (url) => new Client({ apiUrl: `${url}/api`, callerOptions: { maxRetries: 0 } });
const client = at(gateway);
const checks = {};

const types = (values) => values.messages.map((message) => message.type);
const collect = async (stream) => {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
};
const threadWithATurn = async () => {
  const { thread_id } = await client.threads.create();
  await client.runs.wait(thread_id, "lead_agent", { input: QUESTION });
  return thread_id;
};
const refused = (status, promise) => assert.rejects(promise, (error) => error.status === status);

checks["a thread is created, read, searched, patched and deleted"] = async () => {
  const marker = randomUUID();
  const { thread_id, status } = await client.threads.create({ metadata: { marker } });
  assert.equal(status, "idle");
  assert.equal((await client.threads.get(thread_id)).thread_id, thread_id);
  const found = await client.threads.search({ metadata: { marker } });
  assert.deepEqual(found.map((thread) => thread.thread_id), [thread_id]);
  const patched = await client.threads.update(thread_id, { metadata: { more: 1 } });
  assert.deepEqual(patched.metadata, { marker, more: 1 });
  await client.threads.delete(thread_id);
  await refused(404, client.threads.get(thread_id));
};

checks["waiting for a run returns the final values"] = async () => {
  const { thread_id } = await client.threads.create();
  const values = await client.runs.wait(thread_id, "lead_agent", { input: QUESTION });
  assert.deepEqual(types(values), ["human", "ai"]);
  assert.ok(values.title);
};

checks["a stream shows metadata, values and message chunks"] = async () => {
  const { thread_id } = await client.threads.create();
  const created = [];
  const parts = await collect(client.runs.stream(thread_id, "lead_agent", {
    input: QUESTION,
    streamMode: ["values", "messages-tuple", "updates"],
    onRunCreated: (run) => created.push(run),
  }));
  assert.equal(parts[0].event, "metadata");
  assert.ok(!parts.some((part) => part.event === "error"));
  assert.equal(created[0].run_id, parts[0].data.run_id);
  const answer = parts.filter((part) => part.event === "values").at(-1).data.messages.at(-1);
  const chunks = parts.filter((part) => part.event === "messages").map((part) => part.data[0]);
  const text = chunks.filter((chunk) => chunk.id === answer.id).map((chunk) => chunk.content).join("");
  assert.ok(text !== "" && text === answer.content);
};

checks["a background run is joined, listed and read"] = async () => {
  const { thread_id } = await client.threads.create();
  const run = await client.runs.create(thread_id, "lead_agent", { input: QUESTION });
  const values = await client.runs.join(thread_id, run.run_id);
  assert.equal(values.messages.at(-1).type, "ai");
  assert.equal((await client.runs.get(thread_id, run.run_id)).status, "success");
  assert.deepEqual((await client.runs.list(thread_id)).map((run) => run.run_id), [run.run_id]);
};

checks["runs that are enqueued follow each other"] = async () => {
  const { thread_id } = await client.threads.create();
  const options = { input: QUESTION, multitaskStrategy: "enqueue" };
  const runs = [];
  for (let n = 0; n < 3; n += 1) runs.push(await client.runs.create(thread_id, "lead_agent", options));
  await client.runs.join(thread_id, runs[2].run_id);
  const { values } = await client.threads.getState(thread_id);
  assert.deepEqual(types(values), ["human", "ai", "human", "ai", "human", "ai"]);
};

checks["stateless runs need no thread"] = async () => {
  const values = await client.runs.wait(null, "lead_agent", { input: QUESTION });
  assert.equal(values.messages.at(-1).type, "ai");
  const names = (await collect(client.runs.stream(null, "lead_agent", { input: QUESTION }))).map((part) => part.event);
  assert.equal(names[0], "metadata");
};

checks["the state is read, updated and forked"] = async () => {
  const thread_id = await threadWithATurn();
  const before = await client.threads.getState(thread_id);
  await client.threads.updateState(thread_id, { values: { title: "Renamed" } });
  const after = await client.threads.getState(thread_id);
  assert.equal(after.values.title, "Renamed");
  assert.deepEqual(after.values.messages, before.values.messages);
  assert.equal(after.parent_checkpoint.checkpoint_id, before.checkpoint.checkpoint_id);
  const fork = await client.threads.updateState(thread_id, {
    values: { title: "Fork" },
    checkpointId: before.checkpoint.checkpoint_id,
  });
  const head = await client.threads.getState(thread_id);
  assert.equal(head.checkpoint.checkpoint_id, fork.checkpoint.checkpoint_id);
  assert.equal((await client.threads.getState(thread_id, after.checkpoint.checkpoint_id)).values.title, "Renamed");
};

checks["history is newest first and pages"] = async () => {
  const thread_id = await threadWithATurn();
  const history = await client.threads.getHistory(thread_id, { limit: 100 });
  const ids = history.map((entry) => entry.checkpoint.checkpoint_id);
  assert.ok(ids.length >= 4);
  assert.deepEqual(ids, [...ids].sort().reverse());
  const page = await client.threads.getHistory(thread_id, { limit: 100, before: { configurable: history[1].checkpoint } });
  assert.deepEqual(page.map((entry) => entry.checkpoint.checkpoint_id).slice(-1), ids.slice(-1));
};

checks["a breakpoint is resumed with a value"] = async () => {
  const { thread_id } = await client.threads.create();
  await client.runs.wait(thread_id, "lead_agent", { input: QUESTION, interruptBefore: ["model"] });
  assert.deepEqual((await client.threads.getState(thread_id)).next, ["model"]);
  const values = await client.runs.wait(thread_id, "lead_agent", { command: { resume: { approved: true } } });
  assert.deepEqual(types(values), ["human", "ai"]);
  await refused(409, client.runs.create(thread_id, "lead_agent", { command: { resume: "blue" } }));
};

// A proxy that cuts its first connection after the given number of bytes of the answer, and no other.
const cutting = async (bytes) => {
  const open = new Set();
  let left = bytes;
  let connections = 0;
  const proxy = createServer((near) => {
    connections += 1;
    const far = connect(Number(new URL(gateway).port), new URL(gateway).hostname);
    for (const socket of [near, far]) {
      open.add(socket);
      socket.on("error", () => {}).on("close", () => open.delete(socket));
    }
    near.pipe(far);
    const end = left;
    let passed = 0;
    far.on("data", (data) => {
      near.write(data.subarray(0, end - passed));
      passed += data.length;
      if (passed >= end) near.end(() => far.destroy());
    });
    far.on("end", () => near.end());
    left = Infinity;
  });
  await new Promise((listening) => proxy.listen(0, "127.0.0.1", listening));
  const close = () => {
    proxy.close();
    for (const socket of open) socket.destroy();
  };
  return { url: `http://127.0.0.1:${proxy.address().port}`, connections: () => connections, close };
};

checks["a stream whose connection is cut goes on where it was"] = async () => {
  const { thread_id } = await client.threads.create();
  const proxy = await cutting(3000);
  try {
    const options = { input: QUESTION, streamMode: ["values", "messages-tuple"], onDisconnect: "continue" };
    const seen = await collect(at(proxy.url).runs.stream(thread_id, "lead_agent", options));
    assert.ok(proxy.connections() > 1, "the client came back");
    const ids = (parts) => [...new Set(parts.map((part) => part.id).filter(Boolean))];
    const { run_id } = seen[0].data;
    const whole = await collect(client.runs.joinStream(thread_id, run_id, { lastEventId: seen[0].id }));
    assert.deepEqual(ids(seen), ids([seen[0], ...whole]), "nothing is missing, nothing comes twice");
    const { values } = await client.threads.getState(thread_id);
    assert.deepEqual(types(values), ["human", "ai"]);
  } finally {
    proxy.close();
  }
};

// A proxy that counts POST requests, and answers the first with a 500 after the gateway has carried it out.
const losing = async (lost) => {
  let posts = 0;
  const proxy = createHttpServer(async (request, response) => {
    const parts = [];
    for await (const part of request) parts.push(part);
    const { host, connection, "content-length": length, ...headers } = request.headers;
    const body = parts.length ? Buffer.concat(parts) : undefined;
    const answer = await fetch(`${gateway}${request.url}`, { method: request.method, headers, body });
    const text = await answer.text();
    if (request.method === "POST") posts += 1;
    const status = request.method === "POST" && posts <= lost ? 500 : answer.status;
    response.writeHead(status, { "content-type": answer.headers.get("content-type") ?? "text/plain" }).end(text);
  });
  await new Promise((listening) => proxy.listen(0, "127.0.0.1", listening));
  return { url: `http://127.0.0.1:${proxy.address().port}`, posts: () => posts, close: () => proxy.close() };
};

checks["a request whose answer is lost is repeated and creates one run"] = async () => {
  const { thread_id } = await client.threads.create();
  const proxy = await losing(1);
  try {
    // With the SDK's defaults: it retries by itself.
    const headers = { "Idempotency-Key": randomUUID() };
    const retrying = new Client({ apiUrl: `${proxy.url}/api`, defaultHeaders: headers });
    const run = await retrying.runs.create(thread_id, "lead_agent", { input: QUESTION });
    assert.equal(proxy.posts(), 2);
    await client.runs.join(thread_id, run.run_id);
    assert.deepEqual((await client.runs.list(thread_id)).map((run) => run.run_id), [run.run_id]);
    assert.deepEqual(types((await client.threads.getState(thread_id)).values), ["human", "ai"]);
  } finally {
    proxy.close();
  }
};

checks["what is refused for good is asked once"] = async () => {
  const { thread_id } = await client.threads.create();
  const proxy = await losing(0);
  try {
    const retrying = new Client({ apiUrl: `${proxy.url}/api` });
    const create = (thread, options) => retrying.runs.create(thread, "lead_agent", { input: QUESTION, ...options });
    await refused(404, create(randomUUID(), {}));
    await refused(404, create(thread_id, { checkpointId: "0199aaaa-0000-7000-8000-000000000000" }));
    await refused(400, create(thread_id, { context: { model_name: "unknown" } }));
    await refused(409, create(thread_id, { input: undefined, command: { resume: "yes" } }));
    await refused(422, create(thread_id, { multitaskStrategy: "whatever" }));
    assert.equal(proxy.posts(), 5, "one request each");
    assert.deepEqual(await client.runs.list(thread_id), []);
  } finally {
    proxy.close();
  }
};

checks["threads are counted and copied"] = async () => {
  const thread_id = await threadWithATurn();
  await client.threads.copy(thread_id);
  assert.ok((await client.threads.search({ limit: 100 })).length >= 2);
};

checks["the lead agent is the assistant"] = async () => {
  const found = await client.assistants.search();
  assert.deepEqual(found.map((assistant) => assistant.graph_id), ["lead_agent"]);
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok    ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL  ${name}`);
    console.log(error.stack ?? error);
  }
}
console.log(`\n${Object.keys(checks).length - failed} passed, ${failed} failed`);
process.exitCode = failed ? 1 : 0;
