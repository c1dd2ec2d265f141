// The page: the chat, the pool beside it, and their common parts.

import { askForKey } from "./api.js";
import * as chat from "./chat.js";
import * as pool from "./pool.js";

pool.start(chat.total());
chat.start((what) => pool.follow(what, chat.total()));

// a narrow window shows one of the two
for (const button of document.querySelectorAll("[data-shows]")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.shows;
    for (const other of document.querySelectorAll("[data-shows]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  });
}

if (document.documentElement.dataset.needsKey === "yes") {
  const button = document.getElementById("key-button");
  button.hidden = false;
  button.addEventListener("click", async () => {
    if (await askForKey()) pool.look();
  });
}
