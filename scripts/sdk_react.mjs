// The hook `useStream` of the official SDK, in React, against a live gateway: talk, edit, branch, stop, come back.
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
const { useStream } = await import("@langchain/langgraph-sdk/react");

const checks = {};
const human = (content) => ({ messages: [{ type: "human", content }] });
const texts = (page) => page.hook.messages.map((message) => message.content);

// A page that shows one conversation; `hook` is what `useStream` returned last, once its effects have run: nobody can press
// a key before, and an effect that ran after a submission would end it.
const open = (options = {}) => {
  const page = { hook: undefined, threadId: options.threadId };
  const Conversation = () => {
    const hook = useStream({
      apiUrl: `${gateway}/api`,
      assistantId: "lead_agent",
      fetchStateHistory: true,
      onThreadId: (id) => { page.threadId = id; },
      ...options,
    });
    // A page shows these, so that the hook streams them.
    void hook.messages;
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
    () => `${JSON.stringify(expected)}; there is ${JSON.stringify(texts(page))}, loading: ${page.hook.isLoading}, ${page.hook.error}`,
    () => !page.hook.isLoading && same(),
  );
};
const ask = async (page, text, options) => {
  await page.hook.submit(human(text), options);
};
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
const metadata = (page, index) => page.hook.getMessagesMetadata(page.hook.messages[index], index);

checks["turns follow each other, and a second page shows them"] = async () => {
  const page = await talked();
  assert.equal(page.hook.error, undefined);
  const other = open({ threadId: page.threadId });
  await mounted(other);
  await settled(other, ["one", "You said: one", "two", "You said: two"]);
  [page, other].forEach(({ close }) => close());
};

checks["each message was first seen at its own checkpoint"] = async () => {
  const page = await talked();
  await until("the history is there", () => metadata(page, 3)?.firstSeenState != null);
  for (const [index, message] of page.hook.messages.entries()) {
    const { firstSeenState } = metadata(page, index);
    const shown = firstSeenState.values.messages.map(({ id }) => id);
    assert.equal(shown.at(-1), message.id, `message ${index}`);
  }
  page.close();
};

checks["an edited question replaces its turn, and the old one stays a branch"] = async () => {
  const page = await talked();
  await until("the history is there", () => metadata(page, 2)?.firstSeenState != null);
  const checkpoint = metadata(page, 2).firstSeenState.parent_checkpoint;
  await ask(page, "another", { checkpoint });
  await settled(page, ["one", "You said: one", "another", "You said: another"]);
  if (mode === "full") {
    await until("two branches", () => metadata(page, 2)?.branchOptions?.length === 2);
    const { branch, branchOptions } = metadata(page, 2);
    page.hook.setBranch(branchOptions.find((option) => option !== branch));
    await settled(page, ["one", "You said: one", "two", "You said: two"]);
  }
  page.close();
};

checks["an answer is made again"] = async () => {
  const page = await talked();
  await until("the history is there", () => metadata(page, 3)?.firstSeenState != null);
  const before = page.hook.messages[3].id;
  const checkpoint = metadata(page, 3).firstSeenState.parent_checkpoint;
  await page.hook.submit(undefined, { checkpoint });
  // Not the page as it was before, whose texts are the same.
  await until("another answer", () => ![undefined, before].includes(page.hook.messages[3]?.id));
  await settled(page, ["one", "You said: one", "two", "You said: two"]);
  assert.notEqual(page.hook.messages[3].id, before);
  page.close();
};

checks["a stopped answer ends, and the conversation goes on"] = async () => {
  const page = open();
  await mounted(page);
  const asked = ask(page, "without end");
  await until("the answer has begun", () => page.hook.messages.at(-1)?.type === "ai");
  await page.hook.stop();
  await asked;
  await until("it has ended", () => !page.hook.isLoading);
  const { client } = page.hook;
  // Until the gateway has seen that the page has left; the run may still write what it has.
  for (const start = Date.now(); ;) {
    const { status } = (await client.runs.list(page.threadId))[0];
    if (status === "interrupted") break;
    if (Date.now() - start > 600_000) assert.fail(`not interrupted within ten minutes: ${status}`);
    await new Promise((done) => setTimeout(done, 20));
  }
  await ask(page, "one");
  await until("the next answer", () => texts(page).at(-1) === "You said: one" && !page.hook.isLoading);
  page.close();
};

checks["a page that comes back in the middle of an answer shows the rest of it"] = async () => {
  const page = open({ reconnectOnMount: true });
  await mounted(page);
  void ask(page, "patiently").catch(() => {});
  await until("the answer has begun", () => page.hook.messages.at(-1)?.type === "ai");
  const { threadId } = page;
  page.close();
  const again = open({ threadId, reconnectOnMount: true });
  await mounted(again);
  await settled(again, ["patiently", "I answer in many small pieces, one after the other, until I am done."]);
  const runs = await again.hook.client.runs.list(threadId);
  assert.deepEqual(runs.map((run) => run.status), ["success"], "one run, whole");
  again.close();
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
