// The settings of a conversation: the fields of each request beside its messages. An empty field stands for the server's value.

import { at, element } from "./dom.js";
import { defaults } from "./served.js";

// name in a request and in /props, label, least, most, step; the dialog has fields for the server's other settings, too
const FIELDS = [
  ["temperature", "Temperature", 0, 2, "any"],
  ["top_k", "Top K", 0, 2 ** 31 - 1, 1],
  ["top_p", "Top P", 0, 1, "any"],
  ["min_p", "Min P", 0, 1, "any"],
  ["repeat_penalty", "Repeat penalty", 0.001, 1000, "any"],
  ["presence_penalty", "Presence penalty", -2, 2, "any"],
  ["frequency_penalty", "Frequency penalty", -2, 2, "any"],
  ["seed", "Seed", -1, 2 ** 32 - 2, 1],
  ["max_tokens", "Token limit of an answer", 1, 2 ** 31 - 1, 1],
];
const TEXTS = ["system", "stop", "samplers"];
const fields = new Map(); // the dialog's number fields, by name

let settings = {};
let save = () => {};

// onChange: called when the user has changed a setting.
export function start(onChange) {
  save = onChange;
  take("system", at("system"));
  take("stop", at("stop-strings"));
  take("samplers", at("samplers"));
  make(FIELDS, at("sampling"));
  at("theme").value = document.documentElement.dataset.chosen;
  at("settings-open").addEventListener("click", () => at("settings").showModal());
  at("settings-reset").addEventListener("click", reset);
  document.addEventListener("props", known);
}

function make(rows, parent) {
  for (const [name, label, least, most, step] of rows) {
    const [line, field] = [element("label", "", label), element("input")];
    Object.assign(field, { id: name.replaceAll("_", "-"), type: "number", min: least, max: most, step, placeholder: "the server's" });
    line.append(field);
    parent.append(line);
    take(name, field);
  }
}

function take(name, field) {
  fields.set(name, field);
  field.value = settings[name] ?? "";
  field.addEventListener("change", () => {
    if (field.value === "") delete settings[name];
    else settings[name] = field.value;
    save();
  });
}

// Show the server's values, once they are known.
function known() {
  const values = defaults();
  const others = Object.keys(values).filter((name) => typeof values[name] === "number" && !fields.has(name));
  make(others.map((name) => [name, name.replaceAll("_", " "), "", "", "any"]), at("more"));
  at("more").parentElement.hidden = !at("more").children.length;
  for (const [name, field] of fields) {
    if (name === "samplers") field.placeholder = values.samplers?.join(", ") ?? "";
    else if (typeof values[name] === "number") field.placeholder = Number(values[name].toPrecision(4));
  }
}

function reset() {
  for (const name of fields.keys()) if (name !== "system") delete settings[name];
  use(settings);
  save();
}

// Show the settings of a conversation, which are changed in place.
export function use(those) {
  settings = those;
  for (const [name, field] of fields) field.value = settings[name] ?? "";
}

// The fields of a request beside its messages.
export function asked() {
  const body = {};
  for (const name of fields.keys()) {
    if (!TEXTS.includes(name) && settings[name] !== undefined) body[name] = Number(settings[name]);
  }
  const stop = (settings.stop ?? "").split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  if (stop.length) body.stop = stop;
  const samplers = (settings.samplers ?? "").split(/[\s,;]+/).filter(Boolean);
  if (samplers.length) body.samplers = samplers;
  return body;
}

export const system = () => (settings.system ?? "").trim();
