// The page: connects the list of conversations, the chat and the pool.

import { askForKey } from "./api.js";
import * as chat from "./chat.js";
import * as conversations from "./conversations.js";
import { at, isFolded, keepFolded } from "./dom.js";
import * as pool from "./pool.js";
import * as served from "./served.js";

const NAME = "kvflash.pool"; // whether the panel is folded

served.start();
conversations.start();
await chat.start((what) => pool.follow(what, chat.total()), conversations.show);
pool.start(chat.total());

// a narrow window shows the chat or the pool
for (const button of document.querySelectorAll("[data-shows]")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.shows;
    for (const other of document.querySelectorAll("[data-shows]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  });
}

// a wide one shows both, or folds the pool
function fold(value) {
  document.body.classList.toggle("folded", value);
  at("pool-open").setAttribute("aria-expanded", String(!value));
}

fold(isFolded(NAME));
document.addEventListener("props", () => fold(isFolded(NAME, !served.hasPool()))); // without a pool there is little to see
at("pool-open").addEventListener("click", () => {
  const now = !document.body.classList.contains("folded");
  keepFolded(NAME, now);
  fold(now);
});

if (document.documentElement.dataset.needsKey === "yes") {
  const button = at("key-button");
  button.hidden = false;
  button.addEventListener("click", async () => {
    if (await askForKey()) pool.look();
  });
}
