// What the official LangGraph SDK for JavaScript can send: calls every method of its clients with every property that it
// reads of its options, and prints the requests as JSON lines. Nothing is sent.
//
// A method or a property that is not known here fails, so that a new one of a newer SDK is not overlooked.

import { Client } from "@langchain/langgraph-sdk";

// The value of each property of options; those that stay in the client are null.
const VALUES = {
  afterSeconds: 1, asNode: "model", assistantId: "$ASSISTANT", cancelOnDisconnect: true, checkpoint: { checkpoint_id: "$CHECKPOINT" },
  checkpointDuring: true, checkpointId: "$CHECKPOINT", command: { update: { title: "T" } }, config: {}, context: {},
  deleteThreads: true, description: "d", durability: "sync", enabled: true, endTime: "2030-01-01T00:00:00Z",
  feedbackKeys: ["k"], filter: {}, graphId: "lead_agent", ids: ["$THREAD"], ifExists: "do_nothing", ifNotExists: "create",
  includePagination: null, index: ["a"], input: { messages: [] }, interruptAfter: ["tools"], interruptBefore: ["model"],
  lastEventId: null, limit: 3, maxDepth: 2, metadata: {}, multitaskStrategy: "enqueue", name: "n", namespace: "ns",
  offset: 1, onCompletion: "complete", onDisconnect: "continue", onRunCompleted: "keep", onRunCreated: null,
  prefix: ["a"], query: "q", raiseError: null, recurse: true, refreshTtl: true, schedule: "* * * * *", select: ["$SELECT"],
  signal: null, sortBy: "created_at", sortOrder: "asc", status: "$STATUS", streamMode: ["values"], streamResumable: true,
  streamSubgraphs: true, subgraphs: true, suffix: ["a"], supersteps: [], threadId: "$THREAD", ttl: 3, values: { title: "T" },
  webhook: "https://example.org", xray: true, before: "$CHECKPOINT",
  _langsmithTracer: { projectName: "p", exampleId: "e" },
};
// The arguments of each method; OPTIONS is the object whose properties are tried.
const OPTIONS = Symbol("options");
const METHODS = {
  assistants: {
    get: ["$ASSISTANT", OPTIONS], getGraph: ["$ASSISTANT", OPTIONS], getSchemas: ["$ASSISTANT", OPTIONS],
    getSubgraphs: ["$ASSISTANT", OPTIONS], create: [OPTIONS], update: ["$ASSISTANT", OPTIONS],
    delete: ["$ASSISTANT", OPTIONS], search: [OPTIONS], count: [OPTIONS], getVersions: ["$ASSISTANT", OPTIONS],
    setLatest: ["$ASSISTANT", 1, OPTIONS],
  },
  threads: {
    get: ["$THREAD", OPTIONS], create: [OPTIONS], copy: ["$THREAD", OPTIONS], update: ["$THREAD", OPTIONS],
    delete: ["$THREAD", OPTIONS], search: [OPTIONS], count: [OPTIONS], getState: ["$THREAD", undefined, OPTIONS],
    updateState: ["$THREAD", OPTIONS], patchState: ["$THREAD", {}, OPTIONS], getHistory: ["$THREAD", OPTIONS],
    joinStream: ["$THREAD", OPTIONS],
  },
  runs: {
    stream: ["$THREAD", "$ASSISTANT", OPTIONS], create: ["$THREAD", "$ASSISTANT", OPTIONS],
    createBatch: [[OPTIONS]], wait: ["$THREAD", "$ASSISTANT", OPTIONS], list: ["$THREAD", OPTIONS],
    get: ["$THREAD", "$RUN", OPTIONS], cancel: ["$THREAD", "$RUN", true, "interrupt", OPTIONS],
    join: ["$THREAD", "$RUN", OPTIONS], joinStream: ["$THREAD", "$RUN", OPTIONS], delete: ["$THREAD", "$RUN", OPTIONS],
  },
  crons: {
    createForThread: ["$THREAD", "$ASSISTANT", OPTIONS], create: ["$ASSISTANT", OPTIONS], update: ["$CRON", OPTIONS],
    delete: ["$CRON", OPTIONS], search: [OPTIONS], count: [OPTIONS],
  },
  store: {
    putItem: [["a"], "key", {}, OPTIONS], getItem: [["a"], "key", OPTIONS], deleteItem: [["a"], "key"],
    searchItems: [["a"], OPTIONS], listNamespaces: [OPTIONS],
  },
};

const unknown = new Set();
const options = new Proxy({}, {
  get(_, name) {
    if (typeof name !== "string" || name === "then" || name === "toJSON" || name === "configurable") return undefined;
    if (!(name in VALUES)) unknown.add(name);
    return VALUES[name] ?? undefined;
  },
  // For a method that copies its options.
  ownKeys: () => ["assistantId", "input", "streamMode"],
  getOwnPropertyDescriptor: (_, name) => ({ enumerable: true, configurable: true, value: VALUES[name] }),
});

const fill = (value) => (value === OPTIONS ? options : Array.isArray(value) ? value.map(fill) : value);
let sent;
const fetch = async (url, init) => {
  const { pathname, searchParams } = new URL(url);
  sent = {
    method: init.method ?? "GET", path: decodeURIComponent(pathname), query: Object.fromEntries(searchParams),
    body: init.body === undefined ? null : JSON.parse(init.body),
  };
  const stream = pathname.endsWith("/stream") || init.headers?.accept === "text/event-stream";
  if (stream) return new Response("event: end\ndata: null\n\n", { headers: { "content-type": "text/event-stream" } });
  return new Response(pathname.endsWith("/search") && pathname.includes("store") ? '{"items":[]}' : "{}");
};

const client = new Client({ apiUrl: "http://sdk", apiKey: null, callerOptions: { fetch, maxRetries: 0 } });
for (const [group, methods] of Object.entries(METHODS)) {
  const names = Object.getOwnPropertyNames(Object.getPrototypeOf(client[group]));
  for (const name of names.filter((name) => name !== "constructor" && !(name in methods))) unknown.add(`${group}.${name}`);
  for (const [name, args] of Object.entries(methods)) {
    sent = undefined;
    const answer = client[group][name](...args.map(fill));
    if (answer?.[Symbol.asyncIterator]) for await (const _ of answer);
    else await answer;
    console.log(JSON.stringify({ call: `${group}.${name}`, ...sent }));
  }
}
if (unknown.size) {
  console.error(`not known to sdk_fields.mjs: ${[...unknown].join(", ")}`);
  process.exit(1);
}
