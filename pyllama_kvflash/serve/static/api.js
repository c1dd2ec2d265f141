// Requests to the server, with the API key if it has one.

const NAME = `kvflash.key${location.pathname}`; // a proxy may have several servers, each with its key
let needed = document.documentElement.dataset.needsKey === "yes";
const dialog = document.getElementById("key-dialog");
const field = document.getElementById("key");
const why = document.getElementById("key-why");

let key = needed ? stored() ?? "" : "";
let asked = null; // the dialog's promise, while it is open

// The stored key, unless the browser blocks the storage.
function stored(value) {
  try {
    if (value === undefined) return sessionStorage.getItem(NAME);
    if (value) sessionStorage.setItem(NAME, value);
    else sessionStorage.removeItem(NAME);
  } catch { /* then only this page knows it */ }
  return null;
}

export class NoKey extends Error {}

export const wantsKey = () => needed && !key;

// Ask the user for the key. Resolves to whether the user gave one.
export function askForKey(reason) {
  if (reason) why.textContent = reason;
  asked ??= new Promise((resolve) => {
    field.value = "";
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      asked = null;
      if (dialog.returnValue === "use") {
        key = field.value;
        stored(key);
      }
      field.value = "";
      resolve(Boolean(key));
    }, { once: true });
  });
  return asked;
}

document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (/[^\x20-\x7e]/.test(field.value)) {
    why.textContent = "A key has ASCII characters only. Try another one.";
    return;
  }
  dialog.close("use");
});
document.getElementById("key-cancel").addEventListener("click", () => dialog.close(""));

// Fetch a path relative to the page, since a proxy may add a prefix to the page's own path. A body is posted as JSON.
// Throws NoKey, and an Error with the server's own sentence.
export async function request(path, { body, signal } = {}) {
  for (;;) {
    if (wantsKey() && !await askForKey()) throw new NoKey("This server needs an API key.");
    const used = key;
    const headers = used ? { Authorization: `Bearer ${used}` } : {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const res = await fetch(path, {
      method: body === undefined ? "GET" : "POST", headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
    });
    if (res.ok) return res;
    if (res.status !== 401) throw new Error(await sentence(res));
    needed = true; // the server may have restarted with a key
    if (key === used) {
      key = "";
      stored("");
      why.textContent = "That is not the server's key. Try another one.";
    }
  }
}

async function sentence(res) {
  try {
    return (await res.json()).error.message;
  } catch {
    return `The server answered with ${res.status} ${res.statusText}.`;
  }
}

// The events of a stream as objects, and its comments as strings. Throws if the connection breaks.
export async function* events(res) {
  const reader = res.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The connection was lost.");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith(":")) yield block.slice(1).trim();
      else if (block === "data: [DONE]") return;
      else if (block.startsWith("data: ")) yield JSON.parse(block.slice(6));
    }
  }
}
