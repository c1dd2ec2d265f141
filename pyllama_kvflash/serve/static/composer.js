// The message that is being written: its text and its files.

import { at, button, count, element } from "./dom.js";
import * as files from "./files.js";
import * as gauge from "./gauge.js";

const [form, ask] = ["form", "ask"].map(at);
const composes = (event) => event.isComposing || event.keyCode === 229; // Safari ends a composition before the key event

let added = []; // files: name and text

// send: called when the user sends. stop: when the user stops an answer.
export function start(send, stop) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  ask.addEventListener("keydown", (event) => {
    // on a phone, which has no Shift+Enter, Enter begins a new line
    if (event.key !== "Enter" || event.shiftKey || composes(event) || matchMedia("(pointer: coarse)").matches) return;
    event.preventDefault();
    send();
  });
  ask.addEventListener("input", changed);
  ask.addEventListener("paste", (event) => {
    if (!event.clipboardData?.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  at("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !composes(event) && !document.querySelector("dialog[open]")) stop();
  });
  at("add").addEventListener("click", () => at("file").click());
  at("file").addEventListener("change", ({ target }) => add(target.files).finally(() => { target.value = ""; }));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault(); // otherwise the browser opens the file instead of the page
    if (event.dataTransfer?.files.length) add(event.dataTransfer.files);
  });
}

async function add(list) {
  added.push(...await files.read([...list])); // a copy, since the list is emptied with its field
  show();
  ask.focus();
}

export const draft = () => ({ content: ask.value, files: added });

export function set({ content = "", files: those = [] } = {}) {
  ask.value = content;
  added = [...those];
  show();
}

// Put back a message that could not be sent, before the text typed meanwhile.
export function giveBack({ content, files: those }) {
  set({ content: [content, ask.value].filter(Boolean).join("\n\n"), files: [...those, ...added] });
}

function show() {
  at("files").hidden = !added.length;
  at("files").replaceChildren(...added.map((file) => {
    const line = element("li", "chip");
    line.append(element("span", "file-name", named(file)), button("Remove", `Remove ${file.name}`, () => {
      added = added.filter((other) => other !== file);
      show();
      ask.focus();
    }));
    return line;
  }));
  changed();
}

// Make the field as high as its text, up to the style sheet's limit.
function changed() {
  ask.style.height = "";
  if (ask.scrollHeight > ask.clientHeight) ask.style.height = `${ask.scrollHeight + 2}px`;
  gauge.later();
}

export const named = ({ name, text }) => `${name}, ${count(text.length)} characters`;

// A question as the model reads it: the files, then the typed text.
export const whole = ({ content, files: those = [] }) => [
  ...those.map(({ name, text }) => (those.length > 1 ? `File ${name}:\n\n${text}` : text)), content,
].filter(Boolean).join("\n\n");
