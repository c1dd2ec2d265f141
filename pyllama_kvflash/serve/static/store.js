// The conversations, in this browser's database: local storage is too small for long texts.
//
// A conversation: id, title, named (by the user), changed (when), rev (how often it was saved), settings, total (its
// tokens as the server counted them; 0: unknown), messages. A message has role and content; a question also has files (name,
// text), an answer thinking, torn (why it is incomplete: "stopped", "broken", "length"; "": it is complete) and figures.

const STORE = "conversations";
const TAB = "kvflash.tab"; // the conversation of this tab
const TORN = "kvflash.torn"; // an answer that was cut off when the page was closed
const TORNS = ["stopped", "broken", "length"];
const channel = "BroadcastChannel" in window ? new BroadcastChannel("kvflash") : null;

const opened = new Promise((resolve, reject) => {
  const request = indexedDB.open("kvflash", 1);
  request.addEventListener("upgradeneeded", () => {
    const store = request.result.createObjectStore(STORE, { keyPath: "id" });
    store.createIndex("listed", ["changed", "title"]); // the list is read from its keys, without the texts
  });
  request.addEventListener("success", () => resolve(request.result));
  request.addEventListener("error", () => reject(request.error));
});
opened.catch(() => {}); // each use of it reports the error

const result = (request) => new Promise((resolve, reject) => {
  request.addEventListener("success", () => resolve(request.result));
  request.addEventListener("error", () => reject(request.error));
});

const conversations = async (mode) => (await opened).transaction(STORE, mode).objectStore(STORE);

export const fresh = (settings = {}) => ({
  id: newId(), title: "", named: false, changed: 0, rev: 0, settings, total: 0, messages: [],
});

// crypto.randomUUID() needs https.
const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((n) => n.toString(16).padStart(2, "0")).join("");

// onChange: called when another tab has changed a conversation, with its id.
export function onOther(onChange) {
  channel?.addEventListener("message", ({ data }) => onChange(data));
}

// The ids and titles of all conversations, newest first.
export async function list() {
  const index = (await conversations("readonly")).index("listed");
  const found = [];
  return new Promise((resolve, reject) => {
    const request = index.openKeyCursor(null, "prev");
    request.addEventListener("error", () => reject(request.error));
    request.addEventListener("success", () => {
      const cursor = request.result;
      if (!cursor) return resolve(found);
      found.push({ id: cursor.primaryKey, title: cursor.key[1] });
      return cursor.continue();
    });
  });
}

export async function get(id) {
  return checked(await result((await conversations("readonly")).get(id)));
}

let saving = Promise.resolve();

// Save a conversation, after the earlier saves. If another tab has saved it meanwhile, this one becomes a copy.
export function put(conversation) {
  const saved = saving.then(() => write(conversation));
  saving = saved.catch(() => {}); // the caller of put() reports the error
  return saved;
}

async function write(conversation) {
  const store = await conversations("readwrite");
  const there = await result(store.get(conversation.id));
  if (there && there.rev !== conversation.rev) {
    Object.assign(conversation, { id: newId(), title: `${conversation.title} (copy)`, named: true });
    remember(conversation.id);
  }
  conversation.rev += 1;
  await result(store.put(conversation));
  channel?.postMessage(conversation.id);
}

export async function remove(id) {
  await result((await conversations("readwrite")).delete(id));
  channel?.postMessage(id);
}

// Add the conversations of an exported file. Returns their number. Throws an Error.
export async function add(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON: choose one that this page has exported.");
  }
  const all = (Array.isArray(found?.conversations) ? found.conversations : []).map(checked).filter(Boolean);
  if (!all.length) throw new Error("This file has no conversations: choose one that this page has exported.");
  for (const conversation of all) await put({ ...conversation, id: newId(), rev: 0 });
  return all.length;
}

export const exported = (all) => JSON.stringify({ kvflash: 1, conversations: all }, null, 1);

export async function every() {
  return (await result((await conversations("readonly")).getAll())).map(checked).filter(Boolean);
}

// Check a stored or imported conversation, which may be damaged or foreign. Returns its usable parts, or null.
function checked(found) {
  if (!Array.isArray(found?.messages)) return null;
  const text = (value) => (typeof value === "string" ? value : "");
  return {
    ...fresh(), id: text(found.id) || newId(), title: text(found.title) || "Untitled", named: found.named === true,
    changed: Number(found.changed) || 0, rev: Number(found.rev) || 0, total: Number(found.total) || 0,
    settings: Object.fromEntries(Object.entries(found.settings ?? {}).filter(([, value]) => typeof value === "string")),
    messages: found.messages.filter((m) => ["user", "assistant"].includes(m?.role) && typeof m.content === "string").map(message),
  };
}

function message(found) {
  const { role, content } = found;
  if (role === "user") {
    const files = Array.isArray(found.files) ? found.files : [];
    return { role, content, files: files.filter((f) => typeof f?.name === "string" && typeof f.text === "string") };
  }
  const figures = Object.fromEntries(Object.entries(found.figures ?? {}).filter(([, value]) => typeof value === "number"));
  return {
    role, content, figures, thinking: typeof found.thinking === "string" ? found.thinking : "",
    torn: TORNS.includes(found.torn) ? found.torn : "",
  };
}

//
// this tab
//

function tab(name, value) {
  try {
    if (value === undefined) return JSON.parse(sessionStorage.getItem(name));
    if (value === null) sessionStorage.removeItem(name);
    else sessionStorage.setItem(name, JSON.stringify(value));
  } catch { /* the storage is blocked, damaged, or full */ }
  return null;
}

export const remember = (id) => tab(TAB, id);

// The conversation that this tab had; in a new tab, the newest of all.
export async function last() {
  const [id, torn] = [tab(TAB), tab(TORN)];
  tab(TORN, null);
  const found = (typeof id === "string" && await get(id)) || await newest();
  if (found && torn?.id === found.id && Number.isInteger(torn.at) && torn.at <= found.messages.length) {
    found.messages.splice(torn.at, Infinity, message({ ...torn.answer, role: "assistant", torn: "stopped" }));
    await put(found);
  }
  return found;
}

export async function newest() {
  const [first] = await list();
  return first ? get(first.id) : null;
}

// Keep a partial answer in the session storage as the page is closed: the database may be too slow.
export const keepTorn = (id, at, answer) => tab(TORN, { id, at, answer });
