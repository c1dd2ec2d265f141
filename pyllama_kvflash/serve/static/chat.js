// The conversation: what is shown, sent and kept.

import { count, events, request } from "./api.js";

const NAME = "kvflash.conversation";
const at = (id) => document.getElementById(id);
const [log, form, ask, send, stop] = ["log", "form", "ask", "send", "stop"].map(at);
const settings = { system: at("system"), temperature: at("temperature"), max_tokens: at("max-tokens") };
const MOST_HEARD = 1000; // characters of an answer for a screen reader
const composes = (event) => event.isComposing || event.keyCode === 229; // Safari ends a composition before the key event

let file = null; // the file added to the message: name and text
let kept = load(); // messages, settings, and their tokens in all (0: unknown)
let going = null; // the AbortController of the running answer
let writing = null; // that answer
let tell = () => {};

export const total = () => kept.total;

// tell: called with "begin" and "end" of an answer.
export function start(onChange) {
  tell = onChange;
  for (const [name, field] of Object.entries(settings)) {
    field.value = kept.settings[name] ?? "";
    field.addEventListener("change", () => {
      kept.settings[name] = field.value;
      save();
    });
  }
  unanswered();
  kept.messages.forEach(show);
  toEnd();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    say();
  });
  ask.addEventListener("keydown", (event) => {
    // a phone has no Shift+Enter: there Enter begins a line
    if (event.key !== "Enter" || event.shiftKey || composes(event) || matchMedia("(pointer: coarse)").matches) return;
    event.preventDefault();
    say();
  });
  stop.addEventListener("click", () => going?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !composes(event) && !document.querySelector("dialog[open]")) going?.abort();
  });
  at("new").addEventListener("click", restart);
  at("add").addEventListener("click", () => at("file").click());
  at("file").addEventListener("change", ({ target }) => add(target.files[0]).finally(() => { target.value = ""; }));
  at("file-remove").addEventListener("click", () => {
    attach(null);
    ask.focus();
  });
  window.addEventListener("pagehide", () => { // a partial answer stays
    if (!writing?.content || !kept.messages.length || kept.messages.includes(writing)) return;
    kept.messages.push(Object.assign(writing, { note: "stopped" }));
    save();
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault(); // otherwise the browser opens the file instead of the page
    if (event.dataTransfer?.files.length) add(event.dataTransfer.files[0]);
  });
}

//
// storage
//

// A tab has its own conversation; a new tab begins with the last one of any.
function load() {
  for (const store of ["sessionStorage", "localStorage"]) {
    try {
      const found = JSON.parse(window[store].getItem(NAME));
      if (Array.isArray(found?.messages)) {
        const messages = found.messages.filter((m) => ["user", "assistant"].includes(m?.role) && typeof m.content === "string");
        return { messages, settings: { ...found.settings }, total: Number(found.total) || 0 };
      }
    } catch { /* it is damaged, foreign, or blocked */ }
  }
  return { messages: [], settings: {}, total: 0 };
}

function save() {
  try {
    for (const store of ["sessionStorage", "localStorage"]) window[store].setItem(NAME, JSON.stringify(kept));
  } catch {
    if (!at("alert").textContent) complain("The conversation is too long for this browser to keep: it will not survive a reload.");
  }
}

// A question without an answer (the page was closed) becomes a draft again: two in a row confuse a model.
function unanswered() {
  if (kept.messages.at(-1)?.role === "user") ask.value = kept.messages.pop().content;
}

function restart() {
  if (kept.messages.length && !confirm("Forget this conversation, and begin a new one?")) return;
  going?.abort();
  kept = { messages: [], settings: kept.settings, total: 0 };
  log.querySelectorAll(".turn").forEach((turn) => turn.remove());
  at("empty").hidden = false;
  complain("");
  save();
  ask.focus();
  tell("end");
}

// Add a file's text to the next message.
async function add(added) {
  if (!added) return;
  complain("");
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await added.arrayBuffer());
    if (text.includes("\0")) throw new TypeError();
    attach({ name: added.name, text });
  } catch {
    complain(`${added.name} is not a text in UTF-8: save it as UTF-8, and add that.`);
  }
  ask.focus();
}

function attach(what) {
  file = what;
  at("file-chip").hidden = !file;
  at("file-name").textContent = file ? `${file.name}, ${count(file.text.length)} characters` : "";
}

//
// display
//

function element(tag, className, text = "") {
  const res = document.createElement(tag);
  res.className = className;
  res.textContent = text; // never as HTML: a model may write anything
  return res;
}

function show(message) {
  at("empty").hidden = true;
  const mine = message.role === "user";
  const turn = element("article", `turn ${message.role}`);
  const parts = {
    turn, head: element("h3", "", mine ? "You" : "Model"), text: element("div", "text", message.content),
    note: element("p", "note", message.note ?? ""), thinking: null,
  };
  turn.append(parts.head, parts.text, parts.note);
  if (message.thinking) think(parts, message.thinking);
  log.append(turn);
  return parts;
}

function think(parts, text) {
  if (!parts.thinking) {
    const details = document.createElement("details");
    parts.thinking = element("div", "");
    details.append(element("summary", "", "Thinking"), parts.thinking);
    parts.head.after(details);
  }
  parts.thinking.append(text);
}

function complain(text) {
  at("alert").textContent = text;
}

const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;

function toEnd() {
  log.scrollTop = log.scrollHeight;
}

function reading(text, done = 0, of = 0) {
  at("reading").hidden = !text;
  at("reading-text").textContent = text;
  at("progress").value = of ? done / of : 0;
}

//
// a turn
//

async function say() {
  const [typed, added] = [ask.value, file];
  if (going || !(typed.trim() || added)) return;
  ask.value = "";
  attach(null);
  complain("");
  const asked = { role: "user", content: added ? `${added.text}\n\n${typed}` : typed };
  const answer = { role: "assistant", content: "", thinking: "" };
  const shown = [asked, answer].map(show);
  shown[1].turn.classList.add("going");
  kept.messages.push(asked);
  const controller = begin();
  writing = answer;
  try {
    await hear(answer, shown[1], controller.signal);
  } catch (err) {
    if (!controller.signal.aborted) complain(err instanceof TypeError ? "The server cannot be reached." : err.message);
    else answer.note = "stopped";
  }
  end(controller);
  shown[1].turn.classList.remove("going");
  shown[1].note.textContent = answer.note ?? "";
  if (writing === answer) writing = null;
  if (!kept.messages.includes(asked)) return; // another conversation has begun
  if (answer.content || answer.thinking) {
    if (!kept.messages.includes(answer)) kept.messages.push(answer);
  } else { // without an answer, the question is a draft again
    kept.messages.pop();
    shown.forEach((parts) => parts.turn.remove());
    at("empty").hidden = kept.messages.length > 0;
    ask.value = [typed, ask.value].filter(Boolean).join("\n\n");
    attach(file ?? added);
  }
  save();
  heard(answer);
  tell("end");
}

// A screen reader gets an answer at its end, not word by word.
function heard(answer) {
  const text = answer.content.slice(0, MOST_HEARD);
  at("heard-answer").textContent = text + (answer.content.length > MOST_HEARD ? " ... The rest is in the conversation." : "");
}

function begin() {
  going = new AbortController();
  const focused = document.activeElement === send;
  send.disabled = true;
  stop.hidden = false;
  if (focused) stop.focus();
  at("heard-answer").textContent = "";
  toEnd();
  reading("waiting");
  save();
  tell("begin");
  return going;
}

function end(controller) {
  if (going !== controller) return;
  going = null;
  send.disabled = false;
  if (document.activeElement === stop) ask.focus();
  stop.hidden = true;
  reading("");
}

function wanted() {
  const system = settings.system.value.trim();
  const messages = kept.messages.map(({ role, content }) => ({ role, content }));
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true, stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "max_tokens"]) {
    if (settings[name].value !== "") body[name] = Number(settings[name].value);
  }
  return body;
}

// Show an answer as it arrives.
async function hear(answer, parts, signal) {
  const res = await request("/v1/chat/completions", { body: wanted(), signal });
  for await (const event of events(res)) {
    const follow = isAtEnd();
    if (typeof event === "string") {
      const found = /^prefill (\d+)\/(\d+)$/.exec(event);
      if (found) reading(`reading, ${count(+found[1])} of ${count(+found[2])} tokens`, +found[1], +found[2]);
      continue;
    }
    if (event.error) throw new Error(event.error.message);
    const delta = event.choices[0]?.delta ?? {};
    if (delta.reasoning_content) {
      answer.thinking += delta.reasoning_content;
      think(parts, delta.reasoning_content);
    }
    if (delta.content) {
      answer.content += delta.content;
      parts.text.append(delta.content);
    }
    if (delta.content || delta.reasoning_content) reading("");
    if (event.choices[0]?.finish_reason === "length") answer.cut = true;
    if (event.usage) account(answer, event.usage);
    if (follow) toEnd();
  }
}

function account(answer, usage) {
  const known = usage.prompt_tokens_details.cached_tokens;
  kept.total = usage.total_tokens;
  answer.note = `${count(usage.prompt_tokens)} tokens of prompt, ${count(known)} cached,`
    + ` ${count(usage.prompt_tokens - known)} new; ${count(usage.completion_tokens)} of answer`
    + (answer.cut ? ", cut off by the token limit or the end of the context" : "");
}
