// The hook `useStream` of `@langchain/react`, which speaks the thread protocol, against a live gateway.
//
// Every check is named after what it shows; the output is one line per check and a final count.

import assert from "node:assert/strict";

import { JSDOM } from "jsdom";

const [gateway, mode] = process.argv.slice(2);
const { window } = new JSDOM("<main></main>", { url: gateway });
for (const [name, value] of Object.entries({ window, document: window.document, navigator: window.navigator })) {
  Object.defineProperty(globalThis, name, { value, configurable: true });
}
const { createElement, useEffect } = await import("react");
const { createRoot } = await import("react-dom/client");
const { useStream } = await import("@langchain/react");

const checks = {};
const human = (content) => ({ messages: [{ type: "human", content }] });
const texts = (page) => page.hook.messages.map((message) => message.text);

// A page that shows one conversation; `hook` is what `useStream` returned last, once its effects have run: nobody can press
// a key before, and an effect that ran after a submission would end it.
const open = (options = {}) => {
  const page = { hook: undefined, threadId: options.threadId };
  const Conversation = () => {
    const hook = useStream({
      apiUrl: `${gateway}/api`,
      assistantId: "lead_agent",
      onThreadId: (id) => { page.threadId = id; },
      ...options,
    });
    useEffect(() => { page.hook = hook; });
    return null;
  };
  const root = createRoot(document.querySelector("main").appendChild(document.createElement("div")));
  root.render(createElement(Conversation));
  page.close = () => root.unmount();
  return page;
};

const until = async (what, holds) => {
  for (const start = Date.now(); !holds();) {
    if (Date.now() - start > 600_000) assert.fail(`not within ten minutes: ${typeof what === "function" ? what() : what}`);
    await new Promise((done) => setTimeout(done, 5));
  }
};
const mounted = (page) => until("the page is shown", () => page.hook && !page.hook.isThreadLoading);
const settled = async (page, expected) => {
  const same = () => JSON.stringify(texts(page)) === JSON.stringify(expected);
  await until(
    () => `${JSON.stringify(expected)}; there is ${JSON.stringify(texts(page))}, ${page.hook.error}`,
    () => !page.hook.isLoading && same(),
  );
};
const ask = (page, text, options) => page.hook.submit(human(text), options);
// A page with two turns.
const talked = async (options) => {
  const page = open(options);
  await mounted(page);
  await ask(page, "one");
  await settled(page, ["one", "You said: one"]);
  await ask(page, "two");
  await settled(page, ["one", "You said: one", "two", "You said: two"]);
  return page;
};
const slow = "I answer in many small pieces, one after the other, until I am done.";
const begun = (page) => until("the answer has begun", () => page.hook.messages.at(-1)?.type === "ai");

checks["turns follow each other, and a second page shows them"] = async () => {
  const page = await talked();
  assert.equal(page.hook.error, undefined);
  const other = open({ threadId: page.threadId });
  await mounted(other);
  await settled(other, ["one", "You said: one", "two", "You said: two"]);
  [page, other].forEach(({ close }) => close());
};

checks["an answer grows piece by piece"] = async () => {
  const page = open();
  await mounted(page);
  const asked = ask(page, "patiently");
  const seen = new Set();
  await until("it is whole", () => {
    if (page.hook.messages.at(-1)?.type === "ai") seen.add(texts(page).at(-1));
    return seen.has(slow);
  });
  assert.ok(seen.size > 3, `${seen.size} pieces`);
  assert.deepEqual([...seen].filter((part) => !slow.startsWith(part)), []);
  await asked;
  await settled(page, ["patiently", slow]);
  page.close();
};

checks["a call of a tool is shown with its result"] = async () => {
  const page = open();
  await mounted(page);
  await ask(page, "look");
  await until("the answer", () => texts(page).at(-1) === "There is nothing." && !page.hook.isLoading);
  const [call, ...others] = page.hook.toolCalls;
  assert.deepEqual([call.name, call.id, others], ["ls", "looked", []]);
  assert.match(await call.output ?? "", /empty/);
  page.close();
};

checks["an edited question replaces its turn"] = async () => {
  const page = await talked();
  const edited = page.hook.messages[2].id;
  const history = await page.hook.client.threads.getHistory(page.threadId);
  const before = history.find(({ values }) => !values.messages.some(({ id }) => id === edited));
  await ask(page, "another", { forkFrom: before.checkpoint.checkpoint_id });
  const expected = ["one", "You said: one", "another", "You said: another"];
  // First, because the hook may take the end of the turn before for that of this one.
  await settled(page, expected);
  const other = open({ threadId: page.threadId });
  await mounted(other);
  await settled(other, expected);
  [page, other].forEach(({ close }) => close());
};

checks["a stopped answer ends, and the conversation goes on at once"] = async () => {
  const page = open();
  await mounted(page);
  const asked = ask(page, "without end");
  await begun(page);
  await page.hook.stop();
  await asked;
  assert.equal(page.hook.isLoading, false);
  await ask(page, "one");
  // The hook keeps what it has of the stopped answer behind what is in the state.
  await until("the next answer", () => texts(page).includes("You said: one") && !page.hook.isLoading);
  assert.equal(page.hook.error, undefined);
  const { client } = page.hook;
  const [next, stopped] = await client.runs.list(page.threadId);
  // The hook may take the end of the stopped run for that of the next one.
  await client.runs.join(page.threadId, next.run_id);
  assert.equal((await client.runs.get(page.threadId, next.run_id)).status, "success");
  assert.equal(stopped.status, "interrupted");
  page.close();
};

// A page that has come back in the middle of an answer, which shows that there is more to come.
const back = async () => {
  const page = open();
  await mounted(page);
  void ask(page, "patiently").catch(() => {});
  await begun(page);
  const { threadId } = page;
  page.close();
  const again = open({ threadId });
  await mounted(again);
  await begun(again);
  if (again.hook.isLoading) return again;
  // On a machine that stood still for seconds, the answer is whole by now.
  const [{ status }] = await again.hook.client.runs.list(threadId);
  assert.equal(status, "success", "there is more to come, and the page does not show it");
  again.close();
  return back();
};

checks["a page that comes back in the middle of an answer shows all of it"] = async () => {
  const again = await back();
  await settled(again, ["patiently", slow]);
  const runs = await again.hook.client.runs.list(again.threadId);
  assert.deepEqual(runs.map((run) => run.status), ["success"], "one run, whole");
  again.close();
};

checks["a connection that breaks in the middle of an answer loses nothing and repeats nothing"] = async () => {
  let broken = 0;
  const fetchCut = async (url, init) => {
    const answer = await fetch(url, init);
    if (!String(url).endsWith("/stream/events") || broken > 3) return answer;
    // A page has a stream without the answer, too, and the network may join events: the pieces of the answer count.
    const most = 3 * (broken + 1);
    const decoder = new TextDecoder();
    let text = "";
    const breaking = new TransformStream({
      transform(piece, stream) {
        text += decoder.decode(piece, { stream: true });
        if (text.split("content-block-delta").length - 1 <= most) return stream.enqueue(piece);
        broken += 1;
        stream.error(new TypeError("terminated"));
      },
    });
    return new Response(answer.body.pipeThrough(breaking), { status: answer.status, headers: answer.headers });
  };
  // On a machine that stood still, the answer may be whole before a connection asks for pieces of it.
  for (const start = Date.now(); broken === 0;) {
    assert.ok(Date.now() - start < 600_000, "no connection was cut within ten minutes");
    const page = open({ fetch: fetchCut, reconnectDelayMs: () => 50 });
    await mounted(page);
    await ask(page, "slowly");
    await settled(page, ["slowly", slow]);
    page.close();
  }
};

checks["a question of the agent is shown, and its answer resumes it"] = async () => {
  const page = open();
  await mounted(page);
  await ask(page, "paint");
  await until("the question", () => page.hook.interrupts.length === 1 && !page.hook.isLoading);
  const { question, options } = page.hook.interrupt.value;
  assert.deepEqual([question, options], ["Which colour?", ["red", "blue"]]);
  await page.hook.respond("blue");
  await until("the answer", () => texts(page).at(-1) === "You said: blue" && !page.hook.isLoading);
  assert.deepEqual(page.hook.interrupts, []);
  assert.equal(page.hook.error, undefined);
  page.close();
};

checks["a failed run is shown as an error, and the conversation goes on"] = async () => {
  const page = open();
  await mounted(page);
  await ask(page, "break");
  await until("it has ended", () => !page.hook.isLoading);
  assert.match(page.hook.error?.message ?? "", /the model is gone/);
  // The page hears of an end on two streams. If the second one comes after the next question, the SDK takes it for the end of
  // that; the question after it has an end of its own.
  for (const text of ["one", "two"]) {
    await ask(page, text);
    await until("the next answer", () => texts(page).at(-1) === `You said: ${text}` && !page.hook.isLoading);
    if (page.hook.error === undefined) break;
  }
  assert.equal(page.hook.error, undefined);
  page.close();
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok      ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED  ${name}\n${error.stack}`);
  }
}
console.log(`${Object.keys(checks).length - failed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
