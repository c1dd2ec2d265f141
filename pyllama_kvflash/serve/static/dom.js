// Helpers for several parts of the page: elements, numbers in words, copying.

export const at = (id) => document.getElementById(id);

// text: never read as HTML, since a model may write anything.
export function element(tag, className = "", text = "") {
  const res = document.createElement(tag);
  if (className) res.className = className;
  res.textContent = text;
  return res;
}

// label: what a screen reader says in place of the text.
export function button(text, label, onClick, className = "") {
  const res = element("button", className, text);
  res.type = "button";
  if (label) res.setAttribute("aria-label", label);
  res.addEventListener("click", onClick);
  return res;
}

// Change a text only if it differs: each change disturbs screen readers and selections.
export function write(where, text) {
  if (where.textContent !== text) where.textContent = text;
}

// Change the contents of a box. If it was scrolled to its end, it stays there.
export function keepEnd(box, change) {
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  change();
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

// Whether a part of the page was folded when the user left, by its name in the storage. usual: the answer if the storage has none.
export function isFolded(name, usual = false) {
  try {
    return (localStorage.getItem(name) ?? (usual && "folded")) === "folded";
  } catch {
    return usual;
  }
}

export function keepFolded(name, value) {
  try {
    localStorage.setItem(name, value ? "folded" : "open");
  } catch { /* blocked: it lasts as long as the page */ }
}

// A time in words: "42 s", "3:05", "1:03:05".
export function duration(seconds) {
  const all = Math.round(seconds);
  if (all < 120) return `${all} s`;
  const two = (n) => String(n).padStart(2, "0");
  const [hours, minutes] = [Math.floor(all / 3600), Math.floor(all / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(all % 60)}` : `${minutes}:${two(all % 60)}`;
}

export const count = (n) => n.toLocaleString("en");

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; n >= 1024 && unit < units.length - 1; unit += 1) n /= 1024;
  return `${n >= 100 || unit === 0 ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}

export const time = (s) => (s >= 1 ? `${s.toFixed(1)} s` : `${(s * 1000).toFixed(s >= 0.1 ? 0 : 1)} ms`);

export function complain(text) {
  at("alert").textContent = text;
}

// Say a line to a screen reader.
export function tell(text) {
  at("told").textContent = "";
  at("told").textContent = text;
}

// A button that copies a text. get: returns the text.
export function copier(label, get) {
  const res = button("Copy", label, async () => {
    const done = await copy(get());
    res.textContent = done ? "Copied" : "Not copied";
    tell(done ? "Copied" : "The browser did not allow copying.");
    setTimeout(() => { res.textContent = "Copy"; }, 1500);
  }, "copy");
  return res;
}

// Outside of https and localhost, a page has no clipboard, but may copy the selection.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea", "hidden");
    field.value = text;
    const focused = document.activeElement;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return done;
  }
}

// Offer a file to the user as a download.
export function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
