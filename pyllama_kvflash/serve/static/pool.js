// The pool beside the chat, updated once a second while the page is visible.

import { NoKey, request, wantsKey } from "./api.js";
import { at, count, element } from "./dom.js";
import { describe } from "./figures.js";
import { chunkAt, colours, corner, draw, layout, square } from "./grid.js";
import { learn } from "./served.js";

const EVERY = 1000; // ms between two updates
const SHOWN = 2500; // ms for which a moved chunk is marked
const PLACES = ["out, in host memory", "in the pool"];
const KINDS = { p: "pinned", s: "kept: the beginning", t: "kept: the end" };
const LEGEND = [
  ["in the pool: a stronger colour is hotter", { state: "1", kind: "-", heat: 0.1 }, { state: "1", kind: "-", heat: 1 }],
  ["in some of the layers", { state: "0", kind: "-", share: 0.25 }, { state: "0", kind: "-", share: 0.75 }],
  ["out", { state: "0", kind: "-" }],
  ["beginning or end", { state: "1", kind: "t" }],
  ["pinned", { state: "1", kind: "p" }],
  ["has just come back", { state: "1", kind: "-", back: true }],
  ["has just left", { state: "0", kind: "-", left: true }],
];

const [grid, box, pin, heard] = ["grid", "box", "pin", "heard"].map(at);

let seen = null; // the server's last report
let shown = 0; // the sequence whose chunks are shown
let byHand = false; // whether the user chose the sequence
let mine = 0; // tokens of the conversation in the chat; 0: unknown
let focus = 0; // the chunk that arrow keys have chosen
let pointed = null; // the chunk under the pointer
let place = null; // the layout of the squares
let timer = 0;
let looking = false;
let texts = new Map();
let moves = new Map(); // when chunks of the shown sequence moved, by chunk

export function start(total) {
  mine = total;
  legend();
  grid.addEventListener("pointermove", (event) => point(under(event)));
  grid.addEventListener("pointerleave", () => point(null));
  grid.addEventListener("click", click);
  grid.addEventListener("keydown", key);
  grid.addEventListener("focus", () => point(null));
  pin.addEventListener("click", () => toggle(focus));
  at("before").addEventListener("click", () => move(focus - 1));
  at("after").addEventListener("click", () => move(focus + 1));
  new ResizeObserver(() => redraw()).observe(at("pool"));
  new MutationObserver(() => { // the theme has changed
    legend(true);
    redraw();
  }).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) look();
  });
  look();
}

// Called when an answer in the chat begins ("begin") or has ended ("end"), with the tokens of the conversation.
export function follow(what, total) {
  if (what === "begin") byHand = false;
  mine = what === "begin" ? 0 : total;
  look();
}

//
// updates
//

export async function look() {
  clearTimeout(timer);
  if (looking || document.hidden) return;
  looking = true;
  let pause = EVERY;
  try {
    take(await (await request("kvflash/pool")).json());
  } catch (err) {
    at("status").textContent = err instanceof NoKey ? "no API key" : err instanceof TypeError ? "no connection" : err.message;
    pause = 3 * EVERY;
  }
  looking = false;
  if (!wantsKey()) timer = setTimeout(look, pause); // a user who declined is not asked again
}

function take(found) {
  at("model").textContent = found.model;
  document.title = `${found.model} – kvflash`;
  if (found.status !== "ok") at("status").textContent = found.status === "loading" ? "the model is loading" : found.status;
  if (!found.sequences) return;
  learn(found.run);
  if (seen && seen.run !== found.run) { // the server has restarted
    seen = null;
    texts.clear();
  }
  const before = seen?.sequences[shown];
  seen = found;
  choose();
  note(before, seen.sequences[shown]);
  if (found.status === "ok") at("status").textContent = status();
  describe(seen, seen.sequences[shown]);
  sequences();
  legend();
  at("map").hidden = found.pool_cells === null;
  redraw();
}

// The sequence to show: the user's choice, else the one with the conversation in the chat.
function choose() {
  const all = seen.sequences;
  if (shown >= all.length) shown = 0;
  if (byHand) return;
  const found = mine
    ? all.findIndex((s) => Math.abs(s.n_tokens - mine) <= 1)
    : all.findIndex((s, i) => s.busy && (i === shown || !all[shown].busy)); // prefer the shown one
  const was = shown;
  if (found >= 0) shown = found;
  else if (!all[shown].n_tokens) shown = Math.max(0, all.findIndex((s) => s.n_tokens));
  if (shown !== was) other();
}

function other() {
  moves.clear();
  focus = 0;
  pointed = null;
}

// Mark the chunks that moved since the last update.
function note(before, now) {
  const time = performance.now();
  if (!before || before.id !== now.id || before.text_id !== now.text_id) {
    moves.clear();
    if (before && before.id === now.id) texts.clear();
  } else {
    [...now.state].forEach((state, chunk) => {
      const was = before.state[chunk];
      if (was !== undefined && state !== was) moves.set(chunk, time);
    });
    if (now.reselect && now.reselect.pos !== before.reselect?.pos) {
      for (const chunk of [...now.reselect.page_ins, ...now.reselect.drops]) moves.set(chunk, time);
    }
  }
  for (const [chunk, when] of moves) if (time - when > SHOWN) moves.delete(chunk);
}

//
// display
//

function status() {
  const busy = seen.sequences.filter((s) => s.busy).length;
  const waits = seen.queue ? `, ${count(seen.queue)} waiting` : "";
  return busy || seen.queue ? `${busy} of ${seen.sequences.length} busy${waits}` : "idle";
}

function sequences() {
  const parent = at("sequences");
  parent.hidden = seen.sequences.length < 2;
  while (parent.children.length < seen.sequences.length) {
    const button = element("button");
    const i = parent.children.length;
    button.type = "button";
    button.addEventListener("click", () => {
      byHand = true;
      if (shown !== i) other();
      shown = i;
      texts.clear();
      take(seen);
    });
    parent.append(button);
  }
  seen.sequences.forEach((s, i) => {
    const button = parent.children[i];
    const text = `Sequence ${i}: ${s.n_tokens ? count(s.n_tokens) : "empty"}${s.busy ? ", busy" : ""}`;
    if (button.textContent !== text) button.textContent = text;
    button.setAttribute("aria-pressed", String(i === shown));
  });
}

// Draw the legend. anew: even if it is there, because colours have changed.
function legend(anew) {
  const scale = window.devicePixelRatio || 1;
  const shown = LEGEND.filter(([, what]) => !what.share || seen?.policy === "fresh");
  if (at("legend").children.length === shown.length && !anew) return;
  at("legend").replaceChildren(...shown.map(([text, ...whats]) => {
    const line = element("li");
    for (const what of whats) {
      const canvas = document.createElement("canvas");
      canvas.width = canvas.height = 16 * scale;
      canvas.style.width = canvas.style.height = "16px";
      canvas.setAttribute("aria-hidden", "true");
      const g = canvas.getContext("2d");
      g.scale(scale, scale);
      square(g, colours(), 1, 1, 15, what);
      line.append(canvas);
    }
    line.append(text);
    return line;
  }));
}

// The chunk whose text is shown.
const current = () => pointed ?? focus;

function redraw() {
  const s = seen?.sequences[shown];
  if (!s || !box.clientWidth) return; // there is no pool, or a narrow window shows the chat
  const n = s.state.length;
  focus = Math.max(0, Math.min(focus, n - 1));
  place = layout(n, box.clientWidth - 8, seen.chunk); // less its padding
  Object.assign(grid.dataset, { columns: place.columns, cell: place.cell, left: place.left, sequence: s.id });
  const heat = ranks(s.score.map((score, chunk) => (s.state[chunk] === "1" ? score : null))); // all others are colder
  const whats = [...s.state].map((state, chunk) => {
    const moved = moves.has(chunk);
    const share = s.layers.length ? s.layers[chunk] / seen.n_layer : 0;
    return { state, kind: s.kind[chunk], heat: heat[chunk], share, back: moved && state === "1", left: moved && state === "0" };
  });
  draw(grid, place, whats, n ? current() : null);
  detail();
}

// The rank of each score among all, 0 to 1; null without a score.
function ranks(scores) {
  const sorted = scores.filter((x) => x !== null).sort((a, b) => a - b);
  const first = new Map();
  sorted.forEach((x, i) => first.has(x) || first.set(x, i));
  return scores.map((x) => (x === null ? null : sorted.length > 1 ? first.get(x) / (sorted.length - 1) : 1));
}

const placed = (s, chunk) => [where(s, chunk), KINDS[s.kind[chunk]]].filter(Boolean).join(", ");

function where(s, chunk) {
  if (!s.layers.length) return PLACES[s.state[chunk]];
  const n = s.layers[chunk];
  if (s.state[chunk] === "1" || n >= seen.n_layer) return `in the pool for all ${seen.n_layer} layers`;
  return n ? `in the pool for ${n} of ${seen.n_layer} layers` : PLACES[s.state[chunk]];
}

function described(s, chunk) {
  const score = s.score[chunk];
  return `${placed(s, chunk)}, ${score === null ? "no score" : `score ${score}`}`;
}

function detail() {
  const s = seen.sequences[shown];
  const n = s.state.length;
  const chunk = current();
  pin.disabled = !n;
  at("before").disabled = !(n && focus > 0);
  at("after").disabled = !(n && focus < n - 1);
  grid.setAttribute("aria-valuemax", String(Math.max(0, n - 1)));
  grid.setAttribute("aria-valuenow", String(focus));
  grid.setAttribute("aria-valuetext", n ? `Chunk ${focus}, ${placed(s, focus)}` : "no chunks");
  at("detail-title").textContent = n ? title(s, chunk) : "No chunks yet";
  at("detail-state").textContent = n ? described(s, chunk) : "They come with the first message.";
  const pinned = s.kind[focus] === "p";
  pin.setAttribute("aria-label", `${pinned ? "Unpin" : "Pin"} chunk ${focus}`);
  pin.textContent = pinned ? "Unpin" : "Pin";
  if (n) showText(s, chunk);
  else at("detail-text").textContent = "";
}

function title(s, chunk) {
  const end = Math.min((chunk + 1) * seen.chunk, s.n_tokens);
  return `Chunk ${count(chunk)}: tokens ${count(chunk * seen.chunk)} to ${count(end - 1)}`;
}

//
// the text of a chunk
//

async function showText(s, chunk) {
  const name = named(s, chunk);
  if (!texts.has(name)) at("detail-text").textContent = "…"; // not the text of another chunk
  await (texts.has(name) ? null : rest());
  if (s.id !== shown || chunk !== current()) return; // the pointer has moved on
  const text = await textOf(s, chunk);
  if (s.id !== shown || chunk !== current()) return;
  const shows = text ?? "It cannot be read now.";
  if (at("detail-text").textContent !== shows) at("detail-text").textContent = shows;
}

// The text is requested only if the pointer stays for a moment.
const rest = () => new Promise((resolve) => setTimeout(resolve, 80));

// The name under which a text is cached: only the text of a chunk that is not full changes.
function named(s, chunk) {
  const full = (chunk + 1) * seen.chunk <= s.n_tokens;
  return `${s.id}/${s.text_id}/${chunk}/${full ? "" : s.n_tokens}`;
}

function textOf(s, chunk) {
  const name = named(s, chunk);
  if (!texts.has(name)) {
    if (texts.size > 500) texts.clear();
    texts.set(name, request(`kvflash/chunk?sequence=${s.id}&chunk=${chunk}`)
      .then(async (res) => (await res.json()).text)
      .catch(() => {
        texts.delete(name);
        return null;
      }));
  }
  return texts.get(name);
}

//
// pointer and keys
//

const under = (event) => (place ? chunkAt(place, event.offsetX, event.offsetY) : null);

function point(chunk) {
  if (chunk === pointed) return;
  pointed = chunk;
  redraw();
}

function click(event) {
  const chunk = under(event);
  if (chunk === null) return;
  const first = event.pointerType === "touch" && chunk !== focus; // the first tap only selects the chunk
  focus = chunk;
  if (event.pointerType === "touch") pointed = null;
  redraw();
  if (!first) toggle(chunk);
}

function key(event) {
  const n = seen?.sequences[shown].state.length;
  if (!n || !place || event.altKey || event.ctrlKey || event.metaKey) return;
  const { columns } = place;
  const to = {
    ArrowLeft: focus - 1, ArrowRight: focus + 1, ArrowUp: focus - columns, ArrowDown: focus + columns,
    PageUp: focus - 4 * columns, PageDown: focus + 4 * columns, Home: 0, End: n - 1,
  }[event.key];
  if (event.key === "Enter" || event.key === " ") event.repeat || toggle(focus);
  else if (to === undefined) return;
  else move(Math.max(0, Math.min(to, n - 1)));
  event.preventDefault();
}

function move(to) {
  focus = to;
  pointed = null;
  redraw();
  const [, y] = corner(place, focus);
  if (y < box.scrollTop) box.scrollTop = y;
  else if (y + place.cell > box.scrollTop + box.clientHeight) box.scrollTop = y + place.cell - box.clientHeight;
  say(focus);
}

// A screen reader hears number and state as the slider's value, and the text once no key is pressed for a moment.
let resting = 0;

function say(chunk) {
  clearTimeout(resting);
  resting = setTimeout(async () => {
    const s = seen.sequences[shown];
    const text = await textOf(s, chunk);
    if (chunk === focus && text !== null) heard.textContent = text;
  }, 400);
}

async function toggle(chunk) {
  const s = seen?.sequences[shown];
  if (!s || chunk >= s.state.length) return;
  const pinned = s.kind[chunk] !== "p";
  try {
    await request("kvflash/pin", { body: { sequence: s.id, chunk, pinned } });
    at("pool-alert").textContent = "";
    heard.textContent = `Chunk ${chunk} ${pinned ? "pinned" : "unpinned"}`;
  } catch (err) {
    at("pool-alert").textContent = err.message;
  }
  look();
}
