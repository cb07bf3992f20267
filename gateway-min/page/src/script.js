// What streams, and what changes a thread through the public API. Everything that is shown is rendered by the gateway:
// this script only inserts text, or elements of a page that the gateway sent.
"use strict";

const $ = (selector, within = document) => within.querySelector(selector);
const main = $("main");
const thread = main?.dataset.thread;
const token = $('meta[name="page-token"]')?.content ?? "";

// ---- Notices ----

let noticeTimer;
function notice(text, lasting = false) {
  const line = $("#notice");
  clearTimeout(noticeTimer);
  line.textContent = text;
  line.hidden = text === "";
  if (text !== "" && !lasting) noticeTimer = setTimeout(() => notice(""), 6000);
}

// ---- Leaving the page ----

const STAYS = "This page is not available any more; you may be signed out. What you have written stays here until you reload it.";
// Reloads the page, which then says why it is not available, unless what a person has written would be lost.
function leave() {
  const fields = [...document.querySelectorAll("main textarea, main input[type=text]")];
  if (fields.some((field) => field.value !== field.defaultValue)) notice(STAYS, true);
  else location.reload();
}

// ---- The API ----

// The answer to a request, or an error with the API's text.
async function call(method, path, body) {
  const headers = { "content-type": "application/json", "x-page-token": token };
  const answer = await fetch("/api" + path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  if (answer.status === 401) {
    leave();
    throw new Error(STAYS);
  }
  const text = await answer.text();
  let value = null;
  try { value = JSON.parse(text); } catch { /* not every answer has a body */ }
  if (answer.ok) return value;
  const detail = value?.detail;
  const message = typeof detail === "string" ? detail : detail?.message ?? detail?.[0]?.msg;
  throw new Error(message ?? `The gateway answered ${answer.status}.`);
}

const ofThread = (rest, of = thread) => `/threads/${encodeURIComponent(of)}${rest}`;

// Runs what a button asks for, with the button disabled, and shows why it failed.
async function doing(button, work) {
  button.disabled = true;
  try {
    await work();
  } catch (error) {
    notice(error instanceof TypeError ? "The gateway cannot be reached." : error.message);
  } finally {
    button.disabled = false;
  }
}

// ---- Times ----

const STEPS = [["second", 60], ["minute", 60], ["hour", 24], ["day", 30], ["month", 12], ["year", Infinity]];
function tellTimes(within) {
  const format = new Intl.RelativeTimeFormat("en", { numeric: "auto", style: "short" });
  for (const time of within.querySelectorAll("time[datetime]")) {
    const at = new Date(time.dateTime);
    let age = (at - Date.now()) / 1000;
    for (const [unit, size] of STEPS) {
      if (Math.abs(age) < size) {
        time.textContent = unit === "second" ? "just now" : format.format(Math.round(age), unit);
        break;
      }
      age /= size;
    }
    time.title = at.toLocaleString();
  }
}

// ---- A conversation ----

const MODES = ["messages-tuple", "updates", "custom"];
let run = main?.dataset.run ?? null;
// What is shown below the conversation until it is in it, by message id, each with its run: the answers that stream,
// and what a person said.
const streaming = new Map();
const said = new Map();
const isInConversation = (id) => $("#conversation").querySelector(`[data-message="${CSS.escape(id ?? "")}"]`) !== null;

function showRun(id) {
  run = id;
  const stop = $("#stop");
  if (stop) stop.hidden = id === null;
  const status = $(".thread-head .status");
  if (id !== null && status) {
    status.textContent = "busy";
    status.dataset.status = "busy";
  }
}

// A run has begun. An answer that is on its way may be of a time before it, and the run may have ended already.
function begins(id) {
  showRun(id);
  refreshSoon();
}

const isAtEnd = () => window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 80;
const toEnd = () => window.scrollTo(0, document.documentElement.scrollHeight);

// A live message: text only, never markup.
function bubble(kind, who) {
  const article = document.createElement("article");
  article.className = kind + " is-live";
  const head = document.createElement("h2");
  head.className = "who";
  head.textContent = who;
  const text = document.createElement("div");
  text.className = "text";
  text.dir = "auto";
  article.append(head, text);
  $("#live").append(article);
  return { article, text };
}

function addText(id, more, of) {
  if (id !== undefined && isInConversation(id)) return;
  const stays = isAtEnd();
  let live = streaming.get(id);
  if (!live) {
    live = bubble("agent", "Agent");
    streaming.set(id, live);
  }
  live.of = of;
  live.text.append(more);
  if (stays) toEnd();
}

function textOf(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return "";
  return content.map((block) => (typeof block === "string" ? block : block.text ?? "")).join("");
}

// The page as the gateway renders it now takes the place of what is shown; what is open stays open.
let refreshing = null;
let again = false;
function refresh() {
  if (refreshing) {
    again = true;
    return refreshing;
  }
  refreshing = rerender().catch(refreshLater).finally(() => {
    refreshing = null;
    if (again) {
      again = false;
      refresh();
    }
  });
  return refreshing;
}

// How to find an element again after it was replaced.
function placeOf(item) {
  const key = item.closest("details")?.dataset.key;
  if (item.tagName === "SUMMARY" && key) return `details[data-key="${CSS.escape(key)}"] > summary`;
  if (item.dataset.post) return `[data-post="${CSS.escape(item.dataset.post)}"]`;
  return item.id ? "#" + CSS.escape(item.id) : item.href ? `a[href="${CSS.escape(item.getAttribute("href"))}"]` : null;
}

// Whether a person has begun to fill in a form.
function isBegun(form) {
  return form.contains(document.activeElement)
    || [...form.elements].some((field) => field.value !== (field.defaultValue ?? field.value) || field.checked !== (field.defaultChecked ?? field.checked));
}

function renew(id, page) {
  const old = document.getElementById(id);
  const fresh = page.getElementById(id);
  const shown = new Map([...old.querySelectorAll("details[data-key]")].map((item) => [item.dataset.key, item.open]));
  for (const item of fresh.querySelectorAll("details[data-key]")) item.open = shown.get(item.dataset.key) ?? item.open;
  const focused = document.activeElement;
  for (const form of [...old.querySelectorAll("form[data-key]")].filter(isBegun)) {
    $(`form[data-key="${CSS.escape(form.dataset.key)}"]`, fresh)?.replaceWith(form);
  }
  tellTimes(fresh);
  if (old.isEqualNode(fresh)) return;
  old.replaceChildren(...fresh.childNodes);
  if (focused === document.activeElement) return;
  const place = placeOf(focused);
  const same = focused.isConnected ? focused : place && $(place, old);
  same?.focus({ preventScroll: true });
}

// The gateway may be back by then.
let later;
function refreshLater() {
  clearTimeout(later);
  if (!document.hidden) later = setTimeout(refresh, 2000);
}

async function rerender() {
  const known = run;
  const answer = await fetch(location.href, { headers: { accept: "text/html" } });
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById("conversation");
  if (answer.status >= 500) return refreshLater();
  if (!answer.ok || !fresh) return leave();
  const active = page.querySelector("main").dataset.run ?? null;
  // A run began meanwhile that the answer lacks, as one of a time before it does, which would hide what has come of it.
  if (run !== known && run !== active) return refreshSoon();
  // What a person is editing stays until it is sent or left.
  if ($("#conversation form.edit")) return;
  const stays = isAtEnd();
  for (const part of ["thread-head", "goal", "conversation"]) renew(part, page);
  document.title = page.title;
  // What a run that has ended did not store is gone.
  for (const below of [streaming, said]) {
    for (const [id, live] of below) {
      if (live.of === active && !isInConversation(id)) continue;
      live.article.remove();
      below.delete(id);
    }
  }
  // A step is announced before it is stored, and other processes announce none.
  clearTimeout(later);
  if (active !== null && $("#conversation .card:is([data-status=running], [data-status=pending])")) refreshLater();
  showRun(active);
  if (stays) toEnd();
}

function clearLive() {
  for (const live of streaming.values()) live.article.remove();
  streaming.clear();
}

// However many events come, the page is read again some times a second.
let soon;
function refreshSoon() {
  soon ??= setTimeout(() => {
    soon = undefined;
    refresh();
  }, 120);
}

// Follows all runs of the thread, whoever started them, through restarts of the gateway.
let source = null;
let retry;
function follow() {
  source?.close();
  clearTimeout(retry);
  // A new stream begins with the beginning of the active run.
  clearLive();
  source = new EventSource("/api" + ofThread("/stream"));
  let wasLost = false;
  source.onopen = () => {
    if (wasLost) notice("Connected again.");
    wasLost = false;
    main.dataset.stream = "open";
    refresh();
  };
  source.onerror = (event) => {
    if (event.data !== undefined) return refreshSoon();
    wasLost = true;
    main.dataset.stream = "lost";
    notice("The connection to the gateway is lost; trying again.", true);
    if (source.readyState === EventSource.CLOSED) retry = setTimeout(lookAndFollow, 2000);
  };
  const on = (name, does) => source.addEventListener(name, (event) => {
    let data = null;
    try { data = JSON.parse(event.data); } catch { return; }
    // The id of an event of a run is `<run>:<event>`.
    does(data, event.lastEventId.slice(0, event.lastEventId.lastIndexOf(":")));
  });
  on("metadata", (data) => {
    if (data.status === "run_done") {
      refresh().then(() => notice("The run has ended."));
    } else if (data.run_id) {
      begins(data.run_id);
    }
  });
  on("messages", ([message], of) => {
    if (message?.type?.toLowerCase().startsWith("ai")) {
      const text = textOf(message.content);
      if (text !== "") addText(message.id, text, of);
    }
  });
  for (const name of ["updates", "values", "custom"]) on(name, refreshSoon);
  // Events are lost, so the texts that stream have holes: what is stored takes their place.
  on("gap", () => {
    clearLive();
    refreshSoon();
  });
}

// An answer with an error closes an EventSource for good: 401 needs a key, 404 says that the thread is gone.
async function lookAndFollow() {
  try {
    const answer = await fetch(location.href);
    if (answer.status < 500) return answer.redirected || !answer.ok ? leave() : follow();
  } catch { /* The gateway is still away. */ }
  retry = setTimeout(lookAndFollow, 2000);
}

// A new id of a message. `randomUUID` is there with HTTPS only.
const newId = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

async function say(text) {
  const id = newId();
  const body = { input: { messages: [{ role: "user", content: text, id }] }, ...options() };
  const at = main.dataset.at;
  if (at) body.checkpoint_id = at;
  const started = await call("POST", ofThread("/runs"), body);
  // A page of an older state, or of earlier messages, does not show what comes.
  if (location.search !== "") return location.assign(`/threads/${encodeURIComponent(thread)}`);
  $(".empty")?.remove();
  if (!isInConversation(id)) {
    const live = bubble("person", "You");
    live.of = started.run_id;
    live.text.textContent = text.length > 16000 ? text.slice(0, 16000) + " …" : text;
    said.set(id, live);
  }
  begins(started.run_id);
  toEnd();
}

// How a run streams, and whether it may delegate.
const options = () => ({ stream_mode: MODES, context: { subagent_enabled: $("#delegates").checked } });

// Runs the last turn again, as the gateway prepares it.
async function repeat(path, body) {
  const prepared = await call("POST", ofThread(path), body);
  const { input, checkpoint, metadata } = prepared;
  const started = await call("POST", ofThread("/runs"), { input, checkpoint, metadata, ...options() });
  begins(started.run_id);
}

function edit(button) {
  const article = button.closest("article");
  const form = document.createElement("form");
  form.className = "edit";
  const area = document.createElement("textarea");
  area.value = button.dataset.text;
  area.rows = Math.min(12, area.value.split("\n").length + 1);
  area.dir = "auto";
  area.setAttribute("aria-label", "New text");
  const row = document.createElement("div");
  row.className = "row";
  const send = document.createElement("button");
  send.textContent = "Ask again";
  const leave = document.createElement("button");
  leave.type = "button";
  leave.className = "quiet";
  leave.textContent = "Cancel";
  leave.addEventListener("click", () => {
    form.remove();
    refresh();
  });
  row.append(send, leave);
  form.append(area, row);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const body = { human_message_id: button.dataset.message, replacement_text: area.value };
    doing(send, async () => {
      await repeat("/runs/edit-regenerate/prepare", body);
      form.remove();
      await refresh();
    });
  });
  article.replaceChildren($(".who", article), form);
  area.focus();
}

const DOES = {
  repeat: (button) => repeat("/runs/regenerate/prepare", { message_id: button.dataset.message }),
  edit: async (button) => edit(button),
  compact: async () => {
    const done = await call("POST", ofThread("/compact"), {});
    notice(done.compacted ? `A summary stands for ${done.removed_message_count} messages.` : "Nothing was compacted: the conversation is short.");
    await refresh();
  },
  unset: async (button) => {
    await call("DELETE", ofThread("/goal"));
    await renewed(button.form);
  },
  branch: async (button) => {
    const branch = await call("POST", ofThread("/branches"), { message_id: button.dataset.message });
    location.assign(`/threads/${encodeURIComponent(branch.thread_id)}`);
  },
};

// Starts a run that answers what the thread waits for, or goes on without an answer.
async function resume(form, body) {
  const started = await call("POST", ofThread("/runs"), { ...body, ...options() });
  form.remove();
  begins(started.run_id);
}

// What a form asked for is done: the page shows it, with an empty form.
function renewed(form) {
  form.remove();
  return refresh();
}

const SENDS = {
  goal: async (form) => {
    const { objective, continuations } = form.elements;
    await call("PUT", ofThread("/goal"), { objective: objective.value, max_continuations: Number(continuations.value) });
    await renewed(form);
  },
  answer: async (form) => {
    const answers = [...form.querySelectorAll("fieldset")].map((field) =>
      $("input[type=text]", field).value.trim() || ($("input:checked", field)?.value ?? ""));
    if (answers.includes("")) throw new Error("Answer each question.");
    const messages = answers.map((content) => ({ role: "user", content }));
    await resume(form, { command: { resume: answers.length === 1 ? answers[0] : { messages } } });
  },
  continue: (form) => {
    const value = form.elements.value?.value ?? "";
    return resume(form, value === "" ? { input: null } : { command: { resume: value } });
  },
};

function converse() {
  const form = $("#talk");
  const area = $("#say");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = area.value;
    // The Enter key sends also while the button is disabled.
    if (text.trim() === "" || $("#send").disabled) return;
    doing($("#send"), async () => {
      await say(text);
      // What was written meanwhile stays.
      if (area.value.startsWith(text)) area.value = area.value.slice(text.length);
      area.focus();
    });
  });
  area.addEventListener("keydown", (event) => {
    // In Safari a composition has ended by the time of the key that ends it; only its code says what it is.
    const composes = event.isComposing || event.keyCode === 229;
    if (event.key === "Enter" && !event.shiftKey && !composes) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  $("#stop").addEventListener("click", (event) => {
    if (run !== null) doing(event.currentTarget, () => call("POST", ofThread(`/runs/${encodeURIComponent(run)}/cancel`)));
  });
  main.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-do]");
    if (button) doing(button, () => DOES[button.dataset.do](button));
  });
  main.addEventListener("submit", (event) => {
    const send = SENDS[event.target.dataset.does];
    if (!send) return;
    event.preventDefault();
    doing(event.submitter ?? $("button", event.target), () => send(event.target));
  });
  // A browser has few connections to a host: a page that nobody sees leaves its one to others.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      source?.close();
      clearTimeout(retry);
      clearTimeout(later);
    } else {
      follow();
    }
  });
  if (!main.dataset.at) {
    toEnd();
    area.focus({ preventScroll: true });
  }
  follow();
}

// ---- Pages of what is at work ----

let looks = 0;
// Shows what has become of it, without moving what a person reads or holds.
async function lookAgain() {
  const look = ++looks;
  const answer = await fetch(location.href, { headers: { accept: "text/html" } });
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  // Another look began meanwhile, as after a button: this answer may be of a time before what the button did.
  if (look !== looks) return;
  // A gateway that is away may come back.
  if (answer.status >= 500) return watch();
  if (!answer.ok || !page.getElementById("watched")) return location.reload();
  renew("watched", page);
  if (page.querySelector("main[data-watch]")) watch();
}

let looking;
function watch() {
  clearTimeout(looking);
  looking = setTimeout(() => {
    if (document.hidden) return watch();
    lookAgain().catch(watch);
  }, 1000);
}

// ---- Every page ----

// A button for what the API does to this thread; then the page shows what became of it.
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-post]");
  if (!button) return;
  doing(button, async () => {
    await call("POST", ofThread(button.dataset.post, button.dataset.of));
    if ($("#watched")) await lookAgain().catch(watch);
    else location.reload();
  });
});
document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    notice("Copied.");
  } catch {
    // Without HTTPS a browser has no clipboard for pages; the text is selected instead.
    getSelection().selectAllChildren($("code", button.parentElement));
  }
});

tellTimes(document);
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.closest("input, textarea, select")) return;
  const field = $('[data-key="/"]');
  if (field) {
    event.preventDefault();
    field.focus();
  }
});
if (thread !== undefined && $("#talk")) converse();
if (main?.dataset.watch !== undefined) watch();
