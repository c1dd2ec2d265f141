// The conversation: what is shown, sent and kept.

import { count, events, request } from "./api.js";

const NAME = "kvflash.conversation";
const at = (id) => document.getElementById(id);
const [log, form, ask, send, stop] = ["log", "form", "ask", "send", "stop"].map(at);
const settings = { system: at("system"), temperature: at("temperature"), max_tokens: at("max-tokens") };

let kept = load(); // messages, settings, and the tokens of it all (0: not known)
let going = null; // the AbortController of the answer under way
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
  kept.messages.forEach(show);
  toEnd();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    say();
  });
  ask.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    say();
  });
  stop.addEventListener("click", () => going?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) going?.abort();
  });
  at("new").addEventListener("click", restart);
  at("add").addEventListener("click", () => at("file").click());
  at("file").addEventListener("change", addFile);
}

//
// what is kept
//

// A tab has its own conversation; a new tab begins with the last one of any.
function load() {
  for (const store of [sessionStorage, localStorage]) {
    try {
      const found = JSON.parse(store.getItem(NAME));
      if (Array.isArray(found?.messages)) return found;
    } catch { /* it is damaged, or not ours */ }
  }
  return { messages: [], settings: {}, total: 0 };
}

function save() {
  try {
    for (const store of [sessionStorage, localStorage]) store.setItem(NAME, JSON.stringify(kept));
  } catch {
    complain("The conversation is too long for this browser to keep: it will not survive a reload.");
  }
}

function restart() {
  going?.abort();
  kept = { messages: [], settings: kept.settings, total: 0 };
  log.querySelectorAll(".turn").forEach((turn) => turn.remove());
  at("empty").hidden = false;
  complain("");
  save();
  ask.focus();
  tell("end");
}

async function addFile({ target }) {
  const [file] = target.files;
  if (file) {
    ask.value = `${await file.text()}\n\n${ask.value}`;
    ask.focus();
    ask.setSelectionRange(ask.value.length, ask.value.length);
    ask.scrollTop = ask.scrollHeight;
  }
  target.value = "";
}

//
// what is shown
//

function element(tag, className, text = "") {
  const res = document.createElement(tag);
  res.className = className;
  res.textContent = text; // never as HTML: a model may say anything
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
  const text = ask.value;
  if (going || !text.trim()) return;
  ask.value = "";
  complain("");
  const asked = { role: "user", content: text };
  const answer = { role: "assistant", content: "", thinking: "" };
  const shown = [asked, answer].map(show);
  shown[1].turn.classList.add("going");
  kept.messages.push(asked);
  const controller = begin();
  try {
    await hear(answer, shown[1], controller.signal);
  } catch (err) {
    if (!controller.signal.aborted) complain(err instanceof TypeError ? "The server cannot be reached." : err.message);
    else answer.note = "stopped";
  }
  end(controller);
  shown[1].turn.classList.remove("going");
  shown[1].note.textContent = answer.note ?? "";
  if (!kept.messages.includes(asked)) return; // another conversation was begun
  if (answer.content || answer.thinking) {
    kept.messages.push(answer);
  } else { // nothing came of it: the words are given back
    kept.messages.pop();
    shown.forEach((parts) => parts.turn.remove());
    at("empty").hidden = kept.messages.length > 0;
    ask.value ||= text;
  }
  save();
  tell("end");
}

function begin() {
  going = new AbortController();
  send.disabled = true;
  stop.hidden = false;
  log.setAttribute("aria-busy", "true"); // read out as a whole, not word by word
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
  stop.hidden = true;
  log.removeAttribute("aria-busy");
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

// Take an answer in as it comes.
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
    if (event.usage) account(answer, event.usage);
    if (follow) toEnd();
  }
}

function account(answer, usage) {
  const known = usage.prompt_tokens_details.cached_tokens;
  kept.total = usage.total_tokens;
  answer.note = `${count(usage.prompt_tokens)} tokens of prompt, ${count(known)} known,`
    + ` ${count(usage.prompt_tokens - known)} new; ${count(usage.completion_tokens)} of answer`;
}
