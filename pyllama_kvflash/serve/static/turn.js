// A message on the page: its text, its cost (tokens, time), and its buttons.

import { at, button, copier, count, element, keepEnd, time } from "./dom.js";
import { drawing } from "./markdown.js";
import { named, whole } from "./composer.js";

const TORN = {
  stopped: "Torn: it was stopped here.",
  broken: "Torn: the connection or the server failed here.",
  length: "Torn: it reached the limit of tokens, or the end of the context.",
};

// does: callbacks edit(message, text), again(message), resume(message). Returns the message's parts, for grow(),
// finish() and begin().
export function show(message, does) {
  const mine = message.role === "user";
  const turn = element("article", `turn ${message.role}`);
  turn.setAttribute("aria-label", mine ? "You" : "Model");
  const parts = {
    turn, text: element("div", "text"), torn: element("p", "torn"), note: element("p", "note"), acts: element("div", "acts"),
    thinking: null, draw: null,
  };
  turn.append(element("h3", "", mine ? "You" : "Model"));
  if (mine) {
    if (message.files?.length) turn.append(files(message.files));
    parts.text.textContent = message.content;
    parts.text.hidden = !message.content;
  } else parts.draw = drawing(parts.text, (draw) => keepEnd(at("log"), draw));
  turn.append(parts.text, parts.torn, parts.note, parts.acts);
  at("log").append(turn);
  if (mine) questionActs(parts, message, does);
  else finish(parts, message, does);
  return parts;
}

function files(those) {
  const list = element("ul", "files");
  for (const file of those) {
    const [line, details] = [element("li"), element("details")];
    details.append(element("summary", "file-name", named(file)));
    details.addEventListener("toggle", () => { // a file may be long: render it only when opened
      if (details.open && details.children.length === 1) details.append(element("pre", "", file.text));
    });
    line.append(details);
    list.append(line);
  }
  return list;
}

function questionActs(parts, message, does) {
  parts.acts.append(
    copier("Copy the question", () => whole(message)),
    button("Edit", "Edit the question", () => edit(parts, message, does)),
  );
}

// Turn the question into a text field. Its files stay.
function edit(parts, message, does) {
  const [form, field] = [element("form", "edit"), element("textarea")];
  field.setAttribute("aria-label", "The question");
  field.value = message.content;
  field.rows = Math.min(12, message.content.split("\n").length + 1);
  const close = () => {
    form.replaceWith(parts.text);
    parts.acts.hidden = false;
    parts.acts.querySelector(":scope > :last-child").focus();
  };
  const send = element("button", "main", "Send");
  const row = element("div", "row");
  row.append(element("span", "gap"), button("Cancel", "", close), send);
  form.append(field, row);
  const submit = () => {
    if (!field.value.trim() && !message.files?.length) return;
    close();
    does.edit(message, field.value);
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || event.keyCode === 229) return;
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    } else if (event.key === "Enter" && !event.shiftKey && !matchMedia("(pointer: coarse)").matches) {
      event.preventDefault();
      submit();
    }
  });
  parts.text.replaceWith(form);
  parts.acts.hidden = true;
  field.focus();
}

// Show more of an answer that is growing.
export function grow(parts, message) {
  if (message.thinking) think(parts, message.thinking);
  parts.draw(message.content);
}

// Show an answer that has ended.
export function finish(parts, message, does) {
  keepEnd(at("log"), () => ended(parts, message, does));
}

function ended(parts, message, does) {
  if (message.thinking) think(parts, message.thinking);
  parts.draw(message.content, true);
  parts.turn.classList.remove("going");
  parts.torn.textContent = TORN[message.torn] ?? "";
  parts.note.textContent = noted(message.figures ?? {});
  parts.acts.replaceChildren(copier("Copy the answer", () => message.content));
  const again = message.torn ? "Retry" : "Regenerate";
  if (message.torn) parts.acts.append(button("Continue", "Continue the answer", () => does.resume(message), "main"));
  parts.acts.append(button(again, `${again} the answer`, () => does.again(message)));
}

export function begin(parts) {
  parts.turn.classList.add("going");
  for (const part of [parts.torn, parts.note]) part.textContent = "";
  parts.acts.replaceChildren();
}

function think(parts, text) {
  if (!parts.thinking) {
    const details = document.createElement("details");
    details.className = "thinking";
    parts.thinking = element("div");
    details.append(element("summary", "", "Thinking"), parts.thinking);
    parts.text.before(details);
  }
  const there = parts.thinking.textContent;
  if (text.startsWith(there)) parts.thinking.append(text.slice(there.length));
  else parts.thinking.textContent = text;
}

// The cost of an answer. The time to the first token includes the queue and the reading of the prompt.
function noted({ prompt, cached, answer, first, rate }) {
  const parts = [];
  if (rate) parts.push(`${rate.toFixed(rate < 10 ? 2 : 1)} tok/s`);
  if (first !== undefined) parts.push(`first token after ${time(first)}`);
  if (answer !== undefined) parts.push(`${count(answer)} of answer`);
  if (prompt !== undefined) parts.push(`${count(prompt)} of prompt: ${count(cached)} cached, ${count(prompt - cached)} new`);
  return parts.join(" · ");
}
