// An answer's Markdown, drawn as it grows. Whatever a model writes, only the elements below are created.

import DOMPurify from "./lib/purify.es.mjs";
import hljs from "./lib/highlight.min.js";
import { Marked } from "./lib/marked.esm.js";
import { copier, element } from "./dom.js";

const LONGEST = 50_000; // most characters of code that is highlighted
const PAUSE = 80; // ms between two drawings of a growing answer
const ALLOWED = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p",
    "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["align", "class", "href", "start"],
  ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i, // a relative address would point to this server
  RETURN_DOM_FRAGMENT: true,
};
const SAFE = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => text.replace(/[&<>"']/g, (letter) => SAFE[letter]);
const plain = (text) => `<p>${escaped(text.trim()).replaceAll("\n", "<br>")}</p>`;

const marked = new Marked({
  gfm: true, breaks: true,
  renderer: {
    // HTML is shown as text
    html: ({ text, block }) => (block ? plain(text) : escaped(text)),
    // "42." is an answer, not a list without items
    list: ({ items, raw }) => items.every(({ text }) => !text) && plain(raw),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`, // the page loads nothing from elsewhere
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const clean = (html) => DOMPurify.sanitize(html, ALLOWED);

// Returns a function that shows a growing text in an element: call it with the text so far, and at the end also with true.
// It draws only the blocks that have changed, so that a selection stays. around: called with each function that changes the page.
export function drawing(parent, around) {
  let drawn = []; // source and nodes of each block
  let timer = 0;
  let text = "";
  const draw = () => {
    timer = 0;
    around(change);
  };
  const change = () => {
    const blocks = marked.lexer(text);
    let same = 0;
    while (same < drawn.length && same < blocks.length && drawn[same].raw === blocks[same].raw) same += 1;
    for (const { nodes } of drawn.splice(same)) nodes.forEach((node) => node.remove());
    for (const block of blocks.slice(same)) {
      const found = clean(marked.parser([block]));
      finish(found);
      const nodes = [...found.children];
      parent.append(...nodes);
      drawn.push({ raw: block.raw, nodes });
    }
  };
  return (now, ended = false) => {
    text = now;
    if (ended) {
      clearTimeout(timer);
      draw();
    } else timer ||= setTimeout(draw, PAUSE);
  };
}

function finish(found) {
  for (const link of found.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const table of found.querySelectorAll("table")) {
    const box = element("div", "wide-table");
    table.replaceWith(box);
    box.append(table);
    box.tabIndex = 0; // so that keys can scroll it
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Table");
  }
  for (const pre of found.querySelectorAll("pre")) code(pre);
}

function code(pre) {
  const inner = pre.querySelector("code") ?? pre;
  const text = inner.textContent;
  const language = /language-(\S+)/.exec(inner.className)?.[1] ?? "";
  if (hljs.getLanguage(language) && text.length <= LONGEST) {
    inner.replaceChildren(clean(hljs.highlight(text, { language, ignoreIllegals: true }).value));
  }
  const [box, head] = [element("div", "code"), element("div", "code-head")];
  head.append(element("span", "", language || "text"), copier("Copy the code", () => text.replace(/\n$/, "")));
  pre.replaceWith(box);
  box.append(head, pre);
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
}
