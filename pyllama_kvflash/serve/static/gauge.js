// The gauge: how much of the context the conversation and the draft fill.

import { request } from "./api.js";
import { at, count, write } from "./dom.js";
import { context } from "./served.js";

const PAUSE = 400; // ms after the last key until the draft is counted
const PART = 150_000; // characters counted at once
const KEPT = 200; // parts whose counts are cached

const counts = new Map(); // of tokens, by part of a text
let timer = 0;
let turn = 0; // number of the latest count
let get = () => null;

// what: returns the texts to count and the number of tokens known already, or null while the texts are changing.
export function start(what) {
  get = what;
  document.addEventListener("props", later);
}

// Count again soon, after a change.
export function later() {
  clearTimeout(timer);
  timer = setTimeout(look, PAUSE);
}

async function look() {
  turn += 1;
  const [mine, what] = [turn, get()];
  if (!what || !context()) return;
  try {
    let n = what.known;
    for (const text of what.texts) n += await tokens(text);
    if (mine === turn) show(n, what.texts.length > 0);
  } catch { /* the server is busy or away: the next change asks again */ }
}

async function tokens(text) {
  let n = 0;
  for (let start = 0; start < text.length; start += PART) n += await part(text.slice(start, start + PART));
  return n;
}

async function part(text) {
  const known = counts.get(text);
  if (known !== undefined) return known;
  const found = (await (await request("tokenize", { body: { content: text.toWellFormed?.() ?? text } })).json()).tokens.length;
  if (counts.size >= KEPT) counts.clear();
  counts.set(text, found);
  return found;
}

function show(n, about) {
  const most = context();
  const bar = at("gauge-bar");
  Object.assign(bar, { max: most, high: 0.9 * most, optimum: 0, value: Math.min(n, most) });
  at("gauge").hidden = !n;
  at("gauge").classList.toggle("over", n >= most);
  write(at("gauge-text"), `${about ? "about " : ""}${count(n)} of ${count(most)} tokens`);
  write(at("gauge-over"), n >= most ? "That is more than the context holds: shorten it, or start the server with a larger -c." : "");
}
