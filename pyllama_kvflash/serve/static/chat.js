// The conversation on the page: its questions, and its answers as they arrive.

import { events, request } from "./api.js";
import * as composer from "./composer.js";
import { at, complain, count, duration } from "./dom.js";
import * as gauge from "./gauge.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import * as turn from "./turn.js";

const MOST_HEARD = 1000; // characters of an answer that a screen reader gets
const LONGEST_TITLE = 60;
const [log, send, stop] = ["log", "send", "stop"].map(at);
const does = { edit, again, resume };

let kept = store.fresh(); // the conversation on the page, as in store.js
let going = null; // the running answer: controller, answer, and its place among the messages
let tell = () => {};
let listed = () => {};

export const total = () => kept.total;
export const current = () => kept;

// onAnswer: called with "begin" and "end" of each answer. onSaved: called when a conversation was saved.
export async function start(onAnswer, onSaved) {
  [tell, listed] = [onAnswer, onSaved];
  settings.start(() => {
    kept.total = 0; // another system prompt is another text
    if (kept.messages.length) save(kept);
    gauge.later();
  });
  composer.start(say, () => going?.controller.abort());
  gauge.start(counted);
  window.addEventListener("pagehide", () => { // a partial answer stays
    if (going?.answer.content || going?.answer.thinking) store.keepTorn(kept.id, going.place, going.answer);
  });
  store.onOther(async (id) => {
    listed();
    const found = id === kept.id && !going ? await store.get(id).catch(() => null) : null;
    if (found && !going && found.id === kept.id && found.rev !== kept.rev) take(found);
  });
  let [found, failed] = [null, false];
  try {
    found = await store.last();
  } catch {
    failed = true;
  }
  open(found ?? store.fresh());
  if (failed) complain("This browser stores no conversations for this page: they are lost when it is closed.");
}

// The texts for the gauge to count: all of them, or just the draft if the server has told the tokens of the rest (known).
function counted() {
  if (going) return null;
  const { content, files } = composer.draft();
  const texts = kept.total ? [] : [settings.system(), ...kept.messages.map((m) => (m.role === "user" ? composer.whole(m) : m.content))];
  return { known: kept.total, texts: [...texts, content, ...files.map(({ text }) => text)].filter(Boolean) };
}

//
// conversations
//

// Show a conversation. An answer that is running in another one is stopped.
export function open(conversation) {
  going?.controller.abort();
  complain("");
  take(conversation);
  const question = kept.messages.at(-1);
  if (question?.role === "user") { // a question without an answer (the page was closed) becomes a draft again: two questions in a row confuse a model
    kept.messages.pop();
    redraw();
    const { content, files } = composer.draft();
    if (!content && !files.length) composer.set(question);
  }
  tell("end");
}

function take(conversation) {
  kept = conversation;
  store.remember(kept.id);
  settings.use(kept.settings);
  redraw();
  listed();
}

export function restart() {
  open(store.fresh({ ...kept.settings }));
  at("ask").focus();
}

export async function name(title) {
  Object.assign(kept, { title, named: true });
  await save(kept);
}

async function save(conversation) {
  conversation.changed = Date.now();
  if (!conversation.named) conversation.title = titled(conversation.messages[0]);
  try {
    await store.put(conversation);
    listed();
  } catch {
    if (!at("alert").textContent) complain("This browser cannot store the conversation: a reload will lose it.");
  }
}

function titled(question) {
  const text = (question?.content || question?.files?.[0]?.name || "").trim().replace(/\s+/g, " ");
  return text.length > LONGEST_TITLE ? `${text.slice(0, LONGEST_TITLE - 1)}…` : text || "Untitled";
}

function redraw() {
  log.querySelectorAll(".turn").forEach((shown) => shown.remove());
  at("empty").hidden = kept.messages.length > 0;
  kept.messages.forEach((message) => turn.show(message, does));
  toEnd();
  gauge.later();
}

//
// questions
//

const answered = () => ({ role: "assistant", content: "", thinking: "", torn: "", figures: {} });

function say() {
  const draft = composer.draft();
  if (going || !(draft.content.trim() || draft.files.length)) return;
  composer.set();
  const conversation = kept;
  kept.messages.push({ role: "user", ...draft });
  turn.show(kept.messages.at(-1), does);
  respond(answered(), () => {
    conversation.messages.pop();
    composer.giveBack(draft);
  });
}

// Answer a question again. Later turns are removed.
function again(answer) {
  const before = cut(kept.messages.indexOf(answer));
  if (before) respond(answered(), before);
}

function edit(question, content) {
  const undo = cut(kept.messages.indexOf(question), 1); // its answer is replaced in any case
  if (!undo) return;
  kept.messages.push({ ...question, content });
  redraw();
  respond(answered(), () => {
    undo();
    composer.giveBack({ content, files: [] });
  });
}

function resume(answer) {
  const place = kept.messages.indexOf(answer);
  if (going || place < 0 || (place + 1 < kept.messages.length && !cut(place + 1, -1))) return;
  respond(answer, () => {}, true);
}

// Cut the conversation off before a message, if the user agrees to lose those after it. more: messages that are replaced anyway.
// Returns a function that undoes the cut; null if the user declines, or an answer is running.
function cut(place, more = 0) {
  const lost = kept.messages.length - place - 1 - more;
  if (going || place < 0) return null;
  if (lost > 0 && !confirm(`This replaces the ${lost} later message${lost > 1 ? "s" : ""} of the conversation. Continue?`)) return null;
  const [conversation, before, tokens] = [kept, kept.messages, kept.total];
  kept.messages = before.slice(0, place);
  kept.total = 0;
  redraw();
  return () => Object.assign(conversation, { messages: before, total: tokens });
}

//
// an answer
//

// Ask for an answer to the messages or, with goesOn, for more of the last answer. undo: called if no text arrives.
async function respond(answer, undo, goesOn = false) {
  const [conversation, before, torn] = [kept, answer.content.length + answer.thinking.length, answer.torn];
  at("empty").hidden = true;
  const parts = goesOn ? shown(answer) : turn.show(answer, does);
  turn.begin(parts);
  const body = wanted(goesOn);
  const controller = begin(answer, kept.messages.length - goesOn);
  answer.torn = "";
  if (!goesOn) save(conversation);
  try {
    await hear(answer, parts, body, controller.signal);
  } catch (err) {
    answer.torn = controller.signal.aborted ? "stopped" : "broken";
    if (!controller.signal.aborted) complain(err instanceof TypeError ? "The server cannot be reached." : err.message);
  }
  end(controller);
  if (["stopped", "broken"].includes(answer.torn)) conversation.total = 0; // the server did not report it
  if (answer.torn && answer.content.length + answer.thinking.length === before) { // no text arrived: restore everything
    answer.torn = torn;
    undo();
    if (conversation === kept) redraw();
  } else {
    if (!goesOn) conversation.messages.push(answer);
    if (conversation === kept) turn.finish(parts, answer, does);
  }
  if (conversation.messages.length) await save(conversation);
  else await forget(conversation);
  if (conversation !== kept) return;
  heard(answer);
  tell("end");
  gauge.later();
}

// The element of an answer that is continued.
function shown(answer) {
  log.querySelector(".turn:last-of-type").remove();
  return turn.show(answer, does);
}

// Remove a conversation whose first question got no answer.
async function forget(conversation) {
  conversation.rev = 0;
  await store.remove(conversation.id).catch(() => {});
  listed();
}

// Give an answer to a screen reader at its end, not word by word.
function heard(answer) {
  const text = answer.content.slice(0, MOST_HEARD);
  at("heard-answer").textContent = text + (answer.content.length > MOST_HEARD ? " ... The rest is in the conversation." : "");
}

function begin(answer, place) {
  const controller = new AbortController();
  going = { controller, answer, place };
  const focused = document.activeElement === send || document.activeElement === document.body;
  document.body.classList.add("answering");
  send.disabled = true;
  stop.hidden = false;
  if (focused) stop.focus();
  complain("");
  at("heard-answer").textContent = "";
  toEnd();
  reading("waiting");
  tell("begin");
  return controller;
}

function end(controller) {
  if (going?.controller !== controller) return;
  going = null;
  document.body.classList.remove("answering");
  send.disabled = false;
  if (document.activeElement === stop) at("ask").focus();
  stop.hidden = true;
  reading("");
}

function wanted(goesOn) {
  const messages = kept.messages.map((m) => ({ role: m.role, content: m.role === "user" ? composer.whole(m) : m.content }));
  if (goesOn && kept.messages.at(-1).thinking) messages.at(-1).reasoning_content = kept.messages.at(-1).thinking;
  const system = settings.system();
  return {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true, stream_options: { include_usage: true }, ...settings.asked(),
  };
}

// Show an answer as it arrives.
async function hear(answer, parts, body, signal) {
  // tokens of the answer so far; those of a stopped answer are unknown
  const [began, said] = [performance.now(), answer.content || answer.thinking ? answer.figures.answer : 0];
  let [first, last] = [0, 0];
  const left = timeLeft();
  const res = await request("v1/chat/completions", { body, signal });
  for await (const event of events(res)) {
    if (typeof event === "string") {
      const found = /^prefill (\d+)\/(\d+)$/.exec(event);
      if (found) reading(`reading, ${count(+found[1])} of ${count(+found[2])} tokens${left(+found[1], +found[2])}`, +found[1], +found[2]);
      continue;
    }
    if (event.error) throw new Error(event.error.message);
    const { delta = {}, finish_reason: reason } = event.choices?.[0] ?? {};
    if (delta.content || delta.reasoning_content) {
      last = performance.now();
      first ||= last;
      answer.thinking += delta.reasoning_content ?? "";
      answer.content += delta.content ?? "";
      turn.grow(parts, answer);
      reading("");
    }
    if (reason === "length") answer.torn = "length";
    if (event.usage) account(answer, event.usage, said, (first - began) / 1000, (last - first) / 1000);
  }
}

// first: seconds to the first token. rest: seconds for the other tokens.
function account(answer, usage, said, first, rest) {
  const n = usage.completion_tokens;
  kept.total = usage.total_tokens;
  answer.figures = { prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details?.cached_tokens ?? 0 };
  if (said !== undefined) answer.figures.answer = said + n;
  if (first > 0) answer.figures.first = first;
  if (n > 1 && rest > 0) answer.figures.rate = (n - 1) / rest;
}

function toEnd() {
  log.scrollTop = log.scrollHeight;
}

// The time that the rest of a prompt takes at the pace so far; "" until the pace is known.
function timeLeft() {
  let began = 0;
  let at = 0;
  return (done, of) => {
    const now = performance.now();
    if (!began) [began, at] = [now, done];
    return done > at && now - began > 1000 ? `, ${duration((now - began) / 1000 * (of - done) / (done - at))} left` : "";
  };
}

function reading(text, done = 0, of = 0) {
  at("reading").hidden = !text;
  at("reading-text").textContent = text;
  at("progress").value = of ? done / of : 0;
}
