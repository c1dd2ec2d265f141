// The list of conversations: open, rename, delete, export, import.

import * as chat from "./chat.js";
import { at, button, complain, download, element, isFolded, keepFolded, tell } from "./dom.js";
import * as store from "./store.js";

const NAME = "kvflash.list"; // whether it is folded
const narrow = matchMedia("(max-width: 1150px)"); // there the list covers the chat, as in the style sheet

export function start() {
  at("new").addEventListener("click", () => {
    chat.restart();
    if (narrow.matches) fold(true);
  });
  at("list-open").addEventListener("click", () => fold(!at("list").hidden, true));
  at("export-all").addEventListener("click", async () => download("kvflash-conversations.json", store.exported(await store.every())));
  at("import").addEventListener("click", () => at("import-file").click());
  at("import-file").addEventListener("change", ({ target }) => take(target));
  at("list").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !narrow.matches || event.target.id === "rename") return;
    event.stopPropagation();
    fold(true);
    at("list-open").focus();
  });
  narrow.addEventListener("change", () => fold(narrow.matches || isFolded(NAME)));
  fold(narrow.matches || isFolded(NAME));
}

// byHand: the user did it, so remember it.
function fold(value, byHand = false) {
  at("list").hidden = value;
  at("list-open").setAttribute("aria-expanded", String(!value));
  if (byHand && !narrow.matches) keepFolded(NAME, value);
  if (byHand && !value) at("list").querySelector("[aria-current]")?.focus();
}

let turn = 0;
let drawn = ""; // what the list shows

export async function show() {
  turn += 1;
  const mine = turn;
  const all = await store.list().catch(() => []);
  if (mine !== turn || at("rename")) return; // a conversation is being renamed: the list is shown again afterwards
  const { id } = chat.current();
  const now = JSON.stringify([id, all.map((one) => [one.id, one.title])]);
  if (now === drawn) return; // replacing an element would lose a click on it
  drawn = now;
  const focused = at("conversations").contains(document.activeElement) ? document.activeElement.dataset.id : null;
  at("conversations").replaceChildren(...all.map((one) => row(one, one.id === id)));
  at("none").hidden = all.length > 0;
  at("export-all").disabled = !all.length;
  if (focused) at("conversations").querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

function row({ id, title }, here) {
  const line = element("li", here ? "here" : "");
  const opener = button(title, "", () => choose(id), "open");
  opener.dataset.id = id;
  opener.title = title;
  if (here) opener.setAttribute("aria-current", "true");
  line.append(opener);
  if (here) {
    const acts = element("div", "acts");
    acts.append(
      button("Rename", `Rename ${title}`, () => rename(line, opener)),
      button("Export", `Export ${title}`, () => download(`${fileName(title)}.json`, store.exported([chat.current()]))),
      button("Delete", `Delete ${title}`, () => remove(id, title)),
    );
    line.append(acts);
  }
  return line;
}

const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";

async function choose(id) {
  if (id !== chat.current().id) {
    const found = await store.get(id).catch(() => null);
    if (found) chat.open(found);
    else complain("This conversation can no longer be read.");
  }
  if (narrow.matches) {
    fold(true);
    at("list-open").focus();
  }
}

function rename(line, opener) {
  const field = element("input");
  Object.assign(field, { id: "rename", value: opener.textContent, maxLength: 200 });
  field.setAttribute("aria-label", "Name of the conversation");
  opener.replaceWith(field);
  field.select();
  let ended = false;
  const end = async (keep) => {
    if (ended) return;
    ended = true;
    field.replaceWith(opener);
    opener.focus();
    if (keep && field.value.trim()) await chat.name(field.value.trim());
    show();
  };
  field.addEventListener("blur", () => end(true));
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || event.keyCode === 229) return;
    if (event.key === "Enter") end(true);
    if (event.key === "Escape") {
      event.stopPropagation();
      end(false);
    }
  });
}

async function remove(id, title) {
  if (!confirm(`Delete the conversation "${title}"?`)) return;
  await store.remove(id).catch(() => {});
  chat.open((await store.newest().catch(() => null)) ?? store.fresh({ ...chat.current().settings }));
  tell("Deleted");
  at("conversations").querySelector("[aria-current]")?.focus();
}

async function take(field) {
  const [file] = field.files;
  if (!file) return;
  try {
    const n = await store.add(await file.text());
    tell(`${n} imported`);
    complain("");
    show();
  } catch (err) {
    complain(err.message);
  }
  field.value = "";
}
