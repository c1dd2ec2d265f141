// The settings of a conversation: what each request says beside its messages. An empty field is the server's own value.

import { at, element } from "./dom.js";
import { defaults } from "./served.js";

// name in a request and in /props, label, least, most, step
const FIELDS = [
  ["temperature", "Temperature", 0, 2, "any"],
  ["top_k", "Top K", 0, 2 ** 31 - 1, 1],
  ["top_p", "Top P", 0, 1, "any"],
  ["min_p", "Min P", 0, 1, "any"],
  ["repeat_penalty", "Repeat penalty", 0.001, 1000, "any"],
  ["presence_penalty", "Presence penalty", -2, 2, "any"],
  ["frequency_penalty", "Frequency penalty", -2, 2, "any"],
  ["seed", "Seed", -1, 2 ** 32 - 2, 1],
  ["max_tokens", "Most tokens of an answer", 1, 2 ** 31 - 1, 1],
];
// shown if the server has them
const MORE = [
  ["repeat_last_n", "Tokens that are penalized", 0, 2 ** 20, 1],
  ["typical_p", "Typical P", 0, 1, "any"],
  ["top_n_sigma", "Top n sigma", -1, 1000, "any"],
  ["min_keep", "Tokens to keep", 0, 2 ** 20, 1],
  ["dynatemp_range", "Dynamic temperature: range", 0, 1000, "any"],
  ["dynatemp_exponent", "Dynamic temperature: exponent", 0, 100, "any"],
  ["xtc_probability", "XTC probability", 0, 1, "any"],
  ["xtc_threshold", "XTC threshold", 0, 1, "any"],
  ["dry_multiplier", "DRY multiplier", 0, 100, "any"],
  ["dry_base", "DRY base", 1, 100, "any"],
  ["dry_allowed_length", "DRY allowed length", 0, 2 ** 20, 1],
  ["dry_penalty_last_n", "DRY tokens", 0, 2 ** 20, 1],
  ["mirostat", "Mirostat (0, 1 or 2)", 0, 2, 1],
  ["mirostat_tau", "Mirostat tau", 0, 100, "any"],
  ["mirostat_eta", "Mirostat eta", 0, 100, "any"],
];
const TEXTS = ["system", "stop", "samplers"];
const fields = new Map(); // of the dialog, by name

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

// The server has said what its values are.
function known() {
  const values = defaults();
  make(MORE.filter(([name]) => name in values && !fields.has(name)), at("more"));
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

// What a request says beside its messages.
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
